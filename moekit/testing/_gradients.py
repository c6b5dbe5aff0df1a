"""Gradient parity: the same loss and gradients on every layout as in one process."""

import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map_only

from moekit._text import table
from moekit.batch import Batch
from moekit.context import split_context
from moekit.mesh import context_mesh, data_rank, distribute, make_mesh
from moekit.testing._ranks import ranks
from moekit.transforms import accumulate, data_parallel, value_and_grad
from moekit.tree import named

LOSS = ""  # its name beside those of the parameters, one of which may be "loss"
Layout = Mapping[str, Any]


def check_gradients(
    loss: Callable,
    params: TensorDict,
    batch: Any,
    layouts: Iterable[Layout] | Layout,
    *,
    compose: Callable | None = None,
    rtol: float | None = None,
    device: str = "cpu",
    timeout: float = 120.0,
) -> str:
    """Check that a loss and its gradients are the same on every layout as in one process.

    Parameters
    ----------
    loss : callable
        ``loss(params, batch, *, mesh, **options)`` returns this call's share of the loss of the global batch.
    params : TensorDict
        Full parameters, plain tensors on the CPU; each layout places them by :func:`moekit.mesh.layout`.
    batch : pytree
        The global batch. Tensors are divided by their leading dim, 0-d tensors (its totals) are shared.
    layouts : iterable of dict, or one
        ``edp`` and ``ep`` (default 1), ``cp``: ranks of these among which the rows of a
        :class:`moekit.batch.Batch` are split (then ``loss`` takes ``context``; default 1), ``accumulate``:
        micro-batches (default 1), ``rows``: rows of the batch on each rank, or on each ``cp`` of them
        (default: equal parts; 0 is allowed); every other key is an option of ``loss``.
    compose : callable, optional
        ``compose(loss, n_microbatches, mesh) -> grad_fn``: how the gradients are taken, to check a transform
        of one's own. By default
        ``data_parallel(accumulate(value_and_grad(loss), n_microbatches), mesh=mesh)``.
    rtol : float, optional
        Largest difference allowed in a parameter's gradient, of its largest element; by default 1e-10 in
        float64 and 1e-4 in float32.
    device : {"cpu", "cuda"}
        Of the layouts' ranks, as for :class:`moekit.testing.ranks`; the one process computes on the CPU.
    timeout : float
        Seconds for one layout.

    Returns
    -------
    str
        A table: a row per parameter, a column per layout, the largest relative difference on any rank.

    Raises
    ------
    AssertionError
        With the table and the name of each layout and parameter that differs.
    ValueError
        When a layout does not fit the batch.
    """
    given: list[Any] = [layouts] if isinstance(layouts, Mapping) else list(layouts)
    layouts = [dict(layout) for layout in given]
    for layout in layouts:
        _rows(batch, layout)
    compose = compose or _compose
    names = [LOSS, *named(params)]
    if rtol is None:
        rtol = 1e-10 if _dtype(params) == torch.float64 else 1e-4
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as on the ranks
    try:
        want = _gradients(loss, params, batch, compose, {}, "cpu")
    finally:
        torch.set_num_threads(threads)
    columns = []
    for layout in layouts:
        n = layout.get("edp", 1) * layout.get("ep", 1)
        on_ranks = ranks(n, device=device, timeout=timeout)
        got = on_ranks(_gradients, loss, params, batch, compose, layout, device)
        columns.append({name: max(_difference(one[name], want[name]) for one in got) for name in names})
    table = _table(names, layouts, columns)
    wrong = [
        f"{_row(name)} on {_label(layout)}"
        for layout, column in zip(layouts, columns, strict=True)
        for name in names
        if not column[name] <= rtol
    ]
    if wrong:
        raise AssertionError(f"gradients differ by more than {rtol:g}: {'; '.join(wrong)}\n{table}")
    return table


def _compose(loss: Callable, n_microbatches: int, mesh: DeviceMesh | None) -> Callable:
    return data_parallel(accumulate(value_and_grad(loss), n_microbatches), mesh=mesh)


