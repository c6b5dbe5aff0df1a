"""RMSNorm (Zhang & Sennrich 2019, arXiv:1910.07467), with what is added to it in the same pass.

In passes over the rows, each a read or a write: forward 2 and with a residual 3, where torch's fused norm and
a sum take 5; backward 3, where torch takes 5 since it finds the gain's gradient in a kernel apart. Each
program of the backward sums the gain's gradient over its rows; the sums of all are added in order.

Axes: n rows, d features.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from moekit.kernels._backend import (
    INTERPRETED,
    check_shapes,
    jit,
    n_processors,
    next_power_of_2,
    operator,
    tl,
    use_triton,
)
from moekit.kernels.quantize import (
    Format,
    Quantized,
    has_kernel,
    magnitude,
    quantize,
    scale_of_magnitude,
    to_fp8,
)

_TILE = 4096  # elements that a program holds at once, or a row


def rms_norm(
    x: Float[Tensor, "*n d"],
    gain: Float[Tensor, " d"],
    eps: float = 1e-5,
    *,
    residual: Float[Tensor, "*n d"] | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "*n d"]:
    """Divide by the root mean square of the last dim, times ``gain``; add ``residual`` to that.

    Pure and differentiable; keeps ``x``, ``gain`` and a float32 a row.
    """
    check_shapes("rms_norm", gain=(gain, x.shape[-1:]), residual=(residual, x.shape))
    if use_triton("rms_norm", kernels, x):
        return _RMSNorm.apply(x, gain, residual, eps)
    y = F.rms_norm(x, (x.shape[-1],), gain, eps)
    return y if residual is None else residual + y


def rms_norm_quantized(
    x: Float[Tensor, "*n d"],
    gain: Float[Tensor, " d"],
    eps: float,
    form: Format,
    *,
    kernels: str = "auto",
) -> tuple[Float[Tensor, "*n d"], Quantized]:
    """Return what :func:`rms_norm` does, and that rounded to a format, which has no gradient."""
    check_shapes("rms_norm_quantized", gain=(gain, x.shape[-1:]))
    if has_kernel("rms_norm_quantized", form, x, kernels):
        y, values, scales = _RMSNormQuantized.apply(x, gain, eps)
        return y, Quantized(values, scales)
    y = rms_norm(x, gain, eps, kernels=kernels)
    return y, quantize(y.detach(), form, kernels=kernels)


class _RMSNorm(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, gain, residual, eps):
        rows = x.reshape(-1, x.shape[-1])
        y, rstd = torch.ops.moekit.rms_norm(
            rows, gain, None if residual is None else residual.reshape(rows.shape), eps
        )
        ctx.save_for_backward(x, gain, rstd)
        return y.view(x.shape)

    @staticmethod
    def backward(ctx, *grads):
        x, gain, rstd = ctx.saved_tensors
        rows, grad = (z.reshape(-1, x.shape[-1]) for z in (x, grads[0]))
        grad_x, grad_gain = torch.ops.moekit.rms_norm_backward(grad, rows, gain, rstd)
        return grad_x.view(x.shape), grad_gain, grads[0] if ctx.needs_input_grad[2] else None, None


class _RMSNormQuantized(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, gain, eps):
        y, rstd, values, scales = torch.ops.moekit.rms_norm_quantized(x.reshape(-1, x.shape[-1]), gain, eps)
        ctx.save_for_backward(x, gain, rstd)
        ctx.set_materialize_grads(False)
        values, scales = values.view(x.shape), scales.view(*x.shape[:-1], 1)
        ctx.mark_non_differentiable(values, scales)
        return y.view(x.shape), values, scales

    @staticmethod
    def backward(ctx, *grads):
        x, gain, rstd = ctx.saved_tensors
        if grads[0] is None:
            return None, None, None
        rows, grad = (z.reshape(-1, x.shape[-1]) for z in (x, grads[0]))
        grad_x, grad_gain = torch.ops.moekit.rms_norm_backward(grad, rows, gain, rstd)
        return grad_x.view(x.shape), grad_gain, None


@operator("moekit::rms_norm_quantized")
def _quantized_op(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    x = x.contiguous()
    y, rstd, values, scales = outputs = _quantized_like(x, gain, eps)
    if x.numel():
        n, d = x.shape
        rows, block, num_warps = _tile(d)
        _forward[(-(-n // rows),)](
            *(x, gain.contiguous(), None, y, rstd, values, scales, n, eps, d),
            **dict(INTERPRETED=INTERPRETED, ROWS=rows, BLOCK=block, num_warps=num_warps),
        )
    return outputs


@_quantized_op.register_fake
def _quantized_like(x, gain, eps):
    y, rstd = _normed_like(x, gain, None, eps)
    values = x.new_empty(x.shape, dtype=torch.float8_e4m3fn)
    return y, rstd, values, x.new_empty(len(x), dtype=torch.float32)


@operator("moekit::rms_norm")
def _forward_op(x: Tensor, gain: Tensor, residual: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x = x.contiguous()
    y, rstd = _normed_like(x, gain, residual, eps)
    if x.numel():
        n, d = x.shape
        rows, block, num_warps = _tile(d)
        residual = None if residual is None else residual.contiguous()
        _forward[(-(-n // rows),)](
            *(x, gain.contiguous(), residual, y, rstd, None, None, n, eps, d),
            **dict(INTERPRETED=INTERPRETED, ROWS=rows, BLOCK=block, num_warps=num_warps),
        )
    return y, rstd


@_forward_op.register_fake
def _normed_like(x, gain, residual, eps):
    dtype = x.dtype if residual is None else torch.promote_types(x.dtype, residual.dtype)
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(len(x), dtype=torch.float32)


@operator("moekit::rms_norm_backward")
def _backward_op(grad: Tensor, x: Tensor, gain: Tensor, rstd: Tensor) -> tuple[Tensor, Tensor]:
    x, grad = x.contiguous(), grad.contiguous()
    n, d = x.shape
    if not x.numel():
        return torch.empty_like(x), torch.zeros_like(gain)
    rows, block, num_warps = _tile(d)
    programs = min(-(-n // rows), 4 * n_processors(x.device))
    grad_x = torch.empty_like(x)
    partial = x.new_empty(programs, d, dtype=torch.float32)
    _backward[(programs,)](
        *(grad, x, gain.contiguous(), rstd, grad_x, partial, n, d),
        STEPS=-(-n // (rows * programs)),
        ROWS=rows,
        BLOCK=block,
        num_warps=num_warps,
    )
    return grad_x, partial.sum(0).to(gain.dtype)


@_backward_op.register_fake
def _(grad, x, gain, rstd):
    return x.new_empty(x.shape), gain.new_empty(gain.shape)


def _tile(d: int) -> tuple[int, int, int]:
    """Return the rows and columns of a program's tile, and its warps: each thread has 16 elements."""
    block = next_power_of_2(d)
    rows = max(_TILE // block, 1)
    return rows, block, min(rows * block // 512, 32)


@jit
def _forward(
    x, gain, residual, y, rstd, low, low_scales, n, eps, d: tl.constexpr,
    INTERPRETED: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    inside = (row[:, None] < n) & (column < d)
    at = row[:, None] * d + column
    value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(value * value, 1) / d + eps)
    out = value * scale[:, None] * tl.load(gain + column, mask=column < d, other=0.0).to(tl.float32)
    if residual is not None:
        out += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    out = out.to(y.dtype.element_ty)
    tl.store(y + at, out, mask=inside)
    tl.store(rstd + row, scale, mask=row < n)
    if low is not None:
        out = out.to(tl.float32)
        scale, inverse = scale_of_magnitude(tl.max(magnitude(out), 1))
        tl.store(low_scales + row, scale, mask=row < n)
        tl.store(low + at, to_fp8(out * inverse[:, None], INTERPRETED), mask=inside)


@jit
def _backward(
    grad, x, gain, rstd, grad_x, partial, n, d: tl.constexpr, STEPS: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    program = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)[None, :]
    weight = tl.load(gain + column, mask=column < d, other=0.0).to(tl.float32)
    total = tl.zeros((ROWS, BLOCK), tl.float32)
    for step in range(0, STEPS):
        row = (step * tl.num_programs(0) + program) * ROWS + tl.arange(0, ROWS)
        inside = (row[:, None] < n) & (column < d)
        at = row[:, None] * d + column
        scale = tl.load(rstd + row, mask=row < n, other=0.0)[:, None]
        normed = tl.load(x + at, mask=inside, other=0.0).to(tl.float32) * scale
        grad_out = tl.load(grad + at, mask=inside, other=0.0).to(tl.float32)
        total += grad_out * normed
        grad_out *= weight
        mean = tl.sum(grad_out * normed, 1) / d
        out = scale * (grad_out - normed * mean[:, None])
        tl.store(grad_x + at, out.to(grad_x.dtype.element_ty), mask=inside)
    column = tl.arange(0, BLOCK)
    tl.store(partial + program * d + column, tl.sum(total, 0), mask=column < d)
