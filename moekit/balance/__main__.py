"""What ranks wait for, beside what a step's sums show of it: a table, or a page with sliders.

python -m moekit.balance --n-ranks 4 --sortedness 0.5
python -m moekit.balance --rows run/rows.safetensors --html load.html
python -m moekit.balance --recording run/routing.safetensors --n-ranks 8 --n-groups 2 --n-microbatches 2
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
        What :func:`moekit.balance.write_recording` wrote, of one rank or of several: its rows as so many
        ranks and micro-batches would have them.
    html
        A file to write the page to, in place of the table; it needs no other file and no network.
    n_ranks
        Ranks that share a copy of the experts; by default as many as sent the rows in a group, else 4.
    n_groups
        Groups of such ranks, each with a copy of the experts, that rows or a recording are dealt to.
    per_rank
        Experts of a rank of the example.
    n_microbatches
        Of the example, by default as many as ranks; of a recording, by default 1.
    n_rows
        Rows of an expert of the example, from each rank, in the step.
    sortedness
        Part of the example's tokens that are in order of their domain.
    """

    rows: Path | None = None
    recording: tuple[Path, ...] = ()
    html: Path | None = None
    n_ranks: int | None = None
    n_groups: int = 1
    per_rank: int = 2
    n_microbatches: int | None = None
    n_rows: int = 1024
    sortedness: float = 1.0


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
    if args.recording:
        recording, n_ranks = read_recording(*args.recording), 4 if args.n_ranks is None else args.n_ranks
        n_microbatches = 1 if args.n_microbatches is None else args.n_microbatches
        sizes = dict(n_ranks=n_ranks * args.n_groups, n_microbatches=n_microbatches)
        steps = range(len(recording.expert_ids))
        rows = recorded = torch.stack([recorded_rows(recording, step, **sizes) for step in steps])
        start = dict(n_ranks=n_ranks, n_groups=args.n_groups, name=args.recording[0].name)
    elif args.rows is not None:
        rows = recorded = read_rows(args.rows)
        n_ranks = rows.shape[2] // max(args.n_groups, 1) if args.n_ranks is None else args.n_ranks
        start = dict(n_ranks=n_ranks, n_groups=args.n_groups, name=args.rows.name)
    elif args.n_groups != 1:
        raise ValueError(f"needs rows or a recording for n_groups={args.n_groups}: the example has one group")
    else:
        n_ranks = 4 if args.n_ranks is None else args.n_ranks
        options: dict[str, Any] = dict(
            n_rows=args.n_rows,
            per_rank=args.per_rank,
            n_microbatches=n_ranks if args.n_microbatches is None else args.n_microbatches,
            sortedness=args.sortedness,
        )
        rows, recorded = sorted_by_domain(n_ranks, **options)[None], None
        start = dict(n_ranks=n_ranks, **options)
    table = make_table(rows, n_ranks, args.n_groups)
    if args.html is None:
        print(table)
    else:
        args.html.write_text(make_page(start, recorded), encoding="utf-8")
        print(f"wrote {args.html}")


if __name__ == "__main__":
    main()
