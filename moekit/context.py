"""Context parallelism: sequences split over ranks, and attention over the whole of them.

A row of S positions is cut into 2 * cp chunks, and rank i of the axis ``cp`` holds chunk i and chunk
2 * cp - 1 - i, one after the other: early positions see little and late ones much, so every rank has the same
causal work. What treats positions one by one (norms, feed-forwards, experts) is told nothing; attention
exchanges what it needs.

Axes: b sequences, s positions of this rank, S = s * cp of the whole row, n heads, h d_head.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh

from moekit.batch import Batch
from moekit.kernels.attention import Documents, causal_attention, has_kernel
from moekit.mesh import all_gather
from moekit.tree import check_values

AttentionVia = Literal["all_to_all", "all_gather"]
Mask = Tensor | Documents | None
Attend = Callable[..., Tensor]  # of q, k, v and a mask


# --- Which positions a rank holds -----------------------------------------------------


def split_context(batch: Batch, *, context: DeviceMesh | None = None) -> Batch:
    """Return the positions of a batch that this rank holds, of every row.

    Pure; no communication. Every rank of ``context`` must give the same rows. ``Loader(context=)`` sees to
    both. Targets come along with their tokens, so the last position of a chunk has its own, too.

    Parameters
    ----------
    batch : Batch
        Whole rows of S positions.
    context : DeviceMesh, optional
        From :func:`moekit.mesh.context_mesh`; None returns ``batch``.

    Returns
    -------
    Batch
        s = S / cp positions of each row, with ``positions`` filled in and the totals left open: see
        :func:`moekit.count_tokens`.

    Raises
    ------
    ValueError
        When 2 * cp does not divide S, or the batch is split already.

    References
    ----------
    Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.2. https://arxiv.org/abs/2407.21783
    """
    if context is None:
        return batch
    b, n = batch.tokens.shape
    if batch.positions is not None:
        raise ValueError(
            f"split_context needs a batch of whole rows, got one with {n} positions of each; "
            "it is split already (Loader(context=...) does so)"
        )
    check_length("split_context", n, context)
    at = positions_of(n // context.size(), device=batch.tokens.device, context=context)
    names = ("tokens", "targets", "mask", "documents")
    parts = {name: getattr(batch, name)[:, at] for name in names}
    if batch.expert_ids is not None:
        parts["expert_ids"] = batch.expert_ids[:, :, at]
    return replace(batch, **parts, positions=at.repeat(b, 1), n_targets=None, n_tokens=None)


def positions_of(
    n: int, *, device: torch.device | str | None = None, context: DeviceMesh | None = None
) -> Int[Tensor, " s"]:
    """Return where in its row each of the ``n`` positions lies that this rank holds. No communication.

    Raises
    ------
    ValueError
        When ``n`` is odd: a rank holds two chunks.
    """
    at = torch.arange(n, device=device)
    if context is None:
        return at
    if n % 2:
        raise ValueError(
            f"a context of {context.size()} ranks needs two equal chunks of each row on every rank, "
            f"got {n} positions; split the batch with moekit.context.split_context"
        )
    first, second = at.chunk(2)
    rank, chunk = context.get_local_rank(), n // 2
    return torch.cat([first + rank * chunk, second + (2 * context.size() - 2 - rank) * chunk])


def check_length(who: str, n: int, context: DeviceMesh) -> None:
    """Refuse rows that are not a whole number of chunks."""
    n_chunks = 2 * context.size()
    if n % n_chunks:
        below = n // n_chunks * n_chunks
        nearest = f"{below} or {below + n_chunks}" if below else f"{n_chunks}"
        raise ValueError(
            f"{who} needs rows that 2 * cp divides, got {n} positions and cp={context.size()}; take {nearest}"
        )


def check_split(who: str, batch: Batch, context: DeviceMesh | None, mesh: DeviceMesh | None) -> None:
    """Refuse a batch that is not split over this context, and a context without its mesh."""
    at = batch.positions
    if context is not None and mesh is None:
        raise ValueError(f"{who} needs the mesh of its context, got None; pass mesh=, over which to sum")
    if at is None:
        if context is not None:
            raise ValueError(
                f"{who} needs a batch that is split over its context of {context.size()} ranks, "
                "got whole rows; pass context to the Loader, or use moekit.context.split_context"
            )
        return
    if context is None:
        raise ValueError(f"{who} needs the context that this batch is split over, got None; pass context=")
    check_values(
        (at == positions_of(at.shape[1], device=at.device, context=context)).all(),
        who,
        f"the positions of rank {context.get_local_rank()} in a context of {context.size()}",
        lambda: f"{at[0].tolist()}; split the batch over this context",
    )


def whole_rows(x: Int[Tensor, "b s"], *, context: DeviceMesh | None = None) -> Int[Tensor, "b S"]:
    """Return the whole rows of which each rank holds a part; not differentiable. Collective over them."""
    return x if context is None else _join(all_gather(x, context), -1)


# --- Attention ------------------------------------------------------------------------


def attend(
    q: Float[Tensor, "b n s h"],
    k: Float[Tensor, "b m z h"],
    v: Float[Tensor, "b m z h"],
    mask: Mask = None,
    *,
    kernels: str = "auto",
) -> Float[Tensor, "b n s h"]:
    """Let n heads attend to the m heads of keys that they share: causally, or as ``mask`` says.

    A tensor broadcasts to (b, n, s, z): what is added to the scores, or True where a query sees a key.
    :class:`moekit.kernels.attention.Documents`, and no mask where ``kernels`` and the device allow, goes to
    :func:`moekit.kernels.attention.causal_attention`; all else to torch's ``scaled_dot_product_attention``.
    """
    if not isinstance(mask, Tensor) and has_kernel("attend", kernels, q, q.shape[-1]):
        return causal_attention(q, k, v, mask)
    if isinstance(mask, Documents):
        raise ValueError(
            f"attend needs kernels for Documents, and there are none for {q.dtype}, d_head={q.shape[-1]} on "
            f"{q.device} and {kernels=}; pass moekit.model.document_mask"
        )
    return F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=q.shape[1] != k.shape[1]
    )


def attend_over_heads(
    q: Float[Tensor, "b n s h"],
    k: Float[Tensor, "b m s h"],
    v: Float[Tensor, "b m s h"],
    mask: Float[Tensor, "b 1 z z"] | Documents | None = None,
    *,
    kernels: str = "auto",
    context: DeviceMesh,
) -> Float[Tensor, "b n s h"]:
    """Attend to whole rows: each rank gets all positions of its share of the heads, and sends them back.

    Pure and differentiable. Collective: an all-to-all of queries, keys and values, and one of the outputs.
    Keys and values are repeated where cp does not divide their heads.

    Parameters
    ----------
    q, k, v : Tensor
        Of the positions that this rank holds. cp divides the heads of ``q``.
    mask : Float[Tensor, "b 1 S S"] or Documents, optional
        Of the whole rows; None is causal.
    kernels : {"auto", "torch", "triton"}
        As for :func:`attend`.
    context : DeviceMesh
        From :func:`moekit.mesh.context_mesh`.

    References
    ----------
    Jacobs et al., DeepSpeed Ulysses, 2023. https://arxiv.org/abs/2309.14509
    """
    cp = context.size()
    copies = cp // math.gcd(cp, k.shape[1])  # the fewest with which cp divides the heads
    k, v = (repeat(z, "b m s h -> b (m copies) s h", copies=copies) for z in (k, v))
    by_rank = [rearrange(z, "b (rank n) s h -> rank b n s h", rank=cp) for z in (q, k, v)]
    whole = _join(_exchange(torch.cat(by_rank, 2), context), -2)
    q, k, v = whole.split([z.shape[2] for z in by_rank], 1)
    out = attend(q, k, v, mask, kernels=kernels)
    return rearrange(_exchange(_cut(out, cp, -2), context), "rank b n s h -> b (rank n) s h")


def attend_over_keys(
    q: Float[Tensor, "b n s h"],
    k: Float[Tensor, "b m s h"],
    v: Float[Tensor, "b m s h"],
    mask: Float[Tensor, "b 1 s z"] | None = None,
    *,
    context: DeviceMesh,
) -> Float[Tensor, "b n s h"]:
    """Attend to whole rows: each rank gets all keys and values, and looks at those up to each of its chunks.

    Pure and differentiable. Collective: one all-gather of keys and values. It is made as an all-to-all of
    copies, which moves as much; so the backward sums the ranks' gradients in one fixed order, rounded once.

    Parameters
    ----------
    q, k, v : Tensor
        Of the positions that this rank holds; any number of heads.
    mask : Float[Tensor, "b 1 s S"], optional
        Of this rank's queries; None is causal.
    context : DeviceMesh
        From :func:`moekit.mesh.context_mesh`.

    References
    ----------
    Llama Team, The Llama 3 Herd of Models, 2024, section 3.3.2. https://arxiv.org/abs/2407.21783
    """
    cp, rank, chunk = context.size(), context.get_local_rank(), q.shape[2] // 2
    if q.shape[2] % 2 or k.shape[2] != q.shape[2]:
        raise ValueError(
            "attend_over_keys needs two equal chunks of positions, of queries and keys alike, got "
            f"{q.shape[2]} and {k.shape[2]}"
        )
    kv = torch.cat([k, v], 1)
    k, v = _join(_exchange(kv.expand(cp, *kv.shape), context), -2).chunk(2, 1)
    out = []
    for i, index in enumerate((rank, 2 * cp - 1 - rank)):
        rows, end = slice(i * chunk, (i + 1) * chunk), (index + 1) * chunk
        if mask is None:
            seen = torch.ones(chunk, end, dtype=torch.bool, device=q.device).tril(end - chunk)
        else:
            seen = mask[:, :, rows, :end]
        out.append(attend(q[:, :, rows], k[:, :, :end], v[:, :, :end], seen))
    return torch.cat(out, 2)


def choose_attention(
    who: str, *, n_heads: int, via: AttentionVia | None, kernels: str, context: DeviceMesh | None
) -> tuple[AttentionVia | None, Attend | None]:
    """Return the way in which attention sees whole rows, by default over heads where cp divides them.

    Without a context there is nothing to choose, and both are None.

    Raises
    ------
    ValueError
        When ``via`` is unknown, would have no effect, or cp does not divide the heads.
    """
    if context is None:
        if via is not None:
            raise ValueError(f"{who} needs a context for attention_via={via!r}, got None; leave it out")
        return None, None
    if context.ndim != 1:
        raise ValueError(
            f"{who} needs a context of one axis, got axes {context.mesh_dim_names}; "
            "pass what moekit.mesh.context_mesh returned"
        )
    cp = context.size()
    if via is None:
        via = "all_gather" if n_heads % cp else "all_to_all"
    if via == "all_gather":
        return via, partial(attend_over_keys, context=context)
    if via != "all_to_all":
        raise ValueError(f"{who} needs attention_via 'all_to_all' or 'all_gather', got {via!r}")
    if n_heads % cp:
        below = max(n for n in range(1, cp) if n_heads % n == 0)
        raise ValueError(
            f"{who} needs cp to divide n_heads for attention_via='all_to_all', got {n_heads=} and cp={cp}; "
            f"take cp={below} or {n_heads // cp * cp or cp} or {n_heads // cp * cp + cp} heads, "
            "or attention_via='all_gather'"
        )
    return via, partial(attend_over_heads, kernels=kernels, context=context)


# --- Parts and wholes -----------------------------------------------------------------


def _exchange(x: Tensor, context: DeviceMesh) -> Tensor:
    """Send x[i] to rank i, and return what came from each."""
    ones = [1] * context.size()
    return all_to_all_single_autograd(x.contiguous(), ones, ones, context)


def _join(parts: Tensor, dim: int) -> Tensor:
    """Put the parts of the ranks (dim 0) in order along ``dim``, counted from the end."""
    first, second = parts.chunk(2, dim)
    return torch.cat([*first.unbind(), *reversed(second.unbind())], dim)


def _cut(x: Tensor, cp: int, dim: int) -> Tensor:
    """Return the parts of the ranks: the inverse of `_join`."""
    chunks = x.chunk(2 * cp, dim)
    return torch.stack([torch.cat([chunks[i], chunks[-1 - i]], dim) for i in range(cp)])
