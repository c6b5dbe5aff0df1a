"""The model family as functions of a parameter TensorDict.

Which parts a model has (norms before or after, query and key norms, shared experts, a tied head) is read off
its parameters; sizes and routing come from a :class:`moekit.ModelConfig`.

Axes: b sequences, s positions, t = b * s tokens, d d_model, v vocabulary.
"""

import functools
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int, Integer
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit import balance
from moekit._dispatch import Via
from moekit._experts import Kernels
from moekit._low_dense import linear
from moekit._moe import feed_forward, moe
from moekit._policy import BF16, Precision
from moekit._rounded import Rounded
from moekit._route import Assignment, Routing, route
from moekit.batch import Batch
from moekit.config import ModelConfig, Stage
from moekit.context import (
    Attend,
    AttentionVia,
    Mask,
    attend as attend_here,
    check_split,
    choose_attention,
    positions_of,
    whole_rows,
)
from moekit.kernels import check_kernels, check_shapes, elementwise
from moekit.kernels.attention import attention_of_qkv, find_documents, has_kernel
from moekit.kernels.qk_norm_rope import Rope, is_per_head, qk_norm_rope
from moekit.kernels.quantize import Quantized
from moekit.kernels.rms_norm import rms_norm as normed, rms_norm_quantized
from moekit.losses import cross_entropy
from moekit.mesh import local
from moekit.overlap import Overlap
from moekit.params import param_shapes
from moekit.profiling import ranged
from moekit.random import fold_in
from moekit.tree import check_values, named

Params = TensorDict | Mapping[str, Any]


def rms_norm(
    x: Float[Tensor, "*n d"],
    gain: Float[Tensor, " d"],
    eps: float = 1e-5,
    *,
    residual: Float[Tensor, "*n d"] | None = None,
    kernels: str = "auto",
) -> Float[Tensor, "*n d"]:
    """Divide by the root mean square of the last dim, times ``gain`` (arXiv:1910.07467); add ``residual``."""
    return normed(x, local(gain), eps, residual=residual, kernels=elementwise(kernels))


def rope_table(n_positions: int, *, config: ModelConfig, like: Tensor) -> Rope:
    """Return cosines and sines, each (s, d_head / 2), in float32 at least, on the device of ``like``.

    Raises
    ------
    ValueError
        When the sequence is longer than ``config.max_seq_len``.

    References
    ----------
    Su et al., RoFormer, 2021. https://arxiv.org/abs/2104.09864
    """
    if n_positions > config.max_seq_len:
        raise ValueError(
            f"rope_table needs at most max_seq_len={config.max_seq_len} positions, got {n_positions}; "
            "shorten the sequence or raise max_seq_len"
        )
    exponent = torch.arange(0, config.d_head, 2, dtype=torch.float64, device=like.device) / config.d_head
    positions = torch.arange(n_positions, dtype=torch.float64, device=like.device)
    angles = torch.outer(positions, config.rope_base**-exponent)
    dtype = torch.promote_types(like.dtype, torch.float32)
    return angles.cos().to(dtype), angles.sin().to(dtype)


