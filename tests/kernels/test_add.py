"""Sums in float32: each element is read and written once, whatever the strides and sizes."""

import pytest
import torch
from reference import draw

from moekit.kernels.add import add_, add_product_

pytest.importorskip("triton")


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(0, 3), (1,), (3, 5), (5, 4096)])
def test_the_first_is_copied_and_the_others_are_added(shape, kernels):
    total, parts = torch.full(shape, torch.nan), [draw(*shape, seed=i).bfloat16() for i in range(3)]
    for i, part in enumerate(parts):
        add_(total, part, first=i == 0, kernels=kernels)
    assert torch.equal(total, parts[0].float() + parts[1].float() + parts[2].float())


@pytest.mark.parametrize("transpose", ["total", "x"])
def test_transposed_tensors_are_added_element_by_element(transpose):
    total, x = torch.ones(4, 6), draw(4, 6).bfloat16()
    if transpose == "total":
        total = torch.ones(6, 4).mT
    else:
        x = x.mT.contiguous().mT
    add_(total, x, first=False, kernels="triton")
    assert torch.equal(total, 1 + x.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_first_product_replaces_what_was_there(dtype):
    total, a, b = torch.full((3, 5), torch.nan), draw(3, 4).to(dtype), draw(4, 5).to(dtype)
    for first in (True, False):
        add_product_(total, a, b, first=first)
    torch.testing.assert_close(total, 2 * (a @ b).float(), rtol=1e-6, atol=1e-6)
