import pytest
import torch
from reference import close, draw, with_grads

from moekit.kernels.permute import (
    count_experts,
    expert_slots,
    gather_sum,
    gather_sum_backward,
    scatter,
    to_rows,
    to_tokens,
)

# tokens, choices, experts: none, one, part of a block of routes, several blocks
SHAPES = [(0, 2, 4), (1, 1, 1), (37, 4, 8), (300, 2, 5), (513, 4, 128)]
KERNELS = ["torch", "triton"]


def draw_ids(t, k, n_experts):
    return draw(t, n_experts).topk(k, -1).indices


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("t", "k", "n_experts"), SHAPES)
def test_slots_are_the_places_of_a_stable_sort_by_expert(t, k, n_experts, kernels):
    ids = draw_ids(t, k, n_experts)
    slots = expert_slots(ids, n_experts, kernels=kernels)
    in_order = sorted(range(t * k), key=lambda route: ids.flatten()[route].item())
    assert slots.flatten()[in_order].tolist() == list(range(t * k))


@pytest.mark.parametrize("kernels", KERNELS)
def test_all_rows_may_go_to_one_expert(kernels):
    ids = torch.full((300, 1), 2)
    assert expert_slots(ids, 4, kernels=kernels).flatten().tolist() == list(range(300))
    assert count_experts(ids, 4, kernels=kernels).tolist() == [0, 0, 300, 0]


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize(("t", "k", "n_experts"), SHAPES)
def test_counts_leave_out_what_the_mask_does(t, k, n_experts, kernels):
    ids = draw_ids(t, k, n_experts)
    mask = torch.arange(t) % 3 > 0
    for keep in (None, mask):
        want = torch.bincount((ids if keep is None else ids[keep]).flatten(), minlength=n_experts)
        got = count_experts(ids, n_experts, keep, kernels=kernels)
        assert torch.equal(got, want) and got.dtype == torch.int64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("t", "k", "n_experts"), SHAPES)
@pytest.mark.parametrize("d", [8, 4100])
def test_the_passes_of_both_implementations_agree(t, k, n_experts, d, dtype):
    t = min(t, 12 if d > 8 else 50)  # the interpreter runs programs one after the other
    slots = expert_slots(draw_ids(t, k, n_experts), n_experts)
    x, rows, weights = draw(t, d).to(dtype), draw(t * k, d).to(dtype), draw(t, k).float()
    tol = 1e-5 if dtype == torch.float32 else 1e-2
    for got, want in (
        [(scatter(x, slots, kernels=kernels),) for kernels in ("triton", "torch")],
        [(gather_sum(rows, slots, kernels=kernels),) for kernels in ("triton", "torch")],
        [(gather_sum(rows, slots, weights, kernels=kernels),) for kernels in ("triton", "torch")],
        [gather_sum_backward(x, rows, slots, weights, kernels=kernels) for kernels in ("triton", "torch")],
    ):
        for one, other in zip(got, want, strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape
            assert (one.double() - other.double()).norm() <= tol * other.double().norm()


@pytest.mark.parametrize("kernels", KERNELS)
def test_gradients_are_those_of_plain_indexing(kernels):
    slots = expert_slots(draw_ids(37, 4, 8), 8)
    x, rows, weights = (draw(*shape, dtype=torch.float32) for shape in ((37, 6), (148, 6), (37, 4)))

    def back(rows, weights):
        return to_tokens(rows, slots, weights, kernels=kernels)

    close(
        with_grads(back, rows, weights),
        with_grads(lambda r, w: (r[slots] * w[..., None]).sum(1), rows, weights),
        1e-5,
    )
    close(
        with_grads(lambda r: to_tokens(r, slots, kernels=kernels), rows),
        with_grads(lambda r: r[slots].sum(1), rows),
        1e-5,
    )
    routes = slots.flatten().argsort() // 4
    close(
        with_grads(lambda x: to_rows(x, slots, kernels=kernels), x), with_grads(lambda x: x[routes], x), 1e-5
    )


def test_a_token_comes_back_k_times_what_it_was():
    slots = expert_slots(draw_ids(300, 2, 5), 5)
    x = draw(300, 8, dtype=torch.float32)
    close(gather_sum(scatter(x, slots, kernels="triton"), slots, kernels="triton"), 2 * x, 1e-6)
