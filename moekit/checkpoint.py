"""Checkpoints: global tensors under stable names, written whole or not at all, loaded into any layout.

A checkpoint is a folder: tensors as ``torch.distributed.checkpoint`` (DCP) writes them, each rank a share and
no replica twice; and ``manifest.json`` with names, shapes, dtypes, JSON values, and size and CRC-32 of every
file. DCP's index is a pickle: load only checkpoints whose origin you trust.
"""

import dataclasses
import fcntl
import json
import os
import re
import secrets
import shutil
import traceback
import warnings
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from tensordict import TensorDictBase
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moekit.tree import held, is_hollow

FORMAT, VERSION, MANIFEST = "moekit checkpoint", 1, "manifest.json"
_INDEX, _PARTIAL, _DAMAGED = ".metadata", ".partial-", ".damaged"  # the index is DCP's
Tree = Mapping | TensorDictBase
Leaves = dict[str, dict[str, Any]]  # by name: shape and dtype of a tensor, or the JSON text of a value


def save(path: str | os.PathLike, tree: Tree, *, config: Any = None, mesh: DeviceMesh | None = None) -> None:
    """Write a tree of tensors and JSON values as the new folder ``path``.

    Collective over all ranks of ``mesh``; only reads ``tree``. All is written to a hidden folder beside
    ``path``, synced to disk and then renamed: killed at any moment it leaves the whole checkpoint or none,
    and the next save beside it deletes the remains.

    Parameters
    ----------
    path : path
        A new folder on a file system that all ranks see. An existing one is refused: POSIX has no call that
        replaces a folder atomically.
    tree : nested mapping or TensorDict
        Tensors and DTensors (any mesh, ``Replicate`` and ``Shard``), named by their keys joined with "."; a
        part without a tensor (step, data position) is one value of plain JSON. Values and plain tensors must
        be the same on all ranks that have them; ranks may have different names, as pipeline stages do.
        Hollow parameters (:func:`moekit.precision.hollow`) are left out.
    config : dataclass or mapping, optional
        What makes this model this model, for `load` to compare.
    mesh : DeviceMesh, optional
        Of all ranks of the world; None is this process alone, without a process group.

    Raises
    ------
    ValueError
        ``path`` exists, or ``tree`` holds what a checkpoint cannot: on every rank, before a file is made. Or
        another save has made ``path`` meanwhile: that one is kept.
    OSError
        Some rank could not write: on every rank, with nothing at ``path``.
    """
    path = Path(os.path.abspath(path))
    manifest: dict[str, Any] = {"format": FORMAT, "version": VERSION, "torch": torch.__version__}

    def begin(found):
        if os.path.lexists(path):
            raise ValueError(f"save needs a new folder, but {path} exists; choose another path or delete it")
        leaves = _union(found)
        manifest["config"] = _plain(config)
        manifest["hollow"] = {n: leaf["hollow"] for n, leaf in leaves.items() if "hollow" in leaf}
        manifest["values"] = {n: json.loads(leaf["value"]) for n, leaf in leaves.items() if "value" in leaf}
        manifest["tensors"] = {
            n: {"shape": leaf["shape"], "dtype": leaf["dtype"]}
            for n, leaf in leaves.items()
            if "shape" in leaf
        }
        partial = path.with_name(f".{path.name}{_PARTIAL}{secrets.token_hex(4)}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with _locked(path.parent):  # no other save sweeps before this one holds the lock on its manifest
                _sweep(path.parent)
                partial.mkdir()
                undo.callback(shutil.rmtree, partial, ignore_errors=True)
                lock = undo.enter_context(open(partial / MANIFEST, "xb"))
                with suppress(OSError):  # a file system without locks: nobody can sweep there either
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise OSError(f"save needs a folder that it can write to, but {path.parent}: {error}") from error
        return partial

    def publish(found):
        manifest["files"] = {name: measure for share in found for name, measure in share.items()}
        with open(partial / MANIFEST, "r+b") as file:  # r+: it must still be there
            file.write(_dump(manifest))
            file.flush()
            os.fsync(file.fileno())
        _sync(partial)
        try:
            os.rename(partial, path)
        except OSError as error:
            if os.path.lexists(path):
                raise ValueError(f"save needs a new folder, but another has made {path} meanwhile") from error
            raise
        _sync(path.parent)

    with ExitStack() as undo:
        partial = _agree(mesh, lambda: _describe(tree, None, mesh, contents=True), begin)
        writer = _Writer(partial, sync_files=True)
        _dcp(
            dcp.save,
            _tensors(tree, None),
            storage_writer=writer,
            planner=dcp.DefaultSavePlanner(flatten_state_dict=False),
            no_dist=mesh is None,
        )
        files = writer.files if _place(mesh)[0] else [*writer.files, _INDEX]
        _agree(mesh, lambda: _measure(partial, files), publish)


def load(
    path: str | os.PathLike,
    tree: Tree,
    *,
    config: Any = None,
    only: str | Collection[str] | None = None,
    cast: bool = False,
    mesh: DeviceMesh | None = None,
) -> Tree:
    """Fill the tensors of ``tree`` from a checkpoint, in place, and return the tree with the saved values.

    Collective over all ranks of ``mesh``. The layout need not be that of `save`: each rank reads what its
    shards need of each global tensor. All is checked, down to the bytes, before anything is overwritten.

    Parameters
    ----------
    path : path
        The checkpoint.
    tree : nested mapping or TensorDict
        All names that were saved and no others. What stands in the place of a value does not matter; hollow
        parameters stay so, whether they were saved or not.
    config : dataclass or mapping, optional
        Must equal what was saved; None is not compared.
    only : str or collection of str, optional
        Read only these names and those beneath them (``"params"``); the rest of ``tree`` stays as it is.
    cast : bool
        Convert between floating-point dtypes; else a differing dtype is an error.
    mesh : DeviceMesh, optional
        Of all ranks of the world; None is this process alone, without a process group.

    Returns
    -------
    tree
        As ``tree``: its own tensors, and the checkpoint's values.

    Raises
    ------
    ValueError
        No checkpoint; one of another model or a newer format; missing or damaged files; missing and unused
        names, wrong shapes and dtypes, each of them listed. On every rank, before anything is overwritten.
    OSError
        A read failed after the checks: ``tree`` may be overwritten in part.

    Examples
    --------
    >>> import tempfile, torch
    >>> from moekit.checkpoint import load, save
    >>> folder = tempfile.mkdtemp() + "/step-000100"
    >>> save(folder, {"params": {"w": torch.ones(3)}, "step": 100})
    >>> load(folder, {"params": {"w": torch.zeros(3)}, "step": None})
    {'params': {'w': tensor([1., 1., 1.])}, 'step': 100}
    """
    path = Path(os.path.abspath(path))
    only = (only,) if isinstance(only, str) else only

    def describe():
        saved, mine = read_manifest(path)["config"], _plain(config)
        if config is not None and saved != mine:
            saved, mine = (c if isinstance(c, dict) else {"config": c} for c in (saved, mine))
            names = [name for name in {**saved, **mine} if saved.get(name) != mine.get(name)]
            differ = ", ".join(f"{name} = {saved.get(name)!r}, not {mine.get(name)!r}" for name in names)
            raise ValueError(f"{path} is a checkpoint of another model, with {differ}")
        return _describe(tree, only, mesh, contents=False)

    def compare(found):
        manifest = read_manifest(path)
        if misfits := list(_misfits(manifest, _union(found), only, cast)):
            raise ValueError("\n".join([f"the checkpoint {path} does not fit the tree:", *misfits]))
        return manifest["values"], manifest["files"]

    def verify():
        rank, world = _place(mesh)
        for name, measure in _measure(path, sorted(files)[rank::world]).items():
            if measure != files[name]:
                raise ValueError(f"{path} is damaged: the content of {name} has changed")

    values, files = _agree(mesh, describe, compare)
    _agree(mesh, verify, lambda _: None)
    _dcp(
        dcp.load,
        _tensors(tree, only),
        storage_reader=dcp.FileSystemReader(path),
        planner=dcp.DefaultLoadPlanner(flatten_state_dict=False),
        no_dist=mesh is None,
    )
    return _map(lambda name, leaf: values[name] if name in values and _within(name, only) else leaf, tree)


def latest(folder: str | os.PathLike, *, mesh: DeviceMesh | None = None) -> Path | None:
    """Return the newest complete checkpoint in the folder of a run, None where there is none.

    The newest has the largest last number in its name (``step-000100``). One that has lost files is passed
    over with a warning; what files contain is left to `load`. Only reads. Collective over all ranks of
    ``mesh``, as in `save`: rank 0 looks. Raises ValueError when ``folder`` is itself a checkpoint, or the
    newest is of a newer format; ``folder`` need not exist.
    """
    return _agree(mesh, lambda: None, lambda _: _look(folder))[0]


def resume(
    folder: str | os.PathLike,
    tree: Tree,
    *,
    wanted: bool,
    config: Any = None,
    mesh: DeviceMesh | None = None,
) -> Tree | None:
    """Load the newest checkpoint of a run into ``tree``, or say that the run has none.

    Damaged ones that `latest` passes over are then renamed (``step-000400.damaged``), with a warning, so that
    the run can save those steps again. Collective over all ranks of ``mesh``. Arguments as for `load`.

    Parameters
    ----------
    folder : path
        Of the run; it need not exist.
    wanted : bool
        Whether a checkpoint that is there is to be continued.

    Returns
    -------
    tree, or None where the folder has no complete checkpoint

    Raises
    ------
    ValueError
        A checkpoint is there, even a damaged one, and not ``wanted``: the run would train, and then be
        refused its first save. And as `load`.
    """
    newest, damaged = _agree(mesh, lambda: None, lambda _: _look(folder))
    if there := [path.name for path in (newest, *damaged) if path][:1]:
        if not wanted:
            raise ValueError(f"{folder} holds {there[0]}; continue it (--resume), or choose another folder")
    loaded = None if newest is None else load(newest, tree, config=config, mesh=mesh)

    def set_aside(_):
        for path in damaged:
            names = (path.with_name(f"{path.name}{_DAMAGED}{f'-{i}' if i else ''}") for i in count())
            aside = next(name for name in names if not os.path.lexists(name))
            os.rename(path, aside)
            warnings.warn(f"resume has renamed the damaged {path} to {aside.name}", stacklevel=4)

    _agree(mesh, lambda: None, set_aside)
    return loaded


class _Damage(ValueError):
    """What is there is no whole checkpoint."""


def _look(folder: str | os.PathLike) -> tuple[Path | None, list[Path]]:
    """Return the newest complete checkpoint of a run, and the damaged ones that are newer."""
    folder = Path(os.path.abspath(folder))
    if (folder / MANIFEST).exists():
        raise ValueError(f"latest needs the folder of a run, but {folder} is a checkpoint; pass its parent")
    found, damaged = [], []
    for name in os.listdir(folder) if os.path.lexists(folder) else ():  # it raises where glob finds nothing
        if not name.startswith(".") and _DAMAGED not in name and _has_parts(folder / name):
            found += [(int(number), folder / name) for number in re.findall(r"\d+", name)[-1:]]
    for _, path in sorted(found, reverse=True):
        try:
            read_manifest(path)
            return path, damaged
        except _Damage as error:
            damaged.append(path)
            warnings.warn(f"latest passes over a checkpoint: {error}", stacklevel=5)
    return None, damaged


def _has_parts(path: Path) -> bool:
    """Return whether a folder looks like a checkpoint, be it a damaged one."""
    return any((path / name).exists() for name in (MANIFEST, _INDEX)) or any(path.glob("*.distcp"))


def read_manifest(path: str | os.PathLike) -> dict[str, Any]:
    """Return what a checkpoint holds: ``config``, ``values``, ``tensors`` (shapes, dtypes) and ``files``.

    Not collective. Raises ValueError when ``path`` is no checkpoint, has a newer format or a damaged
    manifest, or lacks files or parts of them.
    """
    path = Path(path)
    try:
        text = (path / MANIFEST).read_bytes()
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
        raise _Damage(f"{path} is no checkpoint: it has no {MANIFEST}") from error
    try:
        manifest = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _Damage(f"{path} is damaged: {MANIFEST} is no JSON, {error}") from error
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise _Damage(f"{path} is no checkpoint: its {MANIFEST} does not say {FORMAT!r}")
    if (version := manifest.get("version")) != VERSION:
        raise ValueError(
            f"{path} has format version {version!r}, this moekit reads {VERSION}; use a newer one"
        )
    if text != _dump(manifest):
        raise _Damage(f"{path} is damaged: the content of {MANIFEST} has changed")
    parts = [manifest.get(part) for part in ("values", "tensors", "files")]
    leaves = [leaf for part in parts[1:] if isinstance(part, dict) for leaf in part.values()]
    if "config" not in manifest or not all(isinstance(part, dict) for part in parts + leaves):
        raise _Damage(f"{path} is damaged: {MANIFEST} lacks parts")
    for name, measure in manifest["files"].items():
        if Path(name).name != name:
            raise _Damage(f"{path} is damaged: its {MANIFEST} names {name!r}, no file of this folder")
        size = (path / name).stat().st_size if (path / name).is_file() else None
        if size is None or size != measure.get("bytes"):
            state = "missing" if size is None else f"of {size} bytes instead of {measure.get('bytes')}"
            raise _Damage(f"{path} is damaged: {name} is {state}")
    return manifest


def _agree(mesh: DeviceMesh | None, local: Callable[[], Any], decide: Callable[[list], Any]) -> Any:
    """Return ``decide([local() of each rank])``, as it is on rank 0, on all ranks; raise any fault on all."""
    if mesh is None:
        return decide([local()])
    world = dist.get_world_size() if dist.is_initialized() else 0
    if mesh.size() != world:
        raise ValueError(f"a checkpoint needs a mesh of all {world} ranks, got {mesh} of {mesh.size()}")

    def attempt(fn, *args):
        try:
            return fn(*args), None
        except (ValueError, TypeError, OSError) as error:
            kind = next(kind for kind in (ValueError, TypeError, OSError) if isinstance(error, kind))
            return None, kind(str(error))
        except Exception:  # our own bug: the other ranks must not wait for this one
            return None, RuntimeError(traceback.format_exc())

    found: Any = [None] * world if dist.get_rank() == 0 else None
    outcome: list = [None]
    dist.gather_object(attempt(local), found)
    if found is not None:
        faults = {rank: fault for rank, (_, fault) in enumerate(found) if fault}
        if not faults:
            outcome = [attempt(decide, [result for result, _ in found])]
        elif len(faults) == world and len(set(map(str, faults.values()))) == 1:
            outcome = [(None, faults[0])]
        else:
            text = "\n".join(f"rank {rank}: {fault}" for rank, fault in faults.items())
            outcome = [(None, type(next(iter(faults.values())))(text))]
    dist.broadcast_object_list(outcome)
    result, fault = outcome[0]
    if fault:
        raise fault
    return result


def _dcp(call: Callable, tensors: dict[str, Tensor], **options: Any) -> Any:
    """Call DCP; its failures, which it raises on all ranks, become ordinary errors."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # as mesh=None says
            return call(tensors, **options)
    except dcp.CheckpointException as error:
        faults = {rank: fault for rank, (fault, _) in error.failures.items()}
        if any(isinstance(fault, KeyboardInterrupt) for fault in faults.values()):
            raise KeyboardInterrupt from error
        kind = OSError if any(isinstance(fault, OSError) for fault in faults.values()) else ValueError
        text = "\n".join(f"rank {rank}: {fault!r}" for rank, fault in faults.items())
        raise kind(f"the {call.__name__} of a checkpoint failed:\n{text}") from error


class _Writer(dcp.FileSystemWriter):
    """DCP's writer, telling which files this rank has written, or why it could not."""

    files: Collection[str] = ()

    def write_data(self, plan, planner):
        try:
            written = super().write_data(plan, planner)
        except RuntimeError as error:  # torch.save's own, which may hide that the disk is full
            raise (error.__context__ if isinstance(error.__context__, OSError) else error) from None
        self.files = {result.storage_data.relative_path for result in written.wait()}
        return written


def _map(visit: Callable[[str, Any], Any], tree: Tree, prefix: str = "") -> Tree:
    """Return ``tree`` with ``visit(name, leaf)`` for each tensor and value; TensorDicts come back as is."""
    mapped = {}
    for key, node in tree.items():
        if not isinstance(key, str) or not key:
            raise TypeError(f"a checkpoint needs names that are strings, got {key!r} in {prefix!r}")
        inner = isinstance(node, TensorDictBase) or (isinstance(node, Mapping) and _has_tensors(node))
        mapped[key] = _map(visit, node, f"{prefix}{key}.") if inner else visit(prefix + key, node)
    return tree if isinstance(tree, TensorDictBase) else mapped


def _has_tensors(node: Any) -> bool:
    if isinstance(node, Mapping | TensorDictBase):
        return any(_has_tensors(child) for child in node.values())
    return isinstance(node, Tensor)


def _within(name: str, only: Collection[str] | None) -> bool:
    return only is None or any(name == prefix or name.startswith(f"{prefix}.") for prefix in only)


def _tensors(tree: Tree, only: Collection[str] | None) -> dict[str, Tensor]:
    leaves: list[tuple[str, Any]] = []
    _map(lambda *leaf: leaves.append(leaf), tree)
    mine = {name: leaf for name, leaf in leaves if isinstance(leaf, Tensor) and _within(name, only)}
    return {name: leaf for name, leaf in mine.items() if not _is_empty(leaf)}


def _is_empty(leaf: Tensor) -> bool:
    """Whether a leaf is a hollow parameter, which has NaN for all its values, and no tensor that repeats."""
    return is_hollow(leaf) and leaf.is_floating_point() and bool(held(leaf).flatten()[0].isnan())


def _describe(tree: Tree, only: Collection[str] | None, mesh: DeviceMesh | None, *, contents: bool) -> Leaves:
    """Return the leaves of this rank; with ``contents`` they hold whatever may not differ between ranks."""
    leaves: Leaves = {}
    faults = []

    def visit(name, leaf):
        if not _within(name, only):
            return
        if name in leaves:
            faults.append(f"{name}: there twice")
        if isinstance(leaf, Tensor) and _is_empty(leaf):
            leaves[name] = {"hollow": list(leaf.shape)}
            return
        if isinstance(leaf, Tensor):
            leaves[name] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype).removeprefix("torch.")}
            if leaf.is_meta:
                faults.append(f"{name}: a meta tensor, without numbers")
            elif isinstance(leaf, DTensor):
                if mesh is None:
                    faults.append(f"{name}: a DTensor, but mesh=None; pass mesh=mesh")
                if any(placement.is_partial() for placement in leaf.placements):
                    faults.append(f"{name}: {leaf.placements}, terms of a sum that is still to be taken")
            elif contents and mesh is not None:
                raw = leaf.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
                leaves[name]["crc32 of a plain tensor"] = zlib.crc32(raw.data)
            return
        leaves[name] = {"value": ""}
        if contents:
            try:
                leaves[name]["value"] = text = json.dumps(leaf)
                if repr(json.loads(text)) != repr(leaf):  # not ==: NaN is NaN here, and (1,) is not [1]
                    raise ValueError
            except (TypeError, ValueError):
                faults.append(f"{name}: neither a tensor nor plain JSON (str keys, lists), {leaf!r:.200}")

    _map(visit, tree)
    if faults:
        raise ValueError("\n".join(["a checkpoint cannot hold", *faults]))
    return leaves


