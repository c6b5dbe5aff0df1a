"""Routing as data: recorded, written, read and taken again, and drawn with a given skew."""

from dataclasses import replace
from functools import partial
from itertools import permutations
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, strategies as st
from reference import close, draw, flat, packed_batch, refuses, small_config
from safetensors import safe_open
from safetensors.torch import save_file

import moekit as mk
from moekit import balance
from moekit.balance import (
    Recording,
    dirichlet_shares,
    draw_experts,
    keep_routing,
    read_recording,
    record_step,
    recorded_rows,
    replay,
    write_recording,
)
from moekit.plan import split_layers

CONFIG = small_config(n_layers=3)  # two of them with experts
PARAMS = mk.init_params(CONFIG, dtype=torch.float64)
OTHERS = mk.init_params(CONFIG, dtype=torch.float64, seed=1)  # whose routers choose otherwise
BATCH = packed_batch(b=4)
KEY = mk.random.make_key(5)


def step(params, batch, *, n=1, block=mk.model.transformer_block):
    """Return loss, statistics and gradients of a batch in ``n`` micro-batches."""

    def loss(params, batch):
        return mk.next_token_loss(params, batch, config=CONFIG, block=block)

    (value, stats), grads = mk.accumulate(mk.value_and_grad(loss, has_aux=True), n)(params, batch)
    return value, stats, grads


def record(params=PARAMS, batch=BATCH, *, n=1, recompute="none"):
    """Return the recording of a step, and its statistics."""
    kept = []
    block = keep_routing(mk.remat(mk.model.transformer_block, recompute), kept)
    _, stats, _ = step(params, batch, n=n, block=block)
    return record_step(kept, batch, config=CONFIG), stats


# --- Recorded and taken again ---------------------------------------------------------


def test_a_recording_holds_the_ids_of_every_row_layer_and_position():
    recording, _ = record()
    _, routings = mk.model.forward(PARAMS, BATCH.tokens, config=CONFIG, documents=BATCH.documents)
    assert recording.expert_ids.dtype == torch.uint8 and recording.expert_ids.shape == (1, 4, 2, 7, 2)
    for layer, routing in enumerate(routings):
        ids = recording.expert_ids[0, :, layer].long()
        assert torch.equal(ids, routing.expert_ids.view(4, 7, 2))
    assert torch.equal(recording.sample_ids, BATCH.sample_ids[None])
    assert str(recording) == (
        "Recording(expert_ids=uint8 (1, 4, 2, 7, 2), sample_ids=int64 (1, 4), n_experts=6)"
    )


@pytest.mark.parametrize(("n", "recompute"), [(2, "none"), (4, "block"), (2, ("ffn",))])
def test_micro_batches_and_recomputation_are_not_in_a_recording(n, recompute):
    once, parts = record()[0], record(n=n, recompute=recompute)[0]
    assert torch.equal(once.expert_ids, parts.expert_ids)


@pytest.mark.parametrize("n", [1, 4])
def test_a_replay_gives_the_same_counts_to_the_token_in_any_micro_batches(n):
    recording, stats = record()
    again = step(OTHERS, replay(recording, 0, BATCH, config=CONFIG), n=n)[1]
    assert torch.equal(again["counts"], stats["counts"])
    assert not torch.equal(step(OTHERS, BATCH)[1]["counts"], stats["counts"])


def test_nothing_that_records_or_replays_reads_a_value():
    config = replace(CONFIG, d_expert=8, d_shared=0)
    params = mk.init_params(config, dtype=torch.bfloat16, device="meta")  # which have none
    batch, kept = BATCH.to("meta"), []
    for block in (keep_routing(mk.model.transformer_block, kept), mk.model.transformer_block):
        loss = partial(mk.next_token_loss, config=config, block=block)
        mk.accumulate(mk.value_and_grad(loss, has_aux=True), 2)(params, batch)
        batch = replace(batch, expert_ids=record_step(kept, batch, config=config).expert_ids[0])
    assert batch.expert_ids.is_meta


