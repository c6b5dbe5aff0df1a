"""The harness of the benchmarks: candidates take turns on one device, and two ceilings take turns with them.

A GPU's clock follows its temperature and power, so figures of two runs cannot be compared, nor can the first
and the last of one run. Here every candidate has a slot of a quarter of a second in each round, at another
place of the round each time, and so have the two ceilings: a dense bfloat16 product and a device copy. What
is compared was measured within seconds, and shares of a ceiling are shares of what the device gave then.

    results = measure({"mine": Candidate(run=step, flops=6e12)}, device="cuda")
    print(table(results))

A call is timed by two CUDA events in the stream of its kernels. The host runs ahead of the device, so its own
time counts only where it cannot keep up, as in training; for kernels too short for that, see
:func:`graphed`.
"""

import contextlib
import functools
import gc
import importlib.metadata
import json
import os
import platform
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist

DENSE, COPY = "dense ceiling", "copy ceiling"

T = TypeVar("T")


class Failed(Exception):
    """Something went wrong on a rank, perhaps another: what :func:`describe` says of it."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """Something to time, and what one run of it does; a rate is given for each number that is."""

    run: Callable[[], object]
    flops: float | None = None
    bytes: float | None = None  # read and written
    tokens: float | None = None
    calls: int = 1  # of the operation in one run, as in a CUDA graph; the other numbers are for one call


@dataclass(kw_only=True)
class Result:
    """What was measured of one candidate, or why nothing was; times are of one call."""

    name: str
    error: str | None = None
    seconds: float | None = None  # median over all calls of all rounds
    seconds_p10: float | None = None
    seconds_p90: float | None = None
    n_timed: int = 0
    peak_bytes: int | None = None  # that a call allocates on top of what was there before it
    flops_per_second: float | None = None
    bytes_per_second: float | None = None
    tokens_per_second: float | None = None
    of_dense: float | None = None  # flops_per_second as a share of the dense ceiling's
    of_copy: float | None = None  # bytes_per_second as a share of the copy ceiling's
    idle: float | None = None  # share of the time in which no kernel runs; see idle_share
    more: dict[str, Any] = field(default_factory=dict)  # what one benchmark alone finds


# --- Measuring ------------------------------------------------------------------------


def measure(
    candidates: Mapping[str, Candidate],
    *,
    device: str,
    errors: Mapping[str, str] | None = None,
    rounds: int = 5,
    slot: float = 0.25,
    watch: Callable[[str], contextlib.AbstractContextManager] = lambda name: contextlib.nullcontext(),
) -> list[Result]:
    """Time candidates and ceilings in turn.

    Parameters
    ----------
    candidates
        By name. They have run once already if their first run compiles something.
    device : str
        ``"cuda"``, or ``"cpu"``: with a clock on the host, and small ceilings.
    errors : mapping, optional
        Name and reason of candidates that could not be made; they become results beside the others. One that
        could not be made on one rank is measured on none.
    rounds, slot : int, float
        In each round each candidate runs for ``slot`` seconds after half as long untimed, for a device takes
        its clock from what it did just before: one that comes after light ones would be the faster for it.
        It runs three times at least, after one untimed; where ranks measure together, as often as on rank 0.
    watch : callable
        ``watch(name)`` is entered for each slot, to look at the device meanwhile.

    Returns
    -------
    list of Result
        The ceilings first. A candidate that raises, on any rank, has its error as the result. What raises
        on one rank while others wait for it in a collective of its own is not seen: they wait on.
    """
    candidates = {**ceilings(device), **candidates}
    failed = of_all_ranks(errors or {})
    times: dict[str, list[float]] = {name: [] for name in candidates}
    peaks: dict[str, int] = {}
    names = [name for name in candidates if name not in failed]
    for i in range(rounds):
        start = i * len(names) // rounds
        for name in names[start:] + names[:start]:
            if name in failed:
                continue
            try:
                with watch(name):
                    found, peaks[name] = _slot(candidates[name].run, slot, device)
                times[name] += found
            except Exception as e:
                failed[name] = describe(e)
            if name in failed:
                free(device)
        say(f"round {i + 1} of {rounds}")
    return _results(candidates, times, peaks, failed)


def _slot(run: Callable[[], object], slot: float, device: str) -> tuple[list[float], int]:
    """Return the seconds of each run that fits into the slot, and the bytes that a run allocates."""

    def timed(n: int, before: int = 0) -> list[float]:
        for _ in range(before):
            run()
        if device != "cuda":
            return [_seconds(run) for _ in range(n)]
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(n)
        ]
        for start, end in events:
            start.record()
            run()
            end.record()
        torch.cuda.synchronize()
        return [start.elapsed_time(end) / 1e3 for start, end in events]

    def first() -> int:
        timed(1)
        return torch.cuda.max_memory_allocated() - held if device == "cuda" else 0

    held = 0
    if device == "cuda":
        torch.cuda.empty_cache()  # what another candidate left there could make this one wait for memory
        held = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
    peak = on_all_ranks(first)
    found = on_all_ranks(functools.partial(timed, 3))
    n = _agreed(int(slot / statistics.median(found)), device)
    if n > 3:
        found = on_all_ranks(functools.partial(timed, n, before=n // 2))
    return found, peak


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _agreed(n: int, device: str) -> int:
    """Return what rank 0 says, where ranks measure together."""
    if not dist.is_initialized():
        return n
    agreed = torch.tensor(n, device=device)
    dist.broadcast(agreed, 0)
    return int(agreed)


def of_all_ranks(errors: Mapping[str, str]) -> dict[str, str]:
    """Return errors of all ranks by their names; of several, the first rank's."""
    if not dist.is_initialized():
        return dict(errors)
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, dict(errors))
    first: dict[str, str] = {}
    for rank, named in enumerate(found):
        for name, error in named.items():
            first.setdefault(name, f"on rank {rank}: {error}" if rank else error)
    return first


