"""SwiGLU between two products of eight-bit numbers: what they read is rounded in the pass that makes it.

The passes of :mod:`moekit.kernels.swiglu`; here a program holds a whole row, of which it finds the scale.
What is rounded to eight bits comes from float32; of rows wider than a program holds, from passes one after
the other, from the tensors' dtype.

Axes: r rows, h hidden.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from moekit.kernels._backend import INTERPRETED, check_shapes, jit, next_power_of_2, operator, tl
from moekit.kernels.quantize import (
    ROWWISE,
    WIDEST,
    Format,
    Quantized,
    dequantize,
    has_kernel,
    magnitude,
    quantize,
    scale_of_magnitude,
    to_fp8,
    warps_of_row,
)
from moekit.kernels.swiglu import End, Weights, swiglu_backward, swiglu_forward


def swiglu_forward_quantized(
    gate_up: Float[Tensor, "r h2"],
    weights: Weights,
    end: End,
    form: Format,
    *,
    keep: Format | None = None,
    kernels: str = "auto",
) -> tuple[Quantized, Float[Tensor, "r h2"] | Quantized]:
    """Return the hidden rows, each times its weight, in a format, and ``gate_up``, in ``keep`` where given.

    Not differentiable. Rows past the end are undefined.
    """
    r, h2 = gate_up.shape
    _check("swiglu_forward_quantized", h2, weights=(weights, (r,)))
    fused = keep in (None, ROWWISE) and h2 <= 2 * WIDEST
    if has_kernel("swiglu_forward_quantized", form, gate_up, kernels) and fused:
        values, scales, *kept = torch.ops.moekit.swiglu_quantized(gate_up, weights, end, keep is not None)
        return Quantized(values, scales[:, None]), gate_up if keep is None else Quantized(
            kept[0], kept[1][:, None]
        )
    passes = _of_passes(form, gate_up, kernels)
    wide = gate_up if passes == "auto" else gate_up.to(torch.promote_types(gate_up.dtype, torch.float32))
    hidden = swiglu_forward(wide, weights, end, kernels=passes)
    low = quantize(hidden, form, end=end, kernels=passes)
    return low, gate_up if keep is None else quantize(gate_up, keep, end=end, kernels=passes)


def swiglu_backward_quantized(
    grad: Float[Tensor, "r h"],
    gate_up: Float[Tensor, "r h2"] | Quantized,
    weights: Weights,
    end: End,
    form: Format,
    *,
    in_place: bool = False,
    kernels: str = "auto",
) -> tuple[Quantized, Float[Tensor, "r h2"], Float[Tensor, "r h"], Weights]:
    """Return the gradient of ``gate_up`` in a format, and what :func:`swiglu_backward` does.

    Not differentiable. Rows past the end are undefined. ``in_place`` lets the hidden rows take the memory of
    ``grad``, and a gradient that of ``gate_up``.
    """
    values = gate_up.values if isinstance(gate_up, Quantized) else gate_up
    r, h2 = values.shape
    _check("swiglu_backward_quantized", h2, weights=(weights, (r,)), grad=(grad, (r, h2 // 2)))
    rowwise = not isinstance(gate_up, Quantized) or gate_up.scales.dtype == torch.float32
    fused = rowwise and h2 <= 2 * WIDEST
    if has_kernel("swiglu_backward_quantized", form, grad, kernels) and fused:
        scales = gate_up.scales if isinstance(gate_up, Quantized) else None
        args = (grad, values, scales, weights, end)
        if in_place:
            other, scales, grad_weights = torch.ops.moekit.swiglu_backward_quantized_(*args)
            low, wide = (values, other) if isinstance(gate_up, Quantized) else (other, values)
            hidden = grad
        else:
            low, scales, wide, hidden, grad_weights = torch.ops.moekit.swiglu_backward_quantized(*args)
        return Quantized(low, scales[:, None]), wide, hidden, None if weights is None else grad_weights
    passes = _of_passes(form, grad, kernels)
    dtype = grad.dtype if passes == "auto" else torch.promote_types(grad.dtype, torch.float32)
    full = dequantize(gate_up).to(dtype) if isinstance(gate_up, Quantized) else gate_up.to(dtype)
    wide, hidden, grad_weights = swiglu_backward(grad.to(dtype), full, weights, end, kernels=passes)
    low = quantize(wide, form, end=end, kernels=passes)
    return low, wide.to(grad.dtype), hidden.to(grad.dtype), grad_weights


def _of_passes(form: Format, x: Tensor, kernels: str) -> str:
    """Return the kernels of passes one after the other: a row that no program holds has Triton's."""
    return "auto" if has_kernel("swiglu", form, x, kernels) else "torch"


