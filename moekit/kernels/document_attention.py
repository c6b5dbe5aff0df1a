"""Causal attention inside packed documents, by Triton.

A block of queries starts at the first of its documents and ends at itself, however many there are, so
shapes are static and nothing waits for the host. Every sum has one fixed order. Of scores, rows are queries
and columns are keys. Blocks of a loop whose pairs all see each other need no mask. Where heads are 128 wide,
these blocks use nearly all registers of an H200 and spill next to none.

Axes: b sequences, s positions, n query heads, m key and value heads that n / m of them share, h d_head.
"""

import torch
from torch import Tensor

from moekit.kernels._backend import jit, loop_bound, tl

FORWARD = dict(ROWS=128, COLUMNS=64, num_warps=8, num_stages=2)
BACKWARD_Q = dict(ROWS=128, COLUMNS=64, num_warps=8, num_stages=2)
BACKWARD_KV = dict(ROWS=32, COLUMNS=128, num_warps=8, num_stages=2)  # COLUMNS a multiple of ROWS
DELTA_ROWS = 64
LOG2_E = tl.constexpr(1.4426950408889634)  # pyright: ignore[reportCallIssue]


def attend_within(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Fill out (b, n, s, h) and lse (b, n, s, 1) with attention from each document's start."""
    q, k, v = _rows(q), _rows(k), _rows(v)
    b, n, s, h = q.shape
    _forward[(-(-s // FORWARD["ROWS"]), b * n)](
        *(q, k, v, starts, out, lse, s),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        *(n, n // k.shape[1], h, h**-0.5),
        **FORWARD,
    )
    return out, lse


def attend_within_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Fill the gradients of q, k and v, given that of out."""
    grad, q, k, v, out = (_rows(x) for x in (grad, q, k, v, out))
    b, n, s, h = q.shape
    group = n // k.shape[1]
    delta = torch.empty_like(lse)
    _delta[(-(-s // DELTA_ROWS), b * n)](
        *(grad, out, delta, s, *grad.stride()[:3], *out.stride()[:3], n, h), ROWS=DELTA_ROWS
    )
    inputs = q, k, v, grad, lse, delta
    strides = *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *grad.stride()[:3]
    _backward_q[(-(-s // BACKWARD_Q["ROWS"]), b * n)](
        *(*inputs, starts, grad_q, s, *strides, *grad_q.stride()[:3], n, group, h, h**-0.5),
        **BACKWARD_Q,
    )
    _backward_kv[(-(-s // BACKWARD_KV["COLUMNS"]), b * k.shape[1])](
        *(*inputs, ends, grad_k, grad_v, s, *strides, *grad_k.stride()[:3], *grad_v.stride()[:3]),
        *(n, group, h, h**-0.5),
        **BACKWARD_KV,
    )
    return grad_q, grad_k, grad_v


def _rows(x: Tensor) -> Tensor:
    """Let the elements of a head lie beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --- Kernels --------------------------------------------------------------------------


@jit
def _forward(
    q, k, v, starts, out, lse, s, q_b, q_n, q_s, k_b, k_m, k_s, v_b, v_m, v_s, out_b, out_n, out_s, n,
    group, h: tl.constexpr, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    b, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    row, i = block * ROWS + tl.arange(0, ROWS), tl.arange(0, h)
    there = (row < s)[:, None]
    q_block = tl.load(
        q + b * q_b + head * q_n + row.to(tl.int64)[:, None] * q_s + i[None, :], mask=there, other=0.0
    )
    k += b * k_b + head // group * k_m
    v += b * v_b + head // group * v_m
    start, begin, full = _span_of_rows(starts, b, block, row, s, ROWS, COLUMNS)
    diagonal = block * ROWS
    most = tl.full((ROWS,), -float("inf"), tl.float32)
    total = tl.zeros((ROWS,), tl.float32)
    acc = tl.zeros((ROWS, h), tl.float32)
    scale *= LOG2_E
    acc, total, most = _attend(
        acc, total, most, q_block, k, v, k_s, v_s, row, start, i, s, scale, begin, full, COLUMNS, True
    )
    acc, total, most = _attend(
        acc, total, most, q_block, k, v, k_s, v_s, row, start, i, s, scale, full, diagonal, COLUMNS, False
    )
    end = tl.minimum(diagonal + ROWS, s)
    acc, total, most = _attend(
        acc, total, most, q_block, k, v, k_s, v_s, row, start, i, s, scale, diagonal, end, COLUMNS, True
    )
    acc = (acc / total[:, None]).to(out.dtype.element_ty)
    tl.store(out + b * out_b + head * out_n + row.to(tl.int64)[:, None] * out_s + i[None, :], acc, mask=there)
    tl.store(lse + tl.program_id(1).to(tl.int64) * s + row, (most + tl.log2(total)) / LOG2_E, mask=row < s)


@jit
def _span_of_rows(starts, b, block, row, s, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return where the rows' documents begin, where their columns do, and which on are seen by all rows."""
    if starts is None:
        start, begin, full = row * 0, 0, 0
    else:
        start = tl.load(starts + b * s + row, mask=row < s, other=0)
        begin = tl.load(starts + b * s + block * ROWS) // COLUMNS * COLUMNS
        last = tl.load(starts + b * s + tl.minimum(block * ROWS + ROWS, s) - 1)
        full = tl.minimum((last + COLUMNS - 1) // COLUMNS * COLUMNS, block * ROWS)
    return start, begin, full


@jit
def _attend(
    acc, total, most, q_block, k, v, k_s, v_s, row, start, i, s, scale, begin, end,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, COLUMNS)
    k += tl.cast(begin, tl.int64) * k_s
    v += tl.cast(begin, tl.int64) * v_s
    for first in range(loop_bound(begin), loop_bound(end), COLUMNS):
        column = first + at
        if MASKED:
            k_block = tl.load(k + at[None, :] * k_s + i[:, None], mask=(column < s)[None, :], other=0.0)
            v_block = tl.load(v + at[:, None] * v_s + i[None, :], mask=(column < s)[:, None], other=0.0)
        else:
            k_block = tl.load(k + at[None, :] * k_s + i[:, None])
            v_block = tl.load(v + at[:, None] * v_s + i[None, :])
        scores = tl.dot(q_block, k_block, input_precision="ieee") * scale
        seen = (column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None])
        if MASKED:
            scores = tl.where(seen, scores, -1e30)
        new = tl.maximum(most, tl.max(scores, 1))
        p = tl.exp2(scores - new[:, None])
        if MASKED:
            p = tl.where(seen, p, 0.0)
        shrink = tl.exp2(most - new)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None]
        acc += tl.dot(p.to(v_block.dtype), v_block, input_precision="ieee")
        most = new
        k += COLUMNS * k_s
        v += COLUMNS * v_s
    return acc, total, most


@jit
def _delta(
    grad, out, delta, s, grad_b, grad_n, grad_s, out_b, out_n, out_s, n, h: tl.constexpr,
    ROWS: tl.constexpr,
):  # fmt: skip
    """Sum the products of output and gradient, of each row."""
    b, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    row, i = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, h)
    there, at = (row < s)[:, None], row.to(tl.int64)[:, None]
    x = tl.load(grad + b * grad_b + head * grad_n + at * grad_s + i[None, :], mask=there, other=0.0)
    y = tl.load(out + b * out_b + head * out_n + at * out_s + i[None, :], mask=there, other=0.0)
    total = tl.sum(x.to(tl.float32) * y.to(tl.float32), 1)
    tl.store(delta + tl.program_id(1).to(tl.int64) * s + row, total, mask=row < s)


@jit
def _backward_q(
    q, k, v, grad, lse, delta, starts, grad_q, s, q_b, q_n, q_s, k_b, k_m, k_s, v_b, v_m, v_s, grad_b,
    grad_n, grad_s, out_b, out_n, out_s, n, group, h: tl.constexpr, scale, ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest first
    b, head = (tl.program_id(1) // n).to(tl.int64), (tl.program_id(1) % n).to(tl.int64)
    row, i = block * ROWS + tl.arange(0, ROWS), tl.arange(0, h)
    there, at = (row < s)[:, None], row.to(tl.int64)[:, None]
    q_block = tl.load(q + b * q_b + head * q_n + at * q_s + i[None, :], mask=there, other=0.0)
    g_block = tl.load(grad + b * grad_b + head * grad_n + at * grad_s + i[None, :], mask=there, other=0.0)
    rows = tl.program_id(1).to(tl.int64) * s + row
    sums = tl.load(lse + rows, mask=row < s, other=0.0) * LOG2_E
    deltas = tl.load(delta + rows, mask=row < s, other=0.0)
    k += b * k_b + head // group * k_m
    v += b * v_b + head // group * v_m
    start, begin, full = _span_of_rows(starts, b, block, row, s, ROWS, COLUMNS)
    diagonal = block * ROWS
    acc = tl.zeros((ROWS, h), tl.float32)
    acc = _differentiate_q(
        *(acc, q_block, g_block, k, v, sums, deltas, k_s, v_s, row, start, i, s, scale),
        *(begin, full, COLUMNS, True),
    )
    acc = _differentiate_q(
        *(acc, q_block, g_block, k, v, sums, deltas, k_s, v_s, row, start, i, s, scale),
        *(full, diagonal, COLUMNS, False),
    )
    end = tl.minimum(diagonal + ROWS, s)
    acc = _differentiate_q(
        *(acc, q_block, g_block, k, v, sums, deltas, k_s, v_s, row, start, i, s, scale),
        *(diagonal, end, COLUMNS, True),
    )
    acc = (acc * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q + b * out_b + head * out_n + at * out_s + i[None, :], acc, mask=there)


@jit
def _differentiate_q(
    acc, q_block, g_block, k, v, sums, deltas, k_s, v_s, row, start, i, s, scale, begin, end,
    COLUMNS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, COLUMNS)
    k += tl.cast(begin, tl.int64) * k_s
    v += tl.cast(begin, tl.int64) * v_s
    for first in range(loop_bound(begin), loop_bound(end), COLUMNS):
        column = first + at
        if MASKED:
            k_block = tl.load(k + at[None, :] * k_s + i[:, None], mask=(column < s)[None, :], other=0.0)
            v_block = tl.load(v + at[None, :] * v_s + i[:, None], mask=(column < s)[None, :], other=0.0)
        else:
            k_block = tl.load(k + at[None, :] * k_s + i[:, None])
            v_block = tl.load(v + at[None, :] * v_s + i[:, None])
        scores = tl.dot(q_block, k_block, input_precision="ieee")
        p = tl.exp2(scores * (scale * LOG2_E) - sums[:, None])
        if MASKED:
            p = tl.where((column[None, :] <= row[:, None]) & (column[None, :] >= start[:, None]), p, 0.0)
        d = p * (tl.dot(g_block, v_block, input_precision="ieee") - deltas[:, None])
        acc += tl.dot(d.to(k_block.dtype), tl.trans(k_block), input_precision="ieee")
        k += COLUMNS * k_s
        v += COLUMNS * v_s
    return acc


@jit
def _backward_kv(
    q, k, v, grad, lse, delta, ends, grad_k, grad_v, s, q_b, q_n, q_s, k_b, k_m, k_s, v_b, v_m, v_s,
    grad_b, grad_n, grad_s, grad_k_b, grad_k_m, grad_k_s, grad_v_b, grad_v_m, grad_v_s, n, group,
    h: tl.constexpr, scale, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    m = n // group
    b, head = (tl.program_id(1) // m).to(tl.int64), (tl.program_id(1) % m).to(tl.int64)
    first = tl.program_id(0) * COLUMNS  # the longest
    column, i = first + tl.arange(0, COLUMNS), tl.arange(0, h)
    there, at = (column < s)[:, None], column.to(tl.int64)[:, None]
    k_block = tl.load(k + b * k_b + head * k_m + at * k_s + i[None, :], mask=there, other=0.0)
    v_block = tl.load(v + b * v_b + head * v_m + at * v_s + i[None, :], mask=there, other=0.0)
    if ends is None:
        end = column * 0 + s
        whole, last = s // ROWS * ROWS, s
    else:
        end = tl.load(ends + b * s + column, mask=column < s, other=0)
        whole = tl.load(ends + b * s + first) // ROWS * ROWS
        last = tl.load(ends + b * s + tl.minimum(first + COLUMNS, s) - 1)
    below = tl.minimum(first + COLUMNS, last)
    whole = tl.maximum(whole, first + COLUMNS)
    acc_k = tl.zeros((COLUMNS, h), tl.float32)
    acc_v = tl.zeros((COLUMNS, h), tl.float32)
    for member in range(0, loop_bound(group)):
        of_head = head * group + member
        q_head = q + b * q_b + of_head * q_n
        g_head = grad + b * grad_b + of_head * grad_n
        sums = lse + (b * n + of_head) * s
        deltas = delta + (b * n + of_head) * s
        acc_k, acc_v = _differentiate_kv(
            *(acc_k, acc_v, k_block, v_block, q_head, g_head, sums, deltas, q_s, grad_s, column, end, i, s),
            *(scale, first, below, ROWS, True),
        )
        acc_k, acc_v = _differentiate_kv(
            *(acc_k, acc_v, k_block, v_block, q_head, g_head, sums, deltas, q_s, grad_s, column, end, i, s),
            *(scale, first + COLUMNS, whole, ROWS, False),
        )
        acc_k, acc_v = _differentiate_kv(
            *(acc_k, acc_v, k_block, v_block, q_head, g_head, sums, deltas, q_s, grad_s, column, end, i, s),
            *(scale, whole, last, ROWS, True),
        )
    acc_k = (acc_k * scale).to(grad_k.dtype.element_ty)
    tl.store(grad_k + b * grad_k_b + head * grad_k_m + at * grad_k_s + i[None, :], acc_k, mask=there)
    acc_v = acc_v.to(grad_v.dtype.element_ty)
    tl.store(grad_v + b * grad_v_b + head * grad_v_m + at * grad_v_s + i[None, :], acc_v, mask=there)


@jit
def _differentiate_kv(
    acc_k, acc_v, k_block, v_block, q, grad, lse, delta, q_s, grad_s, column, end, i, s, scale, begin,
    until, ROWS: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, ROWS)
    q += tl.cast(begin, tl.int64) * q_s
    grad += tl.cast(begin, tl.int64) * grad_s
    for first in range(loop_bound(begin), loop_bound(until), ROWS):
        row = first + at
        if MASKED:
            q_block = tl.load(q + at[None, :] * q_s + i[:, None], mask=(row < s)[None, :], other=0.0)
            g_block = tl.load(grad + at[:, None] * grad_s + i[None, :], mask=(row < s)[:, None], other=0.0)
            sums = tl.load(lse + row, mask=row < s, other=0.0) * LOG2_E
            deltas = tl.load(delta + row, mask=row < s, other=0.0)
        else:
            q_block = tl.load(q + at[None, :] * q_s + i[:, None])
            g_block = tl.load(grad + at[:, None] * grad_s + i[None, :])
            sums = tl.load(lse + row) * LOG2_E
            deltas = tl.load(delta + row)
        scores = tl.dot(k_block, q_block, input_precision="ieee")  # transposed, as all below
        p = tl.exp2(scores * (scale * LOG2_E) - sums[None, :])
        if MASKED:
            p = tl.where((row[None, :] >= column[:, None]) & (row[None, :] < end[:, None]), p, 0.0)
        acc_v += tl.dot(p.to(g_block.dtype), g_block, input_precision="ieee")
        d = p * (tl.dot(v_block, tl.trans(g_block), input_precision="ieee") - deltas[None, :])
        acc_k += tl.dot(d.to(q_block.dtype), tl.trans(q_block), input_precision="ieee")
        q += ROWS * q_s
        grad += ROWS * grad_s
    return acc_k, acc_v
