"""Products of eight-bit numbers, and the passes that round what they read."""

import pytest
import torch
from reference import close, draw, refuses
from torch.utils.flop_counter import FlopCounterMode

from moekit.kernels.permute import expert_slots, scatter, scatter_quantized
from moekit.kernels.quantize import (
    MX,
    ROWWISE,
    Format,
    Quantized,
    dequantize,
    quantize,
    quantize_columns,
)
from moekit.kernels.rms_norm import rms_norm, rms_norm_quantized
from moekit.kernels.scaled_mm import (
    pad_groups,
    scaled_grouped_mm,
    scaled_mm,
    scaled_weight_grad,
    swizzle,
)
from moekit.kernels.swiglu import swiglu_backward, swiglu_forward
from moekit.kernels.swiglu_quantized import swiglu_backward_quantized, swiglu_forward_quantized

FLOOR = Format(block=32, rounding="floor")
EACH = pytest.mark.parametrize("form", [ROWWISE, MX, FLOOR], ids=["rowwise", "mxfp8", "floor"])
DTYPE = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
COUNTS = [3, 0, 40, 17]
E, R, K, N = len(COUNTS), sum(COUNTS), 64, 96
OFFSETS = torch.tensor(COUNTS).cumsum(0).int()
NAN = float("nan")


def error(got, want):
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


def operands(form, k=K, n=N):
    rows, weights = draw(R, k, dtype=torch.float32), draw(E, n, k, seed=1, dtype=torch.float32)
    return quantize(rows, form), quantize(weights, form)


@EACH
@DTYPE
def test_a_groups_rows_meet_its_matrix_and_nothing_is_lost_but_the_results_rounding(form, dtype):
    rows, weights = operands(form)
    tail = 5  # rows past the end may be anything
    padded = Quantized(*(torch.cat([x.float(), x.new_full((tail, *x.shape[1:]), NAN).float()]) for x in rows))
    padded = Quantized(padded.values.to(form.elements), padded.scales.to(rows.scales.dtype))
    got = scaled_grouped_mm(padded, weights, OFFSETS, dtype=dtype)
    exact = [
        dequantize(Quantized(v, s), torch.float64) @ w.T
        for v, s, w in zip(
            rows.values.split(COUNTS),
            rows.scales.split(COUNTS),
            dequantize(weights, torch.float64),
            strict=True,
        )
    ]
    assert got.shape == (R + tail, N) and got.dtype == dtype
    assert error(got[:R], torch.cat(exact)) <= (2**-8 if dtype == torch.bfloat16 else 1e-6)
    out = torch.full((R + tail, N), 7.0, dtype=dtype)
    assert scaled_grouped_mm(padded, weights, OFFSETS, dtype=dtype, out=out) is out
    assert torch.equal(out[:R], got[:R])


@EACH
@DTYPE
def test_a_dense_product_is_that_of_one_group(form, dtype):
    rows, weights = operands(form)
    one = Quantized(weights.values[0], weights.scales[0])
    exact = dequantize(rows, torch.float64) @ dequantize(one, torch.float64).T
    got = scaled_mm(rows, one, dtype=dtype)
    assert got.dtype == dtype and error(got, exact) <= (2**-8 if dtype == torch.bfloat16 else 1e-6)


@EACH
@DTYPE
def test_weights_gradients_sum_over_the_rows_of_their_group(form, dtype):
    x, grad = draw(R + 4, K, dtype=dtype), draw(R + 4, N, seed=1, dtype=dtype)
    x[R:] = grad[R:] = NAN
    rows, grads = (quantize_columns(z, OFFSETS, form) for z in (x, grad))
    got = scaled_weight_grad(rows, grads, dtype=dtype)
    starts = [0, *rows.ends.tolist()[:-1]]
    exact = torch.stack(
        [
            rows.wide(torch.float64)[a:b].T @ grads.wide(torch.float64)[a:b]
            for a, b in zip(starts, rows.ends.tolist(), strict=True)
        ]
    )
    assert got.shape == (E, K, N) and error(got, exact) <= (2**-8 if dtype == torch.bfloat16 else 1e-6)
    assert not got[1].any()
    into = torch.ones(E, K, N)
    assert scaled_weight_grad(rows, grads, dtype=dtype, into=into) is None
    assert error(into - 1, exact) <= (2**-7 if dtype == torch.bfloat16 else 1e-6)


