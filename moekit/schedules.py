"""Pipeline schedules: what each rank computes in which order, as data.

F is the forward of a stage for a micro-batch, B its backward. A backward may be split into I, the gradient of
the stage's input, for which another rank waits, and W, the gradients of its weights, which fill gaps. A
schedule says only that; :func:`lower` adds what is sent.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple


class Op(NamedTuple):
    """One step of a rank: a forward, a backward or a part of it; once lowered, also a message."""

    kind: Literal["F", "B", "I", "W", "send_F", "recv_F", "send_B", "recv_B"]
    stage: int  # of a message: the stage that sends, or receives
    micro_batch: int

    def __str__(self) -> str:
        """Write ``F2.5`` for the forward of stage 2 for micro-batch 5."""
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Operations of each rank in order, and the rank of each stage.

    Each stage has, for each micro-batch, a forward, and either one B or one I and later its W.

    Raises
    ------
    ValueError
        When a stage is on no rank or computed by another, an operation is missing or stands twice, or the
        order cannot be carried out; the message names the operations.
    """

    ops: tuple[tuple[Op, ...], ...]  # [rank]
    rank_of: tuple[int, ...]  # [stage]
    n_microbatches: int

    def __post_init__(self) -> None:
        if self.n_microbatches < 1:
            raise ValueError(f"Schedule needs n_microbatches >= 1, got {self.n_microbatches}")
        if not self.ops or set(self.rank_of) != set(range(self.n_ranks)):
            got = sorted(set(self.rank_of))
            raise ValueError(
                f"Schedule needs stages on each of ranks 0 to {self.n_ranks - 1}, got ranks {got}"
            )
        for rank, ops in enumerate(self.ops):
            mine = {
                op
                for stage in self.stages_of(rank)
                for i in range(self.n_microbatches)
                for op in (Op("F", stage, i), *self._backward(stage, i))
            }
            if len(set(ops)) != len(ops) or set(ops) != mine:
                raise ValueError(
                    f"Schedule needs each forward and backward (B, or I and W) of rank {rank}'s stages once, "
                    f"missing: {_show(mine - set(ops))}, not its own: {_show(set(ops) - mine)}, "
                    f"twice: {_show({op for op in ops if ops.count(op) > 1})}"
                )
        lower(self)  # raises where the order is impossible

    @property
    def n_ranks(self) -> int:
        """Ranks of the pipeline."""
        return len(self.ops)

    @property
    def n_stages(self) -> int:
        """Stages over all ranks."""
        return len(self.rank_of)

    def stages_of(self, rank: int) -> list[int]:
        """Return the stages of a rank, in the model's order."""
        return [stage for stage, of in enumerate(self.rank_of) if of == rank]

    def splits(self, stage: int, micro_batch: int) -> bool:
        """Return whether this backward is split into I and W."""
        return (stage, micro_batch) in self._split

    def _backward(self, stage: int, i: int) -> tuple[Op, ...]:
        return (Op("I", stage, i), Op("W", stage, i)) if self.splits(stage, i) else (Op("B", stage, i),)

    @cached_property
    def _split(self) -> frozenset[tuple[int, int]]:
        return frozenset((op.stage, op.micro_batch) for ops in self.ops for op in ops if op.kind in "IW")

    def needs(self, op: Op) -> Op | None:
        """Return what must have been computed, here or on another rank, before an operation can start."""
        if op.kind == "F":
            return Op("F", op.stage - 1, op.micro_batch) if op.stage else None
        if op.kind == "W":
            return Op("I", op.stage, op.micro_batch)
        after = op.stage + 1
        if after == self.n_stages:
            return Op("F", op.stage, op.micro_batch)
        return self._backward(after, op.micro_batch)[0]

    def __str__(self) -> str:
        return timeline(self)


def gpipe(n_ranks: int, n_microbatches: int) -> Schedule:
    """Return all forwards, then all backwards: every micro-batch's activations are held at once.

    References
    ----------
    Huang et al., GPipe, 2018. https://arxiv.org/abs/1811.06965
    """
    _check("gpipe", n_ranks, n_microbatches)
    every = range(n_microbatches)
    ops = [[Op("F", r, i) for i in every] + [Op("B", r, i) for i in every] for r in range(n_ranks)]
    return _schedule(ops, range(n_ranks), n_microbatches)


