import itertools
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

import moekit as mk
from moekit.corpora import corpus_of_tokens
from moekit.data import Loader, pack, sample_order
from moekit.testing import ranks

EOS = 0
TENSORS = ("tokens", "targets", "mask", "documents", "sample_ids")


def a_corpus(*documents, last_ends=True):
    ids = [i for document in documents for i in (*document, EOS)]
    return corpus_of_tokens(
        {"a": np.array(ids if last_ends else ids[:-1], np.uint16)}, eos=EOS, vocab_size=2**16
    )


def numbered(n_tokens, every=7):
    """A corpus whose token at position i is i, but for the ends of documents."""
    ids = np.arange(1, n_tokens + 1, dtype=np.uint16)
    ids[every - 1 :: every] = EOS
    return corpus_of_tokens({"a": ids}, eos=EOS, vocab_size=2**16)


def take(loader, n):
    return list(itertools.islice(loader, n))


def joined(batches):
    return {name: torch.cat([getattr(batch, name) for batch in batches]) for name in TENSORS}


def assert_equal(a, b):
    for name in TENSORS:
        assert torch.equal(a[name], b[name]), name


# --- Packing

documents = st.lists(st.lists(st.integers(1, 9), max_size=20), min_size=1, max_size=8)


@given(documents, st.integers(1, 12), st.booleans(), st.booleans())
def test_packing_makes_each_pair_within_a_document_a_target_once(documents, seq_len, pad, last_ends):
    ids = [i for document in documents for i in (*document, EOS)]
    # Every pair of neighbours of one document, by value and in order, is what there is to learn.
    pairs = [pair for pair in itertools.pairwise(ids if last_ends else ids[:-1]) if pair[0] != EOS]
    try:
        corpus = a_corpus(*documents, last_ends=last_ends)
        samples = pack(corpus, seq_len, pad=pad)
    except ValueError as error:
        assert "needs" in str(error)
        n = len(ids) - (not last_ends)
        assert EOS not in ids[:n] or (not pairs if pad else n <= seq_len)
        return
    batch = mk.batch.make_batch(
        *torch.from_numpy(np.stack([samples.row(i) for i in range(len(samples))])).unbind(1),
        torch.arange(len(samples)),
    )
    assert (
        list(zip(batch.tokens[batch.mask].tolist(), batch.targets[batch.mask].tolist(), strict=True)) == pairs
    )
    assert batch.tokens.shape == (len(samples), seq_len)
    for row in batch.documents:
        real = row[row >= 0]
        assert torch.equal(real, row[: len(real)])  # padding is behind
        steps = real.diff()
        assert not len(real) or (real[0] == 0 and bool(((steps == 0) | (steps == 1)).all()))
    if pad:
        assert int(batch.documents.max()) == 0  # one document a row


def test_windows_hold_documents_that_are_numbered_anew_in_each_row():
    samples = pack(a_corpus([1, 2], [3], [4, 5, 6]), 4)
    assert samples.row(0).tolist() == [[1, 2, 0, 3, 0], [0, 0, 0, 1, 1]]
    assert samples.row(1).tolist() == [[0, 4, 5, 6, 0], [0, 1, 1, 1, 1]]
    assert len(samples) == 2
    assert pack(a_corpus([1, 2], [3], [4, 5]), 4).row(1).tolist() == [[0, 4, 5, 0, 0], [0, 1, 1, 1, -1]]


def test_padded_rows_hold_one_document_or_a_piece_of_it():
    samples = pack(a_corpus([1, 2], [], [3, 4, 5, 6, 7]), 4, pad=True)
    assert [samples.row(i).tolist() for i in range(len(samples))] == [
        [[1, 2, 0, 0, 0], [0, 0, 0, -1, -1]],
        [[3, 4, 5, 6, 7], [0, 0, 0, 0, 0]],
        [[7, 0, 0, 0, 0], [0, 0, -1, -1, -1]],
    ]


