"""Dry runs: planted faults are found and named, and what is held agrees with a real step."""

import gc
import math
import os
import re
from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from hypothesis import given, settings, strategies as st
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.profiler import ProfilerActivity, profile

import moekit as mk
from moekit import plan, schedules
from moekit.dryrun import (
    Call,
    Leaf,
    Record,
    Report,
    compare,
    dry_run,
    dry_run_recipe,
    record,
    replay,
    sample_ranks,
    static_transport,
)
from moekit.layouts import Layout
from moekit.losses import cross_entropy
from moekit.plan import GPUS, flops_per_token
from moekit.tree import held

SMALL = mk.ModelConfig(
    vocab_size=2048,
    d_model=128,
    n_layers=2,
    n_dense_layers=1,
    d_dense=256,
    n_heads=4,
    n_kv_heads=2,
    d_head=32,
    n_experts=8,
    top_k=2,
    d_expert=128,
    d_shared=128,
    max_seq_len=256,
)


def train_step(
    rank,
    *,
    config=SMALL,
    edp=1,
    ep=1,
    b,
    s,
    n_microbatches=1,
    recompute="none",
    reduce="step",
    rows=None,
    via=None,
    capacity_factor=None,
    payload=None,
    overlap="none",
):
    """Make a whole training step in bfloat16, as a recipe does."""
    mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu") if edp * ep > 1 else None
    params = mk.init_params(config, dtype=torch.bfloat16, mesh=mesh)
    optimizer = mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(3e-4))
    optimizer = mk.shard_optimizer(optimizer, reduce=reduce, mesh=mesh)
    state = optimizer.init(params)
    block = mk.remat(partial(mk.model.transformer_block, overlap=overlap), recompute)
    if rows:
        via = static_transport(rows(rank))
    elif via == "rowwise":
        ep = None if mesh is None else mesh["ep"]
        n_tokens = b // n_microbatches * s // (1 if overlap == "none" else 2)
        sizes = dict(n_tokens=n_tokens, capacity_factor=capacity_factor)
        via = mk.rowwise.of(config, ep, **sizes, payload=payload)
    loss = partial(mk.next_token_loss, config=config, block=block, via=via, mesh=mesh)
    grad_fn = mk.value_and_grad(loss, has_aux=True)
    grad_fn = mk.accumulate(grad_fn, n_microbatches, on_grad=optimizer.on_grad)

    def step():
        tokens = torch.zeros(b, s + 1, dtype=torch.int64)
        batch = mk.batch.make_batch(tokens, torch.zeros_like(tokens), torch.arange(b))
        (_, stats), grads = grad_fn(params, mk.count_tokens(batch, mesh=mesh))
        optimizer.update(grads, state, params)
        mk.mesh.sum_over_ranks(stats, mesh=mesh)
        return {"parameters": params, "optimizer state": state, "gradients": grads}

    return step


def pipeline_step(
    rank,
    *,
    config=SMALL,
    pp,
    v=1,
    edp=1,
    ep=1,
    b=1,
    s,
    n_microbatches,
    recompute="none",
    cut=None,
    order=None,
):
    """Make a step of a pipeline in bfloat16, as a recipe does; ``cut(place, stages)`` makes it wrong."""
    mesh = mk.make_mesh(pp=pp, edp=edp, ep=ep)
    place = mesh["pp"].get_local_rank()
    v = len(order(pp, 2 * pp).rank_of) // pp if order else v
    stages = plan.split_layers(config, pp * v, seq_len=s)
    stages = cut(place, stages) if cut else stages
    n = n_microbatches(place) if callable(n_microbatches) else n_microbatches
    schedule = order(pp, n) if order else schedules.interleaved(pp, n, v)
    mine = [stages[i] for i in schedule.stages_of(place)]
    params = mk.init_params(config, dtype=torch.bfloat16, stages=mine, mesh=mesh)
    optimizer = mk.chain(mk.clip_by_global_norm(1.0, mesh=mesh), mk.adamw(3e-4))
    optimizer = mk.shard_optimizer(optimizer, mesh=mesh)
    state = optimizer.init(params)
    block = mk.remat(mk.model.transformer_block, recompute)
    options = dict(config=config, block=block, mesh=mesh["edp", "ep"])
    grad_fn = mk.pipeline(
        [partial(mk.model.stage_loss, stage=stage, **options) for stage in stages],
        schedule=schedule,
        boundary=lambda part: torch.empty(*part.tokens.shape, config.d_model, dtype=torch.bfloat16),
        mesh=mesh["pp"],
    )

    def step():
        tokens = torch.zeros(b * n, s + 1, dtype=torch.int64)
        batch = mk.batch.make_batch(tokens, torch.zeros_like(tokens), torch.arange(len(tokens)))
        (_, stats), grads = grad_fn(params, mk.count_tokens(batch, mesh=mesh["edp", "ep"]))
        optimizer.update(grads, state, params)
        mk.mesh.sum_over_ranks(stats, mesh=mesh)
        return {"parameters": params, "optimizer state": state}

    return step


