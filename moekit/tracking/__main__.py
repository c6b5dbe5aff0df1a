"""Draw the report of runs again from what they have logged: ``python -m moekit.tracking FOLDER ...``."""

from pathlib import Path

import tyro

from moekit.tracking._report import write_report


def main(folders: tyro.conf.Positional[tuple[Path, ...]]) -> None:
    """Write the report of each folder, and print where it is.

    Parameters
    ----------
    folders
        Of runs: each has a metrics.jsonl.
    """
    if not folders:
        raise SystemExit("moekit.tracking needs a folder of a run, got none; see --help")
    for folder in folders:
        try:
            print(write_report(folder))
        except OSError as error:
            raise SystemExit(f"moekit.tracking: {error}") from error


if __name__ == "__main__":
    tyro.cli(main, prog="python -m moekit.tracking")
