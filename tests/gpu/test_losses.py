"""The loss on one CUDA device, with a large vocabulary."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode
from waits import no_sync

from moekit.kernels.rms_norm import rms_norm
from moekit.losses import cross_entropy

T, D, V = 3000, 512, 100_352


def inputs(v=V, dtype=torch.bfloat16):
    generator = torch.Generator("cuda").manual_seed(0)
    options = dict(device="cuda", generator=generator)
    hidden = torch.randn(T, D, **options).to(dtype).requires_grad_()
    head = (D**-0.5 * torch.randn(D, v, **options)).to(dtype).requires_grad_()
    weights = (torch.rand(T, **options) < 0.8) / T
    return hidden, head, torch.randint(v, (T,), **options), weights


def run(hidden, head, *rest, **options):
    loss, ce, z = cross_entropy(hidden, head, *rest, z_weight=1e-3, **options)
    return [loss.detach(), ce, z, *torch.autograd.grad(3 * loss, (hidden, head))]


def run64(hidden, head, targets, weights):
    leaves = [x.detach().double().requires_grad_() for x in (hidden, head)]
    logits = leaves[0] @ leaves[1]
    ce = (weights * F.cross_entropy(logits, targets, reduction="none")).sum()
    z = (weights * logits.logsumexp(-1).square()).sum()
    loss = ce + 1e-3 * z
    return [x.detach() for x in (loss, ce, z)] + [*torch.autograd.grad(3 * loss, leaves)]


@pytest.mark.parametrize("v", [V, 50_257])
@pytest.mark.parametrize("chunk", [None, 1000 * V])
@pytest.mark.parametrize(("dtype", "tol"), [(torch.bfloat16, 1e-2), (torch.float32, 1e-4)])
def test_loss_and_gradients_are_those_of_float64(dtype, tol, chunk, v):
    given = inputs(v, dtype)
    for got, want in zip(run(*given, chunk_elements=chunk), run64(*given), strict=True):
        assert (got.double() - want).norm() <= tol * want.norm()


def test_nothing_waits_for_the_device_and_the_same_bits_come_twice():
    given = inputs()
    first = run(*given)
    with no_sync():
        second = run(*given)
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_a_captured_graph_gives_the_same_bits():
    given = inputs()
    want = run(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(*given)
    graph.replay()
    assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))


def test_only_the_gradients_and_one_chunk_are_held():
    given = inputs()
    run(*given)  # the workspace of the GEMMs
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    run(*given, chunk_elements=1000 * V)
    chunk, head, hidden = 2 * 1000 * V, D * V, T * D
    most = 4 * head + 2 * hidden + max(chunk, 2 * head + 2 * hidden)
    assert torch.cuda.max_memory_allocated() - before < most + 2**20


def test_its_products_are_counted():
    with FlopCounterMode(display=False) as counter:
        run(*inputs(1000))
    assert counter.get_total_flops() == 3 * 2 * T * D * 1000


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("shape", [(3000, 4096), (7, 130), (3, 16_384), (40_000, 128)])
def test_a_norm_is_that_of_float64(shape, residual):
    x, r, grad = (torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    leaves = [x, torch.rand(shape[-1], device="cuda", dtype=torch.bfloat16), *([r] if residual else [])]

    def both(kernels, leaves):
        leaves = [z.detach().requires_grad_() for z in leaves]
        y = rms_norm(*leaves[:2], residual=leaves[2] if residual else None, kernels=kernels)
        return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(y.dtype))]

    got, want = both("triton", leaves), both("torch", [z.double() for z in leaves])
    for a, b in zip(got, want, strict=True):
        assert (a.double() - b).norm() <= 5e-3 * b.norm()
    assert all(torch.equal(a, b) for a, b in zip(got, both("triton", leaves), strict=True))