@ranged("attention")
def attention(
    params: Params,
    x: Float[Tensor, "b s d"],
    *,
    n_heads: int,
    n_kv_heads: int,
    rope: Rope,
    mask: Mask = None,
    attend: Attend | None = None,
    eps: float = 1e-5,
    kernels: str = "auto",
    precision: Precision | Rounded = BF16,
) -> Float[Tensor, "b s d"]:
    """Attend causally, within documents where a mask says so, with grouped queries.

    Pure and differentiable. Collective as ``attend`` is. Where kernels allow, a position keeps for the
    backward the output of ``qkv``, attention's own output and a float32 a head.

    Parameters
    ----------
    params : TensorDict
        ``qkv`` (d, (n_heads + 2 n_kv_heads) * h), ``out`` (n_heads * h, d); optionally ``q_norm`` and
        ``k_norm``, RMSNorm gains of one head (h,) or of the full width.
    x : Float[Tensor, "b s d"]
        Any float dtype.
    n_heads, n_kv_heads : int
        Query heads, and the key and value heads they share.
    rope : tuple of Tensor
        From :func:`rope_table`.
    mask : Float[Tensor, "b 1 s s"] or Documents, optional
        From :func:`document_mask`, or :func:`moekit.kernels.attention.find_documents` where there are kernels
        (:func:`moekit.kernels.attention.has_kernel`): a position sees its own document alone. RoPE is
        relative, so positions need not restart.
    attend : callable, optional
        ``attend(q, k, v, mask)`` of heads (b, n, s, h), as :func:`moekit.context.attend`, which is the
        default, or :func:`moekit.context.attend_over_heads` over several ranks.
    eps : float
        Of the norms.
    kernels : {"auto", "torch", "triton"}
        ``"auto"``: on CUDA, in half precision and for usual d_head, those of
        :mod:`moekit.kernels.attention` and :mod:`moekit.kernels.qk_norm_rope`. Norms of the full width, and
        dense masks, are left to torch.
    precision : Precision or Rounded
        Its ``attention_projections`` are the products with ``qkv`` and ``out``.

    Returns
    -------
    Float[Tensor, "b s d"]

    References
    ----------
    Ainslie et al., GQA, 2023. https://arxiv.org/abs/2305.13245
    """
    low = Rounded.of(precision)
    role = ("attention", "attention_projections")
    qkv = linear(*role, "qkv", x, local(params["qkv"]), low, kernels)
    d_head = qkv.shape[-1] // (n_heads + 2 * n_kv_heads)
    q_gain, k_gain = (local(params[x]) if x in params.keys() else None for x in ("q_norm", "k_norm"))
    heads: dict[str, Any] = dict(n_heads=n_heads, n_kv_heads=n_kv_heads, eps=eps)
    fused = attend is None and is_per_head(q_gain, k_gain, d_head)
    if fused and not isinstance(mask, Tensor) and has_kernel("attention", kernels, qkv, d_head):
        out = attention_of_qkv(qkv, q_gain, k_gain, rope, mask, **heads)
    else:
        q, k, v = qk_norm_rope(qkv, q_gain, k_gain, rope, kernels=kernels, **heads)
        out = attend_here(q, k, v, mask, kernels=kernels) if attend is None else attend(q, k, v, mask)
    out = rearrange(out, "b n s h -> b s (n h)")
    return linear(*role, "out", out, local(params["out"]), replace(low, tokens=None), kernels)


def document_mask(
    documents: Int[Tensor, "b s"], *, dtype: torch.dtype, queries: Int[Tensor, " q"] | None = None
) -> Float[Tensor, "b 1 _ s"]:
    """Return what is added to attention's scores: 0 where a query (dim -2) sees a key, else minus infinity.

    A position sees the earlier ones of its document, and itself. ``queries`` are the positions that look, by
    default all. A float mask, made once for all layers: of a bool one each layer would make and keep a float
    copy.
    """
    keys = torch.arange(documents.shape[1], device=documents.device)
    queries = keys if queries is None else queries
    seen = (documents[:, None, queries, None] == documents[:, None, None, :]) & (keys <= queries[:, None])
    return torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill_(~seen, -torch.inf)


