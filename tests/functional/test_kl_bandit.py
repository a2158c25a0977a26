"""PPO with the KL in the right place finds the optimum of the bandit.

With the KL in a wrong place it finds something else while the logged curves look healthy, so each
wrong placement must miss.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from torch import Tensor

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.kl import kl_k1, kl_k2, kl_k3
from rlhf_lightning.functional.masked import masked_mean
from tests.functional.bandit import Estimator, Training, distance
from tests.vectors.cases import case


def advantages(rewards: Tensor, mask: Tensor) -> Tensor:
    values = masked_mean(rewards, mask).expand_as(rewards)
    return compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95).advantages


PPO = partial(Training, 60, 1024, 4, advantages)


def mean_of(estimator: Estimator) -> Estimator:
    return lambda logprobs, ref_logprobs: estimator(logprobs, ref_logprobs).mean()


def swapped_sign(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return kl_k1(ref_logprobs, logprobs)


@pytest.mark.parametrize("name", ["beta0.1", "beta0.5", "beta2.0"])
def test_ppo_with_k1_in_the_reward_finds_the_optimum(name: str):
    assert distance(case("kl_bandit", name), PPO(in_reward=kl_k1)) <= 0.02


@pytest.mark.parametrize("name", ["beta0.5", "beta2.0"])
def test_ppo_with_k2_in_the_loss_finds_the_optimum(name: str):
    assert distance(case("kl_bandit", name), PPO(in_loss=mean_of(kl_k2))) <= 0.02


WRONG: dict[str, dict[str, Any]] = {
    "k3_in_the_reward": {"in_reward": kl_k3},
    "k1_in_the_loss": {"in_loss": mean_of(kl_k1)},
    "k3_in_the_loss": {"in_loss": mean_of(kl_k3)},
    "sign_flipped": {"in_reward": swapped_sign},
    "no_kl": {},
}


@pytest.mark.parametrize("placement", WRONG)
def test_ppo_with_the_kl_in_a_wrong_place_misses_the_optimum(placement: str):
    assert distance(case("kl_bandit", "beta0.5"), PPO(**WRONG[placement])) > 0.04
