"""The store of labels: pairs in, people's choices out.

What a method returns is on the disk: SQLite with a write-ahead log and `synchronous=FULL`. A
confirmed label survives a killed process. Several processes may have one store open.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import sqlite3
import time
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rlhf_lightning.data.errors import Location
from rlhf_lightning.preferences.agreement import fleiss_kappa, raw_agreement, vote_counts
from rlhf_lightning.preferences.records import Choice, Label, Pair, Side, from_row, to_row

SHOWN_SECONDS = 600.0  # a pair on a rater's screen is not shown to another rater for so long
LONGEST_NAME = 60
TABLES = """
CREATE TABLE notes (key TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE pairs (
  position INTEGER PRIMARY KEY, pair_id TEXT NOT NULL UNIQUE, record TEXT NOT NULL,
  wanted INTEGER NOT NULL
);
CREATE TABLE labels (
  label_id INTEGER PRIMARY KEY AUTOINCREMENT, at_page INTEGER NOT NULL,
  pair_id TEXT NOT NULL, annotator TEXT NOT NULL, choice TEXT NOT NULL, kind TEXT NOT NULL,
  "order" TEXT NOT NULL, created TEXT NOT NULL, seconds REAL, reason TEXT, margin REAL,
  UNIQUE (pair_id, annotator)
);
CREATE TABLE shown (
  annotator TEXT PRIMARY KEY, pair_id TEXT NOT NULL, since REAL NOT NULL, choice TEXT, reason TEXT
)"""
_MARKS = {"application_id": 0x524C4846, "user_version": 2}  # "RLHF", and the version of the tables
_COLUMNS = tuple(field.name for field in fields(Label))
_INSERT = (
    "INSERT OR IGNORE INTO labels (at_page, " + ", ".join(f'"{name}"' for name in _COLUMNS) + ") "
    f"VALUES (?{', ?' * len(_COLUMNS)})"
)
_VOTES = (
    "SELECT count(*) FROM labels WHERE pair_id = pairs.pair_id AND kind = 'person' "
    "AND choice != 'skip'"
)
_NEXT = f"""
SELECT pair_id FROM pairs WHERE wanted > ({_VOTES})
  AND NOT EXISTS (SELECT 1 FROM labels WHERE pair_id = pairs.pair_id AND annotator = :name)
  AND pair_id NOT IN (SELECT pair_id FROM shown WHERE annotator != :name AND since > :since)
ORDER BY place(:name, pair_id) LIMIT 1"""


class StoreError(Exception):
    """The store cannot be used, or does not take what it is given; the message says why."""


@dataclass(frozen=True)
class Task:
    """A pair on the screen of a rater.

    Args:
        pair: pair to be shown.
        shown_first: the response of the pair that is on the left.
        choice: the choice that the rater took back, or None.
        reason: the reason given with it.
    """

    pair: Pair
    shown_first: Side
    choice: Choice | None = None
    reason: str | None = None


@dataclass(frozen=True)
class Progress:
    """Labels wanted of people and given, and those of one rater (skips among them)."""

    wanted: int
    done: int
    own: int


def iso_time(seconds: float) -> str:
    """Return seconds since 1970 as text, with the zone."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")


def _place(*texts: str) -> int:
    return int.from_bytes(hashlib.blake2b("/".join(texts).encode(), digest_size=7).digest(), "big")


def side_shown_first(rater: str, pair_id: str) -> Side:
    """Return the response that a rater sees on the left: random, and the same every time."""
    return "first" if _place("order", rater, pair_id) % 2 else "second"


