"""Configurations of the usual sizes: they compose, hold together, and say what they are."""

from __future__ import annotations

import json
import os
import warnings
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from rlhf_lightning.app.config.compose import choices, named_model
from rlhf_lightning.app.config.groups import ModelSettings
from rlhf_lightning.app.config.settings import TrainSettings
from tests.builders.command_lines import settings_of

SMOLLM2 = Path(
    os.environ.get("RLHF_SMOLLM2", "~/.cache/rlhf_lightning/smollm2-135m-instruct")
).expanduser()
STAGES = ("sft", "reward", "ppo")
SMALL = ("smollm2_135m", "smollm2_360m", "qwen2_5_0_5b", "qwen3_0_6b", "llama3_2_1b")
LARGE = ("qwen2_5_7b", "llama3_1_8b")
SHARDED = ("llama3_2_1b", *LARGE)
DATASETS = {"sft": "ultrachat", "reward": "ultrafeedback", "ppo": "ultrafeedback"}
VARIANTS = {"": [], "_lora": ["lora=lora"], "_fsdp": ["strategy=fsdp"]}
ALL_RECIPES = [
    *((model, "") for model in SMALL),
    *((model, "_lora") for model in (*SMALL, *LARGE)),
    *((model, "_fsdp") for model in SHARDED),
]
FAST = {("smollm2_135m", ""), ("qwen3_0_6b", "_lora"), ("llama3_2_1b", "_fsdp")}
RECIPES = [
    pytest.param(*recipe, marks=() if recipe in FAST else pytest.mark.slow)
    for recipe in ALL_RECIPES
]


# SFT, reward model, policy and value model, of all weights; adapters have ten times the rate.
IN_USE = {
    "smollm2_135m": (3e-5, 3e-5, 1e-5, 1e-5),
    "smollm2_360m": (2e-5, 2e-5, 6e-6, 1e-5),
    "qwen2_5_0_5b": (2e-5, 1.5e-5, 5e-6, 1e-5),
    "qwen3_0_6b": (2e-5, 1.5e-5, 4.5e-6, 1e-5),
    "llama3_2_1b": (1.5e-5, 1e-5, 3e-6, 1e-5),
    "qwen2_5_7b": (1e-5, 9e-6, 1e-6, 1e-5),
    "llama3_1_8b": (1e-5, 9e-6, 1e-6, 1e-5),
}
KEYS = {
    "sft": {"sft.learning_rate": 0},
    "reward": {"reward.learning_rate": 1},
    "ppo": {"ppo.learning_rate": 2, "ppo.value_learning_rate": 3},
}


@cache
def model_files() -> dict[str, ModelSettings]:
    """Return the model files of a size, the smallest first."""
    files = {name: recipe_settings("sft", name, "").model for name in SMALL + LARGE}
    return dict(sorted(files.items(), key=lambda item: item[1].num_parameters))


@cache
def recipe_settings(stage: str, model: str, variant: str) -> TrainSettings:
    """Return the settings of a stage of a recipe, which must give no warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a value outside its usual range would warn
        found: TrainSettings = settings_of(*recipe(stage, model, variant))
    return found


def on_meta_device(shape: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))


def recipe(stage: str, model: str, variant: str, dataset: str = "") -> list[str]:
    """Return the words of a stage's command line."""
    dataset = dataset or DATASETS[stage]
    return [f"+experiment={stage}", f"model={model}", f"dataset={dataset}", *VARIANTS[variant]]


def ranks(cfg: TrainSettings) -> int:
    return cfg.trainer.world_size


def check_batches(cfg: TrainSettings) -> None:
    """A batch divides into ranks, minibatches and whole micro-batches."""
    hparams = cfg.hparams
    minibatches = hparams.num_minibatches if cfg.stage == "ppo" else 1
    share, rest = divmod(cfg.data.batch_size, ranks(cfg) * minibatches)
    assert rest == 0, "every rank takes as many rows of every minibatch"
    rows = hparams.micro_batch_size or 1  # None: a GPU counts tokens
    assert share >= rows
    assert share % rows == 0


def check_lengths(cfg: TrainSettings) -> None:
    """The longest rows fit the context, and the longest answers what they are evaluated with."""
    context, answer = cfg.model.shape["max_position_embeddings"], cfg.evaluation.max_new_tokens
    if cfg.stage == "ppo":
        assert cfg.all_hparams["sampling"].max_new_tokens == answer
        assert cfg.data.get("max_prompt_length") + answer <= context
    else:
        assert answer < cfg.data.get("max_length") <= context


