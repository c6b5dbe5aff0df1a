"""A dense SwiGLU feed-forward that keeps its input and its first product.

Axes: n tokens, d features, h hidden.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from moekit.kernels._backend import check_shapes, forget_saved, use_triton
from moekit.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward


def feed_forward(
    x: Float[Tensor, "*n d"],
    gate_up: Float[Tensor, "d h2"],
    down: Float[Tensor, "h d"],
    *,
    kernels: str = "auto",
) -> Float[Tensor, "*n d"]:
    """Return ``swiglu(x @ gate_up) @ down``. Pure and differentiable.

    With kernels the hidden activations are made again in the backward.
    """
    d, h2 = gate_up.shape
    if h2 % 2:
        raise ValueError(f"feed_forward needs gate_up (d, 2h), two halves, got {tuple(gate_up.shape)}")
    check_shapes("feed_forward", x=(x, (*x.shape[:-1], d)), down=(down, (h2 // 2, down.shape[-1])))
    if use_triton("feed_forward", kernels, x):
        device = "cpu" if x.is_meta else x.device.type
        if torch.is_autocast_enabled(device):  # here, so that the backward meets what the forward did
            dtype = torch.get_autocast_dtype(device)
            x, gate_up, down = x.to(dtype), gate_up.to(dtype), down.to(dtype)
        return _FeedForward.apply(x, gate_up, down)
    return swiglu(x @ gate_up) @ down


class _FeedForward(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, gate_up, down):
        projected = x.reshape(-1, x.shape[-1]) @ gate_up
        ctx.save_for_backward(x, projected, gate_up, down)
        return (swiglu_forward(projected, None, None, kernels="triton") @ down).view(
            *x.shape[:-1], down.shape[1]
        )

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, projected, gate_up, down = ctx.saved_tensors
        may_overwrite = forget_saved(ctx)
        needs_x, needs_gate_up, needs_down = ctx.needs_input_grad
        grad = grad.reshape(-1, grad.shape[-1])
        grad_hidden = grad @ down.mT
        grad_projected, hidden, _ = swiglu_backward(
            grad_hidden, projected, None, None, in_place=may_overwrite, kernels="triton"
        )
        del grad_hidden, projected
        grad_down = hidden.mT @ grad if needs_down else None
        del hidden
        grad_x = (grad_projected @ gate_up.mT).view(x.shape) if needs_x else None
        return grad_x, x.reshape(-1, x.shape[-1]).mT @ grad_projected if needs_gate_up else None, grad_down