@pytest.fixture(scope="module")
def clean():
    """A step of a model on (edp 2, ep 4), whose ranks fit together."""
    return dry_run(partial(train_step, edp=2, ep=4, b=4, s=16, n_microbatches=2), 8)


# --- A clean step ---------------------------------------------------------------------


def test_a_clean_step_raises_no_alarm_and_its_calls_are_those_of_the_code(clean):
    assert [r.rank for r in clean.records] == list(range(8))
    assert compare(clean.records) == replay(clean.records) == []
    of_step = [c for c in clean.records[5].calls if c.step == 2]
    ops = {op: [c for c in of_step if c.op == op] for op in {c.op for c in of_step}}
    # 1 layer with experts, 2 micro-batches: counts, there, back, and two in backward.
    assert {c.group for c in ops["all_to_all"]} == {(4, 5, 6, 7)} and len(ops["all_to_all"]) == 2 * 5
    assert ops["all_to_all"][1].shapes == ((2 * 16 * 2, 128),)  # rows of a micro-batch
    assert ops["all_to_all"][1].sends == ops["all_to_all"][1].receives == (16,) * 4
    assert [c.group for c in ops["reduce_scatter"]] == [(1, 5), tuple(range(8))]
    assert all(c.reduce == "sum" and c.dtype == "float32" for c in ops["reduce_scatter"])
    assert {c.dtype for c in ops["all_gather"]} == {"bfloat16", "float32"}  # routers are float32
    of_ep = [c for c in ops["all_reduce"] if c.group == (4, 5, 6, 7)]
    assert [c.shapes for c in of_ep] == [((1, SMALL.n_experts),)] * 2  # counts, to say who waits
    assert {c.group for c in ops["all_reduce"]} == {tuple(range(8)), (4, 5, 6, 7)}


def test_memory_of_parameters_gradients_and_optimizer_state_is_what_the_leaves_hold(clean):
    shapes = mk.params.param_shapes(SMALL)
    experts = sum(math.prod(s) for name, s in shapes.items() if ".experts." in name) // 4
    router = math.prod(shapes["layers.1.moe.router"])
    rest = sum(math.prod(s) for name, s in shapes.items() if ".experts." not in name) - router
    slack = 512 * 3 * len(shapes)
    for r in clean.records:
        assert 0 <= r.memory["parameters"] - (2 * experts + 2 * rest + 4 * router) < slack
        assert 0 <= r.memory["optimizer state"] - 12 * (experts / 2 + (rest + router) / 8) < slack
        assert r.memory["gradients"] <= 4 * (experts + rest + router) + slack


def test_the_report_says_who_holds_and_sends_how_much(clean):
    text = str(clean)
    assert text.startswith("8 of 8 ranks\n\nMB at") and f"{clean.records[0].peak / 1e6:.2f}" in text
    assert all(kind in text for kind in ("parameters", "optimizer state", "gradients", "activations"))
    assert "0-7" in text  # all alike: one line
    assert all(f"{gpu} ({size / 1e9:.0f} GB): fits" in text for gpu, (size, _) in GPUS.items())
    assert "all_to_all         10" in text
    huge = replace(clean, records=(replace(clean.records[0], memory={"parameters": int(150e9)}),))
    assert "h200 (141 GB): does not fit, 9.0 GB too many" in str(huge)
    assert str(huge).endswith("--gpu h200 names layouts that fit") and "--gpu" not in text
    assert huge.fits("b200") and not huge.fits("h200")
    with pytest.raises(ValueError, match=r"\['b200', 'b300', 'h100', 'h200'\], got 'a100'"):
        huge.fits("a100")


@settings(max_examples=50)
@given(st.data())
def test_any_missing_collective_is_found(clean, data):
    rank = data.draw(st.integers(0, 7))
    calls = clean.records[rank].calls
    at = data.draw(st.integers(0, len(calls) - 1))
    records = list(clean.records)
    records[rank] = replace(records[rank], calls=calls[:at] + calls[at + 1 :])
    (line, *_) = compare(records)
    assert f"rank {rank} does" in line


