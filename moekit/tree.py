"""Trees of parameters by dotted name, and what this rank holds of a leaf."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, keystr, tree_flatten_with_path, tree_unflatten


def named(tree: TensorDict) -> dict[str, Tensor]:
    """Return the leaves of a nested tree by dotted name, in its order.

    Raises
    ------
    ValueError
        When there is no leaf, or a name has a dot of its own.
    TypeError
        When it is no TensorDict.
    """
    if not isinstance(tree, TensorDict):
        raise TypeError(f"a tree of parameters needs to be a TensorDict, got {type(tree).__name__}; wrap it")
    leaves: dict[str, Any] = {}
    for key, leaf in tree.items(True, True):
        parts = (key,) if isinstance(key, str) else key
        if any("." in part for part in parts):
            raise ValueError(f"a tree needs names without dots, which join its levels, got {parts}")
        leaves[".".join(parts)] = leaf
    if not leaves:
        raise ValueError("a tree of parameters needs at least one tensor, got an empty one")
    return leaves


def nested(leaves: Mapping[str, Any]) -> TensorDict:
    """Return the tree whose leaves have these dotted names."""
    return TensorDict({tuple(name.split(".")): leaf for name, leaf in leaves.items()})


def short_repr(carrier: Any) -> str:
    """Return a dataclass as text, its tensors as dtype and shape; a ``__repr__`` for carriers."""
    held = {f.name: getattr(carrier, f.name) for f in fields(carrier) if f.repr}
    said = (
        f"{name}={str(x.dtype).removeprefix('torch.')} {tuple(x.shape)}"
        if isinstance(x, Tensor)
        else f"{name}={x!r}"
        for name, x in held.items()
    )
    return f"{type(carrier).__name__}({', '.join(said)})"


def map_named(fn: Callable[[str, Tensor], Any], tree: TensorDict) -> TensorDict:
    """Return the tree of ``fn(name, leaf)``."""
    return nested({name: fn(name, leaf) for name, leaf in named(tree).items()})


def held(x: Tensor) -> Tensor:
    """Return this rank's part of a leaf as a plain tensor; waits for the collective that makes it, if any.

    For code that is not differentiated, as an optimizer is; elsewhere see :func:`moekit.mesh.local`.
    """
    x = x.to_local() if isinstance(x, DTensor) else x
    return x.wait() if isinstance(x, AsyncCollectiveTensor) else x


def on_mesh(local: Tensor, *, like: Tensor, placements: Any = None) -> Tensor:
    """Wrap this rank's part of a leaf that has the shape and mesh of ``like``; no communication."""
    if not isinstance(like, DTensor):
        return local
    where = like.placements if placements is None else placements
    return DTensor.from_local(
        local, like.device_mesh, where, run_check=False, shape=like.shape, stride=like.stride()
    )


def in_turn(x: Tensor) -> bool:
    """Whether the collectives of a tensor are waited for one by one: on CPUs.

    With two in flight gloo's threads free memory twice, once in some thousand steps (seen on torch 2.13).
    """
    return x.device.type == "cpu"


def check_names(who: str, what: str, tree: Mapping[str, Any] | TensorDict, *names: str) -> None:
    """Raise ``ValueError`` where a tree lacks one of these names."""
    if not all(name in tree.keys() for name in names):
        got = ", ".join(map(str, tree.keys())) or "none"
        raise ValueError(f"{who} needs {what} with {', '.join(names)}, got {got}")


def is_hollow(x: Tensor) -> bool:
    """Whether a parameter has no memory; see :func:`moekit.precision.hollow`."""
    return x.numel() > 1 and not any(held(x).stride())


def check_not_hollow(who: str, **weights: Tensor) -> None:
    """Raise ``ValueError`` for weights without values."""
    for name, w in weights.items():
        if is_hollow(w):
            raise ValueError(
                f"{who} needs {name} with values, got a hollow one; pass precision=round_weights(masters, "
                "policy)"
            )


def has_values(x: Tensor) -> bool:
    """Whether a tensor has numbers: one on the meta device, or of a dry run, has a shape alone."""
    return not (x.is_meta or isinstance(x, FakeTensor))


def check_values(holds: Tensor, who: str, needs: str, got: Callable[[], Any]) -> None:
    """Raise ``ValueError`` where a condition on values does not hold; on a device, without waiting for it.

    Parameters
    ----------
    holds : Tensor
        0-d bool.
    who, needs : str
        Who needs what.
    got : callable
        Says what came, where the values are on the host.
    """
    if not has_values(holds) or torch.compiler.is_compiling():
        return
    if holds.device.type != "cpu":
        torch._assert_async(holds, f"{who} needs {needs}")
    elif not holds:
        raise ValueError(f"{who} needs {needs}, got {got()}")


def at_least_float32(x: Tensor) -> Tensor:
    """Return a leaf in float32, or in float64 if it is; a DTensor's own ``.to`` may sum what is Partial."""
    return on_mesh(held(x).to(torch.promote_types(x.dtype, torch.float32)), like=x)


def summands(who: str, tree: Any) -> tuple[list[Tensor], TreeSpec]:
    """Flatten a pytree whose leaves are to be summed over ranks or micro-batches.

    Keys of dicts come in ascending order, however they were put in, so that ranks sum the same leaves.

    Raises
    ------
    TypeError
        For a leaf that is no tensor.
    """
    leaves, spec = tree_flatten_with_path(_in_order(tree))
    if other := [f"{type(x).__name__} at {keystr(path)}" for path, x in leaves if not isinstance(x, Tensor)]:
        raise TypeError(
            f"{who} needs tensors, which it sums, got {', '.join(other)}; leave them out or make them tensors"
        )
    return [x for _, x in leaves], spec


def _in_order(tree: Any) -> Any:
    if type(tree) is dict:
        return {key: _in_order(tree[key]) for key in sorted(tree, key=str)}
    if type(tree) in (list, tuple):
        return type(tree)(map(_in_order, tree))
    return tree


def add_up(who: str, total: tuple[list[Tensor], TreeSpec] | None, tree: Any) -> tuple[list[Tensor], TreeSpec]:
    """Add the tensors of a tree to a flattened total.

    Raises
    ------
    ValueError
        Unless the tree has the structure and shapes of those before it.
    """
    leaves, spec = summands(who, tree)
    if total is None:
        return leaves, spec
    got, before = ([tuple(x.shape) for x in part] for part in (leaves, total[0]))
    if spec != total[1] or got != before:
        raise ValueError(
            f"{who} needs aux of the same names and shapes from all micro-batches and stages, got "
            f"{tree_unflatten(got, spec)} after {tree_unflatten(before, total[1])}"
        )
    return [a + b for a, b in zip(total[0], leaves, strict=True)], spec
