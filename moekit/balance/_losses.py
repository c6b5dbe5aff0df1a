"""Losses over a named population of tokens, and the next balancing bias."""

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit._route import Routing
from moekit.balance._load import rank_load
from moekit.kernels.permute import count_experts
from moekit.mesh import all_gather, all_reduce, data_mesh
from moekit.profiling import ranged

Population = Literal["document", "rank", "micro_batch", "batch"]


@ranged("balance")
def load_balancing_loss(
    routing: Routing,
    *,
    population: Population,
    n_groups: int | None = None,
    documents: Int[Tensor, " t"] | None = None,
    mask: Bool[Tensor, " t"] | None = None,
    n_tokens: int | Int[Tensor, ""] | None = None,
    load: Int[Tensor, " E"] | Float[Tensor, " E"] | None = None,
    context: DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
) -> Float[Tensor, ""]:
    r"""Return this call's share of the load-balancing loss :math:`E \sum_i f_i P_i`.

    :math:`f_i` is the part of a population's routes that expert i takes (so they sum to one), and :math:`P_i`
    the mean over the population of i's score as a part of all scores. The loss is 1 when balanced.
    Populations weigh as their tokens. With ``n_groups``, i are groups of neighbouring experts, and E is their
    number: experts of one group may differ.

    Pure, differentiable in the scores. Collective over ``mesh`` for ``"micro_batch"`` and ``"batch"``: one
    all-reduce of E counts; over ``context`` for ``"document"``: one all-gather of the expert ids.

    Parameters
    ----------
    routing : Routing
        Of t tokens.
    population : {"document", "rank", "micro_batch", "batch"}
        Over which tokens f and P are taken. ``"document"``: the tokens of one document, so the loss does not
        depend on how documents are split into micro-batches or ranks. ``"rank"``: the tokens of this call.
        ``"micro_batch"``: the tokens of this call on all ranks of ``mesh``. These two depend on the split by
        definition. ``"batch"``: the global batch, which must not be accumulated: it is an error on the device
        when this call on all ranks does not hold ``n_tokens``; or else give ``load``.
    n_groups : int, optional
        Balance groups of experts, such as those that a rank holds: a device-level loss.
    documents : Int[Tensor, " t"], optional
        For ``"document"``: a number per document, in [0, t), or in [0, t * cp) with a context.
    mask : Bool[Tensor, " t"], optional
        False for padding, which then enters no count and no mean.
    n_tokens : int or Int[Tensor, ""], optional
        Tokens of the global batch that ``mask`` keeps; by default those of this call.
    load : Int or Float[Tensor, " E"], optional
        For ``"batch"`` that is accumulated: the rows per expert to take f from, as the counts of the step
        before, or of a window of steps.
    context : DeviceMesh, optional
        From :func:`moekit.mesh.context_mesh`, whose ranks each hold t tokens of the same documents.
    mesh : DeviceMesh, optional
        Axes (edp, ep).

    Raises
    ------
    ValueError
        When the population is unknown or lacks its argument, ``load`` is of no use or of another shape, or
        ``n_groups`` does not divide E.

    References
    ----------
    Fedus et al., Switch Transformers, 2021. https://arxiv.org/abs/2101.03961
    DeepSeek-AI, DeepSeek-V2, 2024 (device-level loss). https://arxiv.org/abs/2405.04434
    Qiu et al., Demons in the Detail, 2025 (global batch). https://arxiv.org/abs/2501.11873
    """
    if population not in ("document", "rank", "micro_batch", "batch"):
        raise ValueError(
            "load_balancing_loss needs population 'document', 'rank', 'micro_batch' or 'batch', "
            f"got {population!r}"
        )
    if population == "document" and documents is None:
        raise ValueError("load_balancing_loss over documents needs documents (t,), got None")
    if population == "batch" and n_tokens is None and mesh is not None:
        raise ValueError("load_balancing_loss over the batch needs n_tokens of the global batch, got None")
    n_experts, top_k = routing.n_experts, routing.expert_ids.shape[-1]
    if load is not None and (population != "batch" or load.shape != (n_experts,)):
        raise ValueError(
            f"load_balancing_loss needs a load ({n_experts},) for population 'batch' alone, got "
            f"{tuple(load.shape)} for {population!r}"
        )
    if n_groups is not None and (n_groups < 1 or n_experts % n_groups):
        raise ValueError(
            f"load_balancing_loss needs n_groups that divides {n_experts} experts, got {n_groups}"
        )
    p = _shares(routing.scores)
    keep = torch.ones(len(p), dtype=torch.bool, device=p.device) if mask is None else mask
    here = keep.sum()
    total = here if n_tokens is None else n_tokens

    if population == "document":
        assert documents is not None
        of = documents.clamp_min(0)  # padding is masked, and may carry -1
        n_documents = len(p) * (1 if context is None else context.size())
        torch._assert_async((of < n_documents).all(), "load_balancing_loss needs documents in [0, t)")
        routed = torch.cat([of[:, None], keep[:, None], routing.expert_ids], 1)
        if context is not None:  # far fewer numbers than the counts
            routed = all_gather(routed, context).flatten(0, 1)
        at, rows, ids = routed.split([1, 1, top_k], 1)
        counts = torch.zeros(n_documents, n_experts, dtype=torch.int64, device=p.device)
        counts.view(-1).scatter_add_(0, (at * n_experts + ids).flatten(), rows.expand(-1, top_k).flatten())
        routes = counts.sum(-1, keepdim=True).clamp_min(1)
        f = (counts.to(p.dtype) / routes)[of]
    elif load is not None:
        f = load.to(p.dtype) / load.sum().clamp_min(1)
    else:
        counts = expert_counts(routing, mask=mask)
        if population != "rank" and mesh is not None:
            counts = all_reduce(counts, data_mesh(mesh), 0)
        if population == "batch":
            torch._assert_async(
                counts.sum() == total * top_k,
                "load_balancing_loss over the batch needs the whole batch in one call, but it is accumulated",
            )
        f = counts.to(p.dtype) / counts.sum().clamp_min(1)
    if n_groups is not None:
        f, p = rank_load(f, n_groups), rank_load(p, n_groups)
    per_token = (f * p).sum(-1).masked_fill(~keep, 0.0)
    return p.shape[-1] * per_token.sum() / _at_least_one(total)


