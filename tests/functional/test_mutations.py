"""Break the maths on purpose: the vectors of a whole batch must notice.

Each mutant replaces one function where the test of the pipeline finds it; the same test, on the
same case, passes before and fails after.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.advantages import Advantages, compute_gae
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.losses import (
    PolicyLoss,
    ValueLoss,
    clipped_value_loss,
    ppo_policy_loss,
)
from rlhf_lightning.functional.masked import masked_whiten
from rlhf_lightning.functional.rewards import shape_rewards
from rlhf_lightning.functional.sequences import last_token_index, response_mask
from tests.functional import test_vectors_pipeline as pipeline
from tests.vectors.cases import case


def flipped_k1(logprobs: Tensor, ref_logprobs: Tensor) -> Tensor:
    return kl_k1(ref_logprobs, logprobs)


def mask_without_eos(responses: Tensor, stop_ids: Any) -> Tensor:
    is_stop = torch.isin(responses, torch.tensor(list(stop_ids)))
    return response_mask(responses, stop_ids) & ~is_stop


def score_one_slot_late(scores: Tensor, kl: Tensor, mask: Tensor, *, kl_coef: float) -> Tensor:
    penalties = shape_rewards(torch.zeros_like(scores), kl, mask, kl_coef=kl_coef)
    late = (last_token_index(mask) + 1).clamp(max=mask.shape[1] - 1)[:, None]
    alive = torch.where(mask.any(-1), scores, 0)[:, None].to(penalties.dtype)
    return penalties.scatter_add(1, late, alive)


def unmasked_whiten(x: Tensor, mask: Tensor) -> Tensor:
    return torch.where(mask, masked_whiten(x, torch.ones_like(mask)), 0)


def gae_without_mask(rewards: Tensor, values: Tensor, mask: Tensor, **options: Any) -> Advantages:
    whole = compute_gae(rewards, values, torch.ones_like(mask), **options)
    return Advantages(*(torch.where(mask, part, 0) for part in whole))


def flipped_advantages(
    logprobs: Tensor, old: Tensor, advantages: Tensor, mask: Tensor, **options: Any
) -> PolicyLoss:
    return ppo_policy_loss(logprobs, old, -advantages, mask, **options)


def unclipped_values(*args: Tensor, cliprange_value: Any, **options: Any) -> ValueLoss:
    return clipped_value_loss(*args, cliprange_value=None, **options)


MUTANTS: dict[str, Callable[..., Any]] = {
    "kl_k1": flipped_k1,
    "response_mask": mask_without_eos,
    "shape_rewards": score_one_slot_late,
    "masked_whiten": unmasked_whiten,
    "compute_gae": gae_without_mask,
    "ppo_policy_loss": flipped_advantages,
    "clipped_value_loss": unclipped_values,
}


@pytest.mark.parametrize("function", MUTANTS)
def test_the_vectors_notice(function: str, monkeypatch: pytest.MonkeyPatch):
    test = pipeline.test_one_batch_from_tokens_to_gradients_matches_the_vectors
    vector = case("ppo_pipeline", "one_batch")
    test(vector, torch.float64)
    monkeypatch.setattr(pipeline, function, MUTANTS[function])
    with pytest.raises(AssertionError, match="ppo_pipeline/one_batch/"):
        test(vector, torch.float64)
