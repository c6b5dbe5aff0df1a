"""wandb, offline unless the user is logged in, and what is worth printing and logging of a step."""

import contextlib
import math
import secrets
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import wandb
import wandb.errors
from jaxtyping import Int
from torch import Tensor
from tqdm import tqdm


def start_run(
    config: Any, *, project: str, folder: str | Path, resume: bool = False, rank: int = 0
) -> "wandb.Run":
    """Start a wandb run: online where the user is logged in, else offline; disabled on ranks other than 0.

    Parameters
    ----------
    config : dataclass
        Logged whole.
    project : str
        Name of the project.
    folder : str or Path
        Where wandb keeps its files, and this function the id of the run; made if needed.
    resume : bool
        Continue the run of this folder. wandb gives an offline run that continues a new directory under the
        same id, which ``wandb sync`` joins; pass the step to ``run.log``.
    rank : int
        This process's place among the ranks.
    """
    if rank:
        return wandb.init(mode="disabled")
    known = Path(folder, "wandb-run-id")
    known.parent.mkdir(parents=True, exist_ok=True)
    if not (resume and known.exists()):
        known.write_text(secrets.token_hex(4))
    mode = _mode()
    return wandb.init(
        project=project,
        dir=str(folder),
        config=asdict(config),
        id=known.read_text(),
        resume="allow" if mode == "online" and resume else None,
        mode=mode,
        settings=wandb.Settings(silent=True),
    )


def _mode() -> Any:
    wanted = wandb.setup().settings.mode
    if wanted != "online":  # what the user's own settings say, such as WANDB_MODE=disabled
        return wanted
    try:
        return "online" if wandb.login(prompt=False) else "offline"
    except wandb.errors.Error as error:  # a key that cannot be checked, as on a node without internet
        warnings.warn(f"wandb logs offline: {error}", stacklevel=3)
        return "offline"


def load_figures(counts: Int[Tensor, "l E"], *, first_layer: int = 0) -> dict[str, Any]:
    """Return the load of each layer's experts as figures to log.

    Reads the counts on the host. They are those of the whole global batch: a micro-batch on one rank, which
    others wait for, is less even.

    Parameters
    ----------
    counts : Int[Tensor, "l E"]
        Rows per expert of the layers that have experts.
    first_layer : int
        Number of the first of them in the model: ``config.n_dense_layers``.

    Returns
    -------
    dict
        ``load/layer_i``, a wandb histogram with a bar for the rows of each expert, and ``load/layer_i_max``
        and
        ``_min``, the largest and the smallest, of the mean (1 is balanced).
    """
    figures: dict[str, Any] = {}
    for i, rows in enumerate(counts.double().cpu().numpy(), first_layer):
        mean = max(rows.mean(), 1.0 / len(rows))
        figures[f"load/layer_{i}"] = wandb.Histogram(np_histogram=(rows, np.arange(len(rows) + 1)))
        figures |= {f"load/layer_{i}_max": rows.max() / mean, f"load/layer_{i}_min": rows.min() / mean}
    return figures


