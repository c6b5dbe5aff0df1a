import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from tensordict import TensorDict
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from moekit._shard_optimizer import shard_optimizer
from moekit.optim import (
    Optimizer,
    Scaled,
    adamw,
    chain,
    clip_by_global_norm,
    global_norm,
    unscale,
    warmup_cosine,
    warmup_linear,
)
from moekit.tree import named, nested

SHAPES = {"embedding": (7, 3), "layers.0.norm": (3,), "layers.0.experts.up": (4, 3, 5), "gain": ()}


def random_tree(seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return nested({name: torch.randn(shape, generator=generator).to(dtype) for name, shape in SHAPES.items()})


def clone(params):
    return nested({name: p.clone() for name, p in named(params).items()})


def torch_adamw(params, steps, clip=None, schedule=None, mask=None, **options):
    """Return the parameters after ``torch.optim.AdamW`` saw the gradients ``random_tree(step)``."""
    leaves = {name: torch.nn.Parameter(p.clone()) for name, p in named(params).items()}
    decay = options.pop("weight_decay", 0.0)
    groups = [
        {"params": [p], "weight_decay": decay if mask is None or mask(n, p) else 0.0}
        for n, p in leaves.items()
    ]
    optimizer = torch.optim.AdamW(groups, **options)
    lr = torch.optim.lr_scheduler.LambdaLR(optimizer, schedule) if schedule else None
    for step in range(steps):
        for name, g in named(random_tree(step, params["embedding"].dtype)).items():
            leaves[name].grad = g
        if clip:
            torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
        optimizer.step()
        if lr:
            lr.step()
    return {name: p.detach() for name, p in leaves.items()}


def run(optimizer, params, steps):
    state = optimizer.init(params)
    for step in range(steps):
        optimizer.update(random_tree(step, params["embedding"].dtype), state, params)
    return state


def assert_trees_close(got, want, **tolerance):
    got, want = named(got), want if isinstance(want, dict) else named(want)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance
        )


EXACT = {"rtol": 0, "atol": 0}
CLOSE = {"rtol": 1e-6, "atol": 1e-7}
OPTIONS = {"eps": 1e-8, "weight_decay": 0.1}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adamw_equals_torchs_fused_adamw_to_the_bit(dtype):
    params = random_tree(-1, dtype)
    want = torch_adamw(params, 20, fused=True, lr=1e-2, betas=(0.9, 0.95), **OPTIONS)
    run(adamw(1e-2, **OPTIONS), params, 20)
    assert_trees_close(params, want, **EXACT)


def test_adamw_with_clip_mask_and_schedule_equals_torch():
    params, mask = random_tree(-1), lambda name, p: p.ndim > 1
    schedule = warmup_cosine(1e-2, warmup_steps=4, total_steps=16)
    want = torch_adamw(
        params,
        20,
        2.0,
        lambda i: float(schedule(torch.tensor(i))),
        mask,
        lr=1.0,
        betas=(0.9, 0.95),
        **OPTIONS,
    )
    run(chain(clip_by_global_norm(2.0), adamw(schedule, mask=mask, **OPTIONS)), params, 20)
    assert_trees_close(params, want, **CLOSE)


def test_clipped_steps_in_float64_are_exact_to_float64():
    params = random_tree(-1, torch.float64)
    want = torch_adamw(params, 5, 0.3, lr=1e-2, betas=(0.9, 0.95), eps=1.0)  # eps: where the scale is seen
    state = run(chain(clip_by_global_norm(0.3), adamw(1e-2, eps=1.0)), params, 5)
    assert_trees_close(params, want, rtol=1e-13, atol=1e-14)
    assert state["0", "norm"].dtype == torch.float32


