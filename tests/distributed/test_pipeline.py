"""Stages on different ranks give the loss, the statistics and every gradient of one process."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from reference import refuses
from torch.distributed.tensor import DTensor

import moekit as mk
from moekit import checkpoint, schedules
from moekit.context import split_context
from moekit.corpora import corpus_of_tokens
from moekit.data import Loader, pack
from moekit.plan import split_layers
from moekit.testing import ranks
from moekit.tree import named

from .tiny import BATCH, batch_of, model, rows_of

WHOLE = {  # name: (schedule, stages a rank)
    "gpipe": (schedules.gpipe, 1),
    "1f1b": (schedules.one_f_one_b, 1),
    "interleaved": (schedules.interleaved, 2),
}
SPLIT = {
    "zero-bubble": (schedules.zero_bubble, 1),
    "zero-bubble, interleaved": (partial(schedules.zero_bubble, n_per_rank=2), 2),
    "zbv": (schedules.zero_bubble_v, 2),
    "dualpipev": (schedules.dual_pipe_v, 2),
}
SCHEDULES = WHOLE | SPLIT


def setup(config, name, *, pp, edp, ep, n_microbatches, cp=1, recompute="none", mesh=None):
    """Return mesh, context, this rank's parameters and the function that gives its gradients."""
    make, n_per_rank = SCHEDULES[name]
    schedule = make(pp, n_microbatches)
    stages = split_layers(config, pp * n_per_rank)
    mesh = mk.make_mesh(pp=pp, edp=edp, ep=ep, device="cpu") if pp * edp * ep > 1 else None
    context = mk.mesh.context_mesh(mesh, cp)
    rank = mesh["pp"].get_local_rank() if mesh is not None and pp > 1 else 0
    inner = None if mesh is None else mesh["edp", "ep"]
    options = dict(mesh=inner, context=context, block=mk.remat(mk.model.transformer_block, recompute))
    functions = [partial(mk.model.stage_loss, config=config, stage=stage, **options) for stage in stages]
    mine = [stages[i] for i in schedule.stages_of(rank)]
    params = mk.init_params(config, dtype=torch.float64, stages=mine, mesh=mesh)
    grad_fn = mk.pipeline(
        functions,
        schedule=schedule,
        boundary=partial(empty, d=config.d_model),
        mesh=mesh["pp"] if pp > 1 else None,
    )
    return mesh, context, params, mk.data_parallel(grad_fn, mesh=mesh)


def on_rank(config, names, layout, batch, **options):
    """Return loss, statistics and gradients of this rank's stages, by schedule."""
    out = {}
    for name in names:
        mesh, context, params, grad_fn = setup(config, name, **layout)
        rank, n = mk.mesh.data_rank(mesh, context)
        size = len(batch.tokens) // n
        part = split_context(rows_of(batch, rank * size, (rank + 1) * size), context=context)
        part = replace(part, n_targets=batch.n_targets, n_tokens=batch.n_tokens)
        (loss, stats), grads = grad_fn(params, part, **options)
        full = {k: g.full_tensor() if isinstance(g, DTensor) else g for k, g in named(grads).items()}
        out[name] = loss, stats, full
    return out


def check(config, names, layout, *, batch=BATCH, **options):
    loss = partial(mk.next_token_loss, config=config)
    params = mk.init_params(config, dtype=torch.float64)
    n = layout["pp"] * layout["edp"] * layout["ep"]
    (want, want_stats), want_grads = mk.value_and_grad(loss, has_aux=True)(params, batch, **options)
    args = (config, names, layout, batch)
    results = ranks(n)(on_rank, *args, **options) if n > 1 else [on_rank(*args, **options)]
    for name in names:
        seen = set()
        for got, stats, grads in (result[name] for result in results):
            torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
            assert (
                torch.equal(stats["counts"], want_stats["counts"]) and stats["n_targets"] == batch.n_targets
            )
            assert (
                stats["fullest"].sum(1) * layout["ep"] >= stats["counts"].sum(1)
            ).all()  # depends on the split
            for key in want_stats.keys() - {"fullest"}:
                torch.testing.assert_close(stats[key], want_stats[key], rtol=1e-12, atol=0)
            for key, grad in grads.items():
                wanted = named(want_grads)[key]
                assert (grad - wanted).abs().max() <= 1e-10 * wanted.abs().max(), (name, key)
            seen |= grads.keys()
        assert seen == named(params).keys()


