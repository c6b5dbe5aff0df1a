"""The experts' passes, forward and backward, in the tensors' dtype or with operands of eight bits.

What a product reads in eight bits is rounded where it is made: rows on their way into expert order, hidden
rows and their gradients in SwiGLU's passes. Weights come rounded, for either product with them.
"""

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit._policy import EXPERTS, Precision, form_on
from moekit._rounded import Operand
from moekit._rowwise import rowwise
from moekit.kernels import Products, forget_saved, is_asked_for
from moekit.kernels.grouped_mm import grouped_mm, grouped_weight_grad
from moekit.kernels.quantize import Format, Quantized, dequantize, quantize, quantize_columns
from moekit.kernels.scaled_mm import scaled_grouped_mm, scaled_weight_grad
from moekit.kernels.swiglu import swiglu_backward, swiglu_forward
from moekit.kernels.swiglu_quantized import swiglu_backward_quantized, swiglu_forward_quantized
from moekit.profiling import named


class ExpertProducts(NamedTuple):
    """Formats of a layer's operands, ``None`` for the tensors' own dtype, and who multiplies."""

    forward: Format | None
    input_grad: Format | None
    weight_grad: Format | None
    saved: Format | None  # of what the layer keeps for its backward
    plain: Products  # products of the tensors' dtype, and the passes around all

    @classmethod
    def of(cls, who: str, policy: Precision, role: str, plain: Products, x: Tensor) -> "ExpertProducts":
        """Return what a policy says of ``"experts"``, or of a dense role."""
        roles = EXPERTS if role == "experts" else (role, role, "dense_weight_grad")
        forward, input_grad, weight_grad = (form_on(who, policy, name, x) for name in roles)
        return cls(forward, input_grad, weight_grad, policy.form("saved_activations"), plain)

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded."""
        return any(self[:-1])

    @property
    def scaled(self) -> str:
        """Who multiplies numbers of eight bits: plain torch where that is asked for."""
        return "torch" if self.plain.elementwise == "torch" else "auto"

    def multiply(
        self, rows: Operand, weights: Operand, offsets: Tensor, like: Tensor, kernels: str, out=None
    ) -> Tensor:
        """Return a grouped product, in the dtype of ``like``."""
        if isinstance(rows, Quantized):
            assert isinstance(weights, Quantized)
            return scaled_grouped_mm(rows, weights, offsets, dtype=like.dtype, out=out, kernels=self.scaled)
        assert isinstance(weights, Tensor)
        return grouped_mm(rows, weights, offsets, out=out, kernels=kernels)

    def grad_of_weights(
        self, rows: Tensor, grad: Tensor, offsets: Tensor, into: Tensor | None = None
    ) -> Tensor | None:
        """Return the weights' gradient, or add it to a buffer."""
        if self.weight_grad is not None:
            columns = [
                quantize_columns(x, offsets, self.weight_grad, kernels=self.plain.elementwise)
                for x in (rows, grad)
            ]
            return scaled_weight_grad(*columns, dtype=rows.dtype, into=into, kernels=self.scaled)
        if self.plain.weight_grad == "dense":  # one group that has all rows
            return (rows.mT @ grad)[None]
        return grouped_weight_grad(rows, grad, offsets, into=into, kernels=self.plain.weight_grad)