@pytest.mark.parametrize(("k", "n"), [(128, 256), (144, 272)])
@pytest.mark.parametrize("counts", [[150, 0, 3], [0, 0, 0], [0, 0, 128]])
def test_the_kernel_of_weights_gradients_sums_as_the_reference_does(k, n, counts):
    pytest.importorskip("triton")
    ends, r = torch.tensor(counts).cumsum(0).int(), sum(counts)
    x, grad = draw(r + 4, k, dtype=torch.bfloat16), draw(r + 4, n, seed=1, dtype=torch.bfloat16)
    columns = [quantize_columns(z, ends, ROWWISE) for z in (x, grad)]
    for values, _, padded in columns:
        values[:, padded[-1] :] = NAN  # what stands past the last group is not read
    want = scaled_weight_grad(*columns, dtype=torch.float32, kernels="torch")
    got = scaled_weight_grad(*columns, dtype=torch.bfloat16, kernels="native")
    assert got.dtype == torch.bfloat16 and not got[1].any()
    close(got.float(), want, 2**-7)
    for dtype, most in ((torch.float32, 1e-4), (torch.bfloat16, 2**-6)):
        into = torch.ones(3, k, n, dtype=dtype)
        assert scaled_weight_grad(*columns, dtype=torch.bfloat16, into=into, kernels="native") is None
        close(into.float() - 1, want, most)


