r"""Train the model of moe_47b.py fully sharded (FSDP2) instead of expert parallel: the baseline.

    torchrun --nproc-per-node 8 recipes/moe_47b_fsdp.py --n-experts 32
    python recipes/moe_47b_fsdp.py --n-experts 8 --batch-size 2
    torchrun --nproc-per-node 4 recipes/moe_47b_fsdp.py --toy
    srun torchrun --nnodes $SLURM_NNODES --nproc-per-node 8 --rdzv-backend c10d \
        --rdzv-endpoint $HEAD:29500 recipes/moe_47b_fsdp.py --n-experts 128

Differs from moe_47b.py in the parallelism alone: model functions, first values, data, routing and learning
rates are the same. Every rank computes all experts for its own tokens, with weights that are gathered a block
ahead. Masters, gradients and moments are float32 and sharded: 16 bytes a parameter, divided by the ranks; so
128 experts leave no room for activations on 8 GPUs of 141 GB. Without checkpoints; train_moe.py shows them.
"""

import os
import warnings
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

import moekit as mk
from moekit import config, corpora, data, dryrun, layouts, profiling, tracking
from moekit.mesh import data_mesh
from moekit.params import draw_slab, param_dtype
from moekit.tree import has_values

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
    # Sum gradients over ranks once a step (every rank then holds those of the whole model, in bfloat16), or
    # after each micro-batch (it holds its float32 shard of them, and sends more).
    reduce: Literal["step", "micro_batch"] = "step"
    recompute: Literal["none", "block"] = "none"
    prefetch: bool = True  # gather a block's weights during the one before; False: when it begins
    assignment: Literal["top_k", "random", "uniform"] = "random"
    optimize: bool = True  # False: forward and backward alone
    lr: float = 3e-4  # at its peak
    warmup_steps: int = 10
    seed: int = 0
    toy: bool = False  # the same at a laptop's width, in float32; by default 8 experts, 128 tokens, 10 steps
    folder: Path = Path("runs/moe_47b_fsdp")
    log_every: int = 5  # steps
    profile: int = 0  # steps to trace, after three; where their time went is printed
    dry_run: bool = False  # execute the step on fake ranks, without values, and say what it needs
    n_gpus: int = 1  # ranks of a dry run
    full: bool = False  # a dry run of two ranks of every single group


cfg = tyro.cli(Config, description=__doc__)
if cfg.toy:  # other defaults; what is given wins
    cfg = tyro.cli(Config, default=Config(toy=True, n_experts=8, seq_len=128, n_steps=10))
model = mk.preset("bench-8L", n_experts=cfg.n_experts)
if cfg.toy:
    model = config.toy(model, n_experts=cfg.n_experts)
layout = layouts.check_recipe(model, cfg)
device = torch.device("cuda" if torch.cuda.is_available() and not cfg.dry_run else "cpu")
dtype = torch.float32 if cfg.toy else torch.bfloat16

# --- The model's functions as modules, which FSDP gathers and frees -------------------


class Unit(nn.Module):
    """Nested parameters under their own names."""

    def __init__(self, params):
        super().__init__()
        for name, x in params.items():
            if name == "layers":
                x = nn.ModuleDict({i: Block(layer) for i, layer in x.items()})
            elif name == "router":
                x = Router(x)
            else:
                x = nn.Parameter(x) if isinstance(x, torch.Tensor) else Unit(x)
            setattr(self, name, x)


class Router(nn.Module):
    """A router stays float32, so FSDP gathers it by itself: when it is called."""

    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self):
        """Return the matrix, not a view: FSDP hooks what comes out."""
        return self.weight.clone()


def params_of(unit):
    """Return the nested parameters of a unit, as they are now."""
    parts = {name: p() if isinstance(p, Router) else params_of(p) for name, p in unit.named_children()}
    return unit._parameters | parts


class Block(Unit):
    """One layer."""

    def forward(self, x, **options):
        """Apply the block of functions to this layer's parameters."""
        return mk.remat(mk.model.transformer_block, cfg.recompute)(params_of(self), x, **options)


class Model(Unit):
    """All layers, and what stands before and behind them."""

    def forward(self, batch, **options):
        """Return this part's share of the loss, and statistics; each layer is called as a module."""
        params = self._parameters | {"layers": self.layers}
        options |= dict(config=model, assignment=cfg.assignment, block=lambda layer, *x, **o: layer(*x, **o))
        return mk.next_token_loss(params, batch, **options)


# --- Mesh, parameters, optimizer, one step --------------------------------------------