def test_leaves_of_two_dtypes_are_clipped_by_one_norm():
    def tree(a, b):
        return nested({"a": torch.tensor(a, dtype=torch.float64), "b": torch.tensor(b)})

    params, grads = tree([1.0, 2.0], [3.0, 4.0]), tree([2.0, 4.0], [4.0, 8.0])
    optimizer = chain(clip_by_global_norm(1.0), adamw(1e-2, b1=0.0, b2=0.0, eps=0.0))
    state = optimizer.init(params)
    optimizer.update(grads, state, params)
    scaled, scale = state["1", "exp_avg"], 1 / (10 + 1e-6)
    want = tree([2 * scale, 4 * scale], [4 * scale, 8 * scale])
    torch.testing.assert_close(scaled["a"], want["a"], rtol=1e-14, atol=0)
    torch.testing.assert_close(scaled["b"], want["b"], rtol=2e-7, atol=0)


def test_update_works_in_place_and_returns_its_arguments():
    params = random_tree(-1)
    before = {name: p.data_ptr() for name, p in named(params).items()}
    optimizer = chain(clip_by_global_norm(1.0), adamw(1e-2))
    state = optimizer.init(params)
    kept = {name: s.data_ptr() for name, s in named(state).items()}
    out = optimizer.update(random_tree(0), state, params)
    assert out[0] is params and out[1] is state
    assert before == {name: p.data_ptr() for name, p in named(params).items()}
    assert kept == {name: s.data_ptr() for name, s in named(state).items()}


def test_state_has_stable_names():
    state = chain(clip_by_global_norm(1.0), adamw(1e-2)).init(random_tree(-1))
    assert list(named(state)) == [
        *("0.norm", "0.skipped", "1.step", "1.lr"),
        *(f"1.exp_avg.{name}" for name in SHAPES),
        *(f"1.exp_avg_sq.{name}" for name in SHAPES),
    ]


def test_gradients_in_another_memory_order_or_dtype_are_read_right():
    params, want = random_tree(-1), random_tree(-1)
    grads = random_tree(0, torch.bfloat16)
    odd = clone(grads)
    odd["embedding"] = grads["embedding"].T.contiguous().T
    odd["layers", "0", "experts", "up"] = (
        grads["layers", "0", "experts", "up"].permute(2, 0, 1).clone().permute(1, 2, 0)
    )
    assert not odd["embedding"].is_contiguous()
    for p, g in ((params, odd), (want, nested({n: x.float() for n, x in named(grads).items()}))):
        optimizer = adamw(1e-2)
        optimizer.update(g, optimizer.init(p), p)
    assert_trees_close(params, want, **EXACT)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("wrap", [lambda o: o, shard_optimizer], ids=["plain", "masters"])
def test_a_gradient_that_is_not_finite_skips_the_step(bad, wrap):
    optimizer = wrap(chain(clip_by_global_norm(1.0), adamw(1e-2, weight_decay=0.1)))
    params, want = random_tree(-1), random_tree(-1)
    state, want_state = optimizer.init(params), optimizer.init(want)
    for step in range(4):
        if step == 2:
            grads, frozen, frozen_state = random_tree(9), clone(params), clone(state)
            grads["layers", "0", "norm"][1] = bad
            optimizer.update(grads, state, params)
            assert_trees_close(params, frozen, **EXACT)
            changed = {n for n, x in named(state).items() if not torch.equal(x, named(frozen_state)[n])}
            assert {name.rpartition(".")[2] for name in changed} == {"norm", "skipped"}
        optimizer.update(random_tree(step), state, params)
        optimizer.update(random_tree(step), want_state, want)
    assert_trees_close(params, want, **EXACT)
    clip = state["0"] if wrap is not shard_optimizer else state["inner", "0"]
    assert clip["skipped"] == 1
    assert torch.isfinite(clip["norm"])


def test_the_clip_reports_the_norm_before_it():
    optimizer = chain(clip_by_global_norm(0.5), adamw(1e-2))
    params = nested({"w": torch.zeros(2), "v": torch.zeros(2)})
    state = optimizer.init(params)
    optimizer.update(nested({"w": torch.tensor([2.0, 4.0]), "v": torch.tensor([4.0, 8.0])}), state, params)
    assert state["0", "norm"] == 10 and state["0", "skipped"] == 0


