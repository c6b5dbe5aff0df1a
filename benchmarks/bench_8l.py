"""What benchmarks of bench-8L share: the model, its batches, moekit's gradients and step, their timing."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from einops import rearrange
from measure import Candidate, Result, describe, free, measure, say
from routing import expert_ids
from tensordict import TensorDict

import moekit as mk
from moekit import config
from moekit.tree import map_named


def make_model(n_experts: int, *, seq_len: int, toy: bool) -> mk.ModelConfig:
    """Return bench-8L, or a toy of its kind."""
    model = mk.preset("bench-8L", n_experts=n_experts, max_seq_len=max(seq_len, 8192))
    return config.toy(model, n_experts=n_experts) if toy else model


def make_batch(
    model: mk.ModelConfig, n_sequences: int, *, seq_len: int, device: str, routing: str = "random"
) -> mk.batch.Batch:
    """Return rows of one document each, with the experts that they go to where ``routing`` says so."""
    tokens = torch.randint(model.vocab_size, (n_sequences, seq_len + 1), device=device)
    ids = torch.arange(n_sequences, device=device)
    batch = mk.count_tokens(mk.batch.make_batch(tokens, torch.zeros_like(tokens), ids))
    sizes: dict[str, Any] = dict(n_experts=model.n_experts, top_k=model.top_k, n_layers=model.n_moe_layers)
    routes = expert_ids(routing, n_sequences * seq_len, device=device, **sizes)
    if routes is None:
        return batch
    return replace(batch, expert_ids=rearrange(routes, "l (b s) k -> b l s k", s=seq_len))


def our_loss(model: mk.ModelConfig, *, device: str) -> Callable:
    """Return ``loss(params, batch, **options)`` of moekit, routed as the batch says, or at random.

    Alike in every call.
    """
    at_random: dict[str, Any] = dict(assignment="random", key=mk.random.make_key(0, device))

    def loss(params: TensorDict, batch: mk.batch.Batch, **options: Any) -> torch.Tensor:
        options |= at_random if batch.expert_ids is None else {}
        return mk.next_token_loss(params, batch, config=model, attend_across_documents=True, **options)[0]

    return loss


def our_gradients(
    loss: Callable, params: TensorDict, batch: mk.batch.Batch, **options: Any
) -> Callable[[], object]:
    """Return a run that makes the gradients of all parameters, then drops them."""
    grad_fn = mk.value_and_grad(loss)
    return lambda: grad_fn(params, batch, **options) and None


def our_optimizer(params: TensorDict) -> tuple[mk.optim.Optimizer, TensorDict, TensorDict]:
    """Return AdamW behind a clip, over float32 masters; its state; and buffers for the gradients' sums."""
    optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(1e-5, weight_decay=0.1)))
    sums = map_named(lambda _, p: torch.zeros_like(p, dtype=torch.float32), params)
    return optimizer, optimizer.init(params), sums


def our_step(
    loss: Callable,
    params: TensorDict,
    batch: mk.batch.Batch,
    optimizer: mk.optim.Optimizer,
    state: TensorDict,
    sums: TensorDict,
    *,
    n_microbatches: int,
    options: Callable[[], Mapping[str, Any]] = dict,
) -> Callable[[], object]:
    """Return a whole step of moekit's transforms; ``options()`` are the loss's, made anew in every step."""
    grad_fn = mk.accumulate(mk.value_and_grad(loss), n_microbatches, straight=mk.model.is_expert)

    def run() -> None:
        _, grads = grad_fn(params, batch, into=sums, **options())
        optimizer.update(grads, state, params)

    return run


def timed(
    builders: Mapping[str, Callable[[], Callable[[], object]]],
    *,
    flops: float,
    tokens: int,
    device: str,
    rounds: int,
    slot: float,
) -> tuple[list[Result], dict[str, Callable[[], object]]]:
    """Build candidates that do the same, run each once, so that it is compiled, and time them.

    Returns their results, and the runs of those that could be built.
    """
    runs: dict[str, Callable[[], object]] = {}
    errors: dict[str, str] = {}
    for name, build in builders.items():
        try:
            run = build()
            run()
            runs[name] = run
            say(f"{name} has run")
        except Exception as e:
            errors[name] = describe(e)
        run = None
        if name in errors:
            free(device)
    given = {name: Candidate(run=run, flops=flops, tokens=tokens) for name, run in runs.items()}
    return measure(given, device=device, errors=errors, rounds=rounds, slot=slot), runs