class LabelStore:
    """A SQLite file of pairs and labels.

    Args:
        path: path of the file; made if there is none.
        clock: returns seconds since 1970.

    Raises:
        StoreError: if the file cannot be used.
    """

    def __init__(self, path: str | Path, *, clock: Callable[[], float] = time.time) -> None:
        """Open the file."""
        self.path = Path(path)
        self._clock = clock
        with self._errors():
            self._check_free()
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.touch(mode=0o600)  # it holds the token
            self._db = sqlite3.connect(path, timeout=30, isolation_level=None)
            self._db.row_factory = sqlite3.Row
            self._db.create_function("place", 2, _place, deterministic=True)
            self._prepare()

    def __enter__(self) -> LabelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self._db.close()

    @property
    def token(self) -> str:
        """The random text that opens the page of this store."""
        return self.noted("token")[0]

    def add_pairs(self, pairs: Iterable[Pair], *, labels_per_pair: int) -> int:
        """Add pairs, and return how many were new.

        Args:
            pairs: one whose name is known is left as it is.
            labels_per_pair: labels of different people that each of them gets.

        Raises:
            StoreError: if a text cannot be stored.
        """
        insert = "INSERT OR IGNORE INTO pairs (pair_id, record, wanted) VALUES (?, ?, ?)"
        texts = ((x.pair_id, json.dumps(to_row(x), ensure_ascii=False)) for x in pairs)
        with self._change() as db:
            return db.executemany(insert, ((*text, labels_per_pair) for text in texts)).rowcount

    def add_labels(self, labels: Iterable[Label]) -> int:
        """Add labels that were given elsewhere, and return how many were new.

        A label of an annotator who has one on that pair is left out.

        Raises:
            StoreError: if a label's pair is unknown.
        """
        with self._change() as db:
            return sum(self._insert(db, label, at_page=False) for label in labels)

    def enter(self, name: str) -> str:
        """Return a rater's name as the store spells it, whatever its case and spaces.

        Raises:
            StoreError: if the name is empty, too long, or has characters that cannot be seen.
        """
        clean = " ".join(unicodedata.normalize("NFC", name).split())
        if not 0 < len(clean) <= LONGEST_NAME or not clean.isprintable():
            raise StoreError(f"a name has 1 to {LONGEST_NAME} visible characters")
        known = self._rows("SELECT annotator FROM labels UNION SELECT annotator FROM shown")
        return {row[0].casefold(): row[0] for row in known}.get(clean.casefold(), clean)

    def next_task(self, rater: str) -> Task | None:
        """Return what the rater is to label now, the same until it is labelled; None at the end.

        The next pair is the first by a hash of rater and pair.
        """
        now = self._clock()
        own = "SELECT * FROM shown WHERE annotator = ? AND since > ?"
        show = "INSERT OR REPLACE INTO shown VALUES (?, ?, ?, NULL, NULL) RETURNING *"
        with self._change() as db:
            row = db.execute(own, (rater, now - SHOWN_SECONDS)).fetchone()
            if row is None:
                given = {"name": rater, "since": now - SHOWN_SECONDS}
                found = db.execute(_NEXT, given).fetchone()
                if found is None:
                    return None
                row = db.execute(show, (rater, found[0], now)).fetchone()
        (record,) = self._rows("SELECT record FROM pairs WHERE pair_id = ?", row["pair_id"])
        shown_first = side_shown_first(rater, row["pair_id"])
        return Task(self._pair(record[0]), shown_first, row["choice"], row["reason"])

    def label(self, rater: str, pair_id: str, choice: Choice, *, reason: str | None = None) -> bool:
        """Keep a rater's choice; return False if the rater has labelled this pair before.

        The label's `seconds` is the time since the pair was shown, unless that is too long to have
        been spent on it.

        Raises:
            StoreError: if the pair is unknown.
        """
        now = self._clock()
        with self._change() as db:
            gone = "DELETE FROM shown WHERE annotator = ? AND pair_id = ? RETURNING since"
            row = db.execute(gone, (rater, pair_id)).fetchall()
            took = now - row[0]["since"] if row else SHOWN_SECONDS
            seconds = round(took, 3) if 0 <= took < SHOWN_SECONDS else None
            side, why = side_shown_first(rater, pair_id), (reason or "").strip() or None
            label = Label(pair_id, rater, choice, "person", side, iso_time(now), seconds, why)
            return self._insert(db, label, at_page=True)

    def undo(self, rater: str) -> bool:
        """Take the rater's last label at the page back, so that its pair is shown next."""
        last = "SELECT max(label_id) FROM labels WHERE annotator = ? AND at_page"
        take = f"DELETE FROM labels WHERE label_id = ({last}) RETURNING pair_id, choice, reason"
        with self._change() as db:
            rows = db.execute(take, (rater,)).fetchall()
            for row in rows:
                values = (rater, row["pair_id"], self._clock(), row["choice"], row["reason"])
                db.execute("INSERT OR REPLACE INTO shown VALUES (?, ?, ?, ?, ?)", values)
        return bool(rows)

    def progress(self, rater: str = "") -> Progress:
        """Return the progress of the whole store and of this rater."""
        query = (
            f"SELECT total(wanted), total(min(wanted, ({_VOTES}))), "
            "(SELECT count(*) FROM labels WHERE annotator = ? AND at_page) FROM pairs"
        )
        return Progress(*map(int, self._rows(query, rater)[0]))

    def pairs(self) -> Iterator[Pair]:
        """Yield all pairs in the order in which they were added."""
        for row in self._rows("SELECT record FROM pairs ORDER BY position"):
            yield self._pair(row["record"])

    def labels(self, *, at_page: bool = False) -> Iterator[Label]:
        """Yield all labels, or those that were given at the page, in the order they were given."""
        for row in self._rows("SELECT * FROM labels WHERE at_page >= ? ORDER BY label_id", at_page):
            yield Label(**{name: row[name] for name in _COLUMNS})

    def note(self, key: str, value: str) -> None:
        """Keep a text under a key."""
        with self._change() as db:
            db.execute("INSERT OR REPLACE INTO notes VALUES (?, ?)", (key, value))

    def noted(self, like: str) -> list[str]:
        """Return the texts whose keys are like this, `%` for any characters."""
        rows = self._rows("SELECT value FROM notes WHERE key LIKE ? ORDER BY key", like)
        return [str(row[0]) for row in rows]

    def _check_free(self) -> None:
        """Raise if the file is something else, before SQLite may write to it."""
        if not self.path.exists() or not (size := self.path.stat().st_size):
            return
        with closing(sqlite3.connect(f"{self.path.absolute().as_uri()}?mode=ro", uri=True)) as db:
            (tables,) = db.execute("SELECT count(*) FROM sqlite_master").fetchone()
            marks = [db.execute(f"PRAGMA {mark}").fetchone()[0] for mark in _MARKS]
        # SQLite takes a file below 512 bytes for an empty one.
        if size < 512 or (tables and marks != [*_MARKS.values()]):
            raise StoreError(f"{self.path} is no store of labels of this release: name another")

    def _prepare(self) -> None:
        self._db.execute("PRAGMA journal_mode = WAL")
        self._db.execute("PRAGMA synchronous = FULL")
        self._db.execute("PRAGMA fullfsync = ON")  # macOS: through the disk's own cache as well
        with self._change() as db:
            if not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in TABLES.split(";\n"):
                    db.execute(statement)
                token = secrets.token_urlsafe(24)
                db.execute("INSERT INTO notes VALUES ('token', ?)", (token,))
                for mark, value in _MARKS.items():
                    db.execute(f"PRAGMA {mark} = {value}")

    def _insert(self, db: sqlite3.Connection, label: Label, *, at_page: bool) -> bool:
        if not db.execute("SELECT 1 FROM pairs WHERE pair_id = ?", (label.pair_id,)).fetchone():
            raise StoreError(f"the pair {label.pair_id} is missing: import the pairs first")
        values = (at_page, *(getattr(label, name) for name in _COLUMNS))
        return bool(db.execute(_INSERT, values).rowcount)

    def _pair(self, record: str) -> Pair:
        with self._errors():
            return from_row(Pair, json.loads(record), Location(str(self.path)))

    def _rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        with self._errors():
            return self._db.execute(query, values).fetchall()

    @contextmanager
    def _change(self) -> Iterator[sqlite3.Connection]:
        """Make what is done inside one change, on the disk at the end, undone after an error."""
        with self._errors():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield self._db
                self._db.execute("COMMIT")
            except BaseException:
                if self._db.in_transaction:  # a full disk ends the transaction by itself
                    self._db.execute("ROLLBACK")
                raise

    @contextmanager
    def _errors(self) -> Iterator[None]:
        try:
            yield
        except (OSError, sqlite3.Error, UnicodeEncodeError, json.JSONDecodeError) as error:
            what = str(error).partition(" with text")[0]  # raw bytes of the file are behind it
            raise StoreError(f"{self.path} cannot be used as a store of labels: {what}") from error


def describe_agreement(store: LabelStore) -> str:
    """Return how far people agree on the pairs that several of them labelled, as a line."""
    counts = vote_counts(x for x in store.labels() if x.kind == "person")
    several = counts[counts.sum(1) >= 2]
    if not len(several):
        return "Agreement: no pair has two labels yet"
    share, kappa = raw_agreement(several), fleiss_kappa(several)
    return f"Agreement: {share:.0%} on {len(several)} pairs with several labels, kappa {kappa:.2f}"


def describe_store(store: LabelStore) -> str:
    """Return progress, agreement and everybody's number of labels, as lines for a terminal."""
    progress, imports = store.progress(), ", ".join(store.noted("import %"))
    total = f"{store.path}: {progress.done} of {progress.wanted} labels"
    total += f", pairs of {imports}" if imports else ""
    counts = Counter(label.annotator for label in store.labels() if label.choice != "skip")
    own = (f"{name}: {count} labels" for name, count in counts.items())
    return "\n".join([total, describe_agreement(store), *own])
