import pytest
import torch

from rlhf_lightning.functional.losses import ppo_policy_loss
from rlhf_lightning.functional.masked import masked_mean, masked_var, masked_whiten
from tests.vectors.cases import DTYPES, Case, assert_matches, cases

CLIP = {"cliprange": 0.2, "cliprange_high": None, "dual_clip": None}


@pytest.mark.parametrize("case", cases("distributed"))
@pytest.mark.parametrize("dtype", DTYPES)
def test_two_halves_with_global_sums_match_the_vectors(case: Case, dtype: torch.dtype):
    compute = whitening_of_ranks if case.name == "whiten_2_ranks" else losses_of_halves
    assert_matches(case, compute(case, dtype), dtype)


def whitening_of_ranks(case: Case, dtype: torch.dtype):
    """Each rank sums its own tokens; the sums of all ranks give the statistics of the whole."""
    x, mask = case.tensor("x", dtype), case.mask()
    ranks = [(x[rows], mask[rows]) for rows in case.inputs["ranks"]]
    counts = torch.stack([m.sum() for _, m in ranks])
    means = torch.stack([masked_mean(*rank) for rank in ranks])
    mean = (means * counts).sum() / counts.sum()
    squares = torch.stack([masked_mean((r - mean).square(), m) * m.sum() for r, m in ranks])
    var = squares.sum() / counts.sum()
    torch.testing.assert_close(var, masked_var(x, mask))
    shared = torch.cat([masked_whiten(*rank, mean=mean, var=var) for rank in ranks])
    torch.testing.assert_close(shared, masked_whiten(x, mask))
    return {
        "whiten_global": shared,
        "per_rank_count_sum_centered_sq": torch.stack([counts, means * counts, squares], dim=-1),
        "whiten_rank_local": torch.cat([masked_whiten(*rank) for rank in ranks]),
    }


def losses_of_halves(case: Case, dtype: torch.dtype):
    logprobs = case.tensor("logp", dtype).requires_grad_()
    others = (case.tensor("old_logp", dtype), case.tensor("adv", dtype), case.mask())
    halves = [[t[rows] for t in (logprobs, *others)] for rows in case.inputs["split"]]
    num_tokens = case.mask().sum()
    parts = [ppo_policy_loss(*half, **CLIP, num_tokens=num_tokens) for half in halves]
    loss = sum(part.loss for part in parts)
    means = [ppo_policy_loss(*half, **CLIP, num_tokens=None).loss.detach() for half in halves]
    return {
        "loss_token_mean": loss.detach(),
        "grad_token_mean": torch.autograd.grad(loss, logprobs)[0],
        "token_counts": torch.stack([half[-1].sum() for half in halves]),
        "wrong_mean_of_means": torch.stack(means).mean(),
    }
