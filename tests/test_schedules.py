"""Schedules as data: their order, their bubble, and what is sent when."""

import itertools

import pytest
from reference import refuses

from moekit import schedules
from moekit.schedules import Op, Schedule, gpipe, interleaved, lower, one_f_one_b, play, timeline

SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 6, 8, 16)))
ALL = [make(p, m) for p, m in SIZES for make in (gpipe, one_f_one_b)]
ALL += [interleaved(p, m, v) for p, m in SIZES for v in (1, 2, 3) if m % p == 0]


@pytest.mark.parametrize("cost", [{"F": 1.0, "B": 2.0}, {"F": 3.0, "B": 3.0}])
def test_the_bubble_is_p_minus_1_of_v_m_plus_p_minus_1(cost):
    for schedule in ALL:
        p, m = schedule.n_ranks, schedule.n_microbatches
        v = schedule.n_stages // p
        assert play(schedule, cost).bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


def held_at_most(ops):
    """Return the most micro-batches whose forward is done and whose backward is not."""
    held = itertools.accumulate(1 if op.kind == "F" else -1 for op in ops)
    return max(held)


def test_1f1b_holds_as_many_micro_batches_as_ranks_come_after_and_gpipe_all():
    for rank in range(4):
        assert held_at_most(one_f_one_b(4, 16).ops[rank]) == 4 - rank
        assert held_at_most(gpipe(4, 16).ops[rank]) == 16
    assert timeline(one_f_one_b(2, 2), {"F": 1, "B": 2}).splitlines() == [
        "rank 0  F0.0 F0.1 .    .    B0.0 -    .    B0.1 -",
        "rank 1  .    F1.0 B1.0 -    F1.1 B1.1 -    .    .",
    ]


def replay(lists):
    """Carry out lists in which every send and receive blocks until its partner is there."""
    at, done = [0] * len(lists), set()
    while True:
        heads = [ops[i] if i < len(ops) else None for ops, i in zip(lists, at, strict=True)]
        before = sum(at)
        for rank, op in enumerate(heads):
            if op is None:
                continue
            if op.kind in ("F", "B"):
                done.add(op)
                at[rank] += 1
            elif op.kind.startswith("send"):
                kind, step = op.kind[-1], 1 if op.kind[-1] == "F" else -1
                assert Op(kind, op.stage, op.micro_batch) in done
                partner = Op("recv_" + kind, op.stage + step, op.micro_batch)
                if partner in heads:
                    at[heads.index(partner)] += 1
                    at[rank] += 1
                    break
        if sum(at) == before:
            return [op for op in heads if op is not None]


def test_lists_with_messages_do_not_deadlock_even_where_every_message_blocks():
    for schedule in ALL:
        lists = lower(schedule)
        assert replay(lists) == []
        n = schedule.n_microbatches * (schedule.n_stages - 1)
        sends = [op for op in itertools.chain(*lists) if op.kind.startswith("send")]
        assert len(sends) == (2 * n if schedule.n_ranks > 1 else 0)


def test_a_schedule_whose_order_is_impossible_is_refused():
    good = gpipe(2, 2)
    late = (tuple(reversed(good.ops[0])), good.ops[1])
    with refuses("needs an order that can be carried out, got ranks that wait: rank 0 at B0.1 for B1.1"):
        Schedule(late, good.rank_of, 2)
    dropped = (good.ops[0][1:], good.ops[1])
    with refuses(
        "(B, or I and W) of rank 0's stages once, missing: F0.0, not its own: none, twice: none"
    ):
        Schedule(dropped, good.rank_of, 2)
    with refuses("rank 0's stages once, missing: none, not its own: none, twice: F0.1"):
        Schedule(((*good.ops[0], Op("F", 0, 1)), good.ops[1]), good.rank_of, 2)
    with refuses("needs stages on ranks 0 to 1, got ranks [5]"):
        Schedule(good.ops, (0, 5), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 4), "gpipe needs n_ranks and n_microbatches >= 1, got 0, 4"),
        (lambda: one_f_one_b(2, 0), "one_f_one_b needs n_ranks and n_microbatches >= 1, got 2, 0"),
        (lambda: interleaved(4, 6), "n_microbatches=6, n_ranks=4; the next above is n_microbatches=8"),
        (lambda: interleaved(4, 8, 0), "interleaved needs n_per_rank >= 1"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with refuses(message):
        make()


def test_a_timeline_is_drawn_with_a_bar_for_every_operation():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed (moekit[dev])")
    pyplot.switch_backend("agg")
    ax = schedules.draw(interleaved(2, 4))
    assert len(ax.patches) == 2 * 4 * 4 and "bubble 11.1%" in ax.get_title()
