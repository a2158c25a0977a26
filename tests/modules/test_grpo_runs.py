"""Whole runs of PolicyGradientModule from Python: a plain Trainer, a resume, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch

from rlhf_lightning import GRPOHparams, LoraHparams, PromptDataModule, SamplingHparams
from tests.builders.library_runs import (
    Stop,
    assert_same_rollouts,
    assert_same_weights,
    fit_in,
    rows,
    samples,
)
from tests.builders.record_files import write_material
from tests.builders.stages import RecordedGRPO

ITERATIONS = 4
GRPO = GRPOHparams(learning_rate=1e-3, num_minibatches=2, num_epochs=2, micro_batch_size=3)


@pytest.fixture(scope="module")
def material(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_material(tmp_path_factory.mktemp("material"))


def length(prompts: Any, completions: Any, **columns: Any) -> list[float]:
    return [float(len(text)) / 10 for text in completions]


def made(material: dict[str, Path], lora: LoraHparams | None = None, **changes: Any) -> Any:
    sampling = SamplingHparams(max_new_tokens=5)
    given = {"grpo": GRPO, "sampling": sampling, "lora": lora} | changes
    return RecordedGRPO.from_pretrained(material["policy"], length, **given)


def prompts(material: dict[str, Path], module: Any) -> PromptDataModule:
    return PromptDataModule(material["prompts"], module.tokenizer, batch_size=4, num_generations=3)


def train(
    material: dict[str, Path], folder: Path, *, lora: LoraHparams | None = None, **flags: Any
) -> tuple[Any, L.Trainer]:
    module = made(material, lora)
    return module, fit_in(folder, module, prompts(material, module), **flags)


@pytest.fixture(scope="module", params=[None, LoraHparams(r=4)], ids=["whole", "lora"])
def trained(material, tmp_path_factory, request):
    folder = tmp_path_factory.mktemp("trained") / "run"
    return (*train(material, folder, lora=request.param), folder, request.param)


@pytest.mark.thorough
def test_a_run_starts_at_the_reference_to_the_bit_and_moves(trained):
    module, trainer, folder, _ = trained
    first, *_, last = rows(folder)
    assert first["rollout/kl_per_response"] == 0
    assert last["rollout/kl_per_response"] != 0
    assert module.steps[0]["grpo/approx_kl"] == module.steps[0]["grpo/clipfrac"] == 0
    assert trainer.global_step == module.num_optimizer_steps == ITERATIONS * 2 * 2
    assert 0 < first["rollout/informative_groups"] <= 1


@pytest.mark.thorough
def test_a_killed_and_resumed_run_is_bitwise_the_run_never_killed(material, trained, tmp_path):
    whole, trainer, folder, lora = trained
    with pytest.raises(RuntimeError, match="the power went"):
        train(material, tmp_path, lora=lora, checkpoint_every_n_iterations=1, callbacks=Stop())
    module, again = train(material, tmp_path, lora=lora, ckpt_path="last")
    assert rows(tmp_path) == rows(folder)
    assert len(rows(folder)) == ITERATIONS
    assert samples(tmp_path) == samples(folder)
    assert len(samples(folder)) > 1
    assert_same_weights(module, whole)
    ours, theirs = (t.optimizers[0].state_dict()["state"] for t in (again, trainer))
    for parameter, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[parameter][name], value), (parameter, name)
    assert 2 <= len(module.rollouts) < ITERATIONS
    assert_same_rollouts(module.rollouts, whole.rollouts)
