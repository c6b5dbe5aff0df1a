"""The Python blocks of the documentation's pages."""

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def blocks(page):
    """Return the text of each Python block of a page."""
    return re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.M | re.S)


def run(page, n=None):
    """Run the first ``n`` blocks of a page (by default all) as one script, and return its names."""
    names = {"__name__": "__main__"}  # so that its functions travel to ranks by value, as a script's do
    for i, block in enumerate(blocks(page)[:n]):
        exec(compile(block, f"{page}, block {i + 1}", "exec"), names)
    return names
