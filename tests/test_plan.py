"""Every published model: parameters and FLOPs to every digit that the report prints."""

import json
import re
import subprocess
import sys
import time

import pytest

import moekit as mk
from moekit.config import PRESETS
from moekit.plan import count_params, flops_per_token, main

PUBLISHED = [  # preset, experts, active and total parameters in billions, as printed
    ("tiny", 64, "1.588", "12.91"),
    ("small", 64, "4.294", "40.86"),
    ("medium", 64, "7.37", "70.2"),
    ("medium", 96, "7.38", "103.7"),
    ("medium", 128, "7.38", "137.3"),
    ("large", 128, "15.14", "295.99"),
    ("ultra-128", 128, "58.359", "1200.5"),
    ("ultra-256", 256, "58.407", "2379.5"),
    ("bench-8L", 8, "3.171", "4.58"),
    ("bench-8L", 32, "3.172", "13.04"),
    ("bench-8L", 48, "3.172", "18.67"),
    ("bench-8L", 64, "3.173", "24.31"),
    ("bench-8L", 128, "3.175", "46.86"),
]


def printed_as(value, digits):
    return f"{value:.{len(digits.partition('.')[2])}f}" == digits


@pytest.mark.parametrize("name, n_experts, active, total", PUBLISHED)
def test_parameters_are_the_published_ones_to_every_digit(name, n_experts, active, total):
    got_total, got_active = count_params(mk.preset(name, n_experts=n_experts))
    assert printed_as(got_total / 1e9, total) and printed_as(got_active / 1e9, active)


def test_every_preset_is_in_the_table():
    assert {name for name, *_ in PUBLISHED} == PRESETS.keys()
    assert all(mk.preset(name).n_experts in {e for n, e, *_ in PUBLISHED if n == name} for name in PRESETS)


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_on_meta_has_the_counted_parameters_within_a_second(name):
    start = time.process_time()
    params = mk.init_params(mk.preset(name), device="meta")
    assert sum(p.numel() for p in params.values(True, True)) == count_params(mk.preset(name))[0]
    assert time.process_time() - start < 1


@pytest.mark.parametrize("n_experts", [8, 32, 48, 64, 128])
def test_the_bench_takes_18_2_gflop_a_token_at_any_number_of_experts(n_experts):
    assert round(flops_per_token(mk.preset("bench-8L", n_experts=n_experts)) / 1e9, 1) == 18.2


def test_ultra_128_takes_371_8_gflop_a_token():
    assert round(flops_per_token(mk.preset("ultra-128")) / 1e9, 1) == 371.8


def test_a_tied_head_is_multiplied_by_though_it_is_the_embedding():
    apart, tied = mk.preset("tiny"), mk.preset("tiny", tied_head=True)
    assert flops_per_token(apart) == flops_per_token(tied)
    assert count_params(apart)[0] - count_params(tied)[0] == apart.vocab_size * apart.d_model


def test_the_command_prints_json():
    # -B: by -m, jaxtyping's hook would write its bytecode where processes without the hook look for theirs.
    command = [sys.executable, "-B", "-m", "moekit.plan", "bench-8L", "--n-experts", "128", "--json"]
    figures = json.loads(subprocess.run(command, capture_output=True, text=True).stdout)
    assert figures["total_params"] == 46_862_510_080 and figures["active_params"] == 3_174_639_616
    assert round(figures["flops_per_token"] / 1e9, 1) == 18.2


@pytest.mark.parametrize(
    "args, message",
    [
        (["nope"], "preset needs one of ['bench-8L', 'large'"),
        (["tiny", "--n-experts", "3"], "top_k <= n_experts, got 4 of 3"),
        (["tiny", "--seq-len", "0"], "flops_per_token needs seq_len >= 1, got 0"),
    ],
)
def test_the_command_says_what_is_wrong(args, message, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["moekit.plan", *args])
    with pytest.raises(SystemExit, match=re.escape(message)):
        main()