def transformer_block(
    params: Params,
    x: Float[Tensor, "b s d"],
    *,
    config: ModelConfig,
    rope: Rope,
    mask: Mask = None,
    attend: Attend | None = None,
    wrap: Callable[[str, Callable], Callable] = lambda name, fn: fn,
    kernels: Kernels = "auto",
    precision: Precision | Rounded = BF16,
    overlap: Overlap = "none",
    route: Callable[..., Routing] = route,
    **moe_options: Any,
) -> tuple[Float[Tensor, "b s d"], Routing | None]:
    """Add attention, then a feed-forward or a Mixture of Experts, each with its norms, to what came in.

    Pure and differentiable. Collective as :func:`moekit.moe` is, where the block has experts, and as
    ``attend`` is.

    Parameters
    ----------
    params : TensorDict
        ``layers.i`` of the model's parameters: ``attention``, ``moe`` or ``ffn``, and the norms that there
        are: ``attention_norm_in`` before attention, ``attention_norm_out`` after it, and likewise ``ffn_*``.
    x : Float[Tensor, "b s d"]
        The residual stream.
    config, rope, mask, attend, kernels, precision
        As for :func:`forward` and :func:`attention`; rounded weights are those of ``layers.i``.
    wrap : callable
        ``wrap(name, fn)`` for the parts ``"attention"`` and ``"ffn"``, each with what it adds to; see
        :func:`moekit.remat`.
    overlap, route
        As for :func:`moekit.moe`, where the block has experts.
    **moe_options
        As for :func:`moekit.moe`.

    Returns
    -------
    x : Float[Tensor, "b s d"]
    routing : Routing or None
    """
    eps = config.norm_eps
    if "ffn" in params.keys() and moe_options:
        raise TypeError(
            f"transformer_block needs no options of moe for one without experts, got {sorted(moe_options)}"
        )

    low = Rounded.of(precision)

    def mix(z: Tensor, tokens: Quantized | None) -> Tensor:
        return attention(
            params["attention"],
            z,
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            rope=rope,
            mask=mask,
            attend=attend,
            eps=eps,
            kernels=elementwise(kernels),
            precision=low.part("attention", tokens),
        )

    def feed(z: Tensor, tokens: Quantized | None) -> tuple[Tensor, Routing | None]:
        if "ffn" in params.keys():
            own = low.part("ffn", tokens)
            return feed_forward(params["ffn"], z, kernels=elementwise(kernels), precision=own), None
        y, routing = moe(
            params["moe"],
            rearrange(z, "b s d -> (b s) d"),
            top_k=config.top_k,
            score=config.score,
            normalize=config.normalize,
            scale=config.route_scale,
            n_groups=config.n_groups,
            top_groups=config.top_groups,
            kernels=kernels,
            precision=low.part("moe", None if tokens is None else tokens.rows()),
            overlap=overlap,
            route=route,
            **moe_options,
        )
        return y.view(z.shape), routing

    def norm(name: str, z: Tensor, residual: Tensor | None = None) -> Tensor:
        if name in params.keys():
            return rms_norm(z, params[name], eps, residual=residual, kernels=kernels)
        return z if residual is None else residual + z

    def norm_in(name: str, z: Tensor, role: str) -> tuple[Tensor, Quantized | None]:
        form = low.policy.form(role)
        is_read = role != "feed_forward" or "ffn" in params.keys() or "shared" in params["moe"].keys()
        if form is None or name not in params.keys() or not is_read:
            return norm(name, z), None
        return rms_norm_quantized(z, local(params[name]), eps, form, kernels=elementwise(kernels))

    def attention_part(z: Tensor) -> Tensor:
        normed = norm_in("attention_norm_in", z, "attention_projections")
        return norm("attention_norm_out", mix(*normed), residual=z)

    def ffn_part(z: Tensor) -> tuple[Tensor, Routing | None]:
        y, routing = feed(*norm_in("ffn_norm_in", z, "feed_forward"))
        return norm("ffn_norm_out", y, residual=z), routing

    attention_part, ffn_part = wrap("attention", attention_part), wrap("ffn", ffn_part)
    return ffn_part(attention_part(x))


