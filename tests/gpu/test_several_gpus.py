"""Expert parallelism over NCCL, on a machine with two GPUs or more."""

import pytest
import torch

import moekit as mk
from moekit import _deepep
from moekit.testing import check_gradients, check_transport, ranks

N = torch.cuda.device_count()
pytestmark = pytest.mark.skipif(N < 2, reason=f"needs two CUDA devices or more, there are {N}")


def test_all_to_all_keeps_its_contract_over_nccl():
    check_transport("all_to_all", n_ranks=[n for n in (1, 2, 4, 8) if n <= N], device="cuda")


def test_deepep_keeps_its_contract():
    try:
        _deepep._library()
    except Exception as error:  # it checks NCCL and CUDA while it is imported
        pytest.skip(f"deep_ep cannot be imported: {error}")
    sizes = [n for n in (2, 4, 8) if n <= N]
    check_transport(mk.deepep, n_ranks=sizes, dtypes=(torch.bfloat16,), d_model=256, device="cuda")


def test_every_layout_has_the_gradients_of_one_process():
    config = mk.ModelConfig(
        vocab_size=97,
        d_model=32,
        n_layers=3,
        n_dense_layers=1,
        d_dense=64,
        n_heads=4,
        n_kv_heads=2,
        d_head=8,
        n_experts=8,
        top_k=2,
        d_expert=16,
        d_shared=16,
        norm="peri",
        balance_weight=0.01,
        router_z_weight=1e-3,
        init_std=0.1,
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (8, 33), generator=generator)
    batch = mk.batch.make_batch(tokens, (torch.arange(33) // 12).expand(8, -1), torch.arange(8))
    params = mk.init_params(config, dtype=torch.float64)
    layouts = [
        dict(ep=2),
        dict(edp=2, accumulate=2),
        dict(ep=2, rows=[8, 0], recompute="block"),
        *(dict(ep=2, cp=2, attention_via=kind, recompute="block") for kind in ("all_to_all", "all_gather")),
        *([dict(edp=2, ep=2)] if N >= 4 else []),
        *([dict(edp=2, ep=4), dict(ep=8)] if N >= 8 else []),
    ]

    def loss(params, batch, *, mesh, recompute="none", **options):
        block = mk.remat(mk.model.transformer_block, recompute)
        return mk.next_token_loss(params, batch, config=config, mesh=mesh, block=block, **options)

    print(check_gradients(loss, params, mk.count_tokens(batch), layouts, device="cuda"))


def test_sharded_steps_equal_those_of_one_process():
    def steps(mesh_shape):
        mesh = mesh_shape and mk.make_mesh(edp=mesh_shape[0], ep=mesh_shape[1], device="cuda")
        shapes = {"w": (7, 5), "experts.up": (4, 6, 3)}
        full = {
            name: torch.linspace(-1, 1, torch.Size(s).numel()).view(s).cuda() for name, s in shapes.items()
        }
        params = mk.mesh.distribute(mk.tree.nested(full), mesh)
        optimizer = mk.chain(mk.clip_by_global_norm(1.0), mk.adamw(1e-2, weight_decay=0.1))
        optimizer = mk.shard_optimizer(optimizer, mesh=mesh)
        state = optimizer.init(params)

        def loss(params, share):
            w, up = mk.local(params["w"]), mk.local(params["experts", "up"])
            # Experts of another ep rank are not here: each rank of the mesh gives its own experts' part.
            return (w.square().sum() + w.sum() * 3) * share + (
                up.sin().sum() * share * (mesh_shape or (1, 1))[1]
            )

        share = 1.0 if mesh is None else 1 / mesh.size()
        for _ in range(5):
            _, grads = mk.value_and_grad(loss)(params, share)
            optimizer.update(grads, state, params)
        return [(p.full_tensor() if mesh else p).cpu() for p in params.values(True, True)]

    want = steps(None)
    for shape in ((2, 1), (1, 2)):
        for got in ranks(2, device="cuda")(steps, shape):
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
