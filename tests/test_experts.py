import pytest
import torch
from hypothesis import given, settings, strategies as st
from reference import close, draw, expanded, feed_forward, refuses, unaligned, with_grads

import moekit as mk
from moekit.kernels.swiglu import swiglu
from moekit.testing import check_kernel

D, H = 8, 12
KERNELS = pytest.mark.parametrize(
    ("kernels", "dtype", "tol"), [("loop", torch.float64, 1e-12), ("torch", torch.float32, 1e-5)]
)


def experts(e, dtype=torch.float64):
    return {"gate_up": draw(e, D, 2 * H, seed=1).to(dtype), "down": draw(e, H, D, seed=2).to(dtype)}


def ends(*sizes):
    return torch.tensor(sizes).cumsum(0).int()


def run(sizes, kernels="auto", dtype=torch.float64, rows=None, fn=mk.expert_forward):
    """Return rows and the gradients of gate_up, down and rows."""
    params = experts(len(sizes), dtype)
    rows = draw(sum(sizes), D).to(dtype) if rows is None else rows
    options = {"kernels": kernels} if fn is mk.expert_forward else {}
    return with_grads(
        lambda gate_up, down, rows: fn({"gate_up": gate_up, "down": down}, rows, ends(*sizes), **options),
        *params.values(),
        rows,
    )


def plain(params, rows, offsets):
    expert_of = torch.bucketize(torch.arange(len(rows)), offsets, right=True)
    out = [
        feed_forward(params["gate_up"][e], params["down"][e], x) for e, x in zip(expert_of, rows, strict=True)
    ]
    return torch.stack(out) if out else rows


@KERNELS
@settings(max_examples=20)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_output_and_gradients_are_those_of_each_row_through_its_expert(kernels, dtype, tol, sizes):
    got, want = run(sizes, kernels, dtype), run(sizes, fn=plain)
    scale = max(1.0, *(w.abs().max().item() for w in want if w.numel()))
    close([x / scale for x in got], [x.to(dtype) / scale for x in want], tol)


@KERNELS
def test_an_expert_without_rows_gets_a_zero_gradient(kernels, dtype, tol):
    _, gate_up, down, _ = run([3, 0, 2, 0], kernels, dtype)
    for grad in (gate_up, down):
        assert [bool(g.any()) for g in grad] == [True, False, True, False] and bool(grad.isfinite().all())


@KERNELS
def test_no_rows_at_all_give_none_and_zero_gradients(kernels, dtype, tol):
    out, gate_up, down, rows = run([0, 0], kernels, dtype)
    assert out.shape == rows.shape == (0, D) and not gate_up.any() and not down.any()


@KERNELS
@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
def test_rows_beyond_the_last_offset_reach_no_valid_row_and_no_gradient(kernels, dtype, tol, garbage):
    sizes, valid = [3, 0, 2], 5
    rows = draw(valid + 4, D).to(dtype)
    rows[valid:] = garbage

    def first(params, rows, offsets):
        return mk.expert_forward(params, rows, offsets, kernels=kernels)[:valid]

    clean = run(sizes, rows=rows[:valid], dtype=dtype, fn=first)
    out, gate_up, down, grad = run(sizes, rows=rows, dtype=dtype, fn=first)
    close([out, gate_up, down, grad[:valid]], clean, tol)


@pytest.mark.parametrize("garbage", [torch.nan, torch.inf])
@KERNELS
def test_gradients_of_rows_beyond_the_last_offset_reach_no_weight(kernels, dtype, tol, garbage):
    params = {name: w.requires_grad_() for name, w in experts(2, dtype).items()}
    rows = draw(7, D).to(dtype).requires_grad_()
    out = mk.expert_forward(params, rows, ends(2, 3), kernels=kernels)
    grad = draw(7, D, seed=3).to(dtype)
    leaves = [*params.values(), rows]
    clean = torch.autograd.grad(out, leaves, grad.index_fill(0, torch.arange(5, 7), 0), retain_graph=True)
    dirty = torch.autograd.grad(out, leaves, grad.index_fill(0, torch.arange(5, 7), garbage))
    close([g[:5] if g.ndim == 2 else g for g in dirty], [g[:5] if g.ndim == 2 else g for g in clean], tol)


