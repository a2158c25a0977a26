"""The runs of a study: their names, command lines and hashes."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from rlhf_lightning.app.config.commands import (
    CollectSettings,
    EvaluateSettings,
    RowSettings,
    StudySettings,
)
from rlhf_lightning.app.config.compose import ConfigError, composed
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.pipeline.steps import given
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.taken import summary_or_none

_ROW = "+paths.row"  # folder of what a row makes that others start from
_MAKING = ("model.from_scratch", "dataset.")  # words that change the models runs start from


@dataclass(frozen=True)
class PlannedRun:
    """One run of the matrix.

    Args:
        row: of the study.
        setting: what varies within the row, "" where nothing does.
        seed: of the run.
        command: `train`, `collect` or `evaluate`.
        words: its command line, without where it writes.
        place: of its folders: a run that begins anew has another one.
        settings: as the command reads them.
        starts_from: the runs that make what it starts from, by key as in `RowSettings`.
    """

    row: str
    setting: str
    seed: int
    command: str
    words: tuple[str, ...]
    place: Path
    settings: TrainSettings | CollectSettings | EvaluateSettings
    starts_from: Mapping[str, PlannedRun]

    @property
    def name(self) -> str:
        """Such as `ppo kl_coef=0.02 seed 1`."""
        return " ".join(filter(None, (self.row, self.setting, f"seed {self.seed}")))

    @property
    def model(self) -> str:
        """The name of what other rows start from: other settings, another name."""
        return f"{self.row}_{self.settings.config_hash}"

    @property
    def answers(self) -> int:
        """Answers that training samples in an iteration."""
        settings = self.settings
        if not isinstance(settings, TrainSettings) or not settings.spec.rolls_out:
            return 0
        return settings.data.num_rows

    def folder(self) -> RunFolder | None:
        """Return the newest run folder of these settings, a completed one before others."""
        found = []
        for file in sorted(self.place.glob("*/*/summary.json")):
            summary = summary_or_none(RunFolder(file.parent))
            if summary is not None and summary.config_hash == self.settings.config_hash:
                found.append((summary.status == "completed", file.parent))
        return RunFolder(max(found)[1]) if found else None

    def is_done(self) -> bool:
        """Return whether it has ended as it should."""
        folder = self.folder()
        summary = None if folder is None else summary_or_none(folder)
        return summary is not None and summary.status == "completed"

    def command_line(self) -> list[str]:
        """Return the command that runs it, or goes on with it."""
        again = ["resume=auto"] if self.command != "evaluate" else []
        placed = [*again, given("paths.outputs", self.place)]
        return [sys.executable, "-m", f"rlhf_lightning.{self.command}", *self.words, *placed]


def plan(settings: StudySettings, folder: Path) -> list[PlannedRun]:
    """Return all runs of a study, all settings of a seed before the next seed.

    Args:
        settings: of the study.
        folder: of the study.

    Raises:
        ConfigError: if a command line does not compose, with the row.
    """
    runs = []
    for seed in settings.seeds:
        of_row: dict[str, PlannedRun] = {}  # rows that others start from have one setting
        for name, row in settings.runs.items():
            for values in itertools.product(*(_choices(key, row) for key in row.vary)):
                of_row[name] = _planned(settings, folder, name, values, seed, of_row)
                runs.append(of_row[name])
    return runs


def _choices(key: str, row: RowSettings) -> Iterator[str]:
    return (f"{key}={json.dumps(value)}" for value in row.vary[key])


def _planned(
    settings: StudySettings,
    folder: Path,
    name: str,
    values: tuple[str, ...],
    seed: int,
    of_row: Mapping[str, PlannedRun],
) -> PlannedRun:
    row = settings.runs[name]
    given_words = getattr(settings.overrides, row.command)
    written = [*getattr(settings.shared, row.command), *row.overrides, *values, *given_words]
    if any(word.lstrip("+").startswith("seed=") for word in written):
        raise ConfigError(f"runs.{name}: seeds=[...] says the seeds of all runs, not seed=")
    artifacts = Path(settings.paths.artifacts).resolve()
    if "debug=fast" in written:  # keeps its models apart
        artifacts /= "debug_fast"
    # Models that runs start from are made by these words too.
    making = [word for word in written if word.lstrip("+").startswith(_MAKING)]
    if making:
        artifacts /= _digest(" ".join(making))
    head = [] if row.experiment is None else [f"+experiment={row.experiment}"]
    starts_from: dict[str, PlannedRun] = {
        kind: of_row[other] for kind, other in row.starts_from.items()
    }
    models = (folder / "rows").resolve()
    makes = name in settings.makers
    tail = [given("paths.artifacts", artifacts), *_model_words(starts_from, models, makes=makes)]
    words = _last_of_each([*head, f"seed={seed}", *written, *tail])
    setting = " ".join(map(_short, values))
    try:
        read = command_settings(row.command, composed(row.command, words), words)
    except COMPOSE_ERRORS as error:
        raise ConfigError(f"runs.{name}: {explain(error, words, row.command)}") from error
    except ConfigError as error:
        raise ConfigError(f"runs.{name}: {error}") from error
    assert isinstance(read, TrainSettings | CollectSettings | EvaluateSettings)
    named = re.sub(r"[^\w.=+-]", "_", setting)
    named = named if named == setting else f"{named}_{_digest(setting)}"
    parts = [part for part in (named, f"seed_{seed}") if part]
    place = folder.joinpath("runs", name, *parts)
    run = PlannedRun(name, setting, seed, row.command, tuple(words), place, read, starts_from)
    if not makes:
        return run
    words = _last_of_each([*words, given(_ROW, models / run.model)])
    return replace(run, words=tuple(words))


def _model_words(starts_from: Mapping[str, PlannedRun], models: Path, *, makes: bool) -> list[str]:
    """Return the words that say what of other rows a run loads, and what it publishes.

    The folders stand below `paths`, so that hashes do not depend on where the study is kept. The
    run's own has the run's hash in its name, so it is known later.
    """
    words = [f"paths.publish={str(makes).lower()}"]
    if makes:
        words += [given(_ROW, models), f"artifacts.publish=${{{_ROW.lstrip('+')}}}"]
    if starts_from:
        words.append(given("+paths.rows", models))
    keys = {kind: f"artifacts.{kind}" if kind in MODELS else kind for kind in starts_from}
    return words + [f"{keys[k]}=${{paths.rows}}/{one.model}" for k, one in starts_from.items()]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _short(word: str) -> str:
    """Return `kl_coef=0.1` of `module.ppo.kl_coef=0.1`."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _last_of_each(words: Iterable[str]) -> list[str]:
    """Return the words without those whose key a later one has: Hydra refuses a group twice."""
    return list({word.lstrip("+~").partition("=")[0]: word for word in words}.values())
