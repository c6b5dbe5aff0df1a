r"""Whole training steps of bench-8L on all GPUs of a host: experts that stay, and fully sharded weights.

    python benchmarks/set_ups.py --n-gpus 8 --json docs/results/moe_47b_8gpus.json
    python benchmarks/set_ups.py --n-gpus 2 --n-experts 16 --n-steps 50
    python benchmarks/set_ups.py --n-gpus 8 --dry-run

Starts recipes/moe_47b.py and moe_47b_fsdp.py, a process a GPU, one after another and again in each round, and
reads what they have logged. Each has the same tokens a rank, layers and optimizer. ``tokens/s`` is a GPU's:
the median over all rounds of steps after the fifth. ``of one GPU`` is that as a share of 8 experts on one GPU
in the same run. ``sent`` is what a rank sends in a step, and ``dry run`` its memory, both of a dry run: with
``--dry-run`` that is all, and no GPU is needed. What does not fit is not started.
"""

import contextlib
import io
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal
from unittest import mock

import torch
import tyro
from measure import Column, Result, check_run, describe, end, environment, known, say, table, write_json

from moekit import dryrun
from moekit.tracking import read_metrics

RECIPES = Path(__file__).parent.parent / "recipes"
Way = Literal["one GPU", "rowwise", "all_to_all", "fully sharded", "fully sharded, no prefetch"]
WARM = 5  # steps that compile and choose


@dataclass(frozen=True, kw_only=True)
class Config:
    """What is compared."""

    n_gpus: int = max(torch.cuda.device_count(), 1)
    n_experts: tuple[int, ...] = (8, 32, 64, 128)
    ways: tuple[Way, ...] = (
        "one GPU",
        "rowwise",
        "all_to_all",
        "fully sharded",
        "fully sharded, no prefetch",
    )
    n_sequences: int = 2  # of 8,192 tokens, in a rank's micro-batch
    n_microbatches: int = 1
    n_steps: int = 20
    assignment: Literal["random", "top_k"] = "random"  # drawn, or learned routing
    capacity_factor: float = 1.25  # of rowwise
    precision: tuple[Literal["bf16", "fp8_rowwise"], ...] = ("bf16",)  # of resident experts
    rounds: int = 2
    dry_run: bool = False  # only say what each needs
    toy: bool = False  # the recipes' own
    timeout: float = 600.0  # seconds a recipe may take
    json: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


# --- What is run ----------------------------------------------------------------------


def commands(cfg: Config) -> dict[str, tuple[int, list[str]]]:
    """Return each candidate's number of ranks, and its recipe with its options."""
    found: dict[str, tuple[int, list[str]]] = {}
    for n_experts in cfg.n_experts:
        for way in cfg.ways:
            n = 1 if way == "one GPU" else cfg.n_gpus
            sizes: dict[str, Any] = dict(n_experts=8 if n == 1 else n_experts, n_steps=cfg.n_steps)
            sizes |= dict(batch_size=n * cfg.n_sequences * cfg.n_microbatches, assignment=cfg.assignment)
            options = [f"--{key.replace('_', '-')}={value}" for key, value in sizes.items()]
            options += [f"--n-microbatches={cfg.n_microbatches}", *(["--toy"] if cfg.toy else [])]
            if way.startswith("fully sharded"):
                ahead = [] if way == "fully sharded" else ["--no-prefetch"]
                found[f"{n_experts} experts, {way}"] = n, ["moe_47b_fsdp.py", *options, *ahead]
                continue
            if way != "one GPU":
                options += [f"--ep={n}", f"--via={way}"]
            if way == "rowwise":
                options += [f"--capacity-factor={cfg.capacity_factor}"]
            for form in cfg.precision:
                low = "" if form == "bf16" else f", {form}"
                name = f"{sizes['n_experts']} experts, {way}{low}"
                found[name] = n, ["moe_47b.py", *options, f"--precision={form}"]
    return found


def predict(n: int, command: list[str]) -> dict[str, float]:
    """Return the memory and the bytes sent of the fullest and the busiest rank, by a dry run.

    Raises
    ------
    RuntimeError
        Where the recipe refuses its options.
    """
    reports, real = [], dryrun.dry_run_recipe

    def keep(*args: Any, **options: Any) -> dryrun.Report:
        reports.append(real(*args, **options))
        return reports[-1]

    script, *options = command
    argv = [script, *options, "--dry-run", f"--n-gpus={n}"]
    said = contextlib.redirect_stdout(io.StringIO())
    with mock.patch.object(dryrun, "dry_run_recipe", keep), mock.patch.object(sys, "argv", argv), said:
        try:
            runpy.run_path(str(RECIPES / script), run_name="__main__")
        except SystemExit as refusal:
            if refusal.code:
                raise RuntimeError(str(refusal)) from refusal
    (report,) = reports
    return dict(
        dry_run_bytes=max(record.peak for record in report.records),
        sent_bytes=max(sum(record.traffic().values()) for record in report.records),
    )


