import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from reference import close, draw, with_grads

from moekit._split_backward import backward_of_input
from moekit.kernels.rms_norm import rms_norm

# Rows of several dims and of odd widths: none, one, a part of a tile, several tiles and steps.
SHAPES = [(0, 8), (1, 5), (2, 3, 7), (3000, 9), (3, 4097)]


def plain(x, gain, *residual, eps=1e-5):
    y = x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * gain
    return y + residual[0] if residual else y


def fused(x, gain, *residual, eps=1e-5):
    return rms_norm(x, gain, eps, residual=residual[0] if residual else None, kernels="triton")


def inputs(shape, residual, dtype=torch.float32):
    wide = draw(*shape), 1 + draw(shape[-1], seed=1), *([draw(*shape, seed=2)] if residual else [])
    return [x.to(dtype) for x in wide]


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 2e-6), (torch.bfloat16, 5e-3)])
def test_output_and_gradients_are_those_of_float64(shape, residual, dtype, tol):
    leaves = inputs(shape, residual, dtype)
    for got, want in zip(
        with_grads(fused, *leaves), with_grads(plain, *(x.double() for x in leaves)), strict=True
    ):
        assert got.dtype == dtype and got.shape == want.shape
        assert (got.double() - want).norm() <= tol * want.norm()


def test_the_reference_is_that_too_in_float64():
    for residual in (False, True):
        leaves = inputs((2, 3, 7), residual, torch.float64)
        reference = with_grads(lambda x, g, *r: rms_norm(x, g, residual=r[0] if r else None), *leaves)
        close(reference, with_grads(plain, *leaves))


def test_the_same_bits_come_twice():
    leaves = inputs((3000, 9), True, torch.bfloat16)
    first, second = (with_grads(fused, *leaves) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_rows_may_be_strided():
    x, gain = draw(6, 4, 10, dtype=torch.float32)[:, 1:3, 1:6], draw(5, dtype=torch.float32)
    close(with_grads(fused, x, gain), with_grads(plain, x, gain), 1e-5)
    out = fused(x, gain, x.transpose(0, 1).contiguous().transpose(0, 1))
    close(out, plain(x, gain, x), 1e-5)


def test_a_backward_that_is_split_gives_the_same_gradients():
    def loss(x, w, gain):
        return fused(x @ w, gain, x).square().sum()

    x, gain = inputs((4, 8), False)
    leaves = [z.requires_grad_() for z in (x, draw(8, 8, seed=3, dtype=torch.float32), gain)]
    want = torch.autograd.grad(loss(*leaves), leaves)
    backward_of_weights = backward_of_input("test", [(loss(*leaves), None)], leaves[0], leaves[1:])
    close(leaves[0].grad, want[0])
    backward_of_weights()
    close([z.grad for z in leaves], list(want))
