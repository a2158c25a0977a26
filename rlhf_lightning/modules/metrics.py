"""Metrics of a rollout and its updates, reduced over ranks, as `phase/quantity`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from rlhf_lightning.batches import FINISHED_BY_STOP, RolloutBatch
from rlhf_lightning.distributed.collectives import gathered, global_moments, global_sum, rank
from rlhf_lightning.functional.advantages import informative_groups
from rlhf_lightning.functional.diversity import distinct_n, novel_ngram_shares
from rlhf_lightning.functional.kl import MAX_LOG_RATIO, kl_k1
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.off_policy import (
    MismatchSums,
    mismatch,
    mismatch_sums,
    sequence_ratios,
    truncated_weights,
)
from rlhf_lightning.functional.statistics import explained_variance
from rlhf_lightning.functional.surrogates import MaskingSurrogate, Surrogate
from rlhf_lightning.hparams import OnPolicyHparams
from rlhf_lightning.rollout.scorers.base import Responses

RATIO_BINS = 80  # of width 0.025 over [0, 2]
TRUST_REGION = "trust_region_sums"  # not logged


class PhaseSeconds(dict[str, float]):
    """Seconds of the phases of an iteration, by name."""

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Add the seconds that are spent inside to a phase."""
        started = time.perf_counter()
        yield
        self[phase] = self.get(phase, 0.0) + time.perf_counter() - started


class RunningMeans:
    """Means over the minibatches of one iteration; of vectors, which are counts, the sums."""

    def __init__(self) -> None:
        self.values: dict[str, list[Tensor | float]] = {}
        self.totals: dict[str, Tensor] = {}
        self.num_steps = 0

    def add(self, values: Mapping[str, Tensor | float], *, took_step: bool = True) -> None:
        """Add the values of a minibatch, and count its optimizer step if it took one."""
        self.num_steps += took_step
        for name, value in values.items():
            if isinstance(value, Tensor) and value.ndim:
                self.totals[name] = self.totals.get(name, 0) + value.detach()
            else:
                self.values.setdefault(name, []).append(value)

    def means(self) -> dict[str, float]:
        """Return the mean of each value."""
        numbers = iter(read_numbers([value for own in self.values.values() for value in own]))
        return {
            name: sum(next(numbers) for _ in own) / len(own) for name, own in self.values.items()
        }


def read_numbers(values: Sequence[Tensor | float]) -> list[float]:
    """Return scalars as numbers; the host waits for the device once, not once for each."""
    tensors = [value.detach().double() for value in values if isinstance(value, Tensor)]
    # Norms of weights that are offloaded are on the host already.
    together = [tensor.to(tensors[0].device) for tensor in tensors]
    read = iter(torch.stack(together).tolist() if together else ())
    return [next(read) if isinstance(value, Tensor) else float(value) for value in values]


@torch.no_grad()
def ratio_counts(log_ratio: Tensor, mask: Tensor) -> Tensor:
    """Return how many tokens have which probability ratio: `RATIO_BINS` equal bins over [0, 2].

    Larger ratios, and those that are not a number, count in the last bin.

    Args:
        log_ratio: new minus old log-probability [B, R].
        mask: response tokens [B, R].
    """
    bins = (log_ratio.exp() * (RATIO_BINS / 2)).nan_to_num(nan=RATIO_BINS, posinf=RATIO_BINS)
    bins = bins.clamp(0, RATIO_BINS - 1).long().flatten()
    return torch.zeros(RATIO_BINS, device=bins.device).scatter_add_(0, bins, mask.flatten().float())


@torch.no_grad()
def trust_region_sums(
    surrogate: Surrogate, logprobs: Tensor, base_logprobs: Tensor, mask: Tensor
) -> dict[str, Tensor]:
    """Return what a micro-batch adds to `trust_region_metrics`, if the surrogate leaves tokens out.

    Args:
        surrogate: one that leaves tokens out has a method `kept`.
        logprobs: of the policy in training [B, R].
        base_logprobs: of the policy that the ratio divides by [B, R].
        mask: response tokens [B, R].
    """
    if not isinstance(surrogate, MaskingSurrogate):
        return {}
    log_ratio = zero_off_mask(logprobs - base_logprobs, mask).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    ratio, kept = log_ratio.double().exp(), surrogate.kept(logprobs, base_logprobs, mask)
    weights = zero_off_mask(ratio, kept)
    sums = (mask, kept, zero_off_mask(ratio, mask), weights, weights.square())
    return {TRUST_REGION: torch.stack([part.double().sum() for part in sums])}


