"""A tensor times a number on the device, converted on the way."""

import torch
from torch import Tensor

from moekit.kernels._backend import jit, operator, tl, use_triton

_BLOCK = 4096


def scaled(x: Tensor, by: Tensor, dtype: torch.dtype, *, kernels: str = "auto") -> Tensor:
    """Return ``x * by`` in another dtype, in one pass; ``by`` is 0-d. Not differentiable."""
    if by.ndim:
        raise ValueError(f"scaled needs a 0-d factor, got {tuple(by.shape)}")
    if use_triton("scaled", kernels, x):
        return torch.ops.moekit.scaled(x, by, dtype)
    return (x * by.to(torch.promote_types(x.dtype, by.dtype))).to(dtype)


@operator("moekit::scaled")
def _scaled_op(x: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    out = _scaled_like(x, by, dtype)
    if out.stride() != x.stride():  # both are walked in the order of memory
        x = torch.empty_like(out, dtype=x.dtype).copy_(x)
    if x.numel():
        _scale[(-(-x.numel() // _BLOCK),)](x, by, out, x.numel(), BLOCK=_BLOCK)
    return out


@_scaled_op.register_fake
def _scaled_like(x, by, dtype):
    return torch.empty_like(x, dtype=dtype)  # dense tensors keep their strides


@jit
def _scale(x, by, out, n, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n).to(tl.float32) * tl.load(by).to(tl.float32)
    tl.store(out + at, value.to(out.dtype.element_ty), mask=at < n)