class Experts(torch.autograd.Function):
    """The experts over rows, or over tokens whose rows ``exchange`` sends and fetches.

    gate_up and down get the gradients; products read ``rounded``, which are these where nothing is rounded.
    ``tokens`` are ``x`` in the format, where rows have arrived and whoever made them has rounded them.
    """

    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, weights, gate_up, down, offsets, places, base, rounded, tokens, plan, into, exchange):
        of_gate_up, of_down = rounded
        kinds, form, by_row = plan.plain, plan.forward, weights
        if tokens is None:
            with named("dispatch"):
                rows, low, by_row = exchange.send(x, places, weights, ends=offsets, form=form, wide=False)
            tokens = rows if low is None else low
            del rows, low
        projected = plan.multiply(tokens, of_gate_up.forward, offsets, x, kinds.forward)
        del tokens
        if plan.forward is None:
            hidden, kept = swiglu_forward(projected, by_row, offsets, kernels=kinds.elementwise), projected
            if plan.saved is not None:
                kept = quantize(projected, plan.saved, end=offsets, kernels=kinds.elementwise)
        else:
            hidden, kept = swiglu_forward_quantized(
                projected, by_row, offsets, plan.forward, keep=plan.saved, kernels=kinds.elementwise
            )
        del projected
        out = exchange.outgoing()
        out = plan.multiply(hidden, of_down.forward, offsets, x, kinds.forward, out=out)
        operands = (kept, of_gate_up.input_grad, of_down.input_grad)
        parts = [part for operand in operands for part in _parts(operand)]
        ctx.save_for_backward(x, by_row, offsets, places, *parts)
        ctx.plan, ctx.into, ctx.exchange = plan, into, exchange
        with named("combine"):
            return exchange.fetch(out, places, base=base)[0]

    @staticmethod
    @once_differentiable  # what it keeps of the forward has no graph
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, by_row, offsets, places, *parts = ctx.saved_tensors
        kept, gate_up, down = map(_operand, parts[::2], parts[1::2])
        del parts  # which dynamo cannot do where a closure reads it
        may_overwrite, exchange, plan = forget_saved(ctx), ctx.exchange, ctx.plan
        kinds, form = plan.plain, plan.input_grad
        into_gate_up, into_down = ctx.into
        needs_x, _, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        at = 1 if by_row is None else 2  # of gate_up among the tensors that came
        needs_gate_up = needs_gate_up and (into_gate_up is None or is_asked_for(ctx, at))
        needs_down = needs_down and (into_down is None or is_asked_for(ctx, at + 1))
        together = isinstance(exchange, rowwise)  # ranks send and fetch alike, whatever each of them needs
        grad_base = grad if ctx.needs_input_grad[6] else None

        with named("combine"):
            grad, low, _ = exchange.send(grad, places, ends=offsets, form=form, wide=needs_down, tokens=False)
        grad_hidden = plan.multiply(grad if low is None else low, down, offsets, x, kinds.input_grad)
        if form is None:
            kept = dequantize(kept).to(x.dtype) if isinstance(kept, Quantized) else kept
            grad_projected, hidden, grad_by_row = swiglu_backward(
                grad_hidden, kept, by_row, offsets, in_place=may_overwrite, kernels=kinds.elementwise
            )
            low = grad_projected
        else:
            low, grad_projected, hidden, grad_by_row = swiglu_backward_quantized(
                grad_hidden, kept, by_row, offsets, form, in_place=may_overwrite, kernels=kinds.elementwise
            )
        del grad_hidden, kept
        grad_down = grad_gate_up = grad_x = grad_weights = None
        if needs_down:
            grad_down = plan.grad_of_weights(hidden, grad, offsets, into_down)
        del hidden, grad
        if needs_gate_up or together:
            with named("dispatch"):
                rows = exchange.send(x, places, ends=offsets)[0]
            if needs_gate_up:
                grad_gate_up = plan.grad_of_weights(rows, grad_projected, offsets, into_gate_up)
            del rows
        del grad_projected
        if needs_x or together:
            out = exchange.outgoing()
            grad_x = plan.multiply(low, gate_up, offsets, x, kinds.input_grad, out=out)
        del low
        with named("dispatch"):
            grad_x, grad_weights = exchange.fetch(grad_x, places, each=grad_by_row)
        return grad_x, grad_weights, grad_gate_up, grad_down, *[None] * 2, grad_base, *[None] * 5


def _parts(x: Operand) -> tuple[Tensor, Tensor | None]:
    return (x.values, x.scales) if isinstance(x, Quantized) else (x, None)


def _operand(values: Tensor, scales: Tensor | None) -> Operand:
    return values if scales is None else Quantized(values, scales)
