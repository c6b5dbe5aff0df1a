"""What is wrong turns parity red, and the table names it: each fault is put in from outside."""

import re

import pytest
import torch
from pages import blocks
from torch.distributed.tensor import Replicate

import moekit as mk
from moekit._dispatch import TRANSPORTS
from moekit.mesh import data_rank
from moekit.testing import check_gradients, check_transport
from moekit.tree import map_named

from .tiny import BATCH, batch_of, loss_of, model

CONFIG, PARAMS = model()
LOSS = loss_of(CONFIG)
ALL = {k if isinstance(k, str) else ".".join(k) for k in PARAMS.keys(True, True)}
EXPERTS = {name for name in ALL if ".experts." in name}
ROUTERS = {name for name in ALL if name.endswith(".router")}


def reading(reader):
    """Return the loss whose parameters are read by ``reader(name, parameter, mesh)`` on a mesh."""

    def loss(params, batch, *, mesh, **options):
        if mesh is not None:
            params = map_named(lambda name, p: reader(name, p, mesh), params)
        return LOSS(params, batch, mesh=mesh, **options)

    return loss


def red(loss, layout, batch=BATCH):
    """Return the names of what differs on a layout."""
    try:
        check_gradients(loss, PARAMS, batch, [layout])
    except AssertionError as error:
        return set(re.findall(r"(\S+) on edp", str(error).splitlines()[0]))
    return set()


def as_it_should(name, p, mesh):
    return mk.local(p)


def experts_times_ep(name, p, mesh):
    p = mk.local(p)
    if name in EXPERTS:
        p.register_hook(lambda grad: grad * mesh["ep"].size())
    return p


def experts_of_rank_1_without_gradient(name, p, mesh):
    p = mk.local(p)
    if name in EXPERTS and data_rank(mesh)[0] == 1:
        p.register_hook(torch.zeros_like)
    return p


def router_unsummed(name, p, mesh):
    return p.to_local(grad_placements=[Replicate()]) if name in ROUTERS else mk.local(p)


def rank_1_dropped(params, batch, *, mesh, **options):
    loss, _ = LOSS(params, batch, mesh=mesh, **options)
    return loss.detach() + 0 * loss if data_rank(mesh)[0] == 1 else loss


def local_denominators(params, batch, *, mesh, **options):
    loss, _ = LOSS(params, mk.count_tokens(batch), mesh=mesh, **options)
    return loss / data_rank(mesh)[1]


def test_a_loss_without_a_fault_stays_green():
    assert (
        red(LOSS, dict(edp=2, ep=2)) == red(reading(as_it_should), dict(edp=2, ep=2, accumulate=2)) == set()
    )


def test_expert_gradients_times_two_are_named():
    assert red(reading(experts_times_ep), dict(edp=1, ep=2)) == EXPERTS
    assert red(reading(experts_times_ep), dict(edp=2, ep=1)) == set()


def test_one_ranks_contribution_that_is_dropped_is_named():
    assert red(rank_1_dropped, dict(edp=1, ep=2)) == ALL
    assert red(rank_1_dropped, dict(edp=2, ep=1)) == ALL
    assert red(reading(experts_of_rank_1_without_gradient), dict(edp=2, ep=1)) == EXPERTS
    assert red(reading(experts_of_rank_1_without_gradient), dict(edp=1, ep=2)) == EXPERTS


@pytest.mark.parametrize("layout", [dict(edp=2, ep=1), dict(edp=1, ep=2)])
def test_a_router_gradient_that_would_be_left_unsummed_is_refused_by_name(layout):
    says = r"labelled as what is still to be summed, \[Partial\(sum\)\] for \S*router, got \(Replicate\(\),\)"
    with pytest.raises(RuntimeError, match=says):
        check_gradients(reading(router_unsummed), PARAMS, BATCH, [layout])


def test_local_denominators_are_seen_where_masks_are_unequal():
    assert red(local_denominators, dict(edp=2, ep=1)) == {"loss"} | ALL
    equal = batch_of([[0, 0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 0, -1]] * 4)
    assert red(local_denominators, dict(edp=2, ep=1), equal) == set()


# --- Transports ------------------------------------------------------------------------

SEND, RETURN = TRANSPORTS["all_to_all"]


def lose_rows(x, routing, mesh):
    """Lose the first row."""
    rows, offsets, plan = SEND(x, routing, mesh)
    return rows[1:], (offsets - 1).clamp_min(0), plan


def return_lost_rows(rows, weights, plan, mesh):
    _, travel = plan
    n = len(rows) if travel is None else len(travel[0])
    return RETURN(torch.cat([rows.new_zeros(n - len(rows), rows.shape[1]), rows]), weights, plan, mesh)


