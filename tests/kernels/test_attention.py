"""Attention's kernels, in Triton's interpreter where there is no GPU: dense attention in float64."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, strategies as st
from reference import draw, named_grads, packed_batch, refuses, small_config

pytest.importorskip("triton")

import moekit as mk
from moekit import model
from moekit._split_backward import backward_of_input
from moekit.context import attend
from moekit.kernels.attention import (
    attention_of_qkv,
    causal_attention,
    choose_attention_kernel,
    find_documents,
    has_kernel,
)
from moekit.kernels.qk_norm_rope import qk_norm_rope


def random_documents(b, s, mean, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(b, s, generator=generator) < 1 / mean).long().cumsum(1)


def padded(b, s):
    return torch.where(torch.arange(s) < s - s // 4, random_documents(b, s, 20), -1)


CASES = {  # b, s, n, m, h and documents
    "whole rows, odd": (2, 5, 3, 1, 16, None),
    "whole rows, several blocks": (1, 137, 4, 2, 16, None),
    "short documents": (2, 140, 2, 2, 16, random_documents(2, 140, 30)),
    "one document": (1, 193, 2, 1, 32, torch.zeros(1, 193, dtype=torch.long)),
    "a document over two blocks": (1, 300, 2, 1, 16, (torch.arange(300) >= 150).long()[None]),
    "every position by itself": (1, 130, 1, 1, 16, torch.arange(130)[None]),
    "one position": (1, 1, 1, 1, 16, torch.zeros(1, 1, dtype=torch.long)),
    "padding": (1, 200, 2, 1, 16, padded(1, 200)),
    "no rows": (0, 5, 1, 1, 16, torch.zeros(0, 5, dtype=torch.long)),
}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def dense(q, k, v, documents):
    mask = None if documents is None else model.document_mask(documents, dtype=q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def ours(q, k, v, documents):
    return causal_attention(q, k, v, None if documents is None else find_documents(documents))


def run(fn, case, dtype):
    """Return attention's output and the gradients of q, k and v."""
    b, s, n, m, h, documents = case
    leaves = [draw(b, x, s, h, seed=i, dtype=dtype).requires_grad_() for i, x in enumerate((n, m, m))]
    out = fn(*leaves, documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, draw(*out.shape, seed=9, dtype=dtype))]


@EACH_CASE
def test_the_output_and_every_gradient_are_those_of_a_dense_mask_and_the_same_bits_each_time(case):
    got, again = (run(ours, case, torch.float32) for _ in range(2))
    torch.testing.assert_close(got, run(dense, case, torch.float64), rtol=1e-5, atol=1e-5, check_dtype=False)
    assert all(torch.equal(x, y) for x, y in zip(got, again, strict=True))


@EACH_CASE
def test_attention_of_a_projection_is_that_of_its_heads(case):
    b, s, n, m, h, documents = case
    angles = draw(s, h // 2, seed=7)

    def run(dtype, fused):
        gains = (1 + 0.3 * draw(2, h, seed=5)).to(dtype).unbind()
        leaves = [x.requires_grad_() for x in (draw(b, s, (n + 2 * m) * h, dtype=dtype), *gains)]
        rope = angles.cos().to(dtype), angles.sin().to(dtype)
        heads = dict(n_heads=n, n_kv_heads=m)
        if fused:
            of = None if documents is None else find_documents(documents)
            out = attention_of_qkv(*leaves, rope, of, **heads)
        else:
            out = dense(*qk_norm_rope(*leaves, rope, kernels="torch", **heads), documents)
        return [out.detach(), *torch.autograd.grad(out, leaves, draw(*out.shape, seed=9, dtype=dtype))]

    got, want = run(torch.float32, True), run(torch.float64, False)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)


@given(st.lists(st.integers(1, 5), min_size=1, max_size=6))
def test_documents_begin_and_end_where_the_number_changes(lengths):
    numbers = torch.cat([torch.full((n,), i % 3 - 1) for i, n in enumerate(lengths)])[None]
    got = find_documents(numbers)
    ends = torch.tensor(lengths).cumsum(0)
    want = torch.cat([torch.full((n,), int(end)) for n, end in zip(lengths, ends, strict=True)])[None]
    assert torch.equal(got.ends, want.int())
    assert torch.equal(
        got.starts, (want - torch.tensor(lengths).repeat_interleave(torch.tensor(lengths))).int()
    )


def test_what_is_kept_is_the_projections_output_attentions_and_a_number_a_head():
    b, s, n, m, h = 1, 20, 4, 2, 16
    qkv = draw(b, s, (n + 2 * m) * h, dtype=torch.float32).requires_grad_()
    gains = [x.requires_grad_() for x in draw(2, h, dtype=torch.float32)]
    rope = draw(2, s, h // 2, dtype=torch.float32).unbind()
    documents, kept = find_documents(random_documents(b, s, 5)), {}
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.setdefault(x.data_ptr(), x), lambda x: x):
        attention_of_qkv(qkv, *gains, rope, documents, n_heads=n, n_kv_heads=m)
    small = (*gains, *rope, documents.starts, documents.ends)
    large = {
        pointer: x.numel() for pointer, x in kept.items() if pointer not in {y.data_ptr() for y in small}
    }
    assert sorted(large.values()) == sorted([qkv.numel(), b * s * n * h, b * s * n])