def test_unscale_multiplies():
    grads = random_tree(0)
    for got in (
        unscale(Scaled(grads, torch.tensor(0.25))),
        unscale(nested({n: g / 4 for n, g in named(grads).items()})),
    ):
        assert_trees_close(got, {name: g / 4 for name, g in named(grads).items()}, **EXACT)


def test_a_link_of_ones_own_fits_into_a_chain():
    sign = Optimizer(
        lambda params: TensorDict({}),
        lambda grads, state, params: (nested({n: g.sign() for n, g in named(unscale(grads)).items()}), state),
    )
    params, want = random_tree(-1), random_tree(-1)
    optimizer = chain(clip_by_global_norm(1.0), sign, adamw(1e-2))
    optimizer.update(random_tree(0), optimizer.init(params), params)
    plain = adamw(1e-2)
    plain.update(nested({n: g.sign() for n, g in named(random_tree(0)).items()}), plain.init(want), want)
    assert_trees_close(params, want, **EXACT)


@pytest.mark.parametrize(
    "dtypes", [("float32",) * 2, ("bfloat16",) * 2, ("bfloat16", "float32"), ("float64", "bfloat16")]
)
def test_the_global_norm_of_2_4_and_4_8_is_10(dtypes):
    a, b = (getattr(torch, dtype) for dtype in dtypes)
    grads = nested(
        {"a": torch.tensor([2, 4], dtype=a), "b": torch.tensor([4, 8], dtype=b), "none": torch.zeros(0, 3)}
    )
    assert global_norm(grads).item() == pytest.approx(10, rel=1e-6)


def test_the_global_norm_of_empty_gradients_is_zero():
    assert global_norm(nested({"a": torch.zeros(0, 3)})) == 0


def test_masters_keep_updates_that_bfloat16_loses():
    params = nested({"w": torch.ones(4, dtype=torch.bfloat16)})
    optimizer = shard_optimizer(adamw(1e-4, eps=0.0))
    state = optimizer.init(params)
    for _ in range(100):
        optimizer.update(nested({"w": torch.ones(4, dtype=torch.bfloat16)}), state, params)
    torch.testing.assert_close(state["master", "w"], torch.full((4,), 0.99), rtol=1e-5, atol=0)
    assert params["w"].equal(state["master", "w"].bfloat16()) and params["w"].dtype == torch.bfloat16


def test_shard_optimizer_without_a_mesh_equals_the_optimizer():
    params, want = random_tree(-1), random_tree(-1)
    run(chain(clip_by_global_norm(1.0), adamw(1e-2)), want, 5)
    state = run(shard_optimizer(chain(clip_by_global_norm(1.0), adamw(1e-2))), params, 5)
    assert_trees_close(params, want, **EXACT)
    assert_trees_close(state["master"], want, **EXACT)


def test_micro_batch_without_a_mesh_hands_back_float32():
    optimizer = shard_optimizer(adamw(1e-2), reduce="micro_batch")
    assert optimizer.on_grad("w", torch.ones(2, dtype=torch.bfloat16)).dtype == torch.float32
    assert shard_optimizer(adamw(1e-2)).on_grad is None
    assert chain(clip_by_global_norm(1.0), optimizer).on_grad is optimizer.on_grad


def test_warmup_cosine_by_hand():
    schedule = warmup_cosine(2.0, warmup_steps=4, total_steps=12, floor=1.0)
    root = math.sqrt(0.5) / 2
    want = {0: 0.5, 1: 1, 2: 1.5, 3: 2, 4: 2, 6: 1.5 + root, 8: 1.5, 10: 1.5 - root, 12: 1, 13: 1, 10**6: 1}
    for step, lr in want.items():
        got = schedule(torch.tensor(step))
        assert got.item() == pytest.approx(lr, rel=1e-6) and got.shape == () and got.dtype == torch.float32


def test_warmup_linear_by_hand():
    schedule = warmup_linear(1.0, warmup_steps=2, total_steps=6)
    assert [schedule(torch.tensor(i)).item() for i in range(8)] == [0.5, 1, 1, 0.75, 0.5, 0.25, 0, 0]
    assert warmup_linear(1.0, warmup_steps=0, total_steps=2)(torch.tensor(0)) == 1


