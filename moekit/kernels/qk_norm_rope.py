"""Queries, keys and values from the output of one projection: RMSNorm of each head, and rotary positions.

The Triton kernels make one pass each. Queries and keys come in one buffer, position by position, and values
stay where they are; the backward writes the gradient of the projection's output, values included, in one go.
Only that output need be kept.

Axes: b sequences, s positions, n query heads, m key and value heads, h d_head.
"""

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from moekit.kernels._backend import check_shapes, jit, next_power_of_2, operator, tl, use_triton

Rope = tuple[Tensor, Tensor]  # cosines and sines, each (s, h / 2)
Gain = Float[Tensor, " h"] | None
Heads = tuple[Float[Tensor, "b n s h"], Float[Tensor, "b m s h"], Float[Tensor, "b m s h"]]


def rotate(x: Float[Tensor, "b s n h"], rope: Rope) -> Float[Tensor, "b s n h"]:
    """Turn the pairs (i, i + h / 2) of each head by the angles of their position."""
    cos, sin = (table[:, None] for table in rope)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)


def qk_norm_rope(
    qkv: Float[Tensor, "b s _"],
    q_gain: Float[Tensor, " _"] | None,
    k_gain: Float[Tensor, " _"] | None,
    rope: Rope,
    *,
    n_heads: int,
    n_kv_heads: int,
    eps: float = 1e-5,
    kernels: str = "auto",
) -> Heads:
    """Return queries and keys, normalised where gains are given and turned by their position, and values.

    Pure and differentiable in ``qkv`` and the gains. Where a Triton kernel runs, arithmetic is in float32,
    rounded once, and nothing but the arguments is kept.

    Parameters
    ----------
    qkv : Float[Tensor, "b s (n + 2 m) h"]
        Of each position first its queries, then its keys, then its values.
    q_gain, k_gain : Tensor, optional
        Gains of RMSNorm: of one head (h,), or of the full width (n h,) and (m h,), which is left to torch.
    rope : tuple of Tensor
        Cosines and sines of each position, (s, h / 2).
    n_heads, n_kv_heads : int
        n and m.
    eps : float
        Of the norms.
    kernels : {"auto", "torch", "triton"}
        What computes it.

    Returns
    -------
    q : Float[Tensor, "b n s h"]
    k, v : Float[Tensor, "b m s h"]
        Heads of one position lie beside each other in memory.

    References
    ----------
    Dehghani et al., Scaling Vision Transformers to 22 Billion Parameters, 2023 (norms of queries and keys).
    https://arxiv.org/abs/2302.05442
    """
    d_head = check_qkv("qk_norm_rope", qkv, rope, n_heads, n_kv_heads)
    for name, gain, n in (("q_gain", q_gain, n_heads), ("k_gain", k_gain, n_kv_heads)):
        if gain is not None and gain.shape not in ((d_head,), (n * d_head,)):
            raise ValueError(
                f"qk_norm_rope needs {name} ({d_head},) or ({n * d_head},), got {tuple(gain.shape)}"
            )
    if use_triton("qk_norm_rope", kernels, qkv) and is_per_head(q_gain, k_gain, d_head):
        return _QKNormRope.apply(qkv, q_gain, k_gain, *rope, n_heads, n_kv_heads, eps)
    q, k, v = qkv.split([n_heads * d_head, n_kv_heads * d_head, n_kv_heads * d_head], -1)

    def heads(z: Tensor, gain: Tensor | None) -> Tensor:
        if gain is not None and len(gain) == z.shape[-1]:
            z, gain = F.rms_norm(z, gain.shape, gain, eps), None
        z = rearrange(z, "b s (n h) -> b s n h", h=d_head)
        return z if gain is None else F.rms_norm(z, gain.shape, gain, eps)

    q, k, v = rotate(heads(q, q_gain), rope), rotate(heads(k, k_gain), rope), heads(v, None)
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def check_qkv(who: str, qkv: Tensor, rope: Rope, n_heads: int, n_kv_heads: int) -> int:
    """Return d_head, if a projection's output is of so many heads of an even width, and the tables fit."""
    n = n_heads + 2 * n_kv_heads
    if qkv.ndim != 3 or qkv.shape[-1] % (2 * n):
        raise ValueError(
            f"{who} needs qkv (b, s, {n} h) for {n_heads=}, {n_kv_heads=} and an even h, "
            f"got {tuple(qkv.shape)}"
        )
    d_head = qkv.shape[-1] // n
    table = qkv.shape[1], d_head // 2
    check_shapes(who, cosines=(rope[0], table), sines=(rope[1], table))
    return d_head


