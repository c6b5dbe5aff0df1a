"""Tensors of a shape that the reference does not define are refused by both, never read past."""

import pytest
import torch
from reference import draw, refuses

import moekit as mk
from moekit.kernels.add import add_, add_product_
from moekit.kernels.attention import Documents, attention_of_qkv, causal_attention
from moekit.kernels.cross_entropy import cross_entropy_
from moekit.kernels.feed_forward import feed_forward
from moekit.kernels.grouped_mm import grouped_mm, grouped_weight_grad
from moekit.kernels.one_sided import get_each, get_sum, put, put_each, put_quantized
from moekit.kernels.permute import expert_slots, gather_sum, gather_sum_backward, scatter, to_tokens
from moekit.kernels.qk_norm_rope import qk_norm_rope
from moekit.kernels.rms_norm import rms_norm
from moekit.kernels.router import choose
from moekit.kernels.row_map import row_map
from moekit.kernels.swiglu import swiglu_backward, swiglu_forward
from moekit.losses import cross_entropy
from moekit.symmetric import Shared

pytestmark = pytest.mark.usefixtures("unchecked")
SLOTS = expert_slots(draw(5, 4).topk(2, -1).indices, 4, kernels="torch")


def f(*shape):
    return draw(*shape, dtype=torch.float32)


def i(*shape):
    return torch.zeros(shape, dtype=torch.int64)


def ends(n):
    return torch.full((n,), 10, dtype=torch.int32)


def rows(*shape, dtype=torch.float32):
    mine = torch.zeros(shape, dtype=dtype)
    return Shared(mine, (mine,), torch.tensor([mine.data_ptr()]))


def heads(kernels, *, qkv=(2, 3, 16), gains=((4,), (4,)), rope=(3, 2)):
    gains = [None if gain is None else f(*gain) for gain in gains]
    return qk_norm_rope(f(*qkv), *gains, (f(*rope), f(*rope)), n_heads=2, n_kv_heads=1, kernels=kernels)


def chosen(kernels, top_k=2, **given):
    options = dict(score="softmax", normalize="l1", scale=1.0)
    return choose(f(5, 4), top_k=top_k, **options, **given, kernels=kernels)


def losses(kernels, targets, weights):
    options = dict(z_weight=0.0, with_grad=False, kernels=kernels)
    return cross_entropy_(f(5, 7), targets, weights, **options)


