import json
import runpy
import timeit

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

import moekit as mk
from moekit import profiling
from moekit.profiling import in_range, traced, where_time_went

CONFIG = mk.ModelConfig(
    vocab_size=64, d_model=32, n_layers=2, n_dense_layers=1, d_dense=64, n_heads=2, n_kv_heads=1, d_head=16,
    n_experts=4, top_k=2, d_expert=32, d_shared=32, max_seq_len=64, balance_weight=0.01,
)  # fmt: skip
EVERY = {"attention", "balance", "combine", "dispatch", "experts", "feed_forward", "gradients", "loss"}
EVERY |= {"optimizer", "other", "route"}


def training(kernels="auto", recompute="none"):
    """Return a function that takes a step of a small model."""
    params = mk.init_params(CONFIG)
    tokens = torch.arange(128).view(2, 64) % 64
    batch = mk.count_tokens(mk.batch.make_batch(tokens, torch.zeros_like(tokens), torch.arange(2)))
    optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(1e-3)))
    state = optimizer.init(params)
    grad_fn = mk.accumulate(mk.value_and_grad(mk.next_token_loss, has_aux=True), 1)
    block = mk.remat(mk.model.transformer_block, recompute)

    def step():
        _, grads = grad_fn(params, batch, config=CONFIG, kernels=kernels, block=block)
        optimizer.update(grads, state, params)

    return step


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_every_moment_of_a_step_counts_to_one_range_forward_or_backward(tmp_path, capsys, recompute):
    step = training(recompute=recompute)
    assert list(n for n in traced(range(6), 2, folder=tmp_path) if step() is None) == list(range(6))
    times = where_time_went(tmp_path / "trace.json")
    assert times.device == "cpu" and times.n_steps == 2 and times.ranges.keys() == EVERY
    assert sum(x.both for x in times.ranges.values()) == pytest.approx(times.step, rel=1e-6)
    for name in ("attention", "combine", "dispatch", "experts", "feed_forward", "route"):
        assert times.ranges[name].forward > 0 and times.ranges[name].backward > 0, name
    assert times.ranges["optimizer"].backward == 0 and times.ranges["optimizer"].forward > 0
    assert times.ranges["gradients"].backward > 0
    printed = capsys.readouterr().out
    assert str(times) in printed and f"trace: {tmp_path / 'trace.json'}" in printed


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *grads):
        with in_range("inner"):
            return 2 * ctx.saved_tensors[0] * grads[0]


def test_a_backward_counts_to_the_range_whose_forward_it_differentiates(tmp_path):
    """Large products in one range each, of which torch runs the backward outside of all."""
    x = torch.randn(600, 600, requires_grad=True)

    def step():
        with in_range("one"):
            y = x @ x  # two products backward
        with in_range("many"):
            for _ in range(4):
                y = (y @ x).relu()
        with in_range("own"):
            y = Squared.apply(y)
        y.sum().backward()

    step()  # the first products take longer
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        profiler.step_num = 0
        with torch.profiler.record_function("ProfilerStep#0"):
            step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    ranges = where_time_went(tmp_path / "trace.json").ranges
    assert ranges["many"].backward > ranges["one"].backward > 0
    assert ranges["inner"].backward > 0 == ranges["inner"].forward
    assert ranges["many"].both > ranges["one"].both > ranges.get("other").both


def span(name, ts, dur, cat="cpu_op", tid=1, **args):
    return dict(ph="X", cat=cat, name=name, pid=1, tid=tid, ts=ts, dur=dur, args=args)


def kernel(ts, dur, correlation, stream=7):
    return span("k", ts, dur, cat="kernel", tid=stream, correlation=correlation)


def launch(ts, correlation, tid=1, **names):
    names = dict(name="cudaLaunchKernel", cat="cuda_runtime") | names
    return span(**names, ts=ts, dur=1, tid=tid, correlation=correlation)


