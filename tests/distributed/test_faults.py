"""Kinds of fault that users of comparable systems reported, each with the right value."""

import math

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import moekit as mk
import moekit.mesh
from moekit.balance import next_bias
from moekit.mesh import data_mesh, data_rank
from moekit.testing import check_gradients, ranks
from moekit.tree import map_named

from .tiny import BATCH, SIZES, loss_of, model, rows_of

MESHES = [(1, 1), (1, 2), (2, 1), (2, 2), (4, 1), (1, 4), (2, 4), (4, 2), (1, 8), (8, 1)]


def cpu_mesh(edp, ep):
    return mk.make_mesh(edp=edp, ep=ep, device="cpu")


def named(params):
    return {k if isinstance(k, str) else ".".join(k): v for k, v in params.items(True, True)}


# --- Gradients -------------------------------------------------------------------------


def test_expert_gradients_are_those_of_the_dense_sum_whatever_ep_is():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 4, generator=generator, dtype=torch.float64)
    experts = dict(
        gate_up=torch.randn(4, 4, 6, generator=generator, dtype=torch.float64),
        down=torch.randn(4, 3, 4, generator=generator, dtype=torch.float64),
    )
    router = torch.randn(4, 4, generator=generator, dtype=torch.float64)
    params = TensorDict(dict(router=router, experts=TensorDict(experts)))

    def loss(params, x, *, mesh):
        y, _ = mk.moe(params, x, top_k=2, mesh=None if mesh is None else mesh["ep"])
        return (y.square() * 0.5).sum()

    weights = (x @ router).softmax(-1)  # now the obvious way, every expert on every token
    weights = weights * (weights >= weights.topk(2).values[:, -1:])
    weights = weights / weights.sum(-1, keepdim=True)
    gate_up, down = (w.clone().requires_grad_() for w in experts.values())
    gate, up = torch.einsum("td,edh->teh", x, gate_up).chunk(2, -1)
    outputs = torch.einsum("teh,ehd->ted", torch.nn.functional.silu(gate) * up, down)
    want_loss = (torch.einsum("te,ted->td", weights, outputs).square() * 0.5).sum()
    want = torch.autograd.grad(want_loss, (gate_up, down))

    def run(edp, ep):
        mesh = cpu_mesh(edp, ep)
        step = mk.data_parallel(mk.value_and_grad(lambda p, x: loss(p, x, mesh=mesh)), mesh=mesh)
        rank, n = data_rank(mesh)
        value, grads = step(mk.mesh.distribute(params, mesh), x.chunk(n)[rank])
        return value, [grads["experts", name].full_tensor() for name in ("gate_up", "down")]

    for edp, ep in MESHES[:6]:
        for value, grads in ranks(edp * ep)(run, edp, ep):
            torch.testing.assert_close(value, want_loss.detach())
            torch.testing.assert_close(grads, list(want))


def test_router_weights_stay_the_same_on_every_rank_and_on_every_layout_after_steps():
    config, params = model(n_dense_layers=0, d_dense=0)

    def train(edp, ep):
        mesh = cpu_mesh(edp, ep)
        rank, n = data_rank(mesh)
        batch = mk.batch.split_batch(BATCH, n)[rank]
        mine = mk.mesh.distribute(params, mesh)
        loss = lambda p, b: mk.next_token_loss(p, b, config=config, mesh=mesh)  # noqa: E731
        step = mk.data_parallel(mk.value_and_grad(loss, has_aux=True), mesh=mesh)
        for _ in range(3):
            _, grads = step(mine, batch)
            for name, p in named(mine).items():
                p.to_local().sub_(0.1 * named(grads)[name].to_local())
        return {name: p.to_local() for name, p in named(mine).items() if name.endswith(".router")}

    (want,) = ranks(1)(train, 1, 1)
    for edp, ep in ((4, 1), (2, 2), (1, 4)):
        first, *others = ranks(edp * ep)(train, edp, ep)
        for name in want:
            assert all(torch.equal(other[name], first[name]) for other in others)
            torch.testing.assert_close(first[name], want[name], rtol=1e-10, atol=1e-10)
            assert (first[name] - named(params)[name]).abs().max() > 1e-3


