"""Read the settings of a command from a composed configuration, checked before anything is trained.

Ranges are checked where objects are made. Without this, a batch size of 0 or a reward function
that does not exist would be found after the stages that come first, which may be hours later.
"""

from __future__ import annotations

import contextlib
import copy
import re
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import (
    ConfigError,
    at,
    choices,
    config_dirs,
    describe_interpolation,
    dotted_keys,
    group_files,
    primary,
    texts,
    written_keys,
)
from rlhf_lightning.app.config.errors import ADDED, composition
from rlhf_lightning.app.config.settings import CommandSettings, RunSettings, TrainSettings
from rlhf_lightning.app.config.targets import OWN, TargetError
from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.data.formats import RowParser
from rlhf_lightning.data.kinds import to_kind
from rlhf_lightning.data.records import DemonstrationRecord, kind_of
from rlhf_lightning.misfit import did_you_mean, near_path
from rlhf_lightning.rollout.scorers.functions import check_function
from rlhf_lightning.rollout.scorers.hparams import is_address
from rlhf_lightning.runs.manifest import is_available, no_model

SettingsT = TypeVar("SettingsT", bound=CommandSettings)
# Settings that may name a function or class in a file, by their last part, and what it is.
CODE = {"estimator": "estimator", "function": "reward function"}
_PATHS = ("data.path", "dataset.path", "ckpt_path", "people.run", "adversarial.run")
_MODELS = ("policy", "baseline", "scorer.source")
_HANDED_ON = ("artifacts.", "dataset.")  # from the command line of a run that is taken over
# Words of a command line that all stages share.
SHARED = (
    *("model=", "model.", "dataset=", "dataset.", "lora=", "lora.", "logger"),
    *("trainer.accelerator", "paths.outputs", "paths.artifacts", "paths.suffix"),
)


def load_settings(settings: type[SettingsT], entry: str, overrides: list[str]) -> SettingsT:
    """Return the settings that a command line composes; for code that is not under Hydra.

    Raises:
        ConfigError: if it does not compose, or with the key, what it got and what it wants.
    """
    found = read_settings(settings, composition(entry, overrides))
    check_overrides_are_read(overrides, found)
    return found


def check_overrides_are_read(
    overrides: Sequence[str],
    settings: CommandSettings,
    origin: CommandSettings | None = None,
) -> None:
    """Refuse a word of the command line that sets what neither settings read.

    Args:
        overrides: words of the command line.
        settings: of the command.
        origin: of the run that they are taken over from, if any.

    Raises:
        ConfigError: with the word, and the keys of its last name that are read.
    """
    for word in overrides:
        key = word.lstrip("+").partition("=")[0]
        handed_on = origin is not None and key.startswith(_HANDED_ON) and is_read(word, origin)
        if is_read(word, settings) or handed_on:
            continue
        groups = {name: settings.written.get(name) for name in settings.open_groups}
        known = [one for one in dotted_keys(groups) if "." in one and is_read(one, settings)]
        alike = [one for one in known if one.rpartition(".")[2] == key.rpartition(".")[2]]
        near = f"; did you mean {' or '.join(alike)}?" if alike else did_you_mean(key, known)
        raise ConfigError(f"{word}: nothing reads {key} here: leave it out{near}")


def is_loaded(settings: RunSettings, source: str) -> bool:
    """Return whether anything but `artifacts` names a model."""

    def named(node: Any) -> bool:
        if isinstance(node, Mapping):
            return any(map(named, node.values()))
        return any(map(named, node)) if isinstance(node, list) else node == source

    return named({key: node for key, node in settings.resolved.items() if key != "artifacts"})


def without_unread(words: Sequence[str], shared: Sequence[str]) -> tuple[str, ...]:
    """Return the words of a training, without those shared with others that it does not read.

    Words that do not compose are returned as they are: reading them says what is wrong.

    Args:
        words: all words of its command line.
        shared: those among them that were written for several trainings.
    """
    unread: set[str] = set()
    with contextlib.suppress(ConfigError):
        settings = read_settings(TrainSettings, composition("train", list(words)))
        unread = {word for word in shared if not is_read(word, settings)}
    return tuple(word for word in words if word not in unread)


