"""Best-of-n from one pool of answers: of a tiny policy, and held against every way to draw n."""

from __future__ import annotations

from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.evaluation.best_of import Pool, measure_best_of, sample_pool
from rlhf_lightning.evaluation.comparisons import share_over_prompts
from rlhf_lightning.evaluation.generate import Sampling
from rlhf_lightning.evaluation.held_out import encode_questions
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids

COUNTS = (1, 2, 4, 8)


def lengths(prompts: list[str], completions: list[str], *_: object) -> list[float]:
    return [len(text) / 10 for text in completions]


def sampled(start: Path, size: int) -> Pool:
    """Return answers to 12 prompts, whose score and gold reward are their length in characters."""
    policy, tokenizer = frozen(load_policy(start)), load_tokenizer(start)
    (batches,), _ = encode_questions(
        DemoSource(seed=1).records("prompts", "validation")[:12],
        [tokenizer],
        max_prompt_length=64,
        batch_size=5,
    )
    sampling = Sampling(
        CachedGenerator(stop_ids(tokenizer, start), tokenizer.pad_token_id), tokenizer, 1.0, 6
    )
    scorer = FunctionScorer(lengths, name="length")
    return sample_pool(policy, batches, sampling, scorer, size=size, seed=1, gold=lengths)


@pytest.fixture(scope="module")
def pool(start: Path) -> Pool:
    return sampled(start, 8)


def test_where_the_reward_is_gold_more_answers_win_more(pool: Pool) -> None:
    assert pool.gold is not None
    found = measure_best_of(pool, COUNTS, baseline_gold=pool.gold[:, :2])
    for name in ("gold_win_rate", "gold", "score"):
        values = [found[f"best_of/{n}/{name}"] for n in COUNTS]
        assert values == sorted(values)
        assert values[0] < values[-1] - 0.1
        for n in COUNTS:
            low, high = (found[f"best_of/{n}/{name}_{end}"] for end in ("low", "high"))
            assert low <= found[f"best_of/{n}/{name}"] <= high
    assert found["best_of/8/gold_win_rate"] <= 1


def test_the_best_of_one_is_the_mean_of_the_pool_and_of_all_its_best(pool: Pool) -> None:
    assert pool.gold is not None
    found = measure_best_of(pool, (1, 8), baseline_gold=pool.gold[:, :1])
    assert found["best_of/1/score"] == pytest.approx(float(pool.scores.mean()))
    assert found["best_of/1/response_length"] == pytest.approx(float(pool.lengths.mean()))
    assert found["best_of/8/score"] == pytest.approx(float(pool.scores.amax(1).mean()))
    rival = pool.gold[:, :1]
    won = (pool.gold > rival).double() + (pool.gold == rival).double() / 2
    assert found["best_of/1/gold_win_rate"] == pytest.approx(float(won.mean()))
    assert found["best_of/1/kl_per_response"] == 0
    assert found["best_of/8/kl_per_response"] == pytest.approx(np.log(8) - 7 / 8)
    length = found["best_of/8/response_length"]
    assert found["best_of/8/kl_per_token"] == pytest.approx((np.log(8) - 7 / 8) / length)


def test_a_win_rate_is_the_mean_over_every_draw_and_its_interval_is_over_prompts() -> None:
    draw = torch.Generator().manual_seed(3)
    scores, gold = torch.rand((2, 30, 6), generator=draw, dtype=torch.float64)
    rivals = torch.rand((30, 3), generator=draw, dtype=torch.float64)
    found = measure_best_of(Pool(scores, torch.ones(30, 6), gold), [3], baseline_gold=rivals)
    by_prompt = []
    for prompt in range(30):
        best = [
            max(drawn, key=lambda answer: scores[prompt, answer])
            for drawn in combinations(range(6), 3)
        ]
        won = [float((gold[prompt, answer] > rivals[prompt]).double().mean()) for answer in best]
        by_prompt.append(np.mean(won))
    wanted = share_over_prompts(np.array(by_prompt), confidence=0.95)
    ends = [found[f"best_of/3/gold_win_rate{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx(list(wanted))


def test_a_smaller_pool_is_the_beginning_of_a_larger_one(pool: Pool, start: Path) -> None:
    first = sampled(start, 2)
    torch.testing.assert_close(first.scores, pool.scores[:, :2], rtol=0, atol=0)
    assert not torch.equal(pool.scores[:, 0], pool.scores[:, 1])
