"""wandb, offline unless the user is logged in, and the figures worth logging of a step."""

import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import wandb
from jaxtyping import Int
from torch import Tensor


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
    online = wandb.login(prompt=False)
    return wandb.init(
        project=project,
        dir=str(folder),
        config=asdict(config),
        id=known.read_text(),
        resume="allow" if online and resume else None,
        mode="online" if online else "offline",
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
