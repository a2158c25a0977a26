"""`logger=` is a word of every command: taken where something is logged, else refused by name."""

from __future__ import annotations

import pytest

from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import ConfigError, register
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.pipeline_steps import as_overrides
from rlhf_lightning.app.prerequisites import training_words
from tests.builders.command_lines import settings_of

NEEDED = {"report": ["run=a"], "export": ["run=a"]}


def test_a_pipeline_gives_it_to_training():
    kind = "wandb"
    settings = settings_of(*as_overrides([f"logger={kind}", "train:seed=3"]), entry="pipeline")
    assert list(settings.overrides["train"]) == [f"logger={kind}", "seed=3"]


@pytest.mark.thorough
@pytest.mark.parametrize("entry", ["evaluate", "collect"])
def test_a_command_that_trains_missing_models_takes_it_for_those_and_refuses_to_show_itself(entry):
    for kind in ("none", "csv"):
        words = [f"logger={kind}"]
        assert settings_of(*words, entry=entry).logger.kind == kind
        assert training_words("sft", settings_of(*words, entry=entry), words)[-1] == words[0]
    for kind in ("wandb", "tensorboard"):
        with pytest.raises(ConfigError, match=rf"^logger={kind} .*logger=none"):
            settings_of(f"logger={kind}", entry=entry)


@pytest.mark.parametrize("word", ["logger=none", "debug=fast"])
@pytest.mark.parametrize("entry", ["report", "export"])
def test_a_command_that_trains_nothing_refuses_it_by_name(entry, word):
    register()
    with pytest.raises(ConfigError) as error:
        load_settings(COMMANDS[entry], entry, [*NEEDED.get(entry, []), word])
    assert str(error.value).startswith(f"{word} is for training, and rlhf-{entry} ")
