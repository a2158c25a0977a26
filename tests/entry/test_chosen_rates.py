"""The learning rates of a run: as set, or else by the size of the model that is loaded."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rlhf_lightning.app.build import choose_rates, with_vocabulary
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from tests.builders.command_lines import named_model, settings_of

# Of all weights of 135 million; adapters have ten times the rate.
IN_USE = {
    "sft": {"sft.learning_rate": 3e-5},
    "reward": {"reward.learning_rate": 3e-5},
    "ppo": {"ppo.learning_rate": 1e-5, "ppo.value_learning_rate": 1e-5},
}


def folder_of(name: str, folder: Path) -> str:
    """Write the config of a checkpoint of this size; weights are not needed."""
    (folder / "config.json").write_text(json.dumps(named_model(name)["shape"]))
    return str(folder)


def chosen(stage: str, start: str, *words: str) -> tuple[TrainSettings, tuple[str, ...]]:
    """Return the settings of a stage from `start`, with the rates that are chosen, and the lines.

    `words` are its command line.
    """
    settings = settings_of(*words, f"artifacts.{'base' if stage == 'sft' else 'sft'}={start}")
    changes, told = choose_rates(settings)
    return settings.updated(changes), told


@pytest.mark.thorough
@pytest.mark.parametrize(("lora", "factor"), [("none", 1), ("lora", 10)])
def test_the_rates_are_those_of_the_checkpoint_and_not_of_the_experiment(lora, factor, tmp_path):
    start = folder_of("smollm2_135m", tmp_path)
    for stage, rates in IN_USE.items():
        words = [f"+experiment={stage}", "model=llama3_2_1b", f"lora={lora}"]
        words += ["dataset=ultrachat" if stage == "sft" else "dataset=ultrafeedback"]
        base = [] if stage == "sft" else [f"artifacts.base={start}"]
        settings, _ = chosen(stage, start, *words, *base)
        for key, rate in rates.items():
            assert settings.select(f"module.{key}") == pytest.approx(rate * factor, rel=1e-9)


def test_an_explicit_rate_wins_and_the_other_follows_the_size(tmp_path):
    start = folder_of("smollm2_135m", tmp_path)
    words = ["+experiment=ppo", "model=qwen2_5_7b", "lora=lora"]
    settings, told = chosen("ppo", start, *words, "module.ppo.learning_rate=2.0e-6")
    assert settings.hparams.learning_rate == 2e-6
    assert settings.hparams.value_learning_rate == 1e-4
    assert "value_learning_rate 0.0001, by the size" in told[1]


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
