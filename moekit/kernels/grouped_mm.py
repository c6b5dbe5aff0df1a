"""Grouped matrix products: each expert's rows times its own matrix.

Three products make an expert layer: forward ``rows @ weights``, the input's gradient, which is the same with
transposed weights, and the weights' gradient, ``rows^T @ grad`` within each group.

Axes: r rows in the order of E groups, K and N features. ``offsets`` (E,) int32 says where groups end. Rows
past the last end are never read, and undefined in a result.
"""

import importlib
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moekit.kernels._backend import (
    TensorDescriptor,
    aligned,
    check_shapes,
    is_hopper,
    jit,
    loop_bound,
    n_processors,
    operator,
    tl,
    use_triton,
)


def grouped_mm(
    rows: Float[Tensor, "r K"],
    weights: Float[Tensor, "E K N"],
    offsets: Int[Tensor, " E"],
    *,
    out: Float[Tensor, "r N"] | None = None,
    kernels: str = "torch",
) -> Float[Tensor, "r N"]:
    """Multiply the rows of each group by its matrix.

    Differentiable, any number of times, for ``"loop"`` and ``"torch"`` without ``out``; torch's takes a
    contiguous gradient alone.

    Parameters
    ----------
    weights : Float[Tensor, "E K N"]
        Contiguous in one of its last two dims.
    out : Float[Tensor, "r N"], optional
        Where the result goes, contiguous and of its dtype.
    kernels : {"torch", "triton", "quack", "loop"}
        ``torch.nn.functional.grouped_mm``; one persistent Triton kernel; that of quack-kernels; or the loop
        over groups that defines the result, for any dtype, which reads the offsets on the host.
    """
    r, (e, k, n) = len(rows), weights.shape
    check_shapes("grouped_mm", rows=(rows, (r, k)), offsets=(offsets, (e,)), out=(out, (r, n)))
    if kernels == "loop":
        parts = [group @ w for group, w in zip(_groups(rows, offsets), weights, strict=True)]
        parts.append(rows.new_zeros(len(rows) - sum(map(len, parts)), weights.shape[-1]))
        return torch.cat(parts, out=out)
    if kernels == "torch":
        product = _torch_mm(rows.contiguous(), weights, offsets)
        return product if out is None else out.copy_(product)
    if kernels == "triton":
        use_triton("grouped_mm", kernels, rows, multiplies=True)  # or an error
    functional, into = {
        "triton": (torch.ops.moekit.grouped_mm, torch.ops.moekit.grouped_mm_into),
        "quack": (torch.ops.moekit.quack_mm, torch.ops.moekit.quack_mm_into),
    }[kernels]
    if out is None:
        return functional(rows, weights, offsets)
    into(rows, weights, offsets, out)
    return out


def grouped_weight_grad(
    rows: Float[Tensor, "r K"],
    grad: Float[Tensor, "r N"],
    offsets: Int[Tensor, " E"],
    *,
    into: Float[Tensor, "E K N"] | None = None,
    kernels: str = "torch",
) -> Float[Tensor, "E K N"] | None:
    """Return each group's ``rows^T @ grad``, or add it to a buffer. Not differentiable.

    Parameters
    ----------
    into : Float[Tensor, "E K N"], optional
        A buffer, float32 say, to which the products are added in its dtype; then nothing is returned.
    kernels
        As for :func:`grouped_mm`. Triton's and quack's add before they round; the others add the rounded
        product.
    """
    (r, k), n = rows.shape, grad.shape[-1]
    check_shapes("grouped_weight_grad", grad=(grad, (r, n)), into=(into, (len(offsets), k, n)))
    if kernels == "triton" and use_triton("grouped_weight_grad", kernels, rows, multiplies=True):
        if into is not None:
            return torch.ops.moekit.grouped_weight_grad_into(rows, grad, offsets, into)
        return torch.ops.moekit.grouped_weight_grad(rows, grad, offsets)
    if kernels == "quack":
        if into is not None:
            return torch.ops.moekit.quack_weight_grad_into(rows, grad, offsets, into)
        return torch.ops.moekit.quack_weight_grad(rows, grad, offsets)
    if kernels == "loop":
        pairs = zip(_groups(rows, offsets), _groups(grad, offsets), strict=True)
        product = torch.stack([x.T @ y for x, y in pairs])
    else:
        product = _torch_mm(rows.contiguous().T, grad.contiguous(), offsets)
    if into is None:
        return product
    into.add_(product)


