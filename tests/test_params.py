import pytest
import torch
from hypothesis import given, strategies as st
from reference import as_rank, flat, refuses, small_config
from tensordict import TensorDict

import moekit as mk
from moekit.params import draw_slab, param_dtype, param_shapes

SHAPES = {
    "embedding": (17, 8),
    "embedding_norm": (8,),
    "layers.0.attention.qkv": (8, 32),
    "layers.0.attention.out": (16, 8),
    "layers.0.attention.q_norm": (4,),
    "layers.0.attention.k_norm": (4,),
    "layers.0.attention_norm_in": (8,),
    "layers.0.attention_norm_out": (8,),
    "layers.0.ffn_norm_in": (8,),
    "layers.0.ffn_norm_out": (8,),
    "layers.0.ffn.gate_up": (8, 24),
    "layers.0.ffn.down": (12, 8),
    "norm": (8,),
    "head": (8, 17),
}
EXPERTS = {
    "layers.0.moe.router": (8, 6),
    "layers.0.moe.experts.gate_up": (6, 8, 8),
    "layers.0.moe.experts.down": (6, 4, 8),
    "layers.0.moe.shared.gate_up": (8, 32),
    "layers.0.moe.shared.down": (16, 8),
}


def shapes_of(**changes):
    return param_shapes(small_config(n_layers=1, norm="peri", normalize_embedding=True, **changes))


def without(shapes, *parts):
    return {name: shape for name, shape in shapes.items() if not any(part in name for part in parts)}


def test_a_dense_model_has_these_parameters():
    assert shapes_of() == SHAPES


def test_a_layer_with_experts_has_router_experts_and_shared_expert():
    assert shapes_of(n_dense_layers=0) == without(SHAPES, ".ffn.") | EXPERTS
    assert shapes_of(n_dense_layers=0, d_shared=0) == without(SHAPES | EXPERTS, ".ffn.", "shared")


@pytest.mark.parametrize(
    ("changes", "absent"),
    [
        (dict(tied_head=True), ["head"]),
        (dict(normalize_embedding=False), ["embedding_norm"]),
        (dict(qk_norm="none"), ["q_norm", "k_norm"]),
        (dict(norm="pre"), ["norm_out"]),
        (dict(norm="post"), ["norm_in"]),
    ],
)
def test_choices_leave_parameters_out(changes, absent):
    choices = dict(n_layers=1, norm="peri", normalize_embedding=True) | changes
    assert param_shapes(small_config(**choices)) == without(SHAPES, *absent)


def test_full_width_query_and_key_norms_span_all_heads():
    widths = {"layers.0.attention.q_norm": (16,), "layers.0.attention.k_norm": (8,)}
    assert shapes_of(qk_norm="full") == SHAPES | widths


def test_the_tree_has_the_names_and_shapes_and_nothing_else():
    config = small_config(n_layers=3)
    params = mk.init_params(config)
    assert {name: tuple(p.shape) for name, p in flat(params).items()} == param_shapes(config)
    assert params["layers"]["1"]["moe"]["experts"]["down"] is flat(params)["layers.1.moe.experts.down"]


def test_matrices_are_normal_with_the_configured_deviation_and_gains_are_one():
    config = small_config(d_model=64, d_expert=64, vocab_size=512, init_std=0.25, norm="peri")
    for name, p in flat(mk.init_params(config)).items():
        if p.ndim == 1:
            assert bool((p == 1).all())
            continue
        z, n = p.flatten() / 0.25, p.numel()
        assert z.mean().abs() < 5 / n**0.5 and (z.square().mean() - 1).abs() < 5 * (2 / n) ** 0.5, name
        assert (z.pow(4).mean() - 3).abs() < 5 * (96 / n) ** 0.5, name


@given(st.integers(-(2**70), 2**70), st.text(max_size=5), st.integers(0, 10**6))
def test_a_slab_depends_on_seed_name_and_index_alone(seed, name, index):
    first = draw_slab(seed, name, index, (3,))
    torch.rand(1)
    assert torch.equal(draw_slab(seed, name, index, (3,)), first) and first.dtype == torch.float32
    for other in ((seed + 1, name, index), (seed, name + "x", index), (seed, name, index + 1)):
        assert not torch.equal(draw_slab(*other, (3,)), first)


def test_the_global_generator_is_neither_read_nor_moved():
    torch.manual_seed(0)
    first, state = mk.init_params(small_config()), torch.get_rng_state()
    torch.rand(5)
    again = mk.init_params(small_config())
    assert all(torch.equal(p, flat(again)[name]) for name, p in flat(first).items())
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)


