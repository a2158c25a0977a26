"""A benchmark of `rlhf-evaluate`: a reward model on pairs, or policy and baseline on tasks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.app.command_line import say
from rlhf_lightning.app.config.commands import EvaluateSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.evaluate_parts import load_side
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.data.first_screen import UNLIMITED
from rlhf_lightning.data.records import PromptRecord
from rlhf_lightning.evaluation.benchmarks import Candidates, RewardBenchmark, Scored, offsets
from rlhf_lightning.evaluation.held_out import written_responses
from rlhf_lightning.evaluation.lm_eval_tasks import LmEvalBenchmark
from rlhf_lightning.models.precision import in_precision
from rlhf_lightning.text.tokenizers import load_tokenizer


def measured_benchmark(settings: EvaluateSettings) -> dict[str, float]:
    """Return `benchmark/...`.

    Args:
        settings: settings of the command, with a benchmark.

    Raises:
        ConfigError: if files, tasks or scorer do not fit.
    """
    assert settings.benchmark is not None
    try:
        benchmark = settings.benchmark.build()
        if isinstance(benchmark, LmEvalBenchmark):
            sides = [load_side(settings, one) for one in (settings.policy, settings.baseline)]
            with in_precision(settings.trainer.precision, sides[0].model.device):
                return benchmark.measure(*sides)
        return benchmark.measure(_scored(settings, benchmark))
    except (BadRecordError, OSError, ValueError, TypeError, ImportError) as error:
        raise ConfigError(str(error)) from error


def _scored(settings: EvaluateSettings, benchmark: RewardBenchmark) -> list[Scored]:
    """Return the scorer's scores of all responses."""
    target = settings.scorer
    if target is None:
        raise ConfigError(
            "benchmark: there is nothing to measure: name a reward model, scorer=NAME"
        )
    members = target.get("sources")
    source = members[0] if members else target.get("source") or settings.policy
    if members:  # to be compared with the others
        target = settings.updated({"scorer.policy": source}).scorer or target
    tokenizer = load_tokenizer(source, **settings.model.template)
    candidates = benchmark.candidates(chat=bool(tokenizer.chat_template))
    if not candidates:
        raise ConfigError("benchmark: the file holds no rows")
    scorer = target.build()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for model in scorer.build():
        model.to(device)
    records = _records(candidates)
    with in_precision(settings.trainer.precision, device):
        answers = written_responses(
            records,
            [answer for one in candidates for answer in one.answers],
            tokenizer,
            max_prompt_length=settings.prompts.max_length or UNLIMITED,
            batch_size=settings.evaluation.batch_size,
            device=device,
            scorer=scorer,
        )
    if len(answers.scores) < len(records):
        raise ConfigError(
            f"benchmark: {len(records) - len(answers.scores)} of {len(records)} responses have a "
            f"prompt of more than prompts.max_length={settings.prompts.max_length} tokens, or of "
            "none: raise it. None is left out, or the figure would be of another set"
        )
    _warn_of_unknown_words(tokenizer, answers.token_ids)
    lengths = answers.lengths
    return [
        Scored(one, answers.scores[begin:end], lengths[begin:end])
        for one, (begin, end) in zip(candidates, offsets(candidates), strict=True)
    ]


def _records(candidates: Sequence[Candidates]) -> list[PromptRecord]:
    """Return the prompt of each response."""
    return [
        PromptRecord(
            one.prompt,
            domain="" if one.record is None else one.record.domain,
            rendered=one.record is not None and one.record.rendered,
            variables={} if one.record is None else one.record.variables,
        )
        for one in candidates
        for _ in one.answers
    ]


def _warn_of_unknown_words(
    tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[Sequence[int]]
) -> None:
    """Log how many responses have words that the tokenizer does not know."""
    unknown = tokenizer.unk_token_id
    rows = 0 if unknown is None else sum(unknown in ids[:-1] for ids in token_ids)
    if rows:
        say(f"{rows} of {len(token_ids)} responses have words that the tokenizer does not know.")
