"""Rows of the store that say who judged what: in from a rater or a file, out as `Label`."""

from __future__ import annotations

import sqlite3
import unicodedata
from datetime import UTC, datetime
from typing import cast

from rlhf_lightning.preferences.annotation import assignment as rules
from rlhf_lightning.preferences.annotation.database import StoreError
from rlhf_lightning.preferences.annotation.tasks import Answer, choice_of
from rlhf_lightning.preferences.records import AnnotatorKind, Label

LONGEST_NAME = 60
LONGEST_REASON = 2000
CLOCK_SLACK = 1.0  # seconds that a browser's clock may run ahead of ours

LABELS = (
    "SELECT labels.*, pairs.pair_id, raters.name FROM labels "
    "JOIN pairs USING (position) JOIN raters USING (rater_id)"
)


def as_label(row: sqlite3.Row) -> Label:
    """Return a row of `LABELS` as a record."""
    return Label(
        pair_id=row["pair_id"],
        annotator=row["name"],
        choice=row["choice"],
        kind=row["kind"],
        order=row["shown_first"],
        created=row["created"],
        seconds=row["seconds"],
        reason=row["reason"],
        margin=row["margin"],
    )


def insert_answer(
    db: sqlite3.Connection,
    assignment: sqlite3.Row,
    answer: Answer,
    seconds: float | None,
    reason: str | None,
    now: float,
) -> None:
    """Keep what a rater answered to an open assignment.

    Args:
        db: in a transaction.
        assignment: the row of `assignments`.
        answer: about what was on the left and on the right.
        seconds: by the rater's own clock; what cannot be is replaced by ours.
        reason: in words; cut at `LONGEST_REASON` characters.
        now: seconds since 1970.
    """
    choice = choice_of(answer, assignment["shown_first"])
    passed = max(now - assignment["served"], 0.0)
    believable = seconds is not None and 0 <= seconds <= passed + CLOCK_SLACK
    db.execute(
        "INSERT INTO labels (position, rater_id, assignment_id, choice, kind, shown_first, "
        "created, seconds, reason) VALUES (?, ?, ?, ?, 'person', ?, ?, ?, ?)",
        (
            assignment["position"],
            assignment["rater_id"],
            assignment["assignment_id"],
            choice,
            assignment["shown_first"],
            iso_time(now),
            round(cast(float, seconds) if believable else passed, 3),
            (reason or "").strip()[:LONGEST_REASON] or None,
        ),
    )
    db.execute(
        "UPDATE assignments SET state = 'labelled' WHERE assignment_id = ?",
        (assignment["assignment_id"],),
    )
    rules.count(db, assignment["position"], assignment["rater_id"], choice, 1)
    if choice == "skip":  # somebody else may take the pair
        db.execute(
            "UPDATE pairs SET taken = taken - 1 WHERE position = ?", (assignment["position"],)
        )


def insert_label(db: sqlite3.Connection, label: Label) -> bool:
    """Keep a label that was given elsewhere; return whether it is new.

    Raises:
        StoreError: if its pair is unknown.
    """
    pair = db.execute("SELECT position FROM pairs WHERE pair_id = ?", (label.pair_id,)).fetchone()
    if pair is None:
        raise StoreError(
            f"a label of {label.annotator} is about the pair {label.pair_id}, which the store does "
            "not have: import the pairs first"
        )
    row = db.execute("SELECT rater_id FROM raters WHERE name = ?", (label.annotator,)).fetchone()
    created = datetime.fromisoformat(label.created).timestamp()
    rater_id = row[0] if row else insert_rater(db, label.annotator, label.kind, created)
    added = db.execute(
        "INSERT INTO labels (position, rater_id, choice, kind, shown_first, created, seconds, "
        "reason, margin) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (rater_id, position) WHERE undone IS NULL DO NOTHING",
        (
            pair[0],
            rater_id,
            label.choice,
            label.kind,
            label.order,
            label.created,
            label.seconds,
            label.reason,
            label.margin,
        ),
    ).rowcount
    if added and label.kind == "person":
        rules.count(db, pair[0], rater_id, label.choice, 1)
        if label.choice != "skip":
            db.execute("UPDATE pairs SET taken = taken + 1 WHERE position = ?", (pair[0],))
    return bool(added)


def insert_rater(db: sqlite3.Connection, name: str, kind: AnnotatorKind, now: float) -> int:
    """Add a rater and return its number."""
    row = db.execute(
        "INSERT INTO raters (name, kind, created) VALUES (?, ?, ?) RETURNING rater_id",
        (name, kind, iso_time(now)),
    )
    return cast(int, row.fetchone()[0])


def clean_name(name: str) -> str:
    """Return a rater's name in one spelling: composed characters, single spaces.

    Raises:
        StoreError: if nothing is left of it, or too much, or it has characters that cannot be seen.
    """
    clean = " ".join(unicodedata.normalize("NFC", name).split())
    if not clean or len(clean) > LONGEST_NAME:
        raise StoreError(f"a name has 1 to {LONGEST_NAME} characters, this one {len(clean)}")
    hidden = [c for c in clean if unicodedata.category(c)[0] == "C"]
    if hidden:
        raise StoreError(f"the name holds the invisible character U+{ord(hidden[0]):04X}")
    return clean


def iso_time(seconds: float) -> str:
    """Return seconds since 1970 as text, with the zone."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
