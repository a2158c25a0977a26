"""The steps of a pipeline, their order and their command lines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import count
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.commands import COMMANDS, PipelineSettings
from rlhf_lightning.app.config.compose import ConfigError, choices, config_dirs, primary
from rlhf_lightning.app.config.errors import composition
from rlhf_lightning.app.config.inherit import (
    command_settings,
    named_again,
    take_over,
)
from rlhf_lightning.app.config.save import write_settings
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import (
    check_overrides_are_read,
    load_settings,
    read_settings,
    without_unread,
)
from rlhf_lightning.app.study.engine import ATTEMPTS, Run
from rlhf_lightning.app.study.words import STAGES, given, key_of
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.misfit import did_you_mean
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError, is_claimed
from rlhf_lightning.runs.resume import newest_complete_checkpoint
from rlhf_lightning.runs.summary import summary_or_none

TRAINED = ("base", "sft", "reward", "ppo")
LATER = STAGES[2:]  # what the rounds after the first run
FIRST = ("base", "sft", "collect", "reward", "ppo", "evaluate")  # nothing has misled a policy yet
NEEDED = ("reward", "ppo")  # by each of several rounds
COLLECTIONS = {"adversarial": "collect"}  # by the same people and judges, with the same words
LEADS = ("ppo", "reward", "sft", "base")  # of a collection
HERE = Path("<pipeline>")  # stands for its folder, where nothing is run yet


@dataclass(frozen=True, kw_only=True)
class Step(Run):
    """One stage of one round; `place` is its folder.

    Args:
        round: number of the round, from 1.
        stage: name of the stage, one of `STAGES`.
        lead: the training step whose settings it takes over; None for a training step.
    """

    round: int
    stage: str
    lead: Step | None = None

    @property
    def name(self) -> str:
        """Such as `round_1/reward`: also its folder below that of the pipeline."""
        return f"round_{self.round}/{self.stage}"

    @property
    def record(self) -> Path:
        """The file of the attempts of all steps."""
        return self.place.parent.parent / ATTEMPTS

    @property
    def settings_file(self) -> Path:
        """The settings of a training step, for the steps before it."""
        return self.place.with_suffix(".yaml")

    @cached_property
    def settings(self) -> Any:
        """The settings, as the command reads them: they may be those of the step that leads."""
        if self.lead is not None:
            self.place.parent.mkdir(parents=True, exist_ok=True)
            write_settings(self.lead.settings_file, _settings_of(self.lead))
        words = self._placed_words()
        return command_settings(self.command, composition(self.command, words), words)

    def command_line(self) -> list[str]:
        """Return the command that starts the step in its folder, or continues it."""
        line = [*super().command_line(), *self._placed_words()[len(self.words) :]]
        folder = RunFolder(self.place)
        if self.command != "train" or not folder.checkpoints.is_dir():
            return line
        checkpoint = newest_complete_checkpoint(folder, self.settings.config_hash)
        return line if checkpoint is None else [*line, given("ckpt_path", checkpoint)]

    def make_room(self) -> None:
        """Give a run that cannot be continued another name: `reward` becomes `reward_before_1`.

        Raises:
            FolderTakenError: if a living process writes there.
        """
        folder = RunFolder(self.place)
        self.place.parent.mkdir(parents=True, exist_ok=True)
        if is_claimed(self.place):
            raise FolderTakenError(f"another process writes {self.place}: wait for it, or end it")
        known = summary_or_none(folder)
        same = known is not None and known.config_hash == self.settings.config_hash
        ended = known is not None and known.status == "completed"
        continues = same and not ended and self.command != "evaluate" and self.is_given_the_same()
        if folder.summary.exists() and not continues:
            others = (self.place.with_name(f"{self.stage}_before_{n}") for n in count(1))
            self.place.rename(next(other for other in others if not other.exists()))

    def _placed_words(self) -> list[str]:
        """Return its words with those that say where it writes."""
        placed = [given("paths.outputs", self.place.parent), given("hydra.run.dir", self.place)]
        return [*self.words, *placed]


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
    planned = plan(settings, HERE)
    _check_words_have_steps(settings.overrides, planned)
    for step in planned:
        if step.lead is not None:
            _check_follower(step, step.lead)
        else:
            _settings_of(step)


def _check_follower(step: Step, lead: Step) -> None:
    """Check the command line of a step that takes over the settings of `lead`.

    Raises:
        ConfigError: if it does not compose, or if nothing can label that dataset.
    """
    trained = _settings_of(lead)
    entry = step.command
    words = [word for word in step.words if not word.startswith("run=")]
    chosen = set(map(key_of, words))
    is_demo = trained.dataset.source.read().call is DemoSource
    if entry == "collect" and not is_demo and not {"dataset", "annotator"} & chosen:
        raise ConfigError(
            f"{lead.name} is trained on {trained.dataset.name}, and annotator=demo labels only "
            "the built-in world: use collect:annotator=page or reward_model, or collect=false "
            "rounds=1"
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
        cfg = composition(entry, words)
        found = read_settings(COMMANDS[entry], take_over(entry, cfg, words, trained, models))
        check_overrides_are_read(words, found, trained)
    except ConfigError as error:
        raise ConfigError(f"{step.name}: {error}") from error


def _settings_of(step: Step) -> TrainSettings:
    """Return the settings of a training step.

    Raises:
        ConfigError: with the name of the step.
    """
    try:
        return load_settings(TrainSettings, "train", list(step.words))
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


def _check_words_have_steps(overrides: Mapping[Any, Any], steps: list[Step]) -> None:
    """Refuse words of a stage that this pipeline leaves out: nothing would read them."""
    names = {step.name for step in steps} | {step.stage for step in steps} | {"train"}
    names |= {f"round_{step.round}/train" for step in steps}
    # Those of `adversarial` come besides those of `collect`.
    names |= {name.replace("adversarial", "collect") for name in names}
    given_to = {word for step in steps for word in step.words}
    for place, words in overrides.items():
        for name, own in words.items() if isinstance(words, Mapping) else [("", words)]:
            full = f"{place}/{name}" if name else str(place)
            unread = [word for word in own if full not in names or word not in given_to]
            if unread:
                raise ConfigError(f"{full}:{unread[0]}: no step reads it, leave it out")


def accepted(settings: PipelineSettings, step: Step) -> bool:
    """Return whether the pipeline continues although a step has failed its gates."""
    return step.stage in settings.accept or step.name in settings.accept


def plan(settings: PipelineSettings, folder: Path) -> list[Step]:
    """Return the steps of a pipeline in their order.

    Raises:
        ConfigError: if a training does not compose, or its model cannot be evaluated or labelled.
    """
    of_first = {**settings.experiments, "collect": settings.collect, "evaluate": settings.evaluate}
    rounds = [(1, stage) for stage in FIRST if of_first.get(stage)]
    for number in range(2, settings.rounds + 1):
        left_out = {name for name in ("adversarial", "evaluate") if not getattr(settings, name)}
        rounds += [(number, stage) for stage in LATER if stage not in left_out]
    steps: list[Step] = []
    for number, stage in rounds:
        step = _step(settings, folder, number, stage)
        steps.append(replace(step, needs=tuple(steps[-1:])))  # a gate stands between the two
    return steps


def _own_words(
    settings: PipelineSettings, folder: Path, number: int, stage: str
) -> tuple[str, ...]:
    """Return the words of a stage that depend on earlier ones; see docs/evaluation.md.

    After round 1 candidates come from the policy of the round before. The reward model is trained
    from the SFT policy again, on the pairs of all rounds. PPO continues from the last policy; its
    reference and the baseline of the evaluation stay the SFT policy of round 1.
    """
    first_pairs = (given("data.path", folder / "round_1/collect/data"),) if settings.collect else ()
    if number == 1:
        return {"reward": first_pairs}.get(stage, ())
    here, before = folder / f"round_{number}", folder / f"round_{number - 1}"
    rounds = [folder / f"round_{k}" for k in range(2, number + 1)]
    collections = ("collect", "adversarial") if settings.adversarial else ("collect",)
    records = [r / name / "data" for r in rounds for name in collections]
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
            given("data.also", records),
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
    make = partial(Step, round=number, stage=stage, place=folder / f"round_{number}" / stage)
    ours = (f"seed={settings.seed}", given("paths.artifacts", folder / "round_1" / "artifacts"))
    if stage in TRAINED:
        # The next round loads export/, and may be asked for when this one has ended.
        whole = ("export.dtype=fp32",) if stage in LATER else ()
        experiment = f"+experiment={settings.experiments.get(stage)}"
        head = (*config_dirs(), experiment, *ours, *whole, *own, *words["train"])
        theirs = (*words[stage], *here.get("train", ()), *here.get(stage, ()))
        shared = (*words["train"], *here.get("train", ()))
        return make(command="train", words=without_unread((*head, *theirs), shared))
    theirs = (*words[stage], *here.get(stage, ()))
    command = COLLECTIONS.get(stage, stage)
    if stage in COLLECTIONS:
        theirs = (*words[command], *here.get(command, ()), *theirs)
    lead = _lead(settings, folder, number, *(("ppo", "sft") if command == "evaluate" else LEADS))
    if lead is None:
        raise ConfigError(f"{stage} has nothing to go by: name an experiment, such as ppo")
    trained = _settings_of(lead)
    carried = [given(f"++{key}", one) for key, one in named_again(command, trained).items()]
    if command == "evaluate":
        gates = settings.evaluation_gates or (None if trained.spec.starts_from == "sft" else "ppo")
        carried += [given("run", lead.place)]
        carried += [] if gates is None else [f"gates={gates}"]
    else:
        # The training step runs later: its settings are written before.
        carried += [given("run", lead.settings_file)]
        start = _lead(settings, folder, 1, "sft") if number == 1 else None
        if start is not None:
            base = _settings_of(start).artifacts.base
            carried += [] if base is None else [given("artifacts.base", Path(base))]
    return make(command=command, words=(*config_dirs(), *ours, *carried, *own, *theirs), lead=lead)


def _lead(settings: PipelineSettings, folder: Path, number: int, *stages: str) -> Step | None:
    """Return the step of the first of these stages that an experiment is named for."""
    for stage in stages:
        if settings.experiments.get(stage) is not None:
            return _step(settings, folder, number, stage)
    return None