def _rows(batch: Any, layout: Layout) -> list[int]:
    """Return how many rows of the batch each rank has, or each ``cp`` ranks."""
    edp, ep, cp, n_microbatches = (layout.get(key, 1) for key in ("edp", "ep", "cp", "accumulate"))
    if cp < 1 or edp * ep % cp or (cp > 1 and not isinstance(batch, Batch)):
        raise ValueError(
            "check_gradients needs cp to divide edp * ep ranks, and for cp > 1 a moekit.batch.Batch, "
            f"got {edp=}, {ep=}, {cp=} and {type(batch).__name__}"
        )
    n = edp * ep // cp
    sizes = sorted({len(x) for x in tree_leaves(batch) if isinstance(x, Tensor) and x.ndim})
    total = sizes[0] if sizes else 0
    rows = list(layout.get("rows", [total // max(n, 1)] * n))
    fits = min(edp, ep, n_microbatches) >= 1 and len(rows) == n and sum(rows) == total and len(sizes) < 2
    if not fits or any(r % n_microbatches for r in rows):
        raise ValueError(
            f"check_gradients needs one leading dim of the batch, divided among {n} ranks "
            f"({edp=}, {ep=}{f', {cp=}' if cp > 1 else ''}), each part by accumulate={n_microbatches}; "
            f"got {sizes}, divided {rows}"
        )
    return rows


def _gradients(
    loss: Callable, params: TensorDict, batch: Any, compose: Callable, layout: Layout, device: str
) -> dict[str, Tensor]:
    """Return the summed loss and the full gradients; runs on every rank of a layout, and in one process."""
    rows = _rows(batch, layout)
    options = dict(layout)
    edp, ep, cp, n_microbatches = (options.pop(key, 1) for key in ("edp", "ep", "cp", "accumulate"))
    options.pop("rows", None)
    mesh = make_mesh(edp=edp, ep=ep, device=device) if layout else None
    context = context_mesh(mesh, cp)
    rank, _ = data_rank(mesh, context)
    start, end = sum(rows[:rank]), sum(rows[: rank + 1])
    here = tree_map_only(Tensor, lambda x: (x[start:end] if x.ndim else x).to(device), batch)
    if context is not None:
        options["context"] = context
        here = replace(split_context(here, context=context), n_targets=here.n_targets, n_tokens=here.n_tokens)

    def share(*args: Any) -> Tensor:
        out = loss(*args, mesh=mesh, **options)
        return out[0] if isinstance(out, tuple) else out

    value, grads = compose(share, n_microbatches, mesh)(distribute(params, mesh), here)
    full = {name: g.full_tensor() if isinstance(g, DTensor) else g for name, g in named(grads).items()}
    return {name: x.cpu() for name, x in {LOSS: value, **full}.items()}


def _difference(got: Tensor, want: Tensor) -> float:
    """Return the largest difference as a part of the largest element; NaN counts as infinite."""
    scale = want.abs().max().clamp_min(torch.finfo(want.dtype).tiny)
    return ((got - want).abs().max() / scale).nan_to_num(nan=torch.inf).item()


def _dtype(params: TensorDict) -> torch.dtype:
    return functools.reduce(
        lambda a, b: a if torch.finfo(a).eps >= torch.finfo(b).eps else b,
        (p.dtype for p in params.values(True, True)),
    )


def _label(layout: Layout) -> str:
    return ",".join(f"{k}={getattr(v, '__name__', v)}" for k, v in layout.items()) or "one rank"


def _row(name: str) -> str:
    return {LOSS: "loss", "loss": "params.loss"}.get(name, name)


def _table(names: list[str], layouts: list[dict], columns: list[dict[str, float]]) -> str:
    rows = [["", *map(_label, layouts)], *([_row(n), *(f"{c[n]:.1e}" for c in columns)] for n in names)]
    return table(rows, n_left=len(rows[0]))
