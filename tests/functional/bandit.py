"""A bandit with one token, whose optimum is `softmax(log ref + score / beta)`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.functional.rewards import shape_rewards
from rlhf_lightning.functional.surrogates import ClippedRatio
from tests.vectors.cases import Case

Estimator = Callable[[Tensor, Tensor], Tensor]  # log-probabilities, those of the reference


@dataclass(frozen=True)
class Training:
    """How a policy learns: from which advantages, and with the KL where.

    Args:
        advantages: token rewards and mask `[B, 1]` -> advantages `[B, 1]`.
        in_reward: the KL in the reward, None for none.
        in_loss: the KL in the loss, a scalar, None for none.
    """

    num_iterations: int
    num_rows: int
    num_epochs: int
    advantages: Callable[[Tensor, Tensor], Tensor]
    in_reward: Estimator | None = None
    in_loss: Estimator | None = None


def train(bandit: Case, how: Training) -> Tensor:
    """Return the probabilities that the policy ends with."""
    generator = torch.Generator().manual_seed(0)
    beta, scores = bandit.inputs["beta"], bandit.tensor("rewards", torch.float64)
    ref_logits = bandit.tensor("ref_logits", torch.float64)
    logits = ref_logits.clone().requires_grad_()
    optimizer = torch.optim.Adam([logits], lr=0.3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.0, how.num_iterations)
    mask = torch.ones(how.num_rows, 1, dtype=torch.bool)

    def logprobs_of(logits: Tensor, tokens: Tensor) -> Tensor:  # [B, 1]
        return token_logprobs(logits.expand(how.num_rows, 1, -1), tokens, temperature=1.0)

    for _ in range(how.num_iterations):
        p = logits.detach().softmax(-1)
        tokens = torch.multinomial(p, how.num_rows, replacement=True, generator=generator)[:, None]
        old_logprobs, ref_logprobs = (logprobs_of(x, tokens) for x in (logits.detach(), ref_logits))
        kl = torch.zeros_like(old_logprobs)
        if how.in_reward is not None:
            kl = how.in_reward(old_logprobs, ref_logprobs)
        rewards = shape_rewards(scores[tokens[:, 0]], kl, mask, kl_coef=beta)
        advantages = how.advantages(rewards, mask)
        for _ in range(how.num_epochs):
            logprobs = logprobs_of(logits, tokens)
            surrogate = ClippedRatio(cliprange=0.2)
            loss = surrogate(logprobs, old_logprobs, advantages, mask, num_tokens=None).loss
            if how.in_loss is not None:
                loss = loss + beta * how.in_loss(logprobs, ref_logprobs)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        schedule.step()
    return logits.detach().softmax(-1)


def distance(bandit: Case, how: Training, *, beta_factor: float = 1) -> float:
    """Return the total variation between what is found and the optimum of `beta_factor * beta`."""
    scores, ref_logits = (bandit.tensor(key, torch.float64) for key in ("rewards", "ref_logits"))
    beta = bandit.inputs["beta"] * beta_factor
    optimum = (ref_logits.log_softmax(-1) + scores / beta).softmax(-1)
    return 0.5 * (train(bandit, how) - optimum).abs().sum().item()
