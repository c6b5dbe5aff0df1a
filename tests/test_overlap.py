"""What runs beside what, in one process: the order of launches, values, and the choice by measurement."""

import contextlib
import gc
import time
import weakref
from functools import partial
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from reference import close, draw, flat, packed_batch, refuses, small_config
from tensordict import TensorDict
from test_moe import D, kernel_layer, layer, run
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

import moekit as mk
from moekit import _moe, overlap
from moekit.overlap import beside, fastest, two_batch

BESIDE = pytest.mark.parametrize("how", ["two_batch", "shared"])


# --- Values ---------------------------------------------------------------------------


@BESIDE
@pytest.mark.parametrize("t", [7, 8, 1, 0])
def test_a_layer_is_the_same_whatever_runs_beside_what(t, how):
    params, x = layer(), draw(t, D)
    close(run(mk.moe, params, x, top_k=2, overlap=how), run(mk.moe, params, x, top_k=2))


@pytest.mark.parametrize(
    ("via", "how"), [("local", "two_batch"), ("rowwise", "two_batch"), ("local", "shared")]
)
def test_a_layer_of_kernels_is_the_same_too(via, how):
    params, x = kernel_layer()
    x, options = x[:3], dict(top_k=2)
    want, want_grads = run(mk.moe, params, x, kernels="torch", **options)
    if via == "rowwise":
        via = mk.rowwise(None, n_tokens=2, d_model=16, n_experts=6, top_k=2, dtype=torch.float32)
    got, grads = run(mk.moe, params, x, via=via, kernels="triton", overlap=how, **options)
    close(got, want, 1e-5)
    for name, g in want_grads.items():
        close(grads[name], g, 1e-5)


@BESIDE
def test_the_routing_is_that_of_all_tokens(how):
    params, x = layer(), draw(7, D)
    options = dict(top_k=2, assignment="random", key=mk.random.make_key(3), token_ids=torch.arange(7) + 50)
    got, want = (mk.moe(params, x, overlap=o, **options)[1] for o in (how, "none"))
    for name in ("weights", "expert_ids", "counts", "logits", "scores"):
        assert torch.equal(getattr(got, name), getattr(want, name)), name
    assert got.dropped is want.dropped is None


def test_what_the_halves_have_no_room_for_is_counted_together():
    sizes = dict(n_tokens=4, d_model=D, n_experts=6, top_k=2, dtype=torch.float64)
    via = mk.rowwise(None, **sizes, capacity_factor=0.5)  # 4 rows of the 8 and 6 of the halves
    routing = mk.moe(layer(shared=False), draw(7, D), top_k=2, via=via, overlap="two_batch")[1]
    assert routing.dropped.sum() == 8 + 6 - 2 * 4 and routing.counts.sum() == 14


@BESIDE
@pytest.mark.parametrize("recompute", ["none", "block", ("ffn",)])
def test_a_model_is_the_same_recomputed_and_accumulated(how, recompute):
    config = small_config(balance_weight=0.3, router_z_weight=0.02)
    params, batch = mk.init_params(config, dtype=torch.float64), packed_batch()

    def run(how, recompute):
        block = mk.remat(partial(mk.model.transformer_block, overlap=how), recompute)
        loss = partial(mk.next_token_loss, config=config, block=block)
        straight = dict(straight=mk.model.is_expert)
        return mk.accumulate(mk.value_and_grad(loss, has_aux=True), 2, **straight)(params, batch)

    (loss, stats), grads = run(how, recompute)
    (want, want_stats), want_grads = run("none", "none")
    close([loss, *stats.values()], [want, *want_stats.values()])
    close(flat(grads), flat(want_grads))


@BESIDE
def test_a_compiled_layer_is_the_same(how):
    params, x = kernel_layer()
    torch.compiler.reset()
    compiled = torch.compile(mk.moe, backend="eager")
    close(compiled(params, x, top_k=2, overlap=how)[0], mk.moe(params, x, top_k=2)[0], 1e-5)


