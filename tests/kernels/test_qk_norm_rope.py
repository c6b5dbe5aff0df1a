"""Norm and RoPE in one kernel, in Triton's interpreter where there is no GPU: the reference in float64."""

import pytest
import torch
from reference import draw

pytest.importorskip("triton")

from moekit.kernels.qk_norm_rope import qk_norm_rope

SIZES = [  # b, s, n, m, h
    (2, 5, 3, 1, 8),
    (1, 37, 4, 2, 16),
    (2, 9, 9, 3, 12),
    (0, 4, 2, 1, 8),
]


def tables(s, h, dtype=torch.float32):
    angles = draw(s, h // 2, seed=7)
    return angles.cos().to(dtype), angles.sin().to(dtype)


def run(sizes, norm, dtype, kernels, device="cpu"):
    """Return q, k and v, and the gradients of qkv and of the gains, of a fixed projection of all three."""
    b, s, n, m, h = sizes
    shapes = {"head": [(h,), (h,)], "full": [(n * h,), (m * h,)], "none": []}[norm]
    gains = [1 + 0.3 * draw(*shape, seed=i + 1) for i, shape in enumerate(shapes)]
    leaves = [x.to(device, dtype).requires_grad_() for x in (draw(b, s, (n + 2 * m) * h), *gains)]
    rope = tuple(x.to(device) for x in tables(s, h, torch.promote_types(dtype, torch.float32)))
    q_gain, k_gain = leaves[1:] or (None, None)
    out = qk_norm_rope(leaves[0], q_gain, k_gain, rope, n_heads=n, n_kv_heads=m, kernels=kernels)
    weights = [draw(*x.shape, seed=i + 4).to(device, dtype) for i, x in enumerate(out)]
    total = sum((x * w).sum() for x, w in zip(out, weights, strict=True))
    return [*(x.detach() for x in out), *torch.autograd.grad(total, leaves)]


@pytest.mark.parametrize("norm", ["head", "none", "full"])
@pytest.mark.parametrize("sizes", SIZES)
def test_heads_and_every_gradient_are_those_of_the_reference(sizes, norm):
    got, want = run(sizes, norm, torch.float32, "triton"), run(sizes, norm, torch.float64, "torch")
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)


@pytest.mark.parametrize("sizes", SIZES)
def test_every_run_gives_the_same_bits(sizes):
    once, again = (run(sizes, "head", torch.float32, "triton") for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


def test_heads_of_a_position_lie_beside_each_other_and_values_stay_where_they_are():
    qkv = draw(2, 5, 8 * 16, dtype=torch.float32)
    gains = draw(2, 16, dtype=torch.float32)
    q, k, v = qk_norm_rope(qkv, *gains, tables(5, 16), n_heads=4, n_kv_heads=2, kernels="triton")
    assert all(x.stride()[1] == 16 and x.stride()[3] == 1 for x in (q, k, v))
    assert v.untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()


def test_nothing_but_the_arguments_is_kept():
    qkv = draw(2, 5, 8 * 16, dtype=torch.float32).requires_grad_()
    gains = [x.requires_grad_() for x in draw(2, 16, dtype=torch.float32)]
    rope, kept = tables(5, 16), []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x) or x, lambda x: x):
        qk_norm_rope(qkv, *gains, rope, n_heads=4, n_kv_heads=2, kernels="triton")
    pointers = {x.data_ptr() for x in (qkv, *gains, *rope)}
    assert {x.data_ptr() for x in kept} <= pointers


def test_the_operators_have_fakes_of_their_shapes():
    qkv, gains, rope = (
        draw(2, 5, 8 * 16, dtype=torch.float32),
        draw(2, 16, dtype=torch.float32),
        tables(5, 16),
    )
    checks = ("test_schema", "test_faketensor")
    args = (qkv, *gains, *rope, 4, 2, 1e-5)
    torch.library.opcheck(torch.ops.moekit.qk_norm_rope.default, args, test_utils=checks)
    grads = [draw(2, n, 5, 16, dtype=torch.float32) for n in (4, 2, 2)]
    args = (*grads, qkv, *gains, *rope, 1e-5)
    torch.library.opcheck(torch.ops.moekit.qk_norm_rope_backward.default, args, test_utils=checks)
