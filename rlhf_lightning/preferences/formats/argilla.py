"""Argilla 2: a list of records as `Dataset.records.to_json` writes them.

A record has `fields` (prompt and two answers), `responses` of users to a question, `suggestions`
of models, and `metadata`. Argilla knows its users by UUID and keeps neither order nor time, so ours
are in the metadata, and a response is matched with them by a UUID made from the annotator's name.
Source: `Record.to_dict` of argilla-io/argilla.
"""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import Row
from rlhf_lightning.preferences.formats.aliases import (
    AGENT,
    as_choice,
    as_word,
    find_texts,
    naming_the_place,
)
from rlhf_lightning.preferences.records import Choice, Label, Pair, from_row, to_row

if TYPE_CHECKING:
    from rlhf_lightning.preferences.aggregate import Verdict

QUESTION, REASON = "preference", "reason"
PAIR, LABELS = "rlhf_pair", "rlhf_labels"  # in the metadata
_USERS = uuid.UUID("6f1d8f5e-8f0e-4a53-9f0e-2f5b6f0f6c11")


def user_id(annotator: str) -> str:
    """Return the UUID that stands for an annotator."""
    return str(uuid.uuid5(_USERS, annotator))


def read(
    rows: Iterable[tuple[Location, Row]], *, source: str, now: str
) -> tuple[list[Pair], list[Label]]:
    """Return the pairs and labels of records; a suggestion is a label of kind `judge`.

    Args:
        rows: the records.
        source: name of the file, for suggestions without an agent.
        now: time of labels that have none.

    Raises:
        BadRecordError: for a record without a prompt and two answers, or with a response that
            means nothing.
    """
    pairs, labels = [], []
    for where, row in rows:
        fields = row.get("fields")
        if not isinstance(fields, Mapping):
            found = f"'fields' is {describe(fields)}, expected an object"
            raise BadRecordError(where, found, "export the records as JSON with Argilla 2")
        prompt, first, second, answers = find_texts(fields, where)
        metadata = row.get("metadata") or {}
        with naming_the_place(where):
            pair = Pair.make(prompt, first, second, domain=str(metadata.get("domain") or ""))
            if PAIR in metadata:
                pair = replace(pair, **json.loads(metadata[PAIR]))
            labels += list(_responses(row, pair, answers, where, now))
            labels += list(_suggestions(row, pair, answers, where, (source, now)))
        pairs.append(pair)
    return pairs, labels


def write_labels(
    pair: Pair, labels: Sequence[Label], left_out: Counter[str]
) -> list[dict[str, Any]]:
    """Return the record of a pair with its labels as responses.

    Args:
        pair: the pair.
        labels: of it; one that skips is in the metadata only.
        left_out: of nothing here.
    """
    record = _record(pair)
    given = [label for label in labels if label.choice != "skip"]
    responses = {
        QUESTION: [{"value": x.choice, "user_id": user_id(x.annotator)} for x in given],
        REASON: [{"value": x.reason, "user_id": user_id(x.annotator)} for x in given if x.reason],
    }
    record["responses"] = {key: value for key, value in responses.items() if value}
    if labels:
        own = [json.dumps(to_row(label), ensure_ascii=False) for label in labels]
        record["metadata"][LABELS] = own
    return [record]


def write_verdict(verdict: Verdict, left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the record of a pair with the verdict as a suggestion.

    Args:
        verdict: of the pair.
        left_out: counts verdicts that say nothing, by reason.
    """
    record = _record(verdict.pair)
    word = as_word(verdict, left_out)
    if word is not None:
        suggestion = {"value": word[0], "score": word[1], "agent": AGENT}
        record["suggestions"][QUESTION] = suggestion
    return [record]


def _record(pair: Pair) -> dict[str, Any]:
    own = {key: getattr(pair, key) for key in ("pair_id", "first_source", "second_source", "gold")}
    metadata: dict[str, Any] = {PAIR: json.dumps(own, ensure_ascii=False)}
    if pair.domain:
        metadata["domain"] = pair.domain
    return {
        "id": pair.pair_id,
        "fields": {"prompt": pair.prompt, "first": pair.first, "second": pair.second},
        "metadata": metadata,
        "suggestions": {},
        "responses": {},
        "vectors": {},
    }


def _responses(
    row: Row, pair: Pair, answers: tuple[str, str], where: Location, now: str
) -> Iterator[Label]:
    metadata = row.get("metadata") or {}
    ours = [from_row(Label, json.loads(text), where) for text in metadata.get(LABELS) or ()]
    known = {user_id(label.annotator): label for label in ours}
    responses = row.get("responses") or {}
    reasons = {r.get("user_id"): r.get("value") for r in responses.get(REASON) or ()}
    for response in _answers_of(responses, where):
        user, value = str(response.get("user_id")), response.get("value")
        choice = _choice(value, answers)
        if choice is None:
            found = f"the response {describe(value)} names neither answer"
            raise BadRecordError(where, found, "use first, second, tie or both_bad, or a ranking")
        before = known.pop(user, None)
        reason = cast(str | None, reasons.get(response.get("user_id")))
        if before is None:
            yield Label(pair.pair_id, user, choice, "person", "first", now, reason=reason)
        elif before.choice == choice:
            yield replace(before, reason=reason)
        else:  # judged anew over there
            yield Label(
                pair.pair_id, before.annotator, choice, before.kind, "first", now, reason=reason
            )
    yield from (label for label in known.values() if label.choice == "skip")


def _answers_of(responses: Any, where: Location) -> list[Mapping[str, Any]]:
    if not isinstance(responses, Mapping):
        found = f"'responses' is {describe(responses)}, expected an object of questions"
        raise BadRecordError(where, found, "export the records as JSON with Argilla 2")
    named = [key for key in responses if key != REASON]
    if QUESTION in named:
        return list(responses[QUESTION])
    if len(named) > 1:
        found = f"the questions {', '.join(named)} have responses"
        raise BadRecordError(where, found, f"name the one about the better answer {QUESTION!r}")
    return list(responses[named[0]]) if named else []


def _choice(value: Any, answers: tuple[str, str]) -> Choice | None:
    """Read a label, or a ranking `[{"value": ..., "rank": ...}, ...]`."""
    if not isinstance(value, list):
        return as_choice(value, answers)
    ranks = {as_choice(item.get("value"), answers): item.get("rank") for item in value}
    first, second = ranks.get("first"), ranks.get("second")
    if not isinstance(first, int) or not isinstance(second, int):
        return None
    return "tie" if first == second else "first" if first < second else "second"


def _suggestions(
    row: Row, pair: Pair, answers: tuple[str, str], where: Location, default: tuple[str, str]
) -> Iterator[Label]:
    suggestion = (row.get("suggestions") or {}).get(QUESTION)
    if suggestion is None:
        return
    choice = _choice(suggestion.get("value"), answers)
    if choice is None:
        found = f"the suggestion {describe(suggestion.get('value'))} names neither answer"
        raise BadRecordError(where, found, "use first, second, tie or both_bad")
    agent = str(suggestion.get("agent") or default[0])
    yield Label(pair.pair_id, agent, choice, "judge", "first", default[1])
