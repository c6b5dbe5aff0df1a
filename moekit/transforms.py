"""Transforms: each takes a function and returns a function of the same shape."""

import functools
from collections.abc import Callable, Container, Iterable
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map, tree_unflatten
from torch.utils.checkpoint import checkpoint

from moekit.batch import split_for
from moekit.kernels.add import add_
from moekit.mesh import gradient_placements, sum_over_ranks
from moekit.profiling import ranged
from moekit.tree import add_up, at_least_float32, held, in_turn, map_named, named, nested, on_mesh

OnGrad = Callable[[str, Tensor], Tensor | None]


def value_and_grad(loss_fn: Callable, *, has_aux: bool = False) -> Callable:
    """Return a function that gives a loss and its gradients.

    The gradients are those of a sum of shares: on a mesh they are DTensors whose placements say what is still
    to be summed (``Partial``). Nothing is written to ``.grad`` of the caller's parameters.

    Parameters
    ----------
    loss_fn : callable
        ``loss_fn(params, *args, **kwargs)`` returns a 0-d loss, or ``(loss, aux)`` with ``has_aux``. It reads
        parameters through :func:`moekit.local`.
    has_aux : bool
        Whether the loss comes with a tree of tensors that are not differentiated.

    Returns
    -------
    callable
        ``run(params, *args, on_grad=None, grad_into=None, **kwargs) -> (loss, grads)`` or ``((loss, aux),
        grads)``, grads a TensorDict like ``params``. ``on_grad(name, grad)`` runs *during* backward, once a
        parameter's gradient is complete; what it returns takes the gradient's place in ``grads``, and
        ``None`` leaves it out. ``grad_into`` goes to ``loss_fn`` where given: buffers to which its backward
        adds gradients itself, which are then left out of ``grads``.

    Raises
    ------
    ValueError
        When the loss is not a 0-d tensor, a parameter is reached by no gradient (each is named), or one on a
        mesh was not read through :func:`moekit.local`.
    TypeError
        When a parameter is not of a floating-point dtype.
    """

    def run(
        params: TensorDict,
        *args: Any,
        on_grad: OnGrad | None = None,
        grad_into: TensorDict | None = None,
        **kwargs: Any,
    ):
        straight: dict[str, Tensor] = {}
        if grad_into is not None:
            straight, kwargs["grad_into"] = named(grad_into), grad_into
        grads: dict[str, Tensor | None] = {}

        def ready(name: str, grad: Tensor | None) -> None:
            if grad is not None:
                grads[name] = grad if on_grad is None else on_grad(name, grad)
            elif name in straight:  # it has gone into its buffer
                grads[name] = None

        fresh = differentiable("value_and_grad", params, ready)
        leaves = named(fresh)
        with torch.enable_grad():
            out = loss_fn(fresh, *args, **kwargs)
            if has_aux and not (isinstance(out, tuple) and len(out) == 2):
                raise ValueError(
                    "value_and_grad(has_aux=True) needs loss_fn to return (loss, aux), "
                    f"got {type(out).__name__}"
                )
            loss, aux = out if has_aux else (out, None)
        if not isinstance(loss, Tensor) or loss.ndim:
            what = tuple(loss.shape) if isinstance(loss, Tensor) else type(loss).__name__
            raise ValueError(
                f"value_and_grad needs loss_fn to return a 0-d tensor, got {what}; "
                "for (loss, aux) pass has_aux=True"
            )
        if loss.requires_grad:
            torch.autograd.backward(loss, inputs=list(leaves.values()))
        check_reached("value_and_grad", leaves, grads)
        tree = nested({name: grads[name] for name in leaves if grads[name] is not None})
        loss = loss.detach()
        if has_aux:
            return (loss, tree_map(lambda x: x.detach() if isinstance(x, Tensor) else x, aux)), tree
        return loss, tree

    return run


