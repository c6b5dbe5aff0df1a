"""Train a byte-level Mixture-of-Experts on the standard library of this Python, then let it write.

    python recipes/quickstart.py
    python recipes/quickstart.py --resume
    torchrun --nproc-per-node 4 recipes/quickstart.py --ep 2 --folder runs/four

The losses are the same on any number of ranks, up to rounding, which in time reroutes tokens. Expect about
2.0 bits per byte on held-out files after five minutes on two CPU cores, where a byte 3-gram has 2.8.
"""

import math
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import tyro
from tqdm import tqdm

import moekit as mk
from moekit import checkpoint, corpora, data, tracking
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
    warmup_steps: int = 120
    weight_decay: float = 0.1
    max_norm: float = 1.0  # of the whole gradient
    bias_rate: float = (
        0.0  # step of the balancing bias, in router scores, e.g. 1e-3; its sign amplifies rounding
    )
    seed: int = 0
    ep: int = 1  # ranks that share one copy of the experts
    text: str | None = None  # a folder of text files; by default the standard library
    folder: Path = Path("runs/quickstart")
    resume: bool = False  # continue from the newest checkpoint in the folder, if any
    log_every: int = 10  # steps
    save_every: int = 200  # steps
    sample_bytes: int = 300  # written at the end


cfg = tyro.cli(Config, description=__doc__)
if min(cfg.log_every, cfg.save_every) < 1:
    raise SystemExit(f"log_every and save_every need to be at least 1, got {cfg.log_every}, {cfg.save_every}")
model = mk.ModelConfig(
    vocab_size=257, d_model=128, n_layers=4, n_heads=4, n_kv_heads=2, d_head=32,
    n_dense_layers=1, d_dense=512,
    n_experts=16, top_k=2, d_expert=192, d_shared=192, max_seq_len=cfg.seq_len, rope_base=1e4,
    balance_weight=0.01, router_z_weight=1e-4, head_z_weight=1e-4,
)  # fmt: skip

# --- Mesh -----------------------------------------------------------------------------

mesh = mk.make_mesh(ep=cfg.ep, n_experts=model.n_experts)  # None in a process that was started alone
rank, _ = data_rank(mesh)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
dtype = torch.bfloat16 if device.type == "cuda" else torch.float32

# --- Parameters, data, optimizer ------------------------------------------------------

params = mk.init_params(model, seed=cfg.seed, dtype=dtype, device=device, mesh=mesh)
biases = torch.zeros(model.n_moe_layers, model.n_experts, device=device)

tokenizer = corpora.byte_tokenizer()
files = corpora.standard_library() if cfg.text is None else corpora.text_files(cfg.text)
train_files, held_out_files = corpora.split_files(files, held_out=0.05)
train, held_out = (corpora.corpus_of_text(part, tokenizer) for part in (train_files, held_out_files))
held_out_samples = data.pack(held_out, cfg.seq_len)
loader = data.Loader(data.pack(train, cfg.seq_len), cfg.batch_size, seed=cfg.seed, mesh=mesh)

lr = mk.optim.warmup_cosine(cfg.lr, warmup_steps=cfg.warmup_steps, total_steps=cfg.n_steps, floor=cfg.lr / 10)
optimizer = mk.chain(mk.clip_by_global_norm(cfg.max_norm), mk.adamw(lr, weight_decay=cfg.weight_decay))
optimizer = mk.shard_optimizer(optimizer, mesh=mesh)
state = optimizer.init(params)

# --- One step -------------------------------------------------------------------------

loss_fn = partial(mk.next_token_loss, config=model, mesh=mesh)
grad_fn = mk.accumulate(mk.value_and_grad(loss_fn, has_aux=True), cfg.n_microbatches)


