import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

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
    figures = tracking.load_figures(torch.tensor([[5, 5, 5], [0, 0, 30]]))
    assert json.loads(json.dumps(figures)) == {
        "load/layer_0_max": 1.0,
        "load/layer_0_min": 1.0,
        "load/layer_1_max": 3.0,
        "load/layer_1_min": 0.0,
    }
