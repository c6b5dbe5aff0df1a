r"""Test the capacity of 512 GPUs with ultra-256, 2.38 T parameters: experts over 32 ranks, rows by DeepEP.

    python recipes/moe_2t4_capacity.py --dry-run
    torchrun --nproc-per-node 8 recipes/moe_2t4_capacity.py --toy
    srun torchrun --nnodes 64 --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint $HEAD:29500 recipes/moe_2t4_capacity.py

Differs from moe_1t2.py in the model, in ep, which spans four hosts, in the transport between them, and in
what it is for: a few steps with random routing that say whether the model fits and how fast it is. A dry
run sends as all_to_all does in the place of DeepEP, whose buffers it counts among what is other.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import moekit as mk
from moekit import checkpoint, config, corpora, data, dryrun, layouts, plan, profiling, schedules, tracking

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything this run depends on; logged whole."""

    tokens: Path | None = None  # a file or folder of uint32 token ids; else the standard library's bytes
    eos: int | None = None  # id that ends a document in token files
    n_steps: int = 10
    batch_size: int = 8192  # sequences of the global batch
    seq_len: int = 8192  # tokens
    n_microbatches: int = 64  # slices of a rank's part of the batch, one after the other through the stages
    recompute: Literal["none", "block"] = "block"
    assignment: Literal["top_k", "random", "uniform"] = "random"
    via: Literal["deepep", "all_to_all"] = "deepep"  # how rows travel on GPUs
    lr: float = 2e-4  # at its peak
    warmup_steps: int = 5
    pp: int = 8  # ranks that a batch passes one after the other
    n_per_rank: int = 2  # stages of each
    ep: int = 32  # ranks of a stage that share one copy of its experts
    cp: int = 1  # ranks that share a row
    seed: int = 0
    precision: Literal["bf16", "fp8_rowwise", "mxfp8"] = "bf16"  # of products; in eight bits where natively
    toy: bool = False  # at a laptop's width, in float32, for 8 processes; by default 5 steps of 64 tokens
    folder: Path = Path("runs/moe_2t4_capacity")
    save_every: int | None = None  # steps; by default nothing is saved
    resume: bool = False  # continue from the newest checkpoint in the folder, if any
    log_every: int = 1  # steps
    gpu: Literal["h100", "h200", "b200", "b300"] | None = None  # refuse what exceeds its memory
    profile: int = 0  # steps to trace, after three; where their time went is printed
    dry_run: bool = False  # execute the step on fake ranks, without values, and say what it needs
    n_gpus: int = 512  # ranks of a dry run; with --toy 8
    full: bool = False  # a dry run of two ranks of every single group


cfg = tyro.cli(Config, description=__doc__)
if cfg.toy:  # other defaults; what is given wins
    toy = Config(
        toy=True, pp=2, ep=2, seq_len=64, batch_size=16, n_microbatches=4, warmup_steps=2, n_steps=5,
        via="all_to_all",  # DeepEP takes bfloat16 on GPUs
        n_gpus=8 if cfg.dry_run else cfg.n_gpus,
    )  # fmt: skip
    cfg = tyro.cli(Config, default=toy)
model = mk.preset("ultra-256", max_seq_len=max(cfg.seq_len, 8192))
if cfg.toy:
    model = config.toy(model)
if cfg.pp < 2:
    raise SystemExit(f"moe_2t4_capacity needs pp >= 2, got {cfg.pp}; moe_47b has no pipeline")
layout = layouts.check_recipe(model, cfg)
policy = mk.precision.preset(cfg.precision, emulate=cfg.toy)
policy.check(model)
device = torch.device("cuda" if torch.cuda.is_available() and not cfg.dry_run else "cpu")
dtype = torch.float32 if cfg.toy else torch.bfloat16
stages = plan.split_layers(model, layout.n_stages, seq_len=cfg.seq_len)
schedule = layouts.schedule_of(layout)  # 1F1B, interleaved with several stages a rank

# --- What a rank holds, and one step ----------------------------------------------------


