"""Optimizers on several gloo ranks, against torch's on one process."""

import math

import pytest
import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from moekit._shard_optimizer import shard_optimizer
from moekit.mesh import data_mesh, distribute, layout, local, make_mesh
from moekit.optim import (
    Optimizer,
    adamw,
    chain,
    clip_by_global_norm,
    global_norm,
    warmup_cosine,
)
from moekit.testing import ranks
from moekit.transforms import accumulate, value_and_grad
from moekit.tree import named, nested, on_mesh

MESHES = [(1, 1), (2, 1), (4, 1), (2, 2), (1, 4)]
# One row fewer than ranks, more rows than ranks but not a multiple, one row, no dim at all.
SHAPES = {
    "embedding": (7, 3),
    "head": (3, 8),
    "layers.0.norm": (5,),
    "layers.0.moe.router": (3, 4),
    "layers.0.moe.experts.up": (4, 3, 5),
    "layers.0.moe.experts.down": (4, 6, 3),
    "layers.0.moe.experts.bias": (4,),
    "one": (1,),
    "gain": (),
}


def clone(params):
    return nested({name: on_mesh(held.clone(), like=p) for name, p, held in each(params)})


def each(params):
    for name, p in named(params).items():
        yield name, p, p.to_local() if isinstance(p, DTensor) else p


def random_leaves(seed, shapes=SHAPES, *, dyadic=True):
    """Multiples of 1/64: sums of them are exact in any order."""
    generator = torch.Generator().manual_seed(seed)
    if dyadic:
        return {n: torch.randint(-256, 257, s, generator=generator) / 64.0 for n, s in shapes.items()}
    return {n: torch.randn(s, generator=generator) for n, s in shapes.items()}


def share(mesh, step, shapes=SHAPES, *, dtype=torch.float32, dyadic=True):
    """Return this rank's part of the gradients of a step, to be summed."""
    leaves = random_leaves(1000 * step + dist.get_rank(), shapes, dyadic=dyadic)
    params = distribute(nested(leaves), mesh)
    partial = {n: [Partial() if q.is_replicate() else q for q in p.placements] for n, p, _ in each(params)}
    return nested({n: on_mesh(x.to(dtype), like=p, placements=partial[n]) for n, p, x in each(params)})


def summed(edp, ep, step, shapes=SHAPES):
    """Return the sum of the shares of all ranks."""
    shares = [random_leaves(1000 * step + rank, shapes) for rank in range(edp * ep)]
    total = {name: sum(one[name] for one in shares) for name in shapes}
    for name in shapes:
        if "experts" in name:  # of the ranks that hold the expert
            of_ep = [sum(shares[i * ep + j][name] for i in range(edp)).chunk(ep)[j] for j in range(ep)]
            total[name] = torch.cat(of_ep)
    return total


def full(params):
    return {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p, _ in each(params)}


def assert_close(got, want, **tolerance):
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(
            got[name], want[name], msg=lambda m, name=name: f"{name}: {m}", **tolerance
        )


EXACT = {"rtol": 0, "atol": 0}


