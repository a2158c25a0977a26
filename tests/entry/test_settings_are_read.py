"""A key that nobody reads is refused, wherever in the configuration it stands."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from typing import Any

import pytest
from omegaconf import OmegaConf
from pydantic import BaseModel

from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import ConfigError, composed, register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import TargetError
from rlhf_lightning.app.config.validate import is_read, read_settings
from rlhf_lightning.app.config.ways import as_overrides
from rlhf_lightning.app.pipeline_steps import HERE, check_pipeline, plan
from rlhf_lightning.app.prerequisites import training_words
from tests.builders.command_lines import settings_of

# Handed to transformers and to the chat template, which read what they know.
FREE = {("model", key) for key in ("from_scratch", "shape", "chat_template_arguments")}


def groups(node: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    if isinstance(node, dict):
        yield place
        for key, inside in node.items():
            yield from groups(inside, (*place, str(key)))


@pytest.mark.thorough
def test_a_key_that_nobody_reads_is_refused_in_every_group():
    register()
    whole: Any = OmegaConf.to_container(composed("train", ["+experiment=ppo"]))
    whole.pop("hydra", None)
    for place in groups(whole):
        if place in FREE:
            continue
        changed = node = copy.deepcopy(whole)
        for key in place:
            node = node[key]
        node["read_by_nobody"] = 1
        with pytest.raises((ConfigError, TargetError), match="read_by_nobody"):
            read_settings(TrainSettings, changed).check_targets()


# Words of rlhf-evaluate that need no model of the built-in world.
BUILT_IN_NOWHERE = "policy=a baseline=a scorer=none"
# Read where something refers to them.
BY_REFERENCE = ("dataset.lengths", "model.base")


def given(node: Any, where: str = "") -> Any:
    """Return settings as values that can be compared, without the keys that a file invents."""
    if isinstance(node, BaseModel):
        names = [n for n in type(node).model_fields if f"{where}{n}" not in BY_REFERENCE]
        return {name: given(getattr(node, name), f"{where}{name}.") for name in names}
    return {key: given(one) for key, one in node.items()} if isinstance(node, dict) else node


def leaves(node: Any, where: str) -> Iterator[str]:
    for key, value in node.items():
        place = f"{where}.{key}"
        yield from leaves(value, place) if isinstance(value, dict) and value else [place]


@pytest.mark.thorough
def test_a_key_counts_as_read_where_another_value_changes_what_the_command_is_given():
    """Whatever stage the key is of."""
    usual = settings_of("+experiment=dpo")
    found: dict[bool, list[str]] = {True: [], False: []}
    for key in (k for group in usual.open_groups for k in leaves(usual.written[group], group)):
        other = 7 if isinstance(usual.select(key), int | float) else "7"
        try:
            changes = given(usual.updated({key: other})) != given(usual)
        except ConfigError:
            changes = True
        assert is_read(f"{key}=7", usual) == changes, key
        found[changes].append(key)
    assert all(len(keys) > 10 for keys in found.values())


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "entry", "wanted"),
    [
        ("+experiment=dpo model.ppo.learning_rate=1.0e-4", "train", "model.dpo.learning_rate"),
        (f"{BUILT_IN_NOWHERE} model.ppo.batch_size=64", "evaluate", "model.ppo.batch_size"),
        ("best_of.pool=7", "evaluate", "best_of.pool"),
    ],
)
def test_a_key_of_another_stage_is_refused_with_the_one_that_is_read(words, entry, wanted):
    with pytest.raises(ConfigError, match=re.escape(wanted)) as error:
        settings_of(*words.split(), entry=entry)
    assert str(error.value).startswith(words.split()[-1].partition("=")[0].partition(".")[0])


def test_a_stage_that_is_trained_first_gets_the_words_that_it_reads():
    words = ["+dataset.source.num_texts=300", "model.ppo.batch_size=64"]
    settings = settings_of("+experiment=ppo", *words)
    assert training_words("base", settings, words) == ["seed=1", words[0]]


@pytest.mark.thorough
def test_commands_take_the_logger_for_what_they_train_first_and_refuse_to_show_themselves():
    words = ["logger=csv"]
    for entry in ("evaluate", "collect"):
        settings = settings_of(*words, entry=entry)
        assert settings.logger.kind == "csv"
        assert training_words("sft", settings, words)[-1] == words[0]
        with pytest.raises(ConfigError, match=r"^logger=wandb .*logger=none"):
            settings_of("logger=wandb", entry=entry)


@pytest.mark.thorough
def test_words_for_every_training_go_to_those_that_read_them():
    register()
    given = ["train:dataset.num_iterations=12", "train:model.ppo.batch_size=64", "collect=false"]
    settings = read_settings(COMMANDS["pipeline"], composed("pipeline", as_overrides(given)))
    words = {step.stage: step.words for step in plan(settings, HERE)}
    check_pipeline(settings)
    for word in ("dataset.num_iterations=12", "model.ppo.batch_size=64"):
        assert [stage for stage, own in words.items() if word in own] == ["ppo"]
    alone = [f"experiments.{stage}=null" for stage in ("base", "reward", "ppo")]
    nobody = as_overrides(["train:model.dpo.learning_rate=1.0", "evaluate=false", *alone])
    with pytest.raises(
        ConfigError, match=r"train:model\.dpo\.learning_rate=1\.0: no step reads it"
    ):
        check_pipeline(read_settings(COMMANDS["pipeline"], composed("pipeline", nobody)))
