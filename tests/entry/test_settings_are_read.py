"""A key that nobody reads is refused, wherever in the configuration it stands."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf

from rlhf_lightning.app.config.compose import ConfigError, choices, composed, register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import TargetError
from rlhf_lightning.app.config.validate import read_settings

# Handed to transformers and to the chat template, which read what they know.
FREE = {("model", key) for key in ("from_scratch", "shape", "chat_template_arguments")}


def groups(node: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict):
        yield place
        for key, inside in node.items():
            yield from groups(inside, (*place, str(key)))


def written(experiment: str) -> dict[str, Any]:
    register()
    found: Any = OmegaConf.to_container(composed("train", [f"+experiment={experiment}"]))
    found.pop("hydra", None)
    return found  # type: ignore[no-any-return]


QUICK = ("sft", "reward", "dpo", "ppo", "grpo", "sft_smollm2_gsm8k")


@pytest.mark.parametrize(
    "experiment",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in choices("experiment")
        if name != "base"
    ],
)
def test_a_key_that_nobody_reads_is_refused_in_every_group(experiment):
    whole = written(experiment)
    for place in groups(whole):
        if place in FREE:
            continue
        changed = node = copy.deepcopy(whole)
        for key in place:
            node = node[key]
        node["read_by_nobody"] = 1
        with pytest.raises((ConfigError, TargetError), match="read_by_nobody"):
            read_settings(TrainSettings, changed).check_targets()
