"""The experts with products of eight-bit numbers.

The passes of :mod:`moekit._experts`, in the same order. What a product reads is rounded where it is made:
rows on their way into expert order, hidden rows and their gradients in SwiGLU's passes. Weights come rounded,
for either product with them.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit._rowwise import rowwise
from moekit.kernels import Products, forget_saved, is_asked_for
from moekit.kernels.grouped_mm import grouped_mm, grouped_weight_grad
from moekit.kernels.quantize import Format, Quantized, dequantize, quantize, quantize_columns
from moekit.kernels.scaled_mm import scaled_grouped_mm, scaled_weight_grad
from moekit.kernels.swiglu import swiglu_backward, swiglu_forward
from moekit.kernels.swiglu_quantized import swiglu_backward_quantized, swiglu_forward_quantized
from moekit.tree import check_not_hollow

Operand = Tensor | Quantized


class LowProducts(NamedTuple):
    """Formats of the experts' operands; ``None``, where a product reads the tensors' dtype."""

    forward: Format | None
    input_grad: Format | None
    weight_grad: Format | None
    saved: Format | None  # of the first product, which the backward reads
    plain: Products  # who makes those that read the tensors' dtype

    def multiply(self, rows: Operand, weights: Operand, offsets: Tensor, dtype, kernels: str, out=None):
        """Return a grouped product of rows with weights (E, K, N), or, of eight bits, (E, N, K)."""
        if isinstance(rows, Quantized):
            assert isinstance(weights, Quantized)
            return scaled_grouped_mm(rows, weights, offsets, dtype=dtype, out=out)
        assert isinstance(weights, Tensor)
        return grouped_mm(rows, weights, offsets, out=out, kernels=kernels)

    def weigh(self, rows: Tensor, grad: Tensor, offsets: Tensor, into: Tensor | None) -> Tensor | None:
        """Return the weights' gradient, or add it to a buffer."""
        if self.weight_grad is None:
            return grouped_weight_grad(rows, grad, offsets, into=into, kernels=self.plain.weight_grad)
        columns = [quantize_columns(x, offsets, self.weight_grad) for x in (rows, grad)]
        return scaled_weight_grad(*columns, dtype=rows.dtype, into=into)


class Weights(NamedTuple):
    """A matrix, or one of each expert, (*E, K, N), as the two products with it read it."""

    forward: Operand
    input_grad: Operand

    @classmethod
    def of(
        cls,
        who: str,
        name: str,
        w: Tensor,
        rounded: Mapping[str, Any],
        forward: Format | None,
        input_grad: Format | None,
    ) -> "Weights":
        """Return what has been rounded of ``w`` to these formats, and views of ``w`` for None.

        Raises
        ------
        ValueError
            Where what is needed has not been rounded, or to another format.
        """
        operands = []
        for product, view, form in (("forward", w.mT, forward), ("input_grad", w, input_grad)):
            if form is None:
                check_not_hollow(who, **{name: w})
                operands.append(view.mT)
                continue
            q = Quantized(**rounded[product]) if product in rounded.keys() else None
            if q is None or not q.is_of(form, view.shape):
                got = (
                    "none"
                    if q is None
                    else f"{q.values.dtype} {tuple(q.values.shape)} with {q.scales.dtype} scales"
                )
                raise ValueError(
                    f"{who} needs {name} rounded to {form} for {product}, got {got}; pass "
                    "rounded=round_weights(weights, precision) of the same policy"
                )
            operands.append(q)
        return cls(*operands)


class LowExperts(torch.autograd.Function):
    """As ``_Experts`` of :mod:`moekit._experts`, with gate_up and down rounded, too; they get gradients."""

    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, x, weights, gate_up, down, offsets, places, base, low, plan, into, exchange):
        of_gate_up, of_down = low
        kinds, dtype = plan.plain, x.dtype
        if plan.forward is None:
            rows, by_row = exchange.send(x, places, weights, ends=offsets)
        else:
            rows, _, by_row = exchange.send_rounded(x, places, plan.forward, weights, ends=offsets)
        projected = plan.multiply(rows, of_gate_up.forward, offsets, dtype, kinds.forward)
        del rows
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
        out = plan.multiply(hidden, of_down.forward, offsets, dtype, kinds.forward, out=out)
        kept = kept if isinstance(kept, Quantized) else (kept, None)
        ctx.save_for_backward(x, by_row, offsets, places, *kept)
        ctx.low, ctx.plan, ctx.into, ctx.exchange = low, plan, into, exchange
        return exchange.fetch(out, places, base=base)[0]

    @staticmethod
    @once_differentiable  # what it keeps of the forward has no graph
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        x, by_row, offsets, places, kept, scales = ctx.saved_tensors
        may_overwrite, exchange, plan, dtype = forget_saved(ctx), ctx.exchange, ctx.plan, x.dtype
        kinds, (of_gate_up, of_down) = plan.plain, ctx.low
        into_gate_up, into_down = ctx.into
        needs_x, _, needs_gate_up, needs_down, *_ = ctx.needs_input_grad
        at = 1 if by_row is None else 2  # of gate_up among the tensors that came
        needs_gate_up = needs_gate_up and (into_gate_up is None or is_asked_for(ctx, at))
        needs_down = needs_down and (into_down is None or is_asked_for(ctx, at + 1))
        together = isinstance(exchange, rowwise)  # ranks send and fetch alike, whatever each of them needs
        grad_base = grad if ctx.needs_input_grad[6] else None

        if plan.input_grad is None:
            low = grad = exchange.send(grad, places)[0]
        else:
            low, grad, _ = exchange.send_rounded(
                grad, places, plan.input_grad, ends=offsets, wide=needs_down, tokens=False
            )
        grad_hidden = plan.multiply(low, of_down.input_grad, offsets, dtype, kinds.input_grad)
        if plan.input_grad is None:
            kept = kept if scales is None else dequantize(Quantized(kept, scales), dtype)
            grad_projected, hidden, grad_by_row = swiglu_backward(
                grad_hidden, kept, by_row, offsets, in_place=may_overwrite, kernels=kinds.elementwise
            )
            low = grad_projected
        else:
            low, grad_projected, hidden, grad_by_row = swiglu_backward_quantized(
                *(grad_hidden, kept if scales is None else Quantized(kept, scales), by_row, offsets),
                *(plan.input_grad,),
                in_place=may_overwrite,
                kernels=kinds.elementwise,
            )
        del grad_hidden, kept
        grad_down = grad_gate_up = grad_x = grad_weights = None
        if needs_down:
            grad_down = plan.weigh(hidden, grad, offsets, into_down)
        del hidden, grad
        if needs_gate_up or together:
            rows = exchange.send(x, places, ends=offsets)[0]
            if needs_gate_up:
                grad_gate_up = plan.weigh(rows, grad_projected, offsets, into_gate_up)
            del rows
        del grad_projected
        if needs_x or together:
            out = exchange.outgoing()
            grad_x = plan.multiply(low, of_gate_up.input_grad, offsets, dtype, kinds.input_grad, out=out)
        del low
        grad_x, grad_weights = exchange.fetch(grad_x, places, each=grad_by_row)
        return grad_x, grad_weights, grad_gate_up, grad_down, *[None] * 2, grad_base, *[None] * 4