def forward(
    params: Params,
    tokens: Int[Tensor, "b s"],
    *,
    config: ModelConfig,
    documents: Int[Tensor, "b s"] | None = None,
    sample_ids: Int[Tensor, " b"] | None = None,
    biases: Float[Tensor, "l E"] | None = None,
    key: Int[Tensor, ""] | None = None,
    assignment: Assignment = "top_k",
    expert_ids: Integer[Tensor, "b l s k"] | None = None,
    via: Via | None = None,
    kernels: Kernels = "auto",
    precision: Precision | Rounded = BF16,
    grad_into: TensorDict | None = None,
    block: Callable = transformer_block,
    attention_via: AttentionVia | None = None,
    context: DeviceMesh | None = None,
    x: Float[Tensor, "b s d"] | None = None,
    stage: Stage | None = None,
    mesh: DeviceMesh | None = None,
) -> tuple[Float[Tensor, "b s d"], list[Routing]]:
    """Return what the head, or the next stage, reads, and the routing of each layer that has experts.

    Pure and differentiable. Collective over ``mesh["ep"]`` in every layer that has experts, and over
    ``context`` in every layer.

    Parameters
    ----------
    params : TensorDict
        From :func:`moekit.init_params`.
    tokens : Int[Tensor, "b s"]
        Token ids in [0, vocab_size); ``b`` may be 0 and differ between ranks.
    config : ModelConfig
        The model.
    documents : Int[Tensor, "b s"], optional
        A number per document within its row, where it is one run; attention stays inside documents.
    sample_ids : Int[Tensor, " b"], optional
        A number of each row that does not depend on the layout, from which random assignments are drawn; by
        default its place in ``tokens``.
    biases : Float[Tensor, "l E"], optional
        Balancing bias of each layer with experts, float32.
    key, assignment
        As for :func:`moekit.route`; the key of each layer is ``fold_in(key, layer)``.
    expert_ids : Integer[Tensor, "b l s k"], optional
        The experts that each position goes to in each layer that has experts; by default routers choose.
    via, kernels
        As for :func:`moekit.dispatch` and :func:`moekit.expert_forward`.
    precision : Precision or Rounded
        Which operands are rounded to eight bits, role by role. A policy alone rounds the weights in every
        call; :func:`moekit.precision.round_weights` rounds them once a step.
    grad_into : TensorDict, optional
        Buffers for the gradients of experts' parameters, under the names of all or some of them; see
        :func:`moekit.expert_forward`.
    block : callable
        Applied to each layer; ``moekit.remat(moekit.model.transformer_block)`` recomputes it in backward.
    attention_via : {"all_to_all", "all_gather"}, optional
        How attention sees the whole rows of a context: each rank takes a share of the heads
        (:func:`moekit.context.attend_over_heads`, by default where cp divides ``n_heads``), or all keys and
        values (:func:`moekit.context.attend_over_keys`).
    context : DeviceMesh, optional
        From :func:`moekit.mesh.context_mesh`, where rows are split over its ranks: ``tokens`` and
        ``documents`` are this rank's part of them (:func:`moekit.context.split_context`).
    x, stage
        Of a pipeline: what the stage before has returned (None for the first), and the stage to apply; by
        default the whole model. ``params`` may hold those of other stages too.
    mesh : DeviceMesh, optional
        Axes (edp, ep).

    Returns
    -------
    hidden : Float[Tensor, "b s d"]
        After the last norm, where the stage has it.
    routings : list of Routing
        One for each layer that has experts, t = b * s tokens each.

    Raises
    ------
    ValueError
        When the parameters are not those of ``config``, a token id is out of range (on CUDA: a device
        assertion), the sequence is longer than the RoPE table, or biases, expert_ids, context or grad_into do
        not fit.
    """
    check_kernels("forward", kernels)
    low = Rounded.of(precision)
    low.policy.check(config)
    _check_params(params, config, stage)
    into = {} if grad_into is None else named(grad_into)
    if others := [name for name in into if not is_expert(name)]:
        raise ValueError(
            "forward needs grad_into with buffers of experts alone (accumulate with "
            f"straight=moekit.model.is_expert), got {', '.join(others)}"
        )
    stage = Stage.whole(config) if stage is None else stage
    if stage.embeds == (x is not None):
        raise ValueError(
            f"forward needs x from the stage before exactly where the stage does not embed, got {stage} and "
            f"{'an' if x is not None else 'no'} x"
        )
    if biases is not None and biases.shape != (config.n_moe_layers, config.n_experts):
        raise ValueError(
            f"forward needs biases ({config.n_moe_layers}, {config.n_experts}), got {tuple(biases.shape)}"
        )
    if expert_ids is not None:
        given = (*tokens.shape[:1], config.n_moe_layers, *tokens.shape[1:], config.top_k)
        check_shapes("forward", expert_ids=(expert_ids, given))
    attention_via, attend = choose_attention(
        "forward",
        n_heads=config.n_heads,
        via=attention_via,
        kernels=elementwise(kernels),
        context=context,
    )
    b, s = tokens.shape
    hidden = _embed(params, tokens, config, kernels) if x is None else x
    positions = positions_of(s, device=tokens.device, context=context)
    whole = s if context is None else s * context.size()
    cos, sin = rope_table(whole, config=config, like=hidden)
    rope = cos[positions], sin[positions]
    if sample_ids is None:
        sample_ids = torch.arange(b, device=tokens.device)
    token_ids = (sample_ids[:, None] * whole + positions).flatten()
    mask = None
    if documents is not None:
        documents = whole_rows(documents, context=context)
        if attention_via == "all_gather":
            mask = document_mask(documents, dtype=hidden.dtype, queries=positions)
        elif has_kernel("forward", elementwise(kernels), hidden, config.d_head):
            mask = find_documents(documents)
        else:
            mask = document_mask(documents, dtype=hidden.dtype)
    routings = []
    for i in stage.layers:
        options: dict[str, Any] = {"kernels": kernels} | ({} if context is None else {"attend": attend})
        if low.policy != BF16:
            options["precision"] = low.part("layers").part(str(i))
        if config.is_moe(i):
            options |= dict(
                bias=None if biases is None else biases[i - config.n_dense_layers],
                key=None if key is None else fold_in(key, i),
                assignment=assignment,
                token_ids=token_ids,
                expert_ids=None if expert_ids is None else _of_layer(expert_ids, i - config.n_dense_layers),
                via=via,
                mesh=None if mesh is None else mesh["ep"],
            )
            of_layer = f"layers.{i}.moe.experts."
            own = {name.removeprefix(of_layer): x for name, x in into.items() if name.startswith(of_layer)}
            if own:  # none, where they are frozen
                options["grad_into"] = own
        hidden, routing = block(
            params["layers"][str(i)], hidden, config=config, rope=rope, mask=mask, **options
        )
        if routing is not None:
            routings.append(routing)
    if stage.heads:
        hidden = rms_norm(hidden, params["norm"], config.norm_eps, kernels=kernels)
    return hidden, routings


