import dataclasses
import fcntl
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import warnings
from contextlib import contextmanager
from pathlib import Path

import pytest
import save_forever
import torch
from kill import in_save, kill_tree, kill_when
from tensordict import TensorDict

from moekit import checkpoint
from moekit.checkpoint import latest, load, read_manifest, resume, save


@dataclasses.dataclass(frozen=True)
class Config:
    d_model: int = 4
    rope_base: float = 1e4
    windows: tuple = (8, 16)
    dtype: torch.dtype = torch.bfloat16


def state(fill=None):
    """A state with the kinds of leaves that there are; with ``fill``, one to load into."""
    generator = torch.Generator().manual_seed(1)

    def leaf(*shape, dtype=torch.float32):
        drawn = (torch.randn(shape, generator=generator) * 100).to(dtype)
        return drawn if fill is None else torch.full_like(drawn, fill)

    layers = {
        str(i): {"w": leaf(3, 4), "experts": {"up": leaf(2, 3, 5, dtype=torch.bfloat16)}} for i in range(2)
    }
    return {
        "params": TensorDict({"embedding": leaf(7, 4), "layers": layers}),
        "optimizer": TensorDict(
            {"0": TensorDict({}), "1": TensorDict({"step": leaf(dtype=torch.int64), "mean": leaf(7, 4)})}
        ),
        "bias": {"0": leaf(2), "empty": leaf(0, 3), "mask": leaf(3, dtype=torch.bool)},
        "step": 17 if fill is None else None,
        "data": {"epoch": 1, "files": ["a", None], "loss": float("nan")} if fill is None else None,
    }


def tensors(tree, prefix=""):
    out = {}
    for key, node in tree.items():
        if isinstance(node, torch.Tensor):
            out[prefix + key] = node
        elif isinstance(node, dict | TensorDict):
            out |= tensors(node, f"{prefix}{key}.")
    return out


def same(a, b):
    a, b = tensors(a), tensors(b)
    return a.keys() == b.keys() and all(a[n].dtype == b[n].dtype and a[n].equal(b[n]) for n in a)


def refused(match, path, tree, **options):
    """Assert that a load is a ValueError that says ``match`` and leaves ``tree`` alone; return the text."""
    before = {name: leaf.clone() for name, leaf in tensors(tree).items()}
    with pytest.raises(ValueError, match=match) as caught:
        load(path, tree, **options)
    assert all(leaf.equal(before[name]) for name, leaf in tensors(tree).items())
    return str(caught.value)


@pytest.fixture
def saved(tmp_path):
    save(tmp_path / "step-000017", state(), config=Config())
    return tmp_path / "step-000017"


def test_what_was_saved_comes_back_bit_by_bit_into_the_same_tensors(saved):
    tree = state(fill=0)
    ours = tensors(tree)
    back = load(saved, tree, config=Config())
    assert same(back, state())
    assert all(leaf is ours[name] for name, leaf in tensors(back).items())
    assert back["step"] == 17 and repr(back["data"]) == repr(state()["data"])
    assert tree["step"] is None  # values come back, tensors are filled


def test_a_tensordict_alone_is_a_tree(tmp_path):
    save(tmp_path / "a", state()["params"])
    back = state(fill=0)["params"]
    assert load(tmp_path / "a", back) is back and same(back, state()["params"])


def test_views_and_tensors_that_need_gradients_come_back(tmp_path):
    full = torch.arange(24.0).reshape(4, 6)
    save(tmp_path / "a", {"t": full.t(), "part": full[1:3, ::2], "p": torch.nn.Parameter(full.clone())})
    assert sum(file.stat().st_size for file in (tmp_path / "a").glob("*.distcp")) < 10_000
    into = torch.zeros(6, 4)
    parameter = torch.nn.Parameter(torch.zeros(4, 6))
    back = load(tmp_path / "a", {"t": into.t().t(), "part": torch.zeros(4, 6)[1:3, ::2], "p": parameter})
    assert into.equal(full.t()) and back["part"].equal(full[1:3, ::2]) and parameter.equal(full)
    assert parameter.is_leaf and parameter.requires_grad


