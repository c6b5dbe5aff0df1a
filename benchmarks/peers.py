"""One MoE layer as moekit's peers make it, from the same weights.

``LAYERS[name](weights, top_k)`` returns ``layer`` and ``parameters``: a function of tokens (t, d), and its
leaves in the peer's own layout. ``weights`` holds ``router`` (d, E), ``gate_up`` (E, d, 2h) with the gate in
the first half, and ``down`` (E, h, d); device, dtype and sizes follow from them.

In all of them: softmax over the experts, top-k, the chosen weights normalised to sum to one, SwiGLU, no
shared expert, no auxiliary loss, no bias. Imports are inside the functions, so that a peer that is not
installed hinders no other. Nothing here makes a peer slower or faster than its own defaults; what had to be
chosen is said at each.
"""

# pyright: reportMissingImports=false
# Most peers are not installed where types are checked.

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Weights = Mapping[str, Tensor]
Layer = tuple[Callable[[Tensor], Tensor], list[Tensor]]
PACKAGES = ("torchtitan", "transformers", "ai2-olmo-core", "sonic-moe", "quack-kernels", "nvidia-cutlass-dsl")


def torchtitan(weights: Weights, top_k: int) -> Layer:
    """Build torchtitan's ``MoE`` without expert parallelism.

    Its gate computes in float32 by autocast, and its experts in bfloat16 whatever the dtype; three grouped
    products. ``load_balance_coeff=None``: no bias to update; in training it still adds to its counts.
    """
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    d, h, n_experts = _sizes(weights)
    config = MoE.Config(
        num_experts=n_experts,
        routed_experts=RoutedExperts.Config(
            inner_experts=GroupedExperts.Config(dim=d, hidden_dim=h, num_experts=n_experts),
            token_dispatcher=LocalTokenDispatcher.Config(num_experts=n_experts, top_k=top_k),
        ),
        router=TokenChoiceTopKRouter.Config(
            num_experts=n_experts,
            gate=Linear.Config(in_features=d, out_features=n_experts, bias=False),
            top_k=top_k,
            score_func="softmax",
            route_norm=True,
        ),
        load_balance_coeff=None,
    )
    layer: Any = _build(config.build, weights)
    experts = layer.routed_experts.inner_experts
    gate, up = weights["gate_up"].chunk(2, -1)
    _set(layer.router.gate.weight, weights["router"].mT)
    _set(experts.w1_EFD, gate.mT)
    _set(experts.w3_EFD, up.mT)
    _set(experts.w2_EDF, weights["down"].mT)
    layer.tokens_per_expert_E = torch.zeros(n_experts, device=weights["router"].device)
    return _of_sequences(layer)


def qwen3(weights: Weights, top_k: int) -> Layer:
    """Build transformers' ``Qwen3MoeSparseMoeBlock`` with ``grouped_mm`` experts: two grouped products."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    d, h, n_experts = _sizes(weights)
    config = Qwen3MoeConfig(
        hidden_size=d, moe_intermediate_size=h, num_experts=n_experts, num_experts_per_tok=top_k,
        norm_topk_prob=True, hidden_act="silu",
    )  # fmt: skip
    return _transformers(config, Qwen3MoeSparseMoeBlock, weights)


def olmoe(weights: Weights, top_k: int) -> Layer:
    """Build transformers' ``OlmoeSparseMoeBlock``, with ``norm_topk_prob`` on (OLMoE has it off)."""
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
    from transformers.models.olmoe.modeling_olmoe import OlmoeSparseMoeBlock

    d, h, n_experts = _sizes(weights)
    config = OlmoeConfig(
        hidden_size=d, intermediate_size=h, num_experts=n_experts, num_experts_per_tok=top_k,
        norm_topk_prob=True, hidden_act="silu",
    )  # fmt: skip
    return _transformers(config, OlmoeSparseMoeBlock, weights)


def _transformers(config: Any, block: Callable[[Any], nn.Module], weights: Weights) -> Layer:
    config._experts_implementation = "grouped_mm"
    layer: Any = _build(lambda: block(config), weights)
    _set(layer.gate.weight, weights["router"].mT)
    _set(layer.experts.gate_up_proj, weights["gate_up"].mT)
    _set(layer.experts.down_proj, weights["down"].mT)
    return _of_sequences(layer)


