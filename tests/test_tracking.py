import atexit
import builtins
import contextlib
import io
import json
import math
import os
import re
import runpy
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch
import wandb
from reference import refuses

import moekit as mk
from moekit import symmetric, tracking
from moekit.testing import ranks
from moekit.tracking import _progress

ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Config:
    lr: float = 0.5
    folder: Path = Path("here")


@pytest.fixture(autouse=True)
def logged_out(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_IDENTITY_TOKEN_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))


def python_m(module, *arguments):
    """Run a module as a program in this process; return what it printed, and its message at the end."""
    out = io.StringIO()
    with mock.patch.object(sys, "argv", [module, *map(str, arguments)]), contextlib.redirect_stdout(out):
        try:
            runpy.run_module(module, run_name="__main__")
        except SystemExit as end:
            return out.getvalue(), end.code
    return out.getvalue(), None


# --- wandb ----------------------------------------------------------------------------


def test_a_run_is_offline_where_nobody_is_logged_in_and_keeps_what_is_logged(tmp_path):
    run = tracking.start_run(Config(), project="p", folder=tmp_path / "run")
    assert run.wandb.offline and run.wandb.config["lr"] == 0.5
    run.log({"loss": 2.0, "load/rows": {"3": [3, 1]}}, step=7)
    run.finish()
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*/files/media/images/load/rows_*.png"))) == 1
    (written,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # wandb's own process may write after finish returns
    while b"summary/best_loss" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"summary/best_loss" in written.read_bytes()


def test_the_configuration_is_a_dataclass_or_a_mapping_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    tracking.start_run({"lr": 0.25}, project="p", folder=tmp_path / "run").finish()
    assert json.loads((tmp_path / "run" / "config.json").read_text()) == {"lr": 0.25}
    for config in (SimpleNamespace(lr=0.25), Config):
        with pytest.raises(TypeError, match="start_run needs a dataclass or a mapping as config, got "):
            tracking.start_run(config, project="p", folder=tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_run_that_continues_has_the_id_of_the_folder_and_a_new_one_another(tmp_path):
    ids = []
    for resume in (False, True, False):
        run = tracking.start_run(Config(), project="p", folder=tmp_path, resume=resume)
        ids.append(run.wandb.id)
        run.log({"loss": 1.0}, step=1)
        run.finish()
    assert ids[0] == ids[1] != ids[2]


def test_a_key_that_cannot_be_checked_logs_offline_and_says_so(tmp_path, monkeypatch):
    def no_internet(**_):
        raise wandb.errors.AuthenticationError("no connection")

    monkeypatch.setattr(wandb, "login", no_internet)
    with pytest.warns(UserWarning, match="wandb logs offline: no connection"):
        run = tracking.start_run(Config(), project="p", folder=tmp_path)
    assert run.wandb.offline
    run.finish()


def test_without_wandb_a_run_says_so_once_and_logs_to_its_folder(tmp_path, monkeypatch, capsys):
    known = builtins.__import__

    def without_wandb(name, *args, **kwargs):
        if name.split(".")[0] == "wandb":
            raise ImportError("No module named 'wandb'")
        return known(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without_wandb)
    start_run = runpy.run_path(tracking._run.__file__)["start_run"]  # imported without it
    run = start_run(Config(), project="p", folder=tmp_path)
    run.log({"loss": 3.0, "load/rows": {"0": [1, 2]}}, step=1)
    run.finish()
    assert capsys.readouterr().out.count("wandb is not installed (No module named 'wandb'): figures") == 1
    assert tracking.read_metrics(tmp_path) == {1: {"loss": 3.0, "load/rows": {"0": [1, 2]}}}
    assert json.loads((tmp_path / "config.json").read_text()) == {"lr": 0.5, "folder": "here"}


def test_where_wandb_is_disabled_it_is_not_imported(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    monkeypatch.setitem(sys.modules, "wandb", None)  # to import it would fail, which is told
    run = tracking.start_run(Config(), project="p", folder=tmp_path)
    assert run.wandb is None and capsys.readouterr().out == ""
    run.finish()


# --- Files ----------------------------------------------------------------------------


def test_where_wandb_is_disabled_all_is_in_the_folder_and_other_ranks_write_and_print_nothing(tmp_path):
    def rank():
        os.environ["WANDB_MODE"] = "disabled"
        mesh = mk.make_mesh(device="cpu")
        run = tracking.start_run(Config(), project="p", folder=tmp_path / str(mesh.get_rank()), mesh=mesh)
        progress = tracking.Progress(run, 2, every=1, tokens_per_step=10, mesh=mesh)
        printed = []
        for step in progress:
            progress._bar.write = printed.append
            progress.write("x")
            progress.log(stats_of(step))
        run.finish()
        return len(printed)

    assert ranks(2)(rank) == [4, 0]
    assert list(tracking.read_metrics(tmp_path / "0")) == [1, 2]
    assert (tmp_path / "0" / "report.html").exists() and not list((tmp_path / "0").glob("wandb*"))
    assert not (tmp_path / "1").exists()


def test_an_interrupted_run_has_its_last_step_and_its_report_once_the_interpreter_ends(tmp_path, monkeypatch):
    at_exit = []
    monkeypatch.setattr(tracking._run.atexit, "register", at_exit.append)
    monkeypatch.setattr(tracking._run.atexit, "unregister", at_exit.remove)
    run = tracking.Run(tmp_path / "interrupted")
    progress = tracking.Progress(run, 3, every=1, tokens_per_step=10)
    with pytest.raises(KeyboardInterrupt):
        for step in progress:
            progress.log(stats_of(step))
            if step == 2:
                raise KeyboardInterrupt
    assert list(tracking.read_metrics(run.folder)) == [1, 2]
    (report,) = (call for call in at_exit if call == run.report)
    report()
    assert (run.folder / "report.html").exists()
    other = tracking.Run(tmp_path / "finished")
    assert other.report in at_exit
    other.finish()
    assert other.report not in at_exit


def test_a_run_that_continues_appends_and_forgets_what_had_come_later(tmp_path):
    run = tracking.Run(tmp_path)
    for step in (10, 20, 30, 40):
        run.log({"loss": float(step)}, step=step)
    run.log({"held_out/bits_per_byte": 1.0}, step=40)
    run._file.write('{"step": 50, "lo')  # killed here
    run._file.close()
    atexit.unregister(run.report)
    again = tracking.Run(tmp_path, resume=True)  # from a checkpoint of step 20
    again.log({"loss": np.float32(0.5)}, step=30)
    again.log({"held_out/bits_per_byte": 2.0}, step=30)
    again.finish()
    want = {10: {"loss": 10.0}, 20: {"loss": 20.0}, 30: {"loss": 0.5, "held_out/bits_per_byte": 2.0}}
    assert tracking.read_metrics(tmp_path) == want
    assert (tmp_path / "metrics.jsonl").read_text().count("\n\n") == 1
    tracking.Run(tmp_path, resume=True).finish()  # which logs nothing
    third = tracking.Run(tmp_path, resume=True)
    third.log({"held_out/bits_per_byte": 3.0}, step=20)  # of the checkpoint that it continues from
    third.finish()
    want = {10: {"loss": 10.0}, 20: {"loss": 20.0, "held_out/bits_per_byte": 3.0}}
    assert tracking.read_metrics(tmp_path) == want
    new = tracking.Run(tmp_path)
    new.log({"loss": 7.0}, step=1)
    new.finish()
    assert tracking.read_metrics(tmp_path) == {1: {"loss": 7.0}}


@pytest.mark.parametrize("resume", [False, True])
def test_a_folder_to_which_another_run_logs_is_refused_and_kept(tmp_path, monkeypatch, resume):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = tracking.start_run(Config(), project="p", folder=tmp_path)
    run.log({"loss": 1.0}, step=1)
    with refuses(f"a run needs a folder of its own, but another logs to {tmp_path}; end it by run.finish()"):
        tracking.start_run(Config(lr=7.0), project="p", folder=tmp_path, resume=resume)
    run.log({"loss": 2.0}, step=2)
    assert tracking.read_metrics(tmp_path) == {1: {"loss": 1.0}, 2: {"loss": 2.0}}
    assert json.loads((tmp_path / "config.json").read_text())["lr"] == 0.5
    run.finish()
    tracking.start_run(Config(), project="p", folder=tmp_path, resume=resume).finish()
    assert len(tracking.read_metrics(tmp_path)) == (2 if resume else 0)


def test_a_step_that_is_logged_late_takes_nothing_from_those_after_it(tmp_path):
    run = tracking.Run(tmp_path)
    for step in (10, 30, 20):
        run.log({"loss": float(step)}, step=step)
    run.log({"held_out/bits_per_byte": 1.0, "loss": 9.0}, step=10)
    run.finish()
    records = tracking.read_metrics(tmp_path)
    assert list(records) == [10, 20, 30]  # the last record is that of the last step
    want = {10: {"loss": 9.0, "held_out/bits_per_byte": 1.0}, 20: {"loss": 20.0}, 30: {"loss": 30.0}}
    assert records == want
    again = tracking.Run(tmp_path, resume=True)  # from step 10
    for step in (25, 15):
        again.log({"loss": -1.0}, step=step)
    again.finish()
    want = {10: want[10], 15: {"loss": -1.0}, 25: {"loss": -1.0}}
    assert tracking.read_metrics(tmp_path) == want


def test_the_summary_has_the_best_loss_the_mean_rate_the_peaks_and_what_was_held_out_last():
    records = {
        1: {"loss": 3.0, "tokens": 10, "speed/tokens_per_second": 10.0, "memory/peak_active_gib": 2.0},
        2: {"loss": 2.0, "tokens": 20, "speed/tokens_per_second": 40.0, "memory/peak_active_gib": 5.0},
        3: {"loss": math.nan, "tokens": 30, "speed/tokens_per_second": 40.0, "memory/peak_active_gib": 5.0},
        4: {"held_out/bits_per_byte": 2.0, "held_out/mine": 3.0},
        5: {"held_out/bits_per_byte": 2.5, "held_out/rows": {"0": [1, 2]}},
    }
    summary = tracking.summarize(records)
    assert math.isnan(summary.pop("summary/last_loss"))
    assert summary == {
        "summary/best_loss": 2.0,
        "summary/tokens": 30,
        "summary/tokens_per_second": pytest.approx(40.0),
        "summary/peak_active_gib": 5.0,
        "summary/held_out/bits_per_byte": 2.5,
        "summary/held_out/mine": 3.0,
    }


def test_the_mean_rate_leaves_out_the_first_record_behind_each_resume(tmp_path):
    for rates in ({10: 1.0, 20: 6.0, 30: 3.0, 40: 99.0}, {40: 1.5, 50: 6.0}, {50: 2.0}):
        run = tracking.Run(tmp_path, resume=True)
        run.log({"loss": 1.0}, step=min(rates) - 5)  # has no rate; the second run resumes from step 30
        for step, rate in rates.items():
            run.log({"speed/tokens_per_second": rate}, step=step)
        run.finish()
    (shown,) = re.findall("<td>tokens_per_second</td><td>(.*?)</td>", (tmp_path / "report.html").read_text())
    assert float(shown) == pytest.approx(4.0)  # 2 / (1 / 6 + 1 / 3): of steps 20 and 30 alone


# --- Steps ----------------------------------------------------------------------------


class Records(list):
    def log(self, figures, step):
        self.append((step, figures))


def stats_of(step=0, counts=((3, 1),), **more):
    return {"cross_entropy": torch.tensor(2.0 + step), "counts": torch.tensor(counts), **more}


@pytest.mark.parametrize(("before", "tokens"), [({}, 30), (dict(tokens=99), 99)])
def test_progress_counts_on_from_a_step_and_logs_those_that_are_due_and_the_last(
    before, tokens, capsys, monkeypatch
):
    now = [100.0]
    monkeypatch.setattr(_progress.time, "perf_counter", lambda: now[0])
    records = Records()
    config = mk.preset("tiny")
    peak = mk.plan.flops_per_token(config, 8) * 10  # ten tokens a second
    progress = tracking.Progress(
        records, 8, start=3, every=2, tokens_per_step=10, **before, config=config, seq_len=8, peak_flops=peak
    )
    seen = []
    for step in progress:
        seen.append(step)
        now[0] += 2.0
        progress.log(stats_of(step), user=torch.tensor(0.5))
        if step == 6:
            with progress.paused():
                now[0] += 500.0
                with progress.paused():  # counts once
                    now[0] += 500.0
    assert seen == [4, 5, 6, 7, 8]
    assert [(step, figures["loss"]) for step, figures in records] == [(4, 6.0), (6, 8.0), (8, 10.0)]
    for step, figures in records:
        assert figures["user"] == 0.5 and figures["tokens"] == tokens + 10 * (step - 3)
        assert figures["bits_per_token"] == figures["loss"] / math.log(2)
        assert figures["speed/tokens_per_second"] == 5.0
        assert figures["speed/mfu"] == pytest.approx(0.5)
        assert figures["speed/tflops_per_rank"] == pytest.approx(peak / 2e12)
    line = capsys.readouterr().out.split("\n")[1]
    assert re.match(r"step     6  loss 8.000000  5 tokens/s  [\d.]+ TFLOP/s a rank  MFU 50.0%$", line)


@pytest.mark.parametrize("ends", ["at the last step", "left early", "raises"])
def test_every_step_that_is_due_is_logged_once_with_its_own_numbers(ends):
    records, norm = Records(), torch.zeros(())
    state = mk.tree.nested({"master.norm": torch.zeros(()), "inner.0.norm": norm})
    biases = torch.zeros(1, 2)
    progress = tracking.Progress(records, 6, every=2, tokens_per_step=10)
    written = []
    try:
        for step in progress:
            norm.fill_(step)  # in place, as an optimizer's
            biases[0, 0] = -step
            progress.log(stats_of(step), dict(state=state, biases=biases))
            written.append(len(records))
            if step == 4 and ends == "left early":
                break
            if step == 4 and ends == "raises":
                raise ZeroDivisionError
    except ZeroDivisionError:
        pass
    steps = [2, 4, 6] if ends == "at the last step" else [2, 4]
    got = [
        (s, f["loss"], f["optim/grad_norm"], f["router/bias_min"], f["router/bias_max"]) for s, f in records
    ]
    assert got == [(s, 2.0 + s, s, -s, 0) for s in steps]
    assert written[:4] == [0, 0, 1, 1]  # a step is written when the next one has been given out


def test_the_first_of_ten_records_and_the_last_have_the_rows_of_every_expert():
    records = Records()
    progress = tracking.Progress(records, 13, every=1, tokens_per_step=10, config=mk.preset("tiny"))
    for step in progress:
        progress.log(stats_of(step))
    first = mk.preset("tiny").n_dense_layers
    with_rows = {step: figures["load/rows"] for step, figures in records if "load/rows" in figures}
    assert with_rows == {step: {str(first): [3, 1]} for step in (1, 11, 13)}


@pytest.mark.parametrize("n", [0, 3])
def test_progress_says_how_many_rows_were_dropped_and_what_share(n, capsys):
    records = Records()
    progress = tracking.Progress(records, 1, tokens_per_step=10)
    for _ in progress:
        progress.log(stats_of(n_routes=torch.tensor(40), n_dropped=torch.tensor(n)))
    ((_, figures),) = records
    assert (figures["drops/rows"], figures["drops/share"]) == (n, n / 40)
    assert ("  dropped 3 rows (7.50%)" in capsys.readouterr().out) == (n == 3)


def test_progress_says_at_once_which_statistics_it_lacks():
    for _ in (progress := tracking.Progress(Records(), 1, tokens_per_step=10)):
        with refuses("Progress.log needs stats with cross_entropy, counts, got counts"):
            progress.log({"counts": torch.ones(1, 2)})


def test_progress_prints_a_line_before_its_first_step(capsys):
    tracking.Progress(Records(), 2, start=1, tokens_per_step=1).write("held out 3.0")
    assert capsys.readouterr().out == "step     1  held out 3.0\n"


def test_progress_refuses_records_every_zero_steps():
    with pytest.raises(ValueError, match="needs every >= 1, got 0"):
        tracking.Progress(Records(), 8, every=0, tokens_per_step=10)


def test_the_peak_memory_is_that_of_the_fullest_rank_with_what_is_symmetric():
    def peaks():
        mesh = mk.make_mesh(ep=2, device="cpu")["ep"]
        rank = torch.distributed.get_rank()
        stats = {"active_bytes.all.peak": 30 - rank, "reserved_bytes.all.peak": 40 + rank}
        torch.cuda.memory_stats = lambda: stats
        layout = {"x": ((8,), torch.float32)}
        shared = symmetric.SymmetricMemory(layout, mesh=mesh, device=torch.device("cpu"))
        with_it = _progress._peak_memory(torch.device("cpu")).tolist()
        n_bytes = shared.n_bytes
        del shared
        return n_bytes, with_it, _progress._peak_memory(torch.device("cpu")).tolist()

    for n, with_it, without in ranks(2)(peaks):
        assert with_it == [30 + n, 41 + n, n] and without == [30, 41, 0]


def test_logging_takes_less_than_a_hundredth_of_the_steps_it_tells_of(tmp_path):
    config = mk.ModelConfig(
        vocab_size=257, d_model=128, n_layers=4, n_dense_layers=1, d_dense=512, n_heads=4, n_kv_heads=2,
        d_head=32, n_experts=16, top_k=4, d_expert=96, d_shared=192, max_seq_len=256,
    )  # fmt: skip
    params, batch = mk.init_params(config), torch.arange(1024).view(4, 256) % config.vocab_size
    batch = mk.count_tokens(mk.batch.make_batch(batch, torch.zeros_like(batch), torch.arange(4)))
    optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(1e-3)))
    state = optimizer.init(params)
    grad_fn = mk.value_and_grad(mk.next_token_loss, has_aux=True)
    run = tracking.Run(tmp_path)
    stepping, logging = 0.0, 0.0
    for _ in (progress := tracking.Progress(run, 4, every=1, tokens_per_step=1024, config=config)):
        start = time.perf_counter()
        (_, stats), grads = grad_fn(params, batch, config=config)
        optimizer.update(grads, state, params)
        stepped = time.perf_counter()
        progress.log(stats, dict(state=state))
        stepping += stepped - start
        logging += time.perf_counter() - stepped
    run.finish()
    print(f"step {stepping / 4 * 1e3:.1f} ms, log {logging / 4 * 1e3:.2f} ms")
    assert (
        logging < 0.01 * 10 * stepping
    )  # 10: log_every of the recipes; of a quarter of the quickstart's batch


def test_an_optimizers_figures_are_those_of_its_last_update():
    params = mk.tree.nested({"norm": torch.ones(2), "1.lr": torch.ones(2)})  # names like those of figures
    schedule = mk.optim.warmup_linear(1.0, warmup_steps=2, total_steps=4)
    optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(schedule)))
    state = optimizer.init(params)
    for norm, lr in ((5.0, 0.5), (10.0, 1.0)):
        grads = mk.tree.nested({"norm": torch.tensor([norm, 0]), "1.lr": torch.zeros(2)})
        optimizer.update(grads, state, params)
        figures = mk.optim.figures(state)
        assert figures == {"grad_norm": norm, "skipped": 0, "lr": lr}
    assert mk.optim.figures(mk.adamw(0.25).init(params)).keys() == {"lr"}


