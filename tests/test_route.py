import itertools
import math

import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference import close, draw, refuses, route as plain_route, with_grads

import moekit as mk

E, D = 8, 5
ROUTER = draw(D, E, seed=1)
KEY = mk.random.make_key(3)
OPTIONS = st.fixed_dictionaries(
    dict(
        top_k=st.integers(1, 4),
        score=st.sampled_from(["softmax", "sigmoid"]),
        normalize=st.sampled_from(["none", "l1"]),
        scale=st.sampled_from([1.0, 2.5]),
        bias=st.sampled_from([None, draw(E, seed=2)]),
    )
)
GROUPS = st.sampled_from([(1, 1), (2, 1), (4, 2), (4, 4)])


def tokens(t, seed=0, dtype=torch.float64):
    return draw(t, D, seed=seed, dtype=dtype)


@settings(max_examples=40)
@given(OPTIONS, GROUPS, st.integers(0, 9))
def test_a_routing_and_its_gradients_are_those_of_a_loop_over_tokens(options, groups, t):
    options |= dict(n_groups=groups[0], top_groups=groups[1])
    got, (weights, ids, logits, scores) = (f(ROUTER, tokens(t), **options) for f in (mk.route, plain_route))
    assert torch.equal(got.expert_ids, ids)
    assert got.counts.tolist() == torch.bincount(ids.flatten(), minlength=E).tolist()
    close((got.weights, got.logits, got.scores), (weights, logits, scores))
    for name, i in (("weights", 0), ("logits", 2), ("scores", 3)):
        want = with_grads(lambda *a, i=i: plain_route(*a, **options)[i], ROUTER, tokens(t))
        close(
            with_grads(lambda *a, name=name: getattr(mk.route(*a, **options), name), ROUTER, tokens(t)), want
        )


@given(OPTIONS, GROUPS, st.sampled_from(["top_k", "random", "uniform"]), st.integers(1, 20))
def test_normalised_weights_sum_to_the_scale(options, groups, assignment, t):
    options |= dict(n_groups=groups[0], top_groups=groups[1], normalize="l1")
    key = None if assignment == "top_k" else KEY
    options["bias"] = options["bias"] if assignment == "top_k" else None
    routing = mk.route(ROUTER.float(), tokens(t).float(), assignment=assignment, key=key, **options)
    close(routing.weights.sum(-1), torch.full((t,), options["scale"]), 1e-5)
    assert bool((routing.weights >= 0).all())


@given(OPTIONS, st.integers(0, E - 1))
def test_a_bias_chooses_experts_and_never_enters_the_weights(options, favourite):
    options["bias"] = 100 * torch.eye(E)[favourite]
    options["normalize"] = "none"
    routing = mk.route(ROUTER, tokens(9), **options)
    assert bool((routing.expert_ids[:, 0] == favourite).all())
    close(routing.weights, routing.scores.gather(1, routing.expert_ids) * options["scale"])
    unbiased = mk.route(ROUTER, tokens(9), **options | {"bias": None})
    assert torch.equal(routing.scores, unbiased.scores) and torch.equal(routing.logits, unbiased.logits)


def test_a_bias_equal_for_all_experts_changes_nothing():
    plain, biased = (mk.route(ROUTER, tokens(9), top_k=3, bias=b) for b in (None, torch.full((E,), 0.25)))
    assert torch.equal(plain.expert_ids, biased.expert_ids) and torch.equal(plain.weights, biased.weights)


