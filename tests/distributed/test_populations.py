"""Balance loss, counts and router gradient do not depend on how documents are split; others by hand."""

import math

import pytest
import torch

import moekit as mk
from moekit.balance import load_balancing_loss
from moekit.mesh import data_rank
from moekit.model import forward
from moekit.testing import ranks

from .tiny import SIZES, model, rows_of

CONFIG, PARAMS = model(n_dense_layers=0, d_dense=0, balance_weight=5.0, max_seq_len=24)
LENGTHS = [  # of documents, by row
    [7, 5, 9],
    [21],
    [3, 3, 3, 3, 4],
    [2, 16],
    [11, 10],
    [1, 1, 12],
    [9, 11],
    [6, 8],
]


def documents():
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(SIZES["vocab_size"], (n,), generator=generator) for n in row] for row in LENGTHS]


def batch_of(rows):
    """Return the batch of these rows of documents, each filled up to 23 tokens with padding."""
    tokens = torch.zeros(len(rows), 24, dtype=torch.int64)
    of = torch.full_like(tokens, -1)
    for i, row in enumerate(rows):
        flat = torch.cat(row)
        tokens[i, : len(flat)] = flat
        of[i, : len(flat)] = torch.arange(len(row)).repeat_interleave(torch.tensor([len(x) for x in row]))
    return mk.count_tokens(mk.batch.make_batch(tokens, of, torch.arange(len(rows))))


PACKED = batch_of(documents())
PADDED = batch_of([[document] for row in documents() for document in row])  # the same, one a row


def measure(batch, edp, ep, rows, micro_batches):
    """Return what must not depend on the split, for each number of micro-batches, on one of the ranks."""
    mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu") if edp * ep > 1 else None
    rank, _ = data_rank(mesh)
    batch = mk.count_tokens(rows_of(batch, sum(rows[:rank]), sum(rows[: rank + 1])), mesh=mesh)

    def loss(params, batch):
        return mk.next_token_loss(params, batch, config=CONFIG, kernels="loop", mesh=mesh)

    results = []
    for n in micro_batches:
        step = mk.data_parallel(mk.accumulate(mk.value_and_grad(loss, has_aux=True), n), mesh=mesh)
        (value, stats), grads = step(mk.mesh.distribute(PARAMS, mesh), batch)
        routers = [grads["layers", str(i), "moe", "router"] for i in range(2)]
        routers = routers if mesh is None else [g.to_local() for g in routers]
        results.append(dict(stats, loss=value, routers=torch.stack(routers), n=n))
    return results


def by_loops(batch):
    """Return the balance loss, summed over layers, and the counts, one document and one token at a time."""
    _, routings = forward(PARAMS, batch.tokens, config=CONFIG, documents=batch.documents, kernels="loop")
    s, n_experts, k = batch.tokens.shape[1], CONFIG.n_experts, CONFIG.top_k
    total, counts = 0.0, torch.zeros(len(routings), n_experts, dtype=torch.int64)
    for layer, routing in enumerate(routings):
        for row in range(len(batch.tokens)):
            for document in range(int(batch.documents[row].max()) + 1):
                tokens = [row * s + i for i in range(s) if batch.documents[row, i] == document]
                f, p = torch.zeros(2, n_experts, dtype=torch.float64)
                for t in tokens:
                    p += routing.scores[t] / len(tokens)
                    for expert in routing.expert_ids[t]:
                        f[expert] += 1 / (len(tokens) * k)
                        counts[layer, expert] += 1
                total += n_experts * float(f @ p) * len(tokens) / int(batch.n_tokens)
    return total, counts