@pytest.mark.parametrize("documents", [None, packed_batch(2, 6).documents], ids=["whole rows", "packed"])
@pytest.mark.parametrize("qk_norm", ["none", "head", "full"])
def test_a_models_attention_is_the_same_with_kernels(documents, qk_norm):
    config = small_config(qk_norm=qk_norm, d_head=16)
    params = mk.init_params(config, dtype=torch.float32)["layers"]["0"]["attention"]
    x, heads = draw(2, 6, 8, dtype=torch.float32), dict(n_heads=4, n_kv_heads=2)
    rope = model.rope_table(6, config=config, like=x)

    def run(mask, kernels):
        def loss(p):
            out = model.attention(p, x, rope=rope, mask=mask, kernels=kernels, **heads)
            return (out * draw(2, 6, 8, dtype=torch.float32)).sum()

        return named_grads(loss, params)

    mask = None if documents is None else model.document_mask(documents, dtype=x.dtype)
    got = run(None if documents is None else find_documents(documents), "triton")
    torch.testing.assert_close(got, run(mask, "torch"), rtol=1e-4, atol=1e-5)


def test_attend_takes_documents_and_means_the_rows_of_the_dense_mask():
    case = CASES["padding"]

    def by_kernel(q, k, v, documents):
        return attend(q, k, v, find_documents(documents), kernels="triton")

    got = run(by_kernel, case, torch.float32)
    want = run(dense, case, torch.float64)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)
    with refuses("attend needs kernels for Documents, and there are none for torch.float32, d_head=16"):
        run(lambda q, k, v, documents: attend(q, k, v, find_documents(documents)), case, torch.float32)


def test_heads_that_do_not_fit_are_refused():
    q, k = draw(1, 3, 4, 16, dtype=torch.float32), draw(1, 2, 4, 16, dtype=torch.float32)
    with refuses("causal_attention needs q (b, n, s, h), k and v (b, m, s, h) and m that divides n"):
        causal_attention(q, k, k)


def test_a_backward_can_be_split_into_that_of_the_input_and_those_of_the_weights():
    config = small_config(d_head=16)
    params = mk.init_params(config, dtype=torch.float32)["layers"]["0"]["attention"]
    rope = model.rope_table(6, config=config, like=draw(1, dtype=torch.float32))

    def run(split):
        x = draw(2, 6, 8, dtype=torch.float32).requires_grad_()
        leaves = {name: p.detach().clone().requires_grad_() for name, p in params.items()}
        y = model.attention(leaves, x, n_heads=4, n_kv_heads=2, rope=rope, kernels="triton")
        roots, weights = [(y, y.detach().cos())], list(leaves.values())
        if split:
            rest = backward_of_input("test", roots, x, weights)
            assert leaves["qkv"].grad is None and leaves["out"].grad is None
            rest()
        else:
            torch.autograd.backward([y], [y.detach().cos()])
        return [x.grad, *(w.grad for w in weights)]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


def test_the_operators_have_fakes_of_their_shapes():
    of = find_documents(random_documents(1, 20, 5))
    q, k, v = (draw(1, 20, n, 16, dtype=torch.float32).transpose(1, 2) for n in (4, 2, 2))
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.moekit.causal_attention.default, (q, k, v, of.starts), test_utils=checks)
    out, lse = torch.ops.moekit.causal_attention(q, k, v, of.starts)
    args = (out.cos(), q, k, v, out, lse, of.starts, of.ends)
    torch.library.opcheck(torch.ops.moekit.causal_attention_backward.default, args, test_utils=checks)


def test_a_d_head_that_the_kernels_lack_is_left_to_torch_or_refused():
    x = draw(1, dtype=torch.float16)
    assert not has_kernel("test", "auto", x, 128)  # on a CPU
    assert has_kernel("test", "triton", x, 128)
    with refuses("test needs d_head in (16, 32, 64, 128) and half precision for kernels='triton', got 4"):
        has_kernel("test", "triton", x, 4)


def test_what_attends_on_a_cpu_is_torch_unless_the_interpreter_is_asked_for():
    q = draw(1, 2, 5, 16, dtype=torch.float32)
    for kernels, name in (("auto", "torch"), ("torch", "torch"), ("triton", "triton")):
        assert choose_attention_kernel(q, q, q, kernels=kernels) == name


def test_the_interpreter_refuses_bfloat16_which_it_cannot_multiply():
    with refuses("test needs compiled kernels for kernels='triton' and bfloat16, of which Triton's"):
        has_kernel("test", "triton", draw(1, dtype=torch.bfloat16), 128)


def test_features_that_are_no_neighbours_change_nothing():
    leaves = [draw(1, 2, 16, 20, seed=i, dtype=torch.float32).mT.requires_grad_() for i in range(3)]
    assert all(x.stride(-1) != 1 for x in leaves)
    got, want = (attend(*leaves, kernels=kernels) for kernels in ("triton", "torch"))
    grads = (torch.autograd.grad(y.square().sum(), leaves) for y in (got, want))
    for a, b in zip((got, *next(grads)), (want, *next(grads)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
