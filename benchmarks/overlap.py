r"""Does communication beside computation pay? Experts and transport alone, in turn, at once; whole layers.

    torchrun --nproc-per-node 8 benchmarks/overlap.py --json docs/results/overlap_8.json
    python benchmarks/overlap.py --shapes 16384x4096x8 --transports local rowwise

For each shape and transport, forward alone: ``compute`` is the experts over rows that have arrived,
``communicate`` is dispatch and combine without experts between them, ``in turn`` both on one stream, ``at
once`` both on two. With ``--free N`` also ``compute N free``, the experts by Triton's products on all of the
device's processors but N, and ``at once N free``, these first and what is sent beside them. What is hidden
is (in turn - at once) / min(compute, communicate): 1 where the shorter costs nothing, 0 where nothing is
gained, below 0 where both at once are slower. Then forward and backward of a layer with a shared expert:
nothing beside anything, in two batches, and the shared expert beside the rest; ``of none`` is the time as a
part of the first one's. ``layer two_batch in turn`` has two batches on one stream: it costs over ``layer
none`` what halves cost, and ``layer two_batch`` over it what streams do. Times are rank 0's; ranks wait for
each other in each call that communicates. One GPU has no link: there a transport's copies alone run beside
the experts.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import torch.distributed as dist
import tyro
from measure import COPY, Candidate, check_run, describe, end, known, measure, of_all_ranks, run_cases, sizes
from torch import Tensor

import moekit as mk
from moekit import overlap
from moekit.kernels import grouped_mm
from moekit.kernels._backend import n_processors
from moekit.mesh import world_size


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured."""

    shapes: tuple[str, ...] = ("16384x4096x8", "16384x4096x128", "16384x2048x128")  # TOKENSxD_MODELxEXPERTS
    d_expert: int = 4096
    d_shared: int = 4096
    top_k: int = 4
    transports: tuple[Literal["local", "all_to_all", "rowwise"], ...] = (
        "local",
        "all_to_all",
        "rowwise",
    )  # local on one rank alone
    free: tuple[int, ...] = ()  # processors that products leave to what is sent, one candidate each
    capacity_factor: float = 1.25  # of rowwise
    rounds: int = 3
    slot: float = 0.25  # seconds a candidate and round
    json: Path | None = None
    plot: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


def main(cfg: Config) -> dict[str, Any]:
    """Measure all shapes on all ranks at once, and return the record, which rank 0 writes."""
    check_run(cfg, cfg.device)
    if min(cfg.d_expert, cfg.d_shared) < 1:
        raise SystemExit(f"--d-expert and --d-shared need 1 or more, got {cfg.d_expert} and {cfg.d_shared}")
    for text in cfg.shapes:
        sizes(text)
    all_of_them = n_processors(torch.device(cfg.device))
    if wrong := [n for n in cfg.free if not 0 < n < all_of_them]:
        raise SystemExit(f"--free needs from 1 to {all_of_them - 1} of the device's processors, got {wrong}")
    mesh = mk.make_mesh(ep=world_size(), device=cfg.device)
    run = partial(run_shape, ep=None if mesh is None else mesh["ep"])
    columns = [("hidden", known("hidden"), ".3f"), ("of none", known("of none"), ".3f")]
    record = run_cases(cfg, run, rate="flops", packages=("quack-kernels",), more=columns)
    if mesh is not None:
        dist.destroy_process_group()
    return record


