"""Memory that every rank of a group addresses: kernels of one rank read and write tensors of another.

On CUDA it is torch's symmetric memory, for devices that reach each other over NVLink. On CPUs it is a file
that the ranks of one machine map, on which the same kernels run in Triton's interpreter: so they can be
tested without a GPU.

Nothing here orders what ranks do. A rank may write what another has read, or read what another has written,
only after :meth:`SymmetricMemory.barrier`; in between, what was written is visible nowhere else. A rank that
does not come to one is an error on the others, after a time.
"""

import os
import shutil
import socket
import tempfile
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._symmetric_memory as symm_mem
from jaxtyping import Int
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit.tree import has_values

Layout = dict[str, tuple[tuple[int, ...], torch.dtype]]  # shape and dtype of each tensor, by name
ALIGNMENT = 128  # bytes, of each tensor
LONGEST = timedelta(days=7)  # that a rank waits for others
SHARED_BY = "moekit_shared_by"  # attribute of a tensor in a dry run: the global ranks that share it


@dataclass(frozen=True, eq=False)
class Shared:
    """One tensor a rank, of one shape, and where all of them are."""

    mine: Tensor
    peers: tuple[Tensor, ...]  # of every rank, this one's included
    addresses: Int[Tensor, " R"]  # int64, of every rank's tensor in this process; multiples of ALIGNMENT


