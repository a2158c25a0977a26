"""Ranks that measure together: the same moments, and every shared model is run equally often."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch

from rlhf_lightning.evaluation.generate import Sampling, sample_batches
from rlhf_lightning.evaluation.held_out import HeldOutComparison, Side
from rlhf_lightning.evaluation.normalization import fold_normalization
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import RewardModelScorer
from tests.builders.models import (
    EOS,
    PAD,
    VOCABULARY,
    prompt_batch,
    prompt_rows,
    tiny_policy,
    tiny_scalar_model,
    tiny_tokenizer,
)
from tests.builders.ranks import SimulatedRanks

PROMPTS = prompt_batch(prompt_rows([4, 6, 5, 3, 8, 7, 2, 5]))


def scorer_of(model: ScalarHeadModel) -> RewardModelScorer:
    scorer = RewardModelScorer(lambda: model.eval())
    scorer.build()
    return scorer


def sampling(*stops: int) -> Sampling:
    return Sampling(CachedGenerator(stops, PAD), tiny_tokenizer(), 1.0, max_new_tokens=40)


def test_every_rank_normalizes_with_the_moments_of_the_samples_that_ranks_have_shared(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    policy, reward = tiny_policy(), tiny_scalar_model(bias=3.0)
    models = [copy.deepcopy(reward) for _ in range(2)]
    batches = [PROMPTS[slice(0, 3)], PROMPTS[slice(3, 6)], PROMPTS[slice(6, 8)]]
    alone = fold_normalization(reward, policy, batches, sampling(EOS), seed=3)

    def one(rank: int) -> dict[str, float]:
        own = copy.deepcopy(policy)
        return fold_normalization(models[rank], own, batches, sampling(EOS), seed=3)

    measured = ranks.run(one)
    assert measured[0] == measured[1]
    assert measured[0] == alone
    # As normalized, the scores of the same samples have mean 0 and a biased variance of 1.
    again = fold_normalization(reward, policy, batches, sampling(EOS), seed=3)
    assert again["reward/sample_mean"] == pytest.approx(0, abs=1e-6)
    assert again["reward/sample_std"] == pytest.approx(1, abs=1e-6)
    said = sample_batches(
        policy, batches, sampling(EOS), noise=RowNoise(3, "normalization"), scorer=scorer_of(reward)
    )
    assert np.std(said.scores) == pytest.approx(1, abs=1e-5)
    for name, weight in models[0].head.state_dict().items():
        assert torch.equal(weight, models[1].head.state_dict()[name])
        torch.testing.assert_close(weight, reward.head.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_ranks_that_sample_other_answers_run_policy_and_reference_equally_often(monkeypatch):
    ranks = SimulatedRanks(monkeypatch, 2)
    models = [(tiny_policy(seed=1), tiny_policy(seed=2)) for _ in range(2)]
    calls = {(rank, side): 0 for rank in range(2) for side in range(2)}
    # The answers of one rank end after one token, those of the other are of any length.
    engines = (sampling(*range(VOCABULARY)), sampling(EOS, *range(2, 5)))

    def one(rank: int) -> list[float]:
        for side, model in enumerate(models[rank]):

            def count(*_: object, key: tuple[int, int] = (rank, side)) -> None:
                calls[key] += 1

            model.register_forward_hook(count)
        policy, reference = models[rank]
        noise = RowNoise(1, "evaluation")
        return sample_batches(policy, [PROMPTS], engines[rank], noise=noise, reference=reference).kl

    kl = ranks.run(one)
    assert len(set(calls.values())) == 1, calls
    assert min(calls.values()) > 1, "the lengths must differ for this test to say anything"
    assert all(len(values) == len(PROMPTS) for values in kl)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_held_out_prompts_and_all_know_every_answer(monkeypatch, size):
    batches = [PROMPTS[slice(start, start + 2)] for start in range(0, 7, 2)]
    batches.append(PROMPTS[slice(0, 1)])
    policy, reference = tiny_policy(seed=1), tiny_policy(seed=2)
    models = [copy.deepcopy((policy, reference)) for _ in range(size)]
    asked = [0] * size

    def answers(number: int, models: tuple[object, object]) -> object:
        engine = sampling(EOS, *range(2, 5))

        class Counted:
            def __call__(self, model: object, prompts: object, **options: object) -> object:
                asked[number] += 1
                return engine.generator(model, prompts, **options)

        counted = Sampling(Counted(), engine.tokenizer, 1.0, max_new_tokens=9)
        comparison = HeldOutComparison([Side(batches, counted, safety=batches[:1])], seed=1)
        return comparison.ask_policy(*models)

    alone = answers(0, (policy, reference))
    assert asked[0] == len(batches) + 1
    asked[0] = 0
    ranks = SimulatedRanks(monkeypatch, size)
    together = ranks.run(lambda rank: answers(rank, models[rank]))
    # A part of the batches each, as many on every rank, and one batch of safety prompts.
    assert asked == [-(-len(batches) // size) + 1] * size
    assert all(found == alone for found in together)
