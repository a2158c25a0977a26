"""The models a stage starts from: found, or trained first where they are built-in ones.

Must not import torch: it runs in a process that will train later.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from rlhf_lightning.app.config.compose import ConfigError, choices
from rlhf_lightning.app.config.settings import RunSettings
from rlhf_lightning.distributed.launch import own_environment
from rlhf_lightning.runs.lock import artifact_lock
from rlhf_lightning.runs.model_folder import is_adapter

KINDS = ("base", "sft", "reward", "ppo")
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
# Other ways to debug are about the stage itself: what it starts from is trained in full.
_PASSED_ON = (
    "paths.outputs",
    "paths.artifacts",
    "debug=fast",
    "logger",
    "trainer.accelerator",
    "model.from_scratch",
    "dataset.",
)
# Overrides that the stages of a pretrained model share.
_SHARED = ("model=", "dataset=", "dataset.name=", "dataset.family=", "lora=", "strategy=")


def prepare_inputs(
    settings: RunSettings,
    overrides: list[str],
    say: Callable[[str], None] = print,
    *,
    kinds: Sequence[str] = KINDS,
) -> None:
    """Make sure that the models in `artifacts` exist; train the built-in ones that do not.

    A missing default of the built-in world is trained by a child process, one device, under a
    file lock on its folder.

    Args:
        settings: of the command.
        overrides: of the command line; those that concern every stage go on to the child.
        say: prints a line.
        kinds: keys of `artifacts` that are looked at.

    Raises:
        ConfigError: for a missing path that the user gave, naming the command that makes it.
        RuntimeError: if a child fails.
    """
    for kind in kinds:
        source = settings.select(f"artifacts.{kind}")
        if source is None or is_available(source):
            continue
        folder = Path(source)
        if not _is_built_in(settings, kind):
            maker = _maker(settings, kind, overrides)
            raise ConfigError(
                f"artifacts.{kind}={source} does not exist: give a folder or hub name, or make it "
                f"with  python -m rlhf_lightning.train +experiment={maker}"
            )
        with artifact_lock(folder, report=say):
            if not is_available(source):
                say(
                    f"The {kind} model of the built-in world is not in {folder}: training it first."
                )
                _train(kind, settings, overrides)


def is_available(source: str) -> bool:
    """Return whether a folder holds a model, or the text can be a hub name."""
    folder = Path(source)
    if folder.is_dir():
        return (folder / "config.json").is_file() or is_adapter(folder)  # named when it is loaded
    # A hub name: transformers looks for it, in its cache first.
    return bool(_HUB_NAME.fullmatch(source)) and not folder.parent.exists()


def _is_built_in(settings: RunSettings, kind: str) -> bool:
    name = str(settings.select("dataset.name") or "")
    default = Path(settings.paths.artifacts) / name / kind
    return name.startswith("demo_") and Path(settings.select(f"artifacts.{kind}")) == default


def _maker(settings: RunSettings, kind: str, overrides: Sequence[str]) -> str:
    """Return the words by which an experiment makes a `kind` model for these settings."""
    sibling = "_".join([kind, *settings.name.split("_")[1:]])
    if sibling in choices("experiment"):
        return sibling
    words = [word for word in overrides if word.startswith(_SHARED)]
    other = settings.select("dataset.sft_dataset") if kind == "sft" else None
    if other is not None and not any(word.startswith("dataset.family=") for word in words):
        words = [f"dataset={other}" if word.startswith("dataset=") else word for word in words]
    return " ".join([kind, *words])


def _train(kind: str, settings: RunSettings, overrides: list[str]) -> None:
    kept = [o for o in overrides if o.lstrip("+").startswith(_PASSED_ON)]
    command = [sys.executable, "-m", "rlhf_lightning.train", f"+experiment={kind}"]
    command += [f"seed={settings.seed}", *kept]
    if settings.paths.apart is not None:  # whatever set it: a file, a preset or the command line
        command.append(f"paths.apart={settings.paths.apart}")
    code = subprocess.run(command, check=False, env=own_environment()).returncode
    if code or not is_available(str(settings.select(f"artifacts.{kind}"))):
        made = "" if code else " and made no model"
        raise RuntimeError(
            f"training the {kind} model failed with exit status {code}{made}: "
            + " ".join(command[1:])
        )
