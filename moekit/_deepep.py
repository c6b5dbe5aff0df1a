"""The transport :class:`deepep`: DeepEP 2 (https://github.com/deepseek-ai/DeepEP) moves the tokens.

Written to DeepEP's documented interface and checked against a stand-in for it; not yet run on its kernels.

A token travels once to each rank that holds any of its experts, with its routing weights. There it becomes
a row for each of these experts, and their outputs are summed, in float32, before one bfloat16 row goes home.
The backward of each way is the other way; gradients of the weights come home with those of the tokens.
"""

import importlib
import weakref
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed._functional_collectives import all_gather_tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit._calls import NODE
from moekit._dispatch import TRANSPORTS
from moekit._made_for import MadeFor, check_sizes
from moekit._route import Routing
from moekit.kernels.permute import invert
from moekit.mesh import check_one_axis
from moekit.symmetric import BESIDE_TORCH
from moekit.tree import has_values

IN_A_DRY_RUN = TRANSPORTS["all_to_all"]


class deepep(MadeFor):
    """A transport over DeepEP 2, where it is installed: ``via=`` of :func:`dispatch`.

    Made once, by all ranks of the mesh, and handed to every layer: its buffers are in use only while a layer
    sends or fetches. The host waits in each dispatch, for the number of rows that come, and each rank's sum
    is rounded to bfloat16 before the last sum. In a dry run it sends as ``"all_to_all"`` does, and holds
    ``buffer_bytes``, without the library. Not yet run on DeepEP's kernels.

    Buffers are freed by :meth:`close`, or when nothing refers to the transport: on all ranks at the same
    point of the program, as DeepEP waits for all of them there, and before ``destroy_process_group``. What a
    process still holds when it ends is left to the system.

    Parameters
    ----------
    mesh : DeviceMesh
        The one-axis expert-parallel mesh, ``mesh["ep"]``.
    n_tokens : int
        The most tokens that any rank has in one call.
    d_model, n_experts, top_k : int
        As of the layers; ``n_experts`` over all ranks, ``d_model`` a multiple of 256, ``top_k`` at most 32.
    dtype : torch.dtype
        Of tokens and rows: bfloat16.
    device : str or torch.device, optional
        By default the mesh's.

    Raises
    ------
    ValueError
        For sizes that do not fit or differ between ranks, and from each use with other tokens than these or
        after ``close``.
    ImportError
        When DeepEP is not installed, or is older than its ElasticBuffer.

    References
    ----------
    https://github.com/deepseek-ai/DeepEP
    """

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        n_tokens: int,
        d_model: int,
        n_experts: int,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        device: str | torch.device | None = None,
    ):
        check_one_axis("deepep", mesh)
        if mesh is None:
            raise ValueError("deepep needs a mesh, got None; use via='local' in one process")
        check_sizes("deepep", mesh.size(), n_tokens, n_experts, top_k)
        if dtype != torch.bfloat16 or d_model < 1 or d_model % 256 or top_k > 32:  # 512 bytes a warp
            raise ValueError(
                "deepep needs bfloat16 tokens of a multiple of 256 wide and top_k of at most 32, got "
                f"{dtype}, {d_model} and {top_k}; use via='all_to_all'"
            )
        self.mesh, self.n_tokens, self.d_model, self.dtype = mesh, n_tokens, d_model, dtype
        self.n_experts, self.top_k = n_experts, top_k
        probe = torch.empty(0, device=mesh.device_type if device is None else device)
        self.device = probe.device
        if not has_values(probe):
            n_bytes = buffer_bytes(mesh.size(), n_tokens, d_model, top_k)
            self._buffer = torch.empty(n_bytes, dtype=torch.uint8, device=self.device)
            self._free = weakref.finalize(self, int)  # nothing to do
            return
        library = _library()
        self._ids = library.topk_idx_t
        # On the device: DeepEP takes over the group's communicator, which torch makes for its first call.
        names, mine = ("n_tokens", "d_model", "n_experts", "top_k"), [n_tokens, d_model, n_experts, top_k]
        sizes = all_gather_tensor(torch.tensor([mine], device=self.device), 0, mesh).tolist()
        for rank, theirs in enumerate(sizes):
            if theirs != mine:
                here, there = (dict(zip(names, x, strict=True)) for x in (mine, theirs))
                raise ValueError(
                    f"deepep needs the same sizes on all ranks, got {here} here and {there} on rank {rank} "
                    "of the mesh"
                )
        self._buffer = _buffer_class(library)(
            mesh.get_group(),
            num_max_tokens_per_rank=n_tokens,
            hidden=d_model,
            num_topk=top_k,
            explicitly_destroy=True,
        )
        self._free = weakref.finalize(self, self._buffer.destroy)
        self._free.atexit = False  # the group is gone by then
        BESIDE_TORCH.add(self)

    @property
    def n_bytes(self) -> int:
        """Bytes of this rank's buffers, without about 17 MB that DeepEP works in; 0 once they are freed."""
        if not self._free.alive:
            return 0
        return self._buffer.nbytes if isinstance(self._buffer, Tensor) else self._buffer.num_bytes

    @property
    def buffer(self) -> Any:
        """DeepEP's object."""
        if not self._free.alive:
            raise ValueError("deepep needs its buffers, got it after close() has freed them; make another")
        return self._buffer

    def close(self) -> None:
        """Free the buffers, as dropping the transport does. Collective; a second call does nothing."""
        self._free()

    @torch.compiler.disable()
    def dispatch(self, x: Tensor, routing: Routing, mesh: DeviceMesh | None) -> tuple:
        """As of :class:`moekit.Transport`."""
        self.check_mesh(mesh)
        self.check_routing(routing)
        self.check_tokens(x, "tokens")
        if isinstance(self.buffer, Tensor):  # a dry run
            return IN_A_DRY_RUN.dispatch(x, routing, mesh)
        ids, weights = routing.expert_ids.to(self._ids), routing.weights.float()
        if not len(x):  # one token that goes nowhere: DeepEP does not say that a rank may have none
            x, weights = F.pad(x, (0, 0, 0, 1)), F.pad(weights, (0, 0, 0, 1))
            ids = ids.new_full((1, self.top_k), -1)
        rows, shares, plan = _Dispatch.apply(x, weights, ids, self)
        offsets = plan.handle.psum_num_recv_tokens_per_expert.clone()  # int32 ends, for an alignment of 1
        return rows, offsets, (plan, shares, routing.weights)

    @torch.compiler.disable()
    def combine(self, rows: Tensor, weights: Tensor, plan: Any, mesh: DeviceMesh | None) -> Tensor:
        """As of :class:`moekit.Transport`, with the weights that travelled with the tokens."""
        if isinstance(self.buffer, Tensor):
            return IN_A_DRY_RUN.combine(rows, weights, plan, mesh)
        plan, shares, sent = plan
        if weights is not sent:
            raise ValueError(
                "combine over deepep needs the weights of its dispatch, which travelled with the tokens, got "
                "others; give them to dispatch, or use via='all_to_all'"
            )
        return _Combine.apply(rows, shares, plan)[: len(weights)]


