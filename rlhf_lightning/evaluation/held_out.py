"""Held-out prompts that two policies respond to: after a stage, during it, and in `evaluate`."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import FINISHED_BY_STOP, Generation, PromptBatch
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import EncodedPrompt, OverLong, encode_prompt, give_same_columns
from rlhf_lightning.data.records import PromptRecord, Text
from rlhf_lightning.data.sampler import validation_part
from rlhf_lightning.data.sources.base import RecordSource
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
from rlhf_lightning.evaluation.metrics import Judges, measure_sides
from rlhf_lightning.evaluation.safety import SafetyCheck
from rlhf_lightning.models.classifiers import max_positions
from rlhf_lightning.models.factory import frozen
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.lora import AdaptedPolicy, AdaptedScalarModel
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Scorer, make_responses, reward_of
from rlhf_lightning.rollout.teachers import Teacher
from rlhf_lightning.text.tokens import TextEncoder, prompt_and_responses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Questions:
    """The prompts for both sides.

    Args:
        batches: held-out prompts, each repeated `answers_per_prompt` times in a row.
        safety: prompts of a safety check's file; domains say which are harmful.
        answers_per_prompt: responses of each side to each prompt.
    """

    batches: Sequence[PromptBatch]
    safety: Sequence[PromptBatch] = ()
    answers_per_prompt: int = 1


@dataclass(frozen=True)
class SideResponses:
    """Responses of one side to the held-out prompts, and to those of a safety file, if any."""

    main: PolicyAnswers
    safety: PolicyAnswers | None = None


@dataclass(frozen=True)
class HeldOutComparison:
    """Samples two policies on the same prompts and compares them; ranks share the prompts.

    The two use different noise, each always the same: sampling a policy again gives the same
    responses.

    Args:
        questions: prompts of both sides.
        sampling: engine and decoding.
        judges: judges of which response is better.
        seed: seeds the sampling and self-BLEU.
        scorer: scores the responses of both; needed if `judges.scored`.
    """

    questions: Questions
    sampling: Sampling
    judges: Judges
    seed: int
    scorer: Scorer | None = None

    def ask_policy(
        self, policy: PolicyModel, reference: PolicyModel | None, teacher: Teacher | None = None
    ) -> SideResponses:
        """Return the responses of the policy, with their KL from the reference if there is one.

        With a teacher, their KL to it too.
        """
        return self._ask(policy, reference, 0, teacher)

    def ask_baseline(
        self,
        baseline: PolicyModel,
        questions: Questions | None = None,
        sampling: Sampling | None = None,
        teacher: Teacher | None = None,
    ) -> SideResponses:
        """Return the responses of the baseline.

        Args:
            baseline: policy to sample from.
            questions: the same prompts, in the tokens of its tokenizer.
            sampling: sampling with its tokenizer and stop ids.
            teacher: for the KL of its responses to it.
        """
        asked = {"questions": questions or self.questions, "sampling": sampling or self.sampling}
        return replace(self, **asked)._ask(baseline, None, 1, teacher)  # type: ignore[arg-type]

    def findings(
        self,
        policy: PolicyModel,
        baseline: PolicyModel,
        *,
        teacher: Teacher | None = None,
        num_samples: int | None = None,
    ) -> Findings:
        """Sample both policies and return metrics, samples and values.

        Args:
            policy: policy that is compared with `baseline`.
            baseline: the other policy; the KL is from it.
            teacher: a model that the policy has learnt from, for the KL of both to it.
            num_samples: prompts to keep with a response of each; None for all.
        """
        mine = self.ask_policy(policy, baseline, teacher)
        theirs = self.ask_baseline(baseline, teacher=teacher)
        count = len(mine.main.prompts) if num_samples is None else num_samples
        metrics = self.measure(mine, theirs)
        samples = side_by_side(mine.main, theirs.main, count)
        return Findings(metrics, samples, values_of(mine.main, theirs.main))

    def measure(self, mine: SideResponses, theirs: SideResponses) -> dict[str, float]:
        """Return all metrics of the policy against the baseline, as `val/*`."""
        metrics = measure_sides(mine.main, theirs.main, self.judges, seed=self.seed)
        safety = self.judges.safety
        if safety is not None and mine.safety is not None and theirs.safety is not None:
            metrics |= safety.compare(mine.safety, theirs.safety)
        return metrics

    def _ask(
        self, model: PolicyModel, reference: PolicyModel | None, side: int, teacher: Teacher | None
    ) -> SideResponses:
        noise = RowNoise(self.seed, "evaluation")

        def ask(batches: Sequence[PromptBatch], place: int, **others: Any) -> PolicyAnswers:
            given = {"noise": noise.at_iteration(place), **others}
            return shared_among_ranks(
                batches, lambda own: sample_batches(model, own, self.sampling, **given)
            )

        main = ask(
            self.questions.batches,
            side,
            reference=reference,
            scorer=self.scorer,
            teacher=teacher,
            answers_per_prompt=self.questions.answers_per_prompt,
        )
        unsafe = self.questions.safety
        return SideResponses(main, ask(unsafe, 2 + side) if unsafe else None)


def start_in_memory(module: object) -> PolicyModel | None:
    """Return the policy that a module started from, where it is in memory.

    It is the reference of the module, or the base that its adapter was trained on.
    """
    reference = getattr(module, "reference", None)
    if isinstance(reference, PolicyModel):
        return reference
    trained = getattr(module, "model", None) or getattr(module, "policy", None)
    if isinstance(trained, AdaptedPolicy | AdaptedScalarModel):
        return frozen(AdaptedPolicy(trained.base, None))
    return None


def trainer_of(module: object) -> Any:
    """Return the Trainer of a module's last fit, else the one that has it, else None."""
    return getattr(module, "fitted_by", None) or getattr(module, "_trainer", None)


