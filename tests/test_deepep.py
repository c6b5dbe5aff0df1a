"""The transport over DeepEP, with a stand-in for the library; tests/gpu checks it with the library."""

import importlib.util
import sys
from copy import copy
from dataclasses import replace
from functools import partial
from types import ModuleType, SimpleNamespace

import pytest
import stand_in_deep_ep
import torch
import torch.distributed as dist
from reference import refuses

import moekit as mk
from moekit import _deepep, symmetric
from moekit.dryrun import record
from moekit.layouts import Layout, memory_of
from moekit.plan import split_layers
from moekit.testing import check_transport, ranks

WIDE = dict(dtypes=(torch.bfloat16,), d_model=256)
SIZES = dict(n_tokens=3, d_model=256, n_experts=4, top_k=2)
X = torch.zeros(3, 256, dtype=torch.bfloat16)
ROUTING = mk.route(torch.zeros(256, 4), torch.zeros(3, 256), top_k=2)


def deepep(mesh, **sizes):
    sys.modules["deep_ep"] = stand_in_deep_ep.library()
    return mk.deepep(mesh, **sizes)


def test_the_contract_is_kept_over_a_stand_in_for_the_library():
    check_transport(deepep, n_ranks=(2, 4), **WIDE)


def make_layer(generator):
    return mk.tree.nested(
        {
            "router": torch.randn(256, 4, generator=generator),
            "experts.gate_up": torch.randn(2, 256, 64, generator=generator).bfloat16() / 16,
            "experts.down": torch.randn(2, 32, 256, generator=generator).bfloat16() / 6,
        }
    )


def layer(recompute):
    """Return output and gradients of one layer."""
    mesh = mk.make_mesh(ep=2, device="cpu")["ep"]
    generator = torch.Generator().manual_seed(dist.get_rank())
    x = torch.randn(9 + mesh.get_local_rank(), 256, generator=generator).bfloat16()
    params = make_layer(generator)
    leaves = [x, *params.values(True, True)]
    for leaf in leaves:
        leaf.requires_grad_()
    via = deepep(mesh, **SIZES | dict(n_tokens=10))
    moe = mk.remat(lambda *args: mk.moe(*args, top_k=2, via=via, mesh=mesh), recompute)
    y, routing = moe(params, x)
    loss = y.float().square().sum() + routing.logits.square().sum()
    return [y.detach(), *torch.autograd.grad(loss, leaves)]


