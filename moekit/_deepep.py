"""The transport ``via="deepep"``: DeepEP 2 (https://github.com/deepseek-ai/DeepEP) moves the tokens.

Written to DeepEP's documented interface and checked against a stand-in for it; not yet run on its kernels.

A token travels once to each rank that holds any of its experts, with its routing weights. There it becomes
a row for each of these experts, and their outputs are summed, in float32, before one bfloat16 row goes home.
The backward of each way is the other way; gradients of the weights come home with those of the tokens.
"""

import importlib
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from moekit._route import Routing
from moekit.kernels.permute import invert


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """What the way back needs: r rows for the experts here, of n received tokens with k choices each."""

    buffer: Any
    handle: Any
    order: Tensor  # (r,) the pair (token, choice), as token * k + choice, of each row
    slots: Tensor  # (n, k) the row of each pair; r where the expert is elsewhere


def dispatch(x: Tensor, routing: Routing, mesh: DeviceMesh | None) -> tuple[Tensor, Tensor, Any]:
    """Send tokens by DeepEP; ranks agree on the largest number of tokens, which waits for the device.

    As of :class:`moekit.Transport`, for bfloat16 tokens on CUDA.
    """
    library = _library()
    top_k = routing.expert_ids.shape[1]
    if mesh is None:
        raise ValueError("dispatch via 'deepep' needs a mesh, got None; use via='local' in one process")
    if x.dtype != torch.bfloat16 or x.shape[1] % 256 or top_k > 32:  # its kernels: 512 bytes a warp
        raise ValueError(
            "dispatch via 'deepep' needs bfloat16 tokens of a multiple of 256 wide and top_k of at most 32, "
            f"got {x.dtype}, {x.shape[1]} and {top_k}; use via='all_to_all'"
        )
    ids, weights = routing.expert_ids.to(library.topk_idx_t), routing.weights.float()
    if not len(x):  # one token that goes nowhere: DeepEP does not say that a rank may have none
        x, weights, ids = F.pad(x, (0, 0, 0, 1)), F.pad(weights, (0, 0, 0, 1)), ids.new_full((1, top_k), -1)
    buffer = _buffer(library, mesh.get_group(), x, top_k)
    rows, shares, plan = _Dispatch.apply(x, weights, ids, routing.n_experts, buffer)
    offsets = plan.handle.psum_num_recv_tokens_per_expert.clone()  # int32 ends, for an alignment of 1
    return rows, offsets, (plan, shares, routing.weights)


def combine(rows: Tensor, weights: Tensor, plan: Any, mesh: DeviceMesh | None) -> Tensor:
    """Bring the rows home, summed with the weights that travelled with the tokens."""
    del mesh
    plan, shares, sent = plan
    if weights is not sent:
        raise ValueError(
            "combine via 'deepep' needs the weights of its dispatch, which travelled with the tokens, got "
            "others; give them to dispatch, or use via='all_to_all'"
        )
    return _Combine.apply(rows, shares, plan)[: len(weights)]


# Rows are in one order whatever order tokens arrive in, and what depends on the latter stays with its handle
# on ``ctx``: a recomputed forward has another handle.


