"""A whole training step on one CUDA device: what it must not do, and that kernels train as torch does."""

import functools
from dataclasses import replace

import pytest
import torch
import torch._dynamo
from tensordict import TensorDict
from waits import no_sync

import moekit as mk
from moekit import corpora, data
from moekit.testing._kernels import relative_error
from moekit.tree import named

triton = pytest.importorskip("triton")

CONFIG = mk.ModelConfig(
    vocab_size=512,
    d_model=256,
    n_layers=3,
    n_dense_layers=1,
    d_dense=512,
    n_heads=4,
    n_kv_heads=2,
    d_head=64,
    n_experts=8,
    top_k=2,
    d_expert=128,
    d_shared=128,
    norm="peri",
    qk_norm="head",
    normalize_embedding=True,
    balance_weight=0.01,
    router_z_weight=1e-3,
)


def make_batch(seed):
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 257), generator=generator)
    documents = (torch.arange(257) // 100).expand(4, -1)
    return mk.count_tokens(mk.batch.make_batch(tokens, documents, torch.arange(4)).to("cuda"))


class Step:
    """Two micro-batches, the norm, an update and the next biases, from fixed tensors: a batch and a key."""

    def __init__(self, block=mk.model.transformer_block, *, config=CONFIG, via=None, **options):
        via = None if via is None else via()
        self.params = mk.init_params(config, dtype=torch.bfloat16, device="cuda")
        schedule = mk.optim.warmup_cosine(1e-3, warmup_steps=2, total_steps=10)
        self.optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(schedule)))
        self.state = self.optimizer.init(self.params)
        self.batch, self.key = make_batch(0), mk.random.make_key(0, "cuda")
        loss_fn = functools.partial(
            mk.next_token_loss,
            config=config,
            assignment="random",
            key=self.key,
            block=block,
            via=via,
            **options,
        )
        self.grad_fn = mk.accumulate(mk.value_and_grad(loss_fn, has_aux=True), 2, straight=mk.model.is_expert)
        self.sums: TensorDict | None = None
        self.biases = torch.zeros(config.n_moe_layers, config.n_experts, device="cuda")
        self.loss = torch.zeros((), device="cuda")

    def __call__(self):
        (loss, stats), self.sums = self.grad_fn(self.params, self.batch, into=self.sums)
        self.optimizer.update(self.sums, self.state, self.params)
        self.biases.copy_(mk.balance.next_bias(self.biases, stats["counts"]))
        self.loss.copy_(loss)

    def feed(self, seed):
        """Put other tokens and another routing where the step reads them."""
        for name in ("tokens", "targets"):
            getattr(self.batch, name).copy_(getattr(make_batch(seed), name))
        self.key.copy_(mk.random.make_key(seed, "cuda"))


def rowwise():
    sizes = dict(d_model=CONFIG.d_model, n_experts=CONFIG.n_experts, top_k=CONFIG.top_k)
    return mk.rowwise(None, n_tokens=2 * 256, capacity_factor=1.25, device="cuda", **sizes)


WIDE_HEADS = replace(CONFIG, n_heads=2, n_kv_heads=1, d_head=128)  # as attention's fastest kernels want them
EACH = pytest.mark.parametrize(
    "options",
    [{}, {"config": WIDE_HEADS, "attend_across_documents": True}, {"via": rowwise}],
    ids=["documents", "whole rows", "rowwise"],
)


@EACH
@pytest.mark.parametrize(
    "wrap", [lambda block: block, torch.compile, mk.remat], ids=["eager", "compiled", "remat"]
)
def test_nothing_is_compiled_after_the_second_step_and_nothing_waits_for_the_device(
    wrap, options, monkeypatch
):
    torch._dynamo.reset()
    step = Step(wrap(mk.model.transformer_block), **options)
    for seed in range(2):
        step.feed(seed)
        step()

    def refuse(*_, **__):
        raise AssertionError("a Triton kernel is compiled again")

    monkeypatch.setattr(triton.knobs.runtime, "jit_cache_hook", refuse)
    batches = [make_batch(seed) for seed in range(2, 5)]
    keys = [mk.random.make_key(seed, "cuda") for seed in range(2, 5)]
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    with no_sync(), torch._dynamo.config.patch(error_on_recompile=True):
        for batch, key in zip(batches, keys, strict=True):
            step.batch.tokens.copy_(batch.tokens)
            step.key.copy_(key)
            step()
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert step.loss.isfinite()


