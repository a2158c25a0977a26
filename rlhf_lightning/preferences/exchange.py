"""Pairs and labels in and out of files: our own records, TRL's preferences, Label Studio's tasks.

| format         | file         | holds                                                            |
|----------------|--------------|------------------------------------------------------------------|
| `pairs`        | JSON Lines   | `Pair` records                                                   |
| `labels`       | JSON Lines   | `Label` records; their pairs are known already                   |
| `trl`          | JSON Lines   | `prompt chosen rejected`, plain or messages: a verdict a pair    |
| `label_studio` | JSON, a list | tasks with `data` of `prompt answer1 answer2`; read: annotations |

Label Studio's tasks have the pair in `meta`.
docs/preferences.md has the labelling configuration. Sources:
https://huggingface.co/docs/trl/dataset_formats and https://labelstud.io/guide/task_format.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any, Literal

from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import Row, checked_rows
from rlhf_lightning.data.formats import RowParser
from rlhf_lightning.data.records import PreferenceRecord, Text, as_columns
from rlhf_lightning.preferences import records
from rlhf_lightning.preferences.agreement import aggregate, preference_row
from rlhf_lightning.preferences.records import Choice, Label, Pair, from_row, to_row
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.text.messages import as_text
from rlhf_lightning.text.thoughts import shown

Format = Literal["pairs", "labels", "trl", "label_studio"]
# A key that tells a format; the first that fits decides.
_TELLING: dict[str, Format] = {
    "choice": "labels",
    "first": "pairs",
    "chosen": "trl",
    "rejected": "trl",
    "data": "label_studio",
}
DATA_KEYS = ("prompt", "answer1", "answer2")
PAIR = "pair"  # key of the fields of `Pair` in Label Studio's `meta`
_SELECTED = {"left": "first", "right": "second"}


@dataclass(frozen=True)
class Collection:
    """Pairs, labels of these or of known pairs, and how many labels of the file were dropped."""

    pairs: tuple[Pair, ...]
    labels: tuple[Label, ...]
    dropped: int = 0


def read_collection(
    path: Path, *, format: Literal["auto"] | Format, known: Literal["labels", "ignore"], now: str
) -> Collection:
    """Return the pairs and labels of a file.

    Args:
        path: file to read.
        format: `auto` takes the one whose keys the first row has.
        known: whether preferences in the file are kept as labels.
        now: ISO time of labels that have none.

    Raises:
        BadRecordError: with file and line, for what cannot be read.
    """
    rows = checked_rows(path)
    where, first = next(rows)
    told = (name for key, name in _TELLING.items() if key in first)
    name = next(told, None) if format == "auto" else format
    chained = itertools.chain([(where, first)], rows)
    pairs: list[Pair] = []
    labels: list[Label] = []
    if name is None:
        keys = f"the keys {', '.join(map(str, first)) or '(none)'} tell no format"
        raise BadRecordError(where, keys, "give format=pairs, labels, trl or label_studio")
    if name == "trl":
        pairs, labels = _read_trl(chained, path.name, now)
    elif name == "labels":
        labels = [from_row(Label, row, where) for where, row in chained]
    elif name == "pairs":
        pairs = [from_row(Pair, row, where) for where, row in chained]
    else:
        for where, row in chained:
            pair, given = _read_task(row, where, path.name, now)
            pairs.append(pair)
            labels += given
    different = tuple({p.pair_id: p for p in pairs}.values())
    if known == "labels" or name == "labels":
        return Collection(different, tuple(labels))
    return Collection(different, (), len(labels))


def write_collection(path: Path, found: Collection, *, format: Format) -> tuple[int, Counter[str]]:
    """Write pairs and labels to a file, whole or not at all.

    Returns the number of rows, and of the verdicts that the format has no words for, by kind.

    Args:
        path: file to write.
        found: pairs and labels.
        format: format of the file. `pairs` and `label_studio` hold no label, `trl` the verdicts,
            see `aggregate`.
    """
    rows: list[Any] = []
    left_out: Counter[str] = Counter()
    if format == "trl":
        people = {label.annotator for label in found.labels if label.kind == "person"}
        verdicts = aggregate(found.pairs, found.labels, people=people)
        left_out.update(str(each.left_out) for each in verdicts if each.choice is None)
        rows = [preference_row(each) for each in verdicts if each.choice is not None]
    elif format == "label_studio":
        rows = [_task(pair) for pair in found.pairs]
    else:
        rows = [to_row(each) for each in (found.pairs if format == "pairs" else found.labels)]
    lines = [json.dumps(row, ensure_ascii=False, allow_nan=False) for row in rows]
    as_list = format == "label_studio"
    text = "[\n" + ",\n".join(lines) + "\n]\n" if as_list else "".join(f"{x}\n" for x in lines)
    write_text(path, text)
    return len(rows), left_out


def _read_trl(
    rows: Iterable[tuple[Location, Row]], source: str, now: str
) -> tuple[list[Pair], list[Label]]:
    pairs, labels = [], []
    parse, times = RowParser(), Counter[str]()
    for where, row in rows:
        record = parse(row, where)
        if not isinstance(record, PreferenceRecord):
            raise BadRecordError(where, "it has no 'chosen' and 'rejected'", "give another format")
        answers = [_text_of(getattr(record, k), k, where) for k in ("chosen", "rejected")]
        # The order must not tell which was chosen; a hash knows nothing of which is better.
        columns = {key: as_text(value) for key, value in as_columns(record.variables).items()}
        more: dict[str, Any] = {"domain": record.domain, "columns": columns}
        with _naming(where):
            both = [Pair.make(record.prompt, *it, **more) for it in (answers, answers[::-1])]
            pair = min(both, key=attrgetter("pair_id"))
            pairs.append(pair)
            side: Choice = "first" if pair is both[0] else "second"
            # A row names no annotator: that of a pair which comes again is another one.
            times[pair.pair_id] += 1
            name = f"{source} ({n})" if (n := times[pair.pair_id]) > 1 else source
            label = Label(pair.pair_id, name, side, "person", "first", now, margin=record.margin)
            labels.append(label)
    return pairs, labels


def _text_of(answer: Text, key: str, where: Location) -> str:
    if isinstance(answer, str):
        return answer
    if len(answer) != 1 or answer[0].get("tool_calls") or answer[0].get("reasoning_content"):
        found = f"{key!r} is not one message with content alone"
        raise BadRecordError(where, found, "put earlier turns into 'prompt', the rest into content")
    return answer[0]["content"]


def _task(pair: Pair) -> dict[str, Any]:
    answers = [shown("", text, "drop", "").response for text in (pair.first, pair.second)]
    return {
        "data": dict(zip(DATA_KEYS, (records.shown_prompt(pair), *answers), strict=True))
        | ({"domain": pair.domain} if pair.domain else {}),
        # Without the right answer, which raters may be shown.
        "meta": {PAIR: to_row(replace(pair, columns=records.variables_of(pair)))},
    }


def _read_task(row: Row, where: Location, source: str, now: str) -> tuple[Pair, list[Label]]:
    data: Any = row.get("data")
    known = (row.get("meta") or {}).get(PAIR)
    texts = [data.get(key) for key in DATA_KEYS] if isinstance(data, Mapping) else [None]
    if not all(isinstance(text, str) for text in texts):
        found = f"'data' is {describe(data)}"
        raise BadRecordError(where, found, "give prompt, answer1 and answer2")
    with _naming(where):
        domain = str(data.get("domain") or "")
        pair = from_row(Pair, known, where) if known else Pair.make(*texts, domain=domain)
        given = row.get("annotations") or ()
        if sum(each.get("completed_by") is None for each in given) > 1:
            raise ValueError("two annotations have no 'completed_by', as if one person gave both")
        labels = [_annotation(each, pair, source, now) for each in given]
    return pair, [label for label in labels if label is not None]


def _annotation(given: Mapping[str, Any], pair: Pair, source: str, now: str) -> Label | None:
    """Return the label of an annotation; None for one that was opened and left."""
    parts = [(part.get("type"), part.get("value") or {}) for part in given.get("result") or ()]
    said: list[Any] = [_SELECTED.get(x["selected"]) for kind, x in parts if kind == "pairwise"]
    said += [each for kind, x in parts if kind == "choices" for each in x.get("choices") or ()]
    if len(said) > 1:
        raise ValueError(f"an annotation has the verdicts {', '.join(map(str, said))}: leave one")
    choice: Any = "skip" if given.get("was_cancelled") else next(iter(said), None)
    if choice is None and not parts:
        return None
    account = given.get("completed_by")
    if isinstance(account, Mapping):
        account = account.get("email") or account.get("id")
    name = source if account is None else str(account)
    texts = (line for kind, x in parts if kind == "textarea" for line in x.get("text") or ())
    reason = "\n".join(texts) or None
    created, seconds = given.get("created_at") or now, given.get("lead_time")
    return Label(pair.pair_id, name, choice, "person", "first", created, seconds, reason)


@contextmanager
def _naming(where: Location) -> Iterator[None]:
    """Turn what goes wrong with a foreign value into an error that names file and record."""
    try:
        yield
    except BadRecordError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise BadRecordError(where, f"it cannot be read ({error})", "mend it") from error
