"""The parameters of a model: their shapes, their first values, and a table of them."""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moekit._text import table
from moekit.config import ModelConfig, Stage
from moekit.mesh import ends_mesh, from_shard, shard_of
from moekit.tree import has_values, held, named, nested


def param_shapes(config: ModelConfig, *stages: Stage) -> dict[str, tuple[int, ...]]:
    """Return the global shape of every parameter, or of those of some stages, by its dotted name.

    Matrices are (in, out): ``x @ w``.
    """
    c, d = config, config.d_model
    q, kv = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
    shapes: dict[str, tuple[int, ...]] = {"embedding": (c.vocab_size, d)}
    if c.normalize_embedding:
        shapes["embedding_norm"] = (d,)
    for i in range(c.n_layers):
        at = f"layers.{i}."
        shapes |= {at + "attention.qkv": (d, q + 2 * kv), at + "attention.out": (q, d)}
        if c.qk_norm == "head":
            shapes |= {at + "attention.q_norm": (c.d_head,), at + "attention.k_norm": (c.d_head,)}
        elif c.qk_norm == "full":
            shapes |= {at + "attention.q_norm": (q,), at + "attention.k_norm": (kv,)}
        for part in ("attention", "ffn"):
            if c.norm in ("pre", "peri"):
                shapes[f"{at}{part}_norm_in"] = (d,)
            if c.norm in ("post", "peri"):
                shapes[f"{at}{part}_norm_out"] = (d,)
        if not c.is_moe(i):
            shapes |= {at + "ffn.gate_up": (d, 2 * c.d_dense), at + "ffn.down": (c.d_dense, d)}
            continue
        shapes |= {
            at + "moe.router": (d, c.n_experts),
            at + "moe.experts.gate_up": (c.n_experts, d, 2 * c.d_expert),
            at + "moe.experts.down": (c.n_experts, c.d_expert, d),
        }
        if c.d_shared:
            shapes |= {
                at + "moe.shared.gate_up": (d, 2 * c.d_shared),
                at + "moe.shared.down": (c.d_shared, d),
            }
    shapes["norm"] = (d,)
    if not c.tied_head:
        shapes["head"] = (d, c.vocab_size)
    if not stages:
        return shapes
    return {name: shape for name, shape in shapes.items() if any(stage.has(name, c) for stage in stages)}


def param_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """Return the dtype a parameter is kept in: routers are float32 at least, the rest is ``dtype``."""
    return torch.promote_types(dtype, torch.float32) if name.endswith(".router") else dtype


def init_params(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    stages: Sequence[Stage] | None = None,
    mesh: DeviceMesh | None = None,
) -> TensorDict:
    """Draw the parameters of a model: normal with ``config.init_std``, norms at one.

    Slab i of a parameter (expert i, row i) is drawn in float32 on the CPU from hash(seed, name, i) alone. So
    the values do not depend on mesh, device or dtype, and no rank materialises another rank's experts.

    Parameters
    ----------
    config : ModelConfig
        The model.
    seed : int
        Any integer.
    dtype : torch.dtype
        bfloat16, float32 or float64, of every parameter but the routers, which are float32 at least.
    device : str or torch.device, optional
        Where to put them; by default the device of ``mesh``, else the CPU. ``"meta"`` draws nothing.
    stages : sequence of Stage, optional
        Draw only the parameters of these, those of this rank of a pipeline.
    mesh : DeviceMesh, optional
        Axes (edp, ep), or (pp, edp, ep). Not collective beyond making the flattened meshes once.

    Returns
    -------
    TensorDict
        Nested by the parts of each dotted name; on a mesh the leaves are DTensors placed by
        :func:`moekit.mesh.layout`.

    Raises
    ------
    ValueError
        When the ep axis does not divide ``n_experts``, or ``dtype`` is none of the three.
    """
    if dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(f"init_params needs bfloat16, float32 or float64, got {dtype}")
    device = torch.device(device or (mesh.device_type if mesh is not None else "cpu"))
    params = {}
    meshes = {"embedding": mesh}
    if config.tied_head and mesh is not None and "pp" in (mesh.mesh_dim_names or ()):
        ends = ends_mesh(mesh)  # made by every rank, also by those that do not hold it
        here = stages or ()
        if not (any(s.embeds for s in here) and any(s.heads for s in here)):  # in a V one rank has both
            meshes["embedding"] = ends
    for name, shape in param_shapes(config, *(stages or ())).items():
        on = meshes.get(name, mesh)
        local, offset = shard_of(name, shape, on)
        values = torch.empty(local, dtype=param_dtype(name, dtype), device=device)
        if len(shape) == 1:  # every vector is the gain of an RMSNorm
            values.fill_(1.0)
        elif has_values(values):
            _fill(values, seed, name, offset[0], config.init_std)
        params[name] = from_shard(name, values, shape, on)
    return nested(params)


def _fill(values: Tensor, seed: int, name: str, first: int, std: float) -> None:
    """Draw each row of a tensor, whose first is ``first`` of the whole one; threads share large rows."""
    rows_at_once = max(2**22 // values.shape[1:].numel(), 1)

    def fill(start: int) -> None:
        drawn = torch.empty(min(rows_at_once, len(values) - start), *values.shape[1:])
        for row, out in enumerate(drawn, first + start):
            out.copy_(draw_slab(seed, name, row, out.shape))
        values[start : start + len(drawn)] = drawn.mul_(std)

    cores = (os.cpu_count() or 1) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))  # torchrun's
    with ThreadPoolExecutor(max(cores, 1) if rows_at_once <= 16 else 1) as pool:  # short ones wait for Python
        list(pool.map(fill, range(0, len(values), rows_at_once)))


def draw_slab(seed: int, name: str, index: int, shape: tuple[int, ...]) -> Tensor:
    """Draw standard normals, float32 on the CPU, from hash(seed, name, index)."""
    digest = hashlib.blake2b(f"{seed}/{name}/{index}".encode(), digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little", signed=True))
    return torch.randn(shape, generator=generator)


def describe(params: TensorDict) -> str:
    """Tabulate name, global shape, dtype, placement and bytes on this rank of every leaf, with a total.

    >>> print(describe(TensorDict({"norm": torch.ones(4)})))
    name   shape  dtype    placement  bytes per rank
    norm   (4,)   float32  -                      16
    total                                         16
    """
    rows, total = [("name", "shape", "dtype", "placement", "bytes per rank")], 0
    for name, leaf in named(params).items():
        n_bytes = held(leaf).nbytes
        total += n_bytes
        where = "-"
        if isinstance(leaf, DTensor):
            axes = leaf.device_mesh.mesh_dim_names or ()
            where = ", ".join(f"{axis}: {p}" for axis, p in zip(axes, leaf.placements, strict=True))
        dtype = str(leaf.dtype).removeprefix("torch.")
        rows.append((name, str(tuple(leaf.shape)), dtype, where, f"{n_bytes:,}"))
    rows.append(("total", "", "", "", f"{total:,}"))
    return table(rows, n_left=4)