def test_a_recomputed_layer_has_the_same_bits_though_tokens_arrive_in_another_order():
    run = ranks(2)
    for kept, again in zip(run(layer, "none"), run(layer, "block"), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


# --- Its buffers ------------------------------------------------------------------------


def buffers_come_and_go():
    """Return bytes counted beside torch, and whether DeepEP's buffer is there, as its owners go."""
    mesh, found = mk.make_mesh(ep=2, device="cpu")["ep"], []
    via = deepep(mesh, **SIZES)
    buffer = via.buffer
    x = X.clone().requires_grad_()

    def look():
        found.append((symmetric.allocated_bytes(), not buffer.destroyed))

    look()
    sent = mk.dispatch(x, ROUTING, via=via, mesh=mesh)
    del via
    look()  # the backward needs it
    mk.combine(sent.rows, sent).sum().backward()
    del sent
    look()
    return found


def test_buffers_are_counted_and_freed_when_the_last_layer_lets_go():
    assert ranks(2)(buffers_come_and_go) == [[(2**21, True), (2**21, True), (0, False)]] * 2


def use_after_close():
    mesh = mk.make_mesh(ep=2, device="cpu")["ep"]
    via = deepep(mesh, **SIZES)
    x = X.clone().requires_grad_()
    sent = mk.dispatch(x, ROUTING, via=via, mesh=mesh)
    buffer = via.buffer
    via.close()
    via.close()  # changes nothing
    assert buffer.destroyed and via.n_bytes == symmetric.allocated_bytes() == 0
    for use in (
        lambda: mk.dispatch(x, ROUTING, via=via, mesh=mesh),
        lambda: mk.combine(sent.rows, sent),
        lambda: sent.rows.sum().backward(),
    ):
        with refuses("deepep needs its buffers, got it after close() has freed them; make another"):
            use()


def test_what_is_closed_is_refused():
    ranks(2)(use_after_close)


def pipeline_lets_go():
    """Return whether a step of a pipeline frees the buffers when it is dropped, as the recipe's is."""
    mesh = mk.make_mesh(pp=2, ep=2, device="cpu")
    sizes = dict(d_model=256, n_experts=4, top_k=2, vocab_size=16, n_heads=2, n_kv_heads=1, d_head=8)
    config = mk.ModelConfig(n_layers=2, d_expert=8, **sizes)
    stages = split_layers(config, 2, seq_len=16)
    mine = [stages[mesh["pp"].get_local_rank()]]
    params = mk.init_params(config, dtype=torch.bfloat16, stages=mine, mesh=mesh)
    via = deepep(mesh["ep"], **SIZES | dict(n_tokens=16))
    buffer = via.buffer
    options = dict(config=config, via=via, mesh=mesh["edp", "ep"])
    step = mk.pipeline(
        [partial(mk.model.stage_loss, stage=stage, **options) for stage in stages],
        schedule=mk.schedules.one_f_one_b(2, 2),
        boundary=lambda part: torch.empty(*part.tokens.shape, 256, dtype=torch.bfloat16),
        mesh=mesh["pp"],
    )
    tokens = torch.arange(2 * 17).view(2, 17) % 16
    batch = mk.batch.make_batch(tokens, torch.zeros_like(tokens), torch.arange(2))
    step(params, mk.count_tokens(batch, mesh=mesh["edp", "ep"]))
    kept = buffer.destroyed
    del via, options, step
    return kept, buffer.destroyed


def test_a_step_of_a_pipeline_that_is_dropped_lets_the_buffers_go():
    assert ranks(4)(pipeline_lets_go) == [(False, True)] * 4


def test_the_bytes_are_those_that_deepep_allocates():
    # 16 ranks on two hosts, as it printed: https://github.com/sgl-project/sglang/pull/24443
    assert _deepep.buffer_bytes(16, 4096, 7168, 8) == 1_218_445_312
    assert _deepep.buffer_bytes(8, 4096, 7168, 8) == 8 * 4096 * (2 * 7168 + 128)  # on one, for each rank


@pytest.mark.parametrize(("overlap", "tokens"), [("none", [64]), ("two_batch", [32]), ("auto", [64, 32])])
def test_the_estimate_of_a_layout_counts_the_bytes(overlap, tokens):
    layout = Layout(ep=8, batch_size=16, seq_len=64, cp=2, edp=1, via="deepep", overlap=overlap)
    config = mk.preset("bench-8L")
    (with_buffers,), (without,) = (
        memory_of(config, replace(layout, via=via)) for via in ("deepep", "all_to_all")
    )
    n_bytes = sum(_deepep.buffer_bytes(8, 2 * n, 4096, 4) for n in tokens)
    assert with_buffers == without | {"symmetric buffers": n_bytes}


def dry_step(rank):
    mesh = mk.make_mesh(ep=2, device="cpu")["ep"]
    via = mk.deepep(mesh, **SIZES | dict(n_tokens=64))
    params, x = make_layer(None), torch.zeros(64, 256, dtype=torch.bfloat16, requires_grad=True)

    def step():
        mk.moe(params, x, top_k=2, via=via, mesh=mesh)[0].sum().backward()
        return {}

    return step


def test_a_dry_run_holds_the_buffers_and_sends_as_all_to_all_without_the_library():
    of_one = record(dry_step, rank=1, world_size=2)
    assert of_one.memory["other"] >= _deepep.buffer_bytes(2, 64, 256, 2)
    assert sum(call.op == "all_to_all" for call in of_one.calls if call.step == 2) >= 4


# --- What it refuses --------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
def test_without_the_library_the_error_says_what_to_install(monkeypatch, unchecked):
    mesh = SimpleNamespace(ndim=1, size=lambda: 2, device_type="cpu")
    with refuses("DeepEP 2 and its ElasticBuffer, got no module deep_ep; install it from", ImportError):
        mk.deepep(mesh, **SIZES)
    old = ModuleType("deep_ep")
    old.__version__ = "1.2.1"
    monkeypatch.setitem(sys.modules, "deep_ep", old)
    with refuses("got deep_ep 1.2.1 without it; install", ImportError):
        mk.deepep(mesh, **SIZES)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(n_experts=3), "deepep needs n_experts that ep divides"),
        (dict(n_tokens=0), "n_tokens=0, top_k=2"),
        (dict(dtype=torch.float32), "32, got torch.float32, 256 and 2; use via='all_to_all'"),
        (dict(d_model=128), "32, got torch.bfloat16, 128 and 2; use"),
        (dict(n_experts=64, top_k=33), "32, got torch.bfloat16, 256 and 33; use"),
    ],
)
def test_what_its_kernels_do_not_take_is_refused_before_communication(change, message, unchecked):
    with refuses(message):
        mk.deepep(SimpleNamespace(ndim=1, size=lambda: 2), **SIZES | change)


def test_one_process_is_told_of_local():
    with refuses("deepep needs a mesh, got None; use via='local' in one process"):
        mk.deepep(None, **SIZES)


def other_uses():
    mesh, rank = mk.make_mesh(ep=2, device="cpu")["ep"], dist.get_rank()
    for name, size in SIZES.items():
        of_ranks = [SIZES, SIZES | {name: 2 * size}]
        said = (
            f"deepep needs the same sizes on all ranks, got {of_ranks[rank]} here and {of_ranks[1 - rank]} on"
        )
        with refuses(said):
            deepep(mesh, **of_ranks[rank])
    via, router, four = deepep(mesh, **SIZES), torch.zeros(256, 4), torch.zeros(4, 256)
    with refuses("deepep was made for n_tokens=3 of a rank, got 4; make another"):
        mk.dispatch(four.bfloat16(), mk.route(router, four, top_k=2), via=via, mesh=mesh)
    with refuses("deepep was made for 4 experts and top_k=2, got 4 and 1; make another"):
        mk.dispatch(X, mk.route(router, X.float(), top_k=1), via=via, mesh=mesh)
    with refuses("deepep was made for torch.bfloat16 tokens of width 256 on cpu, got torch.float32"):
        mk.dispatch(X.float(), ROUTING, via=via, mesh=mesh)
    with refuses("deepep was made for the ranks of "):
        mk.dispatch(X, ROUTING, via=via)
    with refuses("deepep cannot be copied or pickled", TypeError):
        copy(via)
    sent = mk.dispatch(X, ROUTING, via=via, mesh=mesh)
    with refuses("combine over deepep needs the weights of its dispatch"):
        mk.combine(sent.rows, replace(sent, weights=sent.weights * 2))


def test_other_sizes_ranks_tokens_and_weights_are_refused():
    ranks(2)(other_uses)