LAYOUTS = [  # each schedule on stages of several ranks and, of each kind, on four stages
    (SCHEDULES, dict(pp=2, edp=1, ep=1, n_microbatches=4)),
    (("1f1b", "interleaved"), dict(pp=2, edp=2, ep=2, n_microbatches=2, recompute="block")),
    (("zero-bubble, interleaved", "dualpipev"), dict(pp=2, edp=2, ep=2, n_microbatches=4)),
    (("1f1b", "zero-bubble, interleaved", "dualpipev"), dict(pp=4, edp=1, ep=2, n_microbatches=8)),
    (("gpipe", "zbv"), dict(pp=2, edp=1, ep=4, n_microbatches=4)),
]
ALL_LAYOUTS = [
    (WHOLE, dict(pp=2, edp=2, ep=2, n_microbatches=2, recompute="block")),
    (SPLIT, dict(pp=2, edp=2, ep=2, n_microbatches=4)),
    (SCHEDULES, dict(pp=4, edp=1, ep=2, n_microbatches=8)),
    (SCHEDULES, dict(pp=2, edp=1, ep=4, n_microbatches=4)),
]


def check_layout(names, layout):
    # Stages with and without experts, with and without an embedding before, of one, two or more layers.
    config, _ = model(n_layers=2 * layout["pp"] + 1, n_dense_layers=2)
    check(config, list(names), layout)


def by_layout(layouts):
    ids = ["-".join(map(str, layout.values())) for _, layout in layouts]
    return pytest.mark.parametrize(("names", "layout"), layouts, ids=ids)


@by_layout(LAYOUTS)
def test_every_schedule_has_the_gradients_of_one_process(names, layout):
    check_layout(names, layout)


@pytest.mark.soak
@by_layout(ALL_LAYOUTS)
def test_every_schedule_has_the_gradients_of_one_process_on_every_layout(names, layout):
    check_layout(names, layout)


LONG = batch_of(  # 8 positions, so that 2 ranks hold 2 chunks each
    [[0] * 9] * 5 + [[0, 0, 0, 0, 1, 1, 1, 1, 1]] * 4 + [[0, 0, 1, 1, 1, 1, -1, -1, -1]] * 6 + [[-1] * 9]
)


@pytest.mark.parametrize(
    ("names", "layout"),
    [
        (["interleaved", "zbv"], dict(pp=2, edp=2, ep=2, cp=2, n_microbatches=4)),
        (["zero-bubble"], dict(pp=2, edp=1, ep=4, cp=4, n_microbatches=8)),
    ],
    ids=["cp=2", "cp=4"],
)
def test_rows_split_over_the_ranks_of_a_stage_have_the_gradients_of_one_process(names, layout):
    config, _ = model(n_layers=5)
    check(config, names, layout, batch=LONG)


def rows_on(seq_len):
    mesh = mk.make_mesh(pp=2, edp=2, ep=1, device="cpu")
    context, same = (mk.mesh.context_mesh(on, 2) for on in (mesh, mesh["edp", "ep"]))
    assert mk.mesh.all_gather(torch.ones(1), same).sum() == 2 and same.mesh.equal(context.mesh)
    files = {"a": (np.arange(500) % 7).astype(np.uint16)}
    samples = pack(corpus_of_tokens(files, eos=0, vocab_size=7), seq_len)
    batch = mk.count_tokens(next(Loader(samples, 4, context=context, mesh=mesh)), mesh=mesh)
    return batch, sorted(mk.mesh.ranks_of(context))


def test_the_loaders_of_all_stages_give_the_same_parts_of_rows():
    results = ranks(4)(rows_on, 8)
    assert [group for _, group in results] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    for (here, _), (there, _) in zip(results[:2], results[2:], strict=True):
        assert torch.equal(here.tokens, there.tokens) and torch.equal(here.positions, there.positions)
        assert here.n_targets == there.n_targets == results[0][0].n_targets
    assert not torch.equal(results[0][0].positions, results[1][0].positions)


