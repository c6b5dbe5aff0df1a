"""The load that ranks wait for, and the load that a balancing loss sees.

``rows`` count the rows of each expert: of m micro-batches, which come one after the other, from s ranks that
share the experts, in l layers. What is even over all of these can be uneven in each: ranks wait for the
fullest of them in every micro-batch and layer, while a loss or a metric over the global batch adds first.

Where there are ``edp`` copies of the experts, each shared by ``ep`` ranks, the s source ranks are the first
copy's, then the next one's. Ranks wait for the fullest of their own copy; copies go on by themselves, and
wait for the slowest of them once, where the step's gradients are added up. Copies that meet sooner, as in a
balancing loss over all of them, wait as long or longer.

All are pure, and read nothing on the host; none but :func:`fullest` communicates.

Axes: m micro-batches, s source ranks of all copies, l layers, E experts, c copies of them (edp), p ranks that
share one (ep) and hold E / p experts each.
"""

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit.mesh import all_reduce, edp_ep

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


def rank_load(rows: Shaped[Tensor, "*n E"], ep: int) -> Shaped[Tensor, "*n p"]:
    """Return the rows, or shares, of each of ``ep`` ranks: rank i holds experts [i E / ep, (i + 1) E / ep).

    Raises
    ------
    ValueError
        Unless ``ep`` divides the number of experts.
    """
    n_experts = rows.shape[-1]
    if ep < 1 or n_experts % ep:
        raise ValueError(f"rank_load needs ep that divides {n_experts} experts, got {ep}")
    return rows.unflatten(-1, (ep, n_experts // ep)).sum(-1)


def wait(rows: Rows, ep: int, *, edp: int = 1) -> Float[Tensor, "m l"]:
    """Return how many rows a rank waits for on average, in each micro-batch and layer, in float64.

    A layer is done when the fullest rank of a copy is done, so a rank waits for that rank's rows less its
    own. These are means over ranks and copies. Multiplied by the FLOPs of a row
    (:func:`moekit.plan.flops_per_row`) and divided by the rate of the products they are a time.

    Copies also wait for each other, once, at the end of the step. That is not counted here but in ``rows`` of
    :func:`step_wait`, which are never below the sum of these.

    Parameters
    ----------
    rows : Int[Tensor, "m s l E"]
        Of one step.
    ep : int
        Ranks that share one copy of the experts.
    edp : int
        Copies.

    Raises
    ------
    TypeError
        Unless rows are a tensor of integers.
    ValueError
        For rows of another shape or, on a CPU, below 0, copies that do not divide the source ranks, and as
        :func:`rank_load`.
    """
    load = _load_of_copies("wait", rows, ep, edp)
    return (load.amax(-1) - load.mean(-1)).mean(1)


class StepWait(NamedTuple):
    """What ranks wait for in a step, beside what sums over the step show of it; float64.

    The first four are times as multiples of what even rows would take: 1 where all is even.

    Parameters
    ----------
    waited : Float[Tensor, " l"]
        The fullest rank's rows, summed over micro-batches, in each layer; the mean over copies.
    seen : Float[Tensor, " l"]
        The rows of the rank that is fullest over the whole step, in each layer.
    waited_in_all : Float[Tensor, ""]
        As ``waited``, of the slowest copy over all layers together.
    seen_in_all : Float[Tensor, ""]
        ``seen``, averaged over layers by their rows.
    rows : Float[Tensor, ""]
        Rows that a rank waits for on average until the slowest copy has done all layers.
    """

    waited: Float[Tensor, " l"]
    seen: Float[Tensor, " l"]
    waited_in_all: Float[Tensor, ""]
    seen_in_all: Float[Tensor, ""]
    rows: Float[Tensor, ""]


def step_wait(rows: Rows, ep: int, *, edp: int = 1) -> StepWait:
    """Return what ranks wait for in a step, until the slowest copy is done. Arguments as for :func:`wait`.

    ``waited`` is never below ``seen``: the fullest ranks of the micro-batches have together at least the rows
    of the rank that is fullest over the step.
    """
    return _step_wait("step_wait", rows, ep, edp)


def wait_of_sums(
    computed: Shaped[Tensor, "l E"],
    fullest: Shaped[Tensor, "l c"],
    ep: int,
    *,
    stages: Sequence[Sequence[int]] | None = None,
) -> StepWait:
    """Return what :func:`step_wait` does, from sums over a step, as a training loop has them.

    Parameters
    ----------
    computed : Int[Tensor, "l E"]
        Rows per expert, of all copies.
    fullest : Int[Tensor, "l c"]
        Rows of each copy's fullest rank, summed over micro-batches: from :func:`fullest`.
    ep : int
        Ranks that share one copy.
    stages : sequence of sequence of int, optional
        Of a pipeline: which of the l layers each of its ranks has, perhaps none. Its ranks wait at the same
        time, each until the slowest copy of its own layers is done; ``waited_in_all`` and ``rows`` are means
        over them.

    Raises
    ------
    ValueError
        When ``stages`` are not all layers, each once, and as :func:`rank_load`.
    """
    stages = [range(len(computed))] if stages is None else stages
    if sorted(layer for layers in stages for layer in layers) != list(range(len(computed))):
        raise ValueError(f"wait_of_sums needs each of {len(computed)} layers in one stage, got {stages}")
    even = computed.sum(-1).double() / (ep * fullest.shape[-1])
    seen = evenness(rank_load(computed, ep)).max_over_mean
    longest = torch.stack([fullest[list(layers)].double().sum(0).amax() for layers in stages]).sum()
    total = even.sum()
    return StepWait(
        waited=(fullest.double().mean(-1) / even).where(even > 0, 1.0),
        seen=seen,
        waited_in_all=(longest / total).where(total > 0, 1.0),
        seen_in_all=((seen * even).sum() / total).where(total > 0, 1.0),
        rows=(longest - total) / len(stages),
    )


def fullest(
    counts: Int[Tensor, "*l E"], ep: int | None = None, *, mesh: DeviceMesh | None = None
) -> Int[Tensor, "*l c"]:
    """Return this call's share of the rows of each copy's fullest rank.

    Shares add up over micro-batches and ranks to what :func:`wait_of_sums` takes. Pure. Collective over the
    axis ep of ``mesh``: one all-reduce of the counts.

    Parameters
    ----------
    counts : Int[Tensor, "*l E"]
        Rows per expert of this call, in each layer.
    ep : int, optional
        Ranks that share one copy of the experts, or would; by default those of the axis.
    mesh : DeviceMesh, optional
        Axes (edp, ep). The first rank of each copy returns its rows, others 0.

    Raises
    ------
    ValueError
        When ``mesh`` lacks one of the axes, and as :func:`rank_load`.
    """
    if mesh is None:
        return rank_load(counts, 1 if ep is None else ep).amax(-1, keepdim=True)
    copies, sharers = (edp_ep("fullest", mesh)[axis] for axis in ("edp", "ep"))
    rows = rank_load(all_reduce(counts, sharers, 0), sharers.size() if ep is None else ep).amax(-1)
    shares = rows.new_zeros(*rows.shape, copies.size())
    if sharers.get_local_rank() == 0:
        shares[..., copies.get_local_rank()] = rows
    return shares


def _step_wait(who: str, rows: Tensor, ep: int, edp: int) -> StepWait:
    fullest = _load_of_copies(who, rows, ep, edp).amax(-1).sum(0).T
    return wait_of_sums(rows.sum((0, 1)), fullest, ep)


def _load_of_copies(who: str, rows: Tensor, ep: int, edp: int) -> Float[Tensor, "m c l p"]:
    """Return the rows of each rank of each copy, in float64."""
    if not isinstance(rows, Tensor) or rows.is_floating_point() or rows.is_complex():
        got = rows.dtype if isinstance(rows, Tensor) else type(rows).__name__
        raise TypeError(f"{who} needs a tensor of whole numbers of rows, got {got}")
    if rows.ndim != 4:
        raise ValueError(
            f"{who} needs rows (m, s, l, E) of one step, got {tuple(rows.shape)}; give each step by itself"
        )
    if edp < 1 or rows.shape[1] % edp:
        raise ValueError(f"{who} needs edp that divides {rows.shape[1]} source ranks, got {edp}")
    if rows.is_cpu and rows.numel() and rows.amin() < 0:  # elsewhere the host would wait to know
        raise ValueError(f"{who} needs numbers of rows from 0, got {rows.amin()}")
    return rank_load(rows.unflatten(1, (edp, -1)).sum(2), ep).double()


class Gap(NamedTuple):
    """What ranks wait for, beside what sums and a balancing loss show of it, by layer; float64, 1 where even.

    Parameters
    ----------
    waited, seen : Float[Tensor, " l"]
        As in :class:`StepWait`.
    loss : Float[Tensor, " l"]
        E times the sum of the squares of the experts' shares of a population's rows: the balancing loss of
        scores that are as uneven as the rows.
    """

    waited: Float[Tensor, " l"]
    seen: Float[Tensor, " l"]
    loss: Float[Tensor, " l"]


def gerrymandering_gap(
    rows: Rows,
    ep: int,
    *,
    edp: int = 1,
    population: Literal["rank", "micro_batch", "batch"] = "batch",
) -> Gap:
    """Return how much ranks wait for, beside how little of it a step's sums and a balancing loss may show.

    ``waited`` less ``seen`` is the gap, never below 0: uneven load that cancels out between micro-batches, or
    copies, when they are summed.

    Parameters
    ----------
    rows, ep, edp
        As for :func:`wait`.
    population : {"rank", "micro_batch", "batch"}
        Whose shares ``loss`` takes, as for :func:`moekit.balance.load_balancing_loss`.

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
    found = _step_wait("gerrymandering_gap", rows, ep, edp)
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
    ep: int,
    *,
    n_rows: int = 1024,
    per_rank: int = 2,
    n_microbatches: int | None = None,
    sortedness: float = 1.0,
) -> Rows:
    """Return rows (m, s, 1, E) of an example: uneven in each micro-batch, and even in sum over the step.

    There are as many domains as ranks, and each domain goes to the experts of one rank. The step's tokens are
    ordered by domain and cut into micro-batches. Over the step every expert has the same number of rows. Cut
    into as many micro-batches as ranks, each takes ``ep`` times as long as with even rows; cut into one, all
    is even.

    Parameters
    ----------
    ep : int
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
    m = ep if n_microbatches is None else n_microbatches
    if min(ep, per_rank, m) < 1 or n_rows < 0 or not 0 <= sortedness <= 1:
        raise ValueError(
            "sorted_by_domain needs ep, per_rank and n_microbatches >= 1, n_rows >= 0 and sortedness "
            f"in [0, 1], got {ep=}, {per_rank=}, n_microbatches={m}, {n_rows=} and {sortedness=}"
        )
    done = torch.arange(m + 1, dtype=torch.float64)[:, None] / m  # of the step, before each micro-batch
    of_domain = (done * ep - torch.arange(ep)).clamp(0, 1)
    # Rounded sums, not rounded parts: so every expert ends at n_rows.
    before = (n_rows * (sortedness * of_domain + (1 - sortedness) * done) + 0.5).floor().long()
    rows = before.diff(dim=0).repeat_interleave(per_rank, dim=1)
    return rows[:, None, None].repeat(1, ep, 1, 1)
