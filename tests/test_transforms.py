import weakref

import pytest
import torch
from reference import as_rank, close, draw, flat, named_grads, packed_batch, refuses, small_config
from tensordict import TensorDict
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import moekit as mk
from moekit import transforms
from moekit.tree import held, map_named, nested


def tree(dtype=torch.float64, requires_grad=False):
    leaves = {"a": draw(3, seed=1), "in": {"b": draw(3, 2, seed=2), "c": draw(2, seed=3)}}
    return TensorDict(leaves).apply(lambda x: x.to(dtype).requires_grad_(requires_grad))


def loss_of(params, x, *, scale=1.0):
    """Return a loss that uses ``a`` three times; ``a`` is needed last in backward."""
    hidden = (x * params["a"]).tanh() * params["a"] + params["a"]
    return scale * (hidden @ params["in"]["b"] + params["in"]["c"]).square().sum()


def with_aux(params, x):
    return loss_of(params, x), {"n": torch.tensor(len(x)), "mean": (x * params["a"]).mean(0)}


X = draw(6, 3)
run = mk.value_and_grad(loss_of)


# --- value_and_grad -------------------------------------------------------------------


def test_loss_and_gradients_are_those_of_autograd_in_a_tree_like_the_parameters():
    value, grads = run(tree(), X, scale=2.0)
    want, want_grads = named_grads(lambda p: loss_of(p, X, scale=2.0), tree())
    close((value, flat(grads)), (want, want_grads))
    assert not value.requires_grad and list(flat(grads)) == ["a", "in.b", "in.c"]


def test_gradients_are_taken_under_no_grad_too():
    with torch.no_grad():
        value, grads = run(tree(), X)
    close((value, flat(grads)), (run(tree(), X)[0], flat(run(tree(), X)[1])))


@pytest.mark.parametrize("requires_grad", [True, False])
def test_the_callers_parameters_are_left_as_they_were(requires_grad):
    params = tree(requires_grad=requires_grad)
    before = params.clone()
    run(params, X)
    for name, p in flat(params).items():
        assert p.grad is None and p.requires_grad == requires_grad and torch.equal(p, flat(before)[name])
        assert not p._backward_hooks and not p._post_accumulate_grad_hooks


def test_a_grad_that_the_caller_keeps_is_not_touched():
    params = tree(requires_grad=True)
    for p in flat(params).values():
        p.grad = torch.full_like(p, 7)
    run(params, X)
    assert all(bool((p.grad == 7).all()) for p in flat(params).values())


def test_each_gradient_is_handed_over_once_complete_and_during_backward():
    events, seen = [], {}

    def loss(params, x):
        hidden = (x * params["a"]).tanh() * params["a"] + params["a"]
        hidden.register_hook(lambda grad: events.append("backward of what a is used in"))
        return (hidden @ params["in"]["b"] + params["in"]["c"]).square().sum()

    def on_grad(name, grad):
        events.append(name)
        seen[name] = grad.clone()

    mk.value_and_grad(loss)(tree(), X, on_grad=on_grad)
    assert sorted(events[:2]) == ["in.b", "in.c"] and events[2:] == ["backward of what a is used in", "a"]
    close(seen, flat(run(tree(), X)[1]))


def test_what_on_grad_returns_takes_the_gradients_place_and_none_leaves_it_out():
    _, grads = run(tree(), X)
    _, changed = run(tree(), X, on_grad=lambda name, g: None if name == "in.c" else (2 * g).float())
    assert list(flat(changed)) == ["a", "in.b"]
    close(flat(changed), {name: (2 * g).float() for name, g in flat(grads).items() if name != "in.c"})


def test_a_gradient_that_on_grad_leaves_out_is_freed_while_backward_goes_on():
    handed = []

    def on_grad(name, grad):
        assert all(earlier() is None for earlier in handed)
        handed.append(weakref.ref(grad))

    assert not run(tree(), X, on_grad=on_grad)[1].keys() and len(handed) == 3


def test_aux_comes_back_without_a_graph():
    (value, aux), grads = mk.value_and_grad(with_aux, has_aux=True)(tree(), X)
    close((value, flat(grads)), (run(tree(), X)[0], flat(run(tree(), X)[1])))
    close(aux, {"n": torch.tensor(6), "mean": (X * tree()["a"]).mean(0)})
    assert not aux["mean"].requires_grad


