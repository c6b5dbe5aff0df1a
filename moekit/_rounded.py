"""Weights rounded as a policy says, once for all calls between two updates.

Axes: E experts, K and N a matrix's dims, b scales.
"""

from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from moekit._buckets import Parcel, Shards, gather
from moekit._policy import Precision
from moekit.kernels.quantize import Format, Quantized, quantize
from moekit.mesh import all_reduce
from moekit.tree import check_not_hollow, held, map_named, named, nested, on_mesh

Operand = Tensor | Quantized


@dataclass(frozen=True, eq=False)
class Rounded:
    """A policy, with what has been rounded for it already: a value for ``precision=``.

    Attributes
    ----------
    policy : Precision
        The format of each role.
    weights : TensorDict, optional
        From :func:`round_weights`: a tree like the parameters, of those that are rounded. Each has
        ``forward`` and ``input_grad``, for the two products that read it, as ``values`` and ``scales``.
        ``None``: each call rounds its weights.
    tokens : Quantized, optional
        The input of the function that is called, already rounded by the operation that made it.
    """

    policy: Precision  # without a default, which torch 2.11 cannot trace
    weights: Mapping[str, Any] | None = None
    tokens: Quantized | None = None

    @classmethod
    def of(cls, precision: "Precision | Rounded") -> "Rounded":
        """Return a policy as a value of this class, and one of this class as it is.

        Raises
        ------
        TypeError
            For anything else.
        """
        if not isinstance(precision, Precision | Rounded):
            raise TypeError(
                f"precision needs a Precision or Rounded, got {precision!r}; pass moekit.precision.preset()"
            )
        return precision if isinstance(precision, Rounded) else cls(precision)

    def part(self, name: str, tokens: Quantized | None = None) -> "Rounded":
        """Return the same for one part of the parameters, with the ``tokens`` that come into that part."""
        weights = None if self.weights is None else self.weights.get(name, {})
        return Rounded(self.policy, weights, tokens)


class Weights(NamedTuple):
    """A matrix (K, N), or one of each expert (E, K, N), as each of the two products with it reads it.

    Products in eight bits want what they sum over last, torch's want an operand to multiply with.
    """

    forward: Operand  # rounded: (*E, N, K); else the matrix itself
    input_grad: Operand  # rounded: (*E, K, N); else the matrix, transposed

    @classmethod
    def of(
        cls, who: str, name: str, w: Tensor, low: Rounded, forward: Format | None, input_grad: Format | None
    ) -> "Weights":
        """Return ``w`` in these formats, ``None`` for its own dtype.

        Taken from ``low.weights`` where they hold ``w``, else rounded here.

        Raises
        ------
        ValueError
            Where ``low.weights`` have it in other formats, or it is read and hollow (:func:`hollow`).
        """
        mine = None if low.weights is None else low.weights.get(name, {})
        if mine is None or forward is None or input_grad is None:
            check_not_hollow(who, **{name: w})
        w = w.detach()
        return cls(
            _operand(who, f"{name} for the product", w.mT, forward, mine, "forward"),
            _operand(who, f"{name} for its input's gradient", w, input_grad, mine, "input_grad"),
        )

    def of_one_expert(self) -> "Weights":
        """Return rounded (K, N) operands as those of one expert, (1, K, N)."""
        return Weights(*(Quantized(*(part[None] for part in x)) for x in self if isinstance(x, Quantized)))


def _operand(
    who: str, what: str, view: Tensor, form: Format | None, mine: Mapping[str, Any] | None, product: str
) -> Operand:
    if form is None:
        return view.mT
    if mine is None:
        return quantize(view.contiguous(), form)
    q = Quantized(**mine[product]) if product in mine.keys() else None
    if q is None or not q.matches(form, view.shape):
        got = "nothing" if q is None else f"{q.values.dtype} {tuple(q.values.shape)}, {q.scales.dtype}"
        raise ValueError(
            f"{who} needs {what}, {tuple(view.shape)}, rounded to {form}, got {got}; "
            "pass precision=round_weights(weights, policy), of the same weights"
        )
    return q


def round_weights(params: TensorDict, policy: Precision | Rounded) -> Rounded:
    """Round every matrix that a policy rounds: once a step, as long as the weights stay the same.

    Not differentiable, nor need it be: gradients go to the parameters. Collective where ranks share a matrix,
    as they share masters: what they have rounded travels in buckets, as those of
    :func:`moekit.shard_optimizer`. Experts that lie on different ranks are not shared in this sense.

    Parameters
    ----------
    params : TensorDict
        The parameters, or the float32 masters of :func:`moekit.shard_optimizer`. Of masters, what other ranks
        hold arrives in eight bits, once for each of the two products: as many bytes as gathering bfloat16.
    policy : Precision or Rounded
        Which roles are rounded, and to what.

    Returns
    -------
    Rounded
        What this rank multiplies with, for ``precision=`` of :func:`moekit.next_token_loss` and all it calls.

    Raises
    ------
    ValueError
        For hollow parameters, widths that are not whole blocks, and a matrix that two mesh axes shard.
    """
    policy = Rounded.of(policy).policy
    forms = {name: (w, _forms_of(policy, _role_of(name, w))) for name, w in named(params).items()}
    rounded = _round_all({name: (w, two) for name, (w, two) in forms.items() if any(two)})
    return Rounded(policy, nested(rounded))


