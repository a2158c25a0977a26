"""`logger=` is a word of every command: taken where something is logged, else refused by name."""

from __future__ import annotations

import pytest

from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import ConfigError, register
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.prerequisites import training_words
from tests.builders.command_lines import settings_of


@pytest.mark.thorough
def test_a_command_that_trains_missing_models_takes_it_for_those_and_refuses_to_show_itself():
    words = ["logger=csv"]
    for entry in ("evaluate", "collect"):
        settings = settings_of(*words, entry=entry)
        assert settings.logger.kind == "csv"
        assert training_words("sft", settings, words)[-1] == words[0]
        with pytest.raises(ConfigError, match=r"^logger=wandb .*logger=none"):
            settings_of("logger=wandb", entry=entry)


@pytest.mark.parametrize("word", ["logger=none", "debug=fast"])
def test_a_command_that_trains_nothing_refuses_it_by_name(word):
    register()
    for entry in ("report", "export"):
        with pytest.raises(ConfigError) as error:
            load_settings(COMMANDS[entry], entry, ["run=a", word])
        assert str(error.value).startswith(f"{word} is for training, and rlhf-{entry} ")