@settings(max_examples=50)
@given(
    st.sampled_from([warmup_cosine, warmup_linear]),
    st.integers(0, 50),
    st.integers(1, 50),
    st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
def test_schedules_rise_to_the_peak_and_fall_to_the_floor(schedule, warmup, rest, floor):
    lr = schedule(1.0, warmup_steps=warmup, total_steps=warmup + rest, floor=floor)
    values = [lr(torch.tensor(i)).item() for i in range(warmup + rest + 2)]
    assert values[: warmup + 1] == sorted(values[: warmup + 1])
    assert values[warmup:] == sorted(values[warmup:], reverse=True)
    assert values[warmup] == pytest.approx(1) and values[-1] == pytest.approx(floor)
    assert min(values[: warmup + rest]) > 0 or floor == 0


def test_an_update_reads_nothing_back_from_the_device():
    # Fake tensors have no values: whatever reads one raises.
    optimizer = shard_optimizer(
        chain(clip_by_global_norm(1.0), adamw(warmup_cosine(1e-3, warmup_steps=2, total_steps=9)))
    )
    with FakeTensorMode():
        params, grads = (nested({n: torch.ones(s) for n, s in SHAPES.items()}) for _ in range(2))
        state = optimizer.init(params)
        optimizer.update(grads, state, params)
        with pytest.raises(DataDependentOutputException):
            state["inner", "1", "step"].item()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: adamw(-1e-3), "adamw needs a finite lr >= 0 or a schedule, got -0.001"),
        (lambda: adamw(math.nan), "got nan"),
        (lambda: adamw(1e-3, b1=1.0), r"b1 and b2 in \[0, 1\), got b1=1.0, b2=0.95"),
        (lambda: adamw(1e-3, b2=-0.1), r"b1=0.9, b2=-0.1"),
        (lambda: adamw(1e-3, eps=-1.0), "eps=-1.0"),
        (lambda: adamw(1e-3, eps=math.inf), "finite eps >= 0 and weight_decay >= 0, got eps=inf"),
        (lambda: adamw(1e-3, weight_decay=-0.1), "weight_decay=-0.1"),
        (lambda: adamw(1e-3, weight_decay=math.inf), "weight_decay=inf"),
        (lambda: clip_by_global_norm(0.0), "max_norm > 0, got 0.0"),
        (lambda: clip_by_global_norm(math.nan), "max_norm > 0, got nan"),
        (lambda: warmup_cosine(1.0, warmup_steps=5, total_steps=5), "warmup_steps=5, total_steps=5"),
        (lambda: warmup_linear(1.0, warmup_steps=-1, total_steps=5), "warmup_steps=-1"),
        (lambda: warmup_linear(1.0, warmup_steps=1, total_steps=5, floor=2.0), "floor=2.0, peak=1.0"),
        (lambda: warmup_cosine(-1.0, warmup_steps=1, total_steps=5), "peak=-1.0"),
        (lambda: warmup_cosine(math.inf, warmup_steps=1, total_steps=5), "a finite peak, got .*peak=inf"),
        (lambda: shard_optimizer(adamw(1e-3), reduce="x"), "reduce='step' or 'micro_batch', got 'x'"),
        (lambda: shard_optimizer(adamw(1e-3), bucket_bytes=-1), "bucket_bytes >= 0, got -1"),
        (lambda: shard_optimizer(shard_optimizer(adamw(1e-3), reduce="micro_batch")), "wrap it only once"),
        (
            lambda: chain(*[shard_optimizer(adamw(1e-3), reduce="micro_batch")] * 2),
            "at most one link with an on_grad",
        ),
        (
            lambda: adamw(1e-3).init(nested({"w": torch.ones(2, dtype=torch.bfloat16)})),
            "bfloat16 .* for w; shard_opt",
        ),
        (lambda: adamw(1e-3).init(nested({"w": torch.ones(2, 3).T})), "contiguous"),
        (lambda: adamw(1e-3).init(TensorDict({})), "at least one tensor"),
        (lambda: shard_optimizer(adamw(1e-3)).init(nested({"w": torch.ones(2).long()})), "int64 for w"),
        (lambda: global_norm(TensorDict({})), "at least one tensor"),
    ],
)
def test_wrong_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("wrap", [lambda x: x, shard_optimizer])
def test_two_names_of_one_tensor_are_refused(wrap):
    w = torch.ones(3, 3)
    for other in (w, w.T):
        with pytest.raises(ValueError, match="memory of their own, got one for embedding and head; keep one"):
            wrap(adamw(0.1)).init(TensorDict({"embedding": w, "gain": torch.ones(2), "head": other}))
    halves = TensorDict(dict(zip("ab", torch.ones(6).split(3), strict=True)))  # of one buffer: each its own
    assert wrap(adamw(0.1)).init(halves).keys()
    empty = TensorDict({name: torch.ones(0, 3) for name in "ab"})  # as of ranks without a part
    assert wrap(adamw(0.1)).init(empty).keys()


