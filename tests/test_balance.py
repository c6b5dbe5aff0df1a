import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference import balance as one_population, balance_over_documents, close, draw, refuses

import moekit as mk
from moekit.balance import expert_counts, load_balancing_loss, next_bias, router_entropy, router_z_loss

E, K = 4, 2
ALL = ("document", "rank", "micro_batch", "batch")
DOCUMENTS = st.lists(st.integers(-1, 4), min_size=5, max_size=12).map(torch.tensor)  # -1: padding


def routing(t, router=None, score="softmax"):
    return mk.route(draw(3, E, seed=1) if router is None else router, draw(t, 3), top_k=K, score=score)


def fixed(ids, scores):
    """Return the Routing of given experts and scores."""
    ids, scores = torch.tensor(ids), torch.tensor(scores, dtype=torch.float64)
    counts = torch.bincount(ids.flatten(), minlength=scores.shape[1])
    return mk.Routing(
        weights=scores[:, : ids.shape[1]], expert_ids=ids, counts=counts, logits=scores, scores=scores
    )


def part(r, at):
    """Return the Routing of some of its tokens."""
    counts = torch.bincount(r.expert_ids[at].flatten(), minlength=E)
    of_tokens = {name: x[at] for name, x in vars(r).items() if name not in ("counts", "dropped")}
    return mk.Routing(**of_tokens, counts=counts)


def renumbered(documents):
    """Number the documents of a part from 0; padding stays -1."""
    return torch.where(documents >= 0, documents.unique(return_inverse=True)[1], -1)


def balance_of(r, population, documents=None, **options):
    if population == "document" and documents is None:
        documents = torch.zeros(len(r.scores), dtype=torch.int64)
    return load_balancing_loss(r, population=population, documents=documents, **options)


@pytest.mark.parametrize("population", ALL)
@pytest.mark.parametrize(
    ("ids", "scores", "value"),
    [
        ([[0, 1], [2, 3]], [[0.25] * 4] * 2, 1.0),
        ([[0, 1], [2, 3]], [[1.0, 0, 0, 0], [0, 0, 0.5, 0.5]], 1.0),
        ([[0, 1], [0, 1]], [[0.5, 0.5, 0, 0]] * 2, E / K),
        ([[0], [0], [0]], [[1.0, 0, 0, 0]] * 3, E),
        ([[0, 1], [0, 2]], [[0.5, 0.3, 0.1, 0.1], [0.4, 0.1, 0.4, 0.1]], 4 * (0.45 / 2 + 0.2 / 4 + 0.25 / 4)),
        ([[0], [1]], [[0.8, 0.4, 0.2, 0.2], [0.3, 0.9, 0.2, 0.1]], 4 * (0.35 / 2 + 0.425 / 2)),
    ],
    ids=[
        "balanced",
        "balanced counts",
        "collapse to k",
        "collapse to one",
        "uneven",
        "scores that do not sum to one",
    ],
)
def test_the_loss_has_the_value_of_a_hand_calculation(population, ids, scores, value):
    assert balance_of(fixed(ids, scores), population).item() == pytest.approx(value, rel=1e-12)


@given(DOCUMENTS, st.sampled_from(["softmax", "sigmoid"]))
def test_the_loss_over_documents_is_the_token_weighted_mean_of_a_loop_over_documents(documents, score):
    keep = documents >= 0
    router = draw(3, E, seed=1).requires_grad_()
    r = routing(len(documents), router, score)
    got = load_balancing_loss(r, population="document", documents=documents, mask=keep)
    want = balance_over_documents(r.expert_ids, r.scores, documents) if keep.any() else 0 * router.sum()
    close(got, want)
    close(*(torch.autograd.grad(x, router, retain_graph=True)[0] for x in (got, want)))


@pytest.mark.parametrize("population", ["rank", "micro_batch", "batch"])
def test_the_loss_over_a_call_is_that_of_its_kept_tokens(population):
    router = draw(3, E, seed=1).requires_grad_()
    r, keep = routing(9, router), torch.arange(9) % 3 > 0
    got = balance_of(r, population, mask=keep)
    want = one_population(r.expert_ids[keep], r.scores[keep])
    close(got, want)
    close(*(torch.autograd.grad(x, router, retain_graph=True)[0] for x in (got, want)))


