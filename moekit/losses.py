"""Cross-entropy over a large vocabulary, a chunk of tokens at a time."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit.kernels import use_triton
from moekit.kernels.add import add_product_
from moekit.kernels.cross_entropy import cross_entropy_
from moekit.kernels.scale import scaled
from moekit.profiling import ranged
from moekit.tree import check_values


@ranged("loss")
def cross_entropy(
    hidden: Float[Tensor, "t d"],
    head: Float[Tensor, "d v"],
    targets: Int[Tensor, " t"],
    weights: Float[Tensor, " t"],
    *,
    z_weight: float = 0.0,
    chunk_elements: int | None = None,
    kernels: str = "auto",
) -> tuple[Float[Tensor, ""], Float[Tensor, ""], Float[Tensor, ""]]:
    """Return the weighted sums of cross-entropy plus z-loss, and of each alone, never holding all logits.

    Pure, differentiable in ``hidden`` and ``head`` through the first result. The gradient of each chunk is
    taken while its logits exist, so the backward recomputes nothing.

    Parameters
    ----------
    hidden : Float[Tensor, "t d"]
        What the head reads: bfloat16, float32 or float64. float16 has no room for gradients of this size.
    head : Float[Tensor, "d v"]
        A plain tensor of the dtype of ``hidden``.
    targets : Int[Tensor, " t"]
        Token ids in [0, v).
    weights : Float[Tensor, " t"]
        Of each token in the sum: 1 / n_targets of the global batch where it counts, else 0. float32 at least.
    z_weight : float
        Of the squared log-sum-exp of the logits.
    chunk_elements : int, optional
        Logits held at once, those of one token at least. By default 2**29 where a Triton kernel overwrites
        them, which is 1 GiB in bfloat16, and 2**27 with torch, which holds them in float32 beside that.
    kernels : {"auto", "torch", "triton"}
        As for :mod:`moekit.kernels`.

    Returns
    -------
    loss : Float[Tensor, ""]
        The sum of weight * (cross-entropy + z_weight * z).
    cross_entropy, z : Float[Tensor, ""]
        The weighted sums of each alone, not differentiable.

    Raises
    ------
    ValueError
        When shapes or dtypes do not fit, or a target on the CPU is not in [0, v).
    RuntimeError
        Later, from CUDA, for a target on the device that is not in [0, v): nothing waits for it.

    References
    ----------
    Chowdhery et al., PaLM, 2022 (z-loss). https://arxiv.org/abs/2204.02311
    """
    if hidden.shape != (len(hidden), len(head)) or not hidden.shape[:1] == targets.shape == weights.shape:
        raise ValueError(
            "cross_entropy needs hidden (t, d), head (d, v), targets (t,) and weights (t,), got "
            f"{tuple(hidden.shape)}, {tuple(head.shape)}, {tuple(targets.shape)}, {tuple(weights.shape)}"
        )
    if hidden.dtype != head.dtype or hidden.dtype not in (torch.bfloat16, torch.float32, torch.float64):
        raise ValueError(
            "cross_entropy needs hidden and head of one dtype, bfloat16, float32 or float64, got "
            f"{hidden.dtype} and {head.dtype}"
        )
    check_values(
        ((targets >= 0) & (targets < head.shape[1])).all(),
        "cross_entropy",
        f"targets in [0, {head.shape[1]})",
        lambda: f"{targets.min()} to {targets.max()}; give tokens that do not count any id and weight 0",
    )
    if chunk_elements is None:
        chunk_elements = 2**29 if use_triton("cross_entropy", kernels, hidden) else 2**27
    grad = torch.is_grad_enabled()
    return _CrossEntropy.apply(hidden, head, targets, weights, z_weight, chunk_elements, kernels, grad)


class _CrossEntropy(torch.autograd.Function):
    """Holds, beside hidden and head: the gradients of both and one chunk; then the gradients, scaled.

    With d = 4096, v = 100,352, 16,384 tokens in bfloat16 (GB): forward 1.64 (head's in float32) + 0.13 + 0.82
    (4 chunks of 4,096) = 2.6; backward 1.64 + 0.82 (in bfloat16) + 0.13 + 0.13 = 2.7.
    """

    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, hidden, head, targets, weights, z_weight, chunk_elements, kernels, grad):
        acc = torch.promote_types(hidden.dtype, torch.float32)
        ce, z = (torch.zeros((), dtype=acc, device=hidden.device) for _ in range(2))
        needs_hidden, needs_head = (grad and needs for needs in ctx.needs_input_grad[:2])
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        new_sum = torch.empty_like if len(hidden) else torch.zeros_like  # the first product is not added
        grad_head = new_sum(head, dtype=acc) if needs_head else None
        n = tokens_per_chunk(len(hidden), head.shape[1], chunk_elements)
        buffer = hidden.new_empty(n, head.shape[1])  # of all chunks
        for i in range(0, len(hidden), n):
            h, y, w = (x[i : i + n] for x in (hidden, targets, weights))
            logits = torch.mm(h, head, out=buffer[: len(h)])
            losses = cross_entropy_(
                *(logits, y, w), z_weight=z_weight, with_grad=needs_hidden or needs_head, kernels=kernels
            )
            ce += losses[0].sum()
            z += losses[1].sum()
            if grad_hidden is not None:
                torch.mm(logits, head.T, out=grad_hidden[i : i + n])
            if grad_head is not None:
                add_product_(grad_head, h.T, logits, first=i == 0, kernels=kernels)
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.dtype, ctx.kernels = head.dtype, kernels
        ctx.mark_non_differentiable(ce, z)
        return ce + z_weight * z, ce, z

    @staticmethod
    @once_differentiable  # the saved gradients are constants
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, grad_head = (
            x if x is None else scaled(x, grads[0], ctx.dtype, kernels=ctx.kernels) for x in ctx.saved_tensors
        )
        return grad_hidden, grad_head, *[None] * 6


def tokens_per_chunk(t: int, v: int, elements: int) -> int:
    """Return the tokens of a chunk of at most so many logits: all are alike, as a short one is slow."""
    n_chunks = max(-(-t // max(elements // v, 1)), 1)
    return max(-(-t // n_chunks), 1)
