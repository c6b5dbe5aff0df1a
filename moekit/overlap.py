"""Communication beside computation, and the measurement that says whether it pays.

On CUDA what runs beside is launched on a stream of its own: it shares the device's processors and memory with
what the caller's stream runs, so a step may get slower (docs/overlap.md). Autograd runs a backward on the
stream of its forward, so what was beside in one is in the other. Where there are no streams, on CPUs, the
same functions run one after the other and give the same values.
"""

import functools
import itertools
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed._functional_collectives as fc
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_leaves, tree_map_only

from moekit.mesh import world_size
from moekit.tree import has_values

Overlap = Literal["none", "two_batch", "shared"]


# --- Transforms -----------------------------------------------------------------------


def beside(fn: Callable, *args: Any, urgent: bool = False) -> Callable[[], Any]:
    """Start ``fn(*args)`` beside what comes next, and return the function that waits for its result.

    The wait is the device's, not the host's. Differentiable as ``fn`` is, and its backward runs beside others
    likewise.

    Parameters
    ----------
    fn, *args
        Tensors among ``args``, in any nesting, are kept from being overwritten while ``fn`` or its backward
        reads them, and gradients of parameters among them are complete on the caller's stream. Neither holds
        for what ``fn`` reads through a closure: that must live as long, and parameters' gradients may come,
        and their hooks run, on the other stream. The first tensor's device counts.
    urgent : bool
        Whether its kernels go first where both streams wait for room on the device, as communication should.

    Returns
    -------
    callable
        ``take() -> result``, to be called on the stream that reads the result.

    Raises
    ------
    ValueError
        When there is no tensor among ``args``.

    Examples
    --------
    >>> take = beside(torch.mul, torch.ones(2), 3.0)
    >>> take()
    tensor([3., 3.])
    """
    device = next((x.device for x in tree_leaves(args) if isinstance(x, Tensor)), None)
    if device is None:
        raise ValueError("beside needs a tensor among the arguments, whose device says where, got none")
    take = _start(fn, args, _side_stream(device, urgent), _now(device))
    return lambda: _joined(take())


