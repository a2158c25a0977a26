"""Pairs and labels as TRL and Label Studio write them.

* TRL: rows `prompt chosen rejected`, plain or as chat messages, with keys of ours that it ignores:
  `domain`, `margin`; of single labels `annotator`, `kind`, `seconds`, `reason`, `created`.
  Source: https://huggingface.co/docs/trl/dataset_formats.
* Label Studio: tasks with annotations of a `Pairwise` tag, as its JSON export has them. It refuses
  a `completed_by` that is not one of its accounts, so our annotators are in `rlhf`, with all else
  that it has no key for. docs/annotate.md has the labelling configuration. Source:
  https://labelstud.io/guide/task_format, and `data_import` in HumanSignal/label-studio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Literal

from rlhf_lightning.data.conversations import CALLS, as_columns, messages_in, parse_text
from rlhf_lightning.data.errors import BadRecordError, Location, SkippedRecords, describe
from rlhf_lightning.data.files import Row
from rlhf_lightning.data.formats import RowParser, parse_rows
from rlhf_lightning.data.public_formats import PROMPTS
from rlhf_lightning.data.records import PreferenceRecord, Text
from rlhf_lightning.preferences.records import (
    CHOICES,
    SIDES,
    Choice,
    Label,
    Pair,
    completion_of,
    pair_name,
    readable,
    to_row,
    variables_of,
)
from rlhf_lightning.text.forms import THOUGHT
from rlhf_lightning.text.messages import as_text
from rlhf_lightning.text.thoughts import shown

if TYPE_CHECKING:
    from rlhf_lightning.preferences.aggregate import Verdict

Tool = Literal["trl", "label_studio"]
Located = Iterable[tuple[Location, Row]]
AGENT = "verdict"  # the author of a verdict, where a tool asks for a name
TRL_KEYS = ("annotator", "kind", "seconds", "reason", "created")
LABEL_STUDIO_KEYS = ("annotator", "kind", "order", "margin")
PAIR = "pair"  # key in Label Studio's `meta` of the fields of `Pair`
ANSWERS = (
    ("first", "second"),
    ("answer1", "answer2"),
    ("response1", "response2"),
    ("text1", "text2"),
)


def read_tool(
    tool: Tool, rows: Located, *, source: str, now: str
) -> tuple[list[Pair], list[Label]]:
    """Return the pairs and labels of a tool's rows; a model's label has the kind `judge`.

    Args:
        tool: tool that wrote them.
        rows: rows with their locations.
        source: name of the file, for labels without an author.
        now: time of labels that have none.

    Raises:
        BadRecordError: for a row without a prompt and two responses, or with an unknown label.
    """
    if tool == "trl":
        return _read_trl(rows, source, now)
    pairs: list[Pair] = []
    labels: list[Label] = []
    for where, row in rows:
        data = row.get("data")
        if not isinstance(data, Mapping):
            found = f"'data' is {describe(data)}, expected an object"
            raise BadRecordError(where, found, "export as JSON, not as JSON-MIN or CSV")
        prompt, first, second, names = find_texts(data, where)
        with naming_the_place(where):
            pair = Pair.make(prompt, first, second, domain=str(data.get("domain") or ""))
            pair = replace(pair, **(row.get("meta") or {}).get(PAIR, {}))
            labels += _of_label_studio(row, pair, names, where, source, now)
        pairs.append(pair)
    return pairs, labels


def write_labels(
    tool: Tool, pair: Pair, labels: Sequence[Label], left_out: Counter[str]
) -> list[dict[str, Any]]:
    """Return the rows of a pair with all its labels; TRL gets a row for each that prefers a side.

    Args:
        tool: tool that will read them.
        pair: pair of the labels.
        labels: all labels of the pair.
        left_out: counts those that the tool has no word for.
    """
    if tool != "trl":
        return [_label_studio(pair, labels)]
    rows = []
    for label in labels:
        if label.choice not in SIDES:
            left_out[label.choice.replace("_", " ")] += 1
            continue
        answers = [completion_of(pair.prompt, text) for text in (pair.first, pair.second)]
        chosen, rejected = answers if label.choice == "first" else answers[::-1]
        row = {"prompt": pair.prompt, "chosen": chosen, "rejected": rejected, "domain": pair.domain}
        extra = {key: getattr(label, key) for key in (*TRL_KEYS, "margin")}
        row |= variables_of(pair)
        rows.append(row | {key: value for key, value in extra.items() if value is not None})
    return rows


def write_verdict(tool: Tool, verdict: Verdict, left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the row of a verdict: for TRL a preference or none, else a prediction.

    Args:
        tool: tool that will read it.
        verdict: verdict on a pair.
        left_out: counts verdicts that the tool has no word for, by reason.
    """
    from rlhf_lightning.preferences.aggregate import TIE, preference_row

    choice: Choice | None = verdict.choice
    if verdict.left_out == TIE and tool != "trl":
        choice = "tie"
    if choice is None:
        left_out[str(verdict.left_out)] += 1
    if tool == "trl":
        return [preference_row(verdict)] if choice else []
    said = None
    if choice is not None:
        said = choice, round(verdict.votes[choice] / sum(verdict.votes.values()), 6)
    return [_label_studio(verdict.pair, said=said)]