# --- The page -------------------------------------------------------------------------


def small_run(folder):
    """Log steps of two ranks that share the experts, of a model with a dense layer before two others."""
    run = tracking.Run(folder)
    config = mk.preset("tiny", n_layers=3, n_dense_layers=1, n_experts=4)
    progress = tracking.Progress(run, 12, every=2, tokens_per_step=10, config=config, peak_flops=1e12)
    progress.ep = 2  # as of a mesh
    for step in progress:
        more = dict(
            computed=torch.tensor([[10, 20, 30, 20], [20, 20, 20, 20]]),
            fullest=torch.tensor([[60], [50]]),
            n_routes=torch.tensor(160),
            router_entropy=torch.tensor(1.0),
        )
        more |= dict(n_dropped=torch.tensor(0), load_balancing=torch.tensor(2.0))
        stats = stats_of(-step / 10, counts=((10, 20, 30, 20), (20, 20, 20, 20)), **more)
        progress.log(stats, dict(biases=torch.zeros(2, 4)))
        if step == 6:
            run.log({"held_out/bits_per_byte": 1.0}, step=step)
    run.finish()
    return folder


def test_the_report_is_one_file_with_its_images_and_the_same_when_drawn_again(tmp_path):
    folder = small_run(tmp_path / "<run>")
    (folder / "config.json").write_text(json.dumps({"text": "<script>"}))
    images = {name: (folder / f"{name}.png").read_bytes() for name in ("loss", "rate", "load", "wait")}
    assert all(png.startswith(b"\x89PNG") and len(png) > 5000 for png in images.values())
    assert python_m("moekit.tracking", folder) == (f"{folder / 'report.html'}\n", None)
    page = (folder / "report.html").read_text()
    assert page.count('src="data:image/png;base64,') == 4
    assert not re.search(r"https?://|<script|src=\"(?!data:)", page)
    assert "&lt;run&gt;" in page and "&lt;script&gt;" in page
    assert "<td>best_loss</td><td>0.8</td>" in page and "<td>mean_wait_gap</td>" in page
    assert {name: (folder / f"{name}.png").read_bytes() for name in images} == images


