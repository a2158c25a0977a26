"""A bandit with one token has a known optimum, `softmax(log ref + score / beta)`.

PPO with the KL in the right place finds it. With the KL in a wrong place it finds something else
while the logged curves look healthy, so each wrong placement must miss.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.kl import kl_k1, kl_k2, kl_k3
from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.functional.losses import ppo_policy_loss
from rlhf_lightning.functional.masked import masked_mean
from rlhf_lightning.functional.rewards import shape_rewards
from tests.vectors.cases import Case, case

Estimator = Callable[[Tensor, Tensor], Tensor]
NUM_ITERATIONS = 60
NUM_ROLLOUTS = 1024
NUM_EPOCHS = 4


@dataclass(frozen=True)
class Placement:
    """Which estimator stands in the reward and which in the loss; None is none."""

    in_reward: Estimator | None = None
    in_loss: Estimator | None = None


def swapped_sign(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return kl_k1(ref_logprobs, logprobs)


def train(bandit: Case, placement: Placement) -> Tensor:
    """Return the probabilities that PPO ends with."""
    generator = torch.Generator().manual_seed(0)
    beta, scores = bandit.inputs["beta"], bandit.tensor("rewards", torch.float64)
    ref_logits = bandit.tensor("ref_logits", torch.float64)
    logits = ref_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, NUM_ITERATIONS)
    mask = torch.ones(NUM_ROLLOUTS, 1, dtype=torch.bool)

    def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:  # [B, 1]
        return token_logprobs(logits.expand(NUM_ROLLOUTS, 1, -1), tokens, temperature=1.0)

    for _ in range(NUM_ITERATIONS):
        p = logits.detach().softmax(-1)
        tokens = torch.multinomial(p, NUM_ROLLOUTS, replacement=True, generator=generator)[:, None]
        old_logprobs = logprobs_of(logits.detach(), tokens)
        ref_logprobs = logprobs_of(ref_logits, tokens)
        kl = torch.zeros_like(old_logprobs)
        if placement.in_reward is not None:
            kl = placement.in_reward(old_logprobs, ref_logprobs)
        rewards = shape_rewards(scores[tokens[:, 0]], kl, mask, kl_coef=beta)
        values = masked_mean(rewards, mask).expand_as(rewards)
        advantages = compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95).advantages
        for _ in range(NUM_EPOCHS):
            logprobs = logprobs_of(logits, tokens)
            loss = ppo_policy_loss(
                logprobs,
                old_logprobs,
                advantages,
                mask,
                cliprange=0.2,
                cliprange_high=None,
                dual_clip=None,
                num_tokens=None,
            ).loss
            if placement.in_loss is not None:
                loss = loss + beta * masked_mean(placement.in_loss(logprobs, ref_logprobs), mask)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return logits.detach().softmax(-1)


def distance_to_optimum(bandit: Case, placement: Placement) -> float:
    """Return the total variation between what PPO finds and the closed form."""
    optimum = torch.tensor(bandit.expected["pi_star"], dtype=torch.float64)
    return 0.5 * (train(bandit, placement) - optimum).abs().sum().item()


@pytest.mark.parametrize("name", ["beta0.1", "beta0.5", "beta2.0"])
def test_ppo_with_k1_in_the_reward_finds_the_optimum(name: str):
    assert distance_to_optimum(case("kl_bandit", name), Placement(in_reward=kl_k1)) <= 0.02


@pytest.mark.parametrize("name", ["beta0.5", "beta2.0"])
def test_ppo_with_k2_in_the_loss_finds_the_optimum(name: str):
    assert distance_to_optimum(case("kl_bandit", name), Placement(in_loss=kl_k2)) <= 0.02


@pytest.mark.parametrize("name", ["beta0.5", "beta2.0"])
@pytest.mark.parametrize(
    "placement",
    [
        pytest.param(Placement(in_reward=kl_k3), id="k3_in_the_reward"),
        pytest.param(Placement(in_loss=kl_k1), id="k1_in_the_loss"),
        pytest.param(Placement(in_loss=kl_k3), id="k3_in_the_loss"),
        pytest.param(Placement(in_reward=swapped_sign), id="sign_flipped"),
        pytest.param(Placement(), id="no_kl"),
    ],
)
def test_ppo_with_the_kl_in_a_wrong_place_misses_the_optimum(name: str, placement: Placement):
    assert distance_to_optimum(case("kl_bandit", name), placement) > 0.04
