"""The study recipe, on two domains that share no letter."""

import json
import random
from pathlib import Path

import pytest
from scripts import as_main

RECIPE = Path(__file__).parent.parent / "recipes" / "balance_study.py"
SMALL = "--n-steps 8 --rows-per-domain 4 --seq-len 32 --ep 2".split()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("domains")
    words = random.Random(0)
    for domain, letters in (("lower", "abcdefgh"), ("digits", "01234567")):
        (path / domain).mkdir()
        for i in range(30):
            (path / domain / f"{i}.txt").write_text("".join(words.choices(letters, k=400)))
    return path


def test_sorted_domains_make_ranks_wait_for_what_a_steps_sums_do_not_show(folder, tmp_path):
    ways = ("batch, mixed", "batch")
    files = dict(json=tmp_path / "study" / "study.json", plot=tmp_path / "plot" / "study.png")
    options = [word for name, path in files.items() for word in (f"--{name}", path)]
    printed = as_main(RECIPE, *SMALL, "--domains", folder, *options, "--ways", *ways)
    record = json.loads(files["json"].read_text())
    found = record["ways"]
    assert list(found) == list(ways) and all(name in printed for name in ways)
    assert files["plot"].stat().st_size > 10_000 and record["config"]["n_steps"] == 8
    gaps = {}
    for name, way in found.items():
        of_steps = [w - s for w, s in zip(way["waited"], way["seen"], strict=True)]
        assert len(of_steps) == 8 and min(of_steps) >= -1e-5
        gaps[name] = sum(of_steps)
    assert gaps["batch"] > 5 * gaps["batch, mixed"]
    # The first step has the same rows and weights; only their order in micro-batches differs.
    assert found["batch"]["seen"][0] == pytest.approx(found["batch, mixed"]["seen"][0], rel=1e-6)


def test_a_quick_study_of_a_step_takes_the_ways_that_it_is_given(folder, tmp_path):
    files = ("--json", tmp_path / "a.json", "--plot", tmp_path / "a.png")
    small = (*SMALL[2:], "--n-steps", 1, "--quick", "--ways", "bias")
    as_main(RECIPE, *small, "--domains", folder, *files)
    assert list(json.loads((tmp_path / "a.json").read_text())["ways"]) == ["bias"]


def test_ways_and_folders_that_are_not_there_are_refused(folder, tmp_path):
    with pytest.raises(SystemExit, match=r"needs ways among batch, mixed; batch; .*, got tokens"):
        as_main(RECIPE, "--domains", folder, "--quick", "--ways", "tokens")
    for path in (tmp_path, tmp_path / "none", folder / "lower"):
        with pytest.raises(SystemExit, match="balance_study needs a folder of folders of text, got"):
            as_main(RECIPE, "--domains", path)