def test_four_functions_by_hand_are_a_layer_in_two_batches():
    params, x = layer(shared=False), draw(7, D)

    def send(x, ids, weights, logits, scores):
        counts = torch.bincount(ids.flatten(), minlength=logits.shape[1])
        half = dict(weights=weights, expert_ids=ids, counts=counts, logits=logits, scores=scores)
        return mk.dispatch(x, mk.Routing(**half))

    def by_hand(params, x):
        run = two_batch(
            send,
            lambda sent: (mk.expert_forward(params["experts"], sent.rows, sent.offsets), sent),
            lambda out: mk.combine(*out),
        )
        routing = mk.route(params["router"], x, top_k=2)
        return [run(x, routing.expert_ids, routing.weights, routing.logits, routing.scores)]

    close(run(by_hand, params, x), run(mk.moe, params, x, top_k=2))


def test_what_cannot_run_beside_is_refused(unchecked):
    params, x = layer(shared=False), draw(3, D)
    with refuses("moe needs overlap 'none', 'two_batch' or 'shared', got 'auto'; moekit.overlap.fastest"):
        mk.moe(params, x, top_k=2, overlap="auto")
    with refuses('moe needs params for overlap="shared" with shared'):
        mk.moe(params, x, top_k=2, overlap="shared")
    with refuses("beside needs a tensor among the arguments"):
        beside(lambda: None)
    same = two_batch(lambda *x: x[0], lambda x: x, lambda x: x)
    with refuses("two_batch needs tokens of one length, got none"):
        same()
    with refuses("two_batch needs tokens of one length, got [(4, 2), (8,)]"):
        same(torch.ones(4, 2), torch.ones(8))
    with refuses("two_batch needs a row of fetch for each of 2 and 2 tokens, got 1 and 1"):
        two_batch(lambda x: x, lambda x: x, lambda x: x[:1])(torch.ones(4, 2))
    with refuses("two_batch needs a row of fetch for each of 2 and 1 tokens, got 1 and 2"):
        two_batch(lambda x: x, lambda x: x, lambda x: x.new_ones(3 - len(x)))(torch.ones(3))
    with refuses("two_batch needs meanwhile() to return (3,) as fetch does, got (3, 1)"):
        two_batch(lambda x: x, lambda x: x, lambda x: x, meanwhile=lambda: torch.ones(3, 1))(torch.ones(3))


# --- Order ----------------------------------------------------------------------------


class Order(torch.autograd.Function):
    """Note a name when it is computed and again when it is differentiated."""

    @staticmethod
    def forward(ctx, x, name, seen):
        seen.append(name)
        ctx.note = lambda: seen.append(f"d {name}")
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.note()
        return grad, None, None


def test_each_half_travels_while_the_other_computes_forward_and_backward():
    seen, x = [], draw(5, 2).requires_grad_()

    def part(name, x):
        return Order.apply(x, f"{name} of {len(x)}", seen)

    phases = [partial(part, name) for name in ("send", "compute", "fetch")]
    y = two_batch(*phases, meanwhile=lambda: part("meanwhile", x))(x)
    assert seen == [
        *("meanwhile of 5", "send of 3", "send of 2"),
        *("compute of 3", "fetch of 3", "compute of 2", "fetch of 2"),
    ]
    seen.clear()
    close(torch.autograd.grad(y.sum(), x)[0], torch.full_like(x, 2.0))
    assert seen == [
        *("d fetch of 2", "d compute of 2", "d fetch of 3", "d compute of 3"),
        *("d send of 2", "d send of 3", "d meanwhile of 5"),
    ]


class Streams:
    """Streams of a device that is not there: what has been launched on each, and after what."""

    def __init__(self, monkeypatch):
        self.main, self.side = ({"name": name, "clock": {}} for name in ("main", "side"))
        self.current, self.stamps = self.main, {}
        monkeypatch.setattr(overlap, "_side_stream", lambda device, urgent: self.stream(self.side))
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self.stream(self.current))
        monkeypatch.setattr(torch.cuda, "stream", self.switch)

    def stream(self, one):
        def wait_event(event):
            one["clock"] |= {k: max(n, one["clock"].get(k, 0)) for k, n in event.items()}

        return SimpleNamespace(
            of=one, device=None, wait_event=wait_event, record_event=lambda: dict(one["clock"])
        )

    @contextlib.contextmanager
    def switch(self, stream):
        before, self.current = self.current, stream.of
        yield
        self.current = before

    def launch(self, name, x):
        clock = self.current["clock"]
        clock[self.current["name"]] = clock.get(self.current["name"], 0) + 1
        self.stamps[name] = (self.current["name"], dict(clock))
        return x

    def ordered(self, first, then):
        """Say whether the device starts one only after the other has ended."""
        stream, clock = self.stamps[first]
        return clock[stream] <= self.stamps[then][1].get(stream, 0)

    def together(self, one, other):
        return not self.ordered(one, other) and not self.ordered(other, one)


