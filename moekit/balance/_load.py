"""The load that ranks wait for, and the load that a balancing loss sees.

``rows`` count the rows of each expert: of m micro-batches, which come one after the other, from s ranks that
share the experts, in l layers. What is even over all of these can be uneven in each: ranks wait for the
fullest of them in every micro-batch and layer, while a loss or a metric over the global batch adds first.

Where g groups of ranks have a copy of the experts each (edp), the s source ranks are the first group's, then
the next one's. Ranks wait for the fullest of their own group; groups go on by themselves, and wait for the
slowest of them once, where the step's gradients are added up. Groups that meet sooner, as in a balancing loss
over all of them, wait as long or longer.

All are pure, and read nothing on the host.

Axes: m micro-batches, g groups, s source ranks of all groups, l layers, E experts, p ranks of a group that
hold E / p experts each.
"""

import math
from typing import Literal, NamedTuple

import torch
import torch.distributed._functional_collectives as fc
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit.mesh import edp_ep

Rows = Int[Tensor, "m s l E"]


class Evenness(NamedTuple):
    """How even a load over k places is."""

    max_over_mean: Float[Tensor, "*n"]  # 1 where all have the same; k where one has all
    coefficient_of_variation: Float[Tensor, "*n"]  # standard deviation by mean
    entropy: Float[Tensor, "*n"]  # of the shares, by log k: 1 where all have the same, 0 where one has all
    n_dead: Int[Tensor, "*n"]  # places without load, where there is any


def evenness(load: Tensor) -> Evenness:
    """Return how even a load is over its last dim, of k places, in float64; no load at all counts as even.

    >>> evenness(torch.tensor([2, 2, 0, 0])).max_over_mean.item()
    2.0
    """
    load = load.double()
    k, total = load.shape[-1], load.sum(-1)
    shares = load / total.clamp_min(1e-300)[..., None]
    shares = shares.where(total[..., None] != 0, 1 / k)
    entropy = -torch.special.xlogy(shares, shares).sum(-1)
    return Evenness(
        max_over_mean=shares.amax(-1) * k,
        coefficient_of_variation=shares.std(-1, correction=0) * k,
        entropy=entropy / math.log(k) if k > 1 else torch.ones_like(total),
        n_dead=((load == 0) & (total[..., None] > 0)).sum(-1),
    )