def trust_region_metrics(totals: Mapping[str, Tensor], stage: str) -> dict[str, float]:
    """Return the metrics of a trust region, over the tokens of all optimizer steps of an iteration.

    `STAGE/kept_fraction` is the share of tokens that are kept, `STAGE/mean_ratio` the mean ratio of
    all. `STAGE/effective_sample_size` is `(sum w)^2 / (n sum w^2)` over n tokens, with w the ratio
    of a token that is kept, and 0 of one that is not.

    Args:
        totals: sums of `trust_region_sums`; without them there is nothing to return.
        stage: phase of the metrics.
    """
    if TRUST_REGION not in totals:
        return {}
    tokens, kept, ratios, weights, squares = totals[TRUST_REGION].tolist()
    return {
        f"{stage}/kept_fraction": kept / tokens,
        f"{stage}/mean_ratio": ratios / tokens,
        f"{stage}/effective_sample_size": weights**2 / (tokens * squares) if squares else 0.0,
    }


class LoggedNames:
    """Logs NaN for a metric that was logged before and is missing now: Lightning would repeat it.

    NaN is an empty cell of `metrics.csv`.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()

    def with_nans(self, values: Mapping[str, float]) -> dict[str, Tensor]:
        """Return the values, and NaN for every other name that was logged before.

        They are tensors of the host: Lightning would copy each number to the device.
        """
        numbers = dict.fromkeys(sorted(self.names), math.nan) | dict(values)
        self.names = set(numbers)
        return {name: torch.tensor(float(value)) for name, value in numbers.items()}


def rollout_metrics(
    rollout: RolloutBatch, stage: str, *, score_clip: float | None = None
) -> dict[str, float]:
    """Return the `rollout/*` values, `STAGE/entropy`, and what values and groups allow.

    `STAGE/explained_variance` needs a value model; `rollout/informative_groups`, the share of
    prompts whose responses do not all have one score once clipped, needs several responses to a
    prompt; `rollout/clipped`, the share of scores at `score_clip` or beyond, needs a clip;
    `rollout/resampled_groups`, the share of prompts that took the place of others, and
    `rollout/resampling_rounds` need spare prompts. Scores are those of the rows that have one;
    `rollout/unscored` is the share of those that have none, where there are any.

    `rollout/teacher_kl_per_token`, the same KL to the teacher, needs one. Without a reward there is
    nothing of scores.

    KL is k1 (policy minus reference) at sampling, in nats; lengths are tokens with EOS;
    `distinct_2` pools the responses of all ranks, so that it does not depend on their number.
    """
    mask = rollout.response_mask
    kl = torch.where(mask, kl_k1(rollout.logprobs, rollout.ref_logprobs), 0)
    finished = rollout.finish_reason == FINISHED_BY_STOP
    responses = [
        ids[m].tolist() for ids, m in zip(rollout.response_tensors.cpu(), mask.cpu(), strict=True)
    ]
    of_all_ranks = [ids for own in gathered(responses) for ids in own]
    scores = rollout.scores.where(rollout.scored, 0)
    local = torch.stack(
        [
            torch.full((), float(len(rollout)), device=mask.device),
            rollout.scored.sum().float(),
            mask.sum().float(),
            scores.sum().float(),
            kl.sum().float(),
            finished.sum().float(),
            rollout.entropy.sum().float(),
            (scores.abs() >= (score_clip or math.inf)).sum().float(),
        ]
    )
    rows, scored, tokens, score, total_kl, stops, entropy, clipped = global_sum(local).tolist()
    _, score_var = global_moments(scores, rollout.scored)
    measures: dict[str, float] = {}
    if rollout.has_reward:
        measures["rollout/score"] = score / scored if scored else math.nan
        measures["rollout/score_std"] = float(score_var) ** 0.5 if scored else math.nan
    measures |= {
        "rollout/kl_per_token": total_kl / tokens,
        "rollout/kl_per_response": total_kl / rows,
        "rollout/response_length": tokens / rows,
        "rollout/eos_fraction": stops / rows,
        "rollout/distinct_2": distinct_n(of_all_ranks, n=2),
        f"{stage}/entropy": entropy / tokens,
    }
    if rollout.teacher_logprobs is not None:
        from_teacher = zero_off_mask(kl_k1(rollout.logprobs, rollout.teacher_logprobs), mask)
        measures["rollout/teacher_kl_per_token"] = float(global_sum(from_teacher.sum())) / tokens
    if scored < rows:
        measures["rollout/unscored"] = 1 - scored / rows
    if score_clip is not None:
        measures["rollout/clipped"] = clipped / max(scored, 1.0)
    measures |= _group_metrics(rollout, rows, score_clip)
    if rollout.values is not None and rollout.returns is not None:
        measures |= _explained(rollout.values, rollout.returns, rollout.reward_mask, stage)
    return measures | _components(rollout.score_components)


def _group_metrics(
    rollout: RolloutBatch, rows: float, score_clip: float | None
) -> dict[str, float]:
    """Return what groups of responses and spare prompts allow; `rows` are those of all ranks."""
    measures: dict[str, float] = {}
    if rollout.group_size > 1 and rollout.has_reward:
        # Without penalties: what the scorer tells apart, by which resampling decides too.
        told_apart = informative_groups(
            rollout.scores, rollout.group_ids, rollout.scored, clip=score_clip
        )
        measures["rollout/informative_groups"] = float(global_sum(told_apart.sum())) / rows
    if rollout.resampled is not None and rollout.resampling_rounds is not None:
        measures["rollout/resampled_groups"] = float(global_sum(rollout.resampled.sum())) / rows
        measures["rollout/resampling_rounds"] = rollout.resampling_rounds
    return measures


def novelty(responses: Responses) -> list[float]:
    """Return the share of each response's bigrams that no other response of any rank has, `[B]`."""
    mask = responses.response_mask.cpu()
    ids = responses.sequences[:, -mask.shape[1] :].cpu()
    own = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
    ranks = gathered(own)
    start = sum(len(rows) for rows in ranks[: rank()])
    shares = novel_ngram_shares([row for rows in ranks for row in rows], n=2)
    return shares[start : start + len(own)]


