import os

os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch
from reference import close, draw

from moekit.kernels.cross_entropy import cross_entropy_
from moekit.losses import cross_entropy

# Rows and logits of each: none, one, fewer than a lane reads, odd, several blocks and a part of one.
SIZES = [(0, 5), (1, 1), (4, 3), (3, 1001), (2, 9001)]


def inputs(n, v, dtype=torch.float64):
    generator = torch.Generator().manual_seed(n)
    targets = torch.randint(v, (n,), generator=generator)
    targets[:1], targets[1:2] = 0, v - 1
    return 3 * draw(n, v, dtype=dtype), targets, draw(n, seed=1).abs()


def run(logits, *rest, z_weight=0.1, with_grad=True, kernels="triton"):
    logits = logits.clone()
    losses = cross_entropy_(logits, *rest, z_weight=z_weight, with_grad=with_grad, kernels=kernels)
    return [*losses, logits] if with_grad else list(losses)


def near(got, want, tol):
    for x, y in zip(got, want, strict=True):
        assert x.shape == y.shape and (x.double() - y).norm() <= tol * y.norm()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("z_weight", [0.0, 0.1])
@pytest.mark.parametrize(("n", "v"), SIZES)
def test_losses_and_gradients_are_those_that_autograd_finds_in_float64(n, v, z_weight, kernels):
    logits, targets, weights = inputs(n, v)
    logits.requires_grad_()
    lse = logits.logsumexp(-1)
    ce, z = weights * (lse - logits.gather(1, targets[:, None])[:, 0]), weights * lse.square()
    (grad,) = torch.autograd.grad((ce + z_weight * z).sum(), logits)
    dtype, tol = (torch.float32, 2e-6) if kernels == "triton" else (torch.float64, 1e-12)
    got = run(logits.detach().to(dtype), targets, weights, z_weight=z_weight, kernels=kernels)
    near(got, [ce.detach(), z.detach(), grad], tol)


@pytest.mark.parametrize(("n", "v"), SIZES)
def test_only_the_gradient_is_rounded_to_bfloat16(n, v):
    logits, targets, weights = inputs(n, v, torch.bfloat16)
    *losses, grad = run(logits, targets, weights)
    *want, want_grad = run(logits.double(), targets, weights, kernels="torch")
    assert all(x.dtype == torch.float32 for x in losses) and grad.dtype == torch.bfloat16
    near(losses, want, 2e-6)
    near([grad], [want_grad], 4e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_alone_are_the_same_and_so_are_all_bits_the_second_time(dtype):
    given = inputs(3, 5001, dtype)
    first, second, alone = run(*given), run(*given), run(*given, with_grad=False)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    assert all(torch.equal(x, y) for x, y in zip(first[:2], alone, strict=True))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_token_that_does_not_count_gets_zeros(kernels):
    logits, targets, weights = inputs(4, 37, torch.float32)
    weights[1] = 0
    for x in run(logits, targets, weights, kernels=kernels):
        assert not x[1].any() and x[[0, 2, 3]].any()


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("scale", [1e4, -1e4, 1e15])
def test_logits_of_any_size_give_finite_losses_and_gradients(scale, kernels):
    logits, targets, weights = inputs(4, 37, torch.float32)
    ce, _, grad = run(scale * logits, targets, weights, z_weight=0.0, kernels=kernels)
    assert ce.isfinite().all() and grad.isfinite().all()


@pytest.mark.parametrize("chunk", [1, 4 * 37, None])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_the_loss_and_its_gradients_come_through_the_kernel(dtype, tol, chunk):
    def grads(dtype, **options):
        leaves = [draw(9, 8, dtype=dtype), draw(8, 37, seed=1, dtype=dtype)]
        leaves = [x.to(torch.bfloat16).to(dtype).requires_grad_() for x in leaves]
        targets, weights = torch.arange(9) % 5, torch.arange(9) % 3 / 9
        loss, ce, z = cross_entropy(*leaves, targets, weights, z_weight=0.1, **options)
        once = torch.autograd.grad(3 * loss, leaves, retain_graph=True)
        close(once, torch.autograd.grad(3 * loss, leaves))
        return [x.detach() for x in (loss, ce, z, *once)]

    near(grads(dtype, kernels="triton", chunk_elements=chunk), grads(torch.float64), tol)
