"""Metrics of two policies' responses to the same prompts, and of the best of n responses of one.

Best-of-n sampling takes the response that a scorer ranks best among n of one policy, estimated for
every n from one pool of responses per prompt. Legend: N prompts, K responses of the policy to each,
L of the baseline, M of a pool. Responses to one prompt are adjacent in `PolicyAnswers`.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.progress import with_bar
from rlhf_lightning.evaluation.generate import (
    GoldReward,
    PolicyAnswers,
    Sampling,
    gold_details,
    gold_scores,
    sample_batches,
)
from rlhf_lightning.evaluation.safety import SafetyCheck
from rlhf_lightning.evaluation.win_rate import (
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


def measure_sides(
    mine: PolicyAnswers,
    theirs: PolicyAnswers,
    *,
    seed: int,
    gold: GoldReward | None = None,
    scored: bool = False,
    safety: SafetyCheck | None = None,
) -> dict[str, float]:
    """Return all metrics of a policy against a baseline, as `val/*`.

    Args:
        mine: responses of the policy, K to a prompt, with their KL and scores.
        theirs: responses of the baseline, L to a prompt.
        seed: seeds the draws of self-BLEU.
        gold: the true reward, where it is known; only reported.
        scored: whether `PolicyAnswers.scores` holds the scores of a reward model or function.
        safety: the detector of refusals; None leaves them out.
    """
    metrics = {
        **_per_token(mine, mine.kl).named("val/kl_per_token"),
        **_mean(mine, mine.kl).named("val/kl_per_response"),
        "val/num_prompts": float(mine.num_prompts),
    }
    for prefix, answers in ((MINE, mine), (THEIRS, theirs)):
        metrics |= _described(answers, prefix, seed=seed)
        if answers.teacher_kl:
            found = _per_token(answers, answers.teacher_kl)
            metrics |= found.named(f"{prefix}teacher_kl_per_token")
        if scored and not all(map(math.isnan, answers.scores)):
            metrics |= _mean(answers, answers.scores).named(f"{prefix}score")
        if gold is not None:
            answers.gold = gold_scores(gold, answers)
            metrics |= _mean(answers, answers.gold).named(f"{prefix}gold")
            metrics |= _gold_details(gold, answers, prefix)
    if start := metrics.get("val/baseline_teacher_kl_per_token"):
        metrics["val/teacher_kl_share"] = metrics["val/teacher_kl_per_token"] / start
    if scored:
        metrics |= wins("score", mine, theirs, mine.scores, theirs.scores)
    if gold is not None:
        metrics |= wins("gold", mine, theirs, mine.gold, theirs.gold)
    if safety is not None and safety.prompts is None:
        metrics |= safety.compare(mine, theirs)
    elif safety is not None and mine.safety is not None and theirs.safety is not None:
        metrics |= safety.compare(mine.safety, theirs.safety)
    return metrics


def _described(answers: PolicyAnswers, prefix: str, *, seed: int) -> dict[str, float]:
    """Return length, share finished and variety of a set of responses, as `<prefix>...`.

    `distinct_1` to `_3` and `self_bleu` over all responses, `unique_fraction` and
    `most_common_fraction` of whole responses, `repetition` (repeated 4-grams) inside a response.
    """
    rows, ids = len(answers.prompts), [tuple(one) for one in answers.token_ids]
    measures = {
        "response_length": sum(answers.lengths) / rows,
        "eos_fraction": sum(answers.finished) / rows,
        **{f"distinct_{n}": float(distinct_n(ids, n=n)) for n in (1, 2, 3)},
        "self_bleu": self_bleu(ids, n=BLEU_ORDER, max_references=BLEU_REFERENCES, seed=seed),
        "unique_fraction": unique_fraction(ids),
        "most_common_fraction": most_common_fraction(ids),
        "repetition": repeated_ngram_fraction(ids, n=REPEATED),
    }
    if math.isnan(measures["self_bleu"]):
        del measures["self_bleu"]
    return {f"{prefix}{name}": value for name, value in measures.items()}


def _gold_details(gold: GoldReward, answers: PolicyAnswers, prefix: str) -> dict[str, float]:
    metrics: dict[str, float] = {}
    for name, values in gold_details(gold, answers).items():
        mean, key = sum(values) / len(values), f"{prefix}{name}"
        if name not in OWN_DETAILS:
            metrics[f"{prefix}gold/{name}"] = mean
        elif not all(0 <= value <= 1 for value in values):
            metrics[key] = mean
        elif answers.answers_per_prompt == 1:
            metrics |= share(mean * len(values), len(values)).named(key)
        else:
            shares = by_prompt(values, answers.num_prompts).mean(1).numpy()
            metrics |= share_over_prompts(shares).named(key)
    return metrics


def _mean(answers: PolicyAnswers, values: Sequence[float]) -> Interval:
    """Return the mean of values of responses, those that are not NaN; its interval over prompts."""
    known = [value for value in values if not math.isnan(value)]
    means = by_prompt(values, answers.num_prompts).nanmean(1)
    means = means[~means.isnan()]
    found = mean_over_prompts(means.numpy())
    return found._replace(mean=sum(known) / len(known))


def _per_token(answers: PolicyAnswers, values: Sequence[float]) -> Interval:
    """Return the sum of values of responses by their tokens; its interval over prompts."""
    given = (values, answers.lengths)
    sums, tokens = (by_prompt(x, answers.num_prompts).sum(1).numpy() for x in given)
    found = ratio_over_prompts(sums, tokens)
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
    count = mine.num_prompts
    key = f"val/{name}_win_rate"
    first, second = by_prompt(my_scores, count), by_prompt(their_scores, count)  # [N, K], [N, L]
    known = ~(first.isnan().any(1) | second.isnan().any(1))
    first, second = first[known], second[known]
    metrics = {} if known.all() else {f"val/{name}_unscored": 1 - known.double().mean().item()}
    if not known.any():
        return metrics
    metrics |= rate_of(first, second).named(key)
    ties = first.unsqueeze(2) == second.unsqueeze(1)
    metrics[f"val/{name}_tie_rate"] = float(ties.double().mean())
    lengths = by_prompt(mine.lengths, count)[known], by_prompt(theirs.lengths, count)[known]
    # Each of the K x L comparisons of a prompt is one row of the regression.
    rows = [
        table.flatten().tolist()
        for scores in ((first, second), lengths)
        for table in torch.broadcast_tensors(scores[0].unsqueeze(2), scores[1].unsqueeze(1))
    ]
    by_length = length_controlled_win_rate(*rows, rows_per_prompt=len(rows[0]) // len(first))
    metrics |= by_length.named(f"{key}_length_controlled")
    domains = mine.domains[:: mine.answers_per_prompt]
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
        return Interval(*win_rate(first[:, 0], second[:, 0])[3:])
    return win_rate_over_prompts(first, second)


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
    noise, drawn = RowNoise(seed, "best_of"), list[PolicyAnswers]()
    for place in with_bar(range(size), "best of n", "responses a prompt"):
        given: dict[str, Any] = {"noise": noise.at_iteration(place), "scorer": scorer}
        drawn.append(sample_batches(policy, batches, sampling, **given))
        if any(map(math.isnan, drawn[-1].scores)):
            raise ValueError("best of n chooses by score: use a scorer that scores every response")
    read = getattr(gold, "votes", None)
    votes = [] if read is None else [read(one.prompts, one.completions) for one in drawn]
    return Pool(
        _by_draw([one.scores for one in drawn]),
        _by_draw([one.lengths for one in drawn]),
        None if gold is None else _by_draw([gold_scores(gold, one) for one in drawn]),
        list(zip(*votes, strict=True)) or None,
    )


def _by_draw(values: Sequence[Sequence[float]]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64).T  # [N, M]


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
    scores, gold = pool.scores, pool.gold
    is_right = gold is not None and bool(((gold == 0) | (gold == 1)).all())
    found: dict[str, float] = {}
    for n in counts:
        intervals = {"score": mean_over_prompts(_best(scores, scores, n))}
        if gold is not None:
            intervals["gold"] = mean_over_prompts(_best(scores, gold, n))
        if gold is not None and baseline_gold is not None:
            won = comparisons_won(gold, baseline_gold).mean(2)  # [N, M]
            intervals["gold_win_rate"] = _share_of_best(_best(scores, won, n))
        if gold is not None and is_right:
            intervals["pass_at_k"] = _share_of_best(_best(gold, gold, n))
            if pool.votes is not None:
                rows = zip(pool.votes, gold.tolist(), strict=True)
                majority = np.array([majority_of_n_unbiased(*row, n) for row in rows])
                intervals["maj_at_k"] = _share_of_best(majority)
        for name, interval in intervals.items():
            found |= interval.named(f"best_of/{n}/{name}")
        length, kl = float(_best(scores, pool.lengths, n).mean()), best_of_n_kl(n)
        found[f"best_of/{n}/response_length"] = length
        found[f"best_of/{n}/kl_per_response"] = kl
        found[f"best_of/{n}/kl_per_token"] = kl / length
    return found


def _best(scores: Tensor, values: Tensor, n: int) -> np.ndarray:
    """Return `[N]`: the expected value of the best of n by score, of `[N, M]` each."""
    rows = zip(scores, values, strict=True)
    return np.array([best_of_n_unbiased(score, value, n) for score, value in rows])


def _share_of_best(by_prompt: np.ndarray) -> Interval:
    return share_over_prompts(by_prompt.clip(0, 1))  # but for rounding
