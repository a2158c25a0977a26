"""Label Studio: a list of tasks with annotations of a `Pairwise` tag, as its JSON export has them.

The labelling configuration that fits what is written here is `CONFIG`. The names of our annotators
stand in `rlhf`, beside what Label Studio has no key for: it refuses a `completed_by` that is none
of its own accounts. Source: https://labelstud.io/guide/task_format, and the serializers of
`data_import` in HumanSignal/label-studio.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import Row
from rlhf_lightning.preferences.formats.aliases import (
    AGENT,
    as_choice,
    as_word,
    find_texts,
    naming_the_place,
)
from rlhf_lightning.preferences.records import Choice, Label, Pair, readable, to_row

if TYPE_CHECKING:
    from rlhf_lightning.preferences.aggregate import Verdict

CONFIG = """\
<View>
  <Text name="prompt" value="$prompt"/>
  <Pairwise name="preference" toName="answer1,answer2" leftClass="first" rightClass="second"/>
  <Text name="answer1" value="$answer1"/>
  <Text name="answer2" value="$answer2"/>
  <Choices name="verdict" toName="prompt"><Choice value="tie"/><Choice value="both_bad"/></Choices>
  <TextArea name="reason" toName="prompt"/>
</View>
"""
OURS = ("annotator", "kind", "order", "margin")


def read(
    rows: Iterable[tuple[Location, Row]], *, source: str, now: str
) -> tuple[list[Pair], list[Label]]:
    """Return the pairs and labels of tasks; a prediction is a label of kind `judge`.

    Args:
        rows: the tasks.
        source: name of the file, for annotations and predictions that name nobody.
        now: time of labels that have none.

    Raises:
        BadRecordError: for a task without a prompt and two answers, or with an annotation that
            means nothing.
    """
    pairs, labels = [], []
    for where, row in rows:
        data = row.get("data")
        if not isinstance(data, Mapping):
            found = f"'data' is {describe(data)}, expected an object"
            raise BadRecordError(where, found, "export as JSON, not as JSON-MIN or CSV")
        prompt, first, second, answers = find_texts(data, where)
        meta = row.get("meta") or {}
        with naming_the_place(where):
            pair = Pair.make(prompt, first, second, domain=str(data.get("domain") or ""))
            if "pair" in meta:
                pair = Pair(**meta["pair"])
            for given in row.get("annotations") or ():
                labels += _label(given, pair, answers, where, (source, now))
            for given in row.get("predictions") or ():
                model = {"annotator": str(given.get("model_version") or source), "kind": "judge"}
                labels += _label({"rlhf": model} | given, pair, answers, where, (source, now))
        pairs.append(pair)
    return pairs, labels


def write_labels(
    pair: Pair, labels: Sequence[Label], left_out: Counter[str]
) -> list[dict[str, Any]]:
    """Return the task of a pair with its labels as annotations; one that skips is cancelled.

    Args:
        pair: the pair.
        labels: of it.
        left_out: of nothing here.
    """
    task = _task(pair)
    task["annotations"] = [
        {
            "result": _result(label.choice, label.reason),
            "was_cancelled": label.choice == "skip",
            "created_at": label.created,
            "lead_time": label.seconds,
            "rlhf": {key: getattr(label, key) for key in OURS},
        }
        for label in labels
    ]
    return [task]


def write_verdict(verdict: Verdict, left_out: Counter[str]) -> list[dict[str, Any]]:
    """Return the task of a pair with the verdict as a prediction.

    Args:
        verdict: of the pair.
        left_out: counts verdicts that say nothing, by reason.
    """
    task = _task(verdict.pair)
    word = as_word(verdict, left_out)
    if word is not None:
        prediction = {"model_version": AGENT, "score": word[1], "result": _result(word[0], None)}
        task["predictions"].append(prediction)
    return [task]


def _task(pair: Pair) -> dict[str, Any]:
    data = {"prompt": readable(pair.prompt), "answer1": pair.first, "answer2": pair.second}
    return {
        "data": data | ({"domain": pair.domain} if pair.domain else {}),
        "meta": {"pair": to_row(pair)},
        "annotations": [],
        "predictions": [],
    }


def _result(choice: Choice, reason: str | None) -> list[dict[str, Any]]:
    result: list[dict[str, Any]] = []
    if choice in ("first", "second"):
        result.append(
            {
                "type": "pairwise",
                "from_name": "preference",
                "to_name": "answer1,answer2",
                "value": {"selected": "left" if choice == "first" else "right"},
            }
        )
    elif choice != "skip":
        result.append(
            {
                "type": "choices",
                "from_name": "verdict",
                "to_name": "prompt",
                "value": {"choices": [choice]},
            }
        )
    if reason:
        result.append(
            {
                "type": "textarea",
                "from_name": "reason",
                "to_name": "prompt",
                "value": {"text": [reason]},
            }
        )
    return result


def _label(
    given: Mapping[str, Any],
    pair: Pair,
    answers: tuple[str, str],
    where: Location,
    default: tuple[str, str],
) -> list[Label]:
    choice: Choice | None = "skip" if given.get("was_cancelled") else None
    reason = None
    for part in given.get("result") or ():
        value = part.get("value") or {}
        if part.get("type") == "pairwise":
            choice = as_choice(value.get("selected"), answers)
        elif part.get("type") == "choices" and choice is None:
            choice = as_choice((value.get("choices") or [None])[0], answers)
        elif part.get("type") == "textarea":
            reason = "\n".join(value.get("text") or ()) or None
    if choice is None:
        if not given.get("result"):
            return []  # opened and left
        found = f"the annotation {describe(given['result'])} prefers neither answer"
        raise BadRecordError(where, found, "annotate with Pairwise, or with Choices tie, both_bad")
    ours = {key: value for key, value in (given.get("rlhf") or {}).items() if key in OURS}
    values = {"annotator": _account(given, default[0]), "kind": "person", "order": "first"} | ours
    seconds = given.get("lead_time")
    return [
        Label(
            pair.pair_id,
            choice=choice,
            created=_time(given.get("created_at"), default[1]),
            seconds=None if seconds is None else float(seconds),
            reason=reason,
            **values,
        )
    ]


def _account(given: Mapping[str, Any], source: str) -> str:
    account = given.get("completed_by")
    if isinstance(account, Mapping):
        account = account.get("email") or account.get("id")
    return source if account is None else str(account)


def _time(text: Any, now: str) -> str:
    """Return a time of Label Studio's, which writes Z for the zone, as Python does."""
    if text is None:
        return now
    try:
        time = datetime.fromisoformat(str(text))
    except ValueError:
        return now
    return str(text) if time.tzinfo is not None else time.replace(tzinfo=UTC).isoformat()