def test_a_tied_embedding_and_biases_are_right():
    config, _ = model(n_layers=4, tied_head=True, normalize_embedding=True)
    biases = torch.linspace(-0.4, 0.4, 24, dtype=torch.float64).view(3, 8)
    names = [
        "1f1b",
        "interleaved",
        "zero-bubble",
        "zbv",
        "dualpipev",
    ]  # the last two have both ends on a rank
    check(config, names, dict(pp=2, edp=1, ep=2, n_microbatches=4), biases=biases)


def test_several_stages_on_one_process_need_no_mesh():
    config, _ = model(n_layers=4, tied_head=True)
    names = ["interleaved", "zero-bubble", "zero-bubble, interleaved", "zbv", "dualpipev"]
    check(config, names, dict(pp=1, edp=1, ep=1, n_microbatches=4))


# --- Steps, checkpoints, mistakes -----------------------------------------------------


def optimizer_of(mesh, reduce="step"):
    chain = mk.chain(mk.clip_by_global_norm(0.5, mesh=mesh), mk.adamw(1e-2, weight_decay=0.1))
    return mk.shard_optimizer(chain, reduce=reduce, mesh=mesh)


def steps(config, layout, n_steps, folder=None, save_at=None):
    """Train on one batch; return the full parameters of this rank after each step and the norms."""
    pp, edp, ep = (layout.get(axis, 1) for axis in ("pp", "edp", "ep"))
    name = layout.get("name", "interleaved" if config.n_layers >= 2 * pp else "1f1b")
    if pp > 1:
        mesh, _, params, _ = setup(config, name, pp=pp, edp=edp, ep=ep, n_microbatches=2)
    else:
        mesh = mk.make_mesh(edp=edp, ep=ep, device="cpu") if edp * ep > 1 else None
        params = mk.init_params(config, dtype=torch.float64, mesh=mesh)
    optimizer = optimizer_of(mesh, layout.get("reduce", "step"))
    state = optimizer.init(params)
    if folder and save_at is None:
        checkpoint.load(folder, dict(params=params, state=state), mesh=mesh)
    if pp > 1:
        grad_fn = gradients_of(config, name, pp, mesh, optimizer)
    else:
        loss = partial(mk.next_token_loss, config=config, mesh=mesh)
        grad_fn = mk.accumulate(mk.value_and_grad(loss, has_aux=True), 2)
    rank, n = mk.mesh.data_rank(mesh)
    size = len(BATCH.tokens) // n
    norms = []
    for step in range(n_steps):
        _, grads = grad_fn(params, rows_of(BATCH, rank * size, (rank + 1) * size))
        params, state = optimizer.update(grads, state, params)
        norms.append(state["inner", "0", "norm"].item())
        if step + 1 == save_at:
            checkpoint.save(folder, dict(params=params, state=state), mesh=mesh)
    return norms, {k: p.full_tensor() if isinstance(p, DTensor) else p for k, p in named(params).items()}


def gradients_of(config, name, pp, mesh, optimizer):
    """Return the gradients before they are summed over ranks, for the sharded optimizer."""
    make, n_per_rank = SCHEDULES[name]
    stages = split_layers(config, pp * n_per_rank)
    functions = [
        partial(mk.model.stage_loss, config=config, stage=stage, mesh=mesh["edp", "ep"]) for stage in stages
    ]
    boundary = partial(empty, d=config.d_model)
    return mk.pipeline(
        functions, schedule=make(pp, 2), boundary=boundary, on_grad=optimizer.on_grad, mesh=mesh["pp"]
    )


def empty(part, d):
    return torch.empty(*part.tokens.shape, d, dtype=torch.float64)


def merged(results):
    """Return the norms, which all ranks agree on, and the parameters of all stages, which copies agree on."""
    whole = {}
    for norms, params in results:
        assert norms == results[0][0]
        for key, p in params.items():
            assert torch.equal(whole.setdefault(key, p), p), key
    return results[0][0], whole


