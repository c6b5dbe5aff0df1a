"""What a mesh decides without communication; tests/distributed has several ranks."""

import pytest
import torch
import torch.distributed as dist
from reference import as_rank, draw, flat, refuses, small_config
from tensordict import TensorDict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

import moekit as mk
from moekit.mesh import data_mesh, data_rank, layout, shard_of
from moekit.testing import ranks
from moekit.tree import map_named

PARAMS = TensorDict({"norm": draw(3), "moe": {"router": draw(4, 6), "experts": {"down": draw(6, 2, 3)}}})


@pytest.fixture
def of_torchrun(monkeypatch):
    """Have the environment of one of four ranks."""
    monkeypatch.setenv("WORLD_SIZE", "4")
    yield
    assert not dist.is_initialized()


# --- One process ----------------------------------------------------------------------


def test_a_process_that_was_started_alone_has_no_mesh_and_no_process_group(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert mk.make_mesh() is None and mk.make_mesh(edp=1, ep=1, n_experts=3) is None
    assert not dist.is_initialized()


@pytest.mark.parametrize(
    ("in_use", "current", "moves_to"),
    [(True, 0, [3]), (True, 2, []), (False, 0, [])],
    ids=["default device in use", "another chosen", "nothing in use: torch chooses"],
)
def test_a_rank_that_already_uses_the_default_device_gets_its_own(
    in_use, current, moves_to, of_torchrun, monkeypatch
):
    monkeypatch.setenv("LOCAL_RANK", "3")
    chosen, when_made = [], []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: in_use)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(mk.mesh, "init_device_mesh", lambda *args, **options: when_made.extend(chosen))
    monkeypatch.setattr(mk.mesh, "data_mesh", lambda mesh: None)
    mk.make_mesh(device="cuda")
    assert chosen == when_made == moves_to


def test_without_a_mesh_parameters_and_shapes_pass_as_they_are():
    assert mk.mesh.distribute(PARAMS, None) is PARAMS
    assert mk.local(PARAMS["norm"]) is PARAMS["norm"]
    assert shard_of("moe.experts.down", (6, 2, 3), None) == ((6, 2, 3), (0, 0, 0))
    assert data_rank(None) == (0, 1)


def test_names_of_leaves_are_joined_by_dots_in_the_order_of_the_tree():
    named = map_named(lambda name, p: torch.tensor(len(name)), PARAMS)
    assert {name: int(n) for name, n in flat(named).items()} == {
        name: len(name) for name in ("norm", "moe.router", "moe.experts.down")
    }


# --- One rank of many -----------------------------------------------------------------


@pytest.mark.parametrize("rank", range(6))
def test_ranks_of_one_ep_group_are_neighbours_and_data_ranks_count_row_by_row(rank):
    def places(mesh):
        return mesh.mesh_dim_names, mesh["edp"].get_local_rank(), mesh["ep"].get_local_rank(), data_rank(mesh)

    assert as_rank(places, rank) == (("edp", "ep"), rank // 3, rank % 3, (rank, 6))


@pytest.mark.parametrize("axis", ["edp", "ep"])
def test_one_axis_of_a_mesh_is_no_mesh_of_a_batch_and_edp_none_of_a_layer(axis):
    def wrong(mesh):
        with refuses(f"data_mesh needs a mesh with the axes edp and ep, got axes ('{axis}',) of sizes"):
            data_mesh(mesh[axis])
        if axis == "edp":
            with refuses("moe needs a one-axis mesh, got axes ('edp',); pass mesh['ep']"):
                mk.moe(
                    dict(router=draw(3, 6), experts=dict(gate_up=draw(6, 3, 4), down=draw(6, 2, 3))),
                    draw(5, 3),
                    top_k=2,
                    mesh=mesh[axis],
                )
        return True

    assert as_rank(wrong)


def test_edp_is_what_the_ranks_leave():
    def sizes(_):
        return [mk.make_mesh(ep=ep, device="cpu").shape for ep in (1, 2, 6)]

    assert as_rank(sizes) == [(6, 1), (3, 2), (1, 6)]


def test_experts_are_shared_out_over_ep_and_everything_else_is_copied():
    def table(mesh):
        names = ("moe.experts.down", "experts.gate_up", "moe.router", "moe.shared.down", "n_experts", "norm")
        return {name: (layout(name, mesh)[0].mesh_dim_names, layout(name, mesh)[1]) for name in names}

    experts, rest = (("edp", "ep"), (Replicate(), Shard(0))), (("dp",), (Replicate(),))
    got = as_rank(table)
    assert got.pop("moe.experts.down") == got.pop("experts.gate_up") == experts
    assert got == dict.fromkeys(("moe.router", "moe.shared.down", "n_experts", "norm"), rest)


def test_distributed_parameters_hold_a_copy_of_this_ranks_part():
    def held(mesh):
        full = PARAMS.clone()
        placed = mk.mesh.distribute(full, mesh)
        full.apply_(lambda x: x.zero_())
        return {name: (p.to_local(), p.shape, p.placements) for name, p in flat(placed).items()}

    got = as_rank(held, rank=4)
    for name, p in flat(PARAMS).items():
        local, shape, placements = got[name]
        assert torch.equal(local, p[2:4] if "experts" in name else p) and shape == p.shape
        assert placements == ((Replicate(), Shard(0)) if "experts" in name else (Replicate(),))


def test_a_gradient_read_through_local_is_labelled_as_one_term_of_a_sum():
    def labels(mesh):
        out = {}
        for name, p in flat(mk.mesh.distribute(PARAMS, mesh)).items():
            p = p.detach().requires_grad_()
            mk.local(p).square().sum().backward()
            out[name] = (isinstance(p.grad, DTensor), p.grad.placements, p.grad.to_local())
        return out

    got = as_rank(labels, rank=4)
    for name, p in flat(PARAMS).items():
        part, placements = (p[2:4], (Partial(), Shard(0))) if "experts" in name else (p, (Partial(),))
        assert got[name][:2] == (True, placements) and torch.equal(got[name][2], 2 * part)


def test_value_and_grad_keeps_the_labels():
    def labels(mesh):
        loss = mk.value_and_grad(lambda p: sum(mk.local(x).sum() for x in flat(p).values()))
        return {name: g.placements for name, g in flat(loss(mk.mesh.distribute(PARAMS, mesh))[1]).items()}

    assert as_rank(labels) == {
        "norm": (Partial(),),
        "moe.router": (Partial(),),
        "moe.experts.down": (Partial(), Shard(0)),
    }


# --- Bad input ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        (
            dict(edp=2, ep=4),
            "got pp=1 * edp=2 * ep=4 on 4 ranks; start 8 ranks or choose pp and ep that divide 4",
        ),
        (
            dict(ep=3),
            "make_mesh needs pp * edp * ep to be the number of ranks, got pp=1 * edp=1 * ep=3 on 4 ranks",
        ),
        (
            dict(ep=0),
            "make_mesh needs pp * edp * ep to be the number of ranks, got pp=1 * edp=4 * ep=0 on 4 ranks",
        ),
        (
            dict(edp=-1),
            "make_mesh needs pp * edp * ep to be the number of ranks, got pp=1 * edp=-1 * ep=1 on 4 ranks",
        ),
        (dict(pp=3), "got pp=3 * edp=1 * ep=1 on 4 ranks; start 3 ranks or choose pp and ep that divide 4"),
        (
            dict(ep=4, n_experts=6),
            "make_mesh needs ep to divide n_experts, got n_experts=6, ep=4; take ep=3 or 6",
        ),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused_before_any_group_is_made(of_torchrun, sizes, message):
    with refuses(message):
        mk.make_mesh(**sizes)


