"""The experts: grouped GEMM, activation, grouped GEMM."""

from collections.abc import Mapping
from typing import Literal

import torch
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor

from moekit._exchange import Arrived, Exchange, OneRank
from moekit._expert_passes import ExpertProducts, Experts
from moekit._policy import BF16, Precision
from moekit._rounded import Rounded, Weights
from moekit._rowwise import rowwise
from moekit.kernels import Products, aligned, choose_products
from moekit.kernels.grouped_mm import grouped_mm
from moekit.kernels.swiglu import swiglu
from moekit.mesh import local
from moekit.profiling import ranged
from moekit.tree import check_names, check_not_hollow, check_values, held, is_hollow

Kernels = Literal["auto", "torch", "triton", "quack", "loop"]


@ranged("experts")
def expert_forward(
    experts: TensorDict | Mapping[str, Tensor],
    rows: Float[Tensor, "r d"],
    offsets: Int[Tensor, " e"],
    *,
    activation: Literal["swiglu"] = "swiglu",
    kernels: Kernels = "auto",
    precision: Precision | Rounded = BF16,
    grad_into: TensorDict | Mapping[str, Tensor] | None = None,
) -> Float[Tensor, "r d"]:
    """Apply each expert of this rank to its own rows: ``down(silu(gate x) * up x)``.

    Pure and differentiable in ``experts`` and ``rows``. No communication.

    Parameters
    ----------
    experts : TensorDict
        ``gate_up`` (E, d, 2h), gate in the first half of its last dim, and ``down`` (E, h, d); plain with E =
        e, or DTensors sharded on their first dim.
    rows : Float[Tensor, "r d"]
        In expert order. Rows beyond the last offset are undefined and never read; so are those of the result.
    offsets : Int[Tensor, " e"]
        int32, where each expert's rows end; an expert may have none.
    activation : {"swiglu"}
        Between the two GEMMs.
    kernels : {"auto", "torch", "triton", "quack", "loop"}
        See :func:`moekit.kernels.choose_products`. ``"loop"`` defines the result, for any dtype, and reads
        the offsets on the host; the others need ``d`` and ``h`` to be multiples of 16 bytes.
    precision : Precision or Rounded
        Which operands of the products are rounded to eight bits. A policy alone rounds the weights in every
        call; :func:`moekit.precision.round_weights` rounds them once, for as many calls as they stay the
        same. A gradient of weights that was multiplied in eight bits is rounded to their dtype before it goes
        to ``grad_into``.
    grad_into : TensorDict, optional
        Buffers for ``gate_up``, ``down`` or both, of the same shapes and of any float dtype, float32 say. The
        backward adds the weights' gradients to them and returns none to autograd; ``"triton"`` and
        ``"quack"`` add before they round. It does so only where it was asked for these gradients, unless it
        is compiled: then always. See :func:`moekit.accumulate`.

    Returns
    -------
    Float[Tensor, "r d"]
        In the dtype of ``rows``.

    Raises
    ------
    ValueError
        When an option is unknown, shapes or dtypes do not fit, or offsets descend or pass the last row.
    """
    if activation != "swiglu":
        raise ValueError(f"expert_forward needs activation 'swiglu', got {activation!r}")
    gate_up, down = _weights(experts, rows, offsets)
    if offsets.device.type == "cpu":  # on a device the check would cost more launches than the experts
        ends = torch.cat([offsets.new_zeros(1), offsets, offsets.new_tensor([len(rows)])])
        needs = f"offsets that ascend from 0 to at most the {len(rows)} rows"
        check_values((ends.diff() >= 0).all(), "expert_forward", needs, offsets.tolist)
    products = choose_products("expert_forward", kernels, len(rows), gate_up)
    low = Rounded.of(precision)
    plan = ExpertProducts.of("expert_forward", low.policy, "experts", products, rows)
    # Torch's products of other dtypes have no fake form, and that of ours is not differentiable.
    traced = torch.compiler.is_compiling() and products.forward == "torch" and rows.dtype != torch.bfloat16
    if plan.rounds or products.elementwise == "triton" or grad_into is not None or traced:
        exchange = Arrived(products.elementwise)
        args = (rows, experts, gate_up, down, offsets, plan, low, exchange, grad_into)
        return _run("expert_forward", *args)
    check_not_hollow("expert_forward", gate_up=gate_up, down=down)
    hidden = swiglu(grouped_mm(rows, gate_up, offsets, kernels=products.forward))
    out = grouped_mm(hidden, down, offsets, kernels=products.forward)
    return out if products.forward == "loop" else _ContiguousGrad.apply(out)


