"""Numbers in eight bits, with scales kept beside them.

A :class:`Format` says which numbers share a scale, along the last dim: all of a row, with a float32 scale, or
runs of 32, with a power of two, as the OCP Microscaling specification has it. What a product sums over comes
last, so that its scales are those of whole rows, or of runs of its sums.

Axes: n any, d features, b scales of a row, r rows in the order of E groups, R the same padded.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from moekit.kernels._backend import (
    INTERPRETED,
    jit,
    loop_bound,
    next_power_of_2,
    operator,
    tl,
    use_triton,
)

STEP = 128  # rows that a product over rows takes at a time: groups of columns begin at its multiples
# What is scaled to the largest element is this at least: less than any that matters; its inverse is finite.
SMALLEST = 1e-30


@dataclass(frozen=True)
class Format:
    """How numbers are stored.

    Attributes
    ----------
    elements : torch.dtype
        ``float8_e4m3fn``, whose largest is 448, or ``float8_e5m2``, 57,344.
    block : int, optional
        Numbers of the last dim that share a scale; ``None``: all of them.
    rounding : {"floor", "ceil"}, optional
        ``None``: a scale is float32, the largest magnitude by the largest element. Else it is a power of two
        in ``float8_e8m0fnu``: the largest magnitude, rounded to one, by that of the largest element. Rounded
        down, as the specification has it, what is above the largest element becomes it; rounded up, nothing
        is.

    References
    ----------
    OCP Microscaling Formats (MX) Specification 1.0, 2023.
    """

    elements: torch.dtype = torch.float8_e4m3fn
    block: int | None = None
    rounding: Literal["floor", "ceil"] | None = None

    @property
    def largest(self) -> float:
        """The largest element."""
        return torch.finfo(self.elements).max

    @property
    def scale_dtype(self) -> torch.dtype:
        """The dtype of scales."""
        return torch.float32 if self.rounding is None else torch.float8_e8m0fnu

    def n_scales(self, d: int) -> int:
        """Return how many scales a row of ``d`` numbers has.

        Raises
        ------
        ValueError
            Unless whole blocks make up the row.
        """
        if self.block is None:
            return 1
        if d % self.block:
            raise ValueError(f"quantize needs a last dim that is a multiple of {self.block}, got {d}")
        return d // self.block


ROWWISE = Format()
MX = Format(block=32, rounding="ceil")


class Quantized(NamedTuple):
    """Elements, and the scale that each run of the last dim is to be multiplied by."""

    values: Shaped[Tensor, "*n d"]
    scales: Shaped[Tensor, "*n b"]

    def rows(self) -> "Quantized":
        """Return the same with one dim before the last."""
        return Quantized(*(x.reshape(-1, x.shape[-1]) for x in self))

    def matches(self, form: Format, shape: tuple[int, ...]) -> bool:
        """Say whether these are numbers of a format and a shape."""
        of_scales = (*shape[:-1], form.n_scales(shape[-1]))
        dtypes = (self.values.dtype, self.scales.dtype) == (form.elements, form.scale_dtype)
        return dtypes and (self.values.shape, self.scales.shape) == (shape, of_scales)


@torch.no_grad()
def quantize(
    x: Float[Tensor, "*n d"],
    form: Format,
    *,
    end: Int[Tensor, " E"] | None = None,
    largest: Float[Tensor, "*n 1"] | None = None,
    kernels: str = "auto",
) -> Quantized:
    """Round to a format along the last dim. Not differentiable.

    A run with a number that is not finite has the scale NaN; one of zeros comes back as zeros. With scales
    rounded up to powers of two, what is within a rounding of float32's largest comes back as infinity.

    Parameters
    ----------
    end : Int[Tensor, " E"], optional
        Its last element is where valid rows of an ``x`` (n, d) end; those past it are undefined.
    largest : Float[Tensor, "*n 1"], optional
        The largest magnitudes of the rows that ``x`` is a part of, where a row shares a scale.
    kernels : {"auto", "torch", "triton"}
        One Triton kernel for :data:`ROWWISE`; other formats are plain torch.

    Raises
    ------
    ValueError
        Unless whole blocks make up the last dim.
    """
    if not x.numel():
        if largest is None:
            largest = x.new_zeros(*x.shape[:-1], form.n_scales(x.shape[-1]))
        return Quantized(x.to(form.elements), scale_of(largest, form)[0].to(form.scale_dtype))
    if largest is None and has_kernel("quantize", form, x, kernels):
        rows = x.reshape(-1, x.shape[-1])
        values, scales = torch.ops.moekit.quantize_rows(rows, end)
        return Quantized(values.view(x.shape), scales.view(*x.shape[:-1], 1))
    d = x.shape[-1]
    n_scales = form.n_scales(d)
    runs = x.float().unflatten(-1, (n_scales, d // n_scales))
    if largest is None:
        largest = runs.abs().amax(-1, keepdim=True)
    else:
        assert form.block is None
        largest = largest.unsqueeze(-1)
    if form.rounding is None:
        scales, inverse = scale_of(largest, form)
        values = runs * inverse
    else:
        exponent = _exponents(largest, form)
        scales = exponent.to(torch.uint8).view(torch.float8_e8m0fnu)
        # As a float32 of that exponent: of 255, what is not finite, infinity; 2**-127 has none of its own.
        values = runs / (exponent << 23).view(torch.float32).where(exponent > 0, 2.0**-127)
    values = values.clamp(-form.largest, form.largest)  # some casts saturate, some make NaN
    return Quantized(values.flatten(-2).to(form.elements), scales[..., 0])


def has_kernel(who: str, form: Format, x: Tensor, kernels: str) -> bool:
    """Say whether a function that makes numbers of a format from ``x`` runs its Triton kernel."""
    triton = use_triton(who, kernels, x)
    return triton and form == ROWWISE and (not x.is_cuda or has_fp8(x.device))


@functools.cache
def has_fp8(device: torch.device) -> bool:
    """Say whether a CUDA device converts to eight bits in one instruction."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def scale_of(largest: Float[Tensor, "*n"], form: Format) -> tuple[Float[Tensor, "*n"], Float[Tensor, "*n"]]:
    """Return the float32 scale of what has these largest magnitudes, and what it is multiplied by first."""
    largest = largest.float().clamp_min(SMALLEST)
    bound = torch.full_like(largest, form.largest)  # torch would multiply by the inverse of a number
    return torch.where(largest.isfinite(), largest / bound, torch.nan), bound / largest


