"""The recipes, and training that is killed and continued."""

import difflib
import math
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import train_forever
from kill import after_lines, in_save, kill_tree, kill_when
from scripts import as_main, on_ranks

from moekit import checkpoint, dryrun, tracking
from moekit.testing import ranks

ROOT = Path(__file__).parent.parent
RECIPES = ROOT / "recipes"
SMALL = "--warmup-steps 2 --batch-size 8 --seq-len 64 --sample-bytes 8".split()


def run(*command, plain=False, timeout=560):
    """Start a recipe as users do; ``plain``: without the shape checks and on all cores, as they have it."""
    path = [str(ROOT), *(p for p in sys.path if not (plain and p.endswith("startup")))]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "WANDB_MODE": "offline"}
    if not plain:
        env["OMP_NUM_THREADS"] = "1"
    command = [sys.executable, *map(str, command)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=timeout, cwd=ROOT)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout.replace("\r", "\n")


def losses(printed):
    """Return the losses of a recipe by step."""
    return {int(step): float(loss) for step, loss in re.findall(r"step +(\d+)  loss ([\d.]+)", printed)}


def texts(folder):
    """Write a few files of text, some of which are held out."""
    folder.mkdir()
    for i in range(40):
        (folder / f"{i}.txt").write_text("".join(chr(97 + (i * j * j + j) % 26) for j in range(700)))
    return folder


def checksums(path):
    """Return the CRC-32 of the files of a checkpoint that hold tensors."""
    files = checkpoint.read_manifest(path)["files"]
    return {name: measure for name, measure in files.items() if name != ".metadata"}


def test_quickstart_continues_with_the_same_bits_after_a_stop(tmp_path):
    text = texts(tmp_path / "text")
    common = ["recipes/quickstart.py", *SMALL, "--n-steps", 4, "--log-every", 1, "--save-every", 2]
    common += ["--text", text, "--folder"]
    whole = run(*common, tmp_path / "run")
    assert losses(whole).keys() == {1, 2, 3, 4}
    assert "held-out bits per byte: model" in whole and "3-gram" in whole
    held_out = float(re.search(r"model ([\d.]+), 3-gram", whole)[1])  # bits; the texts are alike
    assert abs(held_out - losses(whole)[4] / math.log(2)) < 0.5
    want = checksums(tmp_path / "run" / "step-000004")
    (tmp_path / "other").mkdir()
    (tmp_path / "run" / "step-000002").rename(tmp_path / "other" / "step-000002")
    rest = on_ranks(1, *common, tmp_path / "other", "--resume")
    assert losses(rest) == {step: loss for step, loss in losses(whole).items() if step > 2}
    assert checksums(tmp_path / "other" / "step-000004") == want
    with pytest.raises(RuntimeError, match=r"holds step-000004; continue it \(--resume\)"):
        on_ranks(1, *common, tmp_path / "other")