def test_a_replay_of_what_routers_choose_changes_neither_loss_nor_gradients():
    value, _, grads = step(PARAMS, BATCH)
    again, _, same = step(PARAMS, replay(record()[0], 0, BATCH, config=CONFIG), n=2)
    close(again, value)
    for name, grad in flat(grads).items():
        close(flat(same)[name], grad)


def test_a_pipeline_replays_in_each_of_its_stages():
    recording, stats = record()
    stages = split_layers(CONFIG, 3)
    grad_fn = mk.pipeline(
        [partial(mk.model.stage_loss, config=CONFIG, stage=stage) for stage in stages],
        schedule=mk.schedules.interleaved(1, 2, 3),
        boundary=lambda part: torch.empty(*part.tokens.shape, CONFIG.d_model, dtype=torch.float64),
    )
    (_, again), _ = grad_fn(OTHERS, replay(recording, 0, BATCH, config=CONFIG))
    assert torch.equal(again["counts"], stats["counts"])


def test_rows_are_found_by_their_samples_in_any_order():
    recording, _ = record()
    rows = torch.tensor([2, 0])
    part = mk.batch.make_batch(
        *(torch.cat([x, x[:, :1]], 1)[rows] for x in (BATCH.tokens, BATCH.documents)), BATCH.sample_ids[rows]
    )
    assert torch.equal(replay(recording, 0, part, config=CONFIG).expert_ids, recording.expert_ids[0][rows])


# --- Files ----------------------------------------------------------------------------


def a_recording(*, n=2, b=3, n_layers=2, s=4, k=2, n_experts=6, seed=0):
    ids = torch.rand(n, b, n_layers, s, n_experts, generator=torch.Generator().manual_seed(seed))
    dtype = torch.uint8 if n_experts <= 256 else torch.uint16
    ids = ids.topk(k).indices.to(dtype)
    return Recording(expert_ids=ids, sample_ids=torch.arange(n * b).view(n, b), n_experts=n_experts)


def steps_of(recording):
    return [
        replace(recording, expert_ids=ids[None], sample_ids=samples[None])
        for ids, samples in zip(recording.expert_ids, recording.sample_ids, strict=True)
    ]


@pytest.mark.parametrize("n_experts", [6, 256, 257, 70_000])
def test_what_is_read_is_what_was_written_in_the_smallest_dtype(n_experts, tmp_path):
    kept, batch = [], packed_batch(b=2, s=4)
    config = replace(CONFIG, n_experts=n_experts)
    x = torch.zeros(8, 1)
    ids = torch.tensor([[n_experts - 1, 0]]).repeat(8, 1)
    block = keep_routing(lambda: (x, mk.route(torch.zeros(1, n_experts), x, top_k=2, expert_ids=ids)), kept)
    for _ in range(config.n_moe_layers):
        block()
    recording = record_step(kept, batch, config=config)
    file = tmp_path / "folder" / "routing.safetensors"
    write_recording(file, [recording, recording])
    read = read_recording(file)
    assert read.n_experts == n_experts and read.expert_ids.shape == (2, 2, 2, 4, 2)
    wanted = {6: torch.uint8, 256: torch.uint8, 257: torch.uint16, 70_000: torch.uint32}[n_experts]
    assert read.expert_ids.dtype == wanted and (read.expert_ids.long() == ids[0]).all()
    assert torch.equal(read.sample_ids, batch.sample_ids.repeat(2, 1))
    with safe_open(file, framework="pt") as raw:
        sizes = raw.metadata()
    assert sizes == dict(
        format="moekit routing 2", n_experts=str(n_experts), top_k="2", n_layers="2", tokens="8",
        rank="0", n_ranks="1",
    )  # fmt: skip


