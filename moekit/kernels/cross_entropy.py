"""Cross-entropy and its gradient, which takes the place of the logits.

The Triton kernel gives each row to one program. The first pass over it finds the log-sum-exp, each lane with
a running maximum of its own; the second, backwards over what was read last and may still be in the L2 cache,
writes the gradient. So 6 bytes a logit move in bfloat16, 4 of them from and to memory where the cache holds
the rows in flight; each loss of a row is written apart, and summed in order.

Axes: n rows, v vocabulary.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from moekit.kernels._backend import check_shapes, jit, next_power_of_2, operator, tl, use_triton

Losses = tuple[Float[Tensor, " n"], Float[Tensor, " n"]]


def cross_entropy_(
    logits: Float[Tensor, "n v"],
    targets: Int[Tensor, " n"],
    weights: Float[Tensor, " n"],
    *,
    z_weight: float,
    with_grad: bool,
    kernels: str = "auto",
) -> Losses:
    """Return each row's weighted cross-entropy and squared log-sum-exp (z-loss); not differentiable itself.

    In float32 at least, also inside. Consumes the logits, which must be contiguous: with ``with_grad`` it
    leaves their gradient from the sum over rows of cross-entropy plus ``z_weight`` times z-loss in them.
    """
    check_shapes("cross_entropy_", targets=(targets, logits.shape[:1]), weights=(weights, logits.shape[:1]))
    if use_triton("cross_entropy_", kernels, logits):
        return torch.ops.moekit.cross_entropy_(logits, targets, weights, z_weight, with_grad)
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    w, y = weights.to(wide.dtype), targets[:, None]
    at_target, most = wide.gather(1, y)[:, 0], wide.amax(-1)
    total = wide.sub_(most[:, None]).exp_().sum(-1)  # in place: in this dtype they exist once
    lse = most + total.log()
    if with_grad:
        wide *= (w * (1 + 2 * z_weight * lse) / total)[:, None]
        wide.scatter_add_(1, y, -w[:, None])
        logits.copy_(wide)  # nothing where they are one
    return w * (lse - at_target), w * lse.square()


@operator("moekit::cross_entropy_", mutates_args=("logits",))
def _cross_entropy_op(
    logits: Tensor, targets: Tensor, weights: Tensor, z_weight: float, with_grad: bool
) -> tuple[Tensor, Tensor]:
    assert logits.is_contiguous()
    ce, z = _losses_like(logits, targets, weights, z_weight, with_grad)
    n, v = logits.shape
    if n:
        each = 16 // logits.element_size()  # one load of a thread
        lanes = min(next_power_of_2(-(-v // each)), 1024)
        _cross_entropy[(n,)](
            *(logits, targets.contiguous(), weights.float().contiguous(), ce, z, z_weight, v),
            WITH_GRAD=with_grad,
            LANES=lanes,
            EACH=each,
            num_warps=max(lanes // 64, 1),
        )
    return ce, z


@_cross_entropy_op.register_fake
def _losses_like(logits, targets, weights, z_weight, with_grad):
    ce, z = (logits.new_empty(len(logits), dtype=torch.float32) for _ in range(2))
    return ce, z


@jit
def _cross_entropy(
    logits, targets, weights, ce, z, z_weight, v: tl.constexpr, WITH_GRAD: tl.constexpr,
    LANES: tl.constexpr, EACH: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * v
    target, weight = tl.load(targets + row), tl.load(weights + row)
    at_target = tl.load(logits + target).to(tl.float32)
    lane = tl.arange(0, LANES)[:, None] * EACH + tl.arange(0, EACH)[None, :]
    most = tl.full((LANES,), -3e38, tl.float32)  # finite: a lane may see no logit
    total = tl.zeros((LANES,), tl.float32)
    for start in range(0, v, LANES * EACH):
        column = start + lane
        x = tl.load(logits + column, mask=column < v, other=-float("inf")).to(tl.float32)
        before = most
        most = tl.maximum(most, tl.max(x, 1))
        total = total * tl.exp(before - most) + tl.sum(tl.exp(x - most[:, None]), 1)
    top = tl.max(most, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(most - top), 0))
    tl.store(ce + row, weight * (lse - at_target))
    tl.store(z + row, weight * lse * lse)
    if WITH_GRAD:
        scale = weight * (1 + 2 * z_weight * lse)
        for start in range(0, v, LANES * EACH):
            column = (v - 1) // (LANES * EACH) * (LANES * EACH) - start + lane
            x = tl.load(logits + column, mask=column < v, other=-float("inf")).to(tl.float32)
            grad = scale * tl.exp(x - lse)
            grad = tl.where(column == target, grad - weight, grad)
            tl.store(logits + column, grad.to(logits.dtype.element_ty), mask=column < v)