def test_the_manifest_names_everything(saved):
    manifest = read_manifest(saved)
    assert list(manifest["tensors"]) == list(tensors(state()))
    assert manifest["tensors"]["params.layers.1.experts.up"] == {"shape": [2, 3, 5], "dtype": "bfloat16"}
    assert manifest["values"]["step"] == 17
    assert manifest["config"] == {
        "d_model": 4,
        "rope_base": 1e4,
        "windows": [8, 16],
        "dtype": "torch.bfloat16",
    }
    assert {name: info["bytes"] for name, info in manifest["files"].items()} == {
        file.name: file.stat().st_size for file in saved.iterdir() if file.name != "manifest.json"
    }


def test_only_reads_a_part_and_leaves_the_rest(saved):
    tree = state(fill=0)
    back = load(saved, tree, only="params")
    assert same(back["params"], state()["params"]) and same(back["optimizer"], state(fill=0)["optimizer"])
    assert back["step"] is None
    back = load(saved, {"step": None, "bias": {"0": torch.zeros(2)}}, only=["step", "bias.0"])
    assert back["step"] == 17 and back["bias"]["0"].equal(state()["bias"]["0"])


def test_only_is_strict_within_the_part(saved):
    part = {"params": state(fill=0)["params"]}
    refused("optimizer.1.mean: unused", saved, part)
    refused("bias.empty: unused", saved, {"bias": {"0": torch.zeros(2)}}, only="bias")
    refused(
        "bias.new: missing", saved, {"bias": {**state(fill=0)["bias"], "new": torch.zeros(2)}}, only="bias"
    )
    refused("parms: asked for by only=, and nowhere", saved, part, only=["params", "parms"])
    # a prefix is made of whole names
    refused("param: asked for by only=, and nowhere", saved, part, only="param")


def test_names_that_differ_by_a_prefix_are_said_to(saved, tmp_path):
    tree = state(fill=0)
    says = 'has the names of the tree under "params.": nest it, with only="params"'
    text = refused(says, saved, tree["params"])
    assert "embedding: missing" in text and "params.embedding: unused" in text
    save(tmp_path / "bare", tree["params"])
    refused(
        'the tree has the names of the checkpoint under "params.": pass that part', tmp_path / "bare", tree
    )
    save(tmp_path / "both", {"masters": {"of": state()["params"]}, "params": state()["params"]})
    refused(says, tmp_path / "both", tree["params"])  # the shorter one
    more = TensorDict({**tree["params"], "head": torch.zeros(2)})
    assert "under" not in refused("head: missing", saved, more)
    del tree["params"]["embedding"]
    assert "under" not in refused("params.embedding: unused", saved, tree)


def test_floats_are_converted_when_asked(saved):
    tree = state(fill=0)
    tree["params"] = tree["params"].to(torch.float64)
    text = refused(
        r"params.embedding: a float32 tensor of shape \[7, 4\] in the checkpoint, a float64", saved, tree
    )
    assert "params.layers.1.experts.up: a bfloat16" in text and "optimizer" not in text
    load(saved, tree, cast=True)
    assert same(tree["params"], state()["params"].to(torch.float64))
    tree["optimizer"]["1"]["step"] = torch.tensor(0.0)
    refused("optimizer.1.step: a int64 tensor", saved, tree, cast=True)


def test_every_missing_unused_and_misshapen_name_is_listed(saved):
    tree = state(fill=0)
    del tree["params"]["layers", "0", "w"]
    del tree["bias"]
    tree["params"]["head"] = torch.zeros(4, 7)
    tree["params"]["layers", "1", "w"] = torch.zeros(4, 3)
    tree["step"] = torch.tensor(0)
    tree["rng"] = [1]
    text = refused("does not fit the tree", saved, tree)
    lines = text.splitlines()[1:]
    missing, unused = (
        [line.partition(": ")[0] for line in lines if kind in line] for kind in ("missing in", "unused")
    )
    assert missing == ["params.head", "rng"]
    assert unused == ["params.layers.0.w", "bias.0", "bias.empty", "bias.mask"]
    shapes = (
        "a float32 tensor of shape [3, 4] in the checkpoint, a float32 tensor of shape [4, 3] in the tree"
    )
    assert f"params.layers.1.w: {shapes}" in lines
    assert "step: a value in the checkpoint, a int64 tensor of shape [] in the tree" in text
    assert len(lines) == 8


def test_a_checkpoint_of_another_model_is_refused(saved, tmp_path):
    other = dataclasses.replace(Config(), rope_base=5e5, windows=(8,))
    text = refused("another model", saved, state(fill=0), config=other)
    assert "rope_base = 10000.0, not 500000.0" in text and "windows = [8, 16], not [8]" in text
    assert "d_model" not in text
    save(tmp_path / "no-config", state())
    refused("another model", tmp_path / "no-config", state(fill=0), config=Config())
    load(saved, state(fill=0))  # not compared


