"""The label of a row: true where its response is good, or one value where it is `label_good`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from rlhf_lightning.data.errors import BadRecordError, describe
from rlhf_lightning.data.formats import ParsedRow
from rlhf_lightning.data.records import (
    DemonstrationRecord,
    PreferenceRecord,
    Record,
    UnpairedRecord,
    both_responses,
)

Value = str | int | float | bool
EVERY = "learn all rows alike with columns={label: null}"
GOOD = (
    "name the value of good responses with dataset.source.label_good=VALUE (in Python "
    f"label_good=VALUE), or {EVERY}"
)
_TRUTH = {"true": True, "false": False}


@dataclass(frozen=True)
class Labels:
    """Reads the labels of a set.

    Args:
        column: name of the column; None where no row has one.
        good: the value that says that a response is good; None for true.
    """

    column: str | None
    good: Value | None = None

    def of(self, row: ParsedRow) -> bool | None:
        """Return whether the response of a row is good; None without a label.

        Raises:
            BadRecordError: if the label says neither.
        """
        value = row.columns.get(self.column or "")
        if value is None or value == "":
            return None
        if self.good is not None:
            return str(value) == str(self.good)
        if (known := _TRUTH.get(str(value).lower())) is not None:
            return known
        found = f"the label {self.column!r} holds {describe(value)}, expected true or false"
        raise BadRecordError(row.where, found, GOOD)

    def unread(self, row: ParsedRow) -> tuple[str, ...]:
        """Return the columns of a row that neither its record nor its label has."""
        return tuple(key for key in row.unread if key != self.column)

    def demonstration(self, row: ParsedRow) -> None:
        """Check that a row may be imitated.

        Raises:
            BadRecordError: if its response is labelled bad, or not at all in a labelled set.
        """
        if self.column is None or not isinstance(row.record, DemonstrationRecord):
            return
        if not self.of(row):
            found = f"the label {self.column!r} holds {describe(row.columns.get(self.column))}"
            fix = "leave such rows out with dataset.source.on_bad_record=skip, learn from both "
            raise BadRecordError(row.where, found, f"{fix} labels with +experiment=kto, or {EVERY}")

    def unpaired(self, row: ParsedRow) -> list[Record]:
        """Return a labelled row as an unpaired record, a pair as two.

        Raises:
            BadRecordError: if the row has no label of true or false.
        """
        record = row.record
        if isinstance(record, PreferenceRecord):
            return list(both_responses(record))
        label = self.of(row) if isinstance(record, DemonstrationRecord) else None
        if label is None or not isinstance(record, DemonstrationRecord):
            found = f"the row has no label (other columns: {', '.join(row.columns)})"
            fix = "give prompt, completion and label, or map a column with columns={label: theirs}"
            raise BadRecordError(row.where, found, fix)
        parts = (record.prompt, record.completion, record.domain, record.rendered)
        return [UnpairedRecord(*parts, label, variables=record.variables)]


def find_labels(
    rows: Sequence[ParsedRow],
    columns: Mapping[str, str | None],
    good: Value | None,
    names_of: Callable[[str], Sequence[str]],
) -> Labels:
    """Return the labels of a set: those of its column `label`, or of the one that is mapped to it.

    Raises:
        BadRecordError: if no label is `good`, or the labels are the numbers of a `ClassLabel`,
            whose names say which are good.
    """
    column = columns.get("label", "label")
    if column is None:
        return Labels(None)
    shown = (row for row in rows if isinstance(row.record, DemonstrationRecord))
    labelled = [row for row in shown if row.columns.get(column) is not None]
    if not labelled:
        return Labels(None)
    labels = Labels(column, good)
    if good is None and (names := names_of(column)):
        listed = ", ".join(f"{number} {name!r}" for number, name in enumerate(names[:4]))
        found = f"the label {column!r} holds the names {listed} (ClassLabel)"
        raise BadRecordError(labelled[0].where, found, GOOD)
    if good is not None and not any(map(labels.of, labelled)):
        found = f"no label {column!r} is label_good={good!r}"
        fix = f"give a value that it has, such as {labelled[0].columns[column]!r}"
        raise BadRecordError(labelled[0].where, found, fix)
    return labels


def check_unlabelled(rows: Sequence[ParsedRow], labels: Labels) -> None:
    """Check that no unread column of demonstrations may be a label.

    Raises:
        BadRecordError: for a column of true and false.
    """
    seen: dict[str, set[str]] = {}
    for row in rows:
        for key in labels.unread(row) if isinstance(row.record, DemonstrationRecord) else ():
            seen.setdefault(key, set()).add(str(row.columns.get(key)).lower())
    if found := next((key for key, values in seen.items() if values == set(_TRUTH)), None):
        text = f"the column {found!r} holds true and false, and is not read"
        fix = f"if true says that a response is good set columns={{label: {found}}}, else {EVERY}"
        raise BadRecordError(rows[0].where, text, fix)
