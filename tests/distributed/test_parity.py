"""The same loss and gradients on every layout as in one process: 1e-10 in float64."""

import itertools

import pytest
import torch
import torch.distributed as dist
from pages import run
from torch.distributed.tensor import Partial, Shard

import moekit as mk
from moekit.testing import check_gradients, ranks

from .tiny import BATCH, model

MESHES = [(edp, ep) for edp, ep in itertools.product((1, 2, 4, 8), repeat=2) if edp * ep <= 8]
LAYOUTS = [
    dict(edp=edp, ep=ep, accumulate=accumulate, recompute=recompute, via=via)
    for (edp, ep), accumulate, recompute, via in itertools.product(
        MESHES, (1, 2), ("none", "block", ("ffn",)), ("local", "all_to_all", "all_gather")
    )
    if via != "local" or ep == 1
]
BASE = "softmax, shared expert, dense first layer, pre-norm"
BIASES = torch.linspace(-0.4, 0.4, 16, dtype=torch.float64).view(2, 8)
MODELS = {  # name: (changes of the configuration, options of the loss)
    BASE: ({}, {}),
    "sigmoid, biases, post-norm, full-width QK-norm, tied head": (
        dict(n_dense_layers=0, d_dense=0, d_shared=0, score="sigmoid", route_scale=2.5, norm="post")
        | dict(qk_norm="full", tied_head=True),
        dict(biases=BIASES),
    ),
    "groups, unnormalised, peri-norm, scaled embedding": (
        dict(
            n_groups=4, top_groups=2, normalize="none", norm="peri", qk_norm="none", normalize_embedding=True
        ),
        {},
    ),
    "random assignment": (dict(d_shared=0), dict(assignment="random", key=mk.random.make_key(3))),
    "uniform assignment, top-1": (
        dict(top_k=1, normalize="none"),
        dict(assignment="uniform", key=mk.random.make_key(4)),
    ),
    "every token to every expert": (dict(top_k=8), {}),
    "balance over the batch": (dict(balance_population="batch", balance_weight=3.0), {}),
    "balance over the micro-batch": (dict(balance_population="micro_batch", balance_weight=3.0), {}),
}


ALL_GATHER = run("transport.md", 1)["all_gather"]  # the transport that the documentation shows


def loss_of(name):
    changes, options = MODELS[name]
    config, params = model(**changes)

    def loss(params, batch, *, mesh, via=None, recompute="none", **more):
        via = ALL_GATHER if via == "all_gather" else via
        block = mk.remat(mk.model.transformer_block, recompute)
        more |= dict(via=via, block=block)
        return mk.next_token_loss(params, batch, config=config, mesh=mesh, **options, **more)

    return loss, params


def layouts_of(name, layouts):
    """Return those on which the loss is defined not to depend on the split."""
    whole = MODELS[name][0].get("balance_population", "document") != "document"
    return [layout for layout in layouts if not (whole and layout.get("accumulate", 1) > 1)]


@pytest.mark.parametrize("name", MODELS)
def test_every_parameter_of_these_models_has_a_gradient(name):
    loss, params = loss_of(name)
    _, grads = mk.value_and_grad(lambda *args: loss(*args, mesh=None), has_aux=True)(params, BATCH)
    assert all(g.abs().max() > 1e-3 for g in grads.values(True, True))


def test_every_gradient_of_these_models_says_what_is_still_to_be_summed():
    def check():
        mesh = mk.make_mesh(edp=2, ep=2, device="cpu")
        for name in MODELS:
            loss, params = loss_of(name)
            grad_fn = mk.value_and_grad(lambda *args, loss=loss: loss(*args, mesh=mesh), has_aux=True)
            _, grads = grad_fn(
                mk.mesh.distribute(params, mesh), mk.batch.split_batch(BATCH, 4)[dist.get_rank()]
            )
            for key, g in grads.items(True, True):
                want = (Partial(), Shard(0)) if "experts" in key else (Partial(),)
                assert g.placements == want, f"{key} of {name}: {g.placements}"

    ranks(4)(check)


def test_sums_that_the_loss_adds_to_itself_lie_on_a_mesh_as_the_others_do():
    def check():
        mesh = mk.make_mesh(edp=2, ep=2, device="cpu")
        loss, params = loss_of(next(iter(MODELS)))
        params = mk.mesh.distribute(params, mesh)
        batch = mk.batch.split_batch(BATCH, 4)[dist.get_rank()]
        grad_fn = mk.value_and_grad(lambda *args, **into: loss(*args, mesh=mesh, **into), has_aux=True)
        want = mk.accumulate(grad_fn, 1)(params, batch)[1]
        got = mk.accumulate(grad_fn, 1, straight=mk.model.is_expert)(params, batch)[1]
        for key, g in want.items(True, True):
            assert got[key].placements == g.placements
            torch.testing.assert_close(got[key].to_local(), g.to_local(), rtol=1e-12, atol=1e-12)

    ranks(4)(check)


@pytest.mark.parametrize("i", range(len(MODELS)), ids=list(MODELS))
def test_models_are_the_same_on_selected_layouts(i):
    name = list(MODELS)[i]
    check_gradients(*loss_of(name), BATCH, layouts_of(name, LAYOUTS)[11 * i % 53 :: 53])


def test_every_mesh_up_to_8_ranks_gives_the_same_gradients():
    layouts = [dict(edp=edp, ep=ep, accumulate=2) for edp, ep in MESHES]
    check_gradients(*loss_of(BASE), BATCH, layouts)


def test_ranks_may_hold_unequal_numbers_of_rows_or_none():
    layouts = [
        dict(edp=2, rows=[16, 0], accumulate=2),
        dict(ep=2, rows=[0, 16], accumulate=4, recompute="block"),
        dict(ep=4, rows=[3, 0, 12, 1]),
        dict(edp=2, ep=2, rows=[6, 4, 6, 0], accumulate=2, recompute=("attention", "ffn")),
        dict(edp=2, ep=4, rows=[0, 0, 5, 0, 10, 0, 0, 1]),
    ]
    check_gradients(*loss_of(BASE), BATCH, layouts)
    check_gradients(*loss_of("random assignment"), BATCH, layouts[2::2])


def test_float32_agrees_to_its_own_accuracy():
    loss, params = loss_of(BASE)
    check_gradients(loss, params.float(), BATCH, [dict(ep=2), dict(edp=2, ep=2, accumulate=2)])


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_models_are_the_same_on_all_layouts(name):
    check_gradients(*loss_of(name), BATCH, layouts_of(name, LAYOUTS))