def two_batch(
    send: Callable, compute: Callable, fetch: Callable, *, meanwhile: Callable[[], Tensor] | None = None
) -> Callable:
    """Return ``fetch(compute(send(*tokens)))`` of two halves of the tokens, one travelling as one computes.

    ``send`` and ``fetch`` of either half run beside ``compute`` of the other, in the backward too; what is
    computed stays on the caller's stream, in one order. Pure and differentiable as the three are. Collective
    as they are: each is called twice, in one order on all ranks, also without tokens.

    What ``send`` and ``fetch`` do is in one order too, so both halves can share what a transport keeps
    between its calls, as buffers. A ``send`` that waits on the host, as :func:`moekit.dispatch` via
    ``"all_to_all"`` does for its counts, delays all that is launched after it: the second half's waits until
    the first half's rows have come, which the first half's ``compute`` needs anyway.

    Parameters
    ----------
    send, compute, fetch : callable
        ``send(*tokens)`` of half the tokens, ``compute`` of what ``send`` returned, ``fetch`` of what
        ``compute`` did, which returns a tensor of as many rows as there were tokens. Trees of tensors may
        pass between them. Parameters that ``send`` or ``fetch`` read are not protected as the arguments of
        :func:`beside` are: read those in ``compute`` or before, and route before ``run``.
    meanwhile : callable, optional
        ``meanwhile()`` of all tokens, added to the result: it is computed while the first half travels.

    Returns
    -------
    callable
        ``run(*tokens)``: tensors of one length, of which the first half gets the larger part. It raises
        ``ValueError`` for tensors of several lengths, another number of rows from ``fetch``, or another shape
        from ``meanwhile``.

    Examples
    --------
    >>> run = two_batch(lambda x: x + 1, lambda x: 2 * x, lambda x: x - 1)
    >>> run(torch.arange(3))
    tensor([1, 3, 5])
    """

    def run(*tokens: Tensor) -> Tensor:
        shapes = [tuple(x.shape) for x in tokens]
        lengths = {shape[:1] for shape in shapes}
        if len(lengths) != 1 or () in lengths:
            raise ValueError(f"two_batch needs tokens of one length, got {shapes or 'none'}")
        n, device = len(tokens[0]), tokens[0].device
        side, there = _side_stream(device, urgent=True), _now(device)
        halves = zip(*(x.split([n - n // 2, n // 2]) for x in tokens), strict=True)
        # Before a send, which may hold the host up.
        more = None if meanwhile is None else meanwhile()
        sent = [_start(send, half, side, there) for half in halves]
        home = []
        while sent:
            out = compute(sent.pop(0)())
            home.append(_start(fetch, (out,), side, _now(device)))
            del out
        parts = [_joined(take()) for take in home]
        if [len(x) for x in parts] != [n - n // 2, n // 2]:
            raise ValueError(
                f"two_batch needs a row of fetch for each of {n - n // 2} and {n // 2} tokens, got "
                f"{' and '.join(str(len(x)) for x in parts)}"
            )
        y = torch.cat(parts)
        if more is None:
            return y
        if more.shape != y.shape:
            raise ValueError(
                f"two_batch needs meanwhile() to return {tuple(y.shape)} as fetch does, got "
                f"{tuple(more.shape)}"
            )
        return y + more

    return run


# --- Measurement ----------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Choice:
    """Which function was fastest, and the seconds of a call of each, on the slowest rank."""

    name: str
    seconds: dict[str, float]

    def __str__(self) -> str:
        times = ", ".join(f"{name} {1e3 * seconds:.3f} ms" for name, seconds in self.seconds.items())
        return f"{self.name} is fastest: {times}"


class fastest:
    """A function that calls each of several in turn, and from when their times are known the fastest.

    They should be ways to the same result, so that calls which measure are calls like any other: of a whole
    training step, the function of loss and gradients. None may fail: where one fails on one rank alone, for
    want of memory, the others wait for it. Each is called once before it is timed, as it may compile. A
    function's time is the median of its calls; of several ranks, the slowest's counts. Once it is chosen the
    others are let go, with the buffers that they hold. One function alone is not timed, and without values,
    as in a dry run, the first one is called.

    Collective over ``mesh`` once, in the call that decides, besides what the functions do; the host waits for
    the device in it. All ranks get the same answer, and the first one prints it.

    Parameters
    ----------
    functions : mapping
        By name. Of equals the first wins.
    rounds : int
        Timed calls of each.
    mesh : DeviceMesh, optional
        All ranks that call this; any axes. Of several functions on several ranks it must be given: by its own
        clock each rank could choose another, and wait for the others for ever.

    Attributes
    ----------
    choice : Choice or None
        None while it measures.

    Raises
    ------
    ValueError
        Without functions or rounds, or a mesh where ranks are several.

    Examples
    --------
    >>> run = fastest({"slow": lambda s: time.sleep(s), "fast": lambda s: None}, rounds=1)
    >>> for _ in range(4):
    ...     run(1e-3)  # doctest: +ELLIPSIS
    fast is fastest: slow ... ms, fast ... ms
    >>> run.choice.name
    'fast'
    """

    def __init__(self, functions: Mapping[str, Callable], *, rounds: int = 5, mesh: DeviceMesh | None = None):
        if not functions or rounds < 1:
            raise ValueError(f"fastest needs a function and rounds >= 1, got {list(functions)} and {rounds=}")
        if mesh is None and len(functions) > 1 and (n := world_size()) > 1:
            raise ValueError(
                f"fastest needs a mesh of all that call it, to choose alike on each of {n} ranks, got "
                "mesh=None; pass the mesh from make_mesh"
            )
        self.functions, self.rounds, self.mesh = dict(functions), rounds, mesh
        self.choice: Choice | None = None
        self._turns = itertools.cycle(tuple(functions))
        self._marks: dict[str, list[tuple]] = {name: [] for name in functions}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call one of the functions and return what it does."""
        if self.choice is not None:
            return self.functions[self.choice.name](*args, **kwargs)
        first, *others = self.functions.values()
        tensors = (x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor))
        if not others or not all(map(has_values, tensors)):
            return first(*args, **kwargs)
        name = next(self._turns)
        start = _mark()
        out = self.functions[name](*args, **kwargs)
        self._marks[name].append((start, _mark()))
        if all(len(pairs) > self.rounds for pairs in self._marks.values()):
            self.choice = _decide({name: pairs[1:] for name, pairs in self._marks.items()}, self.mesh)
            self.functions = {self.choice.name: self.functions[self.choice.name]}
            self._marks.clear()
            if self.mesh is None or not any(self.mesh.get_coordinate() or ()):
                print(self.choice)
        return out


def _decide(marks: Mapping[str, list[tuple]], mesh: DeviceMesh | None) -> Choice:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    times = [statistics.median(_between(*pair) for pair in pairs) for pairs in marks.values()]
    device = "cpu" if mesh is None else mesh.device_type
    slowest = torch.tensor(times, dtype=torch.float64, device=device)
    for axis in range(0 if mesh is None else mesh.ndim):
        slowest = fc.wait_tensor(fc.all_reduce(slowest, "max", (mesh, axis)))
    seconds = dict(zip(marks, slowest.tolist(), strict=True))
    return Choice(name=min(seconds, key=seconds.__getitem__), seconds=seconds)


def _mark() -> Any:
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, end: Any) -> float:
    return end - start if isinstance(start, float) else start.elapsed_time(end) / 1e3


# --- Streams --------------------------------------------------------------------------


@functools.cache  # the allocator keeps memory for each stream, so they are few and live on
def _side_stream(device: torch.device, urgent: bool) -> Any:
    """Return the stream beside the caller's; None where there are none."""
    return torch.cuda.Stream(device, priority=-urgent) if device.type == "cuda" else None


def _now(device: torch.device) -> Any:
    """Return an event of the caller's stream: what has been launched there."""
    return None if _side_stream(device, False) is None else torch.cuda.current_stream(device).record_event()


def _start(fn: Callable, args: tuple, side: Any, after: Any) -> Callable[[], Any]:
    """Launch ``fn(*args)`` on ``side`` after an event; the stream that asks for the result waits for it."""
    if side is None:
        out = fn(*args)
        return lambda: out
    # Views of parameters, so that their gradients are complete on this stream, where their hooks run.
    args = tree_map_only(Tensor, lambda x: x.view_as(x) if x.is_leaf and x.requires_grad else x, args)
    side.wait_event(after)
    _is_read_on(side, args)
    with torch.cuda.stream(side):
        out = fn(*args)
        done = side.record_event()

    def take() -> Any:
        here = torch.cuda.current_stream(side.device)
        here.wait_event(done)
        _is_read_on(here, out)
        return out

    return take


def _is_read_on(stream: Any, tree: Any) -> None:
    """Keep a tree's memory from others until ``stream`` has done with it, in the backward too."""
    for x in tree_leaves(tree):
        if isinstance(x, Tensor) and x.is_cuda:
            x.record_stream(stream)


def _joined(tree: Any) -> Any:
    """Return a tree whose backward begins on this stream."""
    return tree_map_only(Tensor, lambda x: _Joined.apply(x) if x.is_cuda and x.requires_grad else x, tree)


class _Joined(torch.autograd.Function):
    """The identity. Where a forward is recomputed, its backward is what asks for that first.

    So it is recomputed on the caller's stream, as the forward was computed; else on that of whichever node
    reads a saved tensor first, of which the others, on other streams, know nothing.
    """

    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x.new_empty(0))
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        _ = ctx.saved_tensors
        return grads[0]
