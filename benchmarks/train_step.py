r"""A training step of bench-8L on one GPU: how fast, and with what memory, beside plain PyTorch.

    python benchmarks/train_step.py --json docs/results/train_step.json --plot docs/results/train_step.png

Three questions, each with the dense ceiling measured in the same rotation:

- forward and backward of two sequences with E = 8 (tokens/s, peak memory);
- the same with E = 8 and E = 48 in turn, to see what six times the experts cost;
- the whole step: micro-batches accumulated in float32, the gradient's norm, AdamW over float32 masters.

All candidates train the same tensors: the parameters, and in the whole step the masters, moments and sums.
Routing is random, or as ``--routing`` says (see benchmarks/routing.py). FLOPs are the model's
(:func:`moekit.plan.flops_per_token`), nothing recomputed counted. The baseline is benchmarks/stock.py,
compiled with its logits made again in the backward or kept, and eager; eager it is left out of the whole
step. In forward and backward the same model also runs with the MoE layers of torchtitan and transformers for
its routed experts, on copies of their parameters and with their own router, which is all but even on a model
that has not been trained and does not take ``--routing``; the rest is the baseline's, compiled.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import bench_8l
import peers
import torch
import tyro
from bench_8l import our_gradients, our_loss, our_optimizer, our_step
from measure import (
    Result,
    check_run,
    describe,
    end,
    environment,
    free,
    idle_share,
    plot,
    refuse_unknown,
    say,
    table,
    write_json,
)
from routing import parse_routing
from stock import make_loss
from tensordict import TensorDict

import moekit as mk
from moekit import plan
from moekit.tree import map_named, named

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured."""

    parts: tuple[Literal["forward_backward", "experts", "whole_step"], ...] = (
        "forward_backward",
        "experts",
        "whole_step",
    )
    candidates: tuple[str, ...] = (
        "moekit",
        "stock compiled",
        "stock compiled, head kept",
        "stock eager",
        "torchtitan",
        "qwen3",
    )  # the last are layers of benchmarks/peers.py
    n_experts: int = 8
    more_experts: int = 48
    routing: str = "random"  # see benchmarks/routing.py; the peers' layers have their own
    batch_size: int = 2  # sequences of a micro-batch
    seq_len: int = 8192  # tokens
    n_microbatches: int = 8  # of the whole step
    rounds: int = 5
    slot: float = 0.5  # seconds a candidate in a round
    toy: bool = False  # a width and a length for a CPU, where what is compiled is left out
    json: Path | None = None
    plot: Path | None = None


STOCK: dict[str, dict[str, Any]] = {
    "stock compiled": dict(compiled=True, recompute_head=True),
    "stock compiled, head kept": dict(compiled=True, recompute_head=False),
    "stock eager": dict(compiled=False, recompute_head=True),
}

cfg = tyro.cli(Config, description=__doc__)
refuse_unknown("candidate", cfg.candidates, ["moekit", *STOCK, *peers.LAYERS])
device = "cuda" if torch.cuda.is_available() else "cpu"
check_run(cfg, device)
parse_routing(cfg.routing)
dtype = torch.float32 if cfg.toy else torch.bfloat16
if cfg.toy:
    cfg = replace(cfg, seq_len=min(cfg.seq_len, 128))
if cfg.toy and device == "cpu":  # compiling takes minutes there
    cfg = replace(cfg, candidates=tuple(n for n in cfg.candidates if n in ("moekit", "stock eager")))
    say(f"a toy on a CPU: {', '.join(cfg.candidates) or 'no candidate'}; what is compiled is left out")
chosen = cfg.candidates
BY_PART = {  # those of each part
    "forward_backward": ("moekit", *STOCK, *peers.LAYERS),
    "experts": ("moekit", "stock compiled"),
    "whole_step": ("moekit", "stock compiled", "stock compiled, head kept"),
}
for part in cfg.parts:
    if not set(chosen) & set(BY_PART[part]):
        raise SystemExit(
            f"part {part} needs a candidate of {', '.join(map(repr, BY_PART[part]))}, got "
            f"{', '.join(map(repr, chosen)) or 'none'}; choose one, or other --parts"
        )

make_model = functools.partial(bench_8l.make_model, seq_len=cfg.seq_len, toy=cfg.toy)
make_batch = functools.partial(bench_8l.make_batch, seq_len=cfg.seq_len, device=device, routing=cfg.routing)

# --- The candidates' gradients --------------------------------------------------------


def peers_loss(name: str, model: mk.ModelConfig, params: TensorDict) -> tuple[Callable, list[torch.Tensor]]:
    """Return the baseline's loss with a peer's layers for the routed experts, and their own parameters."""
    layers, leaves = {}, []
    for i in filter(model.is_moe, range(model.n_layers)):
        moe = params["layers", str(i), "moe"]
        weights = dict(router=moe["router"].to(dtype), **moe["experts"])
        layers[i], parameters = peers.LAYERS[name](weights, model.top_k)
        leaves += parameters
    return make_loss(model, **STOCK["stock compiled"], experts_of=layers), leaves


def differentiable(params: TensorDict) -> TensorDict:
    """Return aliases of parameters with ``.grad`` of their own."""
    return map_named(lambda _, p: p.detach().requires_grad_(), params)


def stock_gradients(
    loss: Callable, params: TensorDict, batch: mk.batch.Batch, *, more: Sequence[torch.Tensor] = ()
) -> Callable[[], object]:
    """Return the same in plain PyTorch; ``more`` are parameters beside the model's."""
    tree = differentiable(params)
    leaves = [*named(tree).values(), *more]

    def run() -> None:
        loss(tree, batch).backward()
        for p in leaves:
            p.grad = None

    return run


