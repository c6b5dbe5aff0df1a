"""The functional core on one CUDA device."""

import functools
import importlib.util

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import moekit as mk
from moekit.testing import check_kernel
from moekit.testing._kernels import relative_error

CONFIG = mk.ModelConfig(
    vocab_size=512,
    d_model=256,
    n_layers=3,
    n_dense_layers=1,
    d_dense=512,
    n_heads=4,
    n_kv_heads=2,
    d_head=64,
    n_experts=8,
    top_k=2,
    d_expert=128,
    d_shared=128,
    norm="peri",
    normalize_embedding=True,
    balance_weight=0.01,
    router_z_weight=1e-3,
    head_z_weight=1e-4,
)


def make(dtype, mesh=None):
    params = mk.init_params(CONFIG, dtype=dtype, device="cuda", mesh=mesh)
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, CONFIG.vocab_size, (4, 257), generator=generator)
    documents = (torch.arange(257) // 100).expand(4, -1)
    batch = mk.count_tokens(mk.batch.make_batch(tokens, documents, torch.arange(4)).to("cuda"), mesh=mesh)
    return params, batch


def names_and_grads(grads):
    for key in grads.keys(True, True):
        g = grads[key]
        yield key, g.full_tensor() if isinstance(g, DTensor) else g


@pytest.mark.parametrize("kernels", ["torch", "loop", "triton", "quack", "auto"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_the_experts_equal_the_float64_loop(kernels, dtype):
    if kernels == "quack" and importlib.util.find_spec("quack") is None:
        pytest.skip("quack-kernels is not installed: no package named quack")
    if kernels == "quack" and dtype != torch.bfloat16:
        pytest.skip("quack-kernels multiplies float32 as TF32, so moekit does not offer it")
    op = functools.partial(mk.expert_forward, kernels=kernels)
    print(check_kernel(op, dtype=dtype, device="cuda", large=dtype == torch.bfloat16))


def test_the_cuda_device_gives_the_cpus_loss_and_gradients_in_float32():
    params, batch = make(torch.float32)
    grad_fn = mk.value_and_grad(functools.partial(mk.next_token_loss, config=CONFIG), has_aux=True)
    (loss, stats), grads = grad_fn(params, batch)
    (want, want_stats), want_grads = grad_fn(params.cpu(), batch.to("cpu"))
    torch.testing.assert_close(loss.cpu(), want, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stats["counts"].cpu(), want_stats["counts"])
    for key, g in names_and_grads(grads):
        scale = want_grads[key].abs().max()
        torch.testing.assert_close(g.cpu() / scale, want_grads[key] / scale, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_one_rank_nccl_mesh_gives_the_gradients_of_no_mesh(dtype, tmp_path):
    params, batch = make(dtype)
    key = mk.random.make_key(
        0, "cuda"
    )  # else bfloat16's rounding, other in "all_to_all", sends tokens elsewhere
    loss_fn = functools.partial(mk.next_token_loss, config=CONFIG, key=key, assignment="random")
    _, want = mk.value_and_grad(loss_fn, has_aux=True)(params, batch)
    dist.init_process_group("nccl", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cuda", (1, 1), mesh_dim_names=("edp", "ep"))
        params, batch = make(dtype, mesh)
        for via in ("local", "all_to_all"):
            on_mesh = functools.partial(loss_fn, mesh=mesh, via=via)
            grad_fn = mk.data_parallel(mk.value_and_grad(on_mesh, has_aux=True), mesh=mesh)
            _, grads = grad_fn(params, batch)
            for name, g in names_and_grads(grads):
                exact = via == "local" or dtype == torch.float32
                assert relative_error(g, want[name]) < (1e-5 if exact else 2e-2), (name, via)
    finally:
        dist.destroy_process_group()