def test_an_aux_may_hold_what_is_no_tensor():
    (_, aux), _ = mk.value_and_grad(lambda p, x: (loss_of(p, x), ("note", 3)), has_aux=True)(tree(), X)
    assert aux == ("note", 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_gradients_have_the_dtype_of_their_parameters(dtype):
    assert {g.dtype for g in flat(run(tree(dtype), X.to(dtype))[1]).values()} == {dtype}


def test_every_parameter_that_no_gradient_reaches_is_named():
    with refuses("value_and_grad needs every parameter in the loss, no gradient reached in.b, in.c"):
        mk.value_and_grad(lambda p: p["a"].sum())(tree())
    with refuses("no gradient reached a, in.b, in.c"):
        mk.value_and_grad(lambda p: torch.ones(()))(tree())
    with refuses("no gradient reached a, in.b"):
        mk.value_and_grad(lambda p: p["in"]["c"].sum() + p["a"].detach().sum())(tree())


@pytest.mark.parametrize(
    ("loss", "has_aux", "message"),
    [
        (lambda p: p["a"], False, "value_and_grad needs loss_fn to return a 0-d tensor, got (3,)"),
        (lambda p: 1.0, False, "value_and_grad needs loss_fn to return a 0-d tensor, got float"),
        (lambda p: (p["a"].sum(), {}), False, "got tuple; for (loss, aux) pass has_aux=True"),
        (lambda p: p["a"].sum(), True, "needs loss_fn to return (loss, aux), got Tensor"),
        (lambda p: (p["a"], {}), True, "value_and_grad needs loss_fn to return a 0-d tensor, got (3,)"),
    ],
)
def test_a_loss_that_is_no_scalar_is_refused(loss, has_aux, message):
    with refuses(message):
        mk.value_and_grad(loss, has_aux=has_aux)(tree())


def test_parameters_that_are_no_floats_are_named_and_refused():
    with refuses("value_and_grad needs floating-point parameters, got torch.int64 for in.step", TypeError):
        run(tree().set(("in", "step"), torch.tensor(3)), X)


# --- accumulate -----------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 4])
@pytest.mark.parametrize("recompute", ["none", "block"])
def test_micro_batches_sum_to_one_call_of_the_whole_batch_balance_loss_and_counts_included(n, recompute):
    config = small_config(balance_weight=0.5, router_z_weight=0.2, head_z_weight=0.1)
    params, batch = mk.init_params(config, dtype=torch.float64), packed_batch()
    grad_fn = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    whole, grads = grad_fn(params, batch, config=config)
    block = mk.remat(mk.model.transformer_block, recompute)
    summed, sums = mk.accumulate(grad_fn, n)(params, batch, config=config, block=block)
    close((summed, flat(sums)), (whole, flat(grads)))
    assert list(flat(sums)) == list(flat(params))


@pytest.mark.parametrize("recompute", ["none", "block"])
def test_sums_that_the_loss_adds_to_itself_are_the_same_and_start_anew_in_buffers_used_again(recompute):
    config = small_config()
    params, batch = mk.init_params(config, dtype=torch.float64), packed_batch()
    block = mk.remat(mk.model.transformer_block, recompute)
    grad_fn = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    want = mk.accumulate(grad_fn, 2)(params, batch, config=config, block=block)[1]
    straight = mk.accumulate(grad_fn, 2, straight=mk.model.is_expert)
    sums = None
    for _ in range(2):
        _, sums = straight(params, batch, into=sums, config=config, block=block)
        close(flat(sums), flat(want))
        assert list(flat(sums)) == list(flat(params))


def test_a_sum_that_the_loss_never_adds_to_is_named():
    params = TensorDict({"a": torch.ones(2), "b": torch.ones(2)})
    grad_fn = mk.value_and_grad(lambda p, x, grad_into: (p["a"] * x).sum())
    with refuses("value_and_grad needs every parameter in the loss, no gradient reached b"):
        mk.accumulate(grad_fn, 1, straight=lambda name: name == "b")(params, torch.ones(1, 2))


def layer_of_one_s_own():
    """Parameters whose experts have no name before them, and tokens."""
    experts = {"gate_up": torch.ones(4, 8, 16).double(), "down": torch.ones(4, 8, 8).double()}
    return TensorDict({"router": torch.eye(8, 4).double(), "experts": experts}), torch.eye(8).double()


def test_experts_of_one_s_own_layer_go_straight_into_their_sums():
    params, x = layer_of_one_s_own()
    given = []

    def loss(params, x, grad_into=None):
        given.append(grad_into)
        into = None if grad_into is None else grad_into["experts"]
        return mk.moe(params, x, top_k=2, grad_into=into)[0].square().sum()

    got, want = (
        mk.accumulate(mk.value_and_grad(loss), 2, straight=straight)(params, x)[1]
        for straight in (mk.model.is_expert, None)
    )
    assert list(flat(given[0])) == ["experts.gate_up", "experts.down"] and given[-1] is None
    close(flat(got), flat(want))


def test_a_loss_that_takes_no_straight_sums_is_told_so_and_other_type_errors_stay():
    params, x = layer_of_one_s_own()
    grad_fn = mk.value_and_grad(lambda p, x: mk.moe(p, x, top_k=2)[0].sum())
    with pytest.raises(TypeError, match=r"a loss that takes grad_into with straight, .*leave straight out"):
        mk.accumulate(grad_fn, 1, straight=mk.model.is_expert)(params, x)
    with pytest.raises(TypeError, match=r"^.*<lambda>\(\) got an unexpected keyword argument 'bias'$"):
        mk.accumulate(grad_fn, 1)(params, x, bias=None)


def test_straight_sums_are_refused_where_they_have_no_effect():
    grad_fn = mk.value_and_grad(lambda p, x: (p["a"] * x).sum())
    with refuses("accumulate needs no on_grad with straight"):
        mk.accumulate(grad_fn, 1, straight=mk.model.is_expert, on_grad=lambda name, grad: grad)


def test_frozen_experts_are_left_out_and_the_others_go_straight_into_their_sums():
    config = small_config(n_layers=3)
    params, batch = mk.init_params(config, dtype=torch.float64), packed_batch()
    every = flat(params)
    for frozen in ("layers.1.moe.experts.", "layers.2.moe.experts.down", ".experts."):
        trained = nested({name: p for name, p in every.items() if frozen not in name})

        def loss(trained, batch, frozen=frozen, **options):
            rest = {name: p for name, p in every.items() if frozen in name}
            whole = {name: (flat(trained) | rest)[name] for name in every}
            return mk.next_token_loss(nested(whole), batch, config=config, **options)

        grad_fn = mk.value_and_grad(loss, has_aux=True)
        got, want = (
            mk.accumulate(grad_fn, 2, straight=straight)(trained, batch)[1]
            for straight in (mk.model.is_expert, None)
        )
        close(flat(got), flat(want))
    assert not any(p.grad is not None for p in every.values())


def test_straight_sums_of_others_than_experts_are_named():
    config = small_config()
    params, batch = mk.init_params(config, dtype=torch.float64), packed_batch()
    grad_fn = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    for chosen in ("embedding", "layers.1.moe.router"):
        run = mk.accumulate(grad_fn, 1, straight=lambda name, chosen=chosen: name == chosen)
        with refuses(f"(accumulate with straight=moekit.model.is_expert), got {chosen}"):
            run(params, batch, config=config)


@pytest.mark.parametrize("n", [1, 2, 4])
def test_the_balance_loss_of_equal_scores_is_one_a_layer_in_however_many_micro_batches(n):
    config, batch = small_config(n_dense_layers=0), packed_batch()
    params = mk.init_params(config, dtype=torch.float64)
    for layer in ("0", "1"):
        params["layers"][layer]["moe"]["router"].zero_()
    (_, stats), _ = mk.accumulate(mk.value_and_grad(mk.next_token_loss, has_aux=True), n)(
        params, batch, config=config
    )
    close(stats["load_balancing"], torch.tensor(2.0, dtype=torch.float64))
    assert stats["counts"].sum() == 2 * 2 * batch.n_tokens


def test_three_hundred_ones_sum_to_three_hundred_in_bfloat16():  # which has no 257
    params = TensorDict({"p": torch.ones(2, dtype=torch.bfloat16)})
    grad_fn = mk.value_and_grad(lambda p, x: (p["p"] * x).sum())
    _, grads = mk.accumulate(grad_fn, 300)(params, torch.ones(300, 1, dtype=torch.bfloat16))
    assert grads["p"].dtype == torch.float32 and grads["p"].tolist() == [300, 300]


@pytest.mark.parametrize("on_mesh", [False, True])
def test_parameters_whose_sum_is_read_get_sums_of_their_own(on_mesh):  # autograd gives both one gradient
    def difference(mesh):
        params = mk.mesh.distribute(TensorDict({"a": draw(3, seed=1), "b": draw(3, seed=2)}), mesh)
        read = lambda p: mk.local(p) if mesh else p.view(3)  # noqa: E731
        grad_fn = mk.value_and_grad(lambda p, x: (x * (read(p["a"]) + read(p["b"]))).sin().sum())
        want, got = (flat(grads) for _, grads in (grad_fn(params, X), mk.accumulate(grad_fn, 6)(params, X)))
        return {name: (held(got[name]) - held(want[name])).abs().max().item() for name in want}

    differences = as_rank(difference) if on_mesh else difference(None)
    assert max(differences.values()) < 1e-12, differences


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_sums_are_float32_at_least(dtype, kept):
    _, grads = mk.accumulate(run, 2)(tree(dtype), X.to(dtype))
    assert {g.dtype for g in flat(grads).values()} == {kept}


def test_scalars_of_the_batch_are_shared_and_the_rest_is_split():
    seen = []

    def loss(params, batch):
        seen.append((len(batch["x"]), batch["n"].item(), batch["name"]))
        return loss_of(params, batch["x"]) / batch["n"]

    batch = {"x": X, "n": torch.tensor(6.0), "name": "train"}
    value, _ = mk.accumulate(mk.value_and_grad(loss), 3)(tree(), batch)
    close(value, loss_of(tree(), X) / 6)
    assert seen == [(2, 6.0, "train")] * 3


def test_buffers_of_the_caller_are_overwritten_and_returned():
    accumulated = mk.accumulate(run, 3)
    _, want = accumulated(tree(), X)
    buffers = want.apply(lambda g: torch.full_like(g, torch.nan))
    _, got = accumulated(tree(), X, into=buffers)
    for name, g in flat(got).items():
        assert g.data_ptr() == flat(buffers)[name].data_ptr() and torch.equal(g, flat(want)[name])


def test_a_missing_buffer_is_made():
    _, want = run(tree(), X)
    _, got = mk.accumulate(run, 2)(tree(), X, into=TensorDict({"a": torch.empty(3, dtype=torch.float64)}))
    close(flat(got), flat(want))


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (
            torch.empty(3).bfloat16(),
            "needs a torch.float32 buffer (3,) for a, got torch.bfloat16 (3,); pass what",
        ),
        (torch.empty(2, 3), "accumulate needs a torch.float32 buffer (3,) for a, got torch.float32 (2, 3)"),
    ],
)
def test_buffers_that_would_lose_the_sum_are_refused(buffer, message):
    with refuses(message):
        mk.accumulate(run, 2)(tree(torch.bfloat16), X.bfloat16(), into=TensorDict({"a": buffer}))


