"""What holds for every operator: true fake forms, no matter how arguments lie; and none runs unasked."""

import functools

import pytest
import torch
from reference import draw
from torch.utils._python_dispatch import TorchDispatchMode

import moekit as mk
from moekit.kernels import _backend
from moekit.kernels.permute import expert_slots

OPS = torch.ops.moekit


def strided(*shape, seed=0):
    """Return normals every other element of which is another tensor's."""
    return draw(*shape, 2, seed=seed, dtype=torch.float32)[..., 0]


IDS = draw(9, 4).topk(2, -1).indices
SLOTS = expert_slots(IDS, 4)
END = torch.tensor([[5, 0], [18, 0]], dtype=torch.int32)[:, 0]
CALLS = {
    "swiglu": (strided(18, 8), strided(18), END),
    "swiglu_backward": (strided(18, 4), strided(18, 8), strided(18), END),
    "count_experts": (IDS.mT.contiguous().mT, 4),
    "expert_slots": (IDS.mT.contiguous().mT, 4),
    "scatter_rows": (strided(9, 6), SLOTS),
    "gather_sum": (strided(18, 6), SLOTS, strided(9, 2), strided(9, 6)),
    "gather_sum_backward": (strided(9, 6), strided(18, 6), SLOTS, strided(9, 2)),
    "choose": (strided(9, 4), strided(4), None, 2, True, True, 1.0),
    "choose_backward": (strided(9, 4), strided(9, 2), strided(9, 4), IDS, strided(9, 2), True, True, 1.0),
    "grouped_mm": (strided(18, 16), draw(2, 16, 16, dtype=torch.float32), END),
    "grouped_weight_grad": (strided(18, 16), strided(18, 16), END),
    "scaled": (strided(6, 8), torch.tensor(2.0), torch.bfloat16),
    "rms_norm": (strided(9, 8), strided(8), strided(9, 8), 1e-5),
    "mm_float32": (strided(9, 8).bfloat16(), strided(8, 4).bfloat16()),
}


@pytest.mark.parametrize("name", CALLS)
def test_fake_forms_have_the_shapes_and_strides_of_what_runs(name):
    torch.library.opcheck(getattr(OPS, name), CALLS[name], test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("name", CALLS)
def test_strides_of_arguments_do_not_change_results(name):
    dense = [x.contiguous() if isinstance(x, torch.Tensor) else x for x in CALLS[name]]
    got, want = getattr(OPS, name)(*CALLS[name]), getattr(OPS, name)(*dense)
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_a_transposed_gradient_is_scaled_where_it_lies():
    x = draw(6, 8, dtype=torch.float32).mT
    got = OPS.scaled(x, torch.tensor(2.0), torch.float32)
    assert torch.equal(got, 2 * x) and got.stride() == x.stride()


def test_a_permuted_tensor_with_gaps_keeps_its_elements_apart():
    x = torch.arange(24.0).view(4, 6)[:, ::2].T
    assert torch.equal(OPS.scaled(x, torch.tensor(2.0), torch.float32), 2 * x)


class NoKernels(TorchDispatchMode):
    """Refuse this package's operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        assert not str(func).startswith("moekit."), func
        return func(*args, **(kwargs or {}))


def test_plain_torch_launches_no_kernel_though_the_device_has_them(monkeypatch):
    monkeypatch.setattr(_backend, "on_cuda", lambda x: True)
    sizes = dict(vocab_size=64, d_model=32, n_layers=2, n_dense_layers=1, n_heads=2, n_kv_heads=2, d_head=16)
    experts = dict(d_dense=32, n_experts=4, top_k=2, d_expert=16, d_shared=16, balance_weight=0.01)
    config = mk.ModelConfig(**sizes, **experts, norm="peri", qk_norm="head")
    tokens = torch.randint(0, 64, (2, 17), generator=torch.Generator().manual_seed(0))
    batch = mk.count_tokens(mk.batch.make_batch(tokens, torch.zeros_like(tokens), torch.arange(2)))
    for dtype in (torch.float32, torch.bfloat16):
        params = mk.init_params(config, dtype=dtype)
        loss_fn = functools.partial(mk.next_token_loss, config=config, kernels="torch")
        with NoKernels():
            mk.value_and_grad(loss_fn, has_aux=True)(params, batch)
