"""The experts: grouped GEMM, activation, grouped GEMM."""

from collections.abc import Mapping
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from tensordict import TensorDict
from torch import Tensor

from moekit.mesh import local
from moekit.tree import check_values

Kernels = Literal["auto", "torch", "loop"]


def expert_forward(
    experts: TensorDict | Mapping[str, Tensor],
    rows: Float[Tensor, "r d"],
    offsets: Int[Tensor, " e"],
    *,
    activation: Literal["swiglu"] = "swiglu",
    kernels: Kernels = "auto",
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
    kernels : {"auto", "torch", "loop"}
        ``"torch"`` is ``torch.nn.functional.grouped_mm``; ``"loop"`` the plain loop over experts that defines
        the result, which reads the offsets on the host. ``"torch"`` needs ``d`` and ``h`` to be multiples of
        16 bytes. ``"auto"`` is ``"torch"``, but for float64, which only the loop has.

    Returns
    -------
    Float[Tensor, "r d"]
        In the dtype of ``rows``.

    Raises
    ------
    ValueError
        When an option is unknown, shapes or dtypes do not fit, or offsets descend or pass the last row.
    """
    gate_up, down = local(experts["gate_up"]), local(experts["down"])
    if activation != "swiglu":
        raise ValueError(f"expert_forward needs activation 'swiglu', got {activation!r}")
    e, d, h2 = gate_up.shape
    if down.shape != (e, h2 // 2, d) or rows.shape[-1] != d or offsets.shape != (e,):
        raise ValueError(
            "expert_forward needs gate_up (e, d, 2h), down (e, h, d), rows (r, d), offsets (e,), got "
            f"{tuple(gate_up.shape)}, {tuple(down.shape)}, {tuple(rows.shape)}, {tuple(offsets.shape)}"
        )
    if offsets.dtype != torch.int32:
        raise ValueError(f"expert_forward needs int32 offsets, got {offsets.dtype}; pass offsets.int()")
    if not rows.dtype == gate_up.dtype == down.dtype:
        raise ValueError(
            f"expert_forward needs one dtype, got {rows.dtype}, {gate_up.dtype} and {down.dtype}"
        )
    if offsets.device.type == "cpu":  # on a device the check would cost more launches than the experts
        ends = torch.cat([offsets.new_zeros(1), offsets, offsets.new_tensor([len(rows)])])
        needs = f"offsets that ascend from 0 to at most the {len(rows)} rows"
        check_values((ends.diff() >= 0).all(), "expert_forward", needs, offsets.tolist)
    if kernels == "auto":
        kernels = "loop" if rows.dtype == torch.float64 else "torch"
    if kernels not in ("torch", "loop"):
        raise ValueError(f"expert_forward needs kernels 'auto', 'torch' or 'loop', got {kernels!r}")
    if kernels == "loop":
        return _loop_mm(swiglu(_loop_mm(rows, gate_up, offs=offsets)), down, offs=offsets)
    if rows.dtype == torch.float64:
        raise ValueError("expert_forward needs kernels='loop' for float64, got kernels='torch'")
    if d * rows.element_size() % 16 or h2 // 2 * rows.element_size() % 16:
        raise ValueError(
            f"expert_forward needs d and h to be multiples of {16 // rows.element_size()} in {rows.dtype} "
            f"(16 bytes), got d={d}, h={h2 // 2}; choose such sizes or pass kernels='loop'"
        )
    hidden = swiglu(F.grouped_mm(rows, gate_up, offs=offsets))
    return _ContiguousGrad.apply(F.grouped_mm(hidden, down, offs=offsets))


class _ContiguousGrad(torch.autograd.Function):
    """The identity; ``grouped_mm`` refuses the expanded gradient of a plain sum."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        return grads[0].contiguous()


def swiglu(x: Float[Tensor, "*n h2"]) -> Float[Tensor, "*n h"]:
    """Return ``silu(gate) * up`` of the two halves of the last dim (Shazeer 2020, arXiv:2002.05202)."""
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up


def _loop_mm(rows: Tensor, weights: Tensor, *, offs: Tensor) -> Tensor:
    """Multiply one group after the other; rows beyond the last offset give zeros."""
    ends = offs.tolist()
    sizes = [end - start for start, end in zip([0, *ends[:-1]], ends, strict=True)]
    *groups, tail = rows.split([*sizes, len(rows) - (ends[-1] if ends else 0)])
    out = [group @ w for group, w in zip(groups, weights, strict=True)]
    return torch.cat([*out, tail.new_zeros(len(tail), weights.shape[-1])])
