"""Who rates what next: leases on pairs, so that no pair gets more labels than were asked for.

Every function changes an open transaction of `Writer`; transactions are one after the other, so
what is counted here cannot change meanwhile. A lease that is not used ends, and the pair goes to
somebody else.
"""

from __future__ import annotations

import hashlib
import sqlite3
from dataclasses import dataclass
from typing import cast

from rlhf_lightning.hparams import Checked, number
from rlhf_lightning.preferences.records import Side


@dataclass(frozen=True)
class Sharing(Checked):
    """How pairs are shared among raters.

    Args:
        gold_share: share of questions whose answer is known, among those that a rater gets.
        lease_seconds: how long a pair is kept for the rater who sees it.
        seed: of the order of the two answers, and of where the gold questions come.
    """

    gold_share: float = number(0.1, at_least=0, at_most=1)
    lease_seconds: float = number(1800.0, above=0)
    seed: int = number(1, at_least=0)


def current(db: sqlite3.Connection, rater_id: int) -> sqlite3.Row | None:
    """Return the rater's newest open assignment; the one before it is next after that."""
    return cast(
        sqlite3.Row | None,
        db.execute(
            "SELECT * FROM assignments WHERE rater_id = ? AND state = 'open' "
            "ORDER BY assignment_id DESC LIMIT 1",
            (rater_id,),
        ).fetchone(),
    )


def assign(
    db: sqlite3.Connection, rater_id: int, sharing: Sharing, now: float
) -> sqlite3.Row | None:
    """Return the rater's open assignment, made first if there is none; None if nothing is left.

    Args:
        db: in a transaction.
        rater_id: of the rater.
        sharing: the rules.
        now: seconds since 1970.
    """
    expire(db, now)
    found = current(db, rater_id)
    if found is not None:
        return found
    rater = db.execute("SELECT * FROM raters WHERE rater_id = ?", (rater_id,)).fetchone()
    place = f"{sharing.seed}/{rater['name']}/{rater['served']}"
    position = None
    if uniform(f"gold/{place}") < sharing.gold_share:
        position = _unseen_gold(db, rater_id)
    if position is None:
        position = _next_open(db, rater)
    if position is None and db.execute("SELECT wanted FROM totals").fetchone()[0] == 0:
        position = _unseen_gold(db, rater_id)  # a store of gold questions alone is a test
    if position is None:
        return None
    db.execute("UPDATE raters SET served = served + 1 WHERE rater_id = ?", (rater_id,))
    pair_id = db.execute("SELECT pair_id FROM pairs WHERE position = ?", (position,)).fetchone()[0]
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
    """Keep a pair for a rater and return the assignment.

    Args:
        db: in a transaction.
        position: of the pair.
        rater_id: of the rater.
        shown_first: which answer of the pair is shown first.
        sharing: the rules.
        now: seconds since 1970.
        redoes: the label that was taken back for it.
    """
    db.execute("UPDATE pairs SET taken = taken + 1 WHERE position = ?", (position,))
    return cast(
        sqlite3.Row,
        db.execute(
            "INSERT INTO assignments (position, rater_id, shown_first, served, expires, redoes) "
            "VALUES (?, ?, ?, ?, ?, ?) RETURNING *",
            (position, rater_id, shown_first, now, now + sharing.lease_seconds, redoes),
        ).fetchone(),
    )


def renew(db: sqlite3.Connection, row: sqlite3.Row, sharing: Sharing, now: float) -> bool:
    """Open an expired assignment again unless the pair has gone to others; return whether it is.

    Args:
        db: in a transaction.
        row: the assignment.
        sharing: the rules.
        now: seconds since 1970.
    """
    if row["state"] != "expired" or not _has_room(db, row["position"]):
        return False
    given = "SELECT 1 FROM labels WHERE rater_id = ? AND position = ? AND undone IS NULL"
    leased = "SELECT 1 FROM assignments WHERE rater_id = ? AND position = ? AND state = 'open'"
    own = (row["rater_id"], row["position"])
    if db.execute(f"{given} UNION ALL {leased}", own + own).fetchone():
        return False
    db.execute("UPDATE pairs SET taken = taken + 1 WHERE position = ?", (row["position"],))
    db.execute(
        "UPDATE assignments SET state = 'open', expires = ? WHERE assignment_id = ?",
        (now + sharing.lease_seconds, row["assignment_id"]),
    )
    return True


def take_back(
    db: sqlite3.Connection, label: sqlite3.Row, sharing: Sharing, now: float, when: str
) -> bool:
    """Undo a label and give its pair back to the rater; return whether that was possible.

    A skipped pair that others have completed meanwhile stays skipped.

    Args:
        db: in a transaction.
        label: the row of `labels`.
        sharing: the rules.
        now: seconds since 1970.
        when: the same as text.
    """
    skipped = label["choice"] == "skip"
    if skipped and not _has_room(db, label["position"]):
        return False
    db.execute("UPDATE labels SET undone = ? WHERE label_id = ?", (when, label["label_id"]))
    db.execute(
        "UPDATE assignments SET state = 'undone' WHERE assignment_id = ?", (label["assignment_id"],)
    )
    count(db, label["position"], label["rater_id"], label["choice"], -1)
    if not skipped:
        db.execute("UPDATE pairs SET taken = taken - 1 WHERE position = ?", (label["position"],))
    lease(
        db,
        label["position"],
        label["rater_id"],
        label["shown_first"],
        sharing,
        now,
        redoes=label["label_id"],
    )
    return True


def count(db: sqlite3.Connection, position: int, rater_id: int, choice: str, step: int) -> None:
    """Add a person's label to the counters, or with `step` -1 take it off them."""
    column = "skipped" if choice == "skip" else "labelled"
    db.execute(
        f"UPDATE raters SET {column} = {column} + ? WHERE rater_id = ?",
        (step, rater_id),
    )
    if choice == "skip":
        return
    pair = db.execute(
        "UPDATE pairs SET done = done + ? WHERE position = ? RETURNING done, wanted",
        (step, position),
    ).fetchone()
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
        db.execute("UPDATE pairs SET taken = taken - 1 WHERE position = ?", (position,))
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


def _unseen_gold(db: sqlite3.Connection, rater_id: int) -> int | None:
    row = db.execute(
        f"SELECT position FROM pairs WHERE is_gold = 1 {_NOT_SEEN} ORDER BY position LIMIT 1",
        {"rater": rater_id},
    ).fetchone()
    return None if row is None else cast(int, row[0])


def _next_open(db: sqlite3.Connection, rater: sqlite3.Row) -> int | None:
    # What others skip or let go may lie before `passed`: if nothing is left after it, look anew.
    for start in {rater["passed"]: None, 0: None}:
        row = db.execute(
            "SELECT position FROM pairs WHERE is_gold = 0 AND taken < wanted AND position > :start "
            f"{_NOT_SEEN} ORDER BY position LIMIT 1",
            {"rater": rater["rater_id"], "start": start},
        ).fetchone()
        if row is not None:
            db.execute(
                "UPDATE raters SET passed = ? WHERE rater_id = ?", (row[0], rater["rater_id"])
            )
            return cast(int, row[0])
    return None


def _has_room(db: sqlite3.Connection, position: int) -> bool:
    row = db.execute(
        "SELECT is_gold = 1 OR taken < wanted FROM pairs WHERE position = ?", (position,)
    )
    return bool(row.fetchone()[0])