def test_a_corpus_shorter_than_a_sample_is_refused():
    with pytest.raises(ValueError, match="corpus of seq_len \\+ 1 tokens, got seq_len=4 and 4 tokens"):
        pack(a_corpus([1, 2, 3]), 4)
    assert len(pack(a_corpus([1, 2, 3]), 3)) == 1
    assert len(pack(a_corpus([1, 2, 3]), 4, pad=True)) == 1
    with pytest.raises(ValueError, match="needs a document of two tokens, got 2 documents of one"):
        pack(a_corpus([], []), 4, pad=True)
    with pytest.raises(ValueError, match="needs seq_len >= 1"):
        pack(a_corpus([1, 2, 3]), 0)


def test_rows_of_a_mapped_file_are_read_where_they_stand(tmp_path):
    path = tmp_path / "a.npy"
    np.save(path, np.arange(100, dtype=np.uint16))
    corpus = corpus_of_tokens({"a": np.load(path, mmap_mode="r")}, eos=0, vocab_size=100)
    samples = pack(corpus, 9)
    with open(path, "r+b") as file:  # after the check: a copy made by now would not see it
        file.seek(-2, 2)
        file.write(b"\x07\x00")
    assert samples.row(10)[0].tolist() == [*range(90, 99), 7]


# --- Order


@given(st.integers(1, 200), st.integers(0, 2**32 - 1), st.integers(0, 5))
def test_an_epoch_has_every_sample_once(n, seed, epoch):
    assert sorted(sample_order(n, seed=seed, epoch=epoch)) == list(range(n))


def test_the_order_is_this_one_whatever_the_version_of_numpy():
    assert sample_order(8, seed=0, epoch=0).tolist() == [3, 7, 4, 0, 2, 6, 5, 1]
    assert sample_order(8, seed=0, epoch=1).tolist() == [0, 5, 6, 1, 3, 2, 4, 7]
    assert sample_order(8, seed=1, epoch=0).tolist() == [6, 3, 7, 1, 4, 0, 2, 5]


# --- Loader


@settings(max_examples=25)
@given(
    st.integers(20, 60), st.integers(1, 4), st.sampled_from([1, 2, 3, 4, 6, 8]), st.booleans(), st.booleans()
)
def test_any_number_of_ranks_yields_the_same_global_batches(n_tokens, per_rank, n_ranks, pad, shuffle):
    samples = pack(numbered(n_tokens), 5, pad=pad)
    batch_size = per_rank * n_ranks
    alone = take(Loader(samples, batch_size, seed=3, shuffle=shuffle), 3)
    parts = [
        take(Loader(samples, batch_size, seed=3, shuffle=shuffle, part=(rank, n_ranks)), 3)
        for rank in range(n_ranks)
    ]
    for step, batch in enumerate(alone):
        assert {len(part[step].tokens) for part in parts} == {per_rank}
        assert_equal(joined([part[step] for part in parts]), joined([batch]))


@settings(max_examples=8)  # each loader ends a thread, which takes 0.1 s
@example(3, 1, 4, False)
@example(5, 4, 2, False)
@given(st.integers(0, 12), st.sampled_from([1, 2, 4, 8]), st.sampled_from([1, 2, 4, 8]), st.booleans())
def test_resume_continues_with_the_exact_next_sample_on_any_number_of_ranks(step, before, after, pad):
    samples = pack(numbered(90), 5, pad=pad)  # 18 samples and more: twelve steps of 8 span epochs
    alone = joined(take(Loader(samples, 8, seed=1), step + 3))
    loaders = [Loader(samples, 8, seed=1, part=(rank, before)) for rank in range(before)]
    for loader in loaders:
        take(loader, step)
    states = [loader.state_dict() for loader in loaders]
    assert all(state == states[0] for state in states)  # whatever each thread has made ahead
    resumed = []
    for rank in range(after):
        loader = Loader(samples, 8, seed=1, part=(rank, after))
        loader.load_state_dict(json.loads(json.dumps(states[0])))
        resumed.append(take(loader, 3))
    rest = joined([batch for three in zip(*resumed, strict=True) for batch in three])
    assert_equal(rest, {name: x[8 * step :] for name, x in alone.items()})