def one_f_one_b(n_ranks: int, n_microbatches: int) -> Schedule:
    """Return a schedule that holds at most ``n_ranks`` micro-batches: one forward, one backward by turns.

    References
    ----------
    Narayanan et al., PipeDream, 2018. https://arxiv.org/abs/1806.03377
    """
    _check("one_f_one_b", n_ranks, n_microbatches)
    every = range(n_microbatches)
    ops = [
        _alternate(n_ranks - 1 - r, [Op("F", r, i) for i in every], [Op("B", r, i) for i in every])
        for r in range(n_ranks)
    ]
    return _schedule(ops, range(n_ranks), n_microbatches)


def interleaved(n_ranks: int, n_microbatches: int, n_per_rank: int = 2) -> Schedule:
    """Return 1F1B with several stages a rank: stage s on rank s mod n_ranks, and a bubble as much smaller.

    Raises
    ------
    ValueError
        When ``n_ranks`` does not divide ``n_microbatches``.

    References
    ----------
    Narayanan et al., Efficient Large-Scale Language Model Training on GPU Clusters, 2021.
    https://arxiv.org/abs/2104.04473
    """
    _check("interleaved", n_ranks, n_microbatches)
    if n_per_rank < 1 or n_microbatches % n_ranks:
        raise ValueError(
            "interleaved needs n_per_rank >= 1 and n_microbatches that n_ranks divides, got "
            f"{n_per_rank=}, {n_microbatches=}, {n_ranks=}; the next above is "
            f"n_microbatches={-(-n_microbatches // n_ranks) * n_ranks}"
        )
    ops = []
    for rank in range(n_ranks):
        turns = [  # groups of n_ranks micro-batches pass the rank's first stage, then its second, ...
            (turn, first + i)
            for first in range(0, n_microbatches, n_ranks)
            for turn in range(n_per_rank)
            for i in range(n_ranks)
        ]
        forwards = [Op("F", turn * n_ranks + rank, i) for turn, i in turns]
        backwards = [Op("B", (n_per_rank - 1 - turn) * n_ranks + rank, i) for turn, i in turns]
        ahead = (
            (n_per_rank - 1) * n_ranks + 2 * (n_ranks - 1 - rank) if n_per_rank > 1 else n_ranks - 1 - rank
        )
        ops.append(_alternate(ahead, forwards, backwards))
    return _schedule(ops, [s % n_ranks for s in range(n_ranks * n_per_rank)], n_microbatches)


