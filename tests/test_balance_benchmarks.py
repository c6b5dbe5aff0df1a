"""The benchmarks' ``--routing``: which experts it gives, and that each benchmark goes by it."""

import json
import sys
from pathlib import Path

import pytest
import torch
from reference import refuses
from scripts import as_main

import moekit as mk
from moekit.balance import Recording, recorded_rows, write_recording

BENCHMARKS = Path(__file__).parent.parent / "benchmarks"
sys.path.append(str(BENCHMARKS))
import bench_8l
import dispatch
import moe_kernels
import moe_layer
import precision
import stock
from routing import expert_ids, expert_shares, parse_routing

QUICK = dict(rounds=1, slot=1e-3)
SIZES = dict(n_experts=8, top_k=4, device="cpu")


@pytest.fixture
def recording(tmp_path):
    """A recording of 2 x 4 rows of 32 tokens, three layers, in which expert 0 gets most; and its name."""
    shares = torch.tensor([4.0, 1, 1, 1, 1, 1, 1, 0])
    key = mk.random.make_key(1)
    ids = mk.balance.draw_experts(shares, torch.arange(768).view(2, 4, 3, 32), top_k=4, key=key)
    found = Recording(expert_ids=ids.byte(), sample_ids=torch.arange(8).view(2, 4), n_experts=8)
    write_recording(tmp_path / "routing.safetensors", [found])
    return found, f"recorded:{tmp_path / 'routing.safetensors'}"


