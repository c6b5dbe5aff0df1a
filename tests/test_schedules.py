"""Schedules as data: their order, their bubble, and what is sent when."""

import itertools

import pytest
from reference import refuses

from moekit import schedules
from moekit.schedules import (
    Op,
    Schedule,
    dual_pipe_v,
    gpipe,
    interleaved,
    lower,
    one_f_one_b,
    play,
    timeline,
    zero_bubble,
    zero_bubble_v,
)

SIZES = list(itertools.product((1, 2, 3, 4, 8), (1, 2, 4, 6, 8, 16)))
ALL = [make(p, m) for p, m in SIZES for make in (gpipe, one_f_one_b)]
ALL += [interleaved(p, m, v) for p, m in SIZES for v in (1, 2, 3) if m % p == 0]
# Multiples of p: ZB1P takes others in part, ZBV any, DualPipeV from 2p on.
SPLIT = [zero_bubble(p, m, v) for p, m in SIZES for v in (1, 2, 3) if m % p == 0]
SPLIT += [zero_bubble_v(p, m) for p, m in SIZES]
SPLIT += [dual_pipe_v(p, m) for p, m in SIZES if m >= 2 * p]


@pytest.mark.parametrize("cost", [{"F": 1.0, "B": 2.0}, {"F": 3.0, "B": 3.0}])
def test_the_bubble_is_p_minus_1_of_v_m_plus_p_minus_1(cost):
    for schedule in ALL:
        p, m = schedule.n_ranks, schedule.n_microbatches
        v = schedule.n_stages // p
        assert play(schedule, cost).bubble == pytest.approx((p - 1) / (v * m + p - 1), abs=1e-12)


def test_a_split_backward_has_the_bubble_p_minus_1_of_3_v_m_plus_p_minus_1():
    for schedule in SPLIT:
        p, m = schedule.n_ranks, schedule.n_microbatches
        v = schedule.n_stages // p
        if m >= v * p:
            played = play(schedule)
            assert played.idle == pytest.approx([(p - 1) / (3 * v * m + p - 1)] * p, abs=1e-12)
        if p > 1:
            whole = gpipe(p, m) if v == 1 else interleaved(p, m, v) if m % p == 0 else None
            assert whole is None or play(schedule).bubble < play(whole).bubble


def test_a_backward_costs_its_two_parts():
    same = [None, {"F": 1, "B": 2}, {"F": 1, "I": 1, "W": 1}, {"F": 1, "B": 2, "I": 1, "W": 1}]
    for schedule in (one_f_one_b(4, 8), zero_bubble(4, 8), dual_pipe_v(2, 4)):
        assert len({play(schedule, cost).makespan for cost in same}) == 1
    longer = play(zero_bubble(4, 8), {"F": 1, "I": 2, "W": 1})
    assert longer.makespan - 8 * 4 == (4 - 1) * 2  # weight gradients do not fill all gaps
    with refuses("play needs the costs of F and of B, or of F, I and W, got those of ['F', 'I']"):
        play(one_f_one_b(2, 2), {"F": 1, "I": 1})


def held_at_most(ops):
    """Return the most micro-batches whose forward is done and whose backward is not, weights included."""
    held = itertools.accumulate({"F": 1, "I": 0}.get(op.kind, -1) for op in ops)
    return max(held)


def test_split_backwards_hold_as_much_on_every_rank_as_1f1b_on_the_first():
    for rank in range(4):
        assert held_at_most(zero_bubble(4, 16).ops[rank]) == 4
        assert held_at_most(zero_bubble_v(4, 16).ops[rank]) == 2 * 4  # of half the size
        assert held_at_most(dual_pipe_v(4, 16).ops[rank]) == 2 * 4 + 1


def test_a_v_has_the_first_and_the_last_stage_on_the_first_rank():
    for schedule in (zero_bubble_v(4, 8), dual_pipe_v(4, 8)):
        assert schedule.rank_of == (0, 1, 2, 3, 3, 2, 1, 0)
        assert [schedule.stages_of(rank) for rank in range(4)] == [[0, 7], [1, 6], [2, 5], [3, 4]]
    kinds = {op.kind for op in itertools.chain(*zero_bubble_v(4, 8).ops)}
    assert kinds == {"F", "I", "W"}
    kinds = {op.kind for op in itertools.chain(*dual_pipe_v(4, 8).ops)}
    assert kinds == {"F", "B", "I", "W"}


def test_a_timeline_shows_the_parts_of_a_backward():
    assert timeline(zero_bubble_v(2, 2)).splitlines() == [
        "rank 0  F0.0 F0.1 .    F3.0 I3.0 W3.0 F3.1 I3.1 W3.1 I0.0 W0.0 .    I0.1 W0.1",
        "rank 1  .    F1.0 F2.0 F1.1 F2.1 I2.0 W2.0 I1.0 W1.0 I2.1 W2.1 I1.1 W1.1 .",
    ]
    assert timeline(zero_bubble(2, 2), {"F": 2, "I": 3, "W": 1}).splitlines() == [
        "rank 0  F0.0 -    F0.1 -    .    .    .    I0.0 -    -    W0.0 .    I0.1 -    -    W0.1",
        "rank 1  .    .    F1.0 -    I1.0 -    -    F1.1 -    I1.1 -    -    W1.0 W1.1 .    .",
    ]
    cells = timeline(dual_pipe_v(1, 2), {"F": 2, "B": 3}).split()[2:]  # half a unit of 1.5 is rounded up
    assert cells == "F0.0 F1.0 - F0.1 B1.0 - F1.1 B0.0 - B1.1 - I0.1 W0.1".split()