def prompt_room(policy: PolicyModel, wanted: int, max_new_tokens: int) -> int:
    """Return the longest prompt, at most `wanted`, that leaves room for a response, in tokens.

    Raises:
        ValueError: if no prompt leaves room.
    """
    limit = max_positions(policy.model)
    if limit is not None and max_new_tokens >= limit:
        raise ValueError(
            f"max_new_tokens={max_new_tokens} leaves no room for a prompt in the {limit} positions "
            "of the policy"
        )
    return wanted if limit is None else min(wanted, limit - max_new_tokens)


def held_out_comparison(
    source: RecordSource,
    sampling: Sampling,
    *,
    scorer: Scorer | None,
    gold: GoldReward | None,
    safety: SafetyCheck | None,
    num_prompts: int,
    answers_per_prompt: int,
    max_prompt_length: int,
    batch_size: int,
    seed: int,
    over_long: OverLong = "drop",
    setting: str = "max_prompt_length",
) -> HeldOutComparison | None:
    """Return the comparison on the held-out prompts of a source; None if it has none.

    Args:
        source: source of records with prompts.
        sampling: sampling of both sides; its tokenizer is that of both.
        scorer: scores responses, or None.
        gold: scores texts, unseen by any stage; or None.
        safety: prompts that must be refused, and the detector of refusals; or None.
        num_prompts: largest number of prompts, a random part of those that are short enough.
        answers_per_prompt: responses of each side to each prompt.
        max_prompt_length: longest prompt, in tokens.
        batch_size: rows of a batch.
        seed: seeds the choice of prompts, the noise and self-BLEU.
        over_long: what to do with longer prompts.
        setting: configuration key of the length, for messages.

    Raises:
        BadRecordError: for a file of safety prompts that cannot be read.
        ValueError: if all of its prompts of a kind are too long.
    """
    tokenizer: Any = sampling.tokenizer
    scorer = reward_of(scorer)
    lengths: dict[str, Any] = {"max_prompt_length": max_prompt_length, "batch_size": batch_size}
    records: Any = source.records("prompts", "validation")
    (batches,), asked = encode_questions(
        records,
        [tokenizer],
        **lengths,
        answers_per_prompt=answers_per_prompt,
        num_prompts=num_prompts,
        seed=seed,
        over_long=over_long,
    )
    if not asked:
        return None
    dangers = [] if safety is None else safety.records()
    (unsafe,) = encode_safety_prompts(dangers, [tokenizer], **lengths, setting=setting)
    judges = Judges(gold, scored=scorer is not None, safety=safety)
    questions = Questions(batches, unsafe, answers_per_prompt)
    return HeldOutComparison(questions, sampling, judges, seed, scorer)


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
) -> tuple[list[list[PromptBatch]], list[int]]:
    """Return the prompts in the tokens of each tokenizer, and their indices.

    A prompt that is too long for one of the tokenizers is left out for all, so that row i is one
    prompt everywhere. Rows are numbered by prompt and response.

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
        Batches by tokenizer, and the indices of the chosen records.
    """
    encode = partial(encode_prompt, max_length=max_prompt_length, over_long=over_long)
    encoders = map(TextEncoder, tokenizers)
    encoded = [[encode(record, encoder) for record in records] for encoder in encoders]
    short = [i for i in range(len(records)) if all(rows[i] is not None for rows in encoded)]
    asked = validation_part(short, num_prompts, seed)
    batches = []
    sides: list[list[Any]] = [[rows[index] for index in asked] for rows in encoded]
    give_same_columns(*sides)
    for rows, tokenizer in zip(sides, tokenizers, strict=True):
        repeated: list[tuple[EncodedPrompt, int]] = [
            (row, position * answers_per_prompt + answer)
            for position, row in enumerate(rows)
            for answer in range(answers_per_prompt)
        ]
        collate = PromptCollator(int(tokenizer.pad_token_id))  # type: ignore[arg-type]
        starts = range(0, len(repeated), batch_size)
        batches.append([collate(repeated[start : start + batch_size]) for start in starts])
    return batches, asked


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
    batches, asked = encode_questions(
        records, tokenizers, max_prompt_length=max_prompt_length, batch_size=batch_size
    )
    left = Counter(records[index].domain for index in asked)
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


