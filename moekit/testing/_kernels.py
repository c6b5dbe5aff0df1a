"""The contract of an expert kernel, checked against the loop in float64."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from moekit._experts import expert_forward

SIZES = {  # name: rows of each expert; rows after the last are garbage
    "equal": ([32] * 4, 0),
    "ragged": ([1, 7, 65, 130], 0),
    "an expert without rows": ([16, 0, 40, 0], 0),
    "one expert takes all": ([0, 0, 200, 0], 0),
    "no rows": ([0, 0, 0, 0], 0),
    "one row": ([0, 1, 0, 0], 0),
    "garbage after the end": ([30, 2, 0, 17], 15),
    "seven rows": ([0, 3, 0, 4], 0),
    "65,537 rows": ([20_000, 0, 45_536, 1], 0),
}
LAYOUTS = {  # name: what is done to weights whose values must not change
    "as they are": lambda w: w,
    "transposed weights": lambda w: w.mT.contiguous().mT,
    "weights of a larger tensor": lambda w: torch.stack([w, w], -1)[..., 0],
    "strided offsets": lambda w: w,
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 5e-6, torch.bfloat16: 1e-2}


def check_kernel(
    op: Callable, *, dtype: torch.dtype = torch.float32, device: str = "cpu", large: bool = False
) -> str:
    """Check an implementation of the experts against the loop in float64: output and every gradient.

    Cases: equal and ragged groups, experts without rows, one that takes all, 0, 1, 7 and 65,537 rows, weights
    that are not contiguous, and NaN in the rows and gradients past the end, which must reach neither a valid
    row nor a weight. Twice in a row with the same bits.

    Parameters
    ----------
    op : callable
        ``op(experts, rows, offsets) -> rows``, as :func:`moekit.expert_forward`.
    dtype : torch.dtype
        float64, float32 or bfloat16. The relative error ``|got - want| / |want|``, of each 1,024 rows
        and of each gradient of weights, may be 1e-12, 5e-6 or 1e-2.
    device : str
        Where to run it.
    large : bool
        Also run one case with more than 2**31 elements of rows (needs about 30 GB on the device in bfloat16).

    Returns
    -------
    str
        A table of the relative errors.

    Raises
    ------
    AssertionError
        Naming the case and what differs or has no gradient; the error, what it may be, and the row or expert
        that is off the most.
    ValueError
        Another dtype.
    """
    if dtype not in TOLERANCE:
        raise ValueError(f"check_kernel needs a dtype of {[*map(str, TOLERANCE)]}, got {dtype}")
    lines = []
    cases = [(case, sizes, n_tail, "as they are") for case, (sizes, n_tail) in SIZES.items()]
    cases += [(layout, [30, 2, 0, 170], 15, layout) for layout in list(LAYOUTS)[1:]]
    for case, sizes, n_tail, layout in cases:
        first, want = _run(op, sizes, n_tail, layout, dtype, device)
        second, _ = _run(op, sizes, n_tail, layout, dtype, device)
        errors = {}
        for name, expected in want.items():
            where, got, again = f"({case}, {dtype})", first[name], second[name]
            assert got is not None and again is not None, f"{name} {where}: no gradient"
            assert got.dtype == dtype, f"{name} {where}: {got.dtype}, wanted {dtype}"
            errors[name] = error = _worst(got, expected)
            assert error <= TOLERANCE[dtype], (
                f"{name} {where}: relative error {error:.1e}, may be {TOLERANCE[dtype]:.0e}; most in "
                f"{'row' if got.ndim == 2 else 'expert'} {_where(got, expected)}"
            )
            assert torch.equal(got, again), f"{name} differs the second time {where}"
        lines.append(f"{case:<28}" + "  ".join(f"{name} {error:.1e}" for name, error in errors.items()))
    if large:
        lines.append(f"{'more than 2**31 elements':<28}" + _check_large(op, dtype, device))
    return "\n".join(lines)


BLOCK = 1024  # rows that share a norm


def _run(
    op: Callable, sizes: list[int], n_tail: int, layout: str, dtype: torch.dtype, device: str
) -> tuple[dict[str, Tensor | None], dict[str, Tensor]]:
    """Return output and gradients of ``op``, and of the loop in float64; None for a missing gradient."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device, dtype)

    valid, e, d, h = sum(sizes), len(sizes), 64, 48
    gate_up, down = draw(e, d, 2 * h) / d**0.5, draw(e, h, d) / h**0.5
    rows, grad = draw(valid + n_tail, d), draw(valid + n_tail, d)
    rows[valid:], grad[valid:] = torch.nan, torch.nan
    offsets = torch.tensor(sizes, device=device).cumsum(0).int()
    if layout == "strided offsets":
        offsets = torch.stack([offsets, offsets + 1], 1)[:, 0]

    def run(fn: Callable, dtype: torch.dtype, n: int) -> dict[str, Any]:
        laid_out = [LAYOUTS[layout](w.to(dtype)) for w in (gate_up, down)]
        leaves = [z.detach().requires_grad_() for z in (rows[:n].to(dtype), *laid_out)]
        out = fn({"gate_up": leaves[1], "down": leaves[2]}, leaves[0], offsets)
        found: list[Tensor | None] = [out.detach(), None, None, None]
        if out.requires_grad:
            found[1:] = torch.autograd.grad(out, leaves, grad[:n].to(dtype), allow_unused=True)
        named = zip(("output", "rows", "gate_up", "down"), found, strict=True)
        return {name: z if z is None or z.ndim == 3 else z[:valid] for name, z in named}

    got = run(op, dtype, valid + n_tail)
    want = run(lambda *args: expert_forward(*args, kernels="loop"), torch.float64, valid)
    return got, want


