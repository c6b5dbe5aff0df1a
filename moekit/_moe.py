"""One Mixture-of-Experts layer: the four functions composed."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, get_args

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit._dispatch import Dispatched, Via, combine, dispatch
from moekit._exchange import OneRank
from moekit._experts import Kernels, expert_forward, experts_over_tokens
from moekit._low_dense import low_feed_forward
from moekit._policy import BF16, Precision, check_payload
from moekit._rounded import Rounded
from moekit._route import Routing, route
from moekit._rowwise import rowwise
from moekit.kernels import check_shapes, choose_products, elementwise
from moekit.kernels.feed_forward import feed_forward as dense
from moekit.kernels.permute import count_experts, expert_slots
from moekit.kernels.quantize import Quantized
from moekit.mesh import check_one_axis, local
from moekit.overlap import Overlap, beside, two_batch
from moekit.profiling import in_range, ranged
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
    overlap: Overlap = "none",
    route: Callable[..., Routing] = route,
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
    route : callable
        What is called in its place, with the same arguments.
    via, mesh
        As for :func:`moekit.dispatch`.
    kernels, precision, grad_into
        As for :func:`moekit.expert_forward`.
    overlap : {"none", "two_batch", "shared"}
        What runs at the same time on CUDA; elsewhere the same is computed in turn. It need not be faster:
        see :mod:`moekit.overlap`.

        ``"two_batch"``: one half of the tokens travels while the experts compute the other half, and the
        shared expert is computed while the first half is on its way. All tokens are routed together, but a
        ``via`` with a capacity has that room for each half. Rows are copied and kept for the backward as
        :func:`moekit.dispatch` and :func:`moekit.combine` do.

        ``"shared"``: the shared expert runs beside all that is routed. Its output is added at the end, which
        rounds once more where kernels would have added it in their sum.

    Returns
    -------
    y : Float[Tensor, "t d"]
    routing : Routing
        For the balancing losses and counts; its ``dropped`` says what ``via`` had no room for.

    Raises
    ------
    ValueError
        When parameters are missing, among them those of a shared expert that ``overlap`` names, or
        ``overlap`` is unknown; and as :func:`moekit.route`, :func:`moekit.dispatch` and
        :func:`moekit.expert_forward`.
    """
    check_names("moe", "params", params, "router", "experts")
    check_names("moe", "experts", params["experts"], "gate_up", "down")
    if overlap not in get_args(Overlap):
        raise ValueError(
            f"moe needs overlap 'none', 'two_batch' or 'shared', got {overlap!r}; moekit.overlap.fastest "
            "chooses by timing"
        )
    check_one_axis("moe", mesh)
    low = Rounded.of(precision)
    check_payload("moe", low.policy, getattr(via, "payload", None))
    if overlap == "shared":
        options = dict(top_k=top_k, route=route, via=via, grad_into=grad_into, mesh=mesh, **route_options)
        return _beside_shared(params, x, low, kernels, options)
    products = choose_products("moe", kernels, len(x) * top_k, local(params["experts"]["gate_up"]))
    routing = route(params["router"], x, top_k=top_k, kernels=elementwise(kernels), **route_options)
    experts, shared = params["experts"], None
    if "shared" in params.keys():
        shared = partial(_shared_expert, x, params["shared"], low.tokens, low, kernels)
    alone = mesh is None or mesh.size() == 1
    own: dict[str, Any] = dict(precision=low.part("experts"), grad_into=grad_into)
    if overlap == "two_batch":
        y, dropped = _in_two_batches(x, routing, experts, shared, own, kernels, via, mesh)
        return y, replace(routing, dropped=dropped)
    base = None if shared is None else shared()
    options: dict[str, Any] = dict(base=base, products=products, **own)
    if isinstance(via, rowwise):
        via.check_mesh(mesh)
        y, dropped = _through(via, experts, x, routing, options)
        return y, replace(routing, dropped=dropped)
    if products.elementwise == "triton" and via in (None, "local") and alone:
        with in_range("dispatch"):
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
    with in_range("dispatch"):
        places, offsets, dropped = via.plan(routing)
    y = experts_over_tokens(experts, x, places, routing.weights, offsets, exchange=via, **options)
    return y, dropped


@torch.compiler.disable()
def _in_two_batches(
    x: Tensor,
    routing: Routing,
    experts: Any,
    shared: Any,
    own: dict,
    kernels: Kernels,
    via: Via | None,
    mesh: DeviceMesh | None,
) -> tuple[Tensor, Tensor | None]:
    dropped: list[Tensor] = []
    options: dict[str, Any] = dict(kernels=elementwise(kernels))

    def send(x: Tensor, ids: Tensor, weights: Tensor, logits: Tensor, scores: Tensor) -> Dispatched:
        counts = count_experts(ids, routing.n_experts, **options)
        half = Routing(weights=weights, expert_ids=ids, counts=counts, logits=logits, scores=scores)
        return dispatch(x, half, via=via, mesh=mesh, **options)

    def compute(sent: Dispatched) -> tuple[Tensor, Dispatched]:
        dropped.extend([] if sent.dropped is None else [sent.dropped])
        return expert_forward(experts, sent.rows, sent.offsets, kernels=kernels, **own), sent

    run = two_batch(send, compute, lambda out: combine(*out), meanwhile=shared)
    y = run(x, routing.expert_ids, routing.weights, routing.logits, routing.scores)
    return y, torch.stack(dropped).sum(0) if dropped else None


@torch.compiler.disable()
def _beside_shared(
    params: Mapping[str, Any], x: Tensor, low: Rounded, kernels: Kernels, options: dict[str, Any]
) -> tuple[Tensor, Routing]:
    check_names("moe", 'params for overlap="shared"', params, "shared")
    weights = {name: local(p) for name, p in params["shared"].items()}
    take = beside(_shared_expert, x, weights, low.tokens, low, kernels)
    routed = {name: params[name] for name in ("router", "experts")}
    y, routing = moe(routed, x, kernels=kernels, precision=low, **options)
    return y + take(), routing


def _shared_expert(
    x: Tensor, params: Mapping[str, Tensor], tokens: Quantized | None, low: Rounded, kernels: Kernels
) -> Tensor:
    of_shared = low.part("shared", tokens)
    y = feed_forward(params, x, kernels=elementwise(kernels), precision=of_shared)
    check_shapes("moe", **{"what the shared expert gives": (y, x.shape)})
    return y


@ranged("feed_forward")
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
