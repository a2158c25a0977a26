"""`python -m rlhf_lightning.train` in a folder of its own, as a user starts it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.entry.small_settings import SMALL

ROOT = Path(__file__).resolve().parents[2]


def command(*overrides: str) -> list[str]:
    return [sys.executable, "-m", "rlhf_lightning.train", *overrides]


def small_sft(start: Path, *overrides: str) -> list[str]:
    return ["+experiment=sft", *SMALL, f"artifacts.base={start}", *overrides]


def environment(**changes: str) -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    kept = {k: v for k, v in os.environ.items() if not k.startswith("RLHF_")}
    return kept | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | changes


def train(folder: Path, *overrides: str, **changes: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(*overrides),
        cwd=folder,
        env=environment(**changes),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )


def run_folder(folder: Path) -> Path:
    (found,) = folder.glob("outputs/*/*/summary.json")
    return found.parent


def summary(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((run_folder(folder) / "summary.json").read_text())
    return content
