import pytest
import torch
import torch.nn.functional as F
from reference import close, draw, with_grads

from moekit.kernels.swiglu import swiglu, swiglu_backward, swiglu_forward

KERNELS = ["torch", "triton"]
SHAPES = [(0, 8), (1, 1), (7, 48), (3, 2500)]  # rows, hidden: more than a block of columns too


def plain(gate_up, weights):
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up * weights[:, None]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)])
@pytest.mark.parametrize(("r", "h"), SHAPES)
def test_one_pass_gives_hidden_rows_and_every_gradient_of_float64(r, h, dtype, tol, kernels):
    gate_up, weights, grad = draw(r, 2 * h).to(dtype), draw(r).float(), draw(r, h, seed=1).to(dtype)
    leaves = [x.double().requires_grad_() for x in (gate_up, weights)]
    want = plain(*leaves)
    want_grads = torch.autograd.grad(want, leaves, grad.double())
    hidden = swiglu_forward(gate_up, weights, None, kernels=kernels)
    grad_gate_up, again, grad_weights = swiglu_backward(grad, gate_up, weights, None, kernels=kernels)
    assert torch.equal(hidden, again)
    for got, exact in ((hidden, want), (grad_gate_up, want_grads[0]), (grad_weights, want_grads[1])):
        assert (got.double() - exact).norm() <= tol * exact.norm()


def test_without_weights_there_is_no_gradient_of_them():
    gate_up, grad = draw(7, 16, dtype=torch.float32), draw(7, 8, dtype=torch.float32)
    got, want = (swiglu_backward(grad, gate_up, None, None, kernels=kernels) for kernels in KERNELS)
    close(got[:2], want[:2], 1e-6)
    assert got[2] is want[2] is None


def test_rows_past_the_end_are_not_read():
    gate_up, weights, grad = draw(7, 16, dtype=torch.float32), draw(7).float(), draw(7, 8).float()
    end = torch.tensor([2, 5], dtype=torch.int32)
    want = swiglu_backward(grad[:5], gate_up[:5], weights[:5], None, kernels="torch")
    for x in (gate_up, weights, grad):
        x[5:] = torch.nan
    got = swiglu_backward(grad, gate_up, weights, end, kernels="triton")
    for one, other in zip(got, want, strict=True):
        close(one[:5], other, 1e-6)
    close(swiglu_forward(gate_up, weights, end, kernels="triton")[:5], want[1], 1e-6)


def test_plain_swiglu_takes_any_dims():
    x = draw(2, 3, 10, dtype=torch.float32)
    close(with_grads(swiglu, x), with_grads(lambda x: plain(x, x.new_ones(3)), x), 1e-6)
