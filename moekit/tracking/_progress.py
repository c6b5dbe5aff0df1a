"""The steps of a run, and what is worth printing and logging of each."""

import contextlib
import itertools
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only
from tqdm import tqdm

from moekit import optim, plan, symmetric
from moekit.config import ModelConfig, Stage
from moekit.tracking._figures import load_figures, wait_figures
from moekit.tree import check_names

LN2 = math.log(2)
AUXILIARY = ("load_balancing", "router_z", "head_z")  # losses among the statistics
HEAT_MAPS = 10  # of so many steps that are logged, one has the rows of every expert


class Progress:
    """The steps of a run, with a bar where there is a terminal; every few a printed line and a record.

    A step is printed and logged once the next one has been given to the device, so nothing here lets the
    device wait: its numbers are copied to the host meanwhile. The last one follows when the loop ends,
    however it does.

    Parameters
    ----------
    run : Run
        From :func:`start_run`, or anything else with its ``log(figures, step=...)``.
    n_steps : int
        The number of the last step.
    start : int
        Steps done before, as read from a checkpoint.
    every : int
        Steps between records; the last step has one too.
    tokens_per_step : int
        Of the global batch.
    tokens : int, optional
        Those of the steps before, as :attr:`moekit.data.Loader.n_tokens` knows them; by default steps before
        had as many as those to come.
    token : str
        What a token is, for printing, e.g. ``"byte"``.
    config : ModelConfig, optional
        The model, for FLOPs and the numbers of its layers.
    seq_len : int, optional
        As for :func:`moekit.plan.flops_per_token`.
    peak_flops : float, optional
        FLOP/s of a rank's device, for what is a part of it; by default that of a GPU that
        :mod:`moekit.plan` knows.
    stages : sequence of sequence of Stage, optional
        Of a pipeline: those of each of its ranks.
    mesh : DeviceMesh, optional
        From :func:`moekit.make_mesh`. Rank 0 prints and logs.

    Raises
    ------
    ValueError
        When ``every`` is below 1, or ``stages`` are not of as many ranks as the mesh has on pp.

    Examples
    --------
    >>> run = start_run(config, project="mine", folder="runs/mine")  # doctest: +SKIP
    >>> progress = Progress(run, 600, every=10, tokens_per_step=4096)  # doctest: +SKIP
    >>> for step in progress:  # doctest: +SKIP
    ...     params, state, stats = train_step(params, state, next(loader))
    ...     progress.log(stats, dict(state=state))
    """

    def __init__(
        self,
        run: Any,
        n_steps: int,
        *,
        start: int = 0,
        every: int = 10,
        tokens_per_step: int,
        tokens: int | None = None,
        token: str = "token",
        config: ModelConfig | None = None,
        seq_len: int | None = None,
        peak_flops: float | None = None,
        stages: Sequence[Sequence[Stage]] | None = None,
        mesh: DeviceMesh | None = None,
    ):
        if every < 1:
            raise ValueError(f"Progress needs every >= 1, got {every}")
        self.run, self.n_steps, self.every, self.step = run, n_steps, every, start
        self.tokens_per_step, self.token, self.config = tokens_per_step, token, config
        self._more_before = 0 if tokens is None else tokens - start * tokens_per_step
        self.rank, n_ranks = (0, 1) if mesh is None else (dist.get_rank(), mesh.size())
        self.ep = 1 if mesh is None else mesh["ep"].size()
        n, got = 1 if mesh is None else n_ranks // mesh["edp", "ep"].size(), len(stages or [()])
        if got != n:
            raise ValueError(
                f"Progress needs the stages of each of {n} ranks of a pipeline, got those of {got}"
            )
        first = self._first_layer
        self.stages = None
        if stages is not None:
            self.stages = [[i - first for x in of for i in x.layers if i >= first] for of in stages]
        self.flops = 0.0 if config is None else plan.flops_per_token(config, seq_len) / n_ranks
        if peak_flops is None and torch.cuda.is_available():
            peak_flops = plan.peak_flops(torch.device("cuda"))
        self.peak_flops = peak_flops
        self._due: _Due | None = None
        self._n_logged = 0
        self._bar = tqdm(disable=True)  # until the steps begin
        self._since, self._began, self._pauses = self.step, _Moment(), []

    def __iter__(self) -> Iterator[int]:
        """Count from ``start + 1`` to ``n_steps``."""
        disable = True if self.rank else None
        self._bar = tqdm(initial=self.step, total=self.n_steps, disable=disable, smoothing=0.05)
        self._since, self._began, self._pauses = self.step, _Moment(), []
        with self._bar:
            try:
                while self.step < self.n_steps:
                    self.step += 1
                    yield self.step
                    self._bar.update()
            finally:
                self._write_due()

    def write(self, line: str, *, step: int | None = None) -> None:
        """Print a line above the bar, after the step's number, on rank 0."""
        if self.rank == 0:
            self._bar.write(f"step {self.step if step is None else step:5d}  {line}")

    def log(self, stats: Mapping[str, Any], held: Mapping[str, Any] | None = None, **figures: Any) -> None:
        """Take what is to be known of a step that is due; print and log the one that was due before.

        Call it in every step, on all ranks: on GPUs a step that is due is collective, for the memory of the
        fullest rank.

        Parameters
        ----------
        stats : mapping
            Tensors of the global batch, as :func:`moekit.next_token_loss` gives them, summed over ranks;
            ``cross_entropy`` and ``counts`` (l, E) are needed.
        held : mapping, optional
            What steps update. Of its ``state``, :func:`moekit.optim.figures` are logged, of its ``biases``
            the least and the largest.
        **figures
            More 0-d tensors or numbers to log.

        Raises
        ------
        ValueError
            When one of the two is missing.
        """
        self._write_due()
        if self.step % self.every and self.step != self.n_steps:
            return
        check_names("Progress.log", "stats", stats, "cross_entropy", "counts")
        device = stats["counts"].device
        memory = _peak_memory(device) if device.type == "cuda" else None
        if self.rank:
            return
        held = {} if held is None else held
        if isinstance(state := held.get("state"), TensorDict):
            figures |= {f"optim/{name}": x for name, x in optim.figures(state).items()}
        if (biases := held.get("biases")) is not None and biases.numel():
            figures |= {"router/bias_min": biases.min(), "router/bias_max": biases.max()}
        of_step, figures, memory = tree_map_only(Tensor, _to_host, (dict(stats), figures, memory))
        self._due = _Due(self.step, _Moment(), self._pauses, of_step, figures, memory)
        self._pauses = []

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the rate what is done within: saving, validation."""
        self._write_due()
        start, n = _Moment(), len(self._pauses)
        yield
        self._pauses[n:] = [(start, _Moment())]  # in place of those within

    def _write_due(self) -> None:
        """Print and log the step that is due, if one is; wait until the device has done it."""
        due = self._due
        if due is None:
            return
        due.moment.wait()
        seconds = due.moment.since(self._began) - sum(end.since(start) for start, end in due.pauses)
        rate = (due.step - self._since) * self.tokens_per_step / seconds
        figures = self._figures(due, rate)
        has_rows = due.stats["counts"].numel() > 0  # of a model that has experts
        if has_rows and (self._n_logged % HEAT_MAPS == 0 or due.step == self.n_steps):
            layers = (str(i) for i in itertools.count(self._first_layer))
            figures["load/rows"] = dict(zip(layers, due.stats["counts"].tolist(), strict=False))
        self._n_logged += 1
        self._due, self._since, self._began = None, due.step, due.moment
        self.run.log(figures, step=due.step)

        parts = [f"loss {figures['loss']:.6f}", f"{rate:,.0f} {self.token}s/s"]
        if "speed/mfu" in figures:
            parts += [f"{figures['speed/tflops_per_rank']:.1f} TFLOP/s a rank"]
            parts += [f"MFU {figures['speed/mfu']:.1%}"]
        if due.memory is not None:
            parts += ["peak {memory/peak_active_gib:.1f} GiB active".format(**figures)]
            parts += ["{memory/peak_reserved_gib:.1f} reserved".format(**figures)]
        if "wait/waited" in figures:
            parts += ["waited {wait/waited:.2f}, seen {wait/seen:.2f}".format(**figures)]
        if figures.get("drops/rows"):
            parts += ["dropped {drops/rows:,} rows ({drops/share:.2%})".format(**figures)]
        self.write("  ".join(parts), step=due.step)
        shown = {"loss": f"{figures['loss']:.3f}", f"bits/{self.token}": f"{figures['loss'] / LN2:.3f}"}
        self._bar.set_postfix(shown | {f"{self.token}s/s": f"{rate:.0f}"})

    def _figures(self, due: "_Due", rate: float) -> dict[str, Any]:
        stats, loss, counts = due.stats, due.stats["cross_entropy"].item(), due.stats["counts"]
        figures: dict[str, Any] = {
            "loss": loss,
            f"bits_per_{self.token}": loss / LN2,
            "tokens": due.step * self.tokens_per_step + self._more_before,
            "speed/tokens_per_second": rate,
        }
        flops, ms_per_row = rate * self.flops, None
        if self.config is not None:
            figures["speed/tflops_per_rank"] = flops / 1e12
            if self.peak_flops:
                figures["speed/mfu"] = flops / self.peak_flops
                ms_per_row = plan.flops_per_row(self.config) / self.peak_flops * 1e3
        if due.memory is not None:
            names = ("peak_active", "peak_reserved", "symmetric")
            figures |= {
                f"memory/{name}_gib": x / 2**30 for name, x in zip(names, due.memory.tolist(), strict=True)
            }
        figures |= {f"aux/{name}": stats[name].item() for name in AUXILIARY if name in stats}
        if "router_entropy" in stats:
            figures["router/entropy"] = stats["router_entropy"].item()
        if "n_dropped" in stats:
            n, of = stats["n_dropped"].item(), stats["n_routes"].item()
            figures |= {"drops/rows": n, "drops/share": n / max(of, 1)}
        if counts.numel():
            figures |= load_figures(counts, first_layer=self._first_layer)
        if counts.numel() and "fullest" in stats and self.ep > 1:
            figures |= wait_figures(
                stats["computed"],
                stats["fullest"],
                ep=self.ep,
                stages=self.stages,
                ms_per_row=ms_per_row,
                first_layer=self._first_layer,
            )
        return figures | {name: x.item() if isinstance(x, Tensor) else x for name, x in due.figures.items()}

    @property
    def _first_layer(self) -> int:
        return 0 if self.config is None else self.config.n_dense_layers


class _Moment:
    """A moment of the device, for which the host need not wait; of the host where there is no GPU."""

    def __init__(self):
        self.event = torch.cuda.Event(enable_timing=True) if torch.cuda.is_available() else None
        if self.event is not None:
            self.event.record()
        self.time = time.perf_counter()

    def wait(self) -> None:
        if self.event is not None:
            self.event.synchronize()

    def since(self, earlier: "_Moment") -> float:
        """Return seconds."""
        if self.event is None or earlier.event is None:
            return self.time - earlier.time
        return earlier.event.elapsed_time(self.event) / 1e3


@dataclass(frozen=True)
class _Due:
    """A step whose numbers are on their way to the host."""

    step: int
    moment: _Moment  # when they are there
    pauses: list[tuple[_Moment, _Moment]]  # since the one before
    stats: dict[str, Tensor]
    figures: dict[str, Any]
    memory: Tensor | None


def _to_host(x: Tensor) -> Tensor:
    """Copy without waiting: the next step may overwrite it, and comes behind the copy."""
    return x.detach().to("cpu", non_blocking=True, copy=True)


def _peak_memory(device: torch.device) -> Tensor:
    """Return the bytes at most active and reserved, and symmetric, of the fullest rank; no host sync."""
    stats, beside = torch.cuda.memory_stats(), symmetric.allocated_bytes()
    peaks = [stats[f"{kind}_bytes.all.peak"] + beside for kind in ("active", "reserved")]
    memory = torch.tensor([*peaks, beside], dtype=torch.float64, pin_memory=device.type == "cuda")
    memory = memory.to(device, non_blocking=True)
    if dist.is_initialized():
        dist.all_reduce(memory, dist.ReduceOp.MAX)
    return memory
