"""Tables of text."""

from collections.abc import Sequence


def table(rows: Sequence[Sequence[str]], *, n_left: int = 0) -> str:
    """Return a line a row, its cells in aligned columns: the first ``n_left`` flush left, others right.

    >>> print(table([("name", "bytes"), ("norm", "16")], n_left=1))
    name  bytes
    norm     16
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if i < n_left else ">" for i in range(len(widths))]
    formats = [f"{{:{side}{width}}}" for side, width in zip(sides, widths, strict=True)]
    lines = ("  ".join(formats).format(*row).rstrip() for row in rows)
    return "\n".join(lines)
