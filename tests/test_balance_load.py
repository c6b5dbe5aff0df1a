"""What ranks wait for, by hand, and beside what sums over a step show."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from reference import refuses

import moekit as mk
from moekit.balance import (
    evenness,
    fullest,
    gerrymandering_gap,
    rank_load,
    sorted_by_domain,
    step_wait,
    wait,
    wait_of_sums,
)
from moekit.testing import ranks


def rows_of(*micro_batches):
    """Return the rows of micro-batches from one rank, one layer."""
    return torch.tensor(micro_batches)[:, None, None]


def test_evenness_by_hand():
    found = evenness(torch.tensor([[3, 1, 0, 0], [2, 2, 2, 2], [0, 0, 0, 8], [0, 0, 0, 0]]))
    assert found.max_over_mean.tolist() == [3.0, 1.0, 4.0, 1.0]
    assert found.coefficient_of_variation.tolist() == pytest.approx([math.sqrt(6) / 2, 0, math.sqrt(3), 0])
    of_first = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25)) / math.log(4)
    assert found.entropy.tolist() == pytest.approx([of_first, 1, 0, 1])
    assert found.n_dead.tolist() == [2, 0, 3, 0]
    assert found.entropy[0].item() == pytest.approx(of_first, rel=1e-14)  # float64 throughout
    assert evenness(torch.tensor([math.nan, 1.0])).max_over_mean.isnan()


def test_a_ranks_load_is_that_of_its_experts():
    rows = torch.tensor([[1, 2, 3, 4, 5, 6]])
    assert rank_load(rows, 3).tolist() == [[3, 7, 11]] and rank_load(rows, 1).tolist() == [[21]]
    with refuses("rank_load needs ep that divides 6 experts, got 4"):
        rank_load(rows, 4)


def test_ranks_wait_for_the_fullest_in_every_micro_batch_and_layer():
    rows = torch.tensor([[[[5, 1, 1, 1], [2, 2, 2, 2]]], [[[0, 0, 4, 4], [1, 0, 0, 1]]]])  # 2 of each
    assert wait(rows, 2).tolist() == [[2.0, 0.0], [4.0, 0.0]]
    assert wait(rows.expand(2, 3, 2, 4), 2).tolist() == [[6.0, 0.0], [12.0, 0.0]]  # from three ranks
    added_up = sum(fullest(of_micro_batch[0], 2) for of_micro_batch in rows)
    assert (added_up[:, 0] - rows.sum((0, 1, 3)) / 2).tolist() == wait(rows, 2).sum(0).tolist()
    assert fullest(rows[0, 0]).tolist() == [[8], [8]]  # one rank has all


def test_ranks_wait_for_their_own_copy_and_the_step_for_the_slowest_copy():
    first = [[[3, 1, 0, 0], [1, 1, 1, 1]], [[2, 0, 1, 1], [1, 1, 1, 1]]]  # (copies, their ranks, experts)
    second = [[[4, 0, 0, 0], [0, 0, 2, 2]], [[0, 0, 4, 0], [0, 0, 0, 4]]]
    load = [[[6, 2], [4, 4]], [[4, 4], [0, 8]]]  # of the ranks of each copy, two experts each
    rows = torch.tensor([first, second])
    assert rows.sum(2).unflatten(-1, (2, 2)).sum(-1).tolist() == load
    rows = rows.flatten(1, 2)[:, :, None]  # one layer
    assert wait(rows, 2, edp=2).tolist() == [[(2 + 0) / 2], [(0 + 4) / 2]]
    found = step_wait(rows, 2, edp=2)
    assert found.rows == (4 + 8) - (16 + 16) / 4  # the second copy's, less the mean
    assert (found.waited.item(), found.waited_in_all.item()) == ((10 + 12) / 2 / 8, 12 / 8)
    assert found.seen.item() == found.seen_in_all.item() == 18 / 16  # of both copies' ranks 0 and 1
    gap = gerrymandering_gap(rows, 2, edp=2)
    assert (gap.waited, gap.seen) == (found.waited, found.seen)
    other_way_round = rows.unflatten(1, (2, 2)).flip(1).flatten(1, 2)
    both = step_wait(torch.cat([rows, other_way_round], 2), 2, edp=2)
    assert both.rows == (12 + 10) - 2 * 8  # copies do not meet in each layer: either takes 22
    assert wait(rows, 2).tolist() == [[2.0], [4.0]]  # one copy on all: 10 and 6, 4 and 12
    for wrong in (0, 3):
        with refuses(f"wait needs edp that divides 4 source ranks, got {wrong}"):
            wait(rows, 2, edp=wrong)


@given(st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 4]), st.data())
def test_copies_are_each_as_if_alone_and_the_slowest_ends_the_step(m, g, n_layers, p, data):
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    of_copies = torch.randint(0, 9, (g, m, 2, n_layers, 2 * p), generator=generator)
    rows = torch.cat(list(of_copies), 1)
    alone = [wait(one, p) for one in of_copies]
    torch.testing.assert_close(wait(rows, p, edp=g), torch.stack(alone).mean(0))
    times = [rank_load(one.sum(1), p).amax(-1).sum().item() for one in of_copies]
    found, even = step_wait(rows, p, edp=g), rows.sum().item() / (g * p)
    assert found.rows.item() == pytest.approx(max(times) - even, abs=1e-9)
    assert (found.waited >= found.seen - 1e-12).all()
    assert found.waited_in_all >= found.seen_in_all - 1e-12
    if even:
        assert found.waited_in_all.item() == pytest.approx(max(times) / even)
    alike = step_wait(of_copies[:1].expand(3, -1, -1, -1, -1).transpose(0, 1).flatten(1, 2), p, edp=3)
    one = step_wait(of_copies[0], p)
    assert all(torch.allclose(x, y) for x, y in zip(alike, one, strict=True))


@pytest.mark.parametrize(("edp", "ep"), [(1, 4), (2, 2), (4, 1)])
def test_shares_of_ranks_add_up_to_the_rows_of_each_copys_fullest_rank(edp, ep):
    rows = torch.randint(0, 9, (2, 4, 3, 8), generator=torch.Generator().manual_seed(0))  # m, s, l, E

    def share():
        mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu")
        mine = rows[:, torch.distributed.get_rank()]
        for part in (mesh["ep"], mesh["edp"]):  # which do not say of which copy the rows are
            with refuses(f"the axes edp and ep, got axes {part.mesh_dim_names} of sizes {tuple(part.shape)}"):
                fullest(mine[0], mesh=part)
        return mk.mesh.sum_over_ranks(sum(fullest(x, mesh=mesh) for x in mine), mesh=mesh)

    for found in ranks(4)(share):
        assert found.shape == (3, edp)
        of_sums, of_rows = wait_of_sums(rows.sum((0, 1)), found, ep), step_wait(rows, ep, edp=edp)
        assert all(torch.equal(x, y) for x, y in zip(of_sums, of_rows, strict=True))


def test_a_mesh_of_other_axes_is_refused(unchecked):
    mesh = SimpleNamespace(mesh_dim_names=("dp", "tp"), shape=(4, 2))
    with refuses(
        "fullest needs a mesh with the axes edp and ep, got axes ('dp', 'tp') of sizes (4, 2); pass the whole"
    ):
        fullest(torch.ones(6, dtype=torch.int64), mesh=mesh)


@pytest.mark.parametrize("ep", [2, 4, 8])
def test_tokens_sorted_by_domain_look_even_and_make_ranks_wait(ep):
    rows = sorted_by_domain(ep)
    assert evenness(rows.sum((0, 1, 2))).max_over_mean == 1.0  # what is logged of a step elsewhere
    gap = gerrymandering_gap(rows, ep)
    assert (gap.waited.item(), gap.seen.item(), gap.loss.item()) == (ep, 1.0, 1.0)
    assert gerrymandering_gap(rows, ep, population="micro_batch").loss.item() == ep
    per_micro_batch = 1024 * 2 * ep
    assert wait(rows, ep).flatten().tolist() == [per_micro_batch * (1 - 1 / ep)] * ep


@given(st.integers(1, 5), st.integers(1, 7), st.integers(1, 50), st.floats(0, 1))
def test_no_sum_shows_how_far_tokens_are_sorted(p, m, n_rows, sortedness):
    rows = sorted_by_domain(p, n_rows=n_rows, per_rank=3, n_microbatches=m, sortedness=sortedness)
    assert (rows >= 0).all() and rows.sum((0, 2)).eq(n_rows).all() and rows.shape == (m, p, 1, 3 * p)
    gap = gerrymandering_gap(rows, p)
    assert (gap.seen.item(), gap.loss.item()) == pytest.approx((1, 1))
    if m == 1 or sortedness == 0:
        assert gap.waited.item() == pytest.approx(1)


def test_ranks_wait_the_longer_the_more_tokens_are_sorted_and_the_more_micro_batches_there_are():
    def waited(m, sortedness):
        rows = sorted_by_domain(4, n_rows=1200, n_microbatches=m, sortedness=sortedness)
        return gerrymandering_gap(rows, 4).waited.item()

    assert [waited(4, x) for x in (0.0, 0.25, 0.5, 1.0)] == pytest.approx([1, 1.75, 2.5, 4])
    assert [waited(m, 1.0) for m in (1, 2, 4, 8)] == pytest.approx([1, 2, 4, 4])
    for wrong in (
        dict(n_microbatches=0), dict(per_rank=0),
        dict(n_rows=-1), dict(sortedness=1.5), dict(sortedness=-0.5)
    ):  # fmt: skip
        with refuses("needs ep, per_rank and n_microbatches >= 1, n_rows >= 0 and sortedness in [0, 1]"):
            sorted_by_domain(4, **wrong)
    with refuses("n_microbatches >= 1, n_rows >= 0 and sortedness in [0, 1], got ep=0, per_rank=2, n_m"):
        sorted_by_domain(0)


def test_a_gap_by_hand(unchecked):
    rows = rows_of([6, 2, 0, 0], [0, 0, 2, 6], [1, 1, 1, 1])  # two ranks of two experts
    gap = gerrymandering_gap(rows, 2)
    assert gap.waited.item() == pytest.approx((8 + 8 + 2) / (4 + 4 + 2))
    assert gap.seen.item() == 1.0
    assert gap.loss.item() == pytest.approx(4 * (2 * 0.35**2 + 2 * 0.15**2))
    of_parts = gerrymandering_gap(rows, 2, population="rank").loss.item()
    assert of_parts == pytest.approx((8 * 2 * 4 * (0.75**2 + 0.25**2) + 4) / 20)
    with refuses("gerrymandering_gap needs population 'rank', 'micro_batch' or 'batch', got 'document'"):
        gerrymandering_gap(rows, 2, population="document")


@pytest.mark.parametrize("load_of", [wait, step_wait, gerrymandering_gap])
def test_the_rows_of_several_steps_are_not_taken_for_those_of_one(load_of, unchecked):
    with refuses(f"{load_of.__name__} needs rows (m, s, l, E) of one step, got (1, 3, 1, 1, 4)"):
        load_of(rows_of([6, 2, 0, 0], [0, 0, 2, 6], [1, 1, 1, 1])[None], 2)


@pytest.mark.parametrize("load_of", [wait, step_wait, gerrymandering_gap])
def test_what_is_no_number_of_rows_is_refused(load_of, unchecked):
    rows = rows_of([6, 2, 0, 0], [0, 0, 2, 6])
    for bad, got in ((rows.float(), "torch.float32"), (rows.numpy(), "ndarray"), (rows.tolist(), "list")):
        with pytest.raises(TypeError, match=f"{load_of.__name__} needs a tensor of whole numbers .*{got}"):
            load_of(bad, 2)
    with refuses(f"{load_of.__name__} needs numbers of rows from 0, got -6"):
        load_of(-rows, 2)


def test_no_rows_are_even():
    gap = gerrymandering_gap(torch.zeros(2, 1, 3, 4, dtype=torch.int64), 2)
    assert all(x.tolist() == [1.0] * 3 for x in gap) and not wait(torch.zeros(1, 1, 1, 4).long(), 4).any()
    found = step_wait(torch.zeros(2, 2, 3, 4, dtype=torch.int64), 2, edp=2)
    assert (found.waited_in_all, found.seen_in_all, found.rows) == (1, 1, 0)


@given(
    st.integers(1, 3), st.integers(1, 3), st.integers(1, 2), st.sampled_from([1, 2, 4]), st.integers(0, 2**31)
)
def test_what_is_waited_is_never_below_what_is_seen_nor_above_all_on_one_rank(m, s, n_layers, p, seed):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(0, 9, (m, s, n_layers, 2 * p), generator=generator)
    rows *= torch.rand(rows.shape, generator=generator) < 0.7
    gap = gerrymandering_gap(rows, p)
    assert (gap.waited >= gap.seen - 1e-12).all() and (gap.waited <= p + 1e-12).all()
    even = rank_load(rows.sum(1), p).double().mean(-1).sum(0)
    torch.testing.assert_close(wait(rows, p).sum(0), (gap.waited - 1) * even)
    finer = [gerrymandering_gap(rows, p, population=x).loss for x in ("batch", "micro_batch", "rank")]
    assert (finer[0] <= finer[1] + 1e-9).all() and (finer[1] <= finer[2] + 1e-9).all()
