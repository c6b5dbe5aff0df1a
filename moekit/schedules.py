"""Pipeline schedules: what each rank computes in which order, as data.

F is the forward of a stage for a micro-batch, B its backward. A schedule says only that; :func:`lower` adds
what is sent.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple


class Op(NamedTuple):
    """One step of a rank: a forward, a backward, or, once lowered, a message to or from the next stage."""

    kind: Literal["F", "B", "send_F", "recv_F", "send_B", "recv_B"]
    stage: int  # of a message: the stage that sends, or receives
    micro_batch: int

    def __str__(self) -> str:
        """Write ``F2.5`` for the forward of stage 2 for micro-batch 5."""
        return f"{self.kind}{self.stage}.{self.micro_batch}"


@dataclass(frozen=True)
class Schedule:
    """Operations of each rank in order, and the rank of each stage.

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
        if bad := sorted({rank for rank in self.rank_of if not 0 <= rank < self.n_ranks}):
            raise ValueError(f"Schedule needs stages on ranks 0 to {self.n_ranks - 1}, got ranks {bad}")
        want = {
            Op(kind, stage, i)
            for kind in ("F", "B")
            for stage in range(self.n_stages)
            for i in range(self.n_microbatches)
        }
        for rank, ops in enumerate(self.ops):
            mine = {op for op in want if self.rank_of[op.stage] == rank}
            if len(set(ops)) != len(ops) or set(ops) != mine:
                raise ValueError(
                    f"Schedule needs each forward and backward of rank {rank}'s stages once, missing: "
                    f"{_show(mine - set(ops))}, not its own: {_show(set(ops) - mine)}, "
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

    def needs(self, op: Op) -> Op | None:
        """Return what must have been computed, here or on another rank, before an operation can start."""
        if op.kind == "F":
            return Op("F", op.stage - 1, op.micro_batch) if op.stage else None
        after = op.stage + 1
        return Op("B", after, op.micro_batch) if after < self.n_stages else Op("F", op.stage, op.micro_batch)

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


def lower(schedule: Schedule) -> tuple[tuple[Op, ...], ...]:
    """Return the schedule with sends and receives between ranks.

    All ranks are walked in one global order, in which a send is followed at once by its receive. So any two
    ranks exchange their messages in the same order, and no list waits for itself, even where sends block.

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
    the bubble (p - 1) / (v m + p - 1) of p ranks, v stages a rank and m micro-batches.

    Parameters
    ----------
    schedule : Schedule
        Of any kind.
    cost : mapping, optional
        Of ``"F"`` and ``"B"`` in any unit; by default 1 and 2.
    """
    cost = {"F": 1.0, "B": 2.0} if cost is None else cost
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
    """
    played = play(schedule, cost)
    unit = min(end - start for start, end in played.times.values())
    width = max(len(str(op)) for op in played.times) + 1
    lines = []
    for rank, ops in enumerate(schedule.ops):
        cells = ["."] * round(played.makespan / unit)
        for op in ops:
            start, end = (round(t / unit) for t in played.times[op])
            cells[start:end] = [str(op), *["-"] * (end - start - 1)]
        lines.append(f"rank {rank}  " + "".join(f"{cell:<{width}}" for cell in cells).rstrip())
    return "\n".join(lines)


def draw(schedule: Schedule, cost: Mapping[str, float | int] | None = None, *, ax: Any = None) -> Any:
    """Draw the timeline with matplotlib, which needs to be installed; return the axes.

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
        color = plt.get_cmap("Blues" if op.kind == "F" else "Greens")(shade)
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


def _check(who: str, n_ranks: int, n_microbatches: int) -> None:
    if n_ranks < 1 or n_microbatches < 1:
        raise ValueError(f"{who} needs n_ranks and n_microbatches >= 1, got {n_ranks}, {n_microbatches}")


def _show(ops: set[Op]) -> str:
    return ", ".join(map(str, sorted(ops))) or "none"
