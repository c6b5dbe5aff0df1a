"""The benchmarks at tiny shapes on a CPU: what they write, and what they say of candidates that fail."""

import contextlib
import json
import re
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from scripts import as_main, on_ranks

import moekit as mk
from moekit import _moe
from moekit.kernels import grouped_mm, quantize
from moekit.testing import ranks

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
import dispatch
import gemm_values
import measure
import moe_kernels
import moe_layer
import overlap
import peers
import precision
import set_ups

QUICK = dict(rounds=2, slot=1e-3, device="cpu")


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_shares_are_of_ceilings_measured_in_the_same_rounds():
    results = measure.measure(
        {
            "slow": measure.Candidate(run=lambda: time.sleep(4e-3), flops=1e6, tokens=8),
            "fast": measure.Candidate(run=lambda: time.sleep(1e-3), bytes=1e3, calls=2),
        },
        **QUICK,
    )
    dense, copy, slow, fast = results
    assert [r.name for r in results] == [measure.DENSE, measure.COPY, "slow", "fast"]
    assert slow.seconds_p10 <= slow.seconds <= slow.seconds_p90 and slow.seconds >= 4e-3
    assert slow.n_timed == 6  # three at least, in each of two rounds
    assert slow.of_dense == pytest.approx(1e6 / slow.seconds / dense.flops_per_second)
    assert slow.tokens_per_second == pytest.approx(8 / slow.seconds) and slow.of_copy is None
    assert 0.5e-3 <= fast.seconds < slow.seconds  # of one call of two in a run
    assert fast.of_copy == pytest.approx(1e3 / fast.seconds / copy.bytes_per_second)


def test_each_round_starts_with_another_candidate():
    order = []
    names = "abcd"  # after the two ceilings
    runs = {name: measure.Candidate(run=lambda name=name: order.append(name)) for name in names}
    measure.measure(runs, rounds=3, slot=1e-4, device="cpu")
    turns = "".join(name for i, name in enumerate(order) if i == 0 or order[i - 1] != name)
    assert turns == "abcd" + "abcd" + "cdab"


def test_a_candidate_is_timed_once_it_has_run_for_half_of_its_slot(monkeypatch):
    now, taken = time.perf_counter, []
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now() + sum(taken))

    def run():  # slow at first, as on a device whose clock has not settled
        taken.append(2e-3 if sum(taken) < 0.05 else 1e-3)

    settles = measure.measure({"settles": measure.Candidate(run=run)}, rounds=1, slot=0.2, device="cpu")[-1]
    assert settles.n_timed > 50 and settles.seconds_p90 < 2e-3


def test_a_candidate_that_raises_is_reported_and_the_others_are_timed():
    calls = iter(range(100))

    def raises_later():
        if next(calls) > 5:
            raise RuntimeError("out of\n  luck")

    results = measure.measure(
        {"raises": measure.Candidate(run=raises_later), "runs": measure.Candidate(run=lambda: None)},
        errors={"absent": "ModuleNotFoundError: no such peer"},
        **QUICK,
    )
    by_name = {r.name: r for r in results}
    assert by_name["raises"].error == "RuntimeError: out of luck" and by_name["raises"].seconds is None
    assert by_name["runs"].n_timed > 0 and by_name["runs"].error is None
    printed = measure.table(results)
    assert "raises         FAILED  RuntimeError: out of luck" in printed
    assert "absent         FAILED  ModuleNotFoundError: no such peer" in printed


def failures_of_ranks():
    """Return errors, and names of what was timed, where some candidates fail on rank 1 alone."""
    sys.path.append(str(BENCHMARKS))
    import measure

    rank, calls, x = dist.get_rank(), {"first": 0, "third": 0}, torch.ones(1)

    def fails(which, at):
        calls[which] += 1
        if rank == 1 and calls[which] >= at:
            raise RuntimeError(f"no {which} call")

    runs = {
        "unmade": lambda: dist.all_reduce(x),  # on rank 0, which would wait in it for ever
        "first": partial(fails, "first", 1),
        "third": partial(fails, "third", 3),
        "meets": lambda: dist.all_reduce(x),
    }
    candidates = {name: measure.Candidate(run=run) for name, run in runs.items()}
    errors = {}
    if rank == 1:
        del candidates["unmade"]
        errors["unmade"] = "OutOfMemoryError: no room"
    results = measure.measure(candidates, errors=errors, rounds=3, slot=1e-3, device="cpu")
    return {r.name: r.error for r in results}


