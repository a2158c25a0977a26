"""The settings of a training as text: its `run.yaml`, `--recipe` and an experiment's help."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator, Sequence
from fnmatch import filter as matching
from functools import partial
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import (
    CONFIG_DIR,
    HPARAMS,
    WORDS,
    conf_dir,
    config_dirs,
    described,
    dotted_keys,
    group_files,
    keys_of,
)
from rlhf_lightning.app.config.errors import composition
from rlhf_lightning.app.config.ways import FOLDERS, read_experiment, replaced
from rlhf_lightning.data.records import KEYS

SCHEMA = "run.schema.json"  # in conf/, written by docs/build_schema.py
HEAD = """\
# What was set for this run. In the folder where it was started, the same command with
#   --config THIS_FILE
# runs it again; further words change it.
"""
_RECIPE = """\
# Give MODEL, a folder or hub name, and FILE, which has records ({}); the names are of folders.
# Then  rlhf-train --config THIS_FILE
"""
_DEFAULTS = "\n# The defaults. Remove a # to change one; docs/configuration.md has every key.\n"
_REWARD = (
    "  --reward FILE.py:NAME, a function (prompts, completions) -> scores; several are added up, "
    "NAME=0.2 weighs one; or --reward-model FOLDER"
)


def run_yaml(words: Sequence[str]) -> str:
    """Return the overrides of a run as YAML."""
    content: dict[str, Any] = {}
    for one in OverridesParser.create().parse_overrides(list(words)):
        key = one.key_or_group + (f"@{one.package}" if one.package else "")
        content[f"~{key}" if one.is_delete() else key] = one.value()
    if "sweeps" in content:  # this is one job of it
        content["hydra.mode"] = "RUN"
    if folders := [one.removeprefix(CONFIG_DIR) for one in config_dirs()]:
        content[FOLDERS] = folders
    return OmegaConf.to_yaml(OmegaConf.create(content))


def schema_line() -> str:
    """Return the comment by which an editor completes and checks a file for `rlhf-train`."""
    return f"# yaml-language-server: $schema={conf_dir() / SCHEMA}\n"


def recipe(name: str, further: Sequence[str]) -> str:
    """Return a file of settings for an experiment and further words; its defaults are comments."""
    one = read_experiment(name)
    words = replaced(one.example(), further)
    lines = [_RECIPE.format(one.records), schema_line(), run_yaml(words), _DEFAULTS]
    for key, value, meaning in _changed_most(words):
        line = OmegaConf.to_yaml({key: value}).strip()
        lines.append(f"# {line}{f'  # {meaning}' if meaning else ''}\n")
    return "".join(lines)


def experiment_help(command: str, name: str) -> str:
    """Return the help of an experiment: what it takes, an example, and what is changed most."""
    one = read_experiment(name)
    usage = f"{name} MODEL FILE" if one.start else f"+experiment={name}"
    needed = "".join(f" {key}=FOLDER" for key in one.others)
    scored = " --reward {}" if one.start and one.needs_reward else ""
    usage += f"{needed}{scored.format('FILE.py:NAME')}"
    rows = [f"rlhf-{command} {usage} [KEY=VALUE ...]", ""]
    rows += [described(group_files("experiment")[name]), ""]
    if one.start:
        records = f"{one.records} ({KEYS[one.records]})"
        rows.append(f"  MODEL  a folder or hub name to start from, or a run; it is {one.start}")
        rows.append(f"  FILE   {records} in .jsonl, .csv, .parquet; it is dataset.path")
        rows += [_REWARD] if scored else []
        words = f"{one.records}.jsonl{needed}{scored.format('reward.py:score')}"
        rows += ["", "Example:", "", f"  rlhf-{command} {name} ORG/NAME {words}", ""]
    rows += ["What is changed most, with its default:", ""]
    for key, value, meaning in _changed_most(one.example()):
        sentence = re.split(r"\.(?: [A-Z]|$)", meaning)[0]
        rows.append(f"  {key}={'null' if value is None else value}  {sentence}".rstrip())
    rows += ["", f"rlhf-{command} --help has other ways, docs/configuration.md every setting."]
    fill = partial(textwrap.fill, width=79, break_on_hyphens=False)
    filled = (fill(row, subsequent_indent=" " * 9 * row.startswith(" ")) for row in rows)
    return "\n".join((*filled, ""))


def _changed_most(words: Sequence[str]) -> Iterator[tuple[str, Any, str]]:
    """Yield key, value and meaning of the settings that other trainers have too and no word has."""
    given = keys_of(words)
    cfg = composition("train", [*config_dirs(), *words])
    keys = list(dotted_keys(cfg))
    for key in (key for one in WORDS["other_trainers"] for key in matching(keys, one)):
        _, part, last = f"..{key}".rsplit(".", 2)
        meaning = meanings_of(HPARAMS[part]).get(last, "") if part in HPARAMS else ""
        value = OmegaConf.select(cfg, key, throw_on_resolution_failure=False)
        if key not in given and (value is not None or meaning):
            yield key, value, meaning


def meanings_of(cls: type) -> dict[str, str]:
    """Return the descriptions of a class's `Args:`, those of its bases included, by name."""
    found: dict[str, str] = {}
    for base in reversed(cls.__mro__):
        section = (base.__doc__ or "").partition("Args:")[2]
        for match in re.finditer(r"^ {8}(\w+): (.*(?:\n {12}.*)*)", section, re.M):
            found[match.group(1)] = re.sub(r"\s+", " ", match.group(2)).strip()
    return found
