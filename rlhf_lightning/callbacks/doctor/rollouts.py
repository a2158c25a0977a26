"""The doctor's reading of a rollout: a record per response, and the figures of the first one.

Legend: B rows, R response.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import FINISHED_BY_STOP, Generation, PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import agreed_max, gathered
from rlhf_lightning.doctor.metrics import ResponseRecord, response_metrics
from rlhf_lightning.doctor.preflight_checks import FirstRollout
from rlhf_lightning.functional.kl import MAX_LOG_RATIO, kl_k1
from rlhf_lightning.models.forward import by_micro_batch, response_statistics
from rlhf_lightning.models.heads import TokenStatistics
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.step_0 import rounding_tolerance
from rlhf_lightning.rollout.scorers.base import Responses
from rlhf_lightning.text.thoughts import answer_in


@dataclass(frozen=True)
class Refusals:
    """The patterns of a refusal, and the domains in which refusals are expected.

    Args:
        domains: domains of harmful prompts; without any the refusal rate is not measured.
        patterns: regular expressions; a response that matches one is a refusal. Case is ignored,
            and a typographic apostrophe counts as a plain one.

    Raises:
        ValueError: for a pattern that is no regular expression, or domains without patterns.
    """

    domains: tuple[str, ...] = ("harmful",)
    patterns: tuple[str, ...] = (
        r"\b(can ?not|can't|won't|will not|must not|unable to) "
        r"(help|assist|do|answer|comply|provide|support)",
        r"\b(refuse|decline)\b",
        r"\bi('m| am) (sorry|not able)\b",
    )
    _compiled: re.Pattern[str] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        """Compile the patterns."""
        if self.domains and not self.patterns:
            raise ValueError("doctor.refusals is empty: fill it, or doctor.harmful_domains=[]")
        if self.patterns:
            joined = "|".join(f"(?:{pattern})" for pattern in self.patterns)
            try:
                compiled = re.compile(joined, re.IGNORECASE)
            except re.error as error:
                raise ValueError(f"doctor.refusals: {error} in {joined!r}") from error
            object.__setattr__(self, "_compiled", compiled)

    def judge(self, domain: str, text: str, prompt: str = "") -> bool | None:
        """Return whether a response refuses behind its thoughts; None where none has to."""
        if domain not in self.domains or self._compiled is None:
            return None
        said = answer_in(text, prompt).replace("\u2019", "'")
        return self._compiled.search(said) is not None


def responses_of(
    rollout: RolloutBatch, prompts: PromptBatch, tokenizer: PreTrainedTokenizerBase, **how: bool
) -> Responses:
    """Return the rollout's responses with their texts, as a scorer takes them.

    Args:
        rollout: rollout of an iteration.
        prompts: prompts of the iteration, with the spare ones.
        tokenizer: turns responses into text.
        how: `skip_special_tokens` of `Responses.of`.
    """
    prompts = prompts.with_row_ids(rollout.row_ids)
    generation = Generation(rollout.sequences, rollout.response_mask, rollout.finish_reason)
    return Responses.of(prompts, generation, tokenizer, **how)


def all_records(
    rollout: RolloutBatch,
    answers: Responses,
    refusals: Refusals,
    seconds: Sequence[float] | None,
    *,
    lags: bool = False,
) -> list[ResponseRecord]:
    """Return one record per response of all ranks, in the order of the ranks.

    Args:
        rollout: this rank's rollout.
        answers: its responses with their texts.
        refusals: what a refusal is.
        seconds: scores of a second scorer.
        lags: whether older weights sampled it; see `token_surplus`.
    """
    responses = zip(rollout.response_tensors.cpu(), rollout.response_mask.cpu(), strict=True)
    tokens = [tuple(ids[mask].tolist()) for ids, mask in responses]
    numbers = (rollout.row_ids, rollout.group_ids, rollout.known_scores)
    surplus = token_surplus(rollout, lags=lags)
    rows, groups, scores, *both = (each.tolist() for each in (*numbers, *surplus))
    two = [None] * len(rollout) if seconds is None else seconds
    asked = answers.prompts.columns.get("prompt", ("",) * len(rollout))
    refused = map(refusals.judge, rollout.domains, answers.completions, asked)
    first: tuple[Any, ...] = (rows, groups, rollout.domains, scores, map(len, tokens), tokens)
    own = [ResponseRecord(*row) for row in zip(*first, *both, two, refused, strict=True)]
    return [record for records in gathered(own) for record in records]


def token_surplus(rollout: RolloutBatch, *, lags: bool = False) -> tuple[Tensor, Tensor]:
    """Return `[B]` sums of surprise less entropy over a row's tokens, and of its square, float64.

    Given what stands before it, a token drawn from the policy has surprise -log p with the entropy
    as its mean, so the sums are those of a martingale: 0 on average, whatever the policy. Where the
    sampler `lags`, a token weighs p over the probability that the sampler had for it, which keeps
    that mean; without the sampler's log-probabilities both sums are NaN.
    """
    gap = -rollout.logprobs.double() - rollout.entropy.double()  # [B, R]
    if lags:
        sampler = rollout.sampler_logprobs
        log_ratio = torch.nan if sampler is None else kl_k1(rollout.logprobs, sampler).double()
        gap = gap * torch.as_tensor(log_ratio).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    gap = torch.where(rollout.response_mask, gap, 0)
    return gap.sum(-1), gap.square().sum(-1)


class PreflightError(RuntimeError):
    """The run is not worth starting; the message names what is wrong and what to do."""


@torch.no_grad()
def first_rollout(module: OnPolicyModule, prompts: PromptBatch) -> FirstRollout:
    """Return the figures of the rollout that iteration 1 will make, over all ranks.

    Args:
        module: the module before its first update.
        prompts: prompts of iteration 1; the same noise gives the same responses again.
    """
    rollout, _ = module.collect_rollout(prompts, 0)
    skip = module.sampling.skip_special_tokens
    answers = responses_of(rollout, prompts, module.tokenizer, skip_special_tokens=skip)
    records = all_records(rollout, answers, Refusals((), ()), None)
    measured = response_metrics(records, score_clip=None)
    ratio, reference, entropy, stopped = _by_row(module, rollout)
    lengths = [record.length for record in records]
    tokens = sum(lengths)
    known = [record.score for record in records if not math.isnan(record.score)]
    scores = torch.tensor(known or [0.0], dtype=torch.float64)
    stops, pad = set(getattr(module.generator, "stop_ids", ())), module.tokenizer.pad_token_id
    finished = [r.tokens for r, by_stop in zip(records, stopped, strict=True) if by_stop]
    vocabulary = len(module.tokenizer)
    warmer = module.controls.temperature > 1  # which makes a trained policy's choices even, too
    return FirstRollout(
        ratio_error=sum(ratio) / tokens,
        reference_error=sum(reference) / tokens,
        finished=len(finished) / len(records),
        stop_errors=sum(bool(stops) and stops.isdisjoint(ids[-1:]) for ids in finished),
        padded=sum(pad in record.tokens[:-1] for record in records) / len(records),
        eos_known=not stops or module.tokenizer.eos_token_id in stops,
        score_mean=float(scores.mean()),
        score_std=float(scores.std(correction=0)),
        finite=bool(scores.isfinite().all()),
        length_mean=tokens / len(records),
        shortest=min(lengths),
        longest=max(lengths),
        max_new_tokens=module.sampling.max_new_tokens,
        sampler_bias=measured["sampler_bias"],
        sampler_error=measured["sampler_error"],
        tolerance=rounding_tolerance(module),
        same_source=module.step_0.same_source,
        has_reward=rollout.has_reward,
        entropy_share=0.0 if warmer else sum(entropy) / tokens / math.log(vocabulary),
        vocabulary=vocabulary,
    )


def _by_row(module: OnPolicyModule, rollout: RolloutBatch) -> Iterator[tuple[Any, ...]]:
    """Return columns over the rows of all ranks, in the order of `all_records`.

    Sums over a row's tokens of |log-ratio| as an update starts, of the same to the reference, and
    of the entropy; and whether a stop token ended the row.
    """
    size = module.algorithm.micro_batch_size

    def update(rows: Tensor) -> TokenStatistics:
        return response_statistics(
            module.policy,
            rollout[rows],
            temperature=module.controls.temperature,
            with_entropy=module.algorithm.entropy_coef > 0,
        )

    again = TokenStatistics(*by_micro_batch(update, rollout.attention_mask, size, agree=agreed_max))
    ratio = (again.logprobs - rollout.logprobs).abs()
    reference = (rollout.logprobs - rollout.ref_logprobs).abs()
    values, mask = (ratio, reference, rollout.entropy), rollout.response_mask
    sums = [torch.where(mask, each, 0).sum(-1).tolist() for each in values]
    own = list(zip(*sums, (rollout.finish_reason == FINISHED_BY_STOP).tolist(), strict=True))
    return zip(*(row for rank in gathered(own) for row in rank), strict=True)