def test_a_chain_is_made_of_optimizers():
    with pytest.raises(TypeError, match="chain needs one or more optimizers"):
        chain()


@pytest.mark.parametrize("wrap", [lambda o: o, shard_optimizer], ids=["plain", "masters"])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda g: g.pop("embedding"), r"missing: \['embedding'\], not a parameter: \[\]"),
        (lambda g: g.set("bias", torch.ones(1)), r"missing: \[\], not a parameter: \['bias'\]"),
        (lambda g: g.set("embedding", torch.ones(3, 7)), r"got \(3, 7\) for embedding, which has \(7, 3\)"),
    ],
)
def test_gradients_of_other_names_or_shapes_are_named_and_change_nothing(wrap, change, message):
    optimizer = wrap(chain(clip_by_global_norm(1.0), adamw(1e-2)))
    params, grads = random_tree(-1), random_tree(0)
    state = optimizer.init(params)
    change(grads)
    before, before_params = clone(state), clone(params)
    with pytest.raises(ValueError, match=message):
        optimizer.update(grads, state, params)
    assert_trees_close(params, before_params, **EXACT)
    assert_trees_close(state, before, **EXACT)


def test_gradients_scaled_outside_of_shard_optimizer_are_refused():
    optimizer = chain(clip_by_global_norm(1.0), shard_optimizer(adamw(1e-2)))
    params = random_tree(-1)
    with pytest.raises(TypeError, match="put the clip inside"):
        optimizer.update(random_tree(0), optimizer.init(params), params)


def test_the_state_of_another_optimizer_is_refused():
    params = random_tree(-1)
    other = adamw(1e-2).init(params)
    with pytest.raises(ValueError, match="needs the state of its 2 links"):
        chain(clip_by_global_norm(1.0), adamw(1e-2)).update(random_tree(0), other, params)


def not_in_place():
    """Return an optimizer that makes new parameters."""
    return Optimizer(
        lambda params: TensorDict({}), lambda grads, state, params: (params.apply(lambda p: p - 1), state)
    )


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: shard_optimizer(clip_by_global_norm(1.0)),
            "ends in one that returns parameters, got .*Sca",
        ),
        (lambda: shard_optimizer(not_in_place()), "shard_optimizer needs an optimizer that updates in place"),
        (lambda: chain(clip_by_global_norm(1.0)), "got another Scaled from link 0 of 0..0"),
        (lambda: chain(adamw(1e-2), clip_by_global_norm(1.0)), "got the parameters from link 0 of 0..1"),
        (
            lambda: chain(clip_by_global_norm(1.0), not_in_place()),
            "got another TensorDict from link 1 of 0..1",
        ),
    ],
)
def test_an_optimizer_that_would_not_train_is_refused(make, message):
    optimizer, params = make(), random_tree(-1)
    with pytest.raises(TypeError, match=message):
        optimizer.update(random_tree(0), optimizer.init(params), params)
