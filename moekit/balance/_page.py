"""The load of a step for a reader: a page that draws it, and a table of the same numbers.

Axes: n steps, and those of ``moekit.balance._load``.
"""

import json
from importlib import resources
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Int
from safetensors import SafetensorError
from safetensors.numpy import load_file
from torch import Tensor

from moekit.balance._load import gerrymandering_gap, step_wait, wait

Steps = Int[Tensor, "n m s l E"]


def read_rows(path: Path) -> Steps:
    """Read counts (m, s, l, E) of one step, or (n, m, s, l, E), from a .npy, .npz or .safetensors file.

    Of several arrays in a file, that named ``rows``.

    Raises
    ------
    ValueError
        Unless there is one, of integers, none of them negative, or where the file cannot be read.
    """
    if path.suffix not in (".npy", ".npz", ".safetensors") or path.is_dir():
        raise ValueError(f"read_rows needs a .npy, .npz or .safetensors file, got {path}")
    try:
        read = load_file(path) if path.suffix == ".safetensors" else np.load(path)
        arrays = {"rows": read} if isinstance(read, np.ndarray) else dict(read)
    except (SafetensorError, BadZipFile, EOFError, AttributeError, TypeError, ValueError) as error:
        raise ValueError(
            f"read_rows needs a .npy, .npz or .safetensors file of whole numbers, got {path}: {error}"
        ) from error
    if "rows" not in arrays and len(arrays) != 1:
        raise ValueError(f"read_rows needs an array named rows in {path}, got {sorted(arrays)}")
    rows = arrays["rows"] if "rows" in arrays else next(iter(arrays.values()))
    is_counts = rows.ndim in (4, 5) and rows.dtype.kind in "iu" and rows.size > 0
    counts = rows.astype(np.int64) if is_counts else rows
    if not is_counts or counts.min() < 0:  # as is a uint64 that has no room
        least = f", the least {rows.min()}" if is_counts else ""
        raise ValueError(
            "read_rows needs counts (m, s, l, E) or (steps, m, s, l, E), whole numbers from 0, "
            f"got {rows.dtype} {rows.shape}{least} in {path}"
        )
    return torch.from_numpy(counts).view(-1, *counts.shape[-4:])


def make_page(start: dict[str, Any], rows: Steps | None = None) -> str:
    """Return one HTML page that draws the rows, or without any, the example whose sliders stand at ``start``.

    It needs no other file and no network. ``start``: ``ep``, and with rows their ``edp`` and ``name``,
    else the options of :func:`moekit.balance.sorted_by_domain`.
    """
    data = dict(start, shape=None, rows=None)
    if rows is not None:
        data |= dict(shape=list(rows.shape), rows=rows.flatten().tolist())
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")  # else a name could end the script
    page = resources.files("moekit.balance").joinpath("page.html").read_text(encoding="utf-8")
    return page.replace("{{data}}", text)


def make_table(rows: Steps, ep: int, edp: int = 1) -> str:
    """Return a line a step and layer: what the step's sums and losses show, and what ranks wait for.

    Of several copies, a line more a step: of all layers, until the slowest copy ends.
    """
    lines = [
        "            ------ loss over a ------   fullest rank by mean",
        "step layer   batch micro-batch   rank      seen waited    gap  rows waited",
    ]
    for step, of_step in enumerate(rows):
        populations = ("batch", "micro_batch", "rank")
        sizes = dict(ep=ep, edp=edp)
        gaps = [gerrymandering_gap(of_step, **sizes, population=name) for name in populations]
        columns = [*(gap.loss for gap in gaps), gaps[0].seen, gaps[0].waited, wait(of_step, **sizes).sum(0)]
        for layer, (batch, micro_batch, rank, seen, waited, n) in enumerate(torch.stack(columns, 1).tolist()):
            lines.append(
                f"{step:4} {layer:5} {batch:7.2f} {micro_batch:11.2f} {rank:6.2f}    "
                f"{seen:6.2f} {waited:6.2f} {waited - seen:6.2f} {n:12,.0f}"
            )
        if edp > 1:
            _, _, waited, seen, n = step_wait(of_step, **sizes)
            of_all = f"{step:4}   all   until the slowest copy ends"
            lines.append(f"{of_all:41}{seen:6.2f} {waited:6.2f} {waited - seen:6.2f} {n:12,.0f}")
    return "\n".join(lines)