@settings(max_examples=50)
@given(DOCUMENTS, st.data())
def test_shares_of_the_loss_over_documents_sum_to_the_whole_however_the_documents_are_split(documents, data):
    side = torch.tensor(data.draw(st.lists(st.booleans(), min_size=5, max_size=5)))[documents]
    r, keep = routing(len(documents)), documents >= 0
    n = keep.sum()

    def share(at):
        r_at, documents_at, keep_at = part(r, at), renumbered(documents[at]), keep[at]
        options = dict(population="document", documents=documents_at, mask=keep_at, n_tokens=n)
        return load_balancing_loss(r_at, **options), router_z_loss(r_at, mask=keep_at, n_tokens=n)

    whole = load_balancing_loss(r, population="document", documents=documents, mask=keep)
    shares = [sum(terms) for terms in zip(share(side), share(~side), strict=True)]
    close(shares, [whole, router_z_loss(r, mask=keep)])


@pytest.mark.parametrize("population", ["rank", "micro_batch"])
def test_shares_of_a_loss_over_calls_are_weighed_by_their_tokens(population):
    r = routing(9)
    shares = [balance_of(part(r, at), population, n_tokens=9) for at in (slice(0, 2), slice(2, 9))]
    parts = [one_population(r.expert_ids[at], r.scores[at]) for at in (slice(0, 2), slice(2, 9))]
    close(sum(shares), (2 * parts[0] + 7 * parts[1]) / 9)


@pytest.mark.parametrize("population", ALL)
def test_experts_of_a_group_may_differ_where_groups_are_balanced(population):
    uneven_in_a_group = fixed([[0], [2], [0], [2]], [[0.5, 0, 0.5, 0]] * 4)
    assert balance_of(uneven_in_a_group, population, n_groups=2).item() == pytest.approx(1.0)
    assert balance_of(uneven_in_a_group, population).item() == pytest.approx(2.0)
    uneven = fixed([[0], [1], [0], [2]], [[0.4, 0.4, 0.1, 0.1]] * 4)  # f = (3/4, 1/4), P = (0.8, 0.2)
    assert balance_of(uneven, population, n_groups=2).item() == pytest.approx(2 * (0.6 + 0.05))


def test_a_loss_over_an_accumulated_batch_takes_the_load_that_it_is_given():
    r, load = routing(8), torch.tensor([5, 1, 0, 2])
    halves = [part(r, slice(4)), part(r, slice(4, 8))]
    shares = [balance_of(half, "batch", load=load, n_tokens=8) for half in halves]
    want = E * (load / 8 * r.scores.mean(0)).sum()
    close(sum(shares), want)
    close(balance_of(r, "batch", load=3 * load), want)  # of a window: its scale has no effect
    close(balance_of(r, "batch", load=r.counts), balance_of(r, "batch"))


def test_the_entropy_of_the_router_by_hand():
    r = fixed([[0], [0], [1]], [[1.0, 0, 0, 0], [0.3, 0.3, 0, 0], [0.2, 0.2, 0.2, 0.2]])
    nats = [0.0, math.log(2), math.log(4)]
    assert router_entropy(r).item() == pytest.approx(sum(nats) / 3)
    assert router_entropy(r, mask=torch.tensor([True, False, True]), n_tokens=4).item() == pytest.approx(
        (nats[0] + nats[2]) / 4
    )


def test_a_loss_over_the_batch_refuses_a_part_of_the_batch():
    r = routing(6)
    close(balance_of(r, "batch", n_tokens=6), balance_of(r, "batch", n_tokens=torch.tensor(6)))
    with pytest.raises(RuntimeError, match="needs the whole batch in one call, but it is accumulated"):
        balance_of(r, "batch", n_tokens=12)


@pytest.mark.parametrize("population", ALL)
def test_padding_enters_no_loss_no_count_and_no_gradient(population):
    keep = torch.tensor([True, True, False, True, False])
    router, x = draw(3, E, seed=1), draw(5, 3).requires_grad_()

    def losses(x):
        r = mk.route(router, x, top_k=K)
        return balance_of(r, population, mask=keep), router_z_loss(r, mask=keep), expert_counts(r, mask=keep)

    *got, counts = losses(x)
    *want, same = losses(torch.where(keep[:, None], x, draw(5, 3, seed=8)))
    close(got, want)
    assert torch.equal(counts, same) and counts.sum() == 3 * K
    (grad,) = torch.autograd.grad(sum(got), x)
    assert not grad[~keep].any() and bool(grad[keep].any(1).all())


