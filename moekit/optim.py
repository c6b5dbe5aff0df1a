"""Optimizers: pairs of functions over trees of parameters, in place, without reading the device."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moekit.mesh import all_reduce, describe_place, place, ranks_of
from moekit.tree import has_values, held, map_named, named, on_mesh

Schedule = Callable[[Tensor], Tensor]


class Optimizer(NamedTuple):
    """A pair of functions, after optax.

    Parameters
    ----------
    init : callable
        ``init(params) -> state``, a TensorDict.
    update : callable
        ``update(grads, state, params) -> (params, state)``: changes both in place, returns the same
        objects, and consumes ``grads``. A link that stands earlier in a :func:`chain` returns ``(grads,
        state)`` instead.
    on_grad : callable, optional
        ``on_grad(name, grad) -> grad``: what the optimizer wants done with a gradient of a micro-batch
        before it is accumulated, for :func:`moekit.accumulate`.
    """

    init: Callable[[TensorDict], TensorDict]
    update: Callable[[Any, TensorDict, TensorDict], tuple[Any, TensorDict]]
    on_grad: Callable[[str, Tensor], Tensor] | None = None


class Scaled(NamedTuple):
    """Gradients that stand for ``grads * scale``; a scale that is not finite asks to skip the step.

    The scale is float32, or float64 for float64 gradients.
    """

    grads: TensorDict
    scale: Float[Tensor, ""]


@torch.no_grad()
def unscale(grads: TensorDict | Scaled) -> TensorDict:
    """Return plain gradients, for a link that does not take :class:`Scaled`. Pure."""
    if not isinstance(grads, Scaled):
        return grads
    return map_named(lambda _, g: on_mesh(held(g) * grads.scale.to(g.dtype), like=g), grads.grads)


def chain(*links: Optimizer) -> Optimizer:
    """Compose links: the earlier ones map gradients to gradients, the last one updates the parameters.

    Parameters
    ----------
    *links : Optimizer
        At least one; at most one may have an ``on_grad``, which becomes the chain's. The last one must
        update the parameters in place and return them, e.g. :func:`adamw`; no other may.

    Returns
    -------
    Optimizer
        Its state is a TensorDict of the links' states under ``"0"``, ``"1"``, ....

    Raises
    ------
    TypeError
        For what is no optimizer; from ``update`` when the last link does not return the parameters that it
        was given, or an earlier one does.
    ValueError
        For several links with an ``on_grad``; from ``update`` for the state of another chain.

    Examples
    --------
    >>> import moekit as mk
    >>> optimizer = mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(3e-4, weight_decay=0.1))
    >>> params = TensorDict({"w": torch.ones(2)})
    >>> state = optimizer.init(params)
    >>> params, state = optimizer.update(TensorDict({"w": torch.ones(2)}), state, params)
    """
    if not links or not all(isinstance(link, Optimizer) for link in links):
        raise TypeError(f"chain needs one or more optimizers, got {[type(link).__name__ for link in links]}")
    hooks = [link.on_grad for link in links if link.on_grad is not None]
    if len(hooks) > 1:
        raise ValueError(f"chain needs at most one link with an on_grad, got {len(hooks)}")

    def init(params: TensorDict) -> TensorDict:
        return TensorDict({str(i): link.init(params) for i, link in enumerate(links)})

    def update(grads: TensorDict | Scaled, state: TensorDict, params: TensorDict):
        if len(state.keys()) != len(links):
            raise ValueError(f"chain needs the state of its {len(links)} links, got {sorted(state.keys())}")
        out: Any = grads
        for i, link in enumerate(links):
            out, _ = link.update(out, state[str(i)], params)
            last = i == len(links) - 1
            if last != (out is params):
                what = f"another {type(out).__name__}" if last else "the parameters"
                raise TypeError(
                    "chain needs its last link alone to update the parameters in place and return them, got "
                    f"{what} from link {i} of 0..{len(links) - 1}; e.g. chain(clip_by_global_norm(...), "
                    "adamw(...))"
                )
        return out, state

    return Optimizer(init, update, hooks[0] if hooks else None)


def clip_by_global_norm(max_norm: float | int, *, mesh: DeviceMesh | None = None) -> Optimizer:
    """Scale gradients so that their norm is at most ``max_norm``; skip the step when the norm is not finite.

    A link for :func:`chain`. Nothing is multiplied here: it hands on :class:`Scaled` gradients, and the
    kernel of :func:`adamw` scales, or skips, while it updates. Collective where gradients are sharded: one
    all-reduce.

    Parameters
    ----------
    max_norm : float
        Positive; ``inf`` only skips.
    mesh : DeviceMesh, optional
        As for :func:`global_norm`.

    Returns
    -------
    Optimizer
        State: ``norm``, 0-d float32, of the last gradients before clipping; ``skipped``, 0-d int64, the steps
        skipped so far.

    References
    ----------
    Pascanu et al., On the difficulty of training recurrent neural networks, 2013.
    https://arxiv.org/abs/1211.5063
    """
    if not max_norm > 0:
        raise ValueError(f"clip_by_global_norm needs max_norm > 0, got {max_norm}")

    @torch.no_grad()
    def init(params: TensorDict) -> TensorDict:
        device = held(next(iter(named(params).values()))).device
        zero = torch.zeros((), device=device)
        return TensorDict({"norm": zero, "skipped": zero.long()})

    @torch.no_grad()
    def update(grads: TensorDict, state: TensorDict, params: TensorDict):
        matching_leaves("clip_by_global_norm", "gradients", grads, named(params))
        norm = global_norm(grads, mesh=mesh)
        finite = norm.isfinite()
        state["norm"].copy_(norm)
        state["skipped"].add_(~finite)
        scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)  # as torch.nn.utils.clip_grad_norm_
        return Scaled(grads, torch.where(finite, scale, math.nan)), state

    return Optimizer(init, update)


def adamw(
    lr: float | int | Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.95,
    eps: float = 1e-8,
    weight_decay: float | int = 0.0,
    mask: Callable[[str, Tensor], bool] | None = None,
) -> Optimizer:
    """Adam with decoupled weight decay, by torch's fused kernel.

    Parameters
    ----------
    lr : float or callable
        Learning rate, or a schedule: a function of the number of updates made, a 0-d int64 tensor, that
        returns a 0-d float32 tensor.
    b1, b2 : float
        Decay of the averages of the gradient and of its square, in [0, 1).
    eps : float
        Added to the root of the average square.
    weight_decay : float
        Each update takes ``lr * weight_decay`` times the parameter away.
    mask : callable, optional
        ``mask(name, param)`` says whether a parameter decays; by default all do.

    Returns
    -------
    Optimizer
        State: ``step``, 0-d int64, the updates made; ``lr``, 0-d float32, the rate of the last one;
        ``exp_avg`` and ``exp_avg_sq``, trees like the parameters. A skipped step changes neither averages,
        ``step`` nor parameters.

    Raises
    ------
    ValueError
        At once for numbers out of range; from ``init`` for parameters that share memory or are not float32
        or float64 (wrap it in :func:`moekit.shard_optimizer`, which keeps float32 masters); from
        ``update`` for gradients that differ from the parameters in names, shapes or placements.

    References
    ----------
    Loshchilov and Hutter, Decoupled Weight Decay Regularization, 2019. https://arxiv.org/abs/1711.05101
    """
    if not callable(lr) and not 0 <= lr < math.inf:
        raise ValueError(f"adamw needs a finite lr >= 0 or a schedule, got {lr}")
    if not (0 <= b1 < 1 and 0 <= b2 < 1):
        raise ValueError(f"adamw needs b1 and b2 in [0, 1), got {b1=}, {b2=}")
    if not (0 <= eps < math.inf and 0 <= weight_decay < math.inf):
        raise ValueError(f"adamw needs finite eps >= 0 and weight_decay >= 0, got {eps=}, {weight_decay=}")

    @torch.no_grad()
    def init(params: TensorDict) -> TensorDict:
        leaves = named(params)
        check_apart("adamw", leaves)
        for name, p in leaves.items():
            if p.dtype not in (torch.float32, torch.float64) or not held(p).is_contiguous():
                raise ValueError(
                    f"adamw needs contiguous float32 or float64 parameters, got {p.dtype} of strides "
                    f"{held(p).stride()} for {name}; shard_optimizer(adamw(...)) keeps float32 masters of any"
                )
        device = held(next(iter(leaves.values()))).device
        return TensorDict(
            {
                "step": torch.zeros((), dtype=torch.int64, device=device),
                "lr": torch.zeros((), device=device),
                "exp_avg": map_named(lambda _, p: on_mesh(torch.zeros_like(held(p)), like=p), params),
                "exp_avg_sq": map_named(lambda _, p: on_mesh(torch.zeros_like(held(p)), like=p), params),
            }
        )

    @torch.no_grad()
    def update(grads: TensorDict | Scaled, state: TensorDict, params: TensorDict):
        scale = None
        if isinstance(grads, Scaled):
            grads, scale = grads
        leaves = named(params)
        g = _placed_leaves("adamw", "gradients", grads, leaves)
        m = _placed_leaves("adamw", "moments", state["exp_avg"], leaves)
        v = named(state["exp_avg_sq"])
        groups: dict[tuple[torch.dtype, bool], list[tuple[Tensor, ...]]] = {}
        for name, p in leaves.items():
            if not held(p).numel():  # a rank that holds no row of it
                continue
            decays = mask is None or bool(mask(name, p))
            # The kernel walks all four in memory order.
            leaf = held(p), held(g[name]).to(p.dtype).contiguous(), held(m[name]), held(v[name])
            groups.setdefault((p.dtype, decays), []).append(leaf)
        step = state["step"]
        skip = None if scale is None else ~scale.isfinite()
        rate = lr(step) if callable(lr) else lr
        state["lr"].fill_(rate)
        now = (step + 1).float()
        for (dtype, decays), group in groups.items():
            ps, gs, ms, vs = (list(column) for column in zip(*group, strict=True))
            divisor = None if scale is None else scale.reciprocal().float()
            if scale is not None and dtype == torch.float64:  # the kernel's divisor is float32
                torch._foreach_mul_(gs, scale)
                divisor = None
            torch._fused_adamw_(
                *(ps, gs, ms, vs, [], [now] * len(group)),
                **dict(lr=rate, beta1=b1, beta2=b2, eps=eps, weight_decay=weight_decay if decays else 0.0),
                **dict(amsgrad=False, maximize=False),
                grad_scale=divisor,
                found_inf=None if skip is None else skip.float(),
            )
        step.add_(1 if skip is None else ~skip)
        return params, state

    return Optimizer(init, update)


def warmup_cosine(
    peak: float | int, *, warmup_steps: int, total_steps: int, floor: float | int = 0.0
) -> Schedule:
    """Return a learning rate that rises to ``peak`` in equal steps, then falls along half a cosine.

    Parameters
    ----------
    peak : float
        Reached by update number ``warmup_steps`` (counted from 1) and kept by the next one.
    warmup_steps : int
        0 starts at the peak.
    total_steps : int
        After so many updates the rate is ``floor``, for good.
    floor : float
        A learning rate, at most ``peak``.

    Returns
    -------
    callable
        Pure: the number of updates made, a 0-d tensor, to a 0-d float32 tensor on the same device.

    Raises
    ------
    ValueError
        Unless ``0 <= warmup_steps < total_steps`` and ``0 <= floor <= peak``.

    References
    ----------
    Loshchilov and Hutter, SGDR, 2017. https://arxiv.org/abs/1608.03983
    """
    falling = lambda done: 0.5 + 0.5 * torch.cos(math.pi * done)  # noqa: E731
    return _warmup("warmup_cosine", falling, peak, warmup_steps, total_steps, floor)


def warmup_linear(
    peak: float | int, *, warmup_steps: int, total_steps: int, floor: float | int = 0.0
) -> Schedule:
    """Return a learning rate that rises to ``peak`` in equal steps, then falls in equal steps to ``floor``.

    Parameters, result and errors are those of :func:`warmup_cosine`.
    """
    return _warmup("warmup_linear", lambda done: 1 - done, peak, warmup_steps, total_steps, floor)


def _warmup(who: str, falling: Schedule, peak, warmup_steps, total_steps, floor) -> Schedule:
    if not 0 <= warmup_steps < total_steps:
        raise ValueError(f"{who} needs 0 <= warmup_steps < total_steps, got {warmup_steps=}, {total_steps=}")
    if not 0 <= floor <= peak < math.inf:
        raise ValueError(f"{who} needs 0 <= floor <= a finite peak, got {floor=}, {peak=}")

    def schedule(step: Int[Tensor, ""] | Float[Tensor, ""]) -> Float[Tensor, ""]:
        done = ((step - warmup_steps).float() / (total_steps - warmup_steps)).clamp(0, 1)
        rise = (step + 1).float() * (peak / max(warmup_steps, 1))
        return torch.where(step < warmup_steps, rise, floor + (peak - floor) * falling(done))

    return schedule


def figures(state: TensorDict) -> dict[str, Tensor]:
    """Return what a state says of the last update: ``grad_norm``, ``skipped`` and ``lr``, those that it has.

    The state's own 0-d tensors, which the next update overwrites: of :func:`clip_by_global_norm` and
    :func:`adamw`, in a :func:`chain` and under :func:`moekit.shard_optimizer`. Waits for nothing.
    """
    names = {"norm": "grad_norm", "skipped": "skipped", "lr": "lr"}
    found: dict[str, Tensor] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            found |= {names[key]: value} if key in names else {}
        elif isinstance(value, TensorDict) and (key == "inner" or key.isdigit()):  # of a link
            found |= figures(value)
    return found


@torch.no_grad()
def global_norm(grads: TensorDict, *, mesh: DeviceMesh | None = None) -> Float[Tensor, ""]:
    """Return the 2-norm of all gradients of all ranks, each element counted once; the same on every rank.

    Collective where gradients are DTensors: one all-reduce for a ``mesh`` of one axis (else one an axis).
    The squares of a leaf are divided by the number of copies of it in its mesh, so leaves of different
    meshes mix.

    Parameters
    ----------
    grads : TensorDict
        Plain tensors, or DTensors that are summed (``Shard`` or ``Replicate``), of any floating dtype.
    mesh : DeviceMesh, optional
        All ranks that hold any leaf, e.g. those of all pipeline stages. By default the leaves' own mesh
        with the fewest axes; then all leaves must lie on the same ranks.

    Returns
    -------
    Tensor
        float32 (float64 for float64 gradients), on the gradients' device.

    Raises
    ------
    ValueError
        For a ``Partial`` leaf, for plain leaves on a mesh, and for leaves on ranks that the mesh lacks.
    """
    leaves = named(grads)
    meshes: dict[DeviceMesh, str] = {}
    for name, g in leaves.items():
        if isinstance(g, DTensor):
            if any(p.is_partial() for p in g.placements):
                raise ValueError(
                    f"global_norm needs summed gradients, got {g.placements} for {name}; sum them with "
                    "data_parallel, or put the clip inside shard_optimizer: shard_optimizer(chain(clip, ...))"
                )
            meshes.setdefault(g.device_mesh, name)
    over = mesh
    if meshes or mesh is not None:
        if plain := [name for name, g in leaves.items() if not isinstance(g, DTensor)]:
            raise ValueError(
                f"global_norm needs DTensors on a mesh, got plain tensors for {', '.join(plain)}"
            )
        over = min(meshes, key=lambda m: m.ndim) if mesh is None else mesh
        everyone = ranks_of(over)
        for other, name in meshes.items():
            if not (ranks_of(other) == everyone or (mesh is not None and ranks_of(other) < everyone)):
                raise ValueError(
                    f"global_norm needs a mesh of all ranks that hold gradients, got ranks "
                    f"{sorted(everyone)} but {sorted(ranks_of(other))} for {name}; pass mesh="
                )
    wide = torch.float64 if any(g.dtype == torch.float64 for g in leaves.values()) else torch.float32
    parts = [(held(g), 1 / _copies(g)) for g in leaves.values() if held(g).numel()]
    total = torch.zeros((), dtype=wide, device=held(next(iter(leaves.values()))).device)
    if parts:
        xs, once = zip(*parts, strict=True)
        norms = torch._foreach_norm(xs, 2, dtype=wide)
        squares = torch._foreach_mul(norms, norms)
        torch._foreach_mul_(squares, once)
        total = torch.stack(squares).sum()
    if over is not None:
        for axis in range(over.ndim):
            total = all_reduce(total, over, axis)
    return total.sqrt()


def _copies(g: Tensor) -> int:
    """Return on how many ranks of its mesh each element of a leaf is."""
    if not isinstance(g, DTensor):
        return 1
    return math.prod(g.device_mesh.size(i) for i, p in enumerate(g.placements) if p.is_replicate())


def _placed_leaves(who: str, what: str, tree: TensorDict, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a tree's leaves; raise unless they match these, also in mesh and placements."""
    given = matching_leaves(who, what, tree, leaves)
    for name, p in leaves.items():
        if place(given[name]) != place(p):
            raise ValueError(
                f"{who} needs {what} placed like the parameters, got {describe_place(given[name])} for "
                f"{name}, which is {describe_place(p)}"
            )
    return given