def test_resume_with_another_batch_size_repeats_and_loses_nothing():
    samples = pack(numbered(90), 5)
    loader = Loader(samples, 4)
    first = take(loader, 3)
    other = Loader(samples, 6)
    other.load_state_dict(loader.state_dict())
    rest = take(other, 4)
    assert_equal(joined([*first, *rest]), joined(take(Loader(samples, 12), 3)))


def test_tokens_are_counted_over_passes_and_batch_sizes():
    samples = pack(numbered(90), 5)  # 18
    loader = Loader(samples, 4, part=(1, 2))
    take(loader, 6)  # of all ranks 24
    other = Loader(samples, 6)
    assert other.n_tokens == 0
    other.load_state_dict(loader.state_dict())
    take(other, 1)
    assert loader.n_tokens == 24 * 5 and other.n_tokens == 30 * 5


def test_a_batch_that_spans_epochs_drops_no_sample():
    samples = pack(numbered(36), 5)  # 7 samples
    ids = joined(take(Loader(samples, 4, seed=5), 7))["sample_ids"].view(4, 7)
    for epoch, order in enumerate(ids):
        assert torch.equal(order, torch.from_numpy(sample_order(7, seed=5, epoch=epoch)))
    assert len({tuple(order.tolist()) for order in ids}) > 1


def test_sample_ids_name_the_rows_of_the_corpus():
    samples = pack(numbered(50), 5)
    for batch in take(Loader(samples, 3), 4):
        for tokens, i in zip(batch.tokens, batch.sample_ids, strict=True):
            assert tokens.tolist() == samples.row(int(i))[0, :-1].tolist()


def test_a_batch_larger_than_the_corpus_goes_around_it():
    samples = pack(numbered(11), 5)  # 2 samples
    (batch,) = take(Loader(samples, 7, shuffle=False), 1)
    assert batch.sample_ids.tolist() == [0, 1, 0, 1, 0, 1, 0]


@pytest.mark.parametrize("n_ranks", [1, 2, 4])
def test_a_pass_has_every_sample_once_and_can_be_made_again(n_ranks):
    samples = pack(numbered(36), 5)  # 7 samples
    loaders = [Loader(samples, 4, shuffle=False, epochs=1, part=(rank, n_ranks)) for rank in range(n_ranks)]
    for _ in range(2):
        passes = [list(loader) for loader in loaders]
        ids = torch.cat([batch.sample_ids for step in zip(*passes, strict=True) for batch in step])
        assert ids.tolist() == [0, 1, 2, 3, 4, 5, 6, -1]
    padding = passes[-1][-1]
    assert not padding.mask[-1].any() and bool((padding.documents[-1] == -1).all())


