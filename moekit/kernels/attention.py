"""Causal attention inside documents, which keeps what its projection gave, its output and a sum a row.

Whole rows go to the kernels of flash-attn-4 where that is installed, else to cuDNN's, or to torch's flash
attention where those do not fit; their sums have no fixed order. Packed documents go to
:mod:`moekit.kernels.document_attention`: what a row holds is known on the device alone, and varlen kernels
launch a grid for as many documents as there may be.

Axes: b sequences, s positions, n query heads, m key and value heads that n / m of them share, h d_head.
"""

import importlib
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.backends.cuda import SDPAParams, can_use_cudnn_attention
from torch.utils._pytree import register_dataclass

from moekit.kernels._backend import INTERPRETED, check_shapes, finds, is_hopper, operator, use_triton
from moekit.kernels.document_attention import attend_within, attend_within_backward
from moekit.kernels.qk_norm_rope import (
    Gain,
    Rope,
    check_qkv,
    qk_norm_rope_backward,
    qk_norm_rope_forward,
)

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
    cuDNN or flash attention. Triton's interpreter takes float32 too, and no bfloat16.

    Raises
    ------
    ValueError
        Where ``"triton"`` cannot run.
    """
    if not use_triton(who, kernels, x, multiplies=True):
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
    return _CausalAttention.apply(q, k, v, *_bounds("causal_attention", documents, (b, s)))


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
    who = "attention_of_qkv"
    head = (check_qkv(who, qkv, rope, n_heads, n_kv_heads),)
    if (q_gain is None) != (k_gain is None):
        raise ValueError(f"{who} needs both gains or neither, got one")
    check_shapes(who, q_gain=(q_gain, head), k_gain=(k_gain, head))
    bounds = _bounds(who, documents, qkv.shape[:2])
    return _AttentionOfQKV.apply(qkv, q_gain, k_gain, *rope, *bounds, n_heads, n_kv_heads, eps)


def _bounds(who: str, documents: Documents | None, shape: tuple[int, ...]) -> tuple:
    """Return where the documents of positions (b, s) start and end, or None for both."""
    if documents is None:
        return None, None
    starts, ends = documents.starts, documents.ends
    check_shapes(who, **{"starts of documents": (starts, shape), "ends of documents": (ends, shape)})
    return starts, ends


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


def choose_attention_kernel(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None = None, *, kernels: str = "auto"
) -> Literal["torch", "triton", "flash-attn-4", "cudnn", "flash"]:
    """Return whose kernels attend, given heads (b, n, s, h) and, for documents, where they start.

    ``"torch"`` is ``torch.nn.functional.scaled_dot_product_attention``: what :func:`has_kernel` does not
    admit, so all that is on a CPU unless ``kernels="triton"`` asks for Triton's interpreter. On an H200,
    2 x 8,192 positions, 32 heads of 128 and 8 of keys, flash-attn-4 needs 0.91 of cuDNN's time (docs/LOG.md).
    """
    if not has_kernel("choose_attention_kernel", kernels, q, q.shape[-1]):
        return "torch"
    return _fastest(q, k, v, starts)


def _fastest(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None
) -> Literal["triton", "flash-attn-4", "cudnn", "flash"]:
    """Return whose kernels attend to what :func:`has_kernel` admits."""
    if starts is not None or not q.is_cuda:
        return "triton"
    if q.shape[-1] == 128 and is_hopper(q) and finds("flash_attn.cute"):
        return "flash-attn-4"
    fits = can_use_cudnn_attention(SDPAParams(q, k, v, None, 0.0, True, q.shape[1] != k.shape[1]))
    return "cudnn" if fits else "flash"


@operator("moekit::causal_attention")
def _forward_op(q: Tensor, k: Tensor, v: Tensor, starts: Tensor | None) -> tuple[Tensor, Tensor]:
    out, lse = _out_like(q, k, v, starts)
    if not q.numel():
        return out, lse
    match _fastest(q, k, v, starts):
        case "triton":
            return attend_within(q, k, v, starts, out, lse)
        case "flash-attn-4":
            heads, result = (x.transpose(1, 2) for x in (q, k, v)), out.transpose(1, 2)
            _flash_attn_4()._flash_attn_fwd(*heads, causal=True, out=result, lse=lse[..., 0])
        case "cudnn":
            return torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, True)[:2]
        case "flash":
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, True)[:2]
            lse = lse[..., None]
    return out, lse


@_forward_op.register_fake
def _out_like(q, k, v, starts):
    return _like(q), q.new_empty(*q.shape[:3], 1, dtype=torch.float32)


def _like(x: Tensor) -> Tensor:
    """Return memory laid out as ``x``, but for features, which are always neighbours."""
    return torch.empty_like(x) if x.stride(-1) == 1 else x.new_empty(x.shape)


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
    grads = _gradients_like(grad, q, k, v, out, lse, starts, ends)
    if not q.numel():
        return grads
    s = q.shape[2]
    unused = torch.empty(
        2, dtype=torch.int64, device=q.device
    )  # the state of dropout, of which there is none
    match _fastest(q, k, v, starts):
        case "triton":
            return attend_within_backward(grad, q, k, v, out, lse, starts, ends, *grads)
        case "flash-attn-4":
            given = (x.transpose(1, 2) for x in (q, k, v, out, grad))
            dq, dk, dv = (x.transpose(1, 2) for x in grads)
            _flash_attn_4()._flash_attn_bwd(*given, lse[..., 0], causal=True, dq=dq, dk=dk, dv=dv)
            return grads
        case "cudnn":
            return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
                *(grad, q, k, v, out, lse, unused[0], unused[1], None, None, None, s, s, 0.0, True)
            )
        case "flash":
            return torch.ops.aten._scaled_dot_product_flash_attention_backward(
                *(grad, q, k, v, out, lse[..., 0], None, None, s, s, 0.0, True, unused, unused)
            )


@_backward_op.register_fake
def _gradients_like(grad, q, k, v, out, lse, starts, ends):
    return _like(q), _like(k), _like(v)


def _flash_attn_4() -> Any:
    # Not its autograd function: queries and keys are made again before the backward.
    return importlib.import_module("flash_attn.cute.interface")