def rank_load(rows: Shaped[Tensor, "*n E"], n_ranks: int) -> Shaped[Tensor, "*n p"]:
    """Return the rows, or shares, of each rank, of which rank i holds experts [i E / p, (i + 1) E / p).

    Raises
    ------
    ValueError
        Unless ``n_ranks`` divides the number of experts.
    """
    n_experts = rows.shape[-1]
    if n_ranks < 1 or n_experts % n_ranks:
        raise ValueError(f"rank_load needs n_ranks that divides {n_experts} experts, got {n_ranks}")
    return rows.unflatten(-1, (n_ranks, n_experts // n_ranks)).sum(-1)


def wait(rows: Rows, n_ranks: int, *, n_groups: int = 1) -> Float[Tensor, "m l"]:
    """Return how many rows a rank waits for on average, in each micro-batch and layer.

    The product of a layer is done when the fullest rank of a group is. What groups wait for each other at the
    end of the step is not among these: :func:`step_wait`. As a time: times the FLOPs of a row
    (:func:`moekit.plan.flops_per_row`), by the rate of the products.

    Parameters
    ----------
    rows : Int[Tensor, "m s l E"]
        Of one step.
    n_ranks : int
        Ranks that share a copy of the experts.
    n_groups : int
        Groups of such ranks.

    Raises
    ------
    ValueError
        For rows of another shape, groups that do not divide the source ranks, and as :func:`rank_load`.
    """
    load = _load_of_groups("wait", rows, n_ranks, n_groups)
    return (load.amax(-1) - load.mean(-1)).mean(1)


class StepWait(NamedTuple):
    """What ranks wait for in a step beside what its sums show of it; but for rows, 1 where all is even."""

    waited: Float[Tensor, " l"]  # the time of all micro-batches' fullest ranks, by even ones'; mean of groups
    seen: Float[Tensor, " l"]  # the fullest rank of the whole step's rows, by the mean
    waited_in_all: Float[Tensor, ""]  # the time of the slowest group in all layers, by that of even rows
    seen_in_all: Float[Tensor, ""]  # what is seen, layers weighed by their rows
    rows: Float[Tensor, ""]  # that a rank waits for on average, until the slowest group has done all layers


def step_wait(rows: Rows, n_ranks: int, *, n_groups: int = 1) -> StepWait:
    """Return what ranks wait for in a step, and the slowest group of them; as for :func:`wait`.

    What is waited is never below what is seen: the fullest ranks of parts add up to at least that of the
    whole.
    """
    load = _load_of_groups("step_wait", rows, n_ranks, n_groups)
    return wait_of_sums(rows.sum((0, 1)), load.amax(-1).sum(0).T, n_ranks)


def wait_of_sums(computed: Shaped[Tensor, "l E"], fullest: Shaped[Tensor, "l g"], n_ranks: int) -> StepWait:
    """Return what :func:`step_wait` does, of what is summed over a step.

    Parameters
    ----------
    computed : Int[Tensor, "l E"]
        Rows per expert, of all groups.
    fullest : Int[Tensor, "l g"]
        Those of each group's fullest rank, summed over micro-batches: :func:`fullest`.
    n_ranks : int
        Ranks of a group.
    """
    even = computed.sum(-1).double() / (n_ranks * fullest.shape[-1])
    seen = evenness(rank_load(computed, n_ranks)).max_over_mean
    total, longest = even.sum(), fullest.double().sum(0).amax()
    return StepWait(
        waited=(fullest.double().mean(-1) / even).where(even > 0, 1.0),
        seen=seen,
        waited_in_all=(longest / total).where(total > 0, 1.0),
        seen_in_all=((seen * even).sum() / total).where(total > 0, 1.0),
        rows=longest - total,
    )


def fullest(
    counts: Int[Tensor, "*l E"], n_ranks: int | None = None, *, mesh: DeviceMesh | None = None
) -> Int[Tensor, "*l g"]:
    """Return this call's share of the rows of each group's fullest rank.

    Shares add up over micro-batches and ranks to what :func:`wait_of_sums` takes. Pure. Collective over the
    axis ep of ``mesh``: one all-reduce of the counts.

    Parameters
    ----------
    counts : Int[Tensor, "*l E"]
        Rows per expert of this call, in each layer.
    n_ranks : int, optional
        Ranks that share a copy of the experts, or would; by default those of ep.
    mesh : DeviceMesh, optional
        Axes (edp, ep). The first rank of each group returns its rows, others 0.

    Raises
    ------
    ValueError
        When ``mesh`` lacks one of the axes, and as :func:`rank_load`.
    """
    ep, group, n_groups = None, 0, 1
    if mesh is not None:
        mesh = edp_ep("fullest", mesh)
        ep, group, n_groups = mesh["ep"], mesh["edp"].get_local_rank(), mesh["edp"].size()
    if n_ranks is None:
        n_ranks = 1 if ep is None else ep.size()
    rows = rank_load(counts if ep is None else fc.all_reduce(counts, "sum", ep), n_ranks).amax(-1)
    shares = rows.new_zeros(*rows.shape, n_groups)
    if ep is None or ep.get_local_rank() == 0:
        shares[..., group] = rows
    return shares


def _load_of_groups(who: str, rows: Tensor, n_ranks: int, n_groups: int) -> Float[Tensor, "m g l p"]:
    """Return the rows of each rank of each group, in float64."""
    if rows.ndim != 4:
        raise ValueError(
            f"{who} needs rows (m, s, l, E) of one step, got {tuple(rows.shape)}; give each step by itself"
        )
    if n_groups < 1 or rows.shape[1] % n_groups:
        raise ValueError(f"{who} needs n_groups that divides {rows.shape[1]} source ranks, got {n_groups}")
    return rank_load(rows.unflatten(1, (n_groups, -1)).sum(2), n_ranks).double()


class Gap(NamedTuple):
    """What ranks wait for beside what is seen of it, by layer; each 1 where all is even."""

    waited: Float[Tensor, " l"]  # as in StepWait
    seen: Float[Tensor, " l"]
    loss: Float[Tensor, " l"]  # E times the sum of squared shares, of the population that a loss sees


def gerrymandering_gap(
    rows: Rows,
    n_ranks: int,
    *,
    n_groups: int = 1,
    population: Literal["rank", "micro_batch", "batch"] = "batch",
) -> Gap:
    """Return how much of what ranks wait for a step's sums, and a balancing loss, do not show.

    ``waited`` less ``seen``, which is never below 0, is load that has moved between micro-batches, or groups,
    instead of becoming even.

    Parameters
    ----------
    rows, n_ranks, n_groups
        As for :func:`wait`.
    population : {"rank", "micro_batch", "batch"}
        As for :func:`moekit.balance.load_balancing_loss`: whose shares its loss takes. That of scores that
        are as uneven as the rows.

    Raises
    ------
    ValueError
        For another population, and as :func:`wait`.
    """
    dims = {"rank": (), "micro_batch": (1,), "batch": (0, 1)}
    if population not in dims:
        raise ValueError(
            f"gerrymandering_gap needs population 'rank', 'micro_batch' or 'batch', got {population!r}"
        )
    load = _load_of_groups("gerrymandering_gap", rows, n_ranks, n_groups)
    found = wait_of_sums(rows.sum((0, 1)), load.amax(-1).sum(0).T, n_ranks)
    of_population = rows.double()
    if dims[population]:
        of_population = of_population.sum(dims[population], keepdim=True)
    weights = of_population.sum(-1)
    shares = of_population / weights.clamp_min(1e-300)[..., None]
    squares = (shares.square().sum(-1) * rows.shape[-1] * weights).sum((0, 1))
    nothing = rows.sum((0, 1, 3)) == 0
    return Gap(
        waited=found.waited,
        seen=found.seen,
        loss=(squares / weights.sum((0, 1)).clamp_min(1e-300)).where(~nothing, 1.0),
    )


def sorted_by_domain(
    n_ranks: int,
    *,
    n_rows: int = 1024,
    per_rank: int = 2,
    n_microbatches: int | None = None,
    sortedness: float = 1.0,
) -> Rows:
    """Return rows of a step that no sum over its batch shows to be uneven, one layer.

    As many domains as ranks, each with all its experts on one rank. The step's tokens, ordered by domain, are
    cut into micro-batches. Over the step every expert has the same; cut into as many micro-batches as ranks,
    each takes ``n_ranks`` times as long as it would with even rows. Cut into one, all is even.

    Parameters
    ----------
    n_ranks : int
        Ranks that share the experts, each of which also sends tokens.
    n_rows : int
        Of each expert, from each rank, in the step.
    per_rank : int
        Experts of a rank.
    n_microbatches : int, optional
        By default as many as ranks.
    sortedness : float
        Part of the tokens that are in order; the others are shuffled over the step. 0: all micro-batches are
        even, up to one row.

    Raises
    ------
    ValueError
        For a sortedness outside [0, 1], no rank, expert or micro-batch, or rows below 0.
    """
    m = n_ranks if n_microbatches is None else n_microbatches
    if min(n_ranks, per_rank, m) < 1 or n_rows < 0 or not 0 <= sortedness <= 1:
        raise ValueError(
            "sorted_by_domain needs n_ranks, per_rank and n_microbatches >= 1, n_rows >= 0 and sortedness "
            f"in [0, 1], got {n_ranks=}, {per_rank=}, n_microbatches={m}, {n_rows=} and {sortedness=}"
        )
    done = torch.arange(m + 1, dtype=torch.float64)[:, None] / m  # of the step, before each micro-batch
    of_domain = (done * n_ranks - torch.arange(n_ranks)).clamp(0, 1)
    # Rounded sums, not rounded parts: so every expert ends at n_rows.
    before = (n_rows * (sortedness * of_domain + (1 - sortedness) * done) + 0.5).floor().long()
    rows = before.diff(dim=0).repeat_interleave(per_rank, dim=1)
    return rows[:, None, None].repeat(1, n_ranks, 1, 1)
