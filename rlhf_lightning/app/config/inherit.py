"""`run=FOLDER` of evaluation and collection: the settings of a training run in place of defaults.

They use the prompts of that run's dataset and load its models. A run folder may come from another
machine, so its settings are data: they are validated again, and code must be named again.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import ConfigError, primary
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.local_files import (
    UNREADABLE,
    Named,
    is_unchanged,
    local_files,
    written_keys,
)
from rlhf_lightning.app.config.saved import read_saved, working_folder
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import nodes
from rlhf_lightning.app.config.validate import check_overrides_are_read, read_settings
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, read_manifest
from rlhf_lightning.runs.summary import summary_or_none

# Of a group all keys are taken over (None) or these alone, which the command reads.
_MODEL = ("name", "chat_template", "chat_template_arguments", "revision", "trust_remote_code")
_ANSWERS = (
    "num_prompts",
    "answers_per_prompt",
    "batch_size",
    "micro_batch_size",
    "temperature",
    "max_new_tokens",
    "skip_special_tokens",
    "gold",
)
_GROUPS: dict[str, dict[str, Collection[str] | None]] = {
    "evaluate": {
        "dataset": None,
        "model": _MODEL,
        "rollout": None,
        "scorer": None,
        "safety": None,
        "gates": None,
        "evaluation": _ANSWERS,
    },
    "collect": {"dataset": None, "model": _MODEL},
}
_SINGLE = {  # key of the training run -> key of the command
    "evaluate": {
        "data.max_prompt_length": "prompts.max_length",
        "trainer.precision": "trainer.precision",
        "trainer.matmul_precision": "trainer.matmul_precision",
        "seed": "seed",
    },
    "collect": {
        "data.max_prompt_length": "candidates.max_prompt_length",
        "module.sampling.max_new_tokens": "candidates.max_new_tokens",
        "module.sampling.skip_special_tokens": "candidates.skip_special_tokens",
        "trainer.precision": "trainer.precision",
        "trainer.matmul_precision": "trainer.matmul_precision",
        "seed": "seed",
    },
}


def command_settings(
    entry: str, cfg: DictConfig, overrides: Sequence[str], *, trains_first: bool = False
) -> Any:
    """Return the settings of a command, with those inherited from `run=`.

    Args:
        entry: name of the command.
        cfg: composed configuration of the command.
        overrides: overrides of the command line.
        trains_first: whether they may have words of the stages that it trains first.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    taken, trained = inherit(entry, cfg, overrides)
    settings = read_settings(COMMANDS[entry], taken)
    check_overrides_are_read(overrides, settings, trained, trains_first=trains_first)
    return settings


def inherit(
    entry: str, cfg: DictConfig, overrides: Sequence[str]
) -> tuple[DictConfig, TrainSettings | None]:
    """Return a command's configuration with what it inherits from `run=`, and that run's settings.

    Settings on the command line stay; a group that it chooses stays as a whole.

    Args:
        entry: name of the command, evaluate or collect.
        cfg: composed; without `run` it is returned as it is.
        overrides: overrides of the command line.

    Raises:
        ConfigError: if the run cannot be read, trained no policy, or names code.
    """
    where = cfg.get("run") if entry in _GROUPS else None
    if where is None:
        return cfg, None
    folder = RunFolder(Path(str(where)))
    trained = read_training(folder)
    if entry == "evaluate" and not trained.spec.trains_policy:
        raise ConfigError(
            f"run={folder.path} trained a {trained.spec.title}: give the run of a policy"
        )
    # A pipeline's file of settings is next to the folder of the run.
    made = RunFolder(folder.path.with_suffix("")) if folder.path.suffix == ".yaml" else folder
    summary = summary_or_none(folder)
    read = {} if summary is None else summary.read
    taken = take_over(entry, cfg, overrides, trained, models_of(trained, made), read)
    return taken, trained


def read_training(folder: RunFolder) -> TrainSettings:
    """Return the settings of a training run, of its folder or of a file of settings.

    Raises:
        ConfigError: if there are none.
    """
    file = folder.path if folder.path.suffix == ".yaml" else folder.config
    try:
        return read_saved(TrainSettings, file)
    except ConfigError as error:
        raise ConfigError(f"run={folder.path}: {error}") from error


def models_of(trained: TrainSettings, folder: RunFolder) -> dict[str, str]:
    """Return the models of a training run by kind, with what it made itself, as found from here."""
    start = working_folder(folder)
    found = {}
    for kind, source in trained.artifacts.models().items():
        beside = start / source
        gone = not os.path.exists(source) and os.path.exists(beside)
        found[kind] = str(beside) if gone else source
    return found | {trained.spec.name: _made(trained, folder)}


def _made(trained: TrainSettings, folder: RunFolder) -> str:
    """Return the model that a run made: the artifact if it is unchanged, else its export."""
    if trained.publishes and trained.artifacts.publish is not None:
        target = working_folder(folder) / trained.artifacts.publish
        with suppress(ManifestError):
            manifest = read_manifest(target, verify=False)
            if Path(manifest.run).resolve() == folder.path.resolve():
                return str(target)
    if not folder.export.resolve().is_relative_to(folder.path.resolve()):
        raise ConfigError(f"{folder.export} is a link that leaves the run's folder: copy the model")
    return str(folder.export)


