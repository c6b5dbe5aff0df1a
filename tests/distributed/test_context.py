"""Rows split over several ranks: attention, losses and gradients are those of one process."""

import functools
import itertools
import math
from dataclasses import replace

import jaxtyping
import numpy as np
import pytest
import torch
import torch.distributed as dist
from pages import blocks
from reference import as_rank, draw, refuses
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._pytree import tree_map_only

import moekit as mk
from moekit.balance import load_balancing_loss
from moekit.context import attend, attend_over_heads, attend_over_keys, positions_of, split_context
from moekit.corpora import corpus_of_tokens
from moekit.data import Loader, pack
from moekit.kernels.attention import find_documents
from moekit.mesh import context_mesh, data_rank
from moekit.testing import check_gradients, ranks

from .test_populations import BY_HAND, OF_RANK, routing_of
from .tiny import batch_of, loss_of, model, rows_of

S = 48  # so that 4, 6, 8 and 16 chunks divide a row
LENGTHS = [  # of the documents of each row of S + 1 tokens, the rest of which is padding
    *([49], [13, 20, 16], [1, 2, 3, 5, 8, 13, 17], [25, 12], [3, 40], [6] * 8, [], [2, 23, 24]),
]
BATCH = batch_of(
    [[i for i, n in enumerate(row) for _ in range(n)] + [-1] * (S + 1 - sum(row)) for row in LENGTHS]
)
BIASES = torch.linspace(-0.4, 0.4, 16, dtype=torch.float64).view(2, 8)
MODELS = {  # name: (changes of the configuration, options of the loss)
    "grouped queries, QK-norm of heads": ({}, {}),
    "full-width QK-norm, post-norm, biases": (
        dict(n_dense_layers=0, d_dense=0, score="sigmoid", norm="post", qk_norm="full", tied_head=True),
        dict(biases=BIASES),
    ),
    "one key head, random assignment": (
        dict(n_kv_heads=1, qk_norm="none"),
        dict(assignment="random", key=mk.random.make_key(3)),
    ),
    "heads as many as key heads, balance over the batch": (
        dict(n_kv_heads=4, balance_population="batch", balance_weight=3.0),
        {},
    ),
    "six heads on three key heads": (dict(n_heads=6, n_kv_heads=3), {}),
}
KINDS = ("all_to_all", "all_gather")
MESHES = [(edp, ep) for edp, ep in itertools.product((1, 2, 4, 8), repeat=2) if 1 < edp * ep <= 8]
LAYOUTS = [
    dict(edp=edp, ep=ep, cp=cp, accumulate=accumulate, recompute=recompute, attention_via=kind)
    for (edp, ep), cp, accumulate, recompute, kind in itertools.product(
        MESHES, (2, 4, 8), (1, 2), ("none", "block", ("attention",)), KINDS
    )
    if edp * ep % cp == 0
]


def loss_and_params(name):
    changes, options = MODELS[name]
    config, params = model(max_seq_len=S, **changes)
    return loss_of(config, **options), params


def layouts_of(name):
    n_heads, whole = MODELS[name][0].get("n_heads", 4), "batch" in name
    return [
        layout
        for layout in LAYOUTS
        if (layout["attention_via"] == "all_gather" or n_heads % layout["cp"] == 0)
        and not (whole and layout["accumulate"] > 1)
    ]


# --- Gradients ------------------------------------------------------------------------


@pytest.mark.parametrize("i", range(len(MODELS)), ids=list(MODELS))
def test_gradients_of_split_rows_are_those_of_one_process(i):
    name = list(MODELS)[i]
    layouts = layouts_of(name)
    check_gradients(*loss_and_params(name), BATCH, layouts[23 * i % 67 :: 67])


