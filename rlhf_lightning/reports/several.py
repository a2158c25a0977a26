"""Several runs held beside each other: what they are called, and what differs between them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rlhf_lightning.runs.changes import ABSENT, flatten, show
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.saved_yaml import read_yaml
from rlhf_lightning.runs.summary import Summary, read_summary

Metrics = Mapping[str, float | None]

COST = "val/kl_per_token"
# Settings that change no figure of a run: they do not name it.
_WITHOUT_EFFECT = ("callbacks.checkpoint.", "callbacks.samples.", "logger.", "resume", "ckpt_path")


@dataclass(frozen=True)
class Run:
    """One of several runs.

    Args:
        folder: where it stands.
        label: what tells it from the others.
        summary: as it ended.
        rows: of metrics.csv.
        samples: of samples.jsonl.
        settings: dotted key -> value as text, of what differs between the runs.
    """

    folder: RunFolder
    label: str
    summary: Summary
    rows: Sequence[Mapping[str, float]]
    samples: Sequence[Mapping[str, Any]]
    settings: Mapping[str, str] = field(default_factory=dict)

    @property
    def metrics(self) -> Metrics:
        """Final values."""
        return self.summary.metrics


def read_runs(folders: Sequence[RunFolder]) -> list[Run]:
    """Return the runs with what differs between them; labels are those settings where few do.

    Raises:
        FileNotFoundError: if a folder has no summary.
    """
    configs = [dict(flatten(_config(folder))) for folder in folders]
    keys = list(dict.fromkeys(key for config in configs for key in config))
    values = {key: [show(config.get(key, ABSENT)) for config in configs] for key in keys}
    different = {key: shown for key, shown in values.items() if len(set(shown)) > 1}
    runs = []
    for index, folder in enumerate(folders):
        settings = {key: shown[index] for key, shown in different.items()}
        runs.append(
            Run(
                folder,
                _label(folder, settings),
                read_summary(folder),
                read_metrics(folder.metrics),
                read_samples(folder.samples),
                settings,
            )
        )
    return runs


def with_effect(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that can change the figures of a run."""
    return {k: v for k, v in settings.items() if not k.startswith(_WITHOUT_EFFECT)}


def _label(folder: RunFolder, settings: Mapping[str, str]) -> str:
    settings = with_effect(settings)
    if 0 < len(settings) <= 3 and all(len(value) <= 24 for value in settings.values()):
        return " ".join(f"{key.rpartition('.')[2]}={value}" for key, value in settings.items())
    parts = folder.path.resolve().parts
    return "/".join(parts[-2:]) if folder.name.isdigit() else folder.name


def _config(folder: RunFolder) -> dict[str, Any]:
    if not folder.config.is_file():
        return {}
    try:
        content = read_yaml(folder.config)
    except (OSError, ValueError):
        return {}
    return public_config(content, content) if isinstance(content, dict) else {}
