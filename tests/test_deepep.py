"""The transport over DeepEP, with a stand-in for the library; tests/gpu checks it with the library."""

import importlib.util
import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import stand_in_deep_ep
import torch
from reference import refuses

import moekit as mk
from moekit import _deepep
from moekit.testing import check_transport, ranks

WIDE = dict(dtypes=(torch.bfloat16,), d_model=256)


def dispatch(x, routing, mesh):
    sys.modules["deep_ep"] = stand_in_deep_ep.library()
    return _deepep.dispatch(x, routing, mesh)


STAND_IN = mk.Transport(dispatch, _deepep.combine)


def test_the_contract_is_kept_over_a_stand_in_for_the_library():
    check_transport(STAND_IN, n_ranks=(2, 4), **WIDE)


def layer(recompute):
    """Return output and gradients of one layer, and how many buffers were made."""
    mesh = mk.make_mesh(ep=2, device="cpu")["ep"]
    generator = torch.Generator().manual_seed(torch.distributed.get_rank())
    x = torch.randn(9 + mesh.get_local_rank(), 256, generator=generator).bfloat16()
    params = mk.tree.nested(
        {
            "router": torch.randn(256, 4, generator=generator),
            "experts.gate_up": torch.randn(2, 256, 64, generator=generator).bfloat16() / 16,
            "experts.down": torch.randn(2, 32, 256, generator=generator).bfloat16() / 6,
        }
    )
    leaves = [x, *params.values(True, True)]
    for leaf in leaves:
        leaf.requires_grad_()
    moe = mk.remat(lambda *args: mk.moe(*args, top_k=2, via=STAND_IN, mesh=mesh), recompute)
    y, routing = moe(params, x)
    loss = y.float().square().sum() + routing.logits.square().sum()
    grads = torch.autograd.grad(loss, leaves)
    made = sum(len(buffers) for buffers in _deepep._BUFFERS.values())
    _deepep.release()
    return [y.detach(), *grads], made, len(_deepep._BUFFERS)


def test_a_recomputed_layer_has_the_same_bits_though_tokens_arrive_in_another_order():
    run = ranks(2)
    for (kept, made, left), (again, *_) in zip(run(layer, "none"), run(layer, "block"), strict=True):
        assert (made, left) == (1, 0)
        assert all(torch.equal(a, b) for a, b in zip(kept, again, strict=True))


def grow():
    """Return the sizes of the buffers made for more and more tokens."""
    library, group = stand_in_deep_ep.library(), torch.distributed.group.WORLD
    own = torch.distributed.get_rank()
    buffers = [_deepep._buffer(library, group, torch.empty(t if own else 1, 256), 2) for t in (1, 5, 8, 3, 9)]
    return [b.num_max_tokens_per_rank for b in buffers]


def test_buffers_grow_to_the_most_tokens_of_any_rank():
    assert ranks(2)(grow) == [[1, 8, 8, 8, 16]] * 2


X, ROUTING = (
    torch.zeros(3, 256, dtype=torch.bfloat16),
    mk.route(torch.zeros(256, 4), torch.zeros(3, 256), top_k=2),
)


@pytest.mark.skipif(importlib.util.find_spec("deep_ep") is not None, reason="deep_ep is installed")
def test_without_the_library_the_error_says_what_to_install(monkeypatch):
    with refuses("DeepEP 2 and its ElasticBuffer, got no module deep_ep; install it from", ImportError):
        mk.dispatch(X, ROUTING, via="deepep")
    old = ModuleType("deep_ep")
    old.__version__ = "1.2.1"
    monkeypatch.setitem(sys.modules, "deep_ep", old)
    with refuses("got deep_ep 1.2.1 without it; install", ImportError):
        mk.dispatch(X, ROUTING, via="deepep")


def test_what_its_kernels_do_not_take_is_refused_before_communication(monkeypatch, unchecked):
    monkeypatch.setitem(sys.modules, "deep_ep", stand_in_deep_ep.library())
    with refuses("needs a mesh, got None; use via='local'"):
        mk.dispatch(X, ROUTING, via="deepep")
    mesh = SimpleNamespace(ndim=1, size=lambda: 2)
    for x in (X.float(), X[:, :128]):
        with refuses(f"multiple of 256 wide and top_k of at most 32, got {x.dtype}, {x.shape[1]} and 2; use"):
            _deepep.dispatch(x, ROUTING, mesh)


def other_weights():
    sent = mk.dispatch(X, ROUTING, via=STAND_IN, mesh=mk.make_mesh(ep=2, device="cpu")["ep"])
    with refuses("combine via 'deepep' needs the weights of its dispatch"):
        mk.combine(sent.rows, replace(sent, weights=sent.weights * 2))


def test_weights_that_did_not_travel_with_the_tokens_are_refused():
    ranks(2)(other_weights)
