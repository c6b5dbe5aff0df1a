"""An optimizer whose state is spread over the ranks that hold the same parameters."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from moekit.mesh import all_reduce, describe_place, place, ranks_of
from moekit.optim import Optimizer, Scaled, check_apart, matching_leaves
from moekit.profiling import ranged
from moekit.tree import held, in_turn, is_hollow, map_named, named, on_mesh

BUCKET_BYTES = 2**28


def shard_optimizer(
    optimizer: Optimizer,
    *,
    reduce: str = "step",
    bucket_bytes: int = BUCKET_BYTES,
    mesh: DeviceMesh | None = None,
) -> Optimizer:
    """Run an optimizer on float32 masters that each rank keeps a part of (ZeRO stage 1).

    ``update`` reduce-scatters gradients that are ``Partial``, updates this rank's part of the masters, and
    gathers the parameters from them. Collective, in buckets: one reduce-scatter of summed float32 and one
    all-gather of the parameters' dtype for up to ``bucket_bytes`` of leaves that are replicated over the
    same mesh axis. On gloo, buckets give the same bits as one collective a leaf.

    A leaf is sharded on the mesh axis it is replicated on, along its first dim that no other axis shards:
    ``(Replicate,)`` becomes ``(Shard(0),)``, and experts, ``(Replicate, Shard(0))`` on (edp, ep), become
    ``(Shard(1), Shard(0))``: they stay on their ep rank. A leaf without such a dim stays as it is, and its
    gradient is all-reduced.

    Parameters
    ----------
    optimizer : Optimizer
        What to run on the masters, e.g. ``chain(clip_by_global_norm(1.0), adamw(3e-4))``. It must update
        them in place and return them. It sees gradients that are summed, sharded and float32 (float64 for
        float64 parameters).
    reduce : {"step", "micro_batch"}
        When to reduce-scatter gradients. ``"step"``: once, in ``update``, after they were accumulated
        locally, which takes a buffer of each whole gradient. ``"micro_batch"``: each micro-batch's, as soon
        as it is complete, by the ``on_grad`` of the result: one collective for each leaf and micro-batch, and
        buffers of this rank's parts alone. Gradients that are summed already pass ``update`` either way;
        those that are not only with ``"step"``.
    bucket_bytes : int
        Most bytes of a bucket, counted over all ranks; a larger leaf travels alone. Up to two buckets exist
        at a time.
    mesh : DeviceMesh, optional
        All ranks that hold any parameter, those of all stages of a pipeline. ``None``: plain tensors and no
        collective, masters all the same.

    Returns
    -------
    Optimizer
        State: ``master``, a tree like the parameters, and ``inner``, the state of ``optimizer``; every leaf
        that belongs to a parameter is a DTensor of the parameter's global shape. The parameters are
        overwritten by every update: they are the masters, rounded.

    Raises
    ------
    ValueError
        At once for an unknown ``reduce`` or a negative ``bucket_bytes``; from ``init`` for parameters that
        share memory, are on ranks that ``mesh`` lacks or are replicated over two axes; from ``update`` for
        gradients that differ in names, shapes, or placements (``Partial`` where the parameter is replicated,
        or already the master's), or are not summed with ``reduce="micro_batch"``. All of them before any
        collective.
    TypeError
        From ``update`` for an ``optimizer`` that does not return the masters it was given.

    Examples
    --------
    >>> params = TensorDict({"w": torch.ones(2, dtype=torch.bfloat16)})
    >>> optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(1e-4, eps=0.0)))
    >>> state = optimizer.init(params)
    >>> grads = TensorDict({"w": torch.ones(2, dtype=torch.bfloat16)})
    >>> params, state = optimizer.update(grads, state, params)
    >>> state["master", "w"].allclose(torch.tensor(1 - 1e-4)), state["inner", "0", "skipped"].item()
    (True, 0)

    References
    ----------
    Rajbhandari et al., ZeRO, 2020. https://arxiv.org/abs/1910.02054
    """
    if reduce not in ("step", "micro_batch"):
        raise ValueError(f"shard_optimizer needs reduce='step' or 'micro_batch', got {reduce!r}")
    if bucket_bytes < 0:
        raise ValueError(f"shard_optimizer needs bucket_bytes >= 0, got {bucket_bytes}")
    if optimizer.on_grad is not None:
        raise ValueError("shard_optimizer needs an optimizer without an on_grad; wrap it only once")

    known: dict[tuple, Plan] = {}

    def plan_of(name: str, x: Tensor) -> Plan:
        key = (place(x), x.ndim, x.dtype)
        if key not in known:
            known[key] = _plan(name, x, mesh)
        return known[key]

    @torch.no_grad()
    def init(params: TensorDict) -> TensorDict:
        plans = {name: plan_of(name, p) for name, p in named(params).items()}
        check_apart("shard_optimizer", named(params))
        if empty := [name for name, p in named(params).items() if is_hollow(p)]:
            raise ValueError(
                f"shard_optimizer needs parameters with values for its masters, got hollow ones, {empty[0]} "
                "among them; call init before moekit.precision.hollow"
            )
        master = map_named(lambda name, p: plans[name].wrap(plans[name].part(held(p)), like=p), params)
        return TensorDict({"master": master, "inner": optimizer.init(master)})

    @ranged("optimizer")
    @torch.no_grad()
    def update(grads: TensorDict | Scaled, state: TensorDict, params: TensorDict):
        if isinstance(grads, Scaled):
            raise TypeError(
                "shard_optimizer needs plain gradients, got Scaled ones; put the clip inside: "
                "shard_optimizer(chain(clip_by_global_norm(...), ...))"
            )
        leaves = named(params)
        plans = {name: plan_of(name, p) for name, p in leaves.items()}
        given = matching_leaves("shard_optimizer", "gradients", grads, leaves)
        master = matching_leaves("shard_optimizer", "masters", state["master"], leaves)
        for name, plan in plans.items():
            plan.check_gradient(name, given[name])
            plan.check_master(name, master[name])
            if reduce == "micro_batch" and not plan.is_reduced(given[name]):
                raise ValueError(
                    "shard_optimizer(reduce='micro_batch') needs gradients that its on_grad has summed, got "
                    f"{describe_place(given[name])} for {name}; pass on_grad=optimizer.on_grad to accumulate"
                )

        shards: dict[str, Tensor] = {}
        todo = []
        for name, plan in plans.items():
            grad = held(given[name])
            if plan.is_reduced(given[name]):
                shards[name] = grad.to(plan.dtype)
            elif plan.whole:
                shards[name] = plan.all_reduce(grad.to(plan.dtype))
            else:
                todo.append(Parcel(name, plan, plan.dtype, grad, held(master[name])))
        for bucket, flat in _ahead(_buckets(todo, bucket_bytes), _reduce_scatter):
            shards.update(_unpack_shards(bucket, flat))
        del todo
        summed = map_named(lambda name, p: plans[name].wrap(shards.pop(name), like=p), params)
        updated, _ = optimizer.update(summed, state["inner"], state["master"])
        if updated is not state["master"]:
            raise TypeError(
                "shard_optimizer needs an optimizer that updates in place and ends in one that returns "
                f"parameters, got one that returns another {type(updated).__name__}; "
                "e.g. chain(clip_by_global_norm(...), adamw(...))"
            )
        del summed

        todo = []
        for name, plan in plans.items():
            if is_hollow(leaves[name]):
                continue  # made from the masters elsewhere
            if plan.whole:
                held(leaves[name]).copy_(held(master[name]))
            else:
                todo.append(Parcel(name, plan, leaves[name].dtype, held(leaves[name]), held(master[name])))
        gather(todo, bucket_bytes)
        return params, state

    @torch.no_grad()
    def on_grad(name: str, grad: Tensor) -> Tensor:
        plan = plan_of(name, grad)
        plan.check_gradient(name, grad)
        local = held(grad)
        if plan.is_reduced(grad):
            shard = local.to(plan.dtype)
        elif plan.whole:
            shard = plan.all_reduce(local.to(plan.dtype))
        else:  # waited for at its first use, so that backward goes on
            parcel = Parcel(name, plan, plan.dtype, local, local)
            shard = _unpack_shards([parcel], AsyncCollectiveTensor(_reduce_scatter([parcel])))[name]
        return plan.wrap(shard, like=grad)

    return Optimizer(init, update, on_grad if reduce == "micro_batch" else None)


class Plan(NamedTuple):
    """How leaves of one placement are reduced and sharded."""

    dtype: torch.dtype  # of masters and summed gradients
    partial: tuple[Placement, ...] = ()  # of a gradient before it is summed
    sharded: tuple[Placement, ...] = ()  # of a master
    mesh: DeviceMesh | None = None
    axis: int = 0  # mesh axis that is summed over
    n: int = 1  # its size
    rank: int = 0  # this rank's place on it
    whole: bool = True  # no dim is sharded over it
    dim: int = 0  # the dim that is

    def length(self, shape: torch.Size) -> int:
        """Return the length along `dim` of a shard, of all but the last ones; as DTensor and torch.chunk."""
        return -(-shape[self.dim] // self.n)

    def shard_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of a shard that is padded to full length."""
        return (*shape[: self.dim], self.length(shape), *shape[self.dim + 1 :])

    def trim(self, padded: Tensor, shape: torch.Size) -> Tensor:
        """Cut the padding off this rank's shard of a leaf of a shape."""
        length = self.length(shape)
        start = min(self.rank * length, shape[self.dim])
        rest = min(length, shape[self.dim] - start)
        return padded if rest == length else padded.narrow(self.dim, 0, rest)

    def part(self, x: Tensor) -> Tensor:
        """Return a copy of this rank's part of a leaf, in the masters' dtype."""
        if not self.whole:
            x = self.trim(self.split(x)[self.rank], x.shape)
        return x.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def split(self, x: Tensor) -> Tensor:
        """Return the shards of a leaf as (n, *shard): a view, or padded with zeros where they are uneven."""
        length = self.length(x.shape)
        if missing := self.n * length - x.shape[self.dim]:
            x = F.pad(x, (0, 0) * (x.ndim - 1 - self.dim) + (0, missing))
        return x.unflatten(self.dim, (self.n, length)).movedim(self.dim, 0)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.mesh is None else all_reduce(x, self.mesh, self.axis)

    def group(self) -> str:
        assert self.mesh is not None
        return self.mesh.get_group(self.axis).group_name

    def wrap(self, local: Tensor, *, like: Tensor) -> Tensor:
        return on_mesh(local, like=like, placements=self.sharded)

    def is_reduced(self, grad: Tensor) -> bool:
        return self.n == 1 or (isinstance(grad, DTensor) and grad.placements == self.sharded)

    def check_gradient(self, name: str, grad: Tensor) -> None:
        if place(grad) not in (self.at(self.partial), self.at(self.sharded)):
            raise ValueError(
                f"shard_optimizer needs a gradient of {name} that is {self.partial} (not summed) or "
                f"{self.sharded} (summed), on the parameter's mesh, got {describe_place(grad)}"
            )

    def check_master(self, name: str, master: Tensor) -> None:
        if place(master) != self.at(self.sharded) or master.dtype != self.dtype:
            raise ValueError(
                f"shard_optimizer needs the state that its init made for these parameters, {self.sharded} "
                f"{self.dtype} for {name}, got {master.dtype}, {describe_place(master)}"
            )

    def at(self, placements: tuple[Placement, ...]) -> tuple | None:
        return None if self.mesh is None else (self.mesh, placements)


