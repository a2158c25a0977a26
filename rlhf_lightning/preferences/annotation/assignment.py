"""Assignments of pairs to raters, and the labels that end them.

An assignment is a lease: one that is not used ends, and the pair goes to another rater, so that no
pair gets more labels than were asked for. The functions that take `db` change an open transaction
of `LabelStore`; transactions are one after the other, so a count cannot change meanwhile.

A rater's answer is about the left and the right of a screen (`Answer`), a label is about the pair.
"""

from __future__ import annotations

import hashlib
import sqlite3
import unicodedata
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal, cast

from rlhf_lightning.arguments import Above0, CountOrZero, Share
from rlhf_lightning.hparams import Checked
from rlhf_lightning.preferences.annotation.database import StoreError
from rlhf_lightning.preferences.records import AnnotatorKind, Choice, Label, Pair, Side

Answer = Literal["left", "right", "tie", "both_bad", "skip"]
ANSWERS: tuple[Answer, ...] = ("left", "right", "tie", "both_bad", "skip")
Outcome = Literal["kept", "repeated", "differs", "undone", "gone"]
LONGEST_NAME = 60
LONGEST_REASON = 2000
CLOCK_SLACK = 1.0  # seconds that a browser's clock may run ahead of ours


@dataclass(frozen=True)
class Task:
    """A pair that is shown to one rater.

    Args:
        assignment_id: id to be returned with the label.
        pair: pair to be shown.
        shown_first: the response of the pair that is on the left.
        served: time of serving, in seconds since 1970.
        before: the label that was taken back for it, if one was.
    """

    assignment_id: int
    pair: Pair
    shown_first: Side
    served: float
    before: Label | None = None


@dataclass(frozen=True)
class Progress:
    """Progress of the whole store and of one rater.

    Args:
        wanted: labels that were asked for, gold questions not counted.
        done: how many of them there are.
        labelled: labels of this rater, gold questions among them.
        skipped: pairs that this rater skipped.
    """

    wanted: int
    done: int
    labelled: int
    skipped: int


def choice_of(answer: Answer, shown_first: Side) -> Choice:
    """Return the choice for the pair that an answer about the screen means."""
    other: Side = "second" if shown_first == "first" else "first"
    sides: dict[str, Side] = {"left": shown_first, "right": other}
    return sides.get(answer, cast(Choice, answer))


def answer_of(choice: Choice, shown_first: Side) -> Answer:
    """Return the answer about the screen that means this choice for the pair."""
    if choice in ("first", "second"):
        return "left" if choice == shown_first else "right"
    return cast(Answer, choice)


@dataclass(frozen=True)
class Sharing(Checked):
    """Rules by which pairs are shared among raters.

    Args:
        gold_share: share of questions whose answer is known, among those that a rater gets.
        lease_seconds: how long a pair is kept for the rater who sees it.
        seed: seeds the order of the two responses, and the places of the gold questions.
    """

    gold_share: Share = 0.1
    lease_seconds: Above0 = 1800.0
    seed: CountOrZero = 1


def one(db: sqlite3.Connection, query: str, *values: object) -> Any:
    """Return the first row of a query, None if it has none."""
    return db.execute(query, values).fetchone()


def assign(
    db: sqlite3.Connection, rater_id: int, sharing: Sharing, now: float
) -> sqlite3.Row | None:
    """Return the rater's open assignment, made first if there is none; None if nothing is left.

    Args:
        db: connection in a transaction.
        rater_id: row id of the rater.
        sharing: rules of sharing pairs.
        now: time in seconds since 1970.
    """
    expire(db, now)
    # The newest; the one before it is next after that.
    newest = "WHERE rater_id = ? AND state = 'open' ORDER BY assignment_id DESC LIMIT 1"
    found = one(db, f"SELECT * FROM assignments {newest}", rater_id)
    if found is not None:
        return cast(sqlite3.Row, found)
    rater = one(db, "SELECT * FROM raters WHERE rater_id = ?", rater_id)
    place = f"{sharing.seed}/{rater['name']}/{rater['served']}"
    position = None
    if uniform(f"gold/{place}") < sharing.gold_share:
        position = _unseen(db, rater_id, "is_gold = 1")
    if position is None:
        position = _next_open(db, rater)
    if position is None and one(db, "SELECT wanted FROM totals")[0] == 0:
        position = _unseen(db, rater_id, "is_gold = 1")  # a store of gold questions alone is a test
    if position is None:
        return None
    db.execute("UPDATE raters SET served = served + 1 WHERE rater_id = ?", (rater_id,))
    pair_id = one(db, "SELECT pair_id FROM pairs WHERE position = ?", position)[0]
    coin = uniform(f"order/{sharing.seed}/{rater['name']}/{pair_id}")
    return lease(db, position, rater_id, "first" if coin < 0.5 else "second", sharing, now)


