"""Invariants of the whole objective that hold for any numbers.

Legend: B rows, T padded tokens (prompt, response, padding), R padded response tokens, V
vocabulary. Padding and EOS are the same token, prompts are padded on the right here.
"""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.logprobs import token_entropy, token_logprobs
from rlhf_lightning.functional.losses import (
    PolicyLoss,
    causal_lm_loss,
    clipped_value_loss,
    ppo_policy_loss,
)
from rlhf_lightning.functional.masked import masked_mean, masked_whiten, zero_off_mask
from rlhf_lightning.functional.rewards import shape_rewards
from rlhf_lightning.functional.sequences import (
    next_token_labels,
    response_mask,
    response_state_index,
)
from rlhf_lightning.functional.statistics import explained_variance

EOS = 9
VOCABULARY = 10
CLIP = {"cliprange": 0.2, "cliprange_high": None, "dual_clip": None}


@dataclass(frozen=True)
class Experience:
    logits: Tensor  # [B, T, V]
    input_ids: Tensor  # [B, T]
    prompt_length: Tensor  # [B]
    responses: Tensor  # [B, R]
    mask: Tensor  # [B, R]
    scores: Tensor  # [B]
    ref_logprobs: Tensor  # [B, R]
    old_noise: Tensor  # [B, R]
    values: Tensor  # [B, R]

    def rows(self, index: Tensor) -> "Experience":
        return Experience(**{name: tensor[index] for name, tensor in vars(self).items()})


@pytest.fixture
def experience() -> Experience:
    generator = torch.Generator().manual_seed(1)
    prompt_length = torch.tensor([2, 3, 1, 3, 2, 1])
    # EOS inside, EOS first, no EOS, EOS exactly last, EOS inside, EOS first.
    response_length = torch.tensor([3, 1, 4, 4, 2, 1])
    rows, response, width = 6, 4, 8
    input_ids = torch.full((rows, width), EOS)
    for row in range(rows):
        first, count = prompt_length[row], response_length[row]
        tokens = torch.randint(0, EOS, (first + count,), generator=generator)
        input_ids[row, : first + count] = tokens
        if row != 2:
            input_ids[row, first + count - 1] = EOS
    # Response token t stands one position after the state that predicts it.
    responses = input_ids.gather(1, response_state_index(prompt_length, response) + 1)
    mask = response_mask(responses, [EOS])
    assert mask.sum(-1).tolist() == response_length.tolist()

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return Experience(
        logits=normal(rows, width, VOCABULARY),
        input_ids=input_ids,
        prompt_length=prompt_length,
        responses=responses,
        mask=mask,
        scores=normal(rows),
        ref_logprobs=-normal(rows, response).abs() - 1,
        old_noise=0.1 * normal(rows, response),
        values=normal(rows, response),
    )


def response_logprobs(logits: Tensor, batch: Experience) -> Tensor:
    index = response_state_index(batch.prompt_length, batch.responses.shape[1])
    states = logits.gather(1, index[..., None].expand(-1, -1, VOCABULARY))  # [B, R, V]
    return token_logprobs(states, batch.responses, temperature=0.7)


def whitened_advantages(batch: Experience, *, gae_lambda: float = 0.95) -> Tensor:
    kl = kl_k1(response_logprobs(batch.logits, batch), batch.ref_logprobs)
    rewards = shape_rewards(batch.scores, kl, batch.mask, kl_coef=0.05)
    gae = compute_gae(rewards, batch.values, batch.mask, gamma=1.0, gae_lambda=gae_lambda)
    return masked_whiten(gae.advantages, batch.mask)


def policy_loss(
    logits: Tensor, batch: Experience, advantages: Tensor, *, num_tokens: Tensor | None = None
) -> PolicyLoss:
    old = response_logprobs(batch.logits, batch) + batch.old_noise
    logprobs = response_logprobs(logits, batch)
    return ppo_policy_loss(logprobs, old, advantages, batch.mask, **CLIP, num_tokens=num_tokens)


def on_policy(batch: Experience) -> Experience:
    return replace(batch, old_noise=torch.zeros_like(batch.old_noise))


def gradient_of(batch: Experience, advantages: Tensor) -> Tensor:
    logits = batch.logits.clone().requires_grad_()
    return torch.autograd.grad(policy_loss(logits, batch, advantages).loss, logits)[0]


def positions_before_actions(batch: Experience) -> Tensor:
    """Written out row by row, on purpose not with the functions under test."""
    expected = torch.zeros(batch.input_ids.shape, dtype=torch.bool)
    for row, first in enumerate(batch.prompt_length.tolist()):
        for t in range(int(batch.mask[row].sum())):
            expected[row, first - 1 + t] = True
    return expected


