"""Execute a training step of any layout on fake ranks, before there are any devices.

Each rank runs in a process of its own, on tensors of the meta device and in a process group without peers,
and what it sends and holds is written down. Then the ranks' calls are compared and replayed.
"""

import math
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit._calls import (
    NODE,
    Call as Call,
    Leaf as Leaf,
    Record as Record,
    compare as compare,
    replay as replay,
)
from moekit._dispatch import TRANSPORTS, Transport, dispatch_all_to_all
from moekit._fake_rank import Device, Step as Step, run_ranks
from moekit._route import Routing
from moekit._text import table
from moekit.batch import make_batch
from moekit.config import ModelConfig
from moekit.context import split_context
from moekit.layouts import Layout
from moekit.params import param_shapes
from moekit.plan import GPUS, fits

# What is documented here, also where it is made elsewhere.
__all__ = [
    "NODE",
    "Call",
    "Leaf",
    "Record",
    "Report",
    "Step",
    "compare",
    "dry_run",
    "dry_run_recipe",
    "record",
    "replay",
    "sample_ranks",
    "static_transport",
]


@dataclass(frozen=True, kw_only=True)
class Report:
    """What a dry run found; ``print`` it.

    Its first table has one line for all ranks that hold the same: bytes by kind at the fullest moment of the
    second step, as in `Record`; ``TFLOP``, what a rank executes in a step, with what is recomputed and with
    all pairs of causal attention; and ``at``, the operation that ran at the fullest moment.
    """

    records: tuple[Record, ...]
    title: str = ""

    def fits(self, gpu: str) -> bool:
        """Whether every recorded rank's high-water mark is below the memory of a GPU, one of `GPUS`."""
        if gpu not in GPUS:
            raise ValueError(f"fits needs one of {sorted(GPUS)}, got {gpu!r}")
        return max(record.peak for record in self.records) < GPUS[gpu].memory

    def __str__(self) -> str:
        title = [self.title, ""] if self.title else []
        return "\n".join([*title, *self._memory(), "", *self._traffic(), "", *self._gpus()])

    def _memory(self) -> Iterator[str]:
        kinds = sorted({*_KINDS, *(kind for record in self.records for kind in record.memory)}, key=_order)
        unit, size = ("GB", 1e9) if max(record.peak for record in self.records) >= 1e9 else ("MB", 1e6)
        yield f"{unit} at the high-water mark of the second step"
        rows = [("ranks", *kinds, "in all", "TFLOP", "at")]
        same: dict[tuple, list[int]] = {}
        for record in self.records:
            n_bytes = (*(record.memory.get(kind, 0) for kind in kinds), record.peak)
            cells = (*(f"{n / size:.2f}" for n in n_bytes), f"{record.flops / 1e12:.1f}", record.at)
            same.setdefault(cells, []).append(record.rank)
        yield table([*rows, *((_ranges(ranks), *cells) for cells, ranks in same.items())], n_left=1)
        if rooms := [record.room for record in self.records if record.room]:
            room, sent = max(rooms)
            yield (
                f"rowwise: buffers and activations have room for {room:,} rows a rank, {room / sent:.3g} "
                f"times the {sent:,} that it sends. There is room for capacity_factor * n_tokens * top_k, "
                "or, without a factor, for ep * n_tokens * min(top_k, experts of a rank)"
            )

    def _traffic(self) -> Iterator[str]:
        yield f"A step's calls, and MB sent by the rank that sends most (nodes of {NODE} ranks)"
        sent = {record.rank: record.traffic() for record in self.records}
        calls = [Counter(c.op for c in r.calls if c.step == 2 and c.op != "wait") for r in self.records]
        rows: list[tuple[str, ...]] = [("", "calls", "within a node", "between nodes")]
        for op in sorted({op for count in calls for op in count}):
            most = (max(by_op.get((op, away), 0.0) for by_op in sent.values()) for away in (False, True))
            rows.append((op, str(max(count[op] for count in calls)), *(f"{n / 1e6:,.1f}" for n in most)))
        yield table(rows, n_left=1)

    def _gpus(self) -> Iterator[str]:
        peak = max(record.peak for record in self.records)
        for gpu, (size, _) in GPUS.items():
            yield f"{gpu} ({size / 1e9:.0f} GB): {fits(peak, gpu)}"
        if small := [gpu for gpu in GPUS if not self.fits(gpu)]:
            yield f"python -m moekit.plan with --gpu {small[-1]} names layouts that fit"


