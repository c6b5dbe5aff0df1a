import pytest
import torch
from reference import draw

from moekit.kernels.grouped_mm import grouped_mm, grouped_weight_grad

# Rows of each group, and rows after the last: full tiles, halves of them, parts, nothing.
GROUPS = [
    ([128] * 4, 0),
    ([1, 7, 65, 130], 5),
    ([16, 0, 40, 0], 0),
    ([0, 0, 200, 0], 3),
    ([0] * 4, 2),
    ([0] * 4, 0),
]
SIZES = [(64, 96), (48, 272)]  # K and N that are no multiples of a tile
# float16 stands for the half precision of tensor cores: Triton's interpreter has no product of bfloat16.
DTYPES = [(torch.float32, 1e-6), (torch.float16, 1e-3)]


def make(groups, n_tail, k, n, dtype):
    valid = sum(groups)
    rows, grad = draw(valid + n_tail, k).to(dtype), draw(valid + n_tail, n, seed=1).to(dtype)
    rows[valid:], grad[valid:] = torch.nan, torch.nan
    weights = draw(len(groups), k, n, seed=2).to(dtype)
    return rows, grad, weights, torch.tensor(groups).cumsum(0).int(), valid


def close_to(got, want, tol):
    assert (got.double() - want).norm() <= tol * want.norm()


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize(("groups", "n_tail"), GROUPS)
def test_rows_meet_the_matrix_of_their_group(groups, n_tail, k, n, dtype, tol, transposed):
    rows, _, weights, offsets, valid = make(groups, n_tail, k, n, dtype)
    want = grouped_mm(rows.double(), weights.double(), offsets, kernels="loop")[:valid]
    if transposed:
        weights = weights.mT.contiguous().mT
    close_to(grouped_mm(rows, weights, offsets, kernels="triton")[:valid], want, tol)


@pytest.mark.parametrize(("dtype", "tol"), DTYPES)
@pytest.mark.parametrize(("k", "n"), SIZES)
@pytest.mark.parametrize(("groups", "n_tail"), GROUPS)
def test_gradients_of_weights_are_summed_within_groups(groups, n_tail, k, n, dtype, tol):
    rows, grad, _, offsets, _ = make(groups, n_tail, k, n, dtype)
    want = grouped_weight_grad(rows.double(), grad.double(), offsets, kernels="loop")
    close_to(grouped_weight_grad(rows, grad, offsets, kernels="triton"), want, tol)


@pytest.mark.parametrize("kernels", ["loop", "torch", "triton"])
def test_gradients_are_added_to_a_float32_buffer(kernels):
    dtype = torch.bfloat16 if kernels == "torch" else torch.float16
    rows, grad, _, offsets, _ = make([40, 0, 56], 3, 64, 96, dtype)
    want = grouped_weight_grad(rows.double(), grad.double(), offsets, kernels="loop")
    buffer = torch.full(want.shape, 2.0)
    for _ in range(2):
        assert grouped_weight_grad(rows, grad, offsets, into=buffer, kernels=kernels) is None
    # Triton adds before it rounds, the others the rounded product.
    close_to(buffer - 2, 2 * want, 1e-6 if kernels == "triton" else 1e-2)


@pytest.mark.parametrize("kernels", ["loop", "torch", "triton"])
def test_the_product_goes_where_it_is_wanted(kernels):
    dtype = torch.bfloat16 if kernels == "torch" else torch.float16
    rows, _, weights, offsets, valid = make([40, 0, 56], 3, 64, 96, dtype)
    out = rows.new_full((len(rows), 96), torch.nan)
    assert grouped_mm(rows, weights, offsets, out=out, kernels=kernels) is out
    assert torch.equal(out[:valid], grouped_mm(rows, weights, offsets, kernels=kernels)[:valid])