def find_texts(values: Mapping[str, Any], where: Location) -> tuple[Any, str, str, tuple[str, str]]:
    """Return prompt, both responses, and their names in the tool.

    Raises:
        BadRecordError: if one is missing or is no text.
    """
    prompt = next((key for key in PROMPTS if values.get(key)), None)
    answers = next((pair for pair in ANSWERS if pair[0] in values and pair[1] in values), None)
    if prompt is None or answers is None:
        missing = "a prompt" if prompt is None else "two answers"
        known = PROMPTS if prompt is None else [" and ".join(pair) for pair in ANSWERS]
        raise BadRecordError(
            where,
            f"{missing} cannot be found among {', '.join(map(str, values)) or 'no keys'}",
            f"name it as one of: {', '.join(known)}",
        )
    cells = {key: messages_in(values[key], key, where) for key in (prompt, *answers)}
    texts = [_one_answer(parse_text(cells[key], key, where), key, where) for key in answers]
    return (parse_text(cells[prompt], prompt, where), texts[0], texts[1], answers)


@contextmanager
def naming_the_place(where: Location) -> Iterator[None]:
    """Turn what goes wrong with a foreign value into an error that names file and record."""
    try:
        yield
    except BadRecordError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        fix = "mend the record, or leave it out"
        raise BadRecordError(where, f"it cannot be read ({error})", fix) from error


def as_choice(value: Any, names: tuple[str, str]) -> Choice | None:
    """Return the choice that a word of Label Studio means, None for an unknown word.

    Args:
        value: a side, the name of a response, or a choice.
        names: names of the two responses there.
    """
    word = str(value).strip().lower()
    sides: dict[str, Choice] = {"left": "first", "right": "second"}
    sides |= {names[0].lower(): "first", names[1].lower(): "second"}
    return sides.get(word, word if word in CHOICES else None)  # type: ignore[arg-type]


def _read_trl(rows: Located, source: str, now: str) -> tuple[list[Pair], list[Label]]:
    located = list(rows)
    own = {str(at): {key: row[key] for key in TRL_KEYS if key in row} for at, row in located}
    pairs, labels = [], []
    for parsed in parse_rows(located, RowParser(), SkippedRecords("raise")):
        record, where = parsed.record, parsed.where
        if not isinstance(record, PreferenceRecord):
            found = "the row has no 'chosen' and 'rejected'"
            raise BadRecordError(where, found, "give pairs, or another format")
        answers = [_one_answer(getattr(record, k), k, where) for k in ("chosen", "rejected")]
        values: dict[str, Any] = {"annotator": source, "kind": "person", "created": now}
        with naming_the_place(where):
            # The order must not tell which was chosen; a hash knows nothing of which is better.
            names = [pair_name(record.prompt, *order) for order in (answers, answers[::-1])]
            side: Choice = "first" if names[0] < names[1] else "second"
            first, second = answers if side == "first" else answers[::-1]
            given = as_columns(record.variables)
            columns = {key: as_text(value) for key, value in given.items()}
            pair = Pair.make(record.prompt, first, second, domain=record.domain, columns=columns)
            pairs.append(pair)
            values |= own[str(where)] | {"margin": record.margin}
            labels.append(Label(pair.pair_id, choice=side, order="first", **values))
    return pairs, labels


