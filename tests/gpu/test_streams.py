"""What runs beside what, on streams of a real device: values, order, and what must not wait."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from exchanges import hurried, layers_both_ways
from test_rowwise import WHERE, N
from test_training_step import Step, rowwise
from waits import no_sync

import moekit as mk
from moekit import _moe, overlap
from moekit.testing import ranks
from moekit.testing._kernels import relative_error

# Torch's warning of a parameter's gradient that is complete on another stream than it was made on.
pytestmark = pytest.mark.filterwarnings("error:.*AccumulateGrad.*")
MODES = pytest.mark.parametrize("how", ["two_batch", "shared"])
CYCLES = 20_000_000  # about ten milliseconds


class Late(torch.autograd.Function):
    """The identity, on a stream that has slept; its backward likewise."""

    @staticmethod
    def forward(ctx, x):
        torch.cuda._sleep(CYCLES)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        torch.cuda._sleep(CYCLES)
        return grad.clone()


# --- Values ---------------------------------------------------------------------------


@WHERE
def test_two_batches_over_rowwise_give_what_whole_layers_give_on_cpus(device, sizes):
    n_tokens = [5, 0, 7, 6][: min(4, max(sizes))]
    run = partial(layers_both_ways, dtype=torch.float32, n_tokens=n_tokens)
    want = ranks(len(n_tokens))(run, "all_to_all", "torch")
    options = dict(device="cuda", overlap="two_batch")
    got = ranks(len(n_tokens), device=device)(run, "rowwise", "triton", **options)
    for mine, theirs in zip(got, want, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@pytest.mark.skipif(N < 2, reason=f"needs two CUDA devices or more, there are {N}")
def test_two_batches_over_nccl_give_what_whole_layers_give_on_cpus():
    run = partial(layers_both_ways, "all_to_all", dtype=torch.float32, n_tokens=[5, 0])
    want = ranks(2)(run, kernels="torch")
    got = ranks(2, device="cuda")(run, kernels="triton", device="cuda", overlap="two_batch")
    for mine, theirs in zip(got, want, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@WHERE
def test_ranks_that_are_late_change_no_bit_of_two_batches(device, sizes):
    assert all(ranks(max(sizes), device=device)(hurried, None, 25, device="cuda", overlap="two_batch"))


def three_layers(how, via, recompute=False):
    """Return what three layers with a shared expert give, and all gradients."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape, dtype=torch.bfloat16):
        x = torch.randn(shape, generator=generator) * shape[-2] ** -0.5
        return x.to("cuda", dtype).requires_grad_()

    params = dict(
        router=draw(256, 8, dtype=torch.float32),
        experts=dict(gate_up=draw(8, 256, 256), down=draw(8, 128, 256)),
        shared=dict(gate_up=draw(256, 256), down=draw(128, 256)),
    )
    if via == "rowwise":
        via = mk.rowwise(None, n_tokens=301, d_model=256, n_experts=8, top_k=2, device="cuda")
    leaves = [params["router"], *params["experts"].values(), *params["shared"].values()]
    key = mk.random.make_key(0, "cuda")  # rounding sends no token elsewhere

    def layer(x):
        options = dict(top_k=2, via=via, assignment="random", key=key)
        return x + mk.moe(params, x, overlap=how, **options)[0]

    block = mk.remat(layer, "block" if recompute else "none")
    x = y = draw(301, 256)
    for _ in range(3):
        y = block(y)
    return [y.detach(), *torch.autograd.grad(y.float().square().sum(), [x, *leaves])]


