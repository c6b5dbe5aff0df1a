"""Where a step's time goes: named ranges in a trace, and a table of them, forward and backward.

A backward runs outside the ranges of its forward. Torch's profiler says which operation has made each node of
the autograd graph, so the time of a node goes to the range that its operation was in.
"""

import functools
import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function, schedule

Function = TypeVar("Function", bound=Callable)
PREFIX = "mk."  # of our ranges' names, among those of others
FIRST = 2  # steps that come before a trace: they compile, allocate and start communicators


def in_range(name: str) -> AbstractContextManager:
    """Return a context whose operations a trace shows as ``mk.<name>``; nothing where no profiler runs.

    Half a microsecond then, where ``torch.profiler.record_function`` takes several. What is compiled has no
    names inside.
    """
    if torch.compiler.is_compiling() or not torch.autograd._profiler_enabled():
        return nullcontext()
    return record_function(PREFIX + name)


def ranged(name: str) -> Callable[[Function], Function]:
    """Return a decorator for a function that a trace shows as ``mk.<name>``; see :func:`in_range`."""

    def decorate(fn: Function) -> Function:
        @functools.wraps(fn)
        def run(*args: Any, **kwargs: Any):
            with in_range(name):
                return fn(*args, **kwargs)

        return cast(Function, run)

    return decorate


def traced(steps: Iterable[int], n: int, *, folder: str | Path) -> Iterable[int]:
    """Return ``steps``, of which ``n`` are traced; write the trace and print where their time went.

    The first two steps come before, and one in which the profiler starts. ``folder/trace.json`` is for
    https://ui.perfetto.dev or ``chrome://tracing``.

    Parameters
    ----------
    steps : iterable of int
        E.g. a :class:`moekit.tracking.Progress`.
    n : int
        0 traces nothing.
    folder : str or Path
        Made if needed. Rank 0 writes; the others are not traced.

    Raises
    ------
    ValueError
        For ``n`` below 0.

    Examples
    --------
    >>> for step in traced(range(8), 2, folder="runs/mine"):  # doctest: +SKIP
    ...     params, state, stats = train_step(params, state, next(loader))
    """
    if n < 0:
        raise ValueError(f"traced needs n >= 0 steps to trace, got {n}")
    if n == 0 or (dist.is_initialized() and dist.get_rank() != 0):
        return steps
    pause = getattr(steps, "paused", nullcontext)  # of a Progress: its rate is then without the writing
    return _traced(iter(steps), n, Path(folder, "trace.json"), pause)


def _traced(steps: Iterator[int], n: int, path: Path, pause: Callable) -> Iterator[int]:
    yield from islice(steps, FIRST)
    written = []

    def write(profiler: Any) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(path))
        written.append(path)
        print(f"{where_time_went(path)}\ntrace: {path}")

    activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
    plan = schedule(wait=0, warmup=1, active=n, repeat=1)
    profiler = profile(activities=activities, schedule=plan, on_trace_ready=write, acc_events=True)
    profiler.start()
    try:
        for i, step in enumerate(islice(steps, 1 + n)):
            if i:
                profiler.step()
            yield step
    finally:
        with pause():
            profiler.stop()
    if not written:
        print(f"no step was traced: a run has to go on after its first {FIRST + 1}")
    yield from steps


class Share(NamedTuple):
    """What a range takes of a step."""

    forward: float  # ms
    backward: float  # ms, recomputation included

    @property
    def both(self) -> float:
        """Forward and backward, ms."""
        return self.forward + self.backward


@dataclass(frozen=True, kw_only=True)
class Times:
    """Where the time of a step went, on average over those of a trace; printed, a table."""

    device: str  # "cuda": time of kernels; "cpu": time of the thread that takes the steps
    n_steps: int
    step: float  # ms
    idle: float  # ms in which no kernel ran; 0 on a CPU
    ranges: dict[str, Share]  # by name, the longest first; "other" is what has none

    def __str__(self) -> str:
        lines = [
            f"where a step's {self.step:.1f} ms went ({self.device}, mean of {self.n_steps} traced steps)",
            f"{'range':<14}{'forward ms':>13}{'backward ms':>13}{'share':>9}",
        ]
        for name, x in self.ranges.items():
            lines.append(f"{name:<14}{x.forward:>13.2f}{x.backward:>13.2f}{x.both / self.step:>9.1%}")
        if self.idle:
            lines.append(f"{'idle':<14}{self.idle:>26.2f}{self.idle / self.step:>9.1%}")
        return "\n".join(lines)


