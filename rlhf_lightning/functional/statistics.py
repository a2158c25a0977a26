"""Statistics for reports: how good the critic is, how sure a fraction is, what best-of-n gives."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from rlhf_lightning.functional.masked import at_least_float32, masked_mean, masked_var

EQUAL_SCORES = 1e-6  # of their size: what fp32 rounding alone makes of equal scores


def explained_variance(
    values: Tensor,
    returns: Tensor,
    mask: Tensor,
    *,
    residual_var: Tensor | None = None,
    total_var: Tensor | None = None,
) -> Tensor:
    """Return `1 - Var(returns - values) / Var(returns)` over the mask, biased variances.

    1 is a perfect critic, 0 one that predicts a constant, below 0 one that is worse than that.
    NaN if the returns do not vary (or the mask is empty), where it is undefined: do not log it.

    Args:
        values: `[B, R]` old values, of the rollout that made the returns.
        returns: `[B, R]` targets, not whitened.
        mask: `[B, R]` bool, True on actions.
        residual_var: scalar, Var(returns - values) over all ranks; None for that of this call.
        total_var: scalar, Var(returns) over all ranks; None for that of this call.

    Returns:
        A scalar, at least float32.

    Source: OpenAI baselines, `explained_variance`.
    """
    values, returns = at_least_float32(values), at_least_float32(returns)
    total = masked_var(returns, mask) if total_var is None else total_var
    residual = masked_var(returns - values, mask) if residual_var is None else residual_var
    rounding = (torch.finfo(returns.dtype).eps * masked_mean(returns.abs(), mask)).square()
    explained = 1 - residual / total
    return torch.where(total > rounding, explained, torch.full_like(total, math.nan))


def wilson_interval(successes: float, n: float, *, confidence: float) -> tuple[float, float]:
    """Return the Wilson score interval of a fraction.

    With `p = successes / n` and the normal quantile z, `(p + z^2/2n +- z sqrt(p(1-p)/n +
    z^2/4n^2)) / (1 + z^2/n)`: inside 0 to 1 and sensible for few samples, unlike `p +- z sd`.

    Args:
        successes: 0 to n; a tie may count one half.
        n: number of trials; some may weigh less than one.
        confidence: coverage of the two-sided interval, such as 0.95.

    Returns:
        Low and high; both NaN if n is 0.

    Raises:
        ValueError: if `confidence` is not between 0 and 1, or `successes` not between 0 and n.

    Source: Wilson 1927.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence={confidence} must be above 0 and below 1: use 0.95")
    if not 0 <= successes <= n:
        raise ValueError(f"successes={successes} must be between 0 and n={n}: check the counts")
    if n == 0:
        return math.nan, math.nan
    z = NormalDist().inv_cdf((1 + confidence) / 2)
    p = successes / n
    centre = p + z * z / (2 * n)
    half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n))
    scale = 1 + z * z / n
    low, high = (centre - half) / scale, (centre + half) / scale
    return min(max(0.0, low), p), max(min(1.0, high), p)  # rounding may pass by p at 0 and 1


def effective_number(sums: Sequence[float], sizes: Sequence[float], *, confidence: float) -> float:
    """Return how many independent trials say as much about a share as trials that come in groups.

    Trials of one group, such as responses to one prompt, are alike. Wilson's interval at this
    number holds the share of new groups: `n p (1 - p) / v`, times the square of the normal over
    Student's quantile. n is `M^2 / sum of m^2` for groups of m trials, M in all; v is the variance
    of a group's share, to which one more group with the variance 1/4, the largest of a share, is
    added: near 0 and 1 most groups agree by chance, and say little about the next one. That adds up
    to at most `p (1 - p)`, the variance of one trial a group. Where all agree the number is n.

    Args:
        sums: of each group the sum of its trials, each 0 to 1.
        sizes: of each group the number of its trials.
        confidence: coverage of the two-sided interval.

    Source: Dean and Pagano 2015 (Wilson's interval at an effective sample size); Kish 1965 (n).
    """
    from scipy.stats import t  # slow to import, and not needed to train

    total = math.fsum(sizes)
    mean = math.fsum(sums) / total
    count = total**2 / math.fsum(size * size for size in sizes)
    left = [won - mean * size for won, size in zip(sums, sizes, strict=True)]
    if max(map(abs, left)) <= 1e-12 * max(sizes):
        return count
    most = mean * (1 - mean)
    variance = count * math.fsum(x * x for x in left) / total**2
    variance = max(variance, min(variance + 1 / (4 * count), most))
    level = (1 + confidence) / 2
    student = float(t.ppf(level, max(count - 1, 1)))
    return count * most / variance * (NormalDist().inv_cdf(level) / student) ** 2


