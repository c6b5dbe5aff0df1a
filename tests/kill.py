"""End processes with SIGKILL at chosen moments, to see what they leave behind."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path


def descendants(pid: int) -> list[int]:
    """Return the living processes that ``pid`` has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent, *_ = stat.read_text().rpartition(")")[2].split()
        except OSError:
            continue  # it has ended meanwhile
        if state != "Z":
            children.setdefault(int(parent), []).append(int(stat.parent.name))
    found, new = [], [pid]
    while new:
        found += (new := [child for parent in new for child in children.get(parent, [])])
    return found


def alive(pid: int) -> bool:
    """Return whether ``pid`` still runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def kill_tree(pid: int) -> None:
    """SIGKILL ``pid`` and all that it has started, and wait until none of them runs."""
    stopped: set[int] = set()
    while new := {pid, *descendants(pid)} - stopped:  # stopped, so that none starts another meanwhile
        for process in new:
            signal_if_there(process, signal.SIGSTOP)
        stopped |= new
    for process in stopped:
        signal_if_there(process, signal.SIGKILL)
    while any(map(alive, stopped)):
        time.sleep(0.001)


def signal_if_there(pid: int, number: int) -> None:
    """Send a signal to a process that may have ended."""
    try:
        os.kill(pid, number)
    except ProcessLookupError:
        pass


def kill_when(moment: Callable[[], bool], pid: int, *, timeout: float = 60.0) -> bool:
    """Kill ``pid`` and all that it has started once ``moment()`` holds; return False when it ended before.

    Raises TimeoutError, having killed it, when the moment does not come within ``timeout`` seconds.
    """
    limit = time.monotonic() + timeout
    while alive(pid):
        if moment():
            kill_tree(pid)
            return True
        if time.monotonic() > limit:
            kill_tree(pid)
            raise TimeoutError(f"the moment to kill did not come within {timeout} s")
        time.sleep(0.0002)
    return False


def in_save(folder: Path, nth: int, seconds: float) -> Callable[[], bool]:
    """Return the moment ``seconds`` after the ``nth`` save that starts in ``folder`` from now on."""
    seen = set(folder.glob(".*.partial-*"))
    begun: list[float] = []

    def moment() -> bool:
        if len(begun) < nth:
            new = set(folder.glob(".*.partial-*")) - seen
            seen.update(new)
            begun.extend([time.monotonic()] * len(new))
        return len(begun) >= nth and time.monotonic() - begun[nth - 1] >= seconds

    return moment


def after_lines(file: Path, nth: int, seconds: float) -> Callable[[], bool]:
    """Return the moment ``seconds`` after the ``nth`` line that is added to ``file`` from now on."""
    before = n_lines(file)
    begun: list[float] = []

    def moment() -> bool:
        if not begun and n_lines(file) >= before + nth:
            begun.append(time.monotonic())
        return bool(begun) and time.monotonic() - begun[0] >= seconds

    return moment


def n_lines(file: Path) -> int:
    """Return the number of lines of a file that need not exist."""
    return file.read_bytes().count(b"\n") if file.exists() else 0
