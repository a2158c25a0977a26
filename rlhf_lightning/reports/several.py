"""Several runs held beside each other: what differs between them, and which one to take."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from rlhf_lightning.runs.changes import ABSENT, flatten, show
from rlhf_lightning.runs.folder import RunFolder, read_metrics, read_samples
from rlhf_lightning.runs.public_config import public_config
from rlhf_lightning.runs.quantities import QUANTITIES, number, percent
from rlhf_lightning.runs.summary import Summary, read_summary

Metrics = Mapping[str, float | None]

# What a setting may be chosen by: never gold, which training must not see. True: more is better.
OBJECTIVES: dict[str, tuple[str, bool]] = {
    "ppo": ("val/score_win_rate", True),
    "reward": ("val/accuracy", True),
    "sft": ("val/loss", False),
    "base": ("val/loss", False),
}
COST = "val/kl_per_token"
# Settings that change no figure of a run: they neither name it nor have an axis.
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


@dataclass(frozen=True)
class Choice:
    """The run whose setting to take.

    Args:
        run: that one; None where none can be chosen.
        reason: one sentence.
    """

    run: Run | None
    reason: str


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


def choose(runs: Sequence[Run]) -> Choice:
    """Return the run to take: of those that are as good as the best, the one nearest to SFT.

    As good is a run whose 95 % interval reaches the best value. Runs that did not end, or whose KL
    is outside of the healthy band, are not looked at. Without intervals the best value decides.
    """
    stages = {run.summary.stage for run in runs}
    if len(stages) != 1:
        return Choice(None, "The runs are of different stages, so none is better than another.")
    objective = OBJECTIVES.get(next(iter(stages)))
    if objective is None:
        return Choice(None, "Nothing is measured that a setting could be chosen by.")
    name, more = objective
    label = QUANTITIES[name].label
    measured = [r for r in runs if r.summary.status == "completed" and r.metrics.get(name)]
    ended = [r for r in measured if _in_band(r)]
    if not ended:
        why = f"keeps {QUANTITIES[COST].label} in the band" if measured else "has ended"
        return Choice(None, f"No run {why}: nothing to recommend.")
    best = max(ended, key=lambda r: _value(r, name) if more else -_value(r, name))
    bound = f"{name}_high"
    equal = [r for r in ended if (r.metrics.get(bound) or _value(r, name)) >= _value(best, name)]
    if not more:
        equal = [best]
    chosen = min(equal, key=lambda r: (r.metrics.get(COST) or 0.0, r.label))
    shown = percent(_value(chosen, name)) if more else number(_value(chosen, name))
    if chosen is best:
        return Choice(chosen, f"It has the best {label}, {shown}.")
    return Choice(
        chosen,
        f"Its {label}, {shown}, cannot be told from the best one, "
        f"{percent(_value(best, name))}, and it stays nearest to the SFT policy.",
    )


def with_effect(settings: Mapping[str, str]) -> dict[str, str]:
    """Return the settings that can change the figures of a run."""
    return {k: v for k, v in settings.items() if not k.startswith(_WITHOUT_EFFECT)}


def _value(run: Run, name: str) -> float:
    value = run.metrics[name]
    assert value is not None
    return value


def _in_band(run: Run) -> bool:
    kl, band = run.metrics.get(COST), QUANTITIES[COST].healthy
    return kl is None or band is None or kl <= band[1]


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
        content = yaml.safe_load(folder.config.read_text("utf-8"))
    except yaml.YAMLError:
        return {}
    return public_config(content, content) if isinstance(content, dict) else {}