def run(cfg: Config, n: int, command: list[str]) -> list[dict[str, Any]]:
    """Start a recipe on ``n`` ranks, and return what it has logged, step by step.

    Raises
    ------
    RuntimeError
        Where it failed, with its last line, or took too long.
    """
    script, *options = command
    launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={n}"] if n > 1 else []
    with tempfile.TemporaryDirectory() as folder:
        logged = [f"--folder={folder}", "--log-every=1"]
        whole = [sys.executable, *launch, str(RECIPES / script), *options, *logged]
        try:
            done = subprocess.run(
                whole, capture_output=True, text=True, timeout=cfg.timeout,
                env=os.environ | dict(WANDB_MODE="disabled"),
            )  # fmt: skip
        except subprocess.TimeoutExpired as error:
            raise RuntimeError(f"{script} took longer than {cfg.timeout:.0f} s") from error
        if done.returncode:
            errors = [line for line in done.stderr.splitlines() if "Error" in line]
            raise RuntimeError((errors or done.stderr.splitlines() or ["it said nothing"])[0].strip())
        return [dict(step=step, **figures) for step, figures in read_metrics(folder).items()]


# --- What came out --------------------------------------------------------------------


def main(cfg: Config) -> dict[str, Any]:
    """Run all candidates in turns, and return the record."""
    check_run(cfg, cfg.device)
    if cfg.n_gpus < 2:
        raise SystemExit(f"set-ups are compared on --n-gpus of 2 or more, got {cfg.n_gpus}")
    if cfg.n_steps <= WARM and not (cfg.dry_run or cfg.toy):
        raise SystemExit(f"--n-steps needs more than the {WARM} that are left out, got {cfg.n_steps}")
    planned = commands(cfg)
    results = {name: Result(name=name, more=dict(command=" ".join(c))) for name, (_, c) in planned.items()}
    record: dict[str, Any] = dict(
        environment=environment(cfg.device, ("quack-kernels", "flash-attn-4")), config=asdict(cfg)
    )
    record["parts"] = {f"{cfg.n_gpus} ranks": list(results.values())}
    steps: dict[str, list[dict[str, Any]]] = {name: [] for name in planned}
    room = torch.cuda.mem_get_info()[1] if cfg.device == "cuda" else None
    for turn in range(1 + cfg.rounds * (not cfg.dry_run)):
        for name, (n, command) in planned.items():
            result = results[name]
            if result.error is not None:
                continue
            try:
                if not turn:
                    result.more |= predict(n, command)
                    needs = result.more["dry_run_bytes"]
                    if room and not cfg.dry_run and needs > room:
                        result.error = f"needs {needs / 1e9:.1f} GB of {room / 1e9:.1f}"
                else:
                    steps[name] += run(cfg, n, command)
                    fill(result, steps[name], n, results.get("8 experts, one GPU"))
            except Exception as error:
                result.error = describe(error)
            say(f"{f'round {turn} of {cfg.rounds}' if turn else 'dry run'}: {name} {result.error or ''}")
        write_json(cfg.json, record)
    print(f"\n{table(list(results.values()), COLUMNS)}\n")
    return record


def fill(result: Result, steps: list[dict[str, Any]], n: int, alone: Result | None) -> None:
    """Put into a result what all its steps so far say."""
    warm = [s for s in steps if s["step"] > WARM] or steps

    def of(name: str, steps: list[dict[str, Any]] = warm) -> list[float]:
        return [s[name] for s in steps if name in s]

    result.n_timed = len(of("speed/tokens_per_second"))
    result.tokens_per_second = statistics.median(of("speed/tokens_per_second")) / n
    if rates := of("speed/tflops_per_rank"):
        result.flops_per_second = 1e12 * statistics.median(rates)
    for name in ("peak_active_gib", "peak_reserved_gib"):
        if peaks := of(f"memory/{name}", steps):
            result.more[name] = max(peaks)
    result.more["loss"] = of("loss", steps)
    if alone is not None and alone.tokens_per_second:
        result.more["of_one_gpu"] = result.tokens_per_second / alone.tokens_per_second


COLUMNS: list[Column] = [
    ("of one GPU", known("of_one_gpu"), ".3f"),
    ("active GiB", known("peak_active_gib"), ".1f"),
    ("reserved", known("peak_reserved_gib"), ".1f"),
    ("dry run GB", known("dry_run_bytes", 1e9), ".1f"),
    ("sent GB", known("sent_bytes", 1e9), ".2f"),
    ("last loss", lambda r: r.more.get("loss", [None])[-1], ".3f"),
]

if __name__ == "__main__":
    end(main(tyro.cli(Config, description=__doc__)))
