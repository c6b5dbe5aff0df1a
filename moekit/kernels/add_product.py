"""A matrix product added to what is there, in float32 also where its factors are narrower."""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moekit.kernels import _backend
from moekit.kernels._backend import operator


def add_product_(
    total: Float[Tensor, "n m"],
    a: Float[Tensor, "n k"],
    b: Float[Tensor, "k m"],
    *,
    first: bool,
    kernels: str = "auto",
):
    """Set ``total`` to ``a @ b`` where it is the first, else add it. Not differentiable.

    On CUDA the GEMM itself accumulates: ``total`` is read and written once, and no product is made apart.
    """
    if a.dtype == total.dtype:
        torch.addmm(total, a, b, beta=1 - first, out=total)
    elif kernels != "torch" and _backend.on_cuda(a):
        torch.ops.moekit.add_product_(total, a, b, first)
    elif first:
        total.copy_(a @ b)
    else:
        total += a @ b


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