def zero_bubble(n_ranks: int, n_microbatches: int, n_per_rank: int = 1) -> Schedule:
    """Return ZB1P: 1F1B, interleaved for several stages a rank, whose weight gradients fill the gaps.

    The bubble is about a third of 1F1B's. Every rank holds as much as rank 0 does there: ``n_ranks``
    micro-batches for one stage a rank. The order is torch's (``ScheduleInterleavedZeroBubble``). See
    :func:`moekit.pipeline` for what a stage may be.

    Raises
    ------
    ValueError
        When ``n_microbatches`` is above ``n_ranks`` and not a multiple of ``n_microbatches // n_ranks``.
    RuntimeError
        When this torch does not have the schedule.

    References
    ----------
    Qi et al., Zero Bubble Pipeline Parallelism, 2023. https://arxiv.org/abs/2401.10241
    """
    _check("zero_bubble", n_ranks, n_microbatches)
    n_rounds = max(1, n_microbatches // n_ranks)
    if n_per_rank < 1 or n_microbatches % n_rounds:
        raise ValueError(
            "zero_bubble needs n_per_rank >= 1 and n_microbatches that n_microbatches // n_ranks divides, "
            f"got {n_per_rank=}, {n_microbatches=}, {n_ranks=}; the next above that n_ranks divides is "
            f"n_microbatches={-(-n_microbatches // n_ranks) * n_ranks}"
        )
    rank_of = [s % n_ranks for s in range(n_ranks * n_per_rank)]
    sizes = dict(n_local_stages=n_per_rank, microbatches_per_round=n_microbatches // n_rounds)
    return _of_torch("zero_bubble", "ScheduleInterleavedZeroBubble", rank_of, n_microbatches, **sizes)


def zero_bubble_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """Return ZBV: two stages a rank in a V (rank 0 has the first and the last), and backwards that are split.

    The bubble is that of ``zero_bubble`` with two stages a rank. Every rank holds a micro-batch for at most
    ``2 * n_ranks`` stages of half the size, as much as rank 0 does in 1F1B. The order is torch's
    (``ScheduleZBVZeroBubble``).

    Raises
    ------
    RuntimeError
        When this torch does not have the schedule.

    References
    ----------
    Qi et al., Pipeline Parallelism with Controllable Memory, 2024. https://arxiv.org/abs/2405.15362
    """
    _check("zero_bubble_v", n_ranks, n_microbatches)
    rank_of = [*range(n_ranks), *reversed(range(n_ranks))]
    return _of_torch(
        "zero_bubble_v", "ScheduleZBVZeroBubble", rank_of, n_microbatches, num_stages=2 * n_ranks
    )


def dual_pipe_v(n_ranks: int, n_microbatches: int) -> Schedule:
    """Return DualPipeV: two stages a rank in a V; a forward of one stands next to a backward of the other.

    Such a pair is run one after the other here, so it hides no communication of experts. Backwards are split
    at the start and the end alone. Every rank holds at most ``2 * n_ranks + 1`` micro-batches of a stage of
    half the size. The order is torch's (``ScheduleDualPipeV``).

    Raises
    ------
    ValueError
        When there are fewer micro-batches than stages.
    RuntimeError
        When this torch does not have the schedule.

    References
    ----------
    DeepSeek-AI, DeepSeek-V3 Technical Report, 2024, section 3.2.1. https://arxiv.org/abs/2412.19437
    """
    _check("dual_pipe_v", n_ranks, n_microbatches)
    if n_microbatches < 2 * n_ranks:
        raise ValueError(
            f"dual_pipe_v needs as many micro-batches as stages, got {n_microbatches=} and {2 * n_ranks} "
            f"stages on {n_ranks} ranks; take n_microbatches={2 * n_ranks} or more, or zero_bubble_v"
        )
    rank_of = [*range(n_ranks), *reversed(range(n_ranks))]
    return _of_torch("dual_pipe_v", "ScheduleDualPipeV", rank_of, n_microbatches)


def lower(schedule: Schedule) -> tuple[tuple[Op, ...], ...]:
    """Return the schedule with sends and receives between ranks.

    All ranks are walked in one global order, in which a send is followed at once by its receive. So any two
    ranks exchange their messages in the same order, and no list waits for itself, even where sends block.
    After F the stage's output is sent on, after B or I the gradient of its input back, after W nothing.

    Raises
    ------
    ValueError
        When the order cannot be carried out; names what each rank waits with.
    """
    out: list[list[Op]] = [[] for _ in schedule.ops]
    at = [0] * schedule.n_ranks
    done: set[Op] = set()
    moved = True
    while moved:
        moved = False
        for rank, ops in enumerate(schedule.ops):
            if at[rank] == len(ops):
                continue
            op = ops[at[rank]]
            before = schedule.needs(op)
            own = op.kind == "F" or Op("F", op.stage, op.micro_batch) in done
            if not own or (before is not None and before not in done):
                continue
            out[rank].append(op)
            done.add(op)
            at[rank] += 1
            moved = True
            if op.kind == "W":
                continue
            to = op.stage + (1 if op.kind == "F" else -1)
            if 0 <= to < schedule.n_stages and schedule.rank_of[to] != rank:
                out[rank].append(Op("send_F" if op.kind == "F" else "send_B", op.stage, op.micro_batch))
                receive = Op("recv_F" if op.kind == "F" else "recv_B", to, op.micro_batch)
                out[schedule.rank_of[to]].append(receive)
    waiting = {
        rank: ops[i] for rank, (ops, i) in enumerate(zip(schedule.ops, at, strict=True)) if i < len(ops)
    }
    if waiting:
        what = ", ".join(f"rank {rank} at {op} for {schedule.needs(op)}" for rank, op in waiting.items())
        raise ValueError(f"Schedule needs an order that can be carried out, got ranks that wait: {what}")
    return tuple(map(tuple, out))


class Played(NamedTuple):
    """When each operation starts and ends, in the unit of the costs."""

    times: dict[Op, tuple[float, float]]
    makespan: float
    idle: tuple[float, ...]  # [rank]: part of the makespan

    @property
    def bubble(self) -> float:
        """Idle part of the busiest rank's time."""
        return min(self.idle)


def play(schedule: Schedule, cost: Mapping[str, float | int] | None = None) -> Played:
    """Play a schedule: each operation starts as soon as its rank is free and its input is there.

    With even stages whose backward costs any multiple of the forward, GPipe, 1F1B and interleaved 1F1B have
    the bubble (p - 1) / (v m + p - 1) of p ranks, v stages a rank and m micro-batches. Where F, I and W cost
    the same, the zero-bubble schedules and DualPipeV have (p - 1) / (3 v m + p - 1), for m >= v p.

    Parameters
    ----------
    schedule : Schedule
        Of any kind.
    cost : mapping, optional
        Of ``"F"``, ``"I"`` and ``"W"`` in any unit, by default 1 each; ``"B"`` is I + W where it is left out,
        and I and W are half of B where they are.

    Raises
    ------
    ValueError
        When the costs of F and of a backward are not given.
    """
    cost = _costs(cost)
    times: dict[Op, tuple[float, float]] = {}
    clock, at = [0.0] * schedule.n_ranks, [0] * schedule.n_ranks
    while any(i < len(ops) for i, ops in zip(at, schedule.ops, strict=True)):
        for rank, ops in enumerate(schedule.ops):
            while at[rank] < len(ops):
                op = ops[at[rank]]
                before = schedule.needs(op)
                if before is not None and before not in times:
                    break
                start = max(clock[rank], times[before][1] if before is not None else 0.0)
                clock[rank] = start + cost[op.kind]
                times[op] = start, clock[rank]
                at[rank] += 1
    makespan = max(clock)
    busy = [sum(cost[op.kind] for op in ops) for ops in schedule.ops]
    return Played(times, makespan, tuple(1 - b / makespan for b in busy))


def timeline(schedule: Schedule, cost: Mapping[str, float | int] | None = None) -> str:
    """Return a line a rank and a cell a unit of time: ``F1.0`` is the forward of stage 1, micro-batch 0.

    >>> print(timeline(one_f_one_b(2, 2), {"F": 1, "B": 1}))
    rank 0  F0.0 F0.1 .    B0.0 .    B0.1
    rank 1  .    F1.0 B1.0 F1.1 B1.1 .
    >>> print(timeline(zero_bubble(2, 2)))
    rank 0  F0.0 F0.1 .    I0.0 W0.0 I0.1 W0.1
    rank 1  .    F1.0 I1.0 F1.1 I1.1 W1.0 W1.1
    """
    played = play(schedule, cost)
    unit = min(end - start for start, end in played.times.values())
    width = max(len(str(op)) for op in played.times) + 1
    lines = []
    for rank, ops in enumerate(schedule.ops):
        cells = ["."] * math.floor(played.makespan / unit + 0.5)
        for op in ops:
            start, end = (math.floor(t / unit + 0.5) for t in played.times[op])  # halves always up
            cells[start:end] = [str(op), *["-"] * (end - start - 1)]
        lines.append(f"rank {rank}  " + "".join(f"{cell:<{width}}" for cell in cells).rstrip())
    return "\n".join(lines)


COLORS = {"F": "Blues", "B": "Greens", "I": "Oranges", "W": "Purples"}


def draw(schedule: Schedule, cost: Mapping[str, float | int] | None = None, *, ax: Any = None) -> Any:
    """Draw the timeline with matplotlib, which needs to be installed; return the axes.

    Forwards are blue, backwards green; where they are split, I is orange and W purple.

    Parameters
    ----------
    schedule, cost
        As for :func:`play`.
    ax : matplotlib.axes.Axes, optional
        Where to; by default on a new figure.
    """
    import matplotlib.pyplot as plt

    played = play(schedule, cost)
    if ax is None:
        ax = plt.subplots(figsize=(12, 0.5 * schedule.n_ranks + 1), layout="constrained")[1]
    for op, (start, end) in played.times.items():
        rank = schedule.rank_of[op.stage]
        shade = 0.35 + 0.5 * op.stage / schedule.n_stages
        color = plt.get_cmap(COLORS[op.kind])(shade)
        ax.barh(rank, end - start, left=start, color=color, edgecolor="white")
        ax.text((start + end) / 2, rank, str(op.micro_batch), ha="center", va="center", fontsize=7)
    ax.set(yticks=range(schedule.n_ranks), ylabel="rank", xlabel="time")
    ax.set_title(
        f"{schedule.n_stages} stages, {schedule.n_microbatches} micro-batches, bubble {played.bubble:.1%}"
    )
    ax.invert_yaxis()
    return ax


def _alternate(ahead: int, forwards: list[Op], backwards: list[Op]) -> list[Op]:
    """Return `ahead` forwards, then a forward and a backward by turns, then the backwards left over."""
    ahead = min(ahead, len(forwards))
    turns = [op for pair in zip(forwards[ahead:], backwards, strict=False) for op in pair]
    return [*forwards[:ahead], *turns, *backwards[len(forwards) - ahead :]]


def _schedule(ops: Sequence[Sequence[Op]], rank_of: Sequence[int], n_microbatches: int) -> Schedule:
    return Schedule(tuple(map(tuple, ops)), tuple(rank_of), n_microbatches)


def _of_torch(who: str, name: str, rank_of: Sequence[int], n_microbatches: int, **sizes: int) -> Schedule:
    """Return the order of one of torch's schedule classes, asked for each rank without stages or groups."""
    import torch
    from torch.distributed.pipelining import schedules as of_torch

    n_ranks = max(rank_of) + 1
    # What the method reads of itself; the class wants PipelineStages on a process group.
    stand_in = SimpleNamespace(pp_group_size=n_ranks, _n_microbatches=n_microbatches, **sizes)
    try:
        method = getattr(of_torch, name)._calculate_single_rank_operations
        actions = [method(stand_in, rank) for rank in range(n_ranks)]
    except AttributeError as error:
        raise RuntimeError(
            f"{who} needs the order of torch's {name} as in torch 2.11 to 2.13, got torch "
            f"{torch.__version__} without it ({error}); take interleaved or one_f_one_b"
        ) from error
    ops = []
    for of_rank in actions:  # None: a gap; sub_actions: a pair to be overlapped
        parts = [part for action in of_rank if action for part in action.sub_actions or (action,)]
        ops.append([Op(a.computation_type.value, a.stage_index, a.microbatch_index) for a in parts])
    return _schedule(ops, rank_of, n_microbatches)


def _costs(cost: Mapping[str, float | int] | None) -> Mapping[str, float | int]:
    """Return the costs of F, B, I and W."""
    known: dict[str, float | int] = {"F": 1.0, "I": 1.0, "W": 1.0} if cost is None else dict(cost)
    if "B" in known:
        known = {"I": known["B"] / 2, "W": known["B"] / 2} | known
    if not {"F", "I", "W"} <= known.keys():
        raise ValueError(
            f"play needs the costs of F and of B, or of F, I and W, got those of {sorted(known)}"
        )
    known = {"B": known["I"] + known["W"]} | known
    if not all(0 < x < math.inf for x in known.values()):
        raise ValueError(f"play needs costs above 0, got {known}")
    return known


def _check(who: str, n_ranks: int, n_microbatches: int) -> None:
    if n_ranks < 1 or n_microbatches < 1:
        raise ValueError(f"{who} needs n_ranks and n_microbatches >= 1, got {n_ranks}, {n_microbatches}")


def _show(ops: set[Op]) -> str:
    return ", ".join(map(str, sorted(ops))) or "none"