def hollow(params: TensorDict, policy: Precision | Rounded) -> TensorDict:
    """Return parameters without memory for those matrices that a policy rounds for both their products.

    Where masters are rounded once a step, nothing reads the bfloat16 parameter. A hollow one keeps its shape,
    dtype and placement and gets a gradient, but is one NaN, expanded: products with it need
    ``precision=round_weights(masters, policy)``. :func:`moekit.shard_optimizer` does not write to it, and a
    checkpoint leaves it out. Make the optimizer's state first: its masters are copies of the parameters. A
    copy of a hollow parameter (``clone``, ``to``) takes memory again, all of it NaN.
    """
    policy = Rounded.of(policy).policy

    def empty(name: str, w: Tensor) -> Tensor:
        if not all(_forms_of(policy, _role_of(name, w))):
            return w
        return on_mesh(held(w).new_full((), torch.nan).expand(held(w).shape), like=w)

    return map_named(empty, params)


def _role_of(name: str, w: Tensor) -> str | None:
    """Return the role of a parameter's products: experts have a matrix each."""
    leaf = name.rpartition(".")[2]
    if leaf in ("qkv", "out"):
        return "attention_projections"
    if leaf in ("gate_up", "down"):
        return "experts" if w.ndim == 3 else "feed_forward"
    return None


def _forms_of(policy: Precision, role: str | None) -> tuple[Format | None, Format | None]:
    if role is None:
        return None, None
    if role == "experts":
        return policy.form("experts_forward"), policy.form("experts_input_grad")
    return policy.form(role), policy.form(role)


def round_matrix(w: Float[Tensor, "*E K N"], forward: Format | None, input_grad: Format | None) -> TensorDict:
    """Round a matrix, or one of each expert, for each of its two products; for one whose format is given.

    The product itself sums over K and the gradient of its input over N, and what is summed over shares a
    scale: so each needs a rounding of its own. Collective where ranks share the matrix, as
    :func:`round_weights` is.

    Returns
    -------
    TensorDict
        ``forward``: ``values`` (*E, N, K) and ``scales`` (*E, N, b); ``input_grad``: (*E, K, N) and
        (*E, K, b).
    """
    return _round_all({"w": (w, (forward, input_grad))})["w"]


@torch.no_grad()
def _round_all(matrices: Mapping[str, tuple[Tensor, Sequence[Format | None]]]) -> dict[str, TensorDict]:
    """Round matrices, each to the formats of its two products; of what ranks share the whole comes back."""
    rounded: dict[str, TensorDict] = {}

    def parcels() -> Iterator[Parcel]:
        for name, (w, (forward, input_grad)) in matrices.items():
            rounded[name] = TensorDict()
            for product, x, form in (("forward", w.mT, forward), ("input_grad", w, input_grad)):
                if form is not None:
                    q = yield from _round(x, form)
                    rounded[name][product] = TensorDict(q._asdict())

    gather(parcels())
    return rounded


def _round(w: Tensor, form: Format) -> Generator[Parcel, None, Quantized]:
    """Round along the last dim; of a matrix that ranks share, return the whole, and yield what fills it."""
    check_not_hollow("round_weights", weights=w)
    local = held(w).contiguous()
    if not isinstance(w, DTensor):
        return quantize(local, form)
    mesh, last = w.device_mesh, w.shape[-1]
    shared = [
        (axis, p.dim)
        for axis, p in enumerate(w.placements)
        if isinstance(p, Shard) and p.dim >= w.ndim - 2 and mesh.size(axis) > 1
    ]
    if not shared:
        return quantize(local, form)
    if len(shared) > 1:
        raise ValueError(f"round_weights needs matrices that one mesh axis shards, got {w.placements}")
    ((axis, dim),) = shared
    n = mesh.size(axis)
    shards = Shards(mesh, axis, n, mesh.get_local_rank(axis), dim)

    def whole(x: Tensor, n_last: int) -> tuple[Tensor, Parcel]:
        full = x.new_empty(*x.shape[:-2], w.shape[-2], n_last)
        parts = [y.view(torch.uint8) if x.element_size() == 1 else y for y in (full, x)]  # of any backend
        return full, Parcel("", shards, parts[0].dtype, *parts)

    largest = None
    if dim == w.ndim - 1 and form.block is None:
        # A rank may have none of a row's numbers; and a maximum over ranks may lose NaN, not infinity.
        mine = local.abs().amax(-1, keepdim=True) if local.numel() else local.new_zeros(*local.shape[:-1], 1)
        largest = all_reduce(mine.nan_to_num(torch.inf, torch.inf), mesh, axis, "max")
    if dim == w.ndim - 1 and form.block is not None and -(-last // n) % form.block:
        full, parcel = whole(local, last)
        gather([parcel])  # ranks share blocks, so what they hold comes as it is
        return quantize(full, form)
    q = quantize(local, form, largest=largest)
    values, parcel = whole(q.values, last)
    yield parcel
    if largest is not None:
        return Quantized(values, q.scales)
    scales, parcel = whole(q.scales, form.n_scales(last))
    yield parcel
    return Quantized(values, scales)
