"""The learning rates of a run: as set, or else by the size of the model that is loaded."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from omegaconf import DictConfig, OmegaConf

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.learning_rates import choose_rates
from rlhf_lightning.models.learning_rates import default_learning_rate
from tests.entry.test_model_configs import RECIPES, STAGES, composed, model_files, recipe

KINDS = ("sft", "reward", "policy", "value")
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


def folder_of(name: str, folder: Path) -> str:
    """Write the config of a checkpoint of this size; weights are not needed."""
    shape = OmegaConf.to_container(model_files()[name].shape)
    (folder / "config.json").write_text(json.dumps(shape))
    return str(folder)


def check_rates(cfg: DictConfig, name: str, *, lora: bool) -> None:
    for key, index in KEYS[cfg.stage].items():
        wanted = IN_USE[name][index] * (10 if lora else 1)
        assert OmegaConf.select(cfg.module, key) == pytest.approx(wanted, rel=1e-9)


@pytest.mark.parametrize(("model", "variant"), RECIPES, ids="".join)
def test_the_rates_of_the_recipes_are_those_of_their_sizes(model, variant, tmp_path):
    start = folder_of(model, tmp_path)
    for stage in STAGES:
        cfg = composed(*recipe(stage, model, variant))
        told = choose_rates(cfg, start)
        check_rates(cfg, model, lora=variant == "_lora")
        assert len(told) == len(KEYS[stage])
        size = f"by the size of the model: {cfg.model.num_parameters:,} weights"
        assert all(size in line for line in told)


@pytest.mark.parametrize("variant", ["", "_lora"])
def test_the_rates_are_those_of_the_checkpoint_and_not_of_the_experiment(variant, tmp_path):
    start = folder_of("smollm2_135m", tmp_path)
    for stage in STAGES:
        for model, *more in (["pretrained"], ["llama3_2_1b", f"artifacts.base={start}"]):
            cfg = composed(*recipe(stage, model, variant), *more)
            choose_rates(cfg, start)
            check_rates(cfg, "smollm2_135m", lora=variant == "_lora")


def test_an_explicit_rate_wins_and_the_other_follows_the_size(tmp_path):
    start = folder_of("smollm2_135m", tmp_path)
    rate = "module.ppo.learning_rate=2.0e-6"
    cfg = composed("+experiment=ppo", "model=qwen2_5_7b", "lora=lora", rate)
    policy, value = choose_rates(cfg, start)
    assert cfg.module.ppo.learning_rate == 2e-6
    assert policy == "learning_rate 2e-06, as set"
    assert cfg.module.ppo.value_learning_rate == 1e-4
    assert value.startswith("value_learning_rate 0.0001, by the size of the model: 134,515,008 ")


@pytest.mark.parametrize(
    ("experiment", "rate"),
    [("sft", 1e-3), ("reward", 5e-4), ("ppo", 4e-4), ("sft_smollm2_shell", 2e-4)],
)
def test_what_an_experiment_sets_stays(experiment, rate, tmp_path):
    cfg = composed(f"+experiment={experiment}")
    told = choose_rates(cfg, folder_of("llama3_1_8b", tmp_path))
    assert cfg.module[cfg.stage].learning_rate == rate
    assert told[0] == f"learning_rate {rate:g}, as set"


def test_a_model_whose_config_gives_no_size_needs_an_explicit_rate(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "clip_vision_model"}')
    cfg = composed("+experiment=sft", "model=pretrained")
    with pytest.raises(ConfigError, match=r"set module\.sft\.learning_rate=1\.0e-5"):
        choose_rates(cfg, str(tmp_path))
    cfg.module.sft.learning_rate = 1e-4
    assert choose_rates(cfg, str(tmp_path)) == ("learning_rate 0.0001, as set",)


def test_a_larger_model_never_has_a_larger_rate():
    files = model_files()
    assert list(files) == list(IN_USE)
    for smaller, larger in pairwise(files.values()):
        for kind in KINDS:
            rates = [
                default_learning_rate(kind, file.num_parameters, lora=False)  # type: ignore[arg-type]
                for file in (smaller, larger)
            ]
            assert rates[1] <= rates[0], f"{kind} of {larger.name}"