def _torch_mm(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    """Return ``torch.nn.functional.grouped_mm``, whose fake form knows bfloat16 alone."""
    offsets = offsets.contiguous()  # it does not look at strides
    if not a.shape[0 if b.ndim == 3 else 1]:  # its backward takes no rows at all for strides that are wrong
        return a @ b.sum(0) if b.ndim == 3 else a.new_zeros(len(offsets), len(a), b.shape[-1])
    if torch.compiler.is_compiling() and a.dtype != torch.bfloat16:
        return torch.ops.moekit.torch_mm(a, b, offsets)
    return F.grouped_mm(aligned(a), aligned(b), offs=offsets)


def _groups(rows: Tensor, offsets: Tensor) -> list[Tensor]:
    ends = offsets.tolist()
    return [rows[start:end] for start, end in zip([0, *ends[:-1]], ends, strict=True)]


# --- Launches -------------------------------------------------------------------------


@operator("moekit::torch_mm")
def _torch_mm_op(a: Tensor, b: Tensor, offsets: Tensor) -> Tensor:
    return F.grouped_mm(aligned(a), aligned(b), offs=offsets)


@_torch_mm_op.register_fake
def _(a, b, offsets):
    return a.new_empty(*(() if b.ndim == 3 else (len(offsets),)), a.shape[0], b.shape[-1])


BLOCK_M = 128  # rows of a tile of the result; its columns are 512 bytes
BLOCK_BYTES = 128  # of what is summed over, a step


@operator("moekit::grouped_mm")
def _grouped_mm_op(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    out = _product_like(rows, weights, offsets)
    _launch(rows, weights, offsets, out)
    return out


@_grouped_mm_op.register_fake
def _product_like(rows, weights, offsets):
    return rows.new_empty(len(rows), weights.shape[-1])


@operator("moekit::grouped_mm_into", mutates_args=("out",))
def _grouped_mm_into_op(rows: Tensor, weights: Tensor, offsets: Tensor, out: Tensor) -> None:
    _launch(rows, weights, offsets, out)


@_grouped_mm_into_op.register_fake
def _nothing(rows, weights, offsets, out):
    return None


def _launch(rows: Tensor, weights: Tensor, offsets: Tensor, out: Tensor) -> None:
    if not out.is_contiguous():
        raise ValueError(f"grouped_mm needs a contiguous out, got strides {out.stride()}")
    e, k, n = weights.shape
    transposed = weights.stride(-1) != 1
    if transposed:
        weights = weights.mT
    weights = weights.contiguous()
    if not out.numel():
        return
    target, rows, weights = aligned(out), aligned(rows.contiguous()), aligned(weights)
    block_k, block_n = BLOCK_BYTES // rows.element_size(), 512 // rows.element_size()
    tile = [block_n, block_k] if transposed else [block_k, block_n]
    _multiply[(n_processors(rows.device),)](
        TensorDescriptor.from_tensor(rows, [BLOCK_M, block_k]),
        TensorDescriptor.from_tensor(rows, [BLOCK_M // 2, block_k]),
        TensorDescriptor.from_tensor(weights.flatten(0, 1), tile),
        TensorDescriptor.from_tensor(target, [BLOCK_M, block_n]),
        *(target, offsets.contiguous()),
        **dict(n_groups=e, K=k, N=n, TRANSPOSED=transposed),
        **dict(BLOCK_M=BLOCK_M, BLOCK_N=block_n, BLOCK_K=block_k),
        **dict(num_warps=8, num_stages=3),
    )
    if target is not out:
        out.copy_(target)


@operator("moekit::grouped_weight_grad")
def _weight_grad_op(rows: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    out = _weight_grad_like(rows, grad, offsets)
    _launch_weight_grad(rows, grad, offsets, out, add=False)
    return out


@_weight_grad_op.register_fake
def _weight_grad_like(rows, grad, offsets):
    return rows.new_empty(len(offsets), rows.shape[1], grad.shape[1])


@operator("moekit::grouped_weight_grad_into", mutates_args=("into",))
def _weight_grad_into_op(rows: Tensor, grad: Tensor, offsets: Tensor, into: Tensor) -> None:
    _launch_weight_grad(rows, grad, offsets, into, add=True)


@_weight_grad_into_op.register_fake
def _(rows, grad, offsets, into):
    return None


def _launch_weight_grad(rows: Tensor, grad: Tensor, offsets: Tensor, out: Tensor, *, add: bool) -> None:
    rows, grad, offsets = aligned(rows.contiguous()), aligned(grad.contiguous()), offsets.contiguous()
    e, k, n = out.shape
    if not out.is_contiguous():
        raise ValueError(f"grouped_weight_grad needs a contiguous buffer, got strides {out.stride()}")
    if not len(rows):
        if not add:
            out.zero_()
        return
    size = rows.element_size()
    quarters = quarters_of(out, 512 // size, add=add) if add else None
    _multiply_transposed[(n_processors(rows.device),)](
        *(rows, grad, out, quarters, offsets),
        **dict(n_groups=e, K=k, N=n, ADD=add),
        **dict(BLOCK_M=BLOCK_M, BLOCK_N=512 // size, BLOCK_R=BLOCK_BYTES // size),
        **dict(num_warps=8, num_stages=3),
    )


def quarters_of(out: Tensor, block_n: int, *, add: bool) -> Any:
    """Return a descriptor of quarters of tiles, which the memory system stores or adds, where it can.

    It adds float32 alone, stores bfloat16 too, and a tile has to be of one matrix.
    """
    e, k, n = out.shape
    dtypes = (torch.float32,) if add else (torch.float32, torch.bfloat16)
    fits = k % BLOCK_M == 0 and n * out.element_size() % 16 == 0 and out.data_ptr() % 16 == 0
    if is_hopper(out) and out.dtype in dtypes and fits:
        return TensorDescriptor.from_tensor(out.view(e * k, n), [BLOCK_M, block_n // 4])
    return None


# quack-kernels wants offsets with a leading 0, and the operands of a weight's gradient as columns.


def _quack() -> Any:
    return importlib.import_module("quack.gemm_interface")


@operator("moekit::quack_mm")
def _quack_mm_op(rows: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    out = _product_like(rows, weights, offsets)
    _quack_mm_into_op(rows, weights, offsets, out)
    return out


_quack_mm_op.register_fake(_product_like)


@operator("moekit::quack_mm_into", mutates_args=("out",))
def _quack_mm_into_op(rows: Tensor, weights: Tensor, offsets: Tensor, out: Tensor) -> None:
    if len(rows):
        rows, weights = aligned(rows.contiguous()), aligned(weights)
        _quack().gemm(rows, weights, out=out, cu_seqlens_m=F.pad(offsets, (1, 0)), tuned=False)


_quack_mm_into_op.register_fake(_nothing)


@operator("moekit::quack_weight_grad")
def _quack_weight_grad_op(rows: Tensor, grad: Tensor, offsets: Tensor) -> Tensor:
    out = _weight_grad_like(rows, grad, offsets)
    if not len(rows):
        return out.zero_()
    rows, grad = aligned(rows.contiguous()), aligned(grad.contiguous())
    _quack().gemm(rows.T, grad, out=out, cu_seqlens_k=F.pad(offsets, (1, 0)), tuned=False)
    return out


_quack_weight_grad_op.register_fake(_weight_grad_like)


@operator("moekit::quack_weight_grad_into", mutates_args=("into",))
def _quack_weight_grad_into_op(rows: Tensor, grad: Tensor, offsets: Tensor, into: Tensor) -> None:
    if len(rows):
        rows, grad = aligned(rows.contiguous()), aligned(grad.contiguous())
        _quack().gemm_add_inplace(rows.T, grad, into, cu_seqlens_k=F.pad(offsets, (1, 0)), tuned=False)


@_quack_weight_grad_into_op.register_fake
def _(rows, grad, offsets, into):
    return None


register_flop_formula(
    [
        torch.ops.moekit.torch_mm,
        torch.ops.moekit.grouped_mm,
        torch.ops.moekit.grouped_mm_into,
        torch.ops.moekit.grouped_weight_grad,
        torch.ops.moekit.grouped_weight_grad_into,
        torch.ops.moekit.quack_mm,
        torch.ops.moekit.quack_mm_into,
        torch.ops.moekit.quack_weight_grad,
        torch.ops.moekit.quack_weight_grad_into,
    ]
)(lambda a, b, *_, **__: 2 * a[0] * a[1] * b[-1])


# --- Kernels --------------------------------------------------------------------------


@jit
def _place(tile, n_m, n_n, GROUP: tl.constexpr):
    """Return the row and column of a tile, neighbours in blocks of GROUP rows, for the L2 cache."""
    in_group = GROUP * n_n
    first = tile // in_group * GROUP
    height = min(n_m - first, GROUP)
    return first + tile % in_group % height, tile % in_group // height


@jit
def _multiply(
    a, half_a, b, c, c_pointer, offsets,
    n_groups: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    tile, seen, start = tl.program_id(0), 0, 0
    n_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    HALF: tl.constexpr = BLOCK_M // 2
    for e in range(n_groups):
        end = tl.load(offsets + e)
        n_m = (end - start + BLOCK_M - 1) // BLOCK_M
        while tile < seen + n_m * n_n:
            m, n = _place(tile - seen, n_m, n_n, 16)
            row, column = start + m * BLOCK_M, n * BLOCK_N
            if row + BLOCK_M <= end:
                out = _tile(a, b, e, row, column, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K)
                c.store([row, column], out.to(c.dtype))
            elif row + HALF < end:
                out = _tile(a, b, e, row, column, K, N, TRANSPOSED, BLOCK_M, BLOCK_N, BLOCK_K)
                _store_until(c_pointer, out, row, end, column, N, BLOCK_M, BLOCK_N)
            else:  # a group's last rows seldom fill a tile
                half = _tile(half_a, b, e, row, column, K, N, TRANSPOSED, HALF, BLOCK_N, BLOCK_K)
                _store_until(c_pointer, half, row, end, column, N, HALF, BLOCK_N)
            tile += tl.num_programs(0)
        seen += n_m * n_n
        start = end


@jit
def _tile(
    a, b, e, row, column,
    K: tl.constexpr, N: tl.constexpr, TRANSPOSED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return a tile of the rows times matrix e, in float32."""
    total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for k in range(0, K, BLOCK_K):
        x = a.load([row, k])  # zeros past K
        if TRANSPOSED:
            y = b.load([e * N + column, k]).T
        else:
            y = b.load([e * K + k, column])
            if K % BLOCK_K:  # where the next group's matrix begins
                y = tl.where((k + tl.arange(0, BLOCK_K) < K)[:, None], y, 0.0)
        total = tl.dot(x, y, total, input_precision="ieee")
    return total


@jit
def _store_until(c, tile, row, end, column, N: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Store a tile's rows that belong to its group."""
    at, columns = row + tl.arange(0, BLOCK_M), column + tl.arange(0, BLOCK_N)
    place = c + at.to(tl.int64)[:, None] * N + columns[None, :]
    tl.store(place, tile.to(c.dtype.element_ty), mask=(at < end)[:, None] & (columns < N)[None, :])


@jit
def tile_of(tile, offsets, n_m: tl.constexpr, n_n: tl.constexpr):
    """Return which matrix a tile is of, its row and column there, and where its group starts and ends."""
    e = tile // (n_m * n_n)
    m, n = _place(tile % (n_m * n_n), n_m, n_n, 16)
    start = tl.load(offsets + e - 1, mask=e > 0, other=0)
    return e, m, n, start, tl.load(offsets + e)


@jit
def _multiply_transposed(
    a, b, out, quarters, offsets,
    n_groups: tl.constexpr, K: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    n_m: tl.constexpr = (K + BLOCK_M - 1) // BLOCK_M
    n_n: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    for tile in range(loop_bound(tl.program_id(0)), n_groups * n_m * n_n, loop_bound(tl.num_programs(0))):
        e, m, n, start, end = tile_of(tile, offsets, n_m, n_n)
        at, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for first in range(loop_bound(start), loop_bound(end), BLOCK_R):
            row = first + tl.arange(0, BLOCK_R)
            inside, row = (row < end)[:, None], row.to(tl.int64)[:, None]
            x = tl.load(a + row * K + at[None, :], mask=inside & (at < K)[None, :], other=0.0)
            y = tl.load(b + row * N + columns[None, :], mask=inside & (columns < N)[None, :], other=0.0)
            total = tl.dot(x.T, y, total, input_precision="ieee")
        store_tile(total, out, quarters, e, m, n, K, N, ADD, BLOCK_M, BLOCK_N)


@jit
def store_tile(
    tile, out, quarters, e, m, n,
    K: tl.constexpr, N: tl.constexpr, ADD: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store tile (m, n) of matrix e, or add it to what is there: by the memory system, given quarters."""
    if quarters is not None:
        row = e * K + m * BLOCK_M
        left, right = _halves(tile, BLOCK_M, BLOCK_N)
        for half in tl.static_range(2):
            one, other = _halves(left if half == 0 else right, BLOCK_M, BLOCK_N // 2)
            column = n * BLOCK_N + half * BLOCK_N // 2
            if ADD:
                quarters.atomic_add([row, column], one)
                quarters.atomic_add([row, column + BLOCK_N // 4], other)
            else:
                quarters.store([row, column], one.to(quarters.dtype))
                quarters.store([row, column + BLOCK_N // 4], other.to(quarters.dtype))
    else:
        at, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
        place = out + e.to(tl.int64) * K * N + at.to(tl.int64)[:, None] * N + columns[None, :]
        mask = (at < K)[:, None] & (columns < N)[None, :]
        if ADD:
            tile += tl.load(place, mask=mask, other=0.0).to(tl.float32)
        tl.store(place, tile.to(out.dtype.element_ty), mask=mask)


@jit
def _halves(x, M: tl.constexpr, N: tl.constexpr):
    """Return the left and the right half of a tile's columns."""
    return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))
