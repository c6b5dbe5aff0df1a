r"""Train one small model under each way to balance its experts, and show what ranks would wait for.

    python recipes/balance_study.py --quick
    python recipes/balance_study.py --json study.json --plot study.png
    python recipes/balance_study.py --domains texts   # each folder in it is a domain

Every step has the same rows under every way: one micro-batch's worth of each domain of text. Sorted, each
micro-batch is of one domain; mixed, each has as much of every one. A loss over the global batch sees no
difference. Ranks that share the experts do: they wait for the fullest of them in every micro-batch. One
process trains, and counts what ``ep`` ranks would wait.

Prints the loss on held-out text of each way, and how much longer than with even rows the experts take: as a
step's sums show it, and as ranks wait. Expect sorted batches to wait though their sums are even.
"""

import json
import sysconfig
import unicodedata
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
import tyro
from matplotlib.figure import Figure
from torch.utils._pytree import tree_map

import moekit as mk
from moekit import balance, corpora, data

# --- Config ---------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Config:
    """Everything the study depends on; written with its results."""

    domains: Path | None = (
        None  # a folder of folders of text; by default four kinds of the standard library's
    )
    n_steps: int = 600
    rows_per_domain: int = 8  # of a step, and so of a micro-batch
    seq_len: int = 128  # bytes
    ep: int = 4  # ranks that would share the experts
    balance_weight: float = 0.02  # of each loss
    bias_rate: float = 1e-3  # of each bias, in router scores
    window: int = 20  # steps whose load moves the bias of "bias over a window"
    lr: float = 3e-3
    seed: int = 0
    ways: tuple[str, ...] = ()  # by default all
    quick: bool = False  # by default 40 steps, and three ways
    json: Path = Path("runs/balance_study.json")
    plot: Path = Path("runs/balance_study.png")


cfg = tyro.cli(Config, description=__doc__)
if cfg.quick:  # other defaults; what is given wins
    some = ("batch, mixed", "batch", "micro-batch, ranks")
    cfg = tyro.cli(Config, default=Config(quick=True, n_steps=40, ways=some))
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
base = mk.ModelConfig(
    vocab_size=257, d_model=128, n_layers=3, n_heads=4, n_kv_heads=2, d_head=32, n_dense_layers=1,
    d_dense=384, n_experts=16, top_k=2, d_expert=128, max_seq_len=cfg.seq_len, rope_base=1e4,
    normalize_embedding=True, init_std=0.06, router_z_weight=1e-4, head_z_weight=1e-4,
)  # fmt: skip
WAYS = {  # of the micro-batches' rows, of the loss, of the bias
    "batch, mixed": ("mixed", dict(balance_population="batch"), 0),
    "batch": ("sorted", dict(balance_population="batch"), 0),
    "batch, ranks": ("sorted", dict(balance_population="batch", balance_groups=cfg.ep), 0),
    "micro-batch": ("sorted", dict(balance_population="micro_batch"), 0),
    "micro-batch, ranks": (
        "sorted",
        dict(balance_population="micro_batch", balance_groups=cfg.ep),
        0,
    ),
    "document": ("sorted", dict(balance_population="document"), 0),
    "bias": ("sorted", None, 1),
    "bias over a window": ("sorted", None, cfg.window),
}
if min(cfg.window, cfg.n_steps, cfg.rows_per_domain) < 1 or cfg.ep < 1 or base.n_experts % cfg.ep:
    raise SystemExit(
        "balance_study needs window, n_steps and rows_per_domain of 1 or more and ep that divides "
        f"{base.n_experts}, got {cfg.window}, {cfg.n_steps}, {cfg.rows_per_domain} and {cfg.ep}"
    )
if unknown := set(cfg.ways) - WAYS.keys():
    raise SystemExit(f"balance_study needs ways among {'; '.join(WAYS)}, got {'; '.join(sorted(unknown))}")
if cfg.domains is not None and not any(x.is_dir() for x in cfg.domains.glob("*")):
    raise SystemExit(f"balance_study needs a folder of folders of text, got {cfg.domains}")

# --- Data -----------------------------------------------------------------------------


def domains():
    """Return the texts of each domain: those of a folder, or prose, code, tables of numbers and names."""
    if cfg.domains is not None:
        return {x.name: corpora.text_files(x) for x in sorted(cfg.domains.iterdir()) if x.is_dir()}
    files = corpora.standard_library()
    is_prose = {name: name.startswith("pydoc_data") for name in files}
    names = [unicodedata.name(chr(i), "") for i in range(0x3000)] + ["\n"]
    return dict(
        prose={name: text for name, text in files.items() if is_prose[name]},
        code={name: text for name, text in files.items() if not is_prose[name]},
        tables=corpora.text_files(Path(sysconfig.get_path("stdlib")) / "encodings", pattern="cp*.py"),
        names={f"{i}": "\n".join(names[i : i + 256]) for i in range(0, len(names), 256)},
    )


