"""An optimizer whose state is spread over the ranks that hold the same parameters."""

from typing import NamedTuple

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from moekit._buckets import BUCKET_BYTES, Parcel, Shards, gather, scatter_sum, scatter_sums
from moekit.mesh import all_reduce, describe_place, place, ranks_of
from moekit.optim import Optimizer, Scaled, check_apart, matching_leaves
from moekit.profiling import ranged
from moekit.tree import held, is_hollow, map_named, named, on_mesh


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

    known: dict[tuple, _Plan] = {}

    def plan_of(name: str, x: Tensor) -> _Plan:
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
                todo.append(Parcel(name, plan.shards, plan.dtype, grad, held(master[name])))
        shards |= scatter_sums(todo, bucket_bytes)
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
                todo.append(
                    Parcel(name, plan.shards, leaves[name].dtype, held(leaves[name]), held(master[name]))
                )
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
            shard = scatter_sum(Parcel(name, plan.shards, plan.dtype, local, local))
        return plan.wrap(shard, like=grad)

    return Optimizer(init, update, on_grad if reduce == "micro_batch" else None)


class _Plan(NamedTuple):
    """How leaves of one placement are reduced and sharded."""

    dtype: torch.dtype  # of masters and summed gradients
    partial: tuple[Placement, ...] = ()  # of a gradient before it is summed
    sharded: tuple[Placement, ...] = ()  # of a master
    shards: Shards = Shards()  # over the ranks that are summed over
    whole: bool = True  # no dim is sharded over them

    def part(self, x: Tensor) -> Tensor:
        """Return a copy of this rank's part of a leaf, in the masters' dtype."""
        if not self.whole:
            x = self.shards.trim(self.shards.split(x)[self.shards.rank], x.shape)
        return x.detach().to(self.dtype, copy=True, memory_format=torch.contiguous_format)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.shards.mesh is None else all_reduce(x, self.shards.mesh, self.shards.axis)

    def wrap(self, local: Tensor, *, like: Tensor) -> Tensor:
        return on_mesh(local, like=like, placements=self.sharded)

    def is_reduced(self, grad: Tensor) -> bool:
        return self.shards.n == 1 or (isinstance(grad, DTensor) and grad.placements == self.sharded)

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
        return None if self.shards.mesh is None else (self.shards.mesh, placements)


def _plan(name: str, x: Tensor, mesh: DeviceMesh | None) -> _Plan:
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
        return _Plan(dtype)
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
    shards = Shards(on, axis, n, on.get_local_rank(axis), dims.get(axis, 0))
    return _Plan(dtype, partial, sharded, shards, whole=n == 1 or axis not in dims)
