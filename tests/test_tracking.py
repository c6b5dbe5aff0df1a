import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import wandb

from moekit import tracking
from moekit.testing import ranks


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


def test_a_run_is_offline_where_nobody_is_logged_in_and_keeps_what_is_logged(tmp_path):
    run = tracking.start_run(Config(), project="p", folder=tmp_path / "run")
    assert run.offline and run.config["lr"] == 0.5
    run.log(tracking.load_figures(torch.tensor([[3, 1]])), step=7)
    run.finish()
    (written,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 60  # wandb's own process may write after finish returns
    while b"load/layer_0_max" not in written.read_bytes() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert b"load/layer_0_max" in written.read_bytes()


def test_a_run_that_continues_has_the_id_of_the_folder_and_a_new_one_another(tmp_path):
    ids = []
    for resume in (False, True, False):
        run = tracking.start_run(Config(), project="p", folder=tmp_path, resume=resume)
        ids.append(run.id)
        run.finish()
    assert ids[0] == ids[1] != ids[2]


def test_other_ranks_write_nothing(tmp_path):
    run = tracking.start_run(Config(), project="p", folder=tmp_path / "run", rank=1)
    run.log({"x": 1})
    run.finish()
    assert not (tmp_path / "run").exists()


def test_the_load_of_a_balanced_layer_is_one():
    figures = tracking.load_figures(torch.tensor([[5, 5, 5], [0, 0, 30]]), first_layer=2)
    bars = {name: figures.pop(name).histogram for name in ("load/layer_2", "load/layer_3")}
    assert bars == {"load/layer_2": [5, 5, 5], "load/layer_3": [0, 0, 30]}
    assert figures == {
        "load/layer_2_max": 1.0,
        "load/layer_2_min": 1.0,
        "load/layer_3_max": 3.0,
        "load/layer_3_min": 0.0,
    }


class Records(list):
    def log(self, figures, step):
        self.append((step, figures))


def test_progress_counts_on_from_a_step_and_logs_those_that_are_due_and_the_last(capsys, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(tracking.time, "perf_counter", lambda: now[0])
    records = Records()
    progress = tracking.Progress(records, 8, start=3, every=2, tokens_per_step=10, peak_flops=1e13)
    stats = {"cross_entropy": torch.tensor(2.0), "counts": torch.tensor([[3, 1]])}
    seen = []
    for step in progress:
        seen.append(step)
        now[0] += 2.0
        progress.log(stats, flops_per_token=1e12, grad_norm=torch.tensor(0.5))
        if step == 6:
            with progress.paused():
                now[0] += 1000.0
    assert seen == [4, 5, 6, 7, 8]
    assert [step for step, _ in records] == [4, 6, 8]
    for _, figures in records:
        assert figures["loss"] == 2.0 and figures["grad_norm"] == 0.5 and figures["load/layer_0_max"] == 1.5
        assert figures["tokens_per_second"] == 5.0 and figures["tflops_per_rank"] == 5.0
        assert figures["mfu"] == 0.5
    line = capsys.readouterr().out.split("\n")[1]
    assert line.startswith("step     6  loss 2.000000  5 tokens/s  5.0 TFLOP/s a rank  MFU 50.0%")


@pytest.mark.parametrize("n", [0, 3])
def test_progress_says_how_many_rows_were_dropped_and_what_share(n, capsys):
    records = Records()
    progress = tracking.Progress(records, 1, tokens_per_step=10)
    stats = {"cross_entropy": torch.tensor(2.0), "counts": torch.tensor([[3, 1]])}
    for _ in progress:
        progress.log(stats | {"n_routes": torch.tensor(40), "n_dropped": torch.tensor(n)})
    ((_, figures),) = records
    assert (figures["dropped_rows"], figures["dropped_share"]) == (n, n / 40)
    assert ("  dropped 3 rows (7.50%)" in capsys.readouterr().out) == (n == 3)


def test_progress_refuses_lines_every_zero_steps_and_prints_on_rank_0_alone(capsys):
    with pytest.raises(ValueError, match="needs every >= 1, got 0"):
        tracking.Progress(Records(), 8, every=0, tokens_per_step=10)
    for _ in (progress := tracking.Progress(Records(), 1, tokens_per_step=1, rank=1)):
        progress.write("x")
    assert not capsys.readouterr().out


def test_a_key_that_cannot_be_checked_logs_offline_and_says_so(tmp_path, monkeypatch):
    def no_internet(**_):
        raise wandb.errors.AuthenticationError("no connection")

    monkeypatch.setattr(wandb, "login", no_internet)
    with pytest.warns(UserWarning, match="wandb logs offline: no connection"):
        run = tracking.start_run(Config(), project="p", folder=tmp_path)
    assert run.offline
    run.finish()


def test_the_users_own_mode_is_kept(tmp_path):
    path = [str(Path(tracking.__file__).parent.parent), *sys.path]
    code = "import test_tracking as t; r = t.tracking.start_run(t.Config(), project='p', folder='run'); "
    code += "print(r.disabled)"
    env = {**os.environ, "WANDB_MODE": "disabled", "PYTHONPATH": os.pathsep.join(path)}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout == "True\n", done.stderr


def test_the_peak_memory_is_that_of_the_fullest_rank():
    def peaks():
        rank = torch.distributed.get_rank()
        stats = {"active_bytes.all.peak": (3 - rank) * 2**30, "reserved_bytes.all.peak": (4 + rank) * 2**30}
        torch.cuda.memory_stats = lambda: stats
        return tracking._peak_memory()

    assert ranks(2)(peaks) == [{"peak_active_gib": 3.0, "peak_reserved_gib": 5.0}] * 2
