"""The Python of the pages that show how to write and test one's own parts runs as it stands there."""

import re

import pytest
from pages import DOCS, blocks, run

import moekit as mk


def test_the_transport_page_runs():
    assert isinstance(run("transport.md")["all_gather"], mk.Transport)


def test_the_transport_of_the_page_is_30_lines_imports_included():
    assert len([line for line in blocks("transport.md")[0].splitlines() if line.strip()]) <= 30


def test_the_transform_page_runs_and_its_mistake_is_found(capsys):
    run("transforms.md")
    out = capsys.readouterr().out
    assert "gradients differ by more than 1e-10: embedding on edp=2; layers.0.attention.qkv on edp=2" in out


@pytest.mark.parametrize("page", ["transport.md", "transforms.md", "concepts.md", "placements.md"])
def test_the_index_lists_the_page_and_the_pages_it_links_exist(page):
    assert page.removesuffix(".md") in (DOCS / "index.md").read_text().splitlines()
    for link in re.findall(r"\]\(([^)#:]+)\)", (DOCS / page).read_text()):
        assert (DOCS / link).exists()
