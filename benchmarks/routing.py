"""Which experts the tokens of a benchmark go to: ``--routing random|uniform|dirichlet:A|recorded:FILE``.

``random`` is what each benchmark does by itself. The others, alike in every run:

- ``uniform``: loads equal to within one row (:func:`moekit.route`);
- ``dirichlet:A``: shares of experts drawn from a Dirichlet(A), of each layer others, and the experts of each
  token by these shares (:func:`moekit.balance.draw_experts`);
- ``recorded:FILE``: the first tokens of a run's recording (:func:`moekit.balance.write_recording`), its
  layers in order, with its number of experts and its top-k.
"""

import functools
from typing import NamedTuple

import torch
from einops import rearrange
from torch import Tensor

import moekit as mk
from moekit import balance


class RoutingChoice(NamedTuple):
    """What a ``--routing`` says."""

    kind: str
    concentration: float = 0.0  # of a Dirichlet distribution
    recording: balance.Recording | None = None


@functools.cache
def parse_routing(text: str) -> RoutingChoice:
    """Return what a ``--routing`` says, with its recording read; end the program where it says nothing."""
    kind, _, about = text.partition(":")
    if kind.startswith("dirichlet") and not about:
        kind, about = "dirichlet", kind.removeprefix("dirichlet")  # dirichlet2, as shapes have it
    try:
        if text in ("random", "uniform"):
            return RoutingChoice(text)
        if kind == "dirichlet":
            balance.dirichlet_shares(float(about), 1)  # or it raises
            return RoutingChoice(kind, concentration=float(about))
        if kind == "recorded":
            return RoutingChoice(kind, recording=balance.read_recording(about))
    except (ValueError, OSError) as error:
        raise SystemExit(f"{_KINDS}, got {text!r}: {error}") from None
    raise SystemExit(f"{_KINDS}, got {text!r}")


_KINDS = "a routing is random, uniform, dirichlet:A or recorded:FILE"


def expert_ids(
    text: str, n_tokens: int, *, n_experts: int, top_k: int, device: str, n_layers: int = 1, first: int = 0
) -> Tensor | None:
    """Return the experts of so many tokens from the ``first`` on, (l, t, k) int64; None for ``random``.

    Raises
    ------
    ValueError
        When the recording has other experts, or less tokens or layers.
    """
    routing = parse_routing(text)
    if routing.kind == "random":
        return None
    if routing.recording is not None:
        ids = rearrange(routing.recording.expert_ids, "n b l s k -> l (n b s) k")
        got = dict(n_experts=routing.recording.n_experts, top_k=ids.shape[2])
        if got != dict(n_experts=n_experts, top_k=top_k):
            raise ValueError(
                f"--routing {text} needs {n_experts=}, {top_k=} as its run had, got {got}; measure with "
                f"--top-k {got['top_k']} and {got['n_experts']} experts, or a recording of such a run"
            )
        if len(ids) < n_layers or ids.shape[1] < first + n_tokens:
            raise ValueError(
                f"--routing {text} needs {n_layers} layers of {first + n_tokens} tokens, got {len(ids)} of "
                f"{ids.shape[1]}; record more steps, or measure less"
            )
        return ids[:n_layers, first : first + n_tokens].long().to(device)
    tokens = torch.arange(first, first + n_tokens, device=device)
    keys = [mk.random.fold_in(mk.random.make_key(0, device), layer) for layer in range(n_layers)]
    if routing.kind == "uniform":
        router, x = torch.zeros(1, n_experts, device=device), torch.zeros(n_tokens, 1, device=device)
        evenly = functools.partial(mk.route, router, x, top_k=top_k, assignment="uniform", token_ids=tokens)
        return torch.stack([evenly(key=key).expert_ids for key in keys])
    shares = [balance.dirichlet_shares(routing.concentration, n_experts, seed=i) for i in range(n_layers)]
    drawn = [balance.draw_experts(s, tokens, top_k=top_k, key=k) for s, k in zip(shares, keys, strict=True)]
    return torch.stack(drawn)


def expert_shares(text: str, n_tokens: int, *, n_experts: int, top_k: int) -> Tensor | None:
    """Return the parts of all routes that experts get in the first layer, (E,) float64; None for ``random``.

    Of a Dirichlet distribution what was drawn, else what so many tokens have.
    """
    routing = parse_routing(text)
    if routing.kind == "dirichlet":
        return balance.dirichlet_shares(routing.concentration, n_experts)
    ids = expert_ids(text, n_tokens, n_experts=n_experts, top_k=top_k, device="cpu")
    return None if ids is None else torch.bincount(ids.flatten(), minlength=n_experts).double() / ids.numel()
