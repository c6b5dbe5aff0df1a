"""Which implementation each of an expert layer's operations uses."""

from typing import NamedTuple

import torch
from torch import Tensor

from moekit.kernels._backend import check_kernels, finds, is_hopper, use_triton


class Products(NamedTuple):
    """Where each operation of the experts runs; :func:`choose_products` makes one."""

    forward: str  # both grouped GEMMs: "torch", "triton", "quack" or "loop"
    input_grad: str
    weight_grad: str
    elementwise: str  # permutation, SwiGLU, combine, norms: "torch" or "triton"

    def __str__(self) -> str:
        return ", ".join(f"{name.replace('_', ' ')} {value}" for name, value in self._asdict().items())


def choose_products(who: str, kernels: str, n_rows: int, gate_up: Tensor) -> Products:
    """Return which implementation an expert layer's operations use, given gate_up (e, d, 2h).

    ``n_rows`` is how many rows this rank may expect, tokens times top_k, not how many it has room for.
    ``"torch"`` is ``torch.nn.functional.grouped_mm`` and plain torch around it; ``"triton"`` this package's
    kernels throughout; ``"quack"`` the GEMMs of quack-kernels, for bfloat16 on Hopper and later, and Triton
    around them; ``"loop"`` the loop over experts that defines the result. ``"auto"`` is ``"torch"`` on CPUs
    (``"loop"`` for float64), and on CUDA what was fastest when measured (docs/LOG.md): Triton, but where
    groups have fewer than 6,144 rows on average and quack is installed, its weights' gradients.

    Raises
    ------
    ValueError
        For an unknown name, and where what was asked for cannot run.
    """
    check_kernels(who, kernels)
    dtype = gate_up.dtype
    d, h, size = gate_up.shape[1], gate_up.shape[2] // 2, gate_up.element_size()
    if kernels == "auto":
        if dtype == torch.float64:
            kernels = "loop"
        elif not use_triton(who, "auto", gate_up, multiplies=True):
            kernels = "torch"
    if kernels == "loop":
        return Products("loop", "loop", "loop", "torch")
    if dtype == torch.float64:
        raise ValueError(f"{who} needs kernels='loop' for float64, got {kernels=}")
    if d * size % 16 or h * size % 16:
        raise ValueError(
            f"{who} needs d and h to be multiples of {16 // size} in {dtype} (16 bytes), "
            f"got {d=}, {h=}; choose such sizes or pass kernels='loop'"
        )
    if kernels == "torch":
        return Products("torch", "torch", "torch", "torch")
    if kernels == "triton":
        use_triton(who, kernels, gate_up, multiplies=True)  # or an error
        return Products("triton", "triton", "triton", "triton")
    if kernels == "auto" and dtype != torch.bfloat16:
        return Products("torch", "torch", "torch", "triton")
    has_quack = finds("quack")
    if kernels == "quack":
        if not (has_quack and dtype == torch.bfloat16 and use_triton(who, "auto", gate_up)):
            got = f"{dtype} on {gate_up.device}"
            if not has_quack:
                got = "no package quack; pip install 'moekit[quack]'"
            raise ValueError(f"{who} needs quack-kernels, CUDA and bfloat16 for kernels='quack', got {got}")
        return Products("quack", "quack", "quack", "triton")
    # Where groups are short, writing gradients of weights takes long; quack hides it behind products.
    short = n_rows < 6144 * len(gate_up)
    weight_grad = "quack" if has_quack and is_hopper(gate_up) and short else "triton"
    return Products("triton", "triton", weight_grad, "triton")
