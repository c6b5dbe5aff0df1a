"""The page of a run: its figures drawn, in one file that needs no server and no network."""

import base64
import html
import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from moekit.tracking._figures import read_starts, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Records = Mapping[int, Mapping[str, Any]]  # figures by step
Rows = Mapping[str, Sequence[int]]  # of each expert, by the number of its layer
COLORS, MOST = "coolwarm", 2.0  # of an expert's load by the mean of its layer; grey at 1

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.4 sans-serif; max-width: 62em; margin: 2em auto; padding: 0 1em; color: #222 }}
img {{ max-width: 100% }}
td {{ padding: 0 1.5em 0 0 }}
pre {{ background: #f4f4f4; padding: 1em; overflow-x: auto }}
</style></head><body>
<h1>{title}</h1>
<table>
{summary}
</table>
{images}
<p>What the names mean, e.g. those of what ranks wait for: docs/metrics.md of moekit.</p>
<h2>Configuration</h2>
<pre>{config}</pre>
</body></html>
"""


def write_report(folder: str | Path) -> Path:
    """Draw what a run has logged to its folder: ``report.html``, and each of its images as a PNG beside it.

    Pure but for these files; they hold loss, rate, load of the experts, and what ranks wait for.

    Returns
    -------
    Path
        Of the page.

    Raises
    ------
    FileNotFoundError
        Where the folder has no ``metrics.jsonl``.
    """
    folder = Path(folder)
    records, starts = read_starts(folder)
    drawn = {name: draw(records) for name, draw in DRAWINGS.items()}
    images = {name: _png(figure) for name, figure in drawn.items() if figure is not None}
    for name, png in images.items():
        (folder / f"{name}.png").write_bytes(png)
    config = folder / "config.json"
    page = folder / "report.html"
    page.write_text(
        PAGE.format(
            title=html.escape(folder.resolve().name),
            summary="\n".join(
                f"<tr><td>{name.removeprefix('summary/')}</td><td>{x:,.6g}</td></tr>"
                for name, x in summarize(records, starts=starts).items()
            ),
            images="\n".join(
                f'<h2>{name}</h2>\n<img alt="{name}" src="data:image/png;base64,'
                f'{base64.b64encode(png).decode()}">'
                for name, png in images.items()
            ),
            config=html.escape(config.read_text() if config.exists() else ""),
        ),
        encoding="utf-8",
    )
    return page


def heat_map(rows: Rows) -> np.ndarray:
    """Return the load of all experts as an image, (4 layers, 4 experts, 3) uint8: grey is the layer's mean.

    Made in a millisecond, for a step that is being logged; the report draws the same with axes.
    """
    from matplotlib import colormaps  # half a second, which no other rank needs

    image = colormaps[COLORS](_over_mean(rows) / MOST, bytes=True)[..., :3]
    return image.repeat(4, 0).repeat(4, 1)


def _over_mean(rows: Rows) -> np.ndarray:
    load = np.array(list(rows.values()), dtype=float)
    return load / load.mean(1, keepdims=True).clip(1e-9)


def _png(figure: "Figure") -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png")
    return out.getvalue()


def _figure(n: int, **options: Any) -> "Figure":
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.2 * n), layout="constrained")
    figure.subplots(n, 1, **options)
    return figure


def _of(records: Records, name: str) -> tuple[list[int], list[Any]]:
    """Return the steps that logged a figure, and its values."""
    steps = [step for step, figures in records.items() if name in figures]
    return steps, [records[step][name] for step in steps]


def _lines(panels: Mapping[str, Sequence[str]]) -> "Callable[[Records], Figure | None]":
    """Return what draws figures over steps, a panel for each label; None where a run has none of them."""

    def draw(records: Records) -> "Figure | None":
        curves = {label: {name: _of(records, name) for name in names} for label, names in panels.items()}
        curves = {label: of for label, of in curves.items() if any(steps for steps, _ in of.values())}
        if not curves:
            return None
        figure = _figure(len(curves), sharex=True)
        for axes, (label, of) in zip(figure.axes, curves.items(), strict=True):
            for name, (steps, values) in of.items():
                axes.plot(steps, values, marker="." if len(steps) < 50 else "", label=name)
            axes.set_ylabel(label)
            axes.grid(alpha=0.3)
            if len(of) > 1:
                axes.legend()
        figure.axes[-1].set_xlabel("step")
        return figure

    return draw


def _draw_load(records: Records) -> "Figure | None":
    """Draw the last load of all experts, and each layer's fullest expert over time."""
    at, rows = _of(records, "load/rows")
    if not at:
        return None
    layers = list(rows[-1])
    steps, most = _of(records, "load/max_over_mean")
    figure = _figure(2 if steps else 1)
    now = figure.axes[0]
    _draw_layers(
        now, _over_mean(rows[-1]), layers, "rows by the layer's mean", cmap=COLORS, vmin=0, vmax=MOST
    )
    now.set(xlabel="expert", title=f"step {at[-1]}")
    if steps:
        of_layers = [dict(zip(*_of(records, f"load_layers/max_over_mean/{x}"), strict=True)) for x in layers]
        values = np.array([[of.get(step, np.nan) for step in steps] for of in of_layers])
        half = (steps[-1] - steps[0]) / max(len(steps) - 1, 1) / 2 or 0.5
        extent = (steps[0] - half, steps[-1] + half, len(layers) - 0.5, -0.5)
        high = max(2.0, float(np.nanquantile(most, 0.99)))
        over_time = figure.axes[1]
        _draw_layers(
            over_time, values, layers, "fullest expert by the mean", extent=extent, vmin=1, vmax=high
        )
        over_time.set_xlabel("step")
    return figure


def _draw_layers(axes: Any, values: np.ndarray, layers: Sequence[str], label: str, **options: Any) -> None:
    """Draw values as colours, a row for each layer."""
    shown = axes.imshow(values, aspect="auto", interpolation="nearest", **options)
    axes.figure.colorbar(shown, ax=axes, label=label, extend="max")
    every = -(-len(layers) // 12)
    axes.set_yticks(range(0, len(layers), every), layers[::every])
    axes.set_ylabel("layer")


DRAWINGS = {
    "loss": _lines(
        {
            "nats per target": ["loss"],
            "held out, bits per byte": ["held_out/bits_per_byte"],
            "gradient norm": ["optim/grad_norm"],
            "learning rate": ["optim/lr"],
        }
    ),
    "rate": _lines({"tokens/s": ["speed/tokens_per_second"], "MFU": ["speed/mfu"]}),
    "load": _draw_load,
    "wait": _lines(
        {
            "fullest rank by the mean": ["wait/waited", "wait/seen"],
            "gap": ["wait/gap"],
            "ms of a step, at least": ["wait/ms"],
        }
    ),
}
