"""Routing as data: which experts the tokens of a run went to, kept, written, read, and taken again.

Axes: n steps, b sequences of the global batch, l layers that have experts, s positions, k choices, E experts;
m micro-batches, r ranks.
"""

import functools
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from einops import rearrange
from jaxtyping import Int, UInt
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import register_dataclass

from moekit.balance._load import Rows
from moekit.batch import Batch
from moekit.config import ModelConfig
from moekit.context import whole_rows
from moekit.mesh import data_rank
from moekit.tree import short_repr

_FORMAT = "moekit routing 2"
_DTYPES = (torch.uint8, torch.uint16, torch.uint32)


@dataclass(frozen=True, kw_only=True)
class Recording:
    """Which experts the tokens of n steps went to.

    Of whole global batches, whose rows are known by their sample: ranks and micro-batches are not in it, and
    it can be taken again on others. Ids are of the smallest unsigned dtype that holds ``n_experts - 1``,
    sample ids int64.
    """

    expert_ids: UInt[Tensor, "n b l s k"]
    sample_ids: Int[Tensor, "n b"]
    n_experts: int

    def __repr__(self) -> str:
        return short_repr(self)


register_dataclass(Recording)


def keep_routing(block: Callable, into: list[Tensor]) -> Callable:
    """Return a block that appends the expert ids (t, k) of each of its calls to a list.

    They stay on the device, in the dtype of a :class:`Recording`; nothing waits for the host.

    Parameters
    ----------
    block : callable
        As :func:`moekit.model.transformer_block`. What recomputes it stands inside:
        ``keep_routing(remat(block), into)``, else ids are appended again in the backward.
    into : list
        Appended to by calls with experts: a micro-batch's layers, then the next one's.
    """

    @functools.wraps(block)
    def run(*args: Any, **kwargs: Any):
        x, routing = block(*args, **kwargs)
        if routing is not None:
            into.append(routing.expert_ids.to(_dtype(routing.n_experts)))
        return x, routing

    return run


