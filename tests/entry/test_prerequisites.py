"""Models that a stage starts from: found, trained first, or asked for by name."""

import json
from pathlib import Path

import pytest

from rlhf_lightning.app import prerequisites, train
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import read_manifest
from rlhf_lightning.text.tokenizers import load_tokenizer
from tests.builders.command_lines import settings_of
from tests.builders.runs import make_start


@pytest.fixture
def compose_ppo(tmp_path):
    def make(*overrides):
        return settings_of("+experiment=ppo", f"paths.artifacts={tmp_path}", *overrides)

    return make


def test_a_missing_folder_that_the_user_gave_names_the_command_that_makes_it(compose_ppo, tmp_path):
    for debug in ("none", "fast"):
        settings = compose_ppo(f"debug={debug}", f"artifacts.sft={tmp_path}/mine")
        with pytest.raises(ConfigError, match=r"mine does not exist.*\+experiment=sft"):
            prerequisites.prepare_inputs(settings, [])


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (
            "model=qwen2_5_0_5b lora=lora dataset=tldr module.ppo.kl_coef=0.1",
            r"\+experiment=sft model=qwen2_5_0_5b lora=lora dataset=tldr$",
        ),
        (
            "model=smollm2_135m dataset=files dataset.path=prompts.jsonl dataset.name=mine "
            "paths.artifacts=elsewhere",
            r"(?=.*paths\.artifacts=elsewhere).*\+experiment=sft .*dataset\.path=DEMONSTRATIONS",
        ),
        (  # that only the value model would start from
            "model=pretrained dataset=files dataset.path=pairs.jsonl dataset.name=mine "
            "artifacts.sft=org/chat scorer=function scorer.function=a.py:b",
            r"module\.value=null module\.value_head=zero",
        ),
    ],
)
def test_a_missing_model_names_the_stage_that_makes_it_or_how_to_do_without(
    working_folder, words, told
):
    (working_folder / "prompts.jsonl").write_text(json.dumps({"prompt": "a"}))
    given = ["+experiment=ppo", *words.split()]
    with pytest.raises(ConfigError, match=told):
        prerequisites.prepare_inputs(settings_of(*given), given)


def test_missing_built_in_models_are_trained_in_order_and_say_so(
    compose_ppo, tmp_path, monkeypatch
):
    trained, said = [], []

    def train(kind, settings, overrides):
        trained.append(kind)

    monkeypatch.setattr(prerequisites, "_train", train)
    monkeypatch.setattr(prerequisites, "say", said.append)
    prerequisites.prepare_inputs(compose_ppo(), [])
    assert trained == ["sft", "reward"]
    assert "training it first" in said[0]


def test_a_child_that_fails_stops_the_run_with_its_command(compose_ppo, monkeypatch, mine):
    class Failed:
        returncode = 3

    commands = []
    monkeypatch.setattr(
        prerequisites.subprocess, "run", lambda command, **_: commands.append(command) or Failed()
    )
    overrides = ["+experiment=ppo", "module.ppo.kl_coef=0.1", "logger=none", "paths.outputs=o"]
    with pytest.raises(RuntimeError, match="training the sft model failed with exit status 3"):
        prerequisites.prepare_inputs(compose_ppo(), overrides)
    assert commands[0][3] == mine
    assert commands[0][-4:] == ["+experiment=sft", "seed=1", "logger=none", "paths.outputs=o"]


@pytest.mark.thorough
@pytest.mark.parametrize("lora", ["none", "lora"])
def test_a_run_that_only_shows_that_it_runs_makes_what_is_missing_of_random_weights(
    tmp_path, monkeypatch, lora
):
    monkeypatch.setattr(prerequisites, "_train", lambda *_: pytest.fail("nothing is trained"))
    real = tmp_path / "demo_seed1" / "sft"
    real.mkdir(parents=True)
    (real / "config.json").write_text("{}")
    words = ["+experiment=ppo", "debug=fast", f"lora={lora}", f"paths.artifacts={tmp_path}"]
    settings = settings_of(*words)
    assert prerequisites.prepare_inputs(settings, []) is settings
    sft, reward = (Path(str(settings.artifacts.of(kind))) for kind in ("sft", "reward"))
    assert sft == tmp_path / "debug_fast/demo_seed1/sft"
    assert len(load_tokenizer(sft)) == load_policy(sft).model.config.vocab_size
    assert load_scalar_model(reward).head.weight.abs().sum() > 0
    assert (reward / "adapter").is_dir() == (lora == "lora")
    assert [path.name for path in real.iterdir()] == ["config.json"]
    before = read_manifest(sft)
    prerequisites.prepare_inputs(settings, [])
    assert read_manifest(sft) == before
    again = settings_of(*words[:-1], f"paths.artifacts={tmp_path}/again")
    prerequisites.prepare_inputs(again, [])
    for kind in ("sft", "reward"):  # by the seed, so that such a run can be repeated
        files = [Path(str(one.artifacts.of(kind))) for one in (settings, again)]
        weights = [(folder / "model.safetensors").read_bytes() for folder in files]
        assert weights[0] == weights[1], kind


def test_the_built_in_world_is_no_data_for_another_model(tmp_path, monkeypatch):
    """Its 24,000 pairs would train a real model for hours where no dataset is named."""
    monkeypatch.chdir(tmp_path)
    mine = make_start(Path("mine"))
    settings = settings_of("+experiment=reward", f"artifacts.sft={mine}")
    prerequisites.check_world(settings, [str(mine), None, "missing/policy/here"])
    other = json.loads((mine / "tokenizer.json").read_text())
    vocabulary = other["model"]["vocab"]
    other["model"]["vocab"] = {f"x{word}" if i > 9 else word: i for word, i in vocabulary.items()}
    (mine / "tokenizer.json").write_text(json.dumps(other))
    refused = r"dataset=demo is the built-in world, and {} is no model of it: .*dataset=files"
    words = ["+experiment=reward", "artifacts.sft=mine"]
    with pytest.raises(ConfigError, match=refused.format("mine")):
        train.run(settings_of(*words), RunFolder(tmp_path / "run"), words)
    hub = settings_of("+experiment=dpo", "model=smollm2_135m", "artifacts.sft=org/mine")
    with pytest.raises(ConfigError, match=refused.format("org/mine")):
        prerequisites.check_world(hub, [hub.start])
    only_runs = settings_of("+experiment=reward", "artifacts.sft=mine", "debug=fast")
    prerequisites.check_world(only_runs, [only_runs.start])
