"""Rows put to and got from several ranks' memory, here tensors of one process."""

import pytest
import torch
from reference import draw

from moekit.kernels.one_sided import (
    FP8,
    dequantize_rows,
    get_each,
    get_sum,
    put,
    put_each,
    put_quantized,
)
from moekit.kernels.quantize import Format, quantize
from moekit.symmetric import Shared

pytest.importorskip("triton")

EACH = pytest.mark.parametrize("kernels", ["torch", "triton"])
PLACES = torch.tensor([[5, -1], [0, 11], [-1, -1], [7, 2], [9, 6]])  # on three ranks of four rows


def shared(*shape, dtype=torch.float32, fill=0.0):
    peers = tuple(torch.full(shape, fill, dtype=dtype) for _ in range(3))
    return Shared(peers[1], peers, torch.tensor([x.data_ptr() for x in peers]))


@EACH
@pytest.mark.parametrize(("d", "dtype"), [(1, torch.float32), (1500, torch.bfloat16), (40, torch.float32)])
def test_rows_land_where_they_are_sent_and_nowhere_else(kernels, d, dtype):
    x, to = draw(5, 2 * d, dtype=dtype)[:, ::2], shared(4, d, dtype=dtype, fill=-7.0)
    put(x, PLACES, to, kernels=kernels)
    want = torch.full((12, d), -7.0, dtype=dtype)
    for token, places in enumerate(PLACES.tolist()):
        for place in places:
            if place >= 0:
                want[place] = x[token]
    assert torch.equal(torch.cat(to.peers), want)


@EACH
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("with_base", [False, True])
def test_a_tokens_rows_are_summed_and_those_without_a_place_are_zero(kernels, weighted, with_base):
    d, source = 33, shared(4, 33)
    for i, peer in enumerate(source.peers):
        peer.copy_(draw(4, d, seed=i))
    source.peers[0][1] = torch.nan  # nobody's
    weights = draw(5, 2, dtype=torch.float32) if weighted else None
    base = draw(5, d, seed=9, dtype=torch.float32) if with_base else None
    got = get_sum(source, PLACES, weights, base=base, kernels=kernels)
    rows = torch.cat(source.peers)[PLACES.clamp(min=0)].where((PLACES >= 0)[..., None], 0)
    want = (rows if weights is None else rows * weights[..., None]).sum(1) + (0 if base is None else base)
    torch.testing.assert_close(got, want)


@EACH
def test_numbers_of_routes_go_and_come(kernels):
    values, to = draw(5, 2, dtype=torch.float32), shared(4, fill=-7.0)
    put_each(values, PLACES, to, kernels=kernels)
    want = torch.full((12,), -7.0)
    want[PLACES[PLACES >= 0]] = values[PLACES >= 0]
    assert torch.equal(torch.cat(to.peers), want)
    back = get_each(to, PLACES, kernels=kernels)
    assert torch.equal(back, values.where(PLACES >= 0, 0))


@EACH
@pytest.mark.parametrize("weight", [torch.inf, torch.nan])
def test_a_route_without_a_place_adds_nothing_whatever_its_weight(kernels, weight):
    source, weights = shared(4, 8, fill=1.0), torch.where(PLACES >= 0, 2.0, weight)
    got = get_sum(source, PLACES, weights, kernels=kernels)
    assert torch.equal(got, 2.0 * (PLACES >= 0).sum(1, keepdim=True).expand(5, 8))


def of_any_size(t, d, dtype, seed=0):
    """Draw rows whose numbers, and whole rows, differ by many orders of magnitude."""
    rows = draw(t, d, seed=seed) * draw(t, d, seed=seed + 1).mul(4).exp() * draw(t, 1, seed=seed + 2).exp()
    return rows.to(dtype)


