"""Formats of eight bits: against torchao bit for bit, and by what they stand for."""

import pytest
import torch
from reference import draw, refuses

from moekit.kernels.quantize import (
    MX,
    ROWWISE,
    STEP,
    Format,
    dequantize,
    quantize,
    quantize_columns,
)

FORMATS = {
    "fp8_rowwise": ROWWISE,
    "blocks of 8": Format(block=8),
    "mxfp8": MX,
    "mxfp8 floor": Format(block=32, rounding="floor"),
    "mxfp8 e5m2": Format(torch.float8_e5m2, block=32, rounding="ceil"),
}
EACH = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS)
NAN = float("nan")


def numbers(kind):
    """Return rows (8, 64) in float32."""
    x = draw(8, 64, dtype=torch.float32)
    powers = torch.exp2(draw(8, 64, seed=1).mul(40).clamp(-120, 120).round()).float()
    return {
        "normal": x,
        "of all sizes": x * powers,
        "a size each row": x * powers[:, :1],
        "powers of two": powers,
        "zeros": torch.zeros(8, 64),
        "some zeros": x * (torch.arange(64) >= 32),
        "subnormal": x * 2.0**-130,
        "huge": x.sign() * 3e38,
        "nan": x.where(torch.arange(512).view(8, 64) % 97 > 0, NAN),
    }[kind]


KINDS = "normal|of all sizes|a size each row|powers of two|zeros|some zeros|subnormal|huge".split("|")


@pytest.mark.parametrize("kind", [*KINDS, "nan"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("rounding", ["floor", "ceil"])
def test_elements_and_scales_are_torchaos_bit_for_bit(kind, dtype, elements, rounding):
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor", exc_type=ImportError)
    x = numbers(kind).to(dtype)
    scales, values = mx.to_mx(x, elements, 32, mx.ScaleCalculationMode[rounding.upper()])
    got = quantize(x, Format(elements, 32, rounding))
    assert torch.equal(got.scales.view(torch.uint8), scales.view(torch.uint8))
    # Of the smallest scale, 2**-127, torchao divides by 2**-126: what is below 2**-118 comes back halved.
    same = (scales.view(torch.uint8) > 0).repeat_interleave(32, 1)
    assert torch.equal(got.values.view(torch.uint8)[same], values.view(torch.uint8)[same])


@EACH
@pytest.mark.parametrize("kind", KINDS)
def test_numbers_come_back_to_the_nearest_element(form, kind):
    x = numbers(kind)
    x = x.where(x.abs() > 2.0**-140, 0)  # float32 itself keeps no more of these
    q = quantize(x, form)
    got = dequantize(q, torch.float64)
    of_runs = q.scales.double().repeat_interleave(64 // q.scales.shape[1], 1)
    bits, smallest = {torch.float8_e4m3fn: (4, -9), torch.float8_e5m2: (3, -16)}[form.elements]
    near = torch.maximum(x.double().abs() * 2.0**-bits, of_runs * 2.0 ** (smallest - 1)) * (1 + 1e-6)
    saturated = x.double().abs() > form.largest * of_runs
    assert ((got - x).abs() <= near)[~saturated].all()
    assert (got.abs() == form.largest * of_runs)[saturated].all()
    if form.rounding != "floor":
        assert not (x.double().abs() > form.largest * of_runs * (1 + 1e-6)).any()


@EACH
@pytest.mark.parametrize("number", [NAN, torch.inf, -torch.inf])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_is_not_finite_stays_visible(form, number, dtype):
    x = draw(3, 64, dtype=dtype)
    x[1, 40] = number
    got = dequantize(quantize(x, form))
    run = torch.arange(64) // (form.block or 64) == 40 // (form.block or 64)
    assert got[1, run].isnan().all() and got[1, ~run].isfinite().all() and got[[0, 2]].isfinite().all()


@EACH
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64), (64,), (2, 3, 64)])
def test_any_dims_before_the_last_may_come(form, shape):
    x = draw(*shape, dtype=torch.float32)
    q = quantize(x, form)
    assert q.values.shape == shape and q.values.dtype == form.elements
    assert q.scales.shape == (*shape[:-1], form.n_scales(64))
    assert torch.equal(dequantize(q).view(-1, 64), dequantize(quantize(x.view(-1, 64), form)))


def test_rows_of_a_part_of_a_block_are_refused():
    with refuses("quantize needs a last dim that is a multiple of 32, got 40"):
        quantize(torch.zeros(2, 40), MX)


@pytest.mark.parametrize("d", [1, 40, 1500])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_gives_the_bits_of_the_reference(d, dtype):
    pytest.importorskip("triton")
    x = draw(7, 2 * d, dtype=dtype)[:, ::2] * torch.exp2(draw(7, 1, seed=2) * 20).to(dtype)
    x[2] = 0
    want = quantize(x, ROWWISE, kernels="torch")
    x = torch.cat([x, torch.full((2, d), NAN, dtype=dtype)])  # past the end
    got = quantize(x, ROWWISE, end=torch.tensor([3, 7], dtype=torch.int32), kernels="triton")
    assert torch.equal(got.values.view(torch.uint8)[:7], want.values.view(torch.uint8))
    assert torch.equal(got.scales[:7], want.scales)


@pytest.mark.parametrize("form", [ROWWISE, MX, FORMATS["mxfp8 e5m2"]], ids=["rowwise", "mx", "e5m2"])
@pytest.mark.parametrize("counts", [[3, 0, 40, 160], [0, 0, 128, 0], [0, 0, 0, 0], [1, 1, 1, 1]])
def test_columns_are_rounded_along_the_rows_of_their_group(form, counts):
    ends = torch.tensor(counts).cumsum(0)
    x = torch.cat([draw(int(ends[-1]), 5, dtype=torch.float32), torch.full((6, 5), NAN)])
    got = quantize_columns(x, ends.int(), form)
    wide, pad = got.wide(torch.float32), form.block or STEP
    starts = got.ends - (torch.tensor(counts) + pad - 1) // pad * pad
    for start, count, group in zip(starts.tolist(), counts, x[: ends[-1]].split(counts), strict=True):
        alone = torch.cat([group, group.new_zeros(-count % pad, 5)]).T.contiguous()
        want = dequantize(quantize(alone, form)).T if count else alone.T
        assert start % pad == 0
        torch.testing.assert_close(wide[start : start + len(want)], want, rtol=0, atol=0)
    assert len(wide) >= got.ends[-1] and len(wide) % pad == 0


@pytest.mark.parametrize("counts", [[3, 0, 70, 16], [0, 0, 200, 0], [0, 0, 0, 0]])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_kernel_of_columns_gives_the_bits_of_the_reference(counts, dtype):
    pytest.importorskip("triton")
    ends = torch.tensor(counts).cumsum(0)
    x = torch.cat([draw(int(ends[-1]), 80, dtype=dtype), torch.full((6, 80), NAN, dtype=dtype)])
    got, want = (quantize_columns(x, ends.int(), ROWWISE, kernels=k) for k in ("triton", "torch"))
    assert torch.equal(got.values.view(torch.uint8), want.values.view(torch.uint8))
    assert torch.equal(got.scales, want.scales) and torch.equal(got.ends, want.ends)
