"""Rows into the order of their experts, and back: no sort over rows, no atomics on floats, no scatter-add.

``slots`` (t, k) says where in expert order route (token, choice) lies: rows of one expert stand together, in
the order of their tokens. A token is read once for its k rows, and a sum over a token's rows is made by one
program in a fixed order.

Axes: t tokens, k choices, r = t * k rows, d features, E experts.
"""

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from moekit.kernels._backend import (
    INTERPRETED,
    check_shapes,
    jit,
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
    warps_of_row,
)

Slots = Int[Tensor, "t k"]


# --- Where each route goes ------------------------------------------------------------


def expert_slots(expert_ids: Int[Tensor, "t k"], n_experts: int, *, kernels: str = "auto") -> Slots:
    """Return the place of each route in expert order: by expert, then token, then choice. int64.

    The reference sorts the routes' ids (not rows). The kernels count each block of routes, sum the counts
    over blocks and experts, and rank within the block.
    """
    if use_triton("expert_slots", kernels, expert_ids):
        return torch.ops.moekit.expert_slots(expert_ids, n_experts)
    return invert(expert_ids.flatten().argsort(stable=True)).view(expert_ids.shape)


def count_experts(
    expert_ids: Int[Tensor, "t k"],
    n_experts: int,
    mask: Bool[Tensor, " t"] | None = None,
    *,
    kernels: str = "auto",
) -> Int[Tensor, " E"]:
    """Count rows per expert, of the tokens where ``mask`` is true. int64; no host sync.

    The kernel counts each block of routes, without the reference's atomics on few addresses.
    """
    if use_triton("count_experts", kernels, expert_ids):
        if mask is not None:
            expert_ids = expert_ids.masked_fill(~mask[:, None], -1)  # no expert's
        return torch.ops.moekit.count_experts(expert_ids, n_experts)
    ones = torch.ones_like(expert_ids) if mask is None else mask[:, None].expand_as(expert_ids).long()
    counts = torch.zeros(n_experts, dtype=torch.int64, device=expert_ids.device)
    return counts.scatter_add_(0, expert_ids.flatten(), ones.flatten())


def invert(order: Int[Tensor, " n"]) -> Int[Tensor, " n"]:
    """Return the inverse of a permutation."""
    return torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))


# --- Rows and tokens, differentiable --------------------------------------------------


def to_rows(x: Float[Tensor, "t d"], slots: Slots, *, kernels: str = "auto") -> Float[Tensor, "r d"]:
    """Put each token into its k slots. Pure and differentiable: the gradient sums a token's rows."""
    return _ToRows.apply(x, slots, kernels)


def to_tokens(
    rows: Float[Tensor, "r d"],
    slots: Slots,
    weights: Float[Tensor, "t k"] | None = None,
    *,
    kernels: str = "auto",
) -> Float[Tensor, "t d"]:
    """Sum each token's k rows, times their weights where given. The sum is in float32 at least.

    Pure and differentiable in rows and weights; with weights it keeps the rows.
    """
    return _ToTokens.apply(rows, slots, weights, kernels)


class _ToRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, slots, kernels):
        ctx.save_for_backward(slots)
        ctx.kernels = kernels
        return scatter(x, slots, kernels=kernels)

    @staticmethod
    def backward(ctx, *grads):
        (slots,) = ctx.saved_tensors
        return gather_sum(grads[0], slots, kernels=ctx.kernels), None, None


class _ToTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, slots, weights, kernels):
        ctx.save_for_backward(rows if weights is not None else None, slots, weights)
        ctx.kernels = kernels
        return gather_sum(rows, slots, weights, kernels=kernels)

    @staticmethod
    def backward(ctx, *grads):
        rows, slots, weights = ctx.saved_tensors
        if weights is None:
            return scatter(grads[0], slots, kernels=ctx.kernels), None, None, None
        grad_rows, grad_weights = gather_sum_backward(grads[0], rows, slots, weights, kernels=ctx.kernels)
        return grad_rows, None, grad_weights, None


# --- The three passes, not differentiable ---------------------------------------------


