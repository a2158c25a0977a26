"""One run as a flat YAML, `run.yaml`: what was set on its command line, and nothing else."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import (
    CONFIG_DIR,
    ConfigError,
    conf_dir,
    config_dirs,
    word,
)
from rlhf_lightning.app.config.errors import ADDED, COMPOSE_ERRORS
from rlhf_lightning.app.config.ways import replaced, values_of

SCHEMA = "run.schema.json"  # in conf/, written by docs/build_schema.py
HEAD = """\
# What was set for this run. In the folder where it was started, the same command with
#   --config THIS_FILE
# runs it again; further words change it.
"""
_FOLDERS = "config_dir"


def with_file(words: Sequence[str]) -> list[str]:
    """Return the words of a command line, with those of the files of `--config` before them.

    Raises:
        ConfigError: if a file cannot be read.
    """
    files, others = values_of("--config", words)
    for file in files:
        try:
            content: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
            others = replaced(list(_words(content)), others)
        except (*COMPOSE_ERRORS, OSError, AttributeError, yaml.YAMLError) as error:
            told = f"--config {file}: {' '.join(str(error).split())}"
            raise ConfigError(f"{told}; write KEY: VALUE, such as experiment: dpo") from error
    return others


def _words(node: Mapping[Any, Any], where: str = "") -> Iterator[str]:
    for name, value in node.items():
        key = f"{where}{name}"
        nested = isinstance(value, Mapping) and all(re.fullmatch(r"[\w.]+", f"{k}") for k in value)
        if nested and value:
            yield from _words(value, f"{key}.")
        elif key == _FOLDERS:
            yield from (f"{CONFIG_DIR}{Path(folder)}" for folder in value)
        elif key.startswith("~"):
            yield key
        else:  # groups and other keys of the top are there, keys below may be new ones
            yield word(f"{'+' * (key in ADDED)}{'++' * ('.' in key)}{key}", value)


def run_yaml(words: Sequence[str]) -> str:
    """Return the overrides of a run as YAML."""
    content: dict[str, Any] = {}
    for one in OverridesParser.create().parse_overrides(list(words)):
        key = one.key_or_group + (f"@{one.package}" if one.package else "")
        content[f"~{key}" if one.is_delete() else key] = one.value()
    if "sweeps" in content:  # this is one job of it
        content["hydra.mode"] = "RUN"
    if folders := [one.removeprefix(CONFIG_DIR) for one in config_dirs()]:
        content[_FOLDERS] = folders
    return OmegaConf.to_yaml(OmegaConf.create(content))


def schema_line() -> str:
    """Return the comment by which an editor completes and checks a file for `rlhf-train`."""
    return f"# yaml-language-server: $schema={conf_dir() / SCHEMA}\n"
