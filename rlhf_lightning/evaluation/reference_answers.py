"""Demonstrated responses of the data, as a third side of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rlhf_lightning.data.records import DemonstrationRecord, PromptRecord, Split, Text, text_key
from rlhf_lightning.data.sources.base import RecordSource
from rlhf_lightning.evaluation.generate import PolicyAnswers, gold_scores
from rlhf_lightning.evaluation.held_out import HeldOutComparison, written_responses
from rlhf_lightning.evaluation.metrics import rows_of, wins
from rlhf_lightning.preferences.candidates import LoadedPolicy


def find_references(
    source: RecordSource, records: Sequence[PromptRecord], split: Split
) -> dict[int, Text]:
    """Return the demonstrated responses to prompts, by the number of the prompt.

    Of several to one prompt the first; a source without demonstrations has none.
    """
    try:
        demonstrations = source.records("demonstrations", split)
    except ValueError:  # such as a file of preferences
        return {}
    said: dict[str, Text] = {}
    for record in demonstrations:
        if isinstance(record, DemonstrationRecord):
            said.setdefault(text_key(record.prompt), record.completion)
    keys = [text_key(record.prompt) for record in records]
    return {number: said[key] for number, key in enumerate(keys) if key in said}


def against_references(
    comparison: HeldOutComparison,
    policy: LoadedPolicy,
    records: Sequence[PromptRecord],
    references: Mapping[int, Text],
    sides: Mapping[str, PolicyAnswers],
    *,
    max_prompt_length: int,
    batch_size: int,
) -> dict[str, float]:
    """Return `val/<side><judge>_reference_win_rate` with its interval, for gold and score.

    Every response of a side meets the one reference. References count as finished.

    Args:
        comparison: comparison with judges and scorer.
        policy: policy whose tokens the scorer reads.
        records: records of the prompts.
        references: result of `find_references`.
        sides: prefix of the names -> responses to all of `records`.
        max_prompt_length: longest prompt, in tokens.
        batch_size: rows that are scored together.
    """
    numbers = sorted(references)
    written = written_responses(
        [records[number] for number in numbers],
        [references[number] for number in numbers],
        policy.tokenizer,
        max_prompt_length=max_prompt_length,
        batch_size=batch_size,
        device=policy.model.device,
        scorer=comparison.scorer,
    )
    gold = comparison.judges.gold
    found = {"val/num_references": float(len(numbers))}
    for side, answers in sides.items():
        several = answers.answers_per_prompt
        rows = [number * several + answer for number in numbers for answer in range(several)]
        part = rows_of(answers, rows)
        part.answers_per_prompt = several
        if comparison.scorer is not None:
            name = f"{side}score_reference"
            found |= wins(name, part, written, part.scores, written.scores)
        if gold is not None:
            scores = gold_scores(gold, part), gold_scores(gold, written)
            found |= wins(f"{side}gold_reference", part, written, *scores)
    return found