@MODES
@pytest.mark.parametrize("via", ["local", "rowwise"])
@pytest.mark.parametrize("recompute", [False, True])
def test_whichever_stream_is_late_no_bit_changes(how, via, recompute, monkeypatch):
    want = three_layers(how, via)
    for got, whole in zip(want, three_layers("none", via), strict=True):
        assert relative_error(got, whole) < 2e-2
    originals = {name: getattr(_moe, name) for name in ("dispatch", "combine", "expert_forward")}
    slow = {
        "dispatch": lambda fn, x, *args, **options: fn(Late.apply(x), *args, **options),
        "arrival": lambda fn, *args, **options: late_rows(fn(*args, **options)),
        "combine": lambda fn, rows, sent: Late.apply(fn(Late.apply(rows), sent)),
        "expert_forward": lambda fn, experts, rows, *args, **options: Late.apply(
            fn(experts, Late.apply(rows), *args, **options)
        ),
    }

    def late_rows(sent):
        return replace(sent, rows=Late.apply(sent.rows))

    for name, run in slow.items():
        where = {"arrival": "dispatch"}.get(name, name)
        with monkeypatch.context() as patch:
            patch.setattr(_moe, where, partial(run, originals[where]))
            for got, undelayed in zip(three_layers(how, via, recompute), want, strict=True):
                assert torch.equal(got, undelayed), name
    shared = _moe._shared_expert
    monkeypatch.setattr(_moe, "_shared_expert", lambda *args: Late.apply(shared(*args)))
    for got, undelayed in zip(three_layers(how, via, recompute), want, strict=True):
        assert torch.equal(got, undelayed), "shared"


# --- Time -----------------------------------------------------------------------------


def milliseconds():
    """Return how long two batches of phases that sleep take, forward and backward."""
    run = overlap.two_batch(Late.apply, Late.apply, Late.apply)
    x = torch.randn(4, 4, device="cuda", requires_grad=True)
    for _ in range(2):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(3)]
        events[0].record()
        y = run(x).sum()
        events[1].record()
        y.backward()
        events[2].record()
        torch.cuda.synchronize()
    return [a.elapsed_time(b) for a, b in pairwise(events)]


def test_one_half_travels_while_the_other_computes_in_both_directions(monkeypatch):
    at_once = milliseconds()  # send, send and compute, fetch and compute, fetch: four sleeps of six
    monkeypatch.setattr(overlap, "_side_stream", lambda device, urgent: None)
    in_turn = milliseconds()
    assert all(a < 0.8 * b for a, b in zip(at_once, in_turn, strict=True)), (at_once, in_turn)


# --- Whole steps ----------------------------------------------------------------------


def block_of(how, recompute="none"):
    return mk.remat(partial(mk.model.transformer_block, overlap=how), recompute)


@MODES
@pytest.mark.parametrize("via", [None, rowwise], ids=["local", "rowwise"])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_nothing_waits_for_the_device(how, via, recompute):
    step = Step(block_of(how, recompute), via=via)
    for seed in range(2):
        step.feed(seed)
        step()
    with no_sync():
        step()
    assert step.loss.isfinite()


@MODES
@pytest.mark.parametrize("via", [None, rowwise], ids=["local", "rowwise"])
def test_a_captured_step_makes_the_losses_of_steps_that_are_launched(how, via):
    launched, want = Step(block_of(how), via=via), []
    for seed in range(4):
        launched.feed(seed)
        launched()
        want.append(launched.loss.item())
    captured, stream = Step(block_of(how), via=via), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for seed in range(2):
            captured.feed(seed)
            captured()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    got = []
    for seed in range(2, 4):
        captured.feed(seed)
        graph.replay()
        got.append(captured.loss.item())
    assert got == pytest.approx(want[2:], abs=1e-4)


def test_the_fastest_is_chosen_by_the_devices_clock():
    def sleep(cycles):
        torch.cuda._sleep(cycles)

    functions = {"slow": partial(sleep, CYCLES), "fast": partial(sleep, CYCLES // 10)}
    run = overlap.fastest(functions, rounds=3)
    for _ in range(8):
        run()
    assert run.choice.name == "fast" and run.choice.seconds["slow"] > 5 * run.choice.seconds["fast"] > 1e-4