def on_all_ranks(fn: Callable[[], T]) -> T:
    """Call a function on all ranks, and raise on all where it has raised on one.

    Raises
    ------
    Failed
        Where ranks are several; else what the function raises.
    """
    if not dist.is_initialized():
        return fn()
    errors, out = {}, None
    try:
        out = fn()
    except Exception as e:
        errors["it"] = describe(e)
    if errors := of_all_ranks(errors):
        raise Failed(errors["it"])
    return cast(T, out)


def _results(
    candidates: Mapping[str, Candidate],
    times: Mapping[str, list[float]],
    peaks: Mapping[str, int],
    failed: Mapping[str, str],
) -> list[Result]:
    results = []
    for name, candidate in candidates.items():
        if name in failed:
            continue
        found = sorted(seconds / candidate.calls for seconds in times[name])
        median = statistics.median(found)
        results.append(
            Result(
                name=name,
                seconds=median,
                seconds_p10=found[len(found) // 10],
                seconds_p90=found[len(found) * 9 // 10],
                n_timed=len(found),
                peak_bytes=peaks[name],
                flops_per_second=candidate.flops and candidate.flops / median,
                bytes_per_second=candidate.bytes and candidate.bytes / median,
                tokens_per_second=candidate.tokens and candidate.tokens / median,
            )
        )
    by_name = {result.name: result for result in results}
    dense, copy = by_name.get(DENSE), by_name.get(COPY)
    for result in results:
        if dense and dense.flops_per_second and result.flops_per_second:
            result.of_dense = result.flops_per_second / dense.flops_per_second
        if copy and copy.bytes_per_second and result.bytes_per_second:
            result.of_copy = result.bytes_per_second / copy.bytes_per_second
    return results + [Result(name=name, error=error) for name, error in failed.items()]


def ceilings(device: str) -> dict[str, Candidate]:
    """Return a dense bfloat16 product of 8192³ and a copy of 1 GiB, which kernels can come near."""
    n, n_bytes = (8192, 2**30) if device == "cuda" else (256, 2**20)
    a, b = (torch.randn(n, n, dtype=torch.bfloat16, device=device) for _ in range(2))
    product = torch.empty_like(a)
    source = torch.ones(n_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return {
        DENSE: Candidate(run=functools.partial(torch.mm, a, b, out=product), flops=2 * n**3),
        COPY: Candidate(run=functools.partial(target.copy_, source), bytes=2 * n_bytes),
    }


def graphed(run: Callable[[], object], *, calls: int) -> Callable[[], None]:
    """Return the replay of a CUDA graph of several calls: what the device needs, without the host's launches.

    A custom operator takes the host 50 to 100 µs, more than many of these kernels take the device: events
    around single calls would time the host. In a graph kernels follow each other within 1 to 2 µs. ``run``
    may read nothing back; what it returns is dropped, and its memory reused by the next call.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles and allocates workspaces, which a capture may not
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()

    def replay() -> None:
        assert run is not None  # what it closes over is read by the graph, so it lives as long
        graph.replay()

    return replay


def idle_share(run: Callable[[], object]) -> float | None:
    """Return the share of a run's time on the device in which no kernel and no copy is at work there.

    From a trace of two runs; the host does not wait between them. Tracing slows it down, so this is an upper
    bound. None, with the reason printed, where the runs fail: what was timed before stands.
    """
    spans = _traced(run, 2, "idle share")
    if spans is None:
        return None
    first, end, idle = spans[0][0], spans[0][0], 0
    for start, stop, _ in spans:
        idle += max(start - end, 0)
        end = max(end, stop)
    return idle / (end - first)


def kernel_seconds(run: Callable[[], object]) -> dict[str, float] | None:
    """Return the time of a run's kernels and copies by their names; None, with the reason, where it fails."""
    spans = _traced(run, 1, "kernels' times")
    if spans is None:
        return None
    seconds: dict[str, float] = {}
    for start, stop, name in spans:
        seconds[name] = seconds.get(name, 0.0) + (stop - start) / 1e9
    return seconds


def _traced(run: Callable[[], object], n: int, what: str) -> list[tuple[int, int, str]] | None:
    """Return begin, end (ns) and name of what is at work on the device in runs; None where they fail."""
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
            for _ in range(n):
                run()
            torch.cuda.synchronize()
    except Exception as e:
        say(f"no {what}: {describe(e)}")
        return None
    assert trace.profiler is not None and trace.profiler.kineto_results is not None
    on_device = torch.autograd.DeviceType.CUDA
    return sorted(  # of the trace itself: making events of torch of a whole step takes minutes
        (e.start_ns(), e.start_ns() + e.duration_ns(), e.name())
        for e in trace.profiler.kineto_results.events()
        if e.device_type() == on_device
    )


def free(device: str) -> None:
    """Give back memory that nothing refers to any more; a device that a candidate broke can not."""
    gc.collect()
    if device == "cuda":
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def describe(error: BaseException) -> str:
    """Return an error's type and the beginning of what it says, in one line."""
    if isinstance(error, Failed):
        return str(error)
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"


@functools.cache
def _started() -> float:
    return time.perf_counter()


def say(text: str) -> None:
    """Print a line of progress with the seconds since the first, on rank 0."""
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    print(f"[{time.perf_counter() - _started():6.1f} s] {text}", flush=True)


# --- Reporting ------------------------------------------------------------------------


def environment(device: str, packages: Sequence[str] = ()) -> dict[str, Any]:
    """Return what the figures depend on: commit, device, driver, and versions with those of peers."""
    found: dict[str, Any] = dict(
        date=time.strftime("%Y-%m-%d %H:%M:%S %Z"),
        **commit(Path(__file__).parent.parent),
        python=platform.python_version(),
        torch=torch.__version__,
        device=torch.cuda.get_device_name()
        if device == "cuda"
        else f"CPU, {torch.get_num_threads()} threads",
        cuda=torch.version.cuda,
    )
    if device == "cuda" and shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version,power.limit", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True)
        found["driver, power limit"] = (done.stdout.splitlines() or [done.stderr])[0].strip()
    for name in ("triton", *packages):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def commit(root: Path) -> dict[str, Any]:
    """Return the commit, and whether the code differs from it: what GIT_COMMIT says, or a checkout."""
    if (given := os.environ.get("GIT_COMMIT")) or not (root / ".git").exists() or not shutil.which("git"):
        return dict(commit=given, dirty=None)
    head, changes = (
        subprocess.run(["git", "-C", str(root), *args], capture_output=True, text=True).stdout.strip()
        for args in (["rev-parse", "HEAD"], ["status", "--porcelain", "--", "moekit", "benchmarks"])
    )
    return dict(commit=head or None, dirty=bool(changes) if head else None)


def refuse_unknown(what: str, given: Sequence[str], known: Sequence[str]) -> None:
    """End the program where a name is none of those known, before anything is measured."""
    if unknown := [name for name in given if name not in known]:
        said = (", ".join(map(repr, names)) for names in (unknown, known))
        raise SystemExit(f"no {what} is called {'; known are '.join(said)}")


def check_run(cfg: Any, device: str) -> None:
    """End the program where nothing could be measured or written: no shapes, rounds, device or file."""
    for name in ("shapes", "parts"):
        if not getattr(cfg, name, True):
            raise SystemExit(f"a benchmark needs --{name} of one or more, got none")
    for name in ("rounds", "calls", "batch_size", "seq_len", "n_microbatches"):
        if (n := getattr(cfg, name, 1)) < 1:
            raise SystemExit(f"a benchmark needs --{name.replace('_', '-')} of at least 1, got {n}")
    for name in ("json", "plot"):
        path = getattr(cfg, name, None)
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
                raise SystemExit(f"a benchmark needs --{name} to be a file that it may write, got {path}")
    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise SystemExit(f"--device {device} needs CUDA, and torch finds none; leave it out, or take cpu")


def end(record: Mapping[str, Any]) -> None:
    """End the program with status 1 where of a shape or part ceilings alone were measured, or not even these.

    Of several candidates some may fail, as peers that are not installed do.
    """
    parts = {case["title"]: case["results"] for case in record.get("cases", ())} | record.get("parts", {})
    measured = {
        title: [r for r in results if r.error is None and r.name not in (DENSE, COPY)]
        for title, results in parts.items()
    }
    failed = [title for title, results in measured.items() if not results]
    if failed:
        raise SystemExit(f"nothing could be measured of {', '.join(failed)}; the reasons are above")


def sizes(text: str) -> tuple[int, int, int]:
    """Return the numbers of a shape as given in a command, each at least 1."""
    given = text.split("x")
    if len(given) != 3 or not all(n.isdecimal() and int(n) for n in given):
        raise SystemExit(f"a shape is TOKENSxD_MODELxEXPERTS, got {text!r}")
    tokens, d_model, n_experts = map(int, given)
    return tokens, d_model, n_experts


def run_cases(
    cfg: Any,
    run_shape: Callable[[Any, str], dict[str, Any]],
    *,
    rate: str,
    packages: Sequence[str] = (),
    more: Sequence["Column"] = (),
) -> dict[str, Any]:
    """Measure a config's shapes and return the record, written after each; one that raises ends no other.

    ``more`` are columns of the tables beside the usual. Where ranks measure together, the first one writes.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    check_run(cfg, cfg.device)
    versions = environment(cfg.device, packages)
    record: dict[str, Any] = dict(environment=versions, config=asdict(cfg), cases=[])
    say("  ".join(f"{name} {value}" for name, value in versions.items()))
    for text in cfg.shapes:
        case: dict[str, Any]
        try:
            case = on_all_ranks(functools.partial(run_shape, cfg, text))
        except Exception as e:  # what its candidates share cannot be made: out of memory, as a rule
            case = dict(title=text, results=[Result(name=text, error=describe(e))])
        record["cases"].append(case)
        if first:
            print(f"\n{text}\n{table(case['results'], more)}\n", flush=True)
            write_json(cfg.json, record)
        torch.compiler.reset()  # or it keeps what was compiled, and meets its limit of recompilations
        free(cfg.device)
    if first:
        plot(cfg.plot, {case["title"]: case["results"] for case in record["cases"]}, rate=rate)
    return record


Column = tuple[str, Callable[[Result], Any], str]  # its title, its value, how that is printed


def known(key: str, unit: float | None = None) -> Callable[[Result], Any]:
    """Return a column's value: what is known of a result beside its times, numbers in a unit."""

    def of(result: Result) -> Any:
        value = result.more.get(key)
        return value if value is None or unit is None else value / unit

    return of


def table(results: Sequence[Result], more: Sequence[Column] = ()) -> str:
    """Return one line a result, with a column for each number that some result has, and those of ``more``."""
    columns: list[Column] = [
        ("ms", lambda r: r.seconds and 1e3 * r.seconds, ".3f"),
        ("p10", lambda r: r.seconds_p10 and 1e3 * r.seconds_p10, ".3f"),
        ("p90", lambda r: r.seconds_p90 and 1e3 * r.seconds_p90, ".3f"),
        ("TFLOP/s", lambda r: r.flops_per_second and r.flops_per_second / 1e12, ".1f"),
        ("of dense", lambda r: r.of_dense, ".3f"),
        ("GB/s", lambda r: r.bytes_per_second and r.bytes_per_second / 1e9, ".0f"),
        ("of copy", lambda r: r.of_copy, ".3f"),
        ("tokens/s", lambda r: r.tokens_per_second, ",.0f"),
        ("idle %", lambda r: r.idle and 100 * r.idle, ".2f"),
        ("GiB added", lambda r: r.peak_bytes and r.peak_bytes / 2**30, ".2f"),
        ("timed", lambda r: r.n_timed, "d"),
        *more,
    ]
    columns = [column for column in columns if any(column[1](result) for result in results)]
    lines = [["", *(title for title, _, _ in columns)]]
    for result in results:
        if result.error is None:
            values = [(get(result), form) for _, get, form in columns]
            lines.append([result.name, *("" if v is None else format(v, form) for v, form in values)])
    wide = max(len(result.name) for result in results)
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "  ".join([f"{line[0]:<{wide}}", *(f"{v:>{w}}" for v, w in zip(line[1:], widths[1:], strict=True))])
        for line in lines
    ]
    return "\n".join(text + [f"{r.name:<{wide}}  FAILED  {r.error}" for r in results if r.error is not None])


def write_json(path: Path | None, record: Mapping[str, Any]) -> None:
    """Write a record, whose results may be :class:`Result`, over the file; without a path do nothing.

    Where it and its plot were written to is left out of its ``config``, and so are the folders of files read.
    """
    if path is not None:
        config = {
            k: v.name if isinstance(v, Path) else v
            for k, v in record.get("config", {}).items()
            if k not in ("json", "plot")
        }
        record = {**record, "config": config} if "config" in record else record
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(
            json.dumps(record, indent=1, default=lambda z: asdict(z) if isinstance(z, Result) else str(z))
            + "\n"
        )


def plot(path: Path | None, cases: Mapping[str, Sequence[Result]], *, rate: str) -> None:
    """Draw a panel a case: a bar a candidate, with its 10th to 90th percentile, the ceiling as a line.

    Parameters
    ----------
    path : Path, optional
        The image; without it do nothing.
    cases
        Results by the title of their panel.
    rate : {"flops", "bytes"}
        Which rate the bars show, and so which ceiling the line is.
    """
    if path is None:
        return
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    unit, ceiling = {"flops": ("TFLOP/s", DENSE), "bytes": ("TB/s", COPY)}[rate]
    n_bars = max(len(results) for results in cases.values())
    fig, axes = plt.subplots(1, len(cases), squeeze=False, figsize=(5 * len(cases), 1.5 + 0.3 * n_bars))
    for axis, (title, results) in zip(axes[0], cases.items(), strict=True):
        bars = [r for r in results if r.name not in (DENSE, COPY)]
        for at, r in enumerate(bars):
            value = getattr(r, f"{rate}_per_second")
            if r.error is not None or value is None:
                axis.text(0, at, " failed" if r.error else " not counted", va="center")
                continue
            assert r.seconds and r.seconds_p10 and r.seconds_p90
            best, worst = value * r.seconds / r.seconds_p10, value * r.seconds / r.seconds_p90
            axis.barh(at, value / 1e12, color="C0" if "moekit" in r.name else "C7")
            axis.plot([worst / 1e12, best / 1e12], [at, at], color="black", linewidth=1)
        for r in results:
            if r.name == ceiling and r.error is None:
                axis.axvline(getattr(r, f"{rate}_per_second") / 1e12, color="C3", label=r.name)
                axis.legend(loc="lower right")
        axis.set_yticks(range(len(bars)), [r.name for r in bars])
        axis.set_ylim(len(bars) - 0.5, -0.5)
        axis.set_xlabel(unit)
        axis.set_title(title, fontsize="medium")
    fig.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    fig.savefig(path, dpi=120)
    plt.close(fig)
