"""What the other columns of rows say of their answers: good or bad, a rating, or nothing.

A column is known by its name and by the values of the whole set, so that a topic stays a topic.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rlhf_lightning.data.errors import BadRecordError, describe
from rlhf_lightning.data.formats import KNOWN_KEYS, ParsedRow
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    Record,
    Text,
    UnpairedRecord,
    both_answers,
)

logger = logging.getLogger(__name__)

_GOOD = (
    "true 1 yes y good up thumbs_up thumbsup like liked upvote positive desirable desired chosen "
    "accepted accept correct right pass passed helpful preferred 👍 +1"
)
_BAD = (
    "false 0 -1 no n bad down thumbs_down thumbsdown dislike disliked downvote negative "
    "undesirable undesired rejected reject incorrect wrong fail failed unhelpful dispreferred 👎"
)
_VERDICTS = dict.fromkeys(_GOOD.split(), True) | dict.fromkeys(_BAD.split(), False)
# Words of a column's name that speak of the answer: by a number, or otherwise.
_RATING_NAMES = (
    "score scores rating ratings reward rewards grade stars votes upvotes quality helpfulness "
    "correctness"
)
_OTHER_NAMES = (
    "label labels thumb thumbs vote feedback kto like liked good desirable accepted preferred "
    "correct helpful verdict"
)
_RATINGS = frozenset(_RATING_NAMES.split())
_NAMES = _RATINGS | frozenset(_OTHER_NAMES.split())


class Label(NamedTuple):
    """A column that says which answers are good; `is_rating`: by a number."""

    column: str
    is_rating: bool = False


def verdict(value: Any) -> bool | None:
    """Return True for good, False for bad, None for what is neither."""
    word = re.sub(r"[\s-]+(?=\D)", "_", str(value).strip().lower())
    return _VERDICTS.get(re.sub(r"\.0+$", "", word))


def find_label(rows: Sequence[ParsedRow], columns: Mapping[str, str | None]) -> Label | None:
    """Return the column that says which answers of a set are good, if one does.

    A column of another name that is true in some rows and false in others is named in a warning.

    Args:
        rows: the whole set.
        columns: ours -> theirs; `label` names the column, or with None says that there is none.
    """
    if "label" in columns:
        mapped = columns["label"]
        return None if mapped is None else Label(mapped)
    texts = {theirs for ours, theirs in columns.items() if ours in KNOWN_KEYS}
    values: dict[str, set[str]] = {}
    for row in rows:
        if isinstance(row.record, DemonstrationRecord):
            for name, value in row.columns.items():
                if name == "label" or name not in {*KNOWN_KEYS, *texts}:
                    values.setdefault(name, set()).add(str(value)[:40])
    found = [_label_of(name, seen) for name, seen in sorted(values.items(), key=_label_first)]
    return next((label for label in found if label is not None), None)


def _label_first(item: tuple[str, Any]) -> bool:
    return item[0] != "label"


def _label_of(name: str, values: set[str]) -> Label | None:
    verdicts = {verdict(value) for value in values}
    named = set(re.findall(r"[a-z]+", re.sub(r"(?<=[a-z])(?=[A-Z])", "_", name).lower()))
    if None not in verdicts and False in verdicts and named & _NAMES:
        return Label(name)
    numeric = all(re.fullmatch(r"[+-]?\d+(\.\d+)?(e-?\d+)?", value.strip()) for value in values)
    if numeric and len(values) > 1 and named & _RATINGS:
        return Label(name, is_rating=True)
    if verdicts == {True, False} or (numeric and len(values) > 1 and "label" in named):
        logger.warning(
            "the column %r (%s) is not read: if it says which responses are good, set "
            "columns={label: %s}",
            name,
            ", ".join(sorted(values)[:4]),
            name,
        )
    return None


def check_demonstration(row: ParsedRow, label: Label | None) -> None:
    """Check that a row may be imitated.

    Raises:
        BadRecordError: if its label says that its answer is bad, or the set has ratings.
    """
    if label is None or not isinstance(row.record, DemonstrationRecord):
        return
    every = "learn all rows alike with columns={label: null}"
    if label.is_rating:
        raise BadRecordError(
            row.where,
            f"the column {label.column!r} rates the responses, and all would be learnt alike",
            f"keep the good rows in a file of their own, write a column label of true and false "
            f"for +experiment=kto, or {every}",
        )
    value = row.columns.get(label.column)
    if not verdict(value):
        raise BadRecordError(
            row.where,
            f"the label {label.column!r} holds {describe(value)}: a response to learn is labelled "
            "good",
            "leave such rows out with dataset.source.on_bad_record=skip, learn from both labels "
            f"with +experiment=kto, or {every}",
        )


def unpaired(row: ParsedRow, label: Label | None) -> list[Record]:
    """Return a labelled row as an unpaired record, a pair as two.

    Raises:
        BadRecordError: if the row has no label of true or false.
    """
    record = row.record
    if isinstance(record, PreferenceRecord):
        return list(both_answers(record))
    if label is None or label.is_rating or not isinstance(record, DemonstrationRecord):
        raise BadRecordError(
            row.where,
            f"the row has no label of true and false (other columns: {', '.join(row.columns)})",
            "give prompt, completion and label, or map another name with columns={label: theirs}",
        )
    value = verdict(row.columns.get(label.column))
    if value is None:
        found = f"the label {label.column!r} holds {describe(row.columns.get(label.column))}"
        raise BadRecordError(row.where, found, "write true or false, or leave the row out")
    parts = (record.prompt, record.completion, record.domain, record.rendered)
    return [UnpairedRecord(*parts, value)]


def warn_of_repeated_prompts(rows: Sequence[ParsedRow], name: str) -> None:
    """Warn where the answers of all rows begin with their prompt, which would be there twice."""
    if len(rows) > 1 and all(map(_repeats_prompt, rows)):
        logger.warning(
            "%s: all %d responses begin with their prompt, which the model then reads twice: take "
            "it out of the responses",
            name,
            len(rows),
        )


def _repeats_prompt(row: ParsedRow) -> bool:
    record = row.record
    if isinstance(record, PreferenceRecord):
        answers: tuple[Text, ...] = (record.chosen, record.rejected)
    elif isinstance(record, DemonstrationRecord):
        answers = (record.completion,)
    else:
        return False
    prompt = _last_text(record.prompt)
    return bool(prompt) and all(_last_text(answer).startswith(prompt) for answer in answers)


def _last_text(text: Text) -> str:
    last = text if isinstance(text, str) else text[-1]["content"] if text else ""
    return " ".join(last.split()) if isinstance(last, str) else ""
