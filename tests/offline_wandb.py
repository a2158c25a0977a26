"""Offline W&B runs as they stand on the disk, read by W&B's own reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]


def segments(folder: Path) -> list[list[Record]]:
    """Return the records of each offline segment of a run folder, in the order of their start."""
    directories = sorted((folder / "wandb").glob("offline-run-*"))
    return [records(directory) for directory in directories]


def records(directory: Path) -> list[Record]:
    """Return the records of one `offline-run-<time>-<id>` folder."""
    leet = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]
    done = subprocess.run(
        [*leet, str(directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, (done.stderr, sorted(path.name for path in directory.iterdir()))
    return [json.loads(line) for line in done.stdout.splitlines()]


def history(found: list[Record]) -> list[Record]:
    """Return what was logged, a row each."""
    return [r["history"]["item"] for r in found if "history" in r]


def by_iteration(rows: list[Record]) -> dict[int, Record]:
    """Join the rows of an iteration; one that was logged twice must be equal both times."""
    joined: dict[int, Record] = {}
    for row in rows:
        if "iteration" not in row:
            continue
        known = joined.setdefault(int(row["iteration"]), {})
        for name, value in row.items():
            if name.startswith("_") or not isinstance(value, int | float):
                continue
            assert known.get(name, value) == value, (name, row["iteration"], known[name], value)
            known[name] = value
    return joined


def logged_names(found: list[Record]) -> set[str]:
    """Return the names of everything that a run logged, its summary included."""
    names = {name for row in history(found) for name in row}
    for record in found:
        names |= set(record.get("summary", {}).get("update", {}))
    return names


def summary_of(found: list[Record]) -> Record:
    """Return the last summary value of each name."""
    values: Record = {}
    for record in found:
        values |= record.get("summary", {}).get("update", {})
    return values


def table(folder: Path, name: str) -> list[Record]:
    """Return the rows of the newest table `name`, by column."""
    pattern = f"wandb/offline-run-*/files/media/table/{name}_*.table.json"
    newest = max(folder.glob(pattern), key=lambda path: path.stat().st_mtime_ns)
    content = json.loads(newest.read_text(encoding="utf-8"))
    return [dict(zip(content["columns"], row, strict=True)) for row in content["data"]]
