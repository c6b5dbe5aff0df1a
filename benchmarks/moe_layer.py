"""How fast one MoE layer is, forward and backward, beside its peers and a dense matrix product.

    python benchmarks/moe_layer.py --json moe_layer.json --plot moe_layer.png
    python benchmarks/moe_layer.py --shapes 16384x4096x8 --candidates moekit-auto torchtitan-compiled

A layer is a router and routed experts, without a shared expert: top-4 of a softmax, SwiGLU experts whose
hidden size is d_model, bfloat16. Every candidate has the same weights, tokens and output gradient, and gives
the gradients of the tokens and of all its parameters. Counted are the six products of the experts that a
layer cannot do without, 18 t k d h flops; the router, and what a candidate computes twice, are not.

A shape is TOKENSxD_MODELxEXPERTS, and its routing that of gaussian tokens and a gaussian router. Others, by
``--routing`` (see benchmarks/routing.py) or, for one shape, by ``:dirichlet2`` behind it, give the sizes of
groups, as a router that is not balanced makes them: the tokens' first feature is 1, and the first row of the
router a bias that is fitted to these sizes, so that the router of every candidate makes them, to within a few
rows in a hundred.

Before anything is timed, the outputs and gradients are compared with moekit's on plain torch, which the tests
check against a loop; whoever differs is not timed. Peers that are not installed, run out of memory or fail
are listed with the reason; unknown names and shapes are refused at the start.

Meant to take four minutes; the JSON is written after each shape. What was measured so far is in docs/LOG.md.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, get_args

import peers
import torch
import tyro
from measure import Candidate, describe, end, free, measure, refuse_unknown, run_cases, say, sizes
from routing import expert_shares, parse_routing
from stock import experts
from torch import Tensor

import moekit as mk
from moekit._experts import Kernels
from moekit.kernels import choose_products

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure, and where to write it."""

    shapes: tuple[str, ...] = (
        "16384x4096x8",
        "16384x4096x128",
        "32768x2048x8",
        "32768x2048x128",
        "16384x4096x128:dirichlet2",
        "32768x2048x128:dirichlet2",
    )
    candidates: tuple[str, ...] = (
        "moekit-auto",
        "moekit-triton",
        "moekit-torch",
        "moekit-quack",
        "stock",
        "stock-compiled",
        "torchtitan",
        "torchtitan-compiled",
        "qwen3",
        "olmoe",
        "olmo_core",
        "olmo_core_grouped_mm",
        "sonicmoe",
    )  # any name of benchmarks/peers.py, and any but moekit's with -compiled
    top_k: int = 4
    routing: str = "random"  # of shapes that name none; see benchmarks/routing.py
    rounds: int = 3
    slot: float = 0.25  # seconds a candidate and round
    json: Path | None = None
    plot: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


class Shape(NamedTuple):
    """Sizes of a layer, and its routing."""

    tokens: int
    d_model: int
    n_experts: int
    routing: str  # as for --routing


def parse(text: str, routing: str = "random") -> Shape:
    """Return the shape that a text like ``16384x4096x128:dirichlet2`` says; ``routing`` if it names none."""
    of_layer, _, own = text.partition(":")
    parse_routing(own or routing)
    return Shape(*sizes(of_layer), own or routing)


# --- The layer's input ----------------------------------------------------------------


def make_layer(shape: Shape, top_k: int, device: str) -> tuple[dict[str, Tensor], Tensor, Tensor]:
    """Return weights, tokens and the gradient of the output, the same in every run."""
    t, d, n_experts, routing = shape
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, std: float) -> Tensor:
        return torch.empty(size, dtype=torch.bfloat16, device=device).normal_(std=std, generator=generator)

    x, grad = normal(t, d, std=1), normal(t, d, std=1)
    weights = dict(
        router=normal(d, n_experts, std=d**-0.5),
        gate_up=normal(n_experts, d, 2 * d, std=d**-0.5),
        down=normal(n_experts, d, d, std=d**-0.5),
    )
    shares = expert_shares(routing, t, n_experts=n_experts, top_k=top_k)
    if shares is not None:
        x[:, 0], weights["router"][0] = 1, 0
        weights["router"][0] = fit_bias(mk.route(weights["router"], x, top_k=top_k).logits, shares, top_k)
    return weights, x, grad


def fit_bias(logits: Tensor, shares: Tensor, top_k: int) -> Tensor:
    """Return the bias with which groups get these shares of the rows, as far as a token chooses once each."""
    wanted = shares.to(logits.device).clamp(max=1 / top_k) * top_k * len(logits)
    wanted = wanted.clamp(min=1)  # no group is wanted empty: its bias would have no end
    bias = wanted.log()
    for _ in range(100):
        chosen = (logits + bias).topk(top_k).indices.flatten()
        counts = torch.zeros_like(wanted).index_add(0, chosen, torch.ones_like(chosen, dtype=wanted.dtype))
        bias = bias + 0.3 * (wanted.log() - counts.clamp_min(1).log())
    return bias - bias.mean()


# --- Candidates -----------------------------------------------------------------------


def stock(weights: dict[str, Tensor], top_k: int) -> peers.Layer:
    """Return the layer as one writes it in PyTorch: argsort, index, two grouped products, index_add."""
    router, gate_up, down = (weights[name] for name in ("router", "gate_up", "down"))
    return lambda x: experts(x, (x @ router).float(), gate_up, down, top_k), list(weights.values())


