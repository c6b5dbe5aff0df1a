r"""Train any Mixture-of-Experts preset, or an OLMoE from Hugging Face, on text or token files.

    python recipes/train_moe.py --preset bench-8L --n-experts 8 --tokens data/ --token-dtype uint32
    torchrun --nproc-per-node 8 recipes/train_moe.py --preset tiny --ep 8 --tokens data/
    python recipes/train_moe.py --hf path/of/OLMoE --text docs/ --tokenizer path/of/tokenizer.json
    srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint $HEAD:29500 recipes/train_moe.py --preset small --ep 8 --tokens data/

With --dry-run, on fake ranks. Differs from quickstart.py in where the model and the tokens come from.
"""

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
import tyro

import moekit as mk
from moekit import checkpoint, corpora, data, dryrun, hf, layouts, profiling, tracking
from moekit.mesh import data_rank

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything this run depends on; logged whole."""

    preset: str | None = None  # a model of moekit.config.PRESETS ...
    n_experts: int | None = None  # ... with another number of experts ...
    hf: Path | None = None  # ... or a folder with OLMoE weights to start from
    balance_weight: float | None = None  # of the load-balancing loss; by default the model's
    router_z_weight: float | None = None  # by default the model's
    tokens: Path | None = None  # a file or folder of .npy or raw token ids ...
    token_dtype: Literal["uint16", "uint32"] | None = None  # ... which raw files need
    eos: int | None = None  # id that ends a document in token files
    text: Path | None = None  # ... or text: a file or folder; by default the standard library
    tokenizer: str = "bytes"  # for text: "bytes", or a tokenizer.json
    n_steps: int = 1000
    batch_size: int = 16  # sequences of the global batch
    seq_len: int = 1024  # tokens
    n_microbatches: int = 1  # slices of a rank's part of the batch
    recompute: Literal["none", "block"] = "none"
    reduce: Literal["step", "micro_batch"] = "step"  # when gradients are summed over ranks
    lr: float = 3e-4  # at its peak
    warmup_steps: int = 10
    weight_decay: float = 0.1
    max_norm: float = 1.0  # of the whole gradient
    bias_rate: float = 0.0  # step of the balancing bias, in router scores; 0 keeps it at 0
    assignment: Literal["top_k", "random", "uniform"] = "top_k"  # random and uniform are for measurements
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    seed: int = 0
    edp: int | None = None  # copies of the experts; by default ranks / ep
    ep: int = 1  # ranks that share one copy of the experts
    folder: Path = Path("runs/train_moe")
    resume: bool = False  # continue from the newest checkpoint in the folder, if any
    log_every: int = 10  # steps
    save_every: int = 500  # steps
    gpu: Literal["h100", "h200", "b200", "b300"] | None = None  # refuse what exceeds its memory
    profile: int = 0  # steps to trace, after three; where their time went is printed
    dry_run: bool = False  # execute the step on fake ranks, without values, and say what it needs
    n_gpus: int = 1  # ranks of a dry run
    full: bool = False  # a dry run of two ranks of every single group


cfg = tyro.cli(Config, description=__doc__)
for wrong, needs in (
    ((cfg.preset is None) == (cfg.hf is None), "either --preset or --hf"),
    (cfg.hf is not None and cfg.n_experts is not None, "--n-experts with a --preset"),
    (cfg.tokens is not None and cfg.text is not None, "at most one of --tokens and --text"),
    (cfg.tokens is not None and cfg.tokenizer != "bytes", "--tokenizer with text"),
    (
        cfg.tokens is None and (cfg.token_dtype or cfg.eos) is not None,
        "--token-dtype and --eos with --tokens",
    ),
    (cfg.assignment != "top_k" and cfg.bias_rate != 0, "--bias-rate with --assignment top_k"),
):
    if wrong:
        raise SystemExit(f"train_moe needs {needs}")
model = hf.config_from_hf(cfg.hf) if cfg.hf else mk.preset(str(cfg.preset))
changes = {name: getattr(cfg, name) for name in ("n_experts", "balance_weight", "router_z_weight")}
changes = {name: value for name, value in changes.items() if value is not None}
model = replace(model, max_seq_len=max(cfg.seq_len, model.max_seq_len), **changes)

layout = layouts.check_recipe(model, cfg)
device = torch.device("cuda" if torch.cuda.is_available() and not cfg.dry_run else "cpu")
dtype = getattr(torch, cfg.dtype)

# --- What a rank holds, and one step ----------------------------------------------------


def build():
    """Make the mesh, what this rank holds, and the step: on real ranks, or on those of a dry run."""
    mesh = mk.make_mesh(edp=cfg.edp, ep=cfg.ep, n_experts=model.n_experts)  # None in a process started alone
    if cfg.hf and not cfg.dry_run:
        params = hf.import_olmoe(cfg.hf, config=model, dtype=dtype, device=device, mesh=mesh)
    else:
        params = mk.init_params(model, seed=cfg.seed, dtype=dtype, device=device, mesh=mesh)
    n_scheduled = max(cfg.n_steps, cfg.warmup_steps + 1)  # a shorter run only rises
    lr = mk.optim.warmup_cosine(cfg.lr, warmup_steps=cfg.warmup_steps, total_steps=n_scheduled)
    optimizer = mk.chain(mk.clip_by_global_norm(cfg.max_norm), mk.adamw(lr, weight_decay=cfg.weight_decay))
    optimizer = mk.shard_optimizer(optimizer, reduce=cfg.reduce, mesh=mesh)
    biases = torch.zeros(model.n_moe_layers, model.n_experts, device=device)
    held: dict[str, Any] = dict(params=params, state=optimizer.init(params), biases=biases)

    block = mk.remat(mk.model.transformer_block, cfg.recompute)
    loss_fn = partial(mk.next_token_loss, config=model, assignment=cfg.assignment, block=block, mesh=mesh)
    grad_fn = mk.accumulate(
        mk.value_and_grad(loss_fn, has_aux=True), layout.n_microbatches, on_grad=optimizer.on_grad
    )
    base_key, chooses = mk.random.make_key(cfg.seed, device), cfg.assignment == "top_k"

    def train_step(held, batch, step):
        """Update what is held, and return the statistics of the global batch."""
        key, biases = (None, held["biases"]) if chooses else (mk.random.fold_in(base_key, step), None)
        batch = mk.count_tokens(batch, mesh=mesh)
        (_, stats), grads = grad_fn(held["params"], batch, biases=biases, key=key)
        held["params"], held["state"] = optimizer.update(grads, held["state"], held["params"])
        stats = mk.mesh.sum_over_ranks(stats, mesh=mesh)
        held["biases"] = mk.balance.next_bias(held["biases"], stats["counts"], rate=cfg.bias_rate)
        return stats

    return mesh, None, held, train_step


if cfg.dry_run:
    print(dryrun.dry_run_recipe(build, model, layout, full=cfg.full, gpu=cfg.gpu))
    raise SystemExit

# --- Data -----------------------------------------------------------------------------

if cfg.tokens:
    files = corpora.token_files(cfg.tokens, dtype=cfg.token_dtype)
    corpus = corpora.corpus_of_tokens(files, eos=cfg.eos, vocab_size=model.vocab_size)
else:
    texts = corpora.text_files(cfg.text) if cfg.text else corpora.standard_library()
    corpus = corpora.corpus_of_text(texts, corpora.load_tokenizer(cfg.tokenizer))
if corpus.vocab_size > model.vocab_size:
    raise SystemExit(
        f"train_moe needs token ids below {model.vocab_size}, the tokenizer has {corpus.vocab_size}"
    )
samples = data.pack(corpus, cfg.seq_len)

# --- Train ----------------------------------------------------------------------------

mesh, _, held, train_step = build()
rank, _ = data_rank(mesh)
loader = data.Loader(samples, cfg.batch_size, seed=cfg.seed, mesh=mesh)


def snapshot(step):
    """Return everything that the next step depends on."""
    return dict(held, data=loader.state_dict(), step=step)


step = 0
if saved := checkpoint.resume(cfg.folder, snapshot(step), wanted=cfg.resume, config=model, mesh=mesh):
    loader.load_state_dict(saved["data"])
    step = saved["step"]
run = tracking.start_run(cfg, project="moekit", folder=cfg.folder, resume=cfg.resume, mesh=mesh)
if rank == 0:
    print(mk.describe(held["params"]))

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
