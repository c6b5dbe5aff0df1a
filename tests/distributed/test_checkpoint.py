import os
import resource
import warnings
import zlib

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from moekit.checkpoint import latest, load, read_manifest, resume, save
from moekit.testing import ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
# Name: shape, dtype, placements as trained, and others; one placement: over all ranks, two: over (edp, ep).
LEAVES = {
    "params.embedding": ((7, 4), torch.float32, [R], [S1]),
    "params.layers.0.moe.experts.up": ((8, 3, 4), torch.bfloat16, [R, S0], [S1, R]),
    "params.layers.0.moe.experts.down": ((6, 5, 3), torch.float32, [R, S0], [S0, S1]),
    "optimizer.master.embedding": ((7, 4), torch.float32, [S0], [R]),
    "optimizer.master.norm": ((5,), torch.float32, [S0], [R]),
    "optimizer.master.layers.0.moe.experts.up": ((8, 3, 4), torch.float32, [S1, S0], [S0, S0]),
    "optimizer.master.layers.0.moe.experts.down": ((6, 5, 3), torch.float32, [S1, S0], [R, Shard(2)]),
    "optimizer.step": ((), torch.int64, [R], [R]),
    "optimizer.none": ((0, 3), torch.float32, [S0], [S1]),
    "bias": ((8,), torch.float32, None, None),
}
# (edp, ep) and which of the two placements; None: one process with plain tensors.
LAYOUTS = [
    None,
    *[((1, 1), 1), ((2, 1), 0), ((1, 2), 1), ((3, 1), 0), ((2, 2), 1)],
    *[((4, 2), 0), ((4, 2), 1), ((2, 4), 0), ((1, 8), 1)],
]


def full(name):
    shape, dtype, *_ = LEAVES[name]
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    return (torch.randn(shape, generator=generator) * 100).to(dtype)


def meshes(edp, ep) -> dict[int, DeviceMesh]:
    mesh = init_device_mesh("cpu", (edp, ep), mesh_dim_names=("edp", "ep"))
    return {2: mesh, 1: mesh._flatten("dp")}


def flat(layout, mesh, zeros=False):
    """The leaves in a layout, by name."""
    leaves = {}
    for name, (*_, first, second) in LEAVES.items():
        leaf = torch.zeros_like(full(name)) if zeros else full(name)
        if layout is not None and first is not None:
            placements = (first, second)[layout[1]]
            leaf = distribute_tensor(leaf, mesh[len(placements)], placements, src_data_rank=None)
        leaves[name] = leaf
    return leaves


def nested(leaves, **values):
    tree = TensorDict({})
    for name, leaf in leaves.items():
        tree[tuple(name.split("."))] = leaf
    return {**tree, **values}


def local(leaf):
    return leaf.to_local() if isinstance(leaf, DTensor) else leaf


def save_in(layout, path):
    mesh = None if layout is None else meshes(*layout[0])
    save(path, nested(flat(layout, mesh), step=3), mesh=mesh and mesh[2])


def load_in(layout, paths):
    """Return what is not as it was saved."""
    mesh = None if layout is None else meshes(*layout[0])
    wrong = []
    for path in paths:
        leaves = flat(layout, mesh, zeros=True)
        back = load(path, nested(leaves, step=None), mesh=mesh and mesh[2])
        want = flat(layout, mesh)
        wrong += [(path.name, n) for n in leaves if not local(leaves[n]).equal(local(want[n]))]
        wrong += [(path.name, "step")] * (back["step"] != 3)
    return wrong


def world(layout):
    return 1 if layout is None else layout[0][0] * layout[0][1]


def name_of(layout):
    return (
        "one process"
        if layout is None
        else "edp{}-ep{}-{}".format(*layout[0], ("trained", "other")[layout[1]])
    )


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    for layout in LAYOUTS:
        ranks(world(layout))(save_in, layout, folder / name_of(layout))
    return [folder / name_of(layout) for layout in LAYOUTS]


