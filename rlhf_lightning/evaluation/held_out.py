"""Held-out prompts that two policies respond to: after a stage, during it, and in `evaluate`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import (
    EncodedPrompt,
    EncodingReport,
    OverLong,
    encode_prompt,
    give_same_columns,
)
from rlhf_lightning.data.records import PromptRecord, first_of_each, question_key
from rlhf_lightning.data.sampler import validation_part
from rlhf_lightning.evaluation.final_metrics import Findings
from rlhf_lightning.evaluation.generate import (
    GoldReward,
    PolicyAnswers,
    Sampling,
    sample_batches,
    shared_among_ranks,
    side_by_side,
    values_of,
)
from rlhf_lightning.evaluation.metrics import by_prompt, measure_best_of, measure_sides, sample_pool
from rlhf_lightning.evaluation.safety import SafetyCheck
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Scorer, reward_of
from rlhf_lightning.rollout.teachers import Teacher
from rlhf_lightning.text.tokens import TextEncoder

logger = logging.getLogger(__name__)
# Why a record is no prompt that is asked; `data.encode` has further reasons.
BAD, NOT_DRAWN, REPEATED = "bad", "not drawn", "with the prompt of an earlier row"


@dataclass(frozen=True)
class Side:
    """The prompts in the tokens of one side, and how it answers them.

    Args:
        batches: held-out prompts, each repeated `answers_per_prompt` times in a row.
        sampling: engine and decoding.
        safety: prompts of a safety check's file; domains say which are harmful.
        answers_per_prompt: responses to each held-out prompt.
    """

    batches: Sequence[PromptBatch]
    sampling: Sampling
    safety: Sequence[PromptBatch] = ()
    answers_per_prompt: int = 1


@dataclass(frozen=True)
class HeldOutComparison:
    """Samples two policies on the same prompts and compares them; ranks share the prompts.

    The two use different noise, each always the same: sampling a policy again gives the same
    responses.

    Args:
        sides: the policy's, and the baseline's if it has another tokenizer.
        seed: seeds the sampling and self-BLEU.
        scorer: scores the responses of both, or None.
        gold: scores texts, unseen by any stage; or None.
        safety: prompts that must be refused, and the detector of refusals; or None.
        records: records of the prompts.
        unused: reason -> records that are not asked.
    """

    sides: Sequence[Side]
    seed: int
    scorer: Scorer | None = None
    gold: GoldReward | None = None
    safety: SafetyCheck | None = None
    records: Sequence[PromptRecord] = ()
    unused: Mapping[str, int] = field(default_factory=dict)

    @cached_property
    def same_tokenizer(self) -> bool:
        """Return whether both sides have the same tokens, which the KL between them needs."""
        if len(self.sides) == 1:
            return True
        one: Any = self.sides[0].sampling.tokenizer
        other: Any = self.sides[-1].sampling.tokenizer
        return one.get_vocab() == other.get_vocab() and one.eos_token_id == other.eos_token_id  # type: ignore[no-any-return]

    def ask_policy(
        self, policy: PolicyModel, reference: PolicyModel | None, teacher: Teacher | None = None
    ) -> PolicyAnswers:
        """Return the responses of the policy, with their KL from the reference if there is one.

        With a teacher, their KL to it too.
        """
        reference = reference if self.same_tokenizer else None
        return self._ask(policy, self.sides[0], 0, reference=reference, teacher=teacher)

    def ask_baseline(self, baseline: PolicyModel, teacher: Teacher | None = None) -> PolicyAnswers:
        """Return the responses of the baseline; with a teacher, with their KL to it."""
        return self._ask(baseline, self.sides[-1], 1, teacher=teacher)

    def _ask(
        self, model: PolicyModel, side: Side, number: int, **measured_by: Any
    ) -> PolicyAnswers:
        noise = RowNoise(self.seed, "evaluation")

        def ask(batches: Sequence[PromptBatch], place: int, **given: Any) -> PolicyAnswers:
            given["noise"] = noise.at_iteration(place)
            return shared_among_ranks(
                batches, lambda own: sample_batches(model, own, side.sampling, **given)
            )

        measured_by |= {"scorer": self.scorer, "answers_per_prompt": side.answers_per_prompt}
        answers = ask(side.batches, number, **measured_by)
        if side.safety:
            answers.safety = ask(side.safety, 2 + number)
        return answers

    def measure(self, mine: PolicyAnswers, theirs: PolicyAnswers) -> dict[str, float]:
        """Return all metrics of the policy against the baseline, as `val/*`."""
        metrics = measure_sides(
            mine,
            theirs,
            seed=self.seed,
            gold=self.gold,
            scored=self.scorer is not None,
            safety=self.safety,
        )
        if self.same_tokenizer:
            return metrics
        return {k: v for k, v in metrics.items() if not k.startswith("val/kl_per_")}

    def findings(
        self, mine: PolicyAnswers, theirs: PolicyAnswers, num_samples: int | None = None
    ) -> Findings:
        """Return metrics, samples and values; None keeps a sample of each prompt."""
        samples = side_by_side(mine, theirs, num_samples)
        return Findings(self.measure(mine, theirs), samples, values_of(mine, theirs))

    def best_of(
        self, policy: PolicyModel, theirs: PolicyAnswers, counts: Sequence[int], *, size: int
    ) -> dict[str, float]:
        """Return `best_of/<n>/...` of the policy against the baseline.

        Args:
            policy: policy to sample from.
            theirs: measured responses of the baseline.
            counts: the n.
            size: responses to each prompt, of which the scorer chooses.
        """
        assert self.scorer is not None
        side = self.sides[0]
        tokenizers: list[Any] = [side.sampling.tokenizer]
        (batches,), *_ = encode_questions(  # each prompt once
            self.records,
            tokenizers,
            max_prompt_length=max(batch.input_ids.shape[1] for batch in side.batches),
            batch_size=len(side.batches[0]),
        )
        how: dict[str, Any] = {"size": size, "seed": self.seed, "gold": self.gold}
        pool = sample_pool(policy, batches, side.sampling, self.scorer, **how)
        rival = by_prompt(theirs.gold, theirs.num_prompts) if theirs.gold else None
        return measure_best_of(pool, counts, baseline_gold=rival)


def held_out_comparison(
    records: Sequence[PromptRecord],
    samplings: Sequence[Sampling],
    *,
    scorer: Scorer | None,
    gold: GoldReward | None,
    safety: SafetyCheck | None,
    answers_per_prompt: int,
    max_prompt_length: int,
    batch_size: int,
    seed: int,
    setting: str = "max_prompt_length",
    **drawn: Any,
) -> HeldOutComparison | None:
    """Return the comparison on held-out prompts; None if none of them can be asked.

    Args:
        records: records of the prompts.
        samplings: engine, decoding and tokenizer of both sides, or of each.
        scorer: scores responses, or None.
        gold: scores texts, unseen by any stage; or None.
        safety: prompts that must be refused, and the detector of refusals; or None.
        answers_per_prompt: responses of each side to each prompt.
        max_prompt_length: longest prompt, in tokens.
        batch_size: rows of a batch.
        seed: seeds the choice of prompts, the noise and self-BLEU.
        setting: configuration key of the length, for messages.
        **drawn: `num_prompts` and `over_long` of `encode_questions`.

    Raises:
        BadRecordError: for a file of safety prompts that cannot be read.
        ValueError: if all of its prompts of a kind are too long.
    """
    tokenizers: list[Any] = [sampling.tokenizer for sampling in samplings]
    lengths: dict[str, Any] = {"max_prompt_length": max_prompt_length, "batch_size": batch_size}
    drawn |= {"answers_per_prompt": answers_per_prompt, "seed": seed}
    batches, asked, unused = encode_questions(records, tokenizers, **lengths, **drawn)
    if not asked:
        return None
    dangers = [] if safety is None else safety.records()
    unsafe = encode_safety_prompts(dangers, tokenizers, **lengths, setting=setting)
    sides = [
        Side(*of_side, answers_per_prompt=answers_per_prompt)
        for of_side in zip(batches, samplings, unsafe, strict=True)
    ]
    scorer = reward_of(scorer)
    return HeldOutComparison(sides, seed, scorer, gold, safety, records=asked, unused=unused)


def encode_questions(
    records: Sequence[PromptRecord],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    *,
    max_prompt_length: int,
    batch_size: int,
    answers_per_prompt: int = 1,
    num_prompts: int | None = None,
    seed: int = 1,
    over_long: OverLong = "drop",
) -> tuple[list[list[PromptBatch]], list[PromptRecord], Counter[str]]:
    """Return the prompts in the tokens of each tokenizer.

    A prompt that is too long for one of the tokenizers is left out for all, so that row i is one
    prompt everywhere. Of several records with one prompt the first is asked: an interval takes
    prompts for independent. Rows are numbered by prompt and response.

    Args:
        records: records of the prompts.
        tokenizers: tokenizers of the sides.
        max_prompt_length: in tokens of each.
        batch_size: rows of a batch.
        answers_per_prompt: how often each prompt is repeated, in a row.
        num_prompts: size of a random part; None for all.
        seed: seeds the choice of prompts.
        over_long: what to do with longer prompts.

    Returns:
        Batches by tokenizer, the records that are asked, and reason -> records that are not.
    """
    encoders = [TextEncoder(tokenizer) for tokenizer in tokenizers]
    unused: Counter[str] = Counter()
    short: list[tuple[PromptRecord, list[EncodedPrompt]]] = []
    for record in records:
        report = EncodingReport()
        given: dict[str, Any] = {"max_length": max_prompt_length, "over_long": over_long}
        tried = [encode_prompt(record, encoder, **given, report=report) for encoder in encoders]
        rows = [row for row in tried if row is not None]
        if len(rows) < len(tried):
            unused[next(iter(report.dropped), BAD)] += 1
        else:
            short.append((record, rows))
    different = first_of_each(short, lambda one: question_key(one[0]))
    asked = validation_part(different, num_prompts, seed)
    unused.update({REPEATED: len(short) - len(different), NOT_DRAWN: len(different) - len(asked)})
    sides = [[rows[side] for _, rows in asked] for side in range(len(tokenizers))]
    give_same_columns(*sides)
    batches = []
    for rows, tokenizer in zip(sides, tokenizers, strict=True):
        repeated = [
            (row, position * answers_per_prompt + answer)
            for position, row in enumerate(rows)
            for answer in range(answers_per_prompt)
        ]
        collate = PromptCollator(int(tokenizer.pad_token_id))  # type: ignore[arg-type]
        starts = range(0, len(repeated), batch_size)
        batches.append([collate(repeated[start : start + batch_size]) for start in starts])
    return batches, [record for record, _ in asked], unused


def encode_safety_prompts(
    records: Sequence[PromptRecord],
    tokenizers: Sequence[PreTrainedTokenizerBase],
    *,
    max_prompt_length: int,
    batch_size: int,
    setting: str,
) -> list[list[PromptBatch]]:
    """Return the prompts of a safety file in the tokens of each tokenizer.

    Those that are too long are left out, and reported.

    Args:
        records: the prompts; their domain says which kind each is.
        tokenizers: tokenizers of the sides.
        max_prompt_length: in tokens of each.
        batch_size: rows of a batch.
        setting: configuration key of the length, for messages.

    Raises:
        ValueError: if none of a kind is left.
    """
    records = first_of_each(records, lambda one: one.domain + question_key(one))
    batches, asked, _ = encode_questions(
        records, tokenizers, max_prompt_length=max_prompt_length, batch_size=batch_size
    )
    left = Counter(record.domain for record in asked)
    for kind, count in Counter(record.domain for record in records).items():
        told = (
            f"safety.prompts: {count - left[kind]} of {count} {kind} prompts have more than "
            f"{setting}={max_prompt_length} tokens"
        )
        if not left[kind]:
            raise ValueError(f"{told}: raise {setting}, or give shorter prompts")
        if left[kind] < count:
            logger.warning("%s and are left out", told)
    return batches