def stock_step(loss: Callable, params: TensorDict, batch, masters, moments, sums) -> Callable[[], object]:
    """Return a whole step as written in plain PyTorch: hooks that add to float32, fused AdamW, copies."""
    tree = differentiable(params)
    leaves = list(named(tree).values())
    buffers, master = list(named(sums).values()), list(named(masters).values())

    def add(buffer: torch.Tensor, p: torch.Tensor) -> None:
        assert p.grad is not None
        buffer.add_(p.grad)
        p.grad = None

    for p, buffer in zip(leaves, buffers, strict=True):
        p.register_post_accumulate_grad_hook(functools.partial(add, buffer))
    weights = [m.requires_grad_() for m in (x.detach() for x in master)]
    optimizer = torch.optim.AdamW(weights, lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    for w, m, v in zip(
        weights, named(moments["exp_avg"]).values(), named(moments["exp_avg_sq"]).values(), strict=True
    ):
        optimizer.state[w] = dict(step=torch.zeros((), device=device), exp_avg=m, exp_avg_sq=v)

    def run() -> None:
        torch._foreach_zero_(buffers)
        for part in mk.batch.split_batch(batch, cfg.n_microbatches):
            (loss(tree, part) / cfg.n_microbatches).backward()
        for w, buffer in zip(weights, buffers, strict=True):
            w.grad = buffer
        torch.nn.utils.clip_grad_norm_(weights, 1.0, foreach=True)
        optimizer.step()
        for w in weights:
            w.grad = None
        with torch.no_grad():
            torch._foreach_copy_(leaves, weights)

    return run


# --- The three parts ------------------------------------------------------------------


def compare() -> list[Result]:
    """Time forward and backward of all candidates."""
    model = make_model(cfg.n_experts)
    params, batch = mk.init_params(model, dtype=dtype, device=device), make_batch(model, cfg.batch_size)
    builders = {name: functools.partial(forward_backward, name, model, params, batch) for name in chosen}
    return timed(builders, model, cfg.batch_size, rounds=cfg.rounds)


def compare_experts() -> list[Result]:
    """Time forward and backward with few and with many experts."""
    builders = {}
    for n_experts in (cfg.n_experts, cfg.more_experts):
        model = make_model(n_experts)
        params, batch = mk.init_params(model, dtype=dtype, device=device), make_batch(model, cfg.batch_size)
        for name in BY_PART["experts"]:
            if name in chosen:
                builders[f"{name}, E = {n_experts}"] = functools.partial(
                    forward_backward, name, model, params, batch
                )
    return timed(builders, make_model(cfg.n_experts), cfg.batch_size, rounds=cfg.rounds)


def forward_backward(
    name: str, model: mk.ModelConfig, params: TensorDict, batch: mk.batch.Batch
) -> Callable[[], object]:
    """Build a candidate that makes gradients and drops them."""
    if name == "moekit":
        return our_gradients(our_loss(model, device=device), params, batch)
    if name in STOCK:
        return stock_gradients(make_loss(model, **STOCK[name]), params, batch)
    if batch.expert_ids is not None:
        raise ValueError(f"{name}'s router chooses by itself, got --routing {cfg.routing}; take random")
    loss, leaves = peers_loss(name, model, params)
    return stock_gradients(loss, params, batch, more=leaves)


def whole_step() -> list[Result]:
    """Time accumulation, norm and update."""
    model = make_model(cfg.n_experts)
    n_sequences = cfg.batch_size * cfg.n_microbatches
    params, batch = mk.init_params(model, dtype=dtype, device=device), make_batch(model, n_sequences)
    optimizer, state, sums = our_optimizer(params)

    def build(name: str) -> Callable[[], object]:
        if name == "moekit":
            loss = our_loss(model, device=device)
            return our_step(loss, params, batch, optimizer, state, sums, n_microbatches=cfg.n_microbatches)
        loss = make_loss(model, **STOCK[name])
        return stock_step(loss, params, batch, state["master"], state["inner", "1"], sums)

    names = [name for name in chosen if name in BY_PART["whole_step"]]
    builders = {name: functools.partial(build, name) for name in names}
    return timed(builders, model, n_sequences, rounds=max(cfg.rounds // 2, 1))


def timed(
    builders: dict[str, Callable], model: mk.ModelConfig, n_sequences: int, *, rounds: int
) -> list[Result]:
    """Build candidates that take the same step, run each once, so that it is compiled, and time them."""
    n_tokens = n_sequences * cfg.seq_len
    flops = n_tokens * plan.flops_per_token(model, cfg.seq_len)
    results, runs = bench_8l.timed(
        builders, flops=flops, tokens=n_tokens, device=device, rounds=rounds, slot=cfg.slot
    )
    for result in results:
        if device == "cuda" and result.name.startswith("moekit") and result.error is None:
            result.idle = idle_share(runs[result.name])
    return results


parts = {"forward_backward": compare, "experts": compare_experts, "whole_step": whole_step}
record = dict(
    environment=environment(device, (*peers.PACKAGES, "flash-attn-4")),
    config=asdict(cfg),
    parts={},
)
for name in cfg.parts:
    try:
        results = parts[name]()
    except Exception as e:  # what its candidates share cannot be made
        results = [Result(name=name, error=describe(e))]
    record["parts"][name] = results
    say(f"{name}\n{table(results)}")
    write_json(cfg.json, record)
    free(device)
plot(cfg.plot, record["parts"], rate="flops")
end(record)
