"""Low precision over ranks: the same gradients on every layout, weights that come in eight bits."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from reference import flat
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

import moekit as mk
from moekit.kernels.quantize import Quantized, dequantize
from moekit.precision import FORMATS, preset, round_matrix, round_weights
from moekit.testing import check_gradients, ranks

from .tiny import BATCH, model

FP8, MXFP8 = (preset(name, emulate=True) for name in ("fp8_rowwise", "mxfp8"))
WIDTHS = dict(d_model=32, d_dense=32, d_head=8, d_expert=32, d_shared=32, init_std=0.2)
CONFIG, PARAMS = model(**WIDTHS)


def loss(params, batch, *, mesh, policy, via=None, **options):
    if via == "rowwise":
        sizes = dict(n_tokens=batch.tokens.numel(), dtype=torch.float64)
        via = mk.rowwise.of(CONFIG, None if mesh is None else mesh["ep"], **sizes)
    options |= dict(config=CONFIG, precision=policy, via=via, mesh=mesh)
    return mk.next_token_loss(params, batch, assignment="random", key=mk.random.make_key(3), **options)


@pytest.mark.parametrize("via", [None, "rowwise"])
@pytest.mark.parametrize("policy", [FP8, MXFP8, replace(FP8, saved_activations="fp8_rowwise")])
def test_every_layout_has_the_gradients_of_one_process(policy, via):
    # Under rowwise, as in kernels, routing weights multiply hidden rows before these are rounded.
    layouts = [dict(edp=2, ep=2), dict(edp=1, ep=4), dict(edp=4, ep=1, accumulate=2)]
    check_gradients(partial(loss, policy=policy, via=via), PARAMS, BATCH, layouts=layouts)


def test_tokens_that_travel_in_eight_bits_are_not_rounded_again():
    def run(payload):
        mesh = mk.make_mesh(ep=2, n_experts=8)["ep"]
        generator = torch.Generator().manual_seed(dist.get_rank())
        x = torch.randn(6, 32, generator=generator).requires_grad_()
        layer = PARAMS["layers", "1", "moe"].float()
        experts = {name: w.chunk(2)[dist.get_rank()] for name, w in layer["experts"].items()}
        params = {"router": layer["router"], "experts": experts}
        via = mk.rowwise(
            mesh, n_tokens=6, d_model=32, n_experts=8, top_k=2, dtype=torch.float32, payload=payload
        )
        policy = replace(FP8, dispatch_payload="fp8_rowwise") if payload else FP8
        y, _ = mk.moe(params, x, top_k=2, via=via, precision=policy, mesh=mesh)
        return y.detach(), torch.autograd.grad(y.square().sum(), x)[0]

    with ranks(2) as run_on:
        for (y, grad), (same, its) in zip(run_on(run, None), run_on(run, torch.float8_e4m3fn), strict=True):
            torch.testing.assert_close(y, same, rtol=1e-5, atol=1e-6)
            torch.testing.assert_close(grad, its, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("n", [2, 3])
def test_what_ranks_share_of_a_matrix_is_rounded_as_the_whole(n):
    w = torch.randn(4, 192, 64, generator=torch.Generator().manual_seed(0))
    cases = list(itertools.product((FORMATS["fp8_rowwise"], FORMATS["mxfp8"]), ((1,), (2,))))

    def run():
        mesh = dist.init_device_mesh("cpu", (n,))
        found = []
        for form, (dim,) in cases:
            found.append(flat(round_matrix(distribute_tensor(w, mesh, [Shard(dim)]), form, form)))
            uneven = distribute_tensor(w[:, :160], mesh, [Shard(1)])  # blocks that two ranks share
            found.append(flat(round_matrix(uneven, form, form)))
        return [{name: x.view(torch.uint8) for name, x in tree.items()} for tree in found]

    with ranks(n) as run_on:
        results = run_on(run)
    for mine in results:
        for i, (form, _) in enumerate(cases):
            for got, whole in zip(mine[2 * i : 2 * i + 2], (w, w[:, :160]), strict=True):
                want = flat(round_matrix(whole, form, form))
                assert all(torch.equal(got[name], x.view(torch.uint8)) for name, x in want.items())


def test_ranks_without_a_part_and_numbers_that_are_not_finite_take_part():
    w = torch.randn(4, 96, generator=torch.Generator().manual_seed(0))
    w[3, 5] = torch.nan
    w[1, 7] = torch.inf
    form = FORMATS["fp8_rowwise"]

    def run():
        mesh = dist.init_device_mesh("cpu", (3,))  # of four rows the last rank has none
        q = round_matrix(distribute_tensor(w, mesh, [Shard(0)]), form, form)
        return {name: dequantize(Quantized(**part)) for name, part in q.items()}

    want = {name: dequantize(Quantized(**part)) for name, part in round_matrix(w, form, form).items()}
    for mine in ranks(3)(run):
        for name, x in want.items():
            torch.testing.assert_close(mine[name], x, rtol=0, atol=0, equal_nan=True)
            assert x.isnan().any() and x.isfinite().any()


@pytest.mark.parametrize(("policy", "n_gathers"), [(FP8, 4), (MXFP8, 12)])  # of blocks that ranks share, each
@pytest.mark.parametrize("n", [2, 4])
def test_weights_come_from_masters_in_eight_bits_and_few_collectives(n, policy, n_gathers):
    ep = n // 2

    def run():
        mesh = mk.make_mesh(ep=ep, n_experts=8)
        params = mk.mesh.distribute(PARAMS.float(), mesh)
        state = mk.shard_optimizer(mk.adamw(1e-3), mesh=mesh).init(params)
        with CommDebugMode() as seen:
            mine = flat(round_weights(state["master"], policy).weights)
        n_calls = sum(n for op, n in seen.get_comm_counts().items() if "all_gather" in str(op))
        return n_calls, {name: x.view(torch.uint8) for name, x in mine.items()}

    whole = flat(round_weights(PARAMS.float(), policy).weights)
    with ranks(n) as run_on:
        results = run_on(run)
    for rank, (n_calls, mine) in enumerate(results):
        assert n_calls == n_gathers
        for name, x in whole.items():
            want = x.view(torch.uint8)
            if "experts" in name:
                want = want.chunk(ep)[rank % ep]
            assert torch.equal(mine[name], want), name


def test_a_matrix_that_two_mesh_axes_shard_is_refused():
    def run():
        mesh = mk.make_mesh(edp=2, ep=2, device="cpu")
        w = distribute_tensor(torch.ones(4, 32), mesh, [Shard(0), Shard(1)])
        round_matrix(w, FORMATS["fp8_rowwise"], None)

    with pytest.raises(RuntimeError, match="round_weights needs matrices that one mesh axis shards, got"):
        ranks(4)(run)