def test_a_report_of_nothing_but_a_loss_has_that_alone_and_one_of_no_run_says_so(tmp_path):
    run = tracking.Run(tmp_path / "run")
    run.log({"loss": 1.0}, step=1)
    run.finish()
    assert [path.name for path in (tmp_path / "run").glob("*.png")] == ["loss.png"]
    printed, end = python_m("moekit.tracking", tmp_path)
    assert not printed and re.match("moekit.tracking: .*No such file.*metrics.jsonl", end)
    _, end = python_m("moekit.tracking", tmp_path / "run" / "loss.png")
    assert re.match("moekit.tracking: .*Not a directory", end)


def test_a_run_of_one_record_has_its_report_and_rate(tmp_path):
    run = tracking.Run(tmp_path)
    for _ in (progress := tracking.Progress(run, 3, tokens_per_step=10)):
        progress.log(stats_of())
    run.finish()
    assert list(tracking.read_metrics(tmp_path)) == [3]
    assert "<td>tokens_per_second</td>" in (tmp_path / "report.html").read_text()


def test_lines_that_are_no_records_are_passed_over(tmp_path):
    lines = [b'{"step": 1, "loss": 2.0}', b"5", b"[1]", b"null", b'{"loss": 1.0}', b'{"step": "2"}', b"\xff"]
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join(lines))
    assert tracking.read_metrics(tmp_path) == {1: {"loss": 2.0}}
    assert python_m("moekit.tracking", tmp_path) == (f"{tmp_path / 'report.html'}\n", None)