def test_what_fails_on_one_rank_is_measured_on_none_and_waits_for_nobody():
    found = ranks(2, timeout=60)(failures_of_ranks)
    assert (
        found[0]
        == found[1]
        == {
            **dict.fromkeys((measure.DENSE, measure.COPY, "meets")),
            "unmade": "on rank 1: OutOfMemoryError: no room",
            "first": "on rank 1: RuntimeError: no first call",
            "third": "on rank 1: RuntimeError: no third call",
        }
    )


def test_a_device_that_a_candidate_broke_ends_neither_the_run_nor_the_trace(monkeypatch, capsys):
    def broken():
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "empty_cache", broken)
    monkeypatch.setattr(torch.profiler, "profile", lambda **_: contextlib.nullcontext())
    measure.free("cuda")
    assert measure.idle_share(broken) is None
    assert "no idle share: RuntimeError: CUDA error: an illegal" in capsys.readouterr().out


def test_the_layer_is_checked_and_timed_beside_peers(tmp_path, monkeypatch, capsys):
    def wrong(weights, top_k):
        layer, parameters = moe_layer.stock(weights, top_k)
        return lambda x: 1.2 * layer(x), parameters

    def raises(weights, top_k):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setitem(peers.LAYERS, "wrong", wrong)
    monkeypatch.setitem(peers.LAYERS, "raises", raises)
    good = ("moekit-auto", "stock", "qwen3")
    cfg = moe_layer.Config(
        shapes=("192x64x8", "192x64x32:dirichlet2"),
        candidates=(*good, "wrong", "raises"),
        json=tmp_path / "layer.json",
        plot=tmp_path / "layer.png",
        **QUICK,
    )
    moe_layer.main(cfg)
    record = json.loads(cfg.json.read_text())
    assert record["environment"]["torch"] == torch.__version__ and "torchtitan" in record["environment"]
    even, skewed = record["cases"]
    assert (skewed["tokens"], skewed["d_model"], skewed["n_experts"]) == (192, 64, 32)
    assert even["rows_max_over_mean"] < 1.5 < skewed["rows_max_over_mean"]
    for case in (even, skewed):
        results = {r["name"]: r for r in case["results"]}
        assert set(case["checks"]) == set(good)
        for name in good:
            seconds = results[name]["seconds"]
            assert results[name]["flops_per_second"] == pytest.approx(18 * 192 * 4 * 64 * 64 / seconds)
            assert results[name]["error"] is None and results[name]["of_dense"] > 0
        assert results["wrong"]["error"].startswith("AssertionError: wrong output")
        assert results["raises"]["error"] == "OutOfMemoryError: CUDA out of memory"
    assert cfg.plot.stat().st_size > 0
    printed = capsys.readouterr().out
    assert "FAILED  AssertionError: wrong output" in printed and "max/mean" in printed


def test_a_shape_without_room_for_the_layer_is_reported_and_the_next_is_measured(
    tmp_path, monkeypatch, capsys
):
    make_layer = moe_layer.make_layer

    def no_room_for_32(shape, *args):
        if shape.n_experts == 32:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return make_layer(shape, *args)

    monkeypatch.setattr(moe_layer, "make_layer", no_room_for_32)
    cfg = moe_layer.Config(
        shapes=("16x16x32", "16x16x8"), candidates=("stock",), json=tmp_path / "layer.json",
        plot=tmp_path / "layer.png", **QUICK,
    )  # fmt: skip
    moe_layer.main(cfg)
    large, small = json.loads(cfg.json.read_text())["cases"]
    assert [r["error"] for r in large["results"]] == ["OutOfMemoryError: CUDA out of memory"]
    assert [r["error"] for r in small["results"]] == [None] * 3
    assert "16x16x32  FAILED  OutOfMemoryError" in capsys.readouterr().out


def test_a_program_fails_with_a_shape_of_which_no_candidate_was_measured_and_for_no_single_one():
    ceiling, good = (measure.Result(name=name, seconds=1.0) for name in (measure.DENSE, "good"))
    bad = measure.Result(name="bad", error="ModuleNotFoundError: no such peer")
    fine = dict(title="fine", results=[ceiling, good, bad])
    measure.end(dict(cases=[fine]))
    measure.end(dict(parts=dict(fine=[ceiling, good, bad])))
    for results in ([ceiling, bad], [bad]):
        with pytest.raises(SystemExit, match="nothing could be measured of whole; the reasons are above"):
            measure.end(dict(cases=[fine, dict(title="whole", results=results)]))
    with pytest.raises(SystemExit, match="measured of whole"):
        measure.end(dict(parts=dict(fine=[good], whole=[bad])))


