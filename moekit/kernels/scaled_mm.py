"""Products of eight-bit numbers: rows with a matrix, groups of rows with theirs, and weights' gradients.

``kernels="torch"`` defines them: elements times scales, multiplied as bfloat16 where scales are powers of two
and the result is bfloat16, else as float32; both hold them exactly. ``"native"`` uses a device's units for
eight bits: torch's products, and a Triton kernel for weights' gradients, which can add them to a buffer.

What is summed over comes last in both operands: a matrix (K, N) is kept as (N, K).

Axes: r rows in the order of E groups, K and N features, b scales.
"""

from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moekit.kernels._backend import (
    TensorDescriptor,
    check_shapes,
    jit,
    loop_bound,
    n_processors,
    operator,
    tl,
)
from moekit.kernels.grouped_mm import (
    BLOCK_M,
    grouped_mm,
    grouped_weight_grad,
    quarters_of,
    store_tile,
    tile_of,
)
from moekit.kernels.quantize import (
    MX,
    ROWWISE,
    STEP,
    Columns,
    Format,
    Quantized,
    dequantize,
    padded_ends,
    padded_positions,
)

functional: Any = torch.nn.functional  # its stubs lack grouped products of eight bits


def scaled_mm(
    x: Quantized, weights: Quantized, *, dtype: torch.dtype, kernels: str = "auto"
) -> Float[Tensor, "r N"]:
    """Return ``x @ weights.T`` of x (r, K) and weights (N, K). Not differentiable."""
    n, k = len(weights.values), x.values.shape[-1]
    check_shapes("scaled_mm", weights=(weights.values, (n, k)))
    if _is_native(kernels, x, dtype):
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
    if _is_native(kernels, rows, dtype):
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
    if _is_native(kernels, rows, dtype):
        operands = (rows.values, rows.scales, grad.values, grad.scales, rows.ends)
        if into is not None:
            return torch.ops.moekit.scaled_weight_grad_into(*operands, into)
        return torch.ops.moekit.scaled_weight_grad(*operands, dtype)
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


def why_emulated(
    form: Format,
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    *,
    over_tokens: bool = False,
) -> str | None:
    """Return why products of a format are made of wider ones on a device; None where it has units for it.

    ``dtype`` is that of the result; ``over_tokens`` are products that sum over tokens, weights' gradients.
    """
    if device.type != "cuda":
        return f"a device of type {device.type} has no units for it"
    needs = {ROWWISE: (9, 0), MX: (10, 0), replace(MX, rounding="floor"): (10, 0)}.get(form)
    if not torch.cuda.is_available():
        return "there is no CUDA device to ask"
    if needs is None or (over_tokens and form.block is not None):
        return "moekit uses no units for it"
    if dtype != torch.bfloat16:
        return f"its units give bfloat16, not {dtype}"
    if (capability := torch.cuda.get_device_capability(device)) != needs:
        return f"it needs compute capability {needs[0]}.{needs[1]}, got {capability[0]}.{capability[1]}"
    return None


def _is_native(kernels: str, x: Quantized | Columns, dtype: torch.dtype) -> bool:
    if kernels != "auto":
        return kernels == "native"
    form = ROWWISE if x.scales.dtype == torch.float32 else MX
    reason = why_emulated(form, x.values.device, dtype, over_tokens=isinstance(x, Columns))
    return x.values.dtype == form.elements and reason is None


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
    kinds = functional.ScalingType
    options: dict[str, Any] = dict(output_dtype=dtype, use_fast_accum=True)
    if scales.dtype == torch.float32:
        if offsets is None:
            return functional.scaled_mm(
                x, weights.T, scales, kinds.RowWise, weight_scales.T, kinds.RowWise, **options
            )
        scales, weight_scales = scales.view(-1), weight_scales.view(len(weights), -1)
        recipes = (kinds.RowWise, kinds.RowWise)
    else:
        swizzled = functional.SwizzleType.SWIZZLE_32_4_4
        options |= dict(swizzle_a=swizzled, swizzle_b=swizzled, use_fast_accum=False)
        recipes = (kinds.BlockWise1x32, kinds.BlockWise1x32)
        if offsets is None:
            scales, weight_scales = swizzle(scales), swizzle(weight_scales)
            return functional.scaled_mm(
                x, weights.T, scales.view(-1), recipes[0], weight_scales.view(-1), recipes[1], **options
            )
        scales = swizzle(pad_groups(scales, offsets))
        weight_scales = swizzle(weight_scales).flatten(1)
    return functional.scaled_grouped_mm(
        *(x, weights.mT, scales, recipes[0], weight_scales, recipes[1]), offs=offsets.contiguous(), **options
    )


@_native_mm_op.register_fake
def _native_mm_like(x, scales, weights, weight_scales, offsets, dtype):
    return x.new_empty(len(x), weights.shape[-2], dtype=dtype)


TILE = 128  # rows of scales that the hardware reads together, with four columns


