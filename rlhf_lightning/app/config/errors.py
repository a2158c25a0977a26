"""Errors of what does not compose, in one line: key, got, wanted, nearest key, fix."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import NoReturn

from hydra.errors import MissingConfigException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import (
    COMPOSE_ERRORS,
    WORDS,
    ConfigError,
    choices,
    composed,
    describe_interpolation,
    dotted_keys,
    texts,
)
from rlhf_lightning.misfit import did_you_mean

OF_TRAINING = ("logger=", "logger.", "debug=")  # how words begin that training alone takes
ADDED = ("experiment", "preset", "sweeps")  # groups that are in no defaults list
_EXAMPLE = "in a checkout, set RLHF_ALLOWED_TARGETS=examples. and add --config-dir=examples/conf"
WITHDRAWN: Mapping[str, str] = WORDS["withdrawn"] | dict.fromkeys(WORDS["in_examples"], _EXAMPLE)


def composition(entry: str, overrides: Sequence[str]) -> DictConfig:
    """Return what a command line composes, with the node `hydra`.

    Raises:
        ConfigError: if it does not, with what can be written.
    """
    try:
        return composed(entry, list(overrides))
    except COMPOSE_ERRORS as error:
        raise ConfigError(explain(error, list(overrides), entry)) from error


def explain(error: Exception, overrides: list[str], config_name: str = "train") -> str:
    """Return a composition error in one line, with a did-you-mean for mistyped names.

    Args:
        error: what `hydra.compose` raised, one of `COMPOSE_ERRORS`.
        overrides: overrides of the command line.
        config_name: name of the composed configuration.
    """
    for word in overrides:
        key, _, value = word.lstrip("+").partition("=")
        if key == "dataset" and Path(value).is_file():
            told = f"{word}: a file of records is given by dataset=files dataset.path={value}"
            return f"{told} dataset.name=NAME"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file:
        group, _, name = error.missing_cfg_file.rpartition("/")
        known = sorted(error.options or choices(group))
        return f"{group}={name} is none of {', '.join(known)}{did_you_mean(name, known)}"
    text = str(error).strip()
    if isinstance(error, OverrideParseException):
        return _unreadable(error.override, text)
    if found := re.search(r"(?:Ambiguous value for argument|Sweep parameters) '([^']+)'", text):
        return f"{found[1]} has several values: -m runs a sweep; a text is quoted, a list is [A,B]"
    if found := re.search(r"Could not override '([\w./@]+)'", text):
        return _unknown(found[1], overrides, config_name)
    if isinstance(error, OmegaConfBaseException):
        return describe_interpolation(error)
    for word in overrides:
        group, _, name = word.lstrip("+").partition("=")
        if not group:
            return f"{word!r} names no key: write KEY=VALUE, such as seed=2"
        known = choices(group) if re.fullmatch(r"[\w/]+", group) else []
        if known and name not in known:
            return f"{group}={name} is none of {', '.join(known)}{did_you_mean(name, known)}"
    return text.partition("\n")[0] or type(error).__name__


def _unreadable(override: str, text: str) -> str:
    if override.startswith("-") or ("=" not in override and not override.startswith("~")):
        return f"{override!r} sets nothing: write KEY=VALUE, such as seed=2"
    if found := re.fullmatch(r"\+*overrides\.(\w+)=\[?([^\]]*)\]?", override):
        return f"{override} cannot be read: write {found[1]}:{found[2]}"
    reason = text.removeprefix(f"Error parsing override '{override}'").strip().partition("\n")[0]
    override = " ".join(override.split())
    return (
        f"{override} cannot be read ({reason or 'a blank, a comma or a bracket'}): close what is "
        f"opened, and quote such signs: '{override.partition('=')[0]}=\"a, b\"'"
    )


def _unknown(path: str, overrides: list[str], config_name: str) -> str:
    given = next((o for o in overrides if o.split("=")[0].lstrip("+~") == path), path)
    if path in ADDED:
        return f"{given} would replace a choice that is not there: add it with +{given}"
    if given.startswith(OF_TRAINING):
        return f"{given} is for training, and rlhf-{config_name} does not train: leave it out"
    kept = [o for o in overrides if o != given]
    try:
        cfg = composed(config_name, kept)
    except COMPOSE_ERRORS:  # it is not the only mistake
        cfg = DictConfig({})
    keys = list(dotted_keys(cfg))
    above = path if path in keys else path.rpartition(".")[0]
    if above in keys and OmegaConf.select(cfg, above, throw_on_resolution_failure=False) == {}:
        return f"{path}: {above} is empty: add to it with +{above}.NAME=VALUE"
    written = OmegaConf.to_container(cfg, resolve=False)
    if any(f"oc.select:{path}," in text for _, text in texts(written)):
        return f"{given}: no default is written here, add it with +{given}"
    name = path.rpartition(".")[2].lower()
    wanted = [ours for ours, theirs in WORDS["other_trainers"].items() if name in theirs.split()]
    if ours := [key for key in keys if any(fnmatch(key, one) for one in wanted)]:
        return f"unknown key {path}: here it is {' or '.join(ours)}"
    if (length := "data.num_iterations") in keys and "data.num_epochs" in wanted:
        return f"unknown key {path}: here {length} is the length, in batches of data.batch_size"
    return f"unknown key {path}{did_you_mean(path, keys)}"


def withdrawn(words: Sequence[str]) -> str | None:
    """Return the error of the first word of a command line that is no longer read, or None."""
    has_examples = any(word.startswith("--config-dir") for word in words)
    for word in words:
        key, _, value = word.lstrip("+~").partition("=")
        for gone, instead in WITHDRAWN.items():
            below = gone.endswith("*") and key.startswith(gone[:-1])
            if instead == _EXAMPLE and has_examples:
                continue
            if below or gone in (key, f"{key}={value}"):
                return f"{word} was withdrawn: {instead}"
    return None


def refuse_study() -> NoReturn:
    """End the withdrawn command `rlhf-study` with what is written instead."""
    raise SystemExit(
        "error: rlhf-study was withdrawn: run a matrix with rlhf-train -m (seed=1,2 KEY=A,B, or "
        "+sweeps=NAME), compare with rlhf-report RUN RUN"
    )
