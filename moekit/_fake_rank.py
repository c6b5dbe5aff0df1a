"""A rank of a dry run: a process that executes two steps without values, and writes down what it did."""

import gc
import os
import pickle
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import wait
from typing import Any, Literal

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_leaves_with_path

from moekit._calls import Leaf, Record
from moekit._recorder import Recorder
from moekit._stand_ins import stand_ins
from moekit.mesh import ranks_of
from moekit.testing._ranks import dumps, shared_pool
from moekit.tree import named

Step = Callable[[], Mapping[str, Any] | None]
Device = Literal["cuda", "cpu"]
# What torch says of an operation that needs the values of a tensor that has none.
_NO_VALUES = (
    *("meta tensor", "Meta tensor", "meta device", 'device "meta"', "device meta"),
    *("unallocated storage", "not allocated yet", "aten::equal", "aten::nonzero", "torch.nonzero"),
)


def run_ranks(
    step_of_rank: Callable, ranks: Sequence[int], world_size: int, device: Device, n_processes: int
) -> list[Record]:
    """Execute ``step_of_rank`` as some ranks of a world, ``n_processes`` at a time; raise if one fails."""
    call = pickle.dumps((os.getcwd(), sys.path, dumps(step_of_rank)))
    pool, todo = shared_pool(), list(reversed(ranks))
    running: dict[Any, tuple[int, Any]] = {}
    records: dict[int, Record] = {}
    try:
        while todo or running:
            while todo and len(running) < n_processes:
                rank = todo.pop()
                ours, theirs = pool.context.Pipe(duplex=False)
                running[ours] = rank, pool.start(_work, theirs, call, rank, world_size, device)
                theirs.close()
            ready: Any
            for ready in wait(list(running)):
                rank, process = running.pop(ready)
                good: bool
                answer: Any
                try:
                    good, answer = pickle.loads(ready.recv_bytes())
                except EOFError:
                    process.join()
                    good, answer = False, f"the process ended with exit code {process.exitcode} and no answer"
                if not good:
                    raise RuntimeError(f"rank {rank} of {world_size} failed in a dry run:\n{answer}")
                records[rank] = answer
                process.join()
    finally:
        for _, process in running.values():
            process.kill()
    return [records[rank] for rank in ranks]


def _work(connection, call: bytes, rank: int, world_size: int, device: Device) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported is no garbage, and takes longer to search than a small step
    try:
        folder, sys.path[:], step_of_rank = pickle.loads(call)
        os.chdir(folder)
        answer = True, _execute(pickle.loads(step_of_rank), rank, world_size, device)
    except BaseException as error:
        answer = False, traceback.format_exc()
        if any(says in str(error) for says in _NO_VALUES):
            answer = False, f"{traceback.format_exc()}a dry run has no values to read"
    connection.send_bytes(pickle.dumps(answer))


def _execute(step_of_rank: Callable[[int], Step], rank: int, world_size: int, device: Device) -> Record:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    began = time.perf_counter()
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world_size)
    recorder = Recorder()
    with stand_ins(recorder, device), recorder:
        step = step_of_rank(rank)
        for number in (1, 2):
            gc.collect()
            gc.disable()  # what is only freed with a cycle is held
            recorder.start(number)
            leaves = _label(recorder, step(), rank)
            gc.enable()
    mark = recorder.high_water(2)
    return Record(
        rank=rank,
        world_size=world_size,
        calls=tuple(recorder.calls),
        memory=mark.by_kind,
        at=mark.op,
        flops=recorder.flops[2],
        leaves=leaves,
        room=recorder.room,
        seconds=time.perf_counter() - began,
    )


def _label(recorder: Recorder, held: Any, rank: int) -> dict[str, dict[str, Leaf]]:
    """Tell the recorder what a step holds, and return what that is."""
    if held is not None and not isinstance(held, Mapping):
        raise TypeError(f"a dry run needs step() to return trees by kind, got {type(held).__name__}")
    found = {}
    for kind, tree in (held or {}).items():
        if isinstance(tree, TensorDict):
            leaves = named(tree)
        else:
            leaves = {_name(path): x for path, x in tree_leaves_with_path(tree) if isinstance(x, Tensor)}
        found[kind] = {name: _leaf(x, rank) for name, x in leaves.items()}
        if not found[kind] and tree_leaves(tree):
            raise TypeError(f"a dry run needs tensors of kind {kind!r}, got {type(tree).__name__}")
        recorder.label(kind, tree)
    return found


def _name(path: Sequence[Any]) -> str:
    """Return a dotted name of a place in a tree."""
    return ".".join(str(getattr(key, "key", getattr(key, "idx", key))) for key in path)


def _leaf(x: Tensor, rank: int) -> Leaf:
    on, placements = (x.device_mesh, x.placements) if isinstance(x, DTensor) else (None, ())
    ranks = (rank,) if on is None else tuple(sorted(ranks_of(on)))
    dtype = str(x.dtype).removeprefix("torch.")
    return Leaf(tuple(x.shape), dtype, tuple(str(p) for p in placements), ranks)
