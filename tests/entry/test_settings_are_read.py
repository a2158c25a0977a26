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
from rlhf_lightning.app.config.compose import ConfigError, choices, composed, register
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.targets import TargetError
from rlhf_lightning.app.config.unread import check_overrides_are_read, is_read
from rlhf_lightning.app.config.validate import read_settings
from rlhf_lightning.app.prerequisites import training_words
from rlhf_lightning.app.study.steps import HERE, check_pipeline, plan
from rlhf_lightning.app.study.words import as_overrides
from tests.builders.command_lines import settings_of

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


BY_REFERENCE = ("dataset.lengths", "model.base")  # read where something refers to them


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


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(name, marks=() if name in ("dpo", "collect") else pytest.mark.slow)
        for name in ("sft", "reward", "dpo", "ppo", "grpo", "evaluate", "collect")
    ],
)
def test_a_key_counts_as_read_where_another_value_changes_what_the_command_is_given(command):
    """Whatever stage the key is of."""
    entry = command if command in COMMANDS else "train"
    usual = settings_of(*([] if entry == command else [f"+experiment={command}"]), entry=entry)
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


@pytest.mark.parametrize(
    ("words", "entry", "wanted"),
    [
        ("+experiment=dpo model.ppo.learning_rate=1.0e-4", "train", "model.dpo.learning_rate"),
        ("+experiment=ppo model.sft.batch_size=64", "train", "model.ppo.batch_size"),
        ("+experiment=sft dataset.num_iterations=7", "train", "dataset.num_iterations"),
        ("+experiment=sft model.lengths.max_length=80", "train", "dataset.lengths.max_length"),
        ("+experiment=sft scorer=http scorer.url=http://h/s", "train", "scorer"),
        ("+experiment=reward safety=default", "train", "safety"),
        ("model.ppo.batch_size=64", "evaluate", "model.ppo.batch_size"),
        ("people.num_pairs=7", "evaluate", "people.num_pairs"),
        ("best_of.pool=7", "evaluate", "best_of.pool"),
        ("model.evaluation.batch_size=7", "collect", "model.evaluation.batch_size"),
        ("adversarial.num_pairs=7", "collect", "adversarial.num_pairs"),
    ],
)
def test_a_key_of_another_stage_is_refused_with_the_one_that_is_read(words, entry, wanted):
    with pytest.raises(ConfigError, match=re.escape(wanted)) as error:
        settings_of(*words.split(), entry=entry)
    assert str(error.value).startswith(words.split()[-1].partition("=")[0].partition(".")[0])


def test_words_of_a_step_that_a_pipeline_leaves_out_are_refused():
    words = as_overrides(["evaluate=false", "evaluate:seed=3"])
    with pytest.raises(ConfigError, match=r"^evaluate:seed=3"):
        check_pipeline(settings_of(*words, entry="pipeline"))


def test_a_stage_that_is_trained_first_gets_the_words_that_it_reads():
    words = ["+dataset.source.num_texts=300", "model.ppo.batch_size=64"]
    settings = settings_of("+experiment=ppo", *words)
    assert training_words("base", settings, words) == ["seed=1", words[0]]


@pytest.mark.parametrize(
    ("word", "place"),
    [
        ("module.seed=7", "seed"),
        ("module.policy=elsewhere", "artifacts.sft"),
        ("module.chat_template=chatml", "model.chat_template"),
        ("module.revision=abc", "model.revision"),
    ],
)
def test_what_the_module_repeats_is_set_where_all_of_the_run_reads_it(word: str, place: str):
    with pytest.raises(ConfigError, match=rf"repeats {place}"):
        settings_of("+experiment=ppo", word)


def test_words_for_every_training_go_to_those_that_read_them():
    register()
    given = ["train:dataset.num_iterations=12", "train:model.ppo.batch_size=64", "collect=false"]
    settings = read_settings(COMMANDS["pipeline"], composed("pipeline", as_overrides(given)))
    words = {step.stage: step.words for step in plan(settings, HERE)}
    check_pipeline(settings)
    for word in ("dataset.num_iterations=12", "model.ppo.batch_size=64"):
        assert [stage for stage, own in words.items() if word in own] == ["ppo"]
    (former,) = as_overrides(["ppo:module.models.value_head=zero"])
    assert former == "overrides.ppo=['module.value_head=zero']"
    nobody = as_overrides(["train:model.dpo.learning_rate=1.0"])
    with pytest.raises(
        ConfigError, match=r"train:model\.dpo\.learning_rate=1\.0: no step reads it"
    ):
        check_pipeline(read_settings(COMMANDS["pipeline"], composed("pipeline", nobody)))


def test_an_evaluation_of_a_run_takes_no_word_that_only_the_training_reads():
    word, trained = "model.ppo.learning_rate=0.5", settings_of("+experiment=ppo")
    evaluated = settings_of("policy=here", entry="evaluate")
    check_overrides_are_read(["dataset.source.seed=3"], evaluated, trained)
    with pytest.raises(ConfigError, match=r"nothing reads model\.ppo\.learning_rate"):
        check_overrides_are_read([word], evaluated, trained)