def is_per_head(q_gain: Tensor | None, k_gain: Tensor | None, d_head: int) -> bool:
    """Say whether both are gains of one head, or neither is given."""
    return all(gain is None or len(gain) == d_head for gain in (q_gain, k_gain)) and (q_gain is None) == (
        k_gain is None
    )


class _QKNormRope(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, qkv, q_gain, k_gain, cos, sin, n_heads, n_kv_heads, eps):
        ctx.save_for_backward(qkv, q_gain, k_gain, cos, sin)
        ctx.eps = eps
        return qk_norm_rope_forward(
            qkv, q_gain, k_gain, (cos, sin), n_heads=n_heads, n_kv_heads=n_kv_heads, eps=eps
        )

    @staticmethod
    def backward(ctx, *grads):
        qkv, q_gain, k_gain, *rope = ctx.saved_tensors
        return *qk_norm_rope_backward(grads, qkv, q_gain, k_gain, rope, eps=ctx.eps), *[None] * 5


def qk_norm_rope_forward(
    qkv: Tensor, q_gain: Gain, k_gain: Gain, rope: Rope, *, n_heads: int, n_kv_heads: int, eps: float
) -> Heads:
    """Launch the Triton kernel of :func:`qk_norm_rope`; values are a view. Not differentiable."""
    n, m = n_heads, n_kv_heads
    qk = torch.ops.moekit.qk_norm_rope(qkv, q_gain, k_gain, *rope, n, m, eps)
    v = qkv.unflatten(-1, (n + 2 * m, -1))[:, :, n + m :]
    return qk[:, :, :n].transpose(1, 2), qk[:, :, n:].transpose(1, 2), v.transpose(1, 2)


