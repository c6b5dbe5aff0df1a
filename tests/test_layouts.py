"""Layouts: all that is wrong is told at once, what is proposed works, and the memory is that of a dry run."""

import math
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from test_dryrun import pipeline_step, train_step

import moekit as mk
from moekit import balance, plan, schedules
from moekit.config import PRESETS
from moekit.dryrun import record
from moekit.layouts import (
    Layout,
    check_layout,
    check_recipe,
    describe_layout,
    memory_of,
    nearest_layouts,
)

TINY, BENCH, ULTRA = mk.preset("tiny"), mk.preset("bench-8L", n_experts=8), mk.preset("ultra-128")
# The published layout of ultra-128 on 512 GPUs, micro-batches of one sequence.
WIDE = Layout(pp=8, n_per_rank=2, ep=8, n_microbatches=128, batch_size=8192, seq_len=8192, recompute="block")


def layout(**changes):
    """A layout that fits tiny on 16 GPUs."""
    return replace(Layout(ep=8, n_microbatches=2, batch_size=64, seq_len=8192), **changes)


def fullest(config, layout):
    return max(sum(rank.values()) for rank in memory_of(config, layout))


# --- Rules ----------------------------------------------------------------------------


def test_a_layout_that_works_comes_back_with_its_edp():
    assert check_layout(TINY, layout(), n_gpus=16) == layout(edp=2)
    assert check_layout(ULTRA, WIDE, n_gpus=512, gpu="b300").edp == 8