def test_no_advantage_gives_no_gradient(experience: Experience):
    gradient = gradient_of(experience, torch.zeros_like(experience.values))
    assert torch.equal(gradient, torch.zeros_like(gradient))


def test_the_policy_gradient_reaches_every_action_and_nothing_else(experience: Experience):
    advantages = torch.ones_like(experience.values)
    gradient = gradient_of(on_policy(experience), advantages)
    reached = (gradient != 0).any(-1)
    assert torch.equal(reached, positions_before_actions(experience))
    assert (gradient.abs().amax(-1)[reached] > 1e-4).all()


def test_the_language_model_gradient_reaches_every_response_token_and_nothing_else(
    experience: Experience,
):
    learnt = positions_before_actions(experience).roll(1, dims=1)
    labels = next_token_labels(experience.input_ids, learnt)
    logits = experience.logits.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(causal_lm_loss(logits, labels, num_tokens=None), logits)
    assert torch.equal((gradient != 0).any(-1), positions_before_actions(experience))
    assert (labels == EOS).sum() == 5


def test_a_better_token_becomes_more_likely(experience: Experience):
    batch = on_policy(experience)
    advantages = torch.where(torch.arange(4) % 2 == 0, 1.0, -1.0).expand(6, 4).double()
    stepped = batch.logits - 0.1 * gradient_of(batch, advantages)
    change = response_logprobs(stepped, batch) - response_logprobs(batch.logits, batch)
    assert (change * advantages > 0)[batch.mask].all()


def test_before_any_update_ratio_is_one_and_nothing_is_clipped(experience: Experience):
    advantages = whitened_advantages(experience)
    result = policy_loss(experience.logits, on_policy(experience), advantages)
    assert result.clipfrac == 0
    assert result.approx_kl == 0
    assert result.loss == -advantages.sum() / experience.mask.sum()
    assert abs(result.loss) < 1e-12


def test_without_divergence_the_rewards_are_the_scores(experience: Experience):
    logprobs = response_logprobs(experience.logits, experience)
    rewards = shape_rewards(
        experience.scores, kl_k1(logprobs, logprobs), experience.mask, kl_coef=0.05
    )
    assert torch.equal(rewards.sum(-1), experience.scores)
    assert (rewards != 0).sum() == 6


def test_rewards_add_up_to_score_less_penalty_and_to_the_first_return(experience: Experience):
    mask = experience.mask
    kl = kl_k1(response_logprobs(experience.logits, experience), experience.ref_logprobs)
    rewards = shape_rewards(experience.scores, kl, mask, kl_coef=0.05)
    total = experience.scores - 0.05 * zero_off_mask(kl, mask).sum(-1)
    torch.testing.assert_close(rewards.sum(-1), total)
    returns = compute_gae(rewards, experience.values, mask, gamma=1.0, gae_lambda=1.0).returns
    torch.testing.assert_close(returns[:, 0], total)


def test_the_order_of_rows_does_not_matter(experience: Experience):
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = experience.rows(order)
    advantages = whitened_advantages(experience)
    torch.testing.assert_close(whitened_advantages(shuffled), advantages[order])
    whole = policy_loss(experience.logits, experience, advantages).loss
    torch.testing.assert_close(
        policy_loss(shuffled.logits, shuffled, advantages[order]).loss, whole
    )
    gradient = gradient_of(experience, advantages)
    torch.testing.assert_close(gradient_of(shuffled, advantages[order]), gradient[order])


def test_a_constant_added_to_all_scores_changes_nothing_for_monte_carlo(experience: Experience):
    fresh = replace(experience, values=torch.zeros_like(experience.values))
    shifted = replace(fresh, scores=fresh.scores + 5)
    monte_carlo = whitened_advantages(fresh, gae_lambda=1.0)
    torch.testing.assert_close(whitened_advantages(shifted, gae_lambda=1.0), monte_carlo)
    # With lambda below 1 it does matter until the critic has learnt the offset.
    change = whitened_advantages(shifted) - whitened_advantages(fresh)
    assert change.abs().max() > 0.1


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_gradient_does_not_depend_on_the_micro_batch_split(experience: Experience, size: int):
    advantages = whitened_advantages(experience)
    whole = gradient_of(experience, advantages)
    num_tokens = experience.mask.sum()
    logits = experience.logits.clone().requires_grad_()
    means = torch.zeros_like(whole)
    for rows in torch.arange(6).split(size):
        part = experience.rows(rows)
        policy_loss(logits[rows], part, advantages[rows], num_tokens=num_tokens).loss.backward()
        means[rows] = gradient_of(part, advantages[rows]) * size / 6
    torch.testing.assert_close(logits.grad, whole, rtol=1e-10, atol=1e-14)
    assert (means - whole).norm() > 0.01 * whole.norm()


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
