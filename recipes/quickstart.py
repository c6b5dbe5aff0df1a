"""Train a byte-level Mixture-of-Experts on the standard library of this Python, then let it write.

    python recipes/quickstart.py
    python recipes/quickstart.py --resume
    torchrun --nproc-per-node 4 recipes/quickstart.py --ep 2 --folder runs/four

The losses are the same on any number of ranks: within 1e-4 for the first 50 steps in float32, until tokens
that rounding sends to other experts add up. Expect about 1.85 bits per byte on held-out files after five
minutes on two CPU cores, where a byte 3-gram has 2.76.
"""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import moekit as mk
from moekit import checkpoint, corpora, data, dryrun, layouts, profiling, tracking
from moekit.mesh import data_rank

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything this run depends on; logged whole."""

    n_steps: int = 600
    batch_size: int = 16  # sequences of the global batch
    seq_len: int = 256  # bytes
    n_microbatches: int = 1  # slices of a rank's part of the batch, one after the other
    lr: float = 4e-3  # at its peak
    warmup_steps: int = 240
    weight_decay: float = 0.1
    max_norm: float = 1.0  # of the whole gradient
    bias_rate: float = 0.0  # step of the balancing bias, in router scores, e.g. 1e-3
    precision: Literal["bf16", "fp8_rowwise", "mxfp8"] = "bf16"  # of products; eight bits may be emulated
    seed: int = 0
    ep: int = 1  # ranks that share one copy of the experts
    text: str | None = None  # a folder of text files; by default the standard library
    folder: Path = Path("runs/quickstart")
    resume: bool = False  # continue from the newest checkpoint in the folder, if any
    log_every: int = 10  # steps
    save_every: int = 200  # steps
    sample_bytes: int = 300  # written at the end
    profile: int = 0  # steps to trace, after three; where their time went is printed
    dry_run: bool = False  # execute the step on fake ranks, without values, and say what it needs
    n_gpus: int = 1  # ranks of a dry run


cfg = tyro.cli(Config, description=__doc__)
model = mk.ModelConfig(
    vocab_size=257, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_head=32,
    n_dense_layers=1, d_dense=512,
    n_experts=16, top_k=4, d_expert=96, d_shared=192, max_seq_len=cfg.seq_len, rope_base=1e4,
    normalize_embedding=True, normalize="none", init_std=0.06,
    balance_weight=0.01, router_z_weight=1e-4, head_z_weight=1e-4,
)  # fmt: skip

block = mk.model.transformer_block  # one with a router of your own: docs/loop.md
layout = layouts.check_recipe(model, cfg)
device = torch.device("cuda" if torch.cuda.is_available() and not cfg.dry_run else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

# --- What a rank holds, and one step ----------------------------------------------------


def build():
    """Make the mesh, what this rank holds, and the step: on real ranks, or on those of a dry run."""
    mesh = mk.make_mesh(ep=cfg.ep, n_experts=model.n_experts)  # None in a process that was started alone
    params = mk.init_params(model, seed=cfg.seed, dtype=dtype, device=device, mesh=mesh)
    n_scheduled = max(cfg.n_steps, cfg.warmup_steps + 1)  # a shorter run only rises
    lr = mk.optim.warmup_cosine(
        cfg.lr, warmup_steps=cfg.warmup_steps, total_steps=n_scheduled, floor=cfg.lr / 10
    )
    optimizer = mk.chain(mk.clip_by_global_norm(cfg.max_norm), mk.adamw(lr, weight_decay=cfg.weight_decay))
    optimizer = mk.shard_optimizer(optimizer, mesh=mesh)
    biases = torch.zeros(model.n_moe_layers, model.n_experts, device=device)
    held: dict[str, Any] = dict(params=params, state=optimizer.init(params), biases=biases)

    policy = mk.precision.preset(cfg.precision, emulate=True)
    loss_fn = partial(mk.next_token_loss, config=model, block=block, precision=policy, mesh=mesh)
    grad_fn = mk.accumulate(mk.value_and_grad(loss_fn, has_aux=True), layout.n_microbatches)

    def train_step(held, batch, step):
        """Update what is held, and return the statistics of the global batch."""
        batch = mk.count_tokens(batch, mesh=mesh)
        (_, stats), grads = grad_fn(held["params"], batch, biases=held["biases"])
        held["params"], held["state"] = optimizer.update(grads, held["state"], held["params"])
        stats = mk.mesh.sum_over_ranks(stats, mesh=mesh)
        held["biases"] = mk.balance.next_bias(held["biases"], stats["counts"], rate=cfg.bias_rate)
        return stats

    return mesh, None, held, train_step


if cfg.dry_run:
    print(dryrun.dry_run_recipe(build, model, layout))
    raise SystemExit

# --- Data -----------------------------------------------------------------------------

mesh, _, held, train_step = build()
rank, _ = data_rank(mesh)
tokenizer = corpora.byte_tokenizer()
files = corpora.standard_library() if cfg.text is None else corpora.text_files(cfg.text)
train_files, held_out_files = corpora.split_files(files, held_out=0.05)
train, held_out = (corpora.corpus_of_text(part, tokenizer) for part in (train_files, held_out_files))
held_out_samples = data.pack(held_out, cfg.seq_len)
loader = data.Loader(data.pack(train, cfg.seq_len), cfg.batch_size, seed=cfg.seed, mesh=mesh)


@torch.no_grad()
def bits_per_byte(samples):
    """Return the mean loss over the targets of all samples, in bits."""
    nats = torch.zeros((), dtype=torch.float64, device=device)
    n_targets = torch.zeros((), dtype=torch.int64, device=device)
    for batch in data.Loader(samples, 64, shuffle=False, epochs=1, uneven=True, mesh=mesh):
        batch = mk.count_tokens(batch.to(device), mesh=mesh)
        _, stats = mk.next_token_loss(
            held["params"], batch, config=model, block=block, biases=held["biases"], mesh=mesh
        )
        stats = mk.mesh.sum_over_ranks(stats, mesh=mesh)
        nats += stats["cross_entropy"] * stats["n_targets"]
        n_targets += stats["n_targets"]
    return (nats / n_targets).item() / math.log(2)


# --- Train ----------------------------------------------------------------------------


def snapshot(step):
    """Return everything that the next step depends on."""
    return dict(held, data=loader.state_dict(), step=step)


step = 0
if saved := checkpoint.resume(cfg.folder, snapshot(step), wanted=cfg.resume, config=model, mesh=mesh):
    loader.load_state_dict(saved["data"])
    step = saved["step"]
run = tracking.start_run(cfg, project="moekit-quickstart", folder=cfg.folder, resume=cfg.resume, mesh=mesh)

progress = tracking.Progress(
    run, cfg.n_steps, start=step, every=cfg.log_every, tokens_per_step=cfg.batch_size * cfg.seq_len,
    token="byte", tokens=loader.n_tokens, config=model, seq_len=cfg.seq_len, mesh=mesh,
)  # fmt: skip
for step in profiling.traced(progress, cfg.profile, folder=cfg.folder):
    stats = train_step(held, next(loader).to(device), step)
    progress.log(stats, held)
    if cfg.save_every and (step % cfg.save_every == 0 or step == cfg.n_steps):
        with progress.paused():
            checkpoint.save(cfg.folder / f"step-{step:06d}", snapshot(step), config=model, mesh=mesh)
            if step < cfg.n_steps:
                bpb = bits_per_byte(held_out_samples)
                run.log({"held_out/bits_per_byte": bpb}, step=step)
                progress.write(f"held-out bits per byte {bpb:.3f}")

# --- What it learnt -------------------------------------------------------------------

bpb = bits_per_byte(held_out_samples)
prompt = torch.tensor([tokenizer.encode("def ")], device=device)
key = mk.random.make_key(cfg.seed, device)
new = mk.generate(
    held["params"], prompt, cfg.sample_bytes, config=model, key=key, block=block, biases=held["biases"],
    mesh=mesh,
)  # fmt: skip
if rank == 0:
    trigram = corpora.trigram_bits_per_byte(train_files.values(), held_out_files.values())
    run.log({"held_out/bits_per_byte": bpb, "held_out/trigram_bits_per_byte": trigram}, step=step)
    print(f"held-out bits per byte: model {bpb:.3f}, 3-gram {trigram:.3f}")
    print("def " + tokenizer.decode(new[0].tolist()))
run.finish()
if mesh is not None:
    torch.distributed.destroy_process_group()
