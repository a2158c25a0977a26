from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.masked import masked_whiten
from rlhf_lightning.hparams import SamplingHparams
from rlhf_lightning.models.ppo_models import PPOModels
from rlhf_lightning.modules import on_policy
from rlhf_lightning.modules.ppo import PPOModule
from rlhf_lightning.rollout.estimators import GAE
from rlhf_lightning.rollout.generators.base import CachedGenerator
from tests.builders.models import (
    EOS,
    PAD,
    prompt_batch,
    prompt_rows,
    tiny_policy,
    tiny_scalar_model,
)
from tests.builders.stages import built, ppo_hparams, tiny_module
from tests.rollout.answers import responses_of
from tests.rollout.test_score import ConstantScorer

PROMPTS = prompt_rows([3, 7, 1, 5, 2, 4], seed=3)
RESPONSES = [[7, 8, EOS], [9, 10, 11, 12, 13], [EOS], [5, PAD, 6, EOS], [4, 4, 4, 4, 4], [20, EOS]]
SCORES = [1.0, -2.0, 0.5, 9.0, 3.0, -1.0]
KL_COEF = 0.2
USUAL, FULL_RETURNS = GAE(1.0, 0.95), GAE(1.0, 1.0)
# A value model of 0 leaves the returns as the advantages.
NO_VALUES = {"value": lambda: tiny_scalar_model(init_std=0.0)}


def module(
    scores: list[float] | None = None,
    *,
    temperature: float = 0.8,
    reference: Any = None,
    value: Any = tiny_scalar_model,
    estimator: GAE = USUAL,
    domain_weights: dict[str, float] | None = None,
    diversity_bonus: float = 0.0,
    **ppo: Any,
) -> PPOModule:
    usual = {"kl_coef": KL_COEF, "score_clip": 5.0, "missing_eos_penalty": 1.5}
    models = PPOModels(
        policy=tiny_policy(seed=0), value=value(), reference=reference or tiny_policy(seed=7)
    )
    made: PPOModule = built(
        tiny_module(
            cls=PPOModule,
            ppo=ppo_hparams(**(usual | {"micro_batch_size": 2} | ppo)),
            sampling=SamplingHparams(max_new_tokens=5, temperature=temperature),
            models=lambda: models,
            scorer=ConstantScorer(scores or SCORES),
            generator=CachedGenerator([EOS], PAD),
            estimator=estimator,
        )
    )
    made.controls.domain_weights = domain_weights or {}
    made.controls.diversity_bonus = diversity_bonus
    return made


@torch.no_grad()
def assembled(prompts=None, **changes):
    the_module, answers = (
        module(**changes),
        responses_of(prompts or prompt_batch(PROMPTS), RESPONSES),
    )
    found = the_module.evaluate_responses(answers)
    return the_module.assemble_rollout(answers, the_module.scorer(answers), found)


def assert_rewards_add_up(rollout, adjusted: list[float], kl_coef: float) -> None:
    """C7: sum over tokens == score - kl_coef * KL of the response, and both parts matter."""
    mask = rollout.response_mask
    kl = torch.where(mask, rollout.logprobs - rollout.ref_logprobs, 0).sum(-1)
    assert (kl_coef * kl).abs().min() > 1e-2
    expected = torch.tensor(adjusted) - kl_coef * kl
    torch.testing.assert_close(rollout.rewards.sum(-1), expected, rtol=0, atol=1e-5)


ADJUSTED = [1.0, -3.5, 0.5, 5.0, 1.5, -1.0]  # clipped to 5, then 1.5 less without EOS


def test_rewards_are_the_clipped_penalised_score_minus_the_kl():
    rollout = assembled()
    assert_rewards_add_up(rollout, ADJUSTED, KL_COEF)
    assert rollout.scores.tolist() == SCORES, "the rollout keeps the scorer's own numbers"
    # The score stands on the last action, every other reward is the KL penalty alone.
    penalty = -KL_COEF * (rollout.logprobs - rollout.ref_logprobs)
    for row, response in enumerate(RESPONSES):
        last = len(response) - 1
        extra = rollout.rewards[row] - penalty[row]
        assert extra[last].item() == pytest.approx(ADJUSTED[row], abs=1e-5)
        assert extra[:last].abs().sum() < 1e-5
        assert (rollout.rewards[row, last + 1 :] == 0).all()


def test_a_flipped_kl_sign_does_not_pass_the_check_of_the_rewards(monkeypatch):
    monkeypatch.setattr(on_policy, "kl_k1", lambda policy, reference: reference - policy)
    with pytest.raises(AssertionError):
        assert_rewards_add_up(assembled(), ADJUSTED, KL_COEF)


