"""Tools for testing functions that run on several ranks."""

import faulthandler
import functools
import io
import multiprocessing
import multiprocessing.forkserver
import multiprocessing.process
import os
import pickle
import re
import signal
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import cloudpickle
import torch
import torch.distributed as dist

# What a forked rank would otherwise import itself; a name that is not installed is skipped by the server.
_PRELOAD = (
    *("torch", "sympy", "torch._dynamo", "torch._functorch.aot_autograd", "torch.distributed.tensor"),
    *("torch.fx.experimental.symbolic_shapes", "torch.distributed._functional_collectives", "tensordict"),
    *("cloudpickle", "beartype", "pytest", "hypothesis", "moekit.testing"),
    *("moekit.checkpoint", "moekit.dryrun"),
)


class ranks:
    """Call a function on ``n`` ranks of this machine and return what each of them returned.

    Collective: every rank runs ``fn(*args, **kwargs)`` at once, with one thread, ``torch.manual_seed(0)`` and
    a fresh default process group of ``n`` ranks. Every call has processes of its own, because torch keeps
    meshes of an ended group in its caches: they are forked from a server that has torch imported (making an
    object of this class starts the server, in the background), those of the next call while this one's
    result is looked at, and die with the caller. Functions, arguments and results travel by cloudpickle, so
    closures and lambdas work; a function of a module is imported by its name.

    Parameters
    ----------
    n : int
        Number of ranks.
    device : {"cpu", "cuda", "cuda:0", ...}
        ``"cpu"``: gloo. ``"cuda"``: each rank has a GPU of its own as its current device, NCCL for CUDA
        tensors and gloo for the others. ``"cuda:i"``: all ranks share GPU i, with gloo, which copies to the
        host; their symmetric memory is as real as on several GPUs.
    timeout : float
        Seconds after which ranks that have not answered are given up.
    grace : float
        Seconds the other ranks have to answer once one rank has failed.

    Raises
    ------
    RuntimeError
        Some rank raised, died, or did not answer in time; the message names the ranks and holds their
        tracebacks, and for ranks without an answer the line they stood at.

    Examples
    --------
    >>> import moekit.testing
    >>> def total(x):
    ...     torch.distributed.all_reduce(x)
    ...     return x.item()
    >>> with moekit.testing.ranks(2) as run:
    ...     run(total, torch.tensor(3.0))
    [6.0, 6.0]
    """

    def __init__(self, n: int, *, device: str = "cpu", timeout: float | int = 120, grace: float | int = 2):
        if n < 1:
            raise ValueError(f"ranks needs at least one rank, got n={n}")
        if not (timeout > 0 and grace > 0):
            raise ValueError(f"ranks needs positive seconds, got timeout={timeout}, grace={grace}")
        if device not in ("cpu", "cuda") and not re.fullmatch(r"cuda:\d+", device):
            raise ValueError(f"ranks needs device 'cpu', 'cuda' or 'cuda:0' and so on, got {device!r}")
        if device == "cuda" and torch.cuda.device_count() < n:
            raise ValueError(f"ranks needs a GPU for each of {n} ranks, got {torch.cuda.device_count()} GPUs")
        self.n, self.device, self.timeout, self.grace = n, device, timeout, grace
        shared_pool().start_server()

    def __enter__(self) -> "ranks":
        return self

    def __exit__(self, *error) -> None:
        pass

    def __call__(self, fn: Callable, *args, **kwargs) -> list:
        """Return ``[fn(*args, **kwargs) of rank 0, of rank 1, ...]``."""
        return shared_pool().run(dumps((fn, args, kwargs)), self.n, self.device, self.timeout, self.grace)


@functools.cache
def shared_pool() -> "_Pool":
    return _Pool()


