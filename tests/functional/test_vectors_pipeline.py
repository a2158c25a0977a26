import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.advantages import compute_gae
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.losses import clipped_value_loss, ppo_policy_loss
from rlhf_lightning.functional.masked import masked_whiten, zero_off_mask
from rlhf_lightning.functional.rewards import adjust_scores, shape_rewards
from rlhf_lightning.functional.sequences import last_token_index, response_mask
from tests.vectors.cases import DTYPES, Case, assert_matches, cases


@pytest.mark.parametrize("case", cases("ppo_pipeline"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_one_batch_from_tokens_to_gradients_matches_the_vectors(case: Case, dtype: torch.dtype):
    rollout = collect(case, dtype)
    assert_matches(case, rollout | update(case, dtype, rollout), dtype)


def collect(case: Case, dtype: torch.dtype) -> dict[str, Tensor]:
    inputs, responses = case.inputs, case.ids("responses")
    mask = response_mask(responses, inputs["eos_ids"])
    last = responses.gather(-1, last_token_index(mask)[:, None])
    has_eos = torch.isin(last, torch.tensor(inputs["eos_ids"])).squeeze(-1)
    scores = adjust_scores(
        case.tensor("scores", dtype),
        has_eos,
        clip=inputs["score_clip"][1],
        missing_eos_penalty=inputs["missing_eos_penalty"],
    )
    old_values = case.tensor("old_values", dtype)
    kl = kl_k1(case.tensor("old_logp", dtype), case.tensor("ref_logp", dtype))
    rewards = shape_rewards(scores, kl, mask, kl_coef=inputs["beta"])
    advantages, returns = compute_gae(
        rewards, old_values, mask, gamma=inputs["gamma"], gae_lambda=inputs["lam"]
    )
    kl_per_response = zero_off_mask(kl, mask).sum(-1)
    return {
        "mask": mask,
        "lengths": mask.sum(-1),
        "has_eos": has_eos,
        "shaped_scores": scores,
        "rewards": rewards,
        "kl_seq_sum": kl_per_response,
        "kl_seq_mean": kl_per_response.mean(),
        "advantages": advantages,
        "returns": returns,
        "advantages_whitened": masked_whiten(advantages, mask),
    }


def update(case: Case, dtype: torch.dtype, rollout: dict[str, Tensor]) -> dict[str, Tensor]:
    inputs = case.inputs
    logprobs = case.tensor("logp", dtype).requires_grad_()
    values = case.tensor("values", dtype).requires_grad_()
    policy = ppo_policy_loss(
        logprobs,
        case.tensor("old_logp", dtype),
        rollout["advantages_whitened"],
        rollout["mask"],
        cliprange=inputs["cliprange"],
        cliprange_high=None,
        dual_clip=None,
        num_tokens=None,
    )
    value = clipped_value_loss(
        values,
        case.tensor("old_values", dtype),
        rollout["returns"],
        rollout["mask"],
        cliprange_value=inputs["cliprange_value"],
        num_tokens=None,
    )
    total = policy.loss + inputs["vf_coef"] * value.loss
    gradients = torch.autograd.grad(total, (logprobs, values))
    return {
        "policy_loss": policy.loss.detach(),
        "value_loss": value.loss.detach(),
        "total": total.detach(),
        "clipfrac": policy.clipfrac,
        "approx_kl_k3": policy.approx_kl,
        "grad_logp": gradients[0],
        "grad_values": gradients[1],
        "value_clipfrac": value.clipfrac,
    }