CALLS = [
    (lambda k: rms_norm(f(3, 8), f(5), kernels=k), "rms_norm needs gain (8,), got (5,)"),
    (lambda k: rms_norm(f(3, 8), f(8), residual=f(2, 8), kernels=k), "residual (3, 8), got (2, 8)"),
    (lambda k: rms_norm(f(3, 8), f(8), residual=f(8, 3), kernels=k), "residual (3, 8), got (8, 3)"),
    (lambda k: heads(k, gains=((2,), (2,))), "qk_norm_rope needs q_gain (4,) or (8,), got (2,)"),
    (lambda k: heads(k, gains=((4,), (3,))), "qk_norm_rope needs k_gain (4,) or (4,), got (3,)"),
    (lambda k: heads(k, gains=((4, 1), (4,))), "q_gain (4,) or (8,), got (4, 1)"),
    (lambda k: heads(k, rope=(2, 2)), "qk_norm_rope needs cosines (3, 2), got (2, 2)"),
    (lambda k: heads(k, qkv=(2, 3, 18)), "qk_norm_rope needs qkv (b, s, 4 h) for n_heads=2, n_kv_heads=1"),
    (lambda k: chosen(k, bias=f(3)), "choose needs bias (4,), got (3,)"),
    (lambda k: put(f(5, 8), SLOTS, rows(10, 7), kernels=k), "put needs tokens (5, 7), got (5, 8)"),
    (lambda k: put(f(4, 8), SLOTS, rows(10, 8), kernels=k), "put needs tokens (5, 8), got (4, 8)"),
    (
        lambda k: put(f(5, 8), SLOTS, rows(10, 8, dtype=torch.bfloat16), kernels=k),
        "put needs tokens of the rows' torch.bfloat16, got torch.float32",
    ),
    (
        lambda k: put_quantized(f(5, 8), SLOTS, rows(10, 8), rows(10, 3), kernels=k),
        "put_quantized needs scales (n, g) for n=10 rows and g that divides 8, got (10, 3)",
    ),
    (lambda k: put_each(f(5, 1), SLOTS, rows(10), kernels=k), "put_each needs values (5, 2), got (5, 1)"),
    (lambda k: get_sum(rows(10, 8), SLOTS, f(5, 1), kernels=k), "get_sum needs weights (5, 2), got (5, 1)"),
    (
        lambda k: get_sum(rows(10, 8), SLOTS, base=f(5, 7), kernels=k),
        "get_sum needs tokens (5, 8), got (5, 7)",
    ),
    (lambda k: get_each(rows(10, 8), SLOTS, kernels=k), "get_each needs source (10,), got (10, 8)"),
    (
        lambda k: row_map(i(5, 2), i(2, 4), rank=2, capacity=9, kernels=k),
        "row_map needs counts (R, E) with R that divides E and a rank below R, got (2, 4) and rank=2",
    ),
    (lambda k: row_map(i(5, 2), i(2, 3), rank=0, capacity=9, kernels=k), "row_map needs counts (R, E)"),
    (
        lambda k: row_map(i(5, 2), i(2, 4), rank=0, capacity=9, priority=f(5, 1), kernels=k),
        "row_map needs priority (5, 2), got (5, 1)",
    ),
    (lambda k: chosen(k, expert_ids=i(5, 1)), "choose needs expert_ids (5, 2), got (5, 1)"),
    (lambda k: chosen(k, top_k=5), "choose needs top_k from 1 to the 4 experts, got 5"),
    (lambda k: scatter(f(4, 6), SLOTS, kernels=k), "scatter needs x (5, 6), got (4, 6)"),
    (lambda k: scatter(f(5, 6, 2), SLOTS, kernels=k), "scatter needs x (5, 2), got (5, 6, 2)"),
    (lambda k: gather_sum(f(9, 6), SLOTS, kernels=k), "gather_sum needs rows (10, 6), got (9, 6)"),
    (lambda k: to_tokens(f(10, 6), SLOTS, f(5, 1), kernels=k), "weights (5, 2), got (5, 1)"),
    (lambda k: to_tokens(f(10, 6), SLOTS, f(5, 3), kernels=k), "weights (5, 2), got (5, 3)"),
    (
        lambda k: gather_sum(f(10, 6), SLOTS, base=f(5, 4), kernels=k),
        "gather_sum needs base (5, 6), got (5, 4)",
    ),
    (
        lambda k: gather_sum_backward(f(5, 6), f(10, 6), SLOTS, f(5, 1), kernels=k),
        "gather_sum_backward needs weights (5, 2), got (5, 1)",
    ),
    (lambda k: swiglu_forward(f(3, 9), None, None, kernels=k), "gate_up (r, 2h), two halves, got (3, 9)"),
    (lambda k: swiglu_forward(f(3, 8), f(2), None, kernels=k), "swiglu_forward needs weights (3,), got (2,)"),
    (
        lambda k: swiglu_backward(f(3, 3), f(3, 8), None, None, kernels=k),
        "swiglu_backward needs grad (3, 4), got (3, 3)",
    ),
    (lambda k: feed_forward(f(3, 8), f(8, 9), f(4, 8), kernels=k), "gate_up (d, 2h), two halves, got (8, 9)"),
    (
        lambda k: feed_forward(f(3, 8), f(8, 8), f(5, 8), kernels=k),
        "feed_forward needs down (4, 8), got (5, 8)",
    ),
    (lambda k: add_(f(4, 4), f(4).bfloat16(), first=False, kernels=k), "add_ needs x (4, 4), got (4,)"),
    (lambda k: add_product_(f(1, 6), f(5, 4), f(4, 6), first=True, kernels=k), "total (5, 6), got (1, 6)"),
    (lambda k: losses(k, i(5, 5), f(5)), "cross_entropy_ needs targets (5,), got (5, 5)"),
    (lambda k: losses(k, i(5), f(5, 1)), "cross_entropy_ needs weights (5,), got (5, 1)"),
    (lambda k: cross_entropy(f(5, 4), f(4, 7), i(5, 5), f(5), kernels=k), "(5, 4), (4, 7), (5, 5), (5,)"),
    (lambda k: cross_entropy(f(5, 4), f(4, 7), i(5), f(5, 1), kernels=k), "(5, 4), (4, 7), (5,), (5, 1)"),
    (
        lambda k: grouped_mm(f(10, 4), f(2, 8, 8), ends(2), kernels=k),
        "grouped_mm needs rows (10, 8), got (10, 4)",
    ),
    (
        lambda k: grouped_mm(f(10, 8), f(2, 8, 8), ends(1), kernels=k),
        "grouped_mm needs offsets (2,), got (1,)",
    ),
    (
        lambda k: grouped_weight_grad(f(10, 8), f(9, 8), ends(2), kernels=k),
        "grouped_weight_grad needs grad (10, 8), got (9, 8)",
    ),
    (
        lambda k: grouped_weight_grad(f(10, 8), f(10, 8), ends(2), into=f(1, 8, 8), kernels=k),
        "grouped_weight_grad needs into (2, 8, 8), got (1, 8, 8)",
    ),
]


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize(("call", "message"), CALLS, ids=[message for _, message in CALLS])
def test_another_shape_is_refused(call, message, kernels):
    with refuses(message):
        call(kernels)


