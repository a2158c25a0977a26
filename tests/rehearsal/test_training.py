"""Every stage on a second device gives the CPU's weights and metrics.

Bits differ: on a CPU a few rows take kernels of its own, and here all layers are plain.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rlhf_lightning import (
    DistillationHparams,
    DPOModule,
    LoraHparams,
    PreferenceDataModule,
    RewardModule,
    SFTModule,
)
from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.models.factory import load_policy, load_scalar_model
from rlhf_lightning.models.ppo_models import ppo_models
from rlhf_lightning.modules.placement import move_models
from rlhf_lightning.rollout.scorers.base import RewardModelScorer
from tests.builders.mirror import on_mirror, recorded, trainer_options
from tests.builders.models import prompt_batch, prompt_rows, tiny_policy, tiny_scalar_model
from tests.builders.record_files import write_material
from tests.builders.stages import (
    LENGTHS,
    group_prompts,
    ppo_hparams,
    preference_batch,
    prompts,
    sft_batch,
    tiny_distillation,
    tiny_grpo,
    tiny_module,
    tiny_sft,
    trainer,
)

LORA = LoraHparams(r=4, alpha=8)
RATE = 0.05
TOLERANCE = {"rtol": 1e-3, "atol": 1e-5}  # in fp32, of weights that move by up to 0.1


def sgd(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Adam would turn rounding into whole steps where a gradient is nearly 0."""
    return torch.optim.SGD(groups)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A policy and files of records."""
    return write_material(tmp_path_factory.mktemp("material"))


def few_prompts(iteration: int) -> PromptBatch:
    # Not those of iteration 1: a random number of theirs lies 5e-8 from the border between two
    # tokens, and rounding decides.
    return prompts(iteration + 2, rows=8)


def prompts_ahead(iteration: int) -> PromptBatch:
    """8 prompts, and as spare ones the 8 of the next iteration."""
    texts = prompt_rows([*LENGTHS, *LENGTHS[:8]], seed=2)[8 * iteration :][:16]
    batch = prompt_batch(texts, first_row=8 * iteration)
    return replace(batch, spare=torch.arange(16) >= 8)


def ppo(policy: Path, model_type: str = "llama") -> Any:
    hparams = ppo_hparams(num_minibatches=2, micro_batch_size=6, learning_rate=RATE)
    return tiny_module(model_type, ppo=hparams, optimizer=sgd)


def ppo_of_a_reward_model(policy: Path) -> Any:
    scorer = RewardModelScorer(lambda: tiny_scalar_model("llama", seed=5), micro_batch_size=5)
    hparams = ppo_hparams(num_ppo_epochs=1, learning_rate=RATE)
    return tiny_module("llama", ppo=hparams, scorer=scorer, optimizer=sgd)


def ppo_with_adapters(policy: Path) -> Any:
    models = partial(ppo_models, policy, None, lora=LORA, value_head="zero")
    hparams = ppo_hparams(num_ppo_epochs=1, learning_rate=RATE)
    return tiny_module(ppo=hparams, models=models, optimizer=sgd)


def sao(policy: Path) -> Any:
    hparams = ppo_hparams(
        surrogate="masked_ratio",
        ratio_base="sampler",
        cliprange=0.8,
        cliprange_high=3.0,
        rollout_lag=1,
        num_ppo_epochs=1,
        num_value_epochs=2,
        value_trainable=("*mlp*", "head*"),
        learning_rate=RATE,
    )
    return tiny_module("llama", ppo=hparams, optimizer=sgd)


def distillation(policy: Path) -> Any:
    hparams = DistillationHparams(learning_rate=RATE)
    return tiny_distillation("llama", distillation=hparams, optimizer=sgd)


# Module of a policy folder, and batches by number; DPO finds its reference by row of a file.
STAGES: dict[str, tuple[Callable[[Path], Any], Callable[[int], Any] | None]] = {
    "ppo": (ppo, few_prompts),
    "ppo, gpt2": (partial(ppo, model_type="gpt2"), few_prompts),
    "ppo, reward model": (ppo_of_a_reward_model, few_prompts),
    "ppo, lora": (ppo_with_adapters, few_prompts),
    "sao": (sao, prompts_ahead),
    "grpo": (lambda policy: tiny_grpo("llama", optimizer=sgd), group_prompts),
    "distillation": (distillation, few_prompts),
    "sft": (lambda policy: tiny_sft("llama"), lambda seed: sft_batch(seed=seed)),
    "sft, lora": (
        lambda policy: SFTModule.from_pretrained(policy, lora=LORA),
        lambda seed: sft_batch(seed=seed),
    ),
    "reward": (RewardModule.from_pretrained, lambda seed: preference_batch(seed=seed)),
    "reward, lora": (
        lambda policy: RewardModule.from_pretrained(policy, lora=LORA),
        lambda seed: preference_batch(seed=seed),
    ),
    "dpo": (DPOModule.from_pretrained, None),
}


# Variants of stages that are there without them.
MORE = dict.fromkeys(("ppo, gpt2", "ppo, lora", "sft, lora", "reward, lora"), pytest.mark.slow)


def trained(stage: str, device: str, material: dict[str, Path], folder: Path) -> dict[str, Any]:
    """Return what two iterations of a stage end with."""
    build, batch = STAGES[stage]
    torch.manual_seed(0)
    module = build(material["policy"])
    if batch is not None:
        data: Any = DataLoader([batch(0), batch(1)], batch_size=None)
    else:
        data = PreferenceDataModule(material["pairs"], module.tokenizer, batch_size=8)
    the_trainer = trainer(
        **trainer_options(device), default_root_dir=folder / device, limit_train_batches=2
    )
    with recorded() as log:
        the_trainer.fit(module, data)
    measured = {name: float(value) for name, value in the_trainer.callback_metrics.items()}
    return {
        "kernels": sum(log.kernels.values()),
        "weights": {name: weight.detach().cpu() for name, weight in module.state_dict().items()},
        "metrics": {k: v for k, v in measured.items() if not k.startswith(("time", "throughput"))},
    }


def assert_alike(there: dict[str, Any], here: dict[str, Any]) -> None:
    """Compare what a stage ended with on two devices."""
    assert here["weights"], "nothing was trained"
    torch.testing.assert_close(there["weights"], here["weights"], **TOLERANCE)
    assert here["metrics"].keys() == there["metrics"].keys() != set()
    for name, value in here["metrics"].items():
        assert there["metrics"][name] == pytest.approx(value, rel=1e-2, abs=1e-3, nan_ok=True), name


@pytest.mark.thorough
@pytest.mark.parametrize("stage", [pytest.param(s, marks=MORE.get(s, ())) for s in STAGES])
def test_a_stage_ends_with_the_weights_and_metrics_of_the_cpu(stage, material, tmp_path):
    here = trained(stage, "cpu", material, tmp_path)
    there = on_mirror(trained, stage, "mirror", material, tmp_path)
    assert there["kernels"] > 1000
    assert_alike(there, here)


@pytest.mark.gpu
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_on_cuda_ends_with_the_weights_and_metrics_of_the_cpu(stage, material, tmp_path):
    here = trained(stage, "cpu", material, tmp_path)
    there = trained(stage, "cuda", material, tmp_path)
    assert torch.cuda.max_memory_allocated() > 0
    assert_alike(there, here)


def trainer_and_data(
    device: str, material: dict[str, Path], folder: Path, module: Any
) -> tuple[Any, Any]:
    made = trainer(
        **trainer_options(device), default_root_dir=folder / device, limit_train_batches=1
    )
    return made, PreferenceDataModule(material["pairs"], module.tokenizer, batch_size=8)


def save_adapter_checkpoint(material: dict[str, Path], folder: Path) -> Path:
    module = DPOModule.from_pretrained(material["policy"], lora=LORA)
    the_trainer, data = trainer_and_data("cpu", material, folder, module)
    the_trainer.fit(module, data)
    the_trainer.save_checkpoint(folder / "adapter.ckpt")
    return folder / "adapter.ckpt"


def validated(
    device: str, material: dict[str, Path], folder: Path, checkpoint: Path
) -> dict[str, Any]:
    """Return the metrics of an adapter that was read, and the weights of a step after."""
    module = DPOModule.load_from_checkpoint(checkpoint, optimizer=sgd)
    the_trainer, data = trainer_and_data(device, material, folder, module)
    (metrics,) = the_trainer.validate(module, data, verbose=False)
    the_trainer.fit(module, data)
    weights = {name: weight.detach().cpu() for name, weight in module.state_dict().items()}
    return {"metrics": metrics, "weights": weights}


@pytest.mark.thorough
def test_an_adapter_that_was_read_is_validated_before_it_is_trained(material, tmp_path):
    checkpoint = save_adapter_checkpoint(material, tmp_path)
    here = validated("cpu", material, tmp_path, checkpoint)
    there = on_mirror(validated, "mirror", material, tmp_path, checkpoint)
    assert_alike(there, here)


def test_a_model_that_a_validation_has_moved_can_be_trained():
    model = torch.nn.Linear(2, 2)
    with torch.inference_mode():  # as Lightning validates
        move_models(SimpleNamespace(device_mesh=None, device=torch.device("meta")), [model])
    assert model.weight.is_meta
    assert not model.weight.is_inference()


def new_weights(device: str, policy: Path) -> dict[str, Any]:
    """Return weights that were drawn as Lightning makes a module, and a number drawn afterwards."""
    with torch.device(device):
        models = {
            "policy": tiny_policy("llama", seed=4),
            "adapter": load_policy(policy, lora=LORA, seed=4),
            "head": load_scalar_model(policy, head="reward", seed=4),
            "adapted head": load_scalar_model(policy, head="reward", lora=LORA, seed=4),
        }
        found = {name: list(model.parameters()) for name, model in models.items()}
        places = {str(p.device.type) for parameters in found.values() for p in parameters}
        found["drawn next"] = [torch.rand(3)]
    weights = {name: [p.detach().cpu() for p in own] for name, own in found.items()}
    return weights | {"places": places}


def test_new_models_heads_and_adapters_have_the_same_bits_on_every_device(material):
    torch.manual_seed(0)
    here = new_weights("cpu", material["policy"])
    there = on_mirror(new_weights, "mirror", material["policy"])
    assert (here.pop("places"), there.pop("places")) == ({"cpu"}, {"mirror"})
    # The device has numbers of its own, so that weights are alike for another reason.
    assert not torch.equal(here.pop("drawn next")[0], there.pop("drawn next")[0])
    torch.testing.assert_close(there, here, rtol=0, atol=0)
