"""What a run logs: to wandb by default, and always to files of its folder, from which a page is drawn.

``metrics.jsonl`` holds the figures as text, ``report.html`` shows them without a server or a network, and
``python -m moekit.tracking FOLDER`` draws it again. The names are in docs/metrics.md.
"""

from moekit.tracking._figures import (
    load_figures as load_figures,
    read_metrics as read_metrics,
    summarize as summarize,
    wait_figures as wait_figures,
)
from moekit.tracking._progress import Progress as Progress
from moekit.tracking._report import write_report as write_report
from moekit.tracking._run import Run as Run, start_run as start_run
