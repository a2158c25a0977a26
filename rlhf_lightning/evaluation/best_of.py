"""Best-of-n sampling: the response that a scorer ranks best among n of one policy.

Estimated for every n from one pool of responses per prompt. Legend: N prompts, M responses of the
pool to each, L responses of the baseline.
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
from rlhf_lightning.evaluation.comparisons import (
    comparisons_won,
    mean_over_prompts,
    share_over_prompts,
)
from rlhf_lightning.evaluation.generate import GoldReward, Sampling, gold_scores, sample_batches
from rlhf_lightning.evaluation.win_rate import CONFIDENCE
from rlhf_lightning.functional.statistics import (
    best_of_n_kl,
    best_of_n_unbiased,
    majority_of_n_unbiased,
)
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Scorer


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
