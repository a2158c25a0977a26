"""The runs of a study: their names, command lines and places."""

from __future__ import annotations

import hashlib
import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from rlhf_lightning.app.config.commands import RowSettings, StudySettings
from rlhf_lightning.app.config.compose import ConfigError, config_dirs
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import without_unread
from rlhf_lightning.app.study.engine import Run
from rlhf_lightning.app.study.words import given, key_of, varied

_ROW = "+paths.row"  # folder of what a row makes that others start from
_MAKING = ("model.from_scratch", "dataset.")  # words that change the models runs start from


@dataclass(frozen=True, kw_only=True)
class PlannedRun(Run):
    """One run of the matrix; `place` is that of its folders, one for each start from the beginning.

    Args:
        row: row of the study.
        setting: varied settings within the row, "" without any.
        seed: seed of the run.
        models: folder of models that other rows start from; None if none does.
        starts_from: the runs that make what it starts from, by key as in `RowSettings`.
    """

    row: str
    setting: str
    seed: int
    models: Path | None
    starts_from: Mapping[str, PlannedRun] = field(compare=False)

    @property
    def name(self) -> str:
        """Such as `ppo kl_coef=0.02 seed 1`."""
        return " ".join(filter(None, (self.row, self.setting, f"seed {self.seed}")))

    @property
    def model(self) -> str:
        """The name of what other rows start from: other settings, another name."""
        return f"{self.row}_{self.settings.config_hash}"

    @property
    def published(self) -> list[Path]:
        """The folders that other rows start from."""
        return [] if self.models is None else [self.models / self.model]

    @property
    def answers(self) -> int:
        """Number of responses that training samples in an iteration."""
        settings = self.settings
        if not isinstance(settings, TrainSettings) or not settings.spec.rolls_out:
            return 0
        return settings.data.num_rows

    def command_line(self) -> list[str]:
        """Return the command that starts or continues it."""
        placed = [given("paths.outputs", self.place), *(given(_ROW, p) for p in self.published)]
        if self.command != "evaluate":
            placed.append(f"resume={'auto' if self.is_given_the_same() else 'never'}")
        return _last_of_each([*super().command_line(), *placed])


def plan(settings: StudySettings, folder: Path) -> list[PlannedRun]:
    """Return all runs of a study, all settings of a seed before the next seed.

    Raises:
        ConfigError: if a command line does not compose, with the row.
    """
    runs = []
    for seed in settings.seeds:
        of_row: dict[str, PlannedRun] = {}  # rows that others start from have one setting
        for name, row in settings.runs.items():
            choices = ([varied(k, one) for one in row.vary[k]] for k in row.vary)
            for values in itertools.product(*choices):
                of_row[name] = _planned(settings, folder, name, values, seed, of_row)
                runs.append(of_row[name])
    for word in settings.overrides.train:
        if not any(word in run.words for run in runs):
            raise ConfigError(f"train:{word}: no run reads it, leave it out")
    return runs


def _planned(
    settings: StudySettings,
    folder: Path,
    name: str,
    values: tuple[str, ...],
    seed: int,
    of_row: Mapping[str, PlannedRun],
) -> PlannedRun:
    row = settings.runs[name]
    written = [*getattr(settings.shared, row.command), *row.overrides, *values]
    shared = getattr(settings.overrides, row.command)
    written += shared
    if any(key_of(word) == "seed" for word in written):
        raise ConfigError(f"runs.{name}: seeds=[...] says the seeds of all runs, not seed=")
    starts_from = {kind: of_row[other] for kind, other in row.starts_from.items()}
    setting = " ".join(map(_short, values))
    named = re.sub(r"[^\w.=+-]", "_", setting)
    named = named if named == setting else f"{named}_{_digest(setting)}"
    models = (folder / "rows").resolve()
    words = _words(settings, row, written, seed, models, starts_from, name in settings.makers)
    run = PlannedRun(
        row=name,
        setting=setting,
        seed=seed,
        command=row.command,
        words=without_unread(words, shared) if row.command == "train" else words,
        place=folder.joinpath("runs", name, *filter(None, (named, f"seed_{seed}"))),
        models=models if name in settings.makers else None,
        starts_from=starts_from,
        needs=tuple(starts_from.values()),
    )
    try:
        _ = run.settings
    except ConfigError as error:
        raise ConfigError(f"runs.{name}: {error}") from error
    return run


def _words(
    settings: StudySettings,
    row: RowSettings,
    written: list[str],
    seed: int,
    models: Path,
    starts_from: Mapping[str, PlannedRun],
    makes: bool,
) -> tuple[str, ...]:
    """Return the words of a run, with those that name the models it loads and publishes.

    The folders are below `paths`, so that hashes do not depend on where the study is. The run's
    folder has the run's hash in its name, so it is known later.
    """
    artifacts = Path(settings.paths.artifacts).resolve()
    if "debug=fast" in written:  # keeps its models apart
        artifacts /= "debug_fast"
    # Models that runs start from are made by these words too.
    making = [word for word in written if word.lstrip("+").startswith(_MAKING)]
    if making:
        artifacts /= _digest(" ".join(making))
    words = [*config_dirs(), *([] if row.experiment is None else [f"+experiment={row.experiment}"])]
    words += [f"seed={seed}", *written, given("paths.artifacts", artifacts)]
    words.append(given("paths.publish", makes))
    if makes:
        words += [given(_ROW, models), f"artifacts.publish=${{{key_of(_ROW)}}}"]
    if starts_from:
        words.append(given("+paths.rows", models))
    keys = {kind: f"artifacts.{kind}" if kind in MODELS else kind for kind in starts_from}
    words += [f"{keys[k]}=${{paths.rows}}/{one.model}" for k, one in starts_from.items()]
    return tuple(_last_of_each(words))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _short(word: str) -> str:
    """Return `kl_coef=0.1` of `module.ppo.kl_coef=0.1`."""
    key, _, value = word.partition("=")
    return f"{key.rpartition('.')[2]}={value}"


def _last_of_each(words: Iterable[str]) -> list[str]:
    """Return the words without those whose key a later one has: Hydra refuses a group twice."""
    return list({key_of(word): word for word in words}.values())