def test_a_process_alone_refuses_a_mesh_of_several_ranks(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with refuses("got pp=1 * edp=2 * ep=1 on 1 ranks; start 2 ranks"):
        mk.make_mesh(edp=2)


def test_experts_that_ep_does_not_divide_are_named():
    with refuses("moe.experts.down needs the ep axis to divide its 6 experts, got ep=4", RuntimeError):
        as_rank(lambda mesh: mk.mesh.distribute(PARAMS, mesh), edp=2, ep=4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda mesh: mk.init_params(small_config(), mesh=mesh["ep"]),
            "data_mesh needs a mesh with the axes edp and ep, "
            "got axes ('ep',) of sizes (3,); pass the whole mesh that make_mesh returned",
        ),
        (
            lambda _: mk.mesh.data_mesh(init_device_mesh("cpu", (2, 3), mesh_dim_names=("a", "b"))),
            "data_mesh needs a mesh with the axes edp and ep, got axes ('a', 'b') of sizes (2, 3); pass",
        ),
        (
            lambda _: mk.mesh.distribute(PARAMS, init_device_mesh("cpu", (2, 3))),
            "data_mesh needs a mesh with the axes edp and ep, got axes () of sizes (2, 3); pass",
        ),
        (
            lambda mesh: mk.mesh.distribute(mk.mesh.distribute(PARAMS, mesh), mesh),
            "distribute needs plain tensors, got norm, which is (Replicate(),) on axes ('dp',) of",
        ),
    ],
)
def test_a_mesh_of_other_axes_and_leaves_that_have_a_place_are_refused(call, message):
    def run(mesh):
        with refuses(message):
            call(mesh)

    as_rank(run)


def test_a_plain_gradient_on_a_mesh_is_refused():
    def run(mesh):
        mk.data_parallel(mk.value_and_grad(lambda p: p["a"].sum()), mesh=mesh)(
            TensorDict({"a": torch.ones(2)})
        )

    with refuses("needs DTensor gradients on a mesh, got a plain one for a; place the", RuntimeError):
        as_rank(run)


def test_a_stage_has_its_own_mesh_and_batch_ranks():
    def look():
        mesh = mk.make_mesh(pp=2, edp=1, ep=2, device="cpu")
        stage = mesh["edp", "ep"]
        whole = mk.mesh.data_mesh(mesh) == mk.mesh.data_mesh(stage)
        total = mk.mesh.sum_over_ranks(torch.tensor(torch.distributed.get_rank()), mesh=stage)
        return sorted(mk.mesh.ranks_of(stage)), mk.mesh.data_rank(mesh), whole, total.item()

    assert ranks(4)(look) == [
        ([0, 1], (0, 2), True, 1),
        ([0, 1], (1, 2), True, 1),
        ([2, 3], (0, 2), True, 5),
        ([2, 3], (1, 2), True, 5),
    ]