def shard(net, mesh):
    """Shard every block, and what stands before and behind them; gather each during the one before."""
    bf16 = MixedPrecisionPolicy(dtype, dtype, cast_forward_inputs=False)  # RoPE tables stay float32
    layers, dp = list(net.layers.values()), data_mesh(mesh)
    warnings.filterwarnings(
        "ignore", ".*returned a view tensor"
    )  # nothing is done in place to a block's output

    def wrap(module, keep, policy):  # with fewer experts than ranks, each rank has a part of every expert
        fully_shard(
            module, mesh=dp, reshard_after_forward=not keep, mp_policy=policy,
            shard_placement_fn=lambda p: Shard(int(p.ndim == 3 and len(p) < dp.size())),
        )  # fmt: skip

    for router in (m for m in net.modules() if isinstance(m, Router)):
        wrap(router, True, MixedPrecisionPolicy())
    for layer in layers:
        wrap(layer, layer is layers[-1], bf16)  # backward begins with the last one, which stays gathered
    wrap(net, True, bf16)  # embedding, last norm, head
    for before, after in pairwise([net, *layers]):  # a module that is gathered already: no prefetch
        ahead = [m for m in after.modules() if isinstance(m, FSDPModule)]
        before.set_modules_to_forward_prefetch(ahead if cfg.prefetch else [before])
        after.set_modules_to_backward_prefetch([before if cfg.prefetch else after])
    for unit in (m for m in net.modules() if isinstance(m, FSDPModule)):
        unit.set_gradient_divide_factor(1.0)  # losses are shares of the global batch's: a sum
        unit.set_force_sum_reduction_for_comms(True)


@torch.no_grad()
def draw(net):
    """Draw the first values of mk.init_params, each rank the rows that it holds."""
    for name, p in net.named_parameters():
        rows, name = p.to_local(), name.removesuffix(".weight")
        if not has_values(rows):  # in a dry run
            continue
        if p.ndim == 1:
            rows.fill_(1.0)
            continue
        dim, rank, n_ranks = p.placements[0].dim, p.device_mesh.get_local_rank(), p.device_mesh.size()
        first = rank * -(-len(p) // n_ranks) if dim == 0 else 0
        for i in range(len(rows)):
            row = draw_slab(cfg.seed, name, first + i, p.shape[1:]).mul_(model.init_std)
            row = row.to(param_dtype(name, dtype))  # rounded as moe_47b.py's
            rows[i] = row if dim == 0 else row.chunk(n_ranks)[rank]


def build():
    """Make the mesh, what this rank holds, and the step: on real ranks, or on those of a dry run."""
    if not dist.is_initialized() and "WORLD_SIZE" not in os.environ:  # one rank, started alone
        dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    mesh = mk.make_mesh()
    net = Model(mk.init_params(model, device="meta"))  # no rank ever holds the whole model
    shard(net, mesh)
    assert isinstance(net, FSDPModule)  # now
    draw(net.to_empty(device=device))
    n_scheduled = max(cfg.n_steps, cfg.warmup_steps + 1)  # a shorter run only rises
    lr = mk.optim.warmup_cosine(cfg.lr, warmup_steps=cfg.warmup_steps, total_steps=n_scheduled)
    adamw = torch.optim.AdamW(net.parameters(), betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    params = {name.removesuffix(".weight"): p for name, p in net.named_parameters()}
    held: dict[str, Any] = dict(params=params, state=None)
    base_key = mk.random.make_key(cfg.seed, device)

    def train_step(held, batch, step):
        """Update the model, and return the statistics of the global batch."""
        key = None if cfg.assignment == "top_k" else mk.random.fold_in(base_key, step)
        parts = mk.batch.split_batch(mk.count_tokens(batch, mesh=mesh), layout.n_microbatches)
        shares = []
        for i, part in enumerate(parts, 1):
            net.set_is_last_backward(i == len(parts))
            net.set_requires_gradient_sync(i == len(parts) or cfg.reduce == "micro_batch")
            loss, stats = net(part, key=key, mesh=mesh)
            loss.backward()
            shares.append(stats)
        if cfg.optimize:
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            rate = lr(torch.tensor(step - 1))  # as a number: AdamW takes a tensor through memory of the host
            adamw.param_groups[0]["lr"] = rate.item() if has_values(rate) else cfg.lr
            adamw.step()
            held["state"] = list(adamw.state.values())
        adamw.zero_grad()
        stats = {name: torch.stack([share[name] for share in shares]).sum(0) for name in shares[0]}
        return mk.mesh.sum_over_ranks(stats, mesh=mesh)

    return mesh, None, held, train_step


if cfg.dry_run:
    print(dryrun.dry_run_recipe(build, model, layout, full=cfg.full))
    raise SystemExit

# --- Data, train ----------------------------------------------------------------------

mesh, _, held, train_step = build()
corpus = corpora.load_corpus(cfg.tokens, eos=cfg.eos, vocab_size=model.vocab_size)
loader = data.Loader(data.pack(corpus, cfg.seq_len), cfg.batch_size, seed=cfg.seed, mesh=mesh)
run = tracking.start_run(cfg, project="moekit", folder=cfg.folder, mesh=mesh)
progress = tracking.Progress(
    run, cfg.n_steps, every=cfg.log_every, tokens_per_step=cfg.batch_size * cfg.seq_len,
    config=model, seq_len=cfg.seq_len, mesh=mesh,
)  # fmt: skip
for step in profiling.traced(progress, cfg.profile, folder=cfg.folder):
    stats = train_step(held, next(loader).to(device), step)
    progress.log(stats, held)
run.finish()
dist.destroy_process_group()
