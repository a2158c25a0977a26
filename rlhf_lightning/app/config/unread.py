"""Words of a command line that nothing reads: they would change nothing, in silence.

A file of `conf/model` or `conf/dataset` has settings of every stage, and a stage reads those that
its own settings refer to. A key is read if another value at it changes what the command is given.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlhf_lightning.app.config.compose import ConfigError, written_keys
from rlhf_lightning.app.config.settings import CommandSettings
from rlhf_lightning.misfit import did_you_mean

_OTHER = "another value than any"


def check_keys_are_known(settings: CommandSettings) -> None:
    """Refuse keys that no file of `conf/` has and nothing reads, wherever they were written.

    Raises:
        ConfigError: with the key and the nearest ones.
    """
    for group in (*settings.open_groups, "debug", "launcher"):
        known = written_keys(group)
        for key in places(settings.written.get(group), group):
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
            names = [n for n in type(typed).model_fields if f"{group}.{n}" not in settings.unread]
            found[group] = {name: found[group].get(name) for name in names}
    return found


def places(node: Any, where: str) -> Iterator[str]:
    """Yield the dotted keys of nested mappings below `where`."""
    for key, value in node.items() if isinstance(node, Mapping) else ():
        yield f"{where}.{key}"
        yield from places(value, f"{where}.{key}")
