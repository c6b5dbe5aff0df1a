"""Sums in float32 of narrower tensors and of matrix products, each buffer read and written once."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moekit.kernels import _backend
from moekit.kernels._backend import check_shapes, jit, operator, tl, use_triton

_BLOCK = 4096


def add_(total: Float[Tensor, "*n"], x: Float[Tensor, "*n"], *, first: bool, kernels: str = "auto") -> None:
    """Set ``total`` to ``x`` where it is the first, else add it. Not differentiable.

    Torch's kernels for two dtypes reach 40 % of a device's bandwidth; the Triton kernel walks memory.
    """
    check_shapes("add_", x=(x, total.shape))
    contiguous = total.is_contiguous() and x.is_contiguous()
    if contiguous and total.dtype != x.dtype and use_triton("add_", kernels, total):
        torch.ops.moekit.add_(total, x, first)
    elif first:
        total.copy_(x)
    else:
        total += x


def add_product_(
    total: Float[Tensor, "n m"],
    a: Float[Tensor, "n k"],
    b: Float[Tensor, "k m"],
    *,
    first: bool,
    kernels: str = "auto",
) -> None:
    """Set ``total`` to ``a @ b`` where it is the first, else add it. Not differentiable.

    On CUDA the GEMM itself accumulates: no product is made apart.
    """
    check_shapes("add_product_", total=(total, (len(a), b.shape[-1])))
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=1 - first, out=total)
    elif kernels != "torch" and _backend.on_cuda(a):
        torch.ops.moekit.add_product_(total, a, b, first)
    elif first:
        total.copy_(a @ b)
    else:
        total += a @ b


# --- Operators ------------------------------------------------------------------------


@operator("moekit::add_", mutates_args=("total",))
def _add_op(total: Tensor, x: Tensor, first: bool) -> None:
    x = x.contiguous()
    if n := total.numel():
        _add[(-(-n // _BLOCK),)](total, x, n, FIRST=first, BLOCK=_BLOCK)


@_add_op.register_fake
def _(total, x, first):
    return None


# An operator of our own, as torch's has no right form for meta tensors (2.11) nor for FlopCounterMode (2.13).
@operator("moekit::add_product_", mutates_args=("total",))
def _add_product_op(total: Tensor, a: Tensor, b: Tensor, first: bool) -> None:
    torch.addmm(total, a, b, out_dtype=total.dtype, beta=1 - first, out=total)


@_add_product_op.register_fake
def _(total, a, b, first):
    return None


@register_flop_formula(torch.ops.moekit.add_product_)
def _flops(total_shape, a_shape, b_shape, *_, **__) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


@jit
def _add(total, x, n, FIRST: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + at, mask=at < n).to(total.dtype.element_ty)
    if not FIRST:
        value += tl.load(total + at, mask=at < n)
    tl.store(total + at, value, mask=at < n)
