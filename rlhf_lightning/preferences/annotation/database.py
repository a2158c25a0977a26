"""The file of pairs, raters, assignments and labels: its tables, opening it, and writing to it.

SQLite with a write-ahead log. `synchronous=FULL`: a commit returns when the log is on the disk, so
an acknowledged label survives not only a killed process, which `NORMAL` would survive as well, but
a power cut.
"""

from __future__ import annotations

import os
import secrets
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

# Tells our file from any other SQLite file, and one version of the tables from another.
APPLICATION_ID = 0x524C4846  # "RLHF"
VERSION = 1
BUSY_SECONDS = 30.0  # how long another process, such as an import, may keep the file to itself

TABLES = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE totals (wanted INTEGER NOT NULL, done INTEGER NOT NULL);
INSERT INTO totals VALUES (0, 0);

-- `position` is the order in which pairs are served. `done` counts labels of people, `taken` these
-- and the leases that may become one. A gold question is asked of all: it wants no number.
CREATE TABLE pairs (
  position INTEGER PRIMARY KEY,
  pair_id TEXT NOT NULL UNIQUE,
  record TEXT NOT NULL,
  is_gold INTEGER NOT NULL,
  wanted INTEGER NOT NULL,
  taken INTEGER NOT NULL DEFAULT 0,
  done INTEGER NOT NULL DEFAULT 0
);
CREATE INDEX open_pairs ON pairs (position) WHERE is_gold = 0 AND taken < wanted;
CREATE INDEX gold_pairs ON pairs (position) WHERE is_gold = 1;

-- `passed` is a position: before it a rater has probably nothing left, so the search starts there.
CREATE TABLE raters (
  rater_id INTEGER PRIMARY KEY,
  name TEXT NOT NULL UNIQUE,
  kind TEXT NOT NULL,
  created TEXT NOT NULL,
  passed INTEGER NOT NULL DEFAULT 0,
  served INTEGER NOT NULL DEFAULT 0,
  labelled INTEGER NOT NULL DEFAULT 0,
  skipped INTEGER NOT NULL DEFAULT 0
);

-- state: open (a lease), labelled, expired, undone
CREATE TABLE assignments (
  assignment_id INTEGER PRIMARY KEY AUTOINCREMENT,
  position INTEGER NOT NULL REFERENCES pairs,
  rater_id INTEGER NOT NULL REFERENCES raters,
  shown_first TEXT NOT NULL,
  served REAL NOT NULL,
  expires REAL NOT NULL,
  state TEXT NOT NULL DEFAULT 'open',
  redoes INTEGER REFERENCES labels
);
CREATE UNIQUE INDEX leases ON assignments (rater_id, position) WHERE state = 'open';
CREATE INDEX ends ON assignments (expires) WHERE state = 'open';