def test_a_context_may_lie_across_ep_groups_and_have_unequal_rows_or_none():
    layouts = [
        dict(edp=3, ep=2, cp=3, rows=[6, 2]),  # {0, 1, 2} has all of one ep group and half of the next
        dict(edp=2, ep=2, cp=2, rows=[8, 0], accumulate=2, recompute="block"),
        dict(edp=2, ep=4, cp=4, rows=[2, 6], accumulate=2),
        dict(ep=8, cp=8, recompute=("attention", "ffn")),  # 4 heads: by keys
    ]
    check_gradients(*loss_and_params("grouped queries, QK-norm of heads"), BATCH, layouts)


@pytest.mark.soak
@pytest.mark.parametrize("name", MODELS)
def test_gradients_of_split_rows_are_those_of_one_process_on_all_layouts(name):
    check_gradients(*loss_and_params(name), BATCH, layouts_of(name))


def measure(edp, ep, cp, n_micro_batches):
    """Return what a step reports, of rows that are split."""
    config, params = model(max_seq_len=S)
    mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu") if edp * ep > 1 else None
    context = context_mesh(mesh, cp)
    rank, n = data_rank(mesh, context)
    rows = rows_of(BATCH, rank * 8 // n, (rank + 1) * 8 // n)
    batch = mk.count_tokens(split_context(rows, context=context), mesh=mesh)
    loss = lambda *args: mk.next_token_loss(*args, config=config, context=context, mesh=mesh)  # noqa: E731
    step = mk.accumulate(mk.value_and_grad(loss, has_aux=True), n_micro_batches)
    (value, stats), _ = mk.data_parallel(step, mesh=mesh)(mk.mesh.distribute(params, mesh), batch)
    return dict(stats, loss=value, totals=torch.stack([batch.n_targets, batch.n_tokens]))


def test_counts_and_every_term_of_the_loss_do_not_depend_on_how_rows_are_split():
    want = measure(1, 1, 1, 1)
    assert torch.equal(want["totals"], torch.stack([BATCH.n_targets, BATCH.n_tokens]))
    for edp, ep, cp, n_micro_batches in [(1, 4, 2, 4), (2, 2, 4, 2)]:
        for got in ranks(edp * ep)(measure, edp, ep, cp, n_micro_batches):
            assert all(torch.equal(got[name], want[name]) for name in ("counts", "totals", "n_targets"))
            for name in want.keys() - {"fullest"}:  # that of the fullest rank does
                torch.testing.assert_close(got[name], want[name], rtol=1e-10, atol=1e-10, msg=name)


def test_documents_across_ranks_are_counted_as_one():
    def share(n_context):
        mesh = mk.make_mesh(edp=2, device="cpu")
        context = context_mesh(mesh, n_context)
        ids, scores = OF_RANK[dist.get_rank()]
        # One more token, which is padding, and on rank 1 one more document, which rank 0 does not have.
        routing = routing_of([0, *ids, 1], [[0.5, 0.5], *scores, [0.5, 0.5]])
        documents = torch.tensor([-1, 5, 5, 7 * dist.get_rank() - (not dist.get_rank())])
        options = dict(documents=documents, mask=documents >= 0, n_tokens=torch.tensor(4), context=context)
        return load_balancing_loss(routing, population="document", **options)

    (of_both, _) = BY_HAND["micro_batch"]
    alone = 2 * 0.5 / 4  # f = (0, 1) and P = (1/2, 1/2), of one of 4 tokens
    got = ranks(2)(share, 2)
    assert math.isclose(got[0], of_both)
    assert math.isclose(got[1], BY_HAND["micro_batch"][1] + alone)


def test_parity_goes_red_where_documents_are_counted_on_each_rank():
    loss, params = loss_and_params("grouped queries, QK-norm of heads")

    def by_rank(params, batch, *, context=None, mesh, **options):
        counted = load_balancing_loss
        if context is not None:
            mk.balance.load_balancing_loss = lambda *args, context, documents, **more: counted(
                *args, documents=documents % batch.tokens.shape[1], **more
            )
        options |= {} if context is None else dict(context=context)
        return loss(params, batch, mesh=mesh, **options)

    one_row = tree_map_only(torch.Tensor, lambda x: x[:1] if x.ndim else x, BATCH)
    with pytest.raises(AssertionError, match=r"gradients differ by more than 1e-10: loss on .*router"):
        check_gradients(by_rank, params, mk.count_tokens(one_row), [dict(edp=2, cp=2)])


# --- Attention ------------------------------------------------------------------------


def heads_of(n, m, b, s):
    return [draw(b, heads, s, 4, seed=i) for i, heads in enumerate((n, m, m))]


def attended(attend, q, k, v, mask):
    leaves = [z.detach().clone().requires_grad_() for z in (q, k, v)]
    out = attend(*leaves, mask)
    return [out.detach(), *torch.autograd.grad(out, leaves, out.detach().sin())]


@pytest.mark.parametrize(
    ("cp", "n", "m", "b"),
    [(2, 4, 4, 2), (2, 6, 3, 1), (2, 4, 1, 0), (3, 6, 2, 2), (4, 8, 2, 1), (4, 3, 3, 2)],
)
def test_attention_over_a_context_is_attention_to_the_whole_rows(cp, n, m, b):
    s = 6 * cp
    documents = torch.arange(s).expand(b, s) // 5
    whole_mask = mk.model.document_mask(documents, dtype=torch.float64)

    def check():
        mesh = context_mesh(mk.make_mesh(device="cpu"), cp)
        at = positions_of(6, context=mesh)
        for attend_over, masks in ((attend_over_heads, whole_mask), (attend_over_keys, whole_mask[:, :, at])):
            if n % cp and attend_over is attend_over_heads:
                continue
            for mask, want_mask in ((None, None), (masks, whole_mask)):
                want = attended(attend, *heads_of(n, m, b, s), want_mask)
                parts = [z[:, :, at] for z in heads_of(n, m, b, s)]
                run = lambda *args, f=attend_over: f(*args, context=mesh)  # noqa: E731
                got, again = (attended(run, *parts, mask) for _ in range(2))
                for x, y, z in zip(got, again, want, strict=True):
                    torch.testing.assert_close(x, z[:, :, at], rtol=1e-12, atol=1e-12)
                    assert torch.equal(x, y)

    ranks(cp)(check)


def test_attention_over_heads_takes_documents_in_the_place_of_their_mask():
    s, cp, documents = 24, 2, torch.arange(24).expand(1, 24) // 5

    def check():
        mesh = context_mesh(mk.make_mesh(device="cpu"), cp)
        at = positions_of(s // cp, context=mesh)
        heads = [draw(1, n, s, 16, seed=n, dtype=torch.float32) for n in (4, 2, 2)]
        want = attended(attend, *heads, mk.model.document_mask(documents, dtype=torch.float32))
        over = functools.partial(attend_over_heads, context=mesh, kernels="triton")
        got = attended(over, *(z[:, :, at] for z in heads), find_documents(documents))
        for x, z in zip(got, want, strict=True):
            torch.testing.assert_close(x, z[:, :, at], rtol=1e-4, atol=1e-5)

    ranks(cp)(check)


def test_a_mask_of_some_queries_is_these_rows_of_the_mask():
    at = torch.tensor([5, 0, 3])
    of = BATCH.documents[:, :9]
    whole = mk.model.document_mask(of, dtype=torch.float32)
    assert torch.equal(mk.model.document_mask(of, dtype=torch.float32, queries=at), whole[:, :, at])


# --- Splitting ------------------------------------------------------------------------


def test_each_rank_holds_an_early_and_a_late_chunk_and_sees_as_much_as_the_others():
    def positions(mesh):
        return positions_of(4, context=context_mesh(mesh, 3)).tolist()

    places = [as_rank(positions, rank) for rank in range(6)]
    assert places == 2 * [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert len({sum(at) for at in places}) == 1
    assert positions_of(3).tolist() == [0, 1, 2]


def test_a_split_batch_keeps_targets_and_documents_and_forgets_its_totals():
    def split(mesh):
        context = context_mesh(mesh, 3)
        return split_context(BATCH, context=context), positions_of(16, context=context)

    part, at = as_rank(split)
    for name in ("tokens", "targets", "mask", "documents"):
        assert torch.equal(getattr(part, name), getattr(BATCH, name)[:, at])
    assert torch.equal(part.positions, at.expand(8, -1)) and torch.equal(part.sample_ids, BATCH.sample_ids)
    assert part.n_targets is part.n_tokens is None
    assert split_context(BATCH) is BATCH


def samples(seq_len):
    files = {"a": (np.arange(500) % 7).astype(np.uint16)}
    return pack(corpus_of_tokens(files, eos=0, vocab_size=7), seq_len)


def test_the_loaders_of_a_context_give_parts_of_the_same_rows():
    names = ("tokens", "targets", "mask", "documents", "sample_ids")

    def parts():
        mesh = mk.make_mesh(edp=2, ep=2, device="cpu")
        context = context_mesh(mesh, 2)
        batch = mk.count_tokens(next(Loader(samples(8), 6, context=context, mesh=mesh)), mesh=mesh)
        whole = mk.count_tokens(next(Loader(samples(8), 6)))
        rank, n = data_rank(mesh, context)
        want = split_context(rows_of(whole, 3 * rank, 3 * rank + 3), context=context)
        assert n == 2 and batch.n_targets == whole.n_targets and batch.n_tokens == whole.n_tokens
        assert all(torch.equal(getattr(batch, name), getattr(want, name)) for name in names)
        return batch.sample_ids.tolist()

    first, same, second, again = ranks(4)(parts)
    assert first == same != second == again


def test_the_lines_of_the_documentation_are_a_loss_over_a_context():
    (lines,) = blocks("concepts.md")
    config, params = model(max_seq_len=8)

    def run(ep):
        mesh = mk.make_mesh(ep=ep, device="cpu") if ep > 1 else None
        placed = mk.mesh.distribute(params, mesh)
        names = dict(mk=mk, Loader=Loader, samples=samples(8), config=config, params=placed, mesh=mesh)
        exec(lines if ep > 1 else lines.replace("(mesh, 2)", "(mesh, 1)"), names)
        return mk.mesh.sum_over_ranks(names["loss"].detach(), mesh=mesh).item()

    want = run(1)
    assert all(math.isclose(got, want, rel_tol=1e-10) for got in ranks(4)(run, 4))


def test_a_context_stays_within_a_pipeline_stage():
    def look(_):
        mesh = mk.make_mesh(pp=2, edp=1, ep=4, device="cpu")
        meshes = [context_mesh(on, 2) for on in (mesh, mesh["edp", "ep"])]
        return [(sorted(mk.mesh.ranks_of(c)), data_rank(mesh, c)) for c in meshes]

    assert as_rank(look, rank=6, edp=2, ep=4) == 2 * [([6, 7], (1, 2))]


# --- Bad input ------------------------------------------------------------------------

CONFIG, PARAMS = model(max_seq_len=S)


def loss(batch, context, mesh, **options):
    params = mk.mesh.distribute(PARAMS, mesh)
    return mk.next_token_loss(params, batch, config=CONFIG, context=context, mesh=mesh, **options)


def part(context):
    return replace(split_context(BATCH, context=context), n_targets=BATCH.n_targets, n_tokens=BATCH.n_tokens)


REFUSED = [  # what is called with a context of 3 of 6 ranks and their mesh, the message
    (
        lambda c, m: split_context(
            mk.batch.make_batch(BATCH.tokens, BATCH.documents, BATCH.sample_ids), context=c
        ),
        "split_context needs rows that 2 * cp divides, got 47 positions and cp=3; take 42 or 48",
    ),
    (
        lambda c, m: split_context(part(c), context=c),
        "split_context needs a batch of whole rows, got one with 16 positions of each; it is split already",
    ),
    (
        lambda c, m: loss(part(c), None, m),
        "next_token_loss needs the context that this batch is split over, got None; pass context=",
    ),
    (
        lambda c, m: loss(BATCH, c, m),
        "next_token_loss needs a batch that is split over its context of 3 ranks, got whole rows; pass",
    ),
    (
        lambda c, m: loss(split_context(BATCH, context=c), c, m),
        "next_token_loss needs the totals of the global batch, got None",
    ),
    (
        lambda c, m: loss(part(c), context_mesh(m, 2), m),
        "next_token_loss needs the positions of rank 1 in a context of 2, got [8, 9, 10",
    ),
    (
        lambda c, m: mk.next_token_loss(PARAMS, part(c), config=CONFIG, context=c),
        "next_token_loss needs the mesh of its context, got None; pass mesh=",
    ),
    (
        lambda c, m: loss(part(c), c, m, attention_via="all_to_all"),
        "forward needs cp to divide n_heads for attention_via='all_to_all', got n_heads=4 and cp=3; "
        "take cp=2 or 3 or 6 heads, or attention_via='all_gather'",
    ),
    (
        lambda c, m: loss(part(c), c, m, attention_via="ring"),
        "forward needs attention_via 'all_to_all' or 'all_gather', got 'ring'",
    ),
    (
        lambda c, m: loss(BATCH, None, m, attention_via="all_gather"),
        "forward needs a context for attention_via='all_gather', got None; leave it out",
    ),
    (
        lambda c, m: mk.model.forward(PARAMS, BATCH.tokens[:, :5], config=CONFIG, context=c, mesh=m),
        "a context of 3 ranks needs two equal chunks of each row on every rank, got 5 positions; split",
    ),
    (
        lambda c, m: mk.model.forward(PARAMS, BATCH.tokens[:, :4], config=CONFIG, context=m, mesh=m),
        "forward needs a context of one axis, got axes ('edp', 'ep'); pass what",
    ),
    (
        lambda c, m: mk.model.forward(PARAMS, BATCH.tokens[:, :18], config=CONFIG, context=c, mesh=m),
        "rope_table needs at most max_seq_len=48 positions, got 54",
    ),
    (
        lambda c, m: context_mesh(m, 4),
        "context_mesh needs cp to divide the edp * ep ranks that share a batch, got cp=4 on 6 ranks; "
        "take cp=3 or 6",
    ),
    (lambda c, m: context_mesh(m, 0), "got cp=0 on 6 ranks; take cp=1"),
    (lambda c, m: context_mesh(None, 2), "got cp=2 on 1 ranks; take cp=1"),
    (
        lambda c, m: Loader(samples(8), 6, context=c, mesh=m),
        "Loader needs rows that 2 * cp divides, got 8 positions and cp=3; take 6 or 12",
    ),
    (
        lambda c, m: Loader(samples(12), 3, context=c, mesh=m),
        "Loader needs a batch_size that its ranks divide, got batch_size=3 and 2 ranks; take 4",
    ),
    (lambda c, m: Loader(samples(12), 6, context=c), "Loader needs the mesh of its context, got None"),
]


def test_what_does_not_fit_a_context_is_refused_before_any_collective():
    def run(mesh):
        jaxtyping.config.update("jaxtyping_disable", True)  # so that moekit's own errors are seen
        context = context_mesh(mesh, 3)
        for call, message in REFUSED:
            with CommDebugMode() as communication, refuses(message):
                call(context, mesh)
            assert communication.get_total_counts() == 0, message

    as_rank(run, rank=1, edp=3, ep=2)


@pytest.mark.parametrize(("cp", "batch"), [(3, BATCH), (0, BATCH), (2, {"a": 1})])
def test_check_gradients_refuses_a_context_that_does_not_fit(cp, batch):
    with refuses(
        f"check_gradients needs cp to divide edp * ep ranks, and for cp > 1 a moekit.batch.Batch, "
        f"got edp=2, ep=1, {cp=} and {type(batch).__name__}"
    ):
        check_gradients(loss_of(CONFIG), PARAMS, batch, [dict(edp=2, cp=cp)])