@pytest.mark.parametrize(
    ("kernels", "dtype"),
    [
        ("auto", torch.float64),
        ("auto", torch.float32),
        ("auto", torch.bfloat16),
        ("loop", torch.float32),
        ("loop", torch.bfloat16),
    ],
)
def test_every_kernel_keeps_the_contract(kernels, dtype):
    table = check_kernel(lambda *args: mk.expert_forward(*args, kernels=kernels), dtype=dtype)
    assert "garbage after the end" in table


def test_a_plain_sum_of_the_result_has_a_gradient():
    params = {name: w.float().requires_grad_() for name, w in experts(2).items()}
    rows = draw(5, D, dtype=torch.float32)
    sums, loops = (mk.expert_forward(params, rows, ends(2, 3), kernels=k).sum() for k in ("torch", "loop"))
    leaves = list(params.values())
    close(torch.autograd.grad(sums, leaves), torch.autograd.grad(loops, leaves), 1e-4)


SIZED = pytest.mark.parametrize("kernels", ["torch", "triton"])


def kernel_experts(e=2, d=8, h=8):
    return {"gate_up": draw(e, d, 2 * h, seed=1).float() / 4, "down": draw(e, h, d, seed=2).float() / 4}


@SIZED
@pytest.mark.parametrize("lay", [unaligned, expanded, lambda x: unaligned(x.mT).mT])
def test_rows_and_weights_may_begin_anywhere_and_repeat(kernels, lay):
    given = [*kernel_experts().values(), draw(5, D).float()]

    def run(lay, kernels):
        def forward(*leaves):
            gate_up, down, rows = (lay(x) for x in leaves)
            return mk.expert_forward({"gate_up": gate_up, "down": down}, rows, ends(2, 3), kernels=kernels)

        return with_grads(forward, *given)

    close(run(lay, kernels), run(lay, "loop"), 1e-5)
    grad = lay(draw(5, D, seed=3).float())
    leaves = [x.clone().requires_grad_() for x in given]
    got, want = (
        mk.expert_forward({"gate_up": leaves[0], "down": leaves[1]}, leaves[2], ends(2, 3), kernels=k)
        for k in (kernels, "loop")
    )
    close(torch.autograd.grad(got, leaves, grad), torch.autograd.grad(want, leaves, grad), 1e-5)


@SIZED
@pytest.mark.parametrize("wanted", [{"rows"}, {"rows", "gate_up"}, {"down"}, {"gate_up", "down"}])
@pytest.mark.parametrize("tokens", [False, True])
def test_a_buffer_gets_what_a_backward_is_asked_for(kernels, wanted, tokens):
    leaves = {name: w.requires_grad_() for name, w in kernel_experts().items()}
    experts, x = dict(leaves), draw(5, D).float().requires_grad_()
    leaves["rows"] = x
    buffers = {name: torch.zeros_like(w) for name, w in experts.items()}
    layer = {"router": draw(D, 2, seed=5).float(), "experts": experts}

    def forward(**options):
        if tokens:
            return mk.moe(layer, x, top_k=1, kernels=kernels, **options)[0]
        return mk.expert_forward(experts, x, ends(2, 3), kernels=kernels, **options)

    want = dict(zip(leaves, torch.autograd.grad(forward().sum(), list(leaves.values())), strict=True))
    asked = [leaves[name] for name in wanted]
    given = torch.autograd.grad(forward(grad_into=buffers).sum(), asked, allow_unused=True)
    for name, got in zip(wanted, given, strict=True):
        close(got if name == "rows" else buffers[name], want[name], 1e-5)
        assert name == "rows" or got is None
    assert not any(buffers[name].any() for name in buffers.keys() - wanted)
    forward(grad_into=buffers).sum().backward()  # all
    for name in buffers:
        close(buffers[name], want[name] * (1 + (name in wanted)), 1e-5)