def _plan(name: str, x: Tensor, mesh: DeviceMesh | None) -> Plan:
    """Make the plan of a parameter, or of its gradient."""
    if not x.is_floating_point():
        raise ValueError(f"shard_optimizer needs floating-point parameters, got {x.dtype} for {name}")
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not isinstance(x, DTensor):
        if mesh is not None:
            raise ValueError(
                f"shard_optimizer needs DTensors on a mesh, got a plain tensor for {name}; place the "
                "parameters with distribute or init_params(mesh=mesh), or pass mesh=None"
            )
        return Plan(dtype)
    if mesh is None or not ranks_of(x.device_mesh) <= ranks_of(mesh):
        raise ValueError(
            f"shard_optimizer needs a mesh with all ranks that hold {name}, which is {describe_place(x)}, "
            f"got {None if mesh is None else sorted(ranks_of(mesh))}"
        )
    on, placements = x.device_mesh, x.placements
    free = [dim for dim in range(x.ndim) if not any(p.is_shard(dim) for p in placements)]
    # Axes that hold copies, those of more than one rank first.
    copies = [i for i, p in enumerate(placements) if p.is_replicate() or p.is_partial()]
    copies.sort(key=lambda i: -on.size(i))
    if len(copies) > 1 and on.size(copies[1]) > 1:
        raise ValueError(
            f"shard_optimizer needs parameters that are replicated over one mesh axis at most, got {name}, "
            f"which is {describe_place(x)}; flatten the axes into one"
        )
    dims = dict(zip(copies, free, strict=False))
    sharded = tuple(Shard(dims[i]) if i in dims else p for i, p in enumerate(placements))
    sharded = tuple(Replicate() if p.is_partial() else p for p in sharded)
    partial = tuple(Partial() if i in copies else p for i, p in enumerate(placements))
    axis = copies[0] if copies else 0
    n = on.size(axis) if copies else 1
    where = {"whole": n == 1 or axis not in dims, "dim": dims.get(axis, 0)}
    return Plan(dtype, partial, sharded, on, axis, n, on.get_local_rank(axis), **where)


