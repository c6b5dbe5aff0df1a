"""Dense layers with products of eight-bit numbers.

Axes: n tokens, K and N features, d of the model, h hidden.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit._exchange import Arrived
from moekit._expert_passes import ExpertProducts, Experts
from moekit._rounded import Rounded, Weights
from moekit.kernels import Products
from moekit.kernels.quantize import Format, Quantized, dequantize, quantize
from moekit.kernels.scaled_mm import scaled_mm
from moekit.tree import check_not_hollow


def linear(
    who: str,
    role: str,
    name: str,
    x: Float[Tensor, "*n K"],
    w: Float[Tensor, "K N"],
    low: Rounded,
    kernels: str,
) -> Float[Tensor, "*n N"]:
    """Return ``x @ w``, of operands in the format that a policy has for this role. Differentiable, once."""
    _check(who, x, **{name: w})
    plan = ExpertProducts.of(who, low.policy, role, _dense(kernels), x)
    if plan.forward is None:
        check_not_hollow(who, **{name: w})
        return x @ w
    rows = x.reshape(-1, x.shape[-1])
    weights = Weights.of(who, name, w, low, plan.forward, plan.input_grad)
    tokens = rounded_tokens(who, low, x, plan.forward)
    if tokens is None:
        tokens = quantize(rows, plan.forward, kernels=kernels)
    return _LowLinear.apply(rows, w, weights, tokens, plan).view(*x.shape[:-1], w.shape[-1])


class _LowLinear(torch.autograd.Function):
    """Keeps its input, as it is or in a format."""

    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, w, weights, tokens, plan):
        kept = x, None
        if plan.saved is not None:
            same = plan.saved == plan.forward
            kept = tokens if same else quantize(x, plan.saved, kernels=plan.plain.elementwise)
        ctx.save_for_backward(*kept, *weights.input_grad)
        ctx.plan = plan
        return scaled_mm(tokens, weights.forward, dtype=x.dtype, kernels=plan.scaled)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, scales, *weights = ctx.saved_tensors
        needs_x, needs_w, *_ = ctx.needs_input_grad
        plan, grad_x, grad_w = ctx.plan, None, None
        if needs_x:
            low = quantize(grad, plan.input_grad, kernels=plan.plain.elementwise)
            grad_x = scaled_mm(low, Quantized(*weights), dtype=grad.dtype, kernels=plan.scaled)
        if needs_w:
            if scales is not None:
                x = dequantize(Quantized(x, scales)).to(grad.dtype)
            grad_w = plan.grad_of_weights(x, grad, _all_rows(x))[0]
        return grad_x, grad_w, None, None, None


def low_feed_forward(
    x: Float[Tensor, "*n d"],
    gate_up: Float[Tensor, "d h2"],
    down: Float[Tensor, "h d"],
    low: Rounded,
    kernels: str,
) -> Float[Tensor, "*n d"] | None:
    """Return ``swiglu(x @ gate_up) @ down``, of one expert with all tokens; None for a wide policy."""
    who = "feed_forward"
    _check(who, x, gate_up=gate_up)
    plan = ExpertProducts.of(who, low.policy, who, _dense(kernels), x)
    if plan.forward is None:
        return None
    rows = x.reshape(-1, x.shape[-1])
    weights = [
        Weights.of(who, name, w, low, plan.forward, plan.input_grad).of_one_expert()
        for name, w in (("gate_up", gate_up), ("down", down))
    ]
    tokens = rounded_tokens(who, low, x, plan.forward)
    args = (rows, None, gate_up[None], down[None], _all_rows(rows), None, None, weights, tokens, plan)
    return Experts.apply(*args, (None, None), Arrived(kernels)).view(x.shape)


def _check(who: str, x: Tensor, **weights: Tensor) -> None:
    """Raise ``ValueError`` for tokens of another width or dtype than weights take; autocast converts them."""
    for name, w in weights.items():
        if x.shape[-1:] != w.shape[:1]:
            raise ValueError(
                f"{who} needs x (*n, {w.shape[0]}) for {name} {tuple(w.shape)}, got {tuple(x.shape)}"
            )
        device = "cpu" if x.is_meta else x.device.type
        if x.dtype != w.dtype and not torch.is_autocast_enabled(device):
            raise ValueError(f"{who} needs one dtype, got x {x.dtype} and {name} {w.dtype}")


def rounded_tokens(who: str, low: Rounded, x: Tensor, form: Format) -> Quantized | None:
    """Return the tokens that have been rounded, as rows.

    Raises
    ------
    ValueError
        Where they are of another format or shape than those that come.
    """
    if low.tokens is None:
        return None
    if not low.tokens.matches(form, x.shape):
        got = f"{low.tokens.values.dtype} {tuple(low.tokens.values.shape)}"
        raise ValueError(f"{who} needs tokens {tuple(x.shape)} rounded to {form}, got {got}")
    return low.tokens.rows()


def _dense(kernels: str) -> Products:
    """Return who makes what is around products of eight bits; a wide gradient of weights is one product."""
    return Products("dense", "dense", "dense", kernels)


def _all_rows(x: Tensor) -> Tensor:
    return torch.full((1,), len(x), dtype=torch.int32, device=x.device)
