"""Writes down what a step sends, holds and computes, on tensors without values."""

import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed.distributed_c10d import _resolve_process_group
from torch.nn import Parameter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter
from torch.utils.flop_counter import flop_registry

from moekit._calls import Call
from moekit._meta import MetaOps
from moekit.symmetric import SHARED_BY
from moekit.tree import held

# What the names of operations begin with, underscores left out.
_OPS = {
    **{"allreduce": "all_reduce", "allgather": "all_gather", "alltoall": "all_to_all"},
    **{"reducescatter": "reduce_scatter", "reduce": "reduce", "broadcast": "broadcast"},
    **{"gather": "gather", "scatter": "scatter", "barrier": "barrier"},
    **{"send": "send", "isend": "send", "recv": "recv", "irecv": "recv"},
}
_INPUTS = ("input", "input_tensor", "input_tensors", "inputs", "tensors", "tensor")
_BLOCK = 512  # bytes, which CUDA's allocator rounds up to


class _Storage:
    """Bytes that are held for a while."""

    def __init__(self, n_bytes: int, step: int, born: int, backward: int | None):
        self.n_bytes, self.step, self.born, self.backward = n_bytes, step, born, backward
        self.label: str | None = None
        self.met_backward = self.outlived_backward = False

    def kind(self, step: int) -> str:
        """Return what kind of memory it was in a step."""
        if self.label:
            return self.label
        if self.step < step:
            return "other"
        if self.backward is not None:
            return "gradients" if self.outlived_backward else "backward"
        return "activations" if self.met_backward else "temporaries"


class _Known(NamedTuple):
    """What does not change from one call of an operation to the next."""

    name: str
    ignored: bool
    communicates: bool
    one_sided: bool  # writes to other ranks' memory, or reads it
    computes: bool
    makes: bool  # tensors that are no views of its arguments


class HighWater(NamedTuple):
    """The most bytes held at a moment of a step, by kind, and the operation that came to them."""

    by_kind: dict[str, int]
    op: str


