"""The steps of a pipeline, their order and their command lines."""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.commands import COMMANDS, PipelineSettings
from rlhf_lightning.app.config.compose import ConfigError, choices, composed, primary
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, OF_TRAINING, explain
from rlhf_lightning.app.config.inherit import named_again, read_again, take_over
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import did_you_mean
from rlhf_lightning.app.config.validate import load_settings, read_settings
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
LEADS = ("ppo", "reward", "sft", "base")  # of a collection
DEMO = "rlhf_lightning.data.demo.source.DemoSource"
HERE = Path("<pipeline>")  # stands for its folder, where nothing is run yet
_ROUND = re.compile(r"round_[1-9]\d*")


@dataclass(frozen=True)
class Step:
    """One stage of one round.

    Args:
        round: from 1.
        stage: one of `STAGES`.
        module: of the entry point.
        overrides: its command line, without where it writes.
        lead: the training step whose settings it takes over; None for a training step.
    """

    round: int
    stage: str
    module: str
    overrides: tuple[str, ...]
    lead: Step | None = None

    @property
    def name(self) -> str:
        """Such as `round_1/reward`: also its folder below that of the pipeline."""
        return f"round_{self.round}/{self.stage}"

    @property
    def continues(self) -> bool:
        """True if it goes on in its folder where it was stopped; an evaluation begins anew."""
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
        return [sys.executable, "-m", self.module, *self._of_lead(), *self.overrides, *placed]

    def _of_lead(self) -> list[str]:
        """Return what a collection reads before its lead has: nothing has recorded it yet."""
        if self.lead is None or self.stage in ANEW:
            return []
        trained = _settings_of(self.lead)
        chosen = {word.lstrip("+").partition("=")[0] for word in self.overrides}
        found = {}
        for named, keys in read_again("collect", trained):
            if named.place.partition(".")[0] not in chosen:
                found[keys[-1]] = _written(named.value)
        return [f"++{key}={value}" for key, value in found.items()]


def as_overrides(words: Sequence[str]) -> list[str]:
    """Return the command line with its words for one stage as Hydra reads them.

    `ppo:module.ppo.kl_coef=0.1` becomes `overrides.ppo=['module.ppo.kl_coef=0.1']`; `train:` is for
    every training stage, `round_2/ppo:` for one round alone. `logger=` and `debug=` are
    for training. Other words stay as they are.
    """
    own: dict[str, list[str]] = {}
    others = []
    for word in words:
        place, colon, rest = f"{'train:' * word.startswith(OF_TRAINING)}{word}".partition(":")
        at, _, stage = place.rpartition("/")
        if colon and stage in ADDRESSED and (not at or _ROUND.fullmatch(at)):
            key = f"+overrides.{at}.{stage}" if at else f"overrides.{stage}"
            own.setdefault(key, []).append(quoted(rest))
        else:
            others.append(word)
    return others + [f"{key}=[{','.join(found)}]" for key, found in own.items()]


def check_pipeline(settings: PipelineSettings) -> None:
    """Check names, words and every command line, before anything runs.

    Raises:
        ConfigError: with what was found and what to write.
    """
    _check_rounds(settings)
    rounds = [f"round_{number}" for number in range(1, settings.rounds + 1)]
    written = primary("pipeline")
    for group, more in (("experiments", []), ("overrides", rounds)):
        keys = [*map(str, written[group]), *more]
        for key in getattr(settings, group):
            if key not in keys:
                raise ConfigError(f"unknown key {group}.{key}{did_you_mean(key, keys)}")
    experiments = choices("experiment")
    for stage, name in settings.experiments.items():
        if name is not None and name not in experiments:
            hint = did_you_mean(name, experiments)
            raise ConfigError(f"experiments.{stage}={name} is no experiment{hint}")
    gates = settings.evaluation_gates
    if gates not in (None, *choices("gates")):
        hint = did_you_mean(str(gates), choices("gates"))
        raise ConfigError(f"evaluation_gates={gates} is none of conf/gates{hint}")
    steps = [*STAGES, *(f"{name}/{stage}" for name in rounds for stage in STAGES)]
    for stage in settings.accept:
        if stage not in steps:
            raise ConfigError(f"accept names {stage!r}{did_you_mean(stage, steps)}")
    _check_words(settings.overrides, list(map(str, written["overrides"])))
    for step in plan(settings, HERE):
        if step.lead is not None:
            _check_follower(step, step.lead)
        else:
            _settings_of(step)


