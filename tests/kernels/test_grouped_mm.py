import pytest
import torch
from reference import close, draw, expanded, refuses, unaligned

import moekit as mk
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


def test_the_interpreter_refuses_bfloat16_which_it_cannot_multiply():
    rows, grad, weights, offsets, _ = make([4, 4], 0, 16, 16, torch.bfloat16)
    with refuses("grouped_mm needs compiled kernels for kernels='triton' and bfloat16"):
        grouped_mm(rows, weights, offsets, kernels="triton")
    with refuses("grouped_weight_grad needs compiled kernels for kernels='triton' and bfloat16"):
        grouped_weight_grad(rows, grad, offsets, kernels="triton")
    with refuses("expert_forward needs compiled kernels for kernels='triton' and bfloat16"):
        mk.expert_forward({"gate_up": weights, "down": weights[:, :8]}, rows, offsets, kernels="triton")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("lay", [unaligned, expanded])
def test_operands_may_begin_anywhere_and_repeat(kernels, lay):
    rows, grad, weights, offsets, _ = make([40, 0, 56], 0, 64, 96, torch.float32)
    for moved in ((lay(rows), weights), (rows, lay(weights)), (rows, lay(weights.mT).mT)):
        want = grouped_mm(*(x.contiguous() for x in moved), offsets, kernels="loop")
        close(grouped_mm(*moved, offsets, kernels=kernels), want, 1e-4)
        out = unaligned(torch.zeros_like(want))
        close(grouped_mm(*moved, offsets, out=out, kernels=kernels), want, 1e-4)
        assert out.data_ptr() % 16
    into = unaligned(torch.zeros(3, 64, 96))
    for moved in ((lay(rows), grad), (rows, lay(grad))):
        want = grouped_weight_grad(*moved, offsets, kernels="loop")
        close(grouped_weight_grad(*moved, offsets, kernels=kernels), want, 1e-4)
        grouped_weight_grad(*moved, offsets, into=into.zero_(), kernels=kernels)
        close(into, want, 1e-4)


@pytest.mark.parametrize("kernels", ["loop", "torch", "triton"])
def test_the_product_goes_where_it_is_wanted(kernels):
    dtype = torch.bfloat16 if kernels == "torch" else torch.float16
    rows, _, weights, offsets, valid = make([40, 0, 56], 3, 64, 96, dtype)
    out = rows.new_full((len(rows), 96), torch.nan)
    assert grouped_mm(rows, weights, offsets, out=out, kernels=kernels) is out
    assert torch.equal(out[:valid], grouped_mm(rows, weights, offsets, kernels=kernels)[:valid])
