r"""What each role of a precision policy gains, loses and costs on one GPU.

    python benchmarks/precision.py --json docs/results/precision.json --plot docs/results/precision.png
    python benchmarks/precision.py --toy --emulate

Everything is beside bfloat16 of the same run, in three parts:

- forward and backward of bench-8L: each role of :class:`moekit.precision.Precision` alone, and all together;
- one layer, router and experts, as in benchmarks/moe_layer.py, with torchao's product as a peer;
- the whole step: micro-batches accumulated in float32, AdamW, and the weights rounded from its masters again.

Gained is time ("of bf16": this time as a share of that in bfloat16). Lost is the signal-to-noise ratio, in
dB, of gradients against those of bfloat16: of all, and of the group of parameters that has the worst. Routing
is fixed, so that no token goes elsewhere: random, or as ``--routing`` says (see benchmarks/routing.py). Held
is the memory of the parameters and of what was rounded of them before the call, as once a step; in the whole
step that is in what the call adds.

"converting" is the share of the device's work in kernels that only convert: those named for quantizing, and
torch's casts to eight bits. With "scattering", those that round rows on their way into expert order are
counted, too, which would move them anyway. What plain torch does beside its casts is in neither.
"""

import functools
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import moe_layer
import peers
import torch
import tyro
from bench_8l import make_batch, make_model, our_gradients, our_loss, our_optimizer, our_step, timed
from measure import (
    Column,
    Result,
    check_run,
    describe,
    end,
    environment,
    free,
    kernel_seconds,
    known,
    plot,
    refuse_unknown,
    say,
    table,
    write_json,
)
from tensordict import TensorDict
from torch import Tensor

import moekit as mk
from moekit import plan, precision
from moekit.params import param_dtype
from moekit.precision import Precision
from moekit.tree import map_named, named

# --- Config ---------------------------------------------------------------------------

ALONE = tuple(role for role in precision.ROLES if role != "dispatch_payload")  # on one GPU nothing travels
BF16, ALL, HOLLOW, TORCHAO = "bf16", "all", "all, hollow parameters", "torchao"
WEIGHT_GRADS, SAVED = "all, weight gradients too", "all, saved activations too"
HOLLOW_SAVED = "all, saved activations too, hollow parameters"
IN_THE_CALL = "all, weight gradients too, weights rounded in the call"
DENSE_WEIGHT_GRAD = "dense_weight_grad with both dense roles"  # alone it has no effect
ROLES = tuple(DENSE_WEIGHT_GRAD if role == "dense_weight_grad" else role for role in ALONE)
BY_PART = {
    "step": (*ROLES, ALL, WEIGHT_GRADS, SAVED, HOLLOW, HOLLOW_SAVED),
    "layer": (ALL, WEIGHT_GRADS, IN_THE_CALL, TORCHAO),
    "whole_step": (ALL, WEIGHT_GRADS, HOLLOW),
}
CANDIDATES = (*BY_PART["step"], IN_THE_CALL, TORCHAO)
NOT_OF_WEIGHTS = ("experts_weight_grad", "dense_weight_grad", "saved_activations")


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is measured; bfloat16 always is."""

    parts: tuple[Literal["step", "layer", "whole_step"], ...] = ("step", "layer", "whole_step")
    candidates: tuple[str, ...] = CANDIDATES
    form: precision.FormatName = "fp8_rowwise"
    emulate: bool = False  # formats that the device has no units for; on CPUs it has none
    n_experts: int = 8
    batch_size: int = 2  # sequences of a micro-batch
    seq_len: int = 8192  # tokens
    n_microbatches: int = 8  # of the whole step
    shapes: tuple[str, ...] = ("16384x4096x8", "16384x4096x128")  # of the layer, tokens x d_model x experts
    top_k: int = 4  # of the layer
    routing: str = "random"  # see benchmarks/routing.py
    rounds: int = 5
    slot: float = 0.5  # seconds a candidate in a round
    toy: bool = False  # widths and lengths for a CPU, the model in float32
    json: Path | None = None
    plot: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"

    @property
    def dtype(self) -> torch.dtype:
        """That of the model's parameters, in which the baseline computes."""
        return torch.float32 if self.toy else torch.bfloat16


Policies = Mapping[str, Precision]
Built = tuple[Callable[[], object], dict[str, Any]]  # a candidate's run, and what is known of it


