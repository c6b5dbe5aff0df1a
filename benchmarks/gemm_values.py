"""What the numbers in a grouped GEMM do to its speed: the same product on zeros and on what training has.

    python benchmarks/gemm_values.py --json gemm_values.json --plot gemm_values.png
    python benchmarks/gemm_values.py --recorded rows.safetensors --shapes 16384x4096x8

A GPU that computes at its power limit lowers its clock, and what power a product takes depends on how many
bits change from one number to the next: on zeros or constants few do. So the same kernel on the same shapes
gives other figures on other values. The candidates are :func:`moekit.kernels.grouped_mm.grouped_mm` of rows
and weights of ``gate_up``, or the gradient of such weights from rows and gradients, on

- ``zeros``, and ``constant``: both operands;
- ``gaussian``: rows N(0, 1), the other operand N(0, 1 / d), as in the other benchmarks here, and in a model
  that has not been trained;
- ``trained``, made up to look like a trained model's: each channel of rows has a scale, log-normal with a
  standard deviation of 1, times 20 in one channel of 500; then each row is divided by its root mean square,
  as a norm does. Few channels that are some twenty times as large as the others, in all tokens, are what
  Dettmers et al. (2022, https://arxiv.org/abs/2208.07339) found in trained transformers. The other operand
  has a scale for each output, log-normal with a standard deviation of 0.5;
- ``recorded``: the rows of ``--recorded FILE``, repeated as often as needed, and a gaussian other operand.

Groups are even. Beside each time stand the SM's clock and the board's power, which a thread reads every 20 ms
by torch and nvidia-ml-py. The driver's power is a mean over up to a second: what is read in the first second
of a slot is left out, so a slot takes several. Where they cannot be read the table says why. Candidates take
turns, also with the ceilings, whose dense product is gaussian.
"""

import contextlib
import math
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import tyro
from measure import Candidate, Column, describe, end, free, known, measure, run_cases, say, sizes
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from moekit.kernels import choose_products
from moekit.kernels.grouped_mm import grouped_mm, grouped_weight_grad

# --- Config ---------------------------------------------------------------------------

Values = Literal["zeros", "constant", "gaussian", "trained"]


@dataclass(frozen=True, kw_only=True)
class Config:
    """What to measure, and where to write it."""

    shapes: tuple[str, ...] = ("16384x4096x8", "16384x4096x128")  # TOKENSxD_MODELxEXPERTS; h is d_model
    values: tuple[Values, ...] = ("zeros", "constant", "gaussian", "trained")
    recorded: Path | None = None  # rows (n, d_model): .npy, or .safetensors with one matrix
    product: Literal["forward", "weight_grad"] = "forward"
    kernels: Literal["auto", "torch", "triton", "quack"] = "auto"
    top_k: int = 4
    rounds: int = 3
    slot: float = 3.0  # seconds a candidate and round, of which the first second's power is not counted
    json: Path | None = None
    plot: Path | None = None
    device: str = "cuda" if torch.cuda.is_available() else "cpu"


SETTLED = 1.0  # seconds of a slot after which a reading is of its candidate alone
EVERY = 0.02  # seconds between readings


# --- Values ---------------------------------------------------------------------------


