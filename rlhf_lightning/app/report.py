"""Write a run's report.html again; of several runs also one page that compares them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from rlhf_lightning.app.command_line import run_command
from rlhf_lightning.app.config.commands import ReportSettings
from rlhf_lightning.app.failures import refusing
from rlhf_lightning.reports.compare import write_comparison
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder, near_run


def run(folders: Sequence[Path], output: Path | None = None) -> list[Path]:
    """Write report.html in each run folder, and of several runs a comparison; return the paths.

    A folder of run folders, such as a sweep's, means all of them.

    Args:
        folders: folders of runs or sweeps.
        output: path of the comparison; in the folder above the runs by default.

    Raises:
        FileNotFoundError: if a folder has no summary.json.
        ValueError: if a file of a run is damaged.
    """
    runs = [RunFolder(one) for folder in folders for one in run_folders(folder)]
    written = [write_report(folder) for folder in runs]
    if len(runs) > 1:
        shared = Path(os.path.commonpath([folder.path.resolve() for folder in runs]))
        written.append(write_comparison(runs, output or shared / "comparison.html"))
    return written


def run_folders(folder: Path) -> list[Path]:
    """Return the folder itself if it is a run's, else the runs in it, in the order of their names.

    Raises:
        FileNotFoundError: if there is none.
    """
    if (folder / "summary.json").is_file():
        return [folder]
    found = [path.parent for path in folder.glob("*/summary.json")]
    if not found:
        told = f"{folder} is no run folder, it has no summary.json: give one below outputs/"
        raise FileNotFoundError(f"{told}{near_run(folder, RunFolder.summary)}")
    return sorted(found, key=lambda path: (len(path.name), path.name))


def _write(settings: ReportSettings) -> list[str]:
    with refusing(OSError, ValueError):
        return list(map(str, run(settings.run, settings.output)))


def main() -> None:
    """Run the command line."""
    run_command("report", _write)
