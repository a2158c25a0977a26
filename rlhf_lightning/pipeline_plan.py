"""What a pipeline runs, in which order, and with which command lines."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.composition import ConfigError, choices, conf_dir, plain
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder, to_json
from rlhf_lightning.runs.resume import checkpoint_problem
from rlhf_lightning.settings import TopSettings, build_checked
from rlhf_lightning.targets import did_you_mean

TRAINED = ("base", "sft", "reward", "ppo")
STAGES = ("base", "sft", "collect", "reward", "ppo", "evaluate")
STATE = "pipeline.json"
RUNNING, DONE, FAILED_GATE = "running", "passed", "gate failed"


@dataclass(frozen=True)
class Step:
    """One stage of one round.

    Args:
        round: from 1.
        stage: one of `STAGES`.
        module: of the entry point.
        overrides: its command line, without where it writes.
    """

    round: int
    stage: str
    module: str
    overrides: tuple[str, ...]

    @property
    def name(self) -> str:
        """Such as `round_1/reward`: also its folder below that of the pipeline."""
        return f"round_{self.round}/{self.stage}"

    @property
    def continues(self) -> bool:
        """Whether it goes on in its folder where it was stopped; an evaluation begins anew."""
        return self.stage != "evaluate"

    def command(self, folder: Path) -> list[str]:
        """Return the command that runs the step into its folder, or goes on with what is there.

        Args:
            folder: of the pipeline.
        """
        where = RunFolder(folder / self.name)
        placed = [
            given("paths.outputs", where.path.parent),
            given("hydra.run.dir", where.path),
        ]
        unfinished = self.stage in TRAINED and where.last_checkpoint.exists()
        if unfinished and checkpoint_problem(where.last_checkpoint) is None:
            placed.append(given("ckpt_path", where.last_checkpoint))
        return [sys.executable, "-m", self.module, *self.overrides, *placed]


@dataclass(frozen=True)
class Outcome:
    """What became of a step (`running`, `passed`, `gate failed`), and of which command line."""

    step: str
    overrides: tuple[str, ...]
    status: str


def as_overrides(words: Sequence[str]) -> list[str]:
    """Return the command line with its words for one stage as Hydra reads them.

    `ppo:module.ppo.kl_coef=0.1` becomes `overrides.ppo=['module.ppo.kl_coef=0.1']`; `train:` is for
    every training stage. Other words stay as they are.
    """
    own: dict[str, list[str]] = {}
    others = []
    for word in words:
        stage, colon, rest = word.partition(":")
        if colon and stage in ("train", *STAGES):
            own.setdefault(stage, []).append(_quoted(rest))
        else:
            others.append(word)
    return others + [f"overrides.{stage}=[{','.join(found)}]" for stage, found in own.items()]


def check_pipeline(cfg: DictConfig) -> None:
    """Refuse what nothing reads or runs.

    Raises:
        ConfigError: with what was found and what to write.
    """
    written: Any = OmegaConf.load(conf_dir() / "pipeline.yaml")
    known = sorted({*map(str, written), "paths"} - {"defaults", "hydra"})
    for key in map(str, cfg):
        if key not in known and key != "hydra":
            raise ConfigError(f"unknown top-level key {key!r}{did_you_mean(key, known)}")
    for group in ("experiments", "overrides"):
        keys = list(map(str, written[group]))
        for key in map(str, cfg[group]):
            if key not in keys:
                raise ConfigError(f"unknown key {group}.{key}{did_you_mean(key, keys)}")
    try:
        build_checked(TopSettings, {key: cfg[key] for key in ("seed", "name")}, "")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if cfg.resume not in ("never", "auto"):
        raise ConfigError(f"resume={cfg.resume} must be never or auto")
    if cfg.rounds != 1:
        raise ConfigError(f"rounds={cfg.rounds}: only one round can be run so far, use rounds=1")
    for key in ("collect", "evaluate"):
        if not isinstance(cfg[key], bool):
            raise ConfigError(f"{key}={cfg[key]} must be true or false")
    experiments = choices("experiment")
    for stage, name in cfg.experiments.items():
        if name is not None and name not in experiments:
            hint = did_you_mean(str(name), experiments)
            raise ConfigError(f"experiments.{stage}={name} is no experiment{hint}")
    if cfg.evaluation_gates not in choices("gates"):
        hint = did_you_mean(str(cfg.evaluation_gates), choices("gates"))
        raise ConfigError(f"evaluation_gates={cfg.evaluation_gates} is none of conf/gates{hint}")
    for stage in cfg.accept:
        if stage not in STAGES:
            raise ConfigError(f"accept names {stage!r}{did_you_mean(str(stage), list(STAGES))}")
    for stage, words in cfg.overrides.items():
        if not OmegaConf.is_list(words) or not all(isinstance(word, str) for word in words):
            raise ConfigError(
                f"overrides.{stage}={words} must be a list of texts: write {stage}:key=value"
            )


def plan(cfg: DictConfig, folder: Path) -> list[Step]:
    """Return the steps of a pipeline in their order.

    Args:
        cfg: of the pipeline.
        folder: of the pipeline, where its models are kept.
    """
    return _first_round(cfg, folder)


def _first_round(cfg: DictConfig, folder: Path) -> list[Step]:
    first = folder / "round_1"
    ours = (f"seed={cfg.seed}", given("paths.artifacts", first / "artifacts"))
    words: Mapping[str, Sequence[str]] = plain(cfg.overrides)
    steps = []
    for stage in STAGES:
        own = tuple(words[stage])
        if stage in TRAINED:
            if cfg.experiments[stage] is None:
                continue
            more = tuple(words["train"])
            if stage == "reward" and cfg.collect:
                more = (given("data.path", first / "collect" / "data"), *more)
            head = (f"+experiment={cfg.experiments[stage]}",)
            steps.append(Step(1, stage, "rlhf_lightning.train", (*head, *ours, *more, *own)))
        elif cfg[stage]:
            held = (f"gates={cfg.evaluation_gates}",) if stage == "evaluate" else ()
            steps.append(Step(1, stage, f"rlhf_lightning.{stage}", (*ours, *held, *own)))
    return steps


def read_state(folder: Path) -> dict[str, Outcome]:
    """Return the outcome of each step that was judged; a new pipeline has none.

    Raises:
        ConfigError: if the file is damaged.
    """
    path = folder / STATE
    if not path.is_file():
        return {}
    try:
        rows = json.loads(path.read_text(encoding="utf-8"))
        found = [Outcome(row["step"], tuple(row["overrides"]), row["status"]) for row in rows]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} is damaged ({error}): begin anew with resume=never") from error
    return {outcome.step: outcome for outcome in found}


def write_state(folder: Path, outcomes: Mapping[str, Outcome]) -> None:
    """Write the outcomes in one step."""
    rows = [asdict(outcome) for outcome in outcomes.values()]
    write_text(folder / STATE, to_json(rows, indent=2) + "\n")


def set_aside(folder: Path) -> None:
    """Give what stands in the way of a new run another name: `reward` becomes `reward_before_1`."""
    if not folder.exists():
        return
    number = 1
    while (other := folder.with_name(f"{folder.name}_before_{number}")).exists():
        number += 1
    folder.rename(other)


def given(key: str, path: Path) -> str:
    """Return `key=path` as Hydra reads it, whatever characters are in the path."""
    return f"{key}={_quoted(str(path))}"


def _quoted(text: str) -> str:
    # Hydra reads a backslash as itself, but before a quote as what escapes it.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"
