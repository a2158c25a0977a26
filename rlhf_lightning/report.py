"""Write a run's report.html again: `python -m rlhf_lightning.report RUN [RUN ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def run(folders: Sequence[Path]) -> list[Path]:
    """Write report.html in each run folder; return the paths.

    Raises:
        FileNotFoundError: if a folder holds no summary.json.
    """
    from rlhf_lightning.reports.page import write_report
    from rlhf_lightning.runs.folder import RunFolder

    for folder in folders:
        if not (folder / "summary.json").is_file():
            raise FileNotFoundError(
                f"{folder} is no run folder: it has no summary.json; runs are in outputs/"
            )
    return [write_report(RunFolder(folder)) for folder in folders]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="rlhf-report", description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run folder")
    try:
        for path in run(parser.parse_args().runs):
            sys.stdout.write(f"{path}\n")
    except FileNotFoundError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
