import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from reference import close, draw, refuses

from moekit.losses import cross_entropy

V, D = 7, 3


def inputs(t, dtype=torch.float64, masked=0.3):
    generator = torch.Generator().manual_seed(t)
    keep = torch.rand(t, generator=generator) >= masked
    targets = torch.randint(V, (t,), generator=generator)
    hidden, head = draw(t, D, dtype=dtype), draw(D, V, seed=1, dtype=dtype)
    return hidden, head, targets, 0.125 * keep


def plain(hidden, head, targets, weights, z_weight=0.0):
    logits = hidden @ head
    ce = (weights * F.cross_entropy(logits, targets, reduction="none")).sum()
    z = (weights * logits.logsumexp(-1).square()).sum()
    return ce + z_weight * z, ce, z


def with_gradients(fn, hidden, head, *rest, **options):
    hidden, head = (x.clone().requires_grad_() for x in (hidden, head))
    out = fn(hidden, head, *rest, **options)
    return [x.detach() for x in out], torch.autograd.grad(3 * out[0], (hidden, head))


@given(st.integers(0, 9), st.integers(1, 80), st.sampled_from([0.0, 0.25]), st.sampled_from([0.0, 0.3, 1.0]))
def test_loss_and_gradients_are_those_of_the_whole_logits_for_any_chunk_and_mask(t, chunk, z_weight, masked):
    options = dict(z_weight=z_weight, chunk_elements=chunk)
    got = with_gradients(cross_entropy, *inputs(t, masked=masked), **options)
    close(got, with_gradients(plain, *inputs(t, masked=masked), z_weight=z_weight))


@pytest.mark.parametrize("chunk", [1, 3 * V, 2**27])
def test_derivatives_are_those_of_finite_differences(chunk):
    options = dict(z_weight=0.25, chunk_elements=chunk)
    hidden, head, targets, weights = inputs(5)
    leaves = hidden.requires_grad_(), head.requires_grad_()
    assert torch.autograd.gradcheck(lambda *a: cross_entropy(*a, targets, weights, **options)[0], leaves)


def test_equal_weights_give_the_mean_that_torch_gives():
    hidden, head, targets, _ = inputs(6)
    loss, ce, _ = cross_entropy(hidden, head, targets, torch.full((6,), 1 / 6))
    close((loss, ce), (F.cross_entropy(hidden @ head, targets),) * 2, 1e-7)


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_lower_precisions_agree_with_float64_and_sum_in_float32(dtype, tol):
    exact = inputs(40)
    got, grads = with_gradients(
        cross_entropy, exact[0].to(dtype), exact[1].to(dtype), *exact[2:], z_weight=0.1
    )
    want, want_grads = with_gradients(
        plain, exact[0].to(dtype).double(), exact[1].to(dtype).double(), *exact[2:], z_weight=0.1
    )
    assert all(x.dtype == torch.float32 for x in got) and all(g.dtype == dtype for g in grads)
    for x, ref in [*zip(got, want, strict=True), *zip(grads, want_grads, strict=True)]:
        assert (x.double() - ref).norm() <= tol * ref.norm()


@pytest.mark.parametrize("frozen", ["hidden", "head"])
def test_one_gradient_may_be_wanted_alone(frozen):
    hidden, head, targets, weights = inputs(5)
    leaf = (head if frozen == "hidden" else hidden).requires_grad_()
    close(
        *(torch.autograd.grad(fn(hidden, head, targets, weights)[0], leaf) for fn in (cross_entropy, plain))
    )


def test_parts_are_not_differentiable_and_a_second_derivative_is_refused():
    hidden, head, targets, weights = inputs(5)
    loss, ce, z = cross_entropy(hidden.requires_grad_(), head, targets, weights)
    assert loss.requires_grad and not ce.requires_grad and not z.requires_grad
    (grad,) = torch.autograd.grad(loss.square(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_logits_of_any_size_give_a_finite_loss():
    hidden, head, targets, weights = inputs(5, torch.float32)
    got, grads = with_gradients(cross_entropy, 1e4 * hidden, head, targets, weights)
    assert all(bool(x.isfinite().all()) for x in (*got, *grads))


@pytest.mark.parametrize(
    "wrong", [dict(hidden=draw(5, 4)), dict(targets=torch.zeros(4).long()), dict(weights=draw(6))]
)
def test_shapes_that_do_not_fit_are_refused(unchecked, wrong):
    given_ = dict(zip(("hidden", "head", "targets", "weights"), inputs(5), strict=True)) | wrong
    shapes = ", ".join(str(tuple(x.shape)) for x in given_.values())
    with refuses(f"hidden (t, d), head (d, v), targets (t,) and weights (t,), got {shapes}"):
        cross_entropy(**given_)


@pytest.mark.parametrize(
    ("hidden", "head"), [("float16", "float16"), ("bfloat16", "float32"), ("float64", "float32")]
)
def test_dtypes_that_lose_gradients_or_differ_are_refused(hidden, head):
    h, w, targets, weights = inputs(5)
    message = f"one dtype, bfloat16, float32 or float64, got torch.{hidden} and torch.{head}"
    with refuses(f"cross_entropy needs hidden and head of {message}"):
        cross_entropy(h.to(getattr(torch, hidden)), w.to(getattr(torch, head)), targets, weights)


@pytest.mark.parametrize("wrong", [-1, V, -100])
def test_targets_that_are_no_token_are_refused(wrong):
    hidden, head, targets, weights = inputs(5)
    targets[2] = wrong
    lowest, highest = targets.min(), targets.max()
    with refuses(f"cross_entropy needs targets in [0, {V}), got {lowest} to {highest}; give tokens that"):
        cross_entropy(hidden, head, targets, weights)


MEMORY = """
import torch
from moekit.losses import cross_entropy
torch.set_num_threads(1)

def status(key):
    return next(int(line.split()[1]) / 2**20 for line in open("/proc/self/status") if line.startswith(key))

t, v, d = {t}, 100_352, 64
hidden, head = torch.randn(t, d, requires_grad=True), torch.randn(d, v, requires_grad=True)
weights = torch.full((t,), 1 / t)
before = status("VmRSS")
cross_entropy(hidden, head, torch.arange(t), weights, z_weight=1e-4)[0].backward()
print(status("VmHWM") - before)
"""


@pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="reads /proc/self/status, which only Linux has"
)
@pytest.mark.parametrize("t", [4096, pytest.param(16_384, marks=pytest.mark.soak)])
def test_logits_of_a_whole_batch_are_never_held(t):
    done = subprocess.run([sys.executable, "-c", MEMORY.format(t=t)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert 0.35 < float(done.stdout) < 1.0  # GiB; all logits and their gradient would be 3.1 and 12.3