@pytest.mark.parametrize("shape", [(1, 20), (2, 5), (20,)])
def test_documents_of_other_positions_are_refused(shape):
    of = Documents(starts=torch.zeros(shape, dtype=torch.int32), ends=torch.ones(shape, dtype=torch.int32))
    q = f(2, 1, 20, 16)
    with refuses(f"causal_attention needs starts of documents (2, 20), got {shape}"):
        causal_attention(q, q, q, of)
    with refuses(f"attention_of_qkv needs starts of documents (2, 20), got {shape}"):
        attention_of_qkv(f(2, 20, 48), None, None, (f(20, 8), f(20, 8)), of, n_heads=1, n_kv_heads=1)


def test_gains_of_another_head_are_refused_by_attention():
    options = dict(rope=(f(20, 8), f(20, 8)), n_heads=1, n_kv_heads=1)
    with refuses("attention_of_qkv needs q_gain (16,), got (8,)"):
        attention_of_qkv(f(2, 20, 48), f(8), f(16), **options)
    with refuses("attention_of_qkv needs both gains or neither"):
        attention_of_qkv(f(2, 20, 48), f(16), None, **options)


def layer(**changes):
    return (
        dict(
            router=f(16, 4),
            experts={"gate_up": f(4, 16, 16), "down": f(4, 8, 16)},
            shared={"gate_up": f(16, 16), "down": f(8, 16)},
        )
        | changes
    )


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_layer_refuses_what_does_not_fit_its_tokens(kernels):
    shared = {"gate_up": f(16, 16), "down": f(8, 8)}
    with refuses("moe needs what the shared expert gives (5, 16), got (5, 8)"):
        mk.moe(layer(shared=shared), f(5, 16), top_k=2, kernels=kernels)
    with refuses("expert_forward needs gate_up (e, d, 2h), down (e, h, d)"):
        odd = {"gate_up": f(4, 16, 17), "down": f(4, 8, 16)}
        mk.moe(layer(experts=odd), f(5, 16), top_k=2, kernels=kernels)


@pytest.mark.parametrize("kernels", ["torch", "triton"])
@pytest.mark.parametrize("shape", [(5, 1), (5, 3)])
def test_dispatch_refuses_weights_of_another_top_k_and_tokens_of_more_dims(kernels, shape):
    routing = mk.route(f(16, 4), f(5, 16), top_k=2)
    with refuses("dispatch needs x (5, 16), got (5, 2, 16)"):
        mk.dispatch(f(5, 2, 16), routing, kernels=kernels)
    with refuses(f"dispatch needs weights (5, 2), got {shape}"):
        other = mk.Routing(**vars(routing) | {"weights": f(*shape)})
        mk.dispatch(f(5, 16), other, kernels=kernels)