def test_any_two_collectives_of_a_group_in_swapped_order_are_found(clean):
    calls = clean.records[3].calls
    pairs = [
        (i, j)
        for i, x in enumerate(calls)
        for j, y in enumerate(calls[:i])
        if x.group == y.group and x._content() != y._content()
    ]
    assert len(pairs) > 100
    for i, j in pairs:
        swapped = list(calls)
        swapped[i], swapped[j] = calls[j], calls[i]
        records = [*clean.records[:3], replace(clean.records[3], calls=tuple(swapped)), *clean.records[4:]]
        assert any("rank 3 does" in line for line in compare(records)), (calls[i], calls[j])


def test_gradients_that_are_reduced_early_are_smaller_on_a_rank(clean):
    early = dry_run(
        partial(train_step, edp=2, ep=4, b=4, s=16, n_microbatches=2, reduce="micro_batch"), 8, ranks=[0, 7]
    )
    shards = early.records[0].memory.get("gradients", 0)
    assert shards < clean.records[0].memory["gradients"] / 1.8
    n = [sum(c.op == "reduce_scatter" and c.step == 2 for c in r.calls) for r in early.records]
    assert n == [2 * (len(mk.params.param_shapes(SMALL)))] * 2


# --- Planted faults, in steps that run ------------------------------------------------


def on_four(fault):
    """Return the ranks' steps on a mesh (edp 2, ep 2), where ``fault(rank, x, groups)`` runs."""

    def step_of_rank(rank):
        mesh = mk.make_mesh(edp=2, ep=2, device="cpu")
        groups = {axis: mesh.get_group(axis) for axis in ("edp", "ep")}
        return lambda: fault(rank, torch.ones(4, 6), groups)

    return step_of_rank


def test_another_reduction_is_named():
    def fault(rank, x, groups):
        fc.all_reduce(x, "sum", groups["ep"])
        dist.all_reduce(x, group=groups["ep"], op=dist.ReduceOp.MAX if rank == 3 else dist.ReduceOp.SUM)

    with pytest.raises(RuntimeError) as error:
        dry_run(on_four(fault), 4)
    assert str(error.value).splitlines()[1:] == [
        "group 2, 3, collective 1: rank 2 does all_reduce(float32, [4, 6], sum); "
        "rank 3 does all_reduce(float32, [4, 6], max)"
    ]


def test_collectives_of_one_group_in_swapped_order_are_named():
    def fault(rank, x, groups):
        calls = [partial(dist.all_reduce, x[0]), partial(dist.broadcast, x, src=3)]
        for call in reversed(calls) if rank == 2 else calls:
            call()

    wanted = (
        r"group 0-3, collective 0: ranks 0, 1, 3 do all_reduce\(float32, \[6\], sum\); "
        r"rank 2 does broadcast\(float32, \[4, 6\], root rank 3\)"
    )
    with pytest.raises(RuntimeError, match=wanted):
        dry_run(on_four(fault), 4)


def test_a_missing_collective_is_named():
    def fault(rank, x, groups):
        x = fc.all_gather_tensor(x, 0, groups["edp"])
        if rank != 1:
            fc.reduce_scatter_tensor(x, "sum", 0, groups["edp"])

    with pytest.raises(
        RuntimeError, match=r"group 1, 3, collective 1: rank 1 does all_gather.*; rank 3 does"
    ):
        dry_run(on_four(fault), 4)


def uneven(rank, *, wrong):
    """Row counts of two ranks with 64 rows each."""
    return [[40, 24], [30, 34]] if not (wrong and rank == 1) else [[41, 23], [30, 34]]


@pytest.mark.parametrize("wrong", [False, True])
def test_a_wrong_all_to_all_split_is_named(wrong):
    run = partial(train_step, ep=2, b=2, s=16, rows=partial(uneven, wrong=wrong))
    if not wrong:
        calls = [c for c in dry_run(run, 2).records[1].calls if c.op == "all_to_all"]
        assert calls[1].sends == (30, 34) and calls[1].receives == (24, 34)
        return
    with pytest.raises(RuntimeError, match=r"rank 0 sends 24 rows to rank 1, which expects 23"):
        dry_run(run, 2)


@pytest.mark.parametrize("crossed, hangs", [((), False), ((0,), False), ((0, 3), True)])
def test_groups_in_crossed_order_are_a_deadlock_where_the_waiting_is_a_ring(crossed, hangs):
    def fault(rank, x, groups):
        for axis in ("edp", "ep") if rank in crossed else ("ep", "edp"):
            dist.all_reduce(x, group=groups[axis])

    if not hangs:
        dry_run(on_four(fault), 4)
        return
    with pytest.raises(RuntimeError) as error:
        dry_run(on_four(fault), 4)
    call = "all_reduce(float32, [4, 6], sum)"
    assert f"rank 0 waits for ever in its call 0, {call} of group 0, 2, for rank 2" in str(error.value)
    assert f"rank 2 waits for ever in its call 0, {call} of group 2, 3, for rank 3" in str(error.value)


