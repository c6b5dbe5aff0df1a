"""One Mixture-of-Experts layer: the four functions composed."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit._dispatch import Via, combine, dispatch
from moekit._experts import Kernels, expert_forward, experts_over_tokens
from moekit._low_dense import low_feed_forward
from moekit._policy import BF16, Precision, check_payload
from moekit._rounded import Rounded
from moekit._route import Routing, route
from moekit._rowwise import rowwise
from moekit.kernels import check_shapes, choose_products, elementwise
from moekit.kernels.feed_forward import feed_forward as dense
from moekit.kernels.permute import OneRank, expert_slots
from moekit.mesh import local
from moekit.tree import check_names, check_not_hollow


def moe(
    params: TensorDict | Mapping[str, Any],
    x: Float[Tensor, "t d"],
    *,
    top_k: int,
    via: Via | None = None,
    kernels: Kernels = "auto",
    precision: Precision | Rounded = BF16,
    grad_into: TensorDict | Mapping[str, Tensor] | None = None,
    mesh: DeviceMesh | None = None,
    **route_options: Any,
) -> tuple[Float[Tensor, "t d"], Routing]:
    """Route, dispatch, compute, combine; add the shared expert where there is one.

    Pure and differentiable. Collective over ``mesh`` as :func:`moekit.dispatch` is.

    Parameters
    ----------
    params : TensorDict
        ``router`` (d, E), ``experts`` (see :func:`moekit.expert_forward`) and optionally ``shared`` with
        ``gate_up`` (d, 2h) and ``down`` (h, d), which every token passes.
    x : Float[Tensor, "t d"]
        Tokens of this rank.
    top_k, **route_options
        As for :func:`moekit.route`.
    via, mesh
        As for :func:`moekit.dispatch`.
    kernels, precision, grad_into
        As for :func:`moekit.expert_forward`.

    Returns
    -------
    y : Float[Tensor, "t d"]
    routing : Routing
        For the balancing losses and counts.

    Raises
    ------
    ValueError
        From the functions that it is made of, for sizes that do not fit or options unknown to them; for
        parameters that are missing.
    """
    check_names("moe", "params", params, "router", "experts")
    check_names("moe", "experts", params["experts"], "gate_up", "down")
    low = Rounded.of(precision)
    check_payload("moe", low.policy, getattr(via, "payload", None))
    products = choose_products("moe", kernels, len(x) * top_k, local(params["experts"]["gate_up"]))
    routing = route(params["router"], x, top_k=top_k, kernels=elementwise(kernels), **route_options)
    experts, base = params["experts"], None
    if "shared" in params.keys():
        of_shared = low.part("shared", low.tokens)
        base = feed_forward(params["shared"], x, kernels=elementwise(kernels), precision=of_shared)
        check_shapes("moe", **{"what the shared expert gives": (base, x.shape)})
    alone = mesh is None or (mesh.ndim == 1 and mesh.size() == 1)  # dispatch refuses a mesh of more axes
    own: dict[str, Any] = dict(precision=low.part("experts"), grad_into=grad_into)
    options: dict[str, Any] = dict(base=base, products=products, **own)
    if isinstance(via, rowwise):
        via.check_mesh(mesh)
        y, dropped = _through(via, experts, x, routing, options)
        return y, replace(routing, dropped=dropped)
    if products.elementwise == "triton" and via in (None, "local") and alone:
        slots = expert_slots(routing.expert_ids, routing.n_experts, kernels="triton")
        offsets = routing.counts.cumsum(0).int()
        exchange = OneRank("triton")
        y = experts_over_tokens(experts, x, slots, routing.weights, offsets, exchange=exchange, **options)
        return y, routing
    sent = dispatch(x, routing, via=via, kernels=elementwise(kernels), mesh=mesh)
    rows = expert_forward(experts, sent.rows, sent.offsets, kernels=kernels, **own)
    y = combine(rows, sent)
    return y if base is None else y + base, replace(routing, dropped=sent.dropped)


@torch.compiler.disable()  # a compiler may copy a buffer that other ranks write to
def _through(via: rowwise, experts: Any, x: Tensor, routing: Routing, options: dict) -> tuple[Tensor, Tensor]:
    places, offsets, dropped = via.plan(routing)
    y = experts_over_tokens(experts, x, places, routing.weights, offsets, exchange=via, **options)
    return y, dropped


def feed_forward(
    params: TensorDict | Mapping[str, Tensor],
    x: Float[Tensor, "*n d"],
    *,
    kernels: str = "auto",
    precision: Precision | Rounded = BF16,
) -> Float[Tensor, "*n d"]:
    """Apply a dense SwiGLU feed-forward: ``gate_up`` (d, 2h), ``down`` (h, d). Pure and differentiable.

    See :func:`moekit.kernels.feed_forward.feed_forward`; ``precision`` is as for
    :func:`moekit.expert_forward`.
    """
    check_names("feed_forward", "params", params, "gate_up", "down")
    gate_up, down = local(params["gate_up"]), local(params["down"])
    y = low_feed_forward(x, gate_up, down, Rounded.of(precision), kernels)
    if y is None:
        check_not_hollow("feed_forward", gate_up=gate_up, down=down)
        y = dense(x, gate_up, down, kernels=kernels)
    return y
