"""Layouts: whether a model and its batch fit so many GPUs, told before any process group is made.

``check_layout(model, Layout.of(cfg))`` at the head of a script is all that a run needs.
"""

import math
import os
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace

from moekit._memory import Layout, memory_of, schedule_of
from moekit.config import ModelConfig
from moekit.mesh import divisors, near
from moekit.plan import GPUS, Gpu

__all__ = ["Layout", "check_layout", "memory_of", "nearest_layouts", "schedule_of"]


def check_layout(
    config: ModelConfig, layout: Layout, *, n_gpus: int | None = None, gpu: str | Gpu | None = None
) -> Layout:
    """Refuse a layout that cannot run, with all that is wrong and the nearest layouts that can.

    Needs no process group and starts none; every rank finds the same.

    Parameters
    ----------
    config : ModelConfig
        The model.
    layout : Layout
        What is asked for.
    n_gpus : int, optional
        By default the number of ranks that torchrun started, 1 without it.
    gpu : str or Gpu, optional
        One of `moekit.plan.GPUS`, whose memory :func:`memory_of` must stay below; None asks for no memory.

    Returns
    -------
    Layout
        The layout, with ``edp`` filled in.

    Raises
    ------
    ValueError
        When ``pp * edp * ep`` is not ``n_gpus``; ``pp * n_per_rank`` is more than there are layers; a value
        does not divide what it has to (experts, ranks, heads, positions, rows, micro-batches); or the
        fullest rank holds more than the GPU has.

    Examples
    --------
    >>> from moekit.layouts import Layout, check_layout
    >>> tiny = mk.preset("tiny")
    >>> check_layout(tiny, Layout(ep=8, batch_size=64, seq_len=8192), n_gpus=16).edp
    2
    >>> check_layout(tiny, Layout(ep=6, batch_size=64, seq_len=8192), n_gpus=16)
    Traceback (most recent call last):
    ...
    ValueError: check_layout needs a layout that works on 16 GPUs, got
    - pp * edp * ep must be the number of GPUs: 1 * 2 * 6 = 12
    - ep must divide n_experts: ep=6, n_experts=64
    nearest layouts that work:
    - ep=8 instead of 6
    - ep=4 instead of 6
    - pp=2, ep=8 instead of pp=1, ep=6
    """
    n_gpus = int(os.environ.get("WORLD_SIZE", 1)) if n_gpus is None else n_gpus  # torchrun's contract
    gpu = _gpu(gpu)
    if n_gpus < 1:
        raise ValueError(f"check_layout needs n_gpus >= 1, got {n_gpus}")
    asked = layout.on(n_gpus)
    problems = list(_problems(config, asked, n_gpus))
    if not problems and gpu is not None:
        problems += _too_much(config, asked, gpu)
    if not problems:
        return asked
    found = nearest_layouts(config, layout, n_gpus=n_gpus, gpu=gpu)
    works = [f"- {_changes(layout, other)}" for other in found]
    of_size = "" if gpu is None else f" of {gpu.memory / 1e9:.0f} GB"
    lines = [f"- {problem}" for problem in problems]
    lines += ["nearest layouts that work:", *works] if works else ["no layout of this model and batch works"]
    raise ValueError(
        "\n".join(
            [f"check_layout needs a layout that works on {n_gpus} GPU{'s' * (n_gpus > 1)}{of_size}, got", *lines]
        )
    )


def nearest_layouts(
    config: ModelConfig, layout: Layout, *, n_gpus: int, gpu: str | Gpu | None = None, n: int = 3
) -> list[Layout]:
    """Return up to ``n`` layouts that work, those with the fewest and smallest changes first.

    None of them changes all that another one does and goes further. What does not alter the training, the
    layout itself, is changed before the batch, and that before the length of a sequence; ``reduce``,
    ``dtype`` and ``attention_via`` stay. Parameters as for :func:`check_layout`.
    """
    gpu = _gpu(gpu)
    found: list[Layout] = []
    tried = 0
    too_large: set[tuple] = set()  # without any activation
    for other in sorted(_candidates(config, layout, n_gpus), key=lambda other: _distance(layout, other)):
        if any(_goes_further(layout, other, near_one) for near_one in found):
            continue
        if gpu is not None:
            static = (other.pp, other.n_per_rank, other.edp, other.ep)
            if static in too_large or tried >= _TRIES:
                continue
            tried += 1
            ranks = memory_of(config, other)
            if max(sum(rank.values()) for rank in ranks) >= gpu.memory:
                held = ("parameters", "optimizer state")
                if max(sum(rank[kind] for kind in held) for rank in ranks) >= gpu.memory:
                    too_large.add(static)
                continue
        found.append(other)
        if len(found) == n:
            break
    return found