def _union(found: list[Leaves]) -> Leaves:
    """Return the leaves of all ranks."""
    union: dict[str, tuple[int, dict[str, Any]]] = {}
    faults = []
    for rank, leaves in enumerate(found):
        for name, leaf in leaves.items():
            first, other = union.setdefault(name, (rank, leaf))
            if leaf != other:
                faults.append(f"{name}: {other} on rank {first}, {leaf} on rank {rank}")
    if faults:
        raise ValueError("\n".join(["a checkpoint needs ranks that agree (shards are DTensors):", *faults]))
    return {name: leaf for name, (_, leaf) in union.items()}


def _misfits(manifest: dict, wanted: Leaves, only: Collection[str] | None, cast: bool) -> Iterator[str]:
    """Yield a line for each way in which a checkpoint does not fit what is wanted of it."""

    def kind(leaf):
        if "value" in leaf:
            return "a value"
        floats = cast and getattr(torch, leaf["dtype"]).is_floating_point
        return f"a {'floating' if floats else leaf['dtype']} tensor of shape {leaf['shape']}"

    saved = {**{name: {"value": ""} for name in manifest["values"]}, **manifest["tensors"]}
    saved = {name: leaf for name, leaf in saved.items() if _within(name, only)}
    for prefix in only or ():
        if not any(_within(name, [prefix]) for name in {**saved, **wanted}):
            yield f"{prefix}: asked for by only=, and nowhere"
    hollow = manifest.get("hollow", {})
    if prefix := _under(wanted, {**saved, **hollow}):
        yield f'the checkpoint has the names of the tree under "{prefix}.": nest it, with only="{prefix}"'
    if prefix := _under(saved, wanted):
        yield f'the tree has the names of the checkpoint under "{prefix}.": pass that part of it alone'
    for name in {**wanted, **saved}:
        if "hollow" in wanted.get(name, ()):
            mine, theirs = wanted[name]["hollow"], saved.get(name, {}).get("shape", hollow.get(name))
            if mine != theirs:
                yield f"{name}: {theirs or 'missing'} in the checkpoint, a hollow {mine} in the tree"
        elif name in hollow and _within(name, only):
            yield (
                f"{name}: hollow in the checkpoint, of a run that had it in eight bits alone; go on with its "
                "precision, or read the rest (only=) and make it from its master"
            )
        elif name not in saved:
            yield f"{name}: missing in the checkpoint"
        elif name not in wanted:
            yield f"{name}: unused, as the tree has no such name (only= reads a part)"
        elif (theirs := kind(saved[name])) != (ours := kind(wanted[name])):
            yield f"{name}: {theirs} in the checkpoint, {ours} in the tree"


