"""The contract of a transport, checked on ranks."""

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from moekit._dispatch import Via, combine, dispatch
from moekit._route import Routing
from moekit.kernels.permute import count_experts
from moekit.testing._kernels import relative_error
from moekit.testing._ranks import ranks

CASES = {  # name: (tokens on rank i, experts per rank, top_k, how experts are chosen)
    "even": (lambda i: 6, 2, 2, "random"),
    "top_1": (lambda i: 5, 2, 1, "random"),
    "a rank without tokens": (lambda i: 7 * (i % 2), 2, 2, "random"),
    "no tokens at all": (lambda i: 0, 2, 2, "random"),
    "one expert takes all": (lambda i: 3 + i, 2, 1, "last"),
    "experts without tokens": (lambda i: 4, 8, 2, "first two"),
}
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}


def check_transport(
    transport: Via | Callable[..., Via],
    *,
    n_ranks: Sequence[int] = (1, 2, 4),
    dtypes: Sequence[torch.dtype] = tuple(TOLERANCE),
    d_model: int = 16,
    device: str = "cpu",
) -> None:
    """Check that a transport keeps its contract, on ranks of this machine.

    In every case the rows must be in the order (expert, source rank, token), the offsets must be int32 ends
    of each expert's rows, and after experts that multiply by a factor of their own, outputs, gradients of the
    tokens and of the weights, and gradients of the experts' factors must be those of the plain sum; twice in
    a row with the same bits. Cases: uneven tokens, ranks and experts without any, one expert that takes all.
    On an even number of ranks also, in the first dtype, with ``mesh["ep"]`` of a mesh (2, n/2): there ranks
    and groups are not those of the world.

    Parameters
    ----------
    transport : str, Transport or callable
        As ``via`` of :func:`moekit.dispatch`, or what makes it for a case, called with a mesh, ``n_tokens``,
        ``d_model``, ``n_experts``, ``top_k``, ``dtype`` and ``device``, as :class:`moekit.rowwise` is.
    n_ranks : sequence of int
        Numbers of ranks; with 1, ``mesh=None`` is checked as well.
    dtypes : sequence of torch.dtype
        Of float64, float32 and bfloat16, those that the transport takes.
    d_model : int
        Width of the tokens.
    device : {"cpu", "cuda", "cuda:0", ...}
        As for :class:`moekit.testing.ranks`.

    Raises
    ------
    RuntimeError
        Naming the ranks, with the AssertionError that says which case and what differs, or what the transport
        raised, and in which case.
    """
    for n in n_ranks:
        ranks(n, device=device)(_check, transport, tuple(dtypes), d_model, device)


