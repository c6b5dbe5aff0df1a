"""Layers over ranks that exchange rows, for the tests of transports on CPUs and on GPUs."""

import random
import time
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import moekit as mk

D, H, K = 16, 8, 2


def make_mesh(device="cpu"):
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("ep",))


def make_params(n_experts, dtype, seed=0, device="cpu"):
    """Return a layer's parameters as this rank holds them."""
    generator = torch.Generator().manual_seed(seed)
    draw = partial(torch.randn, generator=generator, dtype=dtype)
    e, rank = n_experts // dist.get_world_size(), dist.get_rank()
    mine = slice(rank * e, (rank + 1) * e)
    router, gate_up, down = draw(D, n_experts), draw(n_experts, D, 2 * H), draw(n_experts, H, D)
    leaves = [
        x.to(device, copy=True).requires_grad_()
        for x in (router, gate_up[mine] / D**0.5, down[mine] / H**0.5)
    ]
    return dict(router=leaves[0], experts=dict(gate_up=leaves[1], down=leaves[2])), leaves


def tokens(n, dtype, seed=0, device="cpu"):
    generator = torch.Generator().manual_seed(100 * seed + dist.get_rank())
    return torch.randn(n, D, generator=generator, dtype=dtype).to(device).requires_grad_()


def layers(via, kernels, dtype, n_tokens, recompute, device="cpu", overlap="none", room=None):
    """Return the output of two layers, and the gradients of tokens and of all parameters.

    ``room`` is the tokens of a rank that rowwise is made for, by default as many as come.
    """
    mesh = make_mesh(device)
    n_experts = 4 * mesh.size()
    if via == "rowwise":
        sizes = dict(d_model=D, n_experts=n_experts, top_k=K, dtype=dtype)
        via = mk.rowwise(mesh, n_tokens=room or max(n_tokens), kernels=kernels, **sizes)
    (first, a), (second, b) = (make_params(n_experts, dtype, seed, device) for seed in range(2))
    x = tokens(n_tokens[dist.get_rank()], dtype, device=device)

    def layer(x, params):
        run = {"torch": "loop"}.get(kernels, kernels)
        return x + mk.moe(params, x, top_k=K, via=via, kernels=run, overlap=overlap, mesh=mesh)[0]

    block, y = mk.remat(layer, "block" if recompute else "none"), x
    for params in (first, second, first):
        y = block(y, params)
    grads = torch.autograd.grad((y * torch.linspace(1, 2, D, dtype=dtype, device=device)).sum(), [x, *a, *b])
    return [z.cpu() for z in (y.detach(), *grads)]


def layers_both_ways(*args, **options):
    """Return what :func:`layers` gives where activations are kept, then where they are computed again."""
    return [z for recompute in (False, True) for z in layers(*args, recompute=recompute, **options)]


def hurried(fault, n_runs, device="cpu", payload=None, overlap="none"):
    """Return whether layers give the same bits each time, ranks delayed at random at every step.

    With a fault, end as soon as some rank has got others.
    """
    mesh, dtype = make_mesh(device), torch.float32
    kernels = "loop" if device == "cpu" else "auto"
    via = mk.rowwise(mesh, n_tokens=6, d_model=D, n_experts=8, top_k=K, dtype=dtype, payload=payload)
    chance = random.Random(dist.get_rank())

    def slow(fn):
        def run(*args, **kwargs):
            time.sleep(chance.random() * 2e-3)
            return fn(*args, **kwargs)

        return run

    via._claim, via._meet = slow(via._claim), slow(via._meet)
    meet = via._meet
    if fault == "nobody waits for what was sent":
        via._meet = lambda *names: None if names == ("rows in",) else meet(*names)
    elif fault == "nobody waits for what is fetched":
        via._meet = lambda *names: None if names == ("rows out",) else meet(*names)
    elif fault == "nobody waits for the counts":
        via._meet = lambda *names: None if names == ("counts",) else meet(*names)
    elif fault == "nobody waits before sending again":
        via._claim = slow(lambda name: via.memory.tensors[name])
    params, leaves = make_params(8, dtype, device=device)
    first, same = None, torch.ones(1)
    for _ in range(n_runs):
        run = []
        for seed in range(3):
            x = tokens(3 + (seed + dist.get_rank()) % 4, dtype, seed, device)
            options = dict(top_k=K, via=via, kernels=kernels, overlap=overlap, mesh=mesh)
            y = mk.moe(params, x, **options)[0]
            y = mk.moe(params, x + y, **options)[0]
            run += [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *leaves])]
        first = first or run
        same *= all(torch.equal(a, b) for a, b in zip(run, first, strict=True))
        if fault:
            dist.all_reduce(same, dist.ReduceOp.MIN)
            if not same:
                break
    return bool(same)