def record_step(
    kept: Sequence[Tensor], batch: Batch, *, config: ModelConfig, context: DeviceMesh | None = None
) -> Recording:
    """Return the recording of one step, of this rank's rows, on the device; nothing waits for the host.

    Pure. Collective over ``context`` alone: one all-gather.

    Parameters
    ----------
    kept : sequence of Tensor
        What :func:`keep_routing` appended in the step, once for each layer of each micro-batch: of the whole
        model, not of a stage of a pipeline.
    batch : Batch
        This rank's rows of the step, before they were split into micro-batches.
    config : ModelConfig
        The model.
    context : DeviceMesh, optional
        From :func:`moekit.mesh.context_mesh`, where the rows of ``batch`` are split over its ranks; all of
        them then return whole rows, of which one rank's need be written.

    Raises
    ------
    ValueError
        When the ids are not those of all layers of the batch, it is split and there is no context, or no
        layer has experts.
    """
    (b, s), n_layers = batch.tokens.shape, config.n_moe_layers
    if not n_layers:
        raise ValueError(f"record_step needs a model with experts, got {config.n_layers} dense layers")
    m, rest = divmod(len(kept), n_layers)
    want = (b * s // max(m, 1), config.top_k)
    if rest or not m or b % m or {tuple(ids.shape) for ids in kept} != {want}:
        raise ValueError(
            f"record_step needs the ids of {b} x {s} tokens in micro-batches, each {n_layers} layers with "
            f"top_k={config.top_k}, got {len(kept)} of {sum(map(len, kept))} tokens together; clear the list "
            "before each step, and let keep_routing stand outside of remat"
        )
    if (context is None) != (batch.positions is None):
        raise ValueError(
            "record_step needs the context that its batch is split over, and none for whole rows"
        )
    ids = kept[0].new_empty(m, n_layers, b // m, s, config.top_k)
    for i, part in enumerate(kept):  # dtypes of few operations: copied, not stacked
        ids[i // n_layers, i % n_layers].copy_(part.view(b // m, s, config.top_k))
    ids = rearrange(ids, "m l b s k -> (m b) l s k")
    if context is not None:
        flat = rearrange(ids.int(), "b l s k -> (b l k) s")
        ids = rearrange(whole_rows(flat, context=context), "(b l k) s -> b l s k", b=b, l=n_layers).to(
            ids.dtype
        )
    return Recording(expert_ids=ids[None], sample_ids=batch.sample_ids[None], n_experts=config.n_experts)


def write_recording(
    path: str | PathLike,
    steps: Sequence[Recording],
    *,
    context: DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
) -> None:
    """Write recordings, one after the other, as one safetensors file; waits for the device.

    ``expert_ids`` and ``sample_ids`` are as in :class:`Recording`; the file's metadata repeat the sizes, and
    say whose rows these are. On ranks each writes a file of its own, of a ``context`` one of its ranks;
    :func:`read_recording` puts them together. No communication.

    Parameters
    ----------
    path : str or path
        Its folder is made if needed.
    steps : sequence of Recording
        Of this rank, as from :func:`record_step`.
    context, mesh : DeviceMesh, optional
        That the batches were dealt over, as for :class:`moekit.data.Loader`; None for whole batches.

    Raises
    ------
    ValueError
        When there is nothing to write, or sizes differ.
    TypeError
        For a single recording in place of a sequence.
    """
    if isinstance(steps, Recording):
        raise TypeError("write_recording needs a sequence of recordings, got one; pass [recording]")
    if not steps:
        raise ValueError("write_recording needs a step at least, got none")
    whole = _joined("write_recording", steps, 0)
    _, b, n_layers, s, top_k = whole.expert_ids.shape
    rank, n_ranks = data_rank(mesh, context)
    about = dict(n_experts=whole.n_experts, top_k=top_k, n_layers=n_layers, tokens=b * s)
    about |= dict(rank=rank, n_ranks=n_ranks)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save_file(
        dict(expert_ids=whole.expert_ids, sample_ids=whole.sample_ids),
        path,
        metadata={"format": _FORMAT} | {name: str(number) for name, number in about.items()},
    )


def read_recording(*paths: str | PathLike) -> Recording:
    """Read what :func:`write_recording` wrote, of one rank or of several.

    Returns
    -------
    Recording
        On the CPU; of several files the rows of each step, one rank's after the other's, in whichever order
        the files are given.

    Raises
    ------
    ValueError
        When a file is no recording, its ids are not below ``n_experts``, files do not fit together, or there
        is not one of each rank.
    FileNotFoundError
        When there is none.
    """
    if not paths:
        raise ValueError("read_recording needs a path at least, got none")
    recordings, ranks, numbers = zip(*map(_read, paths), strict=True)
    n, came = numbers[0], Counter(ranks)
    if {*numbers} != {n}:
        raise ValueError(
            f"read_recording needs files of as many ranks, got some of {sorted({*numbers})} ranks"
        )
    if sorted(ranks) != list(range(n)):
        missing, twice = [i for i in range(n) if i not in came], [i for i in came if came[i] > 1]
        raise ValueError(
            f"read_recording needs one file of each of {n} ranks, got none of ranks {_some(missing)} and "
            f"several of ranks {_some(twice)}; write_recording takes the mesh, and tells the file whose it is"
        )
    return _joined("read_recording", [recordings[i] for i in sorted(range(n), key=ranks.__getitem__)], 1)


def replay(recording: Recording, step: int, batch: Batch, *, config: ModelConfig) -> Batch:
    """Return the batch with the expert ids that its rows went to in a step of a recording.

    Pure; no communication. The rows are found by their samples, so the batch may be that of any rank of any
    layout, or part of it (:func:`moekit.context.split_context`), and may be split into any micro-batches
    afterwards; a sample that a step holds twice goes where its first did. :func:`moekit.next_token_loss` then
    routes as recorded; a loop passes no biases, key or assignment.

    Parameters
    ----------
    recording : Recording
        On the CPU.
    step : int
        From 0.
    batch : Batch
        On the CPU, as a loader gives it; one on a device is waited for.
    config : ModelConfig
        The model that takes the batch, which has as many experts, choices and layers as that recorded: ids
        say nothing of how many there are.

    Raises
    ------
    ValueError
        When the model has others, there is no such step, samples of the batch are not in it, or rows have
        other lengths.
    """
    _, _, n_layers, s, top_k = recording.expert_ids.shape
    _check_step("replay", recording, step)
    want = dict(n_experts=config.n_experts, top_k=config.top_k, n_moe_layers=config.n_moe_layers)
    got = dict(n_experts=recording.n_experts, top_k=top_k, n_moe_layers=n_layers)
    if got != want:
        raise ValueError(f"replay needs a recording of a model like the one that takes it, {want}, got {got}")
    here, there = batch.sample_ids.cpu(), recording.sample_ids[step]
    same = here[:, None] == there
    if missing := here[~same.any(1)].tolist():
        raise ValueError(
            f"replay needs the samples of step {step}, {_some(there.tolist())}, got {_some(missing)}, which "
            "are not among them; load the same data in the same order"
        )
    at = (
        torch.arange(batch.tokens.shape[1])
        if batch.positions is None or not len(batch.positions)
        else batch.positions[:1].cpu().flatten()
    )
    if (batch.positions is None and len(at) != s) or (at >= s).any():
        raise ValueError(
            f"replay needs rows of {s} positions, as recorded, got a batch with "
            f"{len(at) if batch.positions is None else f'position {at.max()}'}"
        )
    ids = recording.expert_ids[step][same.int().argmax(1)][:, :, at]
    return replace(batch, expert_ids=ids.to(batch.tokens.device))


def recorded_rows(
    recording: Recording, step: int, *, ep: int = 1, edp: int = 1, n_microbatches: int = 1
) -> Rows:
    """Return the rows of each expert in a step, as so many ranks and micro-batches would have them.

    Pure. For :func:`moekit.balance.wait` and its neighbours. Padding is counted, as it is computed.

    Parameters
    ----------
    recording : Recording
        Of whole global batches.
    step : int
        From 0.
    ep, edp : int
        Ranks that share one copy of the experts, and copies: edp * ep source ranks, the first copy's, then
        the next one's. They take equal runs of the rows, as :class:`moekit.data.Loader` deals them.
    n_microbatches : int
        That each rank splits its rows into.

    Raises
    ------
    ValueError
        When there is no such step, or ranks and micro-batches do not divide the rows.
    """
    _check_step("recorded_rows", recording, step)
    ids = recording.expert_ids[step].long()
    if min(ep, edp, n_microbatches) < 1 or len(ids) % (edp * ep * n_microbatches):
        raise ValueError(
            f"recorded_rows needs edp * ep * n_microbatches that divides {len(ids)} rows, got {edp} * {ep} * "
            f"{n_microbatches}"
        )
    ids = rearrange(ids, "(r m b) l s k -> m r l (b s k)", r=edp * ep, m=n_microbatches)
    rows = ids.new_zeros(*ids.shape[:-1], recording.n_experts)
    return rows.scatter_add_(-1, ids, torch.ones_like(ids))


def _check_step(who: str, recording: Recording, step: int) -> None:
    n = len(recording.expert_ids)
    if not 0 <= step < n:
        raise ValueError(f"{who} needs a step from 0 to {n - 1}, which were recorded, got {step}")


# --- Files ----------------------------------------------------------------------------


def _read(path: str | PathLike) -> tuple[Recording, int, int]:
    """Return what a file holds, of which rank it is, and of how many."""
    if Path(path).is_dir():
        raise ValueError(f"read_recording needs files of write_recording, got the folder {path}")
    try:
        with safe_open(path, framework="pt") as file:
            about, names = file.metadata() or {}, set(file.keys())
            if about.get("format") != _FORMAT or not {"expert_ids", "sample_ids"} <= names:
                raise ValueError(
                    f"read_recording needs a file of write_recording, with format={_FORMAT!r} in its "
                    f"metadata, got {path} with {about or 'no metadata'} and {sorted(names) or 'no tensors'}"
                )
            ids, sample_ids = file.get_tensor("expert_ids"), file.get_tensor("sample_ids")
    except SafetensorError as error:
        raise ValueError(f"read_recording needs a safetensors file, got {path}: {error}") from error
    numbers = [about.get(name, "") for name in ("n_experts", "rank", "n_ranks")]
    if not all(map(str.isdecimal, numbers)):
        raise ValueError(
            f"read_recording needs n_experts, rank and n_ranks in a file's metadata, got {about} in {path}"
        )
    n_experts, rank, n_ranks = map(int, numbers)
    fits = ids.ndim == 5 and sample_ids.shape == ids.shape[:2]
    if not fits or ids.dtype not in _DTYPES or sample_ids.dtype != torch.int64:
        raise ValueError(
            "read_recording needs unsigned expert_ids (n, b, l, s, k) and int64 sample_ids (n, b), got "
            f"{ids.dtype} {tuple(ids.shape)} and {sample_ids.dtype} {tuple(sample_ids.shape)} in {path}"
        )
    if ids.numel() and (most := int(ids.numpy().max())) >= n_experts:  # torch has no max of uint16
        raise ValueError(f"read_recording needs expert ids below n_experts={n_experts}, got {most} in {path}")
    return Recording(expert_ids=ids, sample_ids=sample_ids, n_experts=n_experts), rank, n_ranks


def _joined(who: str, parts: Sequence[Recording], dim: int) -> Recording:
    """Put recordings one after the other along a dim, on the CPU."""
    sizes = {(x.n_experts, *(n for i, n in enumerate(x.expert_ids.shape) if i != dim)) for x in parts}
    if len(sizes) > 1:
        kept = [name for i, name in enumerate(("steps", "rows", "layers", "positions", "top_k")) if i != dim]
        raise ValueError(
            f"{who} needs recordings of the same (n_experts, {', '.join(kept)}), got {sorted(sizes)}"
        )
    ids, sample_ids = ([getattr(x, name).cpu() for x in parts] for name in ("expert_ids", "sample_ids"))
    return Recording(
        expert_ids=torch.cat(ids, dim), sample_ids=torch.cat(sample_ids, dim), n_experts=parts[0].n_experts
    )


def _dtype(n_experts: int) -> torch.dtype:
    return next(dtype for dtype in _DTYPES if n_experts - 1 <= torch.iinfo(dtype).max)


def _some(items: list[int]) -> str:
    return f"{items}" if len(items) < 9 else f"[{', '.join(map(str, items[:8]))}, ...]"
