"""Rows put to and got from several ranks' memory, here tensors of one process."""

import pytest
import torch
from reference import draw

from moekit.kernels.one_sided import get_each, get_sum, put, put_each
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
