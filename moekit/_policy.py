"""Which numbers each part of a model computes with; :mod:`moekit.precision` is its public face."""

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

import torch
from torch import Tensor

from moekit.config import ModelConfig
from moekit.kernels import scaled_mm
from moekit.kernels.quantize import MX, ROWWISE, Format

FORMATS = {
    "fp8_rowwise": ROWWISE,
    "mxfp8": MX,
    "mxfp8_floor": replace(MX, rounding="floor"),
    "mxfp8_e5m2": replace(MX, elements=torch.float8_e5m2),
}
FormatName = Literal["fp8_rowwise", "mxfp8", "mxfp8_floor", "mxfp8_e5m2"]  # the keys of FORMATS

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
    """A format for each role of a model; ``None`` stands for the dtype of the tensors, bfloat16 say.

    Frozen and hashable. Some roles are never rounded. They are fields all the same, with one value each, so
    that a policy names all that a model computes.

    Attributes
    ----------
    attention_projections : str, optional
        Both operands of the products with ``qkv`` and ``out``, and of those that give their inputs'
        gradients.
    feed_forward : str, optional
        Likewise in dense layers and shared experts.
    dense_weight_grad : str, optional
        Both operands of the products that give the weights' gradients of these two roles.
    experts_forward, experts_input_grad, experts_weight_grad : str, optional
        Both operands of the routed experts' products: forward, inputs' gradients, weights' gradients.
    saved_activations : str, optional
        What layers keep for their backward. Routed experts keep their first product; dense layers and shared
        experts too, and projections their input, where their own role is rounded.
    dispatch_payload : {"fp8_rowwise"}, optional
        Tokens on their way to other ranks. The transport must be made for it: ``mk.rowwise(payload=...)``.
    router, gradient_accumulation : {"float32"}
        Never rounded.
    attention, norms, head, combine_payload : None
        Never rounded.
    emulate : bool
        Where a device has no units for a format, multiply the rounded numbers in a wider dtype that holds
        them exactly, which is slower than no rounding at all. Without it that is a ``ValueError``.

    Raises
    ------
    ValueError
        For a format that a role does not have.
    """

    attention_projections: FormatName | None = None
    feed_forward: FormatName | None = None
    dense_weight_grad: FormatName | None = None
    experts_forward: FormatName | None = None
    experts_input_grad: FormatName | None = None
    experts_weight_grad: FormatName | None = None
    saved_activations: FormatName | None = None
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
        """Raise ``ValueError`` for a role that a model has no part for, or whose widths do not fit.

        Needs no process group.
        """
        dense = bool(config.n_dense_layers or config.d_shared)
        needs = {role: config.n_moe_layers > 0 for role in ROLES}
        needs["attention_projections"] = True
        needs["feed_forward"] = dense
        needs["dense_weight_grad"] = bool(self.attention_projections or (self.feed_forward and dense))
        needs["saved_activations"] |= needs["dense_weight_grad"]
        if nothing := [role for role, there in needs.items() if getattr(self, role) and not there]:
            out = ", ".join(f"{role}=None" for role in nothing)
            raise ValueError(
                f"Precision needs roles that the model has, got {', '.join(nothing)}; leave them out: "
                f"preset(name, {out})"
            )
        d, heads = config.d_model, config.n_heads * config.d_head
        widths = {
            "attention_projections": dict(
                d_model=d, heads=heads, qkv=heads + 2 * config.n_kv_heads * config.d_head
            ),
            "feed_forward": dict(
                d_model=d, d_shared=config.d_shared, d_dense=config.d_dense if config.n_dense_layers else 0
            ),
            **{role: dict(d_model=d, d_expert=config.d_expert) for role in EXPERTS},
        }
        for role, sizes in widths.items():
            form = self.form(role)
            step = None if form is None else form.block or 16  # as the units for it need
            if step and (odd := {name: n for name, n in sizes.items() if n % step}):
                raise ValueError(
                    f"Precision needs widths that are multiples of {step} for {role}="
                    f"{getattr(self, role)!r}, got {', '.join(f'{k}={n}' for k, n in odd.items())}"
                )

    def describe(self, device: str | torch.device | None = None) -> str:
        """Return a table: each role, its format, and whether a device has units for it.

        Of the CUDA device, where there is one, unless another is named.
        """
        if device is None:
            device = "cuda" if torch.cuda.is_available() else "cpu"
        lines = []
        for role in _roles(self):
            form = self.form(role)
            if role in STAYS:
                said = f"{getattr(self, role) or 'as the tensors'}, {STAYS[role]}"
            elif form is None:
                said = "as the tensors"
            elif role in STORED:
                said = f"{getattr(self, role)}, stored"
            elif why := _why_emulated(role, form, torch.device(device)):
                said = f"{getattr(self, role)}, {'emulated' if self.emulate else 'REFUSED'}: {why}"
            else:
                said = f"{getattr(self, role)}, native"
            lines.append(f"{role:<24}{said}")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.describe()


