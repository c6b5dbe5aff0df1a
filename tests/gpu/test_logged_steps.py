"""A step that is logged: nothing waits for the device, and what is traced has kernels in every range."""

import statistics
import time
from functools import partial

import pytest
import torch
from test_training_step import CONFIG, Step
from waits import no_sync

import moekit as mk
from moekit import profiling, tracking


class Records(list):
    def log(self, figures, step):
        self.append((step, figures))


def logged_step():
    """Return a function that takes a step and gives its statistics, and what it updates."""
    step = Step()

    def take():
        (_, stats), step.sums = step.grad_fn(step.params, step.batch, into=step.sums)
        step.optimizer.update(step.sums, step.state, step.params)
        step.biases.copy_(mk.balance.next_bias(step.biases, stats["counts"]))
        return stats, dict(state=step.state, biases=step.biases)

    return take


def test_steps_that_are_logged_do_not_wait_and_have_their_own_numbers():
    take, records, want = logged_step(), Records(), {}
    progress = tracking.Progress(records, 6, every=2, tokens_per_step=1024, config=CONFIG, seq_len=256)
    for step in progress:
        if step <= 2:
            stats, held = take()
            progress.log(stats, held)
        else:
            with no_sync():
                stats, held = take()
                progress.log(stats, held)
        want[step] = stats["cross_entropy"].clone(), held["state"]["inner", "0", "norm"].clone()
    assert [step for step, _ in records] == [2, 4, 6]
    for step, figures in records:
        loss, norm = (x.item() for x in want[step])
        assert figures["loss"] == loss and figures["optim/grad_norm"] == norm
        assert 0 < figures["memory/peak_active_gib"] <= figures["memory/peak_reserved_gib"]
        assert figures["speed/tokens_per_second"] > 0


def test_the_rate_is_that_of_the_device_whenever_the_host_writes():
    records = Records()
    x = torch.randn(4096, 4096, device="cuda")
    stats = dict(cross_entropy=torch.zeros((), device="cuda"), counts=torch.ones(1, 4, device="cuda").long())
    progress = tracking.Progress(records, 4, every=1, tokens_per_step=1000)
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for step in progress:
        if step == 2:
            start.record()
        for _ in range(20):
            x @ x
        if step == 2:
            end.record()
        progress.log(stats)
    measured = 1000 / (start.elapsed_time(end) / 1e3)
    assert records[1][1]["speed/tokens_per_second"] == pytest.approx(measured, rel=0.2)


def test_a_record_of_every_step_costs_less_than_a_hundredth(tmp_path):
    config = mk.preset("bench-8L", n_experts=8, n_layers=4)
    params = mk.init_params(config, dtype=torch.bfloat16, device="cuda")
    tokens = torch.randint(config.vocab_size, (2, config.max_seq_len + 1), device="cuda")
    ids = torch.arange(2, device="cuda")
    batch = mk.count_tokens(mk.batch.make_batch(tokens, torch.zeros_like(tokens), ids))
    loss = partial(mk.next_token_loss, config=config, attend_across_documents=True)
    grad_fn = mk.value_and_grad(loss, has_aux=True)
    run = tracking.Run(tmp_path)
    sizes = dict(tokens_per_step=batch.tokens.numel(), config=config, seq_len=config.max_seq_len)
    n_rounds, n = 8, 4
    progress = tracking.Progress(run, n * n_rounds, every=1, **sizes)
    seconds: dict[bool, list[float]] = {False: [], True: []}
    steps = iter(progress)
    for _ in range(2):
        grad_fn(params, batch)
    for i in range(2 * n_rounds):
        logged = i % 2 == 1
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(n):
            (_, stats), _ = grad_fn(params, batch)
            if logged:
                next(steps)
                progress.log(stats)
        torch.cuda.synchronize()
        seconds[logged].append(time.perf_counter() - start)
    steps.close()
    run.finish()
    plain, logged = (statistics.median(seconds[x]) for x in (False, True))
    print(f"\n{n} steps: {plain:.4f} s, each logged {logged:.4f} s, {logged / plain - 1:+.2%}")
    assert logged <= 1.01 * plain


def test_a_trace_has_kernels_in_every_range(tmp_path):
    take = logged_step()
    for _ in profiling.traced(range(6), 2, folder=tmp_path):
        take()
    times = profiling.where_time_went(tmp_path / "trace.json")
    assert times.device == "cuda" and times.n_steps == 2
    for name in ("attention", "experts", "dispatch", "combine", "feed_forward"):
        assert times.ranges[name].forward > 0 and times.ranges[name].backward > 0, name
    assert times.ranges["optimizer"].forward > 0 and times.ranges["loss"].forward > 0
    assert times.ranges["other"].both < 0.5 * times.step
