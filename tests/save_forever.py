"""Save checkpoints without end, and start again for every line on the standard input: a program to kill.

python tests/save_forever.py FOLDER RANKS

Prints the process id of each start. A start continues from the newest checkpoint, whose every bit it checks,
and appends the number of each save that has returned to FOLDER/returned.
"""

import os
import shutil
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from moekit import checkpoint

KEEP = 3  # checkpoints


def state(step: int, mesh: DeviceMesh | None = None) -> dict:
    """Return the state of a step, a function of its number alone."""

    def leaf(seed, shape, placement):
        full = torch.rand(shape, generator=torch.Generator().manual_seed(1000 * step + seed))
        return full if mesh is None else distribute_tensor(full, mesh, [placement], src_data_rank=None)

    params = {f"w{i}": leaf(i, (256, 512), Shard(0)) for i in range(8)} | {
        "norm": leaf(8, (512,), Replicate())
    }
    return {"params": TensorDict(params), "step": step, "data": {"position": [step, 2 * step]}}


def difference(ours: dict, theirs: dict) -> list[str]:
    """Return the names of what is not the same, bit by bit, on this rank."""
    names = [
        name for name, leaf in ours["params"].items() if not local(leaf).equal(local(theirs["params"][name]))
    ]
    return names + [name for name in ("step", "data") if ours[name] != theirs[name]]


def local(leaf: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds."""
    return leaf.to_local() if hasattr(leaf, "to_local") else leaf


def work(folder: Path, rank: int, ranks: int, store: Path) -> None:
    """Load the newest checkpoint and save the states after it, one by one."""
    torch.set_num_threads(1)
    mesh = None
    if ranks > 1:
        dist.init_process_group("gloo", store=dist.FileStore(str(store), ranks), rank=rank, world_size=ranks)
        mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    step = 0
    if newest := checkpoint.latest(folder, mesh=mesh):
        loaded = checkpoint.load(newest, state(0, mesh), config={"name": "soak"}, mesh=mesh)
        step = loaded["step"]
        if newest.name != f"step-{step:06d}" or (names := difference(loaded, state(step, mesh))):
            raise SystemExit(f"{newest} is not what was saved: {names}")
    while True:
        step += 1
        checkpoint.save(folder / f"step-{step:06d}", state(step, mesh), config={"name": "soak"}, mesh=mesh)
        if rank == 0:
            with open(folder / "returned", "a") as file:
                file.write(f"{step}\n")
            shutil.rmtree(folder / f"step-{step - KEEP:06d}", ignore_errors=True)


def main(folder: Path, ranks: int) -> None:
    """Start workers one after the other; each is killed before the next line comes."""
    for n, _ in enumerate(sys.stdin):
        first = os.fork()
        if first == 0:
            rank = next((rank for rank in range(1, ranks) if os.fork() == 0), 0)
            work(folder, rank, ranks, folder / f"store-{n}")
        print(first, flush=True)
        os.waitpid(first, 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
