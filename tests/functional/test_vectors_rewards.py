import pytest
import torch

from rlhf_lightning.functional.kl import kl_k1, kl_k3
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.rewards import adjust_scores, shape_rewards
from tests.vectors.cases import DTYPES, Case, assert_matches, case, cases


@pytest.mark.parametrize("case", cases("rewards"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_rewards_match_the_vectors(case: Case, dtype: torch.dtype):
    compute = adjusted_scores if case.name == "score_shaping" else shaped_rewards
    assert_matches(case, compute(case, dtype), dtype)


def adjusted_scores(case: Case, dtype: torch.dtype):
    scores, has_eos = case.tensor("scores", dtype), case.mask("has_eos")
    low, high = case.inputs["clip"]
    assert low == -high
    penalty = case.inputs["penalty"]
    return {
        "clipped": adjust_scores(scores, has_eos, clip=high, missing_eos_penalty=0.0),
        "subtract": adjust_scores(scores, has_eos, clip=high, missing_eos_penalty=penalty),
    }


def shaped_rewards(case: Case, dtype: torch.dtype):
    # k3 in the reward is checked as arithmetic only; that it must not be used is in the bandit.
    estimator = {"k1": kl_k1, "k3": kl_k3}[case.inputs["estimator"]]
    mask, scores = case.mask(), case.tensor("scores", dtype)
    kl = estimator(case.tensor("logp", dtype), case.tensor("ref_logp", dtype))
    kl_coef = case.inputs["beta"]
    rewards = shape_rewards(scores, kl, mask, kl_coef=kl_coef)
    no_score = shape_rewards(torch.zeros_like(scores), kl, mask, kl_coef=kl_coef)
    computed = {
        "rewards": rewards,
        "kl": zero_off_mask(kl, mask),
        "non_score_reward_sum": no_score.sum(-1),
        "total": rewards.sum(-1),
    }
    return {key: computed[key] for key in case.wanted_keys()}


def test_without_clip_and_penalty_the_scores_stay():
    scores = torch.tensor([-100.0, 100.0])
    has_eos = torch.tensor([True, False])
    assert torch.equal(adjust_scores(scores, has_eos, clip=None, missing_eos_penalty=0.0), scores)
    penalised = adjust_scores(scores, has_eos, clip=None, missing_eos_penalty=3.0)
    assert penalised.tolist() == [-100.0, 97.0]


@pytest.mark.parametrize(
    ("clip", "penalty", "message"),
    [
        (0.0, 1.0, "score_clip=0.0 must be positive"),
        (-5.0, 1.0, "score_clip=-5.0 must be positive"),
        (5.0, -1.0, "missing_eos_penalty=-1.0 must be 0 or more"),
    ],
)
def test_impossible_score_settings_are_refused(clip, penalty, message):
    with pytest.raises(ValueError, match=message):
        adjust_scores(torch.zeros(1), torch.ones(1).bool(), clip=clip, missing_eos_penalty=penalty)


def test_rewards_ignore_what_stands_off_the_mask():
    first = case("rewards", "last_token_k1")
    mask, scores = first.mask(), first.tensor("scores", torch.float64)
    kl = kl_k1(first.tensor("logp", torch.float64), first.tensor("ref_logp", torch.float64))
    clean = shape_rewards(scores, kl, mask, kl_coef=0.15)
    empty = ~mask.any(-1)
    assert empty.any()
    dirty = shape_rewards(
        scores.masked_fill(empty, torch.nan),
        kl.masked_fill(~mask, torch.inf),
        mask,
        kl_coef=0.15,
    )
    assert torch.equal(dirty, clean)


def test_rewards_are_data_and_carry_no_graph():
    logprobs = torch.randn(2, 3, requires_grad=True)
    mask = torch.ones(2, 3, dtype=torch.bool)
    rewards = shape_rewards(torch.zeros(2), kl_k1(logprobs, torch.zeros(2, 3)), mask, kl_coef=0.1)
    assert not rewards.requires_grad