def test_buffers_of_no_parameter_are_named_and_refused():
    buffers = TensorDict({"a": torch.empty(3, dtype=torch.float64), "in": {"d": torch.empty(2)}})
    with refuses("accumulate needs buffers of parameters, got ['in.d'] in into"):
        mk.accumulate(run, 2)(tree(), X, into=buffers)


@pytest.mark.parametrize(
    ("aux", "message"),
    [
        ({"tag": "a"}, "accumulate needs tensors, which it sums, got str at [1]['tag']; leave"),
        ({"n": X, "of": [None, 3]}, "got NoneType at [1]['of'][0], int at [1]['of'][1]"),
    ],
)
@pytest.mark.parametrize("n", [1, 2])
def test_an_aux_that_cannot_be_summed_over_micro_batches_is_named_and_refused(aux, message, n):
    with refuses(message, TypeError):
        mk.accumulate(mk.value_and_grad(lambda p, x: (loss_of(p, x), aux), has_aux=True), n)(tree(), X)


def test_on_grad_maps_each_micro_batchs_gradient_before_it_is_added_and_may_leave_it_out():
    calls = []

    def on_grad(name, grad):
        calls.append(name)
        return None if name == "in.c" else grad[:1] * 10

    _, got = mk.accumulate(run, 3, on_grad=on_grad)(tree(), X)
    assert sorted(calls) == sorted(["a", "in.b", "in.c"] * 3)
    close(flat(got), {name: 10 * g[:1] for name, g in flat(run(tree(), X)[1]).items() if name != "in.c"})