def swizzle(scales: Shaped[Tensor, "*E n b"]) -> Shaped[Tensor, "*E n1 b1"]:
    """Lay scales of blocks out as the hardware reads them, padded to whole tiles of 128 rows and 4 columns.

    A tile is 32 times 16 bytes: of rows i, i + 32, i + 64 and i + 96 four columns each.

    References
    ----------
    cuBLAS documentation, 1D block scaling factors layout. https://docs.nvidia.com/cuda/cublas
    """
    n, b = scales.shape[-2:]
    padded = torch.nn.functional.pad(scales.view(torch.uint8), (0, -b % 4, 0, -n % TILE))
    tiles = rearrange(padded, "... (n i j) (b c) -> ... n b j i c", i=4, j=32, c=4)
    return tiles.contiguous().view(padded.shape).view(scales.dtype)


def pad_groups(scales: Shaped[Tensor, "r b"], offsets: Int[Tensor, " E"]) -> Shaped[Tensor, "R b"]:
    """Let the rows of each group begin at a tile, with room for any groups; no host sync."""
    ends, room = padded_ends(offsets, len(scales), TILE)
    at = padded_positions(offsets, len(scales), ends, room)
    out = scales.new_zeros(room + 1, scales.shape[1], dtype=torch.uint8)
    return out.index_copy_(0, at, scales.view(torch.uint8))[:room].view(scales.dtype)


# --- Triton's product over tokens -----------------------------------------------------


@operator("moekit::scaled_weight_grad")
def _weight_grad_op(
    rows: Tensor, scales: Tensor, grad: Tensor, grad_scales: Tensor, ends: Tensor, dtype: torch.dtype
) -> Tensor:
    out = _weight_grad_like(rows, scales, grad, grad_scales, ends, dtype)
    _launch_weight_grad(rows, scales, grad, grad_scales, ends, out, add=False)
    return out


@_weight_grad_op.register_fake
def _weight_grad_like(rows, scales, grad, grad_scales, ends, dtype):
    return rows.new_empty(len(ends), len(rows), len(grad), dtype=dtype)


@operator("moekit::scaled_weight_grad_into", mutates_args=("into",))
def _weight_grad_into_op(
    rows: Tensor, scales: Tensor, grad: Tensor, grad_scales: Tensor, ends: Tensor, into: Tensor
) -> None:
    _launch_weight_grad(rows, scales, grad, grad_scales, ends, into, add=True)


@_weight_grad_into_op.register_fake
def _(rows, scales, grad, grad_scales, ends, into):
    return None


def _launch_weight_grad(
    rows: Tensor, scales: Tensor, grad: Tensor, grad_scales: Tensor, ends: Tensor, out: Tensor, *, add: bool
) -> None:
    if not out.is_contiguous():
        raise ValueError(f"scaled_weight_grad needs a contiguous buffer, got strides {out.stride()}")
    e, k, n = out.shape
    if not out.numel():
        return
    is_long = rows.shape[1] >= 2048 * e  # else two programs a processor hide the ends of each other's groups
    block_n, n_programs, n_warps, n_stages = (256, 1, 8, 4) if is_long else (128, 2, 4, 3)
    _multiply_columns[(n_programs * n_processors(rows.device),)](
        TensorDescriptor.from_tensor(rows, [BLOCK_M, STEP]),
        TensorDescriptor.from_tensor(grad, [block_n, STEP]),
        *(scales.T.contiguous(), grad_scales.T.contiguous(), out),
        *(quarters_of(out, block_n, add=add), ends),
        **dict(n_groups=e, K=k, N=n, ADD=add, BLOCK_M=BLOCK_M, BLOCK_N=block_n, STEP=STEP),
        **dict(num_warps=n_warps, num_stages=n_stages),
    )


@jit
def _multiply_columns(
    a, b, a_scales, b_scales, out, quarters, ends,
    n_groups: tl.constexpr, K: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    n_m: tl.constexpr = (K + BLOCK_M - 1) // BLOCK_M
    n_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(loop_bound(tl.program_id(0)), n_groups * n_m * n_n, loop_bound(tl.num_programs(0))):
        e, m, n, start, end = tile_of(tile, ends, n_m, n_n)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for row in range(loop_bound(start), loop_bound(end), STEP):  # groups are padded to whole steps
            total = tl.dot(a.load([m * BLOCK_M, row]), b.load([n * BLOCK_N, row]).T, total)
        at, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        by_row = tl.load(a_scales + e * K + at, mask=at < K, other=0.0)
        by_column = tl.load(b_scales + e * N + columns, mask=columns < N, other=0.0)
        total = total * by_row[:, None] * by_column[None, :]
        store_tile(total, out, quarters, e, m, n, K, N, ADD, BLOCK_M, BLOCK_N)


register_flop_formula([torch.ops.moekit.native_mm])(lambda x, _, w, *__, **___: 2 * x[0] * x[1] * w[-2])
register_flop_formula([torch.ops.moekit.scaled_weight_grad, torch.ops.moekit.scaled_weight_grad_into])(
    lambda a, _, b, __, ends, *___, **____: 2 * a[0] * (a[1] - STEP * ends[0]) * b[0]  # without padding
)