def written_responses(
    records: Sequence[PromptRecord],
    completions: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    batch_size: int,
    device: torch.device,
    scorer: Scorer | None,
) -> PolicyAnswers:
    """Return given texts, such as references, as responses of a policy, with their scores.

    Args:
        records: the prompts, none of them too long.
        completions: one a prompt, as the records write them.
        tokenizer: tokenizer of the policy, whose tokens the scorer reads.
        max_prompt_length: longest prompt, in tokens.
        batch_size: rows that are scored together.
        device: device of the scorer's models.
        scorer: scores them; without it 0.
    """
    pad = int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    rows: list[tuple[EncodedPrompt, list[int]]] = []
    encoder = TextEncoder(tokenizer)
    texts: list[str] = []
    plain = encoder.control.disarmed
    for record, completion in zip(records, completions, strict=True):
        said = completion
        if not record.rendered:  # texts may spell control tokens
            prompt, variables = plain(record.prompt), plain(dict(record.variables))
            record, said = replace(record, prompt=prompt, variables=variables), plain(said)
        row = encode_prompt(record, encoder, max_length=max_prompt_length)
        if row is not None:
            asked: dict[str, Any] = {"rendered": record.rendered, "variables": record.variables}
            (found,) = prompt_and_responses(record.prompt, [said], encoder, **asked)
            given = np.asarray(found.prompt or row.input_ids, dtype=np.int32)
            rows.append((replace(row, input_ids=given), found.response))
            texts.append(completion if isinstance(completion, str) else completion[-1]["content"])
    result = PolicyAnswers([], [], [], [], [], [], [])
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        prompts = PromptCollator(pad)([(row, start + i) for i, (row, _) in enumerate(part)])
        ids = [torch.tensor(tokens, dtype=torch.int64) for _, tokens in part]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        generation = Generation(
            sequences=torch.cat([prompts.input_ids, pad_sequence(ids, True, pad)], 1),
            response_mask=mask.bool(),  # [B, R]
            finish_reason=torch.full((len(part),), FINISHED_BY_STOP),
        )
        answers = make_responses(prompts.to(device), generation.to(device), tokenizer)
        # As written: a word that the tokenizer does not know is missing in what it decodes.
        written = tuple(texts[start : start + batch_size])
        result.extend(replace(answers, completions=written), scorer)
    return result
