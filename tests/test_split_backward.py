"""A backward in two parts: together they give every gradient once, and neither does the other's work."""

import gc
import weakref
from typing import ClassVar

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from reference import close, draw, refuses
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import moekit as mk
from moekit import schedules
from moekit._split_backward import backward_of_input, keeps_what_it_saves
from moekit.tree import nested

N = 6  # of a square weight


def leaves_of(shapes, calls=None):
    """Return leaves whose hooks count their gradients."""
    leaves = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    for i, leaf in enumerate(leaves):
        if calls is not None:
            leaf.register_post_accumulate_grad_hook(lambda _, i=i: calls.append(i))
    return leaves


def in_two_parts(fn, shapes, calls=None):
    """Return the gradients of x and of weights, and which hooks ran in the first part."""
    x, *weights = leaves_of([(3, N), *shapes])
    calls = [] if calls is None else calls
    for i, w in enumerate(weights):
        w.register_post_accumulate_grad_hook(lambda _, i=i: calls.append(i))
    y, loss = fn(x, *weights)
    roots = [(y, y.detach().cos()), (loss, None)]
    roots = [(root, grad) for root, grad in roots if root is not None and root.requires_grad]
    rest = backward_of_input("test", roots, x, weights)
    first = list(calls)
    rest()
    return [x.grad, *(w.grad for w in weights)], first


def in_one(fn, shapes):
    leaves = leaves_of([(3, N), *shapes])
    y, loss = fn(*leaves)
    roots = [(y, y.detach().cos()), (loss, None)]
    tensors, grads = zip(*[(r, g) for r, g in roots if r is not None and r.requires_grad], strict=True)
    torch.autograd.backward(tensors, grads)
    return [leaf.grad for leaf in leaves]


def check(fn, shapes, first=()):
    calls = []
    got, early = in_two_parts(fn, shapes, calls)
    want = in_one(fn, shapes)
    for g, w in zip(got, want, strict=True):
        assert (g is None) == (w is None)
        if w is not None:
            close(g, w, 1e-12)
    assert early == list(first)
    assert sorted(calls) == [i for i, w in enumerate(want[1:]) if w is not None]  # each once


SQUARE, ROW = (N, N), (N,)
CASES = {
    "a bias and a weight of one node": (lambda x, a, b: (torch.addmm(b, x, a).sin(), None), [SQUARE, ROW]),
    "one weight at two depths, another between": (
        lambda x, a, b: ((((x @ a).sin() @ b).sin() @ a).sin(), None),
        [SQUARE, SQUARE],
    ),
    "a product of weights": (lambda x, a, b: (x @ (a @ b), (x @ a).sin().sum()), [SQUARE, SQUARE]),
    "a loss of weights alone": (lambda x, a, b: ((x @ a).sin(), (b @ a).square().sum()), [SQUARE, SQUARE]),
    "a loss of weights alone that the output reads": (
        lambda x, a: (lambda loss: ((x @ a) * loss, loss))(a.square().mean()),
        [SQUARE],
    ),
    "a part of a weight each": (
        lambda x, a: (torch.cat([(x[i] @ w).sin() for i, w in enumerate(a)]), None),
        [(3, N, N)],
    ),
    "a loss inside": (
        lambda x, a, b: (lambda h: ((h @ b).sin(), h.square().mean()))(F.softmax(x @ a, -1)),
        [SQUARE, SQUARE],
    ),
    "norms and a residual": (
        lambda x, a, b: (x + F.rms_norm(x, (N,), b) @ a + F.layer_norm(x, (N,), b), None),
        [SQUARE, ROW],
    ),
    "a weight that nothing reads": (lambda x, a, b: ((x @ a).sin(), None), [SQUARE, SQUARE]),
    "an output that does not depend on weights": (lambda x, a: (x.sin(), (x @ a).sum()), [SQUARE]),
    "no path to x through the loss": (lambda x, a: (x @ x.T, a.square().sum()), [SQUARE]),
}


@pytest.mark.parametrize("name", CASES)
def test_two_parts_give_every_gradient_once(name):
    check(*CASES[name])


@settings(max_examples=60)
@given(st.lists(st.tuples(*[st.integers(0, 20)] * 3), min_size=1, max_size=9), st.integers(0, 3))
def test_two_parts_give_every_gradient_of_any_graph(steps, n_losses):
    def fn(x, *weights):
        known = [x]
        for kind, i, j in steps:
            a, w = known[i % len(known)], weights[j % 3]
            known.append((a @ w, a + known[j % len(known)], a * w[0], (a @ (w @ w.T)).sin())[kind % 4])
        loss = sum((z.sin().sum() for z in known[:n_losses]), start=weights[0].sum() * 0)
        return x + known[-1], loss

    check(fn, [SQUARE] * 3)


def test_a_hook_of_a_tensor_inside_runs_once():
    seen = []

    def fn(x, a):
        y = x @ a
        y.register_hook(lambda g: seen.append(1) or 2 * g)
        return y, None

    x, a = leaves_of([(3, N), SQUARE])
    y, _ = fn(x, a)
    backward_of_input("test", [(y, torch.ones_like(y))], x, [a])()
    close(a.grad, 2 * x.detach().T @ torch.ones_like(y))
    close(x.grad, 2 * torch.ones_like(y) @ a.detach().T)


def test_each_part_does_its_products_and_no_others():
    x, *weights = leaves_of([(3, N), *[SQUARE] * 4])
    y = x
    with FlopCounterMode(display=False) as forward:
        for w in weights:
            y = (y @ w).sin()
    with FlopCounterMode(display=False) as first:
        rest = backward_of_input("test", [(y, torch.ones_like(y))], x, weights)
    with FlopCounterMode(display=False) as second:
        rest()
    n = forward.get_total_flops()
    assert first.get_total_flops() == second.get_total_flops() == n > 0


