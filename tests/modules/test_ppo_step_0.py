"""What holds before the first update: the policy is the reference, and the ratio is 1."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.functional.masked import masked_mean
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.models.factory import load_policy
from rlhf_lightning.models.forward import micro_batches, response_statistics
from rlhf_lightning.models.ppo_models import PPOModels
from rlhf_lightning.modules.metrics import RunningMeans
from rlhf_lightning.modules.step_0 import Step0Error
from tests.builders.models import MODEL_TYPES, config_fields, tiny_policy
from tests.builders.stages import RecordedPPO, built, fit, ppo_hparams, tiny_models, tiny_module

PRECISIONS = ("32-true", "bf16-mixed")


@pytest.mark.parametrize(
    ("model_type", "precision"), zip(MODEL_TYPES, cycle(PRECISIONS), strict=False)
)
def test_policy_and_reference_agree_and_rewards_are_the_terminal_score(model_type, precision):
    ppo = ppo_hparams(missing_eos_penalty=0.0, score_clip=None, micro_batch_size=3)
    module = tiny_module(model_type, ppo=ppo)
    fit(module, 1, precision=precision)
    (rollout,) = module.rollouts
    assert torch.equal(rollout.logprobs, rollout.ref_logprobs)
    assert rollout.logprobs[rollout.response_mask].std() > 0.3
    mask = rollout.response_mask
    at_last = torch.arange(mask.shape[1]) == (mask.sum(-1) - 1)[:, None]
    assert torch.equal(rollout.rewards[at_last], rollout.scores)
    assert (rollout.rewards[~at_last] == 0).all()
    assert rollout.scores.std() > 0.1


def test_experts_whose_kernels_depend_on_the_batch_train():
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    config = config_fields("qwen3") | experts | {"model_type": "olmoe"}
    models = tiny_models(policy=lambda: load_policy(from_scratch=config))
    module = tiny_module(
        ppo=ppo_hparams(num_minibatches=4, micro_batch_size=3), models=lambda: models
    )
    fit(module, 2)
    assert module.num_optimizer_steps == 16


class WithRatios(RecordedPPO):
    """Keeps the ratios that each minibatch starts with, computed as the loss computes them."""

    log_ratios: list[torch.Tensor]

    def update(self, minibatch: RolloutBatch, steps: RunningMeans, **where: int) -> bool:
        if not self.steps:
            self.log_ratios, self.first = [], minibatch
        size = self.algorithm.micro_batch_size
        for rows in micro_batches(minibatch.attention_mask, size):
            part = minibatch[rows]
            with torch.enable_grad():
                new = response_statistics(self.policy, part, temperature=self.controls.temperature)
            if not self.steps:
                self.log_ratios.append((new.logprobs - part.logprobs).detach())
        return super().update(minibatch, steps, **where)


def assert_first_ratio_is_one(module: WithRatios) -> None:
    """C2: ratio 1 to the bit, so nothing clipped and no KL, in the first minibatch."""
    assert module.log_ratios
    assert all((x == 0).all() for x in module.log_ratios)
    first, second = module.steps[:2]
    assert first["ppo/approx_kl"] == 0
    assert first["ppo/clipfrac"] == 0
    expected = -masked_mean(module.first.advantages, module.first.response_mask)
    assert first["ppo/policy_loss"] == pytest.approx(float(expected), abs=1e-6)
    assert second["ppo/approx_kl"] > 0, "the update must have moved the policy"


@pytest.mark.parametrize(
    ("model_type", "num_minibatches", "micro_batch_size", "precision"),
    [
        ("gpt2", 4, 1, "32-true"),
        ("llama", 2, 3, "bf16-mixed"),
        ("opt", 4, 2, "bf16-mixed"),
        ("gpt_neox", 16, None, "32-true"),
    ],
)
def test_the_ratio_of_the_first_minibatch_is_exactly_1(
    model_type, num_minibatches, micro_batch_size, precision
):
    ppo = ppo_hparams(num_minibatches=num_minibatches, micro_batch_size=micro_batch_size)
    module = tiny_module(model_type, ppo=ppo, cls=WithRatios)
    fit(module, 1, precision=precision)
    assert_first_ratio_is_one(module)


def test_a_response_of_one_token_alone_in_its_micro_batch_has_a_ratio_of_exactly_1():
    # One row, one token: the smallest matrices, for which CPUs have other kernels.
    ppo = ppo_hparams(num_minibatches=16, num_ppo_epochs=1)
    module = tiny_module(ppo=ppo, cls=WithRatios, sampling=SamplingHparams(max_new_tokens=1))
    fit(module, 1)
    assert_first_ratio_is_one(module)


def test_logprobs_taken_from_generation_would_not_give_a_ratio_of_1_in_bf16(monkeypatch):
    # The mutation: what the sampler saw, in place of a forward of the training module.
    evaluate = WithRatios.evaluate_responses

    def with_sampled_logprobs(module, responses):
        found = evaluate(module, responses)
        return found._replace(logprobs=responses.generation.logprobs)

    monkeypatch.setattr(WithRatios, "evaluate_responses", with_sampled_logprobs)
    module = tiny_module(cls=WithRatios, models=lambda: replace(tiny_models(), same_source=False))
    with pytest.raises(Step0Error, match="the ratio must start at 1"):
        fit(module, 1, precision="bf16-mixed")
    assert not module.num_optimizer_steps
    assert max(x.abs().max() for x in module.log_ratios) > 1e-3


def test_the_second_minibatch_of_a_bf16_step_sees_the_updated_weights():
    # Autocast's cache of bf16 weights would outlive an optimizer step inside one training_step.
    module = tiny_module(ppo=ppo_hparams(num_ppo_epochs=4))
    fit(module, 1, precision="bf16-mixed")
    kls = [step["ppo/approx_kl"] for step in module.steps]
    assert kls[0] == 0
    assert len(set(kls)) == 4
    assert kls == sorted(kls)


def other_reference(*, same_source: bool = True) -> PPOModels:
    return replace(tiny_models(), reference=tiny_policy(seed=7), same_source=same_source)


def nudged(reference: Any) -> None:
    next(reference.parameters())[5, 0] += 1e-3


@pytest.mark.parametrize(
    "change",
    [
        lambda reference: reference.load_state_dict(tiny_policy(seed=7).state_dict()),
        nudged,
        lambda reference: reference.to(torch.bfloat16).to(torch.float32),
    ],
    ids=["other weights", "one weight", "another precision"],
)
def test_a_reference_that_is_not_the_policy_ends_the_run_before_its_first_update(change):
    def models() -> PPOModels:
        made = tiny_models()
        with torch.no_grad():
            change(made.reference)
        return made

    module = tiny_module(models=models)
    with pytest.raises(Step0Error, match=r"KL .* must start at 0 \(exactly on cpu") as error:
        fit(module, 2)
    causes = ("missing", "source", "in another precision", "dropout")
    assert all(cause in str(error.value) for cause in causes)
    assert module.num_optimizer_steps == 0
    assert len(module.rollouts) == 1


def test_a_policy_that_goes_on_from_another_one_than_the_reference_is_held_to_its_ratio_alone():
    module = tiny_module(models=lambda: other_reference(same_source=False))
    fit(module, 2)
    assert module.num_optimizer_steps
    assert not module.step_0.awaits_rollout
    assert not module.step_0.awaits_minibatch


@pytest.mark.parametrize("critic_warmup_iterations", [0, 1])
def test_dropout_in_the_policy_ends_the_run_before_it_is_updated(critic_warmup_iterations):
    def models() -> PPOModels:
        noisy = load_policy(from_scratch=config_fields("gpt2"), dropout=0.1)
        return replace(tiny_models(), policy=noisy, same_source=False)

    ppo = ppo_hparams(critic_warmup_iterations=critic_warmup_iterations)
    module = tiny_module(models=models, ppo=ppo)
    before = models().policy.state_dict()
    with pytest.raises(Step0Error, match=r"ratio must start at 1 .*dropout is active") as error:
        fit(module, 2)
    assert "exactly on cpu with precision 32-true" in str(error.value)
    assert len(module.rollouts) == 1 + critic_warmup_iterations
    for name, value in module.policy.state_dict().items():
        assert torch.equal(value, before[name]), name


def test_a_rollout_that_is_not_finite_is_skipped_and_the_next_one_is_looked_at():
    def models() -> PPOModels:
        made = tiny_models()
        with torch.no_grad():
            made.reference.model.transformer.wte.weight[3:6] = math.nan
        return made

    module = tiny_module(models=models)
    with pytest.raises(RuntimeError, match="no optimizer step was taken in 1 iterations"):
        fit(module, 1)
    assert module.step_0.awaits_rollout
    assert module.step_0.awaits_minibatch
    assert not module.num_optimizer_steps
    module.reference.load_state_dict(tiny_policy(seed=7).state_dict())
    with pytest.raises(Step0Error, match="KL to the reference"):
        fit(module, 1)


def test_a_resumed_run_is_not_held_to_where_it_started():
    module = built(tiny_module(models=other_reference))
    checkpoint: dict[str, Any] = {}
    module.on_save_checkpoint(checkpoint)
    module.on_load_checkpoint(checkpoint)
    fit(module, 1)
    assert module.num_optimizer_steps