def zero_a_row(rows, weights, plan, mesh):
    """Lose a row on the way home."""
    return RETURN(torch.cat([rows[:-1], 0 * rows[-1:]]), weights, plan, mesh)


def swap(rows):
    return torch.cat([rows[1:2], rows[:1], rows[2:]])


def swap_rows(x, routing, mesh):
    rows, *rest = SEND(x, routing, mesh)
    return swap(rows), *rest


def swap_back(rows, weights, plan, mesh):
    return RETURN(swap(rows), weights, plan, mesh)


def long_offsets(x, routing, mesh):
    rows, offsets, plan = SEND(x, routing, mesh)
    return rows, offsets.long(), plan


def in_float32(rows, weights, plan, mesh):
    return RETURN(rows.to(weights.dtype), weights, plan, mesh)


def without_weights(rows, weights, plan, mesh):
    return RETURN(rows, weights.detach(), plan, mesh)


def without_graph(rows, weights, plan, mesh):
    return RETURN(rows, weights, plan, mesh).detach()


def says_it_dropped_some(x, routing, mesh):
    return *SEND(x, routing, mesh), torch.ones_like(routing.counts)


BROKEN = {
    "says that it dropped routes": (mk.Transport(says_it_dropped_some, RETURN), "dropped .even.* 4 routes"),
    "loses a row": (mk.Transport(lose_rows, return_lost_rows), "offsets .even"),
    "loses a row on the way home": (mk.Transport(SEND, zero_a_row), "output .even.*relative error"),
    "swaps two rows": (mk.Transport(swap_rows, RETURN), "order of rows .even.*relative error"),
    "swaps two rows and swaps them back": (mk.Transport(swap_rows, swap_back), "order of rows .even"),
    "swaps two rows on the way home": (mk.Transport(SEND, swap_back), "output .even"),
    "gives int64 offsets": (mk.Transport(long_offsets, RETURN), "offsets .even.*int64, wanted torch.int32"),
    "gives another dtype": (mk.Transport(SEND, in_float32), "dtype .even.*bfloat16"),
    "has no gradient of the weights": (
        mk.Transport(SEND, without_weights),
        "gradient of the weights .even.*none",
    ),
    "has no gradient": (mk.Transport(SEND, without_graph), "output .even.*nothing to differentiate"),
}


@pytest.mark.parametrize("fault", BROKEN)
def test_check_transport_names_what_a_transport_gets_wrong(fault):
    transport, message = BROKEN[fault]
    with pytest.raises(RuntimeError, match=message):
        check_transport(transport, n_ranks=(2,))


def of_the_page(old, new, count):
    """Return the transport of docs/transport.md, with a fault."""
    text = blocks("transport.md")[0]
    assert text.count(old) == count
    names = {"__name__": "__main__"}
    exec(text.replace(old, new), names)
    return names["all_gather"]


RANK = ("mesh.get_local_rank()", "torch.distributed.get_rank()", 1, r"offsets \(even, .*: \[0, 0\], wanted")
GROUP = (", 0, mesh)", ", 0, torch.distributed.group.WORLD)", 4, r"offsets \(even, .*wanted")
SIZE = ("mesh.size()", "torch.distributed.get_world_size()", 1, r"Error[\s\S]*check_transport: even, ")


@pytest.mark.parametrize(
    ("n", "fault"),
    [(2, RANK), (2, GROUP), (2, SIZE), (4, GROUP)],
    ids=["rank-2", "group-2", "size-2", "group-4"],
)
def test_a_transport_that_takes_the_world_for_its_mesh_is_named(n, fault):
    old, new, count, message = fault
    died = "the process ended with exit code -"  # gloo may abort where collectives of two groups meet
    with pytest.raises(RuntimeError, match=f"{message}|{died}") as error:
        check_transport(of_the_page(old, new, count), n_ranks=(n,))
    case = f"even, torch.float64, {n} ranks, mesh=ep of (edp=2, ep={n // 2})"
    assert case in str(error.value) or died in str(error.value)


def test_parity_goes_red_with_a_transport_that_loses_a_row():
    def loss(params, batch, *, mesh, **options):
        via = None if mesh is None else BROKEN["loses a row"][0]
        return LOSS(params, batch, mesh=mesh, via=via, **options)

    assert {"loss", *EXPERTS, *ROUTERS} <= red(loss, dict(edp=1, ep=2))


@pytest.mark.parametrize("via", TRANSPORTS)
def test_the_transports_of_moekit_keep_the_contract(via):
    check_transport(via, n_ranks=(1,) if via == "local" else (1, 2, 4))


def test_eight_ranks_keep_the_contract_in_bfloat16():
    check_transport("all_to_all", n_ranks=(8,), dtypes=(torch.bfloat16,))
