"""How near the kernels around an MoE layer's matrix products are to the speed of a device copy.

    python benchmarks/moe_kernels.py --json moe_kernels.json --plot moe_kernels.png

These kernels compute little and move much: into expert order, back with a sum, SwiGLU, the router's choice.
Counted are the bytes that an operation moves by its definition, each input read once and each output written
once, over its time: what it moves twice, or apart from these, lowers its share of the copy's rate.

On CUDA each is timed in a graph of several calls, so that the host's launches do not count (see
``measure.graphed``). Inputs of the router's choice and the slots fit into the L2 cache, as they do in
training, where another kernel has just written them: their share may pass 1, or be small where a call takes
few microseconds.

What an H200 gave is in docs/results/moe_kernels.json.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
import tyro
from measure import Candidate, describe, end, graphed, measure, run_cases, say, sizes
from routing import expert_ids, parse_routing

from moekit.kernels.permute import count_experts, expert_slots, gather_sum, gather_sum_backward, scatter
from moekit.kernels.router import choose
from moekit.kernels.swiglu import swiglu_backward, swiglu_forward

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure, and where to write it."""

    shapes: tuple[str, ...] = (
        "16384x4096x128",
        "32768x2048x128",
    )  # TOKENSxD_MODELxEXPERTS; the hidden size is d_model
    kernels: tuple[Literal["auto", "torch", "triton"], ...] = (
        "auto",
    )  # and "torch", for what the kernels replace
    top_k: int = 4
    routing: str = "random"  # of what is not the router's own choice; see benchmarks/routing.py
    calls: int = 10  # in a graph
    rounds: int = 5
    slot: float = 0.05  # seconds a candidate and round
    json: Path | None = None
    plot: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


# --- Operations -----------------------------------------------------------------------


def operations(
    t: int, d: int, n_experts: int, top_k: int, device: str, kernels: str, routing: str
) -> dict[str, tuple[Callable[[], object], int]]:
    """Return each operation and the bytes that it moves."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
        return torch.empty(size, dtype=dtype, device=device).normal_(generator=generator)

    r, h = t * top_k, d
    logits = normal(t, n_experts, dtype=torch.float32).requires_grad_()
    options: dict[str, Any] = dict(top_k=top_k, score="softmax", normalize="l1", scale=1.0, kernels=kernels)
    given = expert_ids(routing, t, n_experts=n_experts, top_k=top_k, device=device)
    given = None if given is None else given[0]
    _, ids, weights = (z.detach() for z in choose(logits, expert_ids=given, **options))
    slots = expert_slots(ids, n_experts)
    end = count_experts(ids, n_experts).cumsum(0).int()
    x, rows, gate_up, hidden = normal(t, d), normal(r, d), normal(r, 2 * h), normal(r, h)
    by_row = weights.flatten()

    def choose_with_backward() -> object:  # in one: a capture needs both on its stream
        return torch.autograd.grad(choose(logits, **options)[2], logits, weights)

    # Bytes of one pass over each tensor.
    per_logit, per_id, per_weight = size(logits), size(ids), size(weights)
    per_x, per_row, per_gate_up, per_hidden = size(x), size(rows), size(gate_up), size(hidden)
    chosen = 2 * per_logit + per_id + per_weight
    return {
        "router choice": (lambda: choose(logits.detach(), **options), chosen),
        "router choice + backward": (
            choose_with_backward,
            chosen + 2 * per_logit + per_id + 2 * per_weight,
        ),
        "counts": (lambda: count_experts(ids, n_experts), per_id + 8 * n_experts),
        "slots": (lambda: expert_slots(ids, n_experts, kernels=kernels), 2 * per_id),
        "scatter": (lambda: scatter(x, slots, kernels=kernels), per_x + per_id + per_row),
        "gather and sum": (lambda: gather_sum(rows, slots, kernels=kernels), per_row + per_id + per_x),
        "gather and weighted sum": (
            lambda: gather_sum(rows, slots, weights, kernels=kernels),
            per_row + per_id + per_weight + per_x,
        ),
        "its backward": (
            lambda: gather_sum_backward(x, rows, slots, weights, kernels=kernels),
            per_x + 2 * per_row + per_id + 2 * per_weight,
        ),
        "SwiGLU with row weights": (
            lambda: swiglu_forward(gate_up, by_row, end, kernels=kernels),
            per_gate_up + per_weight + per_hidden,
        ),
        "SwiGLU's backward": (
            lambda: swiglu_backward(hidden, gate_up, by_row, end, kernels=kernels),
            2 * per_gate_up + 2 * per_hidden + 2 * per_weight,
        ),
    }


def size(x: torch.Tensor) -> int:
    """Return the bytes of a tensor."""
    return x.numel() * x.element_size()


# --- Shapes ---------------------------------------------------------------------------


def run_shape(cfg: Config, text: str) -> dict[str, Any]:
    """Time all operations at one shape."""
    t, d, n_experts = sizes(text)
    calls = cfg.calls if cfg.device == "cuda" else 1
    candidates, errors = {}, {}
    for kernels in cfg.kernels:
        sizes_of_layer = t, d, n_experts, cfg.top_k
        made = operations(*sizes_of_layer, cfg.device, kernels, cfg.routing)
        for name, (run, n_bytes) in made.items():
            name = name if len(cfg.kernels) == 1 else f"{name}, {kernels}"
            try:
                run = graphed(run, calls=calls) if cfg.device == "cuda" else run
                candidates[name] = Candidate(run=run, bytes=n_bytes, calls=calls)
            except Exception as e:
                errors[name] = describe(e)
    say(f"{text}: captured")
    results = measure(candidates, device=cfg.device, errors=errors, rounds=cfg.rounds, slot=cfg.slot)
    say(f"{text}: measured")
    return dict(title=text, tokens=t, d_model=d, n_experts=n_experts, results=results)


def main(cfg: Config) -> dict[str, Any]:
    """Measure all shapes, and write and return the record."""
    for text in cfg.shapes:
        sizes(text)
    parse_routing(cfg.routing)
    return run_cases(cfg, run_shape, rate="bytes")


if __name__ == "__main__":
    end(main(tyro.cli(Config, description=__doc__)))
