"""How a layer of experts gets its rows, and hands back what it has made of them.

:class:`moekit._expert_passes.Experts` is written once, for rows that are put in order on this rank
(:class:`OneRank`), that a dispatch has already brought (:class:`Arrived`), or that travel between ranks
(:class:`moekit.rowwise`). What differs is an :class:`Exchange`.

Axes: t tokens, k choices, d features, r rows in expert order, e experts of this rank.
"""

from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor

from moekit.kernels.permute import gather_sum, scatter, scatter_quantized
from moekit.kernels.quantize import Format, Quantized, quantize


class Sent(NamedTuple):
    """Rows (r, d) in expert order, as :meth:`Exchange.send` returns them."""

    rows: Tensor | None  # in the dtype of the tokens; None where only the rounded ones were asked for
    low: Quantized | None  # rounded to the format that was asked for
    weights: Tensor | None  # (r,): the routing weight of each row, where weights were sent


@runtime_checkable
class Exchange(Protocol):
    """Three steps: send tokens to their experts, make the experts' outputs, fetch them home.

    A backward takes the same three: the gradient of each token's sum is sent, and the gradient of each token
    is fetched.
    """

    def send(
        self,
        x: Tensor,
        places: Any,
        weights: Tensor | None = None,
        *,
        ends: Tensor | None = None,
        form: Format | None = None,
        wide: bool = True,
        tokens: bool = True,
    ) -> Sent:
        """Return the rows of this rank's experts.

        Parameters
        ----------
        x : Tensor
            (t, d): tokens, or the gradients of their sums.
        places : Tensor, optional
            (t, k) int64: where each of a token's k rows goes. None where ``x`` are rows already.
        weights : Tensor, optional
            (t, k): routing weights, which go along with the rows.
        ends : Tensor, optional
            (e,) int32: where each expert's rows end; those past the last are not rounded.
        form : Format, optional
            Return the rows rounded to this format ...
        wide : bool
            ... and, if true, also as they are.
        tokens : bool
            Whether ``x`` are tokens, which may travel in eight bits. Gradients never do.
        """
        ...

    def outgoing(self) -> Tensor | None:
        """Return the buffer (r, d) that outputs should be written to; None: any will do."""
        ...

    def fetch(
        self,
        rows: Tensor | None,
        places: Any,
        *,
        base: Tensor | None = None,
        each: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return what belongs to this rank's tokens.

        Parameters
        ----------
        rows : Tensor, optional
            (r, d): outputs, or gradients of rows. Each token's k are summed, to (t, d).
        places : Tensor, optional
            As :meth:`send` had them.
        base : Tensor, optional
            (t, d): added to the sums.
        each : Tensor, optional
            (r,): a number of each row, returned for each route, (t, k).
        """
        ...


class OneRank(NamedTuple):
    """Rows that are put into expert order, and summed, on this rank."""

    kernels: str

    def send(
        self,
        x: Tensor,
        places: Tensor,
        weights: Tensor | None = None,
        *,
        ends: Tensor | None = None,
        form: Format | None = None,
        wide: bool = True,
        tokens: bool = True,
    ) -> Sent:
        """Return each token's k rows in expert order."""
        del ends, tokens  # every row is valid, and nothing travels
        rows = low = by_row = None
        if form is None:
            rows = scatter(x, places, kernels=self.kernels)
        else:
            low, rows = scatter_quantized(x, places, form, wide=wide, kernels=self.kernels)
        if weights is not None:
            by_row = torch.empty_like(weights).view(-1).scatter_(0, places.flatten(), weights.flatten())
        return Sent(rows, low, by_row)

    def outgoing(self) -> None:
        """Return None: outputs may be anywhere."""

    def fetch(
        self, rows: Tensor | None, places: Tensor, *, base: Tensor | None = None, each: Tensor | None = None
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return each token's sum of rows, and each route's number."""
        return (
            None if rows is None else gather_sum(rows, places, base=base, kernels=self.kernels),
            None if each is None else each[places],
        )


class Arrived(NamedTuple):
    """Rows that some dispatch has brought, and some combine will take home: nothing is moved here."""

    kernels: str

    def send(
        self,
        x: Tensor,
        places: Tensor | None,
        weights: Tensor | None = None,
        *,
        ends: Tensor | None = None,
        form: Format | None = None,
        wide: bool = True,
        tokens: bool = True,
    ) -> Sent:
        """Return the rows ``x``, rounded where a format is given."""
        del places, tokens
        low = None if form is None else quantize(x, form, end=ends, kernels=self.kernels)
        return Sent(x.contiguous() if form is None or wide else None, low, weights)

    def outgoing(self) -> None:
        """Return None: outputs may be anywhere."""

    def fetch(
        self,
        rows: Tensor | None,
        places: Tensor | None,
        *,
        base: Tensor | None = None,
        each: Tensor | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Return both as they are."""
        del places, base
        return rows, each
