"""Dense layers with products of eight-bit numbers.

Axes: n tokens, K and N features, d of the model, h hidden.
"""

from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit._low_experts import LowExperts, LowProducts, Weights
from moekit.kernels import choose_products
from moekit.kernels.permute import Arrived
from moekit.kernels.quantize import Format, Quantized, dequantize, quantize, quantize_columns
from moekit.kernels.scaled_mm import scaled_mm, scaled_weight_grad


def low_linear(
    x: Float[Tensor, "*n K"],
    w: Float[Tensor, "K N"],
    rounded: Mapping[str, Any],
    form: Format,
    weight_grad: Format | None = None,
    saved: Format | None = None,
    *,
    x_low: Quantized | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "*n N"]:
    """Return ``x @ w`` of operands in a format, and so the gradient of ``x``; that of ``w`` as it says.

    Differentiable, once. Keeps ``x``, in ``saved`` if given. ``rounded`` is from
    :func:`moekit.precision.round_matrix`, ``x_low`` is ``x`` in the format, where it has been rounded.
    """
    weights = Weights.of("linear", "weights", w, rounded, form, form)
    rows = x.reshape(-1, x.shape[-1])
    low = quantize(rows, form, kernels=kernels) if x_low is None else x_low.rows()
    y = _LowLinear.apply(rows, w, weights, low, form, weight_grad, saved, kernels)
    return y.view(*x.shape[:-1], w.shape[-1])


class _LowLinear(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, w, weights, low, form, weight_grad, saved, kernels):
        if saved is None:
            ctx.save_for_backward(x)
        else:
            ctx.save_for_backward(*(low if saved == form else quantize(x, saved, kernels=kernels)))
        ctx.weights, ctx.form, ctx.weight_grad, ctx.kernels = weights, form, weight_grad, kernels
        return scaled_mm(low, weights.forward, dtype=x.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *scales = ctx.saved_tensors
        needs_x, needs_w, *_ = ctx.needs_input_grad
        grad_x = grad_w = None
        if needs_x:
            low = quantize(grad, ctx.form, kernels=ctx.kernels)
            grad_x = scaled_mm(low, ctx.weights.input_grad, dtype=grad.dtype)
        if needs_w and scales:
            x = dequantize(Quantized(x, *scales)).to(grad.dtype)
        if needs_w and ctx.weight_grad is None:
            grad_w = x.mT @ grad
        elif needs_w:
            all_rows = torch.full((1,), len(x), dtype=torch.int32, device=x.device)
            columns = [quantize_columns(rows, all_rows, ctx.weight_grad) for rows in (x, grad)]
            grad_w = scaled_weight_grad(*columns, dtype=grad.dtype)
            assert grad_w is not None  # there is no buffer
            grad_w = grad_w[0]
        return grad_x, grad_w, *[None] * 6


def low_feed_forward(
    x: Float[Tensor, "*n d"],
    gate_up: Float[Tensor, "d h2"],
    down: Float[Tensor, "h d"],
    rounded: Mapping[str, Any],
    form: Format,
    weight_grad: Format | None = None,
    saved: Format | None = None,
    *,
    x_low: Quantized | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "*n d"]:
    """Return ``swiglu(x @ gate_up) @ down``: one expert that takes every token. As :func:`low_linear`.

    ``saved`` is what the first product is kept in.
    """
    rows = x.reshape(-1, x.shape[-1])
    offsets = torch.full((1,), len(rows), dtype=torch.int32, device=x.device)
    plain = choose_products("feed_forward", kernels, len(rows), gate_up[None])
    plan = LowProducts(form, form, weight_grad, saved, plain)
    weights = [
        Weights.of("feed_forward", name, w[None], one_expert(rounded.get(name, {})), form, form)
        for name, w in (("gate_up", gate_up), ("down", down))
    ]
    args = (rows, None, gate_up[None], down[None], offsets, None, None, weights, plan, (None, None))
    exchange = Arrived(kernels, None if x_low is None else x_low.rows())
    return LowExperts.apply(*args, exchange).view(x.shape)


def one_expert(rounded: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
    """Return a rounded matrix as those of one expert."""
    return {name: {part: x[None] for part, x in q.items()} for name, q in rounded.items()}
