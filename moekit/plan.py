"""What a model costs, before anything is made: ``python -m moekit.plan bench-8L --n-experts 128``."""

import itertools
import json
import math
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from typing import Annotated, Any, NamedTuple

import torch
import tyro

from moekit.config import ModelConfig, Stage, preset
from moekit.params import param_shapes


class Gpu(NamedTuple):
    """What a device has, from its data sheet."""

    memory: float  # bytes
    flops: float  # dense bfloat16 FLOP/s


GPUS = {
    "h100": Gpu(80e9, 989.4e12),
    "h200": Gpu(141e9, 989.4e12),
    "b200": Gpu(180e9, 2250e12),
    "b300": Gpu(288e9, 2250e12),
}
"""GPUs by name."""


def gpu_named(name: str) -> Gpu | None:
    """Return the GPU that a device's name tells, e.g. ``torch.cuda.get_device_name()``, if it is known.

    >>> gpu_named("NVIDIA H200").memory
    141000000000.0
    >>> gpu_named("NVIDIA H100 PCIe"), gpu_named("NVIDIA GH200 480GB")  # others than those of GPUS
    (None, None)
    """
    words = name.lower().replace("-", " ").split()
    known = None if {"pcie", "nvl"} & set(words) else next((word for word in words if word in GPUS), None)
    return None if known is None else GPUS[known]


def peak_flops(device: torch.device) -> float | None:
    """Return the dense bfloat16 FLOP/s of a device's data sheet, where it is known."""
    gpu = gpu_named(torch.cuda.get_device_name(device)) if device.type == "cuda" else None
    return None if gpu is None else gpu.flops


def fits(n_bytes: int | float, gpu: str) -> str:
    """Say whether so many bytes are below the memory of a GPU, one of `GPUS`.

    >>> fits(97e9, "h200")
    'fits, 44.0 GB left'
    """
    left = (GPUS[gpu].memory - n_bytes) / 1e9
    return f"fits, {left:.1f} GB left" if left > 0 else f"does not fit, {-left:.1f} GB too many"


def count_params(config: ModelConfig) -> tuple[int, int]:
    """Return the number of parameters in all, and of those that one token uses; the embedding counts.

    >>> count_params(preset("bench-8L"))
    (46862510080, 3174639616)
    """
    total = active = 0
    for name, shape in param_shapes(config).items():
        n = math.prod(shape)
        total += n
        active += n // config.n_experts * config.top_k if ".experts." in name else n
    return total, active


def flops_per_token(config: ModelConfig, seq_len: int | None = None) -> float:
    """Return model FLOPs per trained token: forward and backward, no recomputation.

    Six per active weight of a matrix product, and attention over the causal pairs of a sequence counted
    exactly.

    Parameters
    ----------
    config : ModelConfig
        The model.
    seq_len : int, optional
        Positions of a sequence that is one document; by default ``config.max_seq_len``.

    >>> round(flops_per_token(preset("ultra-128")) / 1e9, 1)
    371.8
    """
    return sum(unit_flops(config, seq_len))


def unit_flops(config: ModelConfig, seq_len: int | None = None) -> list[float]:
    """Return the model FLOPs per trained token of each layer, and last of the head; see `flops_per_token`."""
    seq_len = config.max_seq_len if seq_len is None else seq_len
    if seq_len < 1:
        raise ValueError(f"flops_per_token needs seq_len >= 1, got {seq_len}")
    pairs = (seq_len + 1) / 2  # keys seen by a query, on average
    attention = 2 * 2 * pairs * config.n_heads * config.d_head
    flops = [3 * attention] * config.n_layers + [0.0]
    for name, shape in param_shapes(config).items():
        unit, *rest = name.split(".")
        if len(shape) == 1 or (unit == "embedding" and not config.tied_head):
            continue
        n = math.prod(shape)
        active = n // config.n_experts * config.top_k if "experts" in rest else n
        flops[int(rest[0]) if unit == "layers" else -1] += 3 * 2 * active
    return flops


def flops_per_row(config: ModelConfig) -> float:
    """Return the model FLOPs of a row in an expert, forward and backward: six per weight of the expert.

    >>> config = preset("bench-8L")
    >>> flops_per_row(config) == 18 * config.d_model * config.d_expert
    True
    """
    shapes = param_shapes(config).items()
    layer = f"layers.{config.n_dense_layers}.moe.experts."
    return 6 * sum(math.prod(shape) for name, shape in shapes if name.startswith(layer)) / config.n_experts


