"""The forward and backward of the experts, in the tensors' dtype or with operands of eight bits.

What a product reads in eight bits is rounded by the pass that makes it: rows as they are put into expert
order, hidden rows and their gradients in SwiGLU's passes. Weights are rounded beforehand, once for the
product with them and once for its input's gradient.
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
from moekit.profiling import in_range


class ExpertProducts(NamedTuple):
    """The format of each product's operands, ``None`` for the tensors' own dtype, and the kernels."""

    forward: Format | None
    input_grad: Format | None
    weight_grad: Format | None
    saved: Format | None  # of what the layer keeps for its backward
    plain: Products  # the kernels of products in the tensors' dtype, and of the passes around all products

    @classmethod
    def of(cls, who: str, policy: Precision, role: str, plain: Products, x: Tensor) -> "ExpertProducts":
        """Return what a policy says of a role: ``"experts"``, ``"feed_forward"`` or another dense one.

        Raises
        ------
        ValueError
            In the name of ``who``, where ``x`` is on a device that would have to emulate a format.
        """
        roles = EXPERTS if role == "experts" else (role, role, "dense_weight_grad")
        forward, input_grad, weight_grad = (form_on(who, policy, name, x) for name in roles)
        return cls(forward, input_grad, weight_grad, policy.form("saved_activations"), plain)

    @property
    def rounds(self) -> bool:
        """Whether anything is rounded."""
        return any(self[:-1])

    @property
    def scaled(self) -> str:
        """The kernels of products in eight bits: plain torch where that was asked for."""
        return "torch" if self.plain.elementwise == "torch" else "auto"

    def multiply(
        self, rows: Operand, weights: Operand, offsets: Tensor, like: Tensor, kernels: str, out=None
    ) -> Tensor:
        """Return each group's rows times its matrix, in the dtype of ``like``, where asked for in ``out``."""
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
    """The experts' forward and backward: send, product, SwiGLU, product, fetch.

    Arguments of ``forward``, with t tokens, k choices, r rows, e experts, d features and h hidden:

    - ``x`` (t, d), or rows (r, d) where they have arrived;
    - ``weights`` (t, k), routing weights that multiply the hidden rows, or None;
    - ``gate_up`` (e, d, 2h) and ``down`` (e, h, d): they get the gradients, while the products read
      ``rounded``, a :class:`moekit._rounded.Weights` of each;
    - ``offsets`` (e,), int32; ``places`` (t, k) and ``base`` (t, d), for ``exchange``, or None;
    - ``tokens``: rows of ``x`` in the forward's format, where whoever made ``x`` has rounded it, else None;
    - ``plan``: an :class:`ExpertProducts`;
    - ``into``: the buffers that take the gradients of gate_up and of down in autograd's place, or None each;
    - ``exchange``: a :class:`moekit._exchange.Exchange`.
    """

    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, weights, gate_up, down, offsets, places, base, rounded, tokens, plan, into, exchange):
        of_gate_up, of_down = rounded
        kinds, form, by_row = plan.plain, plan.forward, weights
        if tokens is None:
            with in_range("dispatch"):
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
        with in_range("combine"):
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
        at = 1 if by_row is None else 2  # of gate_up among the arguments that are tensors
        needs_gate_up = needs_gate_up and (into_gate_up is None or is_asked_for(ctx, at))
        needs_down = needs_down and (into_down is None or is_asked_for(ctx, at + 1))
        # Every rank of it must send and fetch as often, whichever gradients it needs itself.
        together = isinstance(exchange, rowwise)
        grad_base = grad if ctx.needs_input_grad[6] else None

        with in_range("combine"):
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
            with in_range("dispatch"):
                rows = exchange.send(x, places, ends=offsets).rows
            if needs_gate_up:
                grad_gate_up = plan.grad_of_weights(rows, grad_projected, offsets, into_gate_up)
            del rows
        del grad_projected
        if needs_x or together:
            out = exchange.outgoing()
            grad_x = plan.multiply(low, gate_up, offsets, x, kinds.input_grad, out=out)
        del low
        with in_range("dispatch"):
            grad_x, grad_weights = exchange.fetch(grad_x, places, each=grad_by_row)
        return grad_x, grad_weights, grad_gate_up, grad_down, *[None] * 2, grad_base, *[None] * 5


def _parts(x: Operand) -> tuple[Tensor, Tensor | None]:
    return (x.values, x.scales) if isinstance(x, Quantized) else (x, None)


def _operand(values: Tensor, scales: Tensor | None) -> Operand:
    return values if scales is None else Quantized(values, scales)