def test_an_expert_without_tokens_has_a_zero_gradient_even_where_a_whole_rank_has_no_rows():
    config, params = model(n_dense_layers=0, d_dense=0, d_expert=8)
    biases = torch.tensor([0.0, 0, 0, 0, -1e9, -1e9, -1e9, -1e9]).repeat(2, 1)  # ep = 2: rank 1 gets no row
    loss = loss_of(config, biases=biases.double())
    layouts = [
        dict(ep=2),
        dict(edp=2, ep=4),
        dict(ep=8),
        dict(ep=2, recompute="block"),
    ]
    check_gradients(loss, params, BATCH, layouts)
    for kernels, dtype in (("loop", torch.float64), ("torch", torch.float32)):

        def run(kernels=kernels, dtype=dtype):
            mesh = cpu_mesh(1, 2)
            loss = lambda p, b: mk.next_token_loss(  # noqa: E731
                p, b, config=config, mesh=mesh, kernels=kernels, biases=biases
            )
            batch = mk.batch.split_batch(BATCH, 2)[dist.get_rank()]
            grad_fn = mk.value_and_grad(loss, has_aux=True)
            (_, stats), grads = grad_fn(mk.mesh.distribute(params.to(dtype), mesh), batch)
            return stats["counts"], {name: g.to_local() for name, g in named(grads).items()}

        (counts, with_rows), (_, without) = ranks(2)(run)
        assert (counts[:, 4:] == 0).all() and (counts[:, :4] > 0).all()
        for name in with_rows:
            assert with_rows[name].isfinite().all() and without[name].isfinite().all()
            if ".experts." in name:
                assert (with_rows[name].flatten(1).norm(dim=1) > 0).all() and (without[name] == 0).all()


# --- Meshes that do not fit ------------------------------------------------------------


@pytest.mark.parametrize(
    ("world", "options", "message"),
    [
        (4, dict(edp=3, ep=2), r"edp=3 \* ep=2 on 4 ranks; start 6 ranks or choose pp and ep that divide 4"),
        (4, dict(ep=3), r"edp=1 \* ep=3 on 4 ranks"),
        (4, dict(edp=2, ep=1), r"edp=2 \* ep=1 on 4 ranks"),
        (4, dict(edp=4, ep=0), r"edp=4 \* ep=0 on 4 ranks"),
        (4, dict(ep=4, n_experts=6), "ep to divide n_experts, got n_experts=6, ep=4"),
        (1, dict(ep=2), r"edp=1 \* ep=2 on 1 ranks; start 2 ranks"),
    ],
)
def test_a_mesh_that_does_not_fit_is_reported_before_any_process_group_is_made(
    monkeypatch, world, options, message
):
    def waits(*args, **options):
        raise AssertionError("a process group was made: alone, this rank would wait here")

    monkeypatch.setenv("WORLD_SIZE", str(world))  # as torchrun does
    monkeypatch.setattr(moekit.mesh, "init_device_mesh", waits)
    monkeypatch.setattr(dist, "init_process_group", waits)
    with pytest.raises(ValueError, match=message):
        mk.make_mesh(device="cpu", **options)


def test_every_rank_says_that_experts_do_not_divide_and_none_waits():
    config, params = model(n_experts=6, top_k=1)

    def message(fn, *args, **options):
        with pytest.raises(ValueError) as error:
            fn(*args, **options)
        return str(error.value)

    def run():
        mesh = cpu_mesh(1, 4)
        x = torch.ones(3, 8, dtype=torch.float64)
        routing = mk.route(torch.ones(8, 6, dtype=torch.float64), x, top_k=1)
        return [
            message(mk.make_mesh, edp=2, ep=4, device="cpu"),
            message(mk.make_mesh, ep=4, n_experts=6, device="cpu"),
            message(mk.init_params, config, mesh=mesh),
            message(mk.mesh.distribute, params, mesh),
            message(mk.dispatch, x, routing, mesh=mesh["ep"]),
            message(mk.dispatch, x, routing, mesh=mesh),
            message(mk.moe, params["layers", "1", "moe"], x, top_k=1, mesh=mesh["ep"]),
        ]

    for said in ranks(4)(run):
        assert "edp=2 * ep=4 on 4 ranks" in said[0] and "n_experts=6, ep=4" in said[1]
        assert said[2] == said[3]
        assert "layers.1.moe.experts.gate_up needs the ep axis to divide its 6 experts, got ep=4" in said[2]
        assert "n_experts=6, ep=4" in said[4] and said[6] == said[4]
        assert "one-axis mesh, got axes ('edp', 'ep'); pass mesh['ep']" in said[5]