def _check_follower(step: Step, lead: Step) -> None:
    """Check the command line of a step that takes over the settings of `lead`.

    Raises:
        ConfigError: if it does not compose, or if nothing can label that data set.
    """
    trained = _settings_of(lead)
    entry = step.module.rpartition(".")[2]
    words = [word for word in step.overrides if not word.startswith("run=")]
    chosen = {word.lstrip("+").partition("=")[0] for word in words}
    dataset = trained.dataset.source.path
    if entry == "collect" and dataset != DEMO and not {"dataset", "annotator"} & chosen:
        raise ConfigError(
            f"{lead.name} is trained on {trained.dataset.name}, and annotator=demo labels "
            "responses of the built-in world alone: say who labels with collect:annotator=page or "
            "collect:annotator=reward_model, or collect nothing (collect=false rounds=1)"
        )
    named = {"policy", "artifacts.ppo"} & chosen
    if entry == "evaluate" and trained.spec.starts_from != "sft" and not named:
        raise ConfigError(
            "evaluate=true compares the policy that PPO trains, and experiments.ppo=null leaves "
            "PPO out: use evaluate=false, or name a policy with evaluate:policy=FOLDER"
        )
    models = {kind: trained.artifacts.of(kind) for kind in ("base", "sft", "reward")}
    models[trained.spec.name] = str(HERE / lead.name / "export")
    try:
        cfg = composed(entry, words)
    except COMPOSE_ERRORS as error:
        raise ConfigError(f"{step.name}: {explain(error, words, entry)}") from error
    try:
        read_settings(COMMANDS[entry], take_over(entry, cfg, words, trained, models))
    except ConfigError as error:
        raise ConfigError(f"{step.name}: {error}") from error


def _settings_of(step: Step) -> TrainSettings:
    """Return the settings of a training step.

    Raises:
        ConfigError: with the name of the step.
    """
    try:
        return load_settings(TrainSettings, "train", list(step.overrides))
    except ConfigError as error:
        raise ConfigError(f"{step.name}: {error}") from error


def _check_rounds(settings: PipelineSettings) -> None:
    for stage in NEEDED:
        if settings.rounds > 1 and settings.experiments.get(stage) is None:
            raise ConfigError(
                f"rounds={settings.rounds} trains reward model and policy again in every round, "
                f"and experiments.{stage}=null leaves one out: name an experiment, or use rounds=1"
            )


def _check_words(overrides: Mapping[Any, Any], stages: list[str], place: str = "") -> None:
    for stage, words in overrides.items():
        if stage not in stages:
            if place or not isinstance(words, Mapping):
                where = f"{place}/" if place else ""
                raise ConfigError(
                    f"overrides: {where}{stage}{did_you_mean(str(stage), stages)}: write "
                    f"{place or 'round_2'}/STAGE:key=value"
                )
            _check_words(words, stages, str(stage))
        elif not isinstance(words, list) or not all(isinstance(word, str) for word in words):
            name = f"{place}/{stage}" if place else stage
            raise ConfigError(
                f"overrides.{name}={words} must be a list of texts: write {name}:key=value"
            )


def accepted(settings: PipelineSettings, step: Step) -> bool:
    """Return whether the pipeline goes on although a step has failed its gates."""
    return step.stage in settings.accept or step.name in settings.accept


def plan(settings: PipelineSettings, folder: Path) -> list[Step]:
    """Return the steps of a pipeline in their order.

    Args:
        settings: of the pipeline.
        folder: of the pipeline, where its models are kept.

    Raises:
        ConfigError: if what is trained does not compose, or cannot be evaluated or labelled.
    """
    steps = _first_round(settings, folder)
    for number in range(2, settings.rounds + 1):
        steps += _later_round(settings, folder, number)
    return steps


def _first_round(settings: PipelineSettings, folder: Path) -> list[Step]:
    steps = []
    for stage in FIRST:
        if stage in TRAINED:
            if settings.experiments.get(stage) is None:
                continue
        elif not getattr(settings, stage):
            continue
        steps.append(_step(settings, folder, 1, stage))
    return steps


def _later_round(settings: PipelineSettings, folder: Path, number: int) -> list[Step]:
    left_out = {name for name in ("adversarial", "evaluate") if not getattr(settings, name)}
    kept = [stage for stage in LATER if stage not in left_out]
    return [_step(settings, folder, number, stage) for stage in kept]


