from types import SimpleNamespace

import pytest
import torch
from reference import (
    close,
    draw,
    feed_forward as plain_feed_forward,
    moe as plain_moe,
    named_grads,
    refuses,
    with_grads,
)
from tensordict import TensorDict

import moekit as mk
from moekit._moe import feed_forward

E, D, H = 6, 8, 8
KEY = mk.random.make_key(1)


def layer(dtype=torch.float64, shared=True):
    tree = {
        "router": draw(D, E, seed=1),
        "experts": {"gate_up": draw(E, D, 2 * H, seed=2), "down": draw(E, H, D, seed=3)},
    }
    if shared:
        tree["shared"] = {"gate_up": draw(D, 4 * H, seed=4), "down": draw(2 * H, D, seed=5)}
    params = TensorDict(tree).apply(lambda x: x.to(dtype))
    return params.set("router", tree["router"].to(torch.promote_types(dtype, torch.float32)))


def run(fn, params, x, **options):
    """Return the output, and the gradients of the parameters and of the tokens by name."""
    projection = draw(*x.shape, seed=9).to(x.dtype)
    grads = named_grads(
        lambda p: (fn(p, p["x"], **options)[0] * projection).sum(), params.copy().set("x", x)
    )[1]
    return fn(params, x, **options)[0], grads


@pytest.mark.parametrize("shared", [True, False], ids=["shared", "routed alone"])
@pytest.mark.parametrize(
    "options",
    [
        dict(top_k=1, normalize="none"),
        dict(top_k=2, scale=4.0),
        dict(top_k=3, score="sigmoid", bias=draw(E, seed=6)),
        dict(top_k=2, n_groups=3, top_groups=2),
        dict(top_k=E, score="sigmoid", normalize="none", scale=0.5),
    ],
    ids=lambda options: "-".join(map(str, options)),
)
def test_output_and_gradients_are_those_of_every_token_through_its_experts(options, shared):
    params, x = layer(shared=shared), draw(7, D)
    close(run(mk.moe, params, x, **options), run(plain_moe, params, x, **options))


@pytest.mark.parametrize("assignment", ["random", "uniform"])
def test_an_assignment_by_key_decides_the_experts_and_the_router_still_learns(assignment):
    params, x, options = layer(), draw(7, D), dict(top_k=2, assignment=assignment, key=KEY)
    ids = mk.route(params["router"], x, **options).expert_ids
    got = run(mk.moe, params, x, **options)
    close(got, run(plain_moe, params, x, top_k=2, ids=ids))
    assert got[1]["router"].abs().max() > 1e-3


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 3e-2)])
def test_lower_precisions_agree_with_float64(dtype, tol):
    rounded = layer(dtype)
    exact, x = rounded.apply(lambda p: p.double()), draw(7, D).to(dtype)
    ids = mk.route(exact["router"], x.double(), top_k=2).expert_ids
    y, grads = run(mk.moe, rounded, x, top_k=2)
    want_y, want = run(plain_moe, exact, x.double(), top_k=2, ids=ids)
    assert y.dtype == dtype and grads["router"].dtype == torch.float32
    for name, got, ref in [("y", y, want_y), *((name, grads[name], want[name]) for name in want)]:
        assert (got.double() - ref).norm() <= tol * ref.norm(), name


def test_an_expert_that_receives_no_token_gets_a_zero_gradient_and_changes_nothing():
    params, x = layer(), draw(7, D)
    bias = torch.zeros(E).index_fill(0, torch.tensor(2), -10)
    y, grads = run(mk.moe, params, x, top_k=2, bias=bias)
    assert mk.moe(params, x, top_k=2, bias=bias)[1].counts[2] == 0
    for name in ("gate_up", "down"):
        grad = grads[f"experts.{name}"]
        assert not grad[2].any() and bool(grad[[0, 1, 3, 4, 5]].isfinite().all()) and bool(grad.any())
        params["experts"][name][2] = torch.nan
    assert torch.equal(mk.moe(params, x, top_k=2, bias=bias)[0], y)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_tokens_give_no_output_and_zero_gradients(dtype):
    y, grads = run(mk.moe, layer(dtype), draw(0, D).to(dtype), top_k=2)
    assert y.shape == grads.pop("x").shape == (0, D)
    assert len(grads) == 5 and not any(bool(g.any()) for g in grads.values())


def test_a_shared_expert_adds_its_output_once_whatever_the_routing_weights():
    params, x = layer(), draw(3, D)
    for options in (dict(top_k=1), dict(top_k=3, scale=4.0)):
        difference = mk.moe(params, x, **options)[0] - mk.moe(params.exclude("shared"), x, **options)[0]
        close(difference, plain_feed_forward(params["shared"]["gate_up"], params["shared"]["down"], x))


def test_every_transport_and_kernel_gives_the_same_layer():
    params, x = layer(), draw(7, D)
    want, routing = mk.moe(params, x, top_k=2)
    for options in (dict(via="local"), dict(via="all_to_all"), dict(kernels="loop")):
        y, same = mk.moe(params, x, top_k=2, **options)
        assert torch.equal(y, want) and torch.equal(same.expert_ids, routing.expert_ids)


def test_parameters_may_be_a_plain_mapping():
    params, x = layer(), draw(3, D)
    assert torch.equal(mk.moe(params.to_dict(), x, top_k=2)[0], mk.moe(params, x, top_k=2)[0])


def test_the_routing_comes_back_for_counts_and_losses():
    params, x = layer(), draw(7, D)
    routing = mk.moe(params, x, top_k=2)[1]
    assert torch.equal(routing.expert_ids, mk.route(params["router"], x, top_k=2).expert_ids)
    assert routing.counts.sum() == 14


