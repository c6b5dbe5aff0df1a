r"""How fast rows travel: each transport against the link, the row map, and a layer under each.

    python benchmarks/dispatch.py --json docs/results/dispatch.json            # one GPU
    torchrun --nproc-per-node 2 benchmarks/dispatch.py --json docs/results/dispatch_2.json

Every rank sends the rows of tokens that are routed at random, or as ``--routing`` says (see
benchmarks/routing.py), and gets them back summed: by the parts of ``rowwise`` (``put`` to ``barrier``), then
by :func:`moekit.dispatch` and :func:`moekit.combine` under each transport. On one GPU the ceiling is a device
copy of the same bytes. On several it is what each rank copies into the next one's memory while the one before
does the same to it, and only rows that leave a rank count. A layer is forward and backward of
:func:`moekit.moe`; its rate is that of its products, of rows that are dropped, too.

What is timed alone (``put``, ``get``, ``row map``) is replayed from a CUDA graph, without barriers; ``send``
and ``fetch`` have theirs. What cannot be set up, as a transport that is not installed, is listed with the
reason.
"""

from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from measure import (
    COPY,
    Candidate,
    check_run,
    describe,
    environment,
    graphed,
    measure,
    plot,
    say,
    table,
    write_json,
)
from routing import expert_ids, parse_routing
from torch import Tensor

import moekit as mk
from moekit import balance
from moekit.kernels.one_sided import FP8, get_sum, put
from moekit.kernels.row_map import row_map
from moekit.mesh import world_size