def accumulate(
    grad_fn: Callable,
    n_microbatches: int,
    *,
    on_grad: OnGrad | None = None,
    straight: Callable[[str], bool] | None = None,
) -> Callable:
    """Return a function that runs ``grad_fn`` on ``n_microbatches`` slices of its batch and sums what comes.

    Losses are shares of the global batch's, so nothing is divided. Gradients are added during backward to
    float32 buffers (float64 for float64), so a micro-batch's own gradients never all exist at once.

    Parameters
    ----------
    grad_fn : callable
        Made by :func:`value_and_grad`.
    n_microbatches : int
        Must divide the leading dim of every tensor of the batch; 0-d tensors are shared.
    on_grad : callable, optional
        ``on_grad(name, grad)`` returns what is added in place of a micro-batch's gradient, e.g.
        ``optimizer.on_grad`` of ``shard_optimizer(reduce="micro_batch")``, which reduce-scatters it. Each
        result is added only after the next gradient's call, so that its collective runs during backward.
    straight : callable, optional
        ``straight(name)`` says of which parameters the loss adds the gradients to the float32 buffers itself
        (gradient accumulation fusion). The loss gets these buffers as ``grad_into``. For
        :func:`moekit.next_token_loss` it is :func:`moekit.model.is_expert`: the experts' kernels add before
        they round. Where no parameter is chosen, as of frozen experts that are not in ``params``, the loss
        gets no ``grad_into``. Not together with ``on_grad``.

    Returns
    -------
    callable
        ``run(params, batch, into=None, **kwargs)``, which returns what ``grad_fn`` does. ``into`` is a
        TensorDict of buffers that the caller owns, as an earlier call returned it; it is overwritten and
        returned.

    Raises
    ------
    ValueError
        When ``n_microbatches`` is below 1 or does not divide, or a buffer of ``into`` is of no parameter or
        has another shape, dtype or placement than its gradient's sum, or micro-batches' aux differ in names
        or shapes.
    TypeError
        When a leaf of aux is no tensor, or the loss takes no ``grad_into`` with ``straight``.
    """
    if n_microbatches < 1:
        raise ValueError(f"accumulate needs n_microbatches >= 1, got {n_microbatches}")
    if straight is not None and on_grad is not None:
        raise ValueError("accumulate needs no on_grad with straight, which it would not see; leave one out")

    def run(params: TensorDict, batch: Any, *, into: TensorDict | None = None, **kwargs: Any):
        sums = GradientSums("accumulate", params, on_grad, into)
        if straight is not None:
            chosen = {name: p for name, p in named(params).items() if straight(name)}
            if chosen:
                kwargs["grad_into"] = sums.buffers(chosen)
        total = None
        for part in split_for("accumulate", "n_microbatches", batch, n_microbatches):
            try:
                value, _ = grad_fn(params, part, on_grad=sums.add, **kwargs)
            except TypeError as error:
                if "grad_into" in kwargs and "unexpected keyword argument 'grad_into'" in str(error):
                    raise TypeError(
                        "accumulate needs a loss that takes grad_into with straight, which gives it the "
                        f"buffers of what straight chooses, got {error}; take it, or leave straight out"
                    ) from error
                raise
            sums.land()
            total = add_up("accumulate", total, value)
        assert total is not None  # there is a micro-batch
        return tree_unflatten(*total), sums.tree()

    return run


def data_parallel(grad_fn: Callable, *, mesh: DeviceMesh | None = None) -> Callable:
    """Return a function whose loss, aux and gradients are summed over the ranks that share a batch.

    For use without :func:`moekit.shard_optimizer`, which reduces gradients itself.

    Parameters
    ----------
    grad_fn : callable
        Made by :func:`value_and_grad` or :func:`accumulate`.
    mesh : DeviceMesh, optional
        Axes (edp, ep); ``None`` returns ``grad_fn``.

    Returns
    -------
    callable
        Of the shape of ``grad_fn``; gradients that were ``Partial`` on an axis are ``Replicate``, and summed
        and returned in float32 (float64 for float64), also those of bfloat16 parameters. Collective.
    """
    if mesh is None:
        return grad_fn

    def reduce(name: str, grad: Tensor) -> Tensor:
        if not isinstance(grad, DTensor):
            raise ValueError(
                f"data_parallel needs DTensor gradients on a mesh, got a plain one for {name}; "
                "place the parameters with moekit.mesh.distribute or init_params(mesh=mesh)"
            )
        summed = [Replicate() if p.is_partial() else p for p in grad.placements]
        wide = at_least_float32(grad)
        assert isinstance(wide, DTensor)  # as grad is
        return wide.redistribute(placements=summed)

    def run(params: TensorDict, *args: Any, **kwargs: Any):
        value, grads = grad_fn(params, *args, **kwargs)
        if isinstance(grads, TensorDict) and grads.is_empty():
            raise ValueError(
                "data_parallel needs gradients, got none, as inside of accumulate, which takes them during "
                "backward; write data_parallel(accumulate(grad_fn, n), mesh=mesh)"
            )
        return sum_over_ranks(value, mesh=mesh), map_named(reduce, grads)

    return run