def test_what_no_report_could_draw_is_refused_when_it_is_logged(tmp_path, unchecked):
    run = tracking.Run(tmp_path)
    for wrong, says in (
        ({"loss": None}, "got loss=None"),
        ({"loss": 1.0, "name": "x", "a": torch.ones(2)}, "got name='x', a=tensor([1., 1.])"),
        ({"rows": np.ones(1)}, "got rows=array([1.])"),
        ({"load/rows": {"0": [1, 2], "1": [1]}}, "got load/rows={'0': [1, 2], '1': [1]}"),
        ({"load/rows": {"0": 1}, "none": {}}, "got load/rows={'0': 1}, none={}"),
    ):
        with refuses(f"Run.log needs numbers, 0-d tensors and a whole number as step, {says}", TypeError):
            run.log(wrong, step=1)
    with refuses("got step='1'", TypeError):
        run.log({"loss": 1.0}, step="1")
    run.finish()
    assert tracking.read_metrics(tmp_path) == {}


def test_a_run_whose_layers_have_changed_has_a_report(tmp_path):
    run = tracking.Run(tmp_path)
    for step, n_layers in ((1, 1), (2, 3), (3, 2)):
        counts = torch.ones(n_layers, 2, dtype=torch.int64)
        rows = {str(i): [1, 1] for i in range(n_layers)}
        run.log(tracking.load_figures(counts) | {"load/rows": rows}, step=step)
    run.finish()
    assert (tmp_path / "load.png").exists()


