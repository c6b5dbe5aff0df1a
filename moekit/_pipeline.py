"""The pipeline as a transform: stages on different ranks, run in the order of a schedule."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map, tree_unflatten

from moekit._split_backward import backward_of_input, keeps_what_it_saves
from moekit.batch import split_for
from moekit.mesh import check_one_axis
from moekit.schedules import Op, Schedule, lower
from moekit.transforms import GradientSums, OnGrad, check_reached, differentiable
from moekit.tree import add_up


def pipeline(
    stages: Sequence[Callable],
    *,
    schedule: Schedule,
    boundary: Callable[[Any], Tensor],
    on_grad: OnGrad | None = None,
    mesh: DeviceMesh | None = None,
) -> Callable:
    """Return a function that gives this rank's share of a loss and its gradients, as ``accumulate`` does.

    Micro-batches pass from stage to stage, each on the rank that the schedule says; ranks compute at the same
    time. Losses are shares of the global batch's: what all ranks return adds up to the loss.

    Parameters
    ----------
    stages : sequence of callable
        All stages of the model, in order: ``stage(params, x, micro_batch, **kwargs) -> (y, loss, aux)``.
        ``x`` is what the stage before returned (None for the first), ``y`` what the next one reads (None from
        the last), ``loss`` the stage's own 0-d share of the loss, ``aux`` a tree of tensors that add up. This
        rank calls its own alone, e.g. ``partial(moekit.model.stage_loss, config=..., stage=...)``.
    schedule : Schedule
        From :mod:`moekit.schedules`; it holds the number of micro-batches. One that splits backwards into
        the gradient of ``x`` (I) and those of weights (W) keeps all that backward reads until W, and needs
        stages, but for the first, without recomputation, saved-tensor hooks or ``torch.compile``, and
        without custom autograd functions that read both what comes from ``x`` and a weight: their backward
        cannot leave a weight's gradient for later. One that computes both at once anyway says so by
        ``gives_gradients_together = True`` on its class, as :func:`moekit.losses.cross_entropy` does; its
        weights' gradients are then complete in I.
    boundary : callable
        ``boundary(micro_batch)`` returns an empty tensor of the shape, dtype and device of what travels
        between stages.
    on_grad : callable, optional
        As for :func:`moekit.accumulate`.
    mesh : DeviceMesh, optional
        The one-axis mesh of the pipeline, ``mesh["pp"]``; ``None`` runs all stages here.

    Returns
    -------
    callable
        ``run(params, batch, into=None, **kwargs) -> ((loss, aux), grads)``, as from `moekit.accumulate`:
        ``params`` and ``grads`` are those of this rank's stages, the gradients float32 sums over its
        micro-batches. Collective over ``mesh``: sends and receives between neighbouring stages.

    Raises
    ------
    ValueError
        At once, when stages or ranks are not those of the schedule; when called, for a batch that the number
        of micro-batches does not divide, a stage whose ``y`` is not as ``boundary`` says or is missing, and
        a parameter that no gradient reaches, and a stage whose backward the schedule splits and that cannot
        be.

    References
    ----------
    Huang et al., GPipe, 2018. https://arxiv.org/abs/1811.06965
    """
    check_one_axis("pipeline", mesh, "pp")
    n_ranks = 1 if mesh is None else mesh.size()
    if schedule.n_ranks != n_ranks or schedule.n_stages != len(stages):
        raise ValueError(
            f"pipeline needs a schedule of its {n_ranks} ranks and {len(stages)} stages, got one of "
            f"{schedule.n_ranks} ranks and {schedule.n_stages} stages"
        )
    rank = 0 if mesh is None else mesh.get_local_rank()
    ops = lower(schedule)[rank]

    def run(params: TensorDict, batch: Any, *, into: TensorDict | None = None, **kwargs: Any):
        sums = GradientSums("pipeline", params, on_grad, into)
        parts = split_for("pipeline", "n_microbatches", batch, schedule.n_microbatches)
        here = _Rank(stages, schedule, boundary, mesh, params, parts, sums, kwargs)
        for op in ops:
            here.run(op)
        here.finish()
        check_reached("pipeline", sums.names, sums.reached)
        assert here.total is not None  # each rank has a stage
        return tree_unflatten(*here.total), sums.tree()

    return run


class _Rank:
    """What a rank holds while it goes through its operations."""

    def __init__(self, stages, schedule, boundary, mesh, params, parts, sums, kwargs):
        self.stages, self.schedule, self.mesh, self.boundary = stages, schedule, mesh, boundary
        self.params, self.parts, self.sums, self.kwargs = params, parts, sums, kwargs
        self.inputs: dict[tuple[str, int, int], Tensor] = {}  # of an operation: x of F, gradient of y of B
        self.awaited: dict[tuple[str, int, int], Any] = {}  # the receive that fills it
        self.outputs: dict[tuple[str, int, int], Tensor] = {}  # to be sent
        self.graphs: dict[tuple[int, int], tuple] = {}  # between a forward and its backward
        self.later: dict[tuple[int, int], Callable[[], None]] = {}  # between I and W
        self.sends: list[tuple[Any, Tensor]] = []
        self.total = None

    def run(self, op: Op) -> None:
        stage, i = op.stage, op.micro_batch
        if op.kind == "F":
            self.forward(stage, i)
        elif op.kind == "B":
            self.backward(stage, i)
        elif op.kind == "I":
            self.backward_of_input(stage, i)
        elif op.kind == "W":
            self.backward_of_weights(stage, i)
        elif op.kind.startswith("send"):
            kind, to = ("F", stage + 1) if op.kind == "send_F" else ("B", stage - 1)
            x = self.outputs.pop((kind, stage, i))
            self.sends.append((dist.isend(x, self.peer(to), self.group), x))
            self.sends = [(work, x) for work, x in self.sends if not work.is_completed()]
        else:
            kind, source = ("F", stage - 1) if op.kind == "recv_F" else ("B", stage + 1)
            x = self.inputs[kind, stage, i] = self.boundary(self.parts[i])
            self.awaited[kind, stage, i] = dist.irecv(x, self.peer(source), self.group)

    def finish(self) -> None:
        for work, _ in self.sends:
            work.wait()

    def forward(self, stage: int, i: int) -> None:
        x = self.take("F", stage, i)
        if x is not None:
            x = x.detach().requires_grad_()
        fresh = differentiable("pipeline", self.params, self.sums.add)
        split = x is not None and self.schedule.splits(stage, i)
        with torch.enable_grad(), keeps_what_it_saves(_who(stage)) if split else nullcontext():
            out = self.stages[stage](fresh, x, self.parts[i], **self.kwargs)
        y, loss, aux = self.check(out, stage, i)
        self.count((loss, aux))
        if y is not None:
            self.give("F", stage, stage + 1, i, y.detach())
        self.graphs[stage, i] = fresh, x, y, loss

    def backward(self, stage: int, i: int) -> None:
        weights, x, roots = self.roots(stage, i)
        if roots:
            tensors, grads = zip(*roots, strict=True)
            torch.autograd.backward(tensors, grads, inputs=weights if x is None else [*weights, x])
        self.sums.land()
        self.give_gradient(x, stage, i)

    def backward_of_input(self, stage: int, i: int) -> None:
        if stage == 0:
            return  # it has no input; W does all
        weights, x, roots = self.roots(stage, i)
        if roots:
            self.later[stage, i] = backward_of_input(_who(stage), roots, x, weights)
        self.sums.land()
        self.give_gradient(x, stage, i)

    def backward_of_weights(self, stage: int, i: int) -> None:
        if stage == 0:
            return self.backward(stage, i)
        if (rest := self.later.pop((stage, i), None)) is not None:
            rest()
        self.sums.land()

    def roots(self, stage: int, i: int) -> tuple[list[Tensor], Any, list[tuple[Tensor, Tensor | None]]]:
        """Return what to differentiate by, and what, with the gradient that has come for it."""
        fresh, x, y, loss = self.graphs.pop((stage, i))
        roots = [(y, self.take("B", stage, i)), (loss, None)]
        roots = [(root, grad) for root, grad in roots if root is not None and root.requires_grad]
        return list(fresh.values(True, True)), x, roots

    def give_gradient(self, x: Tensor | None, stage: int, i: int) -> None:
        if x is not None:
            if x.grad is None:
                raise ValueError(f"pipeline needs stages that read their x, stage {stage} does not")
            self.give("B", stage, stage - 1, i, x.grad)

    def take(self, kind: str, stage: int, i: int) -> Tensor | None:
        """Return what an operation reads, once it is here."""
        if work := self.awaited.pop((kind, stage, i), None):
            work.wait()
        return self.inputs.pop((kind, stage, i), None)

    def give(self, kind: str, stage: int, to: int, i: int, x: Tensor) -> None:
        """Hand a result to a stage of this rank, or keep it until it is sent."""
        if self.schedule.rank_of[to] == self.schedule.rank_of[stage]:
            self.inputs[kind, to, i] = x
        else:
            self.outputs[kind, stage, i] = x.contiguous()

    def count(self, value: Any) -> None:
        """Add up loss and aux of stages and micro-batches."""
        self.total = add_up("pipeline", self.total, tree_map(_detached, value))

    def check(self, out: Any, stage: int, i: int) -> tuple[Tensor | None, Tensor, Any]:
        if not (isinstance(out, tuple) and len(out) == 3):
            raise ValueError(
                f"pipeline needs (y, loss, aux) of each stage, stage {stage} returned {_kind(out)}"
            )
        y, loss, aux = out
        if not isinstance(loss, Tensor) or loss.ndim:
            raise ValueError(f"pipeline needs a 0-d loss tensor, stage {stage} returned {_kind(loss)}")
        last = stage == self.schedule.n_stages - 1
        like = None if last else self.boundary(self.parts[i])
        if _kind(y) != _kind(like):
            raise ValueError(
                f"pipeline needs y of stage {stage} to be {_kind(like)}, as boundary says, got {_kind(y)}"
            )
        return y, loss, aux

    @property
    def group(self) -> Any:
        return self.mesh.get_group()

    def peer(self, stage: int) -> int:
        return dist.get_global_rank(self.group, self.schedule.rank_of[stage])


def _who(stage: int) -> str:
    return f"pipeline, which splits the backward of stage {stage} into I and W as its schedule says,"


def _kind(x: Any) -> str:
    return f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__


def _detached(x: Any) -> Any:
    return x.detach() if isinstance(x, Tensor) else x
