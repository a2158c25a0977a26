"""Columns that rate the responses of rows: as good or bad, or by a number.

A column is known by its name and by the values of the whole set, so that a topic stays a topic.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from rlhf_lightning.data.cells import decoded
from rlhf_lightning.data.errors import BadRecordError, describe
from rlhf_lightning.data.files import batches, is_data_file
from rlhf_lightning.data.formats import KNOWN_KEYS, ParsedRow
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    Record,
    Text,
    UnpairedRecord,
    both_responses,
)
from rlhf_lightning.data.row_keys import words_of
from rlhf_lightning.text.forms import SYSTEM

logger = logging.getLogger(__name__)

_GOOD = (
    "true 1 yes y good up thumbs_up thumbsup like liked upvote positive desirable desired chosen "
    "accepted accept correct right pass passed win won helpful preferred 👍 +1"
)
_BAD = (
    "false 0 -1 no n bad down thumbs_down thumbsdown dislike disliked downvote negative "
    "undesirable undesired rejected reject incorrect wrong fail failed lose lost unhelpful "
    "dispreferred 👎"
)
_VERDICTS = dict.fromkeys(_GOOD.split(), True) | dict.fromkeys(_BAD.split(), False)
# Words of a column's name that rate the response, or may do so.
_RATING_NAMES = (
    "score scores rating ratings reward rewards grade stars vote votes upvotes quality helpfulness "
    "correctness feedback thumb thumbs verdict"
)
_OTHER_NAMES = "label labels kto like liked good desirable accepted preferred correct helpful"
_RATINGS = frozenset(_RATING_NAMES.split())
_NAMES = _RATINGS | frozenset(_OTHER_NAMES.split())
_TRUTH = frozenset(["true", "false", "1", "0", "yes", "no", "y", "n"])
# Words of a name -> whether its truth is good: thumbs_down, is_bad. There, n and no are numbers.
_POLES = {word: good for word, good in _VERDICTS.items() if word not in ("n", "no")}
_GOOD_NAMES = "upvoted harmless safe valid ok approved success successful"
_BAD_NAMES = "downvoted harmful denied flagged nsfw"
_POLES |= dict.fromkeys(_GOOD_NAMES.split(), True) | dict.fromkeys(_BAD_NAMES.split(), False)
_FAULTS = re.compile("(toxic|hallucinat|refus|delet|spam|offens|abus|violat|error|mistake)(?!less)")
_TIES = ("status", "winner", "preference", "label")
_NOT = ("un", "in", "im", "ir", "il", "de", "dis", "non", "non_", "not_")
_MOST_WORDS, _LONGEST_WORD = 12, 20  # of a column of grades, and not of remarks


class Label(NamedTuple):
    """A column that says which responses are good; `is_rating`: by a number.

    With `says_bad` true means bad, as in `thumbs_down`. `is_unclear`: the name does not say whether
    true is good.
    """

    column: str
    is_rating: bool = False
    says_bad: bool = False
    is_unclear: bool = False

    def verdict(self, row: ParsedRow) -> bool | None:
        """Return whether the response of a row is good, None where the column does not say."""
        found = verdict(row.columns.get(self.column))
        return found if found is None else found != self.says_bad


def verdict(value: Any) -> bool | None:
    """Return True for good, False for bad, None for what is neither."""
    return _VERDICTS.get(_word(_alone(value)))


def _alone(value: Any) -> Any:
    """Return the only value of a list, anything else as it is."""
    return value[0] if isinstance(value, list | tuple) and len(value) == 1 else value


def _word(value: Any) -> str:
    """Return a value as a word: 1.0 as 1, "Thumbs up" as thumbs_up, emoji without a skin tone."""
    word = re.sub(
        "[\N{EMOJI MODIFIER FITZPATRICK TYPE-1-2}-\N{EMOJI MODIFIER FITZPATRICK TYPE-6}\ufe0f]",
        "",
        str(value),
    )
    return re.sub(r"\.0+$", "", re.sub(r"[\s-]+(?=\D)", "_", word.strip().lower()))


def find_label(
    rows: Sequence[ParsedRow],
    columns: Mapping[str, str | None],
    features: Mapping[str, Any] = MappingProxyType({}),
) -> Label | None:
    """Return the column that says which responses of a set are good, if one does.

    A column that may say so is named in a warning, and so is one that rates the only response to
    each prompt, which may have been chosen by it.

    Args:
        rows: rows of the whole set.
        columns: ours -> theirs; `label` names the column, or with None says that there is none.
        features: types of the columns by `datasets`, for rows that do not come from files.

    Raises:
        BadRecordError: if the column's numbers have names (`ClassLabel`) other than those of truth.
    """
    label = _find(rows, columns)
    if label is not None and not label.is_rating:
        _check_classes(label.column, rows, features)
    if label is not None and label.says_bad:
        logger.warning(
            "the column %r says by its name that true is bad, and is read so: if true is good, "
            "give the column another name",
            label.column,
        )
    elif label is not None and label.is_unclear:
        logger.warning(
            "the column %r is read with true as good: if true is bad, write a column label with "
            "its values turned round",
            label.column,
        )
    return label


def _check_classes(column: str, rows: Sequence[ParsedRow], features: Mapping[str, Any]) -> None:
    named = [getattr(features.get(column), "names", ())]
    for path in {row.where.source for row in rows if row.where.unit == "row"}:
        if is_data_file(Path(path)):
            written = (next(batches(Path(path))).schema.metadata or {}).get(b"huggingface", "{}")
            types = json.loads(written).get("info", {}).get("features", {})
            named.append(types.get(column, {}).get("names", ()))
    truths: tuple[list[str], ...] = ([], ["0", "1"], ["false", "true"])
    names = next((n for n in named if [str(name).lower() for name in n] not in truths), None)
    if names is None:
        return
    listed = " and ".join(f"{i} for {name!r}" for i, name in enumerate(names[:4]))
    raise BadRecordError(
        rows[0].where,
        f"the label {column!r} holds {listed} by its names (ClassLabel), and not 1 for good",
        f"write Dataset.from_list([row | {{{column!r}: row[{column!r}] == N}} for row in dataset]) "
        "with N for good, or learn all rows alike with columns={label: null}",
    )


def _find(rows: Sequence[ParsedRow], columns: Mapping[str, str | None]) -> Label | None:
    if "label" in columns:
        mapped = columns["label"]
        if mapped is None:
            return None
        words = {_word(_alone(row.columns.get(mapped))) for row in rows if mapped in row.columns}
        own = words_of(mapped)
        silent = not _NAMES.intersection(own) and all(_pole(word) is None for word in own)
        is_unclear = silent and words & _VERDICTS.keys() <= _TRUTH
        return Label(mapped, says_bad=_says_bad(mapped, words), is_unclear=is_unclear)
    texts = {theirs for ours, theirs in columns.items() if ours in KNOWN_KEYS}
    values: dict[str, set[str]] = {}
    prompts: set[str] = set()
    for row in rows:
        if isinstance(row.record, DemonstrationRecord):
            prompts.add(row.split_key)
            for name, value in row.columns.items():
                if name == "label" or name not in {*KNOWN_KEYS, *texts}:
                    values.setdefault(name, set()).add(str(_alone(value))[:40])
    if all(verdict(row.columns.get("label")) for row in rows):
        return Label("label")
    rated = 10 * len(prompts) <= 9 * len(rows)  # not by a few prompts that are there twice
    named = sorted(values.items(), key=lambda item: item[0] != "label")
    found = [_label_of(name, seen, rated=rated) for name, seen in named]
    return next((label for label in found if label is not None), None)


def _label_of(name: str, values: set[str], *, rated: bool) -> Label | None:
    words = set(map(_word, values))
    verdicts = {_VERDICTS.get(word) for word in words}
    named = set(words_of(name))
    numeric = all(re.fullmatch(r"[+-]?\d+(\.\d+)?(e-?\d+)?", word) for word in words)
    graded = len(words) <= _MOST_WORDS and all(len(word) <= _LONGEST_WORD for word in words)
    both = graded and not numeric and {True, False} <= verdicts
    if named & _NAMES and False in verdicts and (None not in verdicts or both):
        return Label(name, says_bad=_says_bad(name, words))
    is_rating = len(words) > 1 and (numeric or graded) and bool(named & _RATINGS)
    if is_rating and rated:
        return Label(name, is_rating=True)
    opposites = graded and any(prefix + word in words for word in words for prefix in _NOT)
    half = graded and bool(named & _NAMES) and (numeric or len(verdicts) > 1)
    if len(words) > 1 and (is_rating or verdicts == {True, False} or opposites or half):
        way = f"set columns={{label: {name}}}"
        logger.warning(
            "the column %r (%s) is not read: if it says which responses are %s, %s",
            name,
            ", ".join(sorted(values)[:4]),
            "bad" if _says_bad(name, words) else "good",
            "write it as a column label of true and false" if None in verdicts else way,
        )
    return None


def _says_bad(name: str, words: set[str]) -> bool:
    """Return True if all poles in a name are bad: not_helpful, but not thumbs_up_or_down."""
    named = ["", *words_of(name), ""]
    poles = [
        pole != (before in ("not", "non") or (not pole and (before == "no" or behind == "free")))
        for before, word, behind in zip(named, named[1:], named[2:], strict=False)
        if (pole := _pole(word)) is not None
    ]
    return words & _VERDICTS.keys() <= _TRUTH and bool(poles) and not any(poles)


def _pole(word: str) -> bool | None:
    """Return whether the truth of a word in a name is good; None where the word does not say."""
    if word in _POLES:
        return _POLES[word]
    for prefix in _NOT:
        rest = word.removeprefix(prefix)
        if rest != word and len(rest) > 3 and (pole := _pole(rest)) is not None:
            return not pole
    return False if _FAULTS.match(word) else None


def unread(row: ParsedRow, label: Label | None) -> tuple[str, ...]:
    """Return the columns of a row that neither its record nor the label of its set has."""
    read = None if label is None or label.is_rating else label.column
    return tuple(key for key in row.unread if key != read)


def check_demonstration(row: ParsedRow, label: Label | None) -> None:
    """Check that a row may be imitated.

    Raises:
        BadRecordError: if its label says that its response is bad, or the set has ratings.
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
    value, good = row.columns.get(label.column), label.verdict(row)
    if not good:
        said = "neither good nor bad" if good is None else "bad"
        raise BadRecordError(
            row.where,
            f"the label {label.column!r} holds {describe(value)}: the response is labelled {said}",
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
        return list(both_responses(record))
    if label is None or label.is_rating or not isinstance(record, DemonstrationRecord):
        raise BadRecordError(
            row.where,
            f"the row has no label of true and false (other columns: {', '.join(row.columns)})",
            "give prompt, completion and label, or map another name with columns={label: theirs}",
        )
    value = label.verdict(row)
    if value is None:
        found = f"the label {label.column!r} holds {describe(row.columns.get(label.column))}"
        raise BadRecordError(row.where, found, "write true or false, or leave the row out")
    parts = (record.prompt, record.completion, record.domain, record.rendered)
    return [UnpairedRecord(*parts, value, variables=record.variables)]


def warn_of_odd_texts(rows: Sequence[ParsedRow], name: str) -> None:
    """Warn of mistakes that all rows share, and of pairs that their scores contradict.

    All responses begin with their prompt, all texts of a key are prints of texts, or no pair has a
    prompt.
    """
    for key in ("prompt", "completion", "chosen", "rejected") if rows else ():
        texts = (_last_text(getattr(row.record, key, "")) for row in rows)
        if all(_is_print(text, key) for text in texts):
            logger.warning(
                "%s: all texts of %s are JSON or a print of a text, of bytes or of a list of "
                "texts, and their quotes are read too: write the texts themselves, or messages",
                name,
                key,
            )
    if len(rows) > 1 and all(map(_repeats_prompt, rows)):
        logger.warning(
            "%s: all %d responses begin with their prompt, which the model then reads twice: take "
            "it out of the responses",
            name,
            len(rows),
        )

    if others := _columns_of_no_prompt(rows):
        logger.warning(
            "%s: no pair has a prompt, as both sides begin with other words, and %s is not read: "
            "map the prompt's column with columns={prompt: NAME}",
            name,
            " or ".join(map(repr, others)),
        )
    if doubtful := [row.where for row in rows if _is_doubtful(row)]:
        logger.warning(
            "%s: in %d of %d pairs the chosen side is not scored above the rejected one (the "
            "first: %s), and they are learnt as they stand: take out ties and turn swapped ones",
            name,
            len(doubtful),
            len(rows),
            doubtful[0],
        )


def _columns_of_no_prompt(rows: Sequence[ParsedRow]) -> list[str]:
    """Return the columns of texts or messages that no pair of a set without prompts has read."""
    if any(not isinstance(r.record, PreferenceRecord) or r.record.prompt for r in rows):
        return []
    unread = ((key, row.columns[key]) for row in rows for key in row.unread)
    return sorted({key for key, x in unread if isinstance(x, list) or " " in str(x)})


def _is_doubtful(row: ParsedRow) -> bool:
    """Return True for a pair whose columns call it a tie, or score the rejected side as high."""
    if not isinstance(row.record, PreferenceRecord):
        return False
    scores = ([row.columns[key] for key in both] for both in _scores_of_both(row.unread))
    return any(row.columns.get(key) == "tie" for key in _TIES) or any(
        _number(chosen) <= _number(rejected) for chosen, rejected in scores
    )


def _number(value: Any) -> float:
    """Return a score, which CSV gives as text; NaN for what is none."""
    try:
        return float(value) if isinstance(value, int | float | str) else math.nan
    except (ValueError, OverflowError):
        return math.nan


@cache
def _scores_of_both(columns: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the columns that score the chosen side, each with that of the rejected one."""
    both = [(key, key.replace("chosen", "rejected")) for key in columns if "chosen" in key]
    return [x for x in both if x[1] in columns and not _RATINGS.isdisjoint(re.split("[-_ ]", x[0]))]


def _is_print(text: str, key: str) -> bool:
    """Return True for JSON or a print of a text or a list of texts.

    A list of several texts in JSON may be what a response has to be.
    """
    if not text.startswith(("[", '"', "'", "b'", 'b"')):
        return False
    found = decoded(text)
    texts = found if isinstance(found, list) else [found]
    if key != "prompt" and len(texts) > 1 and json.dumps(found, ensure_ascii=False) == text:
        return False
    return bool(texts) and all(isinstance(text, str | bytes) for text in texts)


def _repeats_prompt(row: ParsedRow) -> bool:
    record = row.record
    if isinstance(record, PreferenceRecord):
        answers: tuple[Text, ...] = (record.chosen, record.rejected)
    elif isinstance(record, DemonstrationRecord):
        answers = (record.completion,)
    else:
        return False
    asked = record.prompt
    if not isinstance(asked, str):  # of several turns an answer may quote the last one
        asked = tuple(message for message in asked if message["role"] not in SYSTEM)
    prompt = _last_text(asked) if isinstance(asked, str) or len(asked) == 1 else ""
    return bool(prompt) and any(_last_text(answer).startswith(prompt) for answer in answers)


def _last_text(text: Text) -> str:
    """Return a text, or what the last message says; "" for the result of a tool, often JSON."""
    if not isinstance(text, str):
        text = text[-1]["content"] if text and text[-1]["role"] != "tool" else ""
    return " ".join(text.split()) if isinstance(text, str) else ""
