"""The learning rates of a run: as set, or else by the size of the model that is loaded."""

from __future__ import annotations

import pytest

from rlhf_lightning.app.build import choose_rates, with_vocabulary
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.stages.spec import find_stage
from tests.builders.command_lines import settings_of
from tests.entry.test_model_configs import (
    STAGES,
    check_rates,
    folder_of,
    recipe,
)

KINDS = ("sft", "reward", "policy", "value")


def chosen(stage: str, start: str, *words: str) -> tuple[TrainSettings, tuple[str, ...]]:
    """Return the settings of a stage from `start`, with the rates that are chosen, and the lines.

    `words` are its command line.
    """
    settings = settings_of(*words, f"artifacts.{find_stage(stage).starts_from}={start}")
    changes, told = choose_rates(settings)
    return settings.updated(changes), told


@pytest.mark.thorough
@pytest.mark.parametrize("variant", ["", "_lora"])
def test_the_rates_are_those_of_the_checkpoint_and_not_of_the_experiment(variant, tmp_path):
    start = folder_of("smollm2_135m", tmp_path)
    for stage in STAGES:
        for model in ("pretrained", "llama3_2_1b"):
            base = [] if stage == "sft" else [f"artifacts.base={start}"]
            settings, _ = chosen(stage, start, *recipe(stage, model, variant), *base)
            check_rates(settings, "smollm2_135m", lora=variant == "_lora")


def test_an_explicit_rate_wins_and_the_other_follows_the_size(tmp_path):
    start = folder_of("smollm2_135m", tmp_path)
    words = ["+experiment=ppo", "model=qwen2_5_7b", "lora=lora"]
    settings, told = chosen("ppo", start, *words, "module.ppo.learning_rate=2.0e-6")
    policy, value = told
    assert settings.hparams.learning_rate == 2e-6
    assert policy == "learning_rate 2e-06, as set"
    assert settings.hparams.value_learning_rate == 1e-4
    assert value.startswith("value_learning_rate 0.0001, by the size of the model: 134,515,008 ")


def test_a_model_whose_config_gives_no_size_needs_an_explicit_rate(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "clip_vision_model"}')
    words = ["+experiment=sft", "model=pretrained"]
    with pytest.raises(ConfigError, match=r"set module\.sft\.learning_rate=1\.0e-5"):
        chosen("sft", str(tmp_path), *words)
    _, told = chosen("sft", str(tmp_path), *words, "module.sft.learning_rate=1.0e-4")
    assert told == ("learning_rate 0.0001, as set",)


def test_the_rates_that_are_chosen_for_random_weights_keep_the_vocabulary_of_the_tokenizer():
    given = settings_of("+experiment=base", "module.sft.learning_rate=null")
    assert given.start is None
    whole = with_vocabulary(given)
    changes, _ = choose_rates(whole)
    settings = whole.updated(changes)
    assert settings.hparams.learning_rate == changes["module.sft.learning_rate"]
    assert settings.select("module.from_scratch") == whole.model.from_scratch
    assert settings.model.from_scratch == whole.model.from_scratch
