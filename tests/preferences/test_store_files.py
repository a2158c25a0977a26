"""Which files are a store of labels, and what they hold when a label has been acknowledged."""

from __future__ import annotations

import sqlite3
from pathlib import Path

import pytest

from rlhf_lightning.preferences.annotation import database
from rlhf_lightning.preferences.annotation.assignment import Sharing
from rlhf_lightning.preferences.annotation.database import StoreError, connect
from rlhf_lightning.preferences.annotation.store import LabelStore
from tests.builders.labels import make_pairs
from tests.preferences.invariants import check_store, most_labels


def test_a_file_of_something_else_is_left_alone(tmp_path: Path):
    text = tmp_path / "notes.txt"
    text.write_text("These are my notes, and they are rather long. " * 20)
    with pytest.raises(StoreError, match=r"notes\.txt is no store of labels"):
        LabelStore(text)
    other = tmp_path / "other.sqlite"
    db = sqlite3.connect(other)
    db.execute("CREATE TABLE mine (a)")
    db.commit()
    with pytest.raises(StoreError, match="is a SQLite file of something else"):
        LabelStore(other)
    assert db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0] == 1
    db.close()
    newer = tmp_path / "newer.sqlite"
    LabelStore(newer).close()
    db = sqlite3.connect(newer)
    db.execute("PRAGMA user_version = 9")
    db.close()
    with pytest.raises(StoreError, match="tables of version 9, this release reads 1"):
        LabelStore(newer)


def test_a_store_that_another_process_makes_meanwhile_is_ours(tmp_path: Path, monkeypatch):
    path, is_empty, found = tmp_path / "labels.sqlite", database._is_empty, []

    def made_meanwhile(db: sqlite3.Connection) -> bool:
        found.append(None)
        if len(found) == 1:  # the file is looked at: it is there, and has no tables yet
            path_of_other = tmp_path / "other.sqlite"
            LabelStore(path_of_other).close()
            path.write_bytes(path_of_other.read_bytes())
        return is_empty(db)

    monkeypatch.setattr(database, "_is_empty", made_meanwhile)
    path.touch()
    LabelStore(path).close()
    assert found


def test_the_disk_has_a_label_before_it_is_acknowledged(tmp_path: Path):
    """`FULL` is 2; and a copy of the files as they are at that moment holds the label."""
    with LabelStore(tmp_path / "labels.sqlite") as store:
        pragma = store._write(lambda db: db.execute("PRAGMA synchronous").fetchone()[0])
        assert pragma == 2
        store.add_pairs(make_pairs(1), ratings_per_pair=1)
        ann = store.enter("Ann")[0]
        task = store.next_task(ann, Sharing())
        assert task is not None
        assert store.label(ann, task.assignment_id, "left", Sharing()) == "kept"
        copy = tmp_path / "copy.sqlite"
        for suffix in ("", "-wal"):
            Path(f"{copy}{suffix}").write_bytes(Path(f"{store.path}{suffix}").read_bytes())
    with LabelStore(copy) as copied:
        assert most_labels(copy) == 1
        assert [label.annotator for label in copied.labels()] == ["Ann"]


def test_a_full_disk_is_told_nothing_is_acknowledged_and_it_goes_on_when_there_is_room(
    tmp_path: Path,
):
    """SQLite is told that the disk ends here, which it answers as it does a disk that does."""
    with LabelStore(tmp_path / "labels.sqlite") as store:
        store.add_pairs(make_pairs(200), ratings_per_pair=1)
        ann = store.enter("Ann")[0]
        size = store._write(lambda db: db.execute("PRAGMA page_count").fetchone()[0])
        store._write(lambda db: db.execute(f"PRAGMA max_page_count = {size}").fetchone())
        kept = 0

        def label_all() -> None:
            nonlocal kept
            for _ in range(200):
                task = store.next_task(ann, Sharing())
                assert task is not None
                store.label(ann, task.assignment_id, "left", Sharing(), reason="x" * 500)
                kept += 1

        with pytest.raises(StoreError, match="could not take that: database or disk is full"):
            label_all()
        assert len(list(store.labels())) == store.progress().done == kept < 200
        store._write(lambda db: db.execute("PRAGMA max_page_count = 100000").fetchone())
        task = store.next_task(ann, Sharing())
        assert task is not None
        assert store.label(ann, task.assignment_id, "left", Sharing()) == "kept"
        assert len(list(store.labels())) == kept + 1
    check_store(tmp_path / "labels.sqlite")