@pytest.mark.parametrize(
    ("tied", "options"),
    [
        (False, dict(name="interleaved")),
        (True, dict(name="interleaved")),
        (False, dict(name="zero-bubble", reduce="micro_batch")),  # reduced in W
        (True, dict(name="zbv")),
    ],
    ids=lambda x: "-".join(x.values()) if isinstance(x, dict) else f"tied={x}",
)
def test_steps_of_the_sharded_optimizer_equal_those_of_one_process(tied, options):
    config, _ = model(n_layers=4, tied_head=tied)
    want_norms, want = steps(config, {}, 4)
    norms, got = merged(ranks(8)(steps, config, dict(pp=2, edp=2, ep=2) | options, 4))
    assert max(abs(a - b) for a, b in zip(norms, want_norms, strict=True)) <= 1e-10
    assert min(want_norms) > 0.5  # it clips
    assert got.keys() == want.keys()
    for key in want:
        torch.testing.assert_close(got[key], want[key], rtol=1e-8, atol=1e-10)


def test_a_checkpoint_of_four_stages_continues_on_four_ranks_of_experts_and_back(tmp_path):
    config, _ = model(n_layers=4)
    _, want = steps(config, {}, 4)
    pp, ep = dict(pp=4), dict(ep=4)
    for i, (first, then) in enumerate([(pp, [ep, {}]), (ep, [pp])]):
        folder = str(tmp_path / f"{i}")
        ranks(4)(steps, config, first, 2, folder=folder, save_at=2)
        for second in then:
            args = (config, second, 2)
            results = ranks(4)(steps, *args, folder=folder) if second else [steps(*args, folder=folder)]
            _, got = merged(results)
            assert got.keys() == want.keys()
            for key in want:
                torch.testing.assert_close(got[key], want[key], rtol=1e-8, atol=1e-10)


def one_process(config, stages, **changes):
    functions = [partial(mk.model.stage_loss, config=config, stage=stage) for stage in stages]
    options = dict(schedule=schedules.interleaved(1, 4, len(stages)), boundary=partial(empty, d=8)) | changes
    return mk.pipeline(options.pop("functions", functions), **options)


def test_what_does_not_fit_is_refused():
    config, params = model(n_layers=4)
    stages = split_layers(config, 2)
    with refuses("pipeline needs a schedule of its 1 ranks and 2 stages, got one of 2 ranks and 2 stages"):
        one_process(config, stages, schedule=schedules.gpipe(2, 4))
    with refuses(
        "pipeline needs y of stage 0 to be (4, 6, 9) torch.float64, as boundary says, got (4, 6, 8)"
    ):
        one_process(config, stages, boundary=partial(empty, d=9))(params, BATCH)
    with refuses(
        "pipeline needs n_microbatches >= 1 that divides every leading dimension, got n_microbatches=3"
    ):
        one_process(config, stages, schedule=schedules.interleaved(1, 3, 2))(params, BATCH)
    wrong = [stages[0], replace(stages[1], layers=range(3, 4))]  # layer 2 is in no stage
    with refuses("pipeline needs every parameter in the loss, no gradient reached layers.2.attention.qkv"):
        one_process(config, wrong)(params, BATCH)
    late = [replace(stages[0], embeds=False), stages[1]]
    with refuses("forward needs x from the stage before exactly where the stage does not embed"):
        one_process(config, late)(params, BATCH)
    with refuses("split_layers needs 1 to 4 stages, one layer each at least, got 5"):
        split_layers(config, 5)


def test_a_stage_that_does_not_get_its_layers_turns_red():
    config, _ = model(n_layers=4)
    params = mk.init_params(config, dtype=torch.float64)
    (want, _), _ = mk.value_and_grad(partial(mk.next_token_loss, config=config), has_aux=True)(params, BATCH)
    stages = split_layers(config, 2)
    twice = [stages[0], replace(stages[1], layers=range(stages[1].layers.start - 1, 4))]
    (got, _), _ = one_process(config, twice)(params, BATCH)
    assert abs(got - want) > 1e-3


def test_pipelines_compute_in_eight_bits_as_one_process_does():
    config, _ = model(d_model=32, d_dense=32, d_head=8, d_expert=32, d_shared=32, init_std=0.2)
    layout = dict(pp=2, edp=1, ep=2, n_microbatches=4)
    policy = mk.precision.preset("mxfp8", emulate=True, saved_activations="mxfp8")
    fixed = dict(assignment="random", key=mk.random.make_key(3))
    check(config, ["1f1b", "zero-bubble"], layout, precision=policy, **fixed)
