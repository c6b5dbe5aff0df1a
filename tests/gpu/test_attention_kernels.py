"""Attention's kernels on a CUDA device, in bfloat16: libraries' for whole rows, Triton's inside documents."""

import functools

import pytest
import torch
import torch.nn.functional as F
from waits import no_sync

from moekit import model
from moekit.kernels import attention
from moekit.kernels._backend import finds, is_hopper
from moekit.kernels.attention import attention_of_qkv, causal_attention, find_documents
from moekit.kernels.qk_norm_rope import qk_norm_rope

TOLERANCE = 1e-2  # relative, of whole tensors: what bfloat16 leaves


def random_documents(b, s, mean):
    return (torch.rand(b, s, device="cuda") < 1 / mean).long().cumsum(1)


def padded(b, s):
    return torch.where(torch.arange(s, device="cuda") < s - s // 4, random_documents(b, s, 60), -1)


CASES = {  # b, s, n, m, h and documents
    "whole rows, grouped": lambda: (2, 1024, 8, 2, 128, None),
    "whole rows, odd": lambda: (2, 777, 4, 4, 64, None),
    "whole rows, wide and odd": lambda: (1, 643, 6, 3, 128, None),
    "one position": lambda: (3, 1, 4, 2, 64, None),
    "short documents": lambda: (2, 1000, 8, 2, 128, random_documents(2, 1000, 30)),
    "long documents": lambda: (2, 1024, 4, 1, 64, random_documents(2, 1024, 400)),
    "one document": lambda: (1, 513, 4, 2, 32, torch.zeros(1, 513, dtype=torch.long, device="cuda")),
    "padding": lambda: (2, 640, 4, 4, 16, padded(2, 640)),
    "no rows": lambda: (0, 64, 4, 4, 64, None),
}
EACH_CASE = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


def make(b, s, n, m, h):
    """Return the projection's output, gains, tables, and the gradient of attention's output."""
    torch.manual_seed(0)
    qkv = torch.randn(b, s, (n + 2 * m) * h, device="cuda", dtype=torch.bfloat16)
    gains = [torch.rand(h, device="cuda").add(0.5).bfloat16() for _ in range(2)]
    angles = torch.rand(s, h // 2, device="cuda") * 6
    grad = torch.randn(b, s, n, h, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    return qkv, gains, (angles.cos(), angles.sin()), grad


def dense(q, k, v, documents):
    mask = None if documents is None else model.document_mask(documents, dtype=q.dtype)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True)


def run(case, dtype, *, fused, data=None):
    """Return attention's output and the gradients of qkv and of both gains."""
    b, s, n, m, h, documents = case
    qkv, gains, rope, grad = data or make(b, s, n, m, h)
    leaves = [x.detach().to(dtype).requires_grad_() for x in (qkv, *gains)]
    heads = dict(n_heads=n, n_kv_heads=m)
    if fused:
        out = attention_of_qkv(
            *leaves, rope, None if documents is None else find_documents(documents), **heads
        )
    else:
        rope = tuple(x.to(torch.promote_types(dtype, torch.float32)) for x in rope)
        out = dense(*qk_norm_rope(*leaves, rope, kernels="torch", **heads), documents)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.to(dtype))]


def assert_near(got, want):
    for x, y in zip(got, want, strict=True):
        assert x.isfinite().all()
        # one position attends to itself whatever its query and key are: their gradients are zero
        assert (x.double() - y).norm() <= max(TOLERANCE * y.norm(), 1e-4)


@EACH_CASE
def test_the_output_and_every_gradient_are_those_of_float64(case):
    case = case()
    assert_near(run(case, torch.bfloat16, fused=True), run(case, torch.float64, fused=False))


@pytest.mark.parametrize("name", ["flash-attn-4", "cudnn", "flash"])
def test_whole_rows_are_attended_to_by_each_kernel_that_may_be_chosen(name, monkeypatch):
    if name == "flash-attn-4" and not finds("flash_attn.cute"):
        pytest.skip("flash-attn-4 is not installed: no package named flash_attn.cute")
    monkeypatch.setattr(attention, "_fastest", lambda *_: name)
    for case in ("whole rows, grouped", "whole rows, wide and odd"):
        case = CASES[case]()
        assert_near(run(case, torch.bfloat16, fused=True), run(case, torch.float64, fused=False))


def test_documents_and_the_norm_give_the_same_bits_every_time():
    case = CASES["short documents"]()
    once, again = (run(case, torch.bfloat16, fused=True) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(once, again, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("documents", [False, True])
def test_heads_of_any_strides_are_taken(documents, dtype):
    torch.manual_seed(0)
    of = random_documents(2, 320, 50) if documents else None
    layouts = (lambda x: x, lambda x: x.transpose(1, 2).contiguous().transpose(1, 2), lambda x: x[:, :, ::1])
    leaves = [
        f(torch.randn(2, n, 320, 64, device="cuda", dtype=dtype)).requires_grad_()
        for f, n in zip(layouts, (4, 2, 2), strict=True)
    ]
    out = causal_attention(*leaves, None if of is None else find_documents(of))
    got = [out.detach(), *torch.autograd.grad(out, leaves, out.detach())]
    wide = [x.detach().double().requires_grad_() for x in leaves]
    want = dense(*wide, of)
    assert_near(got, [want.detach(), *torch.autograd.grad(want, wide, got[0].double())])


def kernels_of(fn):
    fn()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        fn()
        torch.cuda.synchronize()
    return [event.key for event in profile.key_averages()]


def test_whole_rows_go_to_flash_attn_4_or_cudnn_and_documents_to_triton():
    whole, packed = CASES["whole rows, grouped"](), CASES["short documents"]()
    names = kernels_of(functools.partial(run, whole, torch.bfloat16, fused=True, data=make(*whole[:5])))
    on_hopper = is_hopper(torch.empty(0, device="cuda"))
    library = "flash_attn" if on_hopper and finds("flash_attn.cute") else "cudnn"
    assert any(library in name for name in names), names
    names = kernels_of(functools.partial(run, packed, torch.bfloat16, fused=True, data=make(*packed[:5])))
    assert {"_forward", "_backward_q", "_backward_kv"} <= set(names), names


def test_the_output_joins_its_heads_without_a_copy():
    b, s, n, m, h, _ = CASES["whole rows, grouped"]()
    qkv, gains, rope, _ = make(b, s, n, m, h)
    for of in (None, find_documents(random_documents(b, s, 30))):
        out = attention_of_qkv(qkv, *gains, rope, of, n_heads=n, n_kv_heads=m)
        out.transpose(1, 2).view(b, s, n * h)  # raises where it would have to copy


@pytest.mark.parametrize("name", ["whole rows, grouped", "short documents"])
def test_nothing_waits_for_the_device_and_a_graph_replays_it(name):
    case = CASES[name]()
    data = make(*case[:5])
    want = run(case, torch.bfloat16, fused=True, data=data)
    with no_sync():
        run(case, torch.bfloat16, fused=True, data=data)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        run(case, torch.bfloat16, fused=True, data=data)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run(case, torch.bfloat16, fused=True, data=data)
    graph.replay()
    assert_near(got, [x.double() for x in want])
    if case[5] is not None:  # other documents, in the same graph
        case[5].copy_(random_documents(*case[5].shape, 100))
        want = run(case, torch.bfloat16, fused=True, data=data)
        graph.replay()
        assert all(torch.equal(x, y) for x, y in zip(got, want, strict=True))
