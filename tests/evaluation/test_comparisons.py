"""Win rates over several answers, at equal length, and by domain."""

from __future__ import annotations

import numpy as np
import pytest

from rlhf_lightning.evaluation.win_rate import (
    length_controlled_win_rate,
    mean_over_prompts,
    paired_differences,
    ratio_over_prompts,
    share_over_prompts,
)
from rlhf_lightning.functional.statistics import interval_over_groups, wilson_interval


@pytest.mark.thorough
@pytest.mark.parametrize("count", [10, 40])
@pytest.mark.parametrize("mean", [0.5, 0.9])
@pytest.mark.parametrize("spread", [1, 5])  # a + b of the beta distribution of a prompt's rate
def test_intervals_of_shares_hold_the_truth_and_are_seldom_wholly_above_it(count, mean, spread):
    rng = np.random.default_rng(0)

    def shares(number: int) -> np.ndarray:
        """Shares of 2 x 2 comparisons."""
        return np.round(rng.beta(mean * spread, (1 - mean) * spread, number) * 4) / 4

    truth = float(shares(400_000).mean())
    found = [share_over_prompts(shares(count)) for _ in range(2000)]
    assert np.mean([f.low <= truth <= f.high for f in found]) >= 0.93
    assert np.mean([f.low > truth for f in found]) <= 0.04


@pytest.mark.parametrize(
    ("count", "mean", "sizes"),
    [
        (20, 0.7, [6]),
        (20, 0.7, [1, 2, 3, 6, 15]),
        pytest.param(10, 0.9, [1, 2, 3, 6, 15], marks=pytest.mark.thorough),
        pytest.param(100, 0.5, [6], marks=pytest.mark.thorough),
    ],
)
def test_intervals_of_trials_that_share_prompts_hold_the_truth(count, mean, sizes):
    rng = np.random.default_rng(0)
    inside, above, plain = [], [], []
    for _ in range(300):
        size = rng.choice(sizes, count)
        won = rng.binomial(size, rng.beta(2 * mean, 2 * (1 - mean), count))
        hits = [i < w for w, m in zip(won, size, strict=True) for i in range(m)]
        low, high = interval_over_groups(hits, np.repeat(np.arange(count), size), confidence=0.95)
        inside.append(low <= mean <= high)
        above.append(low > mean)
        low, high = wilson_interval(won.sum(), size.sum(), confidence=0.95)
        plain.append(low <= mean <= high)
    assert np.mean(inside) >= 0.92
    assert np.mean(above) <= 0.05
    assert np.mean(plain) < 0.85  # what it was


def test_trials_of_different_prompts_have_wilsons_interval_and_those_of_one_say_nothing():
    hits = [True] * 7 + [False] * 3
    expected = wilson_interval(7, 10, confidence=0.95)
    assert interval_over_groups(hits, range(10), confidence=0.95) == expected
    assert interval_over_groups(hits, [0] * 10, confidence=0.95) == (0, 1)
    # Prompts that all agree are as many trials, however often each was asked.
    same = interval_over_groups([True] * 12, list(range(4)) * 3, confidence=0.95)
    assert same == pytest.approx(wilson_interval(4, 4, confidence=0.95))
    # Two prompts whose shares differ say next to nothing; nothing is below 0 or above 1.
    low, high = interval_over_groups([True] * 5 + [False], [0] * 5 + [1], confidence=0.95)
    assert 0 <= low < 0.2
    assert 0.95 < high <= 1


def test_the_interval_of_a_kl_per_token_is_over_prompts_and_holds_the_truth():
    rng = np.random.default_rng(0)

    def kl(count: int) -> tuple[np.ndarray, np.ndarray]:
        tokens = rng.integers(2, 40, count)
        return tokens * rng.gamma(2, 0.1 + tokens / 400), tokens  # longer ones move further

    sums, tokens = kl(400_000)
    truth = sums.sum() / tokens.sum()
    found = [ratio_over_prompts(*kl(200)) for _ in range(600)]
    assert np.mean([f.low <= truth <= f.high for f in found]) == pytest.approx(0.95, abs=0.025)
    result = ratio_over_prompts(sums[:3], tokens[:3])
    assert result.mean == pytest.approx(sums[:3].sum() / tokens[:3].sum())
    same = ratio_over_prompts(tokens[:9] * 1.0, [2.0] * 9)
    assert same == pytest.approx(mean_over_prompts(tokens[:9] / 2))
    assert np.isnan(ratio_over_prompts([0.0] * 9, [2] * 9).low)


@pytest.mark.parametrize(
    ("per_prompt", "effect"),
    [(4, 1.5), *(pytest.param(*one, marks=pytest.mark.thorough) for one in ((1, 1.5), (4, 0.0)))],
)
def test_the_interval_at_equal_length_holds_the_truth(per_prompt, effect):
    rng = np.random.default_rng(1)

    def rate(count: int):
        """Longer responses win more by `effect`; at equal length about 0.6 win."""
        prompts = rng.normal(0, 0.7, count).repeat(per_prompt)
        lengths = np.rint(rng.normal(60 + 15 * effect, 20, count * per_prompt))
        longer = np.tanh((lengths - 60) / 20)
        won = rng.random(count * per_prompt) < 1 / (1 + np.exp(-(0.4 + prompts + effect * longer)))
        return length_controlled_win_rate(
            won.astype(float).tolist(),
            [0.5] * len(won),
            lengths.tolist(),
            [60] * len(won),
            rows_per_prompt=per_prompt,
        )

    truth = np.mean([rate(4000).mean for _ in range(5)])
    found = [rate(80) for _ in range(100)]
    assert np.mean([f.low <= truth <= f.high for f in found]) >= 0.9
    assert np.mean([f.low > truth for f in found]) <= 0.06