def test_streams_wait_for_what_they_read_and_for_nothing_else(monkeypatch):
    streams = Streams(monkeypatch)

    def part(name):
        return lambda x: streams.launch(f"{name} {len(x)}", x)

    streams.launch("before", None)
    phases = map(part, ("send", "compute", "fetch"))
    y = two_batch(*phases, meanwhile=lambda: streams.launch("meanwhile", draw(5, 1)))(draw(5, 1))
    streams.launch("after", y)
    chain = ["before", "send 3", "compute 3", "fetch 3", "after"]
    for first, then in [*pairwise(chain), ("compute 3", "compute 2")]:
        assert streams.ordered(first, then), (first, then)
    for first, then in [("before", "send 2"), ("send 2", "compute 2"), ("compute 2", "fetch 2")]:
        assert streams.ordered(first, then), (first, then)
    assert streams.ordered("fetch 2", "after") and streams.ordered("meanwhile", "after")
    side = ["send 3", "send 2", "fetch 3", "fetch 2"]  # share what a transport keeps
    assert all(streams.ordered(*pair) for pair in pairwise(side))
    for one, other in [("compute 3", "send 2"), ("fetch 3", "compute 2")]:
        assert streams.together(one, other), (one, other)
    assert streams.together("meanwhile", "send 3") and streams.together("meanwhile", "send 2")


def test_a_shared_expert_runs_beside_all_that_is_routed(monkeypatch):
    streams = Streams(monkeypatch)
    streams.launch("before", None)
    take = beside(partial(streams.launch, "shared"), draw(2, 1))
    streams.launch("routed", None)
    take()
    streams.launch("after", None)
    assert streams.ordered("before", "shared") and streams.ordered("shared", "after")
    assert streams.together("shared", "routed")


@BESIDE
def test_a_layer_runs_its_parts_on_the_streams_that_it_says(monkeypatch, how):
    streams, (params, x) = Streams(monkeypatch), (layer(), draw(7, D))

    def noted(name, fn):
        def run(*args, **options):
            streams.launch(name if name not in streams.stamps else f"{name} again", None)
            return fn(*args, **options)

        return run

    for name in ("_shared_expert", "dispatch", "expert_forward", "combine"):
        monkeypatch.setattr(_moe, name, noted(name, getattr(_moe, name)))
    mk.moe(params, x, top_k=2, overlap=how)
    streams.launch("after", None)
    on_side = {name.split()[0] for name, (stream, _) in streams.stamps.items() if stream == "side"}
    assert on_side == {"shared": {"_shared_expert"}, "two_batch": {"dispatch", "combine"}}[how]
    assert all(streams.ordered(name, "after") for name in streams.stamps if name != "after")
    if how == "shared":
        assert streams.together("_shared_expert", "expert_forward")
    else:
        assert streams.together("dispatch again", "expert_forward")
        assert streams.together("combine", "expert_forward again")


class FirstReads(TorchFunctionMode):
    """Note the stream on which a node that reads a parameter is made: there its gradient is added."""

    def __init__(self, streams):
        super().__init__()
        self.streams, self.seen = streams, []

    def __torch_function__(self, fn, types, args=(), kwargs=None):
        out = fn(*args, **(kwargs or {}))
        read = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x.is_leaf]
        made = [y for y in tree_leaves(out) if isinstance(y, Tensor) and y.grad_fn is not None]
        self.seen += [self.streams.current["name"]] * (bool(made) and any(x.requires_grad for x in read))
        return out