def read_settings(
    settings: type[SettingsT], cfg: DictConfig | Mapping[str, Any], *, saved: bool = False
) -> SettingsT:
    """Return the settings that a configuration says, all calls checked; imports torch.

    Args:
        settings: the class of a command.
        cfg: composed; the node `hydra` is left out.
        saved: it is that of a run, whose keys may be those of another version.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    found = plain_settings(settings, cfg, saved=saved)
    found.check_targets()
    if isinstance(found, TrainSettings):
        _check_training(found)
        if not saved:  # earlier versions trained with settings that did nothing
            _check_is_read(found)
            _check_said_once(found)
    return found


def plain_settings(
    settings: type[SettingsT], cfg: DictConfig | Mapping[str, Any], *, saved: bool = False
) -> SettingsT:
    """Return the settings with types, ranges, keys and hyper-parameters checked; without torch.

    Args and errors are those of `read_settings`.
    """
    try:
        written: Any = OmegaConf.to_container(OmegaConf.create(cast(Any, cfg)), resolve=False)
    except OmegaConfBaseException as error:
        raise ConfigError(describe_interpolation(error)) from error
    written.pop("hydra", None)
    known = [*settings.model_fields, "debug", "launcher"]
    for key in map(str, written):
        if key not in known:
            near = did_you_mean(key, [*known, *ADDED])
            raise ConfigError(f"unknown top-level key {key!r}{near}")
    if issubclass(settings, TrainSettings) and written.get("stage") is None:
        named = ", ".join(choices("experiment"))
        raise ConfigError(f"stage=None: choose what to train with +experiment=NAME, one of {named}")
    found = settings.of(_with_models_apart(written))
    if not saved:
        check_keys_are_known(found)
    return found


def check_functions(cfg: DictConfig | Mapping[str, Any]) -> None:
    """Refuse names of functions and classes that are not in their files, which are not run.

    Args:
        cfg: composed, also of a command that takes over settings of a run.

    Raises:
        ConfigError: with the nearest names.
    """
    written = OmegaConf.to_container(OmegaConf.create(cast(Any, cfg)), resolve=False)
    for key, text in texts(written):
        what = CODE.get(key.rpartition(".")[2])
        if what is not None and "${" not in text:
            try:
                check_function(text, what)
            except ValueError as error:
                raise ConfigError(str(error)) from error


def check_models(cfg: DictConfig, words: Sequence[str], also: Collection[str] = ()) -> None:
    """Refuse a model or file of the command line that is not there, as far as torch is not needed.

    One that a stage makes is left to the command, which names what makes it.

    Args:
        cfg: composed.
        words: words of the command line.
        also: models of a run that the command takes over.

    Raises:
        ConfigError: with the nearest folder.
    """
    for key in (word.lstrip("+").partition("=")[0] for word in words):
        group, _, kind = key.rpartition(".")
        source = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
        if key in _PATHS and isinstance(source, str) and not Path(source).exists():
            near = near_path(source, Path.exists)
            raise ConfigError(f"{key}={source} does not exist: check the path{near}")
        if (group != "artifacts" or kind == "publish") and key not in _MODELS:
            continue
        usual = (
            cfg.artifacts.values()
            if key in _MODELS
            else [f"{OmegaConf.select(cfg, 'model.folder')}/{kind}"]
        )
        if not isinstance(source, str) or is_address(source) or is_available(source):
            continue
        told = no_model(source, "give a model folder or a hub name")
        is_misspelt = key in _MODELS or Path(source).is_dir() or told.endswith("?")
        if is_misspelt and source not in (*usual, *also):
            raise ConfigError(f"{key}={told}")


def check_first_record(settings: CommandSettings) -> None:
    """Refuse a file whose first row is no record of the kind that a training learns from.

    Raises:
        ConfigError: with the place, what was found there, and the experiments that read it.
    """
    if not isinstance(settings, TrainSettings) or not settings.data.path.startswith(f"{OWN}."):
        return
    source, kind = settings.data.source, settings.data.get("kind", "prompts")
    is_file = source.class_name == "FileSource" and source.get("on_bad_record") != "skip"
    if not is_file or kind is None or settings.data.get("path") is not None:
        return
    try:
        found = source.build()
        where, row = next(checked_rows(found.files("train")[0]))
        record = RowParser(found.columns, rendered=found.rendered)(row, where)
    except TargetError:  # `check_targets` names the place
        return
    except (TypeError, ValueError) as error:
        raise ConfigError(str(error)) from error
    if kind == "unpaired" and isinstance(record, DemonstrationRecord):
        return  # other rows say what its label means
    try:
        to_kind(record, kind)
    except ValueError as error:
        files, given = group_files("experiment").items(), kind_of(record)
        names = [
            n for n, f in files if re.search(rf"(/data|kind): {given}\b", f.read_text("utf-8"))
        ]
        raise ConfigError(f"{error} {given.capitalize()}: {', '.join(names)}.") from error


def check_stages(settings: Any) -> None:
    """Refuse what a pipeline sets for one of its trainings, as far as torch is not needed.

    Raises:
        ConfigError: with the stage.
    """
    usual = primary("pipeline")["experiments"]
    for stage, name in getattr(settings, "experiments", {}).items():
        words = settings.overrides.get(stage, [])
        if name is None or not (words or name != usual[stage]):
            continue
        try:
            cfg = composition("train", [*config_dirs(), f"+experiment={name}", *words])
            plain_settings(TrainSettings, cfg)
        except ConfigError as error:
            raise ConfigError(f"{stage}: {error}") from error


def _with_models_apart(written: dict[str, Any]) -> dict[str, Any]:
    """Return the configuration with `paths.apart` in the folder of models, and then no gates."""
    folder, apart = at(written, "paths.artifacts"), at(written, "paths.apart")
    if not isinstance(folder, str) or apart is None:
        return written
    ungated = written | ({"gates": {}} if "gates" in written else {})
    if apart in Path(folder).parts:
        return ungated
    return ungated | {"paths": written["paths"] | {"artifacts": f"{folder}/{apart}"}}


def _check_training(settings: TrainSettings) -> None:
    """Check what several groups must agree on.

    Raises:
        ConfigError: with both keys.
    """
    spec, scorer = settings.spec, settings.scorer
    if (named := getattr(spec, "stage", None)) != settings.stage:
        raise ConfigError(f"stage={settings.stage}: {settings.module.path} is of stage={named}")
    shard_over, devices = settings.strategy.shard_over, settings.trainer.world_size
    if shard_over is not None and devices % shard_over:
        raise ConfigError(f"strategy.shard_over={shard_over} must divide the {devices} devices")
    _check_batch_divides(settings)
    if scorer is None and spec.rolls_out:
        names = ", ".join(choices("scorer"))
        raise ConfigError(f"scorer=null: {settings.title} needs scorer=NAME, one of {names}")
    kind, wanted = settings.data_kind, spec.kinds_of_records(settings.hparams)
    if kind not in wanted:
        raise ConfigError(
            f"data.kind={kind}: {settings.title} takes data.kind={' or '.join(wanted)}"
        )
    asked = settings.evaluation.temperature
    if is_address(teacher := settings.module.get("teacher")) and asked not in (0, 1):
        told = f"evaluation.temperature={asked:g}: the server at artifacts.teacher={teacher}"
        raise ConfigError(f"{told} gives log-probabilities at temperature 1: use 1")
    adapter = scorer is not None and getattr(scorer.read().call, "holds", None) == "adapter"
    if adapter and not spec.rolls_out:
        raise ConfigError("scorer=reward_adapter needs the base of PPO's policy: use reward_model")


def _check_is_read(settings: TrainSettings) -> None:
    """Refuse settings that this stage does not read: they would do nothing, in silence.

    Raises:
        ConfigError: with the first one.
    """
    for key in sorted(settings.unread):
        if "." in key and (value := settings.select(key)) is not None:
            raise ConfigError(f"{key}={value}: {settings.title} does not read it; leave it out")


def _check_said_once(settings: TrainSettings) -> None:
    """Refuse arguments of the module that differ from what the rest of the run reads elsewhere.

    Raises:
        ConfigError: with the first one, and the key to set.
    """
    start = f"artifacts.{settings.spec.starts_from}"
    of_model = ("revision", "trust_remote_code", "chat_template", "chat_template_arguments")
    said = {"seed": "seed", "lora": "lora", "policy": start, "source": start}
    said |= {name: f"model.{name}" for name in (*of_model, "activation_checkpointing")}
    for name, place in said.items():
        value = settings.select(f"module.{name}")
        if name in settings.module.arguments and value != settings.select(place):
            if value is None and place == start:
                told = f"{start}={settings.start}: {settings.name} starts from random weights"
                fix = f"write +experiment={settings.stage}, which starts from it"
                raise ConfigError(f"{told}: {fix}, or leave {start} out")
            raise ConfigError(f"module.{name}={value} repeats {place}: set {place} in its place")


def _check_batch_divides(settings: TrainSettings) -> None:
    """Refuse a global batch that cannot be dealt to devices and minibatches.

    Raises:
        ConfigError: with both numbers and batch sizes that work.
    """
    if "batch_size" not in settings.data.arguments:
        raise ConfigError("data.batch_size is missing: set it, such as data.batch_size=32")
    rows, unit, key = settings.data.batch_size, settings.batch_unit, f"module.{settings.stage}"
    if rows % unit:
        fits = [str(n) for n in (rows // unit * unit, (rows // unit + 1) * unit) if n]
        count = getattr(settings.hparams, "num_minibatches", None)
        minibatches = "" if count is None else f" x {key}.num_minibatches={count}"
        raise ConfigError(
            f"data.batch_size={rows} must be a multiple of {unit}, {settings.trainer.world_size} "
            f"devices{minibatches}: use data.batch_size={' or '.join(fits)}"
        )


_OTHER = "another value than any"


def check_keys_are_known(settings: CommandSettings) -> None:
    """Refuse keys that no file of `conf/` has and nothing reads, wherever they were written.

    Raises:
        ConfigError: with the key and the nearest ones.
    """
    for group in (*settings.open_groups, "debug", "launcher"):
        known = written_keys(group)
        for key in dotted_keys(settings.written.get(group), f"{group}."):
            if key not in known and not _reads(settings, key):
                raise ConfigError(f"unknown key {key}{did_you_mean(key, sorted(known))}")


def is_read(word: str, settings: CommandSettings) -> bool:
    """Return whether a word of a command line sets what the command reads, or removes it."""
    key = word.lstrip("+").partition("=")[0]
    if word.startswith("~") or "@" in key or (settings.select(key) is None and "." not in key):
        return True
    whole = {key[:end] for end in range(len(key) + 1) if key[end : end + 1] in (".", "")}
    if "." not in key or key.partition(".")[0] not in settings.open_groups:
        return not whole & settings.unread
    return _reads(settings, key)


def _reads(settings: CommandSettings, key: str) -> bool:
    cfg = OmegaConf.create(copy.deepcopy(settings.written))
    try:
        OmegaConf.update(cfg, key, _OTHER, merge=False, force_add=True)
        resolved: Any = OmegaConf.to_container(cfg, resolve=True)
    except OmegaConfBaseException:  # something that refers to it needs another type
        return True
    return _given(settings, resolved) != _given(settings, settings.resolved)


def _given(settings: CommandSettings, resolved: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a command is given: of open groups what the settings have as fields."""
    found = {key: value for key, value in resolved.items() if key not in ("debug", "launcher")}
    for group in settings.open_groups:
        typed = getattr(settings, group, None)
        if typed is not None and isinstance(found.get(group), Mapping):
            fields = type(typed).model_fields
            names = [n for n in fields if f"{group}.{n}" not in settings.by_reference]
            found[group] = {name: found[group].get(name) for name in names}
    return found
