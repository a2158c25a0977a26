"""From the group `doctor` of a configuration to the callback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.doctor.records import Refusals
from rlhf_lightning.composition import ConfigError, plain
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.targets import did_you_mean

KEYS = (
    "thresholds",
    "actions",
    "preflight",
    "second_scorer",
    "second_every_n_iterations",
    "harmful_domains",
    "refusals",
)


def make_doctor(cfg: DictConfig, folder: RunFolder) -> list[Doctor]:
    """Return the doctor of a PPO run; none for another stage and with `doctor=none`.

    Raises:
        ConfigError: for an unknown key, a value that cannot be, gold as the second scorer, or a
            rollback without a best checkpoint.
    """
    if cfg.stage != "ppo" or cfg.doctor is None:
        return []
    values = plain(cfg.doctor)
    for key in values:
        if key not in KEYS:
            raise ConfigError(f"unknown key doctor.{key}{did_you_mean(str(key), list(KEYS))}")
    _refuse_gold(cfg, values["second_scorer"])
    actions = None if values["actions"] is None else instantiate(cfg.doctor.actions)
    monitor = cfg.callbacks.checkpoint.monitor
    if actions is not None and actions.on_alarm == "rollback" and monitor is None:
        raise ConfigError(
            "doctor.actions.on_alarm=rollback goes back to the best checkpoint, and "
            "callbacks.checkpoint.monitor=null keeps none: set it to doctor/quality with "
            "callbacks.checkpoint.mode=max, as doctor=act does"
        )
    try:
        return [
            Doctor(
                folder,
                instantiate(cfg.doctor.thresholds),
                actions=actions,
                second_scorer=instantiate(cfg.doctor.second_scorer),
                second_every_n_iterations=values["second_every_n_iterations"],
                refusals=Refusals(
                    tuple(values["harmful_domains"] or ()), tuple(values["refusals"] or ())
                ),
                preflight=bool(values["preflight"]),
            )
        ]
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _refuse_gold(cfg: DictConfig, second_scorer: Any) -> None:
    """Gold chooses no setting and no checkpoint, and the doctor does both."""
    gold = OmegaConf.select(cfg, "evaluation.gold")
    known = set(_texts(plain(gold))) - {"hydra.utils.get_method"} if gold is not None else set()
    for text in _texts(second_scorer):
        if text in known or text.startswith("rlhf_lightning.data.demo.gold"):
            raise ConfigError(
                f"doctor.second_scorer reads {text}, the gold reward, which only evaluation may "
                "see: use a judge or another reward model"
            )


def _texts(node: Any) -> Iterator[str]:
    if isinstance(node, Mapping):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list | tuple):
        for value in node:
            yield from _texts(value)
    elif isinstance(node, str):
        yield node