def test_what_is_no_checkpoint_is_refused(saved, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "manifest.json").write_text('{"name": "an extension"}')
    for path in (tmp_path / "nowhere", tmp_path / "empty", saved / "manifest.json", tmp_path / "foreign"):
        refused("is no checkpoint", path, state(fill=0))


def test_a_newer_format_is_refused(saved):
    manifest = json.loads((saved / "manifest.json").read_bytes())
    (saved / "manifest.json").write_text(json.dumps({**manifest, "version": 2, "layout": "new"}))
    refused("format version 2, this moekit reads 1", saved, state(fill=0))


def files_of(path):
    return sorted(file.name for file in path.iterdir())


def test_a_checkpoint_is_a_manifest_an_index_and_data(saved):
    assert files_of(saved) == [".metadata", "__0_0.distcp", "manifest.json"]


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json"])
def test_a_damaged_file_is_refused_before_anything_is_read(saved, name):
    whole = (saved / name).read_bytes()
    tree = state(fill=0)
    (saved / name).unlink()
    refused(
        "no checkpoint: it has no manifest" if name == "manifest.json" else f"{name} is missing", saved, tree
    )
    for length in sorted({0, 1, len(whole) // 3, len(whole) // 2, len(whole) - 2, len(whole) - 1}):
        (saved / name).write_bytes(whole[:length])
        refused(f"damaged: .*{name}", saved, tree)
    (saved / name).write_bytes(whole + b"\0")
    refused(f"damaged: .*{name}", saved, tree)
    chooser = random.Random(0)
    for place in {0, len(whole) - 1, *(chooser.randrange(len(whole)) for _ in range(40))}:
        (saved / name).write_bytes(
            whole[:place] + bytes([whole[place] ^ 1 << chooser.randrange(8)]) + whole[place + 1 :]
        )
        refused(f"damaged: .*{name}|is no checkpoint|format version", saved, tree)
    (saved / name).write_bytes(whole)
    assert same(load(saved, tree), state())


def test_a_flip_of_any_byte_of_the_manifest_is_seen(tmp_path):
    save(tmp_path / "a", {"w": torch.zeros(2), "step": 100})
    whole = (tmp_path / "a" / "manifest.json").read_bytes()
    for place in range(len(whole)):
        flipped = bytes([whole[place] ^ 1 << place % 8])
        (tmp_path / "a" / "manifest.json").write_bytes(whole[:place] + flipped + whole[place + 1 :])
        with pytest.raises(ValueError, match=r"damaged|is no checkpoint|format version"):
            read_manifest(tmp_path / "a")


@pytest.mark.parametrize("name", ["../secret", "/etc/hostname", "a/b", "..", "."])
def test_a_manifest_that_names_files_elsewhere_is_refused(saved, name):
    (saved.parent / "secret").write_text("1234")
    manifest = read_manifest(saved)
    path = saved / name
    n_bytes = path.stat().st_size if path.exists() else 4
    manifest["files"] = {**manifest["files"], name: {"bytes": n_bytes, "crc32": 0}}
    (saved / "manifest.json").write_bytes(checkpoint._dump(manifest))
    match = f"damaged: its manifest.json names '{name}', no file of this folder|damaged: {name} is missing"
    refused(match, saved, state(fill=0))


@pytest.mark.parametrize(
    "text",
    [
        *(b"[" * 100_000, b"", b"\xff\xfe", b"[]", b"null"),
        *(
            b'{"format": "moekit checkpoint", "version": 1}',
            checkpoint._dump({"format": "moekit checkpoint"}),
        ),
        checkpoint._dump({"format": "moekit checkpoint", "version": 1}),
        checkpoint._dump({"format": "moekit checkpoint", "version": 1, "files": {"a": 3}}),
    ],
)
def test_any_other_manifest_is_refused(saved, text):
    (saved / "manifest.json").write_bytes(text)
    refused("damaged|no checkpoint|format version", saved, state(fill=0))


def test_a_folder_in_the_place_of_a_manifest_is_no_checkpoint(saved):
    (saved / "manifest.json").unlink()
    (saved / "manifest.json").mkdir()
    refused("is no checkpoint", saved, state(fill=0))


@pytest.mark.parametrize(
    ("leaf", "match"),
    [
        ((1, 2), r"x: neither a tensor nor plain JSON.*\(1, 2\)"),
        ({1: 2}, "x: neither"),
        ({1, 2}, "x: neither"),
        ([torch.zeros(1)], "x: neither"),
        (torch.float32, "x: neither"),
        (torch.zeros(2, device="meta"), "x: a meta tensor"),
    ],
)
def test_what_a_checkpoint_cannot_hold_is_refused_before_a_file_is_made(tmp_path, leaf, match):
    with pytest.raises(ValueError, match=match):
        save(tmp_path / "runs" / "a", {"w": torch.zeros(2), "x": leaf})
    assert not list(tmp_path.iterdir())


def test_names_are_strings_and_unique(tmp_path):
    with pytest.raises(TypeError, match=r"names that are strings, got 0 in .layers\.."):
        save(tmp_path / "a", {"layers": {0: torch.zeros(2)}})
    with pytest.raises(ValueError, match=r"a\.b: there twice"):
        save(tmp_path / "a", {"a.b": torch.zeros(2), "a": {"b": torch.ones(2)}})
    assert not list(tmp_path.iterdir())


def test_an_existing_path_is_refused_and_kept(saved, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for path in (saved, tmp_path / "file", tmp_path / "folder"):
        with pytest.raises(ValueError, match=f"{path.name} exists; choose another path or delete it"):
            save(path, state(fill=3))
    assert same(load(saved, state(fill=0)), state())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder", "step-000017"]


@contextmanager
def files_of_at_most(n_bytes):
    """Make a write past ``n_bytes`` fail, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("n_bytes", [0, 10, 3000, 15000])
def test_a_save_that_cannot_write_leaves_nothing(tmp_path, n_bytes):
    with files_of_at_most(n_bytes), pytest.raises(OSError):
        save(tmp_path / "a", {**state(), "large": torch.zeros(10_000)})
    assert not list(tmp_path.iterdir())


def test_the_remains_of_killed_saves_are_no_checkpoints_and_go_with_the_next_save(saved, tmp_path):
    for name in ("00000001", "00000002", "00000003"):
        shutil.copytree(saved, tmp_path / f".step-000099.partial-{name}")
    (tmp_path / ".step-000099.partial-00000001" / "manifest.json").unlink()
    (tmp_path / ".step-000099.partial-00000002" / "manifest.json").write_bytes(b"")
    assert latest(tmp_path) == saved
    refused("damaged", tmp_path / ".step-000099.partial-00000002", state(fill=0))
    with open(tmp_path / ".step-000099.partial-00000003" / "manifest.json", "r+b") as living:
        fcntl.flock(living, fcntl.LOCK_EX)
        save(tmp_path / "step-000018", state())
        assert {path.name for path in tmp_path.glob(".*")} == {".step-000099.partial-00000003"}
    save(tmp_path / "step-000019", state())
    assert not list(tmp_path.glob(".*"))


def test_a_save_holds_its_lock_to_the_end(tmp_path, monkeypatch):
    seen = []

    def sweep_too(*args, **options):
        checkpoint._sweep(tmp_path)  # as another save beside it does
        seen.extend(tmp_path.glob(".*"))
        return dcp_save(*args, **options)

    dcp_save = checkpoint.dcp.save
    monkeypatch.setattr(checkpoint.dcp, "save", sweep_too)
    sweep_too.__name__ = "save"
    save(tmp_path / "a", state())
    assert len(seen) == 1 and same(load(tmp_path / "a", state(fill=0)), state())


def test_of_two_saves_at_once_into_one_path_one_is_kept_and_the_other_refused(tmp_path):
    start, outcomes = threading.Barrier(2), []

    def attempt(fill):
        start.wait()
        try:
            outcomes.append(save(tmp_path / "a", {"w": torch.full((1000,), fill)}) or fill)
        except ValueError as error:
            outcomes.append(str(error))

    for _ in range(20):
        threads = [threading.Thread(target=attempt, args=(fill,)) for fill in (1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        fill, error = sorted(outcomes, key=str)
        assert error.startswith("save needs a new folder") and len(outcomes) == 2
        assert load(tmp_path / "a", {"w": torch.zeros(1000, dtype=torch.int64)})["w"].eq(fill).all()
        assert files_of(tmp_path) == ["a"]
        shutil.rmtree(tmp_path / "a")
        outcomes.clear()


def test_a_path_that_is_made_during_a_save_is_kept(tmp_path, monkeypatch):
    def save_too(*args, **options):
        monkeypatch.undo()
        save(tmp_path / "a", {"w": torch.ones(2)})
        return checkpoint.dcp.save(*args, **options)

    save_too.__name__ = "save"
    monkeypatch.setattr(checkpoint.dcp, "save", save_too)
    with pytest.raises(ValueError, match=r"save needs a new folder, but another has made .*a meanwhile"):
        save(tmp_path / "a", {"w": torch.zeros(2)})
    assert load(tmp_path / "a", {"w": torch.zeros(2)})["w"].eq(1).all() and files_of(tmp_path) == ["a"]


def test_a_save_that_starts_is_not_swept_away_by_another(tmp_path, monkeypatch):
    makes, others = Path.mkdir, []

    def make(path, *args, **options):
        makes(path, *args, **options)
        if ".partial-" in path.name and not others:  # not locked yet
            others.append(threading.Thread(target=save, args=(tmp_path / "b", {"w": torch.ones(2)})))
            others[0].start()
            others[0].join(0.3)

    monkeypatch.setattr(Path, "mkdir", make)
    save(tmp_path / "a", {"w": torch.zeros(2)})
    others[0].join()
    assert files_of(tmp_path) == ["a", "b"]


@pytest.fixture
def as_nobody(tmp_path):
    """Run without root's rights, where it is root that runs the tests."""
    before = os.geteuid()
    if before == 0:
        os.chmod(tmp_path, 0o755)
        os.seteuid(65534)
    yield
    os.seteuid(before)


def test_a_folder_that_cannot_be_written_or_read_is_said(saved, tmp_path, as_nobody):
    user = os.geteuid()
    os.seteuid(os.getuid())
    (tmp_path / "file").touch()
    (tmp_path / "run").mkdir(mode=0o500)
    (tmp_path / "hidden").mkdir(mode=0o000)
    os.seteuid(user)
    for path in (tmp_path / "run" / "a", tmp_path / "run" / "new" / "a", tmp_path / "file" / "a"):
        with pytest.raises(OSError, match=f"save needs a folder that it can write to, but {path.parent}: "):
            save(path, {"w": torch.zeros(2)})
    for path in (tmp_path / "hidden", tmp_path / "file"):
        with pytest.raises(OSError):
            latest(path)  # not None: the run would start again


def test_latest_is_the_one_with_the_largest_number(saved, tmp_path):
    assert latest(tmp_path / "nowhere") is None
    for name in ("step-9", "step-100", "step-20", "final"):
        shutil.copytree(saved, tmp_path / "run" / name)
    (tmp_path / "run" / "step-200").mkdir()  # of something else
    (tmp_path / "run" / "run-300.log").touch()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert latest(tmp_path / "run") == tmp_path / "run" / "step-100"
    with pytest.raises(ValueError, match="is a checkpoint; pass its parent"):
        latest(saved)


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "manifest.json"])
def test_latest_passes_over_what_is_incomplete_with_a_warning(saved, tmp_path, name):
    shutil.copytree(saved, tmp_path / "step-000018")
    (tmp_path / "step-000018" / name).write_bytes((saved / name).read_bytes()[:-1])
    with pytest.warns(UserWarning, match=f"passes over a checkpoint: .*step-000018 is damaged: .*{name}"):
        assert latest(tmp_path) == saved
    (tmp_path / "step-000018" / name).unlink()
    with pytest.warns(UserWarning, match=f"step-000018 .*{name}"):
        assert latest(tmp_path) == saved


def lose(path, name):
    """Damage a checkpoint: ``name`` is lost, or all but it."""
    for file in path.iterdir():
        if (file.name == name) != name.startswith("__"):
            file.unlink()


@pytest.mark.parametrize("name", [".metadata", "manifest.json", "__0_0.distcp"])
def test_a_run_continues_past_a_damaged_checkpoint(tmp_path, name):
    for step in (200, 400):
        save(tmp_path / f"step-{step:06d}", {"w": torch.full((2,), step), "step": step})
    lose(tmp_path / "step-000400", name)
    left = files_of(tmp_path / "step-000400")
    tree = {"w": torch.zeros(2, dtype=torch.int64), "step": None}
    for n, aside in enumerate(["step-000400.damaged", "step-000400.damaged-1"]):
        with pytest.warns(UserWarning, match="passes over a checkpoint: .*step-000400"):
            assert latest(tmp_path) == tmp_path / "step-000200"  # and only looks
        assert len(files_of(tmp_path)) == 2 + n
        with pytest.warns(UserWarning, match=f"renamed the damaged .*step-000400 to {aside}$"):
            assert resume(tmp_path, tree, wanted=True)["step"] == 200
        assert files_of(tmp_path / aside) == left
        save(tmp_path / "step-000400", {"w": torch.full((2,), 400), "step": 400})
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert resume(tmp_path, tree, wanted=True)["step"] == 400
        lose(tmp_path / "step-000400", name)


def test_a_run_whose_only_checkpoint_is_damaged_starts_again_when_it_is_wanted(saved, tmp_path):
    (saved / ".metadata").unlink()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="holds step-000017; continue it"):
        resume(tmp_path, state(fill=0), wanted=False)
    assert files_of(tmp_path) == ["step-000017"]
    with pytest.warns(UserWarning, match="to step-000017.damaged"):
        assert resume(tmp_path, state(fill=0), wanted=True) is None
    save(saved, state())


