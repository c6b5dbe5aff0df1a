"""Uneven routing on purpose: shares of experts, and ids that follow them.

Axes: E experts, k choices.
"""

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from moekit.random import fold_in, uniform

_PARTS = 2**24  # as many numbers as moekit.random.uniform draws


def dirichlet_shares(concentration: float, n_experts: int, *, seed: int = 0) -> Float[Tensor, " E"]:
    """Draw the shares of experts in the load, float64, from a symmetric Dirichlet distribution.

    The smaller the concentration, the more uneven: the standard deviation of a share, by its mean, is
    ``sqrt((E - 1) / (1 + E * concentration))``.

    Raises
    ------
    ValueError
        Unless the concentration is positive and there is an expert.
    """
    if not 0 < concentration < float("inf") or n_experts < 1:
        raise ValueError(
            "dirichlet_shares needs a positive, finite concentration and n_experts >= 1, got "
            f"{concentration} and {n_experts}"
        )
    return torch.from_numpy(np.random.default_rng(seed).dirichlet(n_experts * [concentration]))


def draw_experts(
    shares: Float[Tensor, " E"], token_ids: Int[Tensor, "*n"], *, top_k: int, key: Int[Tensor, ""]
) -> Int[Tensor, "*n k"]:
    """Draw k different experts for each token, so that each expert's part of all routes is its share.

    Pure, a function of the key and the token's id: the same on every layout. Reads the shares on the host,
    which waits for a device that has them. A token takes an expert with the
    chance ``k * share``, in parts of 2**24. As it takes none twice, no part of the routes exceeds 1 / k: what
    a share has above that goes to the other experts, as their shares are. The k are drawn together, by
    systematic sampling: the chances, which sum to k, are laid one after the other, in an order drawn for each
    token, and those are taken in which u, u + 1, ..., u + k - 1 fall, u uniform in [0, 1).

    Parameters
    ----------
    shares : Float[Tensor, " E"]
        Not negative, k of them above 0; their sum, if finite, does not matter. E.g. :func:`dirichlet_shares`.
    token_ids : Int[Tensor, "*n"]
        Index of each token in the global batch, on the device of the key.
    top_k : int
        Experts per token.
    key : Int[Tensor, ""]
        See :func:`moekit.random.make_key`.

    Returns
    -------
    Int[Tensor, "*n k"]
        int64, in random order.

    Raises
    ------
    ValueError
        When the shares are not as above.

    References
    ----------
    Madow, On the Theory of Systematic Sampling II, 1949. https://doi.org/10.1214/aoms/1177729988
    """
    n_experts, shares = shares.shape[-1], shares.double().cpu()
    well = (shares >= 0).all() and (shares > 0).sum() >= top_k and shares.sum().isfinite()
    if shares.ndim != 1 or not 1 <= top_k <= n_experts or not well:
        raise ValueError(
            f"draw_experts needs shares (E,) of a finite sum, of which none is below 0 and {top_k=} are "
            f"above, got {shares}"
        )
    parts = _parts(shares, top_k).to(key.device)
    experts = torch.arange(n_experts, device=key.device)
    order = uniform(key, token_ids[..., None] * n_experts + experts).argsort(dim=-1, stable=True)
    ends = parts[order].cumsum(-1)
    first = (uniform(fold_in(key, 0), token_ids) * _PARTS).long()
    at = first[..., None] + _PARTS * experts[:top_k]
    return order.gather(-1, torch.searchsorted(ends, at, right=True))


def _parts(shares: Tensor, top_k: int) -> Tensor:
    """Return the chances of a token to take each expert, in whole parts that sum to top_k times 2**24."""
    chances = shares * (top_k / shares.sum())
    for _ in range(top_k):  # each time one more is full, or all is well
        full = chances >= 1
        rest = chances.masked_fill(full, 0)
        if rest.any():
            chances = (rest / rest.sum() * (top_k - full.sum())).masked_fill(full, 1)
    parts = (chances * _PARTS).floor()
    left = top_k * _PARTS - int(parts.sum())
    parts[(chances * _PARTS - parts).topk(left).indices] += 1
    return parts.long()
