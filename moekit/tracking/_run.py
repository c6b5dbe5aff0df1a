"""Where the figures of a run go: wandb, and files in the run's folder."""

import atexit
import fcntl
import json
import os
import secrets
import shutil
import warnings
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit.tracking._figures import read_starts, summarize
from moekit.tracking._report import heat_map, write_report


class Run:
    """A run's figures on their way to ``metrics.jsonl`` in its folder, and to wandb.

    The report is written by :meth:`finish`, or when the interpreter ends without it, as by an exception or
    Ctrl-C. A process that is killed has its figures in the file: ``python -m moekit.tracking FOLDER``.

    Parameters
    ----------
    folder : str or Path, optional
        Made if needed; None, as on ranks other than 0, logs nothing.
    wandb : wandb.Run, optional
        Gets the figures too, and at the end their summary.
    resume : bool
        Append to the folder's figures, behind an empty line. What the folder has of steps after the first one
        that is logged then was of a run that had gone on, and counts no more. Otherwise begin anew: figures
        and configuration of an earlier run stay beside, as ``metrics.1.jsonl`` and ``config.1.json``.

    Raises
    ------
    ValueError
        Where another run logs to the folder and has not finished: lines of both would be one run's.
    """

    def __init__(self, folder: str | Path | None, *, wandb: Any = None, resume: bool = False):
        self.folder, self.wandb = None if folder is None else Path(folder), wandb
        if self.folder is None:
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / "metrics.jsonl"
        self._file = path.open("a")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise ValueError(
                f"a run needs a folder of its own, but another logs to {folder}; end it by run.finish(), or "
                "choose another folder"
            ) from error
        except OSError:
            pass  # a file system without locks
        if not resume and path.stat().st_size:
            i = next(i for i in count(1) if not (self.folder / f"metrics.{i}.jsonl").exists())
            for old in (path, self.folder / "config.json"):
                if old.exists():
                    shutil.copyfile(old, old.with_suffix(f".{i}{old.suffix}"))
            self._file.truncate(0)
            print(f"{path} was of an earlier run: it is metrics.{i}.jsonl now")
        before = path.read_bytes()
        if before:  # an empty line; of a process that was killed while it wrote, the last one ends first
            self._file.write("\n" if before.endswith(b"\n") else "\n\n")
        atexit.register(self.report)

    def log(self, figures: Mapping[str, Any], *, step: int) -> None:
        """Write the figures of a step; several calls for one step add up, in any order of steps.

        A :class:`Progress` writes a step when it gets the next one, or is paused. wandb takes steps in their
        order, and leaves out those that come late, with a warning: log figures of your own after these.

        Numbers and 0-d tensors, and lists of numbers, as many in each, by the number of their layer, such as
        ``load/rows``, which wandb gets as an image.

        Raises
        ------
        TypeError
            For anything else, and a step that is no whole number: the report could not be drawn.
        """
        if self.folder is None:
            return
        figures = {
            name: x.item() if isinstance(x, Tensor | np.generic) and x.ndim == 0 else x
            for name, x in figures.items()
        }
        wrong = [name for name, x in figures.items() if not isinstance(x, int | float) and not _is_image(x)]
        if wrong or not isinstance(step, int):
            got = ", ".join(f"{name}={figures[name]!r}" for name in wrong) or f"{step=}"
            raise TypeError(f"Run.log needs numbers, 0-d tensors and a whole number as step, got {got}")
        self._file.write(json.dumps({"step": step} | figures) + "\n")
        self._file.flush()
        if self.wandb is not None and not self.wandb.disabled:
            from wandb import Image

            shown = {name: Image(heat_map(x)) for name, x in figures.items() if isinstance(x, dict)}
            self.wandb.log(figures | shown, step=step)

    def report(self) -> None:
        """Write the report, and the summary to wandb."""
        if self.folder is None:
            return
        if self.wandb is not None:
            records, starts = read_starts(self.folder)
            self.wandb.summary.update(summarize(records, starts=starts))
        print(f"report: {write_report(self.folder)}")

    def finish(self) -> None:
        """Write the report and end the run."""
        if self.folder is None:
            return
        atexit.unregister(self.report)
        try:
            self.report()
        finally:
            self._file.close()  # and with it the lock
            if self.wandb is not None:
                self.wandb.finish()


def _is_image(x: Any) -> bool:
    """Whether a figure is lists of one length, by their layer."""
    lists = isinstance(x, dict) and all(isinstance(row, list) for row in x.values())
    return lists and len({len(row) for row in x.values()}) == 1


def start_run(
    config: Any,
    *,
    project: str,
    folder: str | Path,
    resume: bool = False,
    mesh: DeviceMesh | None = None,
) -> Run:
    """Start a run whose figures go to files of ``folder``, and to wandb where it is installed.

    Online where the user is logged in, else offline; ``WANDB_MODE=disabled`` leaves wandb out. Ranks other
    than 0 log nothing.

    Parameters
    ----------
    config : dataclass or mapping
        Logged whole, also to ``config.json``.
    project : str
        Name of the project.
    folder : str or Path
        Where figures, report and wandb's files are, and the id of the run; made if needed.
    resume : bool
        Continue the run of this folder. wandb gives an offline run that continues a new directory under the
        same id, which ``wandb sync`` joins.
    mesh : DeviceMesh, optional
        From :func:`moekit.make_mesh`: which rank this is.

    Raises
    ------
    TypeError
        For a config of another type.
    ValueError
        As :class:`Run` does.
    """
    fields = _fields(config)
    if mesh is not None and dist.get_rank():
        return Run(None)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    run = Run(folder, resume=resume)
    (folder / "config.json").write_text(json.dumps(fields, default=str, indent=1) + "\n")
    run.wandb = _start_wandb(fields, project, folder, resume)
    return run


def _fields(config: Any) -> dict[str, Any]:
    if is_dataclass(config) and not isinstance(config, type):
        return asdict(config)
    if isinstance(config, Mapping):
        return dict(config)
    raise TypeError(
        f"start_run needs a dataclass or a mapping as config, got {type(config).__name__}; of argparse pass "
        "vars(args)"
    )


def _start_wandb(config: dict[str, Any], project: str, folder: Path, resume: bool) -> Any:
    if os.environ.get("WANDB_MODE") == "disabled":
        return None  # wandb's own switch, read here so as not to import it, which takes a second
    try:
        import wandb
    except ImportError as error:
        print(f"wandb is not installed ({error}): figures and the report go to {folder} alone")
        return None
    mode = _mode(wandb)
    if mode == "disabled":
        return None
    known = folder / "wandb-run-id"
    if not (resume and known.exists()):
        known.write_text(secrets.token_hex(4))
    return wandb.init(
        project=project,
        dir=str(folder),
        config=config,
        id=known.read_text(),
        resume="allow" if mode == "online" and resume else None,
        mode=mode,
        settings=wandb.Settings(silent=True),
    )


def _mode(wandb: Any) -> Any:
    wanted = wandb.setup().settings.mode
    if wanted != "online":  # what the user's own settings say, such as WANDB_MODE=disabled
        return wanted
    try:
        return "online" if wandb.login(prompt=False) else "offline"
    except wandb.errors.Error as error:  # a key that cannot be checked, as on a node without internet
        warnings.warn(f"wandb logs offline: {error}", stacklevel=4)
        return "offline"