def check_apart(who: str, leaves: dict[str, Tensor]) -> None:
    """Raise ``ValueError`` for two names of memory that begins at one place: each would update it."""
    first: dict[int, str] = {}
    for name, p in leaves.items():
        if not has_values(held(p)) or not held(p).numel():
            continue
        if (other := first.setdefault(held(p).data_ptr(), name)) != name:
            raise ValueError(
                f"{who} needs parameters with memory of their own, got one for {other} and {name}; keep one "
                "of them, and let the loss read it twice, as a model with tied_head=True does"
            )


def matching_leaves(who: str, what: str, tree: TensorDict, leaves: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a tree's leaves by name; raise unless they have exactly the names and the shapes of these."""
    if not isinstance(tree, TensorDict):
        raise TypeError(f"{who} needs a TensorDict of {what}, got {type(tree).__name__}")
    given = named(tree)
    if given.keys() != leaves.keys():
        raise ValueError(
            f"{who} needs {what} for exactly the parameters; missing: "
            f"{sorted(leaves.keys() - given.keys())}, not a parameter: {sorted(given.keys() - leaves.keys())}"
        )
    for name, p in leaves.items():
        if given[name].shape != p.shape:
            raise ValueError(
                f"{who} needs {what} of the parameters' shapes, got {tuple(given[name].shape)} for {name}, "
                f"which has {tuple(p.shape)}"
            )
    return given
