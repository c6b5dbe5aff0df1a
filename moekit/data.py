"""A corpus to batches: packing to fixed length, order, and the loader.

Every step is a function of the last, and nothing depends on the number of ranks::

    samples = pack(corpus, seq_len=256)
    loader = Loader(samples, batch_size=32, seed=0, mesh=mesh)
    batch = count_tokens(next(loader), mesh=mesh)

Axes: b sequences, s positions.
"""

import copy
import threading
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch.distributed.device_mesh import DeviceMesh
from torchdata import nodes

from moekit.batch import Batch, make_batch
from moekit.context import check_length, split_context
from moekit.corpora import Corpus
from moekit.mesh import data_rank


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Rows of ``seq_len + 1`` tokens: row i holds [starts[i], stops[i]) of the corpus, then padding."""

    corpus: Corpus
    seq_len: int
    pad: bool
    starts: Sequence[int] | Int[np.ndarray, " n"]
    stops: Sequence[int] | Int[np.ndarray, " n"]

    def __len__(self) -> int:
        return len(self.starts)

    def row(self, i: int) -> Int[np.ndarray, "2 n"]:
        """Return the tokens and documents of row ``i``; for -1 nothing but padding (token 0, document -1)."""
        row = np.stack([np.zeros(self.seq_len + 1, np.int64), np.full(self.seq_len + 1, -1)])
        if i >= 0:
            tokens, documents = self.corpus.read(int(self.starts[i]), int(self.stops[i]))
            row[:, : len(tokens)] = tokens, documents
        return row


def pack(corpus: Corpus, seq_len: int, *, pad: bool = False) -> Samples:
    """Cut a corpus into rows of ``seq_len`` positions, so that each token after the first is a target once.

    Pure. By default windows of ``seq_len + 1`` tokens at a stride of ``seq_len``, whatever documents they
    hold; only the last may end in padding. Nothing is read before a row is asked for.

    Parameters
    ----------
    corpus : Corpus
        At least ``seq_len + 1`` tokens, unless ``pad``.
    seq_len : int
        Positions in a row.
    pad : bool
        One document a row, or a piece of one that is longer, and padding behind it. Reads the corpus once.

    Raises
    ------
    ValueError
        If there is not one sample.
    """
    if seq_len < 1 or (len(corpus) <= seq_len and not pad):
        raise ValueError(
            f"pack needs seq_len >= 1 and a corpus of seq_len + 1 tokens, got {seq_len=} and {len(corpus)} "
            "tokens; add text, shorten seq_len, or pass pad=True"
        )
    if pad:
        ends = corpus.document_ends()
        begins = np.concatenate([[0], ends[:-1]])
        n = -(-(ends - begins - 1) // seq_len)
        piece = np.arange(n.sum()) - np.repeat(n.cumsum() - n, n)
        starts = np.repeat(begins, n) + seq_len * piece
        stops = np.minimum(starts + seq_len + 1, np.repeat(ends, n))
        if not len(starts):
            raise ValueError(f"pack needs a document of two tokens, got {len(ends)} documents of one")
    else:
        starts = range(0, len(corpus) - 1, seq_len)
        stops = range(seq_len + 1, starts[-1] + seq_len + 2, seq_len)
    return Samples(corpus=corpus, seq_len=seq_len, pad=pad, starts=starts, stops=stops)


def sample_order(n: int, *, seed: int, epoch: int) -> Int[np.ndarray, " n"]:
    """Return the order of ``n`` samples in an epoch: pure, and the same with every version of numpy."""
    return np.random.RandomState([seed, epoch]).permutation(n)  # of numpy's, only this stream is frozen


class _Rows(nodes.BaseNode[Batch]):
    """The batches of one rank, made when asked for; the state is a place in the endless stream of samples."""

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        rows: slice,
        epochs: int | None,
        seed: int,
        shuffle: bool,
        context: DeviceMesh | None,
        n_ranks: int | None,
    ):
        super().__init__()
        self.samples, self.batch_size, self.rows = samples, batch_size, rows
        self.context, self.n_ranks = context, n_ranks
        self.end = None if epochs is None else epochs * len(samples)
        self.order = lru_cache(maxsize=2)(
            lambda epoch: (
                sample_order(len(samples), seed=seed, epoch=epoch) if shuffle else range(len(samples))
            )
        )
        self.identity = {"corpus": samples.corpus.fingerprint, "seq_len": samples.seq_len, "pad": samples.pad}
        self.identity |= {"seed": seed, "shuffle": shuffle}

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        super().reset(initial_state)
        state = self.identity | {"epoch": 0, "sample": 0} if initial_state is None else initial_state
        got = {key: state.get(key) for key in (*self.identity, "epoch", "sample")}
        wrong = {key: x for key, x in got.items() if x is None or x != self.identity.get(key, x)}
        if wrong:
            raise ValueError(
                f"Loader needs a state of the same corpus, packing and order, got {wrong} where this loader "
                f"has {self.identity}; build the loader as it was, or start without the state"
            )
        self.position = int(state["epoch"]) * len(self.samples) + int(state["sample"])

    def get_state(self) -> dict[str, Any]:
        epoch, sample = divmod(self.position, len(self.samples))
        return self.identity | {"epoch": epoch, "sample": sample}

    def next(self) -> Batch:
        if self.end is not None and self.position >= self.end:
            raise StopIteration
        ids = []
        for position in range(self.position, self.position + self.batch_size)[self.rows]:
            epoch, i = divmod(position, len(self.samples))
            ids.append(-1 if self.end is not None and position >= self.end else int(self.order(epoch)[i]))
        self.position += self.batch_size
        rows = np.stack([self.samples.row(i) for i in [-1, *ids]])[1:]  # so that no rows are stacked, too
        tokens, documents = torch.from_numpy(rows).unbind(1)
        batch = make_batch(tokens, documents, torch.tensor(ids, dtype=torch.int64))
        return replace(split_context(batch, context=self.context), n_ranks=self.n_ranks)


class Loader(nodes.Prefetcher[Batch]):
    """Iterator over the batches of this rank, in an order that is a function of (seed, epoch).

    The samples are one endless stream: those of epoch 0 in `sample_order`, those of epoch 1, and so on. A
    global batch is the next ``batch_size`` of them; one may span two epochs, and no sample is dropped. Each
    rank takes a contiguous, equal slice of it, in the order of `data_rank`. Batches are made ahead
    in a thread, on the CPU. Not collective.

    ``state_dict()`` is the place of the next sample {"epoch", "sample"} and what it is a place in {"corpus",
    "seq_len", "pad", "seed", "shuffle"}: numbers and strings, equal on all ranks. After
    ``load_state_dict(state)`` the next sample is exactly that one, on any number of ranks and with any
    ``batch_size``.

    Parameters
    ----------
    samples : Samples
        From `pack`.
    batch_size : int
        Rows of the global batch.
    seed : int
        From 0 to 2**32 - 1.
    shuffle : bool
        False: the order of the corpus, in every epoch.
    epochs : int, optional
        How many make a pass, whose last batch is filled up with padding (``sample_ids`` -1); the next
        iteration is another pass. None: never stop.
    uneven : bool
        Where the ranks do not divide ``batch_size``, let some have one row more than others, or none.
    prefetch : int
        Batches made ahead.
    part : tuple of int, optional
        (rank, number of ranks), in place of a mesh.
    context : DeviceMesh, optional
        From `moekit.mesh.context_mesh`: its ranks count as one, and each gets its part of every row, as
        `moekit.context.split_context` says.
    mesh : DeviceMesh, optional
        The ranks of its axes (edp, ep) share the global batch; None is one process.

    Raises
    ------
    ValueError
        If the ranks do not divide ``batch_size``, the context does not divide the rows, or an argument is out
        of range; from ``load_state_dict`` if the state is of another corpus, packing or order.
    """

    def __init__(
        self,
        samples: Samples,
        batch_size: int,
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
        uneven: bool = False,
        prefetch: int = 2,
        part: tuple[int, int] | None = None,
        context: DeviceMesh | None = None,
        mesh: DeviceMesh | None = None,
    ):
        if part is not None and mesh is not None:
            raise ValueError(f"Loader needs part or mesh, got {part=} and {mesh=}; leave one out")
        if context is not None:
            if part is None and mesh is None:
                raise ValueError("Loader needs the mesh of its context, got None; pass mesh, or part")
            check_length("Loader", samples.seq_len, context)
        rank, n_ranks = data_rank(mesh, context) if part is None else part
        if (
            min(batch_size, prefetch, 1 if epochs is None else epochs) < 1
            or not 0 <= seed < 2**32
            or not 0 <= rank < n_ranks
        ):
            raise ValueError(
                "Loader needs batch_size, prefetch and epochs >= 1, 0 <= seed < 2**32 and 0 <= rank < ranks, "
                f"got {batch_size=}, {prefetch=}, {epochs=}, {seed=} and rank {rank} of {n_ranks}"
            )
        if batch_size % n_ranks and not uneven:
            raise ValueError(
                f"Loader needs a batch_size that its ranks divide, got {batch_size=} and {n_ranks} ranks; "
                f"take {-(-batch_size // n_ranks) * n_ranks}, or pass uneven=True"
            )
        rows = slice(rank * batch_size // n_ranks, (rank + 1) * batch_size // n_ranks)
        share = None if part else n_ranks * (1 if context is None else context.size())
        self._samples = samples
        super().__init__(
            _Rows(samples, batch_size, rows, epochs, seed, shuffle, context, share), prefetch_factor=prefetch
        )

    def reset(self, initial_state: dict[str, Any] | None = None) -> None:
        """Go to the start, or to the place of a ``state_dict()``."""
        self.source = copy.copy(self.source)  # the thread of before may still move the old one
        snapshot = (
            initial_state if initial_state is None else dict(snapshot=initial_state, steps_since_snapshot=0)
        )
        super().reset(snapshot)
        assert self._it is not None
        weakref.finalize(self._it, _end, self._it._stop_event, self._it._thread)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from the place of a ``state_dict()``."""
        self.reset(state)

    def get_state(self) -> dict[str, Any]:
        """Return the place of the next sample, whatever was made ahead."""
        return super().get_state()["snapshot"]

    @property
    def n_tokens(self) -> int:
        """Positions of all batches of this pass so far, padding too, of all ranks and before a resume."""
        state = self.state_dict()
        return (state["epoch"] * len(self._samples) + state["sample"]) * self._samples.seq_len

    def next(self) -> Batch:
        """Return the next batch; at the end of a pass go back to the start."""
        try:
            return super().next()
        except StopIteration:
            self.reset()
            raise


def _end(stop: threading.Event, thread: threading.Thread) -> None:
    """Stop the thread of a loader, also before the interpreter ends: it aborts a thread within torch."""
    stop.set()
    thread.join(timeout=1.0)
