"""The router: logits, and then scores, choice and weights in one pass.

Axes: t tokens, d features, E experts, k choices.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.flop_counter import register_flop_formula

from moekit.kernels import _backend
from moekit.kernels._backend import check_shapes, jit, next_power_of_2, operator, tl, use_triton

# --- Logits ---------------------------------------------------------------------------


def router_logits(
    x: Float[Tensor, "t d"], router: Float[Tensor, "d E"], *, kernels: str = "auto"
) -> Float[Tensor, "t E"]:
    """Return ``x @ router`` in float32 at least. Pure and differentiable.

    For bfloat16 tokens on CUDA a float32 router is written as a sum of three bfloat16, which has all its 24
    bits: tensor cores multiply those exactly and add in float32. The backward splits the float32 gradient in
    two, which keeps 16 bits of it.
    """
    splits = x.dtype == torch.bfloat16 and router.dtype in (torch.bfloat16, torch.float32)
    if splits and kernels != "torch" and _backend.on_cuda(x):
        return _Logits.apply(x, router)
    wide = torch.promote_types(torch.promote_types(x.dtype, router.dtype), torch.float32)
    with torch.autocast("cpu" if x.is_meta else x.device.type, enabled=False):  # which would round them
        return x.to(wide) @ router.to(wide)


class _Logits(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, router):
        ctx.save_for_backward(x, router)
        parts = _split(router, 3)
        logits = torch.ops.moekit.mm_float32(x, torch.cat(parts, 1))
        return logits.unflatten(1, (len(parts), -1)).sum(1)

    @staticmethod
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, router = ctx.saved_tensors
        high, low = _split(grad, 2)
        w_high, *w_low = _split(router, 2)
        grad_x = torch.cat([high, low, *[high] * len(w_low)], 1) @ torch.cat([w_high, w_high, *w_low], 1).mT
        by_high, by_low = torch.ops.moekit.mm_float32(x.mT, torch.cat([high, low], 1)).chunk(2, 1)
        return grad_x, (by_high + by_low).to(router.dtype)


def _split(x: Tensor, n: int) -> list[Tensor]:
    """Return n bfloat16 tensors, each 8 more bits of ``x``, all for n = 3; of a bfloat16 ``x`` itself."""
    high = x.bfloat16()
    if n == 1 or x.dtype == torch.bfloat16:
        return [high]
    return [high, *_split(x - high, n - 1)]


@operator("moekit::mm_float32")
def _mm_float32(a: Tensor, b: Tensor) -> Tensor:
    return torch.mm(a, b, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float()


@_mm_float32.register_fake
def _(a, b):
    return a.new_empty(a.shape[0], b.shape[1], dtype=torch.float32)


@register_flop_formula(torch.ops.moekit.mm_float32)
def _flops(a_shape, b_shape, *_, **__) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]


# --- Scores, choice, weights --------------------------------------------------


def choose(
    logits: Float[Tensor, "t E"],
    *,
    top_k: int,
    score: str,
    normalize: str,
    scale: float,
    bias: Float[Tensor, " E"] | None = None,
    expert_ids: Int[Tensor, "t k"] | None = None,
    kernels: str = "auto",
) -> tuple[Float[Tensor, "t E"], Int[Tensor, "t k"], Float[Tensor, "t k"]]:
    """Return scores, expert ids and weights as :func:`moekit.route` describes them.

    Pure, differentiable in ``logits`` through scores and weights. The experts with the best biased scores are
    chosen, NaN first and the lower id where two are equal, unless ``expert_ids`` says which.
    """
    t, n_experts = logits.shape
    if not 1 <= top_k <= n_experts:
        raise ValueError(f"choose needs top_k from 1 to the {n_experts} experts, got {top_k}")
    check_shapes("choose", bias=(bias, (n_experts,)), expert_ids=(expert_ids, (t, top_k)))
    if use_triton("choose", kernels, logits):
        return _Choose.apply(logits, bias, expert_ids, top_k, score, normalize, scale)
    scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
    if expert_ids is None:
        biased = scores.detach() if bias is None else scores.detach() + bias.to(scores.dtype)
        expert_ids = best(biased, top_k)
    weights = scores.gather(-1, expert_ids)
    if normalize == "l1":
        weights = weights / weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)
    return scores, expert_ids, weights * scale


def best(scores: Float[Tensor, "t n"], k: int) -> Int[Tensor, "t k"]:
    """Return where the k largest are, the lower index first where two are equal, which topk leaves open."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


