"""Layouts: whether a model and its batch fit so many GPUs, told before any process group is made.

``check_recipe(model, cfg)`` at the head of a script is all that a run needs.
"""

import math
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import fields, replace
from typing import Any, NamedTuple

from moekit._memory import Layout, memory_of, schedule_of
from moekit._text import table
from moekit.config import ModelConfig
from moekit.mesh import divisors, near, world_size
from moekit.plan import GPUS, Gpu, split_layers
from moekit.schedules import play

__all__ = [
    "Layout",
    "check_layout",
    "check_recipe",
    "describe_layout",
    "memory_of",
    "nearest_layouts",
    "schedule_of",
]


def check_layout(
    config: ModelConfig,
    layout: Layout,
    *,
    n_gpus: int | None = None,
    gpu: str | Gpu | None = None,
    vary: Collection[str] | None = None,
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
        By default the ranks of the process group, or those that torchrun started, or 1.
    gpu : str or Gpu, optional
        One of `moekit.plan.GPUS`, whose memory :func:`memory_of` must stay below; None asks for no memory.

    vary : collection of str, optional
        Fields that the layouts proposed may change, by default all.

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
    """
    n_gpus = world_size() if n_gpus is None else n_gpus
    gpu = _gpu(gpu)
    if n_gpus < 1:
        raise ValueError(f"check_layout needs n_gpus >= 1, got {n_gpus}")
    asked = layout.on(n_gpus)
    problems = list(_problems(config, asked, n_gpus))
    if not problems and gpu is not None:
        problems += _too_much(config, asked, gpu)
    if not problems:
        return asked
    found = nearest_layouts(config, layout, n_gpus=n_gpus, gpu=gpu, vary=vary)
    works = [f"- {_changes(layout, other, gpu, config)}" for other in found]
    of_size = "" if gpu is None else f" of {gpu.memory / 1e9:.0f} GB"
    lines = [
        f"check_layout needs a layout that works on {n_gpus} GPU{'s' * (n_gpus > 1)}{of_size}, got",
        *(f"- {problem}" for problem in problems),
        *(["nearest layouts that work:", *works] if works else [_NONE]),
    ]
    raise ValueError("\n".join(lines))


_LEAST = dict(log_every=1, save_every=1, n_steps=0, profile=0, sample_bytes=0, seed=0)  # of recipes


def check_recipe(config: ModelConfig, cfg: Any) -> Layout:
    """Return the layout of a recipe's configuration, or end the process and say what is wrong with it.

    Parameters
    ----------
    config : ModelConfig
        The model.
    cfg : object
        The recipe's own configuration: fields as `Layout` names them; ``dry_run``, with ``n_gpus`` and
        ``full``; and ``gpu`` and ``toy``, where they are there.

    Returns
    -------
    Layout
        In a dry run with at most 2 * pp micro-batches: more hold no more.

    Raises
    ------
    SystemExit
        With what :func:`check_layout` raises, which the first rank prints; where ``full``, or another
        ``n_gpus`` than by default, comes without ``dry_run``; or for a number of steps, or a seed, that none
        can have, which would end the run only later.
    """
    n_gpus, gpu = cfg.n_gpus if cfg.dry_run else None, getattr(cfg, "gpu", None)
    vary = [field.name for field in fields(Layout) if hasattr(cfg, field.name)]
    asked = Layout.of(cfg, **({"dtype": "float32"} if getattr(cfg, "toy", False) else {}))
    least = {name: x for name, x in _LEAST.items() if getattr(cfg, name, None) is not None}
    try:
        if below := [name for name, x in least.items() if getattr(cfg, name) < x]:
            needs = ", ".join(f"{name} >= {least[name]}" for name in below)
            got = ", ".join(str(getattr(cfg, name)) for name in below)
            raise ValueError(f"a recipe needs {needs}, got {got}")
        if getattr(cfg, "full", False) and not cfg.dry_run:
            raise ValueError("--full needs --dry-run, got it without")
        if not cfg.dry_run and cfg.n_gpus != getattr(type(cfg), "n_gpus", cfg.n_gpus):  # not the default
            raise ValueError(
                f"--n-gpus {cfg.n_gpus} needs --dry-run, got it without; torchrun says how many ranks run"
            )
        layout = check_layout(config, asked, n_gpus=n_gpus, gpu=gpu, vary=vary)
    except ValueError as error:
        raise SystemExit(str(error) if os.environ.get("RANK", "0") == "0" else 1) from None
    return layout.short() if cfg.dry_run else layout


def nearest_layouts(
    config: ModelConfig,
    layout: Layout,
    *,
    n_gpus: int,
    gpu: str | Gpu | None = None,
    vary: Collection[str] | None = None,
    n: int = 3,
) -> list[Layout]:
    """Return up to ``n`` layouts that work, those with the fewest and smallest changes first.

    Where one that works changes some values, others that change the same values further in the same direction
    are left out, unless the first nearly fills the memory. What counts as a change: one of ``batch_size`` or
    ``seq_len``, which alters the training, counts double, and so does one of ``cp`` by more than a factor of
    four; one of ``n_microbatches`` that only keeps the rows of a micro-batch what they were does not count.
    ``reduce``, ``dtype`` and ``imbalance``, which as a rule grows with ep, are never changed.

    Parameters are those of :func:`check_layout`, and ``n``.
    """
    gpu, asked = _gpu(gpu), layout.on(n_gpus)
    found: list[tuple[_Step, float]] = []  # and the bytes of the fullest rank
    too_large: set[tuple] = set()  # whatever the activations
    for step in sorted(_steps(config, layout, asked, n_gpus), key=_Step.distance):
        other, total = step.to, 0.0
        if vary is not None and not step.by.keys() <= set(vary):
            continue
        further = [by for than, by in found if step.goes_further(than)]
        if further and (gpu is None or min(further) < _ROOMY * gpu.memory):
            continue
        if gpu is not None:
            static = (other.pp, other.n_per_rank, other.edp, other.ep, other.n_microbatches > 1)
            if static in too_large:
                continue
            ranks = memory_of(config, other)
            total = max(sum(rank.values()) for rank in ranks)
            if total >= _RESERVE * gpu.memory:
                held = ("parameters", "optimizer state", *["gradients"] * (other.n_microbatches > 1))
                if max(sum(rank[kind] for kind in held) for rank in ranks) >= gpu.memory:
                    too_large.add(static)
                continue
            if further and total >= _ROOMY * gpu.memory:
                continue
        found.append((step, total))
        if len(found) == n:
            break
    return [step.to for step, _ in found]


def describe_layout(config: ModelConfig, layout: Layout) -> str:
    """Tabulate what a rank of each place of the pipeline holds at its fullest, with the schedule's bubble.

    Parameters as for :func:`memory_of`.
    """
    ranks = memory_of(config, layout)
    stages = split_layers(config, layout.n_stages, seq_len=layout.seq_len)
    rows: list[tuple[str, ...]] = [("pp", "layers", *ranks[0], "in all", "fullest in")]
    for place, rank in enumerate(ranks):
        mine = [stage.layers for stage in stages[place :: layout.pp]]
        layers = ", ".join(f"{x.start}-{x.stop - 1}" if len(x) > 1 else f"{x.start}" for x in mine)
        figures = [f"{n / 1e9:.1f}" for n in (*rank.values(), sum(rank.values()))]
        rows.append((str(place), layers, *figures, "backward" if rank["activations"] else "update"))
    head = (
        f"pp {layout.pp} x edp {layout.edp} x ep {layout.ep}, cp {layout.cp}; micro-batches of {layout.rows} "
        f"x {layout.seq_len} positions: {layout.n_shares} at a time, {layout.n_microbatches} a step"
    )
    bubble = 0.0 if layout.n_stages == 1 else play(schedule_of(layout)).bubble
    uneven = f"a rank that gets {layout.imbalance:g} times the mean of rows"
    routing = "balanced routing" if layout.imbalance == 1 else uneven
    return "\n".join(
        [
            head,
            f"GB on a rank at its fullest, estimated for {routing}:",
            table(rows),
            f"bubble {bubble:.1%}",
        ]
    )


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
            f"each of pp * n_per_rank stages needs a layer: {at.pp} * {at.n_per_rank} = {at.n_stages} "
            f"stages, {c.n_layers} layers"
        )
    if at.n_per_rank > 1 and at.n_microbatches % at.pp:
        yield (
            f"pp must divide n_microbatches with several stages a rank: pp={at.pp}, "
            f"n_microbatches={at.n_microbatches}"
        )
    if at.seq_len > c.max_seq_len:
        yield (
            f"seq_len must be at most max_seq_len: {at.seq_len}, {c.max_seq_len}; or take a model with "
            f"max_seq_len={at.seq_len}"
        )
    n = at.edp * at.ep
    if n % at.cp:
        yield f"cp must divide the edp * ep ranks that share a batch: cp={at.cp}, {n} ranks"
    if at.cp > 1 and at.seq_len % (2 * at.cp):
        yield f"2 * cp must divide seq_len: cp={at.cp}, seq_len={at.seq_len}"
    if at.capacity_factor is not None and not _is_factor(at.capacity_factor):
        yield f"capacity_factor must be positive and finite: {at.capacity_factor}; without, all have room"
    elif at.capacity_factor is not None and at.via != "rowwise":
        yield (
            f"capacity_factor={at.capacity_factor} needs via='rowwise', got via={at.via!r}; take it, or "
            "leave out the factor"
        )
    if not 1 <= at.imbalance <= at.ep and at.imbalance != 1:
        yield f"imbalance must be from 1 to ep, the ranks that share the experts: {at.imbalance}, ep={at.ep}"
    elif not _is_imbalance(at):
        yield (
            "imbalance must be 1 with via='rowwise', whose capacity_factor gives the room: "
            f"{at.imbalance}; take another via, or the factor"
        )
    if at.attention_via is not None and at.cp == 1:
        yield f"attention_via={at.attention_via!r} needs cp > 1, got cp=1; leave it out"
    if at.attention_via == "all_to_all" and c.n_heads % at.cp:
        yield f"cp must divide n_heads for attention_via='all_to_all': cp={at.cp}, n_heads={c.n_heads}"
    if at.pp * n == n_gpus and n % at.cp == 0 and at.batch_size % (n // at.cp * at.n_microbatches):
        yield (
            f"(edp * ep / cp) * n_microbatches must divide batch_size: {n // at.cp} * {at.n_microbatches} = "
            f"{n // at.cp * at.n_microbatches}, batch_size={at.batch_size}"
        )


def _is_factor(capacity_factor: float | None) -> bool:
    return capacity_factor is not None and 0 < capacity_factor < math.inf


def _is_imbalance(layout: Layout) -> bool:
    return layout.imbalance == 1 or (1 < layout.imbalance <= layout.ep and layout.via != "rowwise")


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

# What counts how much: a doubling, or another choice.
_WEIGHTS = {
    "pp": 1.0,
    "edp": 1.0,
    "ep": 1.0,
    "n_per_rank": 0.75,
    "n_microbatches": 0.5,
    "cp": 1.5,
    "attention_via": 0.5,
    "recompute": 1.5,
    "batch_size": 4.0,
    "seq_len": 16.0,
}
_NONE = "no other mesh, context, micro-batches or recomputation would do"
_RESERVE = 0.95  # part of a GPU's memory that a proposal may take: estimates err
_ROOMY = 0.85  # part of a GPU's memory; of a layout that takes more, one that goes further is worth a line


class _Step(NamedTuple):
    """The way from what was asked for to a layout that works."""

    to: Layout
    by: dict[str, float]  # doublings of each value that differs, or 1
    follows: bool  # whether n_microbatches only keeps the rows of a micro-batch what they were

    def distance(self) -> tuple:
        far = sum(_WEIGHTS[name] * abs(by) for name, by in self.by.items())
        n = len(self.by) - self.follows + len(self.by.keys() & {"batch_size", "seq_len"})
        n += abs(self.by.get("cp", 0)) > 2
        return n, far, self.to.pp, self.to.edp  # of equals, the larger ep

    def goes_further(self, than: "_Step") -> bool:
        """Whether it changes all that another one does, each value at least as far the same way."""
        pairs = [
            (self.by.get(name, 0), by)
            for name, by in than.by.items()
            if not (than.follows and name == "n_microbatches")
        ]
        return all(far * by > 0 and abs(far) >= abs(by) for far, by in pairs)


def _steps(config: ModelConfig, layout: Layout, asked: Layout, n_gpus: int) -> Iterator[_Step]:
    for other in _candidates(config, asked, n_gpus):
        by = {}
        for name in _WEIGHTS:
            old, new = getattr(layout, name), getattr(other, name)
            if old is not None and old != new:  # None was left open
                by[name] = math.log2(new / max(old, 0.5)) if isinstance(new, int) else 1.0
        moved = by.keys() & {"pp", "edp", "ep", "cp"}
        yield _Step(other, by, bool(moved) and "n_microbatches" in by and other.rows == asked.rows)


def _candidates(config: ModelConfig, asked: Layout, n_gpus: int) -> Iterator[Layout]:
    """Yield layouts that divide all they need to, with every pp and ep, and what is near in the rest."""
    c = config
    if _is_factor(asked.capacity_factor):
        asked = replace(asked, via="rowwise")
    else:
        asked = replace(asked, capacity_factor=None)
    if not _is_imbalance(asked):
        asked = replace(asked, imbalance=1.0)
    for pp in (pp for pp in divisors(n_gpus) if pp <= c.n_layers):
        for ep in (ep for ep in divisors(n_gpus // pp) if not c.n_moe_layers or c.n_experts % ep == 0):
            n = n_gpus // pp
            for n_per_rank in _near(asked.n_per_rank, range(1, c.n_layers // pp + 1), 1):
                if pp == 1 and n_per_rank > max(asked.n_per_rank, 1):
                    continue
                for cp, seq_len in _contexts(config, asked, n):
                    shares = n // cp
                    for batch_size, m in _batches(asked, shares, pp if n_per_rank > 1 else 1):
                        for recompute in (asked.recompute, *(["block"] * (asked.recompute != "block"))):
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
                                attention_via=asked.attention_via if cp > 1 else None,
                            )


def _contexts(config: ModelConfig, asked: Layout, n: int) -> Iterator[tuple[int, int]]:
    """Yield cp and seq_len that go together on n ranks."""
    length = min(max(asked.seq_len, 1), config.max_seq_len)
    heads = config.n_heads if asked.attention_via == "all_to_all" else 0
    fit = [cp for cp in divisors(n) if heads % cp == 0]
    whole = [cp for cp in fit if cp == 1 or length % (2 * cp) == 0]
    for cp in whole:
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
        of_share = batch_size // shares
        fit = [i for i in divisors(of_share) if i % pp == 0]
        for i in {*_near(m, fit, of_share), *near(of_share // asked.rows, fit)}:
            yield batch_size, i
    for i in _near(m, [m // pp * pp, -(-m // pp) * pp], m):
        if i and (step := shares * i) and batch_size % step:
            for size in (batch_size // step * step, -(-batch_size // step) * step):
                if size:
                    yield size, i


def _near(asked: int, allowed: Sequence[int], other: int) -> list[int]:
    """Return what is allowed near two values."""
    return sorted({*near(asked, allowed), *near(other, allowed)})


def _changes(asked: Layout, other: Layout, gpu: Gpu | None, config: ModelConfig) -> str:
    """Write what is to be changed, and what a rank then holds."""
    old = {name: getattr(asked, name) for name in (*_WEIGHTS, "via", "capacity_factor", "imbalance")}
    # None was left open, but for via, whose None is not rowwise.
    names = [n for n, x in old.items() if (x is not None or n == "via") and x != getattr(other, n)]
    new = ", ".join(f"{name}={getattr(other, name)!r}" for name in names)
    was = repr(old[names[0]]) if len(names) == 1 else ", ".join(f"{name}={old[name]!r}" for name in names)
    if gpu is None:
        return f"{new} instead of {was}"
    total = max(sum(rank.values()) for rank in memory_of(config, other))
    return f"{new} instead of {was}: about {total / 1e9:.0f} GB"