def test_batches_that_do_not_divide_and_numbers_below_one_are_refused():
    with refuses(
        "accumulate needs n_microbatches >= 1 that divides every leading dimension, got n_microbatches=4 and "
        "the tensor (6, 3)"
    ):
        mk.accumulate(run, 4)(tree(), X)
    with refuses("accumulate needs n_microbatches >= 1, got 0"):
        mk.accumulate(run, 0)


@pytest.mark.parametrize("one_by_one", [False, True])
def test_a_gradient_is_reduced_while_backward_makes_the_next_one_but_not_on_cpus(one_by_one):
    class Collectives(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if any(issubclass(t, DTensor) for t in types):
                return NotImplemented  # it unwraps itself, then we see what it calls
            if func.namespace == "_c10d_functional":
                calls.append(func._schema.name.removeprefix("_c10d_functional::"))
            return func(*args, **(kwargs or {}))

    calls = []

    def order(mesh):
        params = mk.mesh.distribute(tree(), mesh)
        optimizer = mk.shard_optimizer(mk.adamw(1e-3), reduce="micro_batch", mesh=mesh)
        loss = mk.value_and_grad(lambda p, x: loss_of(map_named(lambda _, leaf: mk.local(leaf), p), x))
        with Collectives(), pytest.MonkeyPatch.context() as patch:
            patch.setattr(transforms, "in_turn", lambda x: one_by_one)
            mk.accumulate(loss, 2, on_grad=optimizer.on_grad)(params, X)
        return calls

    reduce, wait = "reduce_scatter_tensor", "wait_tensor"
    want = [reduce, wait] * 3 if one_by_one else [reduce, reduce, wait, reduce, wait, wait]
    assert as_rank(order) == want * 2


# --- One process ----------------------------------------------------------------------


def test_without_a_mesh_nothing_is_summed_over_ranks():
    assert mk.data_parallel(run, mesh=None) is run
    aux = {"x": X}
    assert mk.mesh.sum_over_ranks(aux, mesh=None) is aux


@pytest.mark.parametrize("on_mesh", [False, True])
def test_what_cannot_be_summed_over_ranks_is_named_and_refused(on_mesh):
    def total(mesh):
        mk.mesh.sum_over_ranks({"loss": X, "of": (3, "a")}, mesh=mesh)

    message = "sum_over_ranks needs tensors, which it sums, got int at ['of'][0], str at ['of'][1]"
    with refuses(message, RuntimeError if on_mesh else TypeError):
        as_rank(total) if on_mesh else total(None)


@pytest.mark.parametrize("read", ["to_local", "full_tensor"])
def test_a_parameter_on_a_mesh_that_is_not_read_through_local_is_named(read):
    def gradient(mesh):
        params = mk.mesh.distribute(tree(), mesh)

        def total(p):
            return (mk.local(p["a"]).sum() + mk.local(p["in"]["c"]).sum()) * getattr(
                p["in"]["b"], read
            )().sum()

        mk.value_and_grad(total)(params)

    with refuses("[Partial(sum)] for in.b, got (Replicate(),); read the parameter through", RuntimeError):
        as_rank(gradient)


def test_data_parallel_inside_of_accumulate_is_refused():
    def gradient(mesh):
        params = mk.mesh.distribute(TensorDict({"w": X[0]}), mesh)
        grad_fn = mk.value_and_grad(lambda p, x: (x * mk.local(p["w"])).sum())
        mk.accumulate(mk.data_parallel(grad_fn, mesh=mesh), 2)(params, X)

    with refuses("write data_parallel(accumulate(grad_fn, n), mesh=mesh)", RuntimeError):
        as_rank(gradient)


# --- remat ----------------------------------------------------------------------------


def block(params, x, *, wrap=lambda name, fn: fn, calls=None):
    """Return a block of two parts that notes when each of them runs."""

    def first(z):
        calls.append("first")
        return (z * params["a"]).tanh().square()

    def second(z):
        calls.append("second")
        return (z.exp() @ params["in"]["b"] + params["in"]["c"]).sin()

    return wrap("second", second)(wrap("first", first)(x))


@pytest.mark.parametrize(
    ("recompute", "again"),
    [
        ("none", []),
        ((), []),
        ("block", ["first", "second"]),
        (["first"], ["first"]),
        ({"second"}, ["second"]),
        (iter(["first", "second"]), ["second", "first"]),
    ],
    ids=["none", "nothing", "block", "first", "second", "both"],
)
def test_what_is_named_runs_again_in_backward_and_the_gradient_keeps_its_bits(recompute, again):
    calls, handed = [], []
    plain = mk.value_and_grad(lambda p: block(p, X, calls=[]).sum())(tree())
    recomputed = mk.remat(block, recompute)
    value, grads = mk.value_and_grad(lambda p: recomputed(p, X, calls=calls).sum())(
        tree(), on_grad=lambda name, g: handed.append(name) or g
    )
    assert calls == ["first", "second", *again] and sorted(handed) == ["a", "in.b", "in.c"]
    assert torch.equal(value, plain[0])
    assert all(torch.equal(g, flat(plain[1])[name]) for name, g in flat(grads).items())


def test_a_recomputed_block_drops_out_the_same_numbers_again():
    def drops_out(params, x):
        return torch.nn.functional.dropout(x * params["a"]).sin() @ params["in"]["b"] + params["in"]["c"]

    def gradients(fn):
        torch.manual_seed(0)
        return flat(mk.value_and_grad(lambda p: fn(p, X).square().sum())(tree())[1])

    close(gradients(mk.remat(drops_out)), gradients(drops_out))


def test_a_recomputed_block_keeps_less_until_backward():
    kept = {}
    for recompute in ("none", ("first",), "block"):
        numbers = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda x, n=numbers: n.append(x.numel()) or x, lambda x: x
        ):
            params = tree(requires_grad=True)
            mk.remat(block, recompute)(params, X, calls=[]).sum()
        kept[recompute] = sum(numbers)
    assert kept["block"] < kept["first",] < kept["none"]


