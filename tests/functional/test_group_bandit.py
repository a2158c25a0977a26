"""The bandit learnt from groups of responses without a value model.

With k1 in the reward every baseline and scale leads to `softmax(log ref + score / beta)`. With the
KL in the loss that takes k2 and advantages in the unit of the score: the group's mean, which holds
a response's own score, division by the group's spread, and k3 lead elsewhere. The numbers stand in
docs/correctness.md.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.losses import policy_kl_loss
from rlhf_lightning.rollout.estimators import GroupBaseline, Returns
from tests.functional.bandit import Training
from tests.functional.bandit import distance as distance_of
from tests.vectors.cases import case

NUM_ROWS, GROUP = 2048, 8
GROUPS = torch.arange(NUM_ROWS) // GROUP


def distance(name: str, baseline: str, scale: str, kl: Any, *, beta_factor: float = 1) -> float:
    """Return the total variation; `kl` is k1 in the reward, or k2 or k3 in the loss."""
    estimator: Any = Returns(whiten=scale == "global_std")
    if baseline != "none":
        estimator = GroupBaseline(baseline, scale)  # type: ignore[arg-type]

    def advantages(rewards: Tensor, mask: Tensor) -> Tensor:
        found: Tensor = estimator(rewards, None, mask, GROUPS)[0]
        return found

    def in_loss(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
        mask = torch.ones_like(logprobs, dtype=torch.bool)
        return policy_kl_loss(logprobs, ref_logprobs, mask, estimator=kl, num_tokens=None)

    placement: Any = {"in_reward": kl_k1} if kl == "k1" else {"in_loss": in_loss}
    how = Training(100, NUM_ROWS, 2, advantages, **placement)
    return distance_of(case("kl_bandit", name), how, beta_factor=beta_factor)


@pytest.mark.parametrize(
    ("name", "baseline", "scale", "kl"),
    [
        pytest.param("beta0.5", "leave_one_out", "none", "k1", id="rloo"),
        pytest.param("beta0.5", "mean", "group_std", "k1", id="grpo_with_k1"),
        pytest.param("beta0.5", "none", "global_std", "k1", id="reinforce_pp"),
        pytest.param("beta0.5", "leave_one_out", "none", "k2", id="rloo_with_k2"),
        pytest.param(
            "beta2.0", "leave_one_out", "none", "k2", id="more_kl", marks=pytest.mark.slow
        ),
    ],
)
def test_k1_in_the_reward_and_k2_beside_unscaled_advantages_find_the_optimum(
    name: str, baseline: str, scale: str, kl: str
):
    assert distance(name, baseline, scale, kl) <= 0.01


def test_a_mean_that_holds_the_own_score_finds_the_optimum_of_a_larger_coefficient():
    # Dr. GRPO: advantages are (k - 1) / k of those of leave-one-out, and the KL is not.
    assert distance("beta0.5", "mean", "none", "k2") > 0.03
    assert distance("beta0.5", "mean", "none", "k2", beta_factor=GROUP / (GROUP - 1)) <= 0.01


@pytest.mark.parametrize(
    ("baseline", "scale", "kl"),
    [
        pytest.param("mean", "group_std", "k2", id="grpo"),
        pytest.param("mean", "group_std", "k3", id="grpo_as_in_trl"),
        pytest.param("leave_one_out", "none", "k3", id="k3"),
    ],
)
def test_advantages_scaled_by_the_group_beside_a_kl_in_the_loss_and_k3_find_something_else(
    baseline: str, scale: str, kl: str
):
    assert distance("beta0.5", baseline, scale, kl) > 0.05