def files_of_ranks(folder, whole, *ends):
    """Write a recording as ranks would, of which each has the rows up to its end; return their files."""

    def write(rank):
        rows = slice(ends[rank - 1] if rank else 0, ends[rank])
        mine = replace(whole, expert_ids=whole.expert_ids[:, rows], sample_ids=whole.sample_ids[:, rows])
        write_recording(path := folder / f"{rank} of {len(ends)}", steps_of(mine), mesh=rank_mesh(rank))
        return path

    def rank_mesh(rank):
        return SimpleNamespace(
            ndim=1, mesh_dim_names=("dp",), get_local_rank=lambda: rank, size=lambda: len(ends)
        )

    return [write(rank) for rank in range(len(ends))]


def test_the_files_of_ranks_are_put_together_by_rows_in_whichever_order_they_come(tmp_path, unchecked):
    whole = a_recording(b=4)
    files = files_of_ranks(tmp_path, whole, 1, 2, 4)
    for order in permutations(files):
        read = read_recording(*order)
        assert torch.equal(read.expert_ids, whole.expert_ids)
        assert torch.equal(read.sample_ids, whole.sample_ids)


def test_a_file_of_a_rank_that_is_missing_or_there_twice_is_refused(tmp_path, unchecked):
    a, b, c = files_of_ranks(tmp_path, a_recording(b=4), 1, 2, 4)
    (other, _) = files_of_ranks(tmp_path, a_recording(b=4), 2, 4)
    for files, says in (
        ([a, c], "needs one file of each of 3 ranks, got none of ranks [1] and several of ranks []"),
        ([a, b, b], "of 3 ranks, got none of ranks [2] and several of ranks [1]"),
        ([c, a, b, a], "of 3 ranks, got none of ranks [] and several of ranks [0]"),
        ([a], "got none of ranks [1, 2] and several of ranks []; write_recording takes the mesh"),
        ([other, b, c], "needs files of as many ranks, got some of [2, 3] ranks"),
    ):
        with refuses(says):
            read_recording(*files)


