"""Train a tiny model without end, saving every second step: a program to kill.

python tests/train_forever.py

Starts again for every line ``RANKS EP FOLDER`` on the standard input, from the newest checkpoint there, and
prints the process id of each start. Every finished step appends ``step ranks ep loss sample-ids`` to
FOLDER/steps, the loss with all its bits.
"""

import os
import shutil
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

import moekit as mk
from moekit import checkpoint, corpora, data
from moekit.mesh import data_mesh

BATCH, SAVE_EVERY, KEEP = 8, 2, 3
CONFIG = mk.ModelConfig(
    vocab_size=257,
    d_model=16,
    n_layers=2,
    n_dense_layers=1,
    d_dense=32,
    n_heads=2,
    n_kv_heads=1,
    d_head=8,
    n_experts=4,
    top_k=2,
    d_expert=8,
    max_seq_len=16,
    balance_weight=0.01,
)


def work(folder: Path, rank: int, n_ranks: int, ep: int, store: Path, last: float = torch.inf) -> None:
    """Continue from the newest checkpoint, to the ``last`` step."""
    torch.set_num_threads(1)
    mesh = None
    if n_ranks > 1:
        dist.init_process_group(
            "gloo", store=dist.FileStore(str(store), n_ranks), rank=rank, world_size=n_ranks
        )
        mesh = mk.make_mesh(ep=ep, device="cpu")
    params = mk.init_params(CONFIG, mesh=mesh)
    biases = torch.zeros(CONFIG.n_moe_layers, CONFIG.n_experts)
    text = {f"{i}": "".join(chr(97 + (i * j * j + j) % 26) for j in range(150)) for i in range(7)}
    samples = data.pack(corpora.corpus_of_text(text, corpora.byte_tokenizer()), 16)
    loader = data.Loader(samples, BATCH, seed=1, mesh=mesh)
    optimizer = mk.shard_optimizer(mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(1e-3)), mesh=mesh)
    state = optimizer.init(params)
    grad_fn = mk.value_and_grad(partial(mk.next_token_loss, config=CONFIG, mesh=mesh), has_aux=True)

    def snapshot(step):
        return dict(params=params, state=state, biases=biases, data=loader.state_dict(), step=step)

    step = 0
    if saved := checkpoint.resume(folder / "run", snapshot(0), wanted=True, config=CONFIG, mesh=mesh):
        loader.load_state_dict(saved["data"])
        step = saved["step"]
    while step < last:
        batch = mk.count_tokens(next(loader), mesh=mesh)
        (loss, stats), grads = grad_fn(params, batch, biases=biases)
        optimizer.update(grads, state, params)
        loss, counts = mk.mesh.sum_over_ranks((loss, stats["counts"]), mesh=mesh)
        biases.copy_(mk.balance.next_bias(biases, counts))
        step += 1
        ids = batch.sample_ids
        if mesh is not None:
            parts = [torch.empty_like(ids) for _ in range(n_ranks)]
            dist.all_gather(parts, ids, group=data_mesh(mesh).get_group())
            ids = torch.cat(parts)
        if rank == 0:
            with open(folder / "steps", "a") as file:
                file.write(f"{step} {n_ranks} {ep} {loss.item().hex()} {','.join(map(str, ids.tolist()))}\n")
        if step % SAVE_EVERY == 0:
            checkpoint.save(folder / "run" / f"step-{step:06d}", snapshot(step), config=CONFIG, mesh=mesh)
            if rank == 0:
                old = folder / "run" / f"step-{step - KEEP * SAVE_EVERY:06d}"
                shutil.rmtree(old, ignore_errors=True)


def main() -> None:
    """Start workers one after the other; each is killed before the next line comes."""
    for n, line in enumerate(sys.stdin):
        n_ranks, ep = map(int, line.split()[:2])
        folder = Path(line.rstrip("\n").split(" ", 2)[2])
        first = os.fork()
        if first == 0:
            rank = next((rank for rank in range(1, n_ranks) if os.fork() == 0), 0)
            work(folder, rank, n_ranks, ep, folder / f"store-{n}")
        print(first, flush=True)
        os.waitpid(first, 0)


if __name__ == "__main__":
    main()
