"""Metrics of two policies' responses to the same prompts, and of the best of n responses of one.

Best-of-n sampling takes the response that a scorer ranks best among n of one policy, estimated for
every n from one pool of responses per prompt. Legend: N prompts, K responses of the policy to each,
L of the baseline, M of a pool. Responses to one prompt are adjacent in `PolicyAnswers`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.progress import with_bar
from rlhf_lightning.evaluation.generate import (
    GoldReward,
    PolicyAnswers,
    Sampling,
    describe_responses,
    gold_details,
    gold_scores,
    sample_batches,
)
from rlhf_lightning.evaluation.safety import SafetyCheck
from rlhf_lightning.evaluation.win_rate import (
    CONFIDENCE,
    Interval,
    comparisons_won,
    length_controlled_win_rate,
    mean_over_prompts,
    ratio_over_prompts,
    share,
    share_over_prompts,
    win_rate,
    win_rate_over_prompts,
)
from rlhf_lightning.functional.diversity import (
    distinct_n,
    most_common_fraction,
    repeated_ngram_fraction,
    self_bleu,
    unique_fraction,
)
from rlhf_lightning.functional.statistics import (
    best_of_n_kl,
    best_of_n_unbiased,
    majority_of_n_unbiased,
)
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.runs.metric_catalog import part_key

BLEU_ORDER = 4
BLEU_REFERENCES = 32  # self-BLEU grows with their number: never change it alone
REPEATED = 4  # seq-rep-4
MINE, THEIRS = "val/", "val/baseline_"
# Details of this project's gold rewards. Any other name gets a separate level, where it cannot
# overwrite another metric.
OWN_DETAILS = ("exact_match", "first_word_match", "solved", "answered")


@dataclass(frozen=True)
class Judges:
    """The judges of which response is better.

    Args:
        gold: the true reward, where it is known; only reported.
        scored: whether `PolicyAnswers.scores` holds the scores of a reward model or function.
        safety: prompts that must be refused, and the detector of refusals; or None.
    """

    gold: GoldReward | None = None
    scored: bool = False
    safety: SafetyCheck | None = None


def measure_sides(
    mine: PolicyAnswers, theirs: PolicyAnswers, judges: Judges, *, seed: int
) -> dict[str, float]:
    """Return all metrics of a policy against a baseline, as `val/*`.

    Args:
        mine: responses of the policy, K to a prompt, with their KL and scores.
        theirs: responses of the baseline, L to a prompt.
        judges: judges of which response is better.
        seed: seeds the draws of self-BLEU.
    """
    metrics = describe_responses(mine, MINE) | describe_responses(theirs, THEIRS)
    metrics |= variety(mine.token_ids, MINE, seed=seed)
    metrics |= variety(theirs.token_ids, THEIRS, seed=seed)
    metrics |= _per_token(mine, mine.kl).named("val/kl_per_token")
    metrics |= _mean(mine, mine.kl).named("val/kl_per_response")
    for prefix, answers in ((MINE, mine), (THEIRS, theirs)):
        if answers.teacher_kl:
            found = _per_token(answers, answers.teacher_kl)
            metrics |= found.named(f"{prefix}teacher_kl_per_token")
    if start := metrics.get("val/baseline_teacher_kl_per_token"):
        metrics["val/teacher_kl_share"] = metrics["val/teacher_kl_per_token"] / start
    metrics["val/num_prompts"] = float(num_prompts(mine))
    if judges.scored:
        metrics |= wins("score", mine, theirs, mine.scores, theirs.scores)
        for prefix, answers in ((MINE, mine), (THEIRS, theirs)):
            if not all(map(math.isnan, answers.scores)):
                metrics |= _mean(answers, answers.scores).named(f"{prefix}score")
    if judges.gold is not None:
        metrics |= _gold_measures(judges.gold, mine, theirs)
    if judges.safety is not None and judges.safety.prompts is None:
        metrics |= judges.safety.compare(mine, theirs)
    return metrics


def _gold_measures(
    gold: GoldReward, mine: PolicyAnswers, theirs: PolicyAnswers
) -> dict[str, float]:
    mine.gold, theirs.gold = gold_scores(gold, mine), gold_scores(gold, theirs)
    metrics = wins("gold", mine, theirs, mine.gold, theirs.gold)
    metrics |= _mean(mine, mine.gold).named("val/gold")
    metrics |= _mean(theirs, theirs.gold).named("val/baseline_gold")
    for prefix, answers in ((MINE, mine), (THEIRS, theirs)):
        for name, values in gold_details(gold, answers).items():
            mean, key = sum(values) / len(values), f"{prefix}{name}"
            if name not in OWN_DETAILS:
                metrics[f"{prefix}gold/{name}"] = mean
            elif not all(0 <= value <= 1 for value in values):
                metrics[key] = mean
            elif answers.answers_per_prompt == 1:
                metrics |= share(key, mean * len(values), len(values))
            else:
                shares = by_prompt(values, num_prompts(answers)).mean(1).numpy()
                metrics |= share_over_prompts(shares, confidence=CONFIDENCE).named(key)
    return metrics


def _mean(answers: PolicyAnswers, values: Sequence[float]) -> Interval:
    """Return the mean of values of responses, those that are not NaN; its interval over prompts."""
    known = [value for value in values if not math.isnan(value)]
    means = by_prompt(values, num_prompts(answers)).nanmean(1)
    means = means[~means.isnan()]
    found = mean_over_prompts(means.numpy(), confidence=CONFIDENCE)
    return found._replace(mean=sum(known) / len(known))


def _per_token(answers: PolicyAnswers, values: Sequence[float]) -> Interval:
    """Return the sum of values of responses by their tokens; its interval over prompts."""
    count = num_prompts(answers)
    sums, tokens = (by_prompt(x, count).sum(1).numpy() for x in (values, answers.lengths))
    found = ratio_over_prompts(sums, tokens, confidence=CONFIDENCE)
    return found._replace(mean=sum(values) / max(sum(answers.lengths), 1))


def wins(
    name: str,
    mine: PolicyAnswers,
    theirs: PolicyAnswers,
    my_scores: Sequence[float],
    their_scores: Sequence[float],
) -> dict[str, float]:
    """Return `val/<name>_win_rate` with its interval, ties, at equal length, and by domain.

    A domain comes behind a whole key, `val/<name>_win_rate_low/domain/<domain>`, so that even a
    domain `low` cannot be read as the lower end of the interval.

    Every response of the policy meets every response of the baseline to the same prompt. With one
    of each the interval is Wilson's, else that of `share_over_prompts`; both at 95 %. Prompts with
    a response that has no score (NaN) are left out; `val/<name>_unscored` is their share.

    Args:
        name: name of the judge.
        mine: responses of the policy.
        theirs: responses of the baseline.
        my_scores: scores of `mine`, in their order.
        their_scores: scores of `theirs`, in their order.
    """
    count = num_prompts(mine)
    key = f"val/{name}_win_rate"
    first, second = by_prompt(my_scores, count), by_prompt(their_scores, count)  # [N, K], [N, L]
    known = ~(first.isnan().any(1) | second.isnan().any(1))
    first, second = first[known], second[known]
    metrics = {} if known.all() else {f"val/{name}_unscored": 1 - known.double().mean().item()}
    if not known.any():
        return metrics
    metrics |= rate_of(first, second).named(key)
    metrics[f"val/{name}_tie_rate"] = tie_rate(first, second)
    lengths = by_prompt(mine.lengths, count)[known], by_prompt(theirs.lengths, count)[known]
    # Each of the K x L comparisons of a prompt is one row of the regression.
    rows = [
        table.flatten().tolist()
        for scores in ((first, second), lengths)
        for table in torch.broadcast_tensors(scores[0].unsqueeze(2), scores[1].unsqueeze(1))
    ]
    by_length = length_controlled_win_rate(
        *rows, confidence=CONFIDENCE, rows_per_prompt=len(rows[0]) // len(first)
    )
    metrics |= by_length.named(f"{key}_length_controlled")
    domains = mine.domains[:: len(mine.domains) // count]
    domains = [domains[i] for i in known.nonzero().flatten().tolist()]
    for domain in sorted(set(domains) - {""}):
        index = [i for i, each in enumerate(domains) if each == domain]
        part = rate_of(first[index], second[index]).named(key)
        metrics |= {part_key(k, "domain", domain): v for k, v in part.items()}
    return metrics


def rate_of(first: Tensor, second: Tensor) -> Interval:
    """Return the win rate of scores `[N, K]` over `[N, L]`, ties one half, with its 95 % interval.

    Wilson's with one score a side, else that of `share_over_prompts`.
    """
    if first.shape[1] == second.shape[1] == 1:
        result = win_rate(first[:, 0], second[:, 0], confidence=CONFIDENCE)
        return Interval(result.rate, result.low, result.high)
    return win_rate_over_prompts(first, second, confidence=CONFIDENCE)


def tie_rate(first: Tensor, second: Tensor) -> float:
    """Return the share of comparisons whose scores are equal; `[N, K]` and `[N, L]`."""
    return float((first.unsqueeze(2) == second.unsqueeze(1)).double().mean())


def variety(token_ids: Sequence[Sequence[int]], prefix: str, *, seed: int) -> dict[str, float]:
    """Return how varied a set of responses is, as `<prefix>...`.

    `distinct_1` to `_3` and `self_bleu` over all responses, `unique_fraction` and
    `most_common_fraction` of whole responses, `repetition` (repeated 4-grams) inside a response.
    """
    answers = [tuple(ids) for ids in token_ids]
    measures = {f"{prefix}distinct_{n}": distinct_n(answers, n=n) for n in (1, 2, 3)}
    bleu = self_bleu(answers, n=BLEU_ORDER, max_references=BLEU_REFERENCES, seed=seed)
    if not math.isnan(bleu):
        measures[f"{prefix}self_bleu"] = bleu
    measures[f"{prefix}unique_fraction"] = unique_fraction(answers)
    measures[f"{prefix}most_common_fraction"] = most_common_fraction(answers)
    measures[f"{prefix}repetition"] = repeated_ngram_fraction(answers, n=REPEATED)
    return measures


def num_prompts(answers: PolicyAnswers) -> int:
    """Return the number of prompts that were answered, each `answers_per_prompt` times."""
    return len(answers.prompts) // answers.answers_per_prompt


def by_prompt(values: Sequence[float], count: int) -> Tensor:
    """Return values of responses as `[count, responses per prompt]`."""
    return torch.tensor(values, dtype=torch.float64).view(count, -1)


@dataclass(frozen=True)
class Pool:
    """Scores and lengths of a policy's responses to each prompt, `[N, M]` float64.

    Args:
        scores: scores by the scorer that chooses among them.
        lengths: response tokens, EOS included.
        gold: the true reward; None where it is not known.
        votes: answers of the responses, where gold reads them; a response without one has None.
    """

    scores: Tensor
    lengths: Tensor
    gold: Tensor | None = None
    votes: Sequence[Sequence[Hashable]] | None = None


def sample_pool(
    policy: PolicyModel,
    batches: Sequence[PromptBatch],
    sampling: Sampling,
    scorer: Scorer,
    *,
    size: int,
    seed: int,
    gold: GoldReward | None = None,
) -> Pool:
    """Sample `size` responses to each prompt, score them, and return their pool.

    The noise of a response depends on the seed, its place in the pool and its prompt: a smaller
    pool is the beginning of a larger one.

    Args:
        policy: policy to sample from.
        batches: held-out prompts, each once.
        sampling: engine and decoding.
        scorer: scorer that chooses among the responses.
        size: size of the pool.
        seed: seeds the sampling noise.
        gold: the true reward, where it is known.
    """
    noise = RowNoise(seed, "best_of")
    found: list[tuple[Sequence[float], ...]] = []
    read = getattr(gold, "votes", None)
    votes: list[Sequence[Hashable]] = []
    for place in with_bar(range(size), "best of n", "responses a prompt"):
        answers = sample_batches(
            policy, batches, sampling, noise=noise.at_iteration(place), scorer=scorer
        )
        if any(map(math.isnan, answers.scores)):
            raise ValueError(
                "best of n chooses by score, and the scorer has none (None) for some responses: "
                "use a scorer that scores every response"
            )
        extra = [] if gold is None else [gold_scores(gold, answers)]
        found.append((answers.scores, answers.lengths, *extra))
        if read is not None:
            votes.append(read(answers.prompts, answers.completions))
    scores, token_counts, *golds = (
        torch.tensor(x, dtype=torch.float64).T for x in zip(*found, strict=True)
    )
    by_prompt = list(zip(*votes, strict=True))
    return Pool(scores, token_counts, golds[0] if golds else None, by_prompt or None)


def measure_best_of(
    pool: Pool, counts: Sequence[int], *, baseline_gold: Tensor | None
) -> dict[str, float]:
    """Return metrics of the best of n responses, as `best_of/<n>/...`, for each n of `counts`.

    Every figure is the mean over prompts of an expectation over all ways to draw n responses from
    the pool without replacement, which is unbiased. Win rate, gold and score have a 95 % interval
    over prompts: a prompt's expectation is one observation.

    * `gold_win_rate`: against the baseline's responses to the same prompt, ties one half; see
      `share_over_prompts`.
    * `gold`, `score`, `response_length`: of the chosen response.
    * `pass_at_k`, where gold is 0 or 1: the share of draws with a right response (k is n).
    * `maj_at_k`, where gold reads answers: the gold of the answer that most of the n give.
    * `kl_per_response`: `log n - (n - 1) / n` nats from the policy that is sampled, an upper bound
      (near the KL where responses hardly repeat, far above it where they do); `kl_per_token` is
      that by the mean response length.

    Args:
        pool: responses of the policy.
        counts: the n, none above the size of the pool.
        baseline_gold: `[N, L]` gold of the baseline's responses; None where it is not known.

    Source: Nakano et al. 2021, "WebGPT", appendix I (the estimator; for right and wrong it is that
    of Chen et al. 2021, "Codex", equation 1); Beirami et al. 2024, "Theoretical guarantees on the
    best-of-n alignment policy", theorem 1 (the bound).
    """
    won = None
    if pool.gold is not None and baseline_gold is not None:
        won = comparisons_won(pool.gold, baseline_gold).mean(2)  # [N, M]
    found: dict[str, float] = {}
    for n in counts:
        key = f"best_of/{n}"
        means = {"score": pool.scores, "gold": pool.gold}
        for name, values in means.items():
            if values is not None:
                by_prompt = _by_prompt(pool.scores, values, n)
                interval = mean_over_prompts(by_prompt, confidence=CONFIDENCE)
                found |= interval.named(f"{key}/{name}")
        if won is not None:
            by_prompt = _by_prompt(pool.scores, won, n).clip(0, 1)  # but for rounding
            interval = share_over_prompts(by_prompt, confidence=CONFIDENCE)
            found |= interval.named(f"{key}/gold_win_rate")
        for name, by_prompt in _of_right_answers(pool, n).items():
            interval = share_over_prompts(by_prompt.clip(0, 1), confidence=CONFIDENCE)
            found |= interval.named(f"{key}/{name}")
        length = float(_by_prompt(pool.scores, pool.lengths, n).mean())
        kl = best_of_n_kl(n)
        found[f"{key}/response_length"] = length
        found[f"{key}/kl_per_response"] = kl
        found[f"{key}/kl_per_token"] = kl / length
    return found


def _of_right_answers(pool: Pool, n: int) -> dict[str, np.ndarray]:
    """Return `[N]` each of `pass_at_k` and `maj_at_k`; nothing where gold is not 0 or 1."""
    gold = pool.gold
    if gold is None or not bool(((gold == 0) | (gold == 1)).all()):
        return {}
    found = {"pass_at_k": _by_prompt(gold, gold, n)}
    if pool.votes is not None:
        rows = zip(pool.votes, gold.tolist(), strict=True)
        found["maj_at_k"] = np.array([majority_of_n_unbiased(*row, n) for row in rows])
    return found


def _by_prompt(scores: Tensor, values: Tensor, n: int) -> np.ndarray:
    """Return `[N]`: the expected value of the best of n by score, of `[N, M]` each."""
    rows = zip(scores, values, strict=True)
    return np.array([best_of_n_unbiased(score, value, n) for score, value in rows])