def _components(components: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the mean of each of several parts of a score over the rows that have it."""
    found = {}
    for name, value in components.items() if len(components) > 1 else ():
        parts = torch.stack([value.nansum(), value.isfinite().sum()])
        total, count = global_sum(parts).tolist()
        if count:
            found[f"rollout/score/{name}"] = total / count
    return found


def sampler_metrics(
    rollout: RolloutBatch, algorithm: OnPolicyHparams, num_tokens: float
) -> dict[str, float]:
    """Return the distance of the old policy from the sampler, as `rollout/*` values.

    Nothing where the generator gives no log-probabilities. `rollout/sampler_non_finite` counts
    those that are not finite; the other values leave them out. `rollout/sampler_gap` is the mean of
    |log-probability of the old policy less that of the sampler|, in nats a token, and
    `rollout/sampler_gap_max` the largest; `rollout/sampler_kl_k1` and `_k3` estimate KL(sampler ||
    policy); `rollout/effective_sample_size` is that of the responses, as a share of them. Of a
    correction `rollout/truncated_tokens` is the share of tokens above the cap, and
    `rollout/masked_responses` that of responses outside the band.

    Args:
        rollout: rollout of this rank.
        algorithm: hyper-parameters with the correction.
        num_tokens: response tokens of all ranks.
    """
    old, sampler, mask = rollout.logprobs, rollout.sampler_logprobs, rollout.response_mask
    if sampler is None:
        return {}
    limited = 0.0
    if algorithm.off_policy == "truncated":
        above = truncated_weights(old, sampler, mask, cap=math.inf) > algorithm.off_policy_cap
        limited = float(above.sum())
    elif algorithm.off_policy == "masked":
        ratios = sequence_ratios(old, sampler, mask)
        inside = (ratios >= algorithm.off_policy_low) & (ratios <= algorithm.off_policy_high)
        limited = float((mask.any(-1) & ~inside).sum())
    own_sums = mismatch_sums(old, sampler, mask & sampler.isfinite())
    ranks = gathered((tuple(own_sums), limited))
    sums = [MismatchSums(*own) for own, _ in ranks]
    found, num_limited = mismatch(sums), sum(count for _, count in ranks)
    finite_tokens = sum(own.tokens for own in sums)
    measures = {"rollout/sampler_non_finite": num_tokens - finite_tokens}
    if found is None:
        return measures | {"rollout/sampler_gap": MAX_LOG_RATIO}
    measures |= {
        "rollout/sampler_gap": found.mean_abs,
        "rollout/sampler_gap_max": found.max_abs,
        "rollout/sampler_kl_k1": found.kl_k1,
        "rollout/sampler_kl_k3": found.kl_k3,
        "rollout/effective_sample_size": found.effective_sample_size,
    }
    if algorithm.off_policy == "truncated":
        measures["rollout/truncated_tokens"] = num_limited / finite_tokens
    elif algorithm.off_policy == "masked":
        measures["rollout/masked_responses"] = num_limited / sum(own.rows for own in sums)
    return measures


def _explained(values: Tensor, returns: Tensor, mask: Tensor, stage: str) -> dict[str, float]:
    residual, total = (global_moments(x, mask)[1] for x in (returns - values, returns))
    found = explained_variance(values, returns, mask, residual_var=residual, total_var=total)
    variance = float(found)
    # Undefined (NaN) where all returns are equal.
    return {f"{stage}/explained_variance": variance} if variance == variance else {}