class _Choose(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, bias, expert_ids, top_k, score, normalize, scale):
        ctx.options = dict(softmax=score == "softmax", l1=normalize == "l1", scale=scale)
        scores, ids, weights = torch.ops.moekit.choose(logits, bias, expert_ids, top_k, **ctx.options)
        ids = ids if expert_ids is None else expert_ids
        ctx.mark_non_differentiable(ids)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(scores, ids, weights)
        return scores, ids, weights

    @staticmethod
    def backward(ctx, grad_scores, _, grad_weights):  # pyright: ignore[reportIncompatibleMethodOverride]
        scores, ids, weights = ctx.saved_tensors
        if grad_scores is None and grad_weights is None:
            return (None,) * 7
        grad = torch.ops.moekit.choose_backward(
            grad_scores, grad_weights, scores, ids, weights, **ctx.options
        )
        return grad, None, None, None, None, None, None


@operator("moekit::choose")
def _choose_op(
    logits: Tensor,
    bias: Tensor | None,
    expert_ids: Tensor | None,
    top_k: int,
    softmax: bool,
    l1: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits.contiguous()
    bias = None if bias is None else bias.float().contiguous()
    given = None if expert_ids is None else expert_ids.contiguous()
    scores, ids, weights = _chosen_like(logits, bias, expert_ids, top_k, softmax, l1, scale)
    t, n_experts = logits.shape
    if t:
        tokens, padded = _blocks(n_experts)
        _choose[(-(-t // tokens),)](
            *(logits, bias, given, scores, ids, weights, t, scale),
            **dict(n_experts=n_experts, k=top_k, SOFTMAX=softmax, L1=l1),
            **dict(TOKENS=tokens, E=padded, K=next_power_of_2(top_k)),
        )
    return scores, ids, weights


@_choose_op.register_fake
def _chosen_like(logits, bias, expert_ids, top_k, softmax, l1, scale):
    t = len(logits)
    n_ids = t if expert_ids is None else 0  # ids that are given are not copied
    ids = torch.empty(n_ids, top_k, dtype=torch.int64, device=logits.device)
    return logits.new_empty(logits.shape), ids, logits.new_empty(t, top_k)


@operator("moekit::choose_backward")
def _choose_backward_op(
    grad_scores: Tensor | None,
    grad_weights: Tensor | None,
    scores: Tensor,
    ids: Tensor,
    weights: Tensor,
    softmax: bool,
    l1: bool,
    scale: float,
) -> Tensor:
    grad_scores = None if grad_scores is None else grad_scores.contiguous()
    grad_weights = None if grad_weights is None else grad_weights.contiguous()
    scores, weights = scores.contiguous(), weights.contiguous()
    grad_logits = torch.empty_like(scores)
    t, n_experts = scores.shape
    if t:
        tokens, padded = _blocks(n_experts)
        _choose_backward[(-(-t // tokens),)](
            *(grad_scores, grad_weights, scores, ids.contiguous(), weights, grad_logits, t, scale),
            **dict(n_experts=n_experts, k=ids.shape[1], SOFTMAX=softmax, L1=l1, TOKENS=tokens, E=padded),
        )
    return grad_logits


@_choose_backward_op.register_fake
def _(grad_scores, grad_weights, scores, ids, weights, softmax, l1, scale):
    return scores.new_empty(scores.shape)


def _blocks(n_experts: int) -> tuple[int, int]:
    """Return tokens of a program, and experts with padding."""
    padded = next_power_of_2(n_experts)
    return max(2048 // padded, 1), padded


@jit
def _choose(
    logits, bias, given, scores, ids, weights, t, scale,
    n_experts: tl.constexpr, k: tl.constexpr, SOFTMAX: tl.constexpr, L1: tl.constexpr,
    TOKENS: tl.constexpr, E: tl.constexpr, K: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, E)
    real = (expert < n_experts)[None, :]
    place = token[:, None] * n_experts + expert[None, :]
    inside = (token < t)[:, None] & real
    logit = tl.where(real, tl.load(logits + place, mask=inside, other=0.0), float("-inf"))
    if SOFTMAX:
        power = tl.where(real, tl.exp(logit - tl.max(logit, 1)[:, None]), 0.0)
        value = power / tl.sum(power, 1)[:, None]
    else:
        value = tl.where(real, tl.sigmoid(logit), 0.0)
    tl.store(scores + place, value, mask=inside)

    biased = value
    if bias is not None:
        biased += tl.load(bias + expert, mask=expert < n_experts, other=0.0)[None, :]
    # NaN is the largest, as in torch.
    biased = tl.where(biased != biased, float("inf"), tl.maximum(biased, -3e38))
    biased = tl.where(real, biased, float("-inf"))  # as what is taken already
    choice = tl.arange(0, K)[None, :]
    chosen, best_ids = tl.zeros((TOKENS, K), tl.float32), tl.zeros((TOKENS, K), tl.int64)
    for j in tl.static_range(k):
        if given is None:
            best = tl.minimum(tl.argmax(biased, 1), n_experts - 1)
        else:
            best = tl.load(given + token * k + j, mask=token < t, other=0).to(tl.int32)
        here = expert[None, :] == best[:, None]
        biased = tl.where(here, float("-inf"), biased)
        weight = tl.sum(tl.where(here, value, 0.0), 1)
        chosen = tl.where(choice == j, weight[:, None], chosen)
        best_ids = tl.where(choice == j, best[:, None].to(tl.int64), best_ids)
    if L1:
        chosen /= tl.maximum(tl.sum(chosen, 1), 1.1754944e-38, tl.PropagateNan.ALL)[:, None]
    at = token[:, None] * k + choice
    within = (token < t)[:, None] & (choice < k)
    tl.store(weights + at, chosen * scale, mask=within)
    if given is None:
        tl.store(ids + at, best_ids, mask=within)


@jit
def _choose_backward(
    grad_scores, grad_weights, scores, ids, weights, grad_logits, t, scale,
    n_experts: tl.constexpr, k: tl.constexpr, SOFTMAX: tl.constexpr, L1: tl.constexpr,
    TOKENS: tl.constexpr, E: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    expert = tl.arange(0, E)
    place = token[:, None] * n_experts + expert[None, :]
    inside = (token < t)[:, None] & (expert < n_experts)[None, :]
    value = tl.load(scores + place, mask=inside, other=0.0)
    grad = tl.zeros((TOKENS, E), tl.float32)
    if grad_scores is not None:
        grad += tl.load(grad_scores + place, mask=inside, other=0.0)
    if grad_weights is not None:
        chosen, common = tl.zeros((TOKENS,), tl.float32), tl.zeros((TOKENS,), tl.float32)
        if L1:
            for j in tl.static_range(k):
                at = token * k + j
                id = tl.load(ids + at, mask=token < t, other=0).to(tl.int32)
                chosen += tl.sum(tl.where(expert[None, :] == id[:, None], value, 0.0), 1)
                arriving = tl.load(grad_weights + at, mask=token < t, other=0.0)
                common += arriving * tl.load(weights + at, mask=token < t, other=0.0)
        for j in tl.static_range(k):
            at = token * k + j
            id = tl.load(ids + at, mask=token < t, other=0).to(tl.int32)
            arriving = tl.load(grad_weights + at, mask=token < t, other=0.0) * scale
            if L1:
                arriving = (arriving - common) / tl.maximum(chosen, 1.1754944e-38)
            grad += tl.where(expert[None, :] == id[:, None], arriving[:, None], 0.0)
    if SOFTMAX:
        grad = value * (grad - tl.sum(grad * value, 1)[:, None])
    else:
        grad = grad * value * (1 - value)
    tl.store(grad_logits + place, grad, mask=inside)