def _of_layer(expert_ids: Tensor, layer: int) -> Tensor:
    return rearrange(expert_ids[:, layer], "b s k -> (b s) k")


def _embed(params: Params, tokens: Tensor, config: ModelConfig, kernels: Kernels) -> Tensor:
    _check_tokens("forward", tokens, config.vocab_size)
    x = F.embedding(tokens, local(params["embedding"]))
    if "embedding_norm" not in params.keys():
        return x
    return rms_norm(x * config.d_model**0.5, params["embedding_norm"], config.norm_eps, kernels=kernels)


def is_expert(name: str) -> bool:
    """Say whether a parameter of this name is one of the experts' matrices; for ``accumulate(straight=)``."""
    return "experts" in name.split(".")


def head_weight(params: Params) -> Float[Tensor, "d v"]:
    """Return the matrix that gives logits: the head, or the transposed embedding where they are tied."""
    return local(params["head"]) if "head" in params.keys() else local(params["embedding"]).T


def logits(params: Params, tokens: Int[Tensor, "b s"], **options: Any) -> Float[Tensor, "b s v"]:
    """Return the logits of every position, float32 at least, for sampling and tests.

    Pure and differentiable. Options as for :func:`forward`.
    """
    hidden, _ = forward(params, tokens, **options)
    return (hidden @ head_weight(params)).to(torch.promote_types(hidden.dtype, torch.float32))


