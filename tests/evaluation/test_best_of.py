"""Best-of-n from one pool of answers: of a tiny policy, and held against every way to draw n."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import torch

from rlhf_lightning.data.demo.source import DemoSource
from rlhf_lightning.evaluation.generate import GoldReward, Sampling
from rlhf_lightning.evaluation.gold_rewards import NumberGold
from rlhf_lightning.evaluation.held_out import encode_questions
from rlhf_lightning.evaluation.metrics import Pool, measure_best_of, sample_pool
from rlhf_lightning.evaluation.win_rate import share_over_prompts
from rlhf_lightning.models.factory import frozen, load_policy
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from rlhf_lightning.rollout.scorers.verifiable import NumberReward
from rlhf_lightning.text.tokenizers import load_tokenizer, stop_ids


def lengths(prompts: list[str], completions: list[str], *_: object) -> list[float]:
    return [len(text) / 10 for text in completions]


def sampled(start: Path, size: int, gold: GoldReward = lengths) -> Pool:
    """Return answers to 12 prompts, whose score and gold reward are their length in characters."""
    policy, tokenizer = frozen(load_policy(start)), load_tokenizer(start)
    (batches,), *_ = encode_questions(
        DemoSource(seed=1).records("prompts", "validation")[:12],
        [tokenizer],
        max_prompt_length=64,
        batch_size=5,
    )
    sampling = Sampling(
        CachedGenerator(stop_ids(tokenizer, start), tokenizer.pad_token_id), tokenizer, 1.0, 6
    )
    scorer = FunctionScorer(lengths, name="length")
    return sample_pool(policy, batches, sampling, scorer, size=size, seed=1, gold=gold)


@pytest.fixture(scope="module")
def pool(start: Path) -> Pool:
    return sampled(start, 8)


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
    wanted = share_over_prompts(np.array(by_prompt))
    ends = [found[f"best_of/3/gold_win_rate{end}"] for end in ("", "_low", "_high")]
    assert ends == pytest.approx(list(wanted))


def test_pass_and_majority_at_k_are_the_means_over_every_draw() -> None:
    draw = torch.Generator().manual_seed(4)
    answers = torch.randint(0, 4, (20, 7), generator=draw).tolist()  # 0 is right, 3 is none
    votes = [[None if one == 3 else one for one in row] for row in answers]
    gold = torch.tensor(answers).eq(0).double()
    pool = Pool(torch.zeros(20, 7), torch.ones(20, 7), gold, votes)
    found = measure_best_of(pool, (1, 3, 4, 7), baseline_gold=None)

    def majority(part: tuple[int | None, ...]) -> float:
        counts = Counter(one for one in part if one is not None)
        top = [one for one, count in counts.items() if count == max(counts.values())]
        return (0 in top) / max(len(top), 1)

    for n in (1, 3, 4, 7):
        draws = [part for row in votes for part in combinations(row, n)]
        passed = np.mean([0 in part for part in draws])
        assert found[f"best_of/{n}/pass_at_k"] == pytest.approx(passed)
        assert found[f"best_of/{n}/maj_at_k"] == pytest.approx(np.mean(list(map(majority, draws))))
        low, high = (found[f"best_of/{n}/maj_at_k_{end}"] for end in ("low", "high"))
        assert low < found[f"best_of/{n}/maj_at_k"] < high
    graded = replace(pool, gold=gold / 2)
    assert not [key for key in measure_best_of(graded, (3,), baseline_gold=None) if "_at_k" in key]


def test_a_gold_of_numbers_reads_the_votes_of_a_sampled_pool(start: Path) -> None:
    gold = NumberGold(NumberReward())
    assert gold.votes(["q"] * 3, ["so #### 72", "#### 72.00.", "none"]) == [72, 72, None]

    class Right:
        def __call__(self, prompts, completions, finished):
            return [float(len(text) > 10) for text in completions]

        def votes(self, prompts, completions):
            return [len(text) for text in completions]

    pool = sampled(start, 4, Right())
    assert pool.votes is not None
    for votes, gold_of in zip(pool.votes, pool.gold.tolist(), strict=True):
        assert [float(vote > 10) for vote in votes] == gold_of
