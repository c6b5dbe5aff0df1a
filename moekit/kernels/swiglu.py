"""SwiGLU: ``silu(gate) * up`` of the two halves of a row (Shazeer 2020, arXiv:2002.05202).

The Triton kernels make one pass each: 3 values a hidden element forward and 6 backward. The backward makes
the hidden rows again, so that nothing but ``gate_up`` need be kept, and takes the gradient of the row weights
from the same pass.

Axes: r rows, h hidden.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from moekit.kernels._backend import check_shapes, jit, next_power_of_2, operator, tl, use_triton

Weights = Float[Tensor, " r"] | None
End = Int[Tensor, " e"] | None  # its last element is where valid rows end


def swiglu(gate_up: Float[Tensor, "*n h2"]) -> Float[Tensor, "*n h"]:
    """Return ``silu(gate) * up`` of the two halves of the last dim, in plain torch."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_forward(
    gate_up: Float[Tensor, "r h2"], weights: Weights, end: End, *, kernels: str = "auto"
) -> Float[Tensor, "r h"]:
    """Return the hidden rows (r, h), each times its weight; undefined past the end. Not differentiable."""
    _check("swiglu_forward", gate_up, weights)
    if use_triton("swiglu_forward", kernels, gate_up):
        return torch.ops.moekit.swiglu(gate_up, weights, end)
    hidden = _wide(gate_up)[-1]
    return (hidden if weights is None else hidden * weights[:, None]).to(gate_up.dtype)