def test_a_new_store_is_for_its_owner_alone(tmp_path):
    db = connect(tmp_path / "store.sqlite")
    db.execute("BEGIN IMMEDIATE")
    db.execute("INSERT INTO meta VALUES ('a', 'b')")
    db.execute("COMMIT")
    modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
    db.close()
    assert len(modes) > 1
    assert set(modes.values()) == {0o600}


def _delete(store: Path) -> None:
    store.unlink()


def _move(store: Path) -> None:
    store.rename(store.with_name("moved.sqlite"))


def _move_the_folder(store: Path) -> None:
    store.parent.rename(store.parent.with_name("elsewhere"))


def _put_another_store_there(store: Path) -> None:
    other = store.with_name("other.sqlite")
    LabelStore(other).close()
    other.replace(store)


def _put_a_copy_there(store: Path) -> None:
    copy = store.with_name("copy.sqlite")
    copy.write_bytes(store.read_bytes())
    copy.replace(store)


def _put_a_link_to_another_store_there(store: Path) -> None:
    _move(store)
    other = store.with_name("other.sqlite")
    LabelStore(other).close()
    store.symlink_to(other)


def _delete_the_log(store: Path) -> None:
    store.with_name("labels.sqlite-wal").unlink()


@pytest.mark.parametrize(
    "change",
    [
        _delete,
        _move,
        _move_the_folder,
        _put_another_store_there,
        _put_a_copy_there,
        _put_a_link_to_another_store_there,
        _delete_the_log,
    ],
)
def test_nothing_is_confirmed_once_the_path_leads_to_another_file(tmp_path: Path, change):
    path = tmp_path / "here" / "labels.sqlite"
    with LabelStore(path) as store:
        store.add_pairs(make_pairs(9), ratings_per_pair=1)
        ann = store.enter("Ann")[0]
        task = store.next_task(ann, Sharing())
        assert task is not None
        assert store.label(ann, task.assignment_id, "left", Sharing()) == "kept"
        task = store.next_task(ann, Sharing())
        assert task is not None
        change(path)
        for attempt in (
            lambda: store.label(ann, task.assignment_id, "left", Sharing()),
            lambda: store.undo(ann, Sharing()),
            lambda: store.enter("Bob"),
            store.progress,
        ):
            with pytest.raises(StoreError, match=r"labels\.sqlite was moved, removed or replaced"):
                attempt()
    moved = [tmp_path / "here" / "moved.sqlite", tmp_path / "elsewhere" / "labels.sqlite"]
    for file in moved:
        if file.exists():  # with what was in the log
            with LabelStore(file) as found:
                assert len(list(found.labels())) == 1


def test_a_move_during_the_commit_is_noticed_before_the_label_is_confirmed(tmp_path: Path):
    path = tmp_path / "labels.sqlite"
    with LabelStore(path) as store, pytest.raises(StoreError, match="was moved"):
        store._write(lambda db: _move(path))


def test_a_store_behind_a_link_and_one_that_is_moved_back_take_labels(tmp_path: Path):
    LabelStore(tmp_path / "real.sqlite").close()
    path = tmp_path / "labels.sqlite"
    path.symlink_to("real.sqlite")
    with LabelStore(path) as store:
        assert store.add_pairs(make_pairs(2), ratings_per_pair=1) == 2
        path.rename(tmp_path / "aside")
        with pytest.raises(StoreError):
            store.enter("Ann")
        (tmp_path / "aside").rename(path)
        assert store.enter("Ann")[1]
