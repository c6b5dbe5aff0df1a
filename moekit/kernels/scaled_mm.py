"""Products of eight-bit numbers: rows with a matrix, groups of rows with theirs, and weights' gradients.

``kernels="torch"`` defines them: elements times scales, multiplied as bfloat16 where scales are powers of two
and the result is bfloat16, else as float32; both hold them exactly. ``"native"`` is torch's product on a
device's units for eight bits.

What is summed over comes last in both operands: a matrix (K, N) is kept as (N, K).

Axes: r rows in the order of E groups, K and N features, b scales.
"""

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moekit.kernels._backend import check_shapes, operator
from moekit.kernels.grouped_mm import grouped_mm, grouped_weight_grad
from moekit.kernels.quantize import FP8_ROWWISE, MXFP8, Columns, Format, Quantized, dequantize

functional: Any = torch.nn.functional  # its stubs lack grouped products of eight bits


def scaled_mm(
    x: Quantized, weights: Quantized, *, dtype: torch.dtype, kernels: str = "auto"
) -> Float[Tensor, "r N"]:
    """Return ``x @ weights.T`` of x (r, K) and weights (N, K). Not differentiable."""
    n, k = len(weights.values), x.values.shape[-1]
    check_shapes("scaled_mm", weights=(weights.values, (n, k)))
    if _is_native(kernels, x):
        return torch.ops.moekit.native_mm(*x, *weights, None, dtype)
    wide = _exact_in(x, dtype)
    return (dequantize(x, wide) @ dequantize(weights, wide).T).to(dtype)


def scaled_grouped_mm(
    rows: Quantized,
    weights: Quantized,
    offsets: Int[Tensor, " E"],
    *,
    dtype: torch.dtype,
    out: Float[Tensor, "r N"] | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "r N"]:
    """Return the rows (r, K) of each group times its matrix of (E, N, K), transposed. Not differentiable.

    Rows past the last offset are never read, and undefined in the result, which goes to ``out`` where given.
    """
    (r, k), (e, n, _) = rows.values.shape, weights.values.shape
    check_shapes(
        "scaled_grouped_mm",
        weights=(weights.values, (e, n, k)),
        offsets=(offsets, (e,)),
        out=(out, (r, n)),
    )
    if _is_native(kernels, rows):
        product = torch.ops.moekit.native_mm(*rows, *weights, offsets, dtype)
    else:
        wide = _exact_in(rows, dtype)
        product = grouped_mm(
            dequantize(rows, wide), dequantize(weights, wide).mT, offsets, kernels=_plain(wide, offsets)
        ).to(dtype)
    return product if out is None else out.copy_(product)


def scaled_weight_grad(
    rows: Columns,
    grad: Columns,
    *,
    dtype: torch.dtype,
    into: Float[Tensor, "E K N"] | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "E K N"] | None:
    """Return each group's ``rows^T @ grad``, or add it to a buffer. Not differentiable.

    Of columns (K, R) and (N, R), made with the same offsets.
    """
    (k, r), n = rows.values.shape, len(grad.values)
    check_shapes("scaled_weight_grad", grad=(grad.values, (n, r)), into=(into, (len(rows.ends), k, n)))
    if _is_native(kernels, rows):
        product = torch.ops.moekit.native_weight_grad(
            rows.values, rows.scales, grad.values, grad.scales, rows.ends, dtype
        )
    else:
        wide = _exact_in(rows, dtype)
        product = grouped_weight_grad(
            rows.wide(wide), grad.wide(wide), rows.ends, kernels=_plain(wide, rows.ends)
        )
        assert product is not None  # there is no buffer
    if into is None:
        return product.to(dtype)
    into.add_(product)


def _exact_in(x: Quantized | Columns, dtype: torch.dtype) -> torch.dtype:
    """Return a dtype that holds elements times scales, and whose products sum in float32."""
    if dtype == torch.bfloat16 and x.scales.dtype == torch.float8_e8m0fnu:
        return dtype
    return torch.promote_types(dtype, torch.float32)


def _plain(dtype: torch.dtype, like: Tensor) -> str:
    """Return the kernels of ordinary grouped products: torch has none of float64, nor of float32 on CUDA."""
    if dtype == torch.float64:
        return "loop"
    return "triton" if like.is_cuda and dtype == torch.float32 else "torch"


def why_emulated(form: Format, device: torch.device) -> str | None:
    """Return why products of a format are made of wider ones on a device; None where it has units for it."""
    if device.type != "cuda":
        return f"a device of type {device.type} has no units for it"
    capability = torch.cuda.get_device_capability(device)
    needs = {FP8_ROWWISE: (9, 0), MXFP8: (10, 0), replace(MXFP8, rounding="floor"): (10, 0)}.get(form)
    if needs is None:
        return "moekit knows no units for it"
    if capability != needs:
        return f"it needs compute capability {needs[0]}.{needs[1]}, got {capability[0]}.{capability[1]}"
    return None


def _is_native(kernels: str, x: Quantized | Columns) -> bool:
    if kernels != "auto":
        return kernels == "native"
    form = FP8_ROWWISE if x.scales.dtype == torch.float32 else MXFP8
    return x.values.dtype == form.elements and why_emulated(form, x.values.device) is None


# --- Torch's products on a device's own units -----------------------------------------


@operator("moekit::native_mm")
def _native_mm_op(
    x: Tensor,
    scales: Tensor,
    weights: Tensor,
    weight_scales: Tensor,
    offsets: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    if not x.numel():
        return _native_mm_like(x, scales, weights, weight_scales, offsets, dtype)
    recipe = _recipe(scales)
    if offsets is None:
        return functional.scaled_mm(
            *(x, weights.T, scales, recipe, weight_scales.T, recipe), output_dtype=dtype, use_fast_accum=True
        )
    return functional.scaled_grouped_mm(
        *(x, weights.mT, scales.view(-1), recipe, weight_scales.view(len(weights), -1), recipe),
        offs=offsets.contiguous(),
        output_dtype=dtype,
        use_fast_accum=True,
    )


@_native_mm_op.register_fake
def _native_mm_like(x, scales, weights, weight_scales, offsets, dtype):
    return x.new_empty(len(x), weights.shape[-2], dtype=dtype)


@operator("moekit::native_weight_grad")
def _native_weight_grad_op(
    rows: Tensor, scales: Tensor, grad: Tensor, grad_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    recipe = _recipe(scales)
    return functional.scaled_grouped_mm(
        *(rows, grad.T, scales.T.contiguous().view(-1), recipe, grad_scales.T.contiguous().view(-1), recipe),
        offs=ends,
        output_dtype=dtype,
        use_fast_accum=True,
    )


@_native_weight_grad_op.register_fake
def _(rows, scales, grad, grad_scales, ends, dtype):
    return rows.new_empty(len(ends), len(rows), len(grad), dtype=dtype)


def _recipe(scales: Tensor) -> Any:
    return (
        functional.ScalingType.RowWise
        if scales.dtype == torch.float32
        else functional.ScalingType.BlockWise1x32
    )


register_flop_formula([torch.ops.moekit.native_mm])(lambda x, _, w, *__, **___: 2 * x[0] * x[1] * w[-2])
register_flop_formula([torch.ops.moekit.native_weight_grad])(
    lambda a, _, b, *__, **___: 2 * a[0] * a[1] * b[0]
)