def test_kernels_count_to_the_range_that_launched_them_also_from_a_backward_on_another_thread(tmp_path):
    seq = {"Sequence number": 5, "Fwd thread id": 0}
    back = {"Sequence number": 5, "Fwd thread id": 1}
    events = [
        span("ProfilerStep#3", 0, 100, cat="user_annotation"),
        span("mk.experts", 10, 20, cat="user_annotation"),
        span("aten::mm", 12, 10, **seq),
        launch(13, 1),
        span("mk.dispatch", 24, 4, cat="user_annotation"),
        launch(25, 2, name="cuLaunchKernelEx", cat="cuda_driver"),
        span("nccl:all_reduce", 40, 10, cat="user_annotation"),
        launch(41, 3),
        # Another thread's node of the same number, made there, is not that of the forward.
        span("aten::mm", 45, 2, tid=2, **seq),
        span("autograd::engine::evaluate_function: MmBackward0", 50, 20, tid=2, **back),
        span("MmBackward0", 51, 10, tid=2, **back),
        launch(52, 4, tid=2),
        launch(65, 5, tid=2),  # around the node: adding up what arrives
        span("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", 75, 10, tid=2),
        span("mk.gradients", 76, 5, cat="user_annotation", tid=2),
        launch(77, 6, tid=2),
        dict(ph="s", cat="fwdbwd", name="fwdbwd", id=1, pid=1, tid=1, ts=12),
        dict(ph="f", cat="fwdbwd", name="fwdbwd", id=1, pid=1, tid=2, ts=51, bp="e"),
        kernel(0, 5, 99),  # launched before the trace
        kernel(1000, 3000, 1),
        kernel(4000, 1000, 2),
        kernel(4500, 1500, 3, stream=8),  # beside the one before
        kernel(7000, 2000, 4),
        kernel(9000, 500, 5),
        kernel(9500, 500, 6),
    ]
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    times = where_time_went(tmp_path / "trace.json")
    assert times.device == "cuda" and times.step == 9.0 and times.idle == 1.0
    assert times.ranges == {
        "experts": (3.0, 2.5),
        "other": (1.5, 0.0),
        "dispatch": (1.0, 0.0),
        "gradients": (0.0, 0.5),
    }
    assert [line.split() for line in str(times).splitlines()[2:]] == [
        ["experts", "3.00", "2.50", "61.1%"],
        ["other", "1.50", "0.00", "16.7%"],
        ["dispatch", "1.00", "0.00", "11.1%"],
        ["gradients", "0.00", "0.50", "5.6%"],
        ["idle", "1.00", "11.1%"],
    ]


def test_a_trace_without_steps_is_refused(tmp_path):
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": [span("aten::mm", 0, 1)]}))
    with pytest.raises(ValueError, match=r"needs a trace with steps of torch.profiler, got none in"):
        where_time_went(tmp_path / "trace.json")


def test_nothing_is_traced_unless_asked_for_and_a_run_that_is_too_short_says_so(tmp_path, capsys):
    steps = range(4)
    assert traced(steps, 0, folder=tmp_path) is steps
    with pytest.raises(ValueError, match="needs n >= 0 steps to trace, got -1"):
        traced(steps, -1, folder=tmp_path)
    assert list(traced(range(3), 1, folder=tmp_path)) == [0, 1, 2]
    assert "no step was traced: a run has to go on after its first 3" in capsys.readouterr().out
    assert not (tmp_path / "trace.json").exists()


def test_leaving_a_traced_loop_ends_the_profiler_and_the_steps(tmp_path):
    ended = []

    def steps():
        try:
            yield from range(9)
        finally:
            ended.append(True)

    for step in traced(steps(), 5, folder=tmp_path):
        if step == 4:
            assert torch.autograd._profiler_enabled()
            break
    assert ended and not torch.autograd._profiler_enabled()


def test_a_name_costs_less_than_five_microseconds_where_no_profiler_runs():
    plain = runpy.run_path(profiling.__file__)["in_range"]  # without checks of its arguments

    def use():
        with plain("x"):
            pass

    seconds = min(timeit.repeat(use, number=2000, repeat=7)) / 2000
    print(f"{seconds * 1e6:.2f} us")
    assert seconds < 5e-6


def test_names_leave_a_compiled_function_whole():
    @profiling.ranged("outer")
    def fn(x):
        with in_range("inner"):
            return x.sin()

    torch.compiler.reset()
    x = torch.ones(3)
    compiled = torch.compile(fn, backend="eager", fullgraph=True)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        assert torch.equal(compiled(x), x.sin())
    assert not [event for event in profiler.events() if event.name.startswith(profiling.PREFIX)]
