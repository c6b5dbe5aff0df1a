"""The model written the obvious way, one row, head, position and expert at a time; helpers of the tests."""

import re

import pytest
import torch
import torch.distributed as dist
from torch.distributions import Categorical
from torch.testing._internal.distributed.fake_pg import FakeStore

import moekit as mk
from moekit.testing import ranks
from moekit.tree import map_named

# --- Helpers --------------------------------------------------------------------------


def draw(*shape, seed=0, dtype=torch.float64):
    """Return standard normals, the same in every precision up to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def close(got, want, tol=1e-10):
    torch.testing.assert_close(got, want, rtol=tol, atol=tol)


def refuses(message, error=ValueError):
    """Expect an error whose message contains ``message`` word for word."""
    return pytest.raises(error, match=re.escape(message))


def unaligned(x):
    """Return the same numbers one element after a multiple of 16 bytes."""
    return torch.cat([x.new_empty(1), x.flatten()])[1:].view(x.shape)


def expanded(x):
    """Return the first part in the place of all, without copies."""
    return x[:1].expand(x.shape)


def with_grads(fn, *leaves):
    """Return fn's result and the gradients of a fixed projection of it, one for each leaf."""
    leaves = [x.detach().clone().requires_grad_() for x in leaves]
    out = fn(*leaves)
    projection = draw(*out.shape, seed=99, dtype=out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, projection, materialize_grads=True)]


def named_grads(loss, params):
    """Return the loss and its gradients by name, by plain autograd; zeros where a parameter is not used."""
    leaves = {}
    tree = map_named(lambda name, p: leaves.setdefault(name, p.detach().clone().requires_grad_()), params)
    value = loss(tree)
    grads = torch.autograd.grad(value, list(leaves.values()), allow_unused=True, materialize_grads=True)
    return value.detach(), dict(zip(leaves, grads, strict=True))


def flat(tree):
    """Return the leaves of a TensorDict by dotted name."""
    out = {}
    map_named(lambda name, x: out.setdefault(name, x), tree)
    return out


def small_config(**changes):
    """Return a config in which every size differs; one dense layer, then one with experts."""
    sizes = dict(vocab_size=17, d_model=8, n_layers=2, n_dense_layers=1, n_heads=4, n_kv_heads=2, d_head=4)
    experts = dict(d_dense=12, n_experts=6, top_k=2, d_expert=4, d_shared=16)
    return mk.ModelConfig(**(sizes | experts | dict(max_seq_len=16, init_std=0.5) | changes))


def packed_batch(b=4, s=7, vocab_size=17, seed=0):
    """Return a batch whose rows hold documents of random lengths and end in padding of random length."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab_size, (b, s + 1), generator=generator)
    documents = (torch.rand(b, s + 1, generator=generator) < 0.3).long().cumsum(1)
    n_real = torch.randint(2, s + 2, (b, 1), generator=generator)
    documents = torch.where(torch.arange(s + 1) < n_real, documents - documents[:, :1], -1)
    return mk.count_tokens(mk.batch.make_batch(tokens, documents, torch.arange(b)))


def as_rank(fn, rank=5, edp=2, ep=3):
    """Return ``fn(mesh)`` of one of many ranks, which runs without the others, so without communication."""

    def run():
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=edp * ep)
        return fn(mk.make_mesh(edp=edp, ep=ep, device="cpu"))

    return ranks(1)(run)[0]


# --- The model ------------------------------------------------------------------------


def feed_forward(gate_up, down, x):
    gate, up = (x @ gate_up).chunk(2, -1)
    return (gate * gate.sigmoid() * up) @ down


def choose(biased, top_k, n_groups=1, top_groups=1):
    """Return the best experts, best first, of the groups whose two best sum to most."""
    size = len(biased) // n_groups
    of_group = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(n_groups)]
    groups = sorted(range(n_groups), key=lambda g: -of_group[g])[:top_groups]
    allowed = [e for e in range(len(biased)) if e // size in groups]
    return sorted(allowed, key=lambda e: -biased[e])[:top_k]


def route(router, x, *, top_k, score="softmax", normalize="l1", scale=1.0, bias=None, ids=None, **groups):
    """Return weights (t, k), expert ids (t, k), logits and scores (t, E)."""
    logits = x @ router
    scores = logits.exp() / logits.exp().sum(-1, keepdim=True) if score == "softmax" else logits.sigmoid()
    biased = scores if bias is None else scores + bias
    if ids is None:
        ids = [choose(row.tolist(), top_k, **groups) for row in biased]
    rows = [s[i] / s[i].sum() if normalize == "l1" else s[i] for s, i in zip(scores, ids, strict=True)]
    weights = torch.stack(rows) * scale if rows else scores[:, :top_k]
    return weights, torch.as_tensor(ids, dtype=torch.int64).view(-1, top_k), logits, scores


def moe(params, x, **options):
    """Return every token's weighted sum of its experts, plus the shared expert."""
    routing = route(params["router"], x, **options)
    gate_up, down = params["experts"]["gate_up"], params["experts"]["down"]
    y = [
        sum(w * feed_forward(gate_up[e], down[e], token) for w, e in zip(weights, ids, strict=True))
        for token, weights, ids in zip(x, *routing[:2], strict=True)
    ]
    y = torch.stack(y) if y else x
    if "shared" in params.keys():
        y = y + feed_forward(params["shared"]["gate_up"], params["shared"]["down"], x)
    return y, routing


def rms_norm(x, gain, eps=1e-5):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain


