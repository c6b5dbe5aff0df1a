"""Rows written straight to their experts' ranks, on ranks that share memory of this machine."""

import copy
import gc
import os
import re
import signal
import socket
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from exchanges import D, K, hurried, layers, make_mesh, make_params, tokens

import moekit as mk
from moekit import _moe, symmetric
from moekit.kernels.permute import count_experts
from moekit.kernels.quantize import ROWWISE, dequantize, quantize
from moekit.plan import split_layers
from moekit.schedules import interleaved
from moekit.testing import check_transport, ranks

# --- The contract ---------------------------------------------------------------------


def test_rows_arrive_and_come_home_as_of_any_transport():
    check_transport(mk.rowwise, n_ranks=(1, 2, 4))


def test_its_kernels_keep_the_contract_too():
    pytest.importorskip("triton")
    via = partial(mk.rowwise, kernels="triton")
    check_transport(via, n_ranks=(1,), dtypes=(torch.bfloat16,))
    check_transport(via, n_ranks=(2,), dtypes=(torch.float32,))


# --- A layer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n_tokens", "recompute", "kernels", "dtype"),
    [
        ([5], False, "torch", torch.float64),
        ([5, 7], True, "torch", torch.float64),
        ([0, 9, 0, 3], False, "torch", torch.float64),
        ([5, 0], False, "triton", torch.float32),
        ([4, 6], True, "triton", torch.float32),
    ],
)
def test_layers_that_share_buffers_give_what_all_to_all_gives(n_tokens, recompute, kernels, dtype):
    if kernels == "triton":
        pytest.importorskip("triton")
    got, want = (
        ranks(len(n_tokens))(layers, via, kernels, dtype, n_tokens, recompute)
        for via in ("rowwise", "all_to_all")
    )
    for mine, theirs in zip(got, want, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9 if dtype == torch.float64 else 1e-3, atol=1e-5)


def whole_model(via, straight):
    """Return loss and gradients of a model, its sums of micro-batches in buffers that are used again."""
    mesh = mk.make_mesh(ep=dist.get_world_size(), device="cpu")
    if via == "rowwise":
        via = mk.rowwise(
            mesh["ep"], n_tokens=2 * 6, d_model=8, n_experts=8, top_k=2, dtype=torch.float32, kernels="torch"
        )
    config = mk.ModelConfig(
        vocab_size=16,
        d_model=8,
        n_layers=2,
        n_heads=2,
        n_kv_heads=1,
        d_head=4,
        n_experts=8,
        top_k=2,
        d_expert=4,
    )
    params = mk.init_params(config, mesh=mesh)
    ids = torch.arange(4) + 4 * dist.get_rank()
    sequences = (ids[:, None] + torch.arange(7)) ** 2 % 16
    batch = mk.batch.make_batch(sequences, torch.zeros_like(sequences), ids)
    batch = mk.count_tokens(batch, mesh=mesh)
    loss = partial(mk.next_token_loss, config=config, via=via, mesh=mesh)
    grad_fn = mk.value_and_grad(loss, has_aux=True)
    grad_fn = mk.accumulate(grad_fn, 2, straight=mk.model.is_expert if straight else None)
    (_, _), sums = grad_fn(params, batch)
    (value, _), sums = grad_fn(params, batch, into=sums)
    return value, {name: mk.tree.held(g) for name, g in mk.tree.named(sums).items()}


@pytest.mark.parametrize("straight", [False, True])
def test_a_model_has_the_loss_and_gradients_of_all_to_all(straight):
    got, want = (ranks(2)(whole_model, via, straight) for via in ("rowwise", "all_to_all"))
    for (loss, grads), (wanted, wanted_grads) in zip(got, want, strict=True):
        torch.testing.assert_close(loss, wanted)
        for name, grad in grads.items():
            torch.testing.assert_close(grad, wanted_grads[name], msg=name)


def with_less_to_differentiate(frozen):
    """Return the gradients that a rank needs, of two backwards; one rank needs fewer than the other."""
    mesh, dtype, rank = make_mesh(), torch.float64, dist.get_rank()
    via = mk.rowwise(mesh, n_tokens=5, d_model=D, n_experts=4, top_k=K, dtype=dtype)
    params, (_, gate_up, down) = make_params(4, dtype)
    x = tokens(5 - 5 * rank, dtype)
    if frozen == "tokens of a rank without any" and rank == 1:
        x.requires_grad_(False)
    if frozen == "experts of one rank" and rank == 0:
        gate_up.requires_grad_(False)
    found = []
    for _ in range(2):
        y, _ = mk.moe(params, x, top_k=K, via=via, kernels="loop", mesh=mesh)
        leaves = {"x": x, "gate_up": gate_up, "down": down}
        leaves = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
        found.append(dict(zip(leaves, torch.autograd.grad(y.square().sum(), leaves.values()), strict=True)))
    return found