def build():
    """Make the mesh, what this rank holds, and the step: on real ranks, or on those of a dry run."""
    mesh = mk.make_mesh(pp=cfg.pp, ep=cfg.ep, n_experts=model.n_experts)
    assert mesh is not None  # there are pp ranks at least
    stage_mesh = mesh["edp", "ep"]
    context = mk.mesh.context_mesh(mesh, cfg.cp)
    mine = [stages[i] for i in schedule.stages_of(mesh["pp"].get_local_rank())]
    params = mk.init_params(model, seed=cfg.seed, dtype=dtype, device=device, stages=mine, mesh=mesh)
    n_scheduled = max(cfg.n_steps, cfg.warmup_steps + 1)  # a shorter run only rises
    lr = mk.optim.warmup_cosine(cfg.lr, warmup_steps=cfg.warmup_steps, total_steps=n_scheduled)
    optimizer = mk.chain(mk.clip_by_global_norm(1.0, mesh=mesh), mk.adamw(lr, weight_decay=0.1))
    optimizer = mk.shard_optimizer(optimizer, mesh=mesh)
    # What is rounded comes from the masters, and needs no memory beside.
    held: dict[str, Any] = dict(params=mk.precision.hollow(params, policy), state=optimizer.init(params))

    block = mk.remat(mk.model.transformer_block, cfg.recompute)
    via = cfg.via
    if cfg.via == "deepep":
        n_tokens = layout.rows * cfg.seq_len // cfg.cp
        via = mk.deepep.of(model, mesh["ep"], n_tokens=n_tokens, dtype=dtype, device=device)
    options = dict(
        config=model, assignment=cfg.assignment, via=via, block=block, context=context, mesh=stage_mesh
    )
    grad_fn = mk.pipeline(
        [partial(mk.model.stage_loss, stage=stage, **options) for stage in stages],
        schedule=schedule,
        boundary=lambda part: torch.empty(*part.tokens.shape, model.d_model, dtype=dtype, device=device),
        mesh=mesh["pp"],
    )
    base_key = mk.random.make_key(cfg.seed, device)

    def train_step(held, batch, step):
        """Update what is held, and return the statistics of the global batch."""
        key = None if cfg.assignment == "top_k" else mk.random.fold_in(base_key, step)
        batch = mk.count_tokens(batch, mesh=stage_mesh)
        low = mk.precision.round_weights(held["state"]["master"], policy)
        (_, stats), grads = grad_fn(held["params"], batch, key=key, precision=low)
        held["params"], held["state"] = optimizer.update(grads, held["state"], held["params"])
        return mk.mesh.sum_over_ranks(stats, mesh=mesh)

    return mesh, context, held, train_step


if cfg.dry_run:
    print(dryrun.dry_run_recipe(build, model, layout, full=cfg.full, gpu=cfg.gpu))
    raise SystemExit

# --- Train ----------------------------------------------------------------------------

mesh, context, held, train_step = build()
corpus = corpora.load_corpus(cfg.tokens, eos=cfg.eos, vocab_size=model.vocab_size)
samples = data.pack(corpus, cfg.seq_len)
loader = data.Loader(samples, cfg.batch_size, seed=cfg.seed, context=context, mesh=mesh["edp", "ep"])


def snapshot(step):
    """Return everything that the next step depends on."""
    return dict(held, data=loader.state_dict(), step=step)


step = 0
if saved := checkpoint.resume(cfg.folder, snapshot(step), wanted=cfg.resume, config=model, mesh=mesh):
    loader.load_state_dict(saved["data"])
    step = saved["step"]
run = tracking.start_run(cfg, project="moekit", folder=cfg.folder, resume=cfg.resume, mesh=mesh)
if torch.distributed.get_rank() == 0:
    bubble = schedules.play(schedule).bubble
    print(f"{[len(stage.layers) for stage in stages]} layers a stage, bubble {bubble:.1%}")
progress = tracking.Progress(
    run, cfg.n_steps, start=step, every=cfg.log_every, tokens_per_step=cfg.batch_size * cfg.seq_len,
    tokens=loader.n_tokens, config=model, seq_len=cfg.seq_len, mesh=mesh,
    stages=[[stages[i] for i in schedule.stages_of(rank)] for rank in range(cfg.pp)],
)  # fmt: skip
for step in profiling.traced(progress, cfg.profile, folder=cfg.folder):
    stats = train_step(held, next(loader).to(device), step)
    progress.log(stats, held)
    if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.n_steps):
        with progress.paused():
            checkpoint.save(cfg.folder / f"step-{step:06d}", snapshot(step), config=model, mesh=mesh)
run.finish()
del train_step  # and with it DeepEP's buffers, before their process group
torch.distributed.destroy_process_group()
