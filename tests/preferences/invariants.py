"""What holds in every store of labels at any time, counted anew from its rows."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def check_store(path: Path) -> None:
    """Compare the counters with the rows, and the rows with what was asked for."""
    db = sqlite3.connect(path)
    try:
        assert db.execute("PRAGMA integrity_check").fetchone()[0] == "ok"
        assert db.execute("PRAGMA foreign_key_check").fetchall() == []
        done = counts(db, "labels WHERE undone IS NULL AND kind = 'person' AND choice != 'skip'")
        leased = counts(db, "assignments WHERE state = 'open'")
        progress = 0
        for position, wanted, taken, counted, is_gold in db.execute(
            "SELECT position, wanted, taken, done, is_gold FROM pairs"
        ):
            assert counted == done.get(position, 0)
            progress += min(counted, wanted)
            if not is_gold:
                assert taken == counted + leased.get(position, 0)
        assert db.execute("SELECT done FROM totals").fetchone()[0] == progress
        wanted = db.execute("SELECT total(wanted) FROM pairs").fetchone()[0]
        assert db.execute("SELECT wanted FROM totals").fetchone()[0] == wanted
        for column, choice in (("labelled", "!="), ("skipped", "=")):
            wrong = db.execute(
                f"SELECT name FROM raters WHERE {column} != (SELECT count(*) FROM labels WHERE "
                f"labels.rater_id = raters.rater_id AND undone IS NULL AND choice {choice} 'skip' "
                "AND labels.kind = 'person')"
            ).fetchall()
            assert wrong == []
    finally:
        db.close()


def counts(db: sqlite3.Connection, rows: str) -> dict[int, int]:
    return dict(db.execute(f"SELECT position, count(*) FROM {rows} GROUP BY position").fetchall())


def most_labels(path: Path) -> int:
    """Return the largest number of labels that people gave to one pair that is no gold question."""
    db = sqlite3.connect(path)
    try:
        return int(db.execute("SELECT max(done) FROM pairs WHERE is_gold = 0").fetchone()[0])
    finally:
        db.close()
