"""A commented file of settings to start from, made from an experiment: `rlhf-train --recipe dpo`.

Its keys are those that people look for (`words.yaml`), its comments those of the hyper-parameters.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import HPARAMS, WORDS, at, config_dirs, dotted_keys
from rlhf_lightning.app.config.errors import composition
from rlhf_lightning.app.config.run_file import run_yaml, schema_line
from rlhf_lightning.app.config.ways import read_experiment, replaced

_HEAD = """\
# Give MODEL, a folder or hub name, and FILE, which has records ({}); the names are of folders.
# Then  rlhf-train --config THIS_FILE
"""
_DEFAULTS = "\n# The defaults. Remove a # to change one; docs/configuration.md has every key.\n"


def recipe(name: str, further: Sequence[str]) -> str:
    """Return a file of settings for an experiment and further words; its defaults are comments.

    Raises:
        ConfigError: if there is no such experiment, or if the words do not compose.
    """
    one = read_experiment(name)
    words = one.words("MODEL", "mine", "FILE", "mine")
    words += one.reward_words(["reward.py:score"]) if one.needs_reward else []
    words = replaced(words, further)
    cfg = composition("train", [*config_dirs(), *words])
    cfg.hydra = None
    values: Any = OmegaConf.to_container(cfg, resolve=True)
    text, keys = run_yaml(words), list(dotted_keys(cfg))
    lines = [_HEAD.format(one.records), schema_line(), text, _DEFAULTS]
    for searched in WORDS["other_trainers"]:
        pattern = searched.replace(".", r"\.").replace("*", r"\w+")
        for key in (key for key in keys if re.fullmatch(pattern, key) and f"{key}:" not in text):
            _, part, last = f"..{key}".rsplit(".", 2)
            meaning = meanings_of(HPARAMS[part]).get(last) if part in HPARAMS else None
            if (value := at(values, key)) is not None or meaning:
                line = OmegaConf.to_yaml({key: value}).strip()
                lines.append(f"# {line}{f'  # {meaning}' if meaning else ''}\n")
    return "".join(lines)


def meanings_of(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's `Args:`, those of its bases included, by name."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = (base.__doc__ or "").partition("Args:")[2]
        for match in re.finditer(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.M):
            found[match.group(1)] = re.sub(r"\s+", " ", match.group(2)).strip()
    return found
