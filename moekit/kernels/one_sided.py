"""Rows written to and read from the memory of other ranks, one kernel each.

``places`` (t, k), int64, from :func:`moekit.kernels.row_map.row_map` say where a token's rows are: rank * n +
row, or -1 for none; of one rank with room for all they are the slots of :mod:`moekit.kernels.permute`. Other
shapes or dtypes than those here are a ``ValueError``. Nothing here waits for another rank;
:class:`moekit.symmetric.SymmetricMemory` has the barrier.

Rows may travel in float8_e4m3fn: ``q``, and a scale ``s`` for each of g runs of d / g features, so that
``q * s`` is the row. One run is a whole row.

Axes: t tokens, k choices, d features, n rows on each rank, g runs of a row.
"""

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from moekit.kernels._backend import (
    INTERPRETED,
    check_shapes,
    jit,
    next_power_of_2,
    operator,
    tl,
    use_triton,
)
from moekit.kernels.quantize import Format, magnitude, quantize, scale_of_magnitude, to_fp8
from moekit.symmetric import Shared

Places = Int[Tensor, "t k"]
FP8 = torch.float8_e4m3fn


def put(x: Float[Tensor, "t d"], places: Places, to: Shared, *, kernels: str = "auto") -> None:
    """Write each token to its places in ``to``, tensors (n, d) of its dtype: a token is read once."""
    _check("put", x, places, to)
    if x.dtype != to.mine.dtype:
        raise ValueError(f"put needs tokens of the rows' {to.mine.dtype}, got {x.dtype}")
    if use_triton("put", kernels, x):
        torch.ops.moekit.put(x, places, to.mine, to.addresses)
        return
    for peer, here, rows in _by_rank(places, to):
        peer[rows] = x[here.nonzero()[:, 0]]