def _exponents(largest: Float[Tensor, "*n"], form: Format) -> Int[Tensor, "*n"]:
    """Return the scales' exponents plus 127, from 0 to 254, or 255 for what is not finite."""
    bits = largest.view(torch.int32)
    exponent = bits >> 23
    finite = exponent < 255
    if form.rounding == "ceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0)
    of_largest = {torch.float8_e4m3fn: 8, torch.float8_e5m2: 15}[form.elements]
    return (exponent - of_largest).clamp_min(0).where(finite, 255)


def dequantize(q: Quantized, dtype: torch.dtype = torch.float32) -> Float[Tensor, "*n d"]:
    """Return elements times scales. Exact in bfloat16 for powers of two, where that has the exponents."""
    d, n_scales = q.values.shape[-1], q.scales.shape[-1]
    runs = q.values.to(dtype).unflatten(-1, (n_scales, d // n_scales if n_scales else 0))
    return (runs * q.scales.to(dtype)[..., None]).flatten(-2)


class Columns(NamedTuple):
    """Rows of groups, transposed and rounded along their rows, for products that sum over these.

    Groups stand apart: each begins at a multiple of what it is padded to, with zeros.
    """

    values: Shaped[Tensor, "d R"]
    scales: Shaped[Tensor, "d b"]  # of each block of 32; or of each group, b = E
    ends: Int[Tensor, " E"]  # of the padded groups, int32

    def wide(self, dtype: torch.dtype) -> Float[Tensor, "R d"]:
        """Return the padded rows again, elements times scales."""
        if self.scales.dtype == torch.float8_e8m0fnu:
            return dequantize(Quantized(self.values, self.scales), dtype).T
        of = _groups(torch.arange(self.values.shape[1], device=self.ends.device), self.ends)
        return (self.values.to(dtype) * self.scales[:, of].to(dtype)).T


@torch.no_grad()
def quantize_columns(
    x: Float[Tensor, "r d"], offsets: Int[Tensor, " E"], form: Format, *, kernels: str = "auto"
) -> Columns:
    """Round each column of each group of rows to a format. Not differentiable; no host sync.

    Rows past the last offset may be anything, and are left out. Groups are padded to the block, or to what a
    product over them takes a step.
    """
    (r, d), e = x.shape, len(offsets)
    ends, room = padded_ends(offsets, r, form.block or STEP)
    if has_kernel("quantize_columns", form, x, kernels):
        values, scales = torch.ops.moekit.quantize_columns(x, offsets, ends, room)
        return Columns(values, scales.T, ends)
    at = padded_positions(offsets, r, ends, room)
    kept = x.where((at < room)[:, None], 0)
    columns = x.new_zeros(room + 1, d).index_copy_(0, at, kept)[:room].T
    if form.block is not None:
        q = quantize(columns, form, kernels="torch")
        return Columns(q.values.contiguous(), q.scales, ends)
    of = _groups(torch.arange(room, device=x.device), ends)
    largest = x.new_zeros(d, e, dtype=torch.float32)
    largest.scatter_reduce_(1, of.expand(d, -1), columns.abs().float(), "amax")
    scales, inverse = scale_of(largest, form)
    values = (columns.float() * inverse[:, of]).clamp(-form.largest, form.largest)
    return Columns(values.to(form.elements).contiguous(), scales, ends)


def padded_ends(offsets: Int[Tensor, " E"], n_rows: int, pad: int) -> tuple[Int[Tensor, " E"], int]:
    """Return where groups end when each begins at a multiple of ``pad``, and room for any; no host sync."""
    counts = offsets.diff(prepend=offsets.new_zeros(1))
    ends = ((counts + pad - 1) // pad * pad).cumsum(0)
    return ends.int(), -(-n_rows // pad) * pad + len(offsets) * pad


def padded_positions(
    offsets: Int[Tensor, " E"], n_rows: int, ends: Int[Tensor, " E"], room: int
) -> Int[Tensor, " r"]:
    """Return where rows go in padded groups; those past the last offset go past the room. No host sync."""
    zero = offsets.new_zeros(1)
    shift = torch.cat([zero, ends[:-1]]) - torch.cat([zero, offsets[:-1]])  # of each group's first row
    row = torch.arange(n_rows, device=offsets.device)
    return (row + shift[_groups(row, offsets)]).where(row < offsets[-1], room)


def _groups(row: Int[Tensor, " r"], ends: Int[Tensor, " E"]) -> Int[Tensor, " r"]:
    """Return the group of each row; of those past the end, the last."""
    return torch.searchsorted(ends, row, right=True).clamp_max(len(ends) - 1)


# --- Launches and kernels -------------------------------------------------------------


@operator("moekit::quantize_rows")
def _quantize_op(x: Tensor, end: Tensor | None) -> tuple[Tensor, Tensor]:
    x, end = x.contiguous(), None if end is None else end.contiguous()
    values, scales = _quantized_like(x, end)
    if values.numel():
        block = min(next_power_of_2(x.shape[1]), WIDEST)
        _quantize[(len(x),)](
            *(x, end, values, scales, x.shape[1], 0 if end is None else len(end)),
            **dict(INTERPRETED=INTERPRETED, BLOCK=block, num_warps=warps_of_row(block)),
        )
    return values, scales


@_quantize_op.register_fake
def _quantized_like(x, end):
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(len(x), dtype=torch.float32)


@operator("moekit::quantize_columns")
def _quantize_columns_op(x: Tensor, offsets: Tensor, ends: Tensor, room: int) -> tuple[Tensor, Tensor]:
    x, offsets = x.contiguous(), offsets.contiguous()
    d, e = x.shape[1], len(offsets)
    largest = x.new_zeros(e, d, dtype=torch.int32)
    values, scales = _columns_like(x, offsets, ends, room)
    if values.numel():
        columns = -(-d // COLUMNS)
        options = dict(d=d, ROWS=32, COLUMNS=COLUMNS, num_warps=4)
        splits = min(max(PROGRAMS // (columns * e), 2), len(x) // 32 + 1)  # programs that share a group
        _quantize_largest[(columns, e, splits)](x, offsets, largest, **options)
        _quantize_scales[(columns, e)](largest, scales, d=d, COLUMNS=COLUMNS)
        _quantize_transpose[(columns, room // STEP)](
            *(x, offsets, ends, largest, values, e, room),
            **dict(d=d, STEP=STEP, COLUMNS=COLUMNS, GROUPS=next_power_of_2(e), INTERPRETED=INTERPRETED),
            num_warps=8,
        )
    return values, scales


@_quantize_columns_op.register_fake
def _columns_like(x, offsets, ends, room):
    d = x.shape[1]
    return (
        x.new_empty(d, room, dtype=torch.float8_e4m3fn),
        x.new_empty(len(offsets), d, dtype=torch.float32),
    )


WIDEST = 8192  # numbers that a program holds of a row
PROGRAMS = 4096  # that read columns at least, where groups are few
COLUMNS = 128  # of a program


def warps_of_row(block: int) -> int:
    """Return the warps of a program that holds a row: 16 or 32 numbers a thread."""
    return max(1, min(16, block // 512))


@jit
def magnitude(value):
    """Return float32 magnitudes as integers, in whose order NaN is above all: a maximum keeps it."""
    return value.to(tl.int32, bitcast=True) & 0x7FFFFFFF


@jit
def scale_of_magnitude(bits):
    """Return the scale of what has this largest magnitude, and what it is multiplied by; as scale_of."""
    largest = bits.to(tl.float32, bitcast=True)
    largest = tl.where(largest < 1e-30, 1e-30, largest)
    scale = tl.where(largest < float("inf"), tl.div_rn(largest, 448.0), float("nan"))
    return scale, tl.div_rn(448.0, largest)


@jit
def to_fp8(value, INTERPRETED: tl.constexpr):
    """Round float32 numbers up to 448 to float8_e4m3fn."""
    if INTERPRETED:
        value = _round_to_fp8(value)
    return value.to(tl.float8e4nv)


@jit
def _round_to_fp8(value):
    # The interpreter's cast rounds ties up, loses carries and cuts small numbers off; of these it has none.
    bits = value.to(tl.int32, bitcast=True)
    near = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000  # to three bits behind the first
    small = ((tl.abs(value) + 16384.0) - 16384.0).to(tl.int32, bitcast=True)  # to multiples of 2**-9
    near = tl.where(tl.abs(value) < 0.015625, small | (bits & -0x80000000), near)
    return near.to(tl.float32, bitcast=True)


@jit
def _quantize(
    x, end, values, scales, d: tl.constexpr, n_ends, INTERPRETED: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    if end is not None:
        if row >= tl.load(end + n_ends - 1):
            return
    most = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, d, BLOCK):
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * d + column, mask=column < d, other=0.0).to(tl.float32)
        most = tl.maximum(most, magnitude(value))
    scale, inverse = scale_of_magnitude(tl.max(most))
    tl.store(scales + row, scale)
    for start in range(0, d, BLOCK):  # read again, from a cache
        column = start + tl.arange(0, BLOCK)
        value = tl.load(x + row * d + column, mask=column < d, other=0.0).to(tl.float32)
        tl.store(values + row * d + column, to_fp8(value * inverse, INTERPRETED), mask=column < d)


@jit
def _quantize_largest(x, offsets, largest, d: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    group = tl.program_id(1)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group)
    most = tl.zeros((ROWS, COLUMNS), tl.int32)
    first = start + tl.program_id(2) * ROWS
    for at in range(loop_bound(first), loop_bound(end), loop_bound(tl.num_programs(2) * ROWS)):
        row = (at + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < end)[:, None] & (column < d)[None, :]
        value = tl.load(x + row[:, None] * d + column[None, :], mask=inside, other=0.0).to(tl.float32)
        most = tl.maximum(most, magnitude(value))
    tl.atomic_max(largest + group * d + column, tl.max(most, 0), mask=column < d)  # integers, in any order


@jit
def _quantize_scales(largest, scales, d: tl.constexpr, COLUMNS: tl.constexpr):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    at = tl.program_id(1) * d + column
    scale, _ = scale_of_magnitude(tl.load(largest + at, mask=column < d, other=0))
    tl.store(scales + at, scale, mask=column < d)


@jit
def _quantize_transpose(
    x, offsets, ends, largest, values, n_groups, room, d: tl.constexpr, STEP: tl.constexpr,
    COLUMNS: tl.constexpr, GROUPS: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    first = tl.program_id(1) * STEP  # all of one group, which begins at a multiple of STEP
    at, column = first + tl.arange(0, STEP), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    groups = tl.arange(0, GROUPS)
    padded = tl.load(ends + groups, mask=groups < n_groups, other=room)
    group = tl.sum((padded <= first).to(tl.int32))
    begin = tl.load(ends + group - 1, mask=group > 0, other=0)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group, mask=group < n_groups, other=0)
    row = start + (at - begin)
    inside = (row < end)[:, None] & (column < d)[None, :]
    value = tl.load(x + row.to(tl.int64)[:, None] * d + column[None, :], mask=inside, other=0.0)
    bits = tl.load(largest + group * d + column, mask=(column < d) & (group < n_groups), other=0)
    _, inverse = scale_of_magnitude(bits)
    low = to_fp8(value.to(tl.float32) * inverse[None, :], INTERPRETED)
    place = values + column.to(tl.int64)[:, None] * room + at[None, :]
    tl.store(place, tl.trans(low), mask=(column < d)[:, None])