def test_what_is_refused_moves_no_damaged_checkpoint(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "step-000018")
    (tmp_path / "step-000018" / ".metadata").unlink()
    with pytest.warns(UserWarning), pytest.raises(ValueError, match="another model"):
        resume(tmp_path, state(fill=0), wanted=True, config={"d": 1})
    assert files_of(tmp_path) == ["step-000017", "step-000018"]


def test_a_checkpoint_of_a_newer_format_is_not_passed_over(saved, tmp_path):
    shutil.copytree(saved, tmp_path / "step-000018")
    manifest = tmp_path / "step-000018" / "manifest.json"
    manifest.write_text(json.dumps({**json.loads(manifest.read_bytes()), "version": 2}))
    with pytest.raises(ValueError, match=r"step-000018 has format version 2.* use a newer one"):
        resume(tmp_path, state(fill=0), wanted=True)
    assert files_of(tmp_path) == ["step-000017", "step-000018"]


def kill_saves(folder: Path, ranks: int, n_kills: int) -> int:
    """Kill saving processes, check after each what they left; return how many kills hit a save."""
    chooser = random.Random(n_kills * ranks)
    command = [sys.executable, save_forever.__file__, str(folder), str(ranks)]
    pipe, env = subprocess.PIPE, {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    hits = 0
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=env) as program:
        try:
            for _ in range(n_kills):
                moment = in_save(folder, chooser.randint(1, 3), chooser.uniform(0, 0.03))
                before = set(folder.glob(".*.partial-*"))
                program.stdin.write("\n")
                program.stdin.flush()
                assert kill_when(moment, int(program.stdout.readline())), "it ended before it was killed"
                hits += bool(set(folder.glob(".*.partial-*")) - before)
                check_saves(folder)
        finally:
            kill_tree(program.pid)
    return hits


