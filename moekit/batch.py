"""What a training step reads: tokens, targets, and which document each position belongs to.

Axes: b sequences, s positions.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed._functional_collectives as fc
import torch.nn.functional as F
from jaxtyping import Bool, Int, Integer
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import (
    keystr,
    register_dataclass,
    tree_flatten_with_path,
    tree_map_only,
    tree_unflatten,
)

from moekit.mesh import data_mesh


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Rows of a global batch, with the totals its losses are divided by: a pytree of int64 and bool tensors.

    Attributes
    ----------
    tokens, targets : Int[Tensor, "b s"]
        Token ids; ``targets[:, i]`` is the token after ``tokens[:, i]``.
    mask : Bool[Tensor, "b s"]
        Which targets count.
    documents : Int[Tensor, "b s"]
        Number of each token's document within its row, from 0; -1 is padding.
    sample_ids : Int[Tensor, " b"]
        Which sample of the corpus each row is; -1 is a row of padding.
    n_targets, n_tokens : Int[Tensor, ""], optional
        Totals of the global batch: targets that count, and tokens that are not padding. `count_tokens` fills
        them in.
    n_ranks : int, optional
        How many ranks share the global batch, where a `moekit.data.Loader` has drawn it, without ``part``.
    positions : Int[Tensor, "b s"], optional
        Which positions of its row these are, where `moekit.context.split_context` has left a part of them.
    expert_ids : Integer[Tensor, "b l s k"], optional
        The experts that each position goes to in each layer that has experts, in place of the routers'
        choice: see `moekit.balance.replay`. Of any integer dtype.
    """

    tokens: Int[Tensor, "b s"]
    targets: Int[Tensor, "b s"]
    mask: Bool[Tensor, "b s"]
    documents: Int[Tensor, "b s"]
    sample_ids: Int[Tensor, " b"]
    n_targets: Int[Tensor, ""] | None = None
    n_tokens: Int[Tensor, ""] | None = None
    n_ranks: int | None = None
    positions: Int[Tensor, "b s"] | None = None
    expert_ids: Integer[Tensor, "b l s k"] | None = None

    def to(self, device: torch.device | str) -> "Batch":
        """Return the batch with every tensor on ``device``."""
        return tree_map_only(Tensor, lambda x: x.to(device, non_blocking=True), self)


register_dataclass(Batch)


def make_batch(
    tokens: Int[Tensor, "b n"], documents: Int[Tensor, "b n"], sample_ids: Int[Tensor, " b"]
) -> Batch:
    """Make the batch in which every position predicts the next token of its own document.

    Pure. The totals are left open: see `count_tokens`.

    Parameters
    ----------
    tokens : Int[Tensor, "b s+1"]
        Token ids, int64.
    documents : Int[Tensor, "b s+1"]
        Number of each token's document within its row, int64; negative for padding.
    sample_ids : Int[Tensor, "b"]
        Number of each row's sample in the corpus, int64.

    Returns
    -------
    Batch
        ``s`` positions a row. A target counts if it is of the same document as its token and not padding.

    Raises
    ------
    ValueError
        If the shapes disagree or a row has fewer than two tokens.
    """
    if (
        tokens.ndim != 2
        or tokens.shape[1] < 2
        or documents.shape != tokens.shape
        or len(sample_ids) != len(tokens)
    ):
        raise ValueError(
            "make_batch needs tokens and documents of one shape (b, s+1) with s >= 1 and sample_ids (b,), "
            f"got {tuple(tokens.shape)}, {tuple(documents.shape)} and {tuple(sample_ids.shape)}"
        )
    mask = (documents[:, 1:] == documents[:, :-1]) & (documents[:, 1:] >= 0)
    changes = F.pad((documents[:, 1:] != documents[:, :-1]).long(), (1, 0))
    documents = changes.cumsum(1).where(documents >= 0, -1)  # from 0, whatever the numbers were
    return Batch(
        tokens=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        mask=mask,
        documents=documents[:, :-1].contiguous(),
        sample_ids=sample_ids,
    )


def count_tokens(batch: Batch, *, mesh: DeviceMesh | None = None) -> Batch:
    """Return the batch with ``n_targets`` and ``n_tokens`` counted over all ranks of ``mesh``.

    Pure. Collective: one all-reduce of two numbers, which every rank of ``mesh`` joins, also with no rows.
    The totals are counted anew from ``mask`` and ``documents``, so counting twice, or after a change of the
    mask, is right.

    Parameters
    ----------
    batch : Batch
        This rank's rows.
    mesh : DeviceMesh, optional
        Axes (edp, ep), or one axis of the ranks that share the global batch; None is one process.

    Returns
    -------
    Batch
        The same rows; the totals stay on the device and nothing waits for the host.

    Raises
    ------
    ValueError
        When a `moekit.data.Loader` has drawn the batch for another number of ranks.
    """
    n = 1 if mesh is None else data_mesh(mesh).size()
    if batch.n_ranks not in (None, n):
        raise ValueError(
            f"count_tokens needs the mesh that its batch was drawn for, of {batch.n_ranks} ranks that share "
            f"it, got {n}; pass the same mesh to Loader and count_tokens"
        )
    totals = torch.stack([batch.mask.sum(), (batch.documents >= 0).sum()])
    if mesh is not None:
        totals = fc.wait_tensor(fc.all_reduce(totals, "sum", data_mesh(mesh)))
    n_targets, n_tokens = totals.unbind()
    return replace(batch, n_targets=n_targets, n_tokens=n_tokens)


def split_batch(tree: Any, n: int) -> list[Any]:
    """Split every tensor of a tree into ``n`` equal chunks of its leading dimension.

    Pure; the chunks are views. 0-d tensors (totals of the global batch) and other leaves are shared.

    Parameters
    ----------
    tree : pytree
        A `Batch`, or any nesting of dicts, lists, tuples and registered dataclasses.
    n : int
        Number of chunks.

    Returns
    -------
    list
        ``n`` trees of the structure of ``tree``, in order.

    Raises
    ------
    ValueError
        If ``n`` does not divide a leading dimension, or is below 1.
    """
    return split_for("split_batch", "n", tree, n)


def split_for(who: str, name: str, tree: Any, n: int) -> list[Any]:
    """Do what `split_batch` does for ``who``, which calls the number of chunks ``name``."""
    leaves, spec = tree_flatten_with_path(tree)
    split = {path: x for path, x in leaves if isinstance(x, Tensor) and x.ndim}
    if n < 1 or any(len(x) % n for x in split.values()):
        shapes = ", ".join(f"{keystr(path) or 'the tensor'} {tuple(x.shape)}" for path, x in split.items())
        raise ValueError(
            f"{who} needs {name} >= 1 that divides every leading dimension, got {name}={n} and {shapes}"
        )
    columns = [x.tensor_split(n) if path in split else (x,) * n for path, x in leaves]
    return [tree_unflatten(chunk, spec) for chunk in zip(*columns, strict=True)]