def test_unknown_names_and_shapes_are_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(moe_layer, "run_shape", None)
    monkeypatch.setattr(moe_kernels, "run_shape", None)
    with pytest.raises(
        SystemExit, match="no candidate is called 'nobody', 'moekit'; known are 'moekit-auto', "
    ):
        moe_layer.main(moe_layer.Config(candidates=("stock", "nobody", "moekit"), device="cpu"))
    for text in ("64x64x0", "-1x64x8", "1.5x64x8"):
        with pytest.raises(SystemExit, match=f"a shape is TOKENSxD_MODELxEXPERTS, got '{text}'"):
            moe_kernels.main(moe_kernels.Config(shapes=(text,), device="cpu"))
    for module in (moe_layer, moe_kernels):
        with pytest.raises(SystemExit, match="a shape is TOKENSxD_MODELxEXPERTS, got '64x64'"):
            module.main(module.Config(shapes=("16x16x8", "64x64"), device="cpu"))
    with pytest.raises(SystemExit, match=r"a routing is random, .*, got 'skewed'"):
        moe_layer.main(moe_layer.Config(shapes=("16x16x8:skewed",), device="cpu"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ["--candidates", "stock"],
            "'stock'; known are 'moekit', 'stock compiled', 'stock compiled, head kept', 'stock eager', ",
        ),
        (
            ["--parts", "whole_step", "--candidates", "torchtitan"],
            "part whole_step needs a candidate of 'moekit', ",
        ),
        *(
            (["--parts", "whole_step", f"--{name}", "0"], f"a benchmark needs --{name} of at least 1, got 0")
            for name in ("rounds", "batch-size", "seq-len", "n-microbatches")
        ),
        (["--parts"], "a benchmark needs --parts of one or more, got none"),
    ],
)
def test_a_step_with_unknown_candidates_or_nothing_to_measure_is_refused(options, says):
    with pytest.raises(SystemExit, match=says):
        as_main(BENCHMARKS / "train_step.py", *options)


def test_a_record_that_could_not_be_written_is_refused_before_anything_is_measured(tmp_path):
    for option in ("json", "plot"):
        with pytest.raises(SystemExit, match=f"needs --{option} to be a file .*, got {tmp_path}"):
            moe_layer.main(moe_layer.Config(device="cpu", **{option: tmp_path}))


def test_no_rounds_no_device_and_more_experts_a_token_than_there_are_are_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for module in (moe_layer, moe_kernels, dispatch):
        with pytest.raises(SystemExit, match="needs --rounds of at least 1, got 0"):
            module.main(module.Config(rounds=0))
    for module in (moe_layer, moe_kernels):
        with pytest.raises(SystemExit, match="--device cuda needs CUDA, and torch finds none"):
            module.main(module.Config(device="cuda"))
        with pytest.raises(SystemExit, match="a benchmark needs --shapes of one or more, got none"):
            module.main(module.Config(shapes=(), device="cpu"))
    with pytest.raises(SystemExit, match=r"--free needs from 1 to 2 of .* processors, got \[0, 3\]"):
        overlap.main(overlap.Config(free=(1, 0, 3), device="cpu"))
    with pytest.raises(SystemExit, match="--d-expert and --d-shared need 1 or more, got 4096 and 0"):
        overlap.main(overlap.Config(d_shared=0, device="cpu"))
    with pytest.raises(SystemExit, match=r"1 to the number of experts, 8 of the layer and 128 of .*, got 9"):
        dispatch.main(dispatch.Config(top_k=9))


@pytest.mark.parametrize(
    ("script", "option", "known"),
    [
        (
            "dispatch.py",
            ["--transports", "pigeon"],
            "'local', 'all_to_all', 'rowwise', 'rowwise, float8', 'deepep'",
        ),
        ("overlap.py", ["--transports", "pigeon"], "'local', 'all_to_all', 'rowwise'"),
        ("moe_kernels.py", ["--kernels", "cuda"], "'auto', 'torch', 'triton'"),
        ("train_step.py", ["--parts", "forward"], "'forward_backward', 'experts', 'whole_step'"),
    ],
)
def test_unknown_transports_kernels_and_parts_are_refused_with_those_known(script, option, known, capsys):
    with pytest.raises(SystemExit):
        as_main(BENCHMARKS / script, *option)
    said = " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert f"invalid choice '{option[1]}'" in said and known in said


