"""What a rank of a layout holds, estimated from sizes alone."""

import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import torch

from moekit._deepep import buffer_bytes
from moekit._rowwise import buffers_of_rank, rows_of_rank
from moekit.config import ModelConfig, Stage
from moekit.kernels.attention import D_HEADS
from moekit.losses import tokens_per_chunk
from moekit.params import param_shapes
from moekit.plan import split_layers
from moekit.schedules import Schedule, interleaved, one_f_one_b
from moekit.symmetric import byte_offsets

CHUNK = 2**29  # logits that moekit.losses.cross_entropy holds at most
BUCKET = 2**28  # bytes that moekit.shard_optimizer reduces at once


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How a model and its global batch are spread over GPUs, and what a step keeps.

    A value and nothing more: no process group is needed to make or check one. Fields are named as the options
    of the functions that they go to.
    """

    pp: int = 1  # ranks that a batch passes one after the other
    n_per_rank: int = 1  # stages of each; with more than one the schedule is interleaved 1F1B
    edp: int | None = None  # copies of the experts; None: what the GPUs leave
    ep: int = 1  # ranks that share one copy of the experts
    cp: int = 1  # ranks that share a row
    n_microbatches: int = 1  # slices of a rank's part of the batch
    batch_size: int  # sequences of the global batch
    seq_len: int  # tokens of a sequence
    recompute: str | Sequence[str] = "none"  # as for moekit.remat
    reduce: Literal["step", "micro_batch"] = "step"  # as for moekit.shard_optimizer
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of parameters and activations
    via: Literal["all_to_all", "rowwise", "deepep"] | None = None  # as for moekit.dispatch
    capacity_factor: float | None = None  # as for moekit.rowwise
    overlap: Literal["none", "two_batch", "auto"] = "none"  # as for moekit.moe; "auto": of both
    imbalance: float = 1.0  # rows that the fullest of the ep ranks gets, by their mean; see memory_of
    attention_via: Literal["all_to_all", "all_gather"] | None = None  # as for moekit.model.forward
    optimize: bool = True  # False: forward and backward alone

    def __post_init__(self) -> None:
        parts = [self.recompute] if isinstance(self.recompute, str) else self.recompute
        known = ("none", "block") if isinstance(self.recompute, str) else ("attention", "ffn")
        for name, given, allowed in (
            ("recompute", parts, known),
            ("reduce", [self.reduce], ("step", "micro_batch")),
            ("dtype", [self.dtype], ("bfloat16", "float32")),
            ("via", [self.via], (None, "all_to_all", "rowwise", "deepep")),
            ("attention_via", [self.attention_via], (None, "all_to_all", "all_gather")),
            ("overlap", [self.overlap], ("none", "two_batch", "auto")),
        ):
            if unknown := [x for x in given if x not in allowed]:
                raise ValueError(f"Layout needs {name} in {allowed}, got {unknown[0]!r}")

    @classmethod
    def of(cls, config: Any, **changes: Any) -> "Layout":
        """Return a layout of the fields that a recipe's configuration has by the same names."""
        known = {field.name: getattr(config, field.name, None) for field in fields(cls)}
        known = {name: value for name, value in known.items() if value is not None}
        return cls(**(known | changes))

    def on(self, n_gpus: int) -> "Layout":
        """Return the layout with the ``edp`` that a number of GPUs leaves, where it is None."""
        edp = max(n_gpus // max(self.pp * self.ep, 1), 1) if self.edp is None else self.edp
        return replace(self, edp=edp)

    def short(self) -> "Layout":
        """Return the layout of a step of at most 2 * pp micro-batches of as many rows: more hold no more."""
        m = min(self.n_microbatches, 2 * self.pp)
        return replace(self, n_microbatches=m, batch_size=self.batch_size // self.n_microbatches * m)

    @property
    def n_stages(self) -> int:
        """Stages over all ranks."""
        return self.pp * self.n_per_rank

    @property
    def n_shares(self) -> int:
        """Parts of the global batch: ranks of a stage, of which those that share rows count as one."""
        return max((self.edp or 1) * self.ep // max(self.cp, 1), 1)

    @property
    def rows(self) -> int:
        """Sequences of a micro-batch on a rank."""
        return max(self.batch_size // (self.n_shares * max(self.n_microbatches, 1)), 1)


def schedule_of(layout: Layout, *, n_microbatches: int | None = None) -> Schedule:
    """Return the order of a layout's forwards and backwards: 1F1B, interleaved with several stages a rank."""
    m = layout.n_microbatches if n_microbatches is None else n_microbatches
    if layout.n_per_rank == 1:
        return one_f_one_b(layout.pp, m)
    return interleaved(layout.pp, m, layout.n_per_rank)


def memory_of(config: ModelConfig, layout: Layout) -> list[dict[str, int]]:
    """Estimate the bytes that a rank of each place of the pipeline holds at its fullest, by kind.

    From sizes alone, where :func:`moekit.dryrun.dry_run` executes the step: within 4 % of that for the
    presets at their own depth, on 8 to 512 ranks, and within 8 % for shallow models with a large vocabulary.
    The fullest moment is one of the backward's, or the optimizer's update. Counted are

    - *parameters*, and float32 *gradients* of all of them (``reduce="step"``), or of this rank's part;
    - *optimizer state*: float32 master and two moments, over the copies of a leaf: ``edp`` of the experts,
      ``edp * ep`` of the rest;
    - *activations*: what the forward keeps of every micro-batch in flight under the schedule, and of the one
      whose backward runs; with ``recompute="block"`` the input of each block;
    - *workspace*: what that moment takes beside them: a block made again and its gradients, the head's chunk
      of logits, a bucket on its way;
    - with ``via="rowwise"`` or ``"deepep"``, *symmetric buffers*; DeepEP's as it sizes them on hosts of eight
      GPUs, without the 17 MB or so that it works in.

    A rank's experts receive ``top_k * imbalance`` times as many rows as it has tokens, in every layer: 1 is
    balanced routing, and what a recorded step had is ``evenness(rank_load(rows, ep)).max_over_mean.max()`` of
    :mod:`moekit.balance`, for the ``rows`` (m, edp, l, E) of :func:`moekit.balance.recorded_rows`, summed
    over each ep group. With ``via="rowwise"`` activations have room for as many as may come. Not counted are
    the device's context, buffers of NCCL and fragmentation.

    Parameters
    ----------
    config : ModelConfig
        The model; split into stages by :func:`moekit.plan.split_layers`.
    layout : Layout
        One that :func:`check_layout` passes; with ``edp``.

    Returns
    -------
    list of dict
        ``[place on pp]["parameters" | "optimizer state" | "gradients" | "activations" | "workspace" |
        "symmetric buffers"]``.

    Examples
    --------
    >>> from moekit.layouts import Layout, memory_of
    >>> layout = Layout(ep=8, batch_size=8, seq_len=8192, recompute="block")
    >>> [rank] = memory_of(mk.preset("bench-8L"), layout)
    >>> rank["optimizer state"] == 12 * 46_862_510_080 // 8
    True
    """
    stages = _stages(config, layout.n_stages, layout.seq_len)
    # Warm-up and a period of the schedule repeat; four rounds show its fullest moment.
    schedule = _short_schedule(layout.pp, layout.n_per_rank, min(layout.n_microbatches, 4 * layout.pp))
    return [
        _rank(config, layout, {i: stages[i] for i in schedule.stages_of(rank)}, schedule.ops[rank])
        for rank in range(layout.pp)
    ]


@functools.lru_cache(maxsize=256)
def _stages(config: ModelConfig, n_stages: int, seq_len: int) -> list[Stage]:
    return split_layers(config, n_stages, seq_len=seq_len)


@functools.lru_cache(maxsize=256)
def _short_schedule(pp: int, n_per_rank: int, n_microbatches: int) -> Schedule:
    layout = Layout(pp=pp, n_per_rank=n_per_rank, batch_size=1, seq_len=1)
    return schedule_of(layout, n_microbatches=n_microbatches)


class _Moment(NamedTuple):
    """Bytes at a moment, beside parameters and optimizer state."""

    activations: int = 0
    workspace: int = 0
    gradients: int = 0

    def total(self) -> int:
        return sum(self)


def _rank(config: ModelConfig, layout: Layout, stages: dict[int, Stage], ops) -> dict[str, int]:
    """Return what a rank with these stages and operations holds at its fullest."""
    size = 2 if layout.dtype == "bfloat16" else 4
    leaves = list(_leaves(layout, _shapes(config, *stages.values())))
    owned = sum(leaf.owned for leaf in leaves)
    sums = 4 * (owned if layout.reduce == "micro_batch" else sum(leaf.held for leaf in leaves))
    first = layout.n_microbatches == 1  # no sums yet while the only backward runs
    walks = {i: _Walk(config, layout, stage) for i, stage in stages.items()}

    fullest, held = _update(layout, leaves, sums, size) if layout.optimize else _Moment(gradients=sums), 0
    moments = {i: list(walk.backward(grow=first)) for i, walk in walks.items()}
    for op in ops:
        if op.kind == "F":
            held += walks[op.stage].kept
            continue
        held -= walks[op.stage].kept
        top = max(moments[op.stage], key=_Moment.total)
        now = _Moment(held + top.activations, top.workspace, top.gradients + (0 if first else sums))
        fullest = max(fullest, now, key=_Moment.total)
    return {
        "parameters": sum(leaf.held * (4 if leaf.is_router else size) for leaf in leaves),
        "optimizer state": 12 * owned * layout.optimize,
        "gradients": fullest.gradients,
        "activations": fullest.activations,
        "workspace": fullest.workspace,
    } | (
        {"symmetric buffers": _buffers(config, layout, stages)} if layout.via in ("rowwise", "deepep") else {}
    )


def _buffers(config: ModelConfig, layout: Layout, stages: dict[int, Stage]) -> int:
    """Return the bytes that ranks write to and read from each other's memory, of rowwise or deepep."""
    if not any(config.is_moe(i) for stage in stages.values() for i in stage.layers):
        return 0
    n_parts = {"none": [1], "two_batch": [2], "auto": [1, 2]}[layout.overlap]
    if layout.via == "deepep":
        tokens = layout.rows * layout.seq_len // layout.cp
        return sum(buffer_bytes(layout.ep, -(-tokens // n), config.d_model, config.top_k) for n in n_parts)
    dtype = torch.bfloat16 if layout.dtype == "bfloat16" else torch.float32
    rows = [-(-rows_for_experts(config, layout) // n) for n in n_parts]
    sizes = (buffers_of_rank(layout.ep, n, config.d_model, config.n_experts, dtype) for n in rows)
    return sum(byte_offsets(x)[1] for x in sizes)


def rows_for_experts(config: ModelConfig, layout: Layout) -> int:
    """Return the rows that activations of a rank's experts have room for."""
    tokens = layout.rows * layout.seq_len // layout.cp
    if layout.via != "rowwise":
        return math.ceil(tokens * config.top_k * (layout.imbalance if layout.ep > 1 else 1))
    return rows_of_rank(layout.ep, tokens, config.n_experts, config.top_k, layout.capacity_factor)


@functools.lru_cache(maxsize=1024)
def _shapes(config: ModelConfig, *stages: Stage) -> dict[str, tuple[int, ...]]:
    return param_shapes(config, *stages)


class _Leaf(NamedTuple):
    held: int  # elements of the parameter on a rank
    owned: int  # of its master
    is_expert: bool
    is_contiguous: bool  # the parts that ranks own of it
    is_router: bool


def _leaves(layout: Layout, shapes: dict[str, tuple[int, ...]]) -> Iterator[_Leaf]:
    edp = layout.edp or 1
    for name, shape in shapes.items():
        expert = ".experts." in name
        held = math.prod(shape) // (layout.ep if expert else 1)
        owned = -(-held // (edp if expert else edp * layout.ep))
        contiguous = not expert or shape[0] == layout.ep  # of several experts each is divided
        yield _Leaf(held, owned, expert, contiguous, name.endswith(".router"))


def _update(layout: Layout, leaves: list[_Leaf], sums: int, size: int) -> _Moment:
    """Return the update's moment: sums, and two buckets on their way.

    First of gradients, with the reduced parts of all, then of parameters. A gradient that fills a bucket is
    sent from where it is, if its parts lie one after the other.
    """
    edp = layout.edp or 1
    travel = [leaf for leaf in leaves if edp > 1 or (layout.ep > 1 and not leaf.is_expert)]
    workspace = _two([max(size * leaf.held, BUCKET) for leaf in travel])
    if layout.reduce == "step":
        copies = [
            0 if leaf.is_contiguous and 4 * leaf.held >= BUCKET else max(4 * leaf.held, BUCKET)
            for leaf in travel
        ]
        workspace = max(workspace, 4 * sum(leaf.owned for leaf in travel) + _two(copies))
    return _Moment(0, workspace, sums)


def _two(buckets: list[int]) -> int:
    """Return the most bytes of two neighbours."""
    return max(map(sum, pairwise(buckets)), default=sum(buckets))


class _Layer(NamedTuple):
    kept: int  # bytes that its forward keeps
    work: tuple[int, ...]  # what moments of its backward take beside them
    params: int  # elements on a rank


class _Walk:
    """What the forward of a stage keeps for one micro-batch, and the moments of its backward.

    As the autograd functions of CUDA do: ``Experts``, ``_FeedForward``, ``_AttentionOfQKV``, ``_RMSNorm``,
    ``_CrossEntropy``.
    """

    def __init__(self, config: ModelConfig, layout: Layout, stage: Stage):
        self.config, self.layout, self.stage = config, layout, stage
        self.size = 2 if layout.dtype == "bfloat16" else 4
        self.tokens = layout.rows * layout.seq_len // layout.cp
        self.stream = self.tokens * config.d_model * self.size  # bytes of the residual stream
        if self.has_kernel and self.over_heads:
            mask = 8 * layout.rows * layout.seq_len  # where documents begin and end
        else:
            rows = layout.seq_len if self.over_heads else layout.seq_len // layout.cp
            mask = layout.rows * rows * layout.seq_len * self.size
        rope = 4 * config.d_head * self.tokens // layout.rows
        self.around = mask + rope + (0 if stage.heads else self.stream)  # of a forward; its output
        if stage.embeds and config.normalize_embedding:
            self.around += self.tokens * self.norm(config.d_model)
        self.head = config.d_model * config.vocab_size if stage.heads else 0
        kinds = {config.is_moe(i): i for i in stage.layers}
        of_kind = {moe: self.layer(i) for moe, i in kinds.items()}
        self.layers = [of_kind[config.is_moe(i)] for i in stage.layers]
        # The last norm's input, and the gradients that the head's forward takes along.
        self.kept_head = 4 * self.head + self.stream * (2 if stage.heads else 0)
        self.kept = self.around + sum(layer.kept for layer in self.layers) + self.kept_head

    @property
    def has_kernel(self) -> bool:
        """Say whether attention on CUDA runs the kernels of `moekit.kernels.attention`."""
        return self.size == 2 and self.config.d_head in D_HEADS

    @property
    def over_heads(self) -> bool:
        layout = self.layout
        if layout.attention_via is not None:
            return layout.attention_via == "all_to_all"
        return self.config.n_heads % layout.cp == 0

    def backward(self, *, grow: bool) -> Iterator[_Moment]:
        """Walk through the backward, last layer first; ``grow``: its gradients' sums come into being."""
        kept, grown = self.kept, 0
        if self.stage.heads:
            vocab = self.config.vocab_size
            logits = tokens_per_chunk(self.tokens, vocab, CHUNK) * vocab  # in its forward
            yield _Moment(kept, self.size * max(logits, self.head) + self.stream, grown)
            kept -= self.kept_head
            grown += 4 * self.head * grow
        for layer in reversed(self.layers):
            for work in layer.work:
                yield _Moment(kept, work, grown)
            kept -= layer.kept
            grown += 4 * layer.params * grow
        if self.stage.embeds:
            table = self.config.d_model * self.config.vocab_size
            yield _Moment(kept, self.size * table + self.stream, grown + 4 * table * grow)

    def layer(self, i: int) -> "_Layer":
        shapes = _shapes(self.config, Stage(layers=range(i, i + 1), embeds=False, heads=False))
        params = sum(leaf.held for leaf in _leaves(self.layout, shapes))
        kept = self.layer_kept(i)
        again = self.attention_saved() + self.ffn_saved(i) - kept  # of both parts where one is recomputed
        return _Layer(kept, tuple(again + work for work in self.layer_work(i)), params)

    def layer_kept(self, i: int) -> int:
        """Return the bytes that a layer's forward keeps."""
        recompute = self.layout.recompute
        routing = self.routing() if self.config.is_moe(i) else 0
        if recompute == "none":
            return self.attention_saved() + self.ffn_saved(i)
        if recompute == "block":
            return self.stream + routing
        parts = {"attention": self.attention_saved(), "ffn": self.ffn_saved(i)}
        return sum(
            self.stream + routing * (name == "ffn") if name in recompute else saved
            for name, saved in parts.items()
        )

    def norm(self, width: int) -> int:
        """Return the bytes a token that a norm's fused kernel keeps: its input."""
        return width * self.size

    def part_saved(self, inside: int) -> int:
        """Return the bytes that the norms around a part keep, its input and the inside; of all tokens."""
        c = self.config
        norms = (c.norm in ("pre", "peri")) + (c.norm in ("post", "peri"))
        return self.tokens * (norms * self.norm(c.d_model) + self.size * c.d_model + inside)

    def attention_saved(self) -> int:
        c, size = self.config, self.size
        q, kv = c.n_heads * c.d_head, c.n_kv_heads * c.d_head
        cp = self.layout.cp
        qkv, lse = q + 2 * kv, 4 * c.n_heads * self.has_kernel
        if cp == 1:
            heads = 0 if self.has_kernel and c.qk_norm != "full" else q + kv  # queries and keys once turned
            inside = size * (qkv + heads + q) + lse
        elif self.over_heads:  # all three as received, the output before and after its exchange
            inside = size * (qkv + 3 * q + 2 * kv * (cp // math.gcd(cp, c.n_kv_heads))) + lse
        else:
            inside = size * (qkv + 3 * q + 2 * kv * cp)
        return self.part_saved(inside)

    def ffn_saved(self, i: int) -> int:
        c = self.config
        if not c.is_moe(i):
            return self.part_saved(self.size * 2 * c.d_dense)
        return self.part_saved(self.size * 2 * c.d_shared) + self.experts_saved() + self.routing()

    @property
    def copies_rows(self) -> bool:
        """Say whether rows that travel are kept, for experts and for combine."""
        return self.layout.ep > 1 and (self.layout.via != "rowwise" or self.layout.overlap != "none")

    def experts_saved(self) -> int:
        """Return the bytes that experts keep: their first product, and rows where they are copied.

        Those are the rows that came, and for combine those that came home.
        """
        c, came = self.config, rows_for_experts(self.config, self.layout)
        rows = c.d_model * (came + self.tokens * c.top_k) if self.copies_rows else 0
        return self.size * (came * 2 * c.d_expert + rows)

    def routing(self) -> int:
        """Return the bytes of logits, scores and loads, of choices, weights and places."""
        return self.tokens * (12 * self.config.n_experts + 32 * self.config.top_k)

    def layer_work(self, i: int) -> Iterator[int]:
        """Return what moments of a layer's backward take beside what its forward has saved.

        Always the gradient of the stream; that of a norm's output takes the place of the norm's input. The
        first product becomes its gradient, and that of hidden rows the hidden rows: both are counted once.
        """
        c, size, stream = self.config, self.size, self.stream
        moe = c.is_moe(i)
        d_hidden, held = (c.d_expert, c.n_experts // self.layout.ep) if moe else (c.d_dense, 1)
        n_rows = rows_for_experts(c, self.layout) if moe else self.tokens
        rows, hidden = size * n_rows * c.d_model, size * n_rows * d_hidden
        if moe and self.layout.via == "rowwise" and not self.copies_rows:
            rows = 0  # they are in its buffers
        weight = size * held * c.d_model * d_hidden  # of down; gate_up has two
        travels = moe and self.copies_rows
        # Hidden rows and down's gradient; what travels has taken the place of combine's rows.
        yield stream + hidden + weight + (rows if moe and not travels else 0)
        # All weights' gradients, and rows in expert order or their gradient.
        yield stream + rows + 3 * weight
        if travels:  # in the forward: what experts return, in their order and in that of the ranks
            yield 2 * stream + 2 * rows
        if self.layout.reduce == "micro_batch" or self.layout.n_microbatches == 1:
            # gate_up's gradient in float32, when all else of the part is gone.
            saved = self.experts_saved() if moe else 2 * hidden
            yield 2 * stream + (3 * weight + 4 * (2 * weight // size)) - saved