def moekit(weights: dict[str, Tensor], top_k: int, *, kernels: Any) -> peers.Layer:
    """Return :func:`moekit.moe` with some kernels, on the weights themselves."""
    params = dict(router=weights["router"], experts=dict(gate_up=weights["gate_up"], down=weights["down"]))
    return lambda x: mk.moe(params, x, top_k=top_k, kernels=kernels)[0], list(weights.values())


def makers() -> dict[str, Callable[[dict[str, Tensor], int], peers.Layer]]:
    """Return what builds each candidate but moekit."""
    return {"stock": stock, **peers.LAYERS}


def build(name: str, weights: dict[str, Tensor], top_k: int, built: dict[str, peers.Layer]) -> peers.Layer:
    """Return the layer of a candidate and its parameters, which it shares with its compiled form."""
    base, _, variant = name.partition("-")
    if base == "moekit":
        return moekit(weights, top_k, kernels=variant)
    if base not in built:
        built[base] = makers()[base](weights, top_k)
    layer, parameters = built[base]
    return torch.compile(layer, dynamic=False) if variant else layer, parameters


def forward_backward(
    layer: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, grad: Tensor
) -> list[Tensor]:
    """Return the output, and the gradients of the tokens and of all parameters."""
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], grad)]


class Outcome(NamedTuple):
    """What a candidate is checked by."""

    output: Tensor
    tokens_gradient: Tensor
    parameters_gradient_norm: float


def outcome(layer: Callable[[Tensor], Tensor], parameters: list[Tensor], x: Tensor, grad: Tensor) -> Outcome:
    """Run a layer once. Peers keep parameters in other layouts, so of their gradients there is the norm."""
    output, tokens_gradient, *grads = forward_backward(layer, parameters, x, grad)
    norms = [torch.linalg.vector_norm(z, dtype=torch.float32) for z in grads]
    return Outcome(output, tokens_gradient, torch.stack(norms).norm().item())


def compare(got: Outcome, want: Outcome) -> str:
    """Say how far a candidate's output and gradients are from those wanted; raise if too far.

    Routers round differently (the logits of some are bfloat16), and a token whose fourth and fifth best
    experts are that close goes elsewhere. Its row is off by more than 0.1 of its norm, where rounding alone
    gives about 0.01: up to a tenth of the tokens may be, and the others' norm-wise error may be 0.03, as
    that of the gradients' norm.
    """
    said = []
    for what, a, b in zip(("output", "tokens' gradient"), got[:2], want[:2], strict=True):
        if a.shape != b.shape:
            raise AssertionError(f"wrong {what}: {tuple(a.shape)} instead of {tuple(b.shape)}")
        off, norm = (a.float() - b.float()).norm(dim=-1), b.float().norm(dim=-1)
        rerouted = ~(off <= 0.1 * norm)
        error = (off[~rerouted].norm() / norm[~rerouted].norm()).item()
        share = rerouted.float().mean().item()
        said.append(f"{what} {error:.1e}, {share:.2%} rerouted")
        if not (share <= 0.1 and error <= 0.03):
            raise AssertionError(f"wrong {said[-1]}")
    error = abs(got.parameters_gradient_norm / want.parameters_gradient_norm - 1)
    said.append(f"norm of the parameters' gradients {error:.1e}")
    if not error <= 0.03:
        raise AssertionError(f"wrong {said[-1]}")
    return "; ".join(said)


# --- One shape ------------------------------------------------------------------------


def run_shape(cfg: Config, text: str) -> dict[str, Any]:
    """Build and check all candidates at one shape, time them, and return what was found."""
    shape = parse(text, cfg.routing)
    t, d = shape.tokens, shape.d_model
    weights, x, grad = make_layer(shape, cfg.top_k, cfg.device)
    counts = mk.route(weights["router"], x, top_k=cfg.top_k).counts
    skew = (counts.max() / counts.double().mean()).item()
    say(f"{text}: groups of {counts.min()} to {counts.max()} rows, max/mean {skew:.2f}")
    for z in (x, *weights.values()):
        z.requires_grad_()

    want = outcome(*moekit(weights, cfg.top_k, kernels="torch"), x, grad)
    candidates, checks, errors, built = {}, {}, {}, {}
    for name in cfg.candidates:
        try:
            layer, parameters = build(name, weights, cfg.top_k, built)
            checks[name] = compare(outcome(layer, parameters, x, grad), want)
            candidates[name] = Candidate(
                run=partial(forward_backward, layer, parameters, x, grad),
                flops=18 * t * cfg.top_k * d * d,
                tokens=t,
            )
        except Exception as e:
            errors[name] = describe(e)
        layer = parameters = None
        if name in errors:
            built.pop(name, None)
            free(cfg.device)
        say(f"  {name}: {checks.get(name) or errors[name]}")
    results = measure(candidates, device=cfg.device, errors=errors, rounds=cfg.rounds, slot=cfg.slot)
    auto = str(choose_products("auto", "auto", t * cfg.top_k, weights["gate_up"]))
    say(f"{text}: measured, forward + backward; auto: {auto}")
    return dict(
        title=text,
        **shape._asdict(),
        rows_max_over_mean=skew,
        auto=auto,
        checks=checks,
        results=results,
    )


def main(cfg: Config) -> dict[str, Any]:
    """Measure all shapes, and write and return the record."""
    known = [f"moekit-{kernels}" for kernels in get_args(Kernels)]
    known += [name + variant for name in makers() for variant in ("", "-compiled")]
    refuse_unknown("candidate", cfg.candidates, known)
    for text in cfg.shapes:
        parse(text, cfg.routing)
    return run_cases(cfg, run_shape, rate="flops", packages=peers.PACKAGES)


if __name__ == "__main__":
    end(main(tyro.cli(Config, description=__doc__)))
