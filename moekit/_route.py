"""Token-choice routing: which experts each token goes to, and with what weight."""

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Float, Int, Integer
from torch import Tensor
from torch.utils._pytree import register_dataclass

from moekit.kernels import check_shapes
from moekit.kernels.permute import count_experts
from moekit.kernels.router import best, choose, router_logits
from moekit.mesh import local
from moekit.profiling import ranged
from moekit.random import uniform
from moekit.tree import check_values, short_repr

Assignment = Literal["top_k", "random", "uniform"]


@dataclass(frozen=True, kw_only=True)
class Routing:
    """Which experts each token goes to, and with what weight: what :func:`moekit.route` returns.

    t tokens of this rank, k choices of each, E experts of the layer over all ranks. A *route* is one choice
    of one token, t * k in all. Floats are float32, or float64 in a float64 model; ids and counts are int64.

    Attributes
    ----------
    weights : Float[Tensor, "t k"]
        What the outputs of a token's experts are multiplied by before they are summed.
    expert_ids : Int[Tensor, "t k"]
        In [0, E), all different for one token.
    counts : Int[Tensor, " E"]
        Routes of this call to each expert, those of padding included.
    logits, scores : Float[Tensor, "t E"]
        Of every expert, before the choice; scores are the softmax or sigmoid of the logits.
    dropped : Int[Tensor, " E"], optional
        Those of ``counts`` that the transport had no room for. :func:`moekit.moe` fills it in; None where
        nothing can be dropped.
    """

    weights: Float[Tensor, "t k"]
    expert_ids: Int[Tensor, "t k"]
    counts: Int[Tensor, " E"]
    logits: Float[Tensor, "t E"]
    scores: Float[Tensor, "t E"]
    dropped: Int[Tensor, " E"] | None = None

    def __repr__(self) -> str:
        return short_repr(self)

    @property
    def n_experts(self) -> int:
        """Experts of the layer over all ranks."""
        return self.logits.shape[-1]


register_dataclass(Routing)


@ranged("route")
def route(
    router: Float[Tensor, "d E"],
    x: Float[Tensor, "t d"],
    *,
    top_k: int,
    score: Literal["softmax", "sigmoid"] = "softmax",
    normalize: Literal["none", "l1"] = "l1",
    scale: float = 1.0,
    bias: Float[Tensor, " E"] | None = None,
    n_groups: int = 1,
    top_groups: int = 1,
    assignment: Assignment = "top_k",
    key: Int[Tensor, ""] | None = None,
    token_ids: Int[Tensor, " t"] | None = None,
    expert_ids: Integer[Tensor, "t k"] | None = None,
    kernels: str = "auto",
) -> Routing:
    """Send each token to ``top_k`` of E experts.

    Pure, differentiable in ``router`` and ``x`` through the weights, logits and scores. No communication.

    Parameters
    ----------
    router : Float[Tensor, "d E"]
        Plain, or a DTensor replicated over the ranks that share a batch.
    x : Float[Tensor, "t d"]
        Tokens of this rank; ``t`` may be 0. Logits are computed in float32 at least, whatever the dtype of
        ``x``.
    top_k : int
        Experts per token, in [1, E].
    score : {"softmax", "sigmoid"}
        Over all experts, before the choice.
    normalize : {"none", "l1"}
        ``"l1"`` divides the k chosen scores by their sum.
    scale : float
        Multiplies the weights, after ``normalize``.
    bias : Float[Tensor, " E"], optional
        Added to the scores for the choice alone; it never enters the weights. float32 at least.
    n_groups, top_groups : int
        Group-limited routing: experts form ``n_groups`` groups of neighbours, and a token goes to experts of
        its ``top_groups`` best groups alone. A group's score is the sum of its two best biased scores.
    assignment : {"top_k", "random", "uniform"}
        ``"top_k"``: the experts of the best biased scores. ``"random"``: k different experts drawn for each
        token, from ``key`` and the token's id. ``"uniform"``: experts in turn from one that ``key`` says, k
        for each id after the k of the id before, so that loads of consecutive ids differ by one at most. The
        last two look at neither scores nor groups; weights are the chosen experts' scores all the same.
    key : Int[Tensor, ""], optional
        Needed by ``"random"`` and ``"uniform"``, and refused by ``"top_k"``. See
        :func:`moekit.random.make_key` and :func:`moekit.random.fold_in`.
    token_ids : Int[Tensor, " t"], optional
        Index of each token in the global batch; by default its place in ``x``.
    expert_ids : Integer[Tensor, "t k"], optional
        Which experts each token goes to, in place of a choice: those of a recording, say
        (:func:`moekit.balance.replay`). All different for one token, of any integer dtype. Weights are their
        scores; groups are not looked at.
    kernels : {"auto", "torch", "triton"}
        ``"triton"`` makes scores, choice and weights in one kernel, and the counts in another; ``"auto"`` is
        that on CUDA, and ``"torch"`` elsewhere.

    Returns
    -------
    Routing
        Weights, choices, counts, logits and scores.

    Raises
    ------
    ValueError
        When an option is unknown or would have no effect, sizes do not fit, a random assignment has no key,
        or ``expert_ids`` are out of range or repeat an expert for one token (on CUDA the last two are a
        device assertion, later).

    References
    ----------
    Shazeer et al., Outrageously Large Neural Networks, 2017. https://arxiv.org/abs/1701.06538
    DeepSeek-AI, DeepSeek-V3, 2024 (bias, groups). https://arxiv.org/abs/2412.19437
    """
    n_experts = router.shape[-1]
    if router.ndim != 2 or x.ndim != 2 or router.shape[0] != x.shape[-1]:
        raise ValueError(
            f"route needs router (d, E) for tokens (t, d), got {tuple(router.shape)}, {tuple(x.shape)}"
        )
    if not 1 <= top_k <= n_experts:
        raise ValueError(f"route needs 1 <= top_k <= n_experts, got {top_k=}, {n_experts=}")
    if score not in ("softmax", "sigmoid"):
        raise ValueError(f"route needs score 'softmax' or 'sigmoid', got {score!r}")
    if normalize not in ("none", "l1"):
        raise ValueError(f"route needs normalize 'none' or 'l1', got {normalize!r}")
    if bias is not None and (bias.shape != (n_experts,) or bias.dtype not in (torch.float32, torch.float64)):
        raise ValueError(f"route needs a float32 bias ({n_experts},), got {bias.dtype} {tuple(bias.shape)}")
    _check_groups(n_experts, n_groups, top_groups, top_k)
    if expert_ids is None:
        _check_assignment(assignment, key, bias)
    elif assignment != "top_k" or key is not None or bias is not None:
        raise ValueError(
            "route needs no assignment, key or bias with expert_ids, which say where tokens go, got "
            f"{assignment=}, {'no' if key is None else 'a'} key and {'no' if bias is None else 'a'} bias; "
            "leave them out"
        )
    if token_ids is not None and token_ids.shape != (len(x),):
        raise ValueError(f"route needs an id for each of {len(x)} tokens, got {tuple(token_ids.shape)}")

    logits = router_logits(x, local(router), kernels=kernels)
    if expert_ids is not None:
        expert_ids = _checked_ids(expert_ids, (len(x), top_k), n_experts)
    elif assignment != "top_k":
        assert key is not None
        expert_ids = _draw(assignment, key, token_ids, len(x), n_experts, top_k)
    elif n_groups > top_groups:
        scores = logits.detach().softmax(-1) if score == "softmax" else logits.detach().sigmoid()
        biased = scores if bias is None else scores + bias.to(scores.dtype)
        expert_ids = _best_of_groups(biased, top_k, n_groups, top_groups)
    scores, expert_ids, weights = choose(
        logits,
        top_k=top_k,
        score=score,
        normalize=normalize,
        scale=scale,
        bias=bias,
        expert_ids=expert_ids,
        kernels=kernels,
    )
    return Routing(
        weights=weights,
        expert_ids=expert_ids,
        counts=count_experts(expert_ids, n_experts, kernels=kernels),
        logits=logits,
        scores=scores,
    )