def test_parameters_among_arguments_are_first_read_on_the_callers_stream(monkeypatch):
    w, b, c = (torch.ones(n, requires_grad=True) for n in (1, 2, 2))
    tree = dict(
        deep=[TensorDict(dict(inner=TensorDict(dict(b=b)))), 3.0], ids=torch.ones(2, dtype=torch.int64)
    )

    def fn(w, tree):
        assert streams.current is streams.side
        return w * tree["deep"][0]["inner", "b"] * tree["ids"]

    with FirstReads(streams := Streams(monkeypatch)) as reads:
        y = beside(fn, w, tree)()
        assert reads.seen == ["main"] * 2
        y = y * two_batch(lambda c: c.exp(), lambda e: (e, w), lambda pair: pair[0] * pair[1])(c)
    assert set(reads.seen) == {"main"}
    y.sum().backward()
    assert w.is_leaf and all(p.grad is not None for p in (w, b, c))


@BESIDE
def test_no_parameter_of_a_layer_is_first_read_beside(monkeypatch, how):
    params, x = layer(), draw(7, D)
    for p in tree_leaves(params):
        p.requires_grad_()
    with FirstReads(Streams(monkeypatch)) as reads:
        mk.moe(params, x, top_k=2, overlap=how)
    assert set(reads.seen) == {"main"}


def test_what_is_recomputed_is_recomputed_before_any_of_it_is_differentiated():
    """So it is on the stream of the last node, whatever streams the others are on."""
    seen, x = [], draw(3, 2).requires_grad_()

    def block(x):
        return overlap._Joined.apply(Order.apply(x.exp(), "block", seen))

    y = mk.remat(block)(x)
    y.sum().backward()
    assert seen == ["block", "block", "d block"]
    close(x.grad, x.detach().exp())


# --- Choice ---------------------------------------------------------------------------


def measured(functions, *args, rounds=3):
    """Call until it is decided, and once more."""
    run = fastest(functions, rounds=rounds)
    for _ in range((rounds + 1) * len(functions)):
        assert run.choice is None
        run(*args)
    return run


def test_the_fastest_is_chosen_and_all_times_are_given(capsys):
    run = measured({"slow": time.sleep, "fast": lambda seconds: time.sleep(seconds / 20)}, 0.04)
    choice = run.choice
    assert choice.name == "fast" and list(choice.seconds) == ["slow", "fast"]
    assert choice.seconds["slow"] >= 0.04 > choice.seconds["fast"] >= 0.002
    assert str(choice).startswith("fast is fastest: slow ") and str(choice).endswith(" ms")
    assert capsys.readouterr().out == f"{choice}\n"


def test_functions_take_turns_untimed_at_first_and_then_the_fastest_is_called_alone():
    calls = []

    def fn(name, seconds):
        calls.append(name)
        time.sleep(seconds * (1 + (name == "a")) if calls.count(name) > 1 else 0.2)
        return name

    run = measured({name: partial(fn, name) for name in "ab"}, 4e-3)
    assert "".join(calls) == "ab" * 4 and max(run.choice.seconds.values()) < 0.2
    assert run(0) == run(0) == "b" and "".join(calls) == "ab" * 4 + "bb"


def test_what_is_not_chosen_is_let_go_with_all_that_it_holds():
    def way(seconds):
        return lambda: time.sleep(seconds)

    ways = {"slow": way(4e-3), "fast": way(0)}
    held = {name: weakref.ref(fn) for name, fn in ways.items()}
    run = fastest(ways, rounds=1)
    del ways
    for _ in range(3):
        run()
        assert all(fn() for fn in held.values())
    run()
    gc.collect()
    assert run.choice.name == "fast" and held["fast"]() and held["slow"]() is None


def test_of_equals_the_first_is_chosen(monkeypatch):
    monkeypatch.setattr(time, "perf_counter", lambda: 1.0)
    assert measured({"none": int, "two_batch": int}).choice.name == "none"


def test_without_a_choice_or_values_the_first_is_called():
    run = fastest({"none": torch.exp, "two_batch": None}, rounds=1)
    for _ in range(5):
        assert run(torch.ones(2, device="meta")).is_meta and run.choice is None
    alone = fastest({"two_batch": lambda: 7}, rounds=1)
    assert [alone() for _ in range(5)] == [7] * 5 and alone.choice is None


def test_nothing_to_time_is_refused():
    with refuses("fastest needs a function and rounds >= 1, got [] and rounds=5"):
        fastest({})
    with refuses("fastest needs a function and rounds >= 1, got ['none'] and rounds=0"):
        fastest({"none": int}, rounds=0)
