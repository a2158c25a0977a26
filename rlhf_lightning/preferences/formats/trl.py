"""TRL's preference format: `prompt chosen rejected`, plain or as chat messages.

Our further keys, which TRL ignores: `domain`, `margin`; of single labels `annotator`, `kind`,
`seconds`, `reason`. Source: https://huggingface.co/docs/trl/dataset_formats.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_lightning.data.errors import BadRecordError, Location, SkippedRecords
from rlhf_lightning.data.files import Row
from rlhf_lightning.data.formats import ParsedRow, parse_rows
from rlhf_lightning.data.records import PreferenceRecord, Text
from rlhf_lightning.preferences.records import Choice, Label, LabError, Pair, pair_name

if TYPE_CHECKING:
    from rlhf_lightning.preferences.aggregate import Verdict

OURS = ("annotator", "kind", "seconds", "reason", "created")


def read(
    rows: Iterable[tuple[Location, Row]], *, source: str, now: str
) -> tuple[list[Pair], list[Label]]:
    """Return a pair and a label for every row.

    The answers stand in an order that does not tell which was chosen.

    Args:
        rows: of the file.
        source: name of the annotator where a row names none.
        now: time of labels that have none.

    Raises:
        BadRecordError: for a row that is no preference.
    """
    located = list(rows)
    extras = {str(where): {key: row[key] for key in OURS if key in row} for where, row in located}
    pairs, labels = [], []
    for parsed in parse_rows(located, columns=None, skipped=SkippedRecords("raise")):
        values: dict[str, Any] = {"annotator": source, "kind": "person", "created": now}
        try:
            pair, choice = _pair(parsed)
            label = Label(
                pair.pair_id,
                choice=choice,
                order="first",
                margin=_record(parsed).margin,
                **(values | extras[str(parsed.where)]),
            )
        except LabError as error:
            fix = "mend the row, or leave it out"
            raise BadRecordError(parsed.where, str(error), fix) from error
        pairs.append(pair)
        labels.append(label)
    return pairs, labels


def write_labels(
    pair: Pair, labels: Sequence[Label], left_out: Counter[str]
) -> list[dict[str, Any]]:
    """Return a row for every label that prefers an answer.

    Args:
        pair: the pair.
        labels: of it.
        left_out: counts those that prefer none.
    """
    rows = []
    for label in labels:
        if label.choice not in ("first", "second"):
            left_out[label.choice.replace("_", " ")] += 1
            continue
        first = label.choice == "first"
        answers = (pair.first, pair.second) if first else (pair.second, pair.first)
        plain = isinstance(pair.prompt, str)
        chosen, rejected = (
            text if plain else [{"role": "assistant", "content": text}] for text in answers
        )
        row = {"prompt": pair.prompt, "chosen": chosen, "rejected": rejected, "domain": pair.domain}
        extra = {key: getattr(label, key) for key in (*OURS, "margin")}
        rows.append(row | {key: value for key, value in extra.items() if value is not None})
    return rows


def write_verdict(verdict: Verdict, left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the row of a verdict that prefers an answer, none of others.

    Args:
        verdict: of a pair.
        left_out: counts what prefers none, by reason.
    """
    from rlhf_lightning.preferences.aggregate import preference_row

    if verdict.left_out is not None:
        left_out[verdict.left_out] += 1
        return []
    return [preference_row(verdict)]


def _pair(parsed: ParsedRow) -> tuple[Pair, Choice]:
    record = _record(parsed)
    chosen = _one_answer(record.chosen, "chosen", parsed.where)
    rejected = _one_answer(record.rejected, "rejected", parsed.where)
    names = pair_name(record.prompt, chosen, rejected), pair_name(record.prompt, rejected, chosen)
    if names[0] < names[1]:  # a hash knows nothing of which is better
        return Pair.make(record.prompt, chosen, rejected, domain=record.domain), "first"
    return Pair.make(record.prompt, rejected, chosen, domain=record.domain), "second"


def _record(parsed: ParsedRow) -> PreferenceRecord:
    if not isinstance(parsed.record, PreferenceRecord):
        found = "the row has no 'chosen' and 'rejected'"
        raise BadRecordError(parsed.where, found, "give pairs, or another annotate.format")
    return parsed.record


def _one_answer(text: Text, key: str, where: Location) -> str:
    if isinstance(text, str):
        return text
    if len(text) != 1:
        found = f"{key!r} has {len(text)} messages, expected one answer"
        raise BadRecordError(where, found, "put all turns but the last one into 'prompt'")
    return text[0]["content"]