@pytest.mark.parametrize(("n_groups", "top_groups"), [(2, 1), (4, 1), (4, 2), (4, 3), (8, 3)])
@pytest.mark.parametrize("bias", [None, draw(E, seed=4) * 0.2], ids=["unbiased", "biased"])
def test_groups_are_those_of_a_search_over_all_choices(n_groups, top_groups, bias):
    top_k = min(2, E // n_groups * top_groups)
    routing = mk.route(ROUTER, tokens(30), top_k=top_k, n_groups=n_groups, top_groups=top_groups, bias=bias)
    size = E // n_groups
    biased = routing.scores if bias is None else routing.scores + bias
    for scores, ids in zip(biased, routing.expert_ids, strict=True):
        group = [scores[g * size : (g + 1) * size].topk(min(2, size)).values.sum() for g in range(n_groups)]
        groups = max(
            itertools.combinations(range(n_groups), top_groups), key=lambda c: sum(group[g] for g in c)
        )
        allowed = [e for e in range(E) if e // size in groups]
        best = max(itertools.combinations(allowed, top_k), key=lambda c: sum(scores[e] for e in c))
        assert set(ids.tolist()) == set(best)


@given(st.permutations(range(100, 112)), st.integers(1, E), st.integers(0, 5))
def test_a_random_assignment_depends_on_key_and_token_id_alone(ids, top_k, seed):
    options = dict(top_k=top_k, assignment="random", key=mk.random.make_key(seed))
    ids = torch.tensor(ids)
    shuffled = mk.route(ROUTER, tokens(12, seed=seed), token_ids=ids, **options).expert_ids
    in_order = mk.route(-ROUTER, tokens(12), token_ids=torch.arange(100, 112), **options).expert_ids
    assert torch.equal(shuffled, in_order[ids - 100])
    in_part = mk.route(ROUTER, tokens(5), token_ids=ids[:5], **options).expert_ids
    assert torch.equal(in_part, shuffled[:5])


def test_token_ids_are_places_by_default_and_other_keys_choose_otherwise():
    first, same, other = (
        mk.route(ROUTER, tokens(50), top_k=2, assignment="random", key=key, token_ids=ids).expert_ids
        for key, ids in ((KEY, None), (KEY, torch.arange(50)), (mk.random.fold_in(KEY, 0), None))
    )
    assert torch.equal(first, same) and not torch.equal(first, other)


def evenly(counts):
    """Whether counts could come from equal chances: chi-square within four standard deviations."""
    mean, freedom = counts.double().mean(), counts.numel() - 1
    return bool((counts - mean).square().sum() / mean < freedom + 4 * (2 * freedom) ** 0.5)


@pytest.mark.parametrize("seed", range(3))
def test_a_random_assignment_draws_pairs_uniformly_without_replacement_and_apart_from_other_tokens(seed):
    ids = mk.route(
        ROUTER, tokens(5600), top_k=2, assignment="random", key=mk.random.make_key(seed)
    ).expert_ids
    pairs, neighbours = (
        torch.bincount(a * E + b, minlength=E * E).view(E, E)
        for a, b in ((ids[:, 0], ids[:, 1]), (ids[:-1, 0], ids[1:, 0]))
    )
    assert pairs.diagonal().sum() == 0 and evenly(pairs[~torch.eye(E, dtype=torch.bool)])
    assert evenly(neighbours)


@given(st.integers(1, 12), st.data())
def test_loads_of_a_uniform_assignment_differ_by_at_most_one(n_experts, data):
    t, seed, first = (data.draw(st.integers(0, 40)) for _ in range(3))
    top_k = data.draw(st.integers(1, n_experts))
    ids = torch.arange(first, first + t)
    routing = mk.route(
        draw(D, n_experts),
        tokens(t),
        top_k=top_k,
        assignment="uniform",
        key=mk.random.make_key(seed),
        token_ids=ids,
    )
    assert routing.counts.max() - routing.counts.min() <= 1 and routing.counts.sum() == t * top_k
    assert all(len(set(row)) == top_k for row in routing.expert_ids.tolist())


def test_a_uniform_assignment_starts_at_an_expert_that_the_key_decides():
    starts = [
        mk.route(
            ROUTER, tokens(1), top_k=1, assignment="uniform", key=mk.random.make_key(seed)
        ).expert_ids.item()
        for seed in range(50)
    ]
    assert set(starts) == set(range(E))


@pytest.mark.parametrize("assignment", ["random", "uniform"])
def test_weights_of_an_assignment_by_key_are_the_scores_of_its_experts_and_differentiable(assignment):
    options = dict(top_k=3, score="sigmoid", scale=2.0)
    ids = mk.route(ROUTER, tokens(6), assignment=assignment, key=KEY, **options).expert_ids
    got = with_grads(
        lambda *a: mk.route(*a, assignment=assignment, key=KEY, **options).weights, ROUTER, tokens(6)
    )
    close(got, with_grads(lambda *a: plain_route(*a, ids=ids, **options)[0], ROUTER, tokens(6)))


@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64, torch.float64)],
)
def test_logits_scores_and_weights_are_float32_at_least(dtype, kept):
    x = tokens(6).to(dtype)
    routing = mk.route(ROUTER.to(kept), x, top_k=2)
    assert {z.dtype for z in (routing.logits, routing.scores, routing.weights)} == {kept}
    close(routing.logits, x.to(kept) @ ROUTER.to(kept))