def test_with_gamma_and_lambda_1_the_first_return_is_the_sum_of_the_rewards():
    rollout = assembled(estimator=FULL_RETURNS)
    torch.testing.assert_close(rollout.returns[:, 0], rollout.rewards.sum(-1), rtol=0, atol=1e-5)


def test_advantages_are_the_whitened_gae_of_rewards_and_values():
    rollout = assembled()
    mask = rollout.response_mask
    raw, returns = compute_gae(rollout.rewards, rollout.values, mask, gamma=1.0, gae_lambda=0.95)
    torch.testing.assert_close(rollout.returns, returns)
    torch.testing.assert_close(rollout.advantages, masked_whiten(raw, mask), rtol=1e-4, atol=1e-5)
    on_mask = rollout.advantages[mask]
    assert abs(on_mask.mean()) < 1e-6
    assert abs(on_mask.std(unbiased=False) - 1) < 1e-5
    assert (rollout.advantages[~mask] == 0).all()


@pytest.mark.parametrize("micro_batch_size", [None, 1, 4])
def test_extra_padding_and_micro_batches_change_nothing(micro_batch_size):
    base = assembled()
    wide = prompt_batch(PROMPTS, width=12, pad=EOS)
    other = assembled(wide, micro_batch_size=micro_batch_size)
    assert other.prompt_length == 12
    for name in ("logprobs", "ref_logprobs", "entropy", "response_mask", "scores"):
        assert torch.equal(getattr(base, name), getattr(other, name)), name
    for name in ("values", "rewards", "advantages", "returns"):
        torch.testing.assert_close(getattr(base, name), getattr(other, name), rtol=0, atol=1e-5)


def test_a_constant_added_to_all_scores_leaves_the_advantages_without_critic_alone():
    how = {"estimator": FULL_RETURNS, "score_clip": None, **NO_VALUES}
    higher = [score + 5.0 for score in SCORES]
    base, shifted = assembled(**how), assembled(scores=higher, **how)
    torch.testing.assert_close(shifted.advantages, base.advantages, rtol=0, atol=1e-5)
    assert not torch.allclose(shifted.returns, base.returns, atol=1.0)
    # With lambda below 1 credit fades backwards, and the offset of the scores with it.
    fading = {**how, "estimator": GAE(1.0, 0.95)}
    a, b = (assembled(scores=s, **fading) for s in (SCORES, higher))
    assert (a.advantages - b.advantages).abs().max() > 0.01


@pytest.mark.parametrize(
    ("weight", "worth"),  # less the penalty of those that did not end
    [
        (1.5, [6.0, -6.0 - 1.5, 6.75, 7.5, -7.5 - 1.5, -7.5]),  # at 5 of the scorer's own units
        (0.5, [2.0, -2.0 - 1.5, 2.25, 4.5, -2.5 - 1.5, -4.0]),  # at 5, which none of them reaches
    ],
)
def test_a_weight_of_a_domain_does_not_make_scores_equal_that_the_clip_tells_apart(weight, worth):
    prompts = prompt_batch(PROMPTS, domains=["maths"] * 6)
    scores = [4.0, -4.0, 4.5, 9.0, -5.0, -8.0]
    rollout = assembled(prompts, scores=scores, domain_weights={"maths": weight})
    assert_rewards_add_up(rollout, worth, KL_COEF)


def test_the_diversity_bonus_pays_for_bigrams_that_no_other_answer_has():
    # All bigrams here stand in one answer only; the third answer has none.
    rollout = assembled(diversity_bonus=0.2)
    paid = [1.2, -1.8 - 1.5, 0.5, 5.0, 3.2 - 1.5, -0.8]  # before clip and penalty
    assert_rewards_add_up(rollout, paid, KL_COEF)
    assert rollout.scores.tolist() == SCORES, "the rollout keeps the scorer's own numbers"


@pytest.mark.parametrize("temperature", [0.5, 1.0])
def test_the_old_logprobs_are_those_of_the_distribution_that_was_sampled(temperature):
    the_module = module(temperature=temperature)
    rollout, seconds = the_module.collect_rollout(prompt_batch(PROMPTS), 0)
    assert set(seconds) == {"generate", "score"}
    assert the_module.policy.training, "generation must leave the policy in train mode"
    assert rollout.row_ids.tolist() == list(range(6))
    for row, prompt in enumerate(PROMPTS):
        response = rollout.response_tensors[row][rollout.response_mask[row]].tolist()
        with torch.no_grad():
            logits = the_module.policy.model(torch.tensor([prompt + response])).logits[0]
        logprobs = (logits[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        picked = logprobs[torch.arange(len(response)), torch.tensor(response)]
        got = rollout.logprobs[row, : len(response)]
        torch.testing.assert_close(got, picked, rtol=0, atol=1e-5)
    assert not rollout.logprobs.requires_grad
