"""The benchmarks at tiny shapes on a CPU: what they write, and what they say of candidates that fail."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent.parent / "benchmarks"))
import measure
import moe_kernels
import moe_layer
import peers

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


def test_the_layer_is_checked_and_timed_beside_peers(tmp_path, monkeypatch, capsys):
    def wrong(weights, top_k):
        layer, parameters = moe_layer.stock(weights, top_k)
        return lambda x: 1.2 * layer(x), parameters

    monkeypatch.setitem(peers.LAYERS, "wrong", wrong)
    good = ("moekit-auto", "stock", "qwen3")
    cfg = moe_layer.Config(
        shapes=("192x64x8", "192x64x32:dirichlet2"),
        candidates=(*good, "wrong", "nobody"),
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
        assert results["nobody"]["error"].startswith("ValueError: no candidate is called 'nobody'")
    assert cfg.plot.stat().st_size > 0
    printed = capsys.readouterr().out
    assert "FAILED  AssertionError: wrong output" in printed and "max/mean" in printed


def test_group_sizes_are_those_of_the_distribution():
    shape = moe_layer.parse("4096x16x32:dirichlet2")
    weights, x, _ = moe_layer.make_layer(shape, 4, "cpu")
    wanted = moe_layer.np.random.default_rng(0).dirichlet(32 * [2.0])
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


@pytest.mark.parametrize("n_ranks", [1, 2])
def test_dispatch_compares_transports_on_any_number_of_ranks(n_ranks, tmp_path):
    sizes = "--tokens 32 --d-model 16 --d-expert 8 --n-experts 4 --rounds 1 --slot 0.001".split()
    file = tmp_path / "dispatch.json"
    launcher = [sys.executable]
    if n_ranks > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(n_ranks)]
    script = Path(__file__).parent.parent / "benchmarks" / "dispatch.py"
    done = subprocess.run(
        [*launcher, str(script), *sizes, "--json", str(file)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    record = json.loads(file.read_text())
    results = {r["name"]: r for r in record["results"]}
    assert record["ranks"] == n_ranks and not [r for r in results.values() if r["error"]]
    assert {"put", "get", "counts and row map", "layer, rowwise", "layer, all_to_all"} <= results.keys()
    assert ("copy to the next rank" in results) == (n_ranks > 1)
    moved = results["put"]["bytes_per_second"] * results["put"]["seconds"] / (16 * 4)  # rows
    assert moved == pytest.approx(32 * 5) if n_ranks == 1 else 0 < moved < 32 * 4
