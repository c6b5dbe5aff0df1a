from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference import close, draw, refuses, with_grads

import moekit as mk
from moekit.kernels.permute import count_experts, invert, to_rows, to_tokens

VIA = pytest.mark.parametrize("via", ["local", "all_to_all"])
CHOICES = st.integers(
    1, 5
).flatmap(  # any number of tokens, each with k of E experts
    lambda n: st.tuples(
        st.just(n),
        st.integers(1, n).flatmap(
            lambda k: st.lists(st.permutations(range(n)).map(lambda p: p[:k]), max_size=7)
        ),
    )
)


def routing(n_experts, ids, dtype=torch.float64):
    """Return the Routing of chosen experts, with weights that sum to one."""
    ids = torch.tensor(ids, dtype=torch.int64).view(len(ids), -1 if ids else 1)
    weights = draw(*ids.shape, seed=5).softmax(-1).to(dtype)
    scores = torch.zeros(len(ids), n_experts, dtype=dtype)
    counts = count_experts(ids, n_experts)
    return mk.Routing(weights=weights, expert_ids=ids, counts=counts, logits=scores, scores=scores)


@VIA
@given(CHOICES)
def test_identity_experts_return_the_tokens_for_any_counts(via, choice):
    r = routing(*choice)
    x = draw(len(r.weights), 3)
    sent = mk.dispatch(x, r, via=via)
    close(mk.combine(sent.rows, sent), x)


@VIA
@given(CHOICES)
def test_rows_are_in_the_order_of_experts_then_tokens_and_offsets_end_each_expert(via, choice):
    r = routing(*choice)
    x = draw(len(r.weights), 3)
    sent = mk.dispatch(x, r, via=via)
    tokens_of = [(r.expert_ids == e).any(1).nonzero()[:, 0] for e in range(r.n_experts)]
    assert torch.equal(sent.rows, torch.cat([x[at] for at in tokens_of]))
    ends = torch.tensor([len(at) for at in tokens_of]).cumsum(0)
    assert torch.equal(sent.offsets, ends.int()) and sent.offsets.dtype == torch.int32


@VIA
@settings(max_examples=25)
@given(CHOICES)
def test_output_and_gradients_are_those_of_the_weighted_sum(via, choice):
    r = routing(*choice)
    leaves = draw(len(r.weights), 3), r.weights, draw(r.n_experts, 3, seed=1)

    def ours(x, weights, factors):
        sent = mk.dispatch(x, mk.Routing(**vars(r) | {"weights": weights}), via=via)
        of_row = torch.repeat_interleave(torch.arange(r.n_experts), r.counts)
        return mk.combine(sent.rows * factors[of_row], sent)

    def plain(x, weights, factors):
        return torch.einsum("td,tk,tkd->td", x, weights, factors[r.expert_ids])

    close(with_grads(ours, *leaves), with_grads(plain, *leaves))


@VIA
def test_the_sum_over_experts_is_taken_in_float32_and_returned_in_the_rows_dtype(via):
    r = routing(3, [[0, 1, 2]], torch.float32)
    sent = mk.dispatch(torch.ones(1, 1, dtype=torch.bfloat16), r, via=via)
    r.weights.copy_(torch.tensor([[1 + 2.0**-9, 2.0**-9, -1.0]]))  # in bfloat16, 1 + 2**-9 is 1
    y = mk.combine(sent.rows, sent)
    assert y.dtype == torch.bfloat16 and y.item() == 2.0**-8


@VIA
def test_what_an_expert_adds_arrives_once_a_choice_and_with_its_routing_weight(via):
    r = routing(3, [[0, 2], [2, 1]])
    r.weights.copy_(torch.tensor([[0.5, 0.25], [2.0, 1.0]]))
    sent = mk.dispatch(torch.zeros(2, 1, dtype=torch.float64), r, via=via)
    bias = torch.tensor([1.0, 10.0, 100.0], dtype=torch.float64)
    y = mk.combine(sent.rows + bias.repeat_interleave(r.counts)[:, None], sent)
    assert y.tolist() == [[0.5 + 25], [200 + 10]]


def test_a_strangers_transport_carries_the_rows():
    def send(x, routing, mesh):
        assert mesh is None
        rows = x[routing.expert_ids.flatten()[:1]]
        return rows, torch.zeros(routing.n_experts, dtype=torch.int32), "a plan"

    def bring(rows, weights, plan, mesh):
        assert mesh is None and plan == "a plan"
        return rows + weights

    sent = mk.dispatch(draw(4, 1), routing(4, [[2], [0], [1], [1]]), via=mk.Transport(send, bring))
    assert torch.equal(sent.rows, draw(4, 1)[2:3])
    assert torch.equal(mk.combine(sent.rows, sent), draw(4, 1)[2] + torch.ones(4, 1))


@given(st.permutations(range(6)))
def test_an_order_and_its_inverse_cancel_and_tokens_come_back_from_where_they_went(order):
    order, x = torch.tensor(order), draw(6, 2)
    assert invert(order)[order].tolist() == list(range(6))
    got = with_grads(lambda x: to_rows(x, invert(order)[:, None]), x)
    close(got, with_grads(lambda x: x[order], x))
    close(to_tokens(x[order], invert(order)[:, None]), x)


def mesh(size, names=("ep",)):
    """Return what dispatch looks at before any communication."""
    return SimpleNamespace(ndim=len(names), mesh_dim_names=names, size=lambda: size)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            dict(via="carrier pigeon"),
            "via in ['all_to_all', 'local'], a moekit.rowwise(...), a moekit.deepep(...) or a moekit.Tr",
        ),
        *((dict(via=x), f"a moekit.{x}(...)") for x in ("rowwise", "deepep")),  # which are no strings
        (dict(mesh=mesh(4, ("edp", "ep"))), "a one-axis mesh, got axes ('edp', 'ep'); pass mesh['ep']"),
        (dict(mesh=mesh(3)), "dispatch needs ep to divide n_experts, got n_experts=4, ep=3"),
        (dict(mesh=mesh(2), via="local"), "'local' needs one rank, got ep=2; use via='all_to_all'"),
        (dict(x=draw(3, 5)), "dispatch needs a routing per token, got 3 tokens and 2 routings"),
    ],
)
def test_bad_input_is_refused_before_any_communication(unchecked, options, message):
    with refuses(message):
        mk.dispatch(**dict(x=draw(2, 5), routing=routing(4, [[0], [1]])) | options)


def test_combine_refuses_another_number_of_rows():
    sent = mk.dispatch(draw(2, 5), routing(4, [[0, 3], [1, 2]]))
    with refuses("combine needs the 4 rows that were dispatched, got 3"):
        mk.combine(sent.rows[:3], sent)


def test_a_routing_and_what_was_dispatched_print_shapes_and_no_values():
    x = torch.ones(3, 4, dtype=torch.float64)
    routing = mk.route(torch.ones(4, 8), x, top_k=2)
    assert repr(routing) == (
        "Routing(weights=float64 (3, 2), expert_ids=int64 (3, 2), counts=int64 (8,), logits=float64 (3, 8), "
        "scores=float64 (3, 8), dropped=None)"
    )
    assert repr(mk.dispatch(x, routing)) == (
        "Dispatched(rows=float64 (6, 4), offsets=int32 (8,), weights=float64 (3, 2), dropped=None, mesh=None)"
    )