@pytest.mark.parametrize("values", [[], [1.0], [1.0] * 10])
def test_the_interval_of_values_that_do_not_differ_is_not_known(values):
    mean, *ends = mean_over_prompts(values)
    assert np.isnan(ends).all()
    assert mean == 1 or not values


def test_the_length_controlled_rate_is_the_intercept_of_a_regression_on_tanh_of_the_difference():
    rng = np.random.default_rng(2)
    lengths = np.concatenate([60 + rng.integers(-30, 60, size=60), [900, 1200]])
    scores = rng.normal(0.3 + 0.01 * (lengths - 60).clip(-50, 50), 1)
    difference = lengths - 60.0
    x = np.stack(
        [
            np.ones(62),
            np.tanh(difference / np.sqrt((difference**2).mean() - difference.mean() ** 2)),
        ]
    )
    won, weights = (scores > 0).astype(float), np.zeros(2)
    for _ in range(50):  # Newton's steps, with the ridge of the slope
        p = 1 / (1 + np.exp(-weights @ x))
        gradient = x @ (p - won) + np.array([0, 0.02]) * weights
        weights -= np.linalg.solve((x * p * (1 - p)) @ x.T + np.diag([0, 0.02]), gradient)
    got = length_controlled_win_rate(scores.tolist(), [0.0] * 62, lengths.tolist(), [60] * 62)
    assert got.mean == pytest.approx(1 / (1 + np.exp(-weights[0])), abs=1e-4)


def values_of_run(seed: int, gain: float, prompts: range) -> dict[str, list]:
    """Values of a run whose responses gain on easy and hard prompts alike, and get longer."""
    hard = np.random.default_rng(0).normal(0, 1, 1000)[list(prompts)]
    rng = np.random.default_rng(seed)
    length = rng.integers(5, 9, len(prompts)) + round(4 * gain)
    gold = hard + gain + rng.normal(0, 0.3, len(prompts))
    return {
        "prompts": [f"p{i}" for i in prompts],
        "gold": gold.tolist(),
        "score": gold.tolist(),
        "length": length.tolist(),
        "kl": (0.1 * length * (1 + gain)).tolist(),
        "baseline_length": [9] * len(prompts),
        "baseline_score": hard.tolist(),
    }


def test_two_policies_are_compared_prompt_by_prompt():
    first, second = values_of_run(1, 0.0, range(200)), values_of_run(2, 0.2, range(40, 240))
    count, found = paired_differences(first, second)
    assert count == 160
    assert found["gold"].low > 0.1, "the same prompts"
    both = zip(second["gold"][:160], first["gold"][40:], strict=True)
    assert found["gold_win_rate"].mean == np.mean([new > old for new, old in both])
    alone = [mean_over_prompts(one["gold"]) for one in (first, second)]
    assert alone[0].high > alone[1].low, "single intervals overlap"
    lengths, kls = (
        [np.array(second[name][:160]), np.array(first[name][40:])] for name in ("length", "kl")
    )
    assert found["response_length"].mean == pytest.approx(lengths[0].mean() - lengths[1].mean())
    ratios = [kl.sum() / length.sum() for kl, length in zip(kls, lengths, strict=True)]
    assert found["kl_per_token"].mean == pytest.approx(ratios[0] - ratios[1])
    assert (
        found["kl_per_token"].low < found["kl_per_token"].mean < found["kl_per_token"].high + 1e-9
    )
    back = paired_differences(second, first)[1]
    assert back["gold"] == pytest.approx([-x for x in (found["gold"][i] for i in (0, 2, 1))])


def test_another_reward_or_baseline_is_not_compared_and_other_prompts_are_not_paired():
    first, second = values_of_run(1, 0.0, range(50)), values_of_run(2, 0.2, range(50))
    other = {**second, "baseline_score": [1.0] * 50}
    names = set(paired_differences(first, other)[1])
    assert "score" not in names
    assert {"gold", "kl_per_token"} <= names
    longer = {**second, "baseline_length": [8] * 50}
    names = set(paired_differences(first, longer)[1])
    assert names == {"gold_win_rate", "gold", "response_length"}
    judged = [{**one, "baseline_gold": one["baseline_score"]} for one in (first, second)]
    assert "gold" in paired_differences(*judged)[1]
    doubled = {**judged[1], "baseline_gold": [2 * value for value in second["baseline_score"]]}
    names = set(paired_differences(judged[0], doubled)[1])
    assert not names & {"gold", "gold_win_rate"}, "another gold reward"
    assert paired_differences(first, values_of_run(2, 0, range(60, 99))) == (0, {})
