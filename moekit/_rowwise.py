"""The transport :class:`rowwise`: each row is written straight into its slot of its expert's rank.

Ranks tell each other their counts; from these alone every rank knows where each of its rows goes
(:mod:`moekit.kernels.row_map`), and one kernel writes them there. The experts read the buffer that the rows
were written to, and one kernel of each token's rank reads what its experts have made and sums it. The
backward of each way is the other way. Shapes do not depend on the routing and the host waits for nothing.
"""

import math
from datetime import timedelta
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh

from moekit._exchange import Sent
from moekit._made_for import MadeFor, check_sizes
from moekit._route import Routing
from moekit.kernels import check_shapes
from moekit.kernels.one_sided import FP8, dequantize_rows, get_each, get_sum, put, put_each, put_quantized
from moekit.kernels.permute import gather_sum_backward
from moekit.kernels.quantize import ROWWISE, Format, Quantized, quantize
from moekit.kernels.row_map import RowMap, row_map
from moekit.mesh import check_one_axis
from moekit.symmetric import Layout, SymmetricMemory
from moekit.tree import check_values

Overflow = Literal["even", "score", "refuse"]


class rowwise(MadeFor):
    """A transport of fixed shapes, for ranks that address each other's memory: ``via=`` of a layer.

    Made once, by all ranks of the mesh, and handed to every layer. The buffers belong to this object: a layer
    uses them only while it sends or fetches, and they are freed when nothing refers to the object. In
    :func:`moekit.moe`, with the products of Triton or quack-kernels, experts read and write the buffers
    themselves. :func:`moekit.dispatch` and :func:`moekit.combine` by themselves copy rows out of the buffers
    and into them, as autograd keeps rows beyond the call.

    Either all ranks run the backward of a layer or none does. First derivatives only.

    Parameters
    ----------
    mesh : DeviceMesh, optional
        The one-axis expert-parallel mesh, ``mesh["ep"]``; ``None`` for one process.
    n_tokens : int
        Tokens of a rank in one call, at most; with a capacity factor a call may have more.
    d_model, n_experts, top_k : int
        As of the layers; ``n_experts`` over all ranks.
    dtype : torch.dtype
        Of tokens and rows.
    capacity_factor : float, optional
        A rank has room for ``ceil(capacity_factor * n_tokens * top_k)`` rows. By default it has room for the
        most that can come, ``ep * n_tokens * min(top_k, n_experts / ep)``. The activations of the experts
        take as much room as the rows do.
    overflow : {"even", "score", "refuse"}
        What becomes of rows without room. ``"even"`` drops the same share of each expert's rows from each
        rank, to within one row, spread over the tokens. ``"score"`` drops as many of each, but those with the
        smallest routing weights. ``"refuse"`` raises; on CUDA that comes later, as nothing waits. A dropped
        route adds nothing to its token's sum, and is counted in ``dropped`` of :class:`moekit.Dispatched` and
        :class:`moekit.Routing`.
    device : str or torch.device, optional
        By default the mesh's, or the CPU.
    kernels : {"auto", "torch", "triton"}
        As for :mod:`moekit.kernels`. On CUDA ``"torch"`` waits for the device.
    payload : torch.dtype, optional
        ``None``: rows travel as they are. ``torch.float8_e4m3fn``: tokens travel to their experts in half the
        bytes of bfloat16, with one float32 scale a token, its largest magnitude divided by 448. The sending
        kernel rounds; on arrival rows become ``dtype`` again, which every experts' kernel reads. The backward
        sends tokens the same way, so that weights' gradients are those of the rows that the forward had;
        tokens' gradients ignore the rounding. What experts return, and all gradients, travel in ``dtype``:
        sums of them lose more to rounding, and a gradient's largest number says less about the others. The
        buffer of arriving rows takes half as much again. A token with a number that is not finite becomes
        NaN.
    timeout : timedelta, optional
        How long a rank waits for the others before the layer raises, and on CUDA the device stops; by default
        as long as collectives of the mesh do. See :meth:`moekit.symmetric.SymmetricMemory.barrier`.

    Attributes
    ----------
    capacity : int
        Rows that a rank has room for.
    memory : SymmetricMemory
        The buffers.
    n_bytes : int
        Bytes of this rank's buffers.

    Raises
    ------
    ValueError
        For sizes that do not fit, and from each call with tokens of another number, width or dtype.
    RuntimeError
        When the ranks cannot address each other's memory.
    """

    _or = ", or give it a capacity_factor"

    def __init__(
        self,
        mesh: DeviceMesh | None,
        *,
        n_tokens: int,
        d_model: int,
        n_experts: int,
        top_k: int,
        dtype: torch.dtype = torch.bfloat16,
        capacity_factor: float | None = None,
        overflow: Overflow = "even",
        device: str | torch.device | None = None,
        kernels: str = "auto",
        payload: torch.dtype | None = None,
        timeout: timedelta | None = None,
    ):
        check_one_axis("rowwise", mesh)
        if overflow not in ("even", "score", "refuse"):
            raise ValueError(f"rowwise needs overflow 'even', 'score' or 'refuse', got {overflow!r}")
        if kernels not in ("auto", "torch", "triton"):
            raise ValueError(f"rowwise needs kernels 'auto', 'torch' or 'triton', got {kernels!r}")
        if d_model < 1 or not dtype.is_floating_point:
            raise ValueError(f"rowwise needs d_model from 1 and a dtype of reals, got {d_model} and {dtype}")
        if payload not in (None, FP8):
            raise ValueError(f"rowwise needs payload None or {FP8}, got {payload}")
        size = 1 if mesh is None else mesh.size()
        self.capacity = rows_of_rank(size, n_tokens, n_experts, top_k, capacity_factor)
        self.n_tokens = n_tokens if capacity_factor is None else math.inf
        self.mesh, self.n_experts, self.top_k = mesh, n_experts, top_k
        self.d_model, self.dtype, self.payload, self.kernels = d_model, dtype, payload, kernels
        self.overflow = "refuse" if capacity_factor is None else overflow
        # Without a factor there is room for all, unless a token may choose an expert twice.
        self._may_overflow = capacity_factor is not None or top_k > n_experts // size
        if device is None:
            device = "cpu" if mesh is None else mesh.device_type
        if device == "cuda":
            device = torch.device("cuda", torch.cuda.current_device())
        if payload and torch.device(device).type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
            raise ValueError(f"rowwise needs compute capability 8.9 for payload={payload}; leave it out")
        self.memory = SymmetricMemory(
            buffers_of_rank(size, self.capacity, d_model, n_experts, dtype, payload),
            mesh=mesh,
            device=torch.device(device),
            timeout=timeout,
        )
        self.n_bytes, self.device = self.memory.n_bytes, self.memory.tensors["counts"].mine.device
        self._in_use: set[str] = set()  # buffers of which some rank may not be done

        at = torch.arange(n_experts, device=device)
        n = size * n_experts  # where this rank's counts are on each rank
        ranks = torch.arange(size, device=device)[:, None]
        self._places_of_counts = ranks * n + self.memory.rank * n_experts + at

    # --- A layer on its way: in this order, on all ranks ------------------------------

    def plan(self, routing: Routing) -> RowMap:
        """Tell all ranks this one's counts and return where its rows go. Collective; no host sync."""
        self.check_routing(routing)
        counts = self._claim("counts")
        everyone = routing.counts.expand(self.memory.size, -1)
        put_each(everyone, self._places_of_counts, counts, kernels=self.kernels)
        self._meet("counts")
        matrix = counts.mine.view(self.memory.size, self.n_experts)
        if self.overflow == "refuse" and self._may_overflow:
            wanted = matrix.sum(0).view(self.memory.size, -1).sum(1).max()
            check_values(
                wanted <= self.capacity,
                "rowwise",
                f"room for the rows of each rank, and has it for {self.capacity}; a larger n_tokens or "
                "capacity_factor, or overflow='even', lets them pass",
                lambda: f"{wanted} rows for one",
            )
        return row_map(
            routing.expert_ids,
            matrix,
            rank=self.memory.rank,
            capacity=self.capacity,
            priority=routing.weights.detach() if self.overflow == "score" else None,
            kernels=self.kernels,
        )

    def send(
        self,
        x: Float[Tensor, "t d"],
        places: Int[Tensor, "t k"],
        weights: Float[Tensor, "t k"] | None = None,
        *,
        ends: Int[Tensor, " e"] | None = None,
        form: Format | None = None,
        wide: bool = True,
        tokens: bool = True,
    ) -> Sent:
        """Return the rows that came here, as :class:`moekit._exchange.Exchange` says. Collective.

        ``rows`` are a view of the buffer, overwritten by the next ``send``; ``weights`` are a copy. Tokens
        travel in ``payload``; where the rows are wanted in that very format, they are not rounded again. A
        payload or a format needs ``ends``.
        """
        packed = self._send(x, places, weights, packed=tokens)
        rows, low = self.memory.tensors["rows in"].mine, None
        if form is not None:
            low = packed if form == ROWWISE else None
        if packed is not None and (low is None or wide):
            assert ends is not None
            dequantize_rows(*packed, ends, rows, kernels=self.kernels)
        if form is not None and low is None:
            low = quantize(rows, form, end=ends, kernels=self.kernels)
        by_row = None if weights is None else self.memory.tensors["weights in"].mine.clone()
        return Sent(rows if form is None or wide else None, low, by_row)

    def _send(self, x: Tensor, places: Tensor, weights: Tensor | None, *, packed: bool) -> Quantized | None:
        """Write tokens to their places, and wait for those that come; return these if they came packed."""
        self.check_tokens(x, "tokens")
        rows, arrived = self._claim("rows in"), None
        if packed and self.payload:
            to, scales = self.memory.tensors["packed in"], self.memory.tensors["scales in"]
            put_quantized(x, places, to, scales, kernels=self.kernels)
            arrived = Quantized(to.mine, scales.mine)
        else:
            put(x, places, rows, kernels=self.kernels)
        if weights is not None:
            put_each(weights, places, self.memory.tensors["weights in"], kernels=self.kernels)
        self._meet("rows in")
        return arrived

    def fetch(
        self,
        rows: Float[Tensor, "r d"] | None,
        places: Int[Tensor, "t k"],
        *,
        weights: Float[Tensor, "t k"] | None = None,
        base: Float[Tensor, "t d"] | None = None,
        each: Float[Tensor, " r"] | None = None,
    ) -> tuple[Float[Tensor, "t d"] | None, Float[Tensor, "t k"] | None]:
        """Return each token's weighted sum of rows, wherever they are, and each route's number. Collective.

        ``weights`` are 1 where None, ``base`` is added to the sums; a dropped route adds nothing, and its
        number is 0. ``rows`` are copied to the buffer unless they are what :meth:`outgoing` returned.
        """
        if rows is not None:
            self.check_tokens(rows, "rows")
            check_shapes("rowwise.fetch", rows=(rows, (self.capacity, self.d_model)))
        out = self._claim("rows out")
        numbers = self.memory.tensors["weights out"]
        if rows is not None and rows is not out.mine:
            out.mine.copy_(rows)
        if each is not None:
            numbers.mine.copy_(each)
        self._meet("rows out")
        return (
            None if rows is None else get_sum(out, places, weights, base=base, kernels=self.kernels),
            None if each is None else get_each(numbers, places, kernels=self.kernels),
        )

    def outgoing(self) -> Float[Tensor, "r d"]:
        """Return the buffer that rows are fetched from, to write them there in the first place."""
        return self._claim("rows out").mine

    def _claim(self, name: str):
        """Return a buffer that no rank reads any more."""
        if name in self._in_use:
            self._meet()
        return self.memory.tensors[name]

    def _meet(self, *in_use: str) -> None:
        """Wait for all ranks, on the device; then ``in_use`` is read."""
        self.memory.barrier()
        self._in_use = set(in_use)

    # --- As a transport ---------------------------------------------------------------

    @torch.compiler.disable()
    def dispatch(self, x: Tensor, routing: Routing, mesh: DeviceMesh | None) -> tuple:
        """As of :class:`moekit.Transport`, with the routes dropped."""
        self.check_mesh(mesh)
        places, offsets, dropped = self.plan(routing)
        return _Dispatch.apply(x, places, offsets, self), offsets, places, dropped

    @torch.compiler.disable()
    def combine(self, rows: Tensor, weights: Tensor, plan: Any, mesh: DeviceMesh | None) -> Tensor:
        """As of :class:`moekit.Transport`."""
        del mesh
        return _Combine.apply(rows, weights, plan, self)


