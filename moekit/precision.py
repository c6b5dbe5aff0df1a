"""Which numbers each part of a model computes with: a policy, role by role, and the rounded weights it needs.

    precision = mk.precision.FP8_ROWWISE
    print(precision.describe("cuda"))
    (loss, stats), grads = grad_fn(params, batch, precision=precision)

Axes: E experts, K and N a matrix's dims, b scales.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate

from moekit._low_experts import LowProducts
from moekit.config import ModelConfig
from moekit.kernels import Products, scaled_mm
from moekit.kernels.quantize import FP8_ROWWISE as FP8, MXFP8 as MX, Format, Quantized, quantize
from moekit.tree import check_not_hollow, held, map_named, named, nested, on_mesh

FORMATS = {
    "fp8_rowwise": FP8,
    "mxfp8": MX,
    "mxfp8_floor": replace(MX, rounding="floor"),
    "mxfp8_e5m2": replace(MX, elements=torch.float8_e5m2),
}
Role = Literal["fp8_rowwise", "mxfp8", "mxfp8_floor", "mxfp8_e5m2"] | None

# What is not rounded, and why.
STAYS = {
    "router": "a rounded score sends a token to other experts",
    "attention": "a softmax of rounded scores loses more than its share of the time",
    "norms": "they are bound by memory, and all that follows depends on them",
    "head": "the loss is made of small differences between its logits",
    "combine_payload": "a token's sum over its experts would be rounded once more for each",
    "gradient_accumulation": "what is small against the sum would vanish",
}


@dataclass(frozen=True, kw_only=True)
class Precision:
    """The format of each role; ``None``: the dtype of the tensors that come, bfloat16 say.

    Frozen and hashable. Roles that are never rounded take one value alone, so that a policy names them.

    Attributes
    ----------
    attention_projections, feed_forward : str, optional
        Queries', keys', values' and the output projection; dense layers and shared experts: their products
        and the gradients of what these read.
    dense_weight_grad : str, optional
        Gradients of both's weights, which sum over tokens.
    experts_forward, experts_input_grad, experts_weight_grad : str, optional
        The routed experts' products.
    saved_activations : str, optional
        What layers keep for their backward: experts their first product, from which hidden rows are made
        again; dense and shared ones too, and projections their input, where these are rounded.
    dispatch_payload : {"fp8_rowwise"}, optional
        Tokens on their way to other ranks; the transport needs it too (``mk.rowwise(payload=...)``).
    router, gradient_accumulation : {"float32"}
    attention, norms, head, combine_payload : None
    emulate : bool
        Where a device has no units for a format, multiply the rounded numbers as wider ones: exact, and
        slower than no rounding at all. Without it that is refused.

    Raises
    ------
    ValueError
        For a format that a role does not have.
    """

    attention_projections: Role = None
    feed_forward: Role = None
    dense_weight_grad: Role = None
    experts_forward: Role = None
    experts_input_grad: Role = None
    experts_weight_grad: Role = None
    saved_activations: Role = None
    dispatch_payload: Literal["fp8_rowwise"] | None = None
    router: Literal["float32"] = "float32"
    gradient_accumulation: Literal["float32"] = "float32"
    attention: None = None
    norms: None = None
    head: None = None
    combine_payload: None = None
    emulate: bool = False

    def __post_init__(self):
        if self.emulate not in (True, False):
            raise ValueError(f"Precision needs emulate of True or False, got {self.emulate!r}")
        for role in _roles(self):
            value, allowed = getattr(self, role), _allowed(role)
            if value not in allowed:
                why = f": {STAYS[role]}" if role in STAYS else ""
                raise ValueError(
                    f"Precision needs {role} of {', '.join(map(repr, allowed))}, got {value!r}{why}"
                )

    def form(self, role: str) -> Format | None:
        """Return the format of a role."""
        return FORMATS.get(getattr(self, role))

    def check(self, config: ModelConfig) -> None:
        """Raise ``ValueError`` for a role that a model has no part for."""
        experts = [role for role in ROLES if role.startswith(("experts", "saved", "dispatch"))]
        missing = [] if config.n_moe_layers else experts
        if not config.n_dense_layers and not config.d_shared:
            missing = [*missing, "feed_forward"]
        if not (self.attention_projections or self.feed_forward):
            missing = [*missing, "dense_weight_grad"]
        if matches_nothing := [role for role in missing if getattr(self, role)]:
            raise ValueError(
                f"Precision needs roles that the model has, got {', '.join(matches_nothing)}; leave them out"
            )

    def describe(self, device: str | torch.device = "cpu") -> str:
        """Return a table: each role, its format, and whether the device has units for it."""
        lines = []
        for role in _roles(self):
            form = self.form(role)
            if role in STAYS:
                said = f"{getattr(self, role) or 'as the tensors'}, {STAYS[role]}"
            elif form is None:
                said = "as the tensors"
            elif role in STORED:
                said = f"{getattr(self, role)}, stored"
            elif why := scaled_mm.why_emulated(
                form, torch.device(device), over_tokens=role.endswith("weight_grad")
            ):
                said = f"{getattr(self, role)}, {'emulated' if self.emulate else 'REFUSED'}: {why}"
            else:
                said = f"{getattr(self, role)}, native"
            lines.append(f"{role:<24}{said}")
        return "\n".join(lines)

    __str__ = describe


def _roles(policy: Precision) -> list[str]:
    return [field.name for field in fields(policy) if field.name != "emulate"]


def _allowed(role: str) -> tuple[Any, ...]:
    if role in STAYS:
        return ("float32",) if role in ("router", "gradient_accumulation") else (None,)
    return (None, "fp8_rowwise") if role == "dispatch_payload" else (None, *FORMATS)


ROLES = tuple(role for role in _roles(Precision()) if role not in STAYS)  # that can be rounded
STORED = ("saved_activations", "dispatch_payload")  # nothing multiplies them as they are

BF16 = Precision()


def everywhere(form: Role, **changes: Any) -> Precision:
    """Return a policy of one format for all products but weights' gradients, and ``changes``."""
    products = Precision(
        attention_projections=form,
        feed_forward=form,
        experts_forward=form,
        experts_input_grad=form,
        emulate=changes.pop("emulate", False),
    )
    return replace(products, **changes)


