"""Rows without a token, of one token, and scores that are all equal: from rewards to gradients."""

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.logprobs import token_entropy, token_logprobs
from rlhf_lightning.functional.losses import clipped_value_loss, ppo_policy_loss
from rlhf_lightning.functional.masked import masked_mean, masked_whiten
from rlhf_lightning.functional.rewards import shape_rewards
from rlhf_lightning.functional.statistics import explained_variance

VOCABULARY = 10
CLIP = {"cliprange": 0.2, "cliprange_high": None, "dual_clip": None}


def assert_finite(mask: Tensor, scores: Tensor) -> None:
    generator = torch.Generator().manual_seed(2)
    rows, response = mask.shape
    shape = (rows, response, VOCABULARY)
    logits = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
    tokens = torch.randint(0, VOCABULARY, (rows, response), generator=generator)
    logprobs = token_logprobs(logits, tokens, temperature=1.0)
    values = torch.zeros(rows, response, dtype=torch.float64, requires_grad=True)
    rewards = shape_rewards(scores, kl_k1(logprobs, logprobs), mask, kl_coef=0.1)
    gae = compute_gae(rewards, values, mask, gamma=1.0, gae_lambda=0.95)
    advantages = masked_whiten(gae.advantages, mask)
    policy = ppo_policy_loss(logprobs, logprobs.detach(), advantages, mask, **CLIP, num_tokens=None)
    value = clipped_value_loss(
        values, values.detach(), gae.returns, mask, cliprange_value=0.2, num_tokens=None
    )
    entropy = masked_mean(token_entropy(logits, temperature=1.0), mask)
    (policy.loss + value.loss - 0.01 * entropy).backward()
    results = (rewards, *gae, advantages, *policy, *value, entropy, logits.grad, values.grad)
    assert all(result.isfinite().all() for result in results)
    for per_token in (rewards, *gae, advantages):
        assert torch.equal(per_token[~mask], torch.zeros_like(per_token[~mask]))
    if not mask.any():
        assert policy.loss == value.loss == entropy == 0
        assert explained_variance(values, gae.returns, mask).isnan()


@pytest.mark.parametrize(
    ("lengths", "scores"),
    [
        pytest.param([0, 0], [1.0, 2.0], id="only_empty_rows"),
        pytest.param([0, 3], [1.0, 2.0], id="an_empty_row"),
        pytest.param([1, 1], [1.0, -2.0], id="eos_first"),
        pytest.param([1], [1.0], id="one_token_in_all"),
        pytest.param([4, 4], [1.0, 2.0], id="no_eos"),
        pytest.param([4, 2], [0.0, 0.0], id="all_scores_equal"),
    ],
)
def test_odd_batches_stay_finite(lengths: list[int], scores: list[float]):
    mask = torch.arange(4) < torch.tensor(lengths)[:, None]
    assert_finite(mask, torch.tensor(scores, dtype=torch.float64))
