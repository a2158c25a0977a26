"""Settings of an earlier run, read from its folder as data: validated again, targets included."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rlhf_lightning.app.config.compose import ConfigError, at
from rlhf_lightning.app.config.validate import SettingsT, read_settings
from rlhf_lightning.app.stages.spec import find_stage
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.reading import read_yaml
from rlhf_lightning.runs.resume import checkpoint_problem
from rlhf_lightning.runs.summary import summary_or_none

MOST_SUBSTITUTIONS = 10_000
_INNERMOST = re.compile(r"\$\{([^${}]*)\}")
# A key, or oc.select of one with a default. Our own resolvers give names of folders.
_REFERENCE = re.compile(
    r"\s*(?P<select>oc\.select\s*:\s*)?(?P<key>\w[\w.]*)\s*(?(select)(?:,(?P<default>.*))?)"
)


def read_saved(settings: type[SettingsT], file: Path) -> SettingsT:
    """Return the settings of a run.

    Args:
        settings: the class of its command.
        file: `.hydra/config.yaml` of the run.

    Raises:
        ConfigError: if there is none, or if it is not allowed.
    """
    content = saved_config(file)
    check_interpolations(content)
    found = read_settings(settings, content, saved=True)
    for where, text in _texts(found.resolved, ""):
        if "${" in text:  # composing with it would resolve it
            raise ConfigError(f"{where} becomes the interpolation {text!r}: write its value")
    return found


def check_interpolations(content: Mapping[str, Any]) -> None:
    """Refuse interpolations that lead elsewhere than to other keys of a configuration.

    Raises:
        ConfigError: for a resolver, such as one that reads the environment, or for more
            substitutions than a run's configuration has.
    """
    left = MOST_SUBSTITUTIONS

    def expanded(text: str, where: str) -> str:
        nonlocal left
        while (found := _INNERMOST.search(text)) is not None:
            left -= 1 + len(text) // 1000
            if left < 0:
                raise ConfigError(f"{where} is too large with its interpolations: write its value")
            key = _REFERENCE.fullmatch(found[1])
            if key is None:
                raise ConfigError(
                    f"{where} has {found[0]}: the configuration of a run folder refers to its own "
                    "keys alone, and reads nothing else; write the value"
                )
            text = text[: found.start()] + value_of(key, where) + text[found.end() :]
        if "${" in text:
            raise ConfigError(f"{where}={text!r} is no reference to a key: write its value")
        return text

    def value_of(key: re.Match[str], where: str) -> str:
        node = at(content, key["key"])
        if node is None and key["select"]:
            node = key["default"] or ""
        parts = [expanded(text, place) for place, text in _texts(node, key["key"])]
        return "".join(parts)

    for where, text in _texts(content, ""):
        try:
            expanded(text, where)
        except RecursionError:
            raise ConfigError(f"{where}={text!r} refers to itself: write its value") from None


def _texts(node: Any, where: str) -> Iterator[tuple[str, str]]:
    """Yield place and text of all texts of a configuration, keys among them."""
    if isinstance(node, str):
        yield where, node
    elif isinstance(node, Mapping | list):
        for key, value in node.items() if isinstance(node, Mapping) else enumerate(node):
            place = f"{where}.{key}" if where else str(key)
            yield place, str(key)
            yield from _texts(value, place)


def saved_config(file: Path) -> dict[str, Any]:
    """Return the configuration of a run as it was written.

    Raises:
        ConfigError: if there is none.
    """
    try:
        content = read_yaml(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} is no configuration of a run")
    return content


def working_folder(folder: RunFolder) -> Path:
    """Return the folder in which a run was started; this one if that is not known.

    Raises:
        ConfigError: if the file that says so is damaged.
    """
    file = folder.config.with_name("hydra.yaml")
    content = saved_config(file) if file.is_file() else {}
    return Path(str(at(content, "hydra.runtime.cwd") or "."))


def best_of_early_stopping(folder: RunFolder) -> Path | None:
    """Return the checkpoint with which a finished run with early stopping has ended, else None."""
    summary = summary_or_none(folder)
    if summary is None or summary.status != "completed":
        return None
    try:
        cfg = read_yaml(folder.config)
        validates = not find_stage(cfg["stage"], cfg["module"]["_target_"]).rolls_out
        stops = validates and cfg["callbacks"]["early_stopping"] is not None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    best = folder.best_checkpoint.resolve()
    return best if stops and checkpoint_problem(best) is None else None
