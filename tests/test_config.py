import math
from dataclasses import FrozenInstanceError, replace

import pytest
from reference import refuses, small_config

import moekit as mk
from moekit.config import PRESETS

PUBLISHED = """
name      layers dense d_model heads kv  E   H    norm balance router_z
tiny      16     1     2048    16    4   64  2048 peri 0.01    2e-4
small     32     1     2560    24    6   64  2560 peri 0.01    2e-4
medium    39     2     3072    32    8   64  3072 peri 0.005   2e-4
large     47     2     4096    40    10  128 4096 peri 0.005   2e-4
ultra-128 63     2     6144    64    32  128 8192 peri 0.005   2e-4
ultra-256 63     2     6144    64    32  256 8192 peri 0.005   2e-4
bench-8L  8      1     4096    32    8   128 4096 post 0.015   1e-4
"""
ROWS = [line.split() for line in PUBLISHED.strip().splitlines()[1:]]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0])
def test_a_preset_has_the_published_sizes(row):
    config = mk.preset(row[0])
    c = config
    got = [c.n_layers, c.n_dense_layers, c.d_model, c.n_heads, c.n_kv_heads, c.n_experts, c.d_expert, c.norm]
    got += [c.balance_weight, c.router_z_weight]
    assert got == [type(x)(text) for x, text in zip(got, row[1:], strict=True)]


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_shares_what_the_report_says_of_all(name):
    c = mk.preset(name)
    assert (c.vocab_size, c.d_head, c.top_k, c.max_seq_len, c.rope_base) == (100_352, 128, 4, 8192, 5e5)
    assert (c.score, c.normalize, c.route_scale, c.qk_norm) == ("softmax", "l1", 4.0, "head")
    assert (c.d_shared, c.d_dense) == (c.d_expert, 4 * c.d_expert + c.d_shared)
    assert (c.init_std, c.head_z_weight, c.normalize_embedding, c.tied_head) == (0.01, 1e-4, True, False)


def test_the_presets_are_the_published_rows():
    assert list(PRESETS) == [row[0] for row in ROWS]


@pytest.mark.parametrize(("name", "numbers"), [("medium", (64, 96, 128)), ("bench-8L", (8, 32, 48, 64, 128))])
def test_the_published_numbers_of_experts_are_changes_of_a_preset(name, numbers):
    for n in numbers:
        config = mk.preset(name, n_experts=n)
        assert config.n_experts == n and replace(config, n_experts=mk.preset(name).n_experts) == mk.preset(
            name
        )


def test_layers_with_experts_follow_the_dense_ones():
    config = small_config(n_layers=5, n_dense_layers=2)
    assert [config.is_moe(i) for i in range(5)] == [False, False, True, True, True]
    assert config.n_moe_layers == 3


def test_a_dense_model_needs_no_sizes_of_experts_and_a_sparse_one_none_of_dense_layers():
    dense = small_config(n_dense_layers=2, n_experts=0, top_k=0, d_expert=0)
    assert dense.n_moe_layers == 0
    assert small_config(n_dense_layers=0, d_dense=0).n_moe_layers == 2


def test_a_config_is_a_value():
    assert small_config() == small_config() and hash(small_config()) == hash(small_config())
    with pytest.raises(FrozenInstanceError):
        small_config().d_model = 3


POSITIVE = (
    "vocab_size d_model n_layers n_heads n_kv_heads d_head d_dense n_experts top_k d_expert max_seq_len"
)


SIZES = "vocab_size d_model n_layers n_heads n_kv_heads d_head max_seq_len d_dense n_experts top_k d_expert"


@pytest.mark.parametrize("name", SIZES.split())
def test_sizes_below_one_are_refused(name):
    with refuses(f"ModelConfig needs {name} >= 1, got 0"):
        small_config(**{"n_dense_layers": 1, name: 0})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(d_shared=-1), "ModelConfig needs d_shared >= 0, got -1"),
        (
            dict(n_dense_layers=3),
            "ModelConfig needs 0 <= n_dense_layers <= n_layers, got n_dense_layers=3, n_layers=2",
        ),
        *(
            (dict([(name, x)]), f"ModelConfig needs a finite {name} >= 0, got {x}")
            for name in ("init_std", "balance_weight", "router_z_weight", "head_z_weight")
            for x in (-1.0, math.nan, math.inf)
        ),
        *(
            (dict([(name, x)]), f"ModelConfig needs a finite {name} > 0, got {x}")
            for name in ("norm_eps", "rope_base", "route_scale")
            for x in (0.0, math.nan, math.inf)
        ),
        (dict(n_dense_layers=-1), "0 <= n_dense_layers <= n_layers, got n_dense_layers=-1, n_layers=2"),
        (dict(n_kv_heads=3), "ModelConfig needs n_kv_heads to divide n_heads, got 3 and 4"),
        (dict(d_head=5), "ModelConfig needs an even d_head (RoPE turns pairs), got 5"),
        (dict(norm="sandwich"), "ModelConfig needs norm in ('pre', 'post', 'peri'), got 'sandwich'"),
        (dict(qk_norm="both"), "ModelConfig needs qk_norm in ('none', 'head', 'full'), got 'both'"),
        (dict(score="tanh"), "ModelConfig needs score in ('softmax', 'sigmoid'), got 'tanh'"),
        (dict(normalize="l2"), "ModelConfig needs normalize in ('none', 'l1'), got 'l2'"),
        (
            dict(balance_population="world"),
            "balance_population in ('document', 'rank', 'micro_batch', 'batch'), got 'world'",
        ),
        (dict(top_k=7), "ModelConfig needs top_k <= n_experts, got 7 of 6"),
        (
            dict(n_groups=4),
            "n_groups to divide n_experts, 1 <= top_groups <= n_groups and top_k experts in them",
        ),
        (dict(n_groups=2, top_groups=3), "got n_experts=6, n_groups=2, top_groups=3, top_k=2"),
        (dict(n_groups=6, top_groups=1), "got n_experts=6, n_groups=6, top_groups=1, top_k=2"),
    ],
)
def test_sizes_that_are_no_model_are_refused_at_construction(unchecked, changes, message):
    with refuses(message):
        small_config(**changes)


def test_an_unknown_preset_or_field_is_refused():
    with refuses("preset needs one of ['bench-8L', 'large', 'medium', 'small', 'tiny',"):
        mk.preset("huge")
    with refuses("ModelConfig needs top_k <= n_experts, got 4 of 2"):
        mk.preset("tiny", n_experts=2)
    with pytest.raises(TypeError, match="n_expert"):
        mk.preset("tiny", n_expert=8)