-- Nothing is deleted: a label that was taken back keeps the time of that in `undone`.
CREATE TABLE labels (
  label_id INTEGER PRIMARY KEY AUTOINCREMENT,
  position INTEGER NOT NULL REFERENCES pairs,
  rater_id INTEGER NOT NULL REFERENCES raters,
  assignment_id INTEGER UNIQUE REFERENCES assignments,
  choice TEXT NOT NULL,
  kind TEXT NOT NULL,
  shown_first TEXT NOT NULL,
  created TEXT NOT NULL,
  seconds REAL,
  reason TEXT,
  margin REAL,
  undone TEXT
);
CREATE UNIQUE INDEX given ON labels (rater_id, position) WHERE undone IS NULL;
CREATE INDEX latest ON labels (rater_id, label_id) WHERE undone IS NULL;
"""


class StoreError(Exception):
    """The file of labels cannot be used; the message says why and what to do."""


def connect(path: Path, *, read_only: bool = False) -> sqlite3.Connection:
    """Return a connection to the store, made first if there is none.

    Args:
        path: file of the store; `-wal` and `-shm` files exist next to it while it is open.
        read_only: refuse to write through this connection.

    Raises:
        StoreError: if the file is no store of ours, or cannot be opened.
    """
    db = None
    try:
        _check_ours(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):  # SQLite gives its other files the mode of this one
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
        db = sqlite3.connect(
            path, timeout=BUSY_SECONDS, isolation_level=None, check_same_thread=False
        )
        _prepare(db, path)
        db.execute(f"PRAGMA query_only = {int(read_only)}")
    except (OSError, sqlite3.Error, StoreError) as error:
        if db is not None:
            db.close()
        if isinstance(error, StoreError):
            raise
        raise StoreError(
            f"{path} is no store of labels ({error}): give another name, or move the file away"
        ) from error
    db.row_factory = sqlite3.Row
    return db


def _check_ours(path: Path) -> None:
    """Check a file before SQLite may write to it, and to those next to it.

    Raises:
        StoreError: if SQLite would write to a foreign file.
    """
    left = [file for end in ("-wal", "-shm", "-journal") if (file := Path(f"{path}{end}")).exists()]
    if not path.exists():
        if left:
            raise StoreError(
                f"{left[0]} is what a file that is not there has left, and a new store would empty "
                "it: bring that back, or give another name"
            )
        return
    # SQLite would write an index of the log beside a text. There are no locks on the log itself.
    wal = Path(f"{path}-wal")
    log = b""
    if wal.is_file():
        with wal.open("rb") as beginning:
            log = beginning.read(3)
    if 0 < path.stat().st_size < 512 or (log and log != b"\x37\x7f\x06"):
        raise StoreError(f"{path} is no store of labels: give another name, or move the file away")
    # Through SQLite: a file that is closed takes along all locks of this process on it.
    where = f"{path.absolute().as_uri()}?mode=ro"
    with closing(sqlite3.connect(where, BUSY_SECONDS, uri=True)) as db:
        # In this order: another process may be making the store, tables and id at once.
        filled = not _is_empty(db)
        if filled and db.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
            raise StoreError(f"{path} is a SQLite file of something else: give another name")


def _prepare(db: sqlite3.Connection, path: Path) -> None:
    db.execute("PRAGMA foreign_keys = ON")
    db.execute("PRAGMA synchronous = FULL")
    db.execute("PRAGMA fullfsync = ON")  # macOS: through the disk's own cache as well
    if _is_empty(db):
        with transaction(db):
            if _is_empty(db):  # still: another process may have been faster
                for statement in TABLES.split(";\n"):
                    db.execute(statement)
                db.execute("INSERT INTO meta VALUES ('secret', ?)", (secrets.token_hex(32),))
                db.execute(f"PRAGMA application_id = {APPLICATION_ID}")
                db.execute(f"PRAGMA user_version = {VERSION}")
    version = db.execute("PRAGMA user_version").fetchone()[0]
    if version != VERSION:
        raise StoreError(
            f"{path} has tables of version {version}, this release reads {VERSION}: export the "
            "labels with the release that wrote it, and import them into a new store"
        )
    mode = db.execute("PRAGMA journal_mode = WAL").fetchone()[0]
    if mode != "wal":
        raise StoreError(
            f"{path} lies on a file system without shared memory (journal mode {mode}): put the "
            "store on a local disk"
        )


def file_ids(path: Path, target: Path) -> list[tuple[int, int] | None]:
    """Return device and inode of a store's file, its log and its index; None for a missing one.

    Args:
        path: path of the file, possibly a link.
        target: its target when it was opened; SQLite keeps its other files next to that.
    """
    ids: list[tuple[int, int] | None] = []
    for file in (str(path), f"{target}-wal", f"{target}-shm"):
        try:
            found = os.stat(file)
        except OSError:
            ids.append(None)
        else:
            ids.append((found.st_dev, found.st_ino))
    return ids


def _is_empty(db: sqlite3.Connection) -> bool:
    return db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 0


@contextmanager
def transaction(db: sqlite3.Connection) -> Iterator[None]:
    """Make what is done inside one change: at the end it is on the disk, after an error undone."""
    db.execute("BEGIN IMMEDIATE")
    try:
        yield
        db.execute("COMMIT")
    except BaseException:
        if db.in_transaction:  # a full disk ends the transaction by itself
            db.execute("ROLLBACK")
        raise