def dry_run(
    step_of_rank: Callable[[int], Step],
    world_size: int,
    *,
    ranks: Iterable[int] | None = None,
    device: Device = "cuda",
    gpu: str | None = None,
    n_processes: int | None = None,
) -> Report:
    """Execute two steps on fake ranks; raise if the ranks do not fit together.

    Every tensor is on the meta device, so nothing is computed and nothing is sent. Shapes, memory and the
    order of calls are those of a real step, but there are no values, and so no routing:
    :func:`moekit.dispatch` assumes that every rank gets as many rows, and :func:`static_transport` takes
    other numbers. Collectives of objects, and those of other threads, are not seen. A step may not ask for
    CUDA where there is none.

    Parameters
    ----------
    step_of_rank : callable
        ``step_of_rank(rank) -> step`` makes mesh, parameters and state, as a training script does; ``step()``
        makes one step and returns the trees that it holds by kind of memory, e.g. ``{"parameters": params,
        "optimizer state": state}``, or None. It runs in a process of its own. Travels by cloudpickle; tensors
        must be made inside.
    world_size : int
        Number of ranks of the job.
    ranks : iterable of int, optional
        Which ones are executed, by default all; see :func:`sample_ranks`. The others are assumed to fit.
    device : {"cuda", "cpu"}
        Whose kernels the memory is counted for: they differ in what RMSNorm keeps.
    gpu : str, optional
        One of `moekit.plan.GPUS`, whose memory no rank may exceed.
    n_processes : int, optional
        Ranks executed at a time, by default as many as there are CPUs.

    Returns
    -------
    Report
        Its ``records`` are those of ``ranks``, in order.

    Raises
    ------
    ValueError
        When ``ranks`` are none or not of the world, ``gpu`` is unknown, or ``n_processes`` is below 1.
    RuntimeError
        When a rank raised, with its traceback; when the ranks' calls differ (:func:`compare`) or would
        never end (:func:`replay`), or ranks need more memory than the GPU has, with all that was found.

    Examples
    --------
    >>> from moekit.dryrun import dry_run
    >>> def step_of_rank(rank):
    ...     x = torch.ones(1000)
    ...     return lambda: torch.distributed.all_reduce(x)
    >>> report = dry_run(step_of_rank, 512, ranks=[0, 511])
    >>> print(report.records[1].calls[-1])
    all_reduce(float32, [1000], sum)
    """
    chosen = list(range(world_size)) if ranks is None else sorted(set(ranks))
    if not chosen or chosen[0] < 0 or chosen[-1] >= world_size:
        raise ValueError(f"dry_run needs ranks in [0, {world_size}), at least one, got {chosen}")
    if device not in ("cuda", "cpu"):
        raise ValueError(f"dry_run needs device 'cuda' or 'cpu', got {device!r}")
    if gpu is not None and gpu not in GPUS:
        raise ValueError(f"dry_run needs one of {sorted(GPUS)}, got {gpu!r}")
    if n_processes is not None and n_processes < 1:
        raise ValueError(f"dry_run needs n_processes >= 1, got {n_processes}")
    records = run_ranks(step_of_rank, chosen, world_size, device, n_processes or os.cpu_count() or 1)
    if problems := compare(records) or replay(records) or _over(records, gpu):
        raise RuntimeError(
            "\n".join([f"{len(chosen)} ranks of {world_size} do not fit together:", *problems])
        )
    others = ", the others taken to fit" if len(chosen) < world_size else ""
    return Report(records=tuple(records), title=f"{len(chosen)} of {world_size} ranks{others}")


