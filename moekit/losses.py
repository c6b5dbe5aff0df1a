"""Cross-entropy over a large vocabulary, a chunk of tokens at a time."""

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from moekit.tree import check_values


def cross_entropy(
    hidden: Float[Tensor, "t d"],
    head: Float[Tensor, "d v"],
    targets: Int[Tensor, " t"],
    weights: Float[Tensor, " t"],
    *,
    z_weight: float = 0.0,
    chunk_elements: int = 2**27,
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
    chunk_elements : int
        Logits held at once, those of one token at least; by default 512 MiB in float32.

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
    if hidden.shape[-1] != head.shape[0] or not len(hidden) == len(targets) == len(weights):
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
    return _CrossEntropy.apply(hidden, head, targets, weights, z_weight, chunk_elements)


class _CrossEntropy(torch.autograd.Function):
    gives_gradients_together = True  # for a backward that is split; see moekit/_split_backward.py

    @staticmethod
    def forward(ctx, hidden, head, targets, weights, z_weight, chunk_elements):
        acc = torch.promote_types(hidden.dtype, torch.float32)
        ce, z = (torch.zeros((), dtype=acc, device=hidden.device) for _ in range(2))
        needs_hidden, needs_head = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        grad_head = torch.zeros_like(head, dtype=acc) if needs_head else None
        n = max(chunk_elements // head.shape[1], 1)
        for i in range(0, len(hidden), n):
            h, y, w = hidden[i : i + n], targets[i : i + n, None], weights[i : i + n].to(acc)
            logits = (h @ head).to(acc)
            lse = logits.logsumexp(-1)
            ce += (w * (lse - logits.gather(1, y)[:, 0])).sum()
            z += (w * lse.square()).sum()
            if needs_hidden or needs_head:
                grad = logits.sub_(lse[:, None]).exp_()  # in place: the chunk exists once
                del logits
                grad *= (w * (1 + 2 * z_weight * lse))[:, None]
                grad.scatter_add_(1, y, -w[:, None])
                grad = grad.to(hidden.dtype)
                if grad_hidden is not None:
                    torch.matmul(grad, head.T, out=grad_hidden[i : i + n])
                if grad_head is not None:
                    grad_head += h.T @ grad
                del grad  # before the next chunk
            else:
                del logits
        ctx.save_for_backward(grad_hidden, grad_head)
        ctx.head_dtype = head.dtype
        ctx.mark_non_differentiable(ce, z)
        return ce + z_weight * z, ce, z

    @staticmethod
    @once_differentiable  # the saved gradients are constants
    def backward(ctx, *grads):  # pyright: ignore[reportIncompatibleMethodOverride]
        grad_hidden, grad_head = ctx.saved_tensors
        if grad_hidden is not None:
            grad_hidden = grad_hidden * grads[0].to(grad_hidden.dtype)
        if grad_head is not None:
            grad_head = (grad_head * grads[0]).to(ctx.head_dtype)
        return grad_hidden, grad_head, None, None, None, None