def remat(block: Callable, recompute: str | Iterable[str] = "block") -> Callable:
    """Return a block that recomputes in its backward what it does not keep.

    Parameters
    ----------
    block : callable
        Any function for ``"none"`` and ``"block"``. For a list, one that takes ``wrap``, as
        :func:`moekit.model.transformer_block` does: ``wrap(name, fn)`` is called on each part that has a
        name.
    recompute : {"none", "block"} or iterable of str
        Nothing, the whole block, or the parts to recompute, e.g. ``("attention", "ffn")``.

    Returns
    -------
    callable
        Of the same shape, giving the same results. A block that draws from torch's generators, as dropout
        does, draws the same again, but not in a step that is captured as a CUDA graph.

    Raises
    ------
    ValueError
        For a string that is neither ``"none"`` nor ``"block"``, and, when called, for a name that no part of
        the block has.

    References
    ----------
    Chen et al., Training Deep Nets with Sublinear Memory Cost, 2016. https://arxiv.org/abs/1604.06174
    """
    if recompute == "none":
        return block
    if recompute == "block":
        return _checkpointed(block)
    if isinstance(recompute, str):
        raise ValueError(f"remat needs 'none', 'block' or a list of parts, got {recompute!r}")
    names = frozenset(recompute)

    @functools.wraps(block)
    def run(*args: Any, **kwargs: Any):
        seen = set()

        def wrap(name: str, fn: Callable) -> Callable:
            seen.add(name)
            part = _checkpointed(fn) if name in names else fn

            def run_part(*args: Any, **kwargs: Any):
                if unknown := names - seen:  # a block names its parts before it runs the first
                    raise ValueError(f"remat needs parts of the block, {sorted(seen)}, got {sorted(unknown)}")
                return part(*args, **kwargs)

            return run_part

        return block(*args, wrap=wrap, **kwargs)

    return run


def _checkpointed(fn: Callable) -> Callable:
    @functools.wraps(fn)
    def run(*args: Any, **kwargs: Any):
        # The state of generators cannot be read while a graph is captured.
        eager = not torch.compiler.is_compiling() and torch.cuda.is_available()
        captured = eager and torch.cuda.is_current_stream_capturing()
        return checkpoint(
            functools.partial(fn, **kwargs), *args, use_reentrant=False, preserve_rng_state=not captured
        )

    return run


def differentiable(who: str, params: TensorDict, ready: Callable[[str, Tensor | None], Any]) -> TensorDict:
    """Return aliases of parameters to differentiate; ``ready(name, grad)`` is called with each gradient.

    Called during backward, as soon as a gradient is complete, and with None where a function has returned
    none. The caller's tensors get no ``.grad`` and no hook. No two gradients share memory, so each may be
    added to: of ``a + b``, autograd gives two DTensors, or two leaves that were viewed, one tensor.
    """
    given: set[StorageWeakRef] = set()

    def own(grad: Tensor) -> Tensor:
        memory = StorageWeakRef(held(grad).untyped_storage())
        if memory in given:
            return on_mesh(held(grad).clone(), like=grad)
        given.add(memory)
        return grad

    def hand_over(name: str, leaf: Tensor) -> None:
        grad, leaf.grad = leaf.grad, None
        if isinstance(leaf, DTensor) and isinstance(grad, DTensor):
            if list(grad.placements) != (needs := gradient_placements(leaf)):
                raise ValueError(
                    f"{who} needs gradients labelled as what is still to be summed, {needs} for {name}, got "
                    f"{grad.placements}; read the parameter through moekit.local, not to_local or full_tensor"
                )
        ready(name, None if grad is None else own(grad))

    def fresh(name: str, p: Tensor) -> Tensor:
        if not p.is_floating_point():
            raise TypeError(f"{who} needs floating-point parameters, got {p.dtype} for {name}")
        leaf = p.detach().requires_grad_()
        leaf.register_hook(functools.partial(_strided_like, p))
        leaf.register_post_accumulate_grad_hook(functools.partial(hand_over, name))
        return leaf

    return map_named(fresh, params)


