"""Two and four ranks with a share of the groups each do what one rank does with all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from rlhf_lightning.modules import on_policy
from tests.builders.models import PAD, flat_parameters
from tests.builders.ranks import SimulatedRanks
from tests.builders.stages import (
    ROWS,
    STOPS,
    OtherSampler,
    average_over_ranks,
    group_prompts,
    grpo_hparams,
    tiny_grpo,
    without_trainer,
)

pytestmark = pytest.mark.filterwarnings("ignore::rlhf_lightning.hparams.UnusualHparamWarning")
ITERATIONS = 2
HPARAMS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "rloo-gspo-constant": {
        "baseline": "leave_one_out",
        "scale": "none",
        "kl_in": "reward",
        "surrogate": "gspo",
        "loss_reduction": "constant",
        "cliprange": 0.01,
    },
    "reinforce_pp-cispo-sequence": {
        "scale": "global_std",
        "surrogate": "cispo",
        "loss_reduction": "sequence",
        "kl_target": 2.0,
        "kl_horizon": 40,
    },
    "truncated": {"off_policy": "truncated", "off_policy_cap": 1.2},
    "masked": {"off_policy": "masked", "off_policy_low": 0.4, "off_policy_high": 3.0},
}


def train(monkeypatch: pytest.MonkeyPatch, size: int, hparams: dict[str, Any]) -> list[Any]:
    ranks = SimulatedRanks(monkeypatch, size)
    average_over_ranks(monkeypatch, size)
    made = grpo_hparams(num_epochs=2, micro_batch_size=3, kl_coef=0.3, **hparams)
    sampler = {"generator": OtherSampler(STOPS, PAD)} if "off_policy" in hparams else {}
    modules = [without_trainer(tiny_grpo(grpo=made, **sampler)) for _ in range(size)]
    share = 2 * ROWS // size

    def one(rank: int) -> None:
        for iteration in range(ITERATIONS):
            rows = slice(rank * share, (rank + 1) * share)
            modules[rank].training_step(
                group_prompts(iteration, rows=2 * ROWS // 4)[rows], iteration
            )

    ranks.run(one)
    return modules


@pytest.fixture(scope="module")
def one_rank() -> Any:
    done: dict[str, Any] = {}

    def of(name: str) -> Any:
        if name not in done:
            with pytest.MonkeyPatch.context() as monkeypatch:
                (done[name],) = train(monkeypatch, 1, HPARAMS[name])
        return done[name]

    return of


@pytest.mark.thorough
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", HPARAMS)
def test_ranks_take_the_same_steps_and_log_the_same_as_one(monkeypatch, one_rank, name, size):
    one = one_rank(name)
    ranks = train(monkeypatch, size, HPARAMS[name])
    moved = flat_parameters(one) - flat_parameters(without_trainer(tiny_grpo()))
    assert moved.abs().max() > 3e-3
    for number in range(ITERATIONS):
        whole = one.rollouts[number]
        parts = [rank.rollouts[number] for rank in ranks]
        for field in ("row_ids", "group_ids", "scores"):
            assert torch.equal(torch.cat([getattr(p, field) for p in parts]), getattr(whole, field))
        for rank, part in enumerate(parts):
            rows = slice(rank * len(part), (rank + 1) * len(part))
            expected = whole.advantages[rows, : part.advantages.shape[1]]
            torch.testing.assert_close(part.advantages, expected, rtol=0, atol=1e-4)
    for rank in ranks:
        assert (flat_parameters(rank) - flat_parameters(one)).abs().max() < 2e-5
        assert torch.equal(flat_parameters(rank), flat_parameters(ranks[0]))
        for ours, theirs in zip(rank.logged, one.logged, strict=True):
            for measure, value in theirs.items():
                if not measure.startswith(("time/", "throughput/")):
                    assert float(ours[measure]) == pytest.approx(
                        float(value), rel=1e-3, abs=1e-5
                    ), measure


def test_ranks_with_other_numbers_of_rows_are_refused(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    modules = [without_trainer(tiny_grpo()) for _ in range(2)]

    def one(rank: int) -> None:
        with pytest.raises(ValueError, match="were given 16, 8 prompts"):
            modules[rank].training_step(group_prompts(rows=ROWS // 4)[: (16, 8)[rank]], 0)

    ranks.run(one)


@pytest.mark.parametrize("rows", [[0, 1, 2, 3, 4, 5], [0, 4, 1, 5, 2, 6, 3, 7]])
def test_groups_of_unequal_size_or_out_of_order_are_refused(rows):
    module = without_trainer(tiny_grpo())
    with pytest.raises(ValueError, match="give each prompt as many rows"):
        module.training_step(group_prompts()[torch.tensor(rows)], 0)


@pytest.mark.parametrize("name", ["truncated", "masked"])
def test_some_but_not_all_are_limited_where_ranks_are_compared(one_rank, name):
    limited = {"truncated": "rollout/truncated_tokens", "masked": "rollout/masked_responses"}[name]
    plain = flat_parameters(one_rank("grpo"))
    for logged in one_rank(name).logged:
        assert 0.1 < logged[limited] < 0.9
        assert 0.2 < logged["rollout/sampler_gap"] < 0.5
        assert 0.03 < logged["rollout/effective_sample_size"] < 0.9
    assert (flat_parameters(one_rank(name)) - plain).abs().max() > 1e-3, "the weights matter"


def test_a_loss_divided_by_the_counts_of_its_own_rank_would_take_other_steps(monkeypatch, one_rank):
    # The mutation: a mean over the tokens of each rank, and then over ranks.
    monkeypatch.setattr(on_policy, "global_sum", lambda x: x * 2)
    two = train(monkeypatch, 2, HPARAMS["grpo"])
    assert (flat_parameters(two[0]) - flat_parameters(one_rank("grpo"))).abs().max() > 2e-4
