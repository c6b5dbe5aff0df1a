"""The table of modules in CONTRIBUTING.md is complete, and imports point up it."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "moekit"


def rows():
    """Return the row of each module of the table."""
    table = (ROOT / "CONTRIBUTING.md").read_text().partition("## Where things are")[2].partition("\n## ")[0]
    lines = [line.split("|")[2] for line in table.splitlines() if line.startswith("|")][2:]
    return {name: i for i, cell in enumerate(lines) for name in re.findall(r"`(\w+)/?`", cell)}


def imported(path):
    """Yield the modules of the package that a file imports, by their first name."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module == "moekit":
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("moekit."):
            yield node.module.split(".")[1]


def test_every_module_is_in_the_table():
    assert rows().keys() == {path.stem for path in PACKAGE.iterdir() if path.name[:2] != "__"}


def test_imports_point_up_the_table():
    row = rows()
    for path in PACKAGE.rglob("*.py"):
        name = path.relative_to(PACKAGE).parts[0].removesuffix(".py")
        for other in imported(path) if name != "__init__" else ():
            if other in row:  # else a name of the package itself
                assert row[other] <= row[name], f"{path.relative_to(ROOT)} imports {other}"
