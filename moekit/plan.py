"""What a model costs, before anything is made: ``python -m moekit.plan bench-8L --n-experts 128``."""

import json
import math
from dataclasses import asdict, dataclass
from typing import Annotated

import tyro

from moekit.config import ModelConfig, preset
from moekit.params import param_shapes


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
    seq_len = config.max_seq_len if seq_len is None else seq_len
    if seq_len < 1:
        raise ValueError(f"flops_per_token needs seq_len >= 1, got {seq_len}")
    weights = 0
    for name, shape in param_shapes(config).items():
        if len(shape) == 1 or (name == "embedding" and not config.tied_head):
            continue
        n = math.prod(shape)
        weights += n // config.n_experts * config.top_k if ".experts." in name else n
    pairs = (seq_len + 1) / 2  # keys seen by a query, on average
    attention = config.n_layers * 2 * 2 * pairs * config.n_heads * config.d_head
    return 3 * (2 * weights + attention)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Print what a published model costs.

    Attributes
    ----------
    name
        A preset: tiny, small, medium, large, ultra-128, ultra-256 or bench-8L.
    n_experts
        Experts per layer, where they are to differ from the preset's.
    seq_len
        Positions of a sequence; by default the preset's longest.
    json
        Print one JSON object.
    """

    name: tyro.conf.Positional[str]
    n_experts: int | None = None
    seq_len: int | None = None
    json: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False


def main() -> None:
    """Read the command line and print the plan."""
    args = tyro.cli(Plan, prog="python -m moekit.plan")
    try:
        config = preset(args.name, **({} if args.n_experts is None else {"n_experts": args.n_experts}))
        seq_len = config.max_seq_len if args.seq_len is None else args.seq_len
        flops = flops_per_token(config, seq_len)
    except ValueError as error:
        raise SystemExit(f"moekit.plan: {error}") from error
    total, active = count_params(config)
    if args.json:
        figures = dict(name=args.name, total_params=total, active_params=active, flops_per_token=flops)
        print(json.dumps(figures | {"seq_len": seq_len, "config": asdict(config)}))
    else:
        print(f"{args.name}: {config.n_layers} layers, {config.n_experts} experts, top-{config.top_k}")
        print(f"  total parameters    {total:>22,}")
        print(f"  active parameters   {active:>22,}")
        print(
            f"  FLOPs per token     {flops / 1e9:>18.1f} GFLOP  (forward and backward, {seq_len} positions)"
        )


if __name__ == "__main__":
    main()