@pytest.mark.parametrize("population", ALL)
def test_a_call_without_a_kept_token_has_no_loss_and_a_zero_gradient(population):
    for t in (0, 3):
        router = draw(3, E, seed=1).requires_grad_()
        r, keep = routing(t, router), torch.zeros(t, dtype=torch.bool)
        loss = balance_of(r, population, mask=keep) + router_z_loss(r, mask=keep)
        assert loss.item() == 0 and not torch.autograd.grad(loss, router)[0].any()


def test_the_router_z_loss_is_the_mean_square_of_the_log_of_the_sum_of_exponentials():
    logits = [[math.log(1), math.log(2), math.log(5)], [math.log(1), math.log(1), math.log(1)]]
    r = fixed([[0], [1]], logits)
    assert router_z_loss(r).item() == pytest.approx((math.log(8) ** 2 + math.log(3) ** 2) / 2, rel=1e-12)
    assert router_z_loss(r, n_tokens=8).item() == pytest.approx(router_z_loss(r).item() / 4, rel=1e-12)


@pytest.mark.parametrize(("rate", "steps", "reached"), [(1e-4, 4000, 0.4), (1e-3, 100, 0.1)])
def test_a_bias_keeps_moving_by_its_rate_under_one_sided_counts(rate, steps, reached):
    bias, counts = torch.zeros(2), torch.tensor([10, 2])
    for _ in range(steps):
        bias = next_bias(bias, counts, rate=rate)
    close(bias, torch.tensor([-reached, reached]), 1e-3 * reached)


def test_a_bias_rises_below_the_mean_load_of_its_layer_falls_above_and_rests_at_it():
    bias, counts = draw(2, 4).float(), torch.tensor([[1, 5, 3, 3], [0, 0, 0, 8]])
    after = next_bias(bias, counts, rate=0.5)
    close(after - bias, torch.tensor([[0.5, -0.5, 0, 0], [0.5, 0.5, 0.5, -0.5]]), 1e-6)


def test_counts_without_a_mask_are_those_of_the_routing():
    r = routing(7)
    assert torch.equal(expert_counts(r), r.counts) and r.counts.sum() == 7 * K


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(population="world"),
            "needs population 'document', 'rank', 'micro_batch' or 'batch', got 'world'",
        ),
        (dict(population="document"), "load_balancing_loss over documents needs documents (t,), got None"),
        (
            dict(population="batch", mesh=object()),
            "over the batch needs n_tokens of the global batch, got None",
        ),
        (
            dict(population="rank", load=torch.ones(E)),
            "needs a load (4,) for population 'batch' alone, got (4,) for 'rank'",
        ),
        (dict(population="batch", load=torch.ones(1)), "needs a load (4,) for population 'batch'"),
        (dict(population="rank", n_groups=3), "needs n_groups that divides 4 experts, got 3"),
    ],
)
def test_bad_populations_are_refused(unchecked, options, message):
    with refuses(message):
        load_balancing_loss(routing(3), **options)


def test_document_numbers_beyond_the_number_of_tokens_are_refused():
    with pytest.raises(RuntimeError, match=r"load_balancing_loss needs documents in \[0, t\)"):
        load_balancing_loss(routing(3), population="document", documents=torch.tensor([0, 1, 3]))


def test_bad_biases_are_refused(unchecked):
    with refuses(
        "next_bias needs a bias in float32, got torch.bfloat16, in which steps of 0.001 are", TypeError
    ):
        next_bias(torch.zeros(4).bfloat16(), torch.zeros(4).long())
    for rate in (math.nan, math.inf, -1.0):
        with refuses(f"next_bias needs a finite rate >= 0, got {rate}"):
            next_bias(torch.zeros(4), torch.zeros(4).long(), rate=rate)
    with refuses("next_bias needs a count per bias, got (4,) and (2, 4)"):
        next_bias(torch.zeros(4), torch.zeros(2, 4).long())


def test_sigmoid_scores_that_all_vanish_give_a_finite_loss():
    routing = mk.route(-100 * torch.ones(8, 4), torch.ones(5, 8), top_k=2, score="sigmoid")
    assert load_balancing_loss(routing, population="rank").isfinite()