def split_layers(config: ModelConfig, n_stages: int, *, seq_len: int | None = None) -> list[Stage]:
    """Split a model into stages so that the most expensive one costs as little as it can.

    Costs are FLOPs, the head's included; the embedding, a lookup, costs none. Of equal splits, the one whose
    costs have the least sum of squares.

    Parameters
    ----------
    config : ModelConfig
        The model.
    n_stages : int
        Each has a layer at least.
    seq_len : int, optional
        As for :func:`flops_per_token`.

    Raises
    ------
    ValueError
        When there are fewer layers than stages.

    Examples
    --------
    >>> [len(stage.layers) for stage in split_layers(preset("ultra-128"), 16)]
    [4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 4, 3]
    """
    if not 1 <= n_stages <= config.n_layers:
        raise ValueError(
            f"split_layers needs 1 to {config.n_layers} stages, one layer each at least, got {n_stages}"
        )
    *layers, head = unit_flops(config, seq_len)
    upto = [0.0, *itertools.accumulate(layers)]
    # best[n]: (largest cost, sum of squares, ends of the stages) of the first n layers in the stages so far.
    best = {0: (0.0, 0.0, [])}
    for stage in range(n_stages):
        last = stage == n_stages - 1
        ends = [config.n_layers] if last else range(stage + 1, config.n_layers - (n_stages - stage) + 2)
        best = {
            end: min(
                (max(worst, cost := upto[end] - upto[start] + head * last), squares + cost**2, [*cuts, end])
                for start, (worst, squares, cuts) in best.items()
                if start < end
            )
            for end in ends
        }
    cuts = [0, *best[config.n_layers][2]]
    return [Stage(layers=range(a, b), embeds=a == 0, heads=b == config.n_layers) for a, b in pairwise(cuts)]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Print what a published model costs, and with a layout what its ranks hold.

    Attributes
    ----------
    name
        A preset: tiny, small, medium, large, ultra-128, ultra-256 or bench-8L.
    n_experts
        Experts per layer, where they are to differ from the preset's.
    seq_len
        Positions of a sequence; by default the preset's longest.
    n_gpus
        GPUs in all; by default pp * ep.
    pp
        Ranks that a batch passes one after the other.
    n_per_rank
        Stages of each.
    ep
        Ranks that share one copy of the experts.
    cp
        Ranks that share a row.
    batch_size
        Sequences of the global batch; by default one a micro-batch.
    n_microbatches
        Slices of a rank's part of the batch.
    recompute
        What the backward makes again: none or block.
    imbalance
        Rows that the fullest of the ep ranks gets, by their mean, as recorded; by default 1.
    gpu
        Whose memory has to do: h100, h200, b200 or b300; by default each is tried.
    json
        Print one JSON object.
    """

    name: tyro.conf.Positional[str]
    n_experts: int | None = None
    seq_len: int | None = None
    n_gpus: int | None = None
    pp: int | None = None
    n_per_rank: int | None = None
    ep: int | None = None
    cp: int | None = None
    batch_size: int | None = None
    n_microbatches: int | None = None
    recompute: str | None = None
    imbalance: float | None = None
    gpu: str | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


def main() -> None:
    """Read the command line and print the plan."""
    args = tyro.cli(Plan, prog="python -m moekit.plan")
    try:
        _print_plan(args)
    except ValueError as error:
        first, *rest = str(error).splitlines()
        listed = "; ".join(line.removeprefix("- ") for line in rest).replace(":; ", ": ")
        raise SystemExit(f"moekit.plan: {first}{': ' if rest else ''}{listed}") from error


def _print_plan(args: Plan) -> None:
    from moekit import layouts  # which stands on this module

    config = preset(args.name, **({} if args.n_experts is None else {"n_experts": args.n_experts}))
    seq_len = config.max_seq_len if args.seq_len is None else args.seq_len
    config = replace(config, max_seq_len=max(config.max_seq_len, seq_len))
    flops = flops_per_token(config, seq_len)
    total, active = count_params(config)
    given: dict[str, Any] = {}
    names = "pp n_per_rank ep cp batch_size n_microbatches recompute imbalance".split()
    for name in (name for name in names if getattr(args, name) is not None):
        given[name] = getattr(args, name)
    asked = layout = n_gpus = None
    if given or args.n_gpus is not None or args.gpu is not None:
        if args.gpu is not None and args.gpu not in GPUS:
            raise ValueError(f"--gpu needs one of {sorted(GPUS)}, got {args.gpu!r}")
        pp, ep, cp, m = (given.get(name, 1) for name in ("pp", "ep", "cp", "n_microbatches"))
        n_gpus = max(pp * ep, 1) if args.n_gpus is None else args.n_gpus
        one_row_each = max(n_gpus // max(pp, 1) // max(cp, 1) * m, 1)
        asked = layouts.Layout(**({"batch_size": one_row_each, "seq_len": seq_len} | given))
        layout = layouts.check_layout(config, asked, n_gpus=n_gpus)
    if args.json:
        figures: dict[str, Any] = dict(
            name=args.name, total_params=total, active_params=active, flops_per_token=flops
        )
        if layout is not None:
            figures |= {"layout": asdict(layout), "memory": layouts.memory_of(config, layout)}
        print(json.dumps(figures | {"seq_len": seq_len, "config": asdict(config)}))
    else:
        print(f"{args.name}: {config.n_layers} layers, {config.n_experts} experts, top-{config.top_k}")
        print(f"  total parameters    {total:>22,}")
        print(f"  active parameters   {active:>22,}")
        print(
            f"  FLOPs per token     {flops / 1e9:>18.1f} GFLOP  (forward and backward, {seq_len} positions)"
        )
    if asked is None or layout is None:
        return
    if not args.json:
        print(layouts.describe_layout(config, layout))
        peak = max(sum(rank.values()) for rank in layouts.memory_of(config, layout))
        for gpu in GPUS if args.gpu is None else [args.gpu]:
            print(f"{gpu} ({GPUS[gpu].memory / 1e9:.0f} GB): {fits(peak, gpu)}")
        if args.gpu is None and (small := [gpu for gpu in GPUS if peak >= GPUS[gpu].memory]):
            print(f"--gpu {small[-1]} names layouts that fit")
    if args.gpu is not None:
        layouts.check_layout(config, asked, n_gpus=n_gpus, gpu=args.gpu)


if __name__ == "__main__":
    main()