def check_saves(folder: Path) -> None:
    """Assert that the newest checkpoint is whole, and not older than the last save that returned."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        newest = latest(folder)
    if newest is None:
        assert not (folder / "returned").exists()
        return
    back = load(newest, save_forever.state(0), config={"name": "soak"})
    assert save_forever.difference(back, save_forever.state(back["step"])) == []
    assert newest.name == f"step-{back['step']:06d}"
    if (folder / "returned").exists():
        assert back["step"] >= int((folder / "returned").read_text().split()[-1])


@pytest.mark.parametrize("ranks", [1, 2])
def test_after_kills_the_newest_checkpoint_is_whole(tmp_path, ranks):
    assert kill_saves(tmp_path, ranks, n_kills=3) >= 1
    save(tmp_path / "step-999999", save_forever.state(1))
    assert not list(tmp_path.glob(".*"))


@pytest.mark.soak
@pytest.mark.parametrize("ranks", [1, 2])
def test_after_30_kills_the_newest_checkpoint_is_whole(tmp_path, ranks):
    assert kill_saves(tmp_path, ranks, n_kills=30) >= 5
    save(tmp_path / "step-999999", save_forever.state(1))
    assert not list(tmp_path.glob(".*"))


def test_a_save_deletes_nothing_that_another_program_named_alike(tmp_path):
    (tmp_path / ".mydata.partial-important").mkdir()
    (tmp_path / ".mydata.partial-important" / "precious.txt").write_text("x")
    save(tmp_path / "step-1", save_forever.state(1))
    assert (tmp_path / ".mydata.partial-important" / "precious.txt").read_text() == "x"
