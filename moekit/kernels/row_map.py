"""Where every route goes: its expert's rank, and the row there; from counts alone, without a sort of rows.

A rank numbers the rows wanted from it g = 0 .. D - 1 in order (expert, source rank, token, choice). With room
for N = min(D, capacity) rows, row g is kept if ``(g + 1) N // D > g N // D``, and its place is ``g N // D``.
So exactly N rows are kept; an expert, a source rank, or any other run of consecutive rows keeps its share to
within one, and without overflow the place is g.

Axes: R ranks, E experts in all, e = E / R of them on a rank, t tokens, k choices.
"""

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moekit.kernels._backend import check_shapes, jit, next_power_of_2, operator, tl, use_triton
from moekit.kernels.permute import expert_slots


class RowMap(NamedTuple):
    """Where routes go, and what comes here."""

    places: Int[Tensor, "t k"]  # int64: rank * capacity + row there; -1 where dropped
    offsets: Int[Tensor, " e"]  # int32: where the rows of each expert of this rank end
    dropped: Int[Tensor, " E"]  # int64: routes of this rank that found no room, by expert


def row_map(
    expert_ids: Int[Tensor, "t k"],
    counts: Int[Tensor, "R E"],
    *,
    rank: int,
    capacity: int,
    priority: Float[Tensor, "t k"] | None = None,
    kernels: str = "auto",
) -> RowMap:
    """Return where each route of a rank goes. No communication and no host sync.

    Parameters
    ----------
    expert_ids : Int[Tensor, "t k"]
        int64, of this rank's tokens.
    counts : Int[Tensor, "R E"]
        int64, routes of every rank to every expert; row ``rank`` counts ``expert_ids``.
    rank : int
        This rank; rank i holds experts [i * e, (i + 1) * e).
    capacity : int
        Rows that a rank has room for.
    priority : Float[Tensor, "t k"], optional
        Of the routes of one rank to one expert, as many are kept as without, but those of the highest
        priority (of equal ones the earlier), in the order of their tokens. This sorts the routes.
    kernels : {"auto", "torch", "triton"}
        As for :mod:`moekit.kernels`.

    Raises
    ------
    ValueError
        For shapes that do not fit, a rank that is none of R, or R that does not divide E.
    """
    n_ranks, n_experts = counts.shape
    if n_experts % n_ranks or not 0 <= rank < n_ranks:
        raise ValueError(
            f"row_map needs counts (R, E) with R that divides E and a rank below R, got "
            f"{tuple(counts.shape)} and {rank=}"
        )
    check_shapes("row_map", priority=(priority, expert_ids.shape))
    slots = expert_slots(expert_ids, n_experts, kernels=kernels)
    if priority is None and use_triton("row_map", kernels, expert_ids):
        return RowMap(*torch.ops.moekit.row_map(expert_ids, slots, counts, rank, capacity))
    e = n_experts // n_ranks
    of_owner = counts.view(n_ranks, n_ranks, e).permute(1, 2, 0).reshape(n_ranks, -1)  # (expert, source)
    end = of_owner.cumsum(1)
    wanted = end[:, -1:]
    room, wanted = wanted.clamp(max=capacity), wanted.clamp(min=1)
    by_cell = (n_ranks, e, n_ranks)
    first = ((end - of_owner) * room // wanted).view(by_cell)  # place of the first row of each cell
    after = (end * room // wanted).view(by_cell)
    mine = counts[rank]
    quota = (after - first)[:, :, rank].flatten()  # (E,), of this rank's routes
    owner, position = expert_ids // e, slots - (mine.cumsum(0) - mine)[expert_ids]
    if priority is None:
        g = (end - of_owner).view(by_cell)[:, :, rank].flatten()[expert_ids] + position
        n, d = room[owner, 0], wanted[owner, 0]
        place, kept = g * n // d, (g + 1) * n // d > g * n // d
    else:
        best = priority.flatten().argsort(descending=True, stable=True)
        best = best[expert_ids.flatten()[best].argsort(stable=True)]  # by expert, the best first
        ranking = torch.empty_like(best).scatter_(0, best, torch.arange(len(best), device=best.device))
        kept = ranking.view(slots.shape) - (slots - position) < quota[expert_ids]
        through = torch.zeros_like(best).scatter_(0, slots.flatten(), kept.flatten().long()).cumsum(0)
        before = torch.cat([through.new_zeros(1), through])
        place = first[:, :, rank].flatten()[expert_ids] + before[slots] - before[slots - position]
    places = torch.where(kept, owner * capacity + place, -1)
    return RowMap(places, after[rank, :, -1].int(), mine - quota)


# --- Launches -------------------------------------------------------------------------

ROUTES = 256  # a program


@operator("moekit::row_map")
def _row_map_op(
    expert_ids: Tensor, slots: Tensor, counts: Tensor, rank: int, capacity: int
) -> tuple[Tensor, Tensor, Tensor]:
    expert_ids, slots, counts = expert_ids.contiguous(), slots.contiguous(), counts.contiguous()
    places, offsets, dropped = _row_map_like(expert_ids, slots, counts, rank, capacity)
    n_ranks, n_experts = counts.shape
    shift, wanted = counts.new_empty(n_experts), counts.new_empty(n_ranks)
    e = n_experts // n_ranks
    _cells[(n_ranks,)](
        *(counts, shift, wanted, offsets, dropped, capacity),
        **dict(rank=rank, n_ranks=n_ranks, e=e, CELLS=next_power_of_2(n_experts)),
    )
    if n := expert_ids.numel():
        _places[(-(-n // ROUTES),)](expert_ids, slots, shift, wanted, places, n, capacity, e=e, ROUTES=ROUTES)
    return places, offsets, dropped


@_row_map_op.register_fake
def _row_map_like(expert_ids, slots, counts, rank, capacity):
    n_ranks, n_experts = counts.shape
    offsets = counts.new_empty(n_experts // n_ranks, dtype=torch.int32)
    return slots.new_empty(slots.shape), offsets, counts.new_empty(n_experts)


# --- Kernels --------------------------------------------------------------------------


@jit
def _cells(
    counts, shift, wanted, offsets, dropped, capacity,
    rank: tl.constexpr, n_ranks: tl.constexpr, e: tl.constexpr, CELLS: tl.constexpr,
):  # fmt: skip
    # A cell is what one source wants of one expert of this program's rank.
    owner = tl.program_id(0)
    n_experts: tl.constexpr = n_ranks * e
    cell = tl.arange(0, CELLS)
    valid, expert, source = cell < n_experts, owner * e + cell // n_ranks, cell % n_ranks
    count = tl.load(counts + source * n_experts + expert, mask=valid, other=0)
    end = tl.cumsum(count, 0)
    total = tl.sum(count, 0)
    tl.store(wanted + owner, total)
    start, room, total = end - count, tl.minimum(total, capacity), tl.maximum(total, 1)
    kept_start, kept_end = start * room // total, end * room // total
    # This rank's routes stand in the order of all experts; those of earlier ones are not of this owner.
    own = tl.load(counts + rank * n_experts + cell, mask=valid, other=0)
    earlier = tl.sum(tl.where(cell < owner * e, own, 0), 0)
    here = valid & (source == rank)
    through = tl.cumsum(tl.where(here, count, 0), 0)
    tl.store(shift + expert, start - (earlier + through - count), mask=here)
    tl.store(dropped + expert, count - (kept_end - kept_start), mask=here)
    if owner == rank:
        last = valid & (source == n_ranks - 1)
        tl.store(offsets + cell // n_ranks, kept_end.to(tl.int32), mask=last)


@jit
def _places(expert_ids, slots, shift, wanted, places, n, capacity, e: tl.constexpr, ROUTES: tl.constexpr):
    route = tl.program_id(0) * ROUTES + tl.arange(0, ROUTES)
    valid = route < n
    expert = tl.load(expert_ids + route, mask=valid, other=0)
    owner = expert // e
    g = tl.load(shift + expert, mask=valid, other=0) + tl.load(slots + route, mask=valid, other=0)
    total = tl.load(wanted + owner, mask=valid, other=1)
    room = tl.minimum(total, capacity)
    place, after = g * room // total, (g + 1) * room // total
    place = tl.where(total <= capacity, g, place)
    kept = (total <= capacity) | (after > place)
    tl.store(places + route, tl.where(kept, owner * capacity + place, -1), mask=valid)