class Recorder(TorchDispatchMode):
    """Records every operation while it is entered. Call ``start`` at the beginning of each step."""

    def __init__(self):
        super().__init__()
        self.step = 0
        self.calls: list[Call] = []
        self.flops: Counter[int] = Counter()  # by step
        self.reduce_op: str | None = None  # of the call of c10d to come, where it cannot be read
        self.room: tuple[int, int] | None = None  # rows a rank has room for, and those it puts
        self._ops = MetaOps()
        self._known: dict[Any, _Known] = {}
        self._now, self._last_backward = 0, -1  # operations so far
        self._backwards, self._in_backward = 0, False  # those that have ended
        self._live: dict[int, tuple[_Storage, Any]] = {}
        self._events: list[tuple[_Storage, str | None]] = []  # born, with an operation's name, or died
        self._starts: dict[int, int] = {}
        self._messages: Counter[tuple] = Counter()
        self._receiving: dict[Any, Call] = {}

    def start(self, step: int) -> None:
        """Begin a step; 0 is what comes before the first."""
        self.step, self._starts[step] = step, len(self._events)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # which costs as much as the rest

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs, known = kwargs or {}, self._known.get(func) or self._know(func)
        for t in types:
            if t is not Tensor and t is not Parameter:
                # A DTensor finds placements on fake tensors, and comes again, as operations on what it holds.
                return func(*args, **kwargs) if issubclass(t, FakeTensor) else NotImplemented
        if known.ignored:
            return func(*args, **kwargs)
        self._now += 1
        if torch._C._current_autograd_node() is not None:
            self._in_backward, self._last_backward = True, self._now
        elif self._in_backward:
            self._in_backward = False
            self._backwards += 1
        if known.name == "_c10d_functional::wait_tensor":
            self.wait(args[0].untyped_storage()._cdata)
            return args[0].detach()  # by itself it would be a copy
        out = self._ops(func, args, kwargs)
        if known.communicates:
            self._communicate(func._schema, args, kwargs, out)
        if known.one_sided:
            self._reach(func._schema, args, kwargs)
        if known.computes:
            self.flops[self.step] += _flops(func, args, kwargs, out)
        if known.makes:
            for x in (out,) if isinstance(out, Tensor) else tree_iter(out):
                if isinstance(x, Tensor):
                    self._hold(x.untyped_storage(), known.name)
        return out

    def _know(self, func: Any) -> "_Known":
        name = func.name()
        known = self._known[func] = _Known(
            name=name,
            ignored=name.startswith("prim::"),
            communicates=name.startswith(("c10d::", "_c10d_functional::")) and "::_wrap" not in name,
            one_sided=name.startswith(("moekit::put", "moekit::get")),
            computes=func._schema.name in _FLOPS or func.overloadpacket in flop_registry,
            makes=any(x.alias_info is None for x in func._schema.returns),
        )
        return known

    # --- Memory -----------------------------------------------------------------------

    def _hold(self, storage: torch.UntypedStorage, op: str) -> None:
        key = storage._cdata
        if key in self._live:
            return
        n_bytes = -(-storage.nbytes() // _BLOCK) * _BLOCK
        entry = _Storage(n_bytes, self.step, self._now, self._backwards if self._in_backward else None)
        self._live[key] = entry, weakref.ref(storage, lambda _: self._drop(key))
        self._events.append((entry, op))

    def _drop(self, key: int) -> None:
        entry, _ = self._live.pop(key)
        self._see(entry)
        self._events.append((entry, None))

    def resize(self, storage: torch.UntypedStorage, resize: Callable, size: int) -> None:
        """Note a storage that gets another size, as FSDP's do when they are freed and filled."""
        if storage._cdata in self._live:
            self._drop(storage._cdata)
        resize(storage, size)
        self._hold(storage, "resize_")

    def _see(self, entry: _Storage) -> None:
        """Note what has happened since a storage was made."""
        entry.met_backward = self._last_backward > entry.born
        entry.outlived_backward = entry.backward != self._backwards

    def label(self, kind: str, tree: Any) -> None:
        """Say what kind of memory the tensors of a tree are, also before now."""
        for x in tree_iter(tree):
            if isinstance(x, Tensor) and (found := self._live.get(held(x).untyped_storage()._cdata)):
                found[0].label = kind

    def high_water(self, step: int) -> HighWater:
        """Return the most that was held during a step, with what it found when it began."""
        total, most, top = 0, 0, -1
        start, end = self._starts[step], self._starts.get(step + 1, len(self._events))
        for i, (entry, op) in enumerate(self._events[:end]):
            total += -entry.n_bytes if op is None else entry.n_bytes
            if i >= start - 1 and total > most:  # what is there when it begins counts
                most, top = total, i
        for entry, _ in self._live.values():
            self._see(entry)
        by_kind: Counter[str] = Counter()
        for entry, op in self._events[: top + 1]:
            by_kind[entry.kind(step)] += -entry.n_bytes if op is None else entry.n_bytes
        op = self._events[top][1] if top >= start else None
        return HighWater({kind: n for kind, n in by_kind.items() if n}, op or "")

    # --- Communication ----------------------------------------------------------------

    def wait(self, what: Any) -> None:
        """Note that a receive is waited for: its work, or the storage of its result."""
        if call := self._receiving.pop(what, None):
            self.calls.append(
                Call(op="wait", group=call.group, peer=call.peer, message=call.message, step=self.step)
            )

    def _communicate(self, schema, args, kwargs, out) -> None:
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        name = schema.name.partition("::")[2]
        group = given.get("process_group", given.get("group_name"))
        if isinstance(group, str):
            group = _resolve_process_group(group)  # pyright: ignore[reportArgumentType]
        elif not isinstance(group, dist.ProcessGroup):
            group = dist.ProcessGroup.unbox(group)
        ranks = tuple(dist.get_process_group_ranks(group))
        if name == "batch_p2p_ops":
            columns = (given[x] for x in ("op_list", "peer_list", "tag_list", "tensors"))
            for one, peer, tag, x, done in zip(*columns, out, strict=True):
                self._message(_op(one), ranks, [x], peer, tag, done)
            return
        op = _op(name)
        inputs = next(given[x] for x in _INPUTS if x in given) if op != "scatter" else given["output_tensors"]
        if op in ("send", "recv"):
            peer = given.get("dst", given.get("src"))
            self._message(op, ranks, inputs, peer, given.get("tag", 0), out)
            return
        fields: dict[str, Any] = _described(inputs) if op != "barrier" else {}
        reduce = given.get("reduce_op")
        if reduce is not None and not isinstance(reduce, str):
            reduce, self.reduce_op = self.reduce_op, None
        root = given.get("root_rank", given.get("src"))
        if op == "all_to_all":
            fields["sends"], fields["receives"] = _splits(given, out, len(ranks))
            if not isinstance(inputs, Tensor):
                fields["shapes"] = ()  # one tensor a rank, whose elements are what is split
        peer = None if root is None else ranks[root]
        self.calls.append(Call(op=op, group=ranks, reduce=reduce, peer=peer, step=self.step, **fields))

    def _reach(self, schema, args, kwargs) -> None:
        """Note rows put to other ranks or got from them, as many of each, as routing has no values."""
        given = {a.name: v for a, v in zip(schema.arguments, args, strict=False)} | kwargs
        n_rows = given["places"].numel()
        for mine in (given[name] for name in ("mine", "scales") if name in given):
            self.label("symmetric buffers", mine)
            ranks = tuple(getattr(mine, SHARED_BY, ()))
            if not ranks:  # one process
                continue
            row, n = mine.shape[1:], len(ranks)
            if row:
                self.room = (len(mine), n_rows)
            self.calls.append(
                Call(
                    op=schema.name.partition("::")[2][:3],
                    group=ranks,
                    shapes=((n_rows, *row),),
                    dtype=str(mine.dtype).removeprefix("torch."),
                    sends=tuple((i + 1) * n_rows // n - i * n_rows // n for i in range(n)),
                    n_bytes=n_rows * row.numel() * mine.element_size(),
                    step=self.step,
                )
            )

    def _message(self, op: str, ranks: tuple[int, ...], tensors, peer: int | None, tag: int, out) -> None:
        peer = None if peer is None else ranks[peer]
        number = self._messages[op, ranks, peer]
        fields = _described(tensors)
        call = Call(op=op, group=ranks, peer=peer, tag=tag, message=number, step=self.step, **fields)
        self._messages[op, ranks, peer] += 1
        self.calls.append(call)
        if op == "recv" and peer is not None:
            key = out.untyped_storage()._cdata if isinstance(out, Tensor) else dist.Work.unbox(out)
            self._receiving[key] = call


def _op(name: str) -> str:
    flat = name.replace("_", "")
    for start, op in _OPS.items():
        if flat.startswith(start):
            return op
    raise NotImplementedError(f"a dry run knows collectives that begin with {sorted(_OPS)}, got {name}")


def _described(tensors: Any) -> dict[str, Any]:
    found = [x for x in tree_iter(tensors) if isinstance(x, Tensor)]
    return dict(
        shapes=tuple(tuple(x.shape) for x in found),
        dtype=", ".join(sorted({str(x.dtype).removeprefix("torch.") for x in found})),
        n_bytes=sum(x.numel() * x.element_size() for x in found),
    )


def _splits(given: dict[str, Any], out: Any, size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return what an all_to_all sends to each rank, and expects from it."""
    if "input_tensors" in given:
        return tuple(x.numel() for x in given["input_tensors"]), tuple(
            x.numel() for x in given["output_tensors"]
        )
    from_here, to_here = given["input"], given.get("output", out)
    sends, receives = given["input_split_sizes"], given["output_split_sizes"]
    return (
        tuple(sends) or (len(from_here) // size,) * size,
        tuple(receives) or (len(to_here) // size,) * size,
    )


_ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
_KERNEL = "moekit::causal_attention"
_FLOPS = ("aten::_grouped_mm", *(f"{op}{end}" for op in (_ATTENTION, _KERNEL) for end in ("", "_backward")))


def _flops(func, args, kwargs, out) -> int:
    """Return two for each product of a matrix product or of attention; causal attention counts all pairs."""
    name = func._schema.name
    if name == "aten::_grouped_mm":
        a, b = args[:2]
        groups = a.shape[0] if a.ndim == 3 and b.ndim == 2 else 1
        return 2 * a.numel() * b.shape[-1] // groups
    if name.startswith((_ATTENTION, _KERNEL)):
        backward = name.endswith("_backward")
        q, k, v = args[1:4] if backward else args[:3]
        products = q.shape[0] * q.shape[1] * q.shape[2] * k.shape[2]
        return 2 * products * ((3 * q.shape[3] + 2 * v.shape[3]) if backward else (q.shape[3] + v.shape[3]))
    return flop_registry[func.overloadpacket](*args, **kwargs, out_val=out)