# --- Initial weights -------------------------------------------------------------------


class Largest(TorchDispatchMode):
    """Records the number of elements of the largest tensor that any operation makes."""

    n = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types:
            return NotImplemented
        out = func(*args, **(kwargs or {}))
        made = [x.numel() for x in tree_leaves(out) if isinstance(x, torch.Tensor) and not x.is_meta]
        self.n = max(self.n, *made, 0)
        return out


def init(config, edp, ep, dtype):
    mesh = cpu_mesh(edp, ep)
    data_mesh(mesh)
    with Largest() as largest:
        params = mk.init_params(config, seed=5, dtype=dtype, mesh=mesh)
    again = mk.mesh.distribute(mk.init_params(config, seed=5, dtype=dtype), mesh)
    held = {name: p.to_local() for name, p in named(params).items()}
    assert all(torch.equal(p.to_local(), held[name]) for name, p in named(again).items())
    places = {name: (p.device_mesh.mesh_dim_names, p.placements) for name, p in named(params).items()}
    full = {name: p.full_tensor() for name, p in named(params).items()}
    return largest.n, {name: x.shape for name, x in held.items()}, places, full


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_initial_weights_are_bitwise_the_same_on_every_layout_and_no_rank_makes_more_than_its_own(dtype):
    config = mk.ModelConfig(**SIZES | dict(d_expert=32))
    want = named(mk.init_params(config, seed=5, dtype=dtype))
    other_seed = named(mk.init_params(config, seed=6, dtype=dtype))
    for edp, ep in MESHES:
        for largest, shapes, places, full in ranks(edp * ep)(init, config, edp, ep, dtype):
            assert full.keys() == want.keys()
            for name, x in want.items():
                assert torch.equal(full[name], x) and full[name].dtype == x.dtype
                if ".experts." in name:
                    assert shapes[name] == (8 // ep, *x.shape[1:])
                    assert places[name] == (("edp", "ep"), (Replicate(), Shard(0)))
                else:
                    assert shapes[name] == x.shape and places[name] == (("dp",), (Replicate(),))
            assert largest <= max(math.prod(shape) for shape in shapes.values())
    assert not any(torch.equal(x, other_seed[name]) for name, x in want.items() if "norm" not in name)
    experts = want["layers.1.moe.experts.gate_up"]
    assert not any(torch.equal(experts[i], experts[i + 1]) for i in range(7))


# --- Sums over ranks -------------------------------------------------------------------


def test_the_next_bias_counts_all_ranks_that_share_a_batch():
    def run(edp, ep):
        r = dist.get_rank()
        counts = torch.tensor([[10 * (r == 0), 5, 1, 6 * (r == 3)], [0, 0, 0, 0]])
        return next_bias(torch.zeros(2, 4), counts, rate=0.5, mesh=cpu_mesh(edp, ep))

    # Over four ranks 10, 20, 4 and 6 rows, whose mean is 10; on fewer ranks the signs are others.
    for edp, ep in ((4, 1), (2, 2), (1, 4)):
        for bias in ranks(4)(run, edp, ep):
            assert bias.tolist() == [[0, -0.5, 0.5, 0.5], [0, 0, 0, 0]]


def test_counts_are_summed_over_the_ranks_of_a_stage_only_and_a_stage_without_experts_does_not_wait():
    def run(stages_with_experts):
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "edp", "ep"))["edp", "ep"]
        data_mesh(mesh)  # makes the groups: every rank takes part in that
        stage = dist.get_rank() // 2
        if stage not in stages_with_experts:
            return None
        counts = torch.tensor([[6, 0], [0, 4]][stage]) + dist.get_rank() % 2
        bias = next_bias(torch.zeros(2), counts, rate=0.5, mesh=mesh)
        return bias.tolist(), mk.mesh.sum_over_ranks(counts, mesh=mesh).tolist()

    first, second = ([-0.5, 0.5], [13, 1]), ([0.5, -0.5], [1, 9])
    assert ranks(4)(run, (0, 1)) == [first, first, second, second]
    assert ranks(4)(run, (1,)) == [None, None, second, second]


