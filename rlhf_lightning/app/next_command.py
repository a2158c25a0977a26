"""The command that takes what a run has made, to be pasted where the run was started."""

from __future__ import annotations

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.compose import ConfigError, at, choices, given, word
from rlhf_lightning.app.config.inherit import named_again
from rlhf_lightning.app.config.saved import saved_config, saved_words
from rlhf_lightning.app.config.settings import RunSettings, TrainSettings
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.prerequisites import file_for, has_records, words_for
from rlhf_lightning.runs.folder import RunFolder, from_here, run_behind

_COMPARE = "Read the samples. Eight responses to each held-out prompt narrow the interval:"
_MORE = "evaluation.answers_per_prompt=8"
_TALK = "Read the samples, and talk to it beside the model that it was trained from:"
# By what was made: the experiment that starts from it.
_NEXT = {
    "base": ("sft", "Fine-tune this model on demonstrations:"),
    "sft": ("reward", "Train a reward model from this policy:"),
    "reward": ("ppo", "Train a policy against this reward model:"),
}


def after_training(settings: TrainSettings, folder: RunFolder, overrides: Sequence[str]) -> str:
    """Return a sentence and, on a second line, the command for the model that a run has made.

    Where no stage is known for which the dataset of the run has records, the sentence says which
    key of the next command takes the model.
    """
    stage = settings.spec
    start = run_behind(str(settings.start))
    if stage.trains_policy and stage.starts_from != "base":
        if settings.scorer is None and settings.evaluation.gold is None:
            return _told(_TALK, "chat", [from_here(folder.path), start])
        named = named_again("evaluate", settings)
        again, key = list[str](), "scorer.function"
        if key in named and settings.select("scorer").keys() == {"_target_", "function"}:
            again = ["--reward", named.pop(key)]
        again += [given(f"++{key}", value) for key, value in named.items()]
        return _told(_COMPARE, "evaluate", [_word("run", folder.path), _MORE, *again])
    made = "sft" if stage.trains_policy else "reward"
    made = "base" if settings.start is None else made
    if settings.dataset.source.path.endswith(".FileSource"):
        return _short_way(settings, made, start, folder, overrides)
    key = f"artifacts.{made}"
    own = _word(key, folder.export)
    elsewhere = f"The next stage starts from it with {own}."
    kind, told = _NEXT[made]
    if not has_records(settings, kind):
        if f"ppo_{settings.name.partition('_')[2]}" not in choices("experiment"):
            return elsewhere
        kind, told = "ppo", "Train this policy:"
    words = [w for w in _words(settings, kind, folder, overrides) if not w.startswith(f"{key}=")]
    return _checked(told, [*words, own]) or elsewhere


def _short_way(
    settings: TrainSettings, made: str, start: str, folder: RunFolder, overrides: Sequence[str]
) -> str:
    """Return the same of a run on a file, as `rlhf-train EXPERIMENT MODEL FILE`."""
    kind, told = ("dpo", "Train it on preferences:") if made == "sft" else _NEXT[made]
    file, run = file_for(settings, kind), from_here(folder.path)
    policy, reward = (start, ["--reward-model", run]) if made == "reward" else (run, [])
    if file.isupper():
        told = f"{told[:-1]}; {file} is your file of {file.lower()}:"
    said = ("model=pretrained", "model.name=", "dataset=", "dataset.path=", "dataset.name=")
    experiment, *words = words_for(settings, kind, overrides, other_file=False)
    others = [word for word in words if not word.lstrip("+").startswith((*said, "artifacts."))]
    return _told(told, "train", [experiment, policy, file, *others, *reward])


def after_collecting(settings: Any, folder: RunFolder, overrides: Sequence[str], data: Path) -> str:
    """Return the same for records, which `data` holds."""
    if settings.run is not None:  # its dataset and its models are that run's
        folder = RunFolder(Path(settings.run))
        overrides = [*saved_words(folder), *overrides]
    if settings.records == "preferences":
        words = _words(settings, "reward", folder, overrides)
        return _checked("Train a reward model on the pairs:", [*words, _word("data.path", data)])
    source = {"_target_": "rlhf_lightning.FileSource", "path": str(from_here(data))}
    sampled = settings.candidates.policies.get("sft") or settings.artifacts.sft
    words = _words(settings, "sft", folder, overrides)
    words = [word for word in words if "artifacts.base=" not in word]
    words += [_word("artifacts.base", Path(sampled)), given("data.source", source)]
    return _checked("Fine-tune on them:", words)


def _words(
    settings: RunSettings, kind: str, folder: RunFolder, overrides: Sequence[str]
) -> list[str]:
    """Return the words of the training, with model and dataset of the run."""
    words = list(dict.fromkeys(words_for(settings, kind, overrides, other_file=False)))
    file = folder.config.with_name("hydra.yaml")
    chosen = at(saved_config(file), "hydra.runtime.choices") if file.is_file() else None
    for group in ("dataset", "model"):
        named = (chosen or {}).get(group)
        has = any(word.lstrip("+").startswith(f"{group}=") for word in words)
        if words[0] == kind and named not in (None, "demo") and not has:
            words.insert(1, f"{group}={named}")
    return [f"+experiment={words[0]}", *words[1:]]


def _checked(told: str, words: list[str]) -> str:
    """Return sentence and command; "" if what is carried over does not compose there."""
    try:
        if len(words) > 2:
            load_settings(TrainSettings, "train", [w for w in words if not w.startswith("--")])
    except ConfigError:
        return ""
    return _told(told, "train", words)


def _told(told: str, command: str, words: list[str]) -> str:
    program = [from_here(Path(sys.executable)), "-m", f"rlhf_lightning.{command}"]
    program = [f"rlhf-{command}"] if shutil.which(f"rlhf-{command}") else program
    return f"{told}\n{shlex.join([*program, *words])}"


def _word(key: str, path: Path) -> str:
    return word(key, from_here(path))