LINK = "copy to the next rank"


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured."""

    tokens: int = 16384  # of a rank
    d_model: int = 4096
    d_expert: int = 4096
    n_experts: int = 8  # over all ranks
    top_k: int = 4
    capacity_factor: float = 1.25
    routing: str = "random"  # see benchmarks/routing.py; of each rank other tokens
    map_experts: int = 128  # of the row map
    map_ranks: int = 8
    transports: tuple[Literal["local", "all_to_all", "rowwise", "rowwise, float8", "deepep"], ...] = (
        "local",
        "all_to_all",
        "rowwise",
        "rowwise, float8",
    )  # of the layer; tokens in float8 on their way, gradients and what comes home as they are
    calls: int = 10  # in a CUDA graph; with 1 there is none
    rounds: int = 3
    slot: float = 0.25  # seconds a candidate and round
    json: Path | None = None
    plot: Path | None = None


Candidates = dict[str, Candidate]


def main(cfg: Config) -> None:
    """Measure on all ranks at once and write what rank 0 found."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    check_run(cfg, device)
    if not 1 <= cfg.top_k <= min(cfg.n_experts, cfg.map_experts):
        raise SystemExit(
            f"--top-k needs to be from 1 to the number of experts, {cfg.n_experts} of the layer and "
            f"{cfg.map_experts} of the row map, got {cfg.top_k}"
        )
    parse_routing(cfg.routing)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    mesh = mk.make_mesh(ep=world_size())
    ep = None if mesh is None else mesh["ep"]
    rank, size = (0, 1) if ep is None else (ep.get_local_rank(), ep.size())
    torch.manual_seed(rank)
    x = torch.randn(cfg.tokens, cfg.d_model, device=device, dtype=dtype)
    params = make_layer(cfg, size, device, dtype)
    sizes: dict[str, Any] = dict(
        n_tokens=cfg.tokens, d_model=cfg.d_model, n_experts=cfg.n_experts, top_k=cfg.top_k
    )
    sizes |= dict(dtype=dtype, device=device)
    via = mk.rowwise(ep, **sizes, capacity_factor=cfg.capacity_factor)
    calls = cfg.calls if device == "cuda" else 1
    ids = drawn(cfg, cfg.n_experts, device, rank=rank)
    routing = mk.route(params["router"].detach(), x, top_k=cfg.top_k, expert_ids=ids)
    places, _, dropped = via.plan(routing)
    load = mk.mesh.sum_over_ranks(dict(rows=routing.counts, dropped=dropped), mesh=mesh)
    moved = bytes_moved(via, places, x)
    transports: dict[str, Any] = {name: name for name in cfg.transports if name != "local" or size == 1}
    errors: dict[str, str] = {}
    if "rowwise" in transports:
        transports["rowwise"] = via
    if "rowwise, float8" in transports:
        options: dict[str, Any] = dict(capacity_factor=cfg.capacity_factor, payload=FP8)
        transports["rowwise, float8"] = mk.rowwise(ep, **sizes, **options)
    deepep = None
    if transports.pop("deepep", None):
        try:
            deepep = transports["deepep"] = mk.deepep(ep, **sizes)
        except Exception as e:
            errors |= {f"{what}, deepep": describe(e) for what in ("dispatch", "combine", "layer")}
    candidates = {
        **rows(via, routing, places, x, moved, calls),
        **maps(cfg, device, calls, errors),
        **travel(transports, routing, x, ep, moved, errors),
        **layers(cfg, transports, params, x, ids, ep),
    }
    for name, candidate in candidates.items():
        if candidate.calls > 1:
            try:
                run = graphed(candidate.run, calls=candidate.calls)
                candidates[name] = replace(candidate, run=run)
            except Exception as e:
                errors[name] = describe(e)
    results = measure(candidates, device=device, errors=errors, rounds=cfg.rounds, slot=cfg.slot)
    if size > 1:  # the copy within a device is no ceiling of what leaves it
        results = [r for r in results if r.name != COPY]
        link = next(r for r in results if r.name == LINK).bytes_per_second
        for result in results:
            result.of_copy = result.bytes_per_second and link and result.bytes_per_second / link
    if rank == 0:
        title = f"{size} ranks, {cfg.tokens} tokens each of width {cfg.d_model}, E = {cfg.n_experts}"
        of_ranks = balance.rank_load(load["rows"], size)
        uneven = dict(
            rows_max_over_mean=balance.evenness(of_ranks).max_over_mean.item(),
            dropped=(load["dropped"].sum() / load["rows"].sum()).item(),
        )
        say(
            f"{title}: the fullest rank gets {uneven['rows_max_over_mean']:.2f} times the mean of rows, "
            f"{uneven['dropped']:.1%} are dropped by rowwise\n{table(results)}"
        )
        record: dict[str, Any] = dict(environment=environment(device), config=asdict(cfg), ranks=size)
        record |= uneven
        write_json(cfg.json, record | dict(results=results))
        plot(cfg.plot, {title: results}, rate="bytes")
    if deepep is not None:
        deepep.close()
    if mesh is not None:
        dist.destroy_process_group()


def drawn(cfg: Config, n_experts: int, device: str, *, rank: int = 0) -> Tensor | None:
    """Return the experts that a rank's tokens go to, where ``--routing`` says so."""
    first = rank * cfg.tokens
    ids = expert_ids(
        cfg.routing, cfg.tokens, n_experts=n_experts, top_k=cfg.top_k, device=device, first=first
    )
    return None if ids is None else ids[0]


def make_layer(cfg: Config, size: int, device: str, dtype: torch.dtype) -> dict[str, Any]:
    """Return a layer's parameters as a rank holds them."""

    def normal(*shape: int) -> Tensor:
        return (torch.randn(shape, device=device, dtype=dtype) * shape[-2] ** -0.5).requires_grad_()

    e, d, h = cfg.n_experts // size, cfg.d_model, cfg.d_expert
    router = torch.randn(d, cfg.n_experts, generator=torch.Generator().manual_seed(0)) * d**-0.5
    experts = dict(gate_up=normal(e, d, 2 * h), down=normal(e, h, d))
    return dict(router=router.to(device).requires_grad_(), experts=experts)