def byte_offsets(layout: Layout) -> tuple[dict[str, int], int]:
    """Return where each tensor of a layout begins, and the bytes of all."""
    places, end = {}, 0
    for name, (shape, dtype) in layout.items():
        places[name] = end
        end += -(-prod(shape) * dtype.itemsize // ALIGNMENT) * ALIGNMENT
    return places, max(end, ALIGNMENT)


class SymmetricMemory:
    """Tensors of every rank of a mesh that every rank addresses. Memory goes when nothing refers to it.

    Collective: every rank of the mesh makes it, with the same layout.

    Parameters
    ----------
    layout : dict
        Shape and dtype of each tensor, by name.
    mesh : DeviceMesh, optional
        The one-axis mesh whose ranks share; ``None`` for one process.
    device : torch.device
        Of this rank.
    timeout : timedelta, optional
        How long a rank waits for the others in a barrier; by default as in a collective of the mesh's group.

    Attributes
    ----------
    tensors : dict of Shared
        By name, zeros at first.
    n_bytes : int
        Of this rank's memory.

    Raises
    ------
    ValueError
        When the ranks' layouts differ, or for a timeout that is none.
    RuntimeError
        When the ranks cannot address each other's memory.
    """

    @torch.inference_mode(False)  # tensors made in inference could be used there alone
    def __init__(
        self,
        layout: Layout,
        *,
        mesh: DeviceMesh | None,
        device: torch.device,
        timeout: timedelta | None = None,
    ):
        if timeout is not None and not isinstance(timeout, timedelta):
            raise ValueError(
                f"symmetric memory needs timeout to be a datetime.timedelta, got {timeout!r}; "
                "timedelta(seconds=...)"
            )
        if timeout is not None and not timedelta(milliseconds=1) <= timeout <= LONGEST:
            raise ValueError(
                f"symmetric memory needs a timeout from a millisecond to {LONGEST}, got {timeout}"
            )
        places, self.n_bytes = byte_offsets(layout)
        self.size = 1 if mesh is None else mesh.size()
        self.rank = 0 if mesh is None else mesh.get_local_rank()
        without_values = not has_values(torch.empty(0, device=device))  # in a dry run
        if mesh is not None and self.size > 1 and not without_values:
            _check_alike(layout, mesh)
        make = _on_cuda if device.type == "cuda" else _on_cpus
        if self.size == 1 or without_values:
            make = _without_peers
        arenas, self._barrier = make(self.n_bytes, mesh, device, timeout)
        if make is not _without_peers:  # whose memory torch counts itself
            BESIDE_TORCH.add(self)
        arenas[self.rank].zero_()
        self.tensors: dict[str, Shared] = {}
        for name, (shape, dtype) in layout.items():
            n = prod(shape) * dtype.itemsize
            peers = tuple(a[places[name] :][:n].view(dtype).view(shape) for a in arenas)
            at = torch.tensor([a.data_ptr() + places[name] for a in arenas], dtype=torch.int64)
            self.tensors[name] = Shared(peers[self.rank], peers, at.to(device))
            if without_values and mesh is not None:
                setattr(peers[self.rank], SHARED_BY, dist.get_process_group_ranks(mesh.get_group()))
        self.barrier()  # zeros are there before anyone writes

    def barrier(self) -> None:
        """Wait until all ranks are here; what they have written is visible after. No host sync on CUDA.

        Raises
        ------
        RuntimeError
            When a rank has not come in time, or its process has ended. On CUDA the device prints which rank
            it waited for, and stops: whatever the host calls next of CUDA fails, or ends the process.
        """
        self._barrier()


# What a process has allocated is a fact of the process, whoever holds it: torch's own counters, to which
# these bytes are added, are as global. As a value it would have to be handed from wherever a transport is
# made to the log, and what is forgotten would be missing there. References are weak, so nothing lives longer
# for being counted, and no result depends on what is in here.
BESIDE_TORCH: "weakref.WeakSet[Any]" = weakref.WeakSet()  # of what has ``n_bytes``


def allocated_bytes() -> int:
    """Return this process's bytes of symmetric memory, which ``torch.cuda.memory_stats`` does not count.

    That of each :class:`SymmetricMemory` and :class:`moekit.deepep` while it lives, of several ranks and with
    values.
    """
    return sum(memory.n_bytes for memory in BESIDE_TORCH)


def _check_alike(layout: Layout, mesh: DeviceMesh) -> None:
    for rank, other in enumerate(_gather(layout, mesh)):
        differ = [name for name in {**layout, **other} if layout.get(name) != other.get(name)]
        if differ:
            here, there = ({name: x[name] for name in differ if name in x} for x in (layout, other))
            raise ValueError(
                f"symmetric memory needs one layout on all ranks, got {here} here and {there} on rank {rank} "
                "of the mesh"
            )


def _gather(value: Any, mesh: DeviceMesh) -> list:
    """Return each rank's value."""
    values: list = [None] * mesh.size()
    dist.all_gather_object(values, value, group=mesh.get_group())
    return values


def _patience(mesh: DeviceMesh, device: torch.device, timeout: timedelta | None) -> timedelta:
    """Return how long a rank waits for others."""
    return timeout or mesh.get_group()._get_backend(device).options._timeout


# Each returns the bytes of every rank as a tensor here, and a barrier.


def _without_peers(
    n_bytes: int, mesh: DeviceMesh | None, device: torch.device, timeout: timedelta | None
) -> tuple[list[Tensor], Callable]:
    del timeout
    mine = torch.empty(n_bytes, dtype=torch.uint8, device=device)
    if mesh is None or mesh.size() == 1:
        return [mine], lambda: None
    return [mine] * mesh.size(), partial(dist.barrier, mesh.get_group())  # a dry run notes that one waits


def _on_cuda(
    n_bytes: int, mesh: DeviceMesh | None, device: torch.device, timeout: timedelta | None
) -> tuple[list[Tensor], Callable]:
    assert mesh is not None
    _check_reach(device, mesh)
    with torch.cuda.device(device):
        mine = symm_mem.empty(n_bytes, dtype=torch.uint8, device=device)
        try:
            handle = symm_mem.rendezvous(mine, mesh.get_group())
        except RuntimeError as error:
            raise RuntimeError(
                "symmetric memory needs devices that address each other's memory, over NVLink or on one "
                f"host; {device} of {socket.gethostname()} cannot, in a group of {mesh.size()} ranks: "
                f"{error}; take via='all_to_all' there"
            ) from error
    arenas = [handle.get_buffer(rank, (n_bytes,), torch.uint8) for rank in range(mesh.size())]
    # The handle and this rank's tensor live as long as the barrier does.
    milliseconds = _patience(mesh, device, timeout) // timedelta(milliseconds=1)
    return arenas, partial(_barrier_on_cuda, handle, mine, milliseconds)


def _check_reach(device: torch.device, mesh: DeviceMesh) -> None:
    """Raise, on all ranks, where a device does not address another of its host."""
    uuids = [str(torch.cuda.get_device_properties(i).uuid) for i in range(torch.cuda.device_count())]
    host = socket.gethostname()
    index = torch.cuda.current_device() if device.index is None else device.index
    peers = _gather((host, uuids[index]), mesh)
    # A process that sees its own device alone cannot ask about others.
    seen = {rank: uuids.index(uuid) for rank, (at, uuid) in enumerate(peers) if at == host and uuid in uuids}
    far = [r for r, i in seen.items() if i != index and not torch.cuda.can_device_access_peer(index, i)]
    if wrong := {rank: them for rank, them in enumerate(_gather(far, mesh)) if them}:
        raise RuntimeError(
            "symmetric memory needs devices that address each other's memory, got ranks of the mesh whose "
            f"devices do not address those of other ranks: {wrong}; take via='all_to_all' there"
        )


def _barrier_on_cuda(handle, mine: Tensor, milliseconds: int) -> None:
    with torch.cuda.device(mine.device):
        handle.barrier(channel=0, timeout_ms=milliseconds)


def _on_cpus(
    n_bytes: int, mesh: DeviceMesh | None, device: torch.device, timeout: timedelta | None
) -> tuple[list[Tensor], Callable]:
    assert mesh is not None
    group, n_all = mesh.get_group(), n_bytes + ALIGNMENT  # behind it, the barriers that the rank came to
    folder = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    file, path = tempfile.mkstemp(prefix="moekit-", dir=folder)
    try:
        os.ftruncate(file, n_all)  # takes no room yet
        os.close(file)
        room = shutil.disk_usage(folder).free
        hosts, paths, rooms = zip(*_gather((socket.gethostname(), path, room), mesh), strict=True)
        if len(set(hosts)) > 1:
            raise RuntimeError(
                f"symmetric memory on CPUs needs all ranks on one host, got {sorted(set(hosts))}; take "
                "via='all_to_all' there"
            )
        if min(rooms) < mesh.size() * n_all:
            raise RuntimeError(
                f"symmetric memory needs {mesh.size() * n_all:,} bytes in {folder} for all ranks, "
                f"got {min(rooms):,}; a container may have little there (docker run --shm-size)"
            )
        files = [torch.from_file(path, shared=True, size=n_all, dtype=torch.uint8) for path in paths]
        dist.barrier(group)  # all have mapped it
    finally:
        os.unlink(path)  # the mappings keep it
    came = [file[n_bytes:].view(torch.int64)[:1] for file in files]
    patience = _patience(mesh, device, timeout)
    return [file[:n_bytes] for file in files], partial(_barrier_on_cpus, mesh, came, patience)


def _barrier_on_cpus(mesh: DeviceMesh, came: list[Tensor], timeout: timedelta) -> None:
    mine = came[mesh.get_local_rank()]
    mine += 1
    options = dist.BarrierOptions()
    options.device, options.timeout, options.asyncOp = torch.device("cpu"), timeout, False
    reason = None
    try:
        if work := mesh.get_group().barrier(options):
            work.wait()
    except RuntimeError as error:
        reason = error
    # Who has come to a barrier of the group may have come to another memory's.
    late = {rank: int(n) for rank, n in enumerate(came) if n < mine}
    if reason or late:
        raise RuntimeError(
            f"symmetric memory needs every rank of the mesh in each barrier, got to barrier {int(mine)} and "
            f"waited for at most {timeout}; barriers that other ranks have come to: {late or 'as many'}. "
            "One of them has ended, hangs, or calls other layers than this one"
        ) from reason