@pytest.mark.parametrize("frozen", ["tokens of a rank without any", "experts of one rank"])
def test_a_rank_that_needs_fewer_gradients_changes_none_of_the_others(frozen):
    got, want = (ranks(2)(with_less_to_differentiate, x) for x in (frozen, None))
    for mine, theirs in zip(got, want, strict=True):
        for once, wanted in zip(mine, theirs, strict=True):
            assert once and all(torch.equal(grad, wanted[name]) for name, grad in once.items())


def two_layers_backward(order, functions):
    """Return the gradients of two layers that share buffers, both forwards first unless order is None."""
    mesh, dtype = make_mesh(), torch.float64
    via = mk.rowwise(mesh, n_tokens=6, d_model=D, n_experts=4, top_k=K, dtype=dtype)
    forwards = []
    for seed in range(2):
        params, leaves = make_params(4, dtype, seed)
        forwards.append((params, [tokens(5 - seed + dist.get_rank(), dtype, seed), *leaves]))

    def forward(i):
        params, (x, *_) = forwards[i]
        if functions == "moe":
            return mk.moe(params, x, top_k=K, via=via, kernels="loop", mesh=mesh)[0]
        sent = mk.dispatch(x, mk.route(params["router"], x, top_k=K), via=via, mesh=mesh)
        rows = mk.expert_forward(params["experts"], sent.rows, sent.offsets, kernels="loop")
        return mk.combine(rows, sent)

    def backward(i, y):
        return torch.autograd.grad(y.square().sum(), forwards[i][1])

    if order is None:
        return [backward(i, forward(i)) for i in range(2)]
    outputs = [forward(i) for i in range(2)]
    grads = {i: backward(i, outputs[i]) for i in order}
    return [grads[i] for i in range(2)]


@pytest.mark.parametrize("functions", ["moe", "dispatch and combine"])
def test_layers_that_share_buffers_can_go_backward_in_any_order(functions):
    one_by_one, *others = (
        ranks(2)(two_layers_backward, order, functions) for order in (None, (0, 1), (1, 0))
    )
    for got in others:
        for mine, wanted in zip(got, one_by_one, strict=True):
            for a, b in zip(mine, wanted, strict=True):
                assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def one_process(**options):
    return mk.rowwise(None, n_tokens=5, d_model=D, n_experts=4, top_k=K, dtype=torch.float64, **options)


@pytest.mark.parametrize("layer", ["moe", "dispatch", "combine"])
def test_second_derivatives_are_refused(layer):
    via = one_process()
    router, x = torch.randn(D, 4, dtype=torch.float64), torch.randn(5, D, dtype=torch.float64)
    x.requires_grad_()
    experts = dict(
        gate_up=torch.randn(4, D, 8, dtype=torch.float64), down=torch.randn(4, 4, D, dtype=torch.float64)
    )
    if layer == "moe":
        y = mk.moe(dict(router=router, experts=experts), x, top_k=K, via=via, kernels="loop")[0]
    else:
        sent = mk.dispatch(x, mk.route(router, x, top_k=K), via=via)
        y = sent.rows if layer == "dispatch" else mk.combine(sent.rows.square(), sent)
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()


def test_it_cannot_be_copied():
    with pytest.raises(TypeError, match="cannot be copied or pickled"):
        copy.deepcopy(one_process())


def test_one_made_for_inference_can_train():
    with torch.inference_mode():
        via = one_process()
    x = torch.randn(5, D, dtype=torch.float64, requires_grad=True)
    sent = mk.dispatch(x, mk.route(torch.randn(D, 4, dtype=torch.float64), x, top_k=K), via=via)
    assert torch.autograd.grad(mk.combine(sent.rows, sent).sum(), x)[0].isfinite().all()


# --- Rows that travel in float8 -------------------------------------------------------

FP8 = torch.float8_e4m3fn


