"""What ranks wait for, beside what a step's sums show of it: a table, or a page with sliders.

python -m moekit.balance --ep 4 --sortedness 0.5
python -m moekit.balance --rows run/rows.safetensors --html load.html
python -m moekit.balance --recording run/routing.safetensors --ep 8 --edp 2 --n-microbatches 2
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro

from moekit.balance._load import sorted_by_domain
from moekit.balance._page import make_page, make_table, read_rows
from moekit.balance._recorded import read_recording, recorded_rows


@dataclass(frozen=True, kw_only=True)
class Study:
    """Print what ranks wait for beside what a step's sums show of it, or write a page that draws it.

    Attributes
    ----------
    rows
        Counts (m, s, l, E) or (steps, m, s, l, E): of m micro-batches, from s source ranks, in l layers, for
        E experts. A .npy, .npz or .safetensors file; by default an example, of tokens sorted by domain.
    recording
        What moekit.balance.write_recording wrote, of one rank or of several: its rows as so many
        ranks and micro-batches would have them.
    html
        A file to write the page to, in place of the table; it needs no other file and no network.
    ep
        Ranks that share one copy of the experts; by default as many as sent a copy's rows, else 4.
    edp
        Copies, that the source ranks of rows or of a recording are dealt to in order.
    per_rank
        Experts of a rank of the example; by default 2.
    n_microbatches
        Of the example, by default as many as ranks; of a recording, by default 1.
    n_rows
        Rows of an expert of the example, from each rank, in the step; by default 1024.
    sortedness
        Part of the example's tokens that are in order of their domain; by default all.
    """

    rows: Path | None = None
    recording: tuple[Path, ...] = ()
    html: Path | None = None
    ep: int | None = None
    edp: int = 1
    per_rank: int | None = None
    n_microbatches: int | None = None
    n_rows: int | None = None
    sortedness: float | None = None


def main() -> None:
    """Read the command line, and print the table or write the page."""
    args = tyro.cli(Study, prog="python -m moekit.balance")
    try:
        _run(args)
    except (ValueError, OSError) as error:
        raise SystemExit(f"moekit.balance: {error}") from error


def _run(args: Study) -> None:
    if args.rows is not None and args.recording:
        raise ValueError("needs rows or a recording, got both; leave one out")
    names = ("n_microbatches", "n_rows", "per_rank", "sortedness")
    given = {x: getattr(args, x) for x in names if getattr(args, x) is not None}
    for source, own in (("rows", ()), ("recording", ("n_microbatches",))):
        if getattr(args, source) and (extra := sorted(given.keys() - own)):
            raise ValueError(
                f"takes {', '.join(extra)} for the example alone, got {source}; leave out either"
            )
    if args.recording:
        recording, ep = read_recording(*args.recording), 4 if args.ep is None else args.ep
        n_microbatches = 1 if args.n_microbatches is None else args.n_microbatches
        sizes = dict(ep=ep, edp=args.edp, n_microbatches=n_microbatches)
        steps = range(len(recording.expert_ids))
        rows = recorded = torch.stack([recorded_rows(recording, step, **sizes) for step in steps])
        start = dict(ep=ep, edp=args.edp, name=args.recording[0].name)
    elif args.rows is not None:
        rows = recorded = read_rows(args.rows)
        ep = rows.shape[2] // max(args.edp, 1) if args.ep is None else args.ep
        start = dict(ep=ep, edp=args.edp, name=args.rows.name)
    elif args.edp != 1:
        raise ValueError(
            f"needs rows or a recording for edp={args.edp}: the example has one copy of its experts"
        )
    else:
        ep = 4 if args.ep is None else args.ep
        options: dict[str, Any] = dict(n_rows=1024, per_rank=2, n_microbatches=ep, sortedness=1.0) | given
        rows, recorded = sorted_by_domain(ep, **options)[None], None
        start = dict(ep=ep, **options)
    table = make_table(rows, ep, args.edp)
    if args.html is None:
        print(table)
    else:
        args.html.write_text(make_page(start, recorded), encoding="utf-8")
        print(f"wrote {args.html}")


if __name__ == "__main__":
    main()