def olmo_core(weights: Weights, top_k: int) -> Layer:
    """Build OLMo-core's ``DroplessMoE`` as it is without the package grouped_gemm (source only, CUDA).

    Its own Triton gather and scatter, around a loop over the experts that reads their counts on the host.
    """
    from olmo_core.config import DType
    from olmo_core.nn.moe import MoEConfig, MoERouterConfig, MoEType

    d, h, n_experts = _sizes(weights)
    router = weights["router"]
    config = MoEConfig(
        name=MoEType.dropless,
        num_experts=n_experts,
        hidden_size=h,
        router=MoERouterConfig(top_k=top_k, normalize_expert_weights=1.0),
        lb_loss_weight=None,
        z_loss_weight=None,
        dtype=DType.from_pt(router.dtype),
    )
    layer: Any = config.build(d, init_device=str(router.device))
    gate, up = weights["gate_up"].chunk(2, -1)
    _set(layer.router.weight, router.mT.flatten())
    _set(layer.experts.mlp.w1, gate.mT.flatten(0, 1))
    _set(layer.experts.mlp.w3, up.mT.flatten(0, 1))
    _set(layer.experts.mlp.w2, weights["down"].flatten(0, 1))
    return _of_sequences(layer)


def olmo_core_grouped_mm(weights: Weights, top_k: int) -> Layer:
    """Build the same with ``torch.nn.functional.grouped_mm`` where it would call grouped_gemm: a hybrid."""
    import olmo_core.nn.moe.mlp as module

    def gmm(a: Tensor, b: Tensor, batch_sizes: Tensor, trans_b: bool = False) -> Tensor:
        offsets = batch_sizes.to(a.device).cumsum(0).int()
        return F.grouped_mm(a, b.mT if trans_b else b, offs=offsets)

    before, module.gmm = module.gmm, gmm  # pyright: ignore[reportAttributeAccessIssue]
    try:  # the experts read it when they are made
        return olmo_core(weights, top_k)
    finally:
        module.gmm = before


def sonicmoe(weights: Weights, top_k: int) -> Layer:
    """Build SonicMoE's kernels around the parameters of its ``MoE``, which would add an auxiliary loss.

    softmax over the chosen logits is the same as normalising the chosen of the softmax. Its autotuner has no
    switch; it is bounded to six configurations a product, else the first call takes over five minutes.
    """
    from sonicmoe import MoE
    from sonicmoe.enums import ActivationType
    from sonicmoe.functional import moe_TC_softmax_topk_layer

    _bound_autotuning()
    d, h, n_experts = _sizes(weights)
    layer: Any = _build(
        lambda: MoE(
            num_experts=n_experts, num_experts_per_tok=top_k, hidden_size=d, intermediate_size=h,
            activation_function=ActivationType.SWIGLU, add_bias=False, std=0.02,
        ),
        weights,
    )  # fmt: skip
    interleaved = torch.stack(weights["gate_up"].chunk(2, -1), -1).flatten(-2)
    _set(layer.router.weight, weights["router"].mT)
    _set(layer.c_fc.weight, interleaved.mT)
    _set(layer.c_proj.weight, weights["down"].mT)

    def run(x: Tensor) -> Tensor:
        up, down = layer.c_fc.weight.permute(1, 2, 0), layer.c_proj.weight.permute(1, 2, 0)
        stream = torch.cuda.current_stream().cuda_stream
        out, _, _ = moe_TC_softmax_topk_layer(
            x, layer.router.weight, up, None, down, None, top_k, stream, ActivationType.SWIGLU, False
        )
        return out

    return run, list(layer.parameters())


