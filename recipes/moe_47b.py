r"""Train bench-8L, the 47 B model with 3.2 B active (or fewer experts), expert parallel, and say how fast.

    torchrun --nproc-per-node 8 recipes/moe_47b.py --n-experts 128 --ep 8
    python recipes/moe_47b.py --n-experts 8
    torchrun --nproc-per-node 4 recipes/moe_47b.py --toy --ep 4
    srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint $HEAD:29500 recipes/moe_47b.py --n-experts 128 --ep 8

Differs from train_moe.py in the model, in random routing, which keeps experts evenly busy from the first
step, and in what it prints: tokens/s, TFLOP/s, the part of the device's peak, and the peak memory.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import torch
import tyro

import moekit as mk
from moekit import checkpoint, config, corpora, data, plan, tracking
from moekit.mesh import data_rank

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything this run depends on; logged whole."""

    n_experts: int = 128  # 8, 32, 48, 64 or 128 in the published bench
    tokens: Path | None = (
        None  # a file or folder of uint32 token ids; by default the standard library's bytes
    )
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
    seed: int = 0
    toy: bool = False  # the same code at a width for a laptop, in float32
    folder: Path = Path("runs/moe_47b")
    save_every: int | None = None  # steps; by default nothing is saved
    resume: bool = False  # continue from the newest checkpoint in the folder, if any
    log_every: int = 5  # steps


cfg = tyro.cli(Config, description=__doc__)
model = mk.preset("bench-8L", n_experts=cfg.n_experts)
if cfg.toy:
    model = config.toy(model)
    cfg = replace(cfg, seq_len=min(cfg.seq_len, 128), n_steps=min(cfg.n_steps, 10))

# --- Mesh, parameters, data -----------------------------------------------------------

mesh = mk.make_mesh(ep=cfg.ep, n_experts=model.n_experts)  # None in a process that was started alone
rank, n_ranks = data_rank(mesh)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.float32 if cfg.toy else torch.bfloat16
params = mk.init_params(model, seed=cfg.seed, dtype=dtype, device=device, mesh=mesh)

if cfg.tokens:
    files = corpora.token_files(cfg.tokens, dtype="uint32")
    corpus = corpora.corpus_of_tokens(files, eos=cfg.eos, vocab_size=model.vocab_size)
else:
    corpus = corpora.corpus_of_text(corpora.standard_library(), corpora.byte_tokenizer())
loader = data.Loader(data.pack(corpus, cfg.seq_len), cfg.batch_size, seed=cfg.seed, mesh=mesh)

# --- Optimizer, one step --------------------------------------------------------------

lr = mk.optim.warmup_cosine(cfg.lr, warmup_steps=cfg.warmup_steps, total_steps=max(cfg.n_steps, 11))
optimizer = mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(lr, weight_decay=0.1))
optimizer = mk.shard_optimizer(optimizer, mesh=mesh)
state = optimizer.init(params) if cfg.optimize else None
block = mk.remat(mk.model.transformer_block, cfg.recompute)
loss_fn = partial(mk.next_token_loss, config=model, assignment=cfg.assignment, block=block, mesh=mesh)
grad_fn = mk.accumulate(mk.value_and_grad(loss_fn, has_aux=True), cfg.n_microbatches)
base_key = mk.random.make_key(cfg.seed, device)


def train_step(params, state, batch, key):
    """Return the next parameters and optimizer state, and the statistics of the global batch."""
    batch = mk.count_tokens(batch, mesh=mesh)
    (_, stats), grads = grad_fn(params, batch, key=key)
    if state is not None:
        params, state = optimizer.update(grads, state, params)
    return params, state, mk.mesh.sum_over_ranks(stats, mesh=mesh)


# --- Train ----------------------------------------------------------------------------


def snapshot(step):
    """Return everything that the next step depends on."""
    return dict(params=params, state=state, data=loader.state_dict(), step=step)


step = 0
if cfg.save_every and (
    saved := checkpoint.resume(cfg.folder, snapshot(step), wanted=cfg.resume, config=model, mesh=mesh)
):
    loader.load_state_dict(saved["data"])
    step = saved["step"]
run = tracking.start_run(cfg, project="moekit", folder=cfg.folder, resume=cfg.resume, rank=rank)
gpu = plan.gpu_named(torch.cuda.get_device_name()) if device.type == "cuda" else None
progress = tracking.Progress(
    run, cfg.n_steps, start=step, every=cfg.log_every, tokens_per_step=cfg.batch_size * cfg.seq_len,
    peak_flops=gpu and gpu.flops, rank=rank,
)  # fmt: skip
flops = plan.flops_per_token(model, cfg.seq_len) / n_ranks
for step in progress:
    key = None if cfg.assignment == "top_k" else mk.random.fold_in(base_key, step)
    params, state, stats = train_step(params, state, next(loader).to(device), key)
    progress.log(stats, first_layer=model.n_dense_layers, flops_per_token=flops)
    if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.n_steps):
        with progress.paused():
            checkpoint.save(cfg.folder / f"step-{step:06d}", snapshot(step), config=model, mesh=mesh)
run.finish()
if mesh is not None:
    torch.distributed.destroy_process_group()