class Progress:
    """The steps of a run, with a bar where there is a terminal, a printed line and a wandb record every few.

    Parameters
    ----------
    run : wandb.Run
        From :func:`start_run`, or anything else with its ``log(figures, step=...)``.
    n_steps : int
        The number of the last step.
    start : int
        Steps done before, as read from a checkpoint.
    every : int
        Steps between lines; the last step has one too.
    tokens_per_step : int
        Of the global batch.
    token : str
        What a token is, for printing, e.g. ``"byte"``.
    peak_flops : float, optional
        FLOP/s of a rank's device, for the model FLOPs utilisation.
    rank : int
        This process's place among the ranks; 0 prints.

    Raises
    ------
    ValueError
        When ``every`` is below 1.

    Examples
    --------
    >>> run = start_run(config, project="mine", folder="runs/mine")  # doctest: +SKIP
    >>> progress = Progress(run, 600, every=10, tokens_per_step=4096)  # doctest: +SKIP
    >>> for step in progress:  # doctest: +SKIP
    ...     params, state, stats = train_step(params, state, next(loader))
    ...     progress.log(stats)
    """

    def __init__(
        self,
        run: Any,
        n_steps: int,
        *,
        start: int = 0,
        every: int = 10,
        tokens_per_step: int,
        token: str = "token",
        peak_flops: float | None = None,
        rank: int = 0,
    ):
        if every < 1:
            raise ValueError(f"Progress needs every >= 1, got {every}")
        self.run, self.n_steps, self.every, self.rank = run, n_steps, every, rank
        self.tokens_per_step, self.token, self.peak_flops = tokens_per_step, token, peak_flops
        self.step = self._since = start
        self._began = 0.0

    def __iter__(self) -> Iterator[int]:
        """Count from ``start + 1`` to ``n_steps``."""
        self._bar = tqdm(
            initial=self.step, total=self.n_steps, disable=True if self.rank else None, smoothing=0.05
        )
        self._began = time.perf_counter()
        with self._bar:
            while self.step < self.n_steps:
                self.step += 1
                yield self.step
                self._bar.update()

    def write(self, line: str) -> None:
        """Print a line above the bar, after the step's number, on rank 0."""
        if self.rank == 0:
            self._bar.write(f"step {self.step:5d}  {line}")

    def log(
        self, stats: Mapping[str, Any], *, first_layer: int = 0, flops_per_token: float = 0.0, **figures: Any
    ) -> None:
        """Print and log a step that is due, and only then wait for the device.

        Peaks of memory are those of the fullest rank: on GPUs a step that is due is collective.

        Parameters
        ----------
        stats : mapping
            ``cross_entropy`` in nats and ``counts`` of the global batch, as :func:`moekit.next_token_loss`
            gives them, summed over ranks; with its ``n_routes`` and ``n_dropped``, also the rows that this
            step dropped, and their share of all.
        first_layer : int
            As for :func:`load_figures`.
        flops_per_token : float
            Of one rank (the model's, divided by the number of ranks), for ``tflops_per_rank``.
        **figures
            More 0-d tensors or numbers to log.
        """
        if self.step % self.every and self.step != self.n_steps:
            return
        loss = stats["cross_entropy"].item()
        seconds = time.perf_counter() - self._began
        rate = (self.step - self._since) * self.tokens_per_step / seconds
        figures |= {"loss": loss, "tokens_per_second": rate}
        speed = f"{rate:,.0f} {self.token}s/s"
        if flops_per_token:
            flops = rate * flops_per_token
            figures["tflops_per_rank"] = flops / 1e12
            speed += f"  {flops / 1e12:.1f} TFLOP/s a rank"
            if self.peak_flops:
                figures["mfu"] = flops / self.peak_flops
                speed += f"  MFU {figures['mfu']:.1%}"
        if torch.cuda.is_available():
            figures |= _peak_memory()
            speed += "  peak {peak_active_gib:.1f} GiB active, {peak_reserved_gib:.1f} reserved".format(
                **figures
            )
        figures = {name: x.item() if isinstance(x, Tensor) else x for name, x in figures.items()}
        if "n_dropped" in stats:
            n, share = _dropped(stats)
            figures |= {"dropped_rows": n, "dropped_share": share}
            speed += f"  dropped {n:,} rows ({share:.2%})" if n else ""
        self.run.log(figures | load_figures(stats["counts"], first_layer=first_layer), step=self.step)
        self.write(f"loss {loss:.6f}  {speed}")
        bits = {f"bits/{self.token}": f"{loss / math.log(2):.3f}"}
        self._bar.set_postfix({"loss": f"{loss:.3f}"} | bits | {f"{self.token}s/s": f"{rate:.0f}"})
        self._since, self._began = self.step, time.perf_counter()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out of the rate what is done within: saving, validation."""
        start = time.perf_counter()
        yield
        self._began += time.perf_counter() - start


def _dropped(stats: Mapping[str, Any]) -> tuple[int, float]:
    """Return how many rows of a step found no room, and the share of all that is."""
    n = int(stats["n_dropped"])
    return n, n / max(int(stats["n_routes"]), 1)


def _peak_memory() -> dict[str, float]:
    """Return the most that was active and reserved on any rank, in GiB."""
    memory = torch.cuda.memory_stats()
    peaks = {f"peak_{kind}_gib": memory[f"{kind}_bytes.all.peak"] / 2**30 for kind in ("active", "reserved")}
    if not dist.is_initialized():
        return peaks
    of_ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, peaks)
    return {kind: max(of_rank[kind] for of_rank in of_ranks) for kind in peaks}