def test_without_a_number_of_gpus_it_is_the_ranks_of_torchrun(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert check_layout(TINY, layout()).edp == 2
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(ValueError, match=r"works on 1 GPU, got\n- pp \* edp \* ep must be"):
        check_layout(TINY, layout())


RULES = [  # changes of a layout of tiny (16 layers, 64 experts) on 16 GPUs, what is wrong, a way out
    (dict(edp=4), "pp * edp * ep must be the number of GPUs: 1 * 4 * 8 = 32", "edp=2 instead of 4"),
    (dict(ep=3), "pp * edp * ep must be the number of GPUs: 1 * 5 * 3 = 15", "ep=4 instead of 3"),
    (dict(ep=3), "ep must divide n_experts: ep=3, n_experts=64", "ep=2 instead of 3"),
    (
        dict(pp=16, n_per_rank=2, ep=1, n_microbatches=16),
        "each of pp * n_per_rank stages needs a layer: 16 * 2 = 32 stages, 16 layers",
        "n_per_rank=1 instead of 2",
    ),
    (
        dict(pp=4, n_per_rank=2, ep=4),
        "pp must divide n_microbatches with several stages a rank: pp=4, n_microbatches=2",
        "n_microbatches=4 instead of 2",
    ),
    (dict(seq_len=9000), "seq_len must be at most max_seq_len: 9000, 8192", "seq_len=8192 instead of 9000"),
    (
        dict(cp=3, batch_size=60),
        "cp must divide the edp * ep ranks that share a batch: cp=3, 16 ranks",
        "cp=8 instead of 3",
    ),
    (dict(cp=4, seq_len=4100), "2 * cp must divide seq_len: cp=4, seq_len=4100", "cp=2 instead of 4"),
    (dict(cp=4, seq_len=4100), "2 * cp must divide seq_len: cp=4, seq_len=4100", "seq_len=4096"),
    (
        dict(batch_size=50),
        "(edp * ep / cp) * n_microbatches must divide batch_size: 16 * 2 = 32, batch_size=50",
        "batch_size=64 instead of 50",
    ),
    (dict(n_microbatches=3), "16 * 3 = 48, batch_size=64", "n_microbatches=4 instead of 3"),
    (
        dict(capacity_factor=1.25),
        "capacity_factor=1.25 needs via='rowwise', got via=None; take it, or leave out the factor",
        "via='rowwise' instead of None",
    ),
    (
        dict(capacity_factor=1.25, via="all_to_all", ep=3),
        "capacity_factor=1.25 needs via='rowwise', got via='all_to_all'",
        "ep=4, via='rowwise' instead of ep=3, via='all_to_all'",
    ),
    (
        dict(capacity_factor=0.0, via="rowwise"),
        "capacity_factor must be positive and finite: 0.0",
        "capacity_factor=None instead of 0.0",
    ),
    (
        dict(imbalance=0.5, ep=3),
        "imbalance must be from 1 to ep, the ranks that share the experts: 0.5, ep=3",
        "ep=4, imbalance=1.0 instead of ep=3, imbalance=0.5",
    ),
    (
        dict(imbalance=1.5, via="rowwise"),
        "imbalance must be 1 with via='rowwise', whose capacity_factor gives the room: 1.5",
        "imbalance=1.0 instead of 1.5",
    ),
    (
        dict(imbalance=1.5, ep=1),
        "imbalance must be from 1 to ep, the ranks that share the experts: 1.5, ep=1",
        "imbalance=1.0 instead of 1.5",
    ),
    (dict(ep=0, cp=-1), "sizes must be at least 1: ep=0, cp=-1", "ep=1, cp=1 instead of ep=0, cp=-1"),
]


@pytest.mark.parametrize(("changes", "problem", "way_out"), RULES)
def test_what_is_wrong_is_told_with_the_numbers_and_a_way_out(changes, problem, way_out):
    with pytest.raises(ValueError) as error:
        check_layout(TINY, layout(**changes), n_gpus=16)
    first, *lines = str(error.value).splitlines()
    at = lines.index("nearest layouts that work:")
    assert first == "check_layout needs a layout that works on 16 GPUs, got"
    assert any(line.startswith("- ") and problem in line for line in lines[:at])
    assert 1 <= len(lines[at + 1 :]) <= 3
    assert any(line.startswith(f"- {way_out}") for line in lines[at + 1 :]), lines


def test_all_that_is_wrong_is_told_at_once():
    with pytest.raises(ValueError) as error:
        check_layout(
            TINY, layout(pp=3, n_per_rank=6, edp=5, ep=7, cp=2, batch_size=3, seq_len=9001), n_gpus=16
        )
    assert str(error.value).count("\n- ") >= 7


def test_attention_over_heads_is_a_rule_only_where_it_is_asked_for():
    odd = mk.preset("tiny", n_heads=15, n_kv_heads=5)
    assert check_layout(odd, layout(cp=2), n_gpus=16)
    with pytest.raises(ValueError, match=r"cp must divide n_heads for attention_via='all_to_all': cp=2, n_h"):
        check_layout(odd, layout(cp=2, attention_via="all_to_all"), n_gpus=16)


@pytest.mark.parametrize(
    "changes", [dict(recompute="blocks"), dict(recompute=("ffn", "x")), dict(reduce="x"), dict(dtype="int8")]
)
def test_an_unknown_option_is_refused(unchecked, changes):
    ((name, _),) = changes.items()
    with pytest.raises(ValueError, match=f"Layout needs {name} in "):
        layout(**changes)


def test_an_unknown_gpu_and_no_gpus_are_refused():
    with pytest.raises(ValueError, match=r"gpu to be one of .*'h200'.*, got 'a100'"):
        check_layout(TINY, layout(), n_gpus=16, gpu="a100")
    with pytest.raises(ValueError, match="n_gpus >= 1, got 0"):
        check_layout(TINY, layout(), n_gpus=0)


def test_no_process_group_and_no_device_are_needed():
    check_layout(ULTRA, WIDE, n_gpus=512, gpu="b300")
    assert not torch.distributed.is_initialized()


def test_a_layout_is_read_off_a_configuration_of_the_same_names():
    cfg = SimpleNamespace(ep=8, edp=None, batch_size=64, seq_len=8192, n_microbatches=2, lr=1.0)
    assert Layout.of(cfg) == layout()
    assert Layout.of(cfg, pp=2, dtype="float32") == layout(pp=2, dtype="float32")


# --- The nearest that work ------------------------------------------------------------

SIZES = st.integers(0, 20)
ASKED = st.fixed_dictionaries(
    dict(
        pp=SIZES,
        n_per_rank=st.integers(0, 5),
        edp=st.none() | SIZES,
        ep=SIZES,
        cp=st.integers(0, 8),
        n_microbatches=st.integers(0, 40),
        batch_size=st.integers(0, 3000),
        seq_len=st.integers(1, 9000),
        recompute=st.sampled_from(["none", "block", ("ffn",)]),
        attention_via=st.sampled_from([None, "all_to_all", "all_gather"]),
    )
)


@settings(max_examples=100)
@given(ASKED, st.integers(1, 96), st.sampled_from(["tiny", "bench-8L", "large"]))
def test_every_layout_that_is_proposed_works_and_none_is_proposed_where_the_asked_one_does(asked, n, name):
    config, asked = mk.preset(name), Layout(**asked)
    try:
        assert check_layout(config, asked, n_gpus=n) == asked.on(n)
        assert nearest_layouts(config, asked, n_gpus=n)[0] == asked.on(n)
    except ValueError as error:
        found = nearest_layouts(config, asked, n_gpus=n)
        assert 1 <= len(found) <= 3 and len(set(found)) == len(found)
        lines = str(error).partition("nearest layouts that work:\n")[2].splitlines()
        for other, line in zip(found, lines, strict=True):
            assert check_layout(config, other, n_gpus=n) == other
            new = dict(re.findall(r"(\w+)=([^,\s]+|\(.*?\))", line.partition(" instead of ")[0]))
            differs = {k for k, x in asdict(asked).items() if x is not None and x != getattr(other, k)}
            assert new.keys() == differs  # the line says all that changes


@settings(max_examples=10)
@given(ASKED, st.sampled_from([8, 48, 64, 512]), st.sampled_from(["h100", "h200", "b300"]))
def test_what_is_proposed_for_a_gpu_fits_it(asked, n, gpu):
    config = mk.preset("medium")
    for other in nearest_layouts(config, Layout(**asked), n_gpus=n, gpu=gpu):
        assert check_layout(config, other, n_gpus=n, gpu=gpu) == other
        assert fullest(config, other) < plan.GPUS[gpu].memory


def test_ultra_128_needs_288_gb_with_ep_8_and_fits_141_with_the_proposed():
    ranks = memory_of(ULTRA, WIDE.on(512))
    totals = [sum(rank.values()) for rank in ranks]
    assert 0 < totals.index(max(totals)) < 7 and 180e9 < max(totals) < 200e9  # a middle stage
    began = time.process_time()
    with pytest.raises(ValueError) as error:
        check_layout(ULTRA, WIDE, n_gpus=512, gpu="h200")
    assert time.process_time() - began < 10
    assert "a GPU has 141 GB, a rank of place 1 on pp would hold about 1" in str(error.value)
    lines = str(error.value).partition("nearest layouts that work:\n")[2]
    assert [line.partition(" instead")[0] for line in lines.splitlines()] == [
        "- ep=16",
        "- pp=16, n_microbatches=256",  # micro-batches stay one sequence
    ]
    smaller = plan.GPUS["h200"]._replace(memory=135e9)  # where those are tight
    proposed = nearest_layouts(ULTRA, WIDE, n_gpus=512, gpu=smaller)
    assert [(x.pp, x.ep) for x in proposed] == [(8, 16), (16, 8), (8, 32)]
    for ep, pp, m in ((32, 8, 128), (16, 16, 256)):
        check_layout(ULTRA, replace(WIDE, ep=ep, pp=pp, n_microbatches=m), n_gpus=512, gpu="h200")
    assert fullest(ULTRA, replace(WIDE, ep=32).on(512)) < 0.75 * 141e9


def test_recomputation_is_proposed_where_activations_are_too_many():
    asked = Layout(ep=8, n_microbatches=1, batch_size=64, seq_len=8192)
    with pytest.raises(ValueError, match=r"- recompute='block' instead of 'none': about \d+ GB"):
        check_layout(mk.preset("small"), asked, n_gpus=16, gpu="h200")


def test_where_nothing_fits_it_says_so():
    asked = Layout(ep=8, batch_size=8, seq_len=8192)
    with pytest.raises(ValueError, match="no other mesh, context, micro-batches or recomputation"):
        check_layout(ULTRA, asked, n_gpus=8, gpu="b300")


# --- Memory ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", PRESETS)
def test_parameters_gradients_and_optimizer_state_are_counted_as_they_are_spread(name):
    config = mk.preset(name)
    shapes = mk.params.param_shapes(config)
    size = {expert: 0 for expert in (True, False)}
    for leaf, shape in shapes.items():
        size[".experts." in leaf] += math.prod(shape)
    routers = sum(math.prod(shape) for leaf, shape in shapes.items() if leaf.endswith(".router"))
    (rank,) = memory_of(config, Layout(edp=4, ep=8, n_microbatches=2, batch_size=64, seq_len=1024))
    held = size[True] // 8 + size[False]
    assert rank["parameters"] == 2 * held + 2 * routers
    assert rank["gradients"] == 4 * held
    assert abs(rank["optimizer state"] - 12 * (size[True] // 32 + size[False] / 32)) < 12 * len(shapes)


def test_the_ranks_of_a_pipeline_hold_the_model_once():
    whole = memory_of(ULTRA, Layout(edp=1, ep=1, batch_size=1, seq_len=8192))[0]
    parts = memory_of(ULTRA, replace(WIDE, edp=1, ep=1, batch_size=128))
    assert sum(rank["parameters"] for rank in parts) == whole["parameters"]


def test_a_rank_of_1f1b_holds_as_many_micro_batches_as_ranks_follow():
    held = [r["activations"] for r in memory_of(TINY, layout(pp=4, edp=1, ep=4, n_microbatches=16))]
    assert held[0] > held[1] > held[2]
    few, many = (
        memory_of(TINY, layout(pp=4, edp=1, ep=4, n_microbatches=m, batch_size=4 * m)) for m in (32, 256)
    )
    assert few == many


DRY = [  # rank of 8, options of a step of bench-8L with 8 experts
    (0, dict(ep=8, b=1)),
    (5, dict(edp=2, ep=4, b=2, n_microbatches=2)),
    (0, dict(ep=8, b=1, n_microbatches=2, recompute="block")),
    (3, dict(edp=2, ep=4, b=1, n_microbatches=2, recompute=("ffn",), reduce="micro_batch")),
    (7, dict(edp=8, ep=1, b=1, n_microbatches=2, recompute="block")),
    (0, dict(ep=8, b=2, via="rowwise", capacity_factor=1.25)),
    (3, dict(edp=2, ep=4, b=1, n_microbatches=2, recompute="block", via="rowwise")),
    (0, dict(pp=4, v=1, edp=1, ep=2, b=1, n_microbatches=8, recompute="none")),
    (4, dict(pp=4, v=1, edp=1, ep=2, b=1, n_microbatches=8, recompute="none")),
    (4, dict(pp=2, v=2, edp=2, ep=2, b=1, n_microbatches=4, recompute="block")),
]


SHALLOW = dict(n_layers=4, n_experts=8, vocab_size=200_064)
ODD = [  # other models than bench-8L, shallow and with a large vocabulary
    (0, mk.preset("tiny", **SHALLOW), dict(ep=8, b=1, n_microbatches=2, recompute="block")),
    (0, mk.preset("tiny", **SHALLOW, tied_head=True), dict(pp=2, v=1, edp=1, ep=4, b=1, n_microbatches=4)),
    (7, mk.preset("tiny", **SHALLOW, norm="pre", qk_norm="none"), dict(edp=2, ep=4, b=1)),
]


def estimate_and_dry_run(config, rank, options):
    options, step = dict(options), pipeline_step if "pp" in options else train_step
    rows = options.pop("b")
    b = rows if "pp" in options else rows * options.get("n_microbatches", 1)
    fake = record(partial(step, config=config, b=b, s=8192, **options), rank=rank, world_size=8)
    of_layout = {name: x for name, x in options.items() if name != "v"}
    asked = Layout(n_per_rank=options.get("v", 1), batch_size=1, seq_len=8192, **of_layout).on(8)
    asked = replace(asked, batch_size=rows * asked.n_shares * asked.n_microbatches)
    return memory_of(config, check_layout(config, asked, n_gpus=8))[rank * asked.pp // 8], fake


@pytest.mark.parametrize(("rank", "options"), DRY)
def test_the_estimate_is_within_4_percent_of_a_dry_run(rank, options):
    estimate, fake = estimate_and_dry_run(BENCH, rank, options)
    assert 0.96 < sum(estimate.values()) / fake.peak < 1.04, (estimate, fake.memory, fake.at)
    for kind in ("parameters", "optimizer state", "gradients"):
        assert abs(estimate[kind] - fake.memory.get(kind, 0)) < 0.01 * fake.peak


def test_two_batches_over_rowwise_keep_rows_and_halve_the_buffers():
    options = dict(ep=8, b=2, via="rowwise", capacity_factor=1.25)
    whole, _ = estimate_and_dry_run(BENCH, 0, options)
    estimate, fake = estimate_and_dry_run(BENCH, 0, options | dict(overlap="two_batch"))
    assert 0.96 < sum(estimate.values()) / fake.peak < 1.04, (estimate, fake.memory, fake.at)
    assert estimate["symmetric buffers"] == pytest.approx(whole["symmetric buffers"] / 2, rel=1e-3)
    assert sum(estimate.values()) > 1.2 * sum(whole.values())


@pytest.mark.parametrize(("rank", "config", "options"), ODD)
def test_the_estimate_of_an_odd_model_is_within_8_percent_of_a_dry_run(rank, config, options):
    estimate, fake = estimate_and_dry_run(config, rank, options)
    assert 0.92 < sum(estimate.values()) / fake.peak < 1.08, (estimate, fake.memory, fake.at)


def recorded_step(rank, *, rows, **options):
    """Make a training step whose ep ranks send each other the rows of a recording."""
    return train_step(rank, config=BENCH, ep=8, rows=lambda _: rows, **options)


@pytest.mark.parametrize("rank", [0, 5])
def test_a_rank_that_gets_more_rows_by_a_recording_is_estimated_with_its_imbalance(rank):
    shares = torch.tensor([2.0, 1.4, 1.0, 0.8, 0.8, 0.7, 0.7, 0.6])  # of 8 experts, one a rank
    ids = balance.draw_experts(shares, torch.arange(8 * 512), top_k=4, key=mk.random.make_key(0))
    recording = balance.Recording(
        expert_ids=ids.view(1, 8, 1, 512, 4).byte(), sample_ids=torch.arange(8)[None], n_experts=8
    )
    rows = balance.recorded_rows(recording, 0, ep=8)
    sent = 8192 // 512 * balance.rank_load(rows, 8)[0, :, 0]  # of rank i to rank j, of rows as long as below
    imbalance = (balance.rank_load(rows.sum(1), 8).double() / rows.sum() * 8)[0, 0, rank].item()
    assert 1.9 < imbalance < 2.1 if rank == 0 else 0.6 < imbalance < 0.8
    fake = record(partial(recorded_step, rows=sent.tolist(), b=1, s=8192), rank=rank, world_size=8)
    asked = Layout(ep=8, batch_size=8, seq_len=8192, imbalance=max(imbalance, 1.0)).on(8)
    (estimate,) = memory_of(BENCH, check_layout(BENCH, asked, n_gpus=8))
    (even,) = memory_of(BENCH, replace(asked, imbalance=1.0))
    if rank == 0:
        assert 0.96 < sum(estimate.values()) / fake.peak < 1.04, (estimate, fake.memory, fake.at)
        assert sum(even.values()) < 0.9 * fake.peak
    else:
        assert fake.peak < sum(even.values())


def context_step(rank, *, config, s):
    """Make a training step of one row, split over eight ranks."""
    mesh = mk.make_mesh(ep=8)
    context = mk.mesh.context_mesh(mesh, 8)
    params = mk.init_params(config, dtype=torch.bfloat16, mesh=mesh)
    optimizer = mk.shard_optimizer(mk.adamw(3e-4), mesh=mesh)
    state = optimizer.init(params)
    options = dict(config=config, attention_via="all_gather", context=context, mesh=mesh)
    grad_fn = mk.accumulate(mk.value_and_grad(partial(mk.next_token_loss, **options), has_aux=True), 1)

    def step():
        ids = torch.zeros(1, s + 1, dtype=torch.int64)
        batch = mk.batch.make_batch(ids, torch.zeros_like(ids), torch.arange(1))
        batch = mk.count_tokens(mk.context.split_context(batch, context=context), mesh=mesh)
        _, grads = grad_fn(params, batch)
        optimizer.update(grads, state, params)
        return {"parameters": params, "optimizer state": state}

    return step


def test_the_estimate_of_rows_that_are_split_is_within_8_percent_of_a_dry_run():
    config = mk.preset("bench-8L", n_experts=8, max_seq_len=65536)
    asked = Layout(ep=8, cp=8, batch_size=1, seq_len=65536, attention_via="all_gather").on(8)
    fake = record(partial(context_step, config=config, s=65536), rank=0, world_size=8)
    (estimate,) = memory_of(config, check_layout(config, asked, n_gpus=8))
    assert 0.92 < sum(estimate.values()) / fake.peak < 1.08, (estimate, fake.memory, fake.at)


def test_the_table_has_a_line_for_each_place_and_the_bubble_of_the_schedule():
    text = describe_layout(ULTRA, WIDE.on(512))
    assert "pp 8 x edp 8 x ep 8, cp 1; micro-batches of 1 x 8192 positions: 64 at a time" in text
    places = [line.split()[0] for line in text.splitlines() if line.endswith(("backward", "update"))]
    assert places == [str(place) for place in range(8)] and "0-3, 32-35" in text
    bubble = schedules.play(schedules.interleaved(8, 128, 2)).bubble
    assert text.endswith(f"bubble {bubble:.1%}")
    assert "estimated for balanced routing:" in text
    uneven = describe_layout(ULTRA, replace(WIDE.on(512), imbalance=1.5))
    assert "estimated for a rank that gets 1.5 times the mean of rows:" in uneven


def test_a_recipe_ends_with_what_is_wrong_and_what_its_own_options_could_be(monkeypatch):
    cfg = SimpleNamespace(ep=6, n_microbatches=1, batch_size=64, seq_len=8192, dry_run=True, n_gpus=16)
    with pytest.raises(SystemExit, match=r"ep must divide n_experts: ep=6") as error:
        check_recipe(TINY, cfg)
    proposed = str(error.value).partition("nearest layouts that work:")[2]
    assert "ep=8 instead of 6" in proposed and "pp" not in proposed and "cp" not in proposed
    monkeypatch.setenv("RANK", "3")
    with pytest.raises(SystemExit) as error:
        check_recipe(TINY, cfg)
    assert error.value.code == 1
    assert check_recipe(TINY, SimpleNamespace(**{**vars(cfg), "ep": 8})).edp == 2


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        (dict(log_every=0), "log_every >= 1, got 0"),
        (dict(log_every=1, save_every=-1), "save_every >= 1, got -1"),
        (dict(save_every=None, profile=-1, n_steps=-2), "n_steps >= 0, profile >= 0, got -2, -1"),
        (dict(seed=-1), "seed >= 0, got -1"),
        (dict(sample_bytes=-1), "sample_bytes >= 0, got -1"),
    ],
)
def test_a_recipe_ends_at_once_for_numbers_that_none_can_have(numbers, says):
    cfg = SimpleNamespace(batch_size=1, seq_len=8, dry_run=True, n_gpus=1)
    assert check_recipe(TINY, SimpleNamespace(**vars(cfg), log_every=1, save_every=None)).edp == 1
    with pytest.raises(SystemExit, match=f"^a recipe needs {says}$"):
        check_recipe(TINY, SimpleNamespace(**vars(cfg), **numbers))


@pytest.mark.parametrize("gpu", [None, "h200"])
def test_a_factor_without_its_transport_proposes_the_transport(gpu):
    with pytest.raises(ValueError) as error:
        check_layout(BENCH, layout(capacity_factor=1.25, batch_size=16), n_gpus=8, gpu=gpu)
    lines = str(error.value).partition("nearest layouts that work:\n")[2].splitlines()
    assert lines and lines[0].startswith("- via='rowwise' instead of None"), str(error.value)


def test_a_number_of_gpus_without_a_dry_run_is_refused_and_the_default_is_not():
    @dataclass(frozen=True, kw_only=True)
    class Config:
        batch_size: int = 64
        seq_len: int = 8192
        dry_run: bool = False
        n_gpus: int = 512

    with pytest.raises(SystemExit, match=r"^--n-gpus 2 needs --dry-run, got it without; torchrun says"):
        check_recipe(TINY, Config(n_gpus=2))
    assert check_recipe(TINY, Config()).edp == 1
    assert check_recipe(TINY, Config(n_gpus=2, dry_run=True)).edp == 2


# --- Command --------------------------------------------------------------------------


@pytest.fixture
def command(monkeypatch, capsys):
    """``python -m moekit.plan`` with some arguments, in this process."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["moekit.plan", *args])
        try:
            code, says = plan.main() or 0, ""
        except SystemExit as ended:
            code, says = (1, ended.code) if isinstance(ended.code, str) else (ended.code, "")
        printed = capsys.readouterr()
        return SimpleNamespace(returncode=code, stdout=printed.out, stderr=printed.err + says)

    return run


def test_the_command_prints_memory_bubble_and_what_fits(command):
    args = "ultra-128 --n-gpus 512 --pp 8 --n-per-rank 2 --ep 8 --batch-size 8192 --n-microbatches 128"
    done = command(*args.split(), "--recompute", "block")
    assert done.returncode == 0 and "1,200,484,519,680" in done.stdout and "bubble 2.7%" in done.stdout
    assert "h200 (141 GB): does not fit" in done.stdout and "b300 (288 GB): fits" in done.stdout
    assert done.stdout.endswith("\n--gpu b200 names layouts that fit\n")
    done = command(*args.split(), "--recompute", "block", "--gpu", "h200")
    assert done.returncode and "h200 (141 GB): does not fit" in done.stdout and "b300" not in done.stdout
    assert len(done.stderr.splitlines()) == 1 and "ep=16 instead of 8" in done.stderr
    done = command(*args.split(), "--imbalance", "1.5")
    assert done.returncode == 0 and "a rank that gets 1.5 times the mean of rows" in done.stdout


def test_the_command_says_how_to_find_a_layout_for_a_gpu_that_has_no_room(command):
    done = command("bench-8L", "--n-gpus", "8")
    assert done.stdout.endswith("\n--gpu b300 names layouts that fit\n")
    assert (
        "nearest layouts that work: ep=2 instead of 1"
        in command(*"bench-8L --n-gpus 8 --gpu b300".split()).stderr
    )


def test_the_command_without_a_layout_prints_what_it_did(command):
    lines = command("tiny").stdout.splitlines()
    assert len(lines) == 4 and lines[-1].endswith("(forward and backward, 8192 positions)")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ("--ep 6 --n-gpus 16", "1 * 2 * 6 = 12; ep must divide n_experts: ep=6, n_experts=64; nearest"),
        ("--ep 8 --n-gpus 16 --n-microbatches 3 --batch-size 64", "work: n_microbatches=4 instead of 3"),
        ("--cp 0", "sizes must be at least 1: cp=0; nearest layouts that work: cp=1 instead of 0"),
        ("--recompute blocks", "Layout needs recompute in ('none', 'block'), got 'blocks'"),
        ("--gpu a100", "--gpu needs one of ['b200', 'b300', 'h100', 'h200'], got 'a100'"),
    ],
)
def test_the_command_refuses_in_one_line(command, args, message):
    done = command("tiny", *args.split())
    assert done.returncode and message in done.stderr, done.stderr
    assert len(done.stderr.splitlines()) == 1 and not done.stdout