def check_precision(cfg: TrainSettings, variant: str) -> None:
    """bf16 compute on fp32 weights, in the way that each strategy has it."""
    if variant == "_fsdp":
        assert (cfg.strategy.name, cfg.trainer.precision) == ("fsdp", "32-true")
        assert cfg.strategy.compute_dtype == "bfloat16"
        assert (cfg.trainer.accelerator, ranks(cfg)) == ("gpu", 8)
    else:
        assert (cfg.strategy.name, cfg.trainer.precision) == ("auto", "bf16-mixed")
        assert ranks(cfg) == 1


def check_adapters(cfg: TrainSettings, variant: str) -> None:
    """LoRA where the name says so, with the reward model on the base."""
    lora = variant == "_lora"
    assert (cfg.lora is not None) == lora
    if cfg.stage == "ppo":
        kind = "RewardAdapterScorer" if lora else "RewardModelScorer"
        assert cfg.scorer.class_name == kind


def folder_of(name: str, folder: Path) -> str:
    """Write the config of a checkpoint of this size; weights are not needed."""
    (folder / "config.json").write_text(json.dumps(named_model(name)["shape"]))
    return str(folder)


def check_rates(settings: TrainSettings, name: str, *, lora: bool) -> None:
    for key, index in KEYS[settings.stage].items():
        wanted = IN_USE[name][index] * (10 if lora else 1)
        assert settings.select(f"module.{key}") == pytest.approx(wanted, rel=1e-9)
        assert getattr(settings.hparams, key.partition(".")[2]) == settings.select(f"module.{key}")


@pytest.mark.thorough
@pytest.mark.parametrize(("model", "variant"), RECIPES)
def test_the_three_stages_of_a_recipe_compose_and_build_on_each_other(model, variant):
    cfgs = {stage: recipe_settings(stage, model, variant) for stage in STAGES}
    for stage, cfg in cfgs.items():
        assert (cfg.stage, cfg.name) == (stage, f"{stage}_{model}")
        assert cfg.model.name == model
        assert cfg.model.shape, "everything in it resolves"
        assert cfg.model.activation_checkpointing == (model in LARGE)
        check_batches(cfg)
        check_lengths(cfg)
        check_precision(cfg, variant)
        check_adapters(cfg, variant)
    sft, reward, ppo = (cfgs[stage].artifacts for stage in STAGES)
    assert sft.base == cfgs["sft"].model.source
    assert reward.sft == ppo.sft == sft.publish
    assert ppo.reward == reward.publish
    assert len({sft.publish, reward.publish, ppo.publish}) == 3
    assert ("_lora/" in sft.publish) == (variant == "_lora"), "adapters overwrite no full model"
    assert cfgs["sft"].data.source.get("name") == "HuggingFaceH4/ultrachat_200k"
    assert cfgs["reward"].data.get("num_epochs") == 1
    assert {cfgs[s].data.source.get("name") for s in ("reward", "ppo")} == {
        "trl-lib/ultrafeedback_binarized"
    }


def test_sft_on_the_preference_set_replaces_no_model_of_the_other_set():
    name = "smollm2_135m"
    published = {
        dataset: settings_of(*recipe("sft", name, "", dataset)).artifacts.publish
        for dataset in ("ultrachat", "ultrafeedback", "hh_rlhf")
    }
    assert len(set(published.values())) == 3
    reward = settings_of(*recipe("reward", name, "")).artifacts
    assert reward.sft == published["ultrachat"]
    own = "dataset.family=ultrafeedback"
    built_on = settings_of(*recipe("reward", name, ""), own).artifacts
    assert built_on.sft == published["ultrafeedback"]
    assert built_on.publish != reward.publish


def test_every_model_file_is_one_of_the_recipes_tested_here_and_no_experiment_names_a_size():
    assert set(choices("model")) == {*SMALL, *LARGE, "demo", "pretrained"}
    sized = [name for name in choices("experiment") for model in SMALL + LARGE if model in name]
    assert not sized
    assert len(choices("experiment")) <= 24