def bytes_moved(via: mk.rowwise, places: Tensor, x: Tensor) -> int:
    """Return the bytes of rows that leave this rank; where it is alone, those read and written."""
    row = x.shape[1] * x.element_size()
    kept = places >= 0
    if via.memory.size == 1:
        return (len(x) + int(kept.sum())) * row
    return int((kept & (places // via.capacity != via.memory.rank)).sum()) * row


def rows(
    via: mk.rowwise,
    routing: mk.Routing,
    places: Tensor,
    x: Tensor,
    moved: int,
    calls: int,
) -> Candidates:
    """Return the parts of the transport that moves rows."""
    memory = via.memory
    there, back = memory.tensors["rows in"], memory.tensors["rows out"]
    found = {
        "put": Candidate(run=lambda: put(x, places, there), bytes=moved, calls=calls),
        "get": Candidate(run=lambda: get_sum(back, places), bytes=moved, calls=calls),
        "send": Candidate(run=lambda: via.send(x, places), bytes=moved),
        "fetch": Candidate(run=lambda: via.fetch(via.outgoing(), places), bytes=moved),
        "counts and row map": Candidate(run=lambda: via.plan(routing)),
        "barrier": Candidate(run=memory.barrier),
    }
    if memory.size > 1:
        after = there.peers[(memory.rank + 1) % memory.size]
        copies = {
            LINK: partial(after.copy_, back.mine),
            "copy from the next rank": partial(back.mine.copy_, after),
        }
        found = {n: Candidate(run=run, bytes=back.mine.nbytes) for n, run in copies.items()} | found
    return found


def travel(
    transports: dict[str, Any], routing: mk.Routing, x: Tensor, ep: Any, moved: int, errors: dict[str, str]
) -> Candidates:
    """Return the two functions under each transport, as one calls them: with counts, and copies if any."""
    found = {}
    for name, via in transports.items():
        run = partial(mk.dispatch, x, routing, via=via, mesh=ep)
        found[f"dispatch, {name}"] = Candidate(run=run, bytes=moved)
        try:
            sent = run()
        except Exception as e:
            errors[f"combine, {name}"] = describe(e)
            continue
        found[f"combine, {name}"] = Candidate(run=partial(mk.combine, sent.rows, sent), bytes=moved)
    return found


def maps(cfg: Config, device: str, calls: int, errors: dict[str, str]) -> Candidates:
    """Return the row map of one rank of many, from counts that are there."""
    name = f"row map, E = {cfg.map_experts}, {cfg.map_ranks} ranks"
    try:
        ids = drawn(cfg, cfg.map_experts, device)
    except ValueError as e:  # a recording has the layer's number of experts, or this one
        errors[name] = describe(e)
        return {}
    if ids is None:
        ids = torch.rand(cfg.tokens, cfg.map_experts, device=device).topk(cfg.top_k).indices
    mine = torch.bincount(ids.flatten(), minlength=cfg.map_experts)
    run = partial(row_map, ids, mine.repeat(cfg.map_ranks, 1), rank=0, capacity=ids.numel())
    return {name: Candidate(run=run, calls=calls)}


def layers(
    cfg: Config,
    transports: dict[str, Any],
    params: dict[str, Any],
    x: Tensor,
    ids: Tensor | None,
    ep: Any,
) -> Candidates:
    """Return forward and backward of a layer under each transport."""
    leaves = [params["router"], *params["experts"].values()]
    tokens, grad = x.clone().requires_grad_(), torch.randn_like(x)

    def step(via: Any) -> None:
        y, _ = mk.moe(params, tokens, top_k=cfg.top_k, expert_ids=ids, via=via, mesh=ep)
        torch.autograd.grad(y, [tokens, *leaves], grad)

    flops = 18 * cfg.tokens * cfg.top_k * cfg.d_model * cfg.d_expert
    return {
        f"layer, {name}": Candidate(run=partial(step, via), flops=flops) for name, via in transports.items()
    }


if __name__ == "__main__":
    main(tyro.cli(Config, description=__doc__))