@ranged("balance")
def router_z_loss(
    routing: Routing,
    *,
    mask: Bool[Tensor, " t"] | None = None,
    n_tokens: int | Int[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Return this call's share of the mean squared log-sum-exp of the router's logits.

    Pure and differentiable in the logits. ``mask`` and ``n_tokens`` as for :func:`load_balancing_loss`.

    References
    ----------
    Zoph et al., ST-MoE, 2022. https://arxiv.org/abs/2202.08906
    """
    z = routing.logits.logsumexp(-1).square()
    if mask is not None:
        z = z.masked_fill(~mask, 0.0)
    total = (len(z) if mask is None else mask.sum()) if n_tokens is None else n_tokens
    return z.sum() / _at_least_one(total)


def router_entropy(
    routing: Routing,
    *,
    mask: Bool[Tensor, " t"] | None = None,
    n_tokens: int | Int[Tensor, ""] | None = None,
) -> Float[Tensor, ""]:
    """Return this call's share of the mean entropy of a token's scores, as parts of their sum; in nats.

    Pure, not differentiable. log E where scores are alike, 0 where one expert has all. ``mask`` and
    ``n_tokens`` as for :func:`load_balancing_loss`.
    """
    p = _shares(routing.scores.detach())
    entropy = torch.special.entr(p).sum(-1)
    if mask is not None:
        entropy = entropy.masked_fill(~mask, 0.0)
    total = (len(entropy) if mask is None else mask.sum()) if n_tokens is None else n_tokens
    return entropy.sum() / _at_least_one(total)


def next_bias(
    bias: Float[Tensor, "*l E"],
    counts: Int[Tensor, "*l E"] | Float[Tensor, "*l E"],
    *,
    rate: float = 1e-3,
    mesh: DeviceMesh | None = None,
) -> Float[Tensor, "*l E"]:
    """Return the next step's bias: up by ``rate`` for experts below the mean load, down for those above.

    Pure, not differentiable. Collective over ``mesh``: one all-reduce of the counts.

    Parameters
    ----------
    bias : Float[Tensor, "*l E"]
        float32 at least, one row a layer; lower precisions stop moving.
    counts : Int or Float[Tensor, "*l E"]
        Rows per expert of one step, padding left out (:func:`expert_counts`), or of a window of n steps:
        their sum, or a moving mean, ``mean.lerp(counts, 1 / n)``.
    rate : float
        Step of the bias, in units of the scores.
    mesh : DeviceMesh, optional
        Axes (edp, ep), whose ranks' counts are summed; ``None`` where they already are.

    Raises
    ------
    TypeError
        When the bias is kept in less than float32.
    ValueError
        When the shapes differ.

    References
    ----------
    Wang et al., Auxiliary-Loss-Free Load Balancing, 2024. https://arxiv.org/abs/2408.15664
    """
    if bias.dtype not in (torch.float32, torch.float64):
        raise TypeError(
            f"next_bias needs a bias in float32, got {bias.dtype}, in which steps of {rate} are lost"
        )
    if not 0 <= rate < math.inf:
        raise ValueError(f"next_bias needs a finite rate >= 0, got {rate}")
    if bias.shape != counts.shape:
        raise ValueError(
            f"next_bias needs a count per bias, got {tuple(bias.shape)} and {tuple(counts.shape)}"
        )
    if mesh is not None:
        counts = all_reduce(counts, data_mesh(mesh), 0)
    load = counts.to(bias.dtype)
    return bias + rate * (load.mean(-1, keepdim=True) - load).sign()


def expert_counts(routing: Routing, *, mask: Bool[Tensor, " t"] | None = None) -> Int[Tensor, " E"]:
    """Count this call's rows per expert, without padding where ``mask`` is given."""
    if mask is None:
        return routing.counts
    return count_experts(routing.expert_ids, routing.n_experts, mask, kernels="torch")


def _shares(scores: Tensor) -> Tensor:
    total = scores.sum(-1, keepdim=True)
    return scores / total.clamp_min(torch.finfo(total.dtype).tiny)


def _at_least_one(n: int | Tensor) -> int | Tensor:
    return n.clamp_min(1) if isinstance(n, Tensor) else max(n, 1)