def scatter(x: Float[Tensor, "t d"], slots: Slots, *, kernels: str = "auto") -> Float[Tensor, "r d"]:
    """Return rows with ``rows[slots[i, j]] = x[i]``: (1 + k) values moved a token and feature."""
    check_shapes("scatter", x=(x, (len(slots), x.shape[-1])))
    if use_triton("scatter", kernels, x):
        return torch.ops.moekit.scatter_rows(x, slots)
    return x[invert(slots.flatten()) // slots.shape[1]]


def scatter_quantized(
    x: Float[Tensor, "t d"], slots: Slots, form: Format, *, wide: bool = False, kernels: str = "auto"
) -> tuple[Quantized, Float[Tensor, "r d"] | None]:
    """Return what :func:`scatter` does, each row rounded to a format; with ``wide`` as it is, too."""
    check_shapes("scatter_quantized", x=(x, (len(slots), x.shape[-1])))
    if has_kernel("scatter_quantized", form, x, kernels):
        values, scales, rows = torch.ops.moekit.scatter_quantized(x, slots, wide)
        return Quantized(values, scales[:, None]), rows if wide else None
    q = quantize(x, form, kernels="torch")
    token = invert(slots.flatten()) // slots.shape[1]
    values = q.values.view(torch.uint8)[token].view(form.elements)
    scales = q.scales.view(torch.uint8)[token].view(q.scales.dtype)
    return Quantized(values, scales), x[token] if wide else None


def gather_sum(
    rows: Float[Tensor, "r d"],
    slots: Slots,
    weights: Float[Tensor, "t k"] | None = None,
    *,
    base: Float[Tensor, "t d"] | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "t d"]:
    """Return ``sum over j of weights[i, j] rows[slots[i, j]]``: (k + 1) values moved a token and feature."""
    d = rows.shape[-1]
    check_shapes(
        "gather_sum",
        rows=(rows, (slots.numel(), d)),
        weights=(weights, slots.shape),
        base=(base, (len(slots), d)),
    )
    if use_triton("gather_sum", kernels, rows):
        return torch.ops.moekit.gather_sum(rows, slots, weights, base)
    wide = rows[slots].to(torch.promote_types(rows.dtype, torch.float32))
    total = (wide if weights is None else wide * weights[..., None]).sum(1)
    total = total if base is None else total + base
    # In a compiled Function of torch 2.11 a result that is also an intermediate has no gradient.
    return total if total.dtype == rows.dtype else total.to(rows.dtype)


def gather_sum_backward(
    grad: Float[Tensor, "t d"],
    rows: Float[Tensor, "r d"],
    slots: Slots,
    weights: Float[Tensor, "t k"],
    *,
    kernels: str = "auto",
) -> tuple[Float[Tensor, "r d"], Float[Tensor, "t k"]]:
    """Return the gradients of rows and weights in one pass: (1 + 2 k) values moved a token and feature."""
    d = rows.shape[-1]
    check_shapes(
        "gather_sum_backward",
        grad=(grad, (len(slots), d)),
        rows=(rows, (slots.numel(), d)),
        weights=(weights, slots.shape),
    )
    if use_triton("gather_sum_backward", kernels, rows):
        return torch.ops.moekit.gather_sum_backward(grad, rows, slots, weights)
    wide = grad.to(weights.dtype)
    by_route = (wide[:, None] * weights[..., None]).flatten(0, 1).to(rows.dtype)
    return by_route[invert(slots.flatten())], (wide[:, None] * rows[slots]).sum(-1)


# --- Launches -------------------------------------------------------------------------

ROUTES = 128  # a block of routes


@operator("moekit::expert_slots")
def _expert_slots_op(expert_ids: Tensor, n_experts: int) -> Tensor:
    expert_ids = expert_ids.contiguous()
    slots, counts = _slots_like(expert_ids, n_experts), _count_blocks(expert_ids, n_experts)
    # Rows through each block's of an expert: those of smaller experts, and of this one in earlier blocks.
    through, n_blocks = counts.flatten().cumsum(0), counts.shape[1]
    if n_blocks:
        _rank[(n_blocks,)](expert_ids, through, slots, slots.numel(), n_blocks=n_blocks, ROUTES=ROUTES)
    return slots


@_expert_slots_op.register_fake
def _slots_like(expert_ids, n_experts):
    return expert_ids.new_empty(expert_ids.shape, dtype=torch.int64)


@operator("moekit::count_experts")
def _count_experts_op(expert_ids: Tensor, n_experts: int) -> Tensor:
    return _count_blocks(expert_ids.contiguous(), n_experts).sum(1)


@_count_experts_op.register_fake
def _(expert_ids, n_experts):
    return expert_ids.new_empty(n_experts, dtype=torch.int64)


def _count_blocks(expert_ids: Tensor, n_experts: int) -> Tensor:
    """Return each expert's routes in each block, (E, blocks) int32."""
    n = expert_ids.numel()
    n_blocks = -(-n // ROUTES)
    counts = expert_ids.new_empty(n_experts, n_blocks, dtype=torch.int32)
    if n:
        _count[(n_blocks,)](
            *(expert_ids, counts, n),
            **dict(n_experts=n_experts, n_blocks=n_blocks, ROUTES=ROUTES, E=next_power_of_2(n_experts)),
        )
    return counts


@operator("moekit::scatter_rows")
def _scatter_op(x: Tensor, slots: Tensor) -> Tensor:
    x, slots = x.contiguous(), slots.contiguous()
    rows = _rows_like(x, slots)
    if rows.numel():
        # One warp a token: 0.89 of a copy's rate at E = 128 on an H200, four 0.88 (docs/LOG.md).
        _scatter[_grid(x)](x, slots, rows, x.shape[1], slots.shape[1], BLOCK=_block(x), num_warps=1)
    return rows


@_scatter_op.register_fake
def _rows_like(x, slots):
    return x.new_empty(slots.numel(), x.shape[1])


@operator("moekit::scatter_quantized")
def _scatter_quantized_op(x: Tensor, slots: Tensor, wide: bool) -> tuple[Tensor, Tensor, Tensor]:
    x, slots = x.contiguous(), slots.contiguous()
    values, scales, rows = outputs = _quantized_rows_like(x, slots, wide)
    if values.numel():
        block = next_power_of_2(x.shape[1])
        _scatter_quantized[(len(x),)](
            *(x, slots, values, scales, rows, x.shape[1], slots.shape[1]),
            **dict(WIDE=wide, INTERPRETED=INTERPRETED, BLOCK=block, num_warps=warps_of_row(block)),
        )
    return outputs


@_scatter_quantized_op.register_fake
def _quantized_rows_like(x, slots, wide):
    r, d = slots.numel(), x.shape[1]
    return (
        x.new_empty(r, d, dtype=torch.float8_e4m3fn),
        x.new_empty(r, dtype=torch.float32),
        x.new_empty(r if wide else 0, d),
    )


@operator("moekit::gather_sum")
def _gather_sum_op(rows: Tensor, slots: Tensor, weights: Tensor | None, base: Tensor | None) -> Tensor:
    rows, slots = rows.contiguous(), slots.contiguous()
    weights = None if weights is None else weights.contiguous()
    base = None if base is None else base.contiguous()
    out = _tokens_like(rows, slots, weights, base)
    if out.numel():
        _gather_sum[_grid(out)](
            rows, slots, weights, base, out, rows.shape[1], slots.shape[1], BLOCK=_block(out)
        )
    return out


@_gather_sum_op.register_fake
def _tokens_like(rows, slots, weights, base):
    return rows.new_empty(len(slots), rows.shape[1])


@operator("moekit::gather_sum_backward")
def _gather_sum_backward_op(
    grad: Tensor, rows: Tensor, slots: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    grad, rows, slots, weights = (z.contiguous() for z in (grad, rows, slots, weights))
    grad_rows, grad_weights = _gradients_like(grad, rows, slots, weights)
    if grad_weights.numel():
        _gather_sum_backward[(slots.numel(),)](
            *(grad, rows, slots, weights, grad_rows, grad_weights),
            *(rows.shape[1], slots.shape[1]),
            BLOCK=min(_block(grad), 2048),
        )
    return grad_rows, grad_weights


@_gather_sum_backward_op.register_fake
def _gradients_like(grad, rows, slots, weights):
    return rows.new_empty(rows.shape), weights.new_empty(weights.shape)


def _block(x: Tensor) -> int:
    return min(next_power_of_2(x.shape[1]), 4096)


def _grid(x: Tensor) -> tuple[int, int]:
    return len(x), -(-x.shape[1] // _block(x))


# --- Kernels --------------------------------------------------------------------------


@jit
def _count(expert_ids, counts, n, n_experts: tl.constexpr, n_blocks, ROUTES: tl.constexpr, E: tl.constexpr):
    block = tl.program_id(0)
    route = block * ROUTES + tl.arange(0, ROUTES)
    ids = tl.load(expert_ids + route, mask=route < n, other=-1)
    expert = tl.arange(0, E)
    here = tl.sum((ids[:, None] == expert[None, :]).to(tl.int32), 0)
    tl.store(counts + expert * n_blocks + block, here, mask=expert < n_experts)


@jit
def _rank(expert_ids, through, slots, n, n_blocks, ROUTES: tl.constexpr):
    block = tl.program_id(0)
    at = tl.arange(0, ROUTES)
    route = block * ROUTES + at
    ids = tl.load(expert_ids + route, mask=route < n, other=-1)
    same = ids[:, None] == tl.load(expert_ids + block * ROUTES + at, mask=route < n, other=-2)[None, :]
    earlier = tl.sum((same & (at[None, :] < at[:, None])).to(tl.int32), 1)
    of_expert = ids * n_blocks + block - 1  # the sum through the block before, of this expert
    first = tl.load(through + of_expert, mask=(route < n) & (of_expert >= 0), other=0)
    tl.store(slots + route, first + earlier, mask=route < n)


@jit
def _scatter(x, slots, rows, d: tl.constexpr, k: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * d + column, mask=column < d)
    for j in tl.static_range(k):
        slot = tl.load(slots + token * k + j)
        tl.store(rows + slot * d + column, value, mask=column < d, cache_modifier=".cs")


@jit
def _scatter_quantized(
    x, slots, values, scales, rows, d: tl.constexpr, k: tl.constexpr,
    WIDE: tl.constexpr, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    value = tl.load(x + token * d + column, mask=column < d, other=0.0)
    scale, inverse = scale_of_magnitude(tl.max(magnitude(value.to(tl.float32))))
    low = to_fp8(value.to(tl.float32) * inverse, INTERPRETED)
    for j in tl.static_range(k):
        slot = tl.load(slots + token * k + j)
        tl.store(values + slot * d + column, low, mask=column < d, cache_modifier=".cs")
        tl.store(scales + slot, scale)
        if WIDE:
            tl.store(rows + slot * d + column, value, mask=column < d, cache_modifier=".cs")


@jit
def _gather_sum(rows, slots, weights, base, out, d: tl.constexpr, k: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(k):
        slot = tl.load(slots + token * k + j)
        value = tl.load(rows + slot * d + column, mask=column < d, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.load(weights + token * k + j)
        total += value
    if base is not None:
        total += tl.load(base + token * d + column, mask=column < d, other=0.0).to(tl.float32)
    tl.store(out + token * d + column, total.to(out.dtype.element_ty), mask=column < d)


@jit
def _gather_sum_backward(
    grad, rows, slots, weights, grad_rows, grad_weights, d: tl.constexpr, k: tl.constexpr, BLOCK: tl.constexpr
):
    route = tl.program_id(0).to(tl.int64)
    token = route // k
    slot, weight = tl.load(slots + route), tl.load(weights + route)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        arriving = tl.load(grad + token * d + column, mask=column < d, other=0.0).to(tl.float32)
        total += arriving * tl.load(rows + slot * d + column, mask=column < d, other=0.0).to(tl.float32)
        tl.store(
            grad_rows + slot * d + column, (arriving * weight).to(grad_rows.dtype.element_ty), mask=column < d
        )
    tl.store(grad_weights + route, tl.sum(total))