class _Dispatch(torch.autograd.Function):
    """Tokens (t, d) and weights (t, k) to the rows here (r, d) and their weights (r,)."""

    @staticmethod
    def forward(ctx, x, weights, ids, n_experts, buffer):
        received, local_ids, received_weights, handle, _ = buffer.dispatch(
            x.contiguous(),
            topk_idx=ids.contiguous(),
            topk_weights=weights.contiguous(),
            num_experts=n_experts,
            expert_alignment=1,
        )
        top_k = ids.shape[1]
        n_rows = sum(handle.num_recv_tokens_per_expert_list)  # on the host already
        source = handle.recv_src_metadata[:, :1].long()  # source rank * most tokens + token
        local_ids = local_ids.long()  # -1 for an expert elsewhere: last
        elsewhere = len(handle.psum_num_recv_tokens_per_expert)
        key = torch.where(local_ids < 0, elsewhere, local_ids) * 2**32 + source
        order = key.flatten().argsort(stable=True)
        slots = invert(order).clamp_(max=n_rows).view(-1, top_k)
        order = order[:n_rows]
        ctx.plan = _Plan(buffer=buffer, handle=handle, order=order, slots=slots)
        return received[order // top_k], received_weights.flatten()[order], ctx.plan

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, (grad_rows, grad_shares) = ctx.plan, grads[:2]
        grad_weights = grad_shares.new_zeros(plan.slots.numel()).index_copy_(0, plan.order, grad_shares)
        grad_x, grad_weights, _ = plan.buffer.combine(
            _fold(grad_rows, plan), handle=plan.handle, topk_weights=grad_weights.view_as(plan.slots)
        )
        return grad_x, grad_weights, None, None, None


class _Combine(torch.autograd.Function):
    """Rows here (r, d) and their weights (r,) to the weighted sums of the tokens (t, d)."""

    @staticmethod
    def forward(ctx, rows, shares, plan):
        ctx.save_for_backward(rows, shares)
        ctx.plan = plan
        return plan.buffer.combine(_fold(rows, plan, shares), handle=plan.handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows, shares), plan = ctx.saved_tensors, ctx.plan
        received, *_ = plan.buffer.dispatch(
            grads[0].contiguous(), handle=plan.handle, num_sms=plan.handle.num_sms
        )
        grad = received[plan.order // plan.slots.shape[1]].float()
        return (grad * shares[:, None]).to(rows.dtype), (grad * rows).sum(-1), None


def _fold(rows: Tensor, plan: _Plan, shares: Tensor | None = None) -> Tensor:
    """Sum the rows of each received token in float32, with weights if given."""
    rows_and_zero = F.pad(rows, (0, 0, 0, 1))
    total = rows.new_zeros(len(plan.slots), rows.shape[1], dtype=torch.float32)
    for slot in plan.slots.unbind(1):
        part = rows_and_zero[slot]
        total += part if shares is None else part * F.pad(shares, (0, 1))[slot, None]
    return total.to(rows.dtype)


# --- The library and its buffers --------------------------------------------------------

# DeepEP writes into memory that all ranks of a group have registered: it is made once and kept.
_BUFFERS: dict[tuple[Any, int, int], list[Any]] = {}


def release() -> None:
    """Free all buffers. Collective over their groups; call it before ``destroy_process_group``."""
    while _BUFFERS:
        for buffer in _BUFFERS.popitem()[1]:
            buffer.destroy()


def _buffer(library: Any, group: Any, x: Tensor, top_k: int) -> Any:
    """Return a buffer for the largest number of tokens of any rank."""
    most = torch.tensor(len(x), device=x.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    made = _BUFFERS.setdefault((group, x.shape[1], top_k), [])
    if not made or made[-1].num_max_tokens_per_rank < most.item():  # older ones may have a backward to do
        made.append(
            _buffer_class(library)(
                group,
                num_max_tokens_per_rank=1 << (int(most) - 1).bit_length(),
                hidden=x.shape[1],
                num_topk=top_k,
                explicitly_destroy=True,
            )
        )
    return made[-1]


def _buffer_class(library: Any) -> Any:
    """Return ``ElasticBuffer``, or ``EPBuffer``, which later versions have in its place."""
    return getattr(library, "ElasticBuffer", None) or getattr(library, "EPBuffer", None)


def _library() -> Any:
    what = "dispatch via 'deepep' needs DeepEP 2 and its ElasticBuffer"
    do = "install it from https://github.com/deepseek-ai/DeepEP or use via='all_to_all'"
    try:
        library = importlib.import_module("deep_ep")
    except ModuleNotFoundError as error:
        if error.name != "deep_ep":
            raise
        raise ImportError(f"{what}, got no module deep_ep; {do}") from error
    if _buffer_class(library) is None:
        version = getattr(library, "__version__", "of an unknown version")
        raise ImportError(f"{what}, got deep_ep {version} without it; {do}")
    return library
