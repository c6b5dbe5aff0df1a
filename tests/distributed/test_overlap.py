"""What runs beside what, on several ranks: the values of whole layers, and one choice for all ranks."""

import time
from functools import partial

import pytest
import torch
import torch.distributed as dist
from exchanges import hurried, layers

import moekit as mk
from moekit.testing import check_gradients, ranks

from .test_parity import ALL_GATHER
from .tiny import BATCH, model

# --- Values ---------------------------------------------------------------------------


def loss_of(**changes):
    config, params = model(**changes)

    def loss(params, batch, *, mesh, via=None, recompute="none", overlap="none"):
        via = ALL_GATHER if via == "all_gather" else via
        block = mk.remat(partial(mk.model.transformer_block, overlap=overlap), recompute)
        return mk.next_token_loss(params, batch, config=config, via=via, block=block, mesh=mesh)

    return loss, params


@pytest.mark.parametrize(
    "layout",
    [
        dict(ep=2, overlap="two_batch", accumulate=2),
        dict(edp=2, ep=2, overlap="two_batch", recompute="block"),
        dict(ep=4, overlap="two_batch", rows=[3, 0, 12, 1], recompute=("ffn",)),
        dict(ep=2, overlap="two_batch", via="all_gather"),
        dict(edp=2, ep=2, overlap="shared", accumulate=2, recompute="block"),
        dict(ep=2, overlap="shared", rows=[0, 16]),
    ],
    ids=lambda layout: "-".join(map(str, layout.values())),
)
def test_a_model_has_the_loss_and_gradients_of_one_process_without_overlap(layout):
    check_gradients(*loss_of(), BATCH, [layout])


def test_balance_over_all_ranks_is_that_of_whole_layers():
    loss, params = loss_of(balance_population="batch", balance_weight=3.0)
    check_gradients(loss, params, BATCH, [dict(edp=2, ep=2, overlap="two_batch")])


@pytest.mark.parametrize(
    ("via", "n_tokens", "recompute", "room"),
    [
        ("rowwise", [5, 7], True, None),
        ("rowwise", [0, 9, 1, 3], False, 5),  # room for the larger half alone
        ("all_to_all", [1, 0], True, None),
    ],
)
def test_layers_in_two_batches_give_what_whole_ones_give(via, n_tokens, recompute, room):
    """Both halves of all layers go through the same buffers."""
    run = partial(ranks(len(n_tokens)), layers, kernels="torch", dtype=torch.float64, n_tokens=n_tokens)
    got = run(via=via, recompute=recompute, overlap="two_batch", room=room)
    want = run(via="all_to_all", recompute=False)
    for mine, theirs in zip(got, want, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


def test_ranks_that_are_late_change_no_bit_of_two_batches():
    assert all(ranks(2)(hurried, None, 5, overlap="two_batch"))


# --- Choice ---------------------------------------------------------------------------


def chosen(seconds):
    """Return what this rank is told of functions that take as long as ``seconds`` says, by rank."""
    mesh = mk.make_mesh(edp=2, ep=2, device="cpu")
    mine = seconds[dist.get_rank()]
    functions = {name: partial(time.sleep, of_rank) for name, of_rank in mine.items()}
    run = mk.overlap.fastest(functions, rounds=3, mesh=mesh)
    for _ in range(8):
        run()
    return run.choice.name, run.choice.seconds


def test_all_ranks_choose_what_is_fastest_on_the_slowest_of_them():
    seconds = [dict(none=0.01, two_batch=0.001)] * 3 + [dict(none=0.01, two_batch=0.15)]
    names, times = zip(*ranks(4)(chosen, seconds), strict=True)
    assert set(names) == {"none"}
    assert all(x == times[0] for x in times) and times[0]["two_batch"] >= 0.15 > times[0]["none"] >= 0.01


def refused():
    """Return what is said of functions to choose from without a mesh, and of one, which is no choice."""
    assert mk.overlap.fastest({"none": int}).choice is None
    with pytest.raises(ValueError) as error:
        mk.overlap.fastest({"none": int, "two_batch": int})
    return str(error.value)


def test_ranks_without_a_mesh_are_refused_as_each_might_choose_another():
    says = "fastest needs a mesh of all that call it, to choose alike on each of 2 ranks, got mesh=None"
    assert all(text.startswith(says) for text in ranks(2)(refused))
