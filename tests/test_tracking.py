import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import wandb

from moekit import tracking


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