def test_a_send_and_a_receive_of_different_shapes_are_named():
    def fault(rank, x, groups):
        if rank < 2:
            dist.isend(x, 2 + rank, group=groups["edp"]).wait()
        else:
            like = x if rank == 2 else torch.ones(4, 5)
            dist.irecv(like, rank - 2, group=groups["edp"]).wait()

    with pytest.raises(RuntimeError) as error:
        dry_run(on_four(fault), 4)
    assert str(error.value).splitlines()[1:] == [
        "rank 1 to rank 3, message 0: rank 1 does send(float32, [4, 6], to rank 3), rank 3 does "
        "recv(float32, [4, 5], from rank 1) (2 sends, 2 receives in all)"
    ]


@pytest.mark.parametrize("order", ["receive first", "send first", "receive first, wait last", "batch"])
def test_a_receive_that_is_waited_for_before_the_send_of_both_is_a_deadlock(order):
    def step_of_rank(rank):
        x, y, other = torch.ones(3), torch.ones(3), 1 - rank

        def step():
            if order == "receive first":
                dist.recv(y, other)
                dist.send(x, other)
            elif order == "send first":
                dist.send(x, other)
                dist.recv(y, other)
            elif order == "batch":
                both = [dist.P2POp(dist.irecv, y, other), dist.P2POp(dist.isend, x, other)]
                for work in dist.batch_isend_irecv(both):
                    work.wait()
            else:
                work = dist.irecv(y, other)
                dist.isend(x, other)
                work.wait()

        return step

    if order != "receive first":
        ops = [c.op for c in dry_run(step_of_rank, 2).records[0].calls if c.step == 2]
        assert sorted(ops) == ["recv", "send", "wait"] and ops.index("wait") > ops.index("send")
        return
    with pytest.raises(RuntimeError, match=r"rank 0 waits .* wait\(message 0 from rank 1\) .*for rank 1"):
        dry_run(step_of_rank, 2)


def test_every_collective_of_torch_is_known():
    def step_of_rank(rank):
        x, parts = torch.ones(8, 2), [torch.ones(2, 2) for _ in range(4)]

        def step():
            dist.all_gather(parts, x[:2])
            dist.all_gather_into_tensor(torch.ones(32, 2), x)
            dist.reduce_scatter(x[:2], parts, op=dist.ReduceOp.MAX)
            dist.reduce_scatter_tensor(x[:2], x, op=dist.ReduceOp.AVG)
            dist.all_to_all(parts, [torch.ones(1 + i, 2) for i in range(4)])
            dist.all_to_all_single(x, torch.ones(8, 2))
            dist.all_to_all_single(x, torch.ones(7, 2), [2, 2, 2, 2], [1, 2, 2, 2])
            dist.reduce(x, 1)
            dist.gather(x[:2], parts if rank == 1 else None, dst=1)
            dist.scatter(x[:2], parts if rank == 1 else None, src=1)
            dist.barrier()

        return step

    calls = [c for c in record(step_of_rank, rank=1, world_size=4).calls if c.step == 2]
    assert [(c.op, c.reduce, c.peer) for c in calls] == [
        ("all_gather", None, None),
        ("all_gather", None, None),
        ("reduce_scatter", "max", None),
        ("reduce_scatter", "avg", None),
        ("all_to_all", None, None),
        ("all_to_all", None, None),
        ("all_to_all", None, None),
        ("reduce", "sum", 1),
        ("gather", None, 1),
        ("scatter", None, 1),
        ("barrier", None, None),
    ]
    assert calls[4].sends == (2, 4, 6, 8) and calls[4].receives == (4, 4, 4, 4)  # elements
    assert calls[5].sends == (2, 2, 2, 2) and calls[6].sends == (1, 2, 2, 2)
    assert dict(calls[9].bytes_to(1)) == {0: 16, 2: 16, 3: 16}


def test_collectives_of_a_dtensor_are_seen_and_its_bytes_are_those_of_the_rank():
    def step_of_rank(rank):
        mesh = mk.make_mesh(edp=1, ep=64, device="cpu")["ep"]
        sharded = DTensor.from_local(torch.ones(512), mesh, [Shard(0)])

        def step():
            partial_sum = DTensor.from_local(torch.ones(512), mesh, [Partial()])
            partial_sum.redistribute(placements=[Replicate()]).to_local().add(1)
            partial_sum.exp()  # which sums first
            sharded.add(1)
            return {"parameters": sharded}

        return step

    r = record(step_of_rank, rank=2, world_size=64)
    assert [str(c) for c in r.calls if c.step == 2] == ["all_reduce(float32, [512], sum)"] * 2
    assert r.memory["parameters"] == 4 * 512
    assert r.peak < 6 * 4 * 512  # a storage of the global size has 64 times what a rank holds