def take_over(
    entry: str,
    cfg: DictConfig,
    overrides: Sequence[str],
    trained: TrainSettings,
    models: Mapping[str, str | None],
    read: Mapping[str, Sequence[str]] | None = None,
) -> DictConfig:
    """Return `cfg` with groups, keys and models of a training run; see `inherit`.

    What the run names of this machine must be what it has `read`; None is of a run that will be.
    """
    keys = {override.lstrip("+~").partition("=")[0] for override in overrides}
    _refuse_code(entry, trained, keys)
    changed: Any = OmegaConf.create(cast(Any, OmegaConf.to_container(cfg, resolve=False)))
    OmegaConf.set_struct(changed, False)
    trained = _updated(trained, cfg, keys, models)
    if read is not None:
        _refuse_changed(entry, trained, keys, read)
    resolved = trained.resolved
    for group, kept in _GROUPS[entry].items():
        if group in keys or _stays(group, trained):
            continue
        node = resolved.get(group)
        if kept is not None:
            node = {key: value for key, value in (node or {}).items() if key in kept}
            for key, value in node.items():
                OmegaConf.update(changed, f"{group}.{key}", value, merge=False, force_add=True)
        else:
            changed[group] = node
    for theirs, ours in _SINGLE[entry].items():
        if (value := trained.select(theirs)) is not None:
            OmegaConf.update(changed, ours, value)
    for kind in _artifacts(entry):
        if kind in models or entry == "collect":
            OmegaConf.update(changed, f"artifacts.{kind}", models.get(kind))
    if entry == "evaluate" and trained.only_runs:
        OmegaConf.update(changed, "paths.apart", trained.paths.apart)
    if entry == "evaluate":
        # Another artifacts.sft on the command line is another baseline, as by default.
        for side, kind in (("policy", trained.spec.name), ("baseline", trained.spec.starts_from)):
            key = f"${{artifacts.{kind}}}"
            changed[side] = key if key == primary(entry)[side] else models.get(kind)
    for key in keys:
        if "." in key or key in ("seed", "policy", "baseline"):
            OmegaConf.update(changed, key, OmegaConf.select(cfg, key), force_add=True)
    return cast(DictConfig, changed)


def _artifacts(entry: str) -> list[str]:
    """Return the keys of the models that a command reads where it is given none.

    Candidates for labels come from the policy that a run started from, and its base if any.
    """
    given = primary(entry)["artifacts"]
    return [kind for kind in MODELS if given.get(kind) is not None]


def _updated(
    trained: TrainSettings,
    cfg: DictConfig,
    keys: Collection[str],
    models: Mapping[str, str | None],
) -> TrainSettings:
    """Return a run's settings with models where they are now, and what the command line names."""
    moved = {f"artifacts.{kind}": source for kind, source in models.items() if kind in MODELS}
    # Their values are repeated by all that refers to them, such as the dataset's source.
    named = {k: OmegaConf.select(cfg, k) for k in keys if k.startswith(("artifacts.", "dataset."))}
    computed = {"trainer.precision": trained.compute_precision}  # of models that are not sharded
    return trained.updated(moved | named | computed)


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


def read_again(entry: str, trained: TrainSettings) -> Iterator[tuple[Named, list[str]]]:
    """Yield what a command takes over that is on this machine.

    With the keys by which a command line names it: its place, and what that refers to.
    """
    kinds = {trained.spec.starts_from} if entry == "evaluate" else set(_artifacts(entry))
    kinds -= {trained.spec.name}  # its own
    for found in local_files(trained):
        group, _, kind = found.place.partition(".")
        if kind in kinds if group == "artifacts" else _is_taken(entry, group, kind, trained):
            yield found, written_keys(trained.written, found.place)


def _is_taken(entry: str, group: str, key: str, trained: TrainSettings) -> bool:
    kept = _GROUPS[entry].get(group, ())
    return not _stays(group, trained) and (kept is None or key.partition(".")[0] in kept)


def _refuse_changed(
    entry: str,
    trained: TrainSettings,
    keys: Collection[str],
    read: Mapping[str, Sequence[str]],
) -> None:
    for found, named in read_again(entry, trained):
        key, group = named[-1], found.place.partition(".")[0]
        if {group, *named} & set(keys):
            continue
        try:
            same = is_unchanged(found.paths, read.get(found.place, ()))
        except UNREADABLE as error:
            raise ConfigError(f"{key}: {' '.join(str(error).split())}") from error
        if not same:
            why = "has changed since the run" if found.place in read else "is not known of the run"
            raise ConfigError(
                f"{key}={found.value} {why} (SHA-256), and a run folder alone is not trusted with "
                f"other files: name it again on the command line (++{key}=...), or another {group}"
            )


def _refuse_code(entry: str, trained: TrainSettings, keys: Collection[str]) -> None:
    for key, value in named_again(entry, trained).items():
        group = key.partition(".")[0]
        if not {group, key} & set(keys):
            raise ConfigError(
                f"the run has {key}={value}, which its folder alone is not trusted with: name it "
                f"again on the command line (++{key}=...), or choose another {group}"
            )