def test_tokens_go_on_from_those_of_a_run_with_another_batch_size(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    common = [RECIPES / "quickstart.py", *SMALL, "--text", texts(tmp_path / "text"), "--log-every", 1]
    common += ["--save-every", 2, "--folder", tmp_path / "run"]
    as_main(*common, "--n-steps", 2)
    as_main(*common, "--n-steps", 4, "--batch-size", 2, "--resume")
    tokens = [record["tokens"] // 64 for record in tracking.read_metrics(tmp_path / "run").values()]
    assert tokens == [8, 16, 18, 20]


def torchrun(n, *command, **how):
    """Start a recipe on ``n`` ranks as users do."""
    return run("-m", "torch.distributed.run", "--nproc-per-node", n, *command, **how)


def check_four_ranks_against_one(start, folder, options, n_steps, **how):
    common = [RECIPES / "quickstart.py", *options, "--n-steps", n_steps, "--log-every", 1]
    common += ["--save-every", 1000, "--folder"]
    one = losses(on_ranks(1, *common, folder / "one", **how))
    four = losses(start(4, *common, folder / "four", "--ep", 2, **how))
    assert one.keys() == four.keys() and len(one) == n_steps
    worst = max(abs(one[step] - four[step]) for step in one)
    print(f"the largest difference of {n_steps} losses is {worst:.1e}")
    assert worst <= 1e-4


def test_four_ranks_print_the_losses_of_one_process(tmp_path):
    check_four_ranks_against_one(on_ranks, tmp_path, [*SMALL, "--text", texts(tmp_path / "text")], 5)


@pytest.mark.soak
def test_four_ranks_print_the_losses_of_one_process_for_fifty_steps_of_the_standard_library(tmp_path):
    check_four_ranks_against_one(torchrun, tmp_path, ["--sample-bytes", 8], 50, plain=True, timeout=1800)


@pytest.mark.soak
def test_five_minutes_of_training_beat_the_3_gram_by_more_than_015_bits_per_byte(tmp_path):
    start = time.perf_counter()
    printed = run("recipes/quickstart.py", "--folder", tmp_path, plain=True, timeout=1200)
    model, trigram = map(float, re.search(r"model ([\d.]+), 3-gram ([\d.]+)", printed).groups())
    print(f"{model=} {trigram=} {time.perf_counter() - start:.0f} s with start, validation and sample")
    assert model <= trigram - 0.15


def test_train_moe_trains_a_preset_on_token_files_and_an_olmoe_on_text(tmp_path):
    from transformers import OlmoeConfig, OlmoeForCausalLM

    torch.manual_seed(0)
    config = OlmoeConfig(
        vocab_size=257,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        pad_token_id=None,
        eos_token_id=None,
    )
    OlmoeForCausalLM(config).save_pretrained(tmp_path / "olmoe")
    tokens = torch.randint(0, 256, (3000,)).numpy().astype("uint16")
    tokens[::300] = 256
    tokens.tofile(tmp_path / "tokens.bin")
    common = [RECIPES / "train_moe.py", "--hf", tmp_path / "olmoe", *SMALL[:-2]]
    common += ["--dtype", "float32", "--n-steps", 4, "--log-every", 1]
    source = ["--tokens", tmp_path / "tokens.bin", "--token-dtype", "uint16", "--eos", 256]
    want = losses(on_ranks(1, *common, *source, "--folder", tmp_path / "one"))
    options = ["--ep", 2, "--reduce", "micro_batch", "--n-microbatches", 2, "--recompute", "block"]
    got = losses(on_ranks(2, *common, *source, *options, "--folder", tmp_path / "two"))
    assert got.keys() == want.keys() and all(abs(got[i] - want[i]) < 1e-4 for i in want)
    text = ["--text", texts(tmp_path / "text"), "--assignment", "random"]
    printed = on_ranks(1, *common, *text, "--folder", tmp_path / "three", "--profile", 1)
    assert len(losses(printed)) == 4 and re.search("where a step's .* ms went", printed)
    assert {"trace.json", "metrics.jsonl", "report.html"} <= {x.name for x in (tmp_path / "three").iterdir()}


def test_moe_47b_has_the_same_losses_on_ranks_of_experts(tmp_path):
    common = [RECIPES / "moe_47b.py", "--toy", "--n-steps", 3, "--batch-size", 4, "--log-every", 1]
    want = losses(on_ranks(1, *common, "--folder", tmp_path / "one"))
    got = losses(torchrun(2, *common, "--ep", 2, "--n-microbatches", 2, "--folder", tmp_path / "two"))
    assert len(want) == 3 and all(abs(got[step] - want[step]) < 1e-4 for step in want)


def test_the_fully_sharded_moe_47b_has_the_losses_of_the_expert_parallel_one(tmp_path):
    common = ["--toy", "--n-steps", 3, "--batch-size", 8, "--log-every", 1, "--lr", 3e-3]
    want = losses(on_ranks(1, RECIPES / "moe_47b.py", *common, "--folder", tmp_path / "want"))
    fsdp = [RECIPES / "moe_47b_fsdp.py", *common, "--folder", tmp_path / "fsdp"]
    parts = ["--n-microbatches", 2, "--reduce", "micro_batch", "--recompute", "block"]
    alone, two = losses(on_ranks(1, *fsdp, "--no-prefetch")), losses(on_ranks(2, *fsdp, *parts))
    assert len(want) == 3 and want[3] < want[1] - 0.05
    for got in (alone, two):
        assert got.keys() == want.keys() and all(abs(got[i] - want[i]) < 1e-5 for i in want)


def test_moe_1t2_trains_in_a_pipeline_and_continues_with_the_same_losses(tmp_path):
    common = [RECIPES / "moe_1t2.py", "--toy", "--n-steps", 3, "--save-every", 2, "--folder", tmp_path]
    common += ["--precision", "mxfp8"]  # hollow parameters, saved and read
    whole = losses(on_ranks(4, *common, plain=True))
    assert whole.keys() == {1, 2, 3} and whole[3] < whole[1] - 0.1
    shutil.rmtree(tmp_path / "step-000003")
    rest = losses(on_ranks(4, *common, "--resume", plain=True))
    assert rest == {3: whole[3]}


@pytest.mark.soak
def test_moe_1t2_has_the_same_losses_on_eight_ranks_as_on_four(tmp_path):
    four, eight = (
        losses(on_ranks(n, RECIPES / "moe_1t2.py", "--toy", "--folder", tmp_path / str(n))) for n in (4, 8)
    )
    assert four.keys() == eight.keys() and all(abs(four[i] - eight[i]) < 1e-4 for i in four)


def test_moe_2t4_capacity_runs_a_few_steps_and_keeps_nothing(tmp_path):
    common = [RECIPES / "moe_2t4_capacity.py", "--toy", "--n-steps", 2, "--folder", tmp_path]
    assert losses(on_ranks(4, *common, plain=True)).keys() == {1, 2}
    assert not list(tmp_path.glob("step-*"))


# --- The ladder, and dry runs ---------------------------------------------------------


def after_config(recipe):
    """Return the lines of code of a recipe behind its configuration."""
    _, _, text = (RECIPES / recipe).read_text().partition("# --- What a rank holds")
    return [line for line in text.splitlines()[1:] if line.strip() and not line.strip().startswith("#")]


@pytest.mark.parametrize(
    ("before", "after", "most"),  # lines taken away and added
    [
        ("quickstart.py", "train_moe.py", (55, 40)),
        ("train_moe.py", "moe_47b.py", (45, 37)),
        ("moe_47b.py", "moe_1t2.py", (30, 30)),
        ("moe_1t2.py", "moe_2t4_capacity.py", (5, 10)),
    ],
)
def test_a_recipe_is_the_one_before_with_a_few_lines_changed(before, after, most):
    old, new = after_config(before), after_config(after)
    blocks = difflib.SequenceMatcher(None, old, new, autojunk=False).get_matching_blocks()
    same = sum(block.size for block in blocks)
    assert len(old) - same <= most[0] and len(new) - same <= most[1]
    assert f"Differs from {before}" in (RECIPES / after).read_text()


DRY_RUNS = [
    ("quickstart.py", "--n-gpus 4 --ep 2", "edp 2 x ep 2, cp 1; 1 micro-batches of 4 x 256 tokens a rank"),
    (
        "train_moe.py",
        "--preset tiny --n-gpus 8 --ep 4",
        "3 of 8 ranks, the others taken to fit: pp 1 x edp 2 x ep 4",
    ),
    ("moe_47b.py", "--toy --n-gpus 4 --ep 2 --cp 2", "edp 2 x ep 2, cp 2; 1 micro-batches of 8 x 64 tokens"),
    (
        "moe_47b_fsdp.py",
        "--toy --n-gpus 4 --n-microbatches 2",
        "2 of 4 ranks, the others taken to fit: pp 1 x edp 4 x ep 1",
    ),
    (
        "moe_1t2.py",
        "--toy --n-gpus 8",
        "6 of 8 ranks, the others taken to fit: pp 2 x edp 2 x ep 2, cp 1; 4 micro-batches of 1 x 64",
    ),
    ("moe_2t4_capacity.py", "--toy --n-gpus 4 --full", "4 of 4 ranks: pp 2 x edp 1 x ep 2"),
    (
        "moe_47b.py",
        "--n-experts 8 --batch-size 2 --precision fp8_rowwise",
        "1 of 1 ranks: pp 1 x edp 1 x ep 1",
    ),
]


@pytest.mark.parametrize(("recipe", "options", "says"), DRY_RUNS)
def test_every_recipe_has_a_dry_run(recipe, options, says, unchecked):
    printed = as_main(RECIPES / recipe, "--dry-run", *options.split())
    assert says in printed
    assert "parameters  optimizer state" in printed and "b300 (288 GB): fits" in printed


@pytest.mark.parametrize(("options", "edp"), [((), 2), (("--n-gpus", 4), 1)])
@pytest.mark.parametrize("recipe", ["moe_1t2.py", "moe_2t4_capacity.py"])
def test_a_dry_run_of_a_toy_is_of_eight_ranks_where_no_number_is_given(recipe, options, edp, monkeypatch):
    monkeypatch.setattr(dryrun, "dry_run_recipe", lambda build, model, layout, **_: layout)
    printed = as_main(RECIPES / recipe, "--toy", "--dry-run", *options)
    assert f"edp={edp}," in printed and "pp=2," in printed and "ep=2," in printed


@pytest.mark.parametrize("recipe", ["moe_47b.py", "moe_47b_fsdp.py", "moe_1t2.py", "moe_2t4_capacity.py"])
def test_options_that_are_given_win_over_the_sizes_of_a_toy(recipe, monkeypatch):
    monkeypatch.setattr(dryrun, "dry_run_recipe", lambda build, model, layout, **_: (layout, model.n_experts))
    options = "--toy --dry-run --n-gpus 4 --seq-len 256 --batch-size 32"
    n_experts = 12 if "47b" in recipe else 8  # of the others it is no option
    options += " --n-experts 12" if "47b" in recipe else " --pp 4 --ep 1"
    printed = as_main(RECIPES / recipe, *options.split())
    assert "seq_len=256" in printed and "batch_size=32" in printed and printed.endswith(f", {n_experts})\n")
    assert "47b" in recipe or "pp=4" in printed


def test_a_dry_run_of_128_thousand_tokens_splits_them_over_eight_ranks():
    options = "--n-gpus 8 --ep 8 --cp 8 --seq-len 131072 --batch-size 1 --attention-via all_gather"
    printed = run("recipes/moe_47b.py", "--dry-run", *options.split(), plain=True)
    assert "edp 1 x ep 8, cp 8; 1 micro-batches of 1 x 16384 tokens a rank" in printed
    assert "h200 (141 GB): fits" in printed


@pytest.mark.parametrize(
    ("recipe", "options", "says"),
    [
        ("moe_47b.py", "--n-experts 8 --n-gpus 16 --ep 16", "ep must divide n_experts: ep=16, n_experts=8"),
        ("moe_1t2.py", "--gpu h200", "of 141 GB"),
        ("moe_1t2.py", "--batch-size 8200", "64 . 128 = 8192, batch_size=8200"),
    ],
)
def test_a_layout_that_cannot_run_is_refused_with_the_nearest_that_can(recipe, options, says, unchecked):
    with pytest.raises(SystemExit, match=f"(?s){says}.*nearest layouts that work:"):
        as_main(RECIPES / recipe, "--dry-run", *options.split())


@pytest.mark.soak
def test_a_dry_run_of_1_2_trillion_parameters_on_512_ranks_takes_less_than_two_minutes():
    started = time.perf_counter()
    printed = run("recipes/moe_1t2.py", "--dry-run", plain=True)
    seconds = time.perf_counter() - started
    print(printed, f"{seconds:.0f} s")
    assert "24 of 512 ranks" in printed and "16 micro-batches of 1 x 8192 tokens a rank" in printed
    assert "h200 (141 GB): does not fit" in printed and "b300 (288 GB): fits" in printed
    assert seconds < 120
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2e6  # KiB, of one; three at a time


# --- Training that is killed ----------------------------------------------------------


def steps_of(folder):
    """Return what each finished step printed: (step, ranks, ep, loss, sample ids)."""
    lines = (line.split() for line in (folder / "steps").read_text().splitlines())
    return [(int(step), int(n), int(ep), loss, ids) for step, n, ep, loss, ids in lines]


@pytest.fixture(scope="module")
def trainer():
    """The program that trains, for lines that say on how many ranks and where."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, train_forever.__file__]
    with subprocess.Popen(command, stdin=-1, stdout=-1, text=True, env=env) as program:
        try:
            yield program
        finally:
            kill_tree(program.pid)


def kill_training(trainer, folder, layouts, n_kills):
    """Kill training at random moments in saves and after steps, starting on each layout in turn."""
    chooser = random.Random(n_kills)
    folder.mkdir()
    torn = 0
    for i in range(n_kills):
        if i % 2:
            moment = after_lines(folder / "steps", chooser.randint(1, 4), chooser.uniform(0, 0.05))
        else:  # the first as soon as it has begun, and not that of the first checkpoint
            moment = in_save(folder / "run", chooser.randint(2, 3), chooser.uniform(0, 0.1) if i else 0)
        trainer.stdin.write("{} {} {}\n".format(*layouts[i % len(layouts)], folder))
        trainer.stdin.flush()
        assert kill_when(moment, int(trainer.stdout.readline())), "it ended before it was killed"
        torn += bool(list((folder / "run").glob(".*.partial-*")))
    assert torn >= 1
    done = steps_of(folder)
    last = max(step for step, *_ in done)
    assert {step for step, *_ in done} == set(range(1, last + 1))
    again = [after for (before, *_), (after, *_) in pairwise(done) if after <= before]
    assert any(step > 1 for step in again)  # a start from a checkpoint that did steps again
    return done


def whole_training(folder, n, ep, last):
    """Return what an uninterrupted run prints: losses and sample ids by step."""
    folder.mkdir()
    ranks(n, timeout=600)(start, folder, ep, last)
    return {step: (loss, ids) for step, _, _, loss, ids in steps_of(folder)}


def start(folder, ep, last):
    """Train on the ranks of a pool."""
    rank, n = torch.distributed.get_rank(), torch.distributed.get_world_size()
    torch.distributed.barrier()  # else one may leave before all have met
    torch.distributed.destroy_process_group()
    train_forever.work(folder, rank, n, ep, folder / "store", last)


KILLS = pytest.mark.parametrize("n_kills", [3, pytest.param(30, marks=pytest.mark.soak)])


@KILLS
def test_killed_training_continues_with_the_next_sample_on_other_ranks(trainer, tmp_path, n_kills):
    layouts = [(1, 1), (4, 1), (4, 2), (2, 2), (1, 1)]
    done = kill_training(trainer, tmp_path / "killed", layouts, n_kills)
    want = whole_training(tmp_path / "whole", 1, 1, max(step for step, *_ in done))
    for step, _, _, loss, ids in done:
        assert ids == want[step][1], f"step {step} read other samples"
        # Not the same bits: what ranks sum in another order moves all later steps, on any layout.
        assert abs(float.fromhex(loss) - float.fromhex(want[step][0])) < 1e-4


@KILLS
@pytest.mark.parametrize("n, ep", [(1, 1), (2, 2)])
def test_killed_training_has_the_bits_of_an_uninterrupted_one(trainer, tmp_path, n, ep, n_kills):
    done = kill_training(trainer, tmp_path / "killed", [(n, ep)], n_kills)
    want = whole_training(tmp_path / "whole", n, ep, max(step for step, *_ in done))
    assert [(step, *want[step]) for step, *_ in done] == [(step, loss, ids) for step, _, _, loss, ids in done]
