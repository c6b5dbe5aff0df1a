"""A tiny model in float64 with its batch and loss, shared by the tests of this folder."""

import torch
from torch.utils._pytree import tree_map_only

import moekit as mk

SIZES = dict(
    vocab_size=13,
    d_model=8,
    n_layers=2,
    n_dense_layers=1,
    d_dense=10,
    n_heads=4,
    n_kv_heads=2,
    d_head=4,
    n_experts=8,
    top_k=2,
    d_expert=4,
    d_shared=5,
    max_seq_len=16,
    init_std=0.5,
    balance_weight=0.3,
    router_z_weight=0.02,
    head_z_weight=0.01,
)


def model(**changes):
    """Return a configuration and its parameters."""
    config = mk.ModelConfig(**(SIZES | changes))
    return config, mk.init_params(config, dtype=torch.float64)


def batch_of(documents, vocab_size=SIZES["vocab_size"]):
    """Return the batch of random tokens with these documents, its totals counted."""
    documents = torch.tensor(documents)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocab_size, documents.shape, generator=generator)
    return mk.count_tokens(mk.batch.make_batch(tokens, documents, torch.arange(len(documents))))


# 16 rows whose parts on 2, 4 or 8 ranks, and halves of these, have unequal numbers of targets and of tokens.
BATCH = batch_of(
    [
        *([[0] * 7] * 3 + [[0, 0, 0, 1, 1, 1, 1]] * 2),
        *([[0, 0, 1, 1, 1, -1, -1]] * 2 + [[-1] * 7] + [[0, 1, 1, 2, 2, 2, 2]] * 3),
        *([[0, 0, 0, 0, -1, -1, -1]] * 3 + [[0, 0, -1, -1, -1, -1, -1]] * 2),
    ]
)


def rows_of(batch, start, end):
    """Return some rows of a batch, with the totals of the whole."""
    return tree_map_only(torch.Tensor, lambda x: x[start:end] if x.ndim else x, batch)


def loss_of(config, **options):
    """Return the model's loss; ``recompute`` is as for ``moekit.remat``."""

    def loss(params, batch, *, mesh, recompute="none", **more):
        block = mk.remat(mk.model.transformer_block, recompute)  # made on the rank: it cannot be pickled
        return mk.next_token_loss(params, batch, config=config, mesh=mesh, block=block, **options, **more)

    return loss