def test_scores_that_all_underflow_give_finite_weights_and_gradients():
    got = with_grads(
        lambda r, x: mk.route(r, x, top_k=2, score="sigmoid").weights,
        torch.full((1, 4), -500.0),
        torch.ones(3, 1),
    )
    assert all(bool(x.isfinite().all()) for x in got)


def test_a_routing_is_a_pytree_that_knows_its_number_of_experts():
    routing = mk.route(ROUTER, tokens(3), top_k=2)
    doubled = torch.utils._pytree.tree_map(lambda x: x * 2, routing)
    assert isinstance(doubled, mk.Routing) and doubled.n_experts == E
    assert torch.equal(doubled.counts, routing.counts * 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(top_k=0), "route needs 1 <= top_k <= n_experts, got top_k=0, n_experts=8"),
        (dict(top_k=9), "route needs 1 <= top_k <= n_experts, got top_k=9, n_experts=8"),
        (dict(score="tanh"), "route needs score 'softmax' or 'sigmoid', got 'tanh'"),
        (dict(normalize="l2"), "route needs normalize 'none' or 'l1', got 'l2'"),
        (dict(assignment="hash"), "route needs assignment 'top_k', 'random' or 'uniform', got 'hash'"),
        (
            dict(assignment="random"),
            "route needs a key for assignment='random', got None; pass moekit.random.make_key(seed)",
        ),
        (
            dict(assignment="uniform"),
            "route needs a key for assignment='uniform', got None; pass moekit.random.make_key(seed)",
        ),
        (dict(key=KEY), "route needs no key for assignment='top_k', got one; leave it out"),
        (
            dict(assignment="random", key=KEY, bias=torch.zeros(8)),
            "route needs no bias for assignment='random', which does not look at scores; leave it out",
        ),
        (dict(bias=torch.zeros(7)), "route needs a float32 bias (8,), got torch.float32 (7,)"),
        (dict(bias=torch.zeros(8).bfloat16()), "route needs a float32 bias (8,), got torch.bfloat16 (8,)"),
        (
            dict(n_groups=3),
            "n_groups to divide n_experts and 1 <= top_groups <= n_groups, got n_experts=8, n_gr",
        ),
        (dict(n_groups=0), "got n_experts=8, n_groups=0, top_groups=1"),
        (dict(n_groups=2, top_groups=3), "got n_experts=8, n_groups=2, top_groups=3"),
        (
            dict(n_groups=8, top_groups=1),
            "top_k experts in top_groups groups of 1, got top_k=2, top_groups=1",
        ),
        (
            dict(assignment="random", key=KEY, token_ids=torch.arange(1)),
            "route needs an id for each of 4 tokens, got (1,)",
        ),
        (dict(x=torch.zeros(4, 3)), "route needs router (d, E) for tokens (t, d), got (5, 8), (4, 3)"),
        (dict(x=torch.zeros(1, 4, 5)), "route needs router (d, E) for tokens (t, d), got (5, 8), (1, 4, 5)"),
    ],
)
def test_bad_input_is_refused(unchecked, changes, message):
    with refuses(message):
        mk.route(ROUTER, **dict(x=tokens(4), top_k=2) | changes)


def test_softmax_weights_have_the_value_of_a_hand_calculation():
    router = torch.tensor([[math.log(1), math.log(2), math.log(5)]])
    routing = mk.route(router, torch.ones(1, 1), top_k=2, scale=7.0)
    close(routing.weights, torch.tensor([[5.0, 2.0]]), 1e-6)
    close(routing.scores, torch.tensor([[1.0, 2.0, 5.0]]) / 8, 1e-6)
    assert routing.expert_ids.tolist() == [[2, 1]] and routing.counts.tolist() == [0, 1, 1]


def test_autocast_leaves_logits_and_weights_in_float32():
    with torch.autocast("cpu", torch.bfloat16):
        got = mk.route(ROUTER.float(), tokens(9).float(), top_k=2)
    want = mk.route(ROUTER.float(), tokens(9).float(), top_k=2)
    assert torch.equal(got.logits, want.logits) and torch.equal(got.weights, want.weights)