def rotate(x, position, base):
    """Turn the pairs (i, i + h / 2) of one head as complex numbers."""
    half = len(x) // 2
    angle = position * base ** (-torch.arange(half, dtype=x.dtype) / half)
    z = torch.complex(x[:half], x[half:]) * torch.polar(torch.ones_like(angle), angle)
    return torch.cat([z.real, z.imag])


def attention(params, x, *, n_heads, n_kv_heads, base, documents=None, eps=1e-5):
    out = torch.zeros(*x.shape[:2], n_heads, len(params["out"]) // n_heads, dtype=x.dtype)
    h = out.shape[-1]
    for row in range(len(x)):
        q, k, v = (x[row] @ params["qkv"]).split([n_heads * h, n_kv_heads * h, n_kv_heads * h], -1)
        if "q_norm" in params.keys() and len(params["q_norm"]) == n_heads * h:
            q, k = rms_norm(q, params["q_norm"], eps), rms_norm(k, params["k_norm"], eps)
        q, k, v = q.unflatten(-1, (-1, h)), k.unflatten(-1, (-1, h)), v.unflatten(-1, (-1, h))
        if "q_norm" in params.keys() and len(params["q_norm"]) == h:
            q, k = rms_norm(q, params["q_norm"], eps), rms_norm(k, params["k_norm"], eps)
        for head in range(n_heads):
            kv = head // (n_heads // n_kv_heads)
            for i in range(x.shape[1]):
                seen = [
                    j for j in range(i + 1) if documents is None or documents[row, i] == documents[row, j]
                ]
                query = rotate(q[i, head], i, base)
                keys = torch.stack([rotate(k[j, kv], j, base) for j in seen])
                out[row, i, head] = (keys @ query / h**0.5).softmax(0) @ v[seen, kv]
    return out.flatten(2) @ params["out"]


def block(params, x, *, config, documents=None, **moe_options):
    def part(name, f, x):
        z = rms_norm(x, params[name + "_norm_in"], config.norm_eps) if config.norm != "post" else x
        z = f(z)
        return x + (rms_norm(z, params[name + "_norm_out"], config.norm_eps) if config.norm != "pre" else z)

    routing = None

    def feed(z):
        nonlocal routing
        if "ffn" in params.keys():
            return feed_forward(params["ffn"]["gate_up"], params["ffn"]["down"], z)
        c = config
        options = dict(top_k=c.top_k, score=c.score, normalize=c.normalize, scale=c.route_scale)
        options |= dict(n_groups=c.n_groups, top_groups=c.top_groups)
        y, routing = moe(params["moe"], z.flatten(0, 1), **options, **moe_options)
        return y.view(z.shape)

    heads = dict(n_heads=config.n_heads, n_kv_heads=config.n_kv_heads, base=config.rope_base)
    heads |= dict(eps=config.norm_eps, documents=documents)
    x = part("attention", lambda z: attention(params["attention"], z, **heads), x)
    return part("ffn", feed, x), routing


def forward(params, tokens, *, config, documents=None, biases=None):
    """Return what the head reads, the logits, and the routings of the layers with experts."""
    x = params["embedding"][tokens]
    if config.normalize_embedding:
        x = rms_norm(x * config.d_model**0.5, params["embedding_norm"], config.norm_eps)
    routings = []
    for i in range(config.n_layers):
        bias = biases[len(routings)] if biases is not None and i >= config.n_dense_layers else None
        options = {} if bias is None else {"bias": bias}
        x, routing = block(params["layers"][str(i)], x, config=config, documents=documents, **options)
        routings += [] if routing is None else [routing]
    x = rms_norm(x, params["norm"], config.norm_eps)
    return x, x @ (params["embedding"].T if config.tied_head else params["head"]), routings


def balance(ids, scores):
    """Return E * sum of f * P over one population."""
    n_experts = scores.shape[-1]
    f = torch.bincount(ids.flatten(), minlength=n_experts).to(scores.dtype) / ids.numel()
    return n_experts * (f * (scores / scores.sum(-1, keepdim=True)).mean(0)).sum()


def balance_over_documents(ids, scores, documents):
    """Return the mean over the tokens of each one's document's loss; padding is -1."""
    keep = documents >= 0
    of = [documents == n for n in documents[keep].unique()]
    return sum(at.sum() * balance(ids[at], scores[at]) for at in of) / keep.sum()


def loss(params, batch, *, config):
    """Return the training loss with its balance over documents, and its unweighted terms."""
    _, logits, routings = forward(params, batch.tokens, config=config, documents=batch.documents)
    ce = torch.nn.functional.cross_entropy(logits[batch.mask], batch.targets[batch.mask])
    documents = batch.documents + 1000 * torch.arange(len(batch.tokens))[:, None]
    documents = torch.where(batch.documents >= 0, documents, -1).flatten()
    zero = torch.zeros((), dtype=ce.dtype)
    terms = {
        "cross_entropy": ce,
        "load_balancing": sum((balance_over_documents(r[1], r[3], documents) for r in routings), zero),
        "router_z": sum((r[2][documents >= 0].logsumexp(-1).square().mean() for r in routings), zero),
        "head_z": logits[batch.mask].logsumexp(-1).square().mean(),
    }
    weights = (1.0, config.balance_weight, config.router_z_weight, config.head_z_weight)
    total = sum(w * term for w, term in zip(weights, terms.values(), strict=True))
    entropies = [Categorical(probs=r[3][documents >= 0]).entropy().mean() for r in routings]
    return total, terms | {"router_entropy": sum(entropies, zero) / max(len(entropies), 1)}
