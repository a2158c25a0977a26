"""`run=FOLDER` of evaluation and collection: the settings of a training run in place of defaults.

They use the prompts of that run's dataset and load its models. A run folder may come from another
machine, so its settings are data: they are validated again, and code and addresses must be named
again on the command line.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import ConfigError, keys_of, primary, texts
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.saved import read_saved, working_folder
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import nodes
from rlhf_lightning.app.config.validate import (
    CODE,
    check_overrides_are_read,
    plain_settings,
    read_settings,
)
from rlhf_lightning.runs.folder import RunFolder, near_run
from rlhf_lightning.runs.manifest import ManifestError, read_manifest

# Of a group all keys are taken over (None) or these alone, which the command reads.
_MODEL = ("name", "chat_template", "chat_template_arguments", "revision", "trust_remote_code")
_ANSWERS = (
    *("num_prompts", "answers_per_prompt", "batch_size", "micro_batch_size", "temperature"),
    *("max_new_tokens", "skip_special_tokens", "gold"),
)
_GROUPS: dict[str, dict[str, Collection[str] | None]] = {
    "evaluate": {
        **dict.fromkeys(("dataset", "rollout", "scorer", "safety", "gates")),
        "model": _MODEL,
        "evaluation": _ANSWERS,
    },
    "collect": {"dataset": None, "model": _MODEL},
}
_SAME = {key: key for key in ("trainer.precision", "trainer.matmul_precision", "seed")}
_SINGLE = {  # key of the training run -> key of the command
    "evaluate": {"data.max_prompt_length": "prompts.max_length"} | _SAME,
    "collect": {
        "data.max_prompt_length": "candidates.max_prompt_length",
        "module.sampling.max_new_tokens": "candidates.max_new_tokens",
        "module.sampling.skip_special_tokens": "candidates.skip_special_tokens",
    }
    | _SAME,
}


def command_settings(entry: str, cfg: DictConfig, overrides: Sequence[str]) -> Any:
    """Return the settings of a command, with those inherited from `run=`.

    Settings on the command line stay; a group that it chooses stays as a whole.

    Args:
        entry: name of the command.
        cfg: composed configuration of the command.
        overrides: overrides of the command line, also for the stages that it trains first.

    Raises:
        ConfigError: with the key, what it got and what it wants; also if the run cannot be read,
            trained no policy, or names code.
    """
    trained = None
    if entry in _GROUPS and cfg.get("run") is not None:
        folder = RunFolder(Path(str(cfg.run)))
        trained = read_training(folder)
        if entry == "evaluate" and not trained.spec.trains_policy:
            raise ConfigError(f"run={cfg.run} trained a {trained.title}: give the run of a policy")
        # A pipeline's file of settings is next to the folder of the run.
        made = RunFolder(folder.path.with_suffix("")) if folder.path.suffix == ".yaml" else folder
        cfg = take_over(entry, cfg, overrides, trained, made)
    settings = read_settings(COMMANDS[entry], cfg)
    check_overrides_are_read(overrides, settings, trained)
    return settings


def training_file(folder: RunFolder) -> Path:
    """Return the file with the settings of a run folder; a file of settings is one itself.

    Raises:
        ConfigError: if there is none.
    """
    path = folder.path
    file = path if path.suffix == ".yaml" else folder.config
    if not file.is_file():
        told = f"run={path} is no run folder: give one below outputs/"
        raise ConfigError(f"{told}{near_run(path)}")
    return file


def check_run(entry: str, folder: RunFolder, overrides: Sequence[str]) -> Collection[str]:
    """Refuse without torch what `command_settings` would; return the models of the run."""
    trained = read_training(folder, plain_settings)
    if entry == "evaluate" and trained.stage == "reward":
        raise ConfigError(f"run={folder.path} trained a reward model: give the run of a policy")
    taken = (text for group in _GROUPS[entry] for text in texts(trained.resolved.get(group), group))
    _check_named_again({k: text for k, text in taken if k.rpartition(".")[2] in CODE}, overrides)
    return trained.artifacts.models().values()


def read_training(
    folder: RunFolder, read: Callable[..., TrainSettings] = read_settings
) -> TrainSettings:
    """Return the settings of a training run, of its folder or of a file of settings.

    Args:
        folder: the run folder, or the file.
        read: `plain_settings` needs no torch.

    Raises:
        ConfigError: if there are none.
    """
    file = training_file(folder)
    try:
        return read_saved(TrainSettings, file, read)
    except ConfigError as error:
        raise ConfigError(f"run={folder.path}: {error}") from error


def models_of(trained: TrainSettings, folder: RunFolder) -> dict[str, str]:
    """Return the models of a training run by kind, with what it made itself, as found from here.

    What it made is the artifact that it published, if no other run has since, else its export.
    """
    start, made = working_folder(folder), str(folder.export)
    if trained.publishes and trained.artifacts.publish is not None:
        target = start / trained.artifacts.publish
        with suppress(ManifestError):
            if Path(read_manifest(target, verify=False).run).resolve() == folder.path.resolve():
                made = str(target)
    found = trained.artifacts.models()
    for kind, source in found.items():
        if not os.path.exists(source) and os.path.exists(start / source):
            found[kind] = str(start / source)
    return found | {trained.stage: made}


def take_over(
    entry: str, cfg: DictConfig, overrides: Sequence[str], trained: TrainSettings, made: RunFolder
) -> DictConfig:
    """Return `cfg` with groups, keys and models of a training run; see `command_settings`."""
    models = models_of(trained, made)
    keys = keys_of(overrides)
    _check_named_again(named_again(entry, trained), overrides)
    changed: Any = OmegaConf.create(cast(Any, OmegaConf.to_container(cfg, resolve=False)))
    OmegaConf.set_struct(changed, False)
    moved = {f"artifacts.{kind}": source for kind, source in models.items() if kind in MODELS}
    # Their values are repeated by all that refers to them, such as the dataset's source.
    named = {k: OmegaConf.select(cfg, k) for k in keys if k.startswith(("artifacts.", "dataset."))}
    computed = {"trainer.precision": trained.compute_precision}  # of models that are not sharded
    trained = trained.updated(moved | named | computed)
    for group, kept in _GROUPS[entry].items():
        if group in keys or _stays(group, trained):
            continue
        node: Any = trained.resolved.get(group)
        if kept is None:
            changed[group] = node
        for key in (key for key in kept or () if key in (node or {})):
            OmegaConf.update(changed, f"{group}.{key}", node[key], merge=False, force_add=True)
    for theirs, ours in _SINGLE[entry].items():
        if (value := trained.select(theirs)) is not None:
            OmegaConf.update(changed, ours, value)
    given = primary(entry)
    for kind in (kind for kind in MODELS if given["artifacts"].get(kind) is not None):
        if kind in models or entry == "collect":
            OmegaConf.update(changed, f"artifacts.{kind}", models.get(kind))
    if entry == "evaluate":
        if trained.only_runs:
            OmegaConf.update(changed, "paths.apart", trained.paths.apart)
        # Another artifacts.sft on the command line is another baseline, as by default.
        for side, kind in (("policy", trained.stage), ("baseline", trained.spec.starts_from)):
            key = f"${{artifacts.{kind}}}"
            changed[side] = key if key == given[side] else models.get(kind)
    for key in keys:
        if "." in key or key in ("seed", "policy", "baseline"):
            OmegaConf.update(changed, key, OmegaConf.select(cfg, key), force_add=True)
    return cast(DictConfig, changed)


def _check_named_again(named: Mapping[str, Any], overrides: Sequence[str]) -> None:
    keys = keys_of(overrides)
    for key, value in named.items():
        group = key.partition(".")[0]
        if not {group, key} & keys:
            again = "--reward FILE.py:NAME" if key.endswith(".function") else f"++{key}=..."
            raise ConfigError(
                f"the run has {key}={value}, which its folder alone is not trusted with: name it "
                f"again on the command line ({again}), or choose another {group}"
            )


def _stays(group: str, trained: TrainSettings) -> bool:
    """Return whether the default of the command is kept."""
    scorer = trained.scorer
    if group == "scorer" and trained.spec.rolls_out:
        # Of an adapter the merged model is exported.
        return scorer is None or getattr(scorer.read().call, "holds", None) == "adapter"
    if group == "safety":
        return trained.safety is None  # the default looks for domains, and finds none
    return group == "gates" and not trained.spec.rolls_out


def named_again(entry: str, trained: TrainSettings) -> dict[str, Any]:
    """Return what a command takes over only if its command line says it too, by dotted key.

    Functions, addresses and code of the hub: a run folder may come from another machine.
    """
    found = {"model.trust_remote_code": True} if trained.model.trust_remote_code else {}
    for where, target in trained.targets().items():
        group = where.partition(".")[0]
        if group in _GROUPS[entry] and not _stays(group, trained):
            for node in nodes(target.read(where)):
                found |= node.named_again
    return found
