"""Move tokens to the ranks that hold their experts, and back.

A transport is a pair of functions; ``"local"`` and ``"all_to_all"`` are defined here, and a stranger's can be
passed.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single, all_to_all_single_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import register_dataclass

from moekit._made_for import MadeFor
from moekit._route import Routing
from moekit.kernels import check_shapes
from moekit.kernels.permute import expert_slots, to_rows, to_tokens
from moekit.mesh import check_one_axis
from moekit.profiling import ranged
from moekit.tree import check_values, has_values, short_repr


class Transport(NamedTuple):
    """How rows travel: two functions, differentiable in the tokens, the rows and the weights.

    ``dispatch(x, routing, mesh) -> (rows, offsets, plan)``: rows (r, d) in the order (expert, source rank,
    token) of this rank's experts, int32 group end offsets (e,), and anything that the way back needs. A
    fourth result may count this rank's routes that were dropped, (E,) int64.
    ``combine(rows, weights, plan, mesh) -> (t, d)``: each token's k rows come home and are summed with
    ``weights`` (t, k).
    ``mesh`` is the one-axis expert-parallel mesh, or ``None`` for one process. See
    :func:`moekit.testing.check_transport`.
    """

    dispatch: Callable[[Tensor, Routing, DeviceMesh | None], tuple]
    combine: Callable[[Tensor, Tensor, Any, DeviceMesh | None], Tensor]


Via = str | Transport | MadeFor


@dataclass(frozen=True, kw_only=True)
class Dispatched:
    """Rows for the experts of this rank, in expert order, and what brings them home."""

    rows: Float[Tensor, "r d"]
    offsets: Int[Tensor, " e"]  # int32: where each expert's rows end
    weights: Float[Tensor, "t k"]
    dropped: Int[Tensor, " E"] | None  # int64: routes of this rank without room, by expert; None: never any
    plan: Any = field(repr=False)
    transport: Transport | MadeFor = field(repr=False)
    mesh: DeviceMesh | None

    def __repr__(self) -> str:
        return short_repr(self)


register_dataclass(Dispatched)


@ranged("dispatch")
def dispatch(
    x: Float[Tensor, "t d"],
    routing: Routing,
    *,
    via: Via | None = None,
    kernels: str = "auto",
    mesh: DeviceMesh | None = None,
) -> Dispatched:
    """Send every token to the ranks that hold its experts; only what ``via`` has no room for is dropped.

    Pure and differentiable in ``x``. Collective: every rank of ``mesh`` calls it, even with ``t == 0``.

    Parameters
    ----------
    x : Float[Tensor, "t d"]
        Tokens of this rank. ``t`` may differ between ranks.
    routing : Routing
        From :func:`moekit.route`. Rank i of ``mesh`` holds experts [i * e, (i + 1) * e).
    via : {"local", "all_to_all"}, rowwise, deepep or Transport, optional
        By default ``"local"`` on one rank, else ``"all_to_all"``, which works on any backend and reads the
        row counts on the host. A :class:`moekit.rowwise` writes rows to their experts' ranks and waits for
        nothing; a :class:`moekit.deepep` sends by DeepEP 2.
    kernels : {"auto", "torch", "triton"}
        What puts rows into expert order here and sums them in combine; Triton's on CUDA by default.
    mesh : DeviceMesh, optional
        The one-axis expert-parallel mesh, ``mesh["ep"]``.

    Returns
    -------
    Dispatched
        ``rows`` (r, d) in the dtype of ``x`` and in the order (expert, source rank, token); ``offsets`` (e,).

    Raises
    ------
    ValueError
        When ``mesh`` has more than one axis, does not divide the number of experts, ``via`` is unknown or
        does not take these tokens, or tokens and routing differ in number. Raised before any communication.

    References
    ----------
    Lepikhin et al., GShard, 2020. https://arxiv.org/abs/2006.16668
    """
    check_one_axis("dispatch", mesh)
    size = 1 if mesh is None else mesh.size()
    if routing.n_experts % size:
        raise ValueError(
            f"dispatch needs ep to divide n_experts, got n_experts={routing.n_experts}, ep={size}"
        )
    if len(x) != len(routing.expert_ids):
        raise ValueError(
            f"dispatch needs a routing per token, got {len(x)} tokens and {len(routing.expert_ids)} routings"
        )
    shape = routing.expert_ids.shape
    check_shapes("dispatch", x=(x, (len(x), x.shape[-1])), weights=(routing.weights, shape))
    check_values(
        ((routing.expert_ids >= 0) & (routing.expert_ids < routing.n_experts)).all(),
        "dispatch",
        f"expert ids in [0, {routing.n_experts})",
        lambda: f"{routing.expert_ids.min()} to {routing.expert_ids.max()}",
    )
    transport = _transport(via, size, kernels)
    rows, offsets, plan, *dropped = transport.dispatch(x, routing, mesh)
    return Dispatched(
        rows=rows,
        offsets=offsets,
        weights=routing.weights,
        dropped=dropped[0] if dropped else None,
        plan=plan,
        transport=transport,
        mesh=mesh,
    )


@ranged("combine")
def combine(rows: Float[Tensor, "r d"], dispatched: Dispatched) -> Float[Tensor, "t d"]:
    """Bring the experts' outputs home and sum each token's k rows with its routing weights.

    Pure and differentiable in ``rows`` and the weights. Collective over the mesh of the dispatch. The sum is
    taken in float32 at least and returned in the dtype of ``rows``.

    Raises
    ------
    ValueError
        When ``rows`` are not as many as were dispatched.
    """
    if len(rows) != len(dispatched.rows):
        raise ValueError(
            f"combine needs the {len(dispatched.rows)} rows that were dispatched, got {len(rows)}"
        )
    return dispatched.transport.combine(rows, dispatched.weights, dispatched.plan, dispatched.mesh)


def _transport(via: Via | None, size: int, kernels: str) -> Transport | MadeFor:
    if isinstance(via, Transport | MadeFor):
        return via
    if via is None:
        via = "local" if size == 1 else "all_to_all"
    if via == "local" and size > 1:
        raise ValueError(f"dispatch via 'local' needs one rank, got ep={size}; use via='all_to_all'")
    if via not in TRANSPORTS:
        raise ValueError(
            f"dispatch needs via in {sorted(TRANSPORTS)}, a moekit.rowwise(...), a moekit.deepep(...) or a "
            f"moekit.Transport, got {via!r}"
        )
    there, back = cast(tuple[Callable[..., Any], ...], TRANSPORTS[via])  # ours take kernels too
    return Transport(partial(there, kernels=kernels), partial(back, kernels=kernels))


# --- One rank -------------------------------------------------------------------------


def _dispatch_local(
    x: Tensor, routing: Routing, mesh: DeviceMesh | None, *, kernels: str = "auto"
) -> tuple[Tensor, Tensor, Any]:
    del mesh
    slots = expert_slots(routing.expert_ids, routing.n_experts, kernels=kernels)
    return to_rows(x, slots, kernels=kernels), routing.counts.cumsum(0).int(), slots


def _combine_local(
    rows: Tensor, weights: Tensor, plan: Any, mesh: DeviceMesh | None, *, kernels: str = "auto"
) -> Tensor:
    del mesh
    return to_tokens(rows, plan, weights, kernels=kernels)


# --- Any number of ranks, any backend -------------------------------------------------


def _on_host(sent: Int[Tensor, " n"], received: Int[Tensor, " n"], rows: int, mesh: DeviceMesh):
    """Return the rows sent to and received from each rank; in a dry run, without values, as many each."""
    if has_values(sent):
        return torch.stack([sent, received]).tolist()
    n, rank = mesh.size(), mesh.get_local_rank()
    share = [(i + 1) * rows // n - i * rows // n for i in range(n)]
    return share, [share[rank]] * n


def dispatch_all_to_all(
    x: Tensor,
    routing: Routing,
    mesh: DeviceMesh | None,
    *,
    read: Callable = _on_host,
    kernels: str = "auto",
) -> tuple[Tensor, Tensor, Any]:
    """Dispatch on any backend; ``read`` gives the rows sent to and received from each rank, as ints."""
    rows, _, home = _dispatch_local(x, routing, None, kernels=kernels)
    if mesh is None:
        return rows, routing.counts.cumsum(0).int(), (home, None)
    n_out = rearrange(routing.counts, "(rank e) -> rank e", rank=mesh.size())
    n_in = all_to_all_single(n_out, None, None, mesh)  # (source rank, e): rows that come here
    # The host must know them to make the buffers: one wait.
    n_sent, n_received = read(n_out.sum(1), n_in.sum(1), len(rows), mesh)
    rows = all_to_all_single_autograd(rows, n_received, n_sent, mesh)
    # Rows arrive in the order (source rank, expert); the experts want (expert, source rank).
    ids = torch.arange(n_in.shape[1], device=x.device).repeat(mesh.size())
    ids = ids.repeat_interleave(n_in.flatten(), output_size=len(rows))
    slots = expert_slots(ids[:, None], n_in.shape[1], kernels=kernels)
    return (
        to_rows(rows, slots, kernels=kernels),
        n_in.sum(0).cumsum(0).int(),
        (home, (slots, n_sent, n_received)),
    )


def _combine_all_to_all(
    rows: Tensor, weights: Tensor, plan: Any, mesh: DeviceMesh | None, *, kernels: str = "auto"
) -> Tensor:
    home, travel = plan
    if travel is not None:
        assert mesh is not None
        slots, n_sent, n_received = travel
        rows = to_tokens(rows, slots, kernels=kernels)
        rows = all_to_all_single_autograd(rows, n_sent, n_received, mesh)
    return _combine_local(rows, weights, home, None, kernels=kernels)


TRANSPORTS = {
    "local": Transport(_dispatch_local, _combine_local),
    "all_to_all": Transport(dispatch_all_to_all, _combine_all_to_all),
}