class _Pool:
    """Workers that wait for their only call."""

    def __init__(self):
        self.context: Any = multiprocessing.get_context("forkserver")
        self.workers: list[tuple[Any, Any, Any]] = []  # process, connection, its stack traces on request
        self.folder = tempfile.TemporaryDirectory(prefix="moekit-ranks-")
        self.lock, self.calls = threading.Lock(), 0

    def start_server(self) -> None:
        """Start the server that has everything imported; it does so in its own time."""
        self.context.set_forkserver_preload(list(_PRELOAD))
        multiprocessing.forkserver.ensure_running()

    def grow(self, n: int) -> None:
        self.start_server()
        if not all(process.is_alive() for process, _, _ in self.workers):
            self.kill()
        while len(self.workers) < n:
            ours, theirs = self.context.Pipe()
            stacks, stacks_out = self.context.Pipe(duplex=False)
            process = self.start(_work, theirs, stacks_out)
            theirs.close()
            stacks_out.close()
            self.workers.append((process, ours, stacks))

    def start(self, target: Callable, *args: Any) -> Any:
        """Start a process from the server."""
        self.start_server()
        main = sys.modules["__main__"]
        try:
            # It would run the caller's script again, to define what cloudpickle sends by value anyway.
            sys.modules["__main__"] = types.ModuleType("__main__")
            process = self.context.Process(target=target, args=args, daemon=True)
            process.start()
        finally:
            sys.modules["__main__"] = main
        return process

    def kill(self) -> None:
        for process, *_ in self.workers:
            process.kill()
        for process, *connections in self.workers:
            process.join()
            for connection in connections:
                connection.close()
        self.workers = []

    def run(self, call: bytes, n: int, device: str, timeout: float | int, grace: float | int) -> list:
        with self.lock:
            try:
                return self._run(call, n, device, timeout, grace)
            except BaseException:  # also KeyboardInterrupt: nobody knows what the ranks are doing
                self.kill()
                raise

    def _run(self, call: bytes, n: int, device: str, timeout: float | int, grace: float | int) -> list:
        self.grow(n)
        self.calls += 1
        store = os.path.join(self.folder.name, str(self.calls))
        running, results, failed = {}, {}, {}
        place = os.getcwd(), sys.path
        for rank, (process, connection, _) in enumerate(self.workers[:n]):
            running[connection] = running[process.sentinel] = rank
            try:
                connection.send_bytes(pickle.dumps((rank, n, device, store, timeout, *place, call)))
            except OSError:
                pass  # it died; its sentinel says so below
        limit = time.monotonic() + timeout
        while len(results) + len(failed) < n and (left := limit - time.monotonic()) > 0:
            # Connections first: a rank that answered and then died has answered.
            for ready in sorted(wait(list(running), left), key=lambda one: isinstance(one, int)):
                if (rank := running.get(ready)) is None:
                    continue
                process, connection, _ = self.workers[rank]
                try:
                    good, answer = pickle.loads(connection.recv_bytes())
                    (results if good else failed)[rank] = answer
                except (EOFError, OSError):
                    process.join()
                    # In front: the others may have failed because this one was gone.
                    failed = {
                        rank: f"the process ended with exit code {process.exitcode} and no answer\n",
                        **failed,
                    }
                del running[connection], running[process.sentinel]
                if len(failed) == 1 and rank in failed:
                    limit = min(limit, time.monotonic() + grace)
        if len(results) == n:
            used, self.workers = self.workers[:n], self.workers[n:]
            for _, *connections in used:  # nobody needs the group any longer: this tells them to end
                for connection in connections:
                    connection.close()
            self.grow(n)
            return [pickle.loads(results[rank]) for rank in range(n)]
        late = sorted(set(running.values()))
        said: dict[str, list[int]] = {}  # what several ranks say is told once
        for rank, text in failed.items():
            said.setdefault(text, []).append(rank)
        parts = [
            f"{f'rank {which[0]}' if len(which) == 1 else f'ranks {sorted(which)}'} of {n} failed:\n{text}"
            for text, which in said.items()
        ]
        if late:
            how = f"{grace:g} s after that" if failed else f"within {timeout:g} s"
            parts.append(f"ranks {late} of {n} did not answer {how} and were killed; they stood at:")
            parts += [f"rank {rank}:\n{_stacks(*self.workers[rank])}" for rank in late]
        raise RuntimeError("\n".join(parts))


class _Pickler(cloudpickle.Pickler):
    """Keeps the file of a function, so that tracebacks from ranks show its lines."""

    def reducer_override(self, obj: Any) -> Any:
        if not isinstance(obj, types.CodeType):
            return super().reducer_override(obj)
        reduced: Any = self.dispatch_table[types.CodeType](obj)
        return reduced[0], tuple(obj.co_filename if x == "<dynamic-code>" else x for x in reduced[1])


def dumps(value: Any) -> bytes:
    with io.BytesIO() as file:
        _Pickler(file).dump(value)
        return file.getvalue()


def _stacks(process, _, stacks) -> str:
    """Return where each thread of a worker stands."""
    os.kill(process.pid, signal.SIGUSR1)
    text = b""
    while stacks.poll(0.3) and (piece := os.read(stacks.fileno(), 1 << 16)):
        text += piece
    return text.decode(errors="replace") or "(unknown)\n"


def _work(connection, stacks) -> None:
    """Answer one call, and end when the caller closes the connection or is gone."""
    caller = multiprocessing.process.parent_process()
    assert caller is not None

    def die_with_caller():
        caller.join()
        os._exit(1)

    threading.Thread(target=die_with_caller, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller decides
    faulthandler.register(signal.SIGUSR1, file=stacks.fileno())
    torch.set_num_threads(1)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name may resolve to nothing
    try:
        rank, n, device, store, timeout, folder, sys.path[:], call = pickle.loads(connection.recv_bytes())
        try:
            if device != "cpu":
                torch.cuda.set_device(rank if device == "cuda" else device)
            if device.startswith("cuda:"):
                os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
                store=dist.FileStore(store, n),
                rank=rank,
                world_size=n,
                timeout=timedelta(seconds=timeout),
            )
            torch.manual_seed(0)
            os.chdir(folder)
            fn, args, kwargs = pickle.loads(call)
            answer = True, dumps(fn(*args, **kwargs))
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
        connection.recv_bytes()  # the group lives until every rank has answered
    except (EOFError, OSError):
        os._exit(0)