def train_step(params, state, biases, batch):
    """Return the next parameters, optimizer state and biases, and the statistics of the global batch."""
    batch = mk.count_tokens(batch, mesh=mesh)
    (_, stats), grads = grad_fn(params, batch, biases=biases)
    params, state = optimizer.update(grads, state, params)
    stats = mk.mesh.sum_over_ranks(stats, mesh=mesh)
    return params, state, mk.balance.next_bias(biases, stats["counts"], rate=cfg.bias_rate), stats


@torch.no_grad()
def bits_per_byte(samples):
    """Return the mean loss over the targets of all samples, in bits."""
    total = torch.zeros(2, dtype=torch.float64, device=device)  # nats, targets
    for batch in data.Loader(samples, 64, shuffle=False, epochs=1, uneven=True, mesh=mesh):
        batch = mk.count_tokens(batch.to(device), mesh=mesh)
        stats = mk.mesh.sum_over_ranks(loss_fn(params, batch, biases=biases)[1], mesh=mesh)
        total += (
            torch.stack([stats["cross_entropy"], torch.ones_like(stats["cross_entropy"])])
            * stats["n_targets"]
        )
    return (total[0] / total[1]).item() / math.log(2)


# --- Train ----------------------------------------------------------------------------


def snapshot(step):
    """Return everything that the next step depends on."""
    return dict(params=params, state=state, biases=biases, data=loader.state_dict(), step=step)


step = 0
if saved := checkpoint.resume(cfg.folder, snapshot(step), wanted=cfg.resume, config=model, mesh=mesh):
    loader.load_state_dict(saved["data"])
    step = saved["step"]
run = tracking.start_run(cfg, project="moekit-quickstart", folder=cfg.folder, resume=cfg.resume, rank=rank)

bar = tqdm(
    initial=step,
    total=cfg.n_steps,
    disable=True if rank else None,  # no bar where the output is not a terminal
    smoothing=0.05,
)
since, began = step, time.perf_counter()  # of the last line printed
while step < cfg.n_steps:
    params, state, biases, stats = train_step(params, state, biases, next(loader).to(device))
    step += 1
    bar.update()
    if step % cfg.log_every == 0 or step == cfg.n_steps:
        loss = stats["cross_entropy"].item()
        tok_s = (step - since) * cfg.batch_size * cfg.seq_len / (time.perf_counter() - began)
        figures = dict(loss=loss, grad_norm=state["inner", "0", "norm"].item(), tokens_per_second=tok_s)
        run.log(figures | tracking.load_figures(stats["counts"], first_layer=model.n_dense_layers), step=step)
        if rank == 0:
            bar.write(f"step {step:5d}  loss {loss:.6f}")
            bar.set_postfix(bpb=f"{loss / math.log(2):.3f}", tok_s=f"{tok_s:.0f}")
        since, began = step, time.perf_counter()
    if step % cfg.save_every == 0 or step == cfg.n_steps:
        checkpoint.save(cfg.folder / f"step-{step:06d}", snapshot(step), config=model, mesh=mesh)
        if step < cfg.n_steps:
            bpb = bits_per_byte(held_out_samples)
            run.log(dict(held_out_bits_per_byte=bpb), step=step)
            if rank == 0:
                bar.write(f"step {step:5d}  held-out bits per byte {bpb:.3f}")
        since, began = step, time.perf_counter()

bar.close()

# --- What it learnt -------------------------------------------------------------------

bpb = bits_per_byte(held_out_samples)
prompt = torch.tensor([tokenizer.encode("def ")], device=device)
key = mk.random.make_key(cfg.seed, device)
new = mk.generate(params, prompt, cfg.sample_bytes, config=model, key=key, biases=biases, mesh=mesh)
if rank == 0:
    trigram = corpora.trigram_bits_per_byte(train_files.values(), held_out_files.values())
    run.log(dict(held_out_bits_per_byte=bpb, trigram_bits_per_byte=trigram), step=step)
    print(f"held-out bits per byte: model {bpb:.3f}, 3-gram {trigram:.3f}")
    print("def " + tokenizer.decode(new[0].tolist()))
run.finish()
if mesh is not None:
    torch.distributed.destroy_process_group()