def _check(who: str, gate_up: Tensor, weights: Tensor | None, grad: Tensor | None = None) -> None:
    r, h2 = gate_up.shape
    if h2 % 2:
        raise ValueError(f"{who} needs gate_up (r, 2h), two halves, got {tuple(gate_up.shape)}")
    check_shapes(who, weights=(weights, (r,)), grad=(grad, (r, h2 // 2)))


def _wide(gate_up: Tensor) -> tuple[Tensor, ...]:
    """Return up, sigmoid and silu of the gate, and their product, in float32 at least."""
    gate, up = gate_up.to(torch.promote_types(gate_up.dtype, torch.float32)).chunk(2, -1)
    sigmoid = gate.sigmoid()
    silu = gate * sigmoid
    return up, sigmoid, silu, silu * up


def swiglu_backward(
    grad: Float[Tensor, "r h"],
    gate_up: Float[Tensor, "r h2"],
    weights: Weights,
    end: End,
    *,
    in_place: bool = False,
    kernels: str = "auto",
) -> tuple[Float[Tensor, "r h2"], Float[Tensor, "r h"], Weights]:
    """Return the gradient of ``gate_up``, what :func:`swiglu_forward` gave, and the gradient of the weights.

    Not differentiable. Rows past the end are undefined. ``in_place`` lets the first take the memory of
    ``gate_up``, and the second that of ``grad``.
    """
    _check("swiglu_backward", gate_up, weights, grad)
    if use_triton("swiglu_backward", kernels, gate_up):
        if in_place:
            grad_weights = torch.ops.moekit.swiglu_backward_(grad, gate_up, weights, end)
            return gate_up, grad, None if weights is None else grad_weights
        grad_gate_up, hidden, grad_weights = torch.ops.moekit.swiglu_backward(grad, gate_up, weights, end)
        return grad_gate_up, hidden, None if weights is None else grad_weights
    up, sigmoid, silu, hidden = _wide(gate_up)
    grad, grad_weights = grad.to(hidden.dtype), None
    if weights is not None:
        grad_weights = (grad * hidden).sum(-1)
        hidden, grad = hidden * weights[:, None], grad * weights[:, None]
    grad_gate_up = torch.cat([grad * up * (sigmoid + silu * (1 - sigmoid)), grad * silu], -1)
    return grad_gate_up.to(gate_up.dtype), hidden.to(gate_up.dtype), grad_weights


@operator("moekit::swiglu")
def _forward_op(gate_up: Tensor, weights: Tensor | None, end: Tensor | None) -> Tensor:
    gate_up = gate_up.contiguous()
    weights, end = (None if x is None else x.contiguous() for x in (weights, end))
    hidden = _hidden_like(gate_up, weights, end)
    r, h = hidden.shape
    if hidden.numel():
        block = min(next_power_of_2(h), 2048)
        _forward[(r, -(-h // block))](
            gate_up, weights, end, hidden, h, 0 if end is None else len(end), BLOCK=block
        )
    return hidden


@_forward_op.register_fake
def _hidden_like(gate_up, weights, end):
    return gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)


@operator("moekit::swiglu_backward")
def _backward_op(
    grad: Tensor, gate_up: Tensor, weights: Tensor | None, end: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    gate_up, grad = gate_up.contiguous(), grad.contiguous()
    grad_gate_up, hidden, grad_weights = _gradients_like(grad, gate_up, weights, end)
    _launch_backward(grad, gate_up, weights, end, grad_gate_up, hidden, grad_weights)
    return grad_gate_up, hidden, grad_weights


@_backward_op.register_fake
def _gradients_like(grad, gate_up, weights, end):
    return (
        torch.empty_like(gate_up),
        grad.new_empty(grad.shape),
        _grad_weights_like(grad, gate_up, weights, end),
    )


@operator("moekit::swiglu_backward_", mutates_args=("grad", "gate_up"))
def _backward_in_place_op(
    grad: Tensor, gate_up: Tensor, weights: Tensor | None, end: Tensor | None
) -> Tensor:
    assert grad.is_contiguous() and gate_up.is_contiguous()
    grad_weights = _grad_weights_like(grad, gate_up, weights, end)
    _launch_backward(grad, gate_up, weights, end, gate_up, grad, grad_weights)
    return grad_weights


@_backward_in_place_op.register_fake
def _grad_weights_like(grad, gate_up, weights, end):
    return gate_up.new_empty(0 if weights is None else len(gate_up), dtype=torch.float32)


def _launch_backward(grad, gate_up, weights, end, grad_gate_up, hidden, grad_weights) -> None:
    r, h = grad.shape
    weights, end = (None if x is None else x.contiguous() for x in (weights, end))
    block = min(next_power_of_2(h), 1024)
    if grad.numel():
        _backward[(r,)](
            *(grad, gate_up, weights, end, grad_gate_up, hidden, grad_weights),
            *(h, 0 if end is None else len(end)),
            BLOCK=block,
            num_warps=max(min(block // 32, 4), 1),  # no element in two threads: one might have overwritten it
        )


@jit
def _forward(gate_up, weights, end, hidden, h: tl.constexpr, n_ends, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if end is not None:
        if row >= tl.load(end + n_ends - 1):
            return
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < h
    gate = tl.load(gate_up + row * 2 * h + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * h + h + column, mask=inside, other=0.0).to(tl.float32)
    out = gate * tl.sigmoid(gate) * up
    if weights is not None:
        out *= tl.load(weights + row)
    tl.store(hidden + row * h + column, out.to(hidden.dtype.element_ty), mask=inside)


@jit
def _backward(
    grad, gate_up, weights, end, grad_gate_up, hidden, grad_weights, h: tl.constexpr, n_ends,
    BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if end is not None:
        if row >= tl.load(end + n_ends - 1):
            return
    weight = 1.0
    if weights is not None:
        weight = tl.load(weights + row)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, h, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < h
        gate = tl.load(gate_up + row * 2 * h + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * h + h + column, mask=inside, other=0.0).to(tl.float32)
        grad_out = tl.load(grad + row * h + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        out = silu * up
        total += grad_out * out
        grad_out *= weight
        grad_gate = grad_out * up * (sigmoid + silu * (1 - sigmoid))
        kind = hidden.dtype.element_ty
        tl.store(grad_gate_up + row * 2 * h + column, grad_gate.to(kind), mask=inside)
        tl.store(grad_gate_up + row * 2 * h + h + column, (grad_out * silu).to(kind), mask=inside)
        tl.store(hidden + row * h + column, (out * weight).to(kind), mask=inside)
    if weights is not None:
        tl.store(grad_weights + row, tl.sum(total))