def _check(who: str, h2: int, **shapes) -> None:
    if h2 % 2:
        raise ValueError(f"{who} needs gate_up (r, 2h), two halves, got {h2} columns")
    check_shapes(who, **shapes)


# --- Launches -------------------------------------------------------------------------


@operator("moekit::swiglu_quantized")
def _forward_op(
    gate_up: Tensor, weights: Tensor | None, end: Tensor | None, keep: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    gate_up = gate_up.contiguous()
    weights, end = (None if x is None else x.contiguous() for x in (weights, end))
    hidden, scales, kept, kept_scales = outputs = _hidden_like(gate_up, weights, end, keep)
    r, h = hidden.shape
    if hidden.numel():
        block = next_power_of_2(h)
        _forward[(r,)](
            *(gate_up, weights, end, hidden, scales, kept, kept_scales),
            *(h, 0 if end is None else len(end)),
            **dict(KEEP=keep, INTERPRETED=INTERPRETED, BLOCK=block, num_warps=warps_of_row(block)),
        )
    return outputs


@_forward_op.register_fake
def _hidden_like(gate_up, weights, end, keep):
    r, h2 = gate_up.shape
    fp8 = dict(dtype=torch.float8_e4m3fn)
    kept = r if keep else 0
    return (
        gate_up.new_empty(r, h2 // 2, **fp8),
        gate_up.new_empty(r, dtype=torch.float32),
        gate_up.new_empty(kept, h2, **fp8),
        gate_up.new_empty(kept, dtype=torch.float32),
    )


@operator("moekit::swiglu_backward_quantized")
def _backward_op(
    grad: Tensor, gate_up: Tensor, gate_up_scales: Tensor | None, weights: Tensor | None, end: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    outputs = _gradients_like(grad, gate_up, gate_up_scales, weights, end)
    _launch_backward(grad.contiguous(), gate_up.contiguous(), gate_up_scales, weights, end, outputs)
    return outputs


@_backward_op.register_fake
def _gradients_like(grad, gate_up, gate_up_scales, weights, end):
    r, h2 = gate_up.shape
    return (
        grad.new_empty(r, h2, dtype=torch.float8_e4m3fn),
        grad.new_empty(r, dtype=torch.float32),
        grad.new_empty(r, h2),
        grad.new_empty(grad.shape),
        grad.new_empty(0 if weights is None else r, dtype=torch.float32),
    )


@operator("moekit::swiglu_backward_quantized_", mutates_args=("grad", "gate_up"))
def _backward_in_place_op(
    grad: Tensor, gate_up: Tensor, gate_up_scales: Tensor | None, weights: Tensor | None, end: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    assert grad.is_contiguous() and gate_up.is_contiguous()
    other, scales, grad_weights = _others_like(grad, gate_up, gate_up_scales, weights, end)
    low, wide = (gate_up, other) if gate_up_scales is not None else (other, gate_up)
    outputs = low, scales, wide, grad, grad_weights
    _launch_backward(grad, gate_up, gate_up_scales, weights, end, outputs)
    return other, scales, grad_weights


@_backward_in_place_op.register_fake
def _others_like(grad, gate_up, gate_up_scales, weights, end):
    r, h2 = gate_up.shape
    dtype = torch.float8_e4m3fn if gate_up_scales is None else grad.dtype
    return (
        grad.new_empty(r, h2, dtype=dtype),
        grad.new_empty(r, dtype=torch.float32),
        grad.new_empty(0 if weights is None else r, dtype=torch.float32),
    )


def _launch_backward(grad, gate_up, gate_up_scales, weights, end, outputs) -> None:
    gate_up_scales, weights, end = (
        None if x is None else x.contiguous() for x in (gate_up_scales, weights, end)
    )
    r, h = grad.shape
    if grad.numel():
        block = next_power_of_2(h)
        _backward[(r,)](
            *(grad, gate_up, gate_up_scales, weights, end, *outputs),
            *(h, 0 if end is None else len(end)),
            **dict(INTERPRETED=INTERPRETED, BLOCK=block, num_warps=warps_of_row(2 * block)),
        )


# --- Kernels --------------------------------------------------------------------------


@jit
def _forward(
    gate_up, weights, end, hidden, scales, kept, kept_scales, h: tl.constexpr, n_ends,
    KEEP: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if end is not None:
        if row >= tl.load(end + n_ends - 1):
            return
    column = tl.arange(0, BLOCK)
    inside = column < h
    gate = tl.load(gate_up + row * 2 * h + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * h + h + column, mask=inside, other=0.0).to(tl.float32)
    if KEEP:
        most = tl.maximum(tl.max(magnitude(gate)), tl.max(magnitude(up)))
        scale, inverse = scale_of_magnitude(most)
        tl.store(kept_scales + row, scale)
        tl.store(kept + row * 2 * h + column, to_fp8(gate * inverse, INTERPRETED), mask=inside)
        tl.store(kept + row * 2 * h + h + column, to_fp8(up * inverse, INTERPRETED), mask=inside)
    out = gate * tl.sigmoid(gate) * up
    if weights is not None:
        out *= tl.load(weights + row)
    scale, inverse = scale_of_magnitude(tl.max(magnitude(out)))
    tl.store(scales + row, scale)
    tl.store(hidden + row * h + column, to_fp8(out * inverse, INTERPRETED), mask=inside)


@jit
def _backward(
    grad, gate_up, gate_up_scales, weights, end, low, low_scales, wide, hidden, grad_weights,
    h: tl.constexpr, n_ends, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    if end is not None:
        if row >= tl.load(end + n_ends - 1):
            return
    column = tl.arange(0, BLOCK)
    inside = column < h
    gate = tl.load(gate_up + row * 2 * h + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * h + h + column, mask=inside, other=0.0).to(tl.float32)
    if gate_up_scales is not None:
        scale = tl.load(gate_up_scales + row)
        gate *= scale
        up *= scale
    grad_out = tl.load(grad + row * h + column, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    out = silu * up
    if weights is not None:
        tl.store(grad_weights + row, tl.sum(grad_out * out))
        weight = tl.load(weights + row)
        out *= weight
        grad_out *= weight
    grad_gate, grad_up = grad_out * up * (sigmoid + silu * (1 - sigmoid)), grad_out * silu
    most = tl.maximum(tl.max(magnitude(grad_gate)), tl.max(magnitude(grad_up)))
    scale, inverse = scale_of_magnitude(most)
    kind = hidden.dtype.element_ty  # of all that is read nothing has been overwritten till here
    tl.store(hidden + row * h + column, out.to(kind), mask=inside)
    tl.store(wide + row * 2 * h + column, grad_gate.to(kind), mask=inside)
    tl.store(wide + row * 2 * h + h + column, grad_up.to(kind), mask=inside)
    tl.store(low_scales + row, scale)
    tl.store(low + row * 2 * h + column, to_fp8(grad_gate * inverse, INTERPRETED), mask=inside)
    tl.store(low + row * 2 * h + h + column, to_fp8(grad_up * inverse, INTERPRETED), mask=inside)
