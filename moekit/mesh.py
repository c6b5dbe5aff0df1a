"""Who holds what: the device mesh, and the one table of placements.

Axes: ``pp`` pipeline, ``edp`` expert data parallel, ``ep`` expert parallel. Expert leaves live on the
two-axis mesh (edp, ep) of their stage; every other leaf is replicated over both axes flattened into one,
``dp``. A leaf's mesh lists exactly the ranks that hold it. Where sequences are split, ``cp`` neighbours on
``dp`` share rows.
"""

import functools
import math
import os
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as fc
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_unflatten

from moekit.tree import map_named, summands


def make_mesh(
    *,
    pp: int = 1,
    edp: int | None = None,
    ep: int = 1,
    n_experts: int | None = None,
    device: str | None = None,
) -> DeviceMesh | None:
    """Arrange all ranks as ``pp`` x ``edp`` x ``ep``. Collective, once per process.

    Starts the default process group (NCCL on CUDA, gloo on CPUs) from torchrun's environment unless one
    exists; then a rank that has chosen no CUDA device gets that of its number on its host.

    Parameters
    ----------
    pp : int
        Ranks that a batch passes one after the other, each with its part of the layers.
    edp, ep : int
        Copies of every expert of a stage, and ranks that share one copy. Ranks of one ``ep`` group are
        neighbours. By default ``edp`` is what the number of ranks leaves.
    n_experts : int, optional
        Checked against ``ep`` before any group is made.
    device : str, optional
        ``"cuda"`` or ``"cpu"``; by default CUDA where there is a device.

    Returns
    -------
    DeviceMesh or None
        Axes ``("edp", "ep")``, with ``"pp"`` in front where it is more than 1: there ``mesh["edp", "ep"]`` is
        the mesh of this rank's stage, which parameters, losses and the optimizer take. ``mesh["ep"]`` is what
        the moe functions take. ``None`` in a process that was started alone: every function takes that for
        one process with plain tensors.

    Raises
    ------
    ValueError
        When ``pp * edp * ep`` is not the number of ranks, or ``ep`` does not divide ``n_experts``.
    """
    started, world = dist.is_initialized(), world_size()
    edp = max(world // max(pp * ep, 1), 1) if edp is None else edp
    if min(pp, edp, ep) < 1 or pp * edp * ep != world:
        raise ValueError(
            f"make_mesh needs pp * edp * ep to be the number of ranks, got {pp=} * {edp=} * {ep=} on "
            f"{world} ranks; start {max(pp, 1) * max(edp, 1) * max(ep, 1)} ranks or choose pp and ep that "
            f"divide {world}"
        )
    if n_experts is not None and n_experts % ep:
        raise ValueError(
            f"make_mesh needs ep to divide n_experts, got {n_experts=}, {ep=}; take ep={_near(ep, n_experts)}"
        )
    if world == 1 and not started:
        return None
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    sizes = {"pp": pp, "edp": edp, "ep": ep}
    if pp == 1:
        del sizes["pp"]
    # init_device_mesh leaves the device alone once CUDA is in use, be it on the default one.
    if device == "cuda" and not started and torch.cuda.is_initialized() and not torch.cuda.current_device():
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    with _disable_current_modes():  # its tensor of ranks is real, also in a dry run on fake ones
        mesh = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        data_mesh(mesh)  # makes its group now, when every rank is here
    return mesh


def world_size() -> int:
    """Return the number of ranks: of the process group, or that torchrun has started, or 1."""
    if dist.is_initialized():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", 1))  # torchrun's contract


def data_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes (edp, ep) as one axis ``dp``: the ranks that share a batch.

    A mesh of one axis is its own. The first call for a mesh makes the group, and is collective over all
    ranks.

    Raises
    ------
    ValueError
        When a mesh of several axes lacks one of the two, or is one axis of such a mesh.
    """
    part = {"pp", "edp", "ep", "cp"} & {*(mesh.mesh_dim_names or ())} and mesh.size() < dist.get_world_size()
    if mesh.ndim > 1 or part:
        return edp_ep("data_mesh", mesh)._flatten("dp")
    return mesh


@functools.cache
def ends_mesh(mesh: DeviceMesh) -> DeviceMesh:
    """Return the ranks of the first and the last stage of a mesh with ``pp`` in front, as one axis ``ends``.

    What both hold, a tied embedding, is replicated there. The first call for a mesh makes the group, and is
    collective over all ranks.
    """
    with _disable_current_modes():
        ends = torch.cat([mesh.mesh[0].flatten(), mesh.mesh[-1].flatten()])
    return DeviceMesh(mesh.device_type, ends, mesh_dim_names=("ends",))


def edp_ep(who: str, mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes (edp, ep) of a mesh: the ranks that share a batch.

    Raises
    ------
    ValueError
        When ``mesh`` lacks one of the two, in the name of ``who`` needs them.
    """
    axes = mesh.mesh_dim_names or ()
    if not {"edp", "ep"} <= set(axes):
        raise ValueError(
            f"{who} needs a mesh with the axes edp and ep, got axes {axes} of sizes {tuple(mesh.shape)}; "
            "pass the whole mesh that make_mesh returned"
        )
    return mesh["edp", "ep"]


def check_one_axis(who: str, mesh: DeviceMesh | None, name: str = "ep") -> None:
    """Raise ``ValueError`` unless a mesh is None or of one axis, as ``mesh[name]`` is, and of no other."""
    if mesh is None:
        return
    others = {"pp", "edp", "ep", "cp", "dp"} - {name}
    if getattr(mesh, "ndim", None) == 1 and not others & {*(getattr(mesh, "mesh_dim_names", None) or ())}:
        return
    got = f"axes {mesh.mesh_dim_names}" if hasattr(mesh, "mesh_dim_names") else repr(mesh)
    raise ValueError(f"{who} needs a one-axis mesh, got {got}; pass mesh[{name!r}]")


def context_mesh(mesh: DeviceMesh | None, cp: int) -> DeviceMesh | None:
    """Return the axis ``cp``: the neighbours on ``dp`` among which every row of a batch is split.

    Collective over all ranks, and makes a group: call it once, after :func:`make_mesh`. With ``pp`` each
    stage has contexts of its own. Nothing about parameters changes.

    Parameters
    ----------
    mesh : DeviceMesh or None
        What :func:`make_mesh` returned.
    cp : int
        Ranks that share a row; divides edp * ep.

    Returns
    -------
    DeviceMesh or None
        One axis, ``"cp"``; None for ``cp=1``: every function takes that for whole rows.

    Raises
    ------
    ValueError
        When ``cp`` does not divide edp * ep, before any group is made.
    """
    n = 1 if mesh is None else data_mesh(mesh).size()
    if cp < 1 or n % cp:
        raise ValueError(
            f"context_mesh needs cp to divide the edp * ep ranks that share a batch, got {cp=} on {n} ranks; "
            f"take cp={_near(cp, n)}"
        )
    if mesh is None or cp == 1:
        return None
    with _disable_current_modes():  # as in make_mesh
        return data_mesh(mesh)._unflatten(0, (n // cp, cp), ("rows", "cp"))["cp"]


def divisors(n: int) -> list[int]:
    """Return all divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    low = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*low, *(n // i for i in low)})


def near(asked: int, allowed: Sequence[int]) -> list[int]:
    """Return of ascending values the nearest that is not above what was asked for, and the nearest not below.

    >>> near(5, divisors(12)), near(6, divisors(12)), near(0, divisors(12))
    ([4, 6], [6], [1])
    """
    below = [value for value in allowed if value <= asked][-1:]
    return below if below == [asked] else below + [value for value in allowed if value > asked][:1]


def _near(asked: int, n: int) -> str:
    return " or ".join(map(str, near(asked, divisors(n))))


def data_rank(mesh: DeviceMesh | None, context: DeviceMesh | None = None) -> tuple[int, int]:
    """Return this rank's place among the ranks that share a batch, and their number.

    The ranks of a ``context`` hold the same rows and count as one.
    """
    if mesh is None:
        return 0, 1
    cp = 1 if context is None else context.size()
    return data_mesh(mesh).get_local_rank() // cp, data_mesh(mesh).size() // cp


def layout(name: str, mesh: DeviceMesh) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and placements of the parameter ``name``: moekit's only statement of who holds what.

    ========================= ============= ======================= =============================
    leaf                      mesh          parameter               gradient before reduction
    ========================= ============= ======================= =============================
    ``*.experts.*``           (edp, ep)     (Replicate, Shard(0))   (Partial, Shard(0))
    every other               dp            (Replicate,)            (Partial,)
    ========================= ============= ======================= =============================

    A tied embedding of a model in stages lies on :func:`ends_mesh` instead of dp, unless one rank has both
    the first and the last stage.

    Raises
    ------
    ValueError
        When ``mesh`` lacks an axis that the leaf needs.
    """
    if "experts" in name.split("."):
        return edp_ep(f"the placement of {name}", mesh), (Replicate(), Shard(0))
    return data_mesh(mesh), (Replicate(),)


def shard_of(
    name: str, shape: tuple[int, ...], mesh: DeviceMesh | None
) -> tuple[torch.Size, tuple[int, ...]]:
    """Return shape and global offset of what this rank holds of the parameter ``name``.

    Raises
    ------
    ValueError
        When a sharded dim is not divisible by its axis.
    """
    if mesh is None:
        return torch.Size(shape), (0,) * len(shape)
    on, placements = layout(name, mesh)
    local, offset = list(shape), [0] * len(shape)
    for axis, placement in enumerate(placements):
        if not isinstance(placement, Shard):
            continue
        if shape[placement.dim] % on.size(axis):
            axis_name = on.mesh_dim_names[axis] if on.mesh_dim_names else axis
            raise ValueError(
                f"{name} needs the {axis_name} axis to divide its {shape[placement.dim]} experts, "
                f"got {axis_name}={on.size(axis)}"
            )
        local[placement.dim] = shape[placement.dim] // on.size(axis)
        offset[placement.dim] = local[placement.dim] * on.get_local_rank(axis)
    return torch.Size(local), tuple(offset)


def from_shard(name: str, local: Tensor, shape: tuple[int, ...], mesh: DeviceMesh | None) -> Tensor:
    """Wrap this rank's part of the parameter ``name``, of global ``shape``; no communication."""
    if mesh is None:
        return local
    on, placements = layout(name, mesh)
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(local, on, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def local(p: Tensor) -> Tensor:
    """Read a parameter in differentiated code: this rank's part, with its gradient labelled for what it is.

    Pure and differentiable. The gradient's placements follow from the parameter's: ``Partial`` on an axis
    where the parameter is replicated (each rank holds one term of a sum), ``Shard`` where it is sharded.
    Plain tensors pass.
    """
    if not isinstance(p, DTensor):
        return p
    return p.to_local(grad_placements=gradient_placements(p))


def gradient_placements(p: Tensor) -> list[Placement] | None:
    """Return the placements of a parameter's gradient before it is summed; None for a plain one."""
    if not isinstance(p, DTensor):
        return None
    return [Partial() if q.is_replicate() else q for q in p.placements]


def distribute(params: TensorDict, mesh: DeviceMesh | None) -> TensorDict:
    """Place full parameters, the same on every rank, as :func:`layout` says. No communication.

    Parameters
    ----------
    params : TensorDict
        Plain tensors.
    mesh : DeviceMesh or None
        Axes (edp, ep); ``None`` returns ``params``.

    Returns
    -------
    TensorDict
        Each leaf a DTensor whose local tensor is a copy of this rank's part.

    Raises
    ------
    ValueError
        When the ep axis does not divide the number of experts, ``mesh`` lacks an axis, or a leaf is a
        DTensor already.
    """
    if mesh is None:
        return params

    def part(name: str, full: Tensor) -> Tensor:
        if isinstance(full, DTensor):
            raise ValueError(
                f"distribute needs plain tensors, got {name}, which is {describe_place(full)}; they are "
                "what init_params(mesh=None) returns, or full_tensor() of each"
            )
        local, offset = shard_of(name, tuple(full.shape), mesh)
        index = tuple(slice(o, o + n) for o, n in zip(offset, local, strict=True))
        return from_shard(name, full[index].to(mesh.device_type).clone(), tuple(full.shape), mesh)

    return map_named(part, params)


def sum_over_ranks(tree: Any, *, mesh: DeviceMesh | None = None) -> Any:
    """Return the tensors of a tree summed over the ranks that share a batch: shares become the whole.

    Those are the ranks of ``mesh``: the axes (edp, ep), and pp where it has one. Collective: one all-reduce
    per dtype, two with pp.

    Raises
    ------
    TypeError
        For a leaf that is no tensor, before any collective.
    """
    leaves, spec = summands("sum_over_ranks", tree)
    if mesh is None:
        return tree
    by_dtype: dict[torch.dtype, list[int]] = {}
    for i, leaf in enumerate(leaves):
        by_dtype.setdefault(leaf.dtype, []).append(i)
    for at in by_dtype.values():
        flat = torch.cat([leaves[i].reshape(-1) for i in at])
        for group in (data_mesh(mesh), *([mesh["pp"]] if "pp" in (mesh.mesh_dim_names or ()) else [])):
            # Waited for, else what is returned would still be asynchronous.
            flat = fc.wait_tensor(fc.all_reduce(flat, "sum", group))
        for i, part in zip(at, flat.split([leaves[i].numel() for i in at]), strict=True):
            leaves[i] = part.view(leaves[i].shape)
    return tree_unflatten(leaves, spec)


def all_reduce(x: Tensor, mesh: DeviceMesh, axis: int, op: str = "sum") -> Tensor:
    """Return the sum, or else, over a mesh axis, as a functional collective that is waited for."""
    if mesh.size(axis) == 1:
        return x
    c10d = torch.ops._c10d_functional
    return c10d.wait_tensor(c10d.all_reduce(x, op, mesh.get_group(axis).group_name))


def all_gather(x: Tensor, mesh: DeviceMesh) -> Tensor:
    """Return what the ranks of a one-axis mesh hold, stacked: a functional collective, waited for."""
    c10d = torch.ops._c10d_functional
    every = c10d.all_gather_into_tensor(x.contiguous(), mesh.size(), mesh.get_group().group_name)
    return c10d.wait_tensor(every).view(mesh.size(), *x.shape)


def ranks_of(mesh: DeviceMesh) -> frozenset[int]:
    """Return the global ranks of a mesh."""
    with _disable_current_modes():  # the mesh's own tensor is real, also in a dry run on fake ones
        return frozenset(mesh.mesh.flatten().tolist())


def place(x: Tensor) -> tuple | None:
    """Return mesh and placements of a leaf; None for a plain tensor."""
    return (x.device_mesh, x.placements) if isinstance(x, DTensor) else None


def describe_place(x: Tensor) -> str:
    """Return mesh and placements of a leaf for an error message."""
    if not isinstance(x, DTensor):
        return "a plain tensor"
    mesh = x.device_mesh
    return f"{x.placements} on axes {mesh.mesh_dim_names} of ranks {sorted(ranks_of(mesh))}"
