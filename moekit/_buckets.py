"""Leaves on their way between the ranks that share them: gradients summed into shards, shards made whole.

Many leaves travel in one collective, a bucket, and one bucket travels while the next is packed.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh

from moekit.tree import in_turn

BUCKET_BYTES = 2**28


class Shards(NamedTuple):
    """How a leaf is cut along a dim, for the ranks of one mesh axis; as DTensor and torch.chunk do."""

    mesh: DeviceMesh | None = None
    axis: int = 0
    n: int = 1  # size of the axis
    rank: int = 0  # this rank's place on it
    dim: int = 0

    def length(self, shape: torch.Size) -> int:
        """Return the length along `dim` of a shard, of all but the last ones."""
        return -(-shape[self.dim] // self.n)

    def shard_shape(self, shape: torch.Size) -> tuple[int, ...]:
        """Return the shape of a shard that is padded to full length."""
        return (*shape[: self.dim], self.length(shape), *shape[self.dim + 1 :])

    def trim(self, padded: Tensor, shape: torch.Size) -> Tensor:
        """Cut the padding off this rank's shard of a leaf of a shape."""
        length = self.length(shape)
        start = min(self.rank * length, shape[self.dim])
        rest = min(length, shape[self.dim] - start)
        return padded if rest == length else padded.narrow(self.dim, 0, rest)

    def split(self, x: Tensor) -> Tensor:
        """Return the shards of a leaf as (n, *shard): a view, or padded with zeros where they are uneven."""
        length = self.length(x.shape)
        if missing := self.n * length - x.shape[self.dim]:
            x = F.pad(x, (0, 0) * (x.ndim - 1 - self.dim) + (0, missing))
        return x.unflatten(self.dim, (self.n, length)).movedim(self.dim, 0)

    def group(self) -> str:
        assert self.mesh is not None
        return self.mesh.get_group(self.axis).group_name


class Parcel(NamedTuple):
    """One leaf on its way: a gradient to be summed, or the shards of ranks to be gathered into the whole."""

    name: str
    shards: Shards
    dtype: torch.dtype  # it travels in
    full: Tensor  # the gradient, or the whole
    shard: Tensor  # this rank's


_Bucket = list[Parcel]


def scatter_sums(parcels: Iterable[Parcel], bucket_bytes: int = BUCKET_BYTES) -> dict[str, Tensor]:
    """Return the shards of sums over ranks, by name."""
    sums: dict[str, Tensor] = {}
    for bucket, flat in _ahead(_buckets(parcels, bucket_bytes), _reduce_scatter):
        sums.update(_unpack_shards(bucket, flat))
    return sums


def scatter_sum(parcel: Parcel) -> Tensor:
    """Return the shard of one sum over ranks, waited for at its first use."""
    return _unpack_shards([parcel], AsyncCollectiveTensor(_reduce_scatter([parcel])))[parcel.name]


def gather(parcels: Iterable[Parcel], bucket_bytes: int = BUCKET_BYTES) -> None:
    """Fill what is whole with the shards of all ranks, in buckets: one travels as the next is packed."""
    for bucket, flat in _ahead(_buckets(parcels, bucket_bytes), _all_gather):
        _unpack_whole(bucket, flat)


def _buckets(parcels: Iterable[Parcel], limit: int) -> Iterator[_Bucket]:
    """Group parcels of one mesh axis and dtype, in an order that is the same on every rank."""
    filling: dict[tuple, tuple[_Bucket, int]] = {}
    for parcel in parcels:
        key = (parcel.shards.mesh, parcel.shards.axis, parcel.dtype)
        size = parcel.full.numel() * parcel.dtype.itemsize
        bucket, total = filling.pop(key, ([], 0))
        if bucket and total + size > limit:
            yield bucket
            bucket, total = [], 0
        bucket.append(parcel)
        filling[key] = (bucket, total + size)
    for bucket, _ in filling.values():
        yield bucket


def _ahead(
    buckets: Iterable[_Bucket], launch: Callable[[_Bucket], Tensor]
) -> Iterator[tuple[_Bucket, Tensor]]:
    """Launch a bucket before the one in front of it is waited for: packing hides behind transport."""
    before = None
    for bucket in buckets:
        launched = bucket, launch(bucket)
        if before:
            yield before[0], torch.ops._c10d_functional.wait_tensor(before[1])
        before = launched
        if in_turn(launched[1]):
            yield bucket, torch.ops._c10d_functional.wait_tensor(launched[1])
            before = None
    if before:
        yield before[0], torch.ops._c10d_functional.wait_tensor(before[1])


def _reduce_scatter(bucket: _Bucket) -> Tensor:
    shards, dtype = bucket[0].shards, bucket[0].dtype
    pieces = [parcel.shards.split(parcel.full) for parcel in bucket]
    if len(pieces) == 1 and pieces[0].dtype == dtype and pieces[0].is_contiguous():
        flat = pieces[0]  # a large leaf needs no copy
    else:
        sizes = [piece[0].numel() for piece in pieces]
        flat = pieces[0].new_empty((shards.n, sum(sizes)), dtype=dtype)
        for room, piece in zip(flat.split(sizes, 1), pieces, strict=True):
            room.unflatten(1, piece.shape[1:]).copy_(piece)
    return torch.ops._c10d_functional.reduce_scatter_tensor(flat.view(-1), "sum", shards.n, shards.group())


def _unpack_shards(bucket: _Bucket, flat: Tensor) -> dict[str, Tensor]:
    shapes = [parcel.shards.shard_shape(parcel.full.shape) for parcel in bucket]
    parts = flat.split([math.prod(shape) for shape in shapes]) if len(bucket) > 1 else [flat]
    return {
        parcel.name: parcel.shards.trim(part.view(shape), parcel.full.shape)
        for parcel, part, shape in zip(bucket, parts, shapes, strict=True)
    }


def _all_gather(bucket: _Bucket) -> Tensor:
    shards = bucket[0].shards
    shapes = [parcel.shards.shard_shape(parcel.full.shape) for parcel in bucket]
    sizes = [math.prod(shape) for shape in shapes]
    flat = bucket[0].full.new_empty(sum(sizes))
    for parcel, room, shape in zip(bucket, flat.split(sizes), shapes, strict=True):
        parcel.shards.trim(room.view(shape), parcel.full.shape).copy_(parcel.shard)
    return torch.ops._c10d_functional.all_gather_into_tensor(flat, shards.n, shards.group())


def _unpack_whole(bucket: _Bucket, flat: Tensor) -> None:
    shapes = [parcel.shards.shard_shape(parcel.full.shape) for parcel in bucket]
    parts = flat.view(bucket[0].shards.n, -1).split([math.prod(shape) for shape in shapes], 1)
    for parcel, part, shape in zip(bucket, parts, shapes, strict=True):
        shards, param, pieces = parcel.shards, parcel.full, part.unflatten(1, shape)
        if param.shape[shards.dim] % shards.n == 0:
            shards.split(param).copy_(pieces)
        else:
            whole = pieces.movedim(0, shards.dim).flatten(shards.dim, shards.dim + 1)
            param.copy_(whole.narrow(shards.dim, 0, param.shape[shards.dim]))
