"""What holds before the first update: the policy is the reference, and the ratio is 1."""

from __future__ import annotations

import pytest
import torch

from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.functional.masked import masked_mean
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.models.forward import micro_batches, response_statistics
from rlhf_lightning.modules.measures import RunningMeans
from rlhf_lightning.rollout import collect
from rlhf_lightning.rollout.noise import sample
from tests.modules.tiny_ppo import RecordedPPO, fit, ppo_hparams, tiny_module
from tests.tiny import MODEL_TYPES

PRECISIONS = ("32-true", "bf16-mixed")


@pytest.mark.parametrize("model_type", MODEL_TYPES)
@pytest.mark.parametrize("precision", PRECISIONS)
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


class WithRatios(RecordedPPO):
    """Keeps the ratios that each minibatch starts with, computed as the loss computes them."""

    log_ratios: list[torch.Tensor]

    def update(self, minibatch: RolloutBatch, steps: RunningMeans, *, iteration: int) -> bool:
        if not self.steps:
            self.log_ratios, self.first = [], minibatch
        size = self.ppo.micro_batch_size
        for rows in micro_batches(minibatch.attention_mask, size):
            part = minibatch[rows]
            with torch.enable_grad():
                new = response_statistics(self.policy, part, temperature=self.controls.temperature)
            if not self.steps:
                self.log_ratios.append((new.logprobs - part.logprobs).detach())
        return super().update(minibatch, steps, iteration=iteration)


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


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    ("model_type", "num_minibatches", "micro_batch_size"),
    [
        ("gpt2", 1, None),
        ("gpt2", 4, 1),
        ("gpt2", 16, None),
        ("llama", 2, 3),
        ("llama", 8, None),
        ("opt", 4, 2),
        ("gpt_neox", 16, 1),
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
    sampled: list[torch.Tensor] = []

    def sample_and_keep(logits, uniform, *, temperature):
        tokens = sample(logits, uniform, temperature=temperature)
        logprobs = (logits.float() / temperature).log_softmax(-1)
        sampled.append(logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1))
        return tokens

    evaluate = collect.evaluate_answers

    def with_sampled_logprobs(parts, answers, *, temperature):
        _, entropy, reference, values = evaluate(parts, answers, temperature=temperature)
        logprobs = torch.stack(sampled, 1)[:, : entropy.shape[1]]
        return logprobs.masked_fill(~answers.response_mask, 0), entropy, reference, values

    monkeypatch.setattr("rlhf_lightning.rollout.generate.sample", sample_and_keep)
    monkeypatch.setattr(collect, "evaluate_answers", with_sampled_logprobs)
    # Nothing stops, so that no row leaves the batch and the columns above stay rows.
    module = tiny_module(cls=WithRatios)
    module.generator.stop_ids = ()
    fit(module, 1, precision="bf16-mixed")
    with pytest.raises(AssertionError):
        assert_first_ratio_is_one(module)
    assert max(x.abs().max() for x in module.log_ratios) > 1e-3


def test_the_second_minibatch_of_a_bf16_step_sees_the_updated_weights():
    # Autocast's cache of bf16 weights would outlive an optimizer step inside one training_step.
    module = tiny_module(ppo=ppo_hparams(num_ppo_epochs=4))
    fit(module, 1, precision="bf16-mixed")
    kls = [step["ppo/approx_kl"] for step in module.steps]
    assert kls[0] == 0
    assert len(set(kls)) == 4
    assert kls == sorted(kls)
