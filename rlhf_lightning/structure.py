"""Whether a composed configuration has all its parts, and each part the form that it needs.

`~trainer.devices` takes a setting away, `data=[1,2]` puts a list where a group was. Light on
purpose: no torch, so that a mistake is answered at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.composition import ConfigError, conf_dir
from rlhf_lightning.targets import did_you_mean

BUILT = ("module", "data", "rollout", "optimizer", "scheduler")  # by `_target_`
PLAIN = ("paths", "trainer", "strategy", "logger", "callbacks", "evaluation", "model", "world")
TOP = ("stage", "name", "seed", "resume", "ckpt_path", "artifacts")


def check_structure(cfg: DictConfig) -> None:
    """Refuse a configuration that lacks a group or a key that every choice of it has.

    Raises:
        ConfigError: with the place, what is there, and what is wanted.
    """
    container: Any = OmegaConf.to_container(cfg, resolve=False)
    if container.get("stage") is None:
        return  # no experiment was chosen, which is said elsewhere
    for key in TOP:
        if key not in container:
            raise ConfigError(f"{key} is missing: leave it as conf/train.yaml has it, or set it")
    for group in (*BUILT, *PLAIN, "artifacts"):
        node = container.get(group)
        if not isinstance(node, Mapping):
            raise ConfigError(
                f"{group}={node!r} must be a group of settings: {group}=NAME chooses one, "
                f"{group}.KEY=VALUE changes one of its keys"
            )
        for key in sorted(_needed(group)):
            if key not in node:
                raise ConfigError(
                    f"{group}.{key} is missing: set it, or choose {group} as a whole ({group}=NAME)"
                )
    doctor = container.get("doctor")
    known = _keys(conf_dir() / "doctor" / "default.yaml") | {"thresholds"}
    for key in sorted(set(doctor) - known) if isinstance(doctor, Mapping) else ():
        raise ConfigError(
            f"doctor.{key}: doctor has no such key{did_you_mean(key, sorted(known))}; it has "
            f"{', '.join(sorted(known))}"
        )
    _check_export(container.get("export"))
    _check_nodes(container)


def _check_export(node: Any) -> None:
    known = ["auto", "fp32", "bf16"]
    for key in node if isinstance(node, Mapping) else ():
        if key != "dtype":
            raise ConfigError(f"unknown key export.{key}; it has one, export.dtype")
    dtype = node.get("dtype") if isinstance(node, Mapping) else node
    if dtype not in known:
        hint = did_you_mean(str(dtype), known)
        raise ConfigError(f"export.dtype={dtype} must be one of {', '.join(known)}{hint}")


def _check_nodes(container: Mapping[str, Any]) -> None:
    """Refuse values where something is to be built; they would be found after the training."""
    named = {f"callbacks.extra.{k}": v for k, v in _items(container["callbacks"].get("extra"))}
    gold = container["evaluation"].get("gold")
    if gold is not None:
        named["evaluation.gold"] = gold
    for where, node in named.items():
        text = isinstance(node, str) and node.startswith("${")
        if not text and not (isinstance(node, Mapping) and "_target_" in node):
            raise ConfigError(
                f"{where}={node!r} must name what is to be built: {where}._target_=package.Name"
            )


def _items(node: Any) -> list[tuple[str, Any]]:
    return [(str(key), value) for key, value in node.items()] if isinstance(node, Mapping) else []


@cache
def _needed(group: str) -> frozenset[str]:
    """Return the keys that every choice of a group has."""
    if group in BUILT:
        return frozenset({"_target_"})
    if group == "artifacts":
        return frozenset({"base", "sft", "reward", "publish"})
    files = sorted((conf_dir() / group).glob("*.yaml"))
    return frozenset.intersection(*map(_keys, files)) - {"_target_"}


def _keys(file: Path) -> frozenset[str]:
    return frozenset(str(key) for key in OmegaConf.load(file)) - {"defaults"}
