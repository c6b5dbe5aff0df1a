"""The baseline to beat: bench-8L in plain PyTorch, ``torch.compile`` a block, over moekit's parameters.

Written as someone would who knows PyTorch and wants speed without kernels of their own: fused projections,
cuDNN attention, ``grouped_mm`` over rows sorted by expert, a chunked loss. It reads the parameters of
:func:`moekit.init_params` (no gains on norms, which are one), so both train the same tensors. The routed
experts of a layer can be another's: a peer's.
"""

from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import moekit as mk

CHUNK = 8192  # tokens whose logits exist at once


def rms(x: Tensor) -> Tensor:
    """Norm without a gain."""
    return F.rms_norm(x, (x.shape[-1],))


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate (b, n, s, h)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def attention(x: Tensor, p: dict, config: mk.ModelConfig, table: tuple[Tensor, Tensor]) -> Tensor:
    """Causal attention over whole rows, with norms of queries and keys."""
    b, s, _ = x.shape
    n, m, h = config.n_heads, config.n_kv_heads, config.d_head
    q, k, v = (x @ p["attention.qkv"]).split((n * h, m * h, m * h), -1)
    q = rope(rms(q.view(b, s, n, h)).transpose(1, 2), *table)
    k = rope(rms(k.view(b, s, m, h)).transpose(1, 2), *table)
    v = v.view(b, s, m, h).transpose(1, 2)
    with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    return out.transpose(1, 2).reshape(b, s, n * h) @ p["attention.out"]


def swiglu(x: Tensor) -> Tensor:
    """Gate with silu."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def ffn(x: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """Apply a dense feed-forward."""
    return swiglu(x @ gate_up) @ down


def experts(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    """Rows sorted by expert, two grouped GEMMs, rows added back; ``logits`` (t, E) in float32."""
    weights, ids = logits.softmax(-1).topk(top_k, -1)
    weights = weights / weights.sum(-1, keepdim=True)
    n_experts = logits.shape[1]
    order = ids.reshape(-1).argsort(stable=True)
    token = order // top_k
    counts = torch.histc(ids.reshape(-1).float(), bins=n_experts, min=0, max=n_experts - 1)
    offsets = counts.cumsum(0).to(torch.int32)
    rows = F.grouped_mm(swiglu(F.grouped_mm(x[token], gate_up, offs=offsets)), down, offs=offsets)
    rows = rows * weights.reshape(-1)[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, rows)


def block(
    x: Tensor,
    noise: Tensor | None,
    p: dict,
    config: mk.ModelConfig,
    table: tuple[Tensor, Tensor],
    peer: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """One layer, post-norm; with ``noise``, which routes, one of experts, which ``peer`` may stand for."""
    x = x + rms(attention(x, p, config, table))
    if noise is None:
        return x + rms(ffn(x, p["ffn.gate_up"], p["ffn.down"]))
    flat = x.reshape(-1, x.shape[-1])
    if peer is None:
        logits = (flat @ p["moe.router"].to(flat.dtype)).float() * 0 + noise
        routed = experts(flat, logits, p["moe.experts.gate_up"], p["moe.experts.down"], config.top_k)
    else:
        routed = peer(flat)
    shared = ffn(flat, p["moe.shared.gate_up"], p["moe.shared.down"])
    return x + rms((routed + shared).view(x.shape))


def chunk_loss(x: Tensor, head: Tensor, targets: Tensor) -> Tensor:
    """Sum the loss of a chunk of tokens."""
    return F.cross_entropy((x @ head).float(), targets, reduction="sum")


def make_loss(
    config: mk.ModelConfig,
    *,
    compiled: bool,
    recompute_head: bool,
    experts_of: Mapping[int, Callable[[Tensor], Tensor]] | None = None,
) -> Callable:
    """Return ``loss(params, batch) -> 0-d``: the mean cross-entropy over whole rows.

    Routed at random, or to the ``expert_ids`` of the batch.

    ``experts_of`` are functions of tokens (t, d) that stand for the routed experts of layers, routing as they
    do.
    """
    run_block = torch.compile(block) if compiled else block
    run_chunk = torch.compile(chunk_loss) if compiled else chunk_loss

    def loss(params: TensorDict, batch: mk.batch.Batch) -> Tensor:
        b, s = batch.tokens.shape
        x = rms(F.embedding(batch.tokens, params["embedding"]) * config.d_model**0.5)
        cos, sin = mk.model.rope_table(s, config=config, like=x)
        table = cos.to(x.dtype), sin.to(x.dtype)
        for i in range(config.n_layers):
            layer = params["layers"][str(i)]
            p = {".".join(k) if isinstance(k, tuple) else k: v for k, v in layer.items(True, True)}
            noise = torch.rand(b * s, config.n_experts, device=x.device) if config.is_moe(i) else None
            if noise is not None and batch.expert_ids is not None:
                ids = batch.expert_ids[:, i - config.n_dense_layers].reshape(b * s, -1)
                noise.scatter_add_(1, ids, torch.ones_like(noise))  # more than any other's
            peer = None if experts_of is None else experts_of.get(i)
            x = run_block(x, noise, p, config, table, peer)
        x, targets = rms(x).flatten(0, 1), batch.targets.flatten()
        total = x.new_zeros((), dtype=torch.float32)
        for part, wanted in zip(x.split(CHUNK), targets.split(CHUNK), strict=True):
            args = (part, params["head"], wanted)
            total = total + (
                checkpoint(run_chunk, *args, use_reentrant=False) if recompute_head else run_chunk(*args)
            )
        return total / targets.numel()

    return loss