def torchao(weights: Weights, top_k: int) -> Layer:
    """Build plain torch, compiled, around torchao's grouped product of eight-bit numbers. Not in LAYERS.

    It rounds whatever its products read, those of the weights' gradients too, with scales that are powers of
    two; the weights in every call. moekit's router chooses, so that tokens go where moekit's do. Its groups
    have to begin at multiples of 16, and as of 0.18 it does not pad them itself.
    """
    if not weights["router"].is_cuda:
        raise ValueError(f"torchao's kernels need CUDA, got {weights['router'].device}")
    from torchao.prototype.moe_training import _to_fp8_rowwise_then_scaled_grouped_mm as grouped_mm

    import moekit as mk

    def product(rows: Tensor, w: Tensor, ends: Tensor) -> Tensor:
        return grouped_mm(rows, w, ends, out_dtype=rows.dtype, pad_token_groups_for_grouped_mm=False)

    router = weights["router"].detach().clone().requires_grad_()
    gate_up, down = (  # (E, K, N) with K contiguous, as it asks for
        weights[name].detach().mT.contiguous().mT.requires_grad_() for name in ("gate_up", "down")
    )
    experts = torch.compile(functools.partial(padded_experts, product=product), dynamic=False)

    def run(x: Tensor) -> Tensor:
        routing = mk.route(router, x, top_k=top_k)
        return experts(x, routing.expert_ids, routing.weights, routing.counts, gate_up, down)

    return run, [router, gate_up, down]


def padded_experts(
    x: Tensor,
    ids: Tensor,
    routing_weights: Tensor,
    counts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    *,
    product: Callable[[Tensor, Tensor, Tensor], Tensor],
) -> Tensor:
    """Return what experts give, from grouped products whose groups begin at multiples of 16."""
    order = ids.flatten().argsort(stable=True)
    token = order // ids.shape[1]
    padded = (counts + 15) // 16 * 16
    ends = padded.cumsum(0)
    shift = (ends - padded) - (counts.cumsum(0) - counts)  # of each group
    at = torch.arange(len(order), device=x.device) + shift[ids.flatten()[order]]
    rows = x.new_zeros(len(order) + 16 * len(counts), x.shape[1]).index_copy(0, at, x[token])
    gate, up = product(rows, gate_up, ends.int()).chunk(2, -1)
    out = product(F.silu(gate) * up, down, ends.int())[at]
    out = out * routing_weights.flatten()[order, None].to(x.dtype)
    return torch.zeros_like(x).index_add(0, token, out)


def _bound_autotuning() -> None:
    """Leave quack's autotuners six configurations for Hopper, of different tiles and one cluster."""
    import quack.gemm_interface as gemms

    tiles = {(128, 192, True), (128, 160, True), (128, 128, True)}
    tiles |= {(256, 128, False), (256, 192, False), (128, 256, False)}

    def keep(config: Any) -> bool:
        of_tile = (config.tile_m, config.tile_n, config.pingpong) in tiles and not config.swap_ab
        return of_tile and config.device_capacity == 9 and (config.cluster_m, config.cluster_n) == (2, 1)

    for name, tuner in vars(gemms).items():
        if name.endswith("_tuned") and hasattr(tuner, "configs"):
            tuner.configs = [c for c in tuner.configs if keep(c.kwargs["config"])] or tuner.configs


def _sizes(weights: Weights) -> tuple[int, int, int]:
    """Return d, h and E."""
    n_experts, h, d = weights["down"].shape
    return d, h, n_experts


def _build(make: Callable[[], nn.Module], weights: Weights) -> nn.Module:
    """Make a module on the device and in the dtype of the weights, without a float32 copy of it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(weights["router"].dtype)
    try:
        with weights["router"].device:
            return make()
    finally:
        torch.set_default_dtype(before)


def _set(parameter: Tensor, value: Tensor) -> None:
    assert parameter.shape == value.shape, (parameter.shape, value.shape)
    with torch.no_grad():
        parameter.copy_(value)


def _of_sequences(module: nn.Module) -> Layer:
    """Give a module of (b, s, d) all tokens as one sequence."""
    module.requires_grad_(True)
    return lambda x: module(x[None])[0], list(module.parameters())


LAYERS: dict[str, Callable[[Weights, int], Layer]] = {
    f.__name__: f for f in (torchtitan, qwen3, olmoe, olmo_core, olmo_core_grouped_mm, sonicmoe)
}
