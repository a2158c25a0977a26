"""The bandit of `test_kl_bandit.py`, learnt from groups of responses without a value model.

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
from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.functional.losses import policy_kl_loss
from rlhf_lightning.functional.rewards import shape_rewards
from rlhf_lightning.functional.surrogates import ClippedRatio
from rlhf_lightning.rollout.estimators import GroupBaseline, Returns
from tests.vectors.cases import Case, case

NUM_ITERATIONS = 100
NUM_PROMPTS, GROUP = 256, 8
NUM_EPOCHS = 2


def train(bandit: Case, baseline: str, scale: str, kl: str) -> Tensor:
    """Return the probabilities at the end; `kl` is k1 in the reward, or k2 or k3 in the loss."""
    generator = torch.Generator().manual_seed(0)
    beta, scores = bandit.inputs["beta"], bandit.tensor("rewards", torch.float64)
    ref_logits = bandit.tensor("ref_logits", torch.float64)
    logits = ref_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, NUM_ITERATIONS)
    rows = NUM_PROMPTS * GROUP
    mask = torch.ones(rows, 1, dtype=torch.bool)
    group_ids = torch.arange(rows) // GROUP
    estimator: Any = Returns(whiten=scale == "global_std")
    if baseline != "none":
        estimator = GroupBaseline(baseline, scale)  # type: ignore[arg-type]

    def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:  # [B, 1]
        return token_logprobs(logits.expand(rows, 1, -1), tokens, temperature=1.0)

    for _ in range(NUM_ITERATIONS):
        p = logits.detach().softmax(-1)
        tokens = torch.multinomial(p, rows, replacement=True, generator=generator)[:, None]
        old_logprobs, ref_logprobs = (logprobs_of(x, tokens) for x in (logits.detach(), ref_logits))
        rewards = shape_rewards(
            scores[tokens[:, 0]],
            kl_k1(old_logprobs, ref_logprobs),
            mask,
            kl_coef=beta if kl == "k1" else 0.0,
        )
        advantages, _ = estimator(rewards, None, mask, group_ids)
        for _ in range(NUM_EPOCHS):
            logprobs = logprobs_of(logits, tokens)
            surrogate = ClippedRatio(cliprange=0.2)
            loss = surrogate(logprobs, old_logprobs, advantages, mask, num_tokens=None).loss
            if kl != "k1":
                estimate: Any = kl
                loss = loss + beta * policy_kl_loss(
                    logprobs, ref_logprobs, mask, estimator=estimate, num_tokens=None
                )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return logits.detach().softmax(-1)


def distance(name: str, baseline: str, scale: str, kl: str, *, beta_factor: float = 1) -> float:
    """Return the total variation between what is found and the optimum of `beta_factor * beta`."""
    bandit = case("kl_bandit", name)
    scores, ref_logits = (bandit.tensor(key, torch.float64) for key in ("rewards", "ref_logits"))
    beta = bandit.inputs["beta"] * beta_factor
    optimum = (ref_logits.log_softmax(-1) + scores / beta).softmax(-1)
    return 0.5 * (train(bandit, baseline, scale, kl) - optimum).abs().sum().item()


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
