"""One thread that writes to SQLite, so that changes that wait at the same time share one commit.

A commit waits for the disk, some milliseconds. Eight raters who label at once would queue for eight
of them; here whatever has arrived meanwhile is committed together. A change is acknowledged when
its commit has returned, and not before.
"""

from __future__ import annotations

import queue
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")
MOST_AT_ONCE = 64

Change = Callable[[sqlite3.Connection], Any]


class Writer:
    """Runs changes one after the other, each whole or not at all.

    Args:
        db: the connection to write through; nobody else may use it. It is closed with the writer.
    """

    def __init__(self, db: sqlite3.Connection) -> None:
        """Start the thread."""
        self._db = db
        self._waiting: queue.SimpleQueue[tuple[Change, Future[Any]] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="label writer", daemon=True)
        self._thread.start()

    def run(self, change: Callable[[sqlite3.Connection], ResultT]) -> ResultT:
        """Apply `change` and return what it returned, once it is on the disk.

        Raises:
            RuntimeError: if the writer is closed.
            Exception: whatever `change` raised, in which case it changed nothing, or what the
                commit raised.
        """
        future: Future[ResultT] = Future()
        with self._closing:
            if self._closed:
                raise RuntimeError("the store of labels is closed")
            self._waiting.put((change, future))
        return future.result()

    def close(self) -> None:
        """Finish what waits, then end the thread and close the connection."""
        with self._closing:
            if not self._closed:
                self._closed = True
                self._waiting.put(None)
        self._thread.join()

    def _work(self) -> None:
        while (first := self._waiting.get()) is not None:
            batch, last = [first], False
            while len(batch) < MOST_AT_ONCE and not self._waiting.empty():
                following = self._waiting.get()
                if following is None:
                    last = True
                    break
                batch.append(following)
            self._commit(batch)
            if last:
                break
        self._db.close()

    def _commit(self, batch: list[tuple[Change, Future[Any]]]) -> None:
        done: list[tuple[Future[Any], Any]] = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
            for change, future in batch:
                self._db.execute("SAVEPOINT one")
                try:
                    result = change(self._db)
                except Exception as error:  # handed to whoever asked for the change
                    if not self._db.in_transaction:
                        raise  # a full disk ends the transaction, and nobody's change is kept
                    self._db.execute("ROLLBACK TO one")
                    future.set_exception(error)
                else:
                    done.append((future, result))
                self._db.execute("RELEASE one")
            self._db.execute("COMMIT")
        except Exception as error:  # such as a full disk, or a file that another process keeps
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for future, result in done:
            future.set_result(result)