def in_float8(payload, functions, kernels, dtype):
    """Return output and gradients of layers that send float8, or that round tokens before they send them."""
    mesh = make_mesh()
    sizes = dict(d_model=D, n_experts=4, top_k=K, dtype=dtype, kernels=kernels)
    via = mk.rowwise(mesh, n_tokens=6, capacity_factor=0.75, payload=payload, **sizes)
    send = via.send

    def rounded(x, places, weights=None, *, ends=None, tokens=True, **options):
        if tokens:
            x = dequantize(quantize(x, ROWWISE)).to(x.dtype)
        return send(x, places, weights, ends=ends, tokens=tokens, **options)

    if payload is None:
        via.send = rounded
    run = "loop" if kernels == "torch" else kernels
    x, found = tokens(6 - 2 * dist.get_rank(), dtype), []
    x.data[0], x.data[1] = 0.0, 1e-35  # which becomes zeros
    y = x
    for seed in range(2):
        params, leaves = make_params(4, dtype, seed)
        if functions == "moe":
            y = y + mk.moe(params, y, top_k=K, via=via, kernels=run, mesh=mesh)[0]
        else:
            sent = mk.dispatch(y, mk.route(params["router"], y, top_k=K), via=via, mesh=mesh)
            rows = mk.expert_forward(params["experts"], sent.rows, sent.offsets, kernels=run)
            y = y + mk.combine(rows, sent)
        found += leaves
    grads = torch.autograd.grad((y * torch.linspace(1, 2, D, dtype=dtype)).sum(), [x, *found])
    return [y.detach(), *grads], via.n_bytes