def _over(records: Sequence[Record], gpu: str | None) -> list[str]:
    """Return which ranks need more memory than a GPU has: a line for all that need as much."""
    if gpu is None:
        return []
    by_peak: dict[int, list[int]] = {}
    for record in records:
        if record.peak >= GPUS[gpu].memory:
            by_peak.setdefault(record.peak, []).append(record.rank)
    has = f"{GPUS[gpu].memory / 1e9:.0f} GB of {gpu}"
    return [
        f"rank {_ranges(by_peak[peak])}: {peak / 1e9:.1f} GB, more than the {has}"
        for peak in sorted(by_peak, reverse=True)
    ]


def dry_run_recipe(
    build: Callable[[], tuple[DeviceMesh | None, DeviceMesh | None, dict[str, Any], Callable]],
    config: ModelConfig,
    layout: Layout,
    *,
    full: bool = False,
    gpu: str | None = None,
) -> Report:
    """Execute the step of a recipe on fake ranks: two of every kind of group, and every stage of a pipeline.

    Parameters
    ----------
    build : callable
        ``build() -> (mesh, context, held, train_step)``, as recipes define it: makes everything a rank holds,
        a dict with ``params`` and ``state``; ``train_step(held, batch, step)`` makes a step.
    config : ModelConfig
        The model, of which every parameter must be held by some rank.
    layout : Layout
        From :func:`moekit.layouts.check_layout`: the sizes of the mesh and of the batch.
    full : bool
        Two ranks of every single group; see :func:`sample_ranks`.
    gpu : str, optional
        As for :func:`dry_run`.

    Returns
    -------
    Report
        As from :func:`dry_run`.

    Raises
    ------
    RuntimeError
        As :func:`dry_run`; and when parameters of the model are on no rank, or are not of the model.
    """
    sizes = {"pp": layout.pp, "edp": layout.edp or 1, "ep": layout.ep}
    ranks, world_size = sample_ranks(sizes, full=full), math.prod(sizes.values())
    report = dry_run(partial(_recipe_step, build, layout), world_size, ranks=ranks, gpu=gpu)
    whole = param_shapes(config)
    shapes = {name: x.shape for r in report.records for name, x in r.leaves["parameters"].items()}
    if wrong := sorted(name for name in whole.keys() | shapes if whole.get(name) != shapes.get(name)):
        differ = (
            f"{name}: {shapes.get(name, 'on no rank')}, needs {whole.get(name, 'none')}" for name in wrong
        )
        raise RuntimeError("\n".join(["the ranks do not hold the parameters of the model:", *differ]))
    tokens = f"{layout.rows} x {layout.seq_len // layout.cp}"
    title = (
        f"{report.title}: "
        f"{' x '.join(f'{axis} {n}' for axis, n in sizes.items())}, cp {layout.cp}; "
        f"{layout.n_microbatches} micro-batches of {tokens} tokens a rank, of which calls, MB and TFLOP are"
    )
    return replace(report, title=title)


def _recipe_step(build: Callable, layout: Layout, rank: int) -> Step:
    del rank  # the process group knows it
    _, context, held, train_step = build()
    tokens = torch.zeros(layout.rows * layout.n_microbatches, layout.seq_len + 1, dtype=torch.int64)
    batch = make_batch(tokens, torch.zeros_like(tokens), torch.arange(len(tokens)))
    batch = split_context(batch, context=context)

    def step() -> dict[str, Any]:
        train_step(held, batch, 1)
        named = {"params": "parameters", "state": "optimizer state"}
        return {named[kind]: tree for kind, tree in held.items() if kind in named and tree is not None}

    return step


def record(
    step_of_rank: Callable[[int], Step], *, rank: int, world_size: int, device: Device = "cuda"
) -> Record:
    """Execute two steps as one rank of many, in a process of its own, and return what it did.

    Parameters and errors as for :func:`dry_run`.
    """
    return run_ranks(step_of_rank, [rank], world_size, device, 1)[0]