ROWS = "module.{stage}.micro_batch_size"
GPU, EIGHT = (1, "bf16-mixed"), (8, "32-true")
WHOLE, ADAPTER = "RewardModelScorer", "RewardAdapterScorer"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("words", "rows", "batch", "hardware", "scorer", "sft"),
    [
        ("sft smollm2_135m", 16, 128, GPU, None, None),
        ("sft qwen2_5_7b strategy=fsdp", None, 128, EIGHT, None, None),
        ("reward smollm2_135m lora=lora", 8, 64, GPU, None, "smollm2_135m_lora/ultra/sft"),
        ("reward qwen3_0_6b", None, 64, GPU, None, "qwen3_0_6b/ultra/sft"),
        ("reward llama3_1_8b strategy=fsdp", None, 64, EIGHT, None, "llama3_1_8b/ultra/sft"),
        ("ppo qwen2_5_0_5b", None, 128, GPU, WHOLE, "qwen2_5_0_5b/ultra/sft"),
        ("ppo qwen2_5_0_5b lora=lora", None, 128, GPU, ADAPTER, "qwen2_5_0_5b_lora/ultra/sft"),
        ("ppo qwen2_5_0_5b lora=qlora", None, 128, GPU, ADAPTER, "qwen2_5_0_5b_lora/ultra/sft"),
        ("ppo llama3_2_1b strategy=fsdp", None, 256, EIGHT, WHOLE, "llama3_2_1b/ultra/sft"),
        ("ppo llama3_1_8b lora=lora", None, 64, GPU, ADAPTER, "llama3_1_8b_lora/ultra/sft"),
        ("ppo qwen2_5_7b strategy=fsdp", None, 256, EIGHT, WHOLE, "qwen2_5_7b/ultra/sft"),
        ("ppo smollm2_360m tldr", None, 128, GPU, WHOLE, "smollm2_360m/tldr/sft"),
    ],
)
def test_a_command_line_of_a_recipe_means(words, rows, batch, hardware, scorer, sft):
    stage, model, *more = words.split()
    dataset = more.pop() if more == ["tldr"] else ""
    cfg = settings_of(*recipe(stage, model, "", dataset), *more)
    assert cfg.select(ROWS.format(stage=stage)) == rows
    assert cfg.data.batch_size == batch
    assert (cfg.trainer.devices, cfg.trainer.precision) == hardware
    assert scorer in (None, cfg.scorer and cfg.scorer.class_name)
    assert cfg.artifacts.sft == (sft and f"artifacts/{sft}")


@pytest.mark.parametrize("model", SMALL + LARGE)
def test_the_shape_has_the_parameters_that_the_file_states(model):
    file = model_files()[model]
    built = on_meta_device(file.shape)
    assert sum(p.numel() for p in built.parameters()) == file.num_parameters
    assert all(p.is_meta for p in built.parameters())
    config = built.config
    assert config.model_type == file.shape["model_type"]
    for key, value in file.shape.items():
        if key not in ("rope_theta", "rope_scaling"):  # read into rope_parameters
            assert getattr(config, key) == value
    assert config.rope_parameters["rope_theta"] == file.shape["rope_theta"]
    rope_type = "llama3" if "rope_scaling" in file.shape else "default"
    assert config.rope_parameters["rope_type"] == rope_type


@pytest.mark.skipif(
    not (SMOLLM2 / "config.json").is_file(),
    reason=f"SmolLM2-135M-Instruct is not in {SMOLLM2}: set RLHF_SMOLLM2 to its folder",
)
def test_the_smallest_shape_is_that_of_the_published_checkpoint():
    file = model_files()["smollm2_135m"]
    published = AutoConfig.from_pretrained(SMOLLM2)
    built = AutoConfig.for_model(**file.shape)
    for key in (*(k for k in file.shape if k != "rope_theta"), "rope_parameters"):
        assert getattr(built, key) == getattr(published, key), key


@pytest.mark.parametrize("stage", STAGES)
def test_another_data_set_brings_its_data_its_lengths_and_its_own_artefacts(stage):
    cfg = settings_of(*recipe(stage, "llama3_2_1b", "_lora", "tldr"))
    assert cfg.data.source.get("name") == "trl-lib/tldr" + (
        "-preference" if stage == "reward" else ""
    )
    assert cfg.artifacts.publish == f"artifacts/llama3_2_1b_lora/tldr/{stage}"
    assert cfg.evaluation.max_new_tokens == 64
    assert cfg.data.get(cfg.data.prompt_length_key) in (560, 640)


@pytest.mark.parametrize("stage", STAGES)
def test_own_files_and_an_own_checkpoint_go_into_every_recipe(stage):
    overrides = ["dataset.path=mine.jsonl", "dataset.name=mine"]
    cfg = settings_of(
        *recipe(stage, "pretrained", "_lora", "files"), *overrides, "artifacts.base=folder"
    )
    assert cfg.data.source.get("path") == "mine.jsonl"
    assert cfg.artifacts.base == "folder"
    assert cfg.artifacts.publish == f"artifacts/pretrained_lora/mine/{stage}"
    assert cfg.evaluation.max_new_tokens == 512
