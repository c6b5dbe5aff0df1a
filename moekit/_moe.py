"""One Mixture-of-Experts layer: the four functions composed."""

from collections.abc import Mapping
from typing import Any

from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit._dispatch import Transport, combine, dispatch
from moekit._experts import Kernels, expert_forward, swiglu
from moekit._route import Routing, route
from moekit.mesh import local


def moe(
    params: TensorDict | Mapping[str, Any],
    x: Float[Tensor, "t d"],
    *,
    top_k: int,
    via: str | Transport | None = None,
    kernels: Kernels = "auto",
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
    kernels
        As for :func:`moekit.expert_forward`.

    Returns
    -------
    y : Float[Tensor, "t d"]
    routing : Routing
        For the balancing losses and counts.
    """
    routing = route(params["router"], x, top_k=top_k, **route_options)
    sent = dispatch(x, routing, via=via, mesh=mesh)
    rows = expert_forward(params["experts"], sent.rows, sent.offsets, kernels=kernels)
    y = combine(rows, sent)
    if "shared" in params.keys():
        y = y + feed_forward(params["shared"], x)
    return y, routing


def feed_forward(
    params: TensorDict | Mapping[str, Tensor], x: Float[Tensor, "*n d"]
) -> Float[Tensor, "*n d"]:
    """Apply a dense SwiGLU feed-forward: ``gate_up`` (d, 2h), ``down`` (h, d). Pure and differentiable."""
    return swiglu(x @ local(params["gate_up"])) @ local(params["down"])
