"""Invariants of group baselines, of policy losses by name, and of preference losses."""

from typing import Any

import pytest
import torch
from torch import Tensor

from rlhf_lightning.functional.advantages import (
    group_advantages,
    informative_groups,
)
from rlhf_lightning.functional.losses import (
    loss_divisor,
    policy_kl_loss,
)
from rlhf_lightning.functional.preference_losses import dpo_loss
from rlhf_lightning.functional.rewards import overlong_penalty
from rlhf_lightning.functional.statistics import best_of_n_kl, best_of_n_unbiased
from rlhf_lightning.functional.surrogates import SURROGATES, Surrogate


def surrogate(name: str) -> Surrogate:
    return SURROGATES[name](cliprange=0.02, cliprange_high=0.03)


LENGTHS = torch.tensor([5, 2, 0, 1, 4, 3])
MASK = torch.arange(5) < LENGTHS[:, None]
BASELINES = [("mean", "none"), ("mean", "group_std"), ("leave_one_out", "none")]


def batch() -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = MASK.shape
    logprobs = -torch.rand(shape, generator=generator, dtype=torch.float64) - 0.5
    old = logprobs + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)
    rows = torch.randn(shape[0], 1, generator=generator, dtype=torch.float64)
    rows[0] = rows[0].abs() * (logprobs - old)[0].mean().sign()  # clipped, also as a whole
    return logprobs, old, rows.expand(shape)


def divisor(reduction: Any) -> Tensor:
    return loss_divisor(
        MASK,
        reduction=reduction,
        num_tokens=MASK.sum(),
        num_sequences=MASK.any(-1).sum(),
        max_length=8,
    )


@pytest.mark.parametrize("garbage", [torch.inf, torch.nan])
@pytest.mark.parametrize("name", [*SURROGATES, "k2", "k3"])
def test_nothing_off_the_mask_reaches_loss_or_gradient(name: str, garbage: float):
    num_tokens = divisor("sequence")

    def loss_and_gradient(tensors: list[Tensor]) -> tuple[Tensor, Tensor]:
        leaf = tensors[0].clone().requires_grad_()
        if name in SURROGATES:
            loss = surrogate(name)(leaf, *tensors[1:], MASK, num_tokens=num_tokens).loss
        else:
            loss = policy_kl_loss(leaf, tensors[1], MASK, estimator=name, num_tokens=num_tokens)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    clean = loss_and_gradient(list(batch()))
    dirty = loss_and_gradient([tensor.masked_fill(~MASK, garbage) for tensor in batch()])
    assert torch.equal(clean[0], dirty[0])
    assert torch.equal(clean[1], dirty[1])
    assert (clean[1][~MASK] == 0).all()
    assert clean[1].abs().sum() > 0


@pytest.mark.parametrize("name", SURROGATES)
def test_at_ratio_one_every_policy_loss_has_the_same_gradient(name: str):
    logprobs, _, advantages = batch()
    leaf = logprobs.clone().requires_grad_()
    loss = surrogate(name)(leaf, logprobs, advantages, MASK, num_tokens=None).loss
    (gradient,) = torch.autograd.grad(loss, leaf)
    wanted = torch.where(MASK, -advantages / MASK.sum(), 0)
    torch.testing.assert_close(gradient, wanted)


def test_unknown_choices_are_named():
    x = torch.zeros(2)
    with pytest.raises(ValueError, match="reduction='mean' must be 'token'"):
        divisor("mean")
    with pytest.raises(ValueError, match="estimator='k1' must be 'k2' or 'k3'"):
        policy_kl_loss(*batch()[:2], MASK, estimator="k1", num_tokens=None)
    with pytest.raises(ValueError, match="kind='hinge' must be 'sigmoid' or 'ipo'"):
        dpo_loss(x, x, x, x, beta=0.1, label_smoothing=0.0, kind="hinge", num_pairs=None)
    with pytest.raises(ValueError, match=r"label_smoothing=0.1 must be 0 for kind='ipo'"):
        dpo_loss(x, x, x, x, beta=0.1, label_smoothing=0.1, kind="ipo", num_pairs=None)
    with pytest.raises(ValueError, match="baseline='value' must be"):
        group_advantages(x, x.long(), baseline="value", scale="none")
    with pytest.raises(ValueError, match="scale='std' must be"):
        group_advantages(x, x.long(), baseline="mean", scale="std")
    with pytest.raises(ValueError, match="scale='group_std' must have a baseline"):
        group_advantages(x, x.long(), baseline="none", scale="group_std")
    with pytest.raises(ValueError, match="buffer=0 must be between 1 and max_length=8"):
        overlong_penalty(x, max_length=8, buffer=0)
    with pytest.raises(ValueError, match="n=3 must be between 1 and the size of the pool, 2"):
        best_of_n_unbiased(x, x, 3)
    with pytest.raises(ValueError, match="n=0 must be at least 1"):
        best_of_n_kl(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("baseline", "scale"), BASELINES)
def test_equal_scores_and_single_responses_get_exactly_zero(baseline: Any, scale: Any, dtype: Any):
    scores = torch.tensor([0.1, 0.1, 7.7, 0.1, 1.0, 2.0], dtype=dtype)
    ids = torch.tensor([4, 4, 1, 4, 0, 0])
    advantages = group_advantages(scores, ids, baseline=baseline, scale=scale)
    assert (advantages[:4] == 0).all()
    assert advantages[4] < 0 < advantages[5]
    assert informative_groups(scores, ids).tolist() == [False] * 4 + [True] * 2


@pytest.mark.parametrize(("baseline", "scale"), BASELINES)
def test_a_nan_score_reaches_its_own_group_and_no_other(baseline: Any, scale: Any):
    scores = torch.tensor([1.0, torch.nan, 2.0, 3.0, torch.nan, 1.0])
    ids = torch.tensor([0, 0, 1, 1, 2, 1])
    advantages = group_advantages(scores, ids, baseline=baseline, scale=scale)
    assert advantages.isnan().tolist() == [True, True, False, False, True, False]
    assert informative_groups(scores, ids).all()


@pytest.mark.parametrize("kind", ["sigmoid", "ipo"])
def test_dpo_of_no_pairs_is_zero_with_a_graph(kind: Any):
    nothing = torch.zeros(0, requires_grad=True)
    options: dict[str, Any] = {"beta": 0.3, "label_smoothing": 0.0, "kind": kind}
    empty = dpo_loss(nothing, nothing, nothing, nothing, **options, num_pairs=None)
    assert [part.item() for part in empty] == [0, 0, 0, 0]
    assert [part.requires_grad for part in empty] == [True, False, False, False]


def test_best_of_n_shares_among_ties_and_agrees_with_all_draws():
    proxy = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 2.0])
    gold = torch.tensor([3.0, 5.0, 1.0, 2.0, 7.0, -1.0])
    for n in range(1, 7):
        draws = torch.combinations(torch.arange(6), n)
        best = [gold[draw][proxy[draw] == proxy[draw].max()].mean() for draw in draws]
        assert best_of_n_unbiased(proxy, gold, n) == pytest.approx(float(sum(best) / len(best)))
    large = torch.arange(5000.0)
    assert best_of_n_unbiased(large, large, 1000) == pytest.approx(5001 * 1000 / 1001 - 1)
    assert torch.tensor(best_of_n_unbiased(proxy.log() * torch.nan, gold, 2)).isnan()
