"""wandb, offline unless the user is logged in, and the figures worth logging of a step."""

import secrets
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import wandb
import wandb.errors
from jaxtyping import Int
from torch import Tensor


def start_run(
    config: Any, *, project: str, folder: str | Path, resume: bool = False, rank: int = 0
) -> "wandb.Run":
    """Start a wandb run: online where the user is logged in, else offline; disabled on ranks other than 0.

    Parameters
    ----------
    config : dataclass
        Logged whole.
    project : str
        Name of the project.
    folder : str or Path
        Where wandb keeps its files, and this function the id of the run; made if needed.
    resume : bool
        Continue the run of this folder. wandb gives an offline run that continues a new directory under the
        same id, which ``wandb sync`` joins; pass the step to ``run.log``.
    rank : int
        This process's place among the ranks.
    """
    if rank:
        return wandb.init(mode="disabled")
    known = Path(folder, "wandb-run-id")
    known.parent.mkdir(parents=True, exist_ok=True)
    if not (resume and known.exists()):
        known.write_text(secrets.token_hex(4))
    mode = _mode()
    return wandb.init(
        project=project,
        dir=str(folder),
        config=asdict(config),
        id=known.read_text(),
        resume="allow" if mode == "online" and resume else None,
        mode=mode,
        settings=wandb.Settings(silent=True),
    )


def _mode() -> Any:
    wanted = wandb.setup().settings.mode
    if wanted != "online":  # what the user's own settings say, such as WANDB_MODE=disabled
        return wanted
    try:
        return "online" if wandb.login(prompt=False) else "offline"
    except wandb.errors.Error as error:  # a key that cannot be checked, as on a node without internet
        warnings.warn(f"wandb logs offline: {error}", stacklevel=3)
        return "offline"


def load_figures(counts: Int[Tensor, "l E"], *, first_layer: int = 0) -> dict[str, Any]:
    """Return the load of each layer's experts as figures to log.

    Reads the counts on the host. They are those of the whole global batch: a micro-batch on one rank, which
    others wait for, is less even.

    Parameters
    ----------
    counts : Int[Tensor, "l E"]
        Rows per expert of the layers that have experts.
    first_layer : int
        Number of the first of them in the model: ``config.n_dense_layers``.

    Returns
    -------
    dict
        ``load/layer_i``, a wandb histogram with a bar for the rows of each expert, and ``load/layer_i_max``
        and
        ``_min``, the largest and the smallest, of the mean (1 is balanced).
    """
    figures: dict[str, Any] = {}
    for i, rows in enumerate(counts.double().cpu().numpy(), first_layer):
        mean = max(rows.mean(), 1.0 / len(rows))
        figures[f"load/layer_{i}"] = wandb.Histogram(np_histogram=(rows, np.arange(len(rows) + 1)))
        figures |= {f"load/layer_{i}_max": rows.max() / mean, f"load/layer_{i}_min": rows.min() / mean}
    return figures
