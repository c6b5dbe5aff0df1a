"""Rows written straight to their experts, through the symmetric memory of ranks on one GPU and on several."""

import time
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist
from exchanges import D, K, hurried, layers_both_ways, make_mesh, make_params, tokens

import moekit as mk
from moekit.kernels.one_sided import FP8, dequantize_rows, put_quantized
from moekit.symmetric import Shared
from moekit.testing import check_transport, ranks

N = torch.cuda.device_count()
WHERE = pytest.mark.parametrize(
    ("device", "sizes"),
    [
        ("cuda:0", (1, 2, 4, 8)),
        pytest.param(
            "cuda",
            [n for n in (2, 4, 8) if n <= N],
            marks=pytest.mark.skipif(N < 2, reason=f"needs two CUDA devices or more, there are {N}"),
        ),
    ],
)


@WHERE
def test_it_keeps_its_contract(device, sizes):
    check_transport(mk.rowwise, n_ranks=sizes, dtypes=(torch.float32, torch.bfloat16), device=device)


@WHERE
def test_layers_give_what_they_give_on_cpus(device, sizes):
    n_tokens = [5, 0, 7, 6][: min(4, max(sizes))]
    run = partial(layers_both_ways, dtype=torch.float32, n_tokens=n_tokens)
    want = ranks(len(n_tokens))(run, "all_to_all", "torch")
    got = ranks(len(n_tokens), device=device)(run, "rowwise", "triton", device="cuda")
    for mine, theirs in zip(got, want, strict=True):
        for x, y in zip(mine, theirs, strict=True):
            torch.testing.assert_close(x, y, rtol=1e-3, atol=1e-4)


@WHERE
def test_ranks_that_are_late_change_no_bit(device, sizes):
    assert all(ranks(max(sizes), device=device)(hurried, None, 50, device="cuda"))


def a_thousand_steps():
    """Return the memory in use on the device after 10 steps and after 1,000, with routing that changes."""
    dtype = torch.bfloat16
    mesh = make_mesh("cuda")
    via = mk.rowwise(mesh, n_tokens=64, d_model=D, n_experts=8, top_k=K, dtype=dtype, capacity_factor=1.25)
    params, leaves = make_params(8, dtype, device="cuda")
    x = [tokens(1 + 7 * i, dtype, i, "cuda") for i in range(10)]
    used = []
    for step in range(1000):
        y, routing = mk.moe(params, x[step % 10], top_k=K, via=via, mesh=mesh)
        torch.autograd.grad(y.float().square().sum(), leaves)
        if step in (9, 999):
            dist.barrier()
            used.append((torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()))
    assert routing.dropped is not None and y.isfinite().all()
    return used


@WHERE
def test_memory_does_not_grow_in_a_thousand_steps(device, sizes):
    for first, last in ranks(2, device=device)(a_thousand_steps):
        assert first == last


def refusing():
    via = mk.rowwise(
        None, n_tokens=4, d_model=D, n_experts=4, top_k=1, dtype=torch.float32, device="cuda",
        capacity_factor=0.5, overflow="refuse",
    )  # fmt: skip
    params, _ = make_params(4, torch.float32, device="cuda")
    try:
        mk.moe(params, torch.ones(4, D, device="cuda"), top_k=1, via=via)
        torch.cuda.synchronize()
    except Exception as error:
        return str(error)
    return "no error"


def test_too_many_rows_are_refused_by_the_device():
    (error,) = ranks(1, device="cuda:0")(refusing)
    assert "device-side assert" in error


@pytest.mark.skipif(
    not N or torch.cuda.get_device_capability() < (8, 9), reason="needs compute capability 8.9"
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("d", "g"), [(64, 1), (1000, 1), (4096, 1), (7168, 1), (4096, 128), (96, 3)])
def test_rows_in_float8_have_the_bits_of_the_reference(d, g, dtype):
    generator = torch.Generator("cuda").manual_seed(0)
    x, size = (torch.randn(257, d, generator=generator, device="cuda") for _ in range(2))
    x = (x * size.mul(4).exp()).to(dtype)
    x[0], x[1, 0], x[2, 0], x[3] = 0.0, torch.inf, torch.nan, 1e-35
    places = torch.randperm(2 * len(x), generator=generator, device="cuda").view(-1, 2)
    places[5, 1], n, found = -1, 2 * len(x), []
    for kernels in ("torch", "triton"):
        to, scales = (
            Shared(mine, (mine,), torch.tensor([mine.data_ptr()], device="cuda"))
            for mine in (torch.zeros(n, d, device="cuda").to(FP8), torch.zeros(n, g, device="cuda"))
        )
        put_quantized(x, places, to, scales, kernels=kernels)
        out = torch.zeros(n, d, device="cuda", dtype=dtype)
        ends = torch.tensor([3, n], device="cuda", dtype=torch.int32)
        dequantize_rows(to.mine, scales.mine, ends, out, kernels=kernels)
        found.append((scales.mine.nan_to_num(-1.0), out.nan_to_num(-1.0)))
    for got, want in zip(*found, strict=True):
        assert torch.equal(got, want)


@WHERE
def test_ranks_that_are_late_change_no_bit_of_rows_in_float8(device, sizes):
    assert all(ranks(max(sizes), device=device)(hurried, None, 25, device="cuda", payload=FP8))


def left_alone():
    """Wait for a rank that calls no layer."""
    via = mk.rowwise(
        make_mesh("cuda"), n_tokens=4, d_model=D, n_experts=4, top_k=1, dtype=torch.float32,
        timeout=timedelta(seconds=2),
    )  # fmt: skip
    if dist.get_rank():
        time.sleep(8)  # its memory stays
    else:
        params, _ = make_params(4, torch.float32, device="cuda")
        mk.moe(params, torch.ones(4, D, device="cuda"), top_k=1, via=via, mesh=via.mesh)
        torch.cuda.synchronize()


@WHERE
def test_a_rank_that_does_not_come_ends_one_that_waits(device, sizes):
    begun = time.monotonic()
    with pytest.raises(RuntimeError, match="rank 0 of 2 failed"):  # an exception, or already its process
        ranks(2, device=device)(left_alone)
    assert time.monotonic() - begun < 60