def test_tokens_are_counted_over_all_axes_of_a_mesh_and_ranks_without_rows_take_part():
    def run(edp, ep, one_axis):
        mesh = cpu_mesh(edp, ep)
        rank, n = data_rank(mesh)
        rows = {2: [16, 0], 4: [5, 0, 3, 8]}[n]
        here = rows_of(BATCH, sum(rows[:rank]), sum(rows[: rank + 1]))
        batch = mk.count_tokens(here, mesh=data_mesh(mesh) if one_axis else mesh)
        again = mk.count_tokens(batch, mesh=mesh)
        assert (again.n_targets, again.n_tokens) == (batch.n_targets, batch.n_tokens)
        return batch.n_targets.item(), batch.n_tokens.item()

    totals = BATCH.mask.sum().item(), (BATCH.documents >= 0).sum().item()
    for edp, ep in ((2, 1), (2, 2), (1, 4), (4, 1)):
        for one_axis in (False, True):
            assert ranks(edp * ep)(run, edp, ep, one_axis) == [totals] * (edp * ep)


def test_a_tree_is_summed_over_ranks_leaf_by_leaf_in_its_own_dtype():
    def run(edp, ep):
        mesh, r = cpu_mesh(edp, ep), dist.get_rank()
        tree = {
            "loss": torch.tensor(0.5 + r, dtype=torch.float64),
            "counts": torch.tensor([[2**40 + r, 0, 1], [r, r, r]]),
            "stats": (torch.tensor([1.0, r]), torch.zeros(0), torch.tensor(2.0, dtype=torch.bfloat16)),
        }
        before = [x.clone() for x in tree_leaves(tree)]
        out = mk.mesh.sum_over_ranks(tree, mesh=mesh)
        assert all(map(torch.equal, before, tree_leaves(tree)))
        assert all(type(x) is torch.Tensor for x in tree_leaves(out))
        return out

    for edp, ep in ((4, 1), (2, 2)):
        for out in ranks(4)(run, edp, ep):
            assert out["loss"].dtype == torch.float64 and out["loss"].item() == 8.0
            assert out["counts"].tolist() == [[4 * 2**40 + 6, 0, 4], [6, 6, 6]]
            assert [x.tolist() for x in out["stats"]] == [[4.0, 6.0], [], 8.0]
            assert out["stats"][2].dtype == torch.bfloat16


def test_one_process_sums_nothing():
    tree = {"a": torch.ones(2)}
    assert mk.mesh.sum_over_ranks(tree) is tree
    grad_fn = mk.value_and_grad(lambda p: p["w"].sum())
    assert mk.data_parallel(grad_fn) is grad_fn
    params = TensorDict({"w": torch.ones(2)})
    assert mk.mesh.distribute(params, None) is params


# --- Placements ------------------------------------------------------------------------


def weights():
    experts = torch.arange(8.0).view(4, 2)
    return TensorDict({"experts": TensorDict({"w": experts}), "w": torch.arange(2.0)})