def test_files_that_are_no_recordings_are_refused(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with refuses(f"read_recording needs a safetensors file, got {file}"):
        read_recording(file)
    with pytest.raises(FileNotFoundError):
        read_recording(tmp_path / "none")
    with refuses(f"read_recording needs files of write_recording, got the folder {tmp_path}"):
        read_recording(tmp_path)
    good = a_recording()
    tensors = dict(expert_ids=good.expert_ids, sample_ids=good.sample_ids)
    about = dict(format="moekit routing 2", n_experts="6", rank="0", n_ranks="1")
    for change, metadata, says in (
        ({}, {}, "with format='moekit routing 2' in its metadata, got"),
        (dict(expert_ids=None), about, "and ['sample_ids']"),
        (dict(expert_ids=good.expert_ids.long()), about, "unsigned expert_ids (n, b, l, s, k)"),
        (dict(expert_ids=good.expert_ids[0]), about, "got torch.uint8 (3, 2, 4, 2) and torch.int64 (2, 3)"),
        (dict(sample_ids=good.sample_ids[:, :2].clone()), about, "(2, 3, 2, 4, 2) and torch.int64 (2, 2)"),
        (dict(sample_ids=good.sample_ids.float()), about, "and torch.float32 (2, 3)"),
        ({}, about | dict(n_experts="six"), "needs n_experts, rank and n_ranks in a file's metadata, got"),
        ({}, dict(format="moekit routing 2"), "needs n_experts, rank and n_ranks in a file's metadata, got"),
        ({}, about | dict(rank="-1"), "needs n_experts, rank and n_ranks in a file's metadata, got"),
        ({}, about | dict(format="moekit routing 1"), "with format='moekit routing 2' in its metadata, got"),
        ({}, about | dict(n_experts="5"), "expert ids below n_experts=5, got 5"),
    ):
        changed = {name: x for name, x in (tensors | change).items() if x is not None}
        save_file(changed, file, metadata=metadata)
        with refuses(says):
            read_recording(file)


def test_recordings_that_do_not_fit_together_are_refused(tmp_path, unchecked):
    with refuses(
        "write_recording needs recordings of the same (n_experts, rows, layers, positions, top_k), "
    ):
        write_recording(tmp_path / "file", [a_recording(), a_recording(s=5)])
    with refuses("write_recording needs a step at least, got none"):
        write_recording(tmp_path / "file", [])
    with refuses("write_recording needs a sequence of recordings, got one; pass [recording]", TypeError):
        write_recording(tmp_path / "file", a_recording())
    files = [files_of_ranks(tmp_path / f"{n}", a_recording(n=n, b=6), 3, 6)[i] for i, n in enumerate((2, 1))]
    with refuses("(n_experts, steps, layers, positions, top_k), got [(6, 1, 2, 4, 2), (6, 2, 2, 4, 2)]"):
        read_recording(*files)
    with refuses("read_recording needs a path at least, got none"):
        read_recording()


# --- What does not fit ----------------------------------------------------------------


def test_ids_of_another_batch_or_of_two_steps_are_refused():
    kept = []
    for _ in range(2):  # as if a block that is recomputed kept them again
        step(PARAMS, BATCH, block=keep_routing(mk.model.transformer_block, kept))
    with refuses("got 4 of 112 tokens together; clear the list before each step, and let keep_routing stand"):
        record_step(kept, BATCH, config=CONFIG)
    with refuses("record_step needs the ids of 4 x 7 tokens in micro-batches, each 2 layers with top_k=2"):
        record_step([], BATCH, config=CONFIG)
    with refuses("record_step needs a model with experts, got 3 dense layers"):
        record_step([], BATCH, config=small_config(n_layers=3, n_dense_layers=3))
    with refuses("record_step needs the ids of 2 x 7 tokens"):
        record_step(kept[:2], mk.batch.split_batch(BATCH, 2)[0], config=CONFIG)
    split = replace(BATCH, positions=torch.arange(7).repeat(4, 1))
    with refuses("record_step needs the context that its batch is split over, and none for whole rows"):
        record_step(kept[:2], split, config=CONFIG)


def test_a_replay_of_other_steps_samples_or_lengths_is_refused():
    recording, _ = record()
    with refuses("replay needs a step from 0 to 0, which were recorded, got 1"):
        replay(recording, 1, BATCH, config=CONFIG)
    other = replace(BATCH, sample_ids=torch.tensor([0, 9, 1, 7]))
    with refuses("replay needs the samples of step 0, [0, 1, 2, 3], got [9, 7], which are not among them"):
        replay(recording, 0, other, config=CONFIG)
    with refuses("replay needs rows of 7 positions, as recorded, got a batch with 5"):
        replay(recording, 0, packed_batch(b=4, s=5), config=CONFIG)
    split = replace(BATCH, positions=torch.arange(4, 11).repeat(4, 1))
    with refuses("replay needs rows of 7 positions, as recorded, got a batch with position 10"):
        replay(recording, 0, split, config=CONFIG)


def test_a_recording_of_another_model_is_refused_where_it_is_taken_again():
    recording, _ = record()
    got = "got {'n_experts': 6, 'top_k': 2, 'n_moe_layers': 2}"
    for change, want in (
        (dict(n_experts=9), "{'n_experts': 9, 'top_k': 2, 'n_moe_layers': 2}"),  # in which all ids exist
        (dict(n_experts=4), "{'n_experts': 4, 'top_k': 2, 'n_moe_layers': 2}"),
        (dict(top_k=1), "{'n_experts': 6, 'top_k': 1, 'n_moe_layers': 2}"),
        (dict(n_layers=2), "{'n_experts': 6, 'top_k': 2, 'n_moe_layers': 1}"),
    ):
        with refuses(f"replay needs a recording of a model like the one that takes it, {want}, {got}"):
            replay(recording, 0, BATCH, config=replace(CONFIG, **change))


def test_a_rank_of_a_context_without_rows_replays_none():
    half, none = torch.zeros(0, 4, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    split = mk.batch.make_batch(half.new_zeros(0, 5), half.new_zeros(0, 5), none)
    replayed = replay(record()[0], 0, replace(split, positions=half), config=CONFIG)
    assert replayed.expert_ids is not None and replayed.expert_ids.shape == (0, 2, 4, 2)


def test_ids_of_other_models_are_refused(unchecked):
    for ids, says in (
        (a_recording(n=1, b=4, s=7, n_layers=1).expert_ids[0], "(4, 2, 7, 2), got (4, 1, 7, 2)"),
        (a_recording(n=1, b=4, s=7, k=3).expert_ids[0], "(4, 2, 7, 2), got (4, 2, 7, 3)"),
        (a_recording(n=1, b=4, s=7, n_experts=9).expert_ids[0], "route needs expert_ids in [0, 6)"),
    ):
        with refuses(says):
            step(PARAMS, replace(BATCH, expert_ids=ids))
    replayed = replay(record()[0], 0, BATCH, config=CONFIG)
    for options in (dict(biases=torch.zeros(2, 6)), dict(assignment="random", key=KEY)):
        with refuses("route needs no assignment, key or bias with expert_ids"):
            mk.next_token_loss(PARAMS, replayed, config=CONFIG, **options)


# --- Rows of a recording --------------------------------------------------------------


def test_rows_are_those_that_ranks_and_micro_batches_would_have():
    recording = a_recording(n=2, b=8)
    rows = recorded_rows(recording, 1, ep=2, n_microbatches=2)
    assert rows.shape == (2, 2, 2, 6)
    for m, rank, layer in ((0, 0, 0), (1, 0, 1), (0, 1, 1), (1, 1, 0)):
        first = 4 * rank + 2 * m  # ranks take runs of four rows, micro-batches two of them
        ids = recording.expert_ids[1, first : first + 2, layer].long()
        assert rows[m, rank, layer].tolist() == torch.bincount(ids.flatten(), minlength=6).tolist()
    gap = balance.gerrymandering_gap(rows, 2)
    assert (gap.waited >= gap.seen).all()
    with refuses("recorded_rows needs a step from 0 to 1, which were recorded, got -1"):
        recorded_rows(recording, -1)
    with refuses("recorded_rows needs edp * ep * n_microbatches that divides 8 rows, got 1 * 3 * 1"):
        recorded_rows(recording, 0, ep=3)


# --- Skew -----------------------------------------------------------------------------


@pytest.mark.parametrize("concentration", [0.1, 2.0, 50.0])
@pytest.mark.parametrize("top_k", [1, 4])
def test_drawn_experts_differ_and_have_their_shares(concentration, top_k):
    shares = dirichlet_shares(concentration, 16)
    ids = draw_experts(shares, torch.arange(20_000), top_k=top_k, key=KEY)
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    got = torch.bincount(ids.flatten(), minlength=16) / ids.numel()
    wanted = shares.clamp(max=1 / top_k)
    over = shares > 1 / top_k
    wanted = wanted.where(over, wanted * (1 - wanted[over].sum()) / wanted[~over].sum())
    assert (got - wanted).abs().max() < 0.01
    unlike = (got - 1 / 16).abs().max()
    assert unlike > 0.05 if concentration < 1 else unlike < 0.2


def test_a_share_above_what_a_token_can_choose_goes_to_the_others_by_their_shares():
    ids = draw_experts(torch.tensor([9.0, 2.0, 1.0, 0.0]), torch.arange(9000), top_k=2, key=KEY)
    counts = torch.bincount(ids.flatten(), minlength=4)
    assert counts[0] == 9000 and counts[3] == 0
    assert abs(counts[1] / 9000 - 2 / 3) < 0.02


@given(st.integers(1, 9), st.integers(0, 2**31), st.floats(0.02, 20), st.data())
def test_experts_drawn_depend_on_key_and_token_alone_and_are_all_different(n_experts, seed, alpha, data):
    top_k = data.draw(st.integers(1, n_experts))
    shares = dirichlet_shares(alpha, n_experts, seed=seed) + 1e-9
    key, tokens = mk.random.make_key(seed), torch.arange(40).view(8, 5)
    ids = draw_experts(shares, tokens, top_k=top_k, key=key)
    assert ids.shape == (8, 5, top_k) and ids.min() >= 0 and ids.max() < n_experts
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()
    assert torch.equal(draw_experts(shares, tokens[3:5, 1:], top_k=top_k, key=key), ids[3:5, 1:])


def test_every_pair_of_experts_is_drawn_together():
    ids = draw_experts(torch.ones(6), torch.arange(6000), top_k=2, key=KEY)
    pairs = torch.zeros(6, 6).index_put_(tuple(ids.T), torch.tensor(1.0), accumulate=True)
    assert ((pairs + pairs.T)[~torch.eye(6, dtype=torch.bool)] > 300).all()  # of 400 each


def test_shares_that_cannot_be_are_refused():
    for shares in ([1.0, 0.0, 0.0], [1.0, -1.0, 1.0], [1.0], [float("inf"), 1.0, 1.0]):
        with refuses(
            "draw_experts needs shares (E,) of a finite sum, of which none is below 0 and top_k=2 are"
        ):
            draw_experts(torch.tensor(shares), torch.arange(3), top_k=2, key=KEY)
    for concentration, n_experts in ((0.0, 4), (float("inf"), 4), (1.0, 0)):
        with refuses("dirichlet_shares needs a positive, finite concentration and n_experts >= 1, got"):
            dirichlet_shares(concentration, n_experts)


# --- A layer --------------------------------------------------------------------------


def test_a_layer_goes_where_it_is_told_with_the_scores_of_those_experts(unchecked):
    x, router = draw(9, 5), draw(5, 8, seed=1)
    ids = draw_experts(dirichlet_shares(0.5, 8), torch.arange(9), top_k=3, key=KEY)
    routing = mk.route(router, x, top_k=3, expert_ids=ids.int(), score="sigmoid", normalize="none")
    assert torch.equal(routing.expert_ids, ids) and routing.expert_ids.dtype == torch.int64
    close(routing.weights, (x @ router).sigmoid().gather(1, ids))
    assert routing.counts.tolist() == torch.bincount(ids.flatten(), minlength=8).tolist()
    twice, far = ids.clone(), ids.clone()
    twice[4, 1], far[0, 0] = twice[4, 0], 8
    for wrong, says in (
        (ids[:8], "route needs expert_ids (9, 3), got (8, 3)"),
        (ids[:, :2], "route needs expert_ids (9, 3), got (9, 2)"),
        (ids.double(), "route needs expert_ids of an integer dtype, got torch.float64"),
        (twice, "those of a token all different, got 0 to 7, 1 of 9 tokens with one twice"),
        (far, "route needs expert_ids in [0, 8), those of a token all different, got 0 to 8, 0 of 9"),
    ):
        with refuses(says):
            mk.route(router, x, top_k=3, expert_ids=wrong)


def test_kernels_take_ids_as_plain_torch_does():
    x, router = (draw(n, 8, seed=n, dtype=torch.float32) for n in (9, 8))
    ids = draw_experts(torch.ones(8), torch.arange(9), top_k=3, key=KEY)
    experts = dict(gate_up=draw(8, 8, 8, dtype=torch.float32), down=draw(8, 4, 8, dtype=torch.float32))
    params = dict(router=router, experts=experts)
    want, got = (mk.moe(params, x, top_k=3, expert_ids=ids, kernels=kernels) for kernels in ("loop", "torch"))
    assert torch.equal(got[1].expert_ids, ids)
    close(got[0], want[0], 1e-5)
    fast = mk.route(router, x, top_k=3, expert_ids=ids, kernels="triton")
    close(fast.weights, want[1].weights, 1e-6)
    assert torch.equal(fast.expert_ids, ids) and torch.equal(fast.counts, want[1].counts)