def _check_groups(n_experts: int, n_groups: int, top_groups: int, top_k: int) -> None:
    if n_groups < 1 or n_experts % n_groups or not 1 <= top_groups <= n_groups:
        raise ValueError(
            f"route needs n_groups to divide n_experts and 1 <= top_groups <= n_groups, "
            f"got {n_experts=}, {n_groups=}, {top_groups=}"
        )
    if top_k > n_experts // n_groups * top_groups:
        raise ValueError(
            f"route needs top_k experts in top_groups groups of {n_experts // n_groups}, "
            f"got {top_k=}, {top_groups=}"
        )


def _check_assignment(assignment: Assignment, key: Tensor | None, bias: Tensor | None) -> None:
    if assignment == "top_k":
        if key is not None:
            raise ValueError("route needs no key for assignment='top_k', got one; leave it out")
        return
    if assignment not in ("random", "uniform"):
        raise ValueError(f"route needs assignment 'top_k', 'random' or 'uniform', got {assignment!r}")
    if key is None:
        raise ValueError(f"route needs a key for {assignment=}, got None; pass moekit.random.make_key(seed)")
    if bias is not None:
        raise ValueError(
            f"route needs no bias for {assignment=}, which does not look at scores; leave it out"
        )


def _checked_ids(ids: Tensor, shape: tuple[int, int], n_experts: int) -> Int[Tensor, "t k"]:
    """Return given ids in int64; raise unless they are k different experts of each token."""
    check_shapes("route", expert_ids=(ids, shape))
    if ids.dtype == torch.bool or ids.is_floating_point() or ids.is_complex():
        raise ValueError(f"route needs expert_ids of an integer dtype, got {ids.dtype}")
    ids = ids.long()
    apart = (ids.sort(-1).values.diff(dim=-1) > 0).all(-1)
    check_values(
        ((ids >= 0) & (ids < n_experts)).all() & apart.all(),
        "route",
        f"expert_ids in [0, {n_experts}), those of a token all different",
        lambda: f"{ids.min()} to {ids.max()}, {(~apart).sum()} of {len(ids)} tokens with one twice",
    )
    return ids


def _draw(
    assignment: Assignment, key: Tensor, token_ids: Tensor | None, n: int, n_experts: int, top_k: int
) -> Int[Tensor, "t k"]:
    """Choose experts without looking at scores."""
    experts = torch.arange(n_experts, device=key.device)
    if token_ids is None:
        token_ids = torch.arange(n, device=key.device)
    if assignment == "random":
        return uniform(key, token_ids[:, None] * n_experts + experts).topk(top_k, dim=-1).indices
    return (token_ids[:, None] * top_k + experts[:top_k] + key % n_experts) % n_experts


def _best_of_groups(
    biased: Float[Tensor, "t E"], top_k: int, n_groups: int, top_groups: int
) -> Int[Tensor, "t k"]:
    """Choose the best biased scores within the best groups."""
    grouped = rearrange(biased, "t (g e) -> t g e", g=n_groups)
    of_group = grouped.topk(min(2, grouped.shape[-1]), dim=-1).values.sum(-1)
    chosen = torch.zeros_like(of_group, dtype=torch.bool).scatter_(-1, best(of_group, top_groups), True)
    masked = grouped.masked_fill(~chosen[..., None], -torch.inf)
    return best(rearrange(masked, "t g e -> t (g e)"), top_k)
