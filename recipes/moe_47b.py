r"""Train bench-8L, the 47 B model with 3.2 B active (or fewer experts), expert parallel, and say how fast.

    torchrun --nproc-per-node 8 recipes/moe_47b.py --n-experts 128 --ep 8
    python recipes/moe_47b.py --n-experts 8
    python recipes/moe_47b.py --dry-run --n-gpus 8 --ep 8
    python recipes/moe_47b.py --dry-run --n-gpus 64 --ep 8 --cp 8 --seq-len 131072 --attention-via all_gather
    torchrun --nproc-per-node 4 recipes/moe_47b.py --toy --ep 4
    srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint $HEAD:29500 recipes/moe_47b.py --n-experts 128 --ep 8

Differs from train_moe.py in the model, in rows that may be split over ranks (cp), in random routing, which
keeps experts evenly busy from the first step, and in what it prints: tokens/s, TFLOP/s, the part of the
device's peak, and the peak memory.
"""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import moekit as mk
from moekit import checkpoint, config, corpora, data, dryrun, layouts, profiling, tracking

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything this run depends on; logged whole."""

    n_experts: int = 128  # 8, 32, 48, 64 or 128 in the published bench
    tokens: Path | None = None  # a file or folder of uint32 token ids; else the standard library's bytes
    eos: int | None = None  # id that ends a document in token files
    n_steps: int = 20
    batch_size: int = 16  # sequences of the global batch
    seq_len: int = 8192  # tokens
    n_microbatches: int = 1  # slices of a rank's part of the batch
    recompute: Literal["none", "block"] = "none"
    assignment: Literal["top_k", "random", "uniform"] = "random"
    optimize: bool = True  # False: forward and backward alone
    lr: float = 3e-4  # at its peak
    warmup_steps: int = 10
    ep: int = 1  # ranks that share one copy of the experts
    cp: int = 1  # ranks that share a row
    via: Literal["all_to_all", "rowwise"] | None = None  # how rows travel to their experts
    capacity_factor: float | None = None  # of rowwise; by default there is room for all
    overlap: Literal["none", "two_batch", "auto"] = (
        "none"  # one half of the tokens travels as the other computes
    )
    attention_via: Literal["all_to_all", "all_gather"] | None = None  # over heads, or keys; by default heads
    seed: int = 0
    precision: Literal["bf16", "fp8_rowwise", "mxfp8"] = "bf16"  # of products; in eight bits where natively
    toy: bool = False  # the same at a laptop's width, in float32; by default 8 experts, 128 tokens, 10 steps
    folder: Path = Path("runs/moe_47b")
    save_every: int | None = None  # steps; by default nothing is saved
    resume: bool = False  # continue from the newest checkpoint in the folder, if any
    log_every: int = 5  # steps
    gpu: Literal["h100", "h200", "b200", "b300"] | None = None  # refuse what exceeds its memory
    profile: int = 0  # steps to trace, after three; where their time went is printed
    dry_run: bool = False  # execute the step on fake ranks, without values, and say what it needs
    n_gpus: int = 1  # ranks of a dry run
    full: bool = False  # a dry run of two ranks of every single group


cfg = tyro.cli(Config, description=__doc__)
if cfg.toy:  # other defaults; what is given wins
    cfg = tyro.cli(Config, default=Config(toy=True, n_experts=8, seq_len=128, n_steps=10))
model = mk.preset("bench-8L", n_experts=cfg.n_experts, max_seq_len=max(cfg.seq_len, 8192))
if cfg.toy:
    model = config.toy(model, n_experts=cfg.n_experts)
layout = layouts.check_recipe(model, cfg)
policy = mk.precision.preset(cfg.precision, emulate=cfg.toy)
policy.check(model)
device = torch.device("cuda" if torch.cuda.is_available() and not cfg.dry_run else "cpu")
dtype = torch.float32 if cfg.toy else torch.bfloat16

# --- What a rank holds, and one step ----------------------------------------------------


def build():
    """Make the mesh, what this rank holds, and the step: on real ranks, or on those of a dry run."""
    mesh = mk.make_mesh(ep=cfg.ep, n_experts=model.n_experts)  # None in a process that was started alone
    context = mk.mesh.context_mesh(mesh, cfg.cp)
    params = mk.init_params(model, seed=cfg.seed, dtype=dtype, device=device, mesh=mesh)
    n_scheduled = max(cfg.n_steps, cfg.warmup_steps + 1)  # a shorter run only rises
    lr = mk.optim.warmup_cosine(cfg.lr, warmup_steps=cfg.warmup_steps, total_steps=n_scheduled)
    optimizer = mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(lr, weight_decay=0.1))
    optimizer = mk.shard_optimizer(optimizer, mesh=mesh)
    held: dict[str, Any] = dict(params=params, state=None)
    if cfg.optimize:  # what is rounded comes from the masters, and needs no memory beside
        held = dict(params=mk.precision.hollow(params, policy), state=optimizer.init(params))

    options: dict[str, Any] = dict(config=model, assignment=cfg.assignment, attention_via=cfg.attention_via)
    n_tokens = layout.rows * cfg.seq_len // cfg.cp

    def grad_fn_of(overlap):
        via, at_once = cfg.via, n_tokens if overlap == "none" else -(-n_tokens // 2)
        if cfg.via == "rowwise":
            room = dict(n_tokens=at_once, capacity_factor=cfg.capacity_factor)
            via = mk.rowwise.of(model, mesh and mesh["ep"], **room, dtype=dtype, device=device)
        block = mk.remat(partial(mk.model.transformer_block, overlap=overlap), cfg.recompute)
        loss_fn = partial(mk.next_token_loss, **options, via=via, block=block, context=context, mesh=mesh)
        return mk.accumulate(mk.value_and_grad(loss_fn, has_aux=True), layout.n_microbatches)

    ways = ("none", "two_batch") if cfg.overlap == "auto" else (cfg.overlap,)
    grad_fn = mk.overlap.fastest({way: grad_fn_of(way) for way in ways}, mesh=mesh)
    base_key = mk.random.make_key(cfg.seed, device)

    def train_step(held, batch, step):
        """Update what is held, and return the statistics of the global batch."""
        key = None if cfg.assignment == "top_k" else mk.random.fold_in(base_key, step)
        batch = mk.count_tokens(batch, mesh=mesh)
        low = mk.precision.round_weights(held["state"]["master"] if cfg.optimize else params, policy)
        (_, stats), grads = grad_fn(held["params"], batch, key=key, precision=low)
        if cfg.optimize:
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
loader = data.Loader(samples, cfg.batch_size, seed=cfg.seed, context=context, mesh=mesh)


def snapshot(step):
    """Return everything that the next step depends on."""
    return dict(held, data=loader.state_dict(), step=step)


step = 0
if saved := checkpoint.resume(cfg.folder, snapshot(step), wanted=cfg.resume, config=model, mesh=mesh):
    loader.load_state_dict(saved["data"])
    step = saved["step"]
run = tracking.start_run(cfg, project="moekit", folder=cfg.folder, resume=cfg.resume, mesh=mesh)
progress = tracking.Progress(
    run, cfg.n_steps, start=step, every=cfg.log_every, tokens_per_step=cfg.batch_size * cfg.seq_len,
    tokens=loader.n_tokens, config=model, seq_len=cfg.seq_len, mesh=mesh,
)  # fmt: skip
for step in profiling.traced(progress, cfg.profile, folder=cfg.folder):
    stats = train_step(held, next(loader).to(device), step)
    progress.log(stats, held)
    if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.n_steps):
        with progress.paused():
            checkpoint.save(cfg.folder / f"step-{step:06d}", snapshot(step), config=model, mesh=mesh)
run.finish()
if mesh is not None:
    torch.distributed.destroy_process_group()