def make_policies(form: precision.FormatName, emulate: bool) -> dict[str, Precision]:
    """Return what each candidate rounds."""
    roles: dict[str, dict[str, Any]] = {name: {role: form} for name, role in zip(ROLES, ALONE, strict=True)}
    roles[DENSE_WEIGHT_GRAD] |= dict(attention_projections=form, feed_forward=form)
    everything = precision.all_products(form, emulate=emulate)
    weight_grads = replace(everything, experts_weight_grad=form, dense_weight_grad=form)
    return {
        **{name: Precision(**changes, emulate=emulate) for name, changes in roles.items()},
        **{ALL: everything, HOLLOW: everything, WEIGHT_GRADS: weight_grads, IN_THE_CALL: weight_grads},
        **dict.fromkeys((SAVED, HOLLOW_SAVED), replace(everything, saved_activations=form)),
    }


# --- What is lost, and what is held ---------------------------------------------------


def decibels(pairs: Mapping[str, Iterable[tuple[Tensor, Tensor]]]) -> dict[str, float | None]:
    """Return the signal-to-noise ratio of each group of ``(got, wanted)``, and of all; None without noise.

    Raises
    ------
    ValueError
        When something is not finite.
    """
    powers = {}
    for group, tensors in pairs.items():
        power = [0.0, 0.0]
        for got, want in tensors:
            for a, b in zip(got, want, strict=True) if want.ndim == 3 else [(got, want)]:  # an expert each
                for i, x in enumerate((b.float(), a.float() - b.float())):
                    power[i] += torch.linalg.vector_norm(x).item() ** 2
        powers[group] = power
    powers["all"] = [sum(column) for column in zip(*powers.values(), strict=True)]
    if bad := [group for group, power in powers.items() if not math.isfinite(sum(power))]:
        raise ValueError(f"what came is not finite in {', '.join(bad)}")
    return {group: 10 * math.log10(of[0] / of[1]) if all(of) else None for group, of in powers.items()}


def by_group(got: TensorDict, want: TensorDict) -> dict[str, list[tuple[Tensor, Tensor]]]:
    """Return gradients with those wanted, by the kind of their parameters."""
    pairs: dict[str, list[tuple[Tensor, Tensor]]] = {}
    for name, grad in named(got).items():
        path = name.split(".")
        found = [part for part in ("experts", "shared", "ffn", "router", "attention") if part in path]
        group = "norms" if "norm" in path[-1] else found[0] if found else path[0]
        pairs.setdefault(group, []).append((grad, want[tuple(path)]))
    return pairs


def held_bytes(*trees: TensorDict) -> int:
    """Return the bytes of the storages below trees of tensors, each counted once."""
    leaves: list[Any] = [x for tree in trees for x in tree.values(True, True)]
    storages = {x.untyped_storage().data_ptr(): x.untyped_storage() for x in leaves}
    return sum(storage.nbytes() for storage in storages.values())