def test_a_routing_is_random_uniform_drawn_or_recorded(recording):
    assert expert_ids("random", 100, **SIZES) is None
    uniform, drawn, more = (
        expert_ids(text, 200, n_layers=2, **SIZES) for text in ("uniform", "dirichlet:0.5", "dirichlet0.5")
    )
    for ids in (uniform, drawn):
        assert ids.shape == (2, 200, 4) and (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert torch.bincount(uniform[0].flatten()).tolist() == [100] * 8
    assert torch.equal(drawn, more)
    loads = [torch.bincount(ids.flatten(), minlength=8) for ids in drawn]
    assert loads[0].max() > 150 and (loads[0] - loads[1]).abs().max() > 50  # each layer has its own shares
    assert torch.equal(expert_ids("dirichlet:0.5", 50, first=150, **SIZES), drawn[:1, 150:])
    found, text = recording
    again = expert_ids(text, 256, n_layers=3, **SIZES)
    for layer in range(3):
        rows = sum(recorded_rows(found, step)[0, 0, layer] for step in range(2))
        assert torch.bincount(again[layer].flatten(), minlength=8).tolist() == rows.tolist()
    assert expert_shares(text, 256, n_experts=8, top_k=4)[0] == pytest.approx(0.25, abs=1e-9)
    assert expert_shares("random", 9, n_experts=8, top_k=4) is None


def test_a_recording_of_other_experts_or_too_few_tokens_is_refused(recording):
    _, text = recording
    with refuses("needs n_experts=16, top_k=4 as its run had, got {'n_experts': 8, 'top_k': 4}; measure"):
        expert_ids(text, 9, **SIZES | dict(n_experts=16))
    with refuses("needs 1 layers of 300 tokens, got 3 of 256; record more steps, or measure less"):
        expert_ids(text, 200, first=100, **SIZES)
    with refuses("needs 4 layers of 9 tokens, got 3 of 256"):
        expert_ids(text, 9, n_layers=4, **SIZES)


@pytest.mark.parametrize(
    "text", ["skewed", "dirichlet", "dirichlet:x", "dirichlet:0", "uniform:2", "recorded", "recorded:nowhere"]
)
def test_each_benchmark_refuses_a_routing_that_there_is_not(text, monkeypatch):
    monkeypatch.setattr("measure.measure", None)
    says = f"a routing is random, uniform, dirichlet:A or recorded:FILE, got '{text}'"
    with pytest.raises(SystemExit, match=says):
        parse_routing(text)
    for module in (moe_layer, moe_kernels, precision):
        with pytest.raises(SystemExit, match=says):
            module.main(module.Config(routing=text, device="cpu"))
    with pytest.raises(SystemExit, match=says):
        dispatch.main(dispatch.Config(routing=text))
    with pytest.raises(SystemExit, match=says):
        as_main(BENCHMARKS / "train_step.py", "--routing", text)


def test_a_layers_router_makes_recorded_groups(recording, tmp_path):
    _, text = recording
    cfg = moe_layer.Config(
        shapes=("256x32x8", "256x32x8:uniform"), routing=text, candidates=("stock",),
        json=tmp_path / "layer.json", device="cpu", **QUICK,
    )  # fmt: skip
    moe_layer.main(cfg)
    recorded, uniform = json.loads(cfg.json.read_text())["cases"]
    assert (recorded["routing"], uniform["routing"]) == (text, "uniform")
    assert recorded["rows_max_over_mean"] > 1.9 and uniform["rows_max_over_mean"] < 1.1
    assert all(r["error"] is None for case in (recorded, uniform) for r in case["results"])
    shares = expert_shares(text, 256, n_experts=8, top_k=4)
    weights, x, _ = moe_layer.make_layer(moe_layer.parse("256x32x8", text), 4, "cpu")
    counts = mk.route(weights["router"], x, top_k=4).counts
    assert (counts / 1024 - shares).abs().max() < 0.01


def test_kernels_move_the_rows_of_a_routing(recording, tmp_path, monkeypatch):
    counted = []
    count = moe_kernels.count_experts
    monkeypatch.setattr(
        moe_kernels, "count_experts", lambda *a, **kw: counted.append(count(*a, **kw)) or counted[-1]
    )
    cfg = moe_kernels.Config(
        shapes=("128x16x8",), routing=recording[1], json=tmp_path / "kernels.json", device="cpu", **QUICK
    )
    moe_kernels.main(cfg)
    (case,) = json.loads(cfg.json.read_text())["cases"]
    assert all(r["error"] is None for r in case["results"])
    ids = expert_ids(recording[1], 128, **SIZES)[0]
    assert counted[0].tolist() == torch.bincount(ids.flatten(), minlength=8).tolist()


def test_transports_carry_a_skewed_load_and_say_what_was_dropped(tmp_path, capsys, monkeypatch):
    told = {"route": [], "moe": []}
    for name, kept in told.items():
        fn = getattr(mk, name)
        monkeypatch.setattr(
            mk, name, lambda *a, f=fn, to=kept, **kw: to.append(kw["expert_ids"]) or f(*a, **kw)
        )
    cfg = dispatch.Config(
        tokens=32, d_model=16, d_expert=8, n_experts=8, map_experts=16, capacity_factor=0.5,
        routing="dirichlet:0.3", json=tmp_path / "dispatch.json", **QUICK,
    )  # fmt: skip
    dispatch.main(cfg)
    record = json.loads(cfg.json.read_text())
    assert all(r["error"] is None for r in record["results"])
    assert record["dropped"] == pytest.approx(0.5) and record["rows_max_over_mean"] == 1.0  # one rank
    assert record["config"]["routing"] == "dirichlet:0.3"
    assert "50.0% are dropped by rowwise" in capsys.readouterr().out
    ids = expert_ids("dirichlet:0.3", 32, **SIZES)[0]
    assert told["route"] and told["moe"] and all(torch.equal(x, ids) for kept in told.values() for x in kept)


@pytest.mark.parametrize("script", ["moe_layer.py", "moe_kernels.py"])
def test_a_recording_of_another_top_k_ends_the_program_and_says_with_which_option_it_would_do(
    script, recording, tmp_path
):
    file, options = tmp_path / "x.json", "--shapes 16x8x8 --top-k 2 --rounds 1 --slot 0.001 --device cpu"
    with pytest.raises(SystemExit, match="nothing could be measured of 16x8x8"):
        as_main(BENCHMARKS / script, *options.split(), "--routing", recording[1], "--json", file)
    (case,) = json.loads(file.read_text())["cases"]
    assert "; measure with --top-k 4 and 8 experts" in case["results"][0]["error"]


def test_a_row_map_of_other_experts_than_recorded_is_listed_with_the_reason(recording, tmp_path):
    cfg = dispatch.Config(
        tokens=32, d_model=16, d_expert=8, n_experts=8, map_experts=16, routing=recording[1],
        json=tmp_path / "dispatch.json", **QUICK,
    )  # fmt: skip
    dispatch.main(cfg)
    failed = {r["name"]: r["error"] for r in json.loads(cfg.json.read_text())["results"] if r["error"]}
    assert list(failed) == ["row map, E = 16, 8 ranks"] and "needs n_experts=16" in failed.popitem()[1]


def test_a_step_and_its_baseline_go_where_the_batch_says(monkeypatch):
    model = bench_8l.make_model(8, seq_len=16, toy=True)
    options = dict(seq_len=16, device="cpu")
    batch = bench_8l.make_batch(model, 2, routing="dirichlet:0.3", **options)
    assert batch.expert_ids.shape == (2, model.n_moe_layers, 16, model.top_k)
    params = mk.init_params(model, dtype=torch.float32)
    kept, chosen = [], []
    block = mk.balance.keep_routing(mk.model.transformer_block, kept)
    bench_8l.our_loss(model, device="cpu")(params, batch, block=block)
    experts = stock.experts

    def looked_at(x, logits, *args):
        chosen.append(logits.topk(model.top_k).indices)
        return experts(x, logits, *args)

    monkeypatch.setattr(stock, "experts", looked_at)
    stock.make_loss(model, compiled=False, recompute_head=False)(params, batch)
    for layer, (ours, stocks) in enumerate(zip(kept, chosen, strict=True)):
        want = batch.expert_ids[:, layer].reshape(32, -1)
        assert torch.equal(ours.long(), want)
        assert torch.equal(stocks.sort().values, want.sort().values)
    assert bench_8l.make_batch(model, 2, **options).expert_ids is None


def test_a_step_is_timed_on_a_routing(tmp_path):
    options = "--toy --parts forward_backward --candidates moekit --batch-size 1 --seq-len 16 --rounds 1"
    file = tmp_path / "step.json"
    as_main(
        BENCHMARKS / "train_step.py", *options.split(), "--slot=0.001", "--routing=uniform", f"--json={file}"
    )
    record = json.loads(file.read_text())
    assert [r["error"] for r in record["parts"]["forward_backward"]] == [None] * 3
    assert record["config"]["routing"] == "uniform"


def test_roles_of_a_policy_are_compared_on_a_routing(tmp_path, recording):
    cfg = precision.Config(
        toy=True, emulate=True, parts=("layer",), candidates=("all",), routing=recording[1], device="cpu",
        json=tmp_path / "precision.json", **QUICK,
    )  # fmt: skip
    precision.main(cfg)
    (results,) = json.loads(cfg.json.read_text())["parts"].values()
    assert [r["error"] for r in results] == [None] * 4