def _under(names: Collection[str], others: Collection[str]) -> str:
    """Return the shortest prefix with which all names are among others; "" where none has, or needs it."""
    one = next((name for name in names if name not in others), None)
    found = {other.removesuffix(f".{one}") for other in others if one and other.endswith(f".{one}")}
    found = {prefix for prefix in found if all(f"{prefix}.{name}" in others for name in names)}
    return min(found, key=len, default="")


def _plain(config: Any) -> Any:
    """Return a config as JSON has it; what JSON lacks becomes its str."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        config = dataclasses.asdict(config)
    return json.loads(json.dumps(config, default=str))


def _dump(manifest: dict[str, Any]) -> bytes:
    """Return the one text of a manifest, its checksum included."""
    manifest = {key: value for key, value in manifest.items() if key != "crc32"}
    return json.dumps({**manifest, "crc32": zlib.crc32(json.dumps(manifest).encode())}).encode() + b"\n"


def _place(mesh: DeviceMesh | None) -> tuple[int, int]:
    """Return this rank and the number of ranks."""
    return (0, 1) if mesh is None else (dist.get_rank(), dist.get_world_size())


def _measure(folder: Path, files: Collection[str]) -> dict[str, dict[str, int]]:
    """Return size and checksum of each file."""
    measures = {}
    for name in files:
        size = crc = 0
        with open(folder / name, "rb") as file:
            while chunk := file.read(1 << 24):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
        measures[name] = {"bytes": size, "crc32": crc}
    return measures


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder, once no other process does, where the file system has locks."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _sweep(folder: Path) -> None:
    """Delete what killed saves have left behind; a living one holds the lock on its manifest."""
    for partial in folder.glob(f".*{_PARTIAL}*"):
        if not re.fullmatch(rf"\..*{re.escape(_PARTIAL)}[0-9a-f]{{8}}", partial.name):
            continue  # somebody else's
        try:
            with open(partial / MANIFEST, "r+b") as manifest:
                fcntl.flock(manifest, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
        except FileNotFoundError:
            shutil.rmtree(partial, ignore_errors=True)
        except OSError:
            pass  # in use, or a file system without locks