def converting(seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the share of kernels that only convert formats, and that with those that scatter rows, too."""
    counted = {name: s for name, s in seconds.items() if "float8_copy" in name or "quantize" in name}
    alone = [s for name, s in counted.items() if "scatter" not in name]
    total = sum(seconds.values())
    return dict(converting=sum(alone) / total, converting_or_scattering=sum(counted.values()) / total)


# --- The three parts ------------------------------------------------------------------


def step(cfg: Config, policies: Policies) -> list[Result]:
    """Compare forward and backward of the model."""
    model = make_model(cfg.n_experts, seq_len=cfg.seq_len, toy=cfg.toy)
    masters = mk.init_params(model, dtype=torch.float32, device=cfg.device)
    params = map_named(lambda name, p: p.to(param_dtype(name, cfg.dtype)), masters)
    batch = make_batch(model, cfg.batch_size, seq_len=cfg.seq_len, device=cfg.device, routing=cfg.routing)
    loss = our_loss(model, device=cfg.device)
    grad_fn = mk.value_and_grad(loss)
    want = grad_fn(params, batch)[1]
    rounded = functools.cache(functools.partial(precision.round_weights, masters))

    def build(name: str) -> Built:
        if name == BF16:
            return our_gradients(loss, params, batch), dict(held_bytes=held_bytes(params))
        weights_alone = replace(policies[name], **dict.fromkeys(NOT_OF_WEIGHTS))
        low = replace(rounded(weights_alone), policy=policies[name])
        used = precision.hollow(params, policies[name]) if name in (HOLLOW, HOLLOW_SAVED) else params
        lost = decibels(by_group(grad_fn(used, batch, precision=low)[1], want))
        held = held_bytes(used, TensorDict(low.weights if low.weights is not None else {}))
        return our_gradients(loss, used, batch, precision=low), dict(held_bytes=held, sqnr_db=lost)

    n_tokens = cfg.batch_size * cfg.seq_len
    flops = n_tokens * plan.flops_per_token(model, cfg.seq_len)
    return compare(cfg, "step", policies, build, flops=flops, tokens=n_tokens, rounds=cfg.rounds)


def layer(cfg: Config, policies: Policies, *, text: str) -> list[Result]:
    """Compare forward and backward of a layer's router and experts."""
    shape = moe_layer.parse(text, cfg.routing)
    weights, x, grad = moe_layer.make_layer(shape, cfg.top_k, cfg.device)
    for z in (x, *weights.values()):
        z.requires_grad_()
    matrices = {name: weights[name] for name in ("gate_up", "down")}
    params: dict[str, Any] = dict(router=weights["router"], experts=matrices)

    @functools.cache
    def rounded() -> precision.Rounded:  # alike for all
        return precision.round_weights(TensorDict({"experts": TensorDict(matrices)}), policies[ALL])

    def ours(name: str) -> tuple[peers.Layer, int]:
        low = precision.Rounded(precision.BF16 if name == BF16 else policies[name])
        if name not in (BF16, IN_THE_CALL):
            low = replace(low, weights=rounded().weights)
        held = held_bytes(TensorDict(weights), TensorDict(low.weights if low.weights is not None else {}))
        return (lambda x: mk.moe(params, x, top_k=cfg.top_k, precision=low)[0], list(weights.values())), held

    def torchaos() -> tuple[peers.Layer, int]:
        if cfg.form != "fp8_rowwise":
            raise ValueError(f"torchao's product needs --form fp8_rowwise, got {cfg.form}")
        run, parameters = peers.torchao(weights, cfg.top_k)
        return (run, parameters), held_bytes(TensorDict(dict(zip(weights, parameters, strict=True))))

    def build(name: str) -> Built:
        (run, parameters), held = torchaos() if name == TORCHAO else ours(name)
        gradients = functools.partial(moe_layer.forward_backward, run, parameters, x, grad)
        if name == BF16:
            return gradients, dict(held_bytes=held)
        pairs = zip(("output", "tokens", *weights), gradients(), want, strict=True)
        lost = decibels({group: [(got, wanted)] for group, got, wanted in pairs})
        return gradients, dict(held_bytes=held, sqnr_db=lost)

    want = moe_layer.forward_backward(*ours(BF16)[0], x, grad)
    flops, rounds = 18 * shape.tokens * cfg.top_k * shape.d_model**2, cfg.rounds
    results = compare(cfg, "layer", policies, build, flops=flops, tokens=shape.tokens, rounds=rounds)
    torch.compiler.reset()  # or it keeps what was compiled
    return results


def whole_step(cfg: Config, policies: Policies) -> list[Result]:
    """Compare accumulation, norm, update, and rounding of the masters."""
    model = make_model(cfg.n_experts, seq_len=cfg.seq_len, toy=cfg.toy)
    n_sequences = cfg.batch_size * cfg.n_microbatches
    params = mk.init_params(model, dtype=cfg.dtype, device=cfg.device)
    batch = make_batch(model, n_sequences, seq_len=cfg.seq_len, device=cfg.device, routing=cfg.routing)
    loss = our_loss(model, device=cfg.device)
    optimizer, state, sums = our_optimizer(params)

    def build(name: str) -> Built:
        def options() -> dict[str, Any]:
            if name == BF16:
                return {}
            return dict(precision=precision.round_weights(state["master"], policies[name]))

        used = precision.hollow(params, policies[name]) if name == HOLLOW else params
        args = (loss, used, batch, optimizer, state, sums)
        run = our_step(*args, n_microbatches=cfg.n_microbatches, options=options)
        return run, dict(held_bytes=held_bytes(used))

    n_tokens, rounds = n_sequences * cfg.seq_len, max(cfg.rounds // 2, 1)
    flops = n_tokens * plan.flops_per_token(model, cfg.seq_len)
    return compare(cfg, "whole_step", policies, build, flops=flops, tokens=n_tokens, rounds=rounds)


def compare(
    cfg: Config,
    part: str,
    policies: Policies,
    build: Callable[[str], Built],
    *,
    flops: float,
    tokens: int,
    rounds: int,
) -> list[Result]:
    """Build a part's candidates, time them, and add what else is known of them."""
    more: dict[str, dict[str, Any]] = {}

    def keep(name: str) -> Callable[[], object]:
        run, more[name] = build(name)
        policy = policies.get(name, precision.BF16)
        more[name]["roles"] = {r: getattr(policy, r) for r in precision.ROLES if getattr(policy, r)}
        return run

    names = (BF16, *(name for name in BY_PART[part] if name in cfg.candidates))
    builders = {name: functools.partial(keep, name) for name in names}
    results, runs = timed(
        builders, flops=flops, tokens=tokens, device=cfg.device, rounds=rounds, slot=cfg.slot
    )
    (baseline,) = (r.seconds for r in results if r.name == BF16)
    for result in results:
        if result.error is None and result.name in more:
            result.more = more[result.name]
            if baseline and result.seconds:
                result.more["of_bf16"] = result.seconds / baseline
            if torch.device(cfg.device).type == "cuda" and result.name in (BF16, *policies):
                seconds = kernel_seconds(runs[result.name])
                result.more |= converting(seconds) if seconds else {}
    return results


# --- Table ----------------------------------------------------------------------------


def ratio(group: str) -> Callable[[Result], float | None]:
    """Return a column's value: a group's signal-to-noise ratio."""
    return lambda r: r.more.get("sqnr_db", {}).get(group)


def worst(result: Result) -> str | None:
    """Return the lowest ratio, and whose it is."""
    ratios = {group: x for group, x in result.more.get("sqnr_db", {}).items() if x is not None}
    group = min(ratios, key=lambda group: ratios[group], default=None)
    return None if group is None else f"{ratios[group]:.1f} {group}"


COLUMNS: list[Column] = [
    ("of bf16", known("of_bf16"), ".3f"),
    ("GiB held", known("held_bytes", 2**30), ".2f"),
    ("dB all", ratio("all"), ".1f"),
    *((f"dB {name}", ratio(name), ".1f") for name in ("output", "tokens", "gate_up", "down")),
    ("worst dB", worst, ""),
    ("converting %", known("converting", 0.01), ".1f"),
    ("or scattering %", known("converting_or_scattering", 0.01), ".1f"),
]


def main(cfg: Config) -> dict[str, Any]:
    """Measure all parts, and write and return the record."""
    refuse_unknown("candidate", cfg.candidates, (BF16, *CANDIDATES))
    check_run(cfg, cfg.device)
    for text in cfg.shapes:
        moe_layer.parse(text, cfg.routing)
    if cfg.toy:
        small = dict(seq_len=128, n_microbatches=2, rounds=2, slot=0.01)
        small = {name: min(value, getattr(cfg, name)) for name, value in small.items()}
        cfg = replace(cfg, shapes=("256x64x8",), **small)
    torch.manual_seed(0)  # of tokens
    policies = make_policies(cfg.form, cfg.emulate)
    runs: dict[str, Callable[..., list[Result]]] = {}
    for part in cfg.parts:
        if part == "layer":
            runs |= {f"layer {text}": functools.partial(layer, text=text) for text in cfg.shapes}
        else:
            runs[part] = {"step": step, "whole_step": whole_step}[part]
    versions = environment(cfg.device, ("torchao", "flash-attn-4"))
    record: dict[str, Any] = dict(environment=versions, config=asdict(cfg), parts={})
    for name, run in runs.items():
        try:
            results = run(cfg, policies)
        except Exception as e:  # what its candidates share cannot be made
            results = [Result(name=name, error=describe(e))]
        record["parts"][name] = results
        say(f"{name}\n{table(results, COLUMNS)}")
        write_json(cfg.json, record)
        free(cfg.device)
    plot(cfg.plot, record["parts"], rate="flops")
    return record


if __name__ == "__main__":
    end(main(tyro.cli(Config, description=__doc__)))