def test_the_reports_command_says_what_it_takes():
    printed, end = python_m("moekit.tracking", "--help")
    assert end == 0 and "Write the report of each folder" in printed
    _, end = python_m("moekit.tracking")
    assert end == "moekit.tracking needs a folder of a run, got none; see --help"


def test_the_report_of_a_model_without_experts_has_no_load(tmp_path):
    run = tracking.Run(tmp_path)
    none = torch.zeros(0, 4, dtype=torch.int64)
    progress = tracking.Progress(run, 2, every=1, tokens_per_step=10)
    progress.ep = 2  # as of a mesh
    for _ in progress:
        progress.log(stats_of() | dict(counts=none, fullest=none.sum(-1, keepdim=True)))
    run.finish()
    assert {path.name for path in tmp_path.glob("*.png")} == {"loss.png", "rate.png"}


def test_the_report_is_utf_8_whatever_the_locale_is(tmp_path, monkeypatch):
    monkeypatch.setattr(io, "text_encoding", lambda encoding, _=2: encoding or "latin-1")
    run = tracking.Run(tmp_path / "試")
    run.finish()
    assert "<h1>試</h1>" in (tmp_path / "試" / "report.html").read_bytes().decode()


def test_every_name_that_is_logged_is_in_the_table_of_names_and_the_other_way_round(tmp_path):
    folder = small_run(tmp_path)
    records = tracking.read_metrics(folder)
    logged = {name for figures in records.values() for name in figures} | tracking.summarize(records).keys()
    logged = {re.sub(r"/\d+$", "/i", name) for name in logged}
    table = re.findall(
        r"^\| `([^`]+)`", (ROOT / "docs" / "metrics.md").read_text().partition("## Names")[2], re.M
    )
    assert len(table) == len(set(table))
    elsewhere = {name for name in table if re.match(r"(memory|summary/peak|optim)/?", name)}  # GPUs; above
    elsewhere |= {"aux/router_z", "aux/head_z", "held_out/trigram_bits_per_byte", "bits_per_byte"}
    assert logged <= set(table) and set(table) - logged == elsewhere


def test_a_run_that_begins_anew_keeps_the_figures_of_those_before(tmp_path, capsys):
    for loss in (3.0, 2.0, 1.0):
        run = tracking.Run(tmp_path)
        (tmp_path / "config.json").write_text(str(loss))
        run.log({"loss": loss}, step=1)
        run.finish()
    for i, loss in ((".1", 3.0), (".2", 2.0), ("", 1.0)):
        assert json.loads((tmp_path / f"metrics{i}.jsonl").read_text())["loss"] == loss
        assert (tmp_path / f"config{i}.json").read_text() == str(loss)
    assert "is metrics.2.jsonl now" in capsys.readouterr().out