def test_nothing_to_recompute_returns_the_block_itself():
    assert mk.remat(block, "none") is block


def test_unknown_parts_are_refused():
    with refuses("remat needs 'none', 'block' or a list of parts, got 'first'"):
        mk.remat(block, "first")
    with refuses("remat needs parts of the block, ['first', 'second'], got ['attention', 'third']"):
        mk.remat(block, ["third", "first", "attention"])(tree(), X, calls=[])


@pytest.mark.parametrize("over", ["accumulate", "pipeline"])
def test_aux_is_added_by_name_and_other_names_or_shapes_are_refused(over):
    params, batch = TensorDict({"w": torch.ones(1)}), {"x": torch.ones(2, 1)}

    def run(*auxes):
        left = list(auxes)

        def loss(params, part):
            return (part["x"] * params["w"]).sum(), left.pop(0)

        if over == "accumulate":
            return mk.accumulate(mk.value_and_grad(loss, has_aux=True), 2)(params, batch)[0][1]
        stage = lambda params, x, part: (None, *loss(params, part))  # noqa: E731
        return mk.pipeline([stage], schedule=mk.schedules.gpipe(1, 2), boundary=lambda part: torch.empty(1))(
            params, batch
        )[0][1]

    a, b = torch.tensor(1.0), torch.tensor(10.0)
    assert run({"a": a, "b": b}, {"b": b, "a": a}) == {"a": 2.0, "b": 20.0}
    for other in ({"a": a, "c": b}, {"a": a}, {"a": a, "b": torch.ones(3)}):
        with pytest.raises(ValueError, match="needs aux of the same names and shapes"):
            run({"a": a, "b": b}, other)


@pytest.mark.parametrize(
    ("out", "says"),
    [
        ((None, torch.ones(())), r"needs \(y, loss, aux\) of each stage, stage 0 returned tuple"),
        (None, r"stage 0 returned NoneType"),
        ((None, 1.0, {}), "needs a 0-d loss tensor, stage 0 returned float"),
        ((None, torch.ones(1), {}), r"needs a 0-d loss tensor, stage 0 returned \(1,\) torch.float32"),
        ((torch.ones(1), torch.ones(()), {}), r"needs y of stage 0 to be NoneType, .* got \(1,\)"),
    ],
)
def test_a_stage_that_returns_something_else_is_told_what(out, says):
    run = mk.pipeline(
        [lambda *_: out], schedule=mk.schedules.gpipe(1, 1), boundary=lambda part: torch.empty(1)
    )
    with pytest.raises(ValueError, match=says):
        run(TensorDict({"w": torch.ones(1)}), {"x": torch.ones(1, 1)})
