"""Records of one kind as those of another: prompts of any, demonstrations of the good ones.

A pair is a demonstration of its chosen response, and two unpaired rows. A label says which
responses are good.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_lightning.data.errors import BadRecordError, describe
from rlhf_lightning.data.formats import FILL
from rlhf_lightning.data.public_formats import mapping_of
from rlhf_lightning.data.records import (
    KEYS,
    DemonstrationRecord,
    PreferenceRecord,
    PromptRecord,
    Record,
    RecordKind,
    TextRecord,
    UnpairedRecord,
    Value,
    both_responses,
    kind_of,
)
from rlhf_lightning.data.texts import is_transcript

EVERY = "learn all rows alike with columns={label: null}"
GOOD = f"name the value of good responses with dataset.source.label_good=VALUE, or {EVERY}"
# What records of each kind are of a row of another one.
TAKEN = {"prompts": "prompts", "demonstrations": "chosen responses", "unpaired": "responses"}
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Labels:
    """Labels of a set: true where a response is good, or one value where it is `label_good`.

    Args:
        column: name of the column; None where no row has one.
        good: the value that says that a response is good; None for true.
    """

    column: str | None
    good: Value | None = None

    @classmethod
    def of_records(
        cls, records: Sequence[Record], columns: Mapping[str, str | None], good: Value | None
    ) -> Labels:
        """Return the labels of a set: those of its column `label`, or of the one mapped to it.

        Raises:
            BadRecordError: if no label is `good`, or `good` is given and there is no label.
        """
        labels = cls(columns.get("label", "label"), good)
        shown = (record for record in records if isinstance(record, DemonstrationRecord))
        first = next((record for record in shown if labels.value(record) is not None), None)
        if first is None and good is not None and labels.column is not None:
            fix = "map the column with columns={label: theirs}, or leave label_good out"
            found = f"label_good={good!r} is a value of {labels.column!r}, which no response has"
            raise BadRecordError(records[0].place, found, fix)
        if labels.column is None or first is None:
            return cls(None)
        if good is not None and not any(map(labels.is_good, records)):
            fix = f"give a value that it has, such as {labels.value(first)!r}"
            raise BadRecordError(first.place, f"no {labels.column!r} is label_good={good!r}", fix)
        return labels

    def value(self, record: Record) -> Any:
        """Return the label of a record's row; None without one, which pandas writes as NaN."""
        found = None if self.column is None else record.origin.columns.get(self.column)
        return None if str(found).lower() == "nan" else found

    def is_good(self, record: Record) -> bool | None:
        """Return whether the response of a demonstration is good; None without a label.

        Raises:
            BadRecordError: if the label says neither.
        """
        value = self.value(record)
        if value is None or value == "":
            return None
        if self.good is not None:
            said, good = str(value), str(self.good)
            if said != good and _spelling(said) == _spelling(good):
                found = f"the label {self.column!r} holds {said!r}, and label_good is {good!r}"
                raise BadRecordError(record.place, found, "write both in one way")
            return said == good
        if (known := _TRUTH.get(str(value).lower())) is not None:
            return known
        found = f"the label {self.column!r} holds {describe(value)}, expected true or false"
        raise BadRecordError(record.place, found, GOOD)

    def unread(self, record: Record) -> tuple[str, ...]:
        """Return the columns that neither a record nor its label has."""
        return tuple(key for key in record.origin.unread if key != self.column)

    def check_unread(self, records: Sequence[Record]) -> None:
        """Check that no unread column of demonstrations may be a label.

        Raises:
            BadRecordError: for a column of true and false.
        """
        shown = [record for record in records if isinstance(record, DemonstrationRecord)]
        for key in dict.fromkeys(key for record in shown for key in self.unread(record)):
            having = [record.origin for record in shown if key in record.origin.unread]
            if {str(origin.columns.get(key)).lower() for origin in having} == set(_TRUTH):
                text = f"the column {key!r} holds true and false, and is not read"
                fix = f"if true says that a response is good set columns={{label: {key}}}, else "
                raise BadRecordError(shown[0].place, text, fix + EVERY)


def _spelling(label: str) -> str:
    """Return a label without what a spreadsheet may change of it: 1 is 1.0."""
    return label.strip().casefold().removesuffix(".0")


NO_LABELS = Labels(None)


def to_kind(record: Record, kind: RecordKind, labels: Labels = NO_LABELS) -> Sequence[Record]:
    """Return a record as records of the wanted kind: a pair is two unpaired ones, else one.

    A prompt may be taken from any record that has one (its row's other columns go with it), a
    demonstration from a preference (its chosen response).

    Raises:
        BadRecordError: if the record cannot be turned into that kind, naming both; if its response
            is to be imitated and labelled bad, or not at all in a labelled set; or if an unpaired
            row has no label, or a rendered pair no prompt.
    """
    columns = record.origin.columns
    more: dict[str, Any] = {"variables": record.variables, "origin": record.origin}
    if kind == "unpaired" and isinstance(record, PreferenceRecord):
        return both_responses(record)
    if kind == "unpaired":
        good = labels.is_good(record)
        if good is None or not isinstance(record, DemonstrationRecord):
            fix = f"give {KEYS[kind]}, or map one with columns={{label: theirs}}"
            found = f"the row has no label, and {', '.join(columns) or 'nothing'} beside its prompt"
            raise BadRecordError(record.place, found, fix)
        parts = (record.prompt, record.completion, record.domain, record.rendered, good)
        return [UnpairedRecord(*parts, **more)]
    whole = record.rendered and kind in ("prompts", "demonstrations")
    if whole and not all(map(is_transcript, record.origin.sides)):
        found = "no key of a rendered pair says where its prompt ends: responses may begin alike"
        raise BadRecordError(record.place, found, f"write the key 'prompt' for {kind}")
    if kind == "prompts" and not isinstance(record, TextRecord):
        if not record.prompt:
            raise BadRecordError(record.place, "the key 'prompt' is empty", FILL)
        return [PromptRecord(record.prompt, record.domain, columns, record.rendered, **more)]
    if kind == "demonstrations" and isinstance(record, PreferenceRecord):
        given = (record.prompt, record.chosen, record.domain, record.rendered)
        return [DemonstrationRecord(*given, **more)]
    if kind != (given_kind := kind_of(record)):
        found = f"{kind} were asked for, but the records are {given_kind}"
        if unread := record.origin.unread:
            found += f" (columns that are not read: {', '.join(unread)})"
        fix = f"give rows with {KEYS[kind]} ({mapping_of(columns)} maps other names)"
        fix += f", or choose an experiment that takes {given_kind}"
        raise BadRecordError(record.place, found, fix)
    if kind == "demonstrations" and labels.column is not None and not labels.is_good(record):
        found = f"the label {labels.column!r} holds {describe(labels.value(record))}"
        fix = "leave such rows out with dataset.source.on_bad_record=skip, learn from both labels "
        raise BadRecordError(record.place, found, f"{fix}with +experiment=kto, or {EVERY}")
    return [record]