def replay(lists):
    """Carry out lists in which every send and receive blocks until its partner is there."""
    at, done = [0] * len(lists), set()
    while True:
        heads = [ops[i] if i < len(ops) else None for ops, i in zip(lists, at, strict=True)]
        before = sum(at)
        for rank, op in enumerate(heads):
            if op is None:
                continue
            if op.kind in ("F", "B", "I", "W"):
                done.add(op)
                if op.kind == "I":
                    done.add(op._replace(kind="B"))  # what is sent is the same
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
    for schedule in ALL + SPLIT:
        lists = lower(schedule)
        assert replay(lists) == []
        n = schedule.n_microbatches * sum(a != b for a, b in itertools.pairwise(schedule.rank_of))
        sends = [op for op in itertools.chain(*lists) if op.kind.startswith("send")]
        assert len(sends) == 2 * n


def test_a_schedule_whose_order_is_impossible_is_refused():
    good = gpipe(2, 2)
    late = (tuple(reversed(good.ops[0])), good.ops[1])
    with refuses("needs an order that can be carried out, got ranks that wait: rank 0 at B0.1 for B1.1"):
        Schedule(late, good.rank_of, 2)
    dropped = (good.ops[0][1:], good.ops[1])
    with refuses("(B, or I and W) of rank 0's stages once, missing: F0.0, not its own: none, twice: none"):
        Schedule(dropped, good.rank_of, 2)
    with refuses("rank 0's stages once, missing: none, not its own: none, twice: F0.1"):
        Schedule(((*good.ops[0], Op("F", 0, 1)), good.ops[1]), good.rank_of, 2)
    both = (*good.ops[0], Op("I", 0, 1), Op("W", 0, 1))
    with refuses("(B, or I and W) of rank 0's stages once, missing: none, not its own: B0.1, twice: none"):
        Schedule((both, good.ops[1]), good.rank_of, 2)
    split = tuple((*ops[:-1], Op("W", r, 1), Op("I", r, 1)) for r, ops in enumerate(good.ops))
    with refuses("got ranks that wait: rank 0 at W0.1 for I0.1, rank 1 at W1.1 for I1.1"):
        Schedule(split, good.rank_of, 2)
    with refuses("rank 0's stages once, missing: W0.1, not its own: none"):
        Schedule((split[0][:-2] + split[0][-1:], split[1]), good.rank_of, 2)
    with refuses("needs stages on each of ranks 0 to 1, got ranks"):
        Schedule(good.ops, (0, 5), 2)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gpipe(0, 4), "gpipe needs n_ranks and n_microbatches >= 1, got 0, 4"),
        (lambda: one_f_one_b(2, 0), "one_f_one_b needs n_ranks and n_microbatches >= 1, got 2, 0"),
        (lambda: interleaved(4, 6), "n_microbatches=6, n_ranks=4; the next above is n_microbatches=8"),
        (lambda: interleaved(4, 8, 0), "interleaved needs n_per_rank >= 1"),
        (
            lambda: zero_bubble(4, 9),
            "n_microbatches=9, n_ranks=4; the next above that n_ranks divides is n_m",
        ),
        (lambda: zero_bubble(4, 8, 0), "zero_bubble needs n_per_rank >= 1"),
        (lambda: zero_bubble_v(0, 8), "zero_bubble_v needs n_ranks and n_microbatches >= 1, got 0, 8"),
        (
            lambda: dual_pipe_v(4, 7),
            "dual_pipe_v needs as many micro-batches as stages, got n_microbatches=7 and 8 stages on 4 "
            "ranks; take n_microbatches=8 or more",
        ),
    ],
)
def test_sizes_that_do_not_fit_are_refused(make, message):
    with refuses(message):
        make()


def test_a_torch_without_the_order_is_named(monkeypatch):
    from torch.distributed.pipelining import schedules as of_torch

    monkeypatch.delattr(of_torch, "ScheduleDualPipeV")
    with refuses("torch's ScheduleDualPipeV as in torch 2.11 to 2.13, got torch 2.", RuntimeError):
        dual_pipe_v(2, 4)
    method = "_calculate_single_rank_operations"
    monkeypatch.setattr(of_torch.ScheduleZBVZeroBubble, method, lambda self, rank: self.new_name)
    with refuses("without it ('types.SimpleNamespace' object has no attribute 'new_name')", RuntimeError):
        zero_bubble_v(2, 4)


def test_a_timeline_is_drawn_with_a_bar_for_every_operation():
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="matplotlib is not installed (moekit[dev])")
    pyplot.switch_backend("agg")
    ax = schedules.draw(interleaved(2, 4))
    assert len(ax.patches) == 2 * 4 * 4 and "bubble 11.1%" in ax.get_title()
    ax = schedules.draw(zero_bubble_v(2, 4))
    assert len(ax.patches) == 4 * 4 * 3 and "bubble 4.0%" in ax.get_title()