def qk_norm_rope_backward(
    grads: tuple[Tensor, ...],
    qkv: Tensor,
    q_gain: Gain,
    k_gain: Gain,
    rope: Rope | list[Tensor],
    *,
    eps: float,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of qkv and of both gains, given those of q, k and v. Not differentiable."""
    grad, grad_gains = torch.ops.moekit.qk_norm_rope_backward(*grads, qkv, q_gain, k_gain, *rope, eps)
    if q_gain is None or k_gain is None:
        return grad, None, None
    grad_gains = grad_gains.sum(0)  # of a fixed order: the same bits every time
    return grad, grad_gains[0].to(q_gain.dtype), grad_gains[1].to(k_gain.dtype)


HEADS, TOKENS, STEPS = 8, 2, 16  # heads and tokens of a tile; tiles of a program in the backward


@operator("moekit::qk_norm_rope")
def _forward_op(
    qkv: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    n_heads: int,
    n_kv_heads: int,
    eps: float,
) -> Tensor:
    qkv = qkv.contiguous()
    q_gain, k_gain = (None if gain is None else gain.contiguous() for gain in (q_gain, k_gain))
    qk = _qk_like(qkv, q_gain, k_gain, cos, sin, n_heads, n_kv_heads, eps)
    b, s, heads, h = qk.shape
    if qk.numel():
        _forward[(-(-b * s // TOKENS), -(-heads // HEADS))](
            *(qkv, q_gain, k_gain, cos.contiguous(), sin.contiguous(), qk),
            *(b * s, s, eps, n_heads, n_kv_heads, h // 2),
            **dict(HEADS=HEADS, TOKENS=TOKENS, HALF=next_power_of_2(h // 2)),
        )
    return qk


@_forward_op.register_fake
def _qk_like(qkv, q_gain, k_gain, cos, sin, n_heads, n_kv_heads, eps):
    b, s, width = qkv.shape
    return qkv.new_empty(b, s, n_heads + n_kv_heads, width // (n_heads + 2 * n_kv_heads))


@operator("moekit::qk_norm_rope_backward")
def _backward_op(
    grad_q: Tensor,
    grad_k: Tensor,
    grad_v: Tensor,
    qkv: Tensor,
    q_gain: Tensor | None,
    k_gain: Tensor | None,
    cos: Tensor,
    sin: Tensor,
    eps: float,
) -> tuple[Tensor, Tensor]:
    qkv = qkv.contiguous()
    q_gain, k_gain = (None if gain is None else gain.contiguous() for gain in (q_gain, k_gain))
    grad_qkv, grad_gains = _gradients_like(grad_q, grad_k, grad_v, qkv, q_gain, k_gain, cos, sin, eps)
    # The heads of a position beside each other, as attention gives them.
    by_position = [z.transpose(1, 2).contiguous() for z in (grad_q, grad_k, grad_v)]
    b, n, s, h = grad_q.shape
    m = grad_k.shape[1]
    if grad_qkv.numel():
        _backward[(-(-b * s // (TOKENS * STEPS)), -(-(n + 2 * m) // HEADS))](
            *(*by_position, qkv, q_gain, k_gain, cos.contiguous(), sin.contiguous(), grad_qkv, grad_gains),
            *(b * s, s, eps, n, m, h // 2),
            **dict(HEADS=HEADS, TOKENS=TOKENS, STEPS=STEPS, HALF=next_power_of_2(h // 2), num_warps=8),
        )
    return grad_qkv, grad_gains


@_backward_op.register_fake
def _gradients_like(grad_q, grad_k, grad_v, qkv, q_gain, k_gain, cos, sin, eps):
    b, n, s, h = grad_q.shape
    programs = -(-b * s // (TOKENS * STEPS)) * -(-(n + 2 * grad_k.shape[1]) // HEADS)
    shape = (programs, 2, h) if q_gain is not None else (0,)
    return torch.empty_like(qkv), qkv.new_empty(shape, dtype=torch.float32)


@jit
def _forward(
    qkv, q_gain, k_gain, cos, sin, qk, n_tokens, s, eps, n: tl.constexpr, m: tl.constexpr,
    half: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    inside = (token < n_tokens)[:, None, None] & (head < n + m)[None, :, None] & (i < half)[None, None, :]
    there = (token * (n + 2 * m))[:, None, None] + head[None, :, None]
    first = qkv + there * 2 * half + i[None, None, :]
    a = tl.load(first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=inside, other=0.0).to(tl.float32)
    if q_gain is not None:
        scale = 1 / tl.sqrt(tl.sum(a * a + b * b, 2) / (2 * half) + eps)
        gain = _gains(q_gain, k_gain, head, i, n, half)
        a *= scale[:, :, None] * gain[None, :, :]
        gain = _gains(q_gain + half, k_gain + half, head, i, n, half)
        b *= scale[:, :, None] * gain[None, :, :]
    at = (token % s)[:, None] * half + i[None, :]
    known = (token < n_tokens)[:, None] & (i < half)[None, :]
    c = tl.load(cos + at, mask=known, other=0.0)[:, None, :]
    d = tl.load(sin + at, mask=known, other=0.0)[:, None, :]
    there = (token * (n + m))[:, None, None] + head[None, :, None]
    first = qk + there * 2 * half + i[None, None, :]
    tl.store(first, (a * c - b * d).to(qk.dtype.element_ty), mask=inside)
    tl.store(first + half, (b * c + a * d).to(qk.dtype.element_ty), mask=inside)


@jit
def _gains(q_gain, k_gain, head, i, n: tl.constexpr, half: tl.constexpr):
    """Load a half of the gain of each head."""
    of_q = tl.load(q_gain + i, mask=i < half, other=0.0).to(tl.float32)
    of_k = tl.load(k_gain + i, mask=i < half, other=0.0).to(tl.float32)
    return tl.where((head < n)[:, None], of_q[None, :], of_k[None, :])


@jit
def _backward(
    grad_q, grad_k, grad_v, qkv, q_gain, k_gain, cos, sin, grad_qkv, grad_gains, n_tokens, s, eps,
    n: tl.constexpr, m: tl.constexpr, half: tl.constexpr, HEADS: tl.constexpr, TOKENS: tl.constexpr,
    STEPS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    i = tl.arange(0, HALF)
    is_q = (head < n)[:, None]
    is_k = ((head >= n) & (head < n + m))[:, None]
    total_a = tl.zeros((HEADS, HALF), tl.float32)
    total_b = tl.zeros((HEADS, HALF), tl.float32)
    gain_a, gain_b = total_a, total_b
    if q_gain is not None:
        gain_a = _gains(q_gain, k_gain, head, i, n, half)
        gain_b = _gains(q_gain + half, k_gain + half, head, i, n, half)
    for step in range(0, STEPS):
        token = (tl.program_id(0).to(tl.int64) * STEPS + step) * TOKENS + tl.arange(0, TOKENS)
        known = (token < n_tokens)[:, None] & (i < half)[None, :]
        inside = known[:, None, :] & (head < n + 2 * m)[None, :, None]
        a, b = _load_heads(grad_q, token, head, i, n, half, inside & (head < n)[None, :, None])
        more_a, more_b = _load_heads(
            grad_k, token, head - n, i, m, half, inside & ((head >= n) & (head < n + m))[None, :, None]
        )
        a, b = a + more_a, b + more_b
        more_a, more_b = _load_heads(
            grad_v, token, head - n - m, i, m, half, inside & (head >= n + m)[None, :, None]
        )
        is_v = (head >= n + m)[None, :, None]
        at = (token % s)[:, None] * half + i[None, :]
        c = tl.load(cos + at, mask=known, other=0.0)[:, None, :]
        d = tl.load(sin + at, mask=known, other=0.0)[:, None, :]
        a, b = a * c + b * d, b * c - a * d
        if q_gain is not None:
            x_a, x_b = _load_heads(
                qkv, token, head, i, n + 2 * m, half, inside & (head < n + m)[None, :, None]
            )
            scale = 1 / tl.sqrt(tl.sum(x_a * x_a + x_b * x_b, 2) / (2 * half) + eps)
            x_a *= scale[:, :, None]
            x_b *= scale[:, :, None]
            total_a += tl.sum(a * x_a, 0)
            total_b += tl.sum(b * x_b, 0)
            a *= gain_a[None, :, :]
            b *= gain_b[None, :, :]
            along = tl.sum(a * x_a + b * x_b, 2) / (2 * half)
            a = (a - x_a * along[:, :, None]) * scale[:, :, None]
            b = (b - x_b * along[:, :, None]) * scale[:, :, None]
        a, b = tl.where(is_v, more_a, a), tl.where(is_v, more_b, b)
        there = (token * (n + 2 * m))[:, None, None] + head[None, :, None]
        first = grad_qkv + there * 2 * half + i[None, None, :]
        tl.store(first, a.to(grad_qkv.dtype.element_ty), mask=inside)
        tl.store(first + half, b.to(grad_qkv.dtype.element_ty), mask=inside)
    if q_gain is not None:
        place = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
        first = grad_gains + place * 4 * half + i
        inside = i < half
        tl.store(first, tl.sum(tl.where(is_q, total_a, 0.0), 0), mask=inside)
        tl.store(first + half, tl.sum(tl.where(is_q, total_b, 0.0), 0), mask=inside)
        tl.store(first + 2 * half, tl.sum(tl.where(is_k, total_a, 0.0), 0), mask=inside)
        tl.store(first + 3 * half, tl.sum(tl.where(is_k, total_b, 0.0), 0), mask=inside)


@jit
def _load_heads(x, token, head, i, n_heads: tl.constexpr, half: tl.constexpr, mask):
    """Load both halves of heads (tokens, heads, half), of x (tokens, n_heads, 2 half)."""
    there = (token * n_heads)[:, None, None] + head[None, :, None]
    first = x + there * 2 * half + i[None, None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + half, mask=mask, other=0.0).to(tl.float32)
    return a, b
