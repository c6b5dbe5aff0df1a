"""A recorded routing taken again on other layouts: the same counts, to the token, and the same gradients."""

import pytest
import torch
import torch.distributed as dist

import moekit as mk
from moekit.balance import keep_routing, read_recording, record_step, replay, write_recording
from moekit.context import split_context
from moekit.mesh import context_mesh, data_rank
from moekit.testing import check_gradients, ranks

from .tiny import batch_of, loss_of, model, rows_of

CONFIG, PARAMS = model(n_dense_layers=0, d_dense=0)  # two layers that have experts
_, OTHERS = model(n_dense_layers=0, d_dense=0)
OTHERS["layers", "0", "moe", "router"] *= -1  # which would choose otherwise
BATCH = batch_of([[0] * 9] * 3 + [[0, 0, 0, 1, 1, 1, 1, -1, -1]] * 3 + [[0, 1, 1, 2, 2, 2, 2, 2, 3]] * 2)


def recorded(batch, *, n=1, context=None, mesh=None):
    """Return the recording of this rank's rows, and the counts of all."""
    kept = []
    block = keep_routing(mk.model.transformer_block, kept)
    options = dict(config=CONFIG, block=block, context=context, mesh=mesh)

    def loss(params, batch):
        return mk.next_token_loss(params, batch, **options)

    params = mk.mesh.distribute(PARAMS, mesh)
    (_, stats), _ = mk.accumulate(mk.value_and_grad(loss, has_aux=True), n)(params, batch)
    counts = mk.mesh.sum_over_ranks(stats["counts"], mesh=mesh)
    return record_step(kept, batch, config=CONFIG, context=context), counts


RECORDING, COUNTS = recorded(BATCH, n=4)
REPLAYED = replay(RECORDING, 0, BATCH, config=CONFIG)


def here(mesh, context=None):
    """Return the rows of this rank, as a loader deals them."""
    rank, n = data_rank(mesh, context)
    batch = rows_of(BATCH, rank * 8 // n, (rank + 1) * 8 // n)
    return mk.count_tokens(split_context(batch, context=context), mesh=mesh)


@pytest.mark.parametrize("layout", [dict(ep=2), dict(edp=2), dict(ep=2, cp=2)], ids=str)
def test_two_ranks_replay_the_counts_of_one_process_to_the_token(layout):
    cp = layout.get("cp", 1)

    def counts():
        sizes = {name: n for name, n in layout.items() if name != "cp"}
        mesh = mk.make_mesh(**sizes, device="cpu")
        context = context_mesh(mesh, cp)
        batch = replay(RECORDING, 0, here(mesh, context), config=CONFIG)
        params = mk.mesh.distribute(OTHERS, mesh)
        found = []
        for part in mk.batch.split_batch(batch, 2):
            _, stats = mk.next_token_loss(params, part, config=CONFIG, context=context, mesh=mesh)
            found.append(mk.mesh.sum_over_ranks(stats["counts"], mesh=mesh))
        return sum(found)

    for got in ranks(2)(counts):
        assert torch.equal(got, COUNTS)


def test_gradients_of_a_replay_are_the_same_on_every_layout():
    layouts = [dict(ep=2, accumulate=2), dict(edp=2, ep=2, recompute="block"), dict(edp=2, ep=2, cp=2)]
    loss = loss_of(CONFIG)
    check_gradients(lambda *args, **kw: loss(*args, **kw)[0], OTHERS, REPLAYED, layouts)


@pytest.mark.parametrize("cp", [1, 2])
def test_what_ranks_record_is_the_recording_of_one_process(cp, tmp_path):
    def write():
        mesh = mk.make_mesh(ep=2, device="cpu")
        context = context_mesh(mesh, cp)
        recording, counts = recorded(here(mesh, context), n=2, context=context, mesh=mesh)
        assert torch.equal(counts, COUNTS)
        if dist.get_rank() % cp == 0:
            path = tmp_path / f"{dist.get_rank()}.safetensors"
            write_recording(path, [recording], context=context, mesh=mesh)

    ranks(2)(write)
    read = read_recording(*sorted(tmp_path.iterdir(), reverse=True))
    assert torch.equal(read.expert_ids, RECORDING.expert_ids)
    assert torch.equal(read.sample_ids, RECORDING.sample_ids)