def nearest_by_hand(x, g):
    """Return runs rounded to the nearest of all multiples of their scale that float8 has, ties to even."""
    numbers = torch.arange(127, dtype=torch.uint8).view(FP8).double()  # 0 to 448, ascending
    runs = x.double().view(-1, x.shape[1] // g)
    scale = runs.abs().amax(1, keepdim=True) / 448
    apart = (runs.abs() / scale)[..., None] - numbers
    even = torch.arange(127) % 2 == 0
    best = apart.abs().amin(-1, keepdim=True)
    at = ((apart.abs() <= best * (1 + 1e-5)) * (1 + even.int())).argmax(-1)
    return (numbers[at] * scale * runs.sign()).view(x.shape)


@pytest.mark.parametrize("g", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantized_rows_are_the_nearest_numbers_of_each_runs_scale(g, dtype):
    x = of_any_size(7, 40, dtype)
    q, s = quantize(x, Format(block=x.shape[1] // g))
    assert q.dtype == FP8 and s.shape == (7, g) and q.float().abs().amax() == 448
    got = q.double() * s.double().repeat_interleave(40 // g, 1)
    torch.testing.assert_close(got, nearest_by_hand(x, g), rtol=1e-6, atol=0)


@EACH
@pytest.mark.parametrize(
    ("d", "g", "dtype"),
    [(1500, 1, torch.bfloat16), (40, 1, torch.float32), (160, 5, torch.bfloat16), (96, 3, torch.float32)],
)
def test_quantized_rows_land_with_their_scales_and_are_read_back(kernels, d, g, dtype):
    x = of_any_size(5, 2 * d, dtype)[:, ::2].clone()
    x[1] = 0.0
    x[3, 1:3] = torch.tensor([1e-38, -1e-33], dtype=dtype)
    to, scales = shared(4, d, dtype=FP8, fill=-7.0), shared(4, g, fill=-7.0)
    put_quantized(x, PLACES, to, scales, kernels=kernels)
    q, s = quantize(x, Format(block=x.shape[1] // g))
    assert not q[1].float().any()
    want, of_rows = torch.full((12, d), -7.0).to(FP8), torch.full((12, g), -7.0)
    for token, places in enumerate(PLACES.tolist()):
        for place in places:
            if place >= 0:
                want.view(torch.uint8)[place], of_rows[place] = q.view(torch.uint8)[token], s[token]
    assert torch.equal(torch.cat([peer.view(torch.uint8) for peer in to.peers]), want.view(torch.uint8))
    assert torch.equal(torch.cat(scales.peers), of_rows)
    out = torch.full((4, d), -7.0, dtype=dtype)
    dequantize_rows(to.peers[2], scales.peers[2], torch.tensor([1, 4, 4]).int(), out, kernels=kernels)
    rows = want[8:].float() * of_rows[8:].repeat_interleave(d // g, 1)
    # The interpreter rounds to bfloat16 without carries.
    inexact = kernels == "triton" and dtype == torch.bfloat16
    torch.testing.assert_close(out, rows.to(dtype), rtol=2**-7 if inexact else 0, atol=0)


@EACH
@pytest.mark.parametrize("number", [torch.inf, -torch.inf, torch.nan])
def test_a_run_with_a_number_that_is_not_finite_becomes_nan_and_no_other(kernels, number):
    x = draw(5, 16, dtype=torch.bfloat16)
    x[0, 3] = number
    to, scales = shared(4, 16, dtype=FP8), shared(4, 2)
    put_quantized(x, PLACES, to, scales, kernels=kernels)
    out = torch.zeros(4, 16)
    dequantize_rows(to.peers[1], scales.peers[1], torch.tensor([4]).int(), out, kernels=kernels)
    assert out[1, :8].isnan().all() and out[1, 8:].isfinite().all()  # token 0
    assert out[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("n", [0, 2, 4])
def test_rows_beyond_the_last_end_are_not_read(n):
    rows, scales = torch.ones(4, 8).to(FP8), torch.ones(4, 1)
    out = torch.full((4, 8), -7.0)
    dequantize_rows(rows, scales, torch.tensor([0, n]).int(), out, kernels="triton")
    assert (out[:n] == 1).all() and (out[n:] == -7).all()