def test_gradients_say_what_is_still_to_be_summed_and_data_parallel_sums_it():
    def run(edp, ep):
        mesh, r = cpu_mesh(edp, ep), dist.get_rank()
        params = mk.mesh.distribute(weights(), mesh)

        def loss(params, factor):
            total = mk.local(params["experts", "w"]).sum() + mk.local(params["w"]).sum()
            return factor * total, {"r": factor}

        grad_fn = mk.value_and_grad(loss, has_aux=True)
        _, grads = grad_fn(params, torch.tensor(r + 1.0))
        assert grads["experts", "w"].placements == (Partial(), Shard(0))
        assert grads["w"].placements == (Partial(),)
        assert (grads["w"].to_local() == r + 1).all()
        (_, aux), grads = mk.data_parallel(grad_fn, mesh=mesh)(params, torch.tensor(r + 1.0))
        assert grads["experts", "w"].placements == (Replicate(), Shard(0))
        assert grads["w"].placements == (Replicate(),)
        assert all(type(g.to_local()) is torch.Tensor for g in named(grads).values())
        assert params["w"].grad is None
        experts, w = grads["experts", "w"].to_local(), grads["w"].to_local()
        return aux["r"].item(), w.tolist(), experts[:, 0].tolist()

    # Over (edp, ep) = (2, 2), rank 0 and 2 hold the first two experts, 1 and 3 the others.
    assert ranks(4)(run, 2, 2) == [(10, [10, 10], [4, 4]), (10, [10, 10], [6, 6])] * 2
    assert ranks(4)(run, 4, 1) == [(10, [10, 10], [10] * 4)] * 4
    assert ranks(4)(run, 1, 4) == [(10, [10, 10], [r + 1]) for r in range(4)]


def test_data_parallel_sums_bfloat16_gradients_in_float32():
    def run():
        mesh, r = cpu_mesh(2, 2), dist.get_rank()
        params = mk.mesh.distribute(weights().bfloat16(), mesh)
        grad_fn = mk.value_and_grad(
            lambda p, x: mk.local(p["w"]).sum() * x + mk.local(p["experts", "w"]).sum()
        )
        x = torch.tensor([256.0, 1.0, 1.0, 1.0], dtype=torch.bfloat16)[r]  # 257 has no place in bfloat16
        _, grads = mk.data_parallel(grad_fn, mesh=mesh)(params, x)
        assert {g.dtype for g in named(grads).values()} == {torch.float32}
        return grads["w"].to_local().tolist()

    assert ranks(4)(run) == [[259, 259]] * 4


def test_buffers_are_used_again_and_summed_gradients_are_refused_as_buffers():
    def run():
        mesh, r = cpu_mesh(2, 1), dist.get_rank()
        params, x = mk.mesh.distribute(weights(), mesh), torch.ones(4, 2) * (r + 1)
        grad_fn = mk.accumulate(mk.value_and_grad(lambda p, x: (x * mk.local(p["w"])).sum()), 2)
        step, params = mk.data_parallel(grad_fn, mesh=mesh), params.select("w")
        _, first = grad_fn(params, x)
        _, again = grad_fn(params, x, into=first)
        assert again["w"] is first["w"] and again["w"].to_local().tolist() == [4 * (r + 1)] * 2
        _, summed = step(params, x, into=again)
        assert summed["w"].to_local().tolist() == [12, 12]
        with pytest.raises(ValueError, match=r"placed .*Partial.* as the gradient of w, got .*Replicate"):
            step(params, x, into=summed)

    ranks(2)(run)


def test_data_parallel_refuses_gradients_that_do_not_say_where_they_stand():
    def run():
        step = mk.data_parallel(mk.value_and_grad(lambda p: p["w"].sum()), mesh=cpu_mesh(2, 1))
        with pytest.raises(ValueError, match="needs DTensor gradients on a mesh, got a plain one for w"):
            step(TensorDict({"w": torch.ones(2)}))

    ranks(2)(run)


def test_distribute_gives_each_rank_a_copy_of_its_own_rows():
    def run():
        full = weights()
        params = mk.mesh.distribute(full, cpu_mesh(2, 2))
        map_named(lambda _, p: p.to_local().add_(100), params)
        assert named(full)["w"].tolist() == [0, 1] and named(full)["experts.w"][0, 0] == 0
        experts, w = params["experts", "w"], params["w"]
        return experts.to_local().tolist(), w.to_local().tolist(), experts.shape

    for rank, (experts, w, shape) in enumerate(ranks(4)(run)):
        assert experts == [[[100, 101], [102, 103]], [[104, 105], [106, 107]]][rank % 2]
        assert w == [100, 101] and shape == (4, 2)