def _worst(got: Tensor, want: Tensor) -> float:
    """Return the largest relative error of a block of rows, or of a matrix: one norm of all hides a few."""
    if got.ndim == 3 or got.shape != want.shape:
        return relative_error(got, want)
    parts = zip(got.split(BLOCK), want.split(BLOCK), strict=True)
    return max(relative_error(a, b) for a, b in parts)


def _where(got: Tensor, want: Tensor) -> int:
    """Return the row, or expert, that differs the most."""
    off = (got.double() - want.double()).flatten(1).norm(dim=1)
    return int(off.nan_to_num(nan=torch.inf).argmax())


def relative_error(got: Tensor, want: Tensor) -> float:
    """Return ``|got - want| / |want|``, infinite where NaN; ``|got|`` where nothing was wanted."""
    norm = want.norm()
    error = (got.double() - want.double()).norm() / norm if norm > 0 else got.double().norm()
    return error.nan_to_num(nan=torch.inf).item()


def _check_large(op: Callable, dtype: torch.dtype, device: str) -> str:
    """Run more than 2**31 elements of rows through one narrow expert pair, and look at the last rows."""
    d, h = 4096, 64
    n = 2**31 // d + 256
    generator = torch.Generator(device).manual_seed(0)
    rows = torch.randn(n, d, generator=generator, dtype=dtype, device=device)
    experts = {
        "gate_up": torch.randn(2, d, 2 * h, generator=generator, dtype=dtype, device=device) / d**0.5,
        "down": torch.randn(2, h, d, generator=generator, dtype=dtype, device=device) / h**0.5,
    }
    offsets = torch.tensor([128, n], dtype=torch.int32, device=device)
    out = op(experts, rows, offsets)[-128:]
    one = {name: w[1:].double() for name, w in experts.items()}
    end = torch.tensor([128], dtype=torch.int32, device=device)
    error = relative_error(out, expert_forward(one, rows[-128:].double(), end, kernels="loop"))
    assert error <= TOLERANCE[dtype], (
        f"output (more than 2**31 elements, {dtype}): relative error {error:.1e}, "
        f"may be {TOLERANCE[dtype]:.0e}"
    )
    return f"output {error:.1e}"