def _roles(policy: Precision) -> list[str]:
    return [field.name for field in fields(policy) if field.name != "emulate"]


def _allowed(role: str) -> tuple[Any, ...]:
    if role in STAYS:
        return ("float32",) if role in ("router", "gradient_accumulation") else (None,)
    return (None, "fp8_rowwise") if role == "dispatch_payload" else (None, *FORMATS)


def _why_emulated(
    role: str, form: Format, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    return scaled_mm.why_emulated(form, device, dtype, over_tokens=role.endswith("weight_grad"))


ROLES = tuple(role for role in _roles(Precision()) if role not in STAYS)  # that can be rounded
STORED = ("saved_activations", "dispatch_payload")  # nothing multiplies them as they are
EXPERTS = ("experts_forward", "experts_input_grad", "experts_weight_grad")


def all_products(form: FormatName | None, **changes: Any) -> Precision:
    """Return a policy of one format for all products but weights' gradients, and ``changes``."""
    products = Precision(
        attention_projections=form, feed_forward=form, experts_forward=form, experts_input_grad=form
    )
    return replace(products, **changes)


BF16 = Precision()
FP8_ROWWISE = all_products("fp8_rowwise")
MXFP8 = all_products("mxfp8")
PRESETS = {"bf16": BF16, "fp8_rowwise": FP8_ROWWISE, "mxfp8": MXFP8}


def preset(name: str, **changes: Any) -> Precision:
    """Return a policy by name, with changes.

    >>> preset("mxfp8", emulate=True).experts_forward
    'mxfp8'

    Raises
    ------
    ValueError
        For a name that is not there.
    TypeError
        For a change of what is no role.
    """
    if not isinstance(name, str) or name not in PRESETS:
        raise ValueError(f"preset needs a name of {', '.join(map(repr, PRESETS))}, got {name!r}")
    known = [field.name for field in fields(Precision)]
    if unknown := [role for role in changes if role not in known]:
        raise TypeError(f"preset needs changes of {', '.join(known)}, got {', '.join(unknown)}")
    return replace(PRESETS[name], **changes)


# --- For the functions that compute ---------------------------------------------------


def form_on(who: str, policy: Precision, role: str, x: Tensor) -> Format | None:
    """Return the format of a role for tensors like ``x``.

    Raises
    ------
    ValueError
        Where it would have to be emulated and the policy does not say so.
    """
    form = policy.form(role)
    if form is None or role in STORED or policy.emulate:
        return form
    if why := _why_emulated(role, form, x.device, x.dtype):
        raise ValueError(
            f"{who} needs a device's units for {role}={getattr(policy, role)!r}: {why}; take another format, "
            "or a Precision with emulate=True, exact and slow"
        )
    return form


def check_payload(who: str, policy: Precision, payload: torch.dtype | None) -> None:
    """Raise ``ValueError`` unless the transport, which was made before, sends tokens as the policy says."""
    wanted = policy.form("dispatch_payload")
    if wanted is not None and payload != wanted.elements:
        raise ValueError(
            f"{who} needs a transport with payload={wanted.elements} for a policy with dispatch_payload, got "
            f"payload={payload}; pass via=mk.rowwise(..., payload={wanted.elements})"
        )
