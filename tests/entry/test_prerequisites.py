"""Models that a stage starts from: found, trained first, or asked for by name."""

import pytest

from rlhf_lightning.app import prerequisites
from rlhf_lightning.app.config.compose import ConfigError
from tests.builders.command_lines import settings_of


@pytest.fixture
def compose_ppo(tmp_path):
    def make(*overrides):
        return settings_of("+experiment=ppo", f"paths.artifacts={tmp_path}", *overrides)

    return make


def test_a_missing_folder_that_the_user_gave_names_the_command_that_makes_it(compose_ppo, tmp_path):
    settings = compose_ppo(f"artifacts.sft={tmp_path}/mine")
    with pytest.raises(ConfigError, match=r"mine does not exist.*\+experiment=sft"):
        prerequisites.prepare_inputs(settings, [])


def test_a_missing_model_of_a_pretrained_recipe_names_the_stage_and_the_shared_choices(
    tmp_path,
):
    words = ["+experiment=ppo", "model=qwen2_5_0_5b", "lora=lora", "dataset=tldr"]
    settings = settings_of(*words, f"paths.artifacts={tmp_path}")
    wanted = r"\+experiment=sft model=qwen2_5_0_5b lora=lora dataset=tldr$"
    with pytest.raises(ConfigError, match=wanted):
        prerequisites.prepare_inputs(settings, [*words, "module.ppo.kl_coef=0.1"])


def test_a_missing_sft_model_of_ultrafeedback_is_made_from_ultrachat(tmp_path):
    words = ["+experiment=reward", "model=qwen2_5_0_5b", "dataset=ultrafeedback"]
    settings = settings_of(*words, f"paths.artifacts={tmp_path}")
    made = "+experiment=sft model=qwen2_5_0_5b dataset=ultrachat"
    sft = settings_of(*made.split(), f"paths.artifacts={tmp_path}")
    assert sft.artifacts.publish == settings.artifacts.sft
    with pytest.raises(ConfigError, match=rf"\{made}$"):
        prerequisites.prepare_inputs(settings, words)


def test_missing_built_in_models_are_trained_in_order_and_say_so(
    compose_ppo, tmp_path, monkeypatch
):
    trained, said = [], []

    def train(kind, settings, overrides):
        trained.append(kind)

    monkeypatch.setattr(prerequisites, "_train", train)
    prerequisites.prepare_inputs(compose_ppo(), [], say=said.append)
    assert trained == ["sft", "reward"]
    assert "training it first" in said[0]


def test_a_complete_folder_is_used_as_it_is(compose_ppo, tmp_path, monkeypatch):
    for kind in ("sft", "reward"):
        folder = tmp_path / "demo_seed1" / kind
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
    monkeypatch.setattr(prerequisites, "_train", lambda *_: pytest.fail("nothing is missing"))
    prerequisites.prepare_inputs(compose_ppo(), [])


def test_a_child_that_fails_stops_the_run_with_its_command(compose_ppo, monkeypatch):
    class Failed:
        returncode = 3

    commands = []
    monkeypatch.setattr(
        prerequisites.subprocess, "run", lambda command, **_: commands.append(command) or Failed()
    )
    overrides = ["+experiment=ppo", "module.ppo.kl_coef=0.1", "debug=fast", "paths.outputs=o"]
    with pytest.raises(RuntimeError, match="training the sft model failed with exit status 3"):
        prerequisites.prepare_inputs(compose_ppo(), overrides, say=lambda _: None)
    assert commands[0][-4:] == ["+experiment=sft", "seed=1", "debug=fast", "paths.outputs=o"]


def test_models_that_are_kept_apart_are_made_apart_too(compose_ppo, monkeypatch):
    class Failed:
        returncode = 3

    commands = []
    monkeypatch.setattr(
        prerequisites.subprocess, "run", lambda command, **_: commands.append(command) or Failed()
    )
    with pytest.raises(RuntimeError, match="training the sft model failed"):
        prerequisites.prepare_inputs(compose_ppo("paths.apart=trial"), [], say=lambda _: None)
    assert commands[0][-3:] == ["+experiment=sft", "seed=1", "paths.apart=trial"]


def test_a_hub_name_is_left_to_transformers(compose_ppo, monkeypatch):
    monkeypatch.setattr(prerequisites, "_train", lambda *_: pytest.fail("hub names are not ours"))
    settings = compose_ppo("artifacts.sft=Some-Org/model-1B", "artifacts.reward=Some-Org/reward-1B")
    prerequisites.prepare_inputs(settings, [])
