"""The formulas around PPO: groups instead of a critic, sequence ratios, preferences, best-of-n."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from rlhf_lightning.functional.advantages import (
    GROUP_STD_EPS,
    compute_gae,
    group_advantages,
    informative_groups,
    length_adaptive_lambda,
    token_returns,
)
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.losses import (
    cispo_policy_loss,
    gspo_policy_loss,
    loss_divisor,
    ppo_policy_loss,
)
from rlhf_lightning.functional.masked import masked_whiten, zero_off_mask
from rlhf_lightning.functional.preference_losses import dpo_loss
from rlhf_lightning.functional.rewards import overlong_penalty, shape_rewards
from rlhf_lightning.functional.statistics import best_of_n_kl, best_of_n_unbiased
from tests.vectors.cases import DTYPES, Case, assert_matches, cases

# The gradients of these cases are central differences.
OF_DIFFERENCES = {
    "surrogate": {"grad_logprobs": 1e-6},
    "gspo": {"grad_logprobs": 1e-5},
}
REDUCTIONS = {"tokens": "token", "sequence_mean": "sequence", 16.0: "constant"}


@pytest.mark.parametrize("case", cases("estimators"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_estimators_match_the_vectors(case: Case, dtype: torch.dtype):
    kind = next(kind for kind in KINDS if case.name.startswith(kind))
    computed = KINDS[kind](case, dtype)
    assert_matches(case, computed, dtype, of_key=OF_DIFFERENCES.get(kind, {}))


def policy_loss(
    case: Case, dtype: torch.dtype, loss: Callable[..., Any], reduction: str, **more: Any
):
    logprobs, mask = case.tensor("logprobs", dtype).requires_grad_(), case.mask()
    result = loss(
        logprobs,
        case.tensor("old_logprobs", dtype),
        case.tensor("advantages", dtype)[:, None].expand(mask.shape),
        mask,
        cliprange=case.inputs["cliprange"],
        cliprange_high=case.inputs["cliprange_high"],
        **more,
        num_tokens=loss_divisor(
            mask,
            reduction=reduction,
            num_tokens=mask.sum(),
            num_sequences=len(mask),
            max_length=16,
        ),
    )
    return {
        "loss": result.loss.detach(),
        "grad_logprobs": torch.autograd.grad(result.loss, logprobs)[0],
        "clipfrac": result.clipfrac,
    }


def surrogate(case: Case, dtype: torch.dtype):
    reduction = REDUCTIONS[case.inputs["divisor"]]
    computed = policy_loss(case, dtype, ppo_policy_loss, reduction, dual_clip=None)
    del computed["clipfrac"]  # the case has none
    return computed


def gspo(case: Case, dtype: torch.dtype):
    mask = case.mask()
    wide = {"cliprange": 1e9, "cliprange_high": None, "dual_clip": None, "num_tokens": None}
    others = (case.tensor("old_logprobs", dtype), -torch.ones(mask.shape, dtype=dtype), mask)
    rows = zip(case.tensor("logprobs", dtype), *others, strict=True)
    ratios = [gspo_policy_loss(*(part[None] for part in row), **wide).loss for row in rows]
    return policy_loss(case, dtype, gspo_policy_loss, "sequence", dual_clip=None) | {
        "sequence_ratio": torch.stack(ratios)
    }


def cispo(case: Case, dtype: torch.dtype):
    return policy_loss(case, dtype, cispo_policy_loss, "token")


def length_adaptive_gae(case: Case, dtype: torch.dtype):
    mask = case.mask()
    gae_lambda = length_adaptive_lambda(mask.sum(-1).to(dtype), alpha=case.inputs["alpha"])
    return {
        "gae_lambda": gae_lambda,
        "advantages": gae(case, dtype, gae_lambda=gae_lambda).advantages,
    }


def decoupled_gae(case: Case, dtype: torch.dtype):
    lambdas = {key: case.inputs[key] for key in ("gae_lambda", "gae_lambda_value")}
    return gae(case, dtype, **lambdas)._asdict()


def gae(case: Case, dtype: torch.dtype, **lambdas: Any):
    rewards, values = case.tensor("rewards", dtype), case.tensor("values", dtype)
    return compute_gae(rewards, values, case.mask(), gamma=case.inputs["gamma"], **lambdas)


def penalty(case: Case, dtype: torch.dtype):
    limits = {key: case.inputs[key] for key in ("max_length", "buffer")}
    return {"penalty": overlong_penalty(case.ids("lengths"), **limits)}


def informative(case: Case, dtype: torch.dtype):
    return {"keep": informative_groups(case.tensor("scores", dtype), case.ids("group"))}


def best_of_n(case: Case, dtype: torch.dtype):
    n = case.inputs["n"]
    if "kl" in case.expected:
        return {"kl": best_of_n_kl(n)}
    pools = zip(case.tensor("proxy", dtype), case.tensor("gold", dtype), strict=True)
    return {"gold": [best_of_n_unbiased(*pool, n) for pool in pools]}


KINDS: dict[str, Callable[[Case, torch.dtype], dict[str, Any]]] = {
    "surrogate": surrogate,
    "gspo": gspo,
    "cispo": cispo,
    "length_adaptive_gae": length_adaptive_gae,
    "decoupled_gae": decoupled_gae,
    "overlong_penalty": penalty,
    "informative_groups": informative,
    "best_of": best_of_n,
}


@pytest.mark.parametrize("case", cases("group_advantages"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_group_advantages_match_the_vectors(case: Case, dtype: torch.dtype):
    compute = {
        "reinforce_pp": reinforce_pp,
        "reinforce_pp_baseline": reinforce_pp_baseline,
        "rloo_kl_in_reward": rloo_kl_in_reward,
    }.get(case.name, group_baselines)
    assert_matches(case, compute(case, dtype), dtype)


def group_baselines(case: Case, dtype: torch.dtype):
    groups = (case.tensor("rewards", dtype), case.ids("group"))
    assert GROUP_STD_EPS == 1e-4
    return {
        "grpo_unbiased_1e-4": group_advantages(*groups, baseline="mean", scale="group_std"),
        "grpo_unbiased_1e-6": group_advantages(
            *groups, baseline="mean", scale="group_std", eps=1e-6
        ),
        "dr_grpo": group_advantages(*groups, baseline="mean", scale="none"),
        "rloo": group_advantages(*groups, baseline="leave_one_out", scale="none"),
    }


def shaped(case: Case, dtype: torch.dtype):
    kl = kl_k1(case.tensor("logp", dtype), case.tensor("ref_logp", dtype))
    scores, mask = case.tensor("scores", dtype), case.mask()
    return kl, shape_rewards(scores, kl, mask, kl_coef=case.inputs["beta"])


def reinforce_pp(case: Case, dtype: torch.dtype):
    _, rewards = shaped(case, dtype)
    returns = token_returns(rewards, case.mask(), gamma=case.inputs["gamma"])
    return {"returns": returns, "advantages": masked_whiten(returns, case.mask())}


def reinforce_pp_baseline(case: Case, dtype: torch.dtype):
    scores, groups, mask = case.tensor("scores", dtype), case.ids("group"), case.mask()
    centred = group_advantages(scores, groups, baseline="mean", scale="none")
    return {"advantages": masked_whiten(centred[:, None].expand(mask.shape), mask)}


def rloo_kl_in_reward(case: Case, dtype: torch.dtype):
    kl, rewards = shaped(case, dtype)
    return {
        "seq_kl": zero_off_mask(kl, case.mask()).sum(-1),
        "advantages": group_advantages(
            rewards.sum(-1), case.ids("group"), baseline="leave_one_out", scale="none"
        ),
    }


@pytest.mark.parametrize("case", cases("dpo"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_dpo_matches_the_vectors(case: Case, dtype: torch.dtype):
    chosen = case.tensor("policy_chosen", dtype).requires_grad_()
    rejected = case.tensor("policy_rejected", dtype).requires_grad_()
    pairs = (chosen, rejected, case.tensor("ref_chosen", dtype), case.tensor("ref_rejected", dtype))
    options = {
        "beta": case.inputs["beta"],
        "label_smoothing": case.inputs.get("label_smoothing", 0.0),
        "kind": "ipo" if case.inputs.get("ipo") else "sigmoid",
    }
    result = dpo_loss(*pairs, **options, num_pairs=None)
    each = [
        dpo_loss(*(part[i : i + 1] for part in pairs), **options, num_pairs=1)
        for i in range(len(chosen))
    ]
    gradients = torch.autograd.grad(result.loss, (chosen, rejected))
    computed = {
        "loss": result.loss.detach(),
        "per_pair": [pair.loss.item() for pair in each],
        "chosen_reward": [pair.chosen_reward.item() for pair in each],
        "rejected_reward": [pair.rejected_reward.item() for pair in each],
        "accuracy": result.accuracy,
        "grad_policy_chosen": gradients[0],
        "grad_policy_rejected": gradients[1],
    }
    assert_matches(case, computed, dtype)