def test_a_toy_step_leaves_out_what_is_compiled_on_a_cpu_and_a_part_that_fails_ends_no_other(tmp_path):
    file = tmp_path / "step.json"
    options = "--toy --more-experts -1 --batch-size 1 --n-microbatches 2 --rounds 1 --slot 0.001".split()
    command = [sys.executable, str(BENCHMARKS / "train_step.py"), *options, "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stderr
    assert done.stderr.endswith("nothing could be measured of experts; the reasons are above\n")
    record = json.loads(file.read_text())
    assert record["config"]["seq_len"] == 128
    found = {
        part: [(r["name"], r["error"]) for r in results if "ceiling" not in r["name"]]
        for part, results in record["parts"].items()
    }
    assert found == {
        "forward_backward": [("moekit", None), ("stock eager", None)],
        "experts": [("experts", "ValueError: ModelConfig needs n_experts >= 1, got -1")],
        "whole_step": [("moekit", None)],
    }


def test_each_role_of_a_policy_has_a_row_with_its_time_and_what_it_loses(tmp_path, monkeypatch, capsys):
    make_model = precision.make_model  # of two layers it is made here: one dense, one of experts
    monkeypatch.setattr(
        precision, "make_model", lambda *args, **kw: replace(make_model(*args, **kw), n_layers=2)
    )
    cfg = precision.Config(
        toy=True, emulate=True, batch_size=1, seq_len=32, n_microbatches=2, rounds=1, slot=1e-3, device="cpu",
        json=tmp_path / "precision.json", plot=tmp_path / "precision.png",
    )  # fmt: skip
    precision.main(cfg)
    record = json.loads(cfg.json.read_text(), parse_constant=pytest.fail)
    parts = {
        part: {r["name"]: r for r in results if "ceiling" not in r["name"]}
        for part, results in record["parts"].items()
    }
    assert list(parts) == ["step", "layer 256x64x8", "whole_step"]
    failed = {name: r["error"] for part in parts.values() for name, r in part.items() if r["error"]}
    assert failed == {"torchao": "ValueError: torchao's kernels need CUDA, got cpu"}

    rows = parts["step"]
    found = [role for name in precision.ROLES for role in rows[name]["more"]["roles"]]
    assert set(found) == set(precision.precision.ROLES) - {"dispatch_payload"}
    for name, row in rows.items():
        assert row["seconds"] > 0 and row["more"]["of_bf16"] > 0
        if name == "bf16":
            assert "sqnr_db" not in row["more"] and row["more"]["of_bf16"] == 1
        else:
            assert 5 < row["more"]["sqnr_db"]["all"] < 60
    held = {name: row["more"]["held_bytes"] for name, row in rows.items()}
    assert held["all, hollow parameters"] < held["saved_activations"] == held["bf16"] < held["all"]
    # Of the weights' gradients of experts alone, nothing else is rounded.
    experts, *others = (rows["experts_weight_grad"]["more"]["sqnr_db"][x] for x in ("experts", "head", "ffn"))
    assert experts < 60 and all(x is None or x > 90 for x in others)
    both = parts["layer 256x64x8"]["all, weight gradients too"], parts["layer 256x64x8"]["all"]
    assert both[0]["more"]["sqnr_db"]["down"] < both[1]["more"]["sqnr_db"]["down"]
    assert "sqnr_db" not in parts["whole_step"]["all"]["more"] and parts["whole_step"]["all"]["seconds"] > 0
    assert cfg.plot.stat().st_size > 0
    printed = capsys.readouterr().out
    assert "worst dB" in printed and "torchao" in printed


def test_a_policy_is_compared_under_known_names_and_needs_units_or_emulation():
    with pytest.raises(SystemExit, match="no candidate is called 'router'; known are 'bf16', 'attention_pro"):
        precision.main(precision.Config(candidates=("all", "router"), device="cpu"))
    with pytest.raises(SystemExit, match="a shape is TOKENSxD_MODELxEXPERTS, got '64x64'"):
        precision.main(precision.Config(shapes=("64x64",), device="cpu"))
    cfg = precision.Config(toy=True, parts=("layer",), candidates=("all",), rounds=1, slot=1e-3, device="cpu")
    (results,) = precision.main(cfg)["parts"].values()
    errors = {r.name: r.error for r in results if r.error}
    assert list(errors) == ["all"] and "emulate=True" in errors["all"]


def test_ratios_of_signal_to_noise_are_those_of_each_group_and_of_all():
    want = torch.randn(3, 64, 64, dtype=torch.bfloat16)
    noise = 2.0 ** torch.randint(-12, -8, want.shape) * want.sign()
    pairs = {"noisy": [(want.float() + noise, want)], "exact": [(want[0], want[0])]}
    found = precision.decibels(pairs)
    signal, more = want.float().square().sum(), want[0].float().square().sum()
    assert found["noisy"] == pytest.approx(10 * (signal / noise.square().sum()).log10().item(), abs=1e-2)
    assert found["all"] - found["noisy"] == pytest.approx(10 * (1 + more / signal).log10().item(), abs=1e-2)
    assert found["exact"] is None
    with pytest.raises(ValueError, match="what came is not finite in bad, all"):
        precision.decibels({"bad": [(want * torch.nan, want)]})


def test_kernels_that_scatter_are_told_from_those_that_only_convert():
    names = dict(_quantize=1, _scatter_quantized=2, _scatter=4, _backward=1)
    seconds = names | {"void at::native::float8_copy_kernel_cuda": 2}
    assert precision.converting(seconds) == dict(converting=0.3, converting_or_scattering=0.5)


def test_every_kernel_that_rounds_counts_as_converting():
    launched = re.findall(r"(\w+)\[\(", Path(quantize.__file__).read_text())
    assert len(launched) == 4
    for name in launched:
        assert precision.converting({name: 1.0, "product": 3.0})["converting"] == 0.25


def test_what_surrounds_torchaos_product_is_a_layer():
    weights, x, _ = moe_layer.make_layer(moe_layer.parse("96x32x8"), 3, "cpu")
    routing = moe_layer.mk.route(weights["router"], x, top_k=3)
    ends = []

    def product(rows, w, offsets):
        ends.append(offsets)
        return torch.nn.functional.grouped_mm(rows, w, offs=offsets)

    args = (x, routing.expert_ids, routing.weights, routing.counts, weights["gate_up"], weights["down"])
    want = moe_layer.moekit(weights, 3, kernels="torch")[0](x)
    torch.testing.assert_close(peers.padded_experts(*args, product=product), want, atol=2e-2, rtol=2e-2)
    assert len(ends) == 2 and not any((x % 16).any() for x in ends)


def test_results_name_the_commit_and_whether_the_code_differs_from_it(tmp_path, monkeypatch):
    monkeypatch.delenv("GIT_COMMIT", raising=False)
    assert measure.commit(tmp_path) == dict(commit=None, dirty=None)
    with monkeypatch.context() as of_a_copy:
        of_a_copy.setenv("GIT_COMMIT", "given")
        assert measure.commit(tmp_path) == dict(commit="given", dirty=None)

    def git(*args):
        by = ["-c", "user.name=a", "-c", "user.email=a@b"]
        done = subprocess.run(["git", "-C", str(tmp_path), *by, *args], capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return done.stdout.strip()

    git("init")
    (tmp_path / "moekit").mkdir()
    (tmp_path / "moekit" / "a.py").write_text("1")
    git("add", ".")
    git("commit", "-m", "one")
    found = dict(commit=git("rev-parse", "HEAD"), dirty=False)
    (tmp_path / "results.json").write_text("{}")  # is no code
    assert measure.commit(tmp_path) == found
    (tmp_path / "moekit" / "a.py").write_text("2")
    assert measure.commit(tmp_path) == found | dict(dirty=True)
    assert {"commit", "dirty"} <= measure.environment("cpu").keys()


def test_group_sizes_are_those_of_the_distribution():
    shape = moe_layer.parse("4096x16x32:dirichlet2")
    weights, x, _ = moe_layer.make_layer(shape, 4, "cpu")
    wanted = np.random.default_rng(0).dirichlet(32 * [2.0])
    counts = moe_layer.mk.route(weights["router"], x, top_k=4).counts
    assert (counts / (4 * 4096) - torch.tensor(wanted)).abs().max() < 2e-3


def test_kernels_are_timed_by_the_bytes_that_they_move(tmp_path):
    cfg = moe_kernels.Config(
        shapes=("32x16x8",), json=tmp_path / "kernels.json", plot=tmp_path / "kernels.png", **QUICK
    )
    moe_kernels.main(cfg)
    (case,) = json.loads(cfg.json.read_text())["cases"]
    results = {r["name"]: r for r in case["results"]}
    assert len(results) == 12 and all(r["error"] is None for r in results.values())
    moved = results["scatter"]["bytes_per_second"] * results["scatter"]["seconds"]
    assert moved == pytest.approx((1 + 4) * 32 * 16 * 2 + 32 * 4 * 8)
    assert results["scatter"]["of_copy"] > 0
    assert cfg.plot.stat().st_size > 0


@pytest.mark.parametrize("product", ["forward", "weight_grad"])
def test_a_product_is_timed_on_all_values_with_the_reason_why_there_is_no_clock(product, tmp_path, capsys):
    file = tmp_path / "rows.npy"
    np.save(file, torch.randn(7, 16).numpy())
    cfg = gemm_values.Config(
        shapes=("32x16x4", "8x24x2"), product=product, recorded=file, json=tmp_path / "values.json",
        plot=tmp_path / "values.png", **QUICK,
    )  # fmt: skip
    gemm_values.main(cfg)
    record = json.loads(cfg.json.read_text())
    assert "nvidia-ml-py" in record["environment"] and "commit" in record["environment"]
    assert record["config"]["recorded"] == "rows.npy"  # without its folder
    first, second = ({r["name"]: r for r in case["results"]} for case in record["cases"])
    names = {"zeros", "constant", "gaussian", "trained", "recorded"}
    assert first.keys() == names | {measure.DENSE, measure.COPY}
    for name in names:
        seconds = first[name]["seconds"]
        assert first[name]["flops_per_second"] == pytest.approx(2 * 128 * 16 * 32 / seconds)
        assert first[name]["more"]["of_gaussian"] == pytest.approx(seconds / first["gaussian"]["seconds"])
        assert first[name]["more"]["not_read"] == "no GPU: --device cpu"
    assert second["recorded"]["error"].endswith("rows.npy needs rows of 24 features, got (7, 16)")
    assert cfg.plot.stat().st_size > 0
    assert "clock and power not read" in capsys.readouterr().out


def test_values_are_what_they_are_called(tmp_path):
    file = tmp_path / "rows.safetensors"
    save_file(dict(rows=torch.arange(10.0).view(5, 2), scale=torch.ones(2)), file)
    cfg = gemm_values.Config(recorded=file, device="cpu")
    shape, other = (4096, 1000), (2, 1000, 64)
    values = {name: gemm_values.operands(cfg, name, shape, other) for name in cfg.values}
    assert not any(x.any() for x in values["zeros"]) and all((x == 1).all() for x in values["constant"])
    rows, weights = values["gaussian"]
    assert rows.std().item() == pytest.approx(1, rel=0.01)
    assert weights.std().item() == pytest.approx(1000**-0.5, rel=0.02)
    rows, again = (gemm_values.operands(cfg, "trained", shape, other)[0].float() for _ in range(2))
    assert torch.equal(rows, again)
    assert (rows.square().mean(1).sqrt() - 1).abs().max() < 0.02
    of_channels = rows.square().mean(0).sqrt()
    assert of_channels.max() > 8 * of_channels.median()
    recorded, _ = gemm_values.operands(cfg, "recorded", (7, 2), (1, 2, 4))
    assert recorded.float().tolist() == [[2 * (i % 5), 2 * (i % 5) + 1] for i in range(7)]


def test_clock_and_power_are_read_once_a_slot_has_settled(monkeypatch):
    monkeypatch.setattr(gemm_values, "SETTLED", 0.02)
    monkeypatch.setattr(gemm_values, "EVERY", 0.002)
    start, clocks = time.perf_counter(), []

    def clock_rate(device):
        clocks.append(0 if time.perf_counter() - start < 0.02 else 1500)  # a slot begins later
        return clocks[-1]

    monkeypatch.setattr(torch.cuda, "clock_rate", clock_rate)
    monkeypatch.setattr(torch.cuda, "power_draw", lambda device: 700_000)
    sensors = gemm_values.Sensors("cuda")
    with sensors.watch("long"):
        while len(sensors.watts.get("long", [])) < 3 and time.perf_counter() - start < 30:
            time.sleep(0.002)
    monkeypatch.setattr(gemm_values, "SETTLED", 60)
    with sensors.watch("short"):
        time.sleep(0.01)
    long = sensors.of("long")
    assert (long["sm_mhz"], long["watts"]) == (1500, 700) and 3 <= long["n_readings"] < len(clocks)
    assert sensors.of("short") == dict(not_read="no slot longer than 60 s")


def test_what_cannot_be_read_of_a_gpu_is_told_and_ends_nothing(monkeypatch):
    def missing(device):
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed")

    monkeypatch.setattr(torch.cuda, "clock_rate", missing)
    monkeypatch.setattr(gemm_values, "EVERY", 0.001)
    sensors = gemm_values.Sensors("cuda")
    with sensors.watch("any"):
        time.sleep(0.01)
    assert sensors.of("any") == dict(
        not_read="ModuleNotFoundError: nvidia-ml-py does not seem to be installed"
    )


def test_recorded_rows_that_are_none_are_refused_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(gemm_values, "run_cases", None)
    text, two, empty = (tmp_path / name for name in ("rows.safetensors", "two.safetensors", "empty.npy"))
    empty.touch()
    text.write_text("text")
    save_file(dict(a=torch.ones(2, 3), b=torch.ones(2, 3)), two)
    np.save(tmp_path / "ids.npy", torch.ones(2, 3, dtype=torch.int64).numpy())
    for file, says in (
        (text, "--recorded needs an .npy or safetensors file, got "),
        (empty, "--recorded needs an .npy or safetensors file, got "),
        (two, r"--recorded needs one matrix of floats \(n, d\), got {'a': 'torch.float32 \(2, 3\)', 'b'"),
        (tmp_path / "ids.npy", "got {'array': 'torch.int64"),
        (tmp_path / "none.npy", "No such file"),
    ):
        with pytest.raises(SystemExit, match=says):
            gemm_values.main(gemm_values.Config(recorded=file, device="cpu"))


def test_products_leave_the_processors_that_were_asked_for(monkeypatch):
    cpu, seen = torch.device("cpu"), []
    monkeypatch.setattr(mk, "expert_forward", lambda *args, **o: seen.append(grouped_mm.n_processors(cpu)))
    cfg = overlap.Config(d_expert=8, d_shared=8, top_k=2, device="cpu", free=(1, 2))
    x = torch.randn(6, 4)
    params = overlap.make_layer(cfg, 4, 4, 1, x)
    runs = overlap.parts(cfg, "local", "local", params, x, None)
    for name in ("compute, local", "compute 1 free, local", "at once 2 free, local"):
        runs[name].run()
    assert seen == [3, 2, 1]  # of the interpreter


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_overlap_says_what_was_hidden_and_how_long_layers_take_in_each_way(n_ranks, tmp_path):
    options = "--shapes 16x8x4 32x16x4 --d-expert 8 --d-shared 8 --top-k 2 --rounds 1 --slot 0.001".split()
    options += ["--free", "1"]
    files = tmp_path / "overlap.json", tmp_path / "overlap.png"
    on_ranks(n_ranks, BENCHMARKS / "overlap.py", *options, "--json", files[0], "--plot", files[1])
    record = json.loads(files[0].read_text())
    assert "quack-kernels" in record["environment"] and files[1].stat().st_size > 0
    titles = [f"{shape}, {n_ranks} ranks" for shape in ("16x8x4", "32x16x4")]
    assert [case["title"] for case in record["cases"]] == titles
    for case in record["cases"]:
        results = {r["name"]: r for r in case["results"]}
        assert not any(r["error"] for r in results.values())
        assert ("at once, local" in results) == (n_ranks == 1)
        for via in ("all_to_all", "rowwise"):
            seconds = {name: r["seconds"] for name, r in results.items()}
            shorter = min(seconds[f"compute, {via}"], seconds[f"communicate, {via}"])
            assert f"compute 1 free, {via}" in results
            for way in ("at once", "at once 1 free"):
                gained = seconds[f"in turn, {via}"] - seconds[f"{way}, {via}"]
                assert results[f"{way}, {via}"]["more"]["hidden"] == pytest.approx(gained / shorter)
            for way in ("none", "two_batch", "two_batch in turn", "shared"):
                found, none = results[f"layer {way}, {via}"], results[f"layer none, {via}"]
                assert found["more"]["of none"] == pytest.approx(found["seconds"] / none["seconds"])
    last = results["communicate, rowwise"]
    moved = last["bytes_per_second"] * last["seconds"] / (16 * 4)  # rows
    assert moved == pytest.approx(2 * (32 + 64)) if n_ranks == 1 else 0 < moved < 2 * 64


def test_two_batches_in_turn_are_two_batches_without_a_stream_of_their_own(monkeypatch):
    asked, counted, count = [], [], _moe.two_batch
    monkeypatch.setattr(overlap.overlap, "_side_stream", lambda device, urgent: asked.append(urgent))
    monkeypatch.setattr(_moe, "two_batch", lambda *fns, **more: counted.append(1) or count(*fns, **more))
    cfg, x = overlap.Config(d_expert=8, d_shared=8, top_k=2, device="cpu"), torch.randn(6, 4)
    params = overlap.make_layer(cfg, 4, 4, 1, x)
    runs = overlap.layers(cfg, "local", dict.fromkeys(("none", "two_batch"), "local"), params, x, None)
    runs["layer none, local"].run()
    runs["layer two_batch in turn, local"].run()
    assert len(counted) == 1 and not asked
    runs["layer two_batch, local"].run()
    assert len(counted) == 2 and asked


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_dispatch_compares_transports_on_any_number_of_ranks(n_ranks, tmp_path):
    sizes = "--tokens 32 --d-model 16 --d-expert 8 --n-experts 4 --rounds 1 --slot 0.001".split()
    sizes += ["--transports", "all_to_all", "rowwise", "rowwise, float8", "deepep"]  # the last one needs GPUs
    file = tmp_path / "dispatch.json"
    on_ranks(n_ranks, BENCHMARKS / "dispatch.py", *sizes, "--json", file)
    record = json.loads(file.read_text())
    results = {r["name"]: r for r in record["results"]}
    failed = {name for name, r in results.items() if r["error"]}
    assert record["ranks"] == n_ranks
    assert failed == {"dispatch, deepep", "combine, deepep", "layer, deepep"}
    wanted = [
        f"{what}, {via}"
        for what in ("dispatch", "combine", "layer")
        for via in ("rowwise", "rowwise, float8", "all_to_all")
    ]
    assert {"put", "get", "counts and row map", *wanted} <= results.keys()
    assert ("copy to the next rank" in results) == (n_ranks > 1)
    moved = results["put"]["bytes_per_second"] * results["put"]["seconds"] / (16 * 4)  # rows
    assert moved == pytest.approx(32 * 5) if n_ranks == 1 else 0 < moved < 32 * 4


def test_set_ups_are_predicted_and_run_and_one_that_is_refused_ends_no_other(tmp_path, capsys):
    cfg = set_ups.Config(
        n_gpus=2,
        n_experts=(8, 7),
        ways=("one GPU", "rowwise"),
        n_steps=7,
        rounds=1,
        toy=True,
        json=tmp_path / "set_ups.json",
        device="cpu",
    )
    set_ups.main(cfg)
    alone, rowwise, refused = json.loads((tmp_path / "set_ups.json").read_text())["parts"]["2 ranks"]
    assert "ep must divide n_experts: ep=2, n_experts=7" in refused["error"]
    assert [r["name"] for r in (alone, rowwise)] == ["8 experts, one GPU", "8 experts, rowwise"]
    assert not alone["error"] and not rowwise["error"] and rowwise["n_timed"] == 2
    assert len(rowwise["more"]["loss"]) == 7
    rates = rowwise["tokens_per_second"], alone["tokens_per_second"]
    assert rowwise["more"]["of_one_gpu"] == pytest.approx(rates[0] / rates[1])
    assert alone["more"]["sent_bytes"] == 0 < rowwise["more"]["sent_bytes"]
    assert "7 experts, rowwise" in capsys.readouterr().out


def test_set_ups_want_several_gpus_and_steps_beside_those_left_out():
    with pytest.raises(SystemExit, match="--n-gpus of 2 or more, got 1"):
        set_ups.main(set_ups.Config(n_gpus=1, device="cpu"))
    with pytest.raises(SystemExit, match="more than the 5 that are left out, got 5"):
        set_ups.main(set_ups.Config(n_gpus=2, n_steps=5, device="cpu"))