def static_transport(rows: Sequence[Sequence[int]]) -> Transport:
    """Return ``"all_to_all"`` with row counts that are given beforehand, for tensors without values.

    With real tensors it is wrong unless the routing has exactly these counts.

    Parameters
    ----------
    rows : sequence of sequence of int
        ``rows[i][j]``: rows that rank i of the expert-parallel mesh sends to rank j.

    Returns
    -------
    Transport
        For ``via=``.

    Raises
    ------
    ValueError
        When used, if ``rows`` is not square of the size of the mesh, or the rows of this rank are not as many
        as its tokens times ``top_k``.
    """

    def dispatch(x: Tensor, routing: Routing, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor, Any]:
        if mesh is None:
            return TRANSPORTS["local"].dispatch(x, routing, mesh)
        rank, size, n = mesh.get_local_rank(), mesh.size(), routing.expert_ids.numel()
        if len(rows) != size or any(len(row) != size for row in rows) or sum(rows[rank]) != n:
            raise ValueError(
                f"static_transport needs rows ({size}, {size}) with {n} of rank {rank}, got "
                f"{[len(row) for row in rows]} with {sum(rows[rank]) if rank < len(rows) else 'none'}"
            )
        counts = [list(rows[rank]), [row[rank] for row in rows]]
        return dispatch_all_to_all(x, routing, mesh, read=lambda *_: counts)

    def combine(rows: Tensor, weights: Tensor, plan: Any, mesh: DeviceMesh | None) -> Tensor:
        return TRANSPORTS["local" if mesh is None else "all_to_all"].combine(rows, weights, plan, mesh)

    return Transport(dispatch, combine)


def sample_ranks(mesh_sizes: Mapping[str, int], *, full: bool = False) -> list[int]:
    """Return ranks with which a dry run sees every kind of group from two sides.

    Parameters
    ----------
    mesh_sizes : mapping of str to int
        Sizes by axis, in the order of the mesh: the last axis numbers neighbours.
    full : bool
        Two ranks of every single group along every axis, not of one of each kind.

    Returns
    -------
    list of int
        Ascending: of every place along ``pp`` the first rank, and the last along each other axis.

    Raises
    ------
    ValueError
        When an axis has no rank, or there is no axis.

    Examples
    --------
    >>> from moekit.dryrun import sample_ranks
    >>> sample_ranks({"edp": 4, "ep": 8})
    [0, 7, 24]
    """
    sizes = list(mesh_sizes.values())
    if not sizes or min(sizes) < 1:
        raise ValueError(f"sample_ranks needs axes of at least one rank, got {dict(mesh_sizes)}")
    stages = [range(n) if axis == "pp" else [0] for axis, n in mesh_sizes.items()]
    chosen: set[tuple[int, ...]] = set()
    if full:
        seen: Counter[tuple] = Counter()
        # First the ranks that every group of theirs lacks, then those that one does.
        for enough in (all, any):
            for place in product(*map(range, sizes)):
                lacks = (seen[group] < min(2, sizes[group[0]]) for group in _groups(place))
                if place not in chosen and enough(lacks):
                    chosen.add(place)
                    seen.update(_groups(place))
    chosen |= set(product(*stages))
    for i, (axis, n) in enumerate(mesh_sizes.items()):
        if axis != "pp" and not full:
            chosen |= {(*place[:i], n - 1, *place[i + 1 :]) for place in product(*stages)}
    numbers = []
    for place in sorted(chosen):
        rank = 0
        for at, n in zip(place, sizes, strict=True):
            rank = rank * n + at
        numbers.append(rank)
    return numbers


def _groups(place: tuple[int, ...]) -> list[tuple]:
    """Return the groups a rank is in, one along each axis."""
    return [(axis, place[:axis], place[axis + 1 :]) for axis in range(len(place))]


# --- Tables ---------------------------------------------------------------------------

_KINDS = (
    *("parameters", "optimizer state", "gradients", "activations", "backward", "symmetric buffers"),
    *("temporaries", "other"),
)


def _order(kind: str) -> tuple[int, str]:
    return (_KINDS.index(kind) if kind in _KINDS else len(_KINDS), kind)


def _ranges(ranks: Sequence[int]) -> str:
    """Write ascending ranks as 0-3, 8; many as 0-3, ..., 511 (32 ranks)."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    text = [str(a) if a == b else f"{a}-{b}" for a, b in runs]
    return ", ".join(text if len(text) < 5 else [text[0], "...", f"{text[-1]} ({len(ranks)} ranks)"])