FP8_ROWWISE = everywhere("fp8_rowwise")
MXFP8 = everywhere("mxfp8")
PRESETS = {"bf16": BF16, "fp8_rowwise": FP8_ROWWISE, "mxfp8": MXFP8}


def preset(name: str, **changes: Any) -> Precision:
    """Return a policy by name, with changes.

    >>> preset("mxfp8", emulate=True).experts_forward
    'mxfp8'

    Raises
    ------
    ValueError
        For a name that is not there.
    """
    if name not in PRESETS:
        raise ValueError(f"preset needs a name of {', '.join(map(repr, PRESETS))}, got {name!r}")
    return replace(PRESETS[name], **changes)


# --- Experts --------------------------------------------------------------------------


def low_products(who: str, policy: Precision | None, plain: Products, x: Tensor) -> LowProducts | None:
    """Return the formats of the experts' operands; None where the policy rounds none.

    Raises
    ------
    ValueError
        Where a format would have to be emulated and the policy does not say so.
    """
    if policy is None:
        return None
    roles = ("experts_forward", "experts_input_grad", "experts_weight_grad", "saved_activations")
    forward, input_grad, weight_grad, saved = (_form_on(who, policy, role, x) for role in roles)
    low = LowProducts(forward, input_grad, weight_grad, saved, plain)
    return low if any(low[:-1]) else None


def check_payload(who: str, policy: Precision | None, payload: torch.dtype | None) -> None:
    """Raise ``ValueError`` unless tokens travel as the policy says: the transport is made before it."""
    wanted = None if policy is None else policy.form("dispatch_payload")
    if wanted is not None and payload != wanted.elements:
        raise ValueError(
            f"{who} needs a transport with payload={wanted.elements} for a policy with dispatch_payload, got "
            f"payload={payload}; pass via=mk.rowwise(..., payload={wanted.elements})"
        )


def _form_on(who: str, policy: Precision, role: str, x: Tensor) -> Format | None:
    form = policy.form(role)
    if form is None or role in STORED or policy.emulate:
        return form
    if why := scaled_mm.why_emulated(form, x.device, x.dtype, over_tokens=role.endswith("weight_grad")):
        raise ValueError(
            f"{who} needs a device's units for {role}={getattr(policy, role)!r}: {why}; take another format, "
            "or a Precision with emulate=True, exact and slow"
        )
    return form


def dense_forms(
    who: str, policy: Precision | None, role: str, x: Tensor
) -> tuple[Format, Format | None, Format | None] | None:
    """Return the formats of dense products, their weights' gradients and what is kept; None for none."""
    if policy is None:
        return None
    form, weight_grad = (_form_on(who, policy, name, x) for name in (role, "dense_weight_grad"))
    return None if form is None else (form, weight_grad, policy.form("saved_activations"))


# --- Weights, rounded once ------------------------------------------------------------


