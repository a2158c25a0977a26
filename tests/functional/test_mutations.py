"""Break the maths on purpose: the vector tests must notice.

Each mutant replaces one function where the vector test (or another function) finds it; the same
test, on the same cases, passes before and fails after.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional import losses
from rlhf_lightning.functional.advantages import Advantages, compute_gae, group_advantages
from rlhf_lightning.functional.kl import kl_k1, kl_k3
from rlhf_lightning.functional.logprobs import token_logprobs
from rlhf_lightning.functional.losses import (
    PolicyLoss,
    cispo_policy_loss,
    clipped_value_loss,
    gspo_policy_loss,
    ppo_policy_loss,
)
from rlhf_lightning.functional.masked import masked_var, masked_whiten
from rlhf_lightning.functional.preference_losses import DPOLoss, dpo_loss
from rlhf_lightning.functional.rewards import adjust_scores, shape_rewards
from rlhf_lightning.functional.sequences import last_token_index, response_mask
from tests.functional import (
    test_vectors_advantages,
    test_vectors_distributed,
    test_vectors_estimators,
    test_vectors_kl,
    test_vectors_logprobs,
    test_vectors_losses,
    test_vectors_masked,
    test_vectors_pipeline,
    test_vectors_rewards,
    test_vectors_sequences,
)
from tests.vectors.cases import case


def flipped_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return kl_k1(ref_logprobs, logprobs)


def inverted_k3(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return kl_k3(ref_logprobs, logprobs)


def mask_without_eos(responses: Tensor, stop_ids: Any) -> Tensor:
    is_stop = torch.isin(responses, torch.tensor(list(stop_ids)))
    return response_mask(responses, stop_ids) & ~is_stop


def mask_of_pad(responses: Tensor, stop_ids: Any) -> Tensor:
    return responses != stop_ids[0]


def last_index_of_count(attention_mask: Tensor) -> Tensor:
    return (attention_mask.long().sum(-1) - 1).clamp(min=0)


def score_one_slot_late(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    penalties = shape_rewards(torch.zeros_like(scores), kl, mask, kl_coef=kl_coef)
    late = (last_token_index(mask) + 1).clamp(max=mask.shape[1] - 1)[:, None]
    alive = torch.where(mask.any(-1), scores, 0)[:, None].to(penalties.dtype)
    return penalties.scatter_add(1, late, alive)


def penalty_hidden_by_clip(
    scores: Tensor, has_eos: Tensor, *, clip: float, missing_eos_penalty: float
) -> Tensor:
    penalised = torch.where(has_eos, scores, scores - missing_eos_penalty)
    return adjust_scores(penalised, has_eos, clip=clip, missing_eos_penalty=0.0)


def unmasked_whiten(x: Tensor, mask: Tensor, **_: Any) -> Tensor:
    return torch.where(mask, masked_whiten(x, torch.ones_like(mask)), 0)


def uncentred_whiten(x: Tensor, mask: Tensor, **options: Any) -> Tensor:
    return masked_whiten(x, mask, **{"mean": torch.tensor(0.0)} | options)


def unbiased_var(x: Tensor, mask: Tensor) -> Tensor:
    return masked_var(x, mask) * mask.sum() / (mask.sum() - 1)


def gae_without_mask(rewards: Tensor, values: Tensor, mask: Tensor, **options: Any) -> Advantages:
    whole = compute_gae(rewards, values, torch.ones_like(mask), **options)
    return Advantages(*(torch.where(mask, part, 0) for part in whole))


def gae_zero_in_holes(rewards: Tensor, values: Tensor, mask: Tensor, **options: Any) -> Advantages:
    return gae_without_mask(
        torch.where(mask, rewards, 0), torch.where(mask, values, 0), mask, **options
    )


def mean_of_means(*args: Tensor, num_tokens: Any, **options: Any) -> PolicyLoss:
    parts = ppo_policy_loss(*args, **options, num_tokens=None)
    return parts if num_tokens is None else PolicyLoss(*(part / 2 for part in parts))


def whole_squares(*args: Tensor, **options: Any) -> losses.ValueLoss:
    result = clipped_value_loss(*args, **options)
    return result._replace(loss=2 * result.loss)


def unclipped_values(*args: Tensor, cliprange_value: Any, **options: Any) -> losses.ValueLoss:
    return clipped_value_loss(*args, cliprange_value=None, **options)


def flipped_advantages(loss: Callable[..., PolicyLoss]) -> Callable[..., PolicyLoss]:
    def mutant(
        logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options: Any
    ) -> PolicyLoss:
        return loss(logprobs, old, -advantages, mask, **options)

    return mutant


def swapped_pairs(
    policy_chosen: Tensor,
    policy_rejected: Tensor,
    ref_chosen: Tensor,
    ref_rejected: Tensor,
    **options: Any,
) -> DPOLoss:
    return dpo_loss(policy_rejected, policy_chosen, ref_rejected, ref_chosen, **options)


def reversed_scores(scores: Tensor, group_ids: Tensor, **options: Any) -> Tensor:
    return group_advantages(-scores, group_ids, **options)


def optimistic_loss(*args: Tensor, **options: Any) -> PolicyLoss:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "maximum", torch.minimum)
        return ppo_policy_loss(*args, **options)


def ignored_temperature(logits: Tensor, tokens: Tensor, *, temperature: float) -> Tensor:
    return token_logprobs(logits, tokens, temperature=1.0)


@dataclass(frozen=True)
class Place:
    """Where a test of vectors finds the functions that it checks."""

    module: Any
    test: Callable[..., None]
    topic: str
    typed: bool = True


PIPELINE = Place(
    test_vectors_pipeline,
    test_vectors_pipeline.test_one_batch_from_tokens_to_gradients_matches_the_vectors,
    "ppo_pipeline",
)
WHITEN = Place(
    test_vectors_masked,
    test_vectors_masked.test_masked_statistics_match_the_vectors,
    "masked_stats",
)
REWARDS = Place(
    test_vectors_rewards, test_vectors_rewards.test_rewards_match_the_vectors, "rewards"
)
GAE = Place(test_vectors_advantages, test_vectors_advantages.test_gae_matches_the_vectors, "gae")
KL = Place(test_vectors_kl, test_vectors_kl.test_kl_estimators_match_the_vectors, "kl")
POLICY = Place(
    test_vectors_losses, test_vectors_losses.test_policy_loss_matches_the_vectors, "policy_loss"
)
VALUE = Place(
    test_vectors_losses, test_vectors_losses.test_value_loss_matches_the_vectors, "value_loss"
)
HALVES = Place(
    test_vectors_distributed,
    test_vectors_distributed.test_two_halves_with_global_sums_match_the_vectors,
    "distributed",
)
MASK = Place(
    test_vectors_sequences,
    test_vectors_sequences.test_response_mask_matches_the_vectors,
    "response_mask",
    typed=False,
)
LAST = Place(
    test_vectors_sequences,
    test_vectors_sequences.test_last_token_and_positions_match_the_vectors,
    "rm_last_index",
    typed=False,
)
ESTIMATORS = Place(
    test_vectors_estimators,
    test_vectors_estimators.test_estimators_match_the_vectors,
    "estimators",
)
GROUPS = Place(
    test_vectors_estimators,
    test_vectors_estimators.test_group_advantages_match_the_vectors,
    "group_advantages",
)
DPO = Place(test_vectors_estimators, test_vectors_estimators.test_dpo_matches_the_vectors, "dpo")
LOGPROBS = Place(
    test_vectors_logprobs, test_vectors_logprobs.test_logprobs_match_the_vectors, "seq_logprobs"
)
CISPO_WITH_CLIP = partial(ppo_policy_loss, dual_clip=None)

# Which mistake: where, of which function, the mutant, and the case that notices it.
MUTATIONS: dict[str, tuple[Place, str, Callable[..., Any], str]] = {
    "k1_sign_flipped": (KL, "kl_k1", flipped_k1, "estimators"),
    "k1_sign_flipped_in_chain": (PIPELINE, "kl_k1", flipped_k1, "one_batch"),
    "k3_ratio_inverted": (KL, "kl_k3", inverted_k3, "estimators"),
    "eos_dropped": (MASK, "response_mask", mask_without_eos, "pad_equals_eos"),
    "eos_dropped_in_chain": (PIPELINE, "response_mask", mask_without_eos, "one_batch"),
    "mask_from_pad": (MASK, "response_mask", mask_of_pad, "eos_variants"),
    "last_index_is_count": (LAST, "last_token_index", last_index_of_count, "pad_equals_eos_2"),
    "score_one_slot_late": (REWARDS, "shape_rewards", score_one_slot_late, "last_token_k1"),
    "score_late_in_chain": (PIPELINE, "shape_rewards", score_one_slot_late, "one_batch"),
    "penalty_before_clip": (REWARDS, "adjust_scores", penalty_hidden_by_clip, "score_shaping"),
    "whitening_unmasked": (WHITEN, "masked_whiten", unmasked_whiten, "ragged"),
    "whitening_unmasked_in_chain": (PIPELINE, "masked_whiten", unmasked_whiten, "one_batch"),
    "whitening_not_centred": (GAE, "masked_whiten", uncentred_whiten, "ragged_g1.0_l0.95"),
    "variance_unbiased": (WHITEN, "masked_var", unbiased_var, "ragged"),
    "gae_bootstraps_from_padding": (GAE, "compute_gae", gae_without_mask, "ragged_g1.0_l0.95"),
    "gae_zero_in_holes": (GAE, "compute_gae", gae_zero_in_holes, "holes_multi_turn"),
    "mean_of_means": (HALVES, "ppo_policy_loss", mean_of_means, "loss_2_ranks_or_2_microbatches"),
    "policy_loss_sign_flipped": (
        POLICY, "ppo_policy_loss", flipped_advantages(ppo_policy_loss), "ratio_one",
    ),
    "gspo_sign_flipped": (
        ESTIMATORS, "gspo_policy_loss", flipped_advantages(gspo_policy_loss), "gspo_0.2_0.28",
    ),
    "gspo_ratio_of_a_token": (ESTIMATORS, "gspo_policy_loss", ppo_policy_loss, "gspo_0.2_0.28"),
    "cispo_sign_flipped": (
        ESTIMATORS, "cispo_policy_loss", flipped_advantages(cispo_policy_loss), "cispo_0.2_0.28",
    ),
    "cispo_loses_clipped_tokens": (
        ESTIMATORS, "cispo_policy_loss", CISPO_WITH_CLIP, "cispo_0.2_0.28",
    ),
    "group_advantage_sign_flipped": (GROUPS, "group_advantages", reversed_scores, "group_of_2"),
    "dpo_pairs_swapped": (DPO, "dpo_loss", swapped_pairs, "sigmoid_0.1"),
    "value_loss_without_half": (VALUE, "clipped_value_loss", whole_squares, "no_clip"),
    "clip_is_optimistic": (POLICY, "ppo_policy_loss", optimistic_loss, "clip_0.2"),
    "value_clip_ignored": (VALUE, "clipped_value_loss", unclipped_values, "clip_0.2"),
    "temperature_ignored": (LOGPROBS, "token_logprobs", ignored_temperature, "T0.7"),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTATIONS)
def test_the_vectors_notice(name: str, monkeypatch: pytest.MonkeyPatch):
    place, function, mutant, case_name = MUTATIONS[name]
    vector = case(place.topic, case_name)
    arguments = (vector, torch.float64) if place.typed else (vector,)
    place.test(*arguments)
    monkeypatch.setattr(place.module, function, mutant)
    with pytest.raises(AssertionError, match=f"{place.topic}/{case_name}/"):
        place.test(*arguments)