def where_time_went(path: str | Path) -> Times:
    """Read a Chrome trace of ``torch.profiler`` and return the time of its named ranges.

    Where kernels ran: their time, each counted to the range of the call that launched it. Those of several
    streams overlap, so shares may add up to more than 1. Else: the time of the thread that took the steps,
    each moment counted to its innermost range.

    Raises
    ------
    ValueError
        For a trace without steps, which ``torch.profiler.profile(...).step()`` marks.
    """
    events = json.loads(Path(path).read_text())["traceEvents"]
    spans = _nested(e for e in events if e.get("ph") == "X" and e.get("cat") in _ON_HOST)
    steps = [span for span in spans if span.name.startswith("ProfilerStep#")]
    if not steps:
        raise ValueError(f"where_time_went needs a trace with steps of torch.profiler, got none in {path}")
    _place(spans, [e for e in events if e.get("cat") == "fwdbwd"])
    times: dict[tuple[str, bool], float] = defaultdict(float)  # ms of a step, by range and direction
    per_step = 1e-3 / len(steps)  # from us of all

    launches = {span.correlation: span for span in spans if span.correlation is not None}
    kernels = []
    for e in events:
        if e.get("ph") == "X" and e.get("cat") in _ON_DEVICE:
            launch = launches.get(e["args"].get("correlation"))
            if launch is not None:  # else of a step before the trace
                kernels.append((float(e["ts"]), float(e["ts"] + e["dur"])))
                times[launch.range, launch.backward] += e["dur"] * per_step
    if kernels:
        whole = max(end for _, end in kernels) - min(start for start, _ in kernels)
        idle = whole - _covered(kernels)
    else:
        whole, idle = sum(span.end - span.start for span in steps), 0.0
        for span in spans:
            if span.in_step:
                times[span.range, span.backward] += span.alone * per_step
    ranges = {name: Share(times[name, False], times[name, True]) for name in {name for name, _ in times}}
    return Times(
        device="cuda" if kernels else "cpu",
        n_steps=len(steps),
        step=whole * per_step,
        idle=idle * per_step,
        ranges=dict(sorted(ranges.items(), key=lambda item: -item[1].both)),
    )


_ON_HOST = ("cpu_op", "user_annotation", "cuda_runtime", "cuda_driver")
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


@dataclass(slots=True, eq=False)
class _Span:
    """What a thread did from one moment to another, in us."""

    name: str
    thread: Any
    start: float
    end: float
    parent: "_Span | None"
    alone: float  # without the spans inside
    correlation: int | None  # of the kernel that it launches
    node: tuple[int, int] | None  # what torch calls a node of the graph, where this span runs one
    is_forward: bool  # may have made a node
    in_step: bool
    backward: bool
    range: str = "other"

    @property
    def is_range(self) -> bool:
        return self.name.startswith(PREFIX)


def _nested(events: Iterable[dict]) -> list[_Span]:
    """Return the spans of all threads, each behind those that it lies in."""
    stacks: dict[Any, list[_Span]] = defaultdict(list)
    spans = []
    for e in sorted(events, key=lambda e: (e["ts"], -e["dur"])):
        args, stack = e.get("args", {}), stacks[e["tid"]]
        start, length = float(e["ts"]), float(e["dur"])
        while stack and stack[-1].end <= start:
            stack.pop()
        parent = stack[-1] if stack else None
        thread, number = args.get("Fwd thread id", 0), args.get("Sequence number")
        span = _Span(
            name=e["name"],
            thread=e["tid"],
            start=start,
            end=start + length,
            parent=parent,
            alone=length,
            correlation=args.get("correlation"),
            node=(thread, number) if thread and number is not None else None,
            is_forward=not thread and number is not None,
            in_step=e["name"].startswith("ProfilerStep#") or (parent is not None and parent.in_step),
            backward=e["name"].startswith("autograd::engine::evaluate_function")
            or (parent is not None and parent.backward),
        )
        if parent is not None:
            parent.alone -= length
        stack.append(span)
        spans.append(span)
    return spans


def _place(spans: list[_Span], links: list[dict]) -> None:
    """Find the range of each span: its own, that of the node that it runs, or of the span that it lies in."""
    made: dict[tuple, _Span] = {}  # the operation, by where a link begins
    ran: dict[tuple, tuple[int, int]] = {}  # the node, by where it ends
    for span in spans:
        if span.is_forward:
            made[span.thread, span.start] = span
        elif span.node is not None:
            ran[span.thread, span.start] = span.node
    ends = {e["id"]: ran.get((e["tid"], e["ts"])) for e in links if e["ph"] == "f"}
    nodes = {}
    for e in links:
        if e["ph"] == "s" and (operation := made.get((e["tid"], e["ts"]))) is not None:
            nodes[ends.get(e["id"])] = _named(operation)
    for span in spans:
        linked = nodes.get(span.node) if span.node is not None else None
        inherited = "other" if span.parent is None else span.parent.range
        span.range = span.name.removeprefix(PREFIX) if span.is_range else linked or inherited


def _named(span: _Span | None) -> str | None:
    while span is not None and not span.is_range:
        span = span.parent
    return None if span is None else span.name.removeprefix(PREFIX)


def _covered(intervals: list[tuple[float, float]]) -> float:
    """Return the length of what intervals cover together."""
    covered, upto = 0.0, -float("inf")
    for start, end in sorted(intervals):
        covered += max(end - max(start, upto), 0.0)
        upto = max(upto, end)
    return covered