def run_shape(cfg: Config, text: str, *, ep: Any) -> dict[str, Any]:
    """Measure one shape with every transport."""
    n_tokens, d_model, n_experts = sizes(text)
    device = cfg.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    rank, n_ranks = (0, 1) if ep is None else (ep.get_local_rank(), ep.size())
    torch.manual_seed(rank)
    x = torch.randn(n_tokens, d_model, device=device, dtype=dtype)
    params = make_layer(cfg, d_model, n_experts, n_ranks, x)
    made: dict[str, dict[str, Candidate]] = {}
    errors: dict[str, str] = {}
    for name in cfg.transports:
        if name == "local" and n_ranks > 1:
            continue
        try:
            via: Any = name
            half: Any = name
            if name == "rowwise":
                options: dict[str, Any] = dict(d_model=d_model, n_experts=n_experts, top_k=cfg.top_k)
                options |= dict(dtype=dtype, capacity_factor=cfg.capacity_factor, device=device)
                via, half = (mk.rowwise(ep, n_tokens=n, **options) for n in (n_tokens, -(-n_tokens // 2)))
            vias = dict(none=via, two_batch=half, shared=via)
            made[name] = parts(cfg, name, via, params, x, ep) | layers(cfg, name, vias, params, x, ep)
        except Exception as e:
            errors[name] = describe(e)
    errors = of_all_ranks(errors)  # a transport that failed on one rank is measured on none
    candidates = {name: c for via, found in made.items() if via not in errors for name, c in found.items()}
    results = measure(candidates, device=device, errors=errors, rounds=cfg.rounds, slot=cfg.slot)
    results = [r for r in results if r.name != COPY]
    seconds = {r.name: r.seconds for r in results if r.seconds}
    for result in results:
        kind, _, name = result.name.partition(", ")
        if result.seconds and kind.startswith("at once") and f"in turn, {name}" in seconds:
            shorter = min(seconds[f"compute, {name}"], seconds[f"communicate, {name}"])
            result.more["hidden"] = (seconds[f"in turn, {name}"] - result.seconds) / shorter
        if result.seconds and (none := seconds.get(f"layer none, {name}")) and kind.startswith("layer"):
            result.more["of none"] = result.seconds / none
    return dict(title=f"{text}, {n_ranks} ranks", ranks=n_ranks, results=results)


def make_layer(cfg: Config, d: int, n_experts: int, n_ranks: int, x: Tensor) -> dict[str, Any]:
    """Return a layer's parameters as a rank holds them, the router alike on all ranks."""

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, device=x.device, dtype=x.dtype) * shape[-2] ** -0.5).requires_grad_()

    e, h, s = n_experts // n_ranks, cfg.d_expert, cfg.d_shared
    router = torch.randn(d, n_experts, generator=torch.Generator().manual_seed(0)) * d**-0.5
    return dict(
        router=router.to(x.device).requires_grad_(),
        experts=dict(gate_up=normal(e, d, 2 * h), down=normal(e, h, d)),
        shared=dict(gate_up=normal(d, 2 * s), down=normal(s, d)),
    )


def parts(
    cfg: Config, name: str, via: Any, params: dict[str, Any], x: Tensor, ep: Any
) -> dict[str, Candidate]:
    """Return the experts and the transport: each alone, in turn and at once."""
    with torch.no_grad():
        routing = mk.route(params["router"], x, top_k=cfg.top_k)
        arrived = mk.dispatch(x, routing, via=via, mesh=ep)
    per_rank = routing.n_experts // (1 if ep is None else ep.size())
    away = routing.expert_ids // per_rank != (0 if ep is None else ep.get_local_rank())
    row, n_rows = x.shape[1] * x.element_size(), routing.expert_ids.numel()
    # There and back; where a rank is alone, what is read and written on the way.
    moved = 2 * (int(away.sum()) * row if ep is not None and ep.size() > 1 else (len(x) + n_rows) * row)
    flops = 6 * n_rows * x.shape[1] * cfg.d_expert

    @torch.no_grad()
    def compute(kernels: Any = "auto") -> None:
        mk.expert_forward(params["experts"], arrived.rows, arrived.offsets, kernels=kernels)

    @torch.no_grad()
    def communicate(x: Tensor) -> Tensor:
        sent = mk.dispatch(x, routing, via=via, mesh=ep)
        return mk.combine(sent.rows, sent)

    def in_turn() -> None:
        communicate(x)
        compute()

    def at_once() -> None:
        take = overlap.beside(communicate, x, urgent=True)
        compute()
        take()

    def leaving(free: int, beside: Callable[[Tensor], object]) -> None:
        kernels = "triton" if x.is_cuda else "torch"
        with mock.patch.object(grouped_mm, "n_processors", lambda device: n_processors(device) - free):
            take = overlap.beside(lambda _: compute(kernels), x)
        beside(x)
        take()

    some_free = {
        f"{kind} {free} free, {name}": Candidate(run=partial(leaving, free, run), flops=flops)
        for free in cfg.free
        for kind, run in (("compute", lambda _: None), ("at once", communicate))
    }
    return some_free | {
        f"compute, {name}": Candidate(run=compute, flops=flops),
        f"communicate, {name}": Candidate(run=partial(communicate, x), bytes=moved),
        f"in turn, {name}": Candidate(run=in_turn, flops=flops),
        f"at once, {name}": Candidate(run=at_once, flops=flops),
    }


def layers(
    cfg: Config, name: str, vias: dict[str, Any], params: dict[str, Any], x: Tensor, ep: Any
) -> dict[str, Candidate]:
    """Return forward and backward of a layer with a shared expert, in each way and over its transport."""
    leaves = [params["router"], *params["experts"].values(), *params["shared"].values()]
    tokens, grad = x.clone().requires_grad_(), torch.randn_like(x)

    def step(how: Any) -> None:
        y, _ = mk.moe(params, tokens, top_k=cfg.top_k, via=vias[how], overlap=how, mesh=ep)
        torch.autograd.grad(y, [tokens, *leaves], grad)

    def in_turn() -> None:
        with mock.patch.object(overlap, "_side_stream", lambda device, urgent: None):
            step("two_batch")

    flops = 18 * x.numel() * (cfg.top_k * cfg.d_expert + cfg.d_shared)
    runs = {how: partial(step, how) for how in vias} | {"two_batch in turn": in_turn}
    return {f"layer {how}, {name}": Candidate(run=run, flops=flops) for how, run in runs.items()}


if __name__ == "__main__":
    end(main(tyro.cli(Config, description=__doc__)))