@SIZED
@pytest.mark.parametrize("frozen", [{"gate_up"}, {"down"}, {"gate_up", "down"}])
@pytest.mark.parametrize("given", [False, True])
def test_frozen_weights_need_no_buffer_and_add_nothing_to_one(kernels, frozen, given):
    experts = {name: w.requires_grad_(name not in frozen) for name, w in kernel_experts().items()}
    rows = draw(5, D).float().requires_grad_()
    names = experts.keys() if given else experts.keys() - frozen
    buffers = {name: torch.zeros_like(experts[name]) for name in names}
    mk.expert_forward(experts, rows, ends(2, 3), kernels=kernels, grad_into=buffers).sum().backward()
    assert rows.grad.any() and all(w.grad is None for w in experts.values())
    assert {name for name, buffer in buffers.items() if buffer.any()} == experts.keys() - frozen


def test_a_layer_without_all_its_parameters_is_refused():
    experts, rows = kernel_experts(), draw(5, D).float()
    for missing in ("down", "gate_up"):
        some = {name: w for name, w in experts.items() if name != missing}
        got = f"needs experts with gate_up, down, got {', '.join(some)}"
        with refuses(f"expert_forward {got}"):
            mk.expert_forward(some, rows, ends(2, 3))
        with refuses(f"moe {got}"):
            mk.moe({"router": draw(D, 2).float(), "experts": some}, rows, top_k=1)
    with refuses("moe needs params with router, experts, got experts"):
        mk.moe({"experts": experts}, rows, top_k=1)
    with refuses("expert_forward needs grad_into with gate_up and down alone, got ['up']"):
        mk.expert_forward(experts, rows, ends(2, 3), grad_into={"up": torch.zeros(1)})


def test_swiglu_gates_the_second_half_with_the_first():
    x = torch.tensor([[0.0, 1.0, 3.0, 5.0]])
    close(swiglu(x), torch.tensor([[0.0, 5.0 / (1 + torch.tensor(-1.0).exp().item())]]), 1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(activation="gelu"), "expert_forward needs activation 'swiglu', got 'gelu'"),
        (
            dict(kernels="cuda"),
            "expert_forward needs kernels 'auto', 'torch', 'triton', 'quack' or 'loop', got 'cuda'",
        ),
        (dict(rows=draw(5, 9)), "rows (r, d), offsets (e,), got (2, 8, 24), (2, 12, 8), (5, 9), (2,)"),
        (dict(offsets=ends(5)), "got weights of 2 experts, offsets of 1: distribute the parameters"),
        (
            dict(offsets=torch.tensor([3, 2], dtype=torch.int32)),
            "expert_forward needs offsets that ascend from 0 to at most the 5 rows, got [3, 2]",
        ),
        (dict(offsets=ends(2, 4)), "ascend from 0 to at most the 5 rows, got [2, 6]"),
        (
            dict(offsets=ends(2, 3).long()),
            "expert_forward needs int32 offsets, got torch.int64; pass offsets.int()",
        ),
        (
            dict(experts={**experts(2), "down": draw(2, H + 1, D)}),
            "needs gate_up (e, d, 2h), down (e, h, d), rows (r, d), offsets (e,), got (2, 8, 24), (2, 13, 8)",
        ),
        (
            dict(rows=draw(5, D).float()),
            "expert_forward needs one dtype, got torch.float32, torch.float64 and torch.float64",
        ),
        (dict(kernels="torch"), "expert_forward needs kernels='loop' for float64, got kernels='torch'"),
        (
            dict(rows=draw(5, D).bfloat16(), experts=experts(2, torch.bfloat16)),
            "d and h to be multiples of 8 in torch.bfloat16 (16 bytes), got d=8, h=12; choose such sizes or",
        ),
    ],
)
def test_bad_input_is_refused(unchecked, changes, message):
    with refuses(message):
        mk.expert_forward(**dict(experts=experts(2), rows=draw(5, D), offsets=ends(2, 3)) | changes)


@pytest.mark.parametrize("kernels", ["torch", "loop", "triton"])
def test_second_derivatives_are_refused_where_gradients_go_straight_into_buffers(kernels):
    experts = {"gate_up": draw(2, 8, 16).float().requires_grad_(), "down": draw(2, 8, 8).float()}
    rows = draw(6, 8, seed=1).float().requires_grad_()
    into = {"gate_up": torch.zeros(2, 8, 16)}
    out = mk.expert_forward(experts, rows, torch.tensor([2, 6]).int(), kernels=kernels, grad_into=into)
    (grad,) = torch.autograd.grad(out.square().sum(), rows, create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        grad.square().sum().backward()