def interval_over_groups(
    hits: Sequence[bool], groups: Sequence[Hashable], *, confidence: float
) -> tuple[float, float]:
    """Return the Wilson interval of the share of hits; trials of one group count as alike.

    At the number of trials where no two are of one group, else at their `effective_number`, which
    is at most theirs. Trials that are all of one group say nothing about others: 0 to 1.

    Args:
        hits: results of the trials.
        groups: group of each trial, such as its prompt.
        confidence: coverage of the two-sided interval.
    """
    count, right = float(len(hits)), float(sum(hits))
    sums, sizes = defaultdict[Hashable, float](float), defaultdict[Hashable, float](float)
    for hit, group in zip(hits, groups, strict=True):
        sums[group] += hit
        sizes[group] += 1
    if len(sizes) == 1 < len(hits):
        return 0.0, 1.0
    if len(sizes) < len(hits):
        values = list(sums.values()), list(sizes.values())
        count = min(effective_number(*values, confidence=confidence), count)
        right *= count / len(hits)
    return wilson_interval(min(right, count), count, confidence=confidence)


def all_equal(mean: float, std: float) -> bool:
    """Return whether values of this mean and standard deviation are one value, but for rounding."""
    return std <= EQUAL_SCORES * max(1.0, abs(mean))


def best_of_n_kl(n: int) -> float:
    """Return `log n - (n - 1) / n`, an upper bound on KL(best of n || policy), in nats.

    Args:
        n: responses of which the best is taken, at least 1.

    Raises:
        ValueError: if `n` is below 1.

    Source: Stiennon et al. 2020, appendix G.3; Beirami et al. 2024 (a bound, not an equality).
    """
    if n < 1:
        raise ValueError(f"n={n} must be at least 1: 1 is the policy itself")
    return math.log(n) - (n - 1) / n


def best_of_n_unbiased(proxy: Tensor, gold: Tensor, n: int) -> float:
    """Return the expected gold score of the best response by proxy among n of a pool.

    The n responses are drawn without replacement, and the expectation is over all draws: every
    response of the pool counts, `sum of gold * (C(proxies <= own, n) - C(proxies < own, n)) /
    C(pool, n)`, with ties sharing equally. The binomials are exact integers.

    Args:
        proxy: `[pool]` scores that choose.
        gold: `[pool]` gold scores of the same responses, which are reported.
        n: responses drawn, 1 to the size of the pool.

    Returns:
        A number in units of gold; NaN if a proxy score is NaN.

    Raises:
        ValueError: if `n` is not between 1 and the size of the pool.

    Source: Nakano et al. 2021, "WebGPT", appendix I.
    """
    pool = len(proxy)
    if not 1 <= n <= pool:
        raise ValueError(f"n={n} must be between 1 and the size of the pool, {pool}")
    if proxy.isnan().any():
        return math.nan
    _, index, counts = torch.unique(proxy, return_inverse=True, return_counts=True)
    draws = [0, *(math.comb(rank, n) for rank in counts.cumsum(0).tolist())]  # best up to a value
    shares = [(upto - below) / math.comb(pool, n) for below, upto in pairwise(draws)]
    weights = torch.tensor(shares, dtype=torch.float64, device=gold.device) / counts
    return float((weights[index] * gold).sum())


def majority_of_n_unbiased(votes: Sequence[Hashable], gold: Sequence[float], n: int) -> float:
    """Return the expected gold of the answer that most of n responses of a pool give: maj@n.

    As `best_of_n_unbiased` does, over all draws of n without replacement; answers that are given
    equally often share equally. A response without an answer has no vote, and n of them are worth
    0.

    Args:
        votes: answer of each response of the pool; None for one without.
        gold: gold of the same responses; of equal answers the mean counts.
        n: responses drawn, 1 to the size of the pool.

    Source: Wang et al. 2023, "Self-consistency improves chain of thought reasoning" (the vote).
    """
    counts = Counter(vote for vote in votes if vote is not None)
    silent, found = len(votes) - counts.total(), 0.0
    for answer, count in counts.items():
        value = math.fsum(g for v, g in zip(votes, gold, strict=True) if v == answer) / count
        others = [other for vote, other in counts.items() if vote != answer]
        for own in range(1, min(count, n) + 1) if value else ():
            # [drawn, ties]: ways to draw the others, each at most as often as this answer
            ways = np.zeros((n - own + 1, n // own + 1))
            ways[:, 0] = [math.comb(silent, drawn) for drawn in range(len(ways))]
            for other in others:
                before, ways = ways, np.zeros_like(ways)
                for drawn in range(min(other, own, n - own) + 1):
                    tie = int(drawn == own)
                    part = math.comb(other, drawn) * before[: len(ways) - drawn]
                    ways[drawn:, tie:] += part[:, : ways.shape[1] - tie]
            won = float((ways[-1] / np.arange(1, ways.shape[1] + 1)).sum())
            found += value * math.comb(count, own) * won / math.comb(len(votes), n)
    return found