def test_ranks_that_do_not_divide_the_batch_are_refused_unless_told():
    samples = pack(numbered(50), 5)
    with pytest.raises(ValueError, match=r"got batch_size=6 and 4 ranks; take 8, or pass uneven=True"):
        Loader(samples, 6, part=(0, 4))
    with pytest.raises(ValueError, match=r"got batch_size=2 and 4 ranks"):
        Loader(samples, 2, part=(0, 4))
    for batch_size in (6, 2):
        parts = [take(Loader(samples, batch_size, uneven=True, part=(rank, 4)), 2) for rank in range(4)]
        assert {len(part[0].tokens) for part in parts} == {batch_size // 4, batch_size // 4 + 1}
        for step, batch in enumerate(take(Loader(samples, batch_size), 2)):
            assert_equal(joined([part[step] for part in parts]), joined([batch]))


@pytest.mark.parametrize(
    "wrong",
    [
        {"batch_size": 0},
        {"seed": -1},
        {"seed": 2**32},
        {"epochs": 0},
        {"prefetch": 0},
        {"part": (4, 4)},
        {"part": (-1, 4)},
    ],
)
def test_arguments_out_of_range_are_refused(wrong):
    with pytest.raises(ValueError, match="Loader needs batch_size, prefetch and epochs >= 1"):
        Loader(pack(numbered(50), 5), **{"batch_size": 4, **wrong})


def test_the_state_of_another_corpus_packing_or_order_is_refused():
    corpus = numbered(50)
    state = Loader(pack(corpus, 5), 4, seed=1).state_dict()
    others = {
        "corpus": Loader(pack(numbered(51), 5), 4, seed=1),
        "seq_len": Loader(pack(corpus, 6), 4, seed=1),
        "pad": Loader(pack(corpus, 5, pad=True), 4, seed=1),
        "seed": Loader(pack(corpus, 5), 4, seed=2),
        "shuffle": Loader(pack(corpus, 5), 4, seed=1, shuffle=False),
    }
    for key, loader in others.items():
        with pytest.raises(ValueError, match=rf"needs a state of the same corpus.*got {{'{key}': "):
            loader.load_state_dict(state)
    for broken in ({}, {key: x for key, x in state.items() if key != "sample"}):
        with pytest.raises(ValueError, match="'sample': None"):
            Loader(pack(corpus, 5), 4, seed=1).load_state_dict(broken)


def test_ranks_of_a_mesh_take_the_rows_of_one_batch_in_order():
    def rows(edp, ep):
        mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu")
        batch = next(Loader(pack(numbered(90), 5), 8, mesh=mesh))
        return batch.sample_ids, int(mk.count_tokens(batch, mesh=mesh).n_targets)

    alone = next(Loader(pack(numbered(90), 5), 8))
    for edp, ep in ((2, 2), (1, 4)):
        ids, n_targets = zip(*ranks(4)(rows, edp, ep), strict=True)
        assert torch.equal(torch.cat(ids), alone.sample_ids)
        assert set(n_targets) == {int(mk.count_tokens(alone).n_targets)}
    with pytest.raises(ValueError, match="needs a batch_size that its ranks divide"):
        Loader(pack(numbered(90), 5), 9, part=(0, 2))


def test_tokens_are_counted_over_the_ranks_that_the_batch_was_drawn_for():
    def refusals(edp, ep, cp):
        mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu")
        drawn_for = dict(context=mk.mesh.context_mesh(mesh, cp), mesh=mesh)
        whole, drawn = (next(Loader(pack(numbered(90), 8), 8, **on)) for on in ({}, drawn_for))
        mk.count_tokens(drawn, mesh=mesh)
        said = []
        for batch, ranks_counted in ((drawn, None), (whole, mesh)):
            try:
                mk.count_tokens(batch, mesh=ranks_counted)
            except ValueError as e:
                said.append(str(e).partition("; ")[0].partition("drawn for, ")[2])
        return said

    share = "of {} ranks that share it, got {}".format
    for layout in ((2, 2, 1), (2, 2, 2)):
        assert ranks(4)(refusals, *layout) == [[share(4, 1), share(1, 4)]] * 4
    part = next(Loader(pack(numbered(90), 8), 8, part=(1, 4)))
    assert mk.count_tokens(part).n_ranks is None  # whoever names a part counts as they like


def test_a_slow_thread_of_before_does_not_move_the_loader_after_it():
    loader = Loader(pack(numbered(90), 5), 4)
    next(loader)
    old = loader.source
    state = loader.state_dict()
    loader.load_state_dict(state)
    old.next()  # as a thread would that has not stopped yet
    assert loader.state_dict() == state
    ids = joined(take(loader, 4))["sample_ids"]  # more than are made ahead
    assert torch.equal(ids[:14], torch.from_numpy(sample_order(18, seed=0, epoch=0)[4:]))


def test_no_thread_is_left_when_the_interpreter_ends():
    program = """
import atexit, threading
atexit.register(lambda: print(threading.active_count()))  # after those that are registered later
from moekit import corpora, data
corpus = corpora.corpus_of_text({"a": "text"}, corpora.byte_tokenizer())
loader = data.Loader(data.pack(corpus, 2), 1, epochs=1)
print(len(list(loader)))
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env=env, check=True
    )
    assert done.stdout.split() == ["2", "1"]
