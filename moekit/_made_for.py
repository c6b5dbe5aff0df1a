"""What transports that own buffers have in common: the ranks and sizes that they are made for."""

from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from moekit._route import Routing
from moekit.config import ModelConfig

T = TypeVar("T", bound="MadeFor")


class MadeFor:
    """A transport made once, for the ranks of a mesh and for sizes; anything else is refused."""

    mesh: DeviceMesh | None
    n_tokens: float  # of a rank at most
    d_model: int
    n_experts: int
    top_k: int
    dtype: torch.dtype
    device: torch.device
    _or = ""  # what else to do about too many tokens than to make another

    @classmethod
    def of(cls: type[T], config: ModelConfig, mesh: DeviceMesh | None, **options: Any) -> T:
        """Make one for the layers of a model; ``options`` are the others, ``n_tokens`` among them."""
        sizes: dict[str, Any] = dict(
            d_model=config.d_model, n_experts=config.n_experts, top_k=config.top_k, **options
        )
        return cls(mesh, **sizes)  # pyright: ignore[reportCallIssue]

    def __reduce_ex__(self, protocol: Any) -> Any:  # a copy's kernels would write to the original
        name = type(self).__name__
        raise TypeError(f"{name} cannot be copied or pickled: its buffers are other ranks' too; make another")

    def dispatch(self, x: Tensor, routing: Routing, mesh: DeviceMesh | None) -> tuple:
        """As of :class:`moekit.Transport`."""
        raise NotImplementedError

    def combine(self, rows: Tensor, weights: Tensor, plan: Any, mesh: DeviceMesh | None) -> Tensor:
        """As of :class:`moekit.Transport`."""
        raise NotImplementedError

    def check_mesh(self, mesh: DeviceMesh | None) -> None:
        """Raise for ranks other than those whose memory this is."""
        size, own = (1 if m is None else m.size() for m in (mesh, self.mesh))
        if own != size or (size > 1 and mesh != self.mesh):
            raise ValueError(f"{self._was()} the ranks of {self.mesh}, got {mesh}; make another")

    def check_routing(self, routing: Routing) -> None:
        """Raise for another number of experts or choices, or more tokens."""
        n, top_k = routing.expert_ids.shape
        if (routing.n_experts, top_k) != (self.n_experts, self.top_k):
            raise ValueError(
                f"{self._was()} {self.n_experts} experts and top_k={self.top_k}, got "
                f"{routing.n_experts} and {top_k}; make another"
            )
        if n > self.n_tokens:
            raise ValueError(
                f"{self._was()} n_tokens={self.n_tokens} of a rank, got {n}; make another{self._or}"
            )

    def check_tokens(self, x: Tensor, what: str) -> None:
        """Raise for tokens or rows other than those of the buffers."""
        if (x.dtype, *x.shape[1:], x.device) != (self.dtype, self.d_model, self.device):
            raise ValueError(
                f"{self._was()} {self.dtype} {what} of width {self.d_model} on {self.device}, got "
                f"{x.dtype} {tuple(x.shape)} on {x.device}; make another"
            )

    def _was(self) -> str:
        return f"{type(self).__name__} was made for"


def check_sizes(who: str, n_ranks: int, n_tokens: int, n_experts: int, top_k: int) -> None:
    """Raise ``ValueError`` for sizes that no layer has."""
    if n_experts % n_ranks or min(n_tokens, n_experts, top_k) < 1 or top_k > n_experts:
        raise ValueError(
            f"{who} needs n_experts that ep divides, tokens, and top_k from 1 to n_experts, got "
            f"{n_experts=}, ep={n_ranks}, {n_tokens=}, {top_k=}"
        )