@pytest.mark.parametrize("layout", LAYOUTS, ids=name_of)
def test_a_checkpoint_of_any_layout_loads_bitwise_into_any_other(saved, layout):
    assert ranks(world(layout))(load_in, layout, saved) == [[]] * world(layout)


def test_every_layout_saves_the_same_names_shapes_and_dtypes(saved):
    first, *others = [{**read_manifest(path), "files": None, "crc32": None} for path in saved]
    assert all({**first["tensors"]}.items() == other["tensors"].items() for other in others)
    assert all(first["values"] == other["values"] == {"step": 3} for other in others)


def test_replicas_are_written_once_and_the_work_is_shared(tmp_path):
    def save_large(path):
        mesh = meshes(4, 2)
        leaves = {
            f"w{i}": distribute_tensor(torch.zeros(10_000), mesh[1], [R], src_data_rank=None)
            for i in range(8)
        }
        experts = distribute_tensor(torch.zeros(8, 10_000), mesh[2], [R, S0], src_data_rank=None)
        save(path, {**leaves, "experts": experts, "bias": torch.zeros(10_000)}, mesh=mesh[2])

    ranks(8)(save_large, tmp_path / "a")
    sizes = [
        info["bytes"] for name, info in read_manifest(tmp_path / "a")["files"].items() if name != ".metadata"
    ]
    total = 4 * 10_000 * (8 + 8 + 1)
    assert total < sum(sizes) < 1.1 * total
    assert len(sizes) == 8 and max(sizes) < 1.1 * 4 * 50_000  # a shard of the experts and one other


def outcome(fn, *args, **options):
    """Return the error of a call, and by it show that this rank does not wait."""
    try:
        fn(*args, **options)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def all_say(answers, kind, *texts):
    assert {answer[0] for answer in answers} == {kind}, answers
    assert len({answer[1] for answer in answers}) == 1, answers
    for text in texts:
        assert text in answers[0][1]


def tree_on(mesh, fill=1.0):
    """A small state on two ranks."""
    sharded = distribute_tensor(torch.full((4, 3), fill), mesh[1], [S0], src_data_rank=None)
    return {"params": {"w": sharded, "plain": torch.full((2,), fill)}, "step": 1}


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    path = tmp_path_factory.mktemp("small") / "step-1"
    ranks(2)(lambda: save(path, tree_on(mesh := meshes(2, 1)), config={"d": 1}, mesh=mesh[2]))
    return path


def wrong_shape(tree, rank):
    tree["params"]["plain"] = torch.zeros(3) if rank else torch.zeros(2)


def one_more(tree, rank):
    if rank:
        tree["params"]["more"] = torch.zeros(3)


def other_dtype(tree, rank):
    tree["params"]["plain"] = torch.zeros(2, dtype=torch.float64 if rank else torch.float32)


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (wrong_shape, ["params.plain", "[2]", "[3]", "on rank 1"]),
        (one_more, ["params.more: missing in the checkpoint"]),
        (other_dtype, ["params.plain", "float64", "on rank 1"]),
    ],
)
def test_a_tree_that_is_wrong_on_one_rank_is_an_error_on_all(small, change, texts):
    def attempt():
        tree = tree_on(mesh := meshes(2, 1), fill=0.0)
        change(tree, dist.get_rank())
        said = outcome(load, small, tree, mesh=mesh[2])
        return *said, local(tree["params"]["w"]).any().item()

    answers = ranks(2)(attempt)
    all_say(answers, "ValueError", *texts)
    assert not any(touched for *_, touched in answers)


def test_a_checkpoint_that_one_rank_cannot_see_is_an_error_on_all(small):
    def attempt():
        mesh = meshes(2, 1)
        path = small if dist.get_rank() == 0 else small / "elsewhere"
        return outcome(load, path, tree_on(mesh, fill=0.0), mesh=mesh[2])

    all_say(ranks(2)(attempt), "ValueError", "rank 1: ", "is no checkpoint")