def buffer_bytes(n_ranks: int, n_tokens: int, d_model: int, top_k: int) -> int:
    """Return the bytes of a rank's buffer, as DeepEP 2 sizes it, with the ranks on hosts of ``NODE`` GPUs.

    Room for what all ranks may send to one: its tokens with their weights, or on the way back a sum a rank or
    choice. Over several hosts tokens pass through one GPU of each, which has room for those on their way.
    """
    out, back = (2 * d_model + -(-n // 32) * 32 for n in (12 * top_k + 4, 8 * top_k))  # of a token
    hosts = -(-n_ranks // NODE)
    if hosts == 1:
        n_bytes = n_ranks * n_tokens * out  # that back is no more
    else:
        tokens = n_ranks + hosts + 1
        sums = hosts * (min(-(-n_ranks // hosts), top_k) + 1) + min(hosts, top_k)
        channels = 1280 * hosts  # a token each
        n_bytes = max((tokens * n_tokens + channels) * out, (sums * n_tokens + channels) * back)
    return -(-n_bytes // 2**21) * 2**21


@dataclass(frozen=True, kw_only=True, eq=False)
class _Plan:
    """What the way back needs: r rows for the experts here, of n received tokens with k choices each."""

    via: deepep
    handle: Any
    order: Tensor  # (r,) the pair (token, choice), as token * k + choice, of each row
    slots: Tensor  # (n, k) the row of each pair; r where the expert is elsewhere


# Rows are in one order whatever order tokens arrive in, and what depends on the latter stays with its handle
# on ``ctx``: a recomputed forward has another handle.


class _Dispatch(torch.autograd.Function):
    """Tokens (t, d) and weights (t, k) to the rows here (r, d) and their weights (r,)."""

    @staticmethod
    def forward(ctx, x, weights, ids, via):
        received, local_ids, received_weights, handle, _ = via.buffer.dispatch(
            x.contiguous(),
            topk_idx=ids.contiguous(),
            topk_weights=weights.contiguous(),
            num_experts=via.n_experts,
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
        ctx.plan = _Plan(via=via, handle=handle, order=order, slots=slots)
        return received[order // top_k], received_weights.flatten()[order], ctx.plan

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        plan, (grad_rows, grad_shares) = ctx.plan, grads[:2]
        grad_weights = grad_shares.new_zeros(plan.slots.numel()).index_copy_(0, plan.order, grad_shares)
        grad_x, grad_weights, _ = plan.via.buffer.combine(
            _fold(grad_rows, plan), handle=plan.handle, topk_weights=grad_weights.view_as(plan.slots)
        )
        return grad_x, grad_weights, None, None


class _Combine(torch.autograd.Function):
    """Rows here (r, d) and their weights (r,) to the weighted sums of the tokens (t, d)."""

    @staticmethod
    def forward(ctx, rows, shares, plan):
        ctx.save_for_backward(rows, shares)
        ctx.plan = plan
        return plan.via.buffer.combine(_fold(rows, plan, shares), handle=plan.handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        (rows, shares), plan = ctx.saved_tensors, ctx.plan
        received, *_ = plan.via.buffer.dispatch(
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


def _buffer_class(library: Any) -> Any:
    """Return ``ElasticBuffer``, or ``EPBuffer``, which later versions have in its place."""
    return getattr(library, "ElasticBuffer", None) or getattr(library, "EPBuffer", None)


def _library() -> Any:
    what = "deepep needs DeepEP 2 and its ElasticBuffer"
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