@EACH
def test_a_captured_step_makes_the_losses_of_steps_that_are_launched(options):
    launched = Step(**options)
    want = []
    for seed in range(5):
        launched.feed(seed)
        launched()
        want.append(launched.loss.item())

    captured, stream = Step(**options), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # what compiles and allocates once must have done so
        for seed in range(2):
            captured.feed(seed)
            captured()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured()
    got = []
    for seed in range(2, 5):
        captured.feed(seed)
        graph.replay()
        got.append(captured.loss.item())
    assert got == pytest.approx(want[2:], abs=1e-4)
    assert captured.state["inner", "1", "step"] == 5
    for name, p in named(captured.params).items():
        assert relative_error(p, named(launched.params)[name]) < 1e-3, name


def test_for_one_routing_kernels_give_the_gradients_of_plain_torch():
    params, batch = mk.init_params(CONFIG, dtype=torch.bfloat16, device="cuda"), make_batch(0)
    loss_fn = functools.partial(
        mk.next_token_loss, config=CONFIG, assignment="random", key=mk.random.make_key(0, "cuda")
    )
    results = {
        kernels: mk.value_and_grad(functools.partial(loss_fn, kernels=kernels), has_aux=True)(params, batch)
        for kernels in ("torch", "auto", "triton")
    }
    (want, _), want_grads = results.pop("torch")
    for kernels, ((loss, _), grads) in results.items():
        assert abs(loss - want) < 2e-3, kernels
        for name, g in named(grads).items():
            assert relative_error(g, named(want_grads)[name]) < 3e-2, (kernels, name)


@pytest.mark.parametrize("kernels", ["torch", "triton", "quack"])
def test_gradients_go_straight_into_float32_buffers(kernels):
    if kernels == "quack":
        pytest.importorskip("quack", reason="quack-kernels is not installed: no package named quack")
    generator = torch.Generator("cuda").manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.bfloat16, device="cuda")
    experts = {"gate_up": draw(4, 256, 512).requires_grad_(), "down": draw(4, 256, 256).requires_grad_()}
    rows, offsets = draw(700, 256), torch.tensor([300, 300, 301, 690], dtype=torch.int32, device="cuda")
    grad = draw(700, 256)
    into = {name: torch.full(w.shape, 3.0, device="cuda") for name, w in experts.items()}
    for buffers in (None, into, into):
        out = mk.expert_forward(experts, rows, offsets, kernels=kernels, grad_into=buffers)
        out.backward(grad)
    for name, w in experts.items():
        assert relative_error(into[name] - 3, 2 * w.grad.float()) < 1e-2, name


def test_200_steps_end_where_plain_torch_ends_within_the_spread_of_seeds():
    config = replace(CONFIG, vocab_size=257, n_experts=16, top_k=4, d_expert=96, init_std=0.06)
    corpus = corpora.load_corpus(None, eos=None, vocab_size=config.vocab_size)

    def train(kernels, seed):
        params = mk.init_params(config, seed=seed, dtype=torch.bfloat16, device="cuda")
        lr = mk.optim.warmup_cosine(3e-3, warmup_steps=50, total_steps=200)
        optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(lr)))
        state = optimizer.init(params)
        loader = data.Loader(data.pack(corpus, 256), 16, seed=seed)
        grad_fn = mk.value_and_grad(
            functools.partial(mk.next_token_loss, config=config, kernels=kernels), has_aux=True
        )
        losses = []
        for _ in range(200):
            (_, stats), grads = grad_fn(params, mk.count_tokens(next(loader).to("cuda")))
            optimizer.update(grads, state, params)
            losses.append(stats["cross_entropy"])
        return torch.stack(losses[-20:]).mean().item()

    plain = [train("torch", seed) for seed in range(3)]
    ours = [train("auto", seed) for seed in range(3)]
    spread = max(plain) - min(plain)
    print("torch", plain, "auto", ours)
    assert abs(sum(ours) - sum(plain)) / 3 <= max(spread, 0.01), (plain, ours)


def test_routing_is_recorded_and_replayed_without_waiting_for_the_device(tmp_path):
    kept = []
    step = Step(mk.balance.keep_routing(mk.model.transformer_block, kept))
    step()
    kept.clear()
    with no_sync():
        (_, stats), _ = step.grad_fn(step.params, step.batch, into=step.sums)
        recording = mk.balance.record_step(kept, step.batch, config=CONFIG)
    mk.balance.write_recording(tmp_path / "routing.safetensors", [recording])
    read = mk.balance.read_recording(tmp_path / "routing.safetensors")
    batch = mk.balance.replay(read, 0, step.batch, config=CONFIG)
    loss = functools.partial(mk.next_token_loss, config=CONFIG)
    grad_fn = mk.accumulate(mk.value_and_grad(loss, has_aux=True), 4)
    grad_fn(step.params, batch)
    with no_sync():
        (_, again), _ = grad_fn(step.params, batch)
    assert torch.equal(again["counts"], stats["counts"])
