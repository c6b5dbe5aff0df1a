"""Random numbers that are a function of a key and an index: the same on every rank and layout.

A key is an int64 device tensor; there is no generator and no hidden state, so recomputation draws the same
numbers.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def _mix(x: Tensor) -> Tensor:
    """Scramble int64 values: the finaliser of SplitMix64 (Steele et al. 2014), its shifts made logical."""
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * -0x40A7B892E31B1A47
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * -0x6B2FB644ECCEEE15
    return x ^ ((x >> 31) & 0x1FFFFFFFF)


def make_key(seed: int, device: str | torch.device | None = None) -> Int[Tensor, ""]:
    """Return a key, a 0-d int64 tensor, for ``seed``, any integer."""
    seed = (seed + 2**63) % 2**64 - 2**63
    return _mix(torch.tensor(seed, dtype=torch.int64, device=device))


def fold_in(key: Int[Tensor, ""], data: int | Int[Tensor, ""]) -> Int[Tensor, ""]:
    """Return a new key made of ``key`` and an integer such as the step or the layer; no host sync."""
    data = data if isinstance(data, Tensor) else torch.full_like(key, data)  # tensors wrap, ints overflow
    return _mix(key + (data + 1) * -0x61C8864680B583EB)


def uniform(key: Int[Tensor, ""], index: Int[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return float32 in [0, 1), 24 random bits each, a function of (key, index)."""
    return ((_mix(_mix(index) + key) >> 40) & 0xFFFFFF) * 2.0**-24