def put_quantized(
    x: Float[Tensor, "t d"], places: Places, to: Shared, scales: Shared, *, kernels: str = "auto"
) -> None:
    """Write tokens, rounded to float8_e4m3fn in g runs, to their places in ``to`` (n, d), ``scales`` (n, g).

    ``to`` is of float8_e4m3fn, ``scales`` of float32, and g divides d.
    """
    _check("put_quantized", x, places, to)
    if scales.mine.shape[0] != len(to.mine) or x.shape[1] % scales.mine.shape[1]:
        raise ValueError(
            f"put_quantized needs scales (n, g) for n={len(to.mine)} rows and g that divides {x.shape[1]}, "
            f"got {tuple(scales.mine.shape)}"
        )
    if use_triton("put_quantized", kernels, x):
        torch.ops.moekit.put_quantized(x, places, to.mine, to.addresses, scales.mine, scales.addresses)
        return
    q, s = quantize(x, Format(block=x.shape[1] // scales.mine.shape[1]), kernels="torch")
    for (peer, here, rows), of_rows in zip(_by_rank(places, to), scales.peers, strict=True):
        token = here.nonzero()[:, 0]
        peer.view(torch.uint8)[rows] = q.view(torch.uint8)[token]
        of_rows[rows] = s[token]


def dequantize_rows(
    rows: Shaped[Tensor, "n d"],
    scales: Float[Tensor, "n g"],
    ends: Int[Tensor, " e"],
    out: Float[Tensor, "n d"],
    *,
    kernels: str = "auto",
) -> None:
    """Write rows times their scales into ``out``, those before the last of ``ends``; others are undefined."""
    if use_triton("dequantize_rows", kernels, out):
        torch.ops.moekit.dequantize_rows(rows, scales, ends, out)
        return
    n, g = scales.shape
    out.copy_((rows.float().view(n, g, -1) * scales[..., None]).flatten(1))


def put_each(values: Shaped[Tensor, "t k"], places: Places, to: Shared, *, kernels: str = "auto") -> None:
    """Write each route's number to its place in ``to``, tensors (n,), in their dtype."""
    check_shapes("put_each", values=(values, places.shape), to=(to.mine, (len(to.mine),)))
    if use_triton("put_each", kernels, values):
        torch.ops.moekit.put_each(values, places, to.mine, to.addresses)
        return
    for peer, here, rows in _by_rank(places, to):
        peer[rows] = values[here].to(peer.dtype)


def get_sum(
    source: Shared,
    places: Places,
    weights: Float[Tensor, "t k"] | None = None,
    *,
    base: Float[Tensor, "t d"] | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "t d"]:
    """Return each token's rows of ``source``, tensors (n, d), times their weights, summed; plus ``base``.

    The sum is in float32 at least, in the order of the choices; the result has the dtype of the rows.
    """
    _check("get_sum", base, places, source)
    check_shapes("get_sum", weights=(weights, places.shape))
    if use_triton("get_sum", kernels, source.mine):
        return torch.ops.moekit.get_sum(source.mine, source.addresses, places, weights, base)
    t, k = places.shape
    wide = torch.promote_types(source.mine.dtype, torch.float32)
    rows = torch.zeros(t, k, source.mine.shape[1], dtype=wide, device=places.device)
    for peer, here, at in _by_rank(places, source):
        rows[here] = peer[at].to(wide)
    if weights is not None:  # one without a place may have any weight
        rows = rows * weights.where(places >= 0, 0)[..., None]
    total = rows.sum(1)
    return (total if base is None else total + base).to(source.mine.dtype)


def get_each(source: Shared, places: Places, *, kernels: str = "auto") -> Shaped[Tensor, "t k"]:
    """Return the number of each route in ``source``, tensors (n,); 0 where it has no place."""
    check_shapes("get_each", source=(source.mine, (len(source.mine),)))
    if use_triton("get_each", kernels, source.mine):
        return torch.ops.moekit.get_each(source.mine, source.addresses, places)
    values = torch.zeros(places.shape, dtype=source.mine.dtype, device=places.device)
    for peer, here, at in _by_rank(places, source):
        values[here] = peer[at]
    return values


def _check(who: str, tokens: Tensor | None, places: Tensor, shared: Shared) -> None:
    n, d = len(shared.mine), shared.mine.shape[-1]
    check_shapes(who, rows=(shared.mine, (n, d)), places=(places, (len(places), places.shape[-1])))
    check_shapes(who, tokens=(tokens, (len(places), d)))


def _by_rank(places: Places, shared: Shared):
    """Return for each rank its tensor, which places are there, and their rows."""
    n = len(shared.mine)
    for rank, peer in enumerate(shared.peers):
        here = (places >= rank * n) & (places < (rank + 1) * n)
        yield peer, here, places[here] - rank * n


# --- Launches -------------------------------------------------------------------------

ROUTES = 256  # numbers a program
COLUMNS = 4096  # of a row, at a time


# What is written is another rank's too; ``mine`` stands for all of it.
@operator("moekit::put", mutates_args=("mine",))
def _put_op(x: Tensor, places: Tensor, mine: Tensor, addresses: Tensor) -> None:
    x, places = x.contiguous(), places.contiguous()
    if places.numel() and x.shape[1]:
        block = min(next_power_of_2(x.shape[1]), COLUMNS)
        grid = (len(x), -(-x.shape[1] // block))
        shape = (len(mine), x.shape[1], places.shape[1])
        _put[grid](x, places, addresses, *shape, BLOCK=block, num_warps=1)  # as for scatter_rows


@_put_op.register_fake
def _(x, places, mine, addresses):
    return None


@operator("moekit::put_quantized", mutates_args=("mine", "scales"))
def _put_quantized_op(
    x: Tensor, places: Tensor, mine: Tensor, addresses: Tensor, scales: Tensor, addresses_of_scales: Tensor
) -> None:
    x, places = x.contiguous(), places.contiguous()
    (t, d), g = x.shape, scales.shape[1]
    assert d % g == 0
    if places.numel() and d:
        block = next_power_of_2(d // g)
        runs = max(1, min(next_power_of_2(g), COLUMNS // block))  # short ones together
        _put_quantized[(t, -(-g // runs))](
            *(x, places, addresses, addresses_of_scales, len(mine)),
            **dict(d=d, k=places.shape[1], g=g, RUNS=runs, BLOCK=block),
            INTERPRETED=INTERPRETED,
            num_warps=8 if block > COLUMNS else 4,
        )


@_put_quantized_op.register_fake
def _(x, places, mine, addresses, scales, addresses_of_scales):
    return None


@operator("moekit::dequantize_rows", mutates_args=("out",))
def _dequantize_rows_op(rows: Tensor, scales: Tensor, ends: Tensor, out: Tensor) -> None:
    (n, d), ends = rows.shape, ends.contiguous()
    if rows.numel():
        block = min(next_power_of_2(d), 4096)
        grid = (n, -(-d // block))
        _dequantize_rows[grid](rows, scales, ends, out, len(ends), d=d, g=scales.shape[1], BLOCK=block)


@_dequantize_rows_op.register_fake
def _(rows, scales, ends, out):
    return None


@operator("moekit::put_each", mutates_args=("mine",))
def _put_each_op(values: Tensor, places: Tensor, mine: Tensor, addresses: Tensor) -> None:
    values, places = values.to(mine.dtype).contiguous(), places.contiguous()
    if n := places.numel():
        _put_each[(-(-n // ROUTES),)](values, places, addresses, len(mine), n, ROUTES=ROUTES)


@_put_each_op.register_fake
def _(values, places, mine, addresses):
    return None


@operator("moekit::get_sum")
def _get_sum_op(
    mine: Tensor, addresses: Tensor, places: Tensor, weights: Tensor | None, base: Tensor | None
) -> Tensor:
    places = places.contiguous()
    weights = None if weights is None else weights.contiguous()
    base = None if base is None else base.contiguous()
    out = _get_sum_like(mine, addresses, places, weights, base)
    if out.numel():
        d = out.shape[1]
        block = min(next_power_of_2(d), COLUMNS)
        _get_sum[(len(out), -(-d // block))](
            mine, addresses, places, weights, base, out, len(mine), d, places.shape[1], BLOCK=block
        )
    return out


@_get_sum_op.register_fake
def _get_sum_like(mine, addresses, places, weights, base):
    return mine.new_empty(len(places), mine.shape[1])


@operator("moekit::get_each")
def _get_each_op(mine: Tensor, addresses: Tensor, places: Tensor) -> Tensor:
    places = places.contiguous()
    out = _get_each_like(mine, addresses, places)
    if n := places.numel():
        _get_each[(-(-n // ROUTES),)](mine, addresses, places, out, len(mine), n, ROUTES=ROUTES)
    return out


@_get_each_op.register_fake
def _get_each_like(mine, addresses, places):
    return mine.new_empty(places.shape)


# --- Kernels --------------------------------------------------------------------------


@jit
def _rows_of(address, dtype: tl.constexpr):
    # Memory begins at multiples of 128 bytes; unsaid, each number of a row would be moved by itself.
    return tl.multiple_of(tl.load(address).to(tl.pointer_type(dtype)), 16)


@jit
def _put(x, places, addresses, n, d: tl.constexpr, k: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + token * d + column, mask=column < d)
    for j in tl.static_range(k):
        place = tl.load(places + token * k + j)
        if place >= 0:
            there = _rows_of(addresses + place // n, x.dtype.element_ty)
            tl.store(there + place % n * d + column, value, mask=column < d, cache_modifier=".cs")


@jit
def _put_quantized(
    x, places, addresses, addresses_of_scales, n,
    d: tl.constexpr, k: tl.constexpr, g: tl.constexpr,
    RUNS: tl.constexpr, BLOCK: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    run, inside = tl.program_id(1) * RUNS + tl.arange(0, RUNS), tl.arange(0, BLOCK)
    column = run[:, None] * (d // g) + inside[None, :]
    valid = (run < g)[:, None] & (inside < d // g)[None, :]
    value = tl.load(x + token * d + column, mask=valid, other=0.0).to(tl.float32)
    scale, inverse = scale_of_magnitude(tl.max(magnitude(value), 1))
    value = to_fp8(value * inverse[:, None], INTERPRETED)
    for j in tl.static_range(k):
        place = tl.load(places + token * k + j)
        if place >= 0:
            there = _rows_of(addresses + place // n, tl.float8e4nv)
            tl.store(there + place % n * d + column, value, mask=valid, cache_modifier=".cs")
            there = _rows_of(addresses_of_scales + place // n, tl.float32)
            tl.store(there + place % n * g + run, scale, mask=run < g)


@jit
def _dequantize_rows(rows, scales, ends, out, e, d: tl.constexpr, g: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(ends + e - 1):
        column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        value = tl.load(rows + row * d + column, mask=column < d, other=0.0).to(tl.float32)
        if g == 1:
            value *= tl.load(scales + row)
        else:
            value *= tl.load(scales + row * g + column // (d // g), mask=column < d, other=0.0)
        tl.store(out + row * d + column, value.to(out.dtype.element_ty), mask=column < d)


@jit
def _put_each(values, places, addresses, n, n_routes, ROUTES: tl.constexpr):
    route = tl.program_id(0).to(tl.int64) * ROUTES + tl.arange(0, ROUTES)
    place = tl.load(places + route, mask=route < n_routes, other=-1)
    kept = place >= 0
    there = tl.load(addresses + place // n, mask=kept, other=0).to(tl.pointer_type(values.dtype.element_ty))
    value = tl.load(values + route, mask=kept)
    tl.store(there + place % n, value, mask=kept)


@jit
def _get_sum(
    mine, addresses, places, weights, base, out, n,
    d: tl.constexpr, k: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(k):  # no branches: all loads are on their way at once
        place = tl.load(places + token * k + j)
        width = tl.where(place >= 0, d, 0)
        there = _rows_of(addresses + tl.maximum(place, 0) // n, mine.dtype.element_ty)
        value = tl.load(there + place % n * d + column, mask=column < width, other=0.0).to(tl.float32)
        if weights is not None:
            value *= tl.where(place >= 0, tl.load(weights + token * k + j), 0.0)
        total += value
    if base is not None:
        total += tl.load(base + token * d + column, mask=column < d, other=0.0).to(tl.float32)
    tl.store(out + token * d + column, total.to(out.dtype.element_ty), mask=column < d)


@jit
def _get_each(mine, addresses, places, out, n, n_routes, ROUTES: tl.constexpr):
    route = tl.program_id(0).to(tl.int64) * ROUTES + tl.arange(0, ROUTES)
    place = tl.load(places + route, mask=route < n_routes, other=-1)
    kept = place >= 0
    there = tl.load(addresses + place // n, mask=kept, other=0).to(tl.pointer_type(mine.dtype.element_ty))
    value = tl.load(there + place % n, mask=kept, other=0.0)
    tl.store(out + route, value, mask=route < n_routes)
