"""What ranks send each other, as lists that can be compared and replayed."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import NamedTuple

Calls = dict[int, tuple["Call", ...]]
NODE = 8
"""Ranks of a node, which are neighbours."""
_POINT_TO_POINT = ("send", "recv", "wait")
_BY_RANK = ("all_to_all", "put", "get")  # where a rank's rows may be any number


@dataclass(frozen=True, kw_only=True)
class Call:
    """A collective, a send, a receive (``recv``), or the end of a receive that is waited for (``wait``).

    Attributes
    ----------
    op : str
        ``all_reduce``, ``all_gather``, ``reduce_scatter``, ``all_to_all``, ``broadcast``, ``reduce``,
        ``gather``, ``scatter``, ``barrier``, ``send``, ``recv`` or ``wait``, however it was called; ``put``
        and ``get`` of rows in other ranks' memory.
    group : tuple of int
        Global ranks of the process group, in its order.
    shapes, dtype
        Of the tensors that go in; of those that come out for ``recv`` and ``scatter``.
    reduce : str or None
        ``"sum"`` and the like.
    peer : int or None
        Global rank: of the other end, or of the root.
    tag, message : int
        Of a send or receive; ``message`` counts those of a pair of ranks in a group and direction.
    sends, receives : tuple of int or None
        Of an all_to_all: rows to and from each rank of the group; of a put or get: rows in its memory.
    n_bytes : int
        Of the tensors of ``shapes``.
    step : int
        0: before the first step.
    """

    op: str
    group: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...] = ()
    dtype: str = ""
    reduce: str | None = None
    peer: int | None = None
    tag: int = 0
    message: int = 0
    sends: tuple[int, ...] | None = None
    receives: tuple[int, ...] | None = None
    n_bytes: int = 0
    step: int = 0

    def __str__(self) -> str:
        if self.op == "wait":
            return f"wait(message {self.message} from rank {self.peer})"
        what = [self.dtype, *(str(list(shape)) for shape in self.shapes), self.reduce or ""]
        if self.peer is not None:
            role = {"send": "to", "recv": "from"}.get(self.op, "root")
            what.append(f"{role} rank {self.peer}")
        what += [f"tag {self.tag}"] * (self.tag != 0)
        return f"{self.op}({', '.join(w for w in what if w)})"

    def bytes_to(self, rank: int) -> Iterator[tuple[int, float]]:
        """Yield what ``rank`` sends to each other rank, were everything sent straight to its receiver."""
        n, size = self.n_bytes, len(self.group)
        everyone = {"all_reduce": 2 * n / size, "all_gather": n, "reduce_scatter": n / size}
        for i, other in enumerate(self.group):
            if other == rank:
                continue
            if self.op in everyone:
                yield other, everyone[self.op]
            elif self.op in _BY_RANK and self.sends is not None and sum(self.sends):
                yield other, n * self.sends[i] / sum(self.sends)
            elif (self.op in ("broadcast", "scatter") and self.peer == rank) or (
                self.op in ("send", "gather", "reduce") and self.peer == other
            ):
                yield other, n

    def _content(self) -> "Call":
        """Return what is equal on all members of a group."""
        shapes = self.shapes
        if self.op in _BY_RANK:
            shapes = tuple(shape[1:] for shape in shapes)
        return replace(self, shapes=shapes, sends=None, receives=None, n_bytes=0, step=0)


class Leaf(NamedTuple):
    """What a tensor that a rank holds is a part of."""

    shape: tuple[int, ...]  # of the whole
    dtype: str
    placements: tuple[str, ...]  # along the axes of its mesh, e.g. ("R", "S(0)"); none for a plain tensor
    ranks: tuple[int, ...]  # of that mesh, ascending; itself for a plain tensor

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)} {', '.join(self.placements)} on ranks {_span(self.ranks)}"


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one rank did in two steps. Picklable.

    Attributes
    ----------
    rank, world_size : int
        Which rank, of how many.
    calls : tuple of Call
        What it sent and received, in order, with what came before the first step.
    memory : dict of str to int
        Bytes at the high-water mark of the second step, by kind. Besides the kinds that the step named:
        ``activations``, made in a forward and held into a backward; ``backward``, made in a backward;
        ``temporaries``; and ``other``, there before the step and not named. Storages are rounded up to 512
        bytes. What an operation uses inside, and what an allocator cannot use of its blocks, is not counted.
    at : str
        The operation that came to the mark.
    flops : int
        Of the matrix products and attention of the second step, with what is recomputed. Causal attention
        counts all pairs.
    leaves : dict of str to dict of str to Leaf
        Shape and placement of what the step named, by kind and name.
    room : tuple of int, optional
        With :class:`moekit.rowwise` on several ranks: rows that a rank has room for, and rows that it sends.
    seconds : float
        What the dry run of this rank took.
    """

    rank: int
    world_size: int
    calls: tuple[Call, ...]
    memory: dict[str, int] = field(default_factory=dict)
    at: str = ""
    flops: int = 0
    leaves: dict[str, dict[str, Leaf]] = field(default_factory=dict)
    room: tuple[int, int] | None = None
    seconds: float = 0.0

    @property
    def peak(self) -> int:
        """Bytes at the high-water mark."""
        return sum(self.memory.values())

    def traffic(self) -> dict[tuple[str, bool], float]:
        """Return the bytes this rank sends in the second step, by operation and whether they leave its node.

        As if everything went straight from sender to receiver; rings and trees load links in other ways.
        """
        total: dict[tuple[str, bool], float] = defaultdict(float)
        for call in self.calls:
            if call.step == 2:
                for other, n_bytes in call.bytes_to(self.rank):
                    total[call.op, other // NODE != self.rank // NODE] += n_bytes
        return dict(total)


def compare(records: Iterable[Record]) -> list[str]:
    """Return where ranks disagree on what they send each other: one line for each group or pair of ranks.

    Pure. Agreed on must be:

    - the collectives of a group: every recorded member makes the same in the same order, of the same shapes,
      dtypes, reductions and roots, and in an all_to_all each pair expects the rows that are sent;
    - the messages of a pair of ranks: order, shapes, dtype and tag;
    - parameters: one of a name is held by every recorded rank of its mesh, and by no other.

    Ranks that were not recorded are assumed to agree. Groups of the same ranks count as one group.

    Parameters
    ----------
    records : iterable of Record
        One a rank.

    Returns
    -------
    list of str
        Empty where all agree. Only the first difference of each group and pair is named: what comes after it
        follows from it.
    """
    records = list(records)
    calls = {record.rank: record.calls for record in records}
    differ = list(_parameters(records))
    if len(differ) > 8:
        differ[8:] = [f"... and {len(differ) - 8} parameters more"]
    return [*_collectives(calls), *_messages(calls), *differ]


def _parameters(records: Sequence[Record]) -> Iterator[str]:
    held: dict[str, dict[Leaf, list[int]]] = defaultdict(lambda: defaultdict(list))
    for record in records:
        for name, leaf in record.leaves.get("parameters", {}).items():
            if leaf.placements:
                held[name][leaf].append(record.rank)
    for name, leaves in held.items():
        if len(leaves) > 1:
            differ = "; ".join(f"{_who(ranks)}: {leaf}" for leaf, ranks in leaves.items())
            yield f"{name} is not one parameter: {differ}"
            continue
        ((leaf, ranks),) = leaves.items()
        if others := [rank for rank in ranks if rank not in leaf.ranks]:
            yield f"{name}, {leaf}, is also on {_who(others)}"
        if lacking := [r.rank for r in records if r.rank in leaf.ranks and r.rank not in ranks]:
            yield f"{name}, {leaf}, is not on {_who(lacking)}"


def _collectives(calls: Calls) -> Iterator[str]:
    by_group: dict[tuple[int, ...], dict[int, list[Call]]] = defaultdict(lambda: defaultdict(list))
    for rank, made in calls.items():
        for call in made:
            if call.op not in _POINT_TO_POINT:
                by_group[call.group][rank].append(call)
    for group, by_rank in by_group.items():
        members = {rank: by_rank[rank] for rank in group if rank in calls}
        for i in range(max(len(made) for made in members.values())):
            at_once = {rank: made[i] if i < len(made) else None for rank, made in members.items()}
            if wrong := _differ(at_once) or _splits_differ(at_once):
                yield f"group {_span(group)}, collective {i}: {wrong}"
                break


def _differ(calls: dict[int, Call | None]) -> str:
    ranks: dict[Call | None, list[int]] = defaultdict(list)
    for rank, call in calls.items():
        ranks[call and call._content()].append(rank)
    if len(ranks) == 1:
        return ""
    return "; ".join(f"{_who(at)} {_do(at)} {calls[at[0]] or 'no more'}" for at in ranks.values())


def _splits_differ(calls: dict[int, Call | None]) -> str:
    for a, x in calls.items():
        for b, y in calls.items():
            if x is None or y is None or x.sends is None or y.receives is None:
                continue
            sent, awaited = x.sends[x.group.index(b)], y.receives[y.group.index(a)]
            if sent != awaited:
                return f"{x}: rank {a} sends {sent} rows to rank {b}, which expects {awaited}"
    return ""


def _messages(calls: Calls) -> Iterator[str]:
    sent, awaited = defaultdict(list), defaultdict(list)
    for rank, made in calls.items():
        for call in made:
            if call.op == "send":
                sent[call.group, rank, call.peer].append(call)
            elif call.op == "recv" and call.peer is None:
                yield f"rank {rank} receives from any rank, which cannot be compared"
            elif call.op == "recv":
                awaited[call.group, call.peer, rank].append(call)
    for group, a, b in sorted(sent.keys() | awaited.keys()):
        if a not in calls or b not in calls:
            continue
        out, into = sent[group, a, b], awaited[group, a, b]
        for i in range(max(len(out), len(into))):
            x, y = (found[i] if i < len(found) else None for found in (out, into))
            if x is None or y is None or (x.shapes, x.dtype, x.tag) != (y.shapes, y.dtype, y.tag):
                counts = f"{len(out)} sends, {len(into)} receives in all"
                yield (
                    f"rank {a} to rank {b}, message {i}: rank {a} does {x or 'no more'}, "
                    f"rank {b} does {y or 'no more'} ({counts})"
                )
                break


def replay(records: Iterable[Record]) -> list[str]:
    """Return which ranks would wait for ever: one line for each.

    Pure. Every rank makes its calls in order. A collective blocks until every recorded member of its group
    has reached it; sends and receives do not block; waiting for a receive blocks until the message has been
    sent. So collectives of two groups in crossed order are found too, though not every backend hangs there.

    Parameters
    ----------
    records : iterable of Record
        One a rank. :func:`compare` says whether what meets also matches.

    Returns
    -------
    list of str
        Empty where every rank comes to its end.
    """
    calls = {record.rank: record.calls for record in records}
    at = dict.fromkeys(calls, 0)
    sent: Counter[tuple] = Counter()

    def head(rank: int) -> Call | None:
        return calls[rank][at[rank]] if at[rank] < len(calls[rank]) else None

    def awaited(rank: int, call: Call) -> list[int]:
        """Return the ranks that a call still waits for."""
        if call.op in ("send", "recv"):
            return []
        if call.op == "wait":
            there = call.peer not in calls or sent[call.group, call.peer, rank] > call.message
            return [] if there or call.peer is None else [call.peer]
        meeting = {other: head(other) for other in call.group if other in calls}
        return [o for o, c in meeting.items() if c is None or (c.group, c.op) != (call.group, call.op)]

    moved = True
    while moved:
        moved = False
        for rank in calls:
            while (call := head(rank)) and not awaited(rank, call):
                moved = True
                if call.op == "send":
                    sent[call.group, rank, call.peer] += 1
                for other in [rank] if call.op in _POINT_TO_POINT else call.group:
                    if other in calls:
                        at[other] += 1
    return [
        f"rank {rank} waits for ever in its call {at[rank]}, {call} of group {_span(call.group)}, "
        f"for {_who(awaited(rank, call))}"
        for rank in calls
        if (call := head(rank))
    ]


def _who(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {_span(ranks)}"


def _do(ranks: Sequence[int]) -> str:
    return "does" if len(ranks) == 1 else "do"


def _span(ranks: Sequence[int]) -> str:
    """Write ranks as short as it goes: 0-7, or 0, 8, ..., 56."""
    if len(ranks) > 3:
        steps = {b - a for a, b in pairwise(ranks)}
        if steps == {1}:
            return f"{ranks[0]}-{ranks[-1]}"
        if len(steps) == 1:
            return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]}"
    return ", ".join(map(str, ranks))
