"""What a pipeline runs, in which order, and with which command lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.config.compose import ConfigError, choices, conf_dir, plain
from rlhf_lightning.app.config.schema import TopSettings, build_checked
from rlhf_lightning.app.config.targets import did_you_mean
from rlhf_lightning.app.pipeline.inherited_overrides import (
    HERE,
    Lead,
    collection_words,
    evaluation_words,
    quoted,
)
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.resume import checkpoint_problem

TRAINED = ("base", "sft", "reward", "ppo")
STAGES = ("base", "sft", "collect", "adversarial", "reward", "ppo", "evaluate")
LATER = STAGES[2:]  # what the rounds after the first run
FIRST = ("base", "sft", "collect", "reward", "ppo", "evaluate")  # nothing has misled a policy yet
NEEDED = ("reward", "ppo")  # by each of several rounds
ADDRESSED = ("train", *STAGES)  # by words of the command line
ANEW = ("evaluate",)  # begin anew where they were stopped
COLLECTIONS = {"adversarial": "collect"}  # by the same people and judges, with the same words
_ROUND = re.compile(r"round_[1-9]\d*")


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
        return self.stage not in ANEW

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


def as_overrides(words: Sequence[str]) -> list[str]:
    """Return the command line with its words for one stage as Hydra reads them.

    `ppo:module.ppo.kl_coef=0.1` becomes `overrides.ppo=['module.ppo.kl_coef=0.1']`; `train:` is for
    every training stage, `round_2/ppo:` for one round alone. Other words stay as they are.
    """
    own: dict[str, list[str]] = {}
    others = []
    for word in words:
        place, colon, rest = word.partition(":")
        at, _, stage = place.rpartition("/")
        if colon and stage in ADDRESSED and (not at or _ROUND.fullmatch(at)):
            key = f"+overrides.{at}.{stage}" if at else f"overrides.{stage}"
            own.setdefault(key, []).append(quoted(rest))
        else:
            others.append(word)
    return others + [f"{key}=[{','.join(found)}]" for key, found in own.items()]


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
    _check_rounds(cfg)
    rounds = [f"round_{number}" for number in range(1, cfg.rounds + 1)]
    for group, more in (("experiments", []), ("overrides", rounds)):
        keys = [*map(str, written[group]), *more]
        for key in map(str, cfg[group]):
            if key not in keys:
                raise ConfigError(f"unknown key {group}.{key}{did_you_mean(key, keys)}")
    try:
        build_checked(TopSettings, {key: cfg[key] for key in ("seed", "name")}, "")
    except ValueError as error:
        raise ConfigError(str(error)) from error
    if cfg.resume not in ("never", "auto"):
        raise ConfigError(f"resume={cfg.resume} must be never or auto")
    for key in ("collect", "adversarial", "evaluate"):
        if not isinstance(cfg[key], bool):
            raise ConfigError(f"{key}={cfg[key]} must be true or false")
    experiments = choices("experiment")
    for stage, name in cfg.experiments.items():
        if name is not None and name not in experiments:
            hint = did_you_mean(str(name), experiments)
            raise ConfigError(f"experiments.{stage}={name} is no experiment{hint}")
    if cfg.evaluation_gates not in (None, *choices("gates")):
        hint = did_you_mean(str(cfg.evaluation_gates), choices("gates"))
        raise ConfigError(f"evaluation_gates={cfg.evaluation_gates} is none of conf/gates{hint}")
    steps = [*STAGES, *(f"{name}/{stage}" for name in rounds for stage in STAGES)]
    for stage in cfg.accept:
        if stage not in steps:
            raise ConfigError(f"accept names {stage!r}{did_you_mean(str(stage), steps)}")
    _check_words(cfg.overrides, list(map(str, written.overrides)))
    plan(cfg, HERE)


def _check_rounds(cfg: DictConfig) -> None:
    if isinstance(cfg.rounds, bool) or not isinstance(cfg.rounds, int) or cfg.rounds < 1:
        raise ConfigError(f"rounds={cfg.rounds} must be a whole number, at least 1")
    for stage in NEEDED:
        if cfg.rounds > 1 and cfg.experiments[stage] is None:
            raise ConfigError(
                f"rounds={cfg.rounds} trains reward model and policy again in every round, and "
                f"experiments.{stage}=null leaves one out: name an experiment, or use rounds=1"
            )


def _check_words(overrides: Mapping[Any, Any], stages: list[str], place: str = "") -> None:
    for stage, words in overrides.items():
        if stage not in stages:
            if place or not OmegaConf.is_dict(words):
                where = f"{place}/" if place else ""
                raise ConfigError(
                    f"overrides: {where}{stage}{did_you_mean(str(stage), stages)}: write "
                    f"{place or 'round_2'}/STAGE:key=value"
                )
            _check_words(words, stages, str(stage))
        elif not OmegaConf.is_list(words) or not all(isinstance(word, str) for word in words):
            name = f"{place}/{stage}" if place else stage
            raise ConfigError(
                f"overrides.{name}={words} must be a list of texts: write {name}:key=value"
            )


def accepted(cfg: DictConfig, step: Step) -> bool:
    """Return whether the pipeline goes on although a step has failed its gates."""
    return step.stage in cfg.accept or step.name in cfg.accept


def plan(cfg: DictConfig, folder: Path) -> list[Step]:
    """Return the steps of a pipeline in their order.

    Args:
        cfg: of the pipeline.
        folder: of the pipeline, where its models are kept.

    Raises:
        ConfigError: if what is trained does not compose, or cannot be evaluated or labelled.
    """
    steps = _first_round(cfg, folder)
    for number in range(2, cfg.rounds + 1):
        steps += _later_round(cfg, folder, number)
    return steps


def _first_round(cfg: DictConfig, folder: Path) -> list[Step]:
    steps = []
    for stage in FIRST:
        if stage in TRAINED:
            if cfg.experiments[stage] is None:
                continue
        elif not cfg[stage]:
            continue
        steps.append(_step(cfg, folder, 1, stage))
    return steps


def _later_round(cfg: DictConfig, folder: Path, number: int) -> list[Step]:
    left_out = {name for name in ("adversarial", "evaluate") if not cfg[name]}
    kept = [stage for stage in LATER if stage not in left_out]
    return [_step(cfg, folder, number, stage) for stage in kept]


def _own_words(cfg: DictConfig, folder: Path, number: int, stage: str) -> tuple[str, ...]:
    """Return what a stage gets from the ones before it; see docs/evaluation.md for the choices.

    After round 1 candidates come from the policy of the round before. The reward model is trained
    from the SFT policy again, on the pairs of all rounds. PPO goes on from the last policy; its
    reference and the baseline of the evaluation stay the SFT policy of round 1.
    """
    first_pairs = (given("data.path", folder / "round_1/collect/data"),) if cfg.collect else ()
    if number == 1:
        return {"reward": first_pairs}.get(stage, ())
    here, before = folder / f"round_{number}", folder / f"round_{number - 1}"
    rounds = [folder / f"round_{k}" for k in range(2, number + 1)]
    collections = ("collect", "adversarial") if cfg.adversarial else ("collect",)
    records = [str(r / name / "data") for r in rounds for name in collections]
    policy, judge = before / "ppo" / "export", before / "reward" / "export"
    reward, ppo = here / "artifacts" / "reward", here / "artifacts" / "ppo"
    # The pairs of round 1 have margins where they were collected: then the later ones do too.
    labels = ("artifacts.base=null", *(() if cfg.collect else ("lab.margin_scale=0.0",)))
    own: dict[str, tuple[str, ...]] = {
        "collect": (
            *labels,
            "artifacts.publish=null",
            "candidates.policies.sft=null",
            given("+candidates.policies.policy", policy),
        ),
        "adversarial": (
            *labels,
            "artifacts.publish=null",
            given("adversarial.run", here / "collect"),
            given("artifacts.reward", judge),
            "budget.validation_share=0.0",  # what is held out stays what it was
        ),
        "reward": (
            *first_pairs,
            f"data.also=[{','.join(map(quoted, records))}]",
            given("artifacts.publish", reward),
        ),
        "ppo": (
            given("artifacts.reward", reward),
            given("artifacts.ppo", policy),
            given("artifacts.publish", ppo),
        ),
    }
    return own.get(stage, ())


def _step(cfg: DictConfig, folder: Path, number: int, stage: str) -> Step:
    """Return a step whose command line has our words, then those of the user, which win."""
    words: Mapping[str, Any] = plain(cfg.overrides)
    here: Mapping[str, Sequence[str]] = words.get(f"round_{number}", {})
    own = _own_words(cfg, folder, number, stage)
    ours = (f"seed={cfg.seed}", given("paths.artifacts", folder / "round_1" / "artifacts"))
    if stage in TRAINED:
        # The next round loads export/.
        whole = ("export.dtype=fp32",) if stage in LATER and cfg.rounds > 1 else ()
        head = (f"+experiment={cfg.experiments[stage]}", *ours, *whole, *own, *words["train"])
        theirs = (*words[stage], *here.get("train", ()), *here.get(stage, ()))
        return Step(number, stage, "rlhf_lightning.train", (*head, *theirs))
    theirs = (*words[stage], *here.get(stage, ()))
    module = COLLECTIONS.get(stage, stage)
    if stage in COLLECTIONS:
        theirs = (*words[module], *here.get(module, ()), *theirs)
    lead = _lead(cfg, number, "ppo", "reward", "sft", "base")
    if lead is None:
        raise ConfigError(f"{stage} has nothing to go by: name an experiment, such as ppo")
    if module == "evaluate":
        carried = evaluation_words(lead, folder, cfg.evaluation_gates, theirs)
    else:
        start = _lead(cfg, 1, "sft") if number == 1 else None
        carried = collection_words(lead, start, folder, theirs)
    return Step(number, stage, f"rlhf_lightning.{module}", (*ours, *carried, *own, *theirs))


def _lead(cfg: DictConfig, number: int, *stages: str) -> Lead | None:
    """Return the first of these stages that an experiment is named for."""
    for stage in stages:
        if cfg.experiments[stage] is not None:
            step = _step(cfg, HERE, number, stage)
            return Lead(step.name, step.overrides)
    return None


def given(key: str, path: Path) -> str:
    """Return `key=path` as Hydra reads it, whatever characters are in the path."""
    return f"{key}={quoted(str(path))}"
