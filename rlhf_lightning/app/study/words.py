"""Words of command lines, as Hydra reads them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from rlhf_lightning.app.config.compose import primary
from rlhf_lightning.app.config.errors import OF_TRAINING, in_todays_keys

# By words of the command line: all trainings, or a step of a round, in their order.
ADDRESSED: tuple[str, ...] = tuple(primary("pipeline")["overrides"])
STAGES = tuple(name for name in ADDRESSED if name != "train")
_ROUND = re.compile(r"round_[1-9]\d*")


def as_overrides(words: Sequence[str]) -> list[str]:
    """Return the command line with its words for one stage as Hydra reads them.

    `ppo:module.ppo.kl_coef=0.1` becomes `overrides.ppo=['module.ppo.kl_coef=0.1']`; `train:` is for
    every training stage, `round_2/ppo:` for one round alone. `logger=` and `debug=` are
    for training. Other words stay as they are.
    """
    own: dict[str, list[str]] = {}
    others = []
    for word in in_todays_keys(words):
        place, colon, rest = f"{'train:' * word.startswith(OF_TRAINING)}{word}".partition(":")
        at, _, stage = place.rpartition("/")
        if colon and stage in ADDRESSED and (not at or _ROUND.fullmatch(at)):
            key = f"+overrides.{at}.{stage}" if at else f"overrides.{stage}"
            own.setdefault(key, []).append(quoted(rest))
        else:
            others.append(word)
    return others + [f"{key}=[{','.join(found)}]" for key, found in own.items()]


def key_of(word: str) -> str:
    """Return the key that a word sets, adds or takes away."""
    return word.lstrip("+~").partition("=")[0]


def quoted(text: str) -> str:
    """Return a text as Hydra reads it on a command line, whatever characters are in it."""
    # Hydra reads a backslash as itself, but before a quote as what escapes it.
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def varied(key: str, value: object) -> str:
    """Return `key=value` as Hydra reads a value of JSON: texts, numbers, lists and mappings."""
    return f"{key}={_as_json(value)}"


def _as_json(value: object) -> str:
    if isinstance(value, Mapping):
        items = (f"{key}: {_as_json(one)}" for key, one in value.items())
        return f"{{{', '.join(items)}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_as_json, value))}]"
    written = json.dumps(value)
    # Hydra knows no escapes of JSON.
    return quoted(value) if isinstance(value, str) and written != f'"{value}"' else written


def given(key: str, value: object) -> str:
    """Return `key=value` as Hydra reads it: a path, a text, a list of texts or another value."""
    return f"{key}={_written(value)}"


def _written(value: object) -> str:
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    return quoted(str(value)) if isinstance(value, str | Path) else str(value).lower()
