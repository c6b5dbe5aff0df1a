import itertools

import pytest
import torch
from reference import draw, refuses

import moekit as mk
from moekit.kernels import _backend, choose_products
from moekit.kernels.attention import choose_attention_kernel
from moekit.kernels.router import choose, router_logits

SHAPES = [(0, 4, 2), (1, 1, 1), (33, 8, 2), (70, 48, 4), (5, 128, 8)]  # tokens, experts, choices


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(("t", "n_experts", "k"), SHAPES)
def test_one_pass_gives_what_the_reference_does(t, n_experts, k, biased, given):
    logits = draw(t, n_experts).float()
    for score, normalize in itertools.product(("softmax", "sigmoid"), ("none", "l1")):
        options = dict(top_k=k, score=score, normalize=normalize, scale=1.7)
        options["bias"] = draw(n_experts, seed=1).float() if biased else None
        options["expert_ids"] = draw(t, n_experts, seed=2).topk(k, -1).indices if given else None
        got, want = (with_gradients(logits, options, kernels) for kernels in ("triton", "torch"))
        assert torch.equal(got[1], want[1])
        for one, other in zip(got, want, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def with_gradients(logits, options, kernels):
    """Return scores, ids, weights, and gradients through weights alone and through both."""
    leaf = logits.clone().requires_grad_()
    scores, ids, weights = choose(leaf, **options, kernels=kernels)
    through_weights = (weights * draw(*weights.shape, seed=3)).sum()
    both = through_weights + (scores * draw(*scores.shape, seed=4)).sum()
    grads = [torch.autograd.grad(y, leaf, retain_graph=True)[0] for y in (through_weights, both)]
    return scores.detach(), ids, weights.detach(), *grads


def test_the_lower_of_two_equal_experts_is_chosen():
    for kernels in ("torch", "triton"):
        for n in (6, 96):
            options = dict(top_k=3, score="softmax", normalize="l1", scale=1.0, kernels=kernels)
            assert choose(torch.zeros(3, n), **options)[1].tolist() == [[0, 1, 2]] * 3
            two_best = torch.zeros(3, n).index_fill(1, torch.tensor([4, n - 1]), 1.0)
            assert choose(two_best, **options)[1].tolist() == [[4, n - 1, 0]] * 3


def test_experts_of_a_token_differ_and_exist_also_where_logits_are_no_numbers():
    logits = draw(4, 6).float()
    logits[1], logits[2, :5] = torch.nan, -torch.inf
    _, ids, _ = choose(logits, top_k=4, score="softmax", normalize="l1", scale=1.0, kernels="triton")
    assert (ids >= 0).all() and (ids < 6).all()
    assert len(set(ids[2].tolist())) == 4


@pytest.mark.parametrize("normalize", ["none", "l1"])
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
def test_an_expert_whose_score_is_no_number_is_chosen_first_and_seen(score, normalize):
    logits = torch.tensor([[1.0, torch.nan, 3.0, 2.0], [0.0, 4.0, 1.0, 2.0]])
    options = dict(top_k=2, score=score, normalize=normalize, scale=1.0)
    (_, ids, weights), (_, want_ids, want) = (
        choose(logits, **options, kernels=k) for k in ("triton", "torch")
    )
    assert torch.equal(ids, want_ids) and want[0].isnan().any()
    torch.testing.assert_close(weights, want, equal_nan=True)


def test_a_bias_of_float64_chooses_as_one_of_float32():
    bias = torch.tensor([0.0, 1e-9, 2e-9, 3e-9], dtype=torch.float64)
    options = dict(top_k=2, score="sigmoid", normalize="l1", scale=1.0, bias=bias)
    for kernels in ("torch", "triton"):
        assert choose(torch.zeros(1, 4), **options, kernels=kernels)[1].tolist() == [[0, 1]]


@pytest.mark.parametrize(("dtype", "tol"), [(torch.float32, 5e-6), (torch.bfloat16, 3e-3)])
def test_logits_of_bfloat16_tokens_are_those_of_float32_products(dtype, tol, monkeypatch):
    monkeypatch.setattr(_backend, "on_cuda", lambda x: True)  # the path of the tensor cores
    x, weights, grad = draw(64, 128).bfloat16(), draw(128, 8, seed=1).to(dtype), draw(64, 8, seed=2).float()
    leaves = [z.clone().requires_grad_() for z in (x, weights)]
    got = router_logits(*leaves)
    assert got.dtype == torch.float32
    wide = [z.double().requires_grad_() for z in (x, weights)]
    want = wide[0] @ wide[1]
    assert (got - want).norm() <= 2e-7 * want.norm()
    grads = torch.autograd.grad(got, leaves, grad)
    exact = torch.autograd.grad(want, wide, grad.double())
    assert (grads[0] - exact[0]).norm() <= 3e-3 * exact[0].norm()  # bfloat16 as the tokens
    assert (grads[1] - exact[1]).norm() <= tol * exact[1].norm()
    assert grads[1].dtype == dtype


def test_the_backend_is_asked_for_by_name():
    with pytest.raises(ValueError, match="needs kernels 'auto', 'torch' or 'triton', got 'cuda'"):
        _backend.use_triton("choose", "cuda", torch.zeros(1))
    with pytest.raises(ValueError, match="needs kernels='torch' for float64"):
        _backend.use_triton("choose", "triton", torch.zeros(1, dtype=torch.float64))


def test_a_cpu_is_told_of_the_interpreter(monkeypatch):
    monkeypatch.setattr(_backend, "INTERPRETED", False)
    message = (
        "for kernels='triton', got a tensor on cpu; take 'auto' or 'torch', or set TRITON_INTERPRET=1 before"
    )
    x, gate_up = torch.zeros(1, 16), torch.zeros(1, 16, 16)
    for ask in (
        lambda: _backend.use_triton("choose", "triton", x),
        lambda: choose_products("moe", "triton", 1, gate_up),
        lambda: choose_attention_kernel(*[x[None, None]] * 3, kernels="triton"),
    ):
        with refuses(message):
            ask()


def test_the_interpreter_is_not_chosen_for_products_of_bfloat16_on_a_device_either(monkeypatch):
    monkeypatch.setattr(_backend, "INTERPRETED", True)
    monkeypatch.setattr(_backend, "on_cuda", lambda x: True)
    x = torch.zeros(1, 16, 16, dtype=torch.bfloat16)
    assert _backend.use_triton("rms_norm", "auto", x)
    assert choose_products("moe", "auto", 1, x).forward == "torch"
    with refuses("moe needs compiled kernels for kernels='triton' and bfloat16"):
        choose_products("moe", "triton", 1, x)


def test_a_layer_names_the_kernels_that_were_asked_for(unchecked):
    params = {"router": torch.zeros(16, 2), "experts": {"gate_up": torch.zeros(2, 16, 16)}}
    params["experts"]["down"] = torch.zeros(2, 8, 16)
    with refuses("moe needs kernels 'auto', 'torch', 'triton', 'quack' or 'loop', got 'cuda'"):
        mk.moe(params, torch.zeros(3, 16), top_k=1, kernels="cuda")
    with refuses("; one of your own goes between dispatch and combine (docs/kernels.md, One's own)"):
        mk.moe(params, torch.zeros(3, 16), top_k=1, kernels=lambda experts, rows, offsets: rows)
    with refuses("moe needs quack-kernels, CUDA and bfloat16 for kernels='quack', got "):
        mk.moe(params, torch.zeros(3, 16), top_k=1, kernels="quack")
