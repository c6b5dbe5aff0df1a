"""Figures of a step and of a run, by the names that docs/metrics.md lists."""

import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from statistics import harmonic_mean
from typing import Any

from jaxtyping import Int
from torch import Tensor

from moekit.balance import evenness, wait_of_sums

Figures = dict[str, float | int]
RATE = "speed/tokens_per_second"


def load_figures(counts: Int[Tensor, "l E"], *, first_layer: int = 0) -> Figures:
    """Return how even the load of the experts is: of the worst layer, and of each.

    Reads the counts on the host. They are those of the whole global batch: what ranks wait for is less even
    (:func:`wait_figures`).

    Parameters
    ----------
    counts : Int[Tensor, "l E"]
        Rows per expert of the layers that have experts.
    first_layer : int
        Number of the first of them in the model: ``config.n_dense_layers``.

    Examples
    --------
    >>> load_figures(torch.tensor([[2, 2, 0, 0]]))["load/max_over_mean"]
    2.0
    """
    even, mean = evenness(counts), counts.double().mean(-1)
    kinds = {
        "max_over_mean": (even.max_over_mean, max),
        "min_over_mean": ((counts.amin(-1) / mean).where(mean > 0, 1.0), min),
        "cv": (even.coefficient_of_variation, max),
        "entropy": (even.entropy, min),
        "dead": (even.n_dead, sum),
    }
    figures: Figures = {}
    for name, (by_layer, worst) in kinds.items():
        figures[f"load/{name}"] = worst(by_layer.tolist())
        figures |= _by_layer(f"load_layers/{name}", by_layer, first_layer)
    return figures


def wait_figures(
    computed: Int[Tensor, "l E"],
    fullest: Int[Tensor, "l c"],
    *,
    ep: int,
    stages: Sequence[Sequence[int]] | None = None,
    ms_per_row: float | None = None,
    first_layer: int = 0,
) -> Figures:
    """Return what ranks wait for in the experts, and how much of it the sums of a step do not show.

    Those of :func:`moekit.balance.wait_of_sums`. Reads its tensors on the host.

    Parameters
    ----------
    computed : Int[Tensor, "l E"]
        Rows per expert of the global batch, with padding and without what was dropped.
    fullest : Int[Tensor, "l c"]
        Those of the fullest rank of each copy of the experts, summed over micro-batches. Both are statistics
        of :func:`moekit.next_token_loss`, summed over ranks.
    ep : int
        Ranks that share one copy of the experts.
    stages : sequence of sequence of int, optional
        Of a pipeline: which of the l layers each of its ranks has, as for
        :func:`moekit.balance.wait_of_sums`.
    ms_per_row : float, optional
        Of a row in an expert, forward and backward, for ``wait/ms``.
    first_layer : int
        As for :func:`load_figures`.

    Examples
    --------
    Two micro-batches, each of which goes to one of two ranks, the other one each time:

    >>> figures = wait_figures(torch.tensor([[8, 8]]), torch.tensor([[16]]), ep=2)
    >>> [figures[f"wait/{name}"] for name in ("waited", "seen", "gap", "rows")]
    [2.0, 1.0, 1.0, 8.0]
    """
    found = wait_of_sums(computed, fullest, ep, stages=stages)
    figures = {
        "wait/waited": found.waited_in_all.item(),
        "wait/seen": found.seen_in_all.item(),
        "wait/gap": (found.waited_in_all - found.seen_in_all).item(),
        "wait/rows": found.rows.item(),
    }
    if ms_per_row is not None:
        figures["wait/ms"] = figures["wait/rows"] * ms_per_row
    figures |= _by_layer("wait_layers/waited", found.waited, first_layer)
    return figures | _by_layer("wait_layers/gap", found.waited - found.seen, first_layer)


def _by_layer(name: str, values: Tensor, first_layer: int) -> Figures:
    return {f"{name}/{i}": x for i, x in enumerate(values.tolist(), first_layer)}


def read_metrics(folder: str | Path) -> dict[int, dict[str, Any]]:
    """Return the figures that a run has logged to its folder, by step, in ascending order.

    Lines of one step add up in whichever order steps were logged, and of one figure the last one counts.
    Where a run was continued, behind an empty line, what had been logged before of steps after its first is
    left out; so is a line that is no record, as where the end of a process has torn one.
    """
    return read_starts(folder)[0]


def read_starts(folder: str | Path) -> tuple[dict[int, dict[str, Any]], set[int]]:
    """Return what :func:`read_metrics` does, and the step of each process's first rate, which compiles."""
    records: dict[int, dict[str, Any]] = {}
    starts: set[int] = set()
    text = Path(folder, "metrics.jsonl").read_text(encoding="utf-8", errors="replace")
    for part in text.split("\n\n"):
        lines = [record for line in part.splitlines() if (record := _parsed(line)) is not None]
        first = min((line["step"] for line in lines), default=math.inf)
        records = {step: record for step, record in records.items() if step <= first}
        starts = {step for step in starts if step <= first}
        starts |= set(sorted(line["step"] for line in lines if RATE in line)[:1])
        for line in lines:
            records.setdefault(line.pop("step"), {}).update(line)
    return dict(sorted(records.items())), starts


def _parsed(line: str) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except json.JSONDecodeError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("step"), int) else None


def summarize(records: Mapping[int, Mapping[str, Any]], *, starts: Collection[int] | None = None) -> Figures:
    """Return the figures of a whole run, from those of its steps (:func:`moekit.tracking.read_metrics`).

    Parameters
    ----------
    records : mapping of int to mapping
        The figures of each step.
    starts : collection of int, optional
        Steps whose rate is the first of a process, in which things compile, and is left out; by default the
        first of all. Where there are no others, all count.

    Examples
    --------
    >>> rates = {1: 0.5, 2: 5.0, 3: 20.0}  # the first record's steps compile, and are left out
    >>> steps = {step: {"speed/tokens_per_second": rate} for step, rate in rates.items()}
    >>> summarize(steps)["summary/tokens_per_second"]  # of steps of as many tokens each
    8.0
    """

    def of(name: str) -> list[float | int]:
        return [record[name] for record in records.values() if name in record]

    summary: Figures = {}
    if losses := of("loss"):
        finite = [x for x in losses if math.isfinite(x)]
        summary |= {"last_loss": losses[-1], "best_loss": min(finite, default=math.nan)}
    if tokens := of("tokens"):
        summary["tokens"] = tokens[-1]
    if rates := {step: record[RATE] for step, record in records.items() if RATE in record}:
        starts = {min(rates)} if starts is None else starts
        later = [rate for step, rate in rates.items() if step not in starts]
        summary["tokens_per_second"] = harmonic_mean(later or list(rates.values()))
    for name in ("memory/peak_active_gib", "memory/peak_reserved_gib"):
        if peaks := of(name):
            summary[name.removeprefix("memory/")] = max(peaks)
    for name in ("wait/waited", "wait/gap", "wait/rows", "wait/ms"):
        if values := of(name):
            summary["mean_" + name.replace("/", "_")] = sum(values) / len(values)
    for name, x in (item for record in records.values() for item in record.items()):
        if name.startswith("held_out/") and isinstance(x, int | float):  # not rows of layers
            summary[name] = x  # the last one stays
    return {f"summary/{name}": x for name, x in summary.items()}
