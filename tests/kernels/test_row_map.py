"""The row map against brute force: every row numbered, one after another."""

import pytest
import torch
from hypothesis import given, settings, strategies as st

from moekit.kernels.permute import count_experts
from moekit.kernels.row_map import row_map

pytest.importorskip("triton")


def brute_force(ids, n_experts, capacity, priority=None):
    """Return the places of every rank's routes, offsets, and routes dropped, by loops over rows."""
    n_ranks = len(ids)
    e = n_experts // n_ranks
    places = [torch.full(x.shape, -1) for x in ids]
    offsets = torch.zeros(n_ranks, e, dtype=torch.int32)
    dropped = torch.zeros(n_ranks, n_experts, dtype=torch.int64)
    for owner in range(n_ranks):
        wanted = [
            (expert, source, route)
            for expert in range(owner * e, (owner + 1) * e)
            for source in range(n_ranks)
            for route in (ids[source].flatten() == expert).nonzero()[:, 0].tolist()
        ]
        d = len(wanted)
        n = min(d, capacity)
        kept = [row for g, row in enumerate(wanted) if (g + 1) * n // d > g * n // d]
        if priority is not None:
            cells = {row[:2]: [x for x in kept if x[:2] == row[:2]] for row in wanted}
            kept = []
            for (expert, source), fair in cells.items():
                routes = [route for *cell, route in wanted if cell == [expert, source]]
                of = priority[source].flatten()
                best = sorted(routes, key=lambda route: (-of[route].item(), route))[: len(fair)]
                kept += [(expert, source, route) for route in sorted(best)]
        assert len(kept) == n
        for place, (_, source, route) in enumerate(kept):
            places[source].view(-1)[route] = owner * capacity + place
        for expert, source, _ in set(wanted) - set(kept):
            dropped[source, expert] += 1
        sizes = [sum(row[0] == owner * e + i for row in kept) for i in range(e)]
        offsets[owner] = torch.tensor(sizes).cumsum(0)
    return places, offsets, dropped


@st.composite
def batches(draw):
    n_ranks, e = draw(st.integers(1, 4)), draw(st.integers(1, 5))
    top_k = draw(st.integers(1, min(3, n_ranks * e)))
    seed, skew = draw(st.integers(0, 2**31)), draw(st.sampled_from([0.0, 1.0, 4.0]))
    generator = torch.Generator().manual_seed(seed)
    popular = skew * torch.rand(n_ranks * e, generator=generator)
    ids = []
    for _ in range(n_ranks):
        t = draw(st.integers(0, 12))
        ids.append((torch.rand(t, n_ranks * e, generator=generator) + popular).topk(top_k, -1).indices)
    return ids, n_ranks * e, draw(st.integers(1, 40)), generator


@pytest.mark.parametrize(
    ("kernels", "by_priority"), [("torch", False), ("torch", True), ("triton", False), ("triton", True)]
)
@settings(max_examples=40, deadline=None)
@given(batch=batches())
def test_every_route_has_the_place_that_numbering_rows_gives(kernels, by_priority, batch):
    ids, n_experts, capacity, generator = batch
    priority = (
        [torch.rand(x.shape, generator=generator).round(decimals=1) for x in ids] if by_priority else None
    )
    places, offsets, dropped = brute_force(ids, n_experts, capacity, priority)
    counts = torch.stack([count_experts(x, n_experts) for x in ids])
    for rank, mine in enumerate(ids):
        got = row_map(
            mine,
            counts,
            rank=rank,
            capacity=capacity,
            priority=None if priority is None else priority[rank],
            kernels=kernels,
        )
        assert torch.equal(got.places, places[rank])
        assert torch.equal(got.offsets, offsets[rank])
        assert torch.equal(got.dropped, dropped[rank])


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_forty_rows_for_four_experts_into_25_places_are_dropped_evenly(kernels):
    ids = torch.arange(4).repeat_interleave(10)[:, None]
    got = row_map(ids, torch.full((1, 4), 10), rank=0, capacity=25, kernels=kernels)
    assert got.offsets.diff(prepend=torch.zeros(1, dtype=torch.int32)).tolist() == [6, 6, 6, 7]
    assert got.dropped.tolist() == [4, 4, 4, 3]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_products_of_rows_and_capacity_above_int32_are_right(kernels):
    n = 2**13  # times 2**20, it is above int32
    counts = torch.tensor([[2**20, 2**20 - n], [n, 2**20]])  # another rank's rows need not exist here
    ids = torch.zeros(n, 1, dtype=torch.int64)
    got = row_map(ids, counts.flip(0), rank=0, capacity=2**20, kernels=kernels)
    wanted, room = 2**20 + n, 2**20
    g = torch.arange(n)
    place = torch.where((g + 1) * room // wanted > g * room // wanted, g * room // wanted, -1)
    assert torch.equal(got.places[:, 0], place)