@ranged("experts")
def experts_over_tokens(
    experts: TensorDict | Mapping[str, Tensor],
    x: Float[Tensor, "t d"],
    places: Int[Tensor, "t k"],
    weights: Float[Tensor, "t k"],
    offsets: Int[Tensor, " e"],
    *,
    base: Float[Tensor, "t d"] | None = None,
    exchange: OneRank | rowwise,
    products: Products,
    precision: Precision | Rounded = BF16,
    grad_into: TensorDict | Mapping[str, Tensor] | None = None,
) -> Float[Tensor, "t d"]:
    """Return what dispatch, :func:`expert_forward` and combine return together, in less memory.

    Kept for the backward are ``x`` and the output of the first GEMM; the rows in expert order are made again
    from ``x``, the hidden rows from that output. To make this enough, each routing weight multiplies its
    hidden row, not what the expert returns: ``w (h W) = (w h) W``. The weights' gradient then needs the
    hidden rows alone, where a combine that weighs the experts' outputs would have to keep those.

    Parameters
    ----------
    experts, offsets, precision, grad_into
        As for :func:`expert_forward`.
    x : Float[Tensor, "t d"]
        Tokens of this rank.
    places : Int[Tensor, "t k"]
        int64: where ``exchange`` sends each of a token's k rows.
    weights : Float[Tensor, "t k"]
        Routing weights, float32 at least.
    base : Float[Tensor, "t d"], optional
        Added to each token's sum, as the output of a shared expert is.
    exchange : OneRank or rowwise
        How rows travel.
    products : Products
        From :func:`moekit.kernels.choose_products`.
    """
    gate_up, down = _weights(experts, x, offsets)
    low = Rounded.of(precision)
    plan = ExpertProducts.of("moe", low.policy, "experts", products, x)
    args = (x, experts, gate_up, down, offsets, plan, low, exchange, grad_into)
    return _run("moe", *args, weights=weights, places=places, base=base)


def _run(
    who: str,
    x: Tensor,
    experts: Mapping[str, Tensor] | TensorDict,
    gate_up: Tensor,
    down: Tensor,
    offsets: Tensor,
    plan: ExpertProducts,
    low: Rounded,
    exchange: Exchange,
    grad_into: Mapping[str, Tensor] | TensorDict | None,
    *,
    weights: Tensor | None = None,
    places: Tensor | None = None,
    base: Tensor | None = None,
) -> Tensor:
    into, gate_up, down = _buffers(grad_into, experts, gate_up, down)
    rounded = [
        Weights.of(who, name, w, low, plan.forward, plan.input_grad)
        for name, w in (("gate_up", gate_up), ("down", down))
    ]
    tokens = None  # nothing has rounded them yet
    return Experts.apply(
        x, weights, gate_up, down, offsets, places, base, rounded, tokens, plan, into, exchange
    )


def _weights(experts: Mapping[str, Tensor], rows: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return this rank's gate_up and down, if they fit the rows (or tokens) and offsets."""
    check_names("expert_forward", "experts", experts, "gate_up", "down")
    gate_up, down = local(experts["gate_up"]), local(experts["down"])
    e, d, h2 = gate_up.shape
    if h2 % 2 or down.shape != (e, h2 // 2, d) or rows.shape != (len(rows), d) or offsets.ndim != 1:
        raise ValueError(
            "expert_forward needs gate_up (e, d, 2h), down (e, h, d), rows (r, d), offsets (e,), got "
            f"{tuple(gate_up.shape)}, {tuple(down.shape)}, {tuple(rows.shape)}, {tuple(offsets.shape)}"
        )
    if len(offsets) != e:
        raise ValueError(
            f"expert_forward needs as many experts as offsets, got weights of {e} experts, offsets of "
            f"{len(offsets)}: distribute the parameters (moekit.mesh.distribute), or pass mesh['ep']"
        )
    if offsets.dtype != torch.int32:
        raise ValueError(f"expert_forward needs int32 offsets, got {offsets.dtype}; pass offsets.int()")
    if not rows.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"expert_forward needs one dtype, got {rows.dtype}, {gate_up.dtype} and {down.dtype}"
        )
    return _strided(gate_up), _strided(down)


def _strided(weights: Float[Tensor, "E k n"]) -> Float[Tensor, "E k n"]:
    """Return the weights as kernels read them: each matrix dense, 16 bytes or a multiple between two."""
    if is_hollow(weights):  # nothing reads it
        return weights
    _, k, n = weights.shape
    step, *strides = weights.stride()
    dense = tuple(strides) in ((n, 1), (1, k)) and step * weights.element_size() % 16 == 0
    return weights if dense else weights.contiguous()


def _buffers(
    grad_into: Mapping[str, Tensor] | None, experts: Mapping[str, Tensor], gate_up: Tensor, down: Tensor
) -> tuple[tuple[Tensor | None, ...], Tensor, Tensor]:
    """Return this rank's buffers for gate_up and down, None where there is none, and both weights.

    The weights come back as views, not leaves: only of a node that is no leaf can a backward say whether it
    has been asked for its gradient (:func:`moekit.kernels.is_asked_for`).
    """
    if grad_into is None:
        return (None, None), gate_up, down
    if unknown := [name for name in grad_into.keys() if name not in ("gate_up", "down")]:
        raise ValueError(f"expert_forward needs grad_into with gate_up and down alone, got {unknown}")
    buffers = []
    for name in ("gate_up", "down"):
        if name not in grad_into.keys():
            buffers.append(None)
            continue
        buffer, weights = held(grad_into[name]), held(experts[name])
        if (buffer.shape, buffer.device) != (weights.shape, weights.device):
            raise ValueError(
                f"expert_forward needs grad_into with {name} {tuple(weights.shape)} on {weights.device}, "
                f"got {tuple(buffer.shape)} on {buffer.device}"
            )
        if not (buffer.is_floating_point() and buffer.is_contiguous()):
            raise ValueError(
                f"expert_forward needs contiguous floating-point buffers in grad_into, got {buffer.dtype} of "
                f"strides {buffer.stride()} for {name}"
            )
        buffers.append(buffer)
    return tuple(buffers), gate_up.view_as(gate_up), down.view_as(down)


class _ContiguousGrad(torch.autograd.Function):
    """The identity; torch's ``grouped_mm`` refuses the expanded gradient of a plain sum."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return aligned(grads[0].contiguous())