def test_another_seed_draws_other_values_everywhere():
    first, second = (flat(mk.init_params(small_config(), seed=seed)) for seed in (0, 1))
    for name, p in first.items():
        assert p.ndim == 1 or not (p == second[name]).any()


def test_more_experts_layers_or_tokens_leave_the_values_of_the_others():
    few = flat(mk.init_params(small_config()))
    many = flat(mk.init_params(small_config(n_experts=12, n_layers=3, vocab_size=20)))
    for name in set(few) - {"head", "layers.1.moe.router"}:
        assert torch.equal(many[name][: len(few[name])], few[name])


@pytest.mark.parametrize(
    ("dtype", "router"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_values_are_those_of_float32_in_another_dtype_and_routers_are_float32_at_least(dtype, router):
    exact = flat(mk.init_params(small_config()))
    for name, p in flat(mk.init_params(small_config(), dtype=dtype)).items():
        assert p.dtype == param_dtype(name, dtype) == (router if name.endswith("router") else dtype)
        assert torch.equal(p, exact[name].to(p.dtype))


def test_meta_parameters_have_shapes_and_dtypes_and_no_storage():
    config = mk.preset("ultra-128")
    params = flat(mk.init_params(config, dtype=torch.bfloat16, device="meta"))
    assert all(p.is_meta for p in params.values())
    assert {name: tuple(p.shape) for name, p in params.items()} == param_shapes(config)
    assert params["layers.2.moe.router"].dtype == torch.float32 and params["head"].dtype == torch.bfloat16


@pytest.mark.parametrize(("edp", "ep", "rank"), [(1, 2, 1), (2, 3, 4), (4, 6, 11), (8, 1, 3)])
def test_a_rank_draws_its_own_experts_alone_and_they_are_those_of_one_process(edp, ep, rank):
    config = small_config()

    def draw(mesh):
        return {name: (p.to_local(), p.shape) for name, p in flat(mk.init_params(config, mesh=mesh)).items()}

    held = as_rank(draw, rank, edp, ep)
    e, i = 6 // ep, rank % ep
    for name, p in flat(mk.init_params(config)).items():
        local, shape = held[name]
        assert torch.equal(local, p[i * e : (i + 1) * e] if "experts" in name else p) and shape == p.shape


def test_the_table_tells_placement_and_bytes_of_a_rank():
    config = small_config(n_layers=1, n_dense_layers=0, d_shared=0, qk_norm="none")

    def table(mesh):
        return mk.describe(mk.init_params(config, dtype=torch.bfloat16, mesh=mesh))

    assert as_rank(table).splitlines() == [
        "name                          shape      dtype     placement         bytes per rank",
        "embedding                     (17, 8)    bfloat16  dp: R                        272",
        "layers.0.attention.qkv        (8, 32)    bfloat16  dp: R                        512",
        "layers.0.attention.out        (16, 8)    bfloat16  dp: R                        256",
        "layers.0.attention_norm_in    (8,)       bfloat16  dp: R                         16",
        "layers.0.ffn_norm_in          (8,)       bfloat16  dp: R                         16",
        "layers.0.moe.router           (8, 6)     float32   dp: R                        192",
        "layers.0.moe.experts.gate_up  (6, 8, 8)  bfloat16  edp: R, ep: S(0)             256",
        "layers.0.moe.experts.down     (6, 4, 8)  bfloat16  edp: R, ep: S(0)             128",
        "norm                          (8,)       bfloat16  dp: R                         16",
        "head                          (8, 17)    bfloat16  dp: R                        272",
        "total                                                                         1,936",
    ]


def test_the_table_of_plain_tensors_has_no_placement():
    params = TensorDict({"b": torch.zeros(3, 1000), "a": {"c": torch.zeros((), dtype=torch.int64)}})
    assert mk.describe(params).splitlines() == [
        "name   shape      dtype    placement  bytes per rank",
        "b      (3, 1000)  float32  -                  12,000",
        "a.c    ()         int64    -                       8",
        "total                                         12,008",
    ]


def test_bad_input_is_refused():
    for dtype in (torch.int64, torch.float16):
        with refuses(f"init_params needs bfloat16, float32 or float64, got {dtype}"):
            mk.init_params(small_config(), dtype=dtype)
    message = "layers.1.moe.experts.gate_up needs the ep axis to divide its 6 experts, got ep=4"
    with refuses(message, RuntimeError):
        as_rank(lambda mesh: mk.init_params(small_config(), mesh=mesh), edp=2, ep=4)