class Collectives(TorchDispatchMode):
    """Records (op, ranks of the group, shape, dtype) of every collective."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(issubclass(t, DTensor) for t in types):
            return NotImplemented  # it unwraps itself, then we see what it calls
        if func.namespace in ("_c10d_functional", "c10d") and "wait" not in func._schema.name:
            group = torch._C._distributed_c10d._resolve_process_group(args[-1])
            name = func._schema.name.rpartition("::")[2]
            self.calls.append(
                (name, tuple(dist.get_process_group_ranks(group)), tuple(args[0].shape), args[0].dtype)
            )
        return func(*args, **(kwargs or {}))


def subtract():
    """An optimizer that takes the gradients away from the parameters: exact."""

    def update(grads, state, params):
        for name, p in named(params).items():
            p.to_local().sub_(named(grads)[name].to_local())
        return params, state

    return Optimizer(lambda params: TensorDict({}), update)


def train(edp, ep, steps, dtype, clip):
    mesh = make_mesh(edp=edp, ep=ep)
    params = distribute(nested({n: x.to(dtype) for n, x in random_leaves(-1).items()}), mesh)
    links = [clip_by_global_norm(clip)] if clip else []
    lr = warmup_cosine(1e-2, warmup_steps=3, total_steps=15)
    inner = chain(*links, adamw(lr, eps=1e-8, weight_decay=0.1, mask=lambda name, p: p.ndim > 1))
    optimizer = shard_optimizer(inner, mesh=mesh)
    state = optimizer.init(params)
    for step in range(steps):
        out = optimizer.update(share(mesh, step), state, params)
        assert out[0] is params and out[1] is state
    rounded = {n: m.to(dtype) for n, m in full(state["master"]).items()}
    assert_close(full(params), rounded, **EXACT)
    return full(state["master"]), full(params)


def torch_adamw(edp, ep, steps, dtype, clip):
    leaves = {n: torch.nn.Parameter(x.to(dtype).float()) for n, x in random_leaves(-1).items()}
    optimizer = torch.optim.AdamW(
        [{"params": [p], "weight_decay": 0.1 if p.ndim > 1 else 0.0} for p in leaves.values()],
        **dict(lr=1.0, betas=(0.9, 0.95), eps=1e-8),
    )
    lr = warmup_cosine(1e-2, warmup_steps=3, total_steps=15)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: lr(torch.tensor(i)).item())
    for step in range(steps):
        for name, g in summed(edp, ep, step).items():
            leaves[name].grad = g
        if clip:
            torch.nn.utils.clip_grad_norm_(leaves.values(), clip)
        optimizer.step()
        schedule.step()
    return {name: p.detach() for name, p in leaves.items()}


@pytest.mark.parametrize(
    ("edp", "ep", "dtype", "clip"),
    [
        (edp, ep, dtype, clip)
        for i, (edp, ep) in enumerate(MESHES)
        for j, dtype in enumerate([torch.float32, torch.bfloat16])
        for k, clip in enumerate([None, 3.0])
        if (edp, ep) == (2, 2) or (i + j + k) % 2 == 0  # elsewhere each pair of these three
    ],
    ids=lambda x: str(x),
)
def test_twenty_steps_equal_torchs_adamw_on_one_process(edp, ep, dtype, clip):
    want = torch_adamw(edp, ep, 20, dtype, clip)
    for master, params in ranks(edp * ep)(train, edp, ep, 20, dtype, clip):
        assert_close(master, want, rtol=1e-6, atol=1e-7)
        assert all(p.dtype == dtype for p in params.values())


def check_transport(edp, ep, reduce, bucket_bytes):
    mesh = make_mesh(edp=edp, ep=ep)
    for seed in range(2):
        sizes = torch.randint(1, 11, (2, 4, 4), generator=torch.Generator().manual_seed(seed)).tolist()
        shapes = {f"{i}.leaf{n}": tuple(sizes[i][n][:n]) for n in range(4) for i in range(2)}
        shapes |= {f"{i}.experts.leaf{n}": (4, *sizes[i][n][:n]) for n in range(4) for i in range(2)}
        params = distribute(nested(random_leaves(seed, shapes)), mesh)
        optimizer = shard_optimizer(subtract(), reduce=reduce, mesh=mesh, bucket_bytes=bucket_bytes)
        state = optimizer.init(params)
        assert_close(full(state["master"]), full(params), **EXACT)
        grads = share(mesh, seed, shapes)
        if reduce == "micro_batch":
            grads = nested({name: optimizer.on_grad(name, g) for name, g in named(grads).items()})
            assert [g.placements for g in named(grads).values()] == [
                m.placements for m in named(state["master"]).values()
            ]
        optimizer.update(grads, state, params)
        start, total = random_leaves(seed, shapes), summed(edp, ep, seed, shapes)
        want = {name: start[name] - total[name] for name in shapes}
        assert_close(full(params), want, **EXACT)
        assert_close(full(state["master"]), want, **EXACT)
        for name, m, held in each(state["master"]):  # no rank holds a row too many, as torch cuts
            assert held.equal(named(params)[name].redistribute(placements=m.placements).to_local()), name


@pytest.mark.parametrize(("reduce", "bucket_bytes"), [("step", 200), ("step", 2**28), ("micro_batch", 2**28)])
@pytest.mark.parametrize(("edp", "ep"), [(1, 1), (3, 1), (2, 2), (1, 4), (4, 2)])
def test_any_shape_is_summed_and_gathered_exactly(edp, ep, reduce, bucket_bytes):
    ranks(edp * ep)(check_transport, edp, ep, reduce, bucket_bytes)


def many_leaves(mesh):
    """Forty leaves, some in another dtype, of a model with experts."""
    shapes = {
        f"layers.{i}.{name}": shape for i in range(4) for name, shape in SHAPES.items() if "." not in name
    }
    shapes |= {f"layers.{i}.experts.{name}": (8, 8, 6) for i in range(4) for name in ("up", "down", "gate")}
    shapes |= {f"layers.{i}.norm{k}": (5 + k,) for i in range(4) for k in range(3)}
    leaves = random_leaves(-1, shapes)
    low = {n: x if n.endswith("norm0") else x.bfloat16() for n, x in leaves.items()}
    return shapes, distribute(nested(low), mesh)


def run_with_buckets(bucket_bytes):
    mesh = make_mesh(edp=2, ep=2)
    shapes, params = many_leaves(mesh)
    inner = chain(clip_by_global_norm(1.0), adamw(1e-2))
    optimizer = shard_optimizer(inner, mesh=mesh, bucket_bytes=bucket_bytes)
    state = optimizer.init(params)
    for step in range(2):
        grads = share(mesh, step, shapes, dyadic=False)
        with Collectives() as seen:
            optimizer.update(grads, state, params)
    return len(shapes), seen.calls, full(params), full(state["master"])


def test_buckets_take_few_collectives_and_give_the_same_bits():
    few, many = ranks(4)(run_with_buckets, 2**28), ranks(4)(run_with_buckets, 0)
    names = [name for name, *_ in few[0][1]]
    n_leaves = few[0][0] - 4  # all but those without a dim, which are summed alone
    # Both meshes; parameters are gathered in two dtypes on one of them.
    assert (names.count("reduce_scatter_tensor"), names.count("all_gather_into_tensor")) == (2, 3)
    names = [name for name, *_ in many[0][1]]
    assert names.count("reduce_scatter_tensor") == names.count("all_gather_into_tensor") == n_leaves >= 35
    for (_, _, params, master), (_, _, other, other_master) in zip(few, many, strict=True):
        assert_close(params, other, **EXACT)
        assert_close(master, other_master, **EXACT)


def test_buckets_stay_within_their_bytes():
    limit = 3000
    for _, calls, *_ in ranks(4)(run_with_buckets, limit):
        gathered = [
            math.prod(shape) * d.itemsize for name, _, shape, d in calls if name.startswith("reduce_sc")
        ]
        assert max(gathered) <= limit and len(gathered) > 2


def run_expert_shards():
    mesh = make_mesh(edp=4, ep=2)
    shapes = {"experts.up": (8, 32, 12), "experts.down": (8, 12, 32), "router": (32, 8), "norm": (32,)}
    params = distribute(nested({n: x.bfloat16() for n, x in random_leaves(-1, shapes).items()}), mesh)
    optimizer = shard_optimizer(chain(clip_by_global_norm(1.0), adamw(1e-2)), mesh=mesh)
    state = optimizer.init(params)
    with Collectives() as seen:
        optimizer.update(share(mesh, 0, shapes, dtype=torch.bfloat16), state, params)
    own = {name: p.numel() for name, _, p in each(params)}
    kept = {name: x.numel() for name, _, x in each(state) if "experts" in name}
    where = {name: x.placements for name, x in named(state).items() if "experts" in name}
    return seen.calls, own, kept, where


def test_moments_of_experts_are_spread_over_edp_and_no_expert_gradient_is_gathered():
    n_ep, n_edp = 2, 4
    for rank, (calls, own, kept, where) in enumerate(ranks(8)(run_expert_shards)):
        assert len(kept) == 6  # master and two moments of two leaves
        for name, n in kept.items():
            leaf = name.partition("experts.")[2]
            assert 0 < n <= 1.05 / n_edp * own[f"experts.{leaf}"]
        assert set(where.values()) == {(Shard(1), Shard(0))}
        edp_group = tuple(range(rank % n_ep, 8, n_ep))
        n_experts = own["experts.up"] + own["experts.down"]
        others = own["router"] + own["norm"]
        # Gradients (float32) are only scattered, experts' over the ranks with the same experts; gathered are
        # parameters (bfloat16); the last all-reduce is the norm.
        assert sorted(calls, key=str) == sorted(
            [
                ("reduce_scatter_tensor", tuple(range(8)), (others,), torch.float32),
                ("reduce_scatter_tensor", edp_group, (n_experts,), torch.float32),
                ("all_reduce", tuple(range(8)), (), torch.float32),
                ("all_gather_into_tensor", tuple(range(8)), (others // 8,), torch.bfloat16),
                ("all_gather_into_tensor", edp_group, (n_experts // n_edp,), torch.bfloat16),
            ],
            key=str,
        )


def run_modes(reduce):
    mesh = make_mesh(edp=2, ep=2)
    shapes = {"w": (6, 4), "experts.up": (4, 6)}
    params = distribute(nested(random_leaves(-1, shapes)), mesh)
    optimizer = shard_optimizer(chain(clip_by_global_norm(1.0), adamw(1e-2)), reduce=reduce, mesh=mesh)
    state = optimizer.init(params)

    def loss(params, x):
        return (local(params["experts", "up"]) @ (x @ local(params["w"]).T).T).square().sum()

    step = accumulate(value_and_grad(loss), 2, on_grad=optimizer.on_grad)
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(3):
        x = torch.randint(-4, 5, (4, 4), generator=generator).float()
        with Collectives() as seen:
            _, grads = step(params, x)
        optimizer.update(grads, state, params)
    kept = {name: g.numel() for name, _, g in each(grads)}
    return full(params), [name for name, *_ in seen.calls], kept


def test_reducing_each_micro_batch_gives_the_same_step_and_keeps_only_shards():
    at_step, at_micro_batch = ranks(4)(run_modes, "step"), ranks(4)(run_modes, "micro_batch")
    for (params, calls, kept), (other, other_calls, other_kept) in zip(at_step, at_micro_batch, strict=True):
        assert_close(other, params, rtol=1e-5, atol=1e-6)
        assert calls == [] and other_calls == ["reduce_scatter_tensor"] * 4  # two leaves, two micro-batches
        assert kept == {"w": 24, "experts.up": 12}
        assert other_kept["w"] <= 8 and other_kept["experts.up"] == 6


def norm_of(leaves):
    """Run global_norm on leaves given as (local tensor by rank, mesh shape, placements, global shape)."""
    grads = {}
    for name, (locals_, mesh_shape, placements, shape, dtype) in leaves.items():
        mesh = init_device_mesh("cpu", mesh_shape)
        x = torch.tensor(locals_[dist.get_rank()], dtype=dtype)
        x = x.reshape(-1, *shape[1:]) if shape else x
        grads[name] = DTensor.from_local(
            x, mesh, placements, run_check=False, shape=torch.Size(shape), stride=torch.empty(shape).stride()
        )
    with Collectives() as seen:
        norm = global_norm(TensorDict(grads))
    return norm.item(), norm.dtype, [name for name, *_ in seen.calls]


@pytest.mark.parametrize(
    "dtypes",
    [("float32", "float32"), ("bfloat16", "bfloat16"), ("bfloat16", "float32"), ("float32", "float64")],
)
@pytest.mark.parametrize("layout_of", ["one leaf", "leaf by rank", "replicated beside"])
def test_ranks_with_gradients_2_4_and_4_8_agree_on_10(dtypes, layout_of):
    a, b = (getattr(torch, dtype) for dtype in dtypes)
    by_rank = [[2.0, 4.0], [4.0, 8.0]]
    leaves = {
        "one leaf": {"x": (by_rank, (2,), [Shard(0)], (4,), a)},
        # Each rank has a leaf of its own, of which the other holds nothing.
        "leaf by rank": {
            "x": ([[2.0, 4.0], []], (2,), [Shard(0)], (2,), a),
            "y": ([[], [4.0, 8.0]], (2,), [Shard(0)], (2,), b),
        },
        # sqrt(6^2 + 8^2), of a copied leaf and one with copies along one of two axes.
        "replicated beside": {
            "x": ([[6.0], [6.0]], (2,), [Replicate()], (1,), a),
            "y": ([[8.0], [8.0]], (2, 1), [Replicate(), Shard(0)], (1,), b),
        },
    }[layout_of]
    for norm, dtype, calls in ranks(2)(norm_of, leaves):
        assert norm == pytest.approx(10, rel=1e-6) and calls == ["all_reduce"]
        assert dtype == (
            torch.float64 if torch.float64 in {leaf[-1] for leaf in leaves.values()} else torch.float32
        )


@pytest.mark.parametrize(("edp", "ep"), [(2, 2), (4, 1), (1, 4), (4, 2)])
def test_the_norm_is_the_same_on_every_layout(edp, ep):
    def fn():
        mesh = make_mesh(edp=edp, ep=ep)
        optimizer = shard_optimizer(subtract(), reduce="micro_batch", mesh=mesh)
        grads = {name: optimizer.on_grad(name, g) for name, g in named(share(mesh, 0)).items()}
        whole = {name: g.redistribute(placements=layout(name, mesh)[1]) for name, g in grads.items()}
        return (
            global_norm(nested(grads)),
            global_norm(nested(whole)),
            global_norm(nested(whole), mesh=data_mesh(mesh)),
        )

    want = torch.cat([g.double().reshape(-1) for g in summed(edp, ep, 0).values()]).norm().item()
    for norms in ranks(edp * ep)(fn):
        assert [norm.item() for norm in norms] == pytest.approx([want] * 3, rel=1e-6)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("leaf", ["layers.0.norm", "layers.0.moe.experts.up"])
def test_a_bad_gradient_on_one_rank_skips_the_step_on_all(bad, leaf):
    def fn(seen_bad):
        mesh = make_mesh(edp=2, ep=2)
        params = distribute(nested(random_leaves(-1)), mesh)
        optimizer = shard_optimizer(chain(clip_by_global_norm(1.0), adamw(1e-2, weight_decay=0.1)), mesh=mesh)
        state = optimizer.init(params)
        for step in range(3):
            if step == 2 and seen_bad:
                grads = share(mesh, 7)
                if dist.get_rank() == 3:
                    named(grads)[leaf].to_local().view(-1)[0] = bad
                before, before_state = clone(params), clone(state)
                optimizer.update(grads, state, params)
                assert_close(full(params), full(before), **EXACT)
                changed = [
                    n
                    for (n, _, x), (_, _, y) in zip(each(state), each(before_state), strict=True)
                    if not x.equal(y)
                ]
                assert sorted(changed) == ["inner.0.norm", "inner.0.skipped"]
                assert state["inner", "0", "skipped"] == 1 and state["inner", "1", "step"] == 2
            optimizer.update(share(mesh, step), state, params)
        return full(params)

    for got, want in zip(ranks(4)(fn, True), ranks(4)(fn, False), strict=True):
        assert_close(got, want, **EXACT)


def test_a_fake_group_of_512_ranks_runs_an_update_without_reading_a_value():
    def placed(mesh, name, shape, grad=False):
        on, placements = layout(name, mesh)
        held = (shape[0] // 8, *shape[1:]) if "experts" in name else shape
        if grad:
            placements = [Partial() if p.is_replicate() else p for p in placements]
        stride = torch.empty(shape).stride()
        return DTensor.from_local(
            torch.ones(held), on, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def fn():
        dist.destroy_process_group()
        dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=512)
        mesh = make_mesh(edp=64, ep=8)
        data_mesh(mesh)
        shapes = {name: (8, *shape[1:]) if shape else () for name, shape in SHAPES.items()}
        schedule = warmup_cosine(1.0, warmup_steps=1, total_steps=9)
        optimizer = shard_optimizer(chain(clip_by_global_norm(1.0), adamw(schedule)), mesh=mesh)
        with FakeTensorMode(), Collectives() as seen:
            params, grads = (
                nested({name: placed(mesh, name, shape, grad) for name, shape in shapes.items()})
                for grad in (False, True)
            )
            optimizer.update(grads, optimizer.init(params), params)
        return [name for name, *_ in seen.calls]

    (calls,) = ranks(1)(fn)
    assert calls.count("reduce_scatter_tensor") == 2 and calls.count("all_gather_into_tensor") == 2


def wrong_calls():
    mesh = make_mesh(edp=2, ep=1)
    dp = data_mesh(mesh)
    leaves = {"w": torch.ones(4, 3), "experts.up": torch.ones(2, 4)}
    good = distribute(nested(leaves), mesh)
    optimizer = shard_optimizer(chain(clip_by_global_norm(1.0), adamw(1e-2)), mesh=mesh)
    alone = init_device_mesh("cpu", (2,), mesh_dim_names=("alone",))
    placed = lambda x, on, *where: DTensor.from_local(x, on, where, run_check=False)  # noqa: E731

    def grads(**changes):
        out = share(mesh, 0, {n: tuple(x.shape) for n, x in leaves.items()})
        for name, g in changes.items():
            out.pop(name) if g is None else out.set(name, g)
        return out

    def update(grads, params=good, state=None, optimizer=optimizer):
        return optimizer.update(grads, optimizer.init(params) if state is None else state, params)

    of_rank_0 = placed(
        torch.ones(2), init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))["b"], Replicate()
    )
    shards = shard_optimizer(subtract(), reduce="micro_batch", mesh=mesh)
    other_state = shard_optimizer(chain(clip_by_global_norm(1.0), adamw(1e-2)), mesh=None).init(
        nested(leaves)
    )
    return {
        "missing: ['w'], not a parameter: []": lambda: update(grads(w=None)),
        "missing: [], not a parameter: ['x']": lambda: update(grads(x=named(grads())["w"])),
        "got (3, 4) for w, which has (4, 3)": lambda: update(
            grads(w=placed(torch.ones(3, 4), dp, Partial()))
        ),
        "(Shard(dim=0),) (summed), on the parameter's mesh, got (Replicate(),)": lambda: update(
            grads(w=placed(torch.ones(4, 3), dp, Replicate()))
        ),
        "got (Partial(sum),) on axes ('alone',)": lambda: update(
            grads(w=placed(torch.ones(4, 3), alone, Partial()))
        ),
        "got (Partial(avg),)": lambda: update(grads(w=placed(torch.ones(4, 3), dp, Partial("avg")))),
        "(summed), on the parameter's mesh, got a plain tensor": lambda: update(grads(w=torch.ones(4, 3))),
        "needs DTensors on a mesh, got a plain tensor for w": lambda: optimizer.init(
            nested({"w": torch.ones(2)})
        ),
        "needs a mesh with all ranks that hold w": lambda: shard_optimizer(subtract()).init(good),
        "the state that its init made": lambda: update(grads(), state=other_state),
        "needs summed gradients, got (Partial(sum),) for w": lambda: global_norm(grads()),
        "put the clip inside shard_optimizer": lambda: chain(clip_by_global_norm(1.0), optimizer).update(
            grads(), chain(clip_by_global_norm(1.0), optimizer).init(good), good
        ),
        "got plain tensors for w": lambda: global_norm(TensorDict({"w": torch.ones(2), "x": good["w"]})),
        "on a mesh, got plain tensors for w": lambda: global_norm(TensorDict({"w": torch.ones(2)}), mesh=dp),
        "mesh of all ranks that hold gradients": lambda: global_norm(
            TensorDict({"w": of_rank_0, "x": good["w"]})
        ),
        "gradients placed like the parameters": lambda: adamw(1e-2).update(
            grads(), adamw(1e-2).init(good), good
        ),
        "mesh, got (Replicate(),)": lambda: shards.on_grad("w", good["w"]),
        "mesh, got (Partial(avg),)": lambda: shards.on_grad(
            "w", placed(torch.ones(4, 3), dp, Partial("avg"))
        ),
        "pass on_grad=optimizer.on_grad to accumulate": lambda: update(grads(), optimizer=shards),
        "a plain tensor for y": lambda: shards.on_grad("y", torch.ones(2)),
    }


def test_wrong_input_is_an_error_before_any_collective():
    def fn():
        for message, call in wrong_calls().items():
            with Collectives() as seen, pytest.raises(ValueError) as error:
                call()
            assert message in str(error.value), (message, str(error.value))
            assert seen.calls == [], message

    ranks(2)(fn)


def test_a_leaf_on_two_replicated_axes_is_refused():
    def fn():
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep"))
        x = DTensor.from_local(torch.ones(4, 2), mesh, (Replicate(), Replicate()), run_check=False)
        with pytest.raises(ValueError, match=r"replicated over one mesh axis at most, got w.*flatten"):
            shard_optimizer(subtract(), mesh=mesh).init(TensorDict({"w": x}))

    ranks(4)(fn)


def test_a_second_axis_of_one_rank_does_not_count():
    def fn():
        mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("edp", "ep"))
        x = DTensor.from_local(torch.ones(4, 2), mesh, (Replicate(), Replicate()), run_check=False)
        return shard_optimizer(subtract(), mesh=mesh).init(TensorDict({"w": x}))["master", "w"].placements

    assert ranks(2)(fn) == [(Shard(1), Shard(0))] * 2