def fullest(batch, edp, ep, rows, n):
    """Return the rows of each copy's fullest rank in each layer, one micro-batch and copy at a time."""
    _, routings = forward(PARAMS, batch.tokens, config=CONFIG, documents=batch.documents, kernels="loop")
    total = torch.zeros(len(routings), edp, dtype=torch.int64)
    for layer, routing in enumerate(routings):
        ids = routing.expert_ids.reshape(len(batch.tokens), -1)
        for copy in range(edp):
            of_ranks = range(copy * ep, (copy + 1) * ep)
            for i in range(n):
                here = [ids[sum(rows[:r]) :][i * rows[r] // n : (i + 1) * rows[r] // n] for r in of_ranks]
                load = [sum((x * ep // CONFIG.n_experts == r).sum() for x in here) for r in range(ep)]
                total[layer, copy] += max(load)
    return total


def agree(got, want):
    assert torch.equal(got["counts"], want["counts"])
    for name in ("load_balancing", "cross_entropy", "loss", "router_z", "router_entropy", "routers"):
        torch.testing.assert_close(
            got[name], want[name], rtol=1e-10, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.fixture(scope="module")
def want():
    (one,) = measure(PACKED, 1, 1, [8], [1])
    return one


def test_the_balance_loss_of_documents_is_the_loop_over_documents(want):
    total, counts = by_loops(PACKED)
    assert math.isclose(total, want["load_balancing"].item(), rel_tol=1e-10)
    assert torch.equal(counts, want["counts"])
    assert counts.sum() == 2 * 2 * PACKED.n_tokens < 2 * 2 * PACKED.tokens.numel()  # no padding


SPLITS = [  # edp, ep, eighths of the rows on each rank
    (1, 1, [8]),
    (2, 1, [4, 4]),
    (1, 2, [4, 4]),
    (2, 1, [0, 8]),
    (1, 2, [8, 0]),
    (2, 2, [2, 2, 2, 2]),
    (1, 4, [0, 8, 0, 0]),
    (4, 1, [4, 2, 2, 0]),
]


@pytest.mark.parametrize("batch", [PACKED, PADDED], ids=["packed", "padded"])
@pytest.mark.parametrize(("edp", "ep", "eighths"), SPLITS)
def test_documents_may_be_split_over_ranks_and_micro_batches_in_any_way(want, batch, edp, ep, eighths):
    assert batch.n_tokens == PACKED.n_tokens
    rows = [n * len(batch.tokens) // 8 for n in eighths]
    micro_batches = [n for n in (1, 2, 4, 5, 8, 20) if not any(r % n for r in rows)]
    for of_rank in ranks(edp * ep)(measure, batch, edp, ep, rows, micro_batches):
        assert len(of_rank) >= 2  # numbers of micro-batches
        for got in of_rank:
            agree(got, want)
            assert got["fullest"].tolist() == fullest(batch, edp, ep, rows, got["n"]).tolist()


# --- By hand ---------------------------------------------------------------------------


def routing_of(expert_ids, scores):
    """Return a top-1 routing; only ids and scores matter here."""
    ids, scores = torch.tensor(expert_ids)[:, None], torch.tensor(scores, dtype=torch.float64)
    counts = torch.bincount(ids.flatten(), minlength=scores.shape[1])
    weights = scores.gather(1, ids)
    return mk.Routing(weights=weights, expert_ids=ids, counts=counts, logits=scores, scores=scores)


# Two experts and four tokens, two on each of two ranks. Rank 0: f = (1, 0), P = (0.8, 0.2).
# Rank 1: f = (0, 1), P = (0.6, 0.4). Over both: f = (1/2, 1/2), P = (0.7, 0.3). The loss is 2 (f . P).
OF_RANK = [([0, 0], [[0.9, 0.1], [0.7, 0.3]]), ([1, 1], [[0.8, 0.2], [0.4, 0.6]])]
BY_HAND = {
    "document": [0.5 * 2 * 0.8, 0.5 * 2 * 0.4],
    "rank": [0.5 * 2 * 0.8, 0.5 * 2 * 0.4],
    "micro_batch": [0.5 * 2 * (0.5 * 0.8 + 0.5 * 0.2), 0.5 * 2 * (0.5 * 0.6 + 0.5 * 0.4)],
    "batch": [0.5 * 2 * 0.5, 0.5 * 2 * 0.5],
}


def shares(edp, ep, padding):
    mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu")
    ids, scores = OF_RANK[data_rank(mesh)[0]]
    mask = None
    if padding:  # one more token, which no count and no mean may see
        ids, scores, mask = [0, *ids], [[0.5, 0.5], *scores], torch.tensor([False, True, True])
    documents = torch.zeros(len(ids), dtype=torch.int64)
    n_tokens = torch.tensor(4)
    options = dict(mask=mask, documents=documents, n_tokens=n_tokens, mesh=mesh)
    return {
        name: load_balancing_loss(routing_of(ids, scores), population=name, **options) for name in BY_HAND
    }


@pytest.mark.parametrize(("edp", "ep"), [(2, 1), (1, 2)])
@pytest.mark.parametrize("padding", [False, True])
def test_the_share_of_each_population_on_two_ranks_is_the_one_by_hand(edp, ep, padding):
    for rank, got in enumerate(ranks(2)(shares, edp, ep, padding)):
        assert {name: round(x.item(), 12) for name, x in got.items()} == {
            name: round(of_rank[rank], 12) for name, of_rank in BY_HAND.items()
        }


def test_populations_of_a_call_depend_on_the_split_as_they_say():
    both = routing_of(*(OF_RANK[0][i] + OF_RANK[1][i] for i in range(2)))
    for population in ("rank", "micro_batch", "batch"):
        assert math.isclose(load_balancing_loss(both, population=population).item(), 1.0)
    halves = [load_balancing_loss(routing_of(*one), population="rank", n_tokens=4) for one in OF_RANK]
    assert math.isclose(sum(halves).item(), 1.2)


def test_the_batch_as_population_cannot_be_accumulated():
    def run(n):
        config, params = model(balance_population="batch", max_seq_len=24)
        mesh = mk.make_mesh(edp=2, device="cpu")
        rank = data_rank(mesh)[0]
        batch = rows_of(PACKED, 4 * rank, 4 * rank + 4)
        loss = lambda *args: mk.next_token_loss(*args, config=config, mesh=mesh)  # noqa: E731
        step = mk.accumulate(mk.value_and_grad(loss, has_aux=True), n)
        return step(mk.mesh.distribute(params, mesh), batch)[0][0]

    ranks(2)(run, 1)
    with pytest.raises(RuntimeError, match="needs the whole batch in one call, but it is accumulated"):
        ranks(2)(run, 2)