def rows_of_rank(
    n_ranks: int, n_tokens: int, n_experts: int, top_k: int, capacity_factor: float | None
) -> int:
    """Return the rows that a rank has room for; see :class:`rowwise`."""
    check_sizes("rowwise", n_ranks, n_tokens, n_experts, top_k)
    if capacity_factor is None:
        return n_ranks * n_tokens * min(top_k, n_experts // n_ranks)
    if not 0 < capacity_factor < math.inf:
        raise ValueError(f"rowwise needs a positive, finite capacity_factor, got {capacity_factor}")
    return math.ceil(capacity_factor * n_tokens * top_k)


def buffers_of_rank(
    n_ranks: int,
    capacity: int,
    d_model: int,
    n_experts: int,
    dtype: torch.dtype,
    payload: torch.dtype | None = None,
) -> Layout:
    """Return shape and dtype of each buffer of a rank, by name."""
    wide = torch.promote_types(dtype, torch.float32)
    packed: Layout = {
        "packed in": ((capacity, d_model), payload or dtype),
        "scales in": ((capacity, 1), torch.float32),
    }
    return {
        "counts": ((n_ranks * n_experts,), torch.int64),
        "rows in": ((capacity, d_model), dtype),
        "rows out": ((capacity, d_model), dtype),
        "weights in": ((capacity,), wide),
        "weights out": ((capacity,), wide),
        **(packed if payload else {}),
    }


class _Dispatch(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, places, offsets, transport):
        ctx.save_for_backward(places)
        ctx.transport = transport
        return transport.send(x, places, ends=offsets).rows.clone()

    @staticmethod
    @once_differentiable  # what other ranks write has no graph
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        (places,) = ctx.saved_tensors
        return ctx.transport.fetch(grad, places)[0], None, None, None


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, weights, places, transport):
        ctx.save_for_backward(rows, weights, places)
        ctx.transport = transport
        return transport.fetch(rows, places, weights=weights)[0]

    @staticmethod
    @once_differentiable  # what other ranks write has no graph
    def backward(ctx, grad):  # pyright: ignore[reportIncompatibleMethodOverride]
        rows, weights, places = ctx.saved_tensors
        grad, _, by_row = ctx.transport.send(grad, places, weights, tokens=False)
        slots = torch.arange(len(rows), device=rows.device)[:, None]
        grad_rows, grad_by_row = gather_sum_backward(
            grad, rows, slots, by_row[:, None], kernels=ctx.transport.kernels
        )
        _, grad_weights = ctx.transport.fetch(None, places, each=grad_by_row[:, 0])
        return grad_rows, grad_weights, None, None