def lease(
    db: sqlite3.Connection,
    position: int,
    rater_id: int,
    shown_first: Side,
    sharing: Sharing,
    now: float,
    *,
    redoes: int | None = None,
) -> sqlite3.Row:
    """Reserve a pair for a rater and return the assignment.

    Args:
        db: connection in a transaction.
        position: position of the pair.
        rater_id: row id of the rater.
        shown_first: the response of the pair that is shown first.
        sharing: rules of sharing pairs.
        now: time in seconds since 1970.
        redoes: the label that was taken back for it.
    """
    _take(db, position, 1)
    insert = (
        "INSERT INTO assignments (position, rater_id, shown_first, served, expires, redoes) "
        "VALUES (?, ?, ?, ?, ?, ?) RETURNING *"
    )
    values = position, rater_id, shown_first, now, now + sharing.lease_seconds, redoes
    return cast(sqlite3.Row, one(db, insert, *values))


def renew(db: sqlite3.Connection, row: sqlite3.Row, sharing: Sharing, now: float) -> bool:
    """Open an expired assignment again unless the pair has gone to others; return whether it is.

    Args:
        db: connection in a transaction.
        row: row of the assignment.
        sharing: rules of sharing pairs.
        now: time in seconds since 1970.
    """
    if row["state"] != "expired" or not _has_room(db, row["position"]):
        return False
    given = "SELECT 1 FROM labels WHERE rater_id = ? AND position = ? AND undone IS NULL"
    leased = "SELECT 1 FROM assignments WHERE rater_id = ? AND position = ? AND state = 'open'"
    own = (row["rater_id"], row["position"])
    if one(db, f"{given} UNION ALL {leased}", *own, *own):
        return False
    _take(db, row["position"], 1)
    db.execute(
        "UPDATE assignments SET state = 'open', expires = ? WHERE assignment_id = ?",
        (now + sharing.lease_seconds, row["assignment_id"]),
    )
    return True


def take_back(db: sqlite3.Connection, label: sqlite3.Row, sharing: Sharing, now: float) -> bool:
    """Undo a label and give its pair back to the rater; return whether that was possible.

    A skipped pair that others have completed meanwhile stays skipped.

    Args:
        db: connection in a transaction.
        label: the row of `labels`.
        sharing: rules of sharing pairs.
        now: time in seconds since 1970.
    """
    position, rater_id = label["position"], label["rater_id"]
    if label["choice"] == "skip" and not _has_room(db, position):
        return False
    undone = (iso_time(now), label["label_id"])
    db.execute("UPDATE labels SET undone = ? WHERE label_id = ?", undone)
    db.execute(
        "UPDATE assignments SET state = 'undone' WHERE assignment_id = ?", (label["assignment_id"],)
    )
    count(db, position, rater_id, label["choice"], -1)
    if label["choice"] != "skip":
        _take(db, position, -1)
    lease(db, position, rater_id, label["shown_first"], sharing, now, redoes=label["label_id"])
    return True


def count(db: sqlite3.Connection, position: int, rater_id: int, choice: str, step: int) -> None:
    """Add a person's label to the counters, or with `step` -1 take it off them."""
    column = "skipped" if choice == "skip" else "labelled"
    db.execute(f"UPDATE raters SET {column} = {column} + ? WHERE rater_id = ?", (step, rater_id))
    if choice == "skip":
        return
    change = "UPDATE pairs SET done = done + ? WHERE position = ? RETURNING done, wanted"
    pair = one(db, change, step, position)
    after = pair["done"] if step > 0 else pair["done"] + 1
    if after <= pair["wanted"]:  # labels beyond what was asked for are no progress
        db.execute("UPDATE totals SET done = done + ?", (step,))


def expire(db: sqlite3.Connection, now: float) -> None:
    """End the leases whose time is over; their raters get those pairs first if they come back."""
    rows = db.execute(
        "UPDATE assignments SET state = 'expired' WHERE state = 'open' AND expires <= ? "
        "RETURNING position, rater_id",
        (now,),
    ).fetchall()
    for position, rater_id in rows:
        _take(db, position, -1)
        db.execute(
            "UPDATE raters SET passed = min(passed, ?) WHERE rater_id = ?", (position - 1, rater_id)
        )


def uniform(text: str) -> float:
    """Return a number in [0, 1) that depends on `text` alone."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=7).digest(), "big") / 2**56


_NOT_SEEN = """
  AND NOT EXISTS (SELECT 1 FROM labels WHERE labels.rater_id = :rater
                  AND labels.position = pairs.position AND undone IS NULL)
  AND NOT EXISTS (SELECT 1 FROM assignments WHERE assignments.rater_id = :rater
                  AND assignments.position = pairs.position AND state = 'open')