# --- What is wrong --------------------------------------------------------------------


def _problems(config: ModelConfig, layout: Layout, n_gpus: int) -> Iterator[str]:
    """Say what is wrong with a layout whose edp is known, memory left out."""
    c, at = config, layout
    assert at.edp is not None
    sizes = "pp n_per_rank edp ep cp n_microbatches batch_size seq_len".split()
    if below := {name: getattr(at, name) for name in sizes if getattr(at, name) < 1}:
        yield f"sizes must be at least 1: {', '.join(f'{name}={x}' for name, x in below.items())}"
        return
    if at.pp * at.edp * at.ep != n_gpus:
        product = at.pp * at.edp * at.ep
        yield f"pp * edp * ep must be the number of GPUs: {at.pp} * {at.edp} * {at.ep} = {product}"
    if c.n_moe_layers and c.n_experts % at.ep:
        yield f"ep must divide n_experts: ep={at.ep}, n_experts={c.n_experts}"
    if at.n_stages > c.n_layers:
        yield (
            f"each of pp * n_per_rank stages needs a layer: {at.pp} * {at.n_per_rank} = {at.n_stages} stages, "
            f"{c.n_layers} layers"
        )
    if at.n_per_rank > 1 and at.n_microbatches % at.pp:
        yield (
            f"pp must divide n_microbatches with several stages a rank: pp={at.pp}, "
            f"n_microbatches={at.n_microbatches}"
        )
    if at.seq_len > c.max_seq_len:
        yield f"seq_len must be at most max_seq_len: {at.seq_len}, {c.max_seq_len}"
    n = at.edp * at.ep
    if n % at.cp:
        yield f"cp must divide the edp * ep ranks that share a batch: cp={at.cp}, {n} ranks"
    if at.cp > 1 and at.seq_len % (2 * at.cp):
        yield f"2 * cp must divide seq_len: cp={at.cp}, seq_len={at.seq_len}"
    if at.attention_via == "all_to_all" and c.n_heads % at.cp:
        yield f"cp must divide n_heads for attention_via='all_to_all': cp={at.cp}, n_heads={c.n_heads}"
    if n % at.cp == 0 and at.batch_size % (n // at.cp * at.n_microbatches):
        yield (
            f"(edp * ep / cp) * n_microbatches must divide batch_size: {n // at.cp} * {at.n_microbatches} = "
            f"{n // at.cp * at.n_microbatches}, batch_size={at.batch_size}"
        )


def _too_much(config: ModelConfig, layout: Layout, gpu: Gpu) -> list[str]:
    ranks = memory_of(config, layout)
    place, most = max(enumerate(ranks), key=lambda at: sum(at[1].values()))
    total = sum(most.values())
    if total < gpu.memory:
        return []
    kinds = ", ".join(f"{kind} {n / 1e9:.0f}" for kind, n in most.items())
    where = f"a rank of place {place} on pp" if layout.pp > 1 else "a rank"
    return [f"a GPU has {gpu.memory / 1e9:.0f} GB, {where} would hold about {total / 1e9:.0f}: {kinds}"]


def _gpu(gpu: str | Gpu | None) -> Gpu | None:
    if isinstance(gpu, str):
        if gpu not in GPUS:
            raise ValueError(f"check_layout needs gpu to be one of {sorted(GPUS)}, got {gpu!r}")
        return GPUS[gpu]
    return gpu


# --- What would work ------------------------------------------------------------------

# What a doubling, or another choice, counts.
_WEIGHTS = {
    "pp": 1.0,
    "edp": 1.0,
    "ep": 1.0,
    "n_per_rank": 0.75,
    "n_microbatches": 0.5,
    "cp": 1.5,
    "recompute": 1.5,
    "batch_size": 4.0,
    "seq_len": 16.0,
}
_TRIES = 400  # layouts whose memory is looked at


def _candidates(config: ModelConfig, asked: Layout, n_gpus: int) -> Iterator[Layout]:
    """Yield layouts that divide all they need to, with every pp and ep, and what is near in the rest."""
    c = config
    for pp in (pp for pp in divisors(n_gpus) if pp <= c.n_layers):
        for ep in (ep for ep in divisors(n_gpus // pp) if not c.n_moe_layers or c.n_experts % ep == 0):
            n = n_gpus // pp
            for n_per_rank in _near(asked.n_per_rank, range(1, c.n_layers // pp + 1), 1):
                if pp == 1 and n_per_rank > max(asked.n_per_rank, 1):
                    continue
                for cp, seq_len in _contexts(config, asked, n):
                    shares = n // cp
                    for batch_size, m in _batches(asked, shares, pp if n_per_rank > 1 else 1):
                        for recompute in dict.fromkeys((asked.recompute, "block")):
                            yield replace(
                                asked,
                                pp=pp,
                                n_per_rank=n_per_rank,
                                edp=n // ep,
                                ep=ep,
                                cp=cp,
                                n_microbatches=m,
                                batch_size=batch_size,
                                seq_len=seq_len,
                                recompute=recompute,
                            )


def _contexts(config: ModelConfig, asked: Layout, n: int) -> Iterator[tuple[int, int]]:
    """Yield cp and seq_len that go together on n ranks."""
    length = min(max(asked.seq_len, 1), config.max_seq_len)
    heads = config.n_heads if asked.attention_via == "all_to_all" else 0
    fit = [cp for cp in divisors(n) if heads % cp == 0]
    whole = [cp for cp in fit if cp == 1 or length % (2 * cp) == 0]
    for cp in _near(asked.cp, whole, 2 * max(asked.cp, 1)):
        yield cp, length
    if asked.cp in fit and asked.cp not in whole:
        step = 2 * asked.cp
        for seq_len in {length // step * step, -(-length // step) * step}:
            if 0 < seq_len <= config.max_seq_len:
                yield asked.cp, seq_len


def _batches(asked: Layout, shares: int, pp: int) -> Iterator[tuple[int, int]]:
    """Yield batch_size and n_microbatches that go together; pp divides the latter."""
    batch_size, m = max(asked.batch_size, 1), max(asked.n_microbatches, 1)
    if batch_size % shares == 0:
        fit = [i for i in divisors(batch_size // shares) if i % pp == 0]
        for i in _near(m, fit, max(2 * m, batch_size // shares)):
            yield batch_size, i
    for i in _near(m, [m // pp * pp, -(-m // pp) * pp], m):
        if i and (step := shares * i) and batch_size % step:
            for size in (batch_size // step * step, -(-batch_size // step) * step):
                if size:
                    yield size, i


def _near(asked: int, allowed: Sequence[int], other: int) -> list[int]:
    """Return what is allowed near two values."""
    return sorted({*near(asked, allowed), *near(other, allowed)})


def _changed(asked: Layout, other: Layout) -> dict[str, float]:
    """Return how far each value that differs has gone: doublings, or 1; what was left open does not count."""
    changed = {}
    for name in _WEIGHTS:
        old, new = getattr(asked, name), getattr(other, name)
        if old == new or old is None:
            continue
        changed[name] = math.log2(new / max(old, 0.5)) if isinstance(new, int) else 1.0
    return changed


def _distance(asked: Layout, other: Layout) -> tuple:
    changed = _changed(asked, other)
    far = sum(_WEIGHTS[name] * abs(by) for name, by in changed.items())
    return len(changed), far, tuple(-getattr(other, name) for name in ("ep", "edp", "pp"))


def _goes_further(asked: Layout, other: Layout, than: Layout) -> bool:
    """Whether a layout changes all that another one does, and each value at least as far the same way."""
    far, less = _changed(asked, other), _changed(asked, than)
    return all(name in far and far[name] * by > 0 and abs(far[name]) >= abs(by) for name, by in less.items())


def _changes(asked: Layout, other: Layout) -> str:
    names = [field.name for field in fields(asked) if field.name in _changed(asked, other)]
    new = ", ".join(f"{name}={getattr(other, name)!r}" for name in names)
    if len(names) == 1:
        return f"{new} instead of {getattr(asked, names[0])!r}"
    return f"{new} instead of {', '.join(f'{name}={getattr(asked, name)!r}' for name in names)}"