def _one_answer(text: Text, key: str, where: Location) -> str:
    if isinstance(text, str):
        return text
    if len(text) != 1:
        found = f"{key!r} has {len(text)} messages, expected one answer"
        raise BadRecordError(where, found, "put all turns but the last one into 'prompt'")
    if unsaid := [name for name in (CALLS, THOUGHT) if text[0].get(name)]:
        found = f"{key!r} has {' and '.join(unsaid)}, and a response of a pair is a text"
        raise BadRecordError(where, found, "write them into its content, as the model does")
    return text[0]["content"]


def _of_label_studio(
    row: Row, pair: Pair, names: tuple[str, str], where: Location, source: str, now: str
) -> Iterator[Label]:
    predictions = [
        {"rlhf": {"annotator": str(given.get("model_version") or source), "kind": "judge"}} | given
        for given in row.get("predictions") or ()
    ]
    for given in (*(row.get("annotations") or ()), *predictions):
        choice: Choice | None = "skip" if given.get("was_cancelled") else None
        reason = None
        for part in given.get("result") or ():
            value = part.get("value") or {}
            if part.get("type") == "pairwise" and choice is None:
                choice = as_choice(value.get("selected"), names)
            elif part.get("type") == "choices" and choice is None:
                choice = as_choice((value.get("choices") or [None])[0], names)
            elif part.get("type") == "textarea":
                reason = "\n".join(value.get("text") or ()) or None
        if choice is None and not given.get("result"):
            continue  # opened and left
        if choice is None:
            found = f"the annotation {describe(given['result'])} prefers neither answer"
            fix = "annotate with Pairwise, or with Choices tie, both_bad"
            raise BadRecordError(where, found, fix)
        account = given.get("completed_by")
        if isinstance(account, Mapping):
            account = account.get("email") or account.get("id")
        values: dict[str, Any] = {
            "annotator": source if account is None else str(account),
            "kind": "person",
            "order": "first",
            "created": _time(given.get("created_at"), now),
            "seconds": None if given.get("lead_time") is None else float(given["lead_time"]),
        }
        own = (given.get("rlhf") or {}).items()
        values |= {key: value for key, value in own if key in LABEL_STUDIO_KEYS}
        yield Label(pair.pair_id, choice=choice, reason=reason, **values)


def _label_studio(
    pair: Pair, labels: Sequence[Label] = (), said: tuple[Choice, float] | None = None
) -> dict[str, Any]:
    """Return a task; a label that skips is a cancelled annotation."""
    answers = [shown("", text, "drop", "").response for text in (pair.first, pair.second)]
    data = {"prompt": readable(pair.prompt), "answer1": answers[0], "answer2": answers[1]}
    prediction = (
        {"model_version": AGENT, "score": said[1], "result": _result(said[0])} if said else None
    )
    return {
        "data": data | ({"domain": pair.domain} if pair.domain else {}),
        # Without the right answer, which raters may be shown.
        "meta": {PAIR: to_row(replace(pair, columns=variables_of(pair)))},
        "annotations": [
            {
                "result": _result(label.choice, label.reason),
                "was_cancelled": label.choice == "skip",
                "created_at": label.created,
                "lead_time": label.seconds,
                "rlhf": {key: getattr(label, key) for key in LABEL_STUDIO_KEYS},
            }
            for label in labels
        ],
        "predictions": [prediction] if prediction else [],
    }


def _result(choice: Choice, reason: str | None = None) -> list[dict[str, Any]]:
    parts: list[tuple[str, str, str, dict[str, Any]]] = []
    if choice in SIDES:
        selected = "left" if choice == "first" else "right"
        parts.append(("pairwise", "preference", "answer1,answer2", {"selected": selected}))
    elif choice != "skip":
        parts.append(("choices", "verdict", "prompt", {"choices": [choice]}))
    if reason:
        parts.append(("textarea", "reason", "prompt", {"text": [reason]}))
    return [dict(zip(("type", "from_name", "to_name", "value"), x, strict=True)) for x in parts]


def _time(text: Any, now: str) -> str:
    """Return a time of Label Studio's, which writes Z for the zone, as Python does."""
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return now
    return str(text) if time.tzinfo is not None else time.replace(tzinfo=UTC).isoformat()
