"""The store of labels: pairs in, people's judgements out, shared among raters, never lost.

What a method returns is on the disk. Several processes may have one store open: a server and, say,
an export.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import TypeVar, cast

from rlhf_lightning.data.errors import Location
from rlhf_lightning.preferences.annotation import assignment as rules
from rlhf_lightning.preferences.annotation.assignment import LABELS, Answer, Outcome, Sharing, Task
from rlhf_lightning.preferences.annotation.database import (
    StoreError,
    connect,
    file_ids,
    transaction,
)
from rlhf_lightning.preferences.records import Label, Pair, from_row, to_row

ResultT = TypeVar("ResultT")
_NEWEST = (
    "SELECT * FROM assignments WHERE rater_id = ? AND state = 'open' AND expires > ? "
    "ORDER BY assignment_id DESC LIMIT 1"
)


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
        self._reader = connect(self.path, read_only=True)
        self._writer = connect(self.path)
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._target = self.path.resolve()
        self._file_ids = file_ids(self.path, self._target)

    def __enter__(self) -> LabelStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Finish what is being written, and close the file."""
        with self._writing, self._reading:
            self._writer.close()
            self._reader.close()

    @property
    def secret(self) -> str:
        """A random text that belongs to this store, for signing cookies."""
        return self._noted("secret")[0]

    def add_pairs(self, pairs: Iterable[Pair], *, ratings_per_pair: int) -> int:
        """Add pairs behind those that are there, and return how many were new.

        Args:
            pairs: served in this order; one whose name is known is left as it is.
            ratings_per_pair: labels of different people that each of them gets; gold questions are
                asked of all raters.

        Raises:
            StoreError: if a text cannot be stored.
        """
        rows = [
            (
                pair.pair_id,
                json.dumps(to_row(pair), ensure_ascii=False),
                pair.gold is not None,
                0 if pair.gold is not None else ratings_per_pair,
            )
            for pair in pairs
        ]

        def change(db: sqlite3.Connection) -> int:
            added = 0
            for row in rows:
                cursor = db.execute(
                    "INSERT INTO pairs (pair_id, record, is_gold, wanted) VALUES (?, ?, ?, ?) "
                    "ON CONFLICT (pair_id) DO NOTHING",
                    row,
                )
                added += cursor.rowcount
                if cursor.rowcount:
                    db.execute("UPDATE totals SET wanted = wanted + ?", (row[3],))
            return added

        return self._write(change)

    def add_labels(self, labels: Iterable[Label]) -> int:
        """Add labels that were given elsewhere, and return how many were new.

        A label of a rater who has one on that pair is left out. Those of people count towards the
        ratings that were asked for.

        Raises:
            StoreError: if a label's pair is unknown.
        """
        given = list(labels)
        return self._write(lambda db: sum(rules.insert_label(db, label) for label in given))

    def enter(self, name: str) -> tuple[int, bool]:
        """Return the number of the one of this name, made if there is none, and whether it is new.

        Case and the number of spaces make no other name.

        Raises:
            StoreError: if the name is empty or too long, or that of an annotator who is no person.
        """
        clean = rules.clean_name(name)

        def change(db: sqlite3.Connection) -> tuple[int, bool]:
            # SQLite folds the case of ASCII alone.
            known = db.execute("SELECT rater_id, kind, name FROM raters").fetchall()
            alike = [row for row in known if row["name"].casefold() == clean.casefold()]
            row = max(alike, key=lambda row: row["name"] == clean, default=None)
            if row is not None and row["kind"] != "person":
                raise StoreError(f"{clean} is the name of a {row['kind']}: choose another name")
            if row is not None:
                return cast(int, row[0]), False
            return rules.insert_rater(db, clean, "person", self._clock()), True

        return self._write(change)

    def next_task(self, rater_id: int, sharing: Sharing) -> Task | None:
        """Return what the rater is to label now, the same until it is labelled; None at the end."""
        now = self._clock()
        found = self._read(_NEWEST, (rater_id, now))
        if found:
            return self._task(found[0])
        row = self._write(lambda db: rules.assign(db, rater_id, sharing, now))
        return None if row is None else self._task(row)

    def label(
        self,
        rater_id: int,
        assignment_id: int,
        answer: Answer,
        sharing: Sharing,
        *,
        seconds: float | None = None,
        reason: str | None = None,
    ) -> Outcome:
        """Save a rater's answer, and choose the next pair with it.

        Args:
            rater_id: row id of the rater.
            assignment_id: id of a `Task` of this rater.
            answer: about what is on the left and on the right of the screen.
            sharing: rules of sharing pairs.
            seconds: time that the rater took; None takes the time since the pair was served.
            reason: comment of the rater, or None.

        Returns:
            `kept`; `repeated` if it is there already; `differs` if another answer is there, which
            stays; `undone` if it was taken back elsewhere; `gone` if the lease had ended and others
            have completed the pair, or it never was this rater's.
        """
        now = self._clock()

        def change(db: sqlite3.Connection) -> Outcome:
            query = "SELECT * FROM assignments WHERE assignment_id = ? AND rater_id = ?"
            row = rules.one(db, query, assignment_id, rater_id)
            if row is None:
                return "gone"
            if row["state"] == "undone":
                return "undone"
            if row["state"] == "labelled":
                query = "SELECT choice FROM labels WHERE assignment_id = ?"
                given = rules.one(db, query, assignment_id)[0]
                return (
                    "repeated"
                    if given == rules.choice_of(answer, row["shown_first"])
                    else "differs"
                )
            if row["state"] != "open" and not rules.renew(db, row, sharing, now):
                return "gone"
            rules.insert_answer(db, row, answer, seconds, reason, now)
            rules.assign(db, rater_id, sharing, now)
            return "kept"

        return self._write(change)

    def undo(self, rater_id: int, sharing: Sharing) -> bool:
        """Take the rater's last label back, so that its pair is the next task.

        Returns:
            Whether there was one; a skipped pair that others have completed stays skipped.
        """
        now = self._clock()

        def change(db: sqlite3.Connection) -> bool:
            rules.expire(db, now)
            label = db.execute(
                "SELECT * FROM labels WHERE rater_id = ? AND undone IS NULL "
                "AND assignment_id IS NOT NULL ORDER BY label_id DESC LIMIT 1",
                (rater_id,),
            ).fetchone()
            return label is not None and rules.take_back(db, label, sharing, now)

        return self._write(change)

    def progress(self, rater_id: int | None = None) -> rules.Progress:
        """Return the progress of the whole store and of this rater."""
        own = self._read("SELECT labelled, skipped FROM raters WHERE rater_id = ?", (rater_id,))
        labelled, skipped = own[0] if own else (0, 0)
        wanted, done = self._read("SELECT wanted, done FROM totals")[0]
        return rules.Progress(wanted, done, labelled, skipped)

    def rater_name(self, rater_id: int) -> str:
        """Return the name of the rater of this number."""
        rows = self._read("SELECT name FROM raters WHERE rater_id = ?", (rater_id,))
        return cast(str, rows[0][0])

    def pairs(self) -> Iterator[Pair]:
        """Yield all pairs in their order."""
        for row in self._read("SELECT record FROM pairs ORDER BY position"):
            yield self._pair(row["record"])

    def labels(self) -> Iterator[Label]:
        """Yield all labels that were not taken back, in the order in which they were given."""
        for row in self._read(f"{LABELS} WHERE undone IS NULL ORDER BY label_id"):
            yield rules.as_label(row)

    def exports(self) -> list[str]:
        """Return the digests of the files that `note_export` recorded."""
        return self._noted("export %")

    def note_export(self, file: str, digest: str) -> None:
        """Keep what an export has written into a file, which a later one may replace."""
        self._note(f"export {file}", digest)

    def imports(self) -> list[str]:
        """Return the names of the files that `note_import` recorded."""
        return self._noted("import %")

    def note_import(self, file: Path) -> None:
        """Keep the name of a file whose pairs were added."""
        self._note(f"import {file.resolve()}", str(file))

    def question(self) -> str | None:
        """Return the question under which people have labelled; None before the first label."""
        labelled = "SELECT 1 FROM labels WHERE assignment_id IS NOT NULL AND undone IS NULL LIMIT 1"
        return next(iter(self._noted("question")), None) if self._read(labelled) else None

    def note_question(self, text: str) -> None:
        """Keep the question that raters are asked from now on."""
        self._note("question", text)

    def _note(self, key: str, value: str) -> None:
        insert = "INSERT OR REPLACE INTO meta VALUES (?, ?)"
        self._write(lambda db: db.execute(insert, (key, value)))

    def _noted(self, like: str) -> list[str]:
        rows = self._read("SELECT value FROM meta WHERE key LIKE ? ORDER BY key", (like,))
        return [str(row[0]) for row in rows]

    def first_shown_chosen(self) -> dict[str, str]:
        """Return how often each rater at the page chose the response that was shown first."""
        rows = self._read(
            "SELECT name, sum(choice = shown_first), count(*) FROM labels JOIN raters USING "
            "(rater_id) WHERE undone IS NULL AND assignment_id IS NOT NULL "
            "AND choice IN ('first', 'second') GROUP BY name"
        )
        return {name: f"{first} of {all_}" for name, first, all_ in rows}

    def _task(self, row: sqlite3.Row) -> Task:
        record = self._read("SELECT record FROM pairs WHERE position = ?", (row["position"],))
        before = None
        if row["redoes"] is not None:
            before = rules.as_label(self._read(f"{LABELS} WHERE label_id = ?", (row["redoes"],))[0])
        pair = self._pair(record[0]["record"])
        return Task(row["assignment_id"], pair, row["shown_first"], row["served"], before)

    def _pair(self, text: str) -> Pair:
        try:
            row = json.loads(text)
        except ValueError as error:
            raise StoreError(
                f"{self.path} is damaged (a pair is no JSON): take a copy of it that is whole"
            ) from error
        return from_row(Pair, row, Location(str(self.path)))

    def _read(self, query: str, values: tuple[object, ...] = ()) -> list[sqlite3.Row]:
        self._check_place()
        try:
            with self._reading:
                return self._reader.execute(query, values).fetchall()
        except sqlite3.Error as error:
            what = str(error).partition(" with text")[0]  # behind it stand raw bytes of the file
            raise StoreError(
                f"{self.path} cannot be read ({what}): take a copy of it that is whole, or what "
                "sqlite3's .recover saves"
            ) from error

    def _write(self, change: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        self._check_place()
        try:
            with self._writing, transaction(self._writer):
                result = change(self._writer)
        except (sqlite3.Error, UnicodeEncodeError) as error:
            raise StoreError(f"{self.path} could not take that: {error}") from error
        self._check_place()
        return result

    def _check_place(self) -> None:
        """Raise if the path leads to another file than the one that is open."""
        if file_ids(self.path, self._target) == self._file_ids:
            return
        with self._reading, suppress(sqlite3.Error):  # what was confirmed is partly in the log
            self._reader.execute("PRAGMA wal_checkpoint(PASSIVE)")
        raise StoreError(
            f"{self.path} was moved, removed or replaced while it was open: put the file back, or "
            "give store= its new place, and start the page again"
        )


def describe_store(store: LabelStore) -> str:
    """Return progress and every annotator's numbers, as lines for a terminal."""
    progress = store.progress()
    gold = {pair.pair_id: pair.gold for pair in store.pairs() if pair.gold is not None}
    labels: defaultdict[tuple[str, str], list[Label]] = defaultdict(list)
    for label in store.labels():
        labels[label.annotator, label.kind].append(label)
    rows = [
        ("annotator", "kind", "labels", "skips", "seconds", "known answers found", "first shown")
    ]
    first_shown = store.first_shown_chosen()
    for (name, kind), given in labels.items():
        judged = [label for label in given if label.choice != "skip"]
        seconds = [label.seconds for label in judged if label.seconds is not None]
        asked = [label for label in judged if label.pair_id in gold]
        right = sum(label.choice == gold[label.pair_id] for label in asked)
        found = f"{right} of {len(asked)}" if asked else "-"
        took = f"{median(seconds):.1f}" if seconds else "-"
        counts = str(len(judged)), str(len(given) - len(judged))
        rows.append((name, kind, *counts, took, found, first_shown.get(name, "-")))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = [f"{store.path}: {progress.done} of {progress.wanted} labels"]
    if files := store.imports():
        lines[0] += f", pairs of {', '.join(files)}"
    for row in rows:
        cells = [
            cell.ljust(width) if column < 2 else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)