def next_token_loss(
    params: Params,
    batch: Batch,
    *,
    config: ModelConfig,
    attend_across_documents: bool = False,
    load: Int[Tensor, "l E"] | Float[Tensor, "l E"] | None = None,
    context: DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Return this call's share of the training loss of the global batch, and statistics that add up likewise.

    The loss is the mean cross-entropy over targets plus the weighted auxiliary losses of ``config``, each
    divided by totals of the global batch. So shares of ranks and micro-batches are only ever summed.

    Pure and differentiable. Collective over ``mesh`` and ``context``.

    Parameters
    ----------
    params : TensorDict
        From :func:`moekit.init_params`.
    batch : Batch
        This rank's rows, with totals from :func:`moekit.count_tokens`. Its ``expert_ids``, where it has
        them, take the place of the routers' choice.
    config : ModelConfig
        The model and the weights of its auxiliary losses.
    attend_across_documents : bool
        Let attention see whole rows, as many published recipes do, not each document by itself. Targets and
        the balancing losses keep to documents.
    load : Int or Float[Tensor, "l E"], optional
        Rows per expert of each layer with experts, to take the place of this call's in a balancing loss over
        an accumulated batch; see :func:`moekit.balance.load_balancing_loss`.
    context : DeviceMesh, optional
        From :func:`moekit.mesh.context_mesh`, where the rows of ``batch`` are split over its ranks.
    mesh : DeviceMesh, optional
        Axes (edp, ep).
    **options
        As for :func:`forward`.

    Returns
    -------
    loss : Float[Tensor, ""]
        In nats per token.
    stats : dict of Tensor
        Of this call, to be summed over micro-batches and ranks as the loss is; l layers have experts, of
        which there are c = edp copies. 0-d where no shape is given; counts are int64.

        - ``cross_entropy``, ``load_balancing``, ``router_z``, ``head_z``: shares of the means, before the
          weights of ``config``; ``load_balancing`` and ``router_z`` are sums over layers.
        - ``router_entropy``: a share of the mean over tokens and layers, in nats.
        - ``counts`` (l, E): routes to each expert, padding left out.
        - ``computed`` (l, E): rows that each expert computes, padding included, dropped ones not.
        - ``fullest`` (l, c): rows of the fullest rank of each copy (:func:`moekit.balance.fullest`).
        - ``n_targets``: targets that count.
        - ``n_routes``, ``n_dropped``: routes of all layers, padding included, and those of them that ``via``
          had no room for.

    Raises
    ------
    ValueError
        When the batch has no totals or is not split over ``context``, and as :func:`forward`.
    """
    _, loss, stats = stage_loss(
        params,
        None,
        batch,
        config=config,
        stage=Stage.whole(config),
        attend_across_documents=attend_across_documents,
        load=load,
        context=context,
        mesh=mesh,
        **options,
    )
    return loss, stats


def stage_loss(
    params: Params,
    x: Float[Tensor, "b s d"] | None,
    batch: Batch,
    *,
    config: ModelConfig,
    stage: Stage,
    attend_across_documents: bool = False,
    load: Int[Tensor, "l E"] | Float[Tensor, "l E"] | None = None,
    context: DeviceMesh | None = None,
    mesh: DeviceMesh | None = None,
    **options: Any,
) -> tuple[Float[Tensor, "b s d"] | None, Float[Tensor, ""], dict[str, Tensor]]:
    """Apply one stage; return what the next one reads, and this stage's share of loss and statistics.

    The shares of all stages add up to what :func:`next_token_loss` returns for the whole model. For
    :func:`moekit.pipeline`. Pure and differentiable. Collective over ``mesh`` and ``context``.

    Parameters
    ----------
    params : TensorDict
        Those of the stage, among any others.
    x : Float[Tensor, "b s d"], optional
        What the stage before has returned; None for the first.
    batch : Batch
        As for :func:`next_token_loss`; every stage gets it whole.
    stage : Stage
        From :func:`moekit.plan.split_layers`.
    config, attend_across_documents, load, context, mesh, **options
        As for :func:`next_token_loss`; biases and loads are those of all layers.

    Returns
    -------
    y : Float[Tensor, "b s d"] or None
        None from the last stage.
    loss : Float[Tensor, ""]
    stats : dict of Tensor
        As from :func:`next_token_loss`, with rows of 0 for the layers of other stages.

    Raises
    ------
    ValueError
        As :func:`next_token_loss`, and for an ``x`` that a stage does not take or lacks.
    """
    if batch.n_targets is None or batch.n_tokens is None:
        raise ValueError(
            "next_token_loss needs the totals of the global batch, got None; "
            "call batch = moekit.count_tokens(batch, mesh=mesh) first"
        )
    check_split("next_token_loss", batch, context, mesh)
    hidden, routings = forward(
        params,
        batch.tokens,
        config=config,
        documents=None if attend_across_documents else batch.documents,
        sample_ids=batch.sample_ids,
        expert_ids=batch.expert_ids,
        x=x,
        stage=stage,
        context=context,
        mesh=mesh,
        **options,
    )
    zero = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
    loss = ce = head_z = zero
    if stage.heads:
        _check_tokens("next_token_loss", batch.targets, config.vocab_size)
        loss, ce, head_z = cross_entropy(
            rearrange(hidden, "b s d -> (b s) d"),
            head_weight(params),
            batch.targets.flatten(),
            batch.mask.flatten().to(zero.dtype) / batch.n_targets.clamp_min(1),
            z_weight=config.head_z_weight,
            kernels=elementwise(options.get("kernels", "auto")),
        )

    terms, stats = _routing_terms(
        routings,
        batch,
        config=config,
        stage=stage,
        load=load,
        context=context,
        mesh=mesh,
        dtype=zero.dtype,
    )
    n_targets = batch.mask.sum() * stage.heads
    stats |= {"cross_entropy": ce, "head_z": head_z, "n_targets": n_targets}
    return None if stage.heads else hidden, loss + terms, stats


def _routing_terms(
    routings: list[Routing],
    batch: Batch,
    *,
    config: ModelConfig,
    stage: Stage,
    load: Tensor | None,
    context: DeviceMesh | None,
    mesh: DeviceMesh | None,
    dtype: torch.dtype,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """Return what a stage's routing adds to the loss, and its statistics."""
    b, s = batch.tokens.shape
    whole = s if context is None else s * context.size()
    keep = (batch.documents >= 0).flatten()
    torch._assert_async(
        (batch.documents < whole).all(), "next_token_loss needs documents below s; use make_batch"
    )
    documents = (batch.documents + torch.arange(b, device=keep.device)[:, None] * whole).flatten()
    counts = torch.zeros(config.n_moe_layers, config.n_experts, dtype=torch.int64, device=keep.device)
    computed = torch.zeros_like(counts)
    balancing = router_z = entropy = torch.zeros((), dtype=dtype, device=keep.device)
    n_dropped = counts.new_zeros(())
    tokens: dict[str, Any] = dict(mask=keep, n_tokens=batch.n_tokens)
    layers = [i - config.n_dense_layers for i in stage.layers if config.is_moe(i)]
    for layer, routing in zip(layers, routings, strict=True):
        balancing = balancing + balance.load_balancing_loss(
            routing,
            population=config.balance_population,
            n_groups=config.balance_groups,
            load=None if load is None else load[layer],
            documents=documents,
            context=context,
            mesh=mesh,
            **tokens,
        )
        router_z = router_z + balance.router_z_loss(routing, **tokens)
        entropy = entropy + balance.router_entropy(routing, **tokens) / config.n_moe_layers
        counts[layer] = balance.expert_counts(routing, mask=keep)
        computed[layer] = routing.counts
        if routing.dropped is not None:
            computed[layer] -= routing.dropped
            n_dropped = n_dropped + routing.dropped.sum()
    if layers:  # a model without experts may be on ranks that do not divide n_experts
        fullest = balance.fullest(computed, mesh=mesh)
    else:
        fullest = counts.new_zeros(len(counts), 1 if mesh is None else mesh["edp"].size())
    stats = {
        "load_balancing": balancing.detach(),
        "router_z": router_z.detach(),
        "router_entropy": entropy,
        "counts": counts,
        "computed": computed,
        "fullest": fullest,
        "n_routes": counts.new_full((), len(layers) * b * s * config.top_k),
        "n_dropped": n_dropped,
    }
    return config.balance_weight * balancing + config.router_z_weight * router_z, stats


@functools.cache
def _names(config: ModelConfig, *stages: Stage) -> frozenset[str]:
    return frozenset(param_shapes(config, *stages))


def _check_params(params: Params, config: ModelConfig, stage: Stage | None) -> None:
    """Which parts a model has is read off its parameters: they must be those that the config describes."""
    if not isinstance(params, TensorDict):
        return
    got = {key if isinstance(key, str) else ".".join(key) for key in params.keys(True, True)}
    needs = _names(config) if stage is None else _names(config, stage)
    missing, unused = sorted(needs - got), sorted(got - _names(config) if stage else got - needs)
    if missing or unused:
        raise ValueError(f"forward needs the parameters of its config, missing: {missing}, unused: {unused}")


def _check_tokens(who: str, tokens: Tensor, vocab_size: int) -> None:
    check_values(
        ((tokens >= 0) & (tokens < vocab_size)).all(),
        who,
        f"token ids in [0, {vocab_size})",
        lambda: f"[{tokens.min()}, {tokens.max()}]",
    )
