"""Records of a rollout, one per response, those of all ranks together.

Legend: B rows, R response.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import Generation, PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import gathered
from rlhf_lightning.doctor.metrics import ResponseRecord
from rlhf_lightning.rollout.scorers.base import Responses, Scorer, make_responses


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
            raise ValueError(
                "doctor.refusals is empty: give patterns, or doctor.harmful_domains=[]"
            )
        if self.patterns:
            joined = "|".join(f"(?:{pattern})" for pattern in self.patterns)
            try:
                compiled = re.compile(joined, re.IGNORECASE)
            except re.error as error:
                raise ValueError(f"doctor.refusals: {error} in {joined!r}") from error
            object.__setattr__(self, "_compiled", compiled)

    def judge(self, domain: str, text: str) -> bool | None:
        """Return whether a response is a refusal; None where none is expected."""
        if domain not in self.domains or self._compiled is None:
            return None
        return self._compiled.search(text.replace("\u2019", "'")) is not None


def responses_of(
    rollout: RolloutBatch,
    prompts: PromptBatch,
    tokenizer: PreTrainedTokenizerBase,
    *,
    skip_special_tokens: bool = False,
) -> Responses:
    """Return the rollout's responses with their texts, as a scorer takes them.

    Args:
        rollout: rollout of an iteration.
        prompts: prompts of the iteration, with the spare ones.
        tokenizer: turns responses into text.
        skip_special_tokens: leave special tokens out of the text.
    """
    prompts = prompts.with_row_ids(rollout.row_ids)
    generation = Generation(rollout.sequences, rollout.response_mask, rollout.finish_reason)
    return make_responses(prompts, generation, tokenizer, skip_special_tokens=skip_special_tokens)


def second_scores(scorer: Scorer | None, answers: Responses) -> list[float] | None:
    """Return the second scorer's score of each response; None without one."""
    return None if scorer is None else scorer(answers).total.float().tolist()


def all_records(
    rollout: RolloutBatch,
    answers: Responses,
    refusals: Refusals,
    seconds: Sequence[float] | None,
) -> list[ResponseRecord]:
    """Return one record per response of all ranks, in the order of the ranks."""
    surplus, squares = token_surplus(rollout)
    mask = rollout.response_mask.cpu()
    responses = rollout.response_tensors.cpu()
    columns = zip(
        rollout.row_ids.tolist(),
        rollout.group_ids.tolist(),
        rollout.domains,
        rollout.known_scores.tolist(),
        [tuple(ids[m].tolist()) for ids, m in zip(responses, mask, strict=True)],
        surplus.tolist(),
        squares.tolist(),
        answers.completions,
        [None] * len(rollout) if seconds is None else seconds,
        strict=True,
    )
    own = [
        ResponseRecord(
            row_id, group_id, domain, score, len(ids), ids, total, square, second,
            refusals.judge(domain, text),
        )
        for row_id, group_id, domain, score, ids, total, square, text, second in columns
    ]  # fmt: skip
    return [record for records in gathered(own) for record in records]


def token_surplus(rollout: RolloutBatch) -> tuple[Tensor, Tensor]:
    """Return `[B]` sums of surprise less entropy over a row's tokens, and of its square, float64.

    Given what stands before it, a token drawn from the policy has surprise -log p with the entropy
    as its mean, so the sums are those of a martingale: 0 on average, whatever the policy.
    """
    gap = -rollout.logprobs.double() - rollout.entropy.double()  # [B, R]
    gap = torch.where(rollout.response_mask, gap, 0)
    return gap.sum(-1), gap.square().sum(-1)
