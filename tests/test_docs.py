"""The Python of the pages that show how to write and test one's own parts runs as it stands there."""

import re

import pytest
import torch
from pages import DOCS, blocks, run

import moekit as mk
from moekit.testing import check_gradients, ranks


def test_the_transport_page_runs():
    assert isinstance(run("transport.md")["all_gather"], mk.Transport)


def test_the_transport_of_the_page_is_30_lines_imports_included():
    assert len([line for line in blocks("transport.md")[0].splitlines() if line.strip()]) <= 30


def test_the_transform_page_runs_and_its_mistake_is_found(capsys):
    run("transforms.md")
    out = capsys.readouterr().out
    assert "gradients differ by more than 1e-10: embedding on edp=2; layers.0.attention.qkv on edp=2" in out


def test_the_loop_page_runs_and_its_loss_is_the_same_on_every_layout():
    names = run("loop.md")
    loss = names["loss"]
    params = mk.init_params(names["config"], dtype=torch.float64)
    batch, layouts = mk.count_tokens(names["batch"]), [dict(edp=2), dict(ep=2, accumulate=2)]
    check_gradients(lambda *args, mesh: loss(*args, mesh=mesh)[0], params, batch, layouts)


def test_the_page_on_overlap_runs_and_all_its_ways_have_one_loss():
    names = run("overlap.md")
    ways = names["grad_fn"].choice.seconds
    losses = {way: names["grad_fn_of"](way)(names["params"], names["batch"])[0][0] for way in ways}
    assert losses.keys() == {"none", "two_batch", "shared"}
    torch.testing.assert_close(list(losses.values()), [losses["none"]] * 3)


def test_the_page_on_scale_runs_and_prints_what_it_shows(capsys):
    run("scale.md")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", (DOCS / "scale.md").read_text(), re.M | re.S)
    assert shown in capsys.readouterr().out


def test_the_page_on_routing_runs_and_balances_as_recorded():
    names = run("routing.md")
    assert names["recording"].expert_ids.shape == (2, 4, 2, 32, 2) and names["imbalance"] >= 1


@pytest.mark.parametrize(
    "page",
    [
        "transport.md",
        "transforms.md",
        "concepts.md",
        "placements.md",
        "loop.md",
        "scale.md",
        "gerrymandering.md",
        "overlap.md",
        "routing.md",
        "metrics.md",
    ],
)
def test_the_index_lists_the_page_and_the_pages_it_links_exist(page):
    assert page.removesuffix(".md") in (DOCS / "index.md").read_text().splitlines()
    for link in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
        assert (DOCS / link).exists()


@pytest.mark.parametrize("n_ranks", [None, 2])
def test_the_four_lines_of_the_readme_are_a_layer(n_ranks):
    (lines,) = blocks("../README.md")
    assert len(lines.splitlines()) == 4
    config = mk.preset("tiny", n_layers=1, n_dense_layers=0, d_model=16, d_expert=8, d_shared=0, n_experts=8)
    params = mk.init_params(config)["layers", "0", "moe"]
    x = torch.randn(5, 16, generator=torch.Generator().manual_seed(0))

    def layer():
        mesh = mk.make_mesh(ep=2, device="cpu") if n_ranks else {"ep": None}
        names = dict(mk=mk, mesh=mesh, x=x, params=mk.mesh.distribute(params, mesh if n_ranks else None))
        exec(lines, names)
        return names["y"].detach()

    want, _ = mk.moe(params, x, top_k=4)
    for got in ranks(n_ranks)(layer) if n_ranks else [layer()]:
        torch.testing.assert_close(got, want)