def test_a_dense_feed_forward_is_a_gated_product_of_any_leading_dims():
    got = with_grads(
        lambda g, d, x: feed_forward({"gate_up": g, "down": d}, x), draw(4, 6), draw(3, 4), draw(2, 5, 4)
    )
    close(got, with_grads(plain_feed_forward, draw(4, 6), draw(3, 4), draw(2, 5, 4)))


def test_an_option_that_routing_does_not_have_is_refused():
    with pytest.raises(TypeError, match="capacity_factor"):
        mk.moe(layer(), draw(3, D), top_k=2, capacity_factor=1.0)


def kernel_layer():
    """Return a layer and tokens whose sizes the kernels take."""
    params = TensorDict(
        {
            "router": draw(16, E, seed=1),
            "experts": {"gate_up": draw(E, 16, 48, seed=2), "down": draw(E, 24, 16, seed=3)},
            "shared": {"gate_up": draw(16, 40, seed=4), "down": draw(20, 16, seed=5)},
        }
    )
    return params.apply(lambda w: (w / 4).float()), draw(37, 16, dtype=torch.float32)


def test_what_kernels_fuse_is_what_the_four_functions_compose():
    params, x = kernel_layer()
    got, grads = run(mk.moe, params, x, top_k=2, kernels="triton")
    want, want_grads = run(mk.moe, params, x, top_k=2, kernels="torch")
    close(got, want, 1e-5)
    for name, g in want_grads.items():
        close(grads[name], g, 1e-5)


def test_a_graph_that_is_retained_gives_the_same_gradients_again():
    params, x = kernel_layer()
    x.requires_grad_()
    y, _ = mk.moe(params, x, top_k=2, kernels="triton")
    first, second = (torch.autograd.grad(y.sum(), x, retain_graph=i == 0)[0] for i in range(2))
    assert torch.equal(first, second)


@pytest.mark.parametrize("overlap", ["none", "two_batch", "shared"])
def test_another_router_takes_the_place_of_route(overlap):
    params, x = kernel_layer()
    seen = []

    def turned(router, x, **options):
        seen.append(options["top_k"])
        return mk.route(-router, x, **options)

    y, routing = mk.moe(params, x, top_k=2, overlap=overlap, route=turned, normalize="l1")
    want, wanted = mk.moe(dict(params, router=-params["router"]), x, top_k=2, normalize="l1")
    assert seen == [2] and torch.equal(routing.expert_ids, wanted.expert_ids)
    close(y, want, 1e-5)


def test_a_layer_of_kernels_is_one_graph_for_any_routing():
    params, x = kernel_layer()
    graphs = []

    def count(graph, inputs):
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    compiled = torch.compile(mk.moe, backend=count, fullgraph=True)
    for seed in range(3):
        options = dict(top_k=2, kernels="triton", assignment="random", key=mk.random.make_key(seed))
        close(compiled(params, x, **options)[0], mk.moe(params, x, **options)[0], 1e-6)
    assert len(graphs) == 1


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_layer_of_torch_gives_what_it_gives_uncompiled(backend):
    params, x = kernel_layer()
    torch.compiler.reset()
    compiled = torch.compile(mk.moe, backend=backend)
    got, want = (run(fn, params, x, top_k=2, kernels="torch") for fn in (compiled, mk.moe))
    close(got[0], want[0], 1e-5)
    for name, g in want[1].items():
        close(got[1][name], g, 1e-5)


def test_no_tokens_pass_the_kernels_of_a_layer_with_a_shared_expert():
    params, x = kernel_layer()
    y, grads = run(mk.moe, params, x[:0], top_k=2, kernels="triton")
    assert y.shape == (0, 16) and all(bool((g == 0).all()) for g in grads.values())


@pytest.mark.parametrize("around", ["forward", "both"])
def test_a_dense_feed_forward_of_kernels_has_a_backward_under_autocast(around):
    leaves = [draw(5, 16), draw(16, 40, seed=1) / 4, draw(20, 16, seed=2) / 4]

    def run(kernels):
        x, gate_up, down = given = [z.float().requires_grad_() for z in leaves]
        with torch.autocast("cpu", torch.bfloat16):
            y = feed_forward({"gate_up": gate_up, "down": down}, x, kernels=kernels)
        with torch.autocast("cpu", torch.bfloat16, enabled=around == "both"):
            return [y, *torch.autograd.grad(y.float().square().sum(), given)]

    for got, want in zip(run("triton"), run("torch"), strict=True):
        assert got.dtype == want.dtype and (got - want).norm() <= 2e-2 * want.norm()


def test_a_mesh_of_two_axes_is_refused_by_kernels_too(unchecked):
    params, x = kernel_layer()
    two = SimpleNamespace(ndim=2, mesh_dim_names=("edp", "ep"), size=lambda: 1)
    for kernels in ("torch", "triton"):
        with refuses("moe needs a one-axis mesh, got axes ('edp', 'ep'); pass mesh['ep']"):
            mk.moe(params, x, top_k=2, kernels=kernels, mesh=two)


def test_a_name_is_no_mesh(unchecked):
    params, x = kernel_layer()
    needs = "needs a one-axis mesh, got 'ep'; pass mesh['ep']"
    with refuses(f"moe {needs}"):
        mk.moe(params, x, top_k=2, mesh="ep")
    with refuses(f"dispatch {needs}"):
        mk.dispatch(x, mk.route(params["router"], x, top_k=2), mesh="ep")
    with refuses(f"rowwise {needs}"):
        mk.rowwise("ep", n_tokens=1, d_model=1, n_experts=2, top_k=1)
    with refuses("pipeline needs a one-axis mesh, got 'pp'; pass mesh['pp']"):
        mk.pipeline([], schedule=None, boundary=None, mesh="pp")