train, held_out = [], []
for texts in domains().values():
    parts = corpora.split_files(texts, held_out=0.1)
    corpus, other = (corpora.corpus_of_text(part, corpora.byte_tokenizer()) for part in parts)
    train.append(data.pack(corpus, cfg.seq_len))
    loader = data.Loader(data.pack(other, cfg.seq_len), 64, seed=cfg.seed)
    held_out.append(mk.count_tokens(next(loader).to(device)))


def joined(batches, order):
    """Return the rows of all domains as one batch: a domain after the other, or in turn."""
    n = torch.arange(len(batches) * cfg.rows_per_domain)
    rows = n if order == "sorted" else n.view(len(batches), -1).T.flatten()
    drawn = (replace(batch, n_ranks=None) for batch in batches)  # none was the whole
    together = tree_map(lambda *parts: torch.cat(parts)[rows], *drawn)
    return mk.count_tokens(replace(together, sample_ids=n[rows]).to(device))


# --- One way --------------------------------------------------------------------------


def study(order, loss, window):
    """Train; return the loss on held-out text, and of each step what is seen and what is waited for."""
    model = base if loss is None else replace(base, balance_weight=cfg.balance_weight, **loss)
    params = mk.init_params(model, seed=cfg.seed, device=device)
    lr = mk.optim.warmup_cosine(cfg.lr, warmup_steps=cfg.n_steps // 5, total_steps=cfg.n_steps)
    optimizer = mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(lr, weight_decay=0.1))
    state = optimizer.init(params)
    kept: list[torch.Tensor] = []  # the expert ids of each layer of each micro-batch
    block = balance.keep_routing(mk.model.transformer_block, kept)
    loss_fn = partial(mk.next_token_loss, config=model, block=block)
    grad_fn = mk.accumulate(mk.value_and_grad(loss_fn, has_aux=True), len(train))
    loaders = [data.Loader(samples, cfg.rows_per_domain, seed=cfg.seed) for samples in train]
    biases = torch.zeros(model.n_moe_layers, model.n_experts, device=device)
    load = torch.ones_like(biases)  # a moving mean
    gaps = []
    for _ in range(cfg.n_steps):
        kept.clear()
        batch = joined([next(loader) for loader in loaders], order)
        over_batch = dict(load=load) if model.balance_population == "batch" else {}
        (_, stats), grads = grad_fn(params, batch, biases=biases, **over_batch)
        params, state = optimizer.update(grads, state, params)
        load = load.lerp(stats["counts"].float(), 1 / max(window, 1))
        biases = balance.next_bias(biases, load, rate=cfg.bias_rate if window else 0.0)
        recording = balance.record_step(kept, batch, config=model)
        rows = balance.recorded_rows(recording, 0, n_microbatches=len(train))
        gaps.append(balance.gerrymandering_gap(rows, cfg.ep))
    with torch.no_grad():
        each = [mk.next_token_loss(params, batch, config=model, biases=biases)[1] for batch in held_out]
    found = {name: [getattr(gap, name).mean().item() for gap in gaps] for name in ("seen", "waited")}
    return found | dict(held_out=[stats["cross_entropy"].item() for stats in each])


# --- All ways -------------------------------------------------------------------------

results = {}
last = max(cfg.n_steps // 4, 1)
print(
    f"{'balanced over':20}  held-out loss  seen  waited   (means of the last quarter; 1 is even)", flush=True
)
for name in cfg.ways or WAYS:
    found = results[name] = study(*WAYS[name])
    means = [sum(found[x][-last:]) / last for x in ("seen", "waited")]
    found |= dict(mean_held_out=sum(found["held_out"]) / len(train), mean_seen=means[0], mean_waited=means[1])
    print(f"{name:20}  {found['mean_held_out']:13.4f} {means[0]:5.2f} {means[1]:7.2f}", flush=True)

for path in (cfg.json, cfg.plot):
    path.parent.mkdir(parents=True, exist_ok=True)
cfg.json.write_text(json.dumps(dict(config=asdict(cfg), torch=torch.__version__, ways=results), default=str))
figure = Figure(figsize=(13, 4), layout="constrained")
axes = figure.subplots(1, 3)
top = 1.05 * max(max(found["waited"]) for found in results.values())
for name, found in results.items():
    for axis, key in zip(axes, ("seen", "waited"), strict=False):
        smooth = torch.tensor(found[key]).unfold(0, max(cfg.n_steps // 20, 1), 1).mean(1)
        axis.plot(smooth, label=name)
        axis.set(title=f"fullest rank by the mean: {key}", xlabel="step", ylim=(0.95, top))
    axes[2].plot(found["mean_waited"], found["mean_held_out"], "o", label=name)
axes[2].set(title="at the end", xlabel="waited", ylabel="held-out loss, nats a byte")
axes[0].legend(fontsize="small")
figure.savefig(cfg.plot, dpi=120)