def _own_words(
    settings: PipelineSettings, folder: Path, number: int, stage: str
) -> tuple[str, ...]:
    """Return what a stage gets from the ones before it; see docs/evaluation.md for the choices.

    After round 1 candidates come from the policy of the round before. The reward model is trained
    from the SFT policy again, on the pairs of all rounds. PPO goes on from the last policy; its
    reference and the baseline of the evaluation stay the SFT policy of round 1.
    """
    first_pairs = (given("data.path", folder / "round_1/collect/data"),) if settings.collect else ()
    if number == 1:
        return {"reward": first_pairs}.get(stage, ())
    here, before = folder / f"round_{number}", folder / f"round_{number - 1}"
    rounds = [folder / f"round_{k}" for k in range(2, number + 1)]
    collections = ("collect", "adversarial") if settings.adversarial else ("collect",)
    records = [str(r / name / "data") for r in rounds for name in collections]
    policy, judge = before / "ppo" / "export", before / "reward" / "export"
    reward, ppo = here / "artifacts" / "reward", here / "artifacts" / "ppo"
    # The pairs of round 1 have margins where they were collected: then the later ones do too.
    labels = ("artifacts.base=null", *(() if settings.collect else ("lab.margin_scale=0.0",)))
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


def _step(settings: PipelineSettings, folder: Path, number: int, stage: str) -> Step:
    """Return a step whose command line has our words, then those of the user, which win."""
    words: Mapping[str, Any] = settings.overrides
    here: Mapping[str, Sequence[str]] = words.get(f"round_{number}", {})
    own = _own_words(settings, folder, number, stage)
    ours = (f"seed={settings.seed}", given("paths.artifacts", folder / "round_1" / "artifacts"))
    if stage in TRAINED:
        # The next round loads export/, and may be asked for when this one has ended.
        whole = ("export.dtype=fp32",) if stage in LATER else ()
        head = (
            f"+experiment={settings.experiments.get(stage)}",
            *ours,
            *whole,
            *own,
            *words["train"],
        )
        theirs = (*words[stage], *here.get("train", ()), *here.get(stage, ()))
        return Step(number, stage, "rlhf_lightning.train", (*head, *theirs))
    theirs = (*words[stage], *here.get(stage, ()))
    module = COLLECTIONS.get(stage, stage)
    if stage in COLLECTIONS:
        theirs = (*words[module], *here.get(module, ()), *theirs)
    lead = _lead(settings, folder, number, *(("ppo", "sft") if module == "evaluate" else LEADS))
    if lead is None:
        raise ConfigError(f"{stage} has nothing to go by: name an experiment, such as ppo")
    trained = _settings_of(lead)
    carried = [f"++{k}={_written(v)}" for k, v in named_again(module, trained).items()]
    if module == "evaluate":
        gates = settings.evaluation_gates or (None if trained.spec.starts_from == "sft" else "ppo")
        carried += [given("run", folder / lead.name)]
        carried += [] if gates is None else [f"gates={gates}"]
    else:
        # The training step runs later: its settings are written before.
        carried += [given("run", settings_file(folder, lead))]
        start = _lead(settings, folder, 1, "sft") if number == 1 else None
        if start is not None:
            base = _settings_of(start).artifacts.base
            carried += [] if base is None else [given("artifacts.base", Path(base))]
    overrides = (*ours, *carried, *own, *theirs)
    return Step(number, stage, f"rlhf_lightning.{module}", overrides, lead)


def _written(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return quoted(value) if isinstance(value, str) else str(value).lower()


def settings_file(folder: Path, lead: Step) -> Path:
    """Return the file with the settings of a training step, for the steps before it."""
    return folder / f"{lead.name}.yaml"


def _lead(settings: PipelineSettings, folder: Path, number: int, *stages: str) -> Step | None:
    """Return the step of the first of these stages that an experiment is named for."""
    for stage in stages:
        if settings.experiments.get(stage) is not None:
            return _step(settings, folder, number, stage)
    return None


def quoted(text: str) -> str:
    """Return a text as Hydra reads it on a command line, whatever characters are in it."""
    # Hydra reads a backslash as itself, but before a quote as what escapes it.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def given(key: str, path: Path) -> str:
    """Return `key=path` as Hydra reads it, whatever characters are in the path."""
    return f"{key}={quoted(str(path))}"