def test_a_config_of_another_model_is_an_error_on_all(small):
    def attempt():
        mesh = meshes(2, 1)
        config = {"d": 1 + dist.get_rank()}
        return outcome(load, small, tree_on(mesh, fill=0.0), config=config, mesh=mesh[2])

    all_say(ranks(2)(attempt), "ValueError", "rank 1: ", "another model", "d = 1, not 2")


def test_damage_that_one_rank_reads_is_an_error_on_all(small, tmp_path):
    def attempt(path):
        tree = tree_on(mesh := meshes(2, 2), fill=0.0)
        return *outcome(load, path, tree, mesh=mesh[2]), local(tree["params"]["w"]).any().item()

    for name in read_manifest(small)["files"]:
        path = tmp_path / name.strip(".")
        path.mkdir()
        for file in small.iterdir():
            (path / file.name).write_bytes(file.read_bytes())
        content = bytearray((path / name).read_bytes())
        content[len(content) // 2] ^= 4
        (path / name).write_bytes(content)
        answers = ranks(4)(attempt, path)
        all_say(answers, "ValueError", "rank ", f"the content of {name} has changed")
        assert not any(touched for *_, touched in answers)


def not_json(tree, mesh):
    tree["step"] = 1 if dist.get_rank() == 0 else {1, 2}


def another_value(tree, mesh):
    tree["step"] = dist.get_rank()


def another_plain_tensor(tree, mesh):
    tree["params"]["plain"] = torch.full((2,), float(dist.get_rank()))


def plain_on_one_rank(tree, mesh):
    if dist.get_rank():
        tree["params"]["w"] = torch.zeros(4, 3)


def unsummed(tree, mesh):
    tree["params"]["w"] = DTensor.from_local(torch.zeros(4, 3), mesh[1], [Partial()])


def lost_shard(tree, mesh):
    if dist.get_rank():
        del tree["params"]["w"]


@pytest.mark.parametrize(
    ("change", "texts"),
    [
        (not_json, ["rank 1: ", "step: neither a tensor nor plain JSON"]),
        (another_value, ["step: {'value': '0'} on rank 0, {'value': '1'} on rank 1"]),
        (another_plain_tensor, ["params.plain", "on rank 1", "shards are DTensors"]),
        (plain_on_one_rank, ["params.w", "on rank 1"]),
        (unsummed, ["params.w", "sum that is still to be taken"]),
        (lost_shard, ["rank 0: ", "Failed to validate global plan"]),
    ],
)
def test_what_cannot_be_saved_is_an_error_on_all_ranks_and_leaves_nothing(tmp_path, change, texts):
    def attempt():
        tree = tree_on(mesh := meshes(2, 1))
        change(tree, mesh)
        return outcome(save, tmp_path / "a", tree, mesh=mesh[2])

    all_say(ranks(2)(attempt), "ValueError", *texts)
    assert not list(tmp_path.iterdir())


def test_an_existing_path_is_an_error_on_all_ranks(small):
    def attempt():
        return outcome(save, small, tree_on(mesh := meshes(2, 1)), mesh=mesh[2])

    all_say(ranks(2)(attempt), "ValueError", f"{small} exists")


@pytest.mark.parametrize("full", [0, 1])
def test_a_rank_that_cannot_write_is_an_error_on_all_and_leaves_nothing(tmp_path, full):
    def attempt():
        mesh = meshes(2, 1)
        tree = {"w": distribute_tensor(torch.zeros(400, 300), mesh[1], [S0], src_data_rank=None)}
        limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(
            resource.RLIMIT_FSIZE, (100_000 if dist.get_rank() == full else limit[0], limit[1])
        )
        try:
            return outcome(save, tmp_path / "a", tree, mesh=mesh[2])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)

    all_say(ranks(2)(attempt), "OSError", f"rank {full}: ", "File too large")
    assert not list(tmp_path.iterdir())


