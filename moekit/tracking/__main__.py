"""Draw the report of runs again from what they have logged: ``python -m moekit.tracking FOLDER ...``."""

import sys

from moekit.tracking._report import write_report


def main(folders: list[str]) -> None:
    """Write the report of each folder, and print where it is."""
    if not folders:
        raise SystemExit("usage: python -m moekit.tracking FOLDER ...")
    for folder in folders:
        try:
            print(write_report(folder))
        except OSError as error:
            raise SystemExit(f"moekit.tracking: {error}") from error


if __name__ == "__main__":
    main(sys.argv[1:])
