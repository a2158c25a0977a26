"""Any value for any key, any misspelt key, any text as an override: run, or one line that helps."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hypothesis import given
from hypothesis import strategies as st
from omegaconf import DictConfig, OmegaConf, flag_override

from rlhf_lightning.app.build import check_run
from rlhf_lightning.app.config.compose import ConfigError, conf_dir, register
from rlhf_lightning.app.config.errors import COMPOSE_ERRORS, explain
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import read_settings
from tests.bad_input.examples import examples

pytestmark = [pytest.mark.thorough, pytest.mark.filterwarnings("ignore::UserWarning")]
STAGES = ("sft", "reward", "ppo")
# Groups whose keys are the user's own, or those of a model of somebody else.
OPEN = ("gates.", "callbacks.extra.", "model.", "logger.tags")


@cache
def composed(*overrides: str) -> DictConfig:
    register()
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        return compose("train", overrides=list(overrides))


@cache
def keys(stage: str) -> list[str]:
    found: list[str] = []

    def walk(node: Any, where: str) -> None:
        for key in node:
            path = f"{where}.{key}" if where else str(key)
            if OmegaConf.is_missing(node, key) or OmegaConf.is_interpolation(node, key):
                found.append(path)
            elif OmegaConf.is_dict(node[key]):
                walk(node[key], path)
            else:
                found.append(path)

    walk(composed(f"+experiment={stage}"), "")
    return sorted(found)


WORDS = st.text("abcdefz_-./: 0123456789", max_size=12)
VALUES = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | WORDS
    | st.lists(st.integers(-2, 5) | WORDS, max_size=3)
    | st.dictionaries(st.text("abc", min_size=1, max_size=3), st.integers() | WORDS, max_size=2)
)
PLACES = st.sampled_from(STAGES).flatmap(
    lambda stage: st.tuples(st.just(stage), st.sampled_from(keys(stage)))
)


def must_name(text: str, key: str) -> None:
    assert "\n" not in text
    assert any(part in text for part in key.split("."))
    assert len(text) < 6000


@examples(60)
@given(PLACES, VALUES)
def test_any_value_is_taken_or_refused_by_its_name(place, value):
    stage, key = place
    cfg = copy.deepcopy(composed(f"+experiment={stage}"))
    with flag_override(cfg, "struct", False):
        OmegaConf.update(cfg, key, value, merge=False)
    try:
        check_run(read_settings(TrainSettings, cfg))
    except ConfigError as error:
        must_name(str(error), key)


EDITS = st.tuples(st.sampled_from(["drop", "double", "swap", "add"]), st.integers(0, 40))


def misspelt(word: str, how: str, where: int) -> str:
    at = where % len(word)
    if how == "drop":
        return word[:at] + word[at + 1 :]
    if how == "double":
        return word[: at + 1] + word[at:]
    if how == "swap":
        return word[:at] + word[at : at + 2][::-1] + word[at + 2 :]
    return f"{word[:at]}x{word[at:]}"


@examples(60)
@given(PLACES, EDITS)
def test_a_misspelt_key_is_never_taken_in_silence(place, edit):
    stage, key = place
    group, _, last = key.rpartition(".")
    wrong = misspelt(last, *edit)
    cfg = copy.deepcopy(composed(f"+experiment={stage}"))
    parent = OmegaConf.select(cfg, group) if group else cfg
    if not wrong or wrong in parent or key.startswith(OPEN) or last.startswith("_"):
        return
    path = f"{group}.{wrong}" if group else wrong
    with flag_override(cfg, "struct", False):
        OmegaConf.update(cfg, path, 1)
    with pytest.raises(ConfigError) as caught:
        check_run(read_settings(TrainSettings, cfg))
    assert wrong in str(caught.value)
    assert "\n" not in str(caught.value)


SIGNS = st.text("=+~,[]{}()<>:;'\"$\\@/.*?! abcseedmodel019\t\n", max_size=20)


@examples(60)
@given(SIGNS | st.text(max_size=10) | SIGNS.map("seed={}".format) | SIGNS.map("+data={}".format))
def test_any_text_as_an_override_composes_or_is_explained(override):
    register()
    overrides = ["+experiment=base", override]
    with initialize_config_dir(version_base="1.3", config_dir=str(conf_dir())):
        try:
            compose("train", overrides=overrides)
        except COMPOSE_ERRORS as error:
            must_name(explain(error, overrides), "")
