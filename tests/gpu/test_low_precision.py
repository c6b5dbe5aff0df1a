"""Eight-bit products on the device's own units, against the rounded numbers multiplied as wider ones."""

from dataclasses import replace

import pytest
import torch
from reference import draw
from waits import no_sync

import moekit as mk
from moekit.kernels.quantize import MX, ROWWISE, Quantized, quantize, quantize_columns
from moekit.kernels.scaled_mm import scaled_grouped_mm, scaled_mm, scaled_weight_grad
from moekit.precision import preset

CAPABILITY = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)


def on(*capability):
    has = ".".join(map(str, CAPABILITY))
    reason = f"needs compute capability {capability[0]}.{capability[1]}, this device has {has}"
    return pytest.mark.skipif(capability != CAPABILITY, reason=reason)


FORMS = [
    pytest.param(ROWWISE, marks=on(9, 0), id="rowwise"),
    pytest.param(MX, marks=on(10, 0), id="mxfp8"),
]
COUNTS = [300, 0, 1, 7, 516, 200]
OFFSETS = torch.tensor(COUNTS).cumsum(0).int()
R, E, K, N = sum(COUNTS), len(COUNTS), 512, 768


def close(got, want):
    got, want = got.double().cpu(), want.double().cpu()
    # Hopper adds products in fewer bits than float32 between its sums in float32.
    assert (got - want).norm() <= 2e-2 * want.norm()


@pytest.mark.parametrize("form", FORMS)
def test_grouped_products_are_those_of_the_rounded_numbers(form):
    rows, weights = (
        quantize(draw(R + 9, K).float().cuda(), form),
        quantize(draw(E, N, K).float().cuda(), form),
    )
    rows.scales[R:] = torch.nan
    got, want = (
        scaled_grouped_mm(rows, weights, OFFSETS.cuda(), dtype=torch.bfloat16, kernels=kernels)[:R]
        for kernels in ("native", "torch")
    )
    close(got, want)
    one = Quantized(weights.values[0], weights.scales[0])
    x = Quantized(rows.values[:R], rows.scales[:R])
    got, want = (scaled_mm(x, one, dtype=torch.bfloat16, kernels=k) for k in ("native", "torch"))
    close(got, want)


@on(9, 0)
def test_weights_gradients_are_those_of_the_rounded_numbers():
    x, grad = draw(R + 9, K).bfloat16().cuda(), draw(R + 9, N, seed=1).bfloat16().cuda()
    x[R:] = grad[R:] = torch.nan
    columns = [quantize_columns(z, OFFSETS.cuda(), ROWWISE) for z in (x, grad)]
    got, want = (scaled_weight_grad(*columns, dtype=torch.bfloat16, kernels=k) for k in ("native", "torch"))
    close(got, want)
    assert not got[1].any()
    into = torch.ones(E, K, N, device="cuda")
    assert scaled_weight_grad(*columns, dtype=torch.bfloat16, into=into, kernels="native") is None
    close(into - 1, want)


def layer(policy, **options):
    """Return output and gradients of a layer on the device."""
    t, d, h, n_experts = 2048, 512, 256, 16
    x, router = draw(t, d).bfloat16().cuda(), draw(d, n_experts, seed=1).bfloat16().cuda() * d**-0.5
    gate_up = draw(n_experts, d, 2 * h, seed=2).bfloat16().cuda() * d**-0.5
    down = draw(n_experts, h, d, seed=3).bfloat16().cuda() * h**-0.5
    leaves = [z.requires_grad_() for z in (x, router, gate_up, down)]
    params = {"router": router, "experts": {"gate_up": gate_up, "down": down}}
    fixed = dict(assignment="random", key=mk.random.make_key(4, "cuda"))
    y, _ = mk.moe(params, x, top_k=4, precision=policy, **fixed, **options)
    return y, *torch.autograd.grad(y, leaves, draw(t, d, seed=5).bfloat16().cuda())


def decibels(got, want):
    noise = sum(((a.double() - b.double()) ** 2).sum() for a, b in zip(got, want, strict=True))
    return (10 * (sum((b.double() ** 2).sum() for b in want) / noise).log10()).item()


@pytest.mark.parametrize(
    ("policy", "least"),
    [
        pytest.param(preset("fp8_rowwise"), 24, marks=on(9, 0), id="rowwise"),
        pytest.param(
            preset("fp8_rowwise", experts_weight_grad="fp8_rowwise"),
            23,
            marks=on(9, 0),
            id="weight gradients",
        ),
        pytest.param(preset("fp8_rowwise", saved_activations="fp8_rowwise"), 23, marks=on(9, 0), id="saved"),
        pytest.param(preset("mxfp8"), 24, marks=on(10, 0), id="mxfp8 native"),
        pytest.param(preset("mxfp8", emulate=True), 24, id="mxfp8"),
    ],
)
def test_gradients_of_a_layer_have_their_signal_to_noise(policy, least):
    got, want = layer(policy), layer(preset("bf16"))
    assert decibels(got[1:], want[1:]) >= least
    again = layer(policy)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@on(9, 0)
@pytest.mark.parametrize("weight_grad", [None, "fp8_rowwise"])
def test_a_layer_waits_for_nothing(weight_grad):
    policy = replace(preset("fp8_rowwise"), experts_weight_grad=weight_grad)
    layer(policy)
    x = draw(256, 512).bfloat16().cuda().requires_grad_()
    gate_up, down = draw(4, 512, 512).bfloat16().cuda(), draw(4, 256, 512).bfloat16().cuda()
    params = {
        "router": draw(512, 4).bfloat16().cuda(),
        "experts": {"gate_up": gate_up.requires_grad_(), "down": down.requires_grad_()},
    }
    torch.cuda.synchronize()
    with no_sync():
        y, _ = mk.moe(params, x, top_k=2, precision=policy)
        y.sum().backward()
