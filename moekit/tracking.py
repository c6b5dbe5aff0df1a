"""wandb, offline unless the user is logged in, and the figures worth logging of a step."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import wandb
from jaxtyping import Int
from torch import Tensor


def start_run(
    config: Any, *, project: str, folder: str | Path, run_id: str | None = None, rank: int = 0
) -> "wandb.Run":
    """Start a wandb run: online where the user is logged in, else offline; disabled on ranks other than 0.

    Parameters
    ----------
    config : dataclass
        Logged whole.
    project : str
        Name of the project.
    folder : str or Path
        Where wandb keeps its files; made if needed.
    run_id : str, optional
        The id of the run to continue. An offline run that is continued begins a new directory under the same id, which ``wandb
        sync`` joins; pass the step to ``run.log``.
    rank : int
        This process's place among the ranks.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    mode = "disabled" if rank else "online" if wandb.login(prompt=False) else "offline"
    return wandb.init(
        project=project,
        dir=str(folder),
        config=asdict(config),
        id=run_id,
        resume="allow" if run_id and mode == "online" else None,
        mode=mode,
        settings=wandb.Settings(silent=True),
    )


def load_figures(counts: Int[Tensor, "l E"]) -> dict[str, float]:
    """Return the load of each layer's experts as figures to log: the largest and smallest, of the mean.

    Reads the counts on the host. 1 is balanced.
    """
    load = counts.double() / counts.double().mean(-1, keepdim=True).clamp_min(torch.finfo(torch.double).tiny)
    rows = zip(load.amax(-1).tolist(), load.amin(-1).tolist(), strict=True)
    return {
        f"load/layer_{i}_{name}": value
        for i, (top, low) in enumerate(rows)
        for name, value in (("max", top), ("min", low))
    }