@pytest.mark.parametrize(
    ("functions", "kernels", "dtype"),
    [
        ("moe", "torch", torch.bfloat16),
        ("dispatch and combine", "torch", torch.bfloat16),
        ("moe", "torch", torch.float32),
        ("moe", "triton", torch.float32),
    ],
)
def test_a_payload_gives_the_bits_of_rows_that_were_rounded_before(functions, kernels, dtype):
    if kernels == "triton":
        pytest.importorskip("triton")
    got, want = (ranks(2)(in_float8, payload, functions, kernels, dtype) for payload in (FP8, None))
    for (mine, more), (theirs, n_bytes) in zip(got, want, strict=True):
        assert all(torch.equal(a, b) and a.isfinite().all() for a, b in zip(mine, theirs, strict=True))
        capacity = 9
        assert more - n_bytes == -(-capacity * D // 128) * 128 + 128  # rows and scales, each to 128 bytes


def with_a_bad_token():
    mesh, dtype = make_mesh(), torch.float32
    via = mk.rowwise(mesh, n_tokens=6, d_model=D, n_experts=4, top_k=1, dtype=dtype, payload=FP8)
    x = tokens(6, dtype).detach()
    scores = torch.zeros(6, 4)
    ids = (torch.arange(6)[:, None] + dist.get_rank()) % 4
    routing = mk.Routing(
        weights=torch.ones(6, 1), expert_ids=ids, counts=count_experts(ids, 4), logits=scores, scores=scores
    )
    x[2, 1], x[4, 3] = torch.inf, torch.nan
    sent = mk.dispatch(x, routing, via=via, mesh=mesh)
    y = mk.combine(sent.rows, sent)
    return y.isnan().all(1).tolist(), y.isfinite().all(1).tolist()


def test_a_token_that_is_not_finite_arrives_as_nan_and_spoils_no_other():
    for bad, good in ranks(2)(with_a_bad_token):
        assert bad == [False, False, True, False, True, False]
        assert good == [not x for x in bad]


# --- Without room ---------------------------------------------------------------------


def overflowing(overflow, factor):
    """Return what a layer without room gives, beside the sum over the routes that a loop keeps."""
    mesh, dtype = make_mesh(), torch.float64
    size, rank = mesh.size(), mesh.get_local_rank()
    n_experts = 2 * size
    via = mk.rowwise(
        mesh, n_tokens=9, d_model=D, n_experts=n_experts, top_k=K, dtype=dtype,
        capacity_factor=factor, overflow=overflow,
    )  # fmt: skip
    params, leaves = make_params(n_experts, dtype)
    x = tokens(9 - rank, dtype)
    y, routing = mk.moe(params, x, top_k=K, via=via, kernels="loop", mesh=mesh)
    grads = torch.autograd.grad(y.square().sum(), [x, *leaves])

    everyone: list = [None] * size
    dist.all_gather_object(everyone, (routing.expert_ids, routing.weights.detach()))
    kept = kept_by_loops(
        [ids for ids, _ in everyone], [w for _, w in everyone], n_experts, via.capacity, overflow
    )
    whole: list = [None] * size
    dist.all_gather_object(whole, [leaf.detach() for leaf in leaves[1:]])
    gate_up, down = (torch.cat(parts).requires_grad_() for parts in zip(*whole, strict=True))
    again = mk.route(params["router"], x, top_k=K)
    weights = again.weights * kept[rank]
    ids = again.expert_ids
    gate, up = torch.einsum("td,tkdh->tkh", x, gate_up[ids]).chunk(2, -1)
    rows = torch.einsum("tkh,tkhd->tkd", torch.nn.functional.silu(gate) * up, down[ids])
    wanted = (rows * weights[..., None]).sum(1)
    wanted_grads = list(torch.autograd.grad(wanted.square().sum(), [x, leaves[0], gate_up, down]))
    for g in wanted_grads[2:]:
        dist.all_reduce(g)
    mine = slice(2 * rank, 2 * rank + 2)
    wanted_grads[2:] = [g[mine] for g in wanted_grads[2:]]
    sent = mk.dispatch(x, routing, via=via, mesh=mesh)
    dropped = count_experts(ids[~kept[rank]][:, None], n_experts)
    assert routing.dropped.tolist() == sent.dropped.tolist() == dropped.tolist()
    assert sum(int((~mask).sum()) for mask in kept) > 0
    for a, b in zip([y, *grads], [wanted, *wanted_grads], strict=True):
        torch.testing.assert_close(a, b)


def kept_by_loops(ids, weights, n_experts, capacity, overflow):
    """Return which routes of every rank find room."""
    e = n_experts // len(ids)
    kept = [torch.ones_like(x, dtype=torch.bool) for x in ids]
    for owner in range(len(ids)):
        rows = [
            (expert, source, route)
            for expert in range(owner * e, owner * e + e)
            for source in range(len(ids))
            for route in (ids[source].flatten() == expert).nonzero()[:, 0].tolist()
        ]
        n = min(len(rows), capacity)
        even = [g for g in range(len(rows)) if (g + 1) * n // len(rows) > g * n // len(rows)]
        for cell in {row[:2] for row in rows}:
            of_cell = [g for g, row in enumerate(rows) if row[:2] == cell]
            quota = [g for g in of_cell if g in even]
            if overflow == "score":
                by_weight = sorted(of_cell, key=lambda g: -weights[cell[1]].flatten()[rows[g][2]].item())
                quota = by_weight[: len(quota)]
            for g in of_cell:
                kept[cell[1]].view(-1)[rows[g][2]] = g in quota
    return kept


@pytest.mark.parametrize("overflow", ["even", "score"])
@pytest.mark.parametrize("factor", [0.3, 0.75])
def test_routes_without_room_add_nothing_and_are_counted(overflow, factor):
    ranks(3)(overflowing, overflow, factor)


def dropped_by_a_model(pp, recompute):
    """Return the statistics of a batch in two micro-batches, and what the layers' plans say was dropped."""
    mesh = mk.make_mesh(pp=pp, ep=2, device="cpu")
    inner = mesh["edp", "ep"]
    config = mk.ModelConfig(
        vocab_size=16, d_model=8, n_layers=2, n_heads=2, n_kv_heads=1, d_head=4,
        n_experts=8, top_k=2, d_expert=4,
    )  # fmt: skip
    via = mk.rowwise.of(config, mesh["ep"], n_tokens=2 * 6, dtype=torch.float32, capacity_factor=0.75)
    plan, planned = via.plan, []

    def noted(routing):
        found = plan(routing)
        if not torch._C._current_autograd_node():  # a layer that is recomputed drops the same again
            planned.append(found.dropped.sum())
        return found

    via.plan = noted
    block = mk.remat(mk.model.transformer_block, recompute)
    options = dict(config=config, via=via, block=block, mesh=inner)
    stages = split_layers(config, pp)
    place = mesh["pp"].get_local_rank() if pp > 1 else 0
    params = mk.init_params(config, stages=[stages[place]], mesh=mesh)
    ids = torch.arange(4) + 4 * inner["ep"].get_local_rank()
    sequences = (ids[:, None] + torch.arange(7)) ** 2 % 16
    batch = mk.batch.make_batch(sequences, torch.zeros_like(sequences), ids)
    batch = mk.count_tokens(batch, mesh=inner)
    if pp == 1:
        loss = partial(mk.next_token_loss, **options)
        grad_fn = mk.accumulate(mk.value_and_grad(loss, has_aux=True), 2)
    else:
        grad_fn = mk.pipeline(
            [partial(mk.model.stage_loss, stage=stage, **options) for stage in stages],
            schedule=interleaved(pp, 2, 1),
            boundary=lambda part: torch.empty(*part.tokens.shape, config.d_model),
            mesh=mesh["pp"],
        )
    (_, stats), _ = grad_fn(params, batch)
    stats = mk.mesh.sum_over_ranks(stats, mesh=mesh)
    return int(stats["n_dropped"]), int(stats["n_routes"]), int(sum(planned))


@pytest.mark.parametrize(("pp", "recompute"), [(1, "none"), (1, "block"), (2, "none")])
def test_the_statistics_count_what_all_ranks_layers_and_micro_batches_dropped(pp, recompute):
    found = ranks(2 * pp)(dropped_by_a_model, pp, recompute)
    dropped = sum(planned for _, _, planned in found)
    assert dropped > 0
    assert {of_rank[:2] for of_rank in found} == {(dropped, 2 * 2 * 4 * 6 * 2)}  # layers, ranks, rows, ids, k


def refusing():
    via = mk.rowwise(
        make_mesh(), n_tokens=4, d_model=D, n_experts=4, top_k=1, dtype=torch.float32,
        capacity_factor=1.0, overflow="refuse",
    )  # fmt: skip
    ids = torch.zeros(4, 1, dtype=torch.int64)
    scores = torch.zeros(4, 4)
    routing = mk.Routing(
        weights=torch.ones(4, 1), expert_ids=ids, counts=count_experts(ids, 4), logits=scores, scores=scores
    )
    with pytest.raises(ValueError, match=r"has it for 4; .*, got 8 rows for one"):
        mk.dispatch(torch.ones(4, D), routing, via=via, mesh=via.mesh)


def test_too_many_rows_are_refused_on_every_rank_with_the_numbers():
    ranks(2)(refusing)


def more_tokens_than_there_is_room_for():
    via = mk.rowwise(make_mesh(), n_tokens=2, d_model=D, n_experts=2, top_k=1, dtype=torch.float32)
    params, _ = make_params(2, torch.float32)
    with pytest.raises(ValueError, match="made for n_tokens=2 of a rank, got 3; make another, or give it a"):
        mk.moe(params, torch.ones(3, D), top_k=1, via=via, mesh=via.mesh)


def test_without_a_capacity_factor_nothing_is_dropped_so_more_tokens_are_refused():
    ranks(2)(more_tokens_than_there_is_room_for)


# --- Ranks that do not come -----------------------------------------------------------

SECONDS = 3


def with_others_gone(how, folder):
    """Return what the first rank is told, and after how long, when the last one goes in mid-exchange."""
    mesh, last = make_mesh(), dist.get_rank() == dist.get_world_size() - 1
    sizes = dict(n_tokens=4, d_model=D, n_experts=6, top_k=K, dtype=torch.float32)
    via = mk.rowwise(mesh, **sizes, timeout=timedelta(seconds=SECONDS))
    params, leaves = make_params(6, torch.float32)
    meet, begun = via._meet, time.monotonic()

    def go(*names):
        if last and names == ("rows in",):
            os.kill(os.getpid(), signal.SIGKILL)
        meet(*names)

    def layer():
        y = mk.moe(params, tokens(4, torch.float32), top_k=K, via=via, kernels="loop", mesh=mesh)[0]
        torch.autograd.grad(y.sum(), leaves)

    layer()
    if how == "killed":
        via._meet = go
    elif last:
        return time.sleep(2 * SECONDS)  # it lives, and calls one layer less
    try:
        layer()
    except RuntimeError as error:
        told = str(error)
    else:
        told = "nothing"
    (folder / str(dist.get_rank())).write_text(f"{time.monotonic() - begun} {told}")


@pytest.mark.parametrize("how", ["killed", "calls fewer layers"])
def test_a_rank_that_does_not_come_is_an_error_on_the_others_within_the_timeout(how, tmp_path):
    if how == "killed":
        with pytest.raises(RuntimeError, match="rank 2 of 3 failed:\nthe process ended with exit code -9"):
            ranks(3, grace=2 * SECONDS)(with_others_gone, how, tmp_path)
    else:
        ranks(3)(with_others_gone, how, tmp_path)
    barriers = {"killed": (10, 9), "calls fewer layers": (9, 8)}[how]
    for rank in range(2):
        seconds, told = (tmp_path / str(rank)).read_text().split(maxsplit=1)
        assert float(seconds) < 2 * SECONDS
        assert f"got to barrier {barriers[0]}" in told and f"{{2: {barriers[1]}}}" in told, told


# --- Races ----------------------------------------------------------------------------


N_RUNS = 10  # a barrier that is left out is seen in the second


@pytest.mark.parametrize(("payload", "n_runs"), [(None, N_RUNS), (FP8, 5)])
def test_ranks_that_are_late_change_no_bit(payload, n_runs):
    assert all(ranks(4)(hurried, None, n_runs, payload=payload))


@pytest.mark.parametrize(
    "fault",
    [
        "nobody waits for what was sent",
        "nobody waits for what is fetched",
        "nobody waits for the counts",
        "nobody waits before sending again",
    ],
)
def test_a_barrier_left_out_is_seen(fault):
    assert not all(ranks(4)(hurried, fault, N_RUNS))


# --- Buffers --------------------------------------------------------------------------


def mapped():
    return [line for line in Path("/proc/self/maps").read_text().splitlines() if "moekit-" in line]


def buffers_come_and_go():
    mesh = make_mesh()
    via = mk.rowwise(mesh, n_tokens=64, d_model=D, n_experts=8, top_k=K, dtype=torch.float32)
    here = len(mapped())
    params, leaves = make_params(8, torch.float32)
    for step in range(80):
        x = tokens(1 + step % 64, torch.float32, step)
        y = mk.moe(params, x, top_k=K, via=via, kernels="loop", mesh=mesh)[0]
        torch.autograd.grad(y.sum(), leaves)
    assert len(mapped()) == here == mesh.size()
    assert all(line.endswith(" (deleted)") for line in mapped())  # no file stays in /dev/shm
    del via, y
    gc.collect()
    return len(mapped())


@pytest.mark.skipif(not Path("/dev/shm").exists(), reason="looks into /dev/shm and /proc/self/maps")
def test_buffers_are_used_again_and_freed_when_dropped():
    assert ranks(2)(buffers_come_and_go) == [0, 0]


def test_the_capacity_is_what_is_said():
    sizes = dict(n_tokens=10, d_model=D, n_experts=8, top_k=4)
    assert mk.rowwise(None, **sizes).capacity == 40
    assert mk.rowwise(None, **sizes, capacity_factor=1.26).capacity == 51
    via = mk.rowwise(None, **sizes, dtype=torch.bfloat16)
    assert via.n_bytes == 128 + 2 * 40 * D * 2 + 2 * 256  # counts, rows twice, weights twice; each to 128


def refused_on_ranks():
    mesh, here = make_mesh(), dist.get_rank()
    sizes = dict(n_tokens=4, d_model=D, n_experts=4, top_k=2)
    for differ, numbers in [
        (dict(n_tokens=4 + here), r"(?s)'rows in'.*\(16, 16\).*\(20, 16\)"),
        (dict(d_model=D + here), r"(?s)'rows in'.*\(16, 16\).*\(16, 17\)"),
        (dict(dtype=(torch.float32, torch.bfloat16)[here]), r"(?s)'rows in'.*float32.*bfloat16"),
        (dict(n_experts=4 + 2 * here), r"(?s)'counts'.*\(8,\).*\(12,\)"),
        (dict(payload=(None, FP8)[here]), r"(?s)\{\}.*'packed in'"),
        (dict(capacity_factor=1.0 + here), r"(?s)'rows in'.*\(8, 16\).*\(16, 16\)"),
    ]:
        with pytest.raises(ValueError, match="needs one layout on all ranks, got") as error:
            mk.rowwise(mesh, **(sizes | differ))
        message = str(error.value)
        if here:  # its own comes first
            mine, theirs = message.split(" here and ")
            message = theirs + mine
        assert re.search(numbers, message), message
    via = mk.rowwise(mesh, n_tokens=4, d_model=D, n_experts=4, top_k=K, dtype=torch.float32)
    params, _ = make_params(4, torch.float32)
    with pytest.raises(ValueError, match="was made for the ranks of"):
        mk.moe(params, torch.ones(2, D), top_k=K, via=via)


def test_ranks_that_do_not_agree_are_told():
    ranks(2)(refused_on_ranks)


def test_rows_of_another_dtype_are_not_rounded_on_their_way_home():
    via = mk.rowwise(None, n_tokens=4, d_model=D, n_experts=8, top_k=K, dtype=torch.bfloat16)
    x = torch.ones(4, D, dtype=torch.bfloat16)
    sent = mk.dispatch(x, mk.route(torch.ones(D, 8, dtype=x.dtype), x, top_k=K), via=via)
    with pytest.raises(ValueError, match=r"bfloat16 rows of width 16 on cpu, got torch\.float32"):
        mk.combine(sent.rows.float(), sent)


def hosts_that_differ():
    socket.gethostname = lambda: f"host-{dist.get_rank()}"
    with pytest.raises(RuntimeError, match=r"all ranks on one host, got \['host-0', 'host-1'\]"):
        mk.rowwise(make_mesh(), n_tokens=4, d_model=D, n_experts=4, top_k=2)


def test_ranks_on_two_hosts_are_refused():
    ranks(2)(hosts_that_differ)


def in_another_order():
    """Call two layers whose ranks take two memories in another order."""
    mesh = make_mesh()
    sizes = dict(n_tokens=4, d_model=D, n_experts=4, top_k=K, dtype=torch.float32)
    vias = [mk.rowwise(mesh, **sizes, timeout=timedelta(seconds=SECONDS)) for _ in range(2)]
    params, _ = make_params(4, torch.float32)
    with pytest.raises(
        RuntimeError, match=r"other ranks have come to: \{.* calls other layers than this one"
    ):
        mk.moe(params, torch.ones(4, D), top_k=K, via=vias[dist.get_rank()], mesh=mesh)


def test_ranks_that_take_two_memories_in_another_order_are_told():
    ranks(2)(in_another_order)


def without_room():
    with (
        mock.patch.object(symmetric.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000)),
        pytest.raises(
            RuntimeError, match=r"symmetric memory needs [\d,]+ bytes in .*, got 1,000; a container"
        ),
    ):
        mk.rowwise(make_mesh(), n_tokens=4, d_model=D, n_experts=4, top_k=K, dtype=torch.float32)


def test_too_little_shared_memory_is_refused_before_it_is_touched():
    ranks(2)(without_room)


def counted():
    """Return what is counted as symmetric while memories come and go, each time beside what is there."""
    mesh, found = make_mesh(), []
    sizes = dict(n_tokens=4, d_model=D, n_experts=4, top_k=K, dtype=torch.float32)

    def count(*alive):
        found.append((symmetric.allocated_bytes(), sum(via.n_bytes for via in alive)))

    one, other = mk.rowwise(mesh, **sizes), mk.rowwise(mesh, **sizes, capacity_factor=3.0)
    count(one, other)
    layer = partial(mk.moe, via=one)  # counted as long as anything holds it
    del one
    count(layer.keywords["via"], other)
    del layer
    count(other)
    with mock.patch.object(symmetric.shutil, "disk_usage", lambda _: SimpleNamespace(free=1000)):
        try:
            mk.rowwise(mesh, **sizes)
        except RuntimeError as error:  # whose traceback holds what has not been made
            count(other)
            assert error.__traceback__
    alone = mk.rowwise(None, **sizes)  # torch counts it
    count(other)
    del other, alone
    count()
    return found


def test_what_is_symmetric_is_counted_while_it_lives_and_keeps_nothing_alive():
    for found in ranks(2)(counted):
        assert [got for got, _ in found] == [want for _, want in found]
        assert found[0] == found[1] > found[2] > found[-1] == (0, 0)


def devices(visible, rank_of_device, hosts, far):
    """Say what `_check_reach` says of GPUs that the rank sees, `far` being pairs that are not connected."""
    rank = dist.get_rank()
    mine = visible[rank]
    cuda = dict(
        device_count=lambda: len(mine),
        get_device_properties=lambda i: SimpleNamespace(uuid=mine[i]),
        can_device_access_peer=lambda i, j: {mine[i], mine[j]} not in far,
    )
    for name, fake in cuda.items():
        setattr(torch.cuda, name, fake)
    socket.gethostname = lambda: hosts[rank]
    try:
        symmetric._check_reach(torch.device("cuda", mine.index(rank_of_device[rank])), make_mesh())
    except RuntimeError as error:
        return str(error)
    return ""


def test_devices_without_access_to_each_other_are_named_on_all_ranks():
    all_three, alike = ["abc"] * 3, ["here"] * 3
    for error in ranks(3)(devices, all_three, "abc", alike, [{"a", "c"}]):
        assert "do not address those of other ranks: {0: [2], 2: [0]}; take via='all_to_all'" in error
    assert ranks(3)(devices, all_three, "abc", alike, []) == [""] * 3
    assert ranks(3)(devices, "abc", "abc", alike, [{"a", "c"}]) == [""] * 3  # each sees its own alone
    assert ranks(3)(devices, all_three, "aaa", alike, [{"a"}]) == [""] * 3
    assert ranks(3)(devices, all_three, "abc", ["here", "here", "there"], [{"a", "c"}]) == [""] * 3


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(payload=torch.float8_e5m2), r"payload None or torch\.float8_e4m3fn, got torch\.float8_e5m2"),
        (dict(timeout=3), r"timeout to be a datetime.timedelta, got 3; timedelta\(seconds="),
        (dict(timeout=timedelta(0)), "timeout from a millisecond to 7 days, 0:00:00, got 0:00:00"),
        (dict(timeout=timedelta.max), "timeout from a millisecond to 7 days, 0:00:00, got 999999999 days"),
        (dict(d_model=0), "d_model from 1 and a dtype of reals, got 0 and"),
        (dict(dtype=torch.int64), "d_model from 1 and a dtype of reals, got 16 and torch.int64"),
        (dict(n_experts=0), "needs n_experts that ep divides"),
        (dict(top_k=9), "top_k from 1 to n_experts"),
        (dict(capacity_factor=0.0), "positive, finite capacity_factor, got 0.0"),
        (dict(capacity_factor=float("inf")), "positive, finite capacity_factor, got inf"),
        (dict(kernels="fast"), "kernels 'auto', 'torch' or 'triton', got 'fast'"),
        (dict(overflow="all"), "overflow 'even', 'score' or 'refuse', got 'all'"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(change, message, unchecked):
    with pytest.raises(ValueError, match=message):
        mk.rowwise(None, **(dict(n_tokens=4, d_model=D, n_experts=8, top_k=K) | change))


@pytest.mark.parametrize(
    ("x", "n_experts", "message"),
    [
        (torch.ones(2, D, dtype=torch.float64), 8, r"float32 tokens of width 16 on cpu, got torch.float64"),
        (torch.ones(2, 12), 8, r"of width 16 on cpu, got torch.float32 \(2, 12\)"),
        (torch.ones(5, D), 8, "n_tokens=4 of a rank, got 5"),
        (torch.ones(2, D), 4, "8 experts and top_k=2, got 4 and 2"),
    ],
)
def test_other_tokens_than_it_was_made_for_are_refused(x, n_experts, message, unchecked):
    via = mk.rowwise(None, n_tokens=4, d_model=D, n_experts=8, top_k=K, dtype=torch.float32)
    routing = mk.route(torch.ones(x.shape[1], n_experts, dtype=x.dtype), x, top_k=K)
    with pytest.raises(ValueError, match=message):
        mk.dispatch(x, routing, via=via)


def test_rows_are_as_many_as_there_is_room_for(unchecked):
    via = mk.rowwise(None, n_tokens=4, d_model=D, n_experts=8, top_k=K, dtype=torch.float32)
    with pytest.raises(ValueError, match=rf"rowwise.fetch needs rows \({4 * K}, 16\), got \(1, 16\)"):
        via.fetch(torch.ones(1, D), torch.zeros(4, K, dtype=torch.int64))


def rows_that_products_are_chosen_for():
    params, _ = make_params(8, torch.float32)
    with mock.patch.object(_moe, "choose_products", wraps=_moe.choose_products) as choose:
        for factor in (None, 5.0):
            sizes = dict(n_tokens=4, d_model=D, n_experts=8, top_k=K, dtype=torch.float32)
            mk.moe(params, torch.ones(3, D), top_k=K, via=mk.rowwise(None, **sizes, capacity_factor=factor))
    return [call.args[2] for call in choose.call_args_list]


def test_products_are_chosen_for_the_rows_expected_whatever_there_is_room_for():
    assert ranks(1)(rows_that_products_are_chosen_for) == [[3 * K, 3 * K]]
