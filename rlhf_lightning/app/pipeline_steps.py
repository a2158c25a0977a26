"""The stages of a pipeline: their order, their command lines, and what they read."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.commands import PipelineSettings
from rlhf_lightning.app.config.compose import (
    ConfigError,
    config_dirs,
    given,
    keys_of,
    texts,
)
from rlhf_lightning.app.config.errors import composition
from rlhf_lightning.app.config.inherit import command_settings, named_again
from rlhf_lightning.app.config.saved import write_settings
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import check_functions, load_settings, without_unread
from rlhf_lightning.app.config.ways import ADDRESSED
from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, content_digest
from rlhf_lightning.runs.summary import Summary, summary_or_none

STAGES = tuple(name for name in ADDRESSED if name != "train")
LEADS = ("ppo", "reward", "sft", "base")  # whose prompts and lengths a collection takes
FIRST = ("base", "sft", "collect", "reward", "ppo", "evaluate")  # nothing has misled a policy yet
LATER = STAGES[2:]  # what the rounds after the first run
HERE = Path("<pipeline>")  # stands for its folder, where nothing is run yet
# What says where a run writes, and what is not read but where another key refers to it.
_NOT_READ = {"paths", "hydra", "logger", "callbacks", "run", "model.folder", "model.base"}
# Of a model's folder what is no part of its fingerprint and changes what is learnt or sampled.
_BESIDE = ("*config.json", "special_tokens_map.json", "chat_template.*", "vocab.*", "*.model")


@dataclass(frozen=True)
class Step:
    """One stage of one round."""

    round: int  # from 1
    stage: str  # one of STAGES
    place: Path
    command: str  # train, collect or evaluate
    words: tuple[str, ...]  # its command line, without its folder
    lead: Step | None = None  # the training whose settings it takes over; None for a training

    @property
    def name(self) -> str:
        """Such as `round_1/reward`: also its folder below that of the pipeline."""
        return f"round_{self.round}/{self.stage}"

    @property
    def placed(self) -> list[str]:
        """Its words, and those that say where it writes."""
        where = [given("paths.outputs", self.place.parent), given("hydra.run.dir", self.place)]
        return [*self.words, *where]

    @cached_property
    def training(self) -> TrainSettings:
        """The settings of a training step, wherever it writes."""
        try:
            found = load_settings(TrainSettings, "train", list(self.words))
            check_functions(found.written)
            return found
        except ConfigError as error:
            raise ConfigError(f"{self.name}: {error}") from error

    @cached_property
    def settings(self) -> Any:
        """The settings, as the command reads them: they may be those of the step that leads."""
        if self.lead is not None:  # whose run may be later, or not begun
            self.place.parent.mkdir(parents=True, exist_ok=True)
            write_settings(self.lead.place.with_suffix(".yaml"), self.lead.training)
        cfg = composition(self.command, self.placed)
        return command_settings(self.command, cfg, self.placed)

    def command_line(self) -> list[str]:
        """Return the command that starts the step in its folder, or continues it."""
        resume = ["resume=auto"] if self.command != "evaluate" else []
        return [sys.executable, "-m", f"rlhf_lightning.{self.command}", *self.placed, *resume]

    def summary(self) -> Summary | None:
        """Return the summary in its folder, if it is of these settings."""
        found = summary_or_none(RunFolder(self.place))
        same = found is not None and found.config_hash == self.settings.config_hash
        return found if same else None

    def read(self) -> dict[str, str]:
        """Return the digests of the files and models that its settings name, by their keys."""
        named, resolved = keys_of(self.words), self.settings.resolved
        found = {"export": json.dumps(resolved.get("export"))}  # no part of the hash
        for key, text in texts(resolved):
            group = key.partition(".")[0]
            is_read = key in named if group == "artifacts" else not {group, key} & _NOT_READ
            if is_read and key != "artifacts.publish":
                found |= _digests(key, text)
        return found


def _digests(key: str, text: str) -> dict[str, str]:
    """Return the digests of the file, script, module or folder that a text names, if any."""
    path = Path(re.sub(r"(\.py):\w+$", r"\1", text))
    if key.endswith("function") and re.fullmatch(r"\w+(\.\w+)+", text):
        module = f"{text.rpartition('.')[0].replace('.', '/')}.py"
        names = (os.path.join(place, module) for place in ("", *sys.path))
        path = Path(next(filter(os.path.isfile, names), path))
    # os.path takes a text of any length for no path. Names of groups may be those of folders, too.
    is_model = os.path.isfile(path / "config.json")
    is_folder = os.path.isdir(path) and (is_model or "/" in text or key.endswith("path"))
    if not (is_folder or os.path.isfile(path)):
        return {}
    if (path / "summary.json").is_file():  # of a run its records: pages are written again
        path /= "data"
    beside = sorted(file for name in _BESIDE for file in path.glob(name)) if is_model else []
    with suppress(OSError, ManifestError):
        return {key: " ".join(map(content_digest, (path, *beside)))}
    return {}


def plan(settings: PipelineSettings, folder: Path) -> list[Step]:
    """Return the steps of a pipeline in their order.

    Raises:
        ConfigError: if a training does not compose, or its model cannot be evaluated or labelled.
    """
    asked = {stage: getattr(settings, stage, None) for stage in STAGES} | settings.experiments
    later = [stage for stage in LATER if stage == "collect" or asked[stage]]
    rounds = [[stage for stage in FIRST if asked[stage]], *[later] * (settings.rounds - 1)]
    return [
        _step(settings, folder, number, stage)
        for number, stages in enumerate(rounds, start=1)
        for stage in stages
    ]


def _step(settings: PipelineSettings, folder: Path, number: int, stage: str) -> Step:
    """Return a step whose command line has our words, then those of the user, which win."""
    given_words: Mapping[str, Any] = settings.overrides
    levels = (given_words, given_words.get(f"round_{number}", {}))
    own = _own_words(settings, folder, number).get(stage, [])
    place = folder / f"round_{number}" / stage
    ours = [f"seed={settings.seed}", given("paths.artifacts", folder / "round_1" / "artifacts")]

    def theirs(*names: str) -> list[str]:
        return [word for level in levels for name in names for word in level.get(name, ())]

    if stage in settings.experiments:
        # The next round loads export/, and may be asked for when this one has ended.
        ours += ["export.dtype=fp32"] if stage in LATER else []
        line = [*config_dirs(), f"+experiment={settings.experiments[stage]}", *ours, *own]
        words = without_unread([*line, *theirs("train", stage)], theirs("train"))
        return Step(number, stage, place, "train", words)
    command = "collect" if stage == "adversarial" else stage  # by the same people and judges
    known: Mapping[str, Any] = settings.experiments  # type: ignore[assignment]
    lead_name = next(filter(known.get, LEADS[:1] if command == "evaluate" else LEADS), None)
    if lead_name is None:
        raise ConfigError(f"experiments.ppo=null leaves none to {command}: use {command}=false")
    lead = _step(settings, folder, number, lead_name)
    trained = lead.training
    carried = [given(f"++{key}", value) for key, value in named_again(command, trained).items()]
    if command == "evaluate":
        gates = settings.evaluation_gates or (None if trained.spec.starts_from == "sft" else "ppo")
        carried += [given("run", lead.place), *([f"gates={gates}"] if gates else [])]
    else:
        carried.append(given("run", lead.place.with_suffix(".yaml")))
        if number == 1 and settings.experiments.get("sft"):
            base = _step(settings, folder, 1, "sft").training.artifacts.base
            carried += [given("artifacts.base", Path(base))] if base else []
    line = [*config_dirs(), *ours, *carried, *own, *theirs(*dict.fromkeys((command, stage)))]
    return Step(number, stage, place, command, tuple(line), lead)


def _own_words(settings: PipelineSettings, folder: Path, number: int) -> dict[str, list[str]]:
    """Return the words of stages that depend on earlier ones; see docs/pipeline_and_sweeps.md.

    After round 1 candidates come from the policy of the round before. The reward model is trained
    from the SFT policy again, on the pairs of all rounds. PPO continues from the last policy; its
    reference and the baseline of the evaluation stay the SFT policy of round 1.
    """
    pairs = [given("data.path", folder / "round_1/collect/data")] if settings.collect else []
    if number == 1:
        return {"reward": pairs}
    here, before = folder / f"round_{number}", folder / f"round_{number - 1}"
    collections = ("collect", "adversarial") if settings.adversarial else ("collect",)
    rounds = range(2, number + 1)
    records = [folder / f"round_{k}" / name / "data" for k in rounds for name in collections]
    reward, ppo = here / "artifacts" / "reward", here / "artifacts" / "ppo"
    # The pairs of round 1 have margins where they were collected: then the later ones do too.
    labels = ["artifacts.base=null", "artifacts.publish=null"]
    labels += [] if settings.collect else ["lab.margin_scale=0.0"]
    policy = given("+candidates.policies.policy", before / "ppo" / "export")
    return {
        "collect": [*labels, "candidates.policies.sft=null", policy],
        "adversarial": [
            *labels,
            given("adversarial.run", here / "collect"),
            given("artifacts.reward", before / "reward" / "export"),
            "budget.validation_share=0.0",  # what is held out stays what it was
        ],
        "reward": [*pairs, given("data.also", records), given("artifacts.publish", reward)],
        "ppo": [
            given("artifacts.reward", reward),
            given("artifacts.ppo", before / "ppo" / "export"),
            given("artifacts.publish", ppo),
        ],
    }


def check_pipeline(settings: PipelineSettings) -> None:
    """Check words and every command line, before anything runs.

    Raises:
        ConfigError: with what was found and what to write.
    """
    steps = plan(settings, HERE)
    read = {word for step in steps for word in step.words}
    for name, words in settings.addressed.items():
        if unread := [word for word in words if word not in read]:
            raise ConfigError(f"{name}:{unread[0]}: no step reads it, leave it out")
    for step in steps:
        _check_composes(step)


def _check_composes(step: Step) -> None:
    if step.lead is None:
        _ = step.training
        return
    trained, words = step.lead.training, [w for w in step.words if not w.startswith("run=")]
    is_demo = trained.dataset.source.read().call is DemoSource
    if step.command == "collect" and not (is_demo or {"dataset", "annotator"} & keys_of(words)):
        raise ConfigError(
            f"{step.lead.name} is trained on {trained.dataset.name}, and annotator=demo labels the "
            "built-in world alone: use collect:annotator=page or reward_model, or collect=false"
        )
    try:
        check_functions(composition(step.command, words))
    except ConfigError as error:
        raise ConfigError(f"{step.name}: {error}") from error