def operands(cfg: Config, name: str, shape: tuple[int, int], other: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Return rows (r, d) and the other operand, weights (E, d, n) or gradients (r, n); alike in every run."""
    like: dict[str, Any] = dict(dtype=torch.bfloat16, device=cfg.device)
    rows, second = torch.empty(shape, **like), torch.empty(other, **like)
    if name in ("zeros", "constant"):
        return rows.fill_(name == "constant"), second.fill_(name == "constant")
    generator = torch.Generator(cfg.device).manual_seed(0)
    rows.normal_(generator=generator)
    second.normal_(std=shape[1] ** -0.5, generator=generator)
    if name == "trained":
        rows = with_outliers(rows, generator)
        scale = torch.empty(other[-1], device=cfg.device)
        second.mul_(scale.log_normal_(std=0.5, generator=generator))
    if name == "recorded":
        assert cfg.recorded is not None
        found = read_rows(cfg.recorded)
        if found.shape[1] != shape[1]:
            raise ValueError(f"{cfg.recorded} needs rows of {shape[1]} features, got {tuple(found.shape)}")
        rows.copy_(found[torch.arange(len(rows)) % len(found)])
    return rows, second


def with_outliers(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Give each channel a scale of a heavy tail, and each row a root mean square of 1; in place."""
    d = rows.shape[1]
    scale = torch.empty(d, device=rows.device).log_normal_(std=1.0, generator=generator)
    scale[torch.randperm(d, device=rows.device, generator=generator)[: math.ceil(d / 500)]] *= 20
    rows.mul_(scale)
    for part in rows.split(4096):  # of a float32 copy
        part.div_(part.float().square().mean(1, keepdim=True).sqrt())
    return rows


def read_rows(path: Path) -> Tensor:
    """Return the matrix of a file.

    Raises
    ------
    ValueError
        When it is no whole .npy or safetensors file, or does not hold one matrix of floats.
    """
    try:
        found = dict(array=torch.from_numpy(np.load(path))) if path.suffix == ".npy" else load_file(path)
    except (SafetensorError, EOFError, TypeError, ValueError) as error:
        raise ValueError(f"--recorded needs an .npy or safetensors file, got {path}: {error}") from error
    matrices = [x for x in found.values() if x.ndim == 2 and x.is_floating_point() and len(x)]
    if len(matrices) != 1:
        kinds = {name: f"{x.dtype} {tuple(x.shape)}" for name, x in found.items()}
        raise ValueError(f"--recorded needs one matrix of floats (n, d), got {kinds} in {path}")
    return matrices[0]


# --- Clock and power ------------------------------------------------------------------


@dataclass
class Sensors:
    """What a thread reads of a device while candidates run, by their names."""

    device: str
    clocks: dict[str, list[float]] = field(default_factory=dict)  # MHz
    watts: dict[str, list[float]] = field(default_factory=dict)
    reason: str | None = None  # why nothing, or nothing more, can be read

    def __post_init__(self) -> None:
        if torch.device(self.device).type != "cuda":
            self.reason = f"no GPU: --device {self.device}"
            return
        self.read()  # torch loads what it needs, or says what is missing

    def read(self) -> tuple[float, float] | None:
        """Return MHz and watts; None, from then on, where that fails."""
        if self.reason is None:
            try:
                return float(torch.cuda.clock_rate(self.device)), torch.cuda.power_draw(self.device) / 1e3
            except Exception as error:
                self.reason = describe(error)
        return None

    @contextlib.contextmanager
    def watch(self, name: str) -> Iterator[None]:
        """Read while a slot of a candidate lasts."""
        ended, start = threading.Event(), time.perf_counter()

        def look() -> None:
            while not ended.wait(EVERY) and (found := self.read()) is not None:
                if time.perf_counter() - start > SETTLED:
                    self.clocks.setdefault(name, []).append(found[0])
                    self.watts.setdefault(name, []).append(found[1])

        thread = threading.Thread(target=look)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join()

    def of(self, name: str) -> dict[str, Any]:
        """Return means over a candidate's slots, with their number, or why there are none."""
        if not self.watts.get(name):
            return dict(not_read=self.reason or f"no slot longer than {SETTLED:g} s")
        mean = statistics.fmean
        return dict(
            sm_mhz=mean(self.clocks[name]), watts=mean(self.watts[name]), n_readings=len(self.watts[name])
        )


COLUMNS: list[Column] = [
    ("of gaussian", known("of_gaussian"), ".3f"),
    ("SM MHz", known("sm_mhz"), ".0f"),
    ("W", known("watts"), ".0f"),
    ("clock and power not read", known("not_read"), ""),
]


# --- One shape ------------------------------------------------------------------------


def run_shape(cfg: Config, text: str) -> dict[str, Any]:
    """Time the product on all values at one shape."""
    t, d, n_experts = sizes(text)
    r, n = t * cfg.top_k, 2 * d
    one = torch.empty(1, d, n, dtype=torch.bfloat16, device=cfg.device)
    products = choose_products("gemm_values", cfg.kernels, r, one.expand(n_experts, d, n))
    forward = cfg.product == "forward"
    kernels = products.forward if forward else products.weight_grad
    multiply, other = (grouped_mm, (n_experts, d, n)) if forward else (grouped_weight_grad, (r, n))
    offsets = (torch.arange(1, n_experts + 1, device=cfg.device) * r // n_experts).int()
    candidates, errors = {}, {}
    for name in (*cfg.values, *(["recorded"] if cfg.recorded else [])):
        try:
            run = partial(multiply, *operands(cfg, name, (r, d), other), offsets, kernels=kernels)
            run()
            candidates[name] = Candidate(run=run, flops=2 * r * d * n)
        except Exception as e:
            errors[name] = describe(e)
            run = None
            free(cfg.device)
    say(f"{text}: {cfg.product} by {kernels}, {r} rows")
    sensors = Sensors(cfg.device)
    results = measure(
        candidates,
        device=cfg.device,
        errors=errors,
        rounds=cfg.rounds,
        slot=cfg.slot,
        watch=sensors.watch,
    )
    seconds = {r.name: r.seconds for r in results if r.error is None}
    for result in results:
        if result.error is None:
            result.more = sensors.of(result.name)
            if result.name in candidates and result.seconds and (gaussian := seconds.get("gaussian")):
                result.more["of_gaussian"] = result.seconds / gaussian
    say(f"{text}: measured")
    about = dict(tokens=t, d_model=d, n_experts=n_experts, rows=r, kernels=kernels)
    return dict(title=f"{text}, {cfg.product}", **about, results=results)


def main(cfg: Config) -> dict[str, Any]:
    """Measure all shapes, and write and return the record."""
    for text in cfg.shapes:
        sizes(text)
    if cfg.recorded is not None:
        try:
            read_rows(cfg.recorded)
        except (ValueError, OSError) as error:
            raise SystemExit(str(error)) from None
    return run_cases(cfg, run_shape, rate="flops", packages=("nvidia-ml-py", "quack-kernels"), more=COLUMNS)


if __name__ == "__main__":
    end(main(tyro.cli(Config, description=__doc__)))
