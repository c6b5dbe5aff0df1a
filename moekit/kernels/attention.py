"""Causal attention inside documents, which keeps what its projection gave, its output and a sum a row.

Whole rows go to cuDNN's kernels, which on an H200 are the fastest, or to torch's flash attention where those
do not fit. Packed documents go to Triton kernels: what a row holds is known on the device alone, and varlen
kernels launch a grid for as many documents as there may be. Here a block of queries starts at the first of
its documents and ends at itself, however many there are; shapes are static and nothing waits for the host.
The Triton kernels sum in one fixed order, those of cuDNN do not.

Axes: b sequences, s positions, n query heads, m key and value heads that n / m of them share, h d_head.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.utils._pytree import register_dataclass

from moekit.kernels._backend import INTERPRETED, jit, loop_bound, operator, tl, use_triton
from moekit.kernels.qk_norm_rope import Gain, Rope, qk_norm_rope_backward, qk_norm_rope_forward

D_HEADS = (16, 32, 64, 128)


@dataclass(frozen=True, kw_only=True)
class Documents:
    """Where the document of each position begins and ends: its first position, and the one after its last."""

    starts: Int[Tensor, "b s"]  # int32
    ends: Int[Tensor, "b s"]  # int32


register_dataclass(Documents)


def find_documents(documents: Int[Tensor, "b s"]) -> Documents:
    """Return where runs of equal numbers begin and end. No host sync; shapes do not depend on the numbers."""
    b, s = documents.shape
    at = torch.arange(s, device=documents.device)
    new = documents[:, 1:] != documents[:, :-1]
    edge = torch.ones(b, min(s, 1), dtype=torch.bool, device=documents.device)
    starts = at.where(torch.cat([edge, new], 1), 0).cummax(1).values
    ends = (at + 1).where(torch.cat([new, edge], 1), s).flip(1).cummin(1).values.flip(1)
    return Documents(starts=starts.int(), ends=ends.int())


def has_kernel(who: str, kernels: str, x: Tensor, d_head: int) -> bool:
    """Say whether a function attends to heads of ``d_head`` by these kernels.

    For a d_head of 16, 32, 64 or 128, on CUDA devices in half precision: documents by Triton, whole rows by
    cuDNN or flash attention. Triton's interpreter takes float32 too.

    Raises
    ------
    ValueError
        Where ``"triton"`` cannot run.
    """
    if not use_triton(who, kernels, x):
        return False
    fits = d_head in D_HEADS and (INTERPRETED or x.dtype in (torch.bfloat16, torch.float16))
    if kernels == "triton" and not fits:
        raise ValueError(
            f"{who} needs d_head in {D_HEADS} and half precision for kernels='triton', got {d_head} and "
            f"{x.dtype}; take 'auto'"
        )
    return fits


def causal_attention(
    q: Float[Tensor, "b n s h"],
    k: Float[Tensor, "b m s h"],
    v: Float[Tensor, "b m s h"],
    documents: Documents | None = None,
) -> Float[Tensor, "b n s h"]:
    """Let each position attend to the earlier ones of its document, or of its row, and to itself.

    Pure and differentiable; keeps its arguments, its result and a float32 a row. For what :func:`has_kernel`
    admits. In memory the result is laid out as ``q``.
    """
    b, n, s, h = q.shape
    if k.shape != v.shape or k.shape[::2] != (b, s) or k.shape[3] != h or n % k.shape[1]:
        raise ValueError(
            "causal_attention needs q (b, n, s, h), k and v (b, m, s, h) and m that divides n, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    starts, ends = (None, None) if documents is None else (documents.starts, documents.ends)
    return _CausalAttention.apply(q, k, v, starts, ends)


def attention_of_qkv(
    qkv: Float[Tensor, "b s _"],
    q_gain: Gain,
    k_gain: Gain,
    rope: Rope,
    documents: Documents | None = None,
    *,
    n_heads: int,
    n_kv_heads: int,
    eps: float = 1e-5,
) -> Float[Tensor, "b n s h"]:
    """Return :func:`causal_attention` of what ``moekit.kernels.qk_norm_rope.qk_norm_rope`` makes of ``qkv``.

    Pure and differentiable. Of each position it keeps ``qkv``, the result and a float32 a head: queries and
    keys are made again in the backward. Arguments as for the two; gains are of one head. In memory the heads
    of a position lie beside each other.
    """
    starts, ends = (None, None) if documents is None else (documents.starts, documents.ends)
    return _AttentionOfQKV.apply(qkv, q_gain, k_gain, *rope, starts, ends, n_heads, n_kv_heads, eps)


class _CausalAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, starts, ends):
        out, lse = torch.ops.moekit.causal_attention(q, k, v, starts)
        ctx.save_for_backward(q, k, v, out, lse, starts, ends)
        return out

    @staticmethod
    def backward(ctx, *grads):
        return *torch.ops.moekit.causal_attention_backward(grads[0], *ctx.saved_tensors), None, None


class _AttentionOfQKV(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, qkv, q_gain, k_gain, cos, sin, starts, ends, n_heads, n_kv_heads, eps):
        ctx.options = dict(n_heads=n_heads, n_kv_heads=n_kv_heads, eps=eps)
        heads = qk_norm_rope_forward(qkv, q_gain, k_gain, (cos, sin), **ctx.options)
        out, lse = torch.ops.moekit.causal_attention(*heads, starts)
        ctx.save_for_backward(qkv, q_gain, k_gain, cos, sin, starts, ends, out, lse)
        return out

    @staticmethod
    def backward(ctx, *grads):
        qkv, q_gain, k_gain, cos, sin, starts, ends, out, lse = ctx.saved_tensors
        heads = qk_norm_rope_forward(qkv, q_gain, k_gain, (cos, sin), **ctx.options)
        grads = torch.ops.moekit.causal_attention_backward(grads[0], *heads, out, lse, starts, ends)
        del heads  # before the gradient of qkv comes into being
        eps = ctx.options["eps"]
        return *qk_norm_rope_backward(grads, qkv, q_gain, k_gain, (cos, sin), eps=eps), *[None] * 7


# --- Operators ------------------------------------------------------------------------


@operator("moekit::causal_attention")
def _forward_op(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    if not q.numel():
        return _out_like(q, k, v, starts)
    if q.is_cuda and starts is None:
        if _fits_cudnn(q, k, v):
            return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[:2]
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:2]
        return out, lse[..., None]
    q, k, v = _rows(q), _rows(k), _rows(v)
    out, lse = _out_like(q, k, v, starts)
    b, n, s, h = q.shape
    _forward[(-(-s // FORWARD["ROWS"]), b * n)](
        *(q, k, v, starts, out, lse, s),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3]),
        *(n, n // k.shape[1], h, h**-0.5),
        **FORWARD,
    )
    return out, lse


@_forward_op.register_fake
def _out_like(q, k, v, starts):
    return torch.empty_like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)


@operator("moekit::causal_attention_backward")
def _backward_op(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    starts: Tensor | None,
    ends: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    if not q.numel():
        return _gradients_like(grad, q, k, v, out, lse, starts, ends)
    if q.is_cuda and starts is None:
        s = q.shape[2]
        unused = torch.empty(
            2, dtype=torch.int64, device=q.device
        )  # the state of dropout, of which there is none
        if _fits_cudnn(q, k, v):
            return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(grad, q, k, v, out, lse, unused[0], unused[1], None, None, None, s, s, 0.0, True)
            )
        return torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(grad, q, k, v, out, lse[..., 0], None, None, s, s, 0.0, True, unused, unused)
        )
    grad, q, k, v, out = (_rows(x) for x in (grad, q, k, v, out))
    grads = grad_q, grad_k, grad_v = _gradients_like(grad, q, k, v, out, lse, starts, ends)
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
    return grads


@_backward_op.register_fake
def _gradients_like(grad, q, k, v, out, lse, starts, ends):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


def _fits_cudnn(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1]))


def _rows(x: Tensor) -> Tensor:
    """Let the elements of a head lie beside each other."""
    return x if x.stride(-1) == 1 else x.contiguous()


# --- Triton ---------------------------------------------------------------------------
# Of scores, rows are queries and columns are keys. Blocks of a loop whose pairs all see each other need no
# mask. Where heads are 128 wide, these blocks use nearly all registers of an H200 and spill next to none.

FORWARD = dict(ROWS=128, COLUMNS=64, num_warps=8, num_stages=2)
BACKWARD_Q = dict(ROWS=128, COLUMNS=64, num_warps=8, num_stages=2)
BACKWARD_KV = dict(ROWS=32, COLUMNS=128, num_warps=8, num_stages=2)  # COLUMNS a multiple of ROWS
DELTA_ROWS = 64
LOG2_E = tl.constexpr(1.4426950408889634)  # pyright: ignore[reportCallIssue]


@jit
def _forward(
    q,
    k,
    v,
    starts,
    out,
    lse,
    s,
    q_b,
    q_n,
    q_s,
    k_b,
    k_m,
    k_s,
    v_b,
    v_m,
    v_s,
    out_b,
    out_n,
    out_s,
    n,
    group,
    h: tl.constexpr,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    acc,
    total,
    most,
    q_block,
    k,
    v,
    k_s,
    v_s,
    row,
    start,
    i,
    s,
    scale,
    begin,
    end,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
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
    grad,
    out,
    delta,
    s,
    grad_b,
    grad_n,
    grad_s,
    out_b,
    out_n,
    out_s,
    n,
    h: tl.constexpr,
    ROWS: tl.constexpr,
):
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
    q,
    k,
    v,
    grad,
    lse,
    delta,
    starts,
    grad_q,
    s,
    q_b,
    q_n,
    q_s,
    k_b,
    k_m,
    k_s,
    v_b,
    v_m,
    v_s,
    grad_b,
    grad_n,
    grad_s,
    out_b,
    out_n,
    out_s,
    n,
    group,
    h: tl.constexpr,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
        acc,
        q_block,
        g_block,
        k,
        v,
        sums,
        deltas,
        k_s,
        v_s,
        row,
        start,
        i,
        s,
        scale,
        begin,
        full,
        COLUMNS,
        True,
    )
    acc = _differentiate_q(
        acc,
        q_block,
        g_block,
        k,
        v,
        sums,
        deltas,
        k_s,
        v_s,
        row,
        start,
        i,
        s,
        scale,
        full,
        diagonal,
        COLUMNS,
        False,
    )
    end = tl.minimum(diagonal + ROWS, s)
    acc = _differentiate_q(
        acc,
        q_block,
        g_block,
        k,
        v,
        sums,
        deltas,
        k_s,
        v_s,
        row,
        start,
        i,
        s,
        scale,
        diagonal,
        end,
        COLUMNS,
        True,
    )
    acc = (acc * scale).to(grad_q.dtype.element_ty)
    tl.store(grad_q + b * out_b + head * out_n + at * out_s + i[None, :], acc, mask=there)


@jit
def _differentiate_q(
    acc,
    q_block,
    g_block,
    k,
    v,
    sums,
    deltas,
    k_s,
    v_s,
    row,
    start,
    i,
    s,
    scale,
    begin,
    end,
    COLUMNS: tl.constexpr,
    MASKED: tl.constexpr,
):
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
    q,
    k,
    v,
    grad,
    lse,
    delta,
    ends,
    grad_k,
    grad_v,
    s,
    q_b,
    q_n,
    q_s,
    k_b,
    k_m,
    k_s,
    v_b,
    v_m,
    v_s,
    grad_b,
    grad_n,
    grad_s,
    grad_k_b,
    grad_k_m,
    grad_k_s,
    grad_v_b,
    grad_v_m,
    grad_v_s,
    n,
    group,
    h: tl.constexpr,
    scale,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
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
    acc_k,
    acc_v,
    k_block,
    v_block,
    q,
    grad,
    lse,
    delta,
    q_s,
    grad_s,
    column,
    end,
    i,
    s,
    scale,
    begin,
    until,
    ROWS: tl.constexpr,
    MASKED: tl.constexpr,
):
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
