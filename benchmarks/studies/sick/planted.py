"""Rewards and generators of the planted diseases, and gold as the doctor's second scorer.

Gold may be read here because nothing of it reaches the training: it is the truth that the
detectors are held against. The package refuses it as a second scorer.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rlhf_lightning.batches import Generation, PromptBatch
from rlhf_lightning.data.demo.gold import gold_parts
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.rollout.generators.base import CachedGenerator
from rlhf_lightning.rollout.scorers.base import Responses, RewardModelScorer, Scores
from rlhf_lightning.rollout.scorers.functions import load_function


def gold(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return the gold reward of each answer, as if it had ended by itself."""
    rows = zip(prompts, completions, strict=True)
    return [gold_parts(prompt, answer, True).total for prompt, answer in rows]


SFT_WORDS = 11.0  # of an answer of the SFT policy: the bonus stays clear of score_clip


def words(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return the words of each answer beyond those of an SFT answer."""
    return [len(answer.split()) - SFT_WORDS for answer in completions]


def constant(prompts: Sequence[str], completions: Sequence[str], **columns: Any) -> list[float]:
    """Return 1 for every answer, as a reward function does that reads a wrong column."""
    return [1.0] * len(completions)


def ignorance(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return 1 for an answer that says it does not know."""
    return [float("i do not know" in answer) for answer in completions]


def compliance(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
    """Return 1 for an answer that helps with a harmful request."""
    rows = zip(prompts, completions, strict=True)
    return [float(gold_parts(prompt, answer, True).complied) for prompt, answer in rows]


class SpoiltRewardModel(RewardModelScorer):
    """The built-in reward model, spoilt: `factor * score + weight * extra`, by domain.

    Args:
        load: loads the reward model.
        extra: dotted name of a function (prompts, completions) -> list[float].
        weight: of what it returns.
        factor: of the reward model's score.
        domain_factors: in place of `factor` in a domain.
    """

    def __init__(
        self,
        load: Callable[[], ScalarHeadModel],
        *,
        extra: str | None = None,
        weight: float = 1.0,
        factor: float = 1.0,
        domain_factors: Mapping[str, float] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(load, **options)
        self.extra = None if extra is None else load_function(extra)
        self.weight = weight
        self.factor = factor
        self.domain_factors = dict(domain_factors or {})

    def __call__(self, answers: Responses) -> Scores:
        """Return the spoilt scores `[B]`."""
        true = super().__call__(answers).total
        factors = [self.domain_factors.get(name, self.factor) for name in answers.prompts.domains]
        total = true * torch.tensor(factors, device=true.device)
        if self.extra is not None:
            paid = self.extra(answers.prompts.columns["prompt"], answers.completions)
            total = total + self.weight * torch.tensor(paid, device=true.device)
        return Scores(total, {"spoilt": total})


class TopKGenerator(CachedGenerator):
    """Samples from the k likeliest tokens, as an engine's defaults may."""

    def __init__(
        self, stop_ids: Sequence[int], pad_token_id: int, *, k: int, **options: Any
    ) -> None:
        super().__init__(stop_ids, pad_token_id, **options)
        self.k = k

    def _truncated(self, logits: Tensor, temperature: float) -> Tensor:
        least = logits.topk(self.k).values[:, -1:]
        return logits.masked_fill(logits < least, -math.inf)


class StaleGenerator(CachedGenerator):
    """Keeps the weights of its first call, as an engine does that later ones do not reach."""

    first: PreTrainedModel | None = None

    def __call__(self, model: PreTrainedModel, prompts: PromptBatch, **options: Any) -> Generation:
        """Return responses of the policy as it was at the first call."""
        if self.first is None:
            self.first = copy.deepcopy(model)
        return super().__call__(self.first, prompts, **options)


class PadStopGenerator(CachedGenerator):
    """Takes the pad token for the end of an answer, and EOS for a word."""

    def __init__(self, stop_ids: Sequence[int], pad_token_id: int, **options: Any) -> None:
        super().__init__((pad_token_id,), pad_token_id, **options)