def check_reached(who: str, params: Iterable[str], reached: Container[str]) -> None:
    """Raise for parameters that no gradient has reached."""
    if missing := [name for name in params if name not in reached]:
        raise ValueError(f"{who} needs every parameter in the loss, no gradient reached {', '.join(missing)}")


class GradientSums:
    """Gradients of micro-batches, added during backward to float32 buffers (float64 for float64)."""

    def __init__(self, who: str, params: TensorDict, on_grad: OnGrad | None, into: TensorDict | None):
        self.who, self.names, self.on_grad = who, list(named(params)), on_grad
        self.reached: set[str] = set()
        self._sums: dict[str, Tensor] = {}
        self._buffers: dict[str, Any] = {} if into is None else named(into)
        self._in_flight: list[tuple[str, Tensor]] = []  # at most one
        if unknown := self._buffers.keys() - set(self.names):
            raise ValueError(f"{who} needs buffers of parameters, got {sorted(unknown)} in into")

    @ranged("gradients")
    def add(self, name: str, grad: Tensor | None) -> None:
        """Add what ``on_grad`` makes of a gradient, one call later, so that its collective goes on."""
        if grad is None:
            return None
        self.reached.add(name)
        if self.on_grad is None:
            return self._add(name, grad)
        new = self.on_grad(name, grad)
        self.land()  # the one before, now that this one's collective is on its way
        if new is not None:
            self._in_flight.append((name, new))
            if in_turn(new):
                self.land()

    def buffers(self, params: dict[str, Tensor]) -> TensorDict:
        """Return zeroed buffers for the gradients that the loss adds itself."""
        for name, p in params.items():
            grad = on_mesh(held(p).detach(), like=p, placements=gradient_placements(p))
            if name in self._buffers:
                self._sums[name] = self._checked_buffer(name, grad)
                held(self._sums[name]).zero_()
            else:
                wide = torch.promote_types(p.dtype, torch.float32)
                zeros = held(p).new_zeros(held(p).shape, dtype=wide)
                self._sums[name] = on_mesh(zeros, like=p, placements=gradient_placements(p))
        return nested({name: self._sums[name] for name in params})

    @ranged("gradients")
    def land(self) -> None:
        """Add what is in flight."""
        while self._in_flight:
            self._add(*self._in_flight.pop())

    def tree(self) -> TensorDict:
        """Return the sums, in the order of the parameters."""
        self.land()
        return nested({name: self._sums[name] for name in self.names if name in self._sums})

    def _add(self, name: str, new: Tensor) -> None:
        if name in self._sums:
            add_(held(self._sums[name]), held(new), first=False)
        elif name in self._buffers:
            self._sums[name] = self._checked_buffer(name, new)
            add_(held(self._sums[name]), held(new), first=True)
        else:
            self._sums[name] = at_least_float32(new)

    def _checked_buffer(self, name: str, grad: Tensor) -> Tensor:
        buffer, dtype = self._buffers[name], torch.promote_types(grad.dtype, torch.float32)
        if buffer.dtype != dtype or held(buffer).shape != held(grad).shape:
            raise ValueError(
                f"{self.who} needs a {dtype} buffer {tuple(grad.shape)} for {name}, "
                f"got {buffer.dtype} {tuple(buffer.shape)}; pass what an earlier call returned"
            )
        here, there = (x.placements if isinstance(x, DTensor) else None for x in (buffer, grad))
        if here != there:
            raise ValueError(
                f"{self.who} needs a buffer placed {there} as the gradient of {name}, got {here}; "
                "pass what an earlier call returned, before data_parallel"
            )
        return buffer


def _strided_like(p: Tensor, grad: Tensor | None) -> Tensor | None:
    """Lay a gradient out as its parameter: torch 2.11 copies others, and sums what is Partial on the way."""
    if not isinstance(grad, DTensor) or grad.stride() == p.stride():
        return grad
    laid_out = torch.empty_like(held(p), dtype=grad.dtype).copy_(held(grad))
    return on_mesh(laid_out, like=p, placements=grad.placements)