def _check(
    transport: Via | Callable[..., Via], dtypes: tuple[torch.dtype, ...], d_model: int, device: str
) -> None:
    world, kind = dist.get_world_size(), torch.device(device).type
    meshes: list = [(init_device_mesh(kind, (world,), mesh_dim_names=("ep",)), "ep", dtypes)]
    if world == 1:
        meshes.append((None, "None", dtypes))
    if world % 2 == 0:
        mesh = init_device_mesh(kind, (2, world // 2), mesh_dim_names=("edp", "ep"))
        meshes.append((mesh["ep"], f"ep of (edp=2, ep={world // 2})", dtypes[:1]))
    for mesh, label, of_mesh in meshes:
        for case, (n_tokens, per_rank, top_k, choice) in CASES.items():
            for dtype in of_mesh:
                n_experts = per_rank * (1 if mesh is None else mesh.size())
                ids = _choose(choice, n_tokens(dist.get_rank()), n_experts, top_k).to(device)
                where = f"{case}, {dtype}, {world} ranks, mesh={label}"
                sizes = dict(d_model=d_model, n_experts=n_experts, top_k=top_k, dtype=dtype, device=device)
                most = max(1, *map(n_tokens, range(world)))
                try:
                    via = transport
                    if callable(via):
                        via = via(mesh, n_tokens=most, **sizes)
                    first, second = (_run(via, ids, n_experts, dtype, d_model, mesh, where) for _ in range(2))
                except Exception as error:
                    error.add_note(f"check_transport: {where}")
                    raise
                for name, got in first.items():
                    assert torch.equal(got, second[name]), f"{name} differs the second time ({where})"


def _choose(choice: str, tokens: int, n_experts: int, top_k: int) -> Tensor:
    if choice == "last":
        return torch.full((tokens, top_k), n_experts - 1)
    if choice == "first two":
        return torch.arange(top_k).expand(tokens, top_k).contiguous()
    generator = torch.Generator().manual_seed(dist.get_rank())
    return torch.rand(tokens, n_experts, generator=generator).topk(top_k, dim=-1).indices


def _run(
    transport: Via,
    ids: Tensor,
    n_experts: int,
    dtype: torch.dtype,
    d_model: int,
    mesh: DeviceMesh | None,
    where: str,
) -> dict[str, Tensor]:
    """Check one case; return what came, by name."""

    def check(name: str, got: Tensor, want: Tensor) -> None:
        shapes = f"shape {tuple(got.shape)}, wanted {tuple(want.shape)}"
        assert got.shape == want.shape, f"{name} ({where}): {shapes}"
        error = relative_error(got.double(), want.double())
        assert error <= TOLERANCE[dtype], f"{name} ({where}): relative error {error:.1e}"

    rank, size = (0, 1) if mesh is None else (mesh.get_local_rank(), mesh.size())
    group = None if mesh is None else mesh.get_group()
    generator = torch.Generator().manual_seed(100 + dist.get_rank())
    x = torch.randn(len(ids), d_model, generator=generator, dtype=torch.float64).to(ids.device, dtype)
    x[:, 0] = (
        torch.arange(len(ids), device=ids.device) + 32 * dist.get_rank()
    ) / 256  # says whence a row came; exact in bfloat16
    above = torch.promote_types(dtype, torch.float32)
    weights = torch.rand(ids.shape, generator=generator, dtype=torch.float64).to(ids.device, above)
    out_grad = torch.randn(x.shape, generator=generator, dtype=torch.float64).to(ids.device, dtype)
    factors = 1 + torch.arange(n_experts, dtype=above, device=ids.device) / 8
    x, weights, factors = (z.requires_grad_() for z in (x, weights, factors))

    scores = torch.zeros(len(ids), n_experts, dtype=above, device=ids.device)
    routing = Routing(
        weights=weights, expert_ids=ids, counts=count_experts(ids, n_experts), logits=scores, scores=scores
    )
    sent = dispatch(x, routing, via=transport, mesh=mesh)

    everyone: list = [None] * size
    dist.all_gather_object(everyone, (ids.cpu(), x.detach()[:, 0].cpu()), group=group)
    e = n_experts // size
    mine = range(rank * e, (rank + 1) * e)
    origins = [torch.cat([xs[(of == i).nonzero()[:, 0]] for of, xs in everyone]) for i in mine]
    sizes = torch.tensor([len(origin) for origin in origins])
    offsets, ends = sent.offsets, sizes.cumsum(0)
    assert offsets.dtype == torch.int32, f"offsets ({where}): {offsets.dtype}, wanted torch.int32"
    assert offsets.tolist() == ends.tolist(), f"offsets ({where}): {offsets.tolist()}, wanted {ends.tolist()}"
    valid = int(ends[-1])
    dropped = 0 if sent.dropped is None else int(sent.dropped.sum())
    assert not dropped, f"dropped ({where}): {dropped} routes, wanted none"
    check("order of rows", sent.rows.detach()[:valid, 0].cpu(), torch.cat(origins))

    experts = torch.tensor(mine).repeat_interleave(sizes).to(ids.device)
    tail = sent.rows.new_full((len(sent.rows) - valid, d_model), torch.nan)  # nobody may read these
    # In float32 at least, else the sum over d of a wide token's products says little in bfloat16.
    rows = torch.cat([(sent.rows[:valid].to(above) * factors[experts, None]).to(dtype), tail])
    y = combine(rows, sent)
    assert sent.rows.dtype == y.dtype == dtype, f"dtype ({where}): {sent.rows.dtype} and {y.dtype}"
    inputs = {"tokens": x, "weights": weights, "rows": factors}  # factors: by way of the rows
    assert y.requires_grad, f"output ({where}): nothing to differentiate, wanted {', '.join(inputs)}"
    grads = torch.autograd.grad(y, tuple(inputs.values()), out_grad, allow_unused=True)
    for name, grad in zip(inputs, grads, strict=True):
        assert grad is not None, f"gradient of the {name} ({where}): none, the output does not depend on them"

    x64, w64, f64 = (z.detach().double().requires_grad_() for z in (x, weights, factors))
    want = (x64[:, None] * (w64 * f64[ids])[..., None]).sum(1)
    want_grads = torch.autograd.grad(want, (x64, w64, f64), out_grad.double())
    dist.all_reduce(want_grads[2], group=group)
    check("output", y.detach(), want.detach())
    check("gradient of the tokens", grads[0], want_grads[0])
    check("gradient of the weights", grads[1], want_grads[1])
    # Of all experts at once: one whose rows cancel out has a gradient near zero, and any relative error.
    of_experts = grads[2].clone()
    dist.all_reduce(of_experts, group=group)
    check("gradient of the experts", of_experts, want_grads[2])
    names = ("rows", "output", "gradient of the tokens", "gradient of the weights", "gradient of the experts")
    return dict(zip(names, (sent.rows.detach()[:valid], y.detach(), *grads), strict=True))