def test_stages_with_other_names_make_one_checkpoint(tmp_path):
    def stages(path):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
        stage = mesh.get_local_rank("pp")
        tree = {
            f"stage{stage}": distribute_tensor(
                torch.full((3,), 1.0 + stage), mesh["dp"], [S0], src_data_rank=None
            )
        }
        save(path, {**tree, "step": 1}, mesh=mesh)
        tree = {f"stage{stage}": distribute_tensor(torch.zeros(3), mesh["dp"], [R], src_data_rank=None)}
        assert load(path, {**tree, "step": None}, mesh=mesh)["step"] == 1
        return tree[f"stage{stage}"].to_local()

    answers = ranks(4)(stages, tmp_path / "a")
    assert [answer.tolist() for answer in answers] == [[1.0] * 3] * 2 + [[2.0] * 3] * 2
    back = {"stage0": torch.zeros(3), "stage1": torch.zeros(3), "step": None}
    load(tmp_path / "a", back)
    assert back["stage0"].eq(1).all() and back["stage1"].eq(2).all()


def test_a_run_on_two_ranks_continues_past_a_damaged_checkpoint(tmp_path):
    def train(last):
        """Return where the run started and whether it warned."""
        tree = tree_on(mesh := meshes(2, 1), fill=0.0)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            saved = resume(tmp_path, tree, wanted=True, mesh=mesh[2])
        start = saved["step"] if saved else 0
        assert local(tree["params"]["w"]).eq(start).all()
        for step in range(start + 1, last + 1):
            save(tmp_path / f"step-{step}", {**tree_on(mesh, fill=float(step)), "step": step}, mesh=mesh[2])
        return start, [str(w.message) for w in said if "damaged" in str(w.message)]

    assert ranks(2)(train, 2) == [(0, [])] * 2
    (tmp_path / "step-2" / "__1_0.distcp").unlink()
    (start, said), (other, unsaid) = ranks(2)(train, 3)
    assert start == other == 1 and len(said) == 2 and not unsaid  # rank 0 speaks
    assert "to step-2.damaged" in said[1]
    assert {path.name for path in tmp_path.iterdir()} == {"step-1", "step-2", "step-2.damaged", "step-3"}
    assert ranks(2)(train, 3) == [(3, [])] * 2


def test_a_damaged_checkpoint_that_cannot_be_renamed_is_an_error_on_all_ranks(tmp_path):
    def attempt():
        tree = tree_on(mesh := meshes(2, 1))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            os.rename = lambda *_: (_ for _ in ()).throw(PermissionError(13, "Permission denied"))
            return outcome(resume, tmp_path, tree, wanted=True, mesh=mesh[2])

    save(tmp_path / "step-1", {"w": torch.zeros(2)})
    (tmp_path / "step-1" / ".metadata").unlink()
    all_say(ranks(2)(attempt), "OSError", "Permission denied")


def test_the_mesh_must_hold_all_ranks_and_dtensors_need_a_mesh(small):
    def attempt():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        leaf = distribute_tensor(torch.zeros(4, 3), mesh["ep"], [S0], src_data_rank=None)
        return outcome(load, small, {"w": leaf}, mesh=mesh["ep"]), outcome(load, small, {"w": leaf}, only="w")

    for few, none in ranks(4)(attempt):
        assert few[0] == "ValueError" and "a mesh of all 4 ranks" in few[1]
        assert none[0] == "ValueError" and "w: a DTensor, but mesh=None" in none[1]


def test_all_ranks_get_the_latest_that_rank_0_sees(small):
    def look():
        mesh = meshes(2, 1)
        folder = small.parent if dist.get_rank() == 0 else small / "elsewhere"
        return latest(folder, mesh=mesh[2])

    assert ranks(2)(look) == [small] * 2


def test_one_rank_alone_reads_what_many_have_saved_within_their_group(small):
    def alone():
        tree = {"params": {"w": torch.zeros(4, 3), "plain": torch.zeros(2)}, "step": None}
        return (
            load(small, tree)["step"] == 1 and tree["params"]["w"].eq(1).all().item()
            if dist.get_rank()
            else True
        )

    assert ranks(2)(alone) == [True, True]