class Parcel(NamedTuple):
    """One leaf on its way: a gradient to be summed, or the shards of ranks to be gathered into the whole."""

    name: str
    plan: Plan
    dtype: torch.dtype  # it travels in
    full: Tensor  # the gradient, or the whole
    shard: Tensor  # this rank's


_Bucket = list[Parcel]


def gather(parcels: Iterable[Parcel], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Fill what is whole with the shards of all ranks, in buckets: one travels as the next is packed."""
    for bucket, flat in _ahead(_buckets(parcels, bucket_bytes), _all_gather):
        _unpack_params(bucket, flat)


def _buckets(parcels: Iterable[Parcel], limit: int) -> Iterator[_Bucket]:
    """Group parcels of one mesh axis and dtype, in an order that is the same on every rank."""
    filling: dict[tuple, tuple[_Bucket, int]] = {}
    for parcel in parcels:
        key = (parcel.plan.mesh, parcel.plan.axis, parcel.dtype)
        size = parcel.full.numel() * parcel.dtype.itemsize
        bucket, total = filling.pop(key, ([], 0))
        if bucket and total + size > limit:
            yield bucket
            bucket, total = [], 0
        bucket.append(parcel)
        filling[key] = (bucket, total + size)
    for bucket, _ in filling.values():
        yield bucket


def _ahead(
    buckets: Iterable[_Bucket], launch: Callable[[_Bucket], Tensor]
) -> Iterator[tuple[_Bucket, Tensor]]:
    """Launch a bucket before the one in front of it is waited for: packing hides behind transport."""
    before = None
    for bucket in buckets:
        launched = bucket, launch(bucket)
        if before:
            yield before[0], torch.ops._c10d_functional.wait_tensor(before[1])
        before = launched
        if in_turn(launched[1]):
            yield bucket, torch.ops._c10d_functional.wait_tensor(launched[1])
            before = None
    if before:
        yield before[0], torch.ops._c10d_functional.wait_tensor(before[1])


def _reduce_scatter(bucket: _Bucket) -> Tensor:
    plan, dtype = bucket[0].plan, bucket[0].dtype
    pieces = [parcel.plan.split(parcel.full) for parcel in bucket]
    if len(pieces) == 1 and pieces[0].dtype == dtype and pieces[0].is_contiguous():
        flat = pieces[0]  # a large leaf needs no copy
    else:
        sizes = [piece[0].numel() for piece in pieces]
        flat = pieces[0].new_empty((plan.n, sum(sizes)), dtype=dtype)
        for room, piece in zip(flat.split(sizes, 1), pieces, strict=True):
            room.unflatten(1, piece.shape[1:]).copy_(piece)
    return torch.ops._c10d_functional.reduce_scatter_tensor(flat.view(-1), "sum", plan.n, plan.group())


def _unpack_shards(bucket: _Bucket, flat: Tensor) -> dict[str, Tensor]:
    shapes = [parcel.plan.shard_shape(parcel.full.shape) for parcel in bucket]
    parts = flat.split([math.prod(shape) for shape in shapes]) if len(bucket) > 1 else [flat]
    return {
        parcel.name: parcel.plan.trim(part.view(shape), parcel.full.shape)
        for parcel, part, shape in zip(bucket, parts, shapes, strict=True)
    }


def _all_gather(bucket: _Bucket) -> Tensor:
    plan = bucket[0].plan
    shapes = [parcel.plan.shard_shape(parcel.full.shape) for parcel in bucket]
    sizes = [math.prod(shape) for shape in shapes]
    flat = bucket[0].full.new_empty(sum(sizes))
    for parcel, room, shape in zip(bucket, flat.split(sizes), shapes, strict=True):
        parcel.plan.trim(room.view(shape), parcel.full.shape).copy_(parcel.shard)
    return torch.ops._c10d_functional.all_gather_into_tensor(flat, plan.n, plan.group())


def _unpack_params(bucket: _Bucket, flat: Tensor) -> None:
    shapes = [parcel.plan.shard_shape(parcel.full.shape) for parcel in bucket]
    parts = flat.view(bucket[0].plan.n, -1).split([math.prod(shape) for shape in shapes], 1)
    for parcel, part, shape in zip(bucket, parts, shapes, strict=True):
        plan, param, pieces = parcel.plan, parcel.full, part.unflatten(1, shape)
        if param.shape[plan.dim] % plan.n == 0:
            plan.split(param).copy_(pieces)
        else:
            whole = pieces.movedim(0, plan.dim).flatten(plan.dim, plan.dim + 1)
            param.copy_(whole.narrow(plan.dim, 0, param.shape[plan.dim]))
