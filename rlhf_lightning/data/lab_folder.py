"""Preference records that the lab has made, with what it knows of their noise."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rlhf_lightning.data.sources import FileSource

RELIABILITY = "reliability.json"


class PreferenceFolder(FileSource):
    """A folder that `rlhf_lightning.collect` wrote, or any file or folder of preference records.

    Where `reliability.json` stands in the folder and tells the ceiling of the validation labels,
    `label_ceiling()` returns it; else there is no such attribute.

    Args:
        path: of the folder or file.
        seed: of the split, where there is no validation file.
        validation_fraction: of the prompts, held out where there is no validation file.

    Raises:
        ValueError: if there is nothing at `path`.
    """

    def __init__(
        self, path: str | Path, *, seed: int = 1, validation_fraction: float = 0.05
    ) -> None:
        """Read what is known of the noise; records are read at the first call of `records`."""
        super().__init__(path, seed=seed, validation_fraction=validation_fraction)
        if not self.path.exists():
            raise ValueError(
                f"data.path={path} does not exist: give preference records (prompt, chosen, "
                "rejected), or make them with  python -m rlhf_lightning.collect"
            )
        ceiling = self._reliability().get("label_ceiling")
        if ceiling is not None:
            self.label_ceiling: Callable[[], float] = lambda: float(ceiling)

    def _reliability(self) -> dict[str, Any]:
        file = self.path / RELIABILITY
        if not file.is_file():
            return {}
        content = json.loads(file.read_text(encoding="utf-8"))
        return content if isinstance(content, dict) else {}
