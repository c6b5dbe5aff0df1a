"""A backward in two parts: the gradient of a stage's input, and later those of its weights.

Nodes of the autograd graph that lead to the input x form a path back to it; weights hang on its side. The
first part walks this path, which leaves weights out, and notes the gradient that arrives at each node where a
weight joins it. The second part starts from there, so it does what is left: at each joint the product that
gives the weight's gradient, and the way from there to the weight.
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, get_gradient_edge


@contextmanager
def keeps_what_it_saves(who: str) -> Iterator[None]:
    """Refuse what packs or recomputes the tensors that a backward reads: each part would do it again.

    Raises
    ------
    ValueError
        Where checkpoints or saved-tensor hooks are used inside.
    """
    message = (
        f"{who} needs stages that keep what their backward reads, got one with remat, torch.utils.checkpoint "
        "or saved-tensor hooks, which each part would run again; leave them out, or take a schedule whose "
        "backwards are whole, e.g. one_f_one_b"
    )
    try:
        with torch.autograd.graph.disable_saved_tensors_hooks(message):
            yield
    except RuntimeError as error:
        if message in str(error):
            raise ValueError(message) from error
        raise


def backward_of_input(
    who: str, roots: Sequence[tuple[Tensor, Tensor | None]], x: Tensor, weights: Sequence[Tensor]
) -> Callable[[], None]:
    """Leave the gradient of ``x`` in ``x.grad``, and return the function that differentiates the weights.

    Both parts accumulate as ``torch.autograd.backward`` does, so hooks of a weight run once, with its whole
    gradient: in the second part, but for weights that go into a function that gives its gradients together
    (`gives_gradients_together`). The order of the weights follows from the graph, so it is the same on ranks
    that ran the same stage, and hooks may communicate. The graph is freed with the function.

    A node that joins several weights, or weights read in several places, are differentiated together: in
    between, the path is walked again for those read at different depths of it.

    Raises
    ------
    ValueError
        When a custom autograd function, or a compiled one, joins x and a weight: its backward cannot leave
        either gradient out.
    """
    graph = _Graph([get_gradient_edge(root) for root, _ in roots], x, weights)
    early: dict[int, Tensor] = {}  # by id
    for node in graph.joints:
        if isinstance(node, BackwardCFunction):
            if not getattr(getattr(node, "_forward_cls", None), "gives_gradients_together", False):
                raise ValueError(_cannot_split(who, node))
            early |= {id(w): w for w in graph.weights_of(node)}

    arriving: dict[Any, tuple[Tensor | None, ...]] = {}
    beside = {edge.node for edge in graph.roots if edge.node not in graph.on_path}
    for edge, (root, grad) in zip(graph.roots, roots, strict=True):
        if edge.node in beside:  # it depends on weights alone
            seed = torch.ones_like(root) if grad is None else grad
            arriving[edge.node] = _plus(arriving.get(edge.node), edge.output_nr, seed)
    groups = graph.groups(without=early)
    handles = [
        node.register_prehook(lambda grads, node=node: arriving.__setitem__(node, grads))
        for nodes, _ in groups
        for node in nodes
        if node not in beside
    ]
    try:
        tensors, grads = zip(*roots, strict=True)
        torch.autograd.backward(tensors, grads, inputs=[x, *early.values()], retain_graph=True)
    finally:
        for handle in handles:
            handle.remove()

    def backward_of_weights() -> None:
        while groups:
            nodes, of_group = groups.pop(0)
            grads = {node: arriving.pop(node) for node in nodes if node in arriving}
            _backward_from(grads, of_group, again=beside)

    return backward_of_weights


def _backward_from(grads: dict[Any, tuple], weights: list[Tensor], again: set[Any]) -> None:
    """Differentiate weights, given the gradients that arrive at all nodes where they join the path."""
    # Set at each node: one may lie on the way from another, and hooks of tensors have run once already. On
    # such a way there may be nodes of later groups, never of earlier ones, so a single node frees its own.
    handles = [
        node.register_prehook(lambda _, set_to=set_to: set_to)
        for node, set_to in grads.items()
        if node not in again
    ]
    edges = {
        GradientEdge(node, i): grad
        for node, arrived in grads.items()
        for i, grad in enumerate(arrived)
        if grad is not None
    }
    try:
        if edges:
            torch.autograd.backward(
                tuple(edges), tuple(edges.values()), inputs=weights, retain_graph=len(grads) > 1
            )
    finally:
        for handle in handles:
            handle.remove()


class _Graph:
    """Which nodes lead to x, which to which weights, and where the two part."""

    def __init__(self, roots: list[GradientEdge], x: Tensor, weights: Sequence[Tensor]):
        self.roots = roots
        leaves = {id(w): w for w in weights}
        self.on_path: set[Any] = set()  # looked up, never walked: its order differs between ranks
        self._weights: dict[Any, dict[int, Tensor]] = {}  # of a node beside the path, by id
        self.joints: list[Any] = []
        for node in _post_order(edge.node for edge in roots):
            leaf = node.variable if type(node).__name__ == "AccumulateGrad" else None
            after = [n for n, _ in node.next_functions if n is not None]
            beside: dict[int, Tensor] = {id(leaf): leaf} if leaf is not None and id(leaf) in leaves else {}
            for n in after:
                if n not in self.on_path:
                    beside |= self._weights[n]
            self._weights[node] = beside
            if leaf is x or any(n in self.on_path for n in after):
                self.on_path.add(node)
                if beside:
                    self.joints.append(node)

    def weights_of(self, node: Any) -> list[Tensor]:
        """Return the weights that a node joins, or leads to beside the path."""
        return list(self._weights[node].values())

    def groups(self, *, without: Container[int]) -> list[tuple[list[Any], list[Tensor]]]:
        """Return nodes and weights that belong together, those nearest to the roots first."""
        beside = dict.fromkeys(edge.node for edge in self.roots if edge.node not in self.on_path)
        group_of: dict[int, tuple[dict[Any, None], dict[int, Tensor]]] = {}  # by weight
        for node in [*reversed(self.joints), *beside]:
            nodes, weights = {node: None}, {k: w for k, w in self._weights[node].items() if k not in without}
            for old_nodes, old_weights in [group_of[k] for k in weights if k in group_of]:
                nodes, weights = old_nodes | nodes, old_weights | weights
            group_of |= dict.fromkeys(weights, (nodes, weights))
        unique = {id(nodes): (nodes, weights) for nodes, weights in group_of.values()}
        return [(list(nodes), list(weights.values())) for nodes, weights in unique.values()]


def _post_order(roots: Iterable[Any]) -> Iterator[Any]:
    """Yield every node of the graph once, after all that it leads to."""
    seen: set[Any] = set()
    stack = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if done:
            yield node
        elif node not in seen:
            seen.add(node)
            stack.append((node, True))
            stack += [(n, False) for n, _ in node.next_functions if n is not None]


def _plus(grads: tuple | None, i: int, grad: Tensor) -> tuple:
    """Return gradients of a node's outputs with one more of output ``i``."""
    out: dict[int, Tensor | None] = dict(enumerate(grads or ()))
    before = out.get(i)
    out[i] = grad if before is None else before + grad
    return tuple(out.get(j) for j in range(max(out) + 1))


def _cannot_split(who: str, node: Any) -> str:
    name = type(node).__name__.removesuffix("Backward")
    if name.startswith("CompiledFunction"):
        what, or_else = "a compiled one (torch.compile)", ", or leave it uncompiled"
    else:
        what = f"the custom autograd function {name}"
        or_else = ", or set gives_gradients_together = True on it, where both cost little once one is there"
    return (
        f"{who} needs functions that give the gradient of x without that of a weight, got {what}, which "
        f"reads both; take a schedule whose backwards are whole, e.g. one_f_one_b{or_else}"
    )