def test_weights_come_in_the_order_of_a_backward():
    calls = []
    in_two_parts(lambda x, a, b, c: ((x @ a).sin() @ b.sin() @ c, None), [SQUARE] * 3, calls)
    assert calls == [2, 1, 0]


# --- Custom functions -----------------------------------------------------------------


class Kept:
    """What a graph keeps, seen by weak references."""


class Joint(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, *grads):
        Joint.calls += 1
        x, w = ctx.saved_tensors
        return grads[0] @ w.T, x.T @ grads[0]


class Together(Joint):
    gives_gradients_together = True


class Same(torch.autograd.Function):
    """The identity, which keeps something."""

    kept: ClassVar = weakref.WeakSet()

    @staticmethod
    def forward(ctx, x):
        ctx.kept = Kept()
        Same.kept.add(ctx.kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0]


def test_custom_functions_beside_the_path_or_on_it_are_fine():
    check(lambda x, a: (Same.apply(Same.apply(x) @ Same.apply(a)), None), [SQUARE])


def test_weights_of_a_function_that_gives_gradients_together_come_in_the_first_part():
    before = Joint.calls
    fn = lambda x, a, b: (Together.apply(Same.apply(x @ b).sin(), a.sin()), None)  # noqa: E731
    check(fn, [SQUARE, SQUARE], first=[0])
    assert Joint.calls == before + 2  # once in two parts, once in one
    tied = lambda x, a, b: (Together.apply((x @ a @ b).sin(), a), None)  # noqa: E731
    check(tied, [SQUARE, SQUARE], first=[0])


def test_a_function_that_joins_x_and_a_weight_is_refused():
    with refuses(
        "test needs functions that give the gradient of x without that of a weight, got the custom autograd "
        "function Joint, which reads both; take a schedule whose backwards are whole, e.g. one_f_one_b, or "
        "set gives_gradients_together = True on it"
    ):
        in_two_parts(lambda x, a: (Joint.apply(x, a), None), [SQUARE])


def test_the_graph_is_freed_part_by_part():
    x, a, b = leaves_of([(3, N), SQUARE, SQUARE])
    y = Same.apply(Same.apply(Same.apply(x) @ a) @ b)
    rest = backward_of_input("test", [(y, torch.ones_like(y))], x, [a, b])
    del y
    gc.collect()
    assert len(Same.kept) == 2  # what lies between the last weight and the end is gone
    rest()
    gc.collect()
    assert len(Same.kept) == 0  # while the function still exists


# --- In a pipeline --------------------------------------------------------------------


def first(params, x, part):
    return part @ params["first"], part.new_zeros(()), {}


def run(stage, schedule=schedules.zero_bubble_v):
    """Run two stages on one process, of which the second is ``stage(w, x)``."""
    weights = nested({"first": draw(N, N), "second": draw(N, N, seed=1)})
    second = lambda p, x, _: (None, stage(p["second"], x).sum(), {})  # noqa: E731
    empty = lambda part: torch.empty_like(part)  # noqa: E731
    run = mk.pipeline([first, second], schedule=schedule(1, 2), boundary=empty)
    return run(weights, draw(4, N, seed=2))


WHO = "pipeline, which splits the backward of stage 1 into I and W as its schedule says, needs "


def test_stages_whose_backward_cannot_be_split_are_refused():
    mm = lambda w, x: (x @ w).sin()  # noqa: E731
    compiled = torch.compile(mm, backend="aot_eager")
    recomputed = [
        lambda w, x: checkpoint(mm, w, x, use_reentrant=False),
        mk.remat(mm),
    ]
    for stage in recomputed:
        with refuses(WHO + "stages that keep what their backward reads, got one with remat"):
            run(stage)
    with torch.autograd.graph.save_on_cpu(), refuses(WHO + "stages that keep what their backward reads"):
        run(mm)
    with refuses(WHO + "functions that give the gradient of x without that of a weight, got a compiled one"):
        run(compiled)
    with refuses(WHO + "functions that give the gradient of x without that of a weight, got the custom"):
        run(lambda w, x: Joint.apply(x, w))
    with refuses("pipeline needs stages that read their x, stage 1 does not"):
        run(lambda w, x: w)


def test_whole_backwards_take_any_stage():
    mm = lambda w, x: (x @ w).sin()  # noqa: E731
    two = lambda n_ranks, m: schedules.interleaved(n_ranks, m, 2)  # noqa: E731
    _, want = run(mm, two)
    for stage in (mk.remat(mm), torch.compile(mm, backend="aot_eager"), lambda w, x: Joint.apply(x, w).sin()):
        _, got = run(stage, two)
        close(got["second"], want["second"])
    _, got = run(mm)
    close(got["second"], want["second"])
    close(got["first"], want["first"])


def test_the_first_stage_may_recompute_for_it_has_no_input_gradient():
    weights = nested({"first": draw(N, N), "second": draw(N, N, seed=1)})
    second = lambda p, x, _: (None, (x @ p["second"]).sin().sum(), {})  # noqa: E731
    recomputed = mk.remat(first)
    grads = [
        mk.pipeline([f, second], schedule=schedules.zero_bubble(1, 2, 2), boundary=torch.empty_like)(
            weights, draw(4, N, seed=2)
        )[1]
        for f in (first, recomputed)
    ]
    close(grads[1]["first"], grads[0]["first"])


def test_other_errors_of_a_stage_pass():
    with pytest.raises(RuntimeError, match="mine"), keeps_what_it_saves("test"):
        raise RuntimeError("mine")