DEEP = replace(SMALL, n_layers=6)
PIPELINE = dict(config=DEEP, pp=2, edp=1, ep=2, s=16, n_microbatches=4)


@pytest.mark.parametrize("v", [1, 2])
def test_a_clean_pipeline_raises_no_alarm(v):
    records = dry_run(partial(pipeline_step, **PIPELINE, v=v), 4).records
    sends = [sum(c.op == "send" and c.step == 2 for c in r.calls) for r in records]
    assert sends == [4 * (2 * v - 1)] * 4  # of 4 micro-batches to the next stage, and as many gradients back
    assert all(r.leaves["parameters"]["embedding"].ranks == (0, 1) for r in records[:2])
    assert {str(r.leaves["parameters"]["layers.5.moe.experts.down"].ranks) for r in records[2:]} == {"(2, 3)"}


@pytest.mark.parametrize("order", [schedules.zero_bubble, schedules.zero_bubble_v, schedules.dual_pipe_v])
def test_a_pipeline_that_splits_the_backward_computes_and_communicates_as_much(order):
    n_stages = len(order(2, 4).rank_of)
    records = dry_run(partial(pipeline_step, **PIPELINE, order=order), 4, ranks=[0, 2]).records
    whole = dry_run(partial(pipeline_step, **PIPELINE, v=n_stages // 2), 4, ranks=[0, 2]).records
    for op in ("all_to_all", "all_reduce", "reduce_scatter"):  # over the stages of both ranks
        calls, same = (sum(c.op == op for r in part for c in r.calls) for part in (records, whole))
        assert calls == same
    assert sum(r.flops for r in records) == sum(r.flops for r in whole)


def shifted(places):
    """Return a cut whose last stage begins a layer earlier, as the ranks of some places take it."""

    def cut(place, stages):
        if place not in places:
            return stages
        *_, last = stages
        return [*stages[:-1], replace(last, layers=range(last.layers.start - 1, last.layers.stop))]

    return cut


def test_a_layer_that_two_stages_hold_is_named():
    with pytest.raises(RuntimeError) as error:
        dry_run(partial(pipeline_step, **PIPELINE, cut=shifted([0, 1])), 4)
    (twice,) = re.findall(r"(layers\.\d)\.attention\.qkv is not one parameter", str(error.value))
    assert re.search(
        rf"{twice}\.attention\.out .*ranks 0, 1: .* on ranks 0, 1; ranks 2, 3:", str(error.value)
    )


def test_a_wrong_number_of_micro_batches_of_a_stage_is_named():
    wrong = dict(PIPELINE, n_microbatches=lambda place: 4 if place == 0 else 6)
    more = r"rank 0 to rank 2, message 8: rank 0 does no more, rank 2 does recv"  # after two steps of 4
    with pytest.raises(RuntimeError, match=more):
        dry_run(partial(pipeline_step, **wrong), 4)


def test_an_expert_count_that_does_not_divide_is_named():
    with pytest.raises(RuntimeError, match=r"needs the ep axis to divide its 6 experts, got ep=4"):
        dry_run(partial(train_step, config=replace(SMALL, n_experts=6), ep=4, b=1, s=16), 4, ranks=[0])


def test_ranks_over_the_memory_of_a_gpu_are_named():
    def step_of_rank(rank):
        params = torch.zeros(int(150e9) if rank == 1 else 10, dtype=torch.uint8)
        return lambda: {"parameters": params}

    assert dry_run(step_of_rank, 3, gpu="b200")
    with pytest.raises(RuntimeError, match=r"rank 1: 150\.0 GB, more than the 141 GB of h200") as error:
        dry_run(step_of_rank, 3, gpu="h200")
    assert len(str(error.value).splitlines()) == 2
    with pytest.raises(
        ValueError, match=r"dry_run needs one of \['b200', 'b300', 'h100', 'h200'\], got 'a100'"
    ):
        dry_run(step_of_rank, 3, gpu="a100")


def test_parameters_that_are_not_those_of_the_model_are_named():
    layout = Layout(ep=2, batch_size=2, seq_len=16).on(2)

    def build(config=SMALL):
        step = train_step(0, config=config, ep=2, b=1, s=16)
        held = {}

        def once(held, batch, number):
            made = step()
            held |= {"params": made["parameters"], "state": made["optimizer state"]}

        return None, None, held, once

    assert "2 of 2 ranks: pp 1 x edp 1 x ep 2" in str(dry_run_recipe(build, SMALL, layout))
    other = replace(SMALL, n_layers=3)
    with pytest.raises(RuntimeError, match=r"layers\.2\.attention\.out: on no rank, needs \(128, 128\)"):
        dry_run_recipe(build, other, layout)


# --- Memory and time ------------------------------------------------------------------


@pytest.mark.parametrize(
    "options, inside",  # what operations use inside themselves, as a part of the whole
    [
        (dict(b=4, s=256), 0.1),
        (dict(b=4, s=256, n_microbatches=2, recompute="block"), 0.1),
        (dict(b=2, s=16, n_microbatches=2), 0.02),
    ],
)
def test_the_high_water_mark_is_what_a_real_step_takes_from_the_allocator(options, inside):
    fake = record(partial(train_step, **options), rank=0, world_size=1, device="cpu")
    step = train_step(0, **options)
    kinds = step()
    leaves = [x for k in ("parameters", "optimizer state") for x in kinds.pop(k).values(True, True)]
    base = sum(held(x).untyped_storage().nbytes() for x in leaves)
    del kinds, leaves
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        step()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    assert most > base / 3  # a step takes much beside what it begins with
    assert 1 - inside < fake.peak / (base + most) < 1.01, (fake.memory, fake.at, base, most)


def test_the_bench_on_eight_ranks_takes_seconds_and_the_memory_that_a_hand_counts():
    config = mk.preset("bench-8L", n_experts=128)
    run = partial(train_step, config=config, ep=8, b=1, s=8192)
    (r,) = dry_run(run, 8, ranks=[3]).records
    # 7 layers of 128 experts of three 4096 x 4096 matrices; all else is 46.863 - 45.097 = 1.765 G.
    experts, rest = 7 * 128 * 3 * 4096**2 / 8, 46_862_510_080 - 7 * 128 * 3 * 4096**2
    assert abs(r.memory["parameters"] - 2 * (experts + rest)) < 30e6  # 14.80 GB; routers are float32
    assert abs(r.memory["optimizer state"] - 12 * (experts + rest / 8)) < 30e6
    assert r.memory["gradients"] < 4.01 * (experts + rest)
    assert 110e9 < r.peak < 125e9
    assert r.seconds < 60
    assert 1 < r.flops / (8192 * flops_per_token(config, 8192)) < 1.25  # attention counts all pairs


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_a_chunk_of_logits_exists_once(device):
    t, d, v, chunk = 4096, 256, 100_352, 1024 * 100_352

    def step_of_rank(rank):
        hidden, head = (torch.ones(n, dtype=torch.bfloat16, requires_grad=True) for n in ((t, d), (d, v)))
        targets, weights = torch.zeros(t, dtype=torch.int64), torch.ones(t)

        def step():
            cross_entropy(hidden, head, targets, weights, chunk_elements=chunk)

        return step

    r = record(step_of_rank, rank=0, world_size=1, device=device)
    held = (4 + 2) * d * v + 2 * 2 * t * d  # the head's gradient and parameter; hidden and its gradient
    a_logit = 2 if device == "cuda" else 2 + 4  # torch makes float32 of them
    assert a_logit * chunk + held <= r.peak < 1.05 * a_logit * chunk + held + 2 * d * v * (device == "cpu")


@pytest.mark.parametrize("product", [torch.mm, torch.nn.functional.linear])
def test_operands_of_other_dtypes_are_refused_as_they_are_with_values(product):
    run = lambda rank: lambda: product(torch.ones(4, 4).bfloat16(), torch.ones(4, 4)) and None  # noqa: E731
    with pytest.raises(RuntimeError, match="needs tensors of one dtype, got"):
        record(run, rank=0, world_size=1)


def test_a_mesh_can_be_made_inside():
    def step_of_rank(rank):
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 4), mesh_dim_names=("a", "b"))
        x = torch.ones(3)
        return lambda: dist.all_reduce(x, group=mesh["b"].get_group()) and None

    assert record(step_of_rank, rank=5, world_size=8).calls[-1].group == (4, 5, 6, 7)