@torch.no_grad()
def round_weights(params: TensorDict, policy: Precision) -> TensorDict:
    """Round all matrices that a policy rounds, for as long as they stay as they are: once a step.

    Of parameters, or of the float32 masters of :func:`moekit.shard_optimizer`: what other ranks hold of a
    matrix then comes in eight bits. Not differentiable, nor need it be: gradients go to the parameters.
    Collective over the axes that shard a matrix, but not its experts.

    Returns
    -------
    TensorDict
        Under the names of ``params``, of those that are rounded, this rank's ``forward`` and ``input_grad``,
        each with ``values`` and ``scales``: ``rounded=`` of :func:`moekit.next_token_loss` and what it calls.
    """
    return nested(
        {
            name: round_matrix(w, policy, role)
            for name, w in named(params).items()
            if (role := _role_of(name)) and any(_forms_of(policy, role))
        }
    )


def hollow(params: TensorDict, policy: Precision) -> TensorDict:
    """Return parameters in which those that a policy rounds for both their products have no memory.

    They keep shape, dtype and placement, get gradients, and read as zeros: the products need
    ``rounded=round_weights(masters, policy)``. :func:`moekit.shard_optimizer` leaves them alone, once it has
    made its masters, and a checkpoint leaves them out.
    """

    def empty(name: str, w: Tensor) -> Tensor:
        role = _role_of(name)
        if role is None or not all(_forms_of(policy, role)):
            return w
        return on_mesh(held(w).new_zeros(()).expand(held(w).shape), like=w)

    return map_named(empty, params)


def _role_of(name: str) -> str | None:
    """Return the role of a parameter's products, of its dotted name."""
    *path, leaf = name.split(".")
    if leaf in ("qkv", "out"):
        return "attention_projections"
    if leaf in ("gate_up", "down"):
        return "experts" if path[-1] == "experts" else "feed_forward"
    return None


def round_matrices(matrices: Mapping[str, Tensor], policy: Precision, role: str) -> TensorDict:
    """Round the matrices of one role by name; see :func:`round_matrix`."""
    return TensorDict({name: round_matrix(w.detach(), policy, role) for name, w in matrices.items()})


def round_matrix(w: Float[Tensor, "*E K N"], policy: Precision, role: str = "experts") -> TensorDict:
    """Round a matrix, or one of each expert, for its products: ``forward`` and ``input_grad`` where they are.

    The product sums over K and its input's gradient over N, so there is one of each; both together take the
    memory of bfloat16. Collective where the matrix is sharded, as :func:`round_weights` is.

    Returns
    -------
    TensorDict
        Of either, ``values`` and ``scales``: of one with experts (E, N, K) and (E, N, b), or (E, K, N) and
        (E, K, b).
    """
    forward, input_grad = _forms_of(policy, role)
    of = {"forward": (w.mT, forward), "input_grad": (w, input_grad)}
    return TensorDict({name: _round(x, form)._asdict() for name, (x, form) in of.items() if form is not None})


def _forms_of(policy: Precision, role: str) -> tuple[Format | None, Format | None]:
    if role == "experts":
        return policy.form("experts_forward"), policy.form("experts_input_grad")
    return policy.form(role), policy.form(role)


def _round(w: Tensor, form: Format) -> Quantized:
    """Round along the last dim; of a matrix that ranks share, the whole comes back, in eight bits."""
    check_not_hollow("round_weights", weights=w)
    rows, summed = (
        [isinstance(w, DTensor) and p.is_shard(dim) for p in (w.placements if isinstance(w, DTensor) else ())]
        for dim in (w.ndim - 2, w.ndim - 1)
    )
    local = held(w).contiguous()
    if not isinstance(w, DTensor) or not any(rows + summed):
        return quantize(local, form)
    mesh, placements = w.device_mesh, w.placements

    def whole(x: Tensor, last: int, placements=placements) -> Tensor:
        shape = torch.Size((*w.shape[:-1], last))
        bytes_ = x.view(torch.uint8) if x.element_size() == 1 else x  # which any backend sends
        meta = torch.empty(shape, device="meta")
        part = DTensor.from_local(
            bytes_, mesh, placements, run_check=False, shape=shape, stride=meta.stride()
        )
        to = [Replicate() if a or b else p for p, a, b in zip(placements, rows, summed, strict=True)]
        return held(part.redistribute(placements=to)).view(x.dtype)

    if not any(summed):
        q = quantize(local, form)
        return Quantized(whole(q.values, w.shape[-1]), whole(q.scales, q.scales.shape[-1]))
    if form.block is None:
        largest = local.abs().amax(-1, keepdim=True)
        of_all = [Partial("max") if s else p for p, s in zip(placements, summed, strict=True)]
        q = quantize(local, form, largest=whole(largest, 1, of_all))
        return Quantized(whole(q.values, w.shape[-1]), q.scales)
    n = math.prod(mesh.size(i) for i, s in enumerate(summed) if s)
    if -(-w.shape[-1] // n) % form.block:  # blocks that ranks share
        return quantize(whole(local, w.shape[-1]), form)
    q = quantize(local, form)
    return Quantized(whole(q.values, w.shape[-1]), whole(q.scales, form.n_scales(w.shape[-1])))