"""


def _unseen(db: sqlite3.Connection, rater_id: int, condition: str) -> int | None:
    query = f"SELECT position FROM pairs WHERE {condition} {_NOT_SEEN} ORDER BY position LIMIT 1"
    row = db.execute(query, {"rater": rater_id}).fetchone()
    return None if row is None else cast(int, row[0])


def _next_open(db: sqlite3.Connection, rater: sqlite3.Row) -> int | None:
    # Pairs that others skip or release may come before `passed`: if none is left after it, start
    # over.
    for start in {rater["passed"]: None, 0: None}:
        is_open = f"is_gold = 0 AND taken < wanted AND position > {int(start)}"
        found = _unseen(db, rater["rater_id"], is_open)
        if found is not None:
            update = "UPDATE raters SET passed = ? WHERE rater_id = ?"
            db.execute(update, (found, rater["rater_id"]))
            return found
    return None


def _has_room(db: sqlite3.Connection, position: int) -> bool:
    query = "SELECT is_gold = 1 OR taken < wanted FROM pairs WHERE position = ?"
    return bool(one(db, query, position)[0])


def _take(db: sqlite3.Connection, position: int, step: int) -> None:
    """Count labels and leases of a pair: one more, or with `step` -1 one less."""
    db.execute("UPDATE pairs SET taken = taken + ? WHERE position = ?", (step, position))


_LABEL_COLUMNS = ("choice", "kind", "order", "created", "seconds", "reason", "margin")
LABELS = (
    "SELECT labels.*, pairs.pair_id, raters.name FROM labels "
    "JOIN pairs USING (position) JOIN raters USING (rater_id)"
)


def as_label(row: sqlite3.Row) -> Label:
    """Return a row of `LABELS` as a record."""
    same = {key: row[key] for key in ("pair_id", *_LABEL_COLUMNS) if key != "order"}
    return Label(annotator=row["name"], order=row["shown_first"], **same)


def insert_answer(
    db: sqlite3.Connection,
    assignment: sqlite3.Row,
    answer: Answer,
    seconds: float | None,
    reason: str | None,
    now: float,
) -> None:
    """Save a rater's answer to an open assignment.

    Args:
        db: connection in a transaction.
        assignment: the row of `assignments`.
        answer: about what was on the left and on the right.
        seconds: time by the rater's clock; an impossible one is replaced by ours.
        reason: comment of the rater; cut at `LONGEST_REASON` characters.
        now: time in seconds since 1970.
    """
    choice = choice_of(answer, assignment["shown_first"])
    took = max(now - assignment["served"], 0.0)
    if seconds is not None and 0 <= seconds <= took + CLOCK_SLACK:
        took = seconds
    position, rater_id = assignment["position"], assignment["rater_id"]
    values = {
        **dict(assignment),
        "choice": choice,
        "created": iso_time(now),
        "seconds": round(took, 3),
        "reason": (reason or "").strip()[:LONGEST_REASON] or None,
    }
    db.execute(
        "INSERT INTO labels (position, rater_id, assignment_id, choice, kind, shown_first, "
        "created, seconds, reason) VALUES (:position, :rater_id, :assignment_id, :choice, "
        "'person', :shown_first, :created, :seconds, :reason)",
        values,
    )
    db.execute(
        "UPDATE assignments SET state = 'labelled' WHERE assignment_id = :assignment_id", values
    )
    count(db, position, rater_id, choice, 1)
    if choice == "skip":  # another rater may take the pair
        _take(db, position, -1)


def insert_label(db: sqlite3.Connection, label: Label) -> bool:
    """Keep a label that was given elsewhere; return whether it is new.

    Raises:
        StoreError: if its pair is unknown.
    """
    pair = one(db, "SELECT position FROM pairs WHERE pair_id = ?", label.pair_id)
    if pair is None:
        raise StoreError(
            f"a label of {label.annotator} is about the pair {label.pair_id}, which the store does "
            "not have: import the pairs first"
        )
    row = one(db, "SELECT rater_id FROM raters WHERE name = ?", label.annotator)
    created = datetime.fromisoformat(label.created).timestamp()
    rater_id = row[0] if row else insert_rater(db, label.annotator, label.kind, created)
    added = db.execute(
        "INSERT INTO labels (position, rater_id, choice, kind, shown_first, created, seconds, "
        "reason, margin) VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?) "
        "ON CONFLICT (rater_id, position) WHERE undone IS NULL DO NOTHING",
        (pair[0], rater_id, *(getattr(label, key) for key in _LABEL_COLUMNS)),
    ).rowcount
    if added and label.kind == "person":
        count(db, pair[0], rater_id, label.choice, 1)
        if label.choice != "skip":
            _take(db, pair[0], 1)
    return bool(added)


def insert_rater(db: sqlite3.Connection, name: str, kind: AnnotatorKind, now: float) -> int:
    """Add a rater and return its number."""
    insert = "INSERT INTO raters (name, kind, created) VALUES (?, ?, ?) RETURNING rater_id"
    return cast(int, one(db, insert, name, kind, iso_time(now))[0])


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