def test_operations_of_weights_gradients_are_those_of_rows_not_of_padding():
    pytest.importorskip("triton")
    ends = torch.tensor([64, 256]).int()
    columns = [quantize_columns(draw(256, d, dtype=torch.bfloat16), ends, ROWWISE) for d in (16, 32)]
    into = torch.zeros(2, 16, 32)
    for buffer in (None, into):
        with FlopCounterMode(display=False) as counter:
            scaled_weight_grad(*columns, dtype=torch.bfloat16, into=buffer, kernels="native")
        assert counter.get_total_flops() == 2 * 256 * 16 * 32


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@EACH
@pytest.mark.parametrize("shape", [(0, 32), (2, 5, 64), (3, 1504)])
def test_what_a_norm_makes_is_rounded_as_it_is(shape, form, kernels):
    x, gain = draw(*shape, dtype=torch.float32), draw(shape[-1], seed=1, dtype=torch.float32)
    leaves = [z.requires_grad_() for z in (x, gain)]
    y, low = rms_norm_quantized(x, gain, 1e-5, form, kernels=kernels)
    want = quantize(y.detach(), form, kernels="torch")
    assert torch.equal(low.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(low.scales.float(), want.scales.float())
    assert not low.values.requires_grad and low.matches(form, shape)
    plain = rms_norm(x, gain, 1e-5, kernels=kernels)
    assert torch.equal(y, plain)
    grad = draw(*shape, seed=2, dtype=torch.float32)
    for got, other in zip(*(torch.autograd.grad(z, leaves, grad) for z in (y, plain)), strict=True):
        assert torch.equal(got, other)


@pytest.mark.parametrize(
    ("form", "least"), [(ROWWISE, 28.0), (MX, 28.0), (FLOOR, 27.0)], ids=["rowwise", "mxfp8", "floor"]
)
def test_a_products_signal_to_noise(form, least):
    t, k, n = 512, 256, 256
    x, w, g = draw(t, k), draw(2, k, n, seed=1), draw(t, n, seed=2)
    ends = torch.tensor([200, t]).int()
    groups = [slice(0, 200), slice(200, t)]

    def decibels(got, want):
        return -20 * torch.tensor(error(got, want)).log10().item()

    rounded, grad = quantize(x, form), quantize(g, form)
    forward = scaled_grouped_mm(rounded, quantize(w.mT.contiguous(), form), ends, dtype=torch.float32)
    input_grad = scaled_grouped_mm(grad, quantize(w, form), ends, dtype=torch.float32)
    columns = [quantize_columns(z.float(), ends, form) for z in (x, g)]
    weight_grad = scaled_weight_grad(*columns, dtype=torch.float32)
    found = {
        "forward": decibels(forward, torch.cat([x[s] @ w[i] for i, s in enumerate(groups)])),
        "input": decibels(input_grad, torch.cat([g[s] @ w[i].T for i, s in enumerate(groups)])),
        "weights": decibels(weight_grad, torch.stack([x[s].T @ g[s] for s in groups])),
    }
    assert all(least <= db <= least + 3 for db in found.values()), found


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@EACH
@pytest.mark.parametrize("wide", [False, True])
def test_tokens_are_rounded_once_and_land_in_every_slot(form, kernels, wide):
    x, ids = draw(20, 64, dtype=torch.bfloat16), torch.stack([torch.arange(20) % 3, torch.arange(20) % 4], 1)
    slots = expert_slots(ids, 4, kernels="torch")
    low, rows = scatter_quantized(x, slots, form, wide=wide, kernels=kernels)
    want = scatter(dequantize(quantize(x, form, kernels="torch")), slots, kernels="torch")
    assert torch.equal(dequantize(low), want)
    assert (rows is None) is not wide
    assert rows is None or torch.equal(rows, scatter(x, slots, kernels="torch"))


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("keep", [None, ROWWISE, MX], ids=["whole", "rowwise", "mxfp8"])
@EACH
@pytest.mark.parametrize(("r", "h"), [(0, 32), (7, 64), (3, 1504)])
def test_swiglu_rounds_what_it_makes_from_float32(r, h, form, keep, kernels):
    gate_up, weights = draw(r + 2, 2 * h, dtype=torch.float32), draw(r + 2, seed=1, dtype=torch.float32)
    grad, end = draw(r + 2, h, seed=2, dtype=torch.float32), torch.tensor([0, r]).int()
    for x in (gate_up, weights, grad):
        x[r:] = NAN
    low, kept = swiglu_forward_quantized(gate_up, weights, end, form, keep=keep, kernels=kernels)
    hidden = swiglu_forward(gate_up[:r], weights[:r], None, kernels="torch")
    step = 2.0**-3  # one element from the next, of those that fall on different sides
    rounded = dequantize(quantize(hidden, form, kernels="torch"))
    assert (dequantize(low)[:r] - rounded).abs().le(step * rounded.abs() + 1e-6).all()
    assert r == 0 or error(dequantize(low)[:r], rounded) < 1e-3
    if keep is None:
        assert kept is gate_up
        full = gate_up
    else:
        full = dequantize(kept)
        assert torch.equal(full[:r], dequantize(quantize(gate_up[:r], keep, kernels="torch")))

    got = swiglu_backward_quantized(grad.clone(), kept, weights, end, form, kernels=kernels)
    want = swiglu_backward(grad[:r], full[:r], weights[:r], None, kernels="torch")
    for one, other in zip(got[1:], want, strict=True):
        close(one[:r], other, 1e-5)
    if r:
        assert error(dequantize(got[0])[:r], dequantize(quantize(want[0], form, kernels="torch"))) < 1e-3
    again = grad.clone()
    in_place = swiglu_backward_quantized(again, kept, weights, end, form, in_place=True, kernels=kernels)
    for one, other in zip(in_place[1:], got[1:], strict=True):
        assert torch.equal(one[:r], other[:r])


def test_scales_lie_as_torchao_lays_them_out_for_the_hardware():
    utils = pytest.importorskip("torchao.prototype.mx_formats.utils", exc_type=ImportError)
    ends = torch.tensor([7, 7, 200, 290]).int()
    scales = torch.arange(300 * 6).view(300, 6).to(torch.uint8)
    got = swizzle(scales.view(torch.float8_e8m0fnu)).view(torch.uint8)
    assert got.shape == (384, 8) and torch.equal(got.flatten(), utils.to_blocked(scales))
    assert torch.equal(swizzle(torch.stack([scales, scales + 1]))[1], swizzle(scales + 1))
    padded = swizzle(pad_groups(scales.view(torch.float8_e8m0fnu), ends)).view(torch.uint8).flatten()
    groups = [utils.to_blocked(group) for group in scales[:290].split([7, 193, 90])]
    want = torch.cat(groups)
    assert torch.equal(padded[: len(want)], want)


def test_other_shapes_are_refused():
    rows, weights = operands(ROWWISE)
    with refuses("scaled_grouped_mm needs offsets (4,), got (3,)"):
        scaled_grouped_mm(rows, weights, OFFSETS[:3], dtype=torch.float32)
    with refuses("scaled_mm needs weights"):
        scaled_mm(rows, Quantized(weights.values[0, :, :32], weights.scales[0]), dtype=torch.float32)
    with refuses("swiglu_forward_quantized needs gate_up (r, 2h), two halves, got 7 columns"):
        swiglu_forward_quantized(torch.zeros(2, 7), None, None, ROWWISE)
