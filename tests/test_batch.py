import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils._pytree import tree_leaves

import moekit as mk
from moekit.batch import count_tokens, make_batch, split_batch
from moekit.testing import ranks

TOKENS = torch.tensor([[5, 6, 9, 7, 8], [3, 4, 9, 0, 0]])
DOCUMENTS = torch.tensor([[0, 0, 0, 1, 1], [0, 0, 0, -1, -1]])


def a_batch(rows=slice(None)):
    return make_batch(TOKENS[rows], DOCUMENTS[rows], torch.arange(2)[rows])


def test_each_position_predicts_the_next_token_of_its_own_document():
    batch = a_batch()
    assert batch.tokens.tolist() == [[5, 6, 9, 7], [3, 4, 9, 0]]
    assert batch.targets.tolist() == [[6, 9, 7, 8], [4, 9, 0, 0]]
    assert batch.mask.tolist() == [[True, True, False, True], [True, True, False, False]]
    assert batch.documents.tolist() == [[0, 0, 0, 1], [0, 0, 0, -1]]


def test_totals_are_counted_anew_and_leave_padding_out():
    batch = count_tokens(count_tokens(a_batch()))
    assert (int(batch.n_targets), int(batch.n_tokens)) == (5, 7)


def test_totals_are_the_same_on_every_rank_and_layout_with_a_rank_without_rows():
    def totals(edp, ep):
        mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu")
        rank = torch.distributed.get_rank()
        batch = count_tokens(a_batch(slice(rank, rank + 1)), mesh=mesh)  # ranks 2 and 3 have no row
        again = count_tokens(batch, mesh=mesh)
        return [int(x) for x in (batch.n_targets, batch.n_tokens, again.n_targets, again.n_tokens)]

    for edp, ep in ((4, 1), (2, 2), (1, 4)):
        assert ranks(4)(totals, edp, ep) == [[5, 7, 5, 7]] * 4


@given(st.integers(1, 4), st.integers(0, 3))
def test_chunks_put_together_are_the_batch_and_share_its_totals(n, rows):
    tokens = torch.arange(n * rows * 3).view(n * rows, 3)
    batch = count_tokens(make_batch(tokens, torch.zeros_like(tokens), tokens[:, 0]))
    chunks = split_batch({"batch": batch, "lr": 0.5}, n)
    assert len(chunks) == n and all(chunk["lr"] == 0.5 for chunk in chunks)
    for name in ("tokens", "targets", "mask", "documents", "sample_ids"):
        parts = [getattr(chunk["batch"], name) for chunk in chunks]
        assert {len(part) for part in parts} == {rows}
        assert torch.equal(torch.cat(parts), getattr(batch, name))
    assert all(chunk["batch"].n_targets is batch.n_targets for chunk in chunks)


@pytest.mark.parametrize("n", [3, 0])
def test_a_split_that_leaves_a_rest_says_which_tensors_it_cannot_split(n):
    with pytest.raises(ValueError, match=rf"got n={n} and \.tokens \(2, 4\)"):
        split_batch(a_batch(), n)


def test_a_row_of_one_token_is_refused():
    with pytest.raises(
        ValueError, match=r"needs tokens and documents of one shape \(b, s\+1\).*got \(2, 1\)"
    ):
        make_batch(TOKENS[:, :1], DOCUMENTS[:, :1], torch.arange(2))


def test_every_tensor_of_a_batch_moves_to_the_device():
    tensors = tree_leaves(count_tokens(a_batch()).to("meta"))
    assert [x.device.type for x in tensors] == 7 * ["meta"]