def test_what_is_freed_and_what_is_kept_is_told_apart():
    n = 512 * 100

    def step_of_rank(rank):
        kept, w = torch.ones(n, dtype=torch.uint8), torch.ones(n // 4, requires_grad=True)

        def step():
            temporary = torch.ones(2 * n, dtype=torch.uint8)
            del temporary
            activation = w.exp().exp()  # each saves its result
            activation.sum().backward()
            kept.add_(1)
            w.grad = None
            return {"parameters": w}

        return step

    r = record(step_of_rank, rank=0, world_size=1)
    assert r.memory["parameters"] == r.memory["other"] == n
    assert r.memory["activations"] >= 2 * n and 0 < r.memory["backward"] <= 2 * n + 512
    assert "temporaries" not in r.memory


def test_what_was_sent_is_free_once_its_sender_has_asked():
    def step_of_rank(rank):
        def step():
            sends = []
            for _ in range(8):
                x = torch.ones(1000, dtype=torch.float64)
                sends = [(work, y) for work, y in sends if not work.is_completed()]
                sends.append((dist.isend(x, 1 - rank), x))

        return step

    assert record(step_of_rank, rank=0, world_size=2).peak == 2 * 8192


def test_a_context_can_be_made_in_a_dry_run():
    def step_of_rank(rank):
        mesh = mk.make_mesh(edp=2, ep=2, device="cpu")
        x = torch.ones(4) * mk.mesh.context_mesh(mesh, 2).size()
        return lambda: {"parameters": x}

    assert [r.memory for r in dry_run(step_of_rank, 4).records] == [{"parameters": 512}] * 4


def test_a_step_that_makes_nothing_holds_what_was_there():
    def step_of_rank(rank):
        params = torch.ones(1000, dtype=torch.float64)
        return lambda: {"parameters": params}

    r = record(step_of_rank, rank=0, world_size=1)
    assert r.memory == {"parameters": 8192} and r.at == ""
    assert record(lambda rank: lambda: None, rank=0, world_size=1).memory == {}


# --- Errors ---------------------------------------------------------------------------


def test_a_rank_that_raises_is_named_with_its_traceback():
    def step_of_rank(rank):
        if rank == 1:
            raise KeyError("the needle")
        return lambda: None

    with pytest.raises(RuntimeError, match=r"(?s)rank 1 of 2 failed in a dry run.*raise KeyError.*needle"):
        dry_run(step_of_rank, 2)


def test_a_rank_that_dies_is_named():
    with pytest.raises(RuntimeError, match=r"(?s)rank 0 of 1 .*ended with exit code 7 and no answer"):
        dry_run(lambda rank: os._exit(7), 1)


@pytest.mark.parametrize("read", [Tensor.item, Tensor.tolist, Tensor.numpy, bool])
def test_reading_values_is_an_error_that_says_so(read):
    with pytest.raises(RuntimeError, match="a dry run has no values to read"):
        record(lambda rank: lambda: read(torch.ones(1)), rank=0, world_size=1)


def test_a_step_that_returns_something_else_is_an_error():
    with pytest.raises(RuntimeError, match="return trees by kind, got list"):
        record(lambda rank: lambda: [torch.ones(1)], rank=0, world_size=1)
    with pytest.raises(RuntimeError, match="tensors of kind 'gradients', got int"):
        record(lambda rank: lambda: {"gradients": 1}, rank=0, world_size=1)


@pytest.mark.parametrize("ranks", [[], [-1], [2]])
def test_ranks_must_be_of_the_world(ranks):
    with pytest.raises(ValueError, match=r"ranks in \[0, 2\), at least one, got"):
        dry_run(lambda rank: lambda: None, 2, ranks=ranks)
    with pytest.raises(ValueError, match=r"n_processes >= 1, got 0"):
        dry_run(lambda rank: lambda: None, 2, n_processes=0)


def test_rows_that_are_put_and_got_are_seen_with_their_bytes_and_buffers():
    step = partial(train_step, ep=4, b=1, s=64, via="rowwise", capacity_factor=1.25)
    records = [record(step, rank=rank, world_size=4) for rank in range(4)]
    assert not compare(records)
    calls = Counter(call.op for call in records[0].calls if call.step == 2)
    layers = SMALL.n_moe_layers
    # Forward: counts, rows and weights; backward: gradients, rows again.
    assert (calls["put"], calls["get"]) == (5 * layers, 3 * layers)
    assert calls["barrier"] == 7 * layers and not calls["all_to_all"]
    rows = 64 * SMALL.top_k
    put = [call for call in records[0].calls if call.op == "put" and call.shapes == ((rows, SMALL.d_model),)]
    assert {call.n_bytes for call in put} == {2 * rows * SMALL.d_model}
    assert {sum(n for _, n in call.bytes_to(0)) for call in put} == {0.75 * 2 * rows * SMALL.d_model}
    capacity = math.ceil(1.25 * rows)
    assert records[0].memory["symmetric buffers"] >= 2 * 2 * capacity * SMALL.d_model
    said = str(Report(records=tuple(records)))
    assert f"room for {capacity:,} rows a rank, 1.25 times the {rows:,} that it sends. There is" in said


def test_a_payload_of_float8_puts_half_the_bytes_of_tokens_and_a_scale_each():
    step = partial(train_step, ep=4, b=1, s=64, via="rowwise", capacity_factor=1.25)
    plain, packed = (
        record(partial(step, payload=payload), rank=1, world_size=4)
        for payload in (None, torch.float8_e4m3fn)
    )
    layers, routes = SMALL.n_moe_layers, 64 * SMALL.top_k

    def put(run):
        return sum(call.n_bytes for call in run.calls if call.step == 2 and call.op == "put")

    # Of a layer: its tokens, in the forward and again in the backward.
    assert put(plain) - put(packed) == layers * 2 * routes * (SMALL.d_model - 4)
    more = packed.memory["symmetric buffers"] - plain.memory["symmetric buffers"]
    capacity = math.ceil(1.25 * routes)
    assert capacity * (SMALL.d_model + 4) <= more < capacity * (SMALL.d_model + 4) + 1024


def test_static_rows_must_be_those_of_the_tokens():
    run = partial(train_step, ep=2, b=2, s=16, rows=lambda rank: [[40, 25], [30, 34]])
    with pytest.raises(
        RuntimeError, match=r"static_transport needs rows \(2, 2\) with 64 of rank 0, got.*65"
    ):
        record(run, rank=0, world_size=2)


# --- Lists of calls -------------------------------------------------------------------


def test_bytes_between_nodes_are_told_from_those_within():
    group = tuple(range(16))
    call = Call(op="all_gather", group=group, n_bytes=10, step=2)
    assert Record(rank=3, world_size=16, calls=(call,)).traffic() == {
        ("all_gather", False): 70,
        ("all_gather", True): 80,
    }
    call = Call(op="all_to_all", group=group, n_bytes=160, step=2, sends=(10, *[0] * 8, 6, *[0] * 6))
    assert Record(rank=3, world_size=16, calls=(call,)).traffic() == {
        ("all_to_all", False): 100,
        ("all_to_all", True): 60,
    }
    reduced = Record(rank=3, world_size=16, calls=(Call(op="all_reduce", group=group, n_bytes=160, step=2),))
    assert reduced.traffic() == {("all_reduce", False): 7 * 20, ("all_reduce", True): 8 * 20}


def test_a_parameter_of_other_ranks_than_those_that_hold_it_is_named():
    held = {"parameters": {"w": Leaf((4,), "float32", ("R",), (0, 1))}}
    records = [Record(rank=rank, world_size=4, calls=(), leaves=held) for rank in range(3)]
    (line,) = compare(records)
    assert line == "w, float32 [4] R on ranks 0, 1, is also on rank 2"
    (line,) = compare([records[0], Record(rank=1, world_size=4, calls=())])
    assert line == "w, float32 [4] R on ranks 0, 1, is not on rank 1"


def test_ranks_that_were_not_recorded_are_taken_to_agree():
    group = (0, 1, 2)
    calls = (Call(op="barrier", group=group), Call(op="wait", group=group, peer=2))
    records = [Record(rank=rank, world_size=3, calls=calls) for rank in (0, 1)]
    assert compare(records) == replay(records) == []
    assert replay([*records, Record(rank=2, world_size=3, calls=calls[:1])])  # and never sends


# --- Samples of ranks -----------------------------------------------------------------


def test_a_sample_has_two_ranks_along_every_axis_and_every_stage():
    ranks = sample_ranks({"pp": 8, "edp": 8, "ep": 8})
    assert len(ranks) == 8 * 3 and ranks[:4] == [0, 7, 56, 64]
    assert {r // 64 for r in ranks} == set(range(8))
    assert sample_ranks({"edp": 1, "ep": 2}) == [0, 1]
    with pytest.raises(ValueError, match="axes of at least one rank"):
        sample_ranks({"edp": 0})


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.booleans())
def test_a_full_sample_has_two_ranks_of_every_single_group(sizes, pp):
    axes = dict(zip(("pp" if pp else "edp", "ep", "cp"), sizes, strict=False))
    ranks = torch.zeros(sizes).flatten()
    ranks[sample_ranks(axes, full=True)] = 1
    for axis, size in enumerate(sizes):
        assert (ranks.view(sizes).sum(axis) >= min(2, size)).all()


def test_a_full_sample_of_512_ranks_has_hardly_more_than_two_of_each_group_and_a_whole_chain():
    ranks = sample_ranks({"pp": 8, "edp": 8, "ep": 8}, full=True)
    assert len(ranks) == 134  # 192 groups need 128
    assert set(range(0, 512, 64)) <= set(ranks)
