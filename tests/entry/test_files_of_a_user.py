"""No command loses or changes a file that a user has put somewhere, whatever it is given."""

from __future__ import annotations

import hashlib
import os
import shutil
import sqlite3
import tempfile
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path

import pytest

from rlhf_lightning.app.annotate import run as annotate
from rlhf_lightning.app.config.commands import AnnotateSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.run_claim import check_folder
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.report import run as report
from rlhf_lightning.preferences.annotation.store import LabelStore, StoreError
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.summary import Summary, write_summary
from tests.builders.labels import make_pairs
from tests.builders.runs import settings_for

Files = dict[str, tuple[str, int, int]]


def files(root: Path) -> Files:
    """Return content, mode and time of change of each file and link, by its path."""
    found: Files = {}
    for folder, folders, names in os.walk(root):
        for path in (Path(folder, name) for name in (*names, *folders)):
            if path.is_symlink():
                content = os.readlink(path)
            elif path.is_dir():
                continue
            else:
                content = hashlib.sha256(path.read_bytes()).hexdigest()
            stat = path.lstat()
            found[str(path.relative_to(root))] = (content, stat.st_mode, stat.st_mtime_ns)
    return found


# What commands write, and what has the look of it: of a user all the same.
NAMES = ["comparison.html", "labels.sqlite", "out.jsonl"]


def export_labels(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        with LabelStore(Path(other, "labels.sqlite")) as store:
            store.add_pairs(make_pairs(2), labels_per_pair=1)
        words = [f"store={other}/labels.sqlite", "format=pairs", f"file={folder}/out.jsonl"]
        annotate(load_settings(AnnotateSettings, "annotate", ["action=export", *words]))


def compare(folder: Path) -> None:
    with tempfile.TemporaryDirectory() as other:
        for name in "ab":
            run = RunFolder(Path(other, name)).create()
            write_summary(run, Summary("sft", "completed", 1))
        report([Path(other)], folder / "comparison.html")


WRITERS: dict[str, Callable[[Path], None]] = {
    "store": lambda f: LabelStore(f / "labels.sqlite").close(),
    "labels": export_labels,
    "comparison": compare,
}


@pytest.mark.parametrize("content", ["mine\n", "<!doctype html>\n"])
@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_stands_in_a_folder_stays(writer, content, tmp_path):
    for name in NAMES:
        (tmp_path / name).write_text(content)
    before = files(tmp_path)
    with suppress(FolderTakenError, StoreError, ConfigError, OSError):
        WRITERS[writer](tmp_path)
    after = files(tmp_path)
    assert {path: after.get(path) for path in before} == before


def test_a_run_that_is_continued_goes_on_in_its_own_folder_alone(tmp_path, start):
    begun = RunFolder(tmp_path / "thesis/outputs/sft/1").create()
    checkpoint = begun.checkpoints / "iteration=000001.ckpt"
    write_summary(begun, Summary("sft", "stopped", 1))
    (tmp_path / "thesis/report.html").write_text("mine")
    own = settings_for("sft", start, f"ckpt_path='{checkpoint}'")
    check_folder(own, begun)
    with pytest.raises(FolderTakenError, match="thesis"):
        check_folder(own, RunFolder(tmp_path / "thesis"))


def test_the_database_of_another_program_is_not_written_to(tmp_path):
    with closing(sqlite3.connect(tmp_path / "theirs.sqlite")) as db:
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("CREATE TABLE mine (a)")
        db.commit()
        for end in ("", "-wal"):  # as the program left it when it was killed
            shutil.copy2(tmp_path / f"theirs.sqlite{end}", tmp_path / f"left.sqlite{end}")
    before = files(tmp_path)
    with pytest.raises(StoreError, match="is no store of labels"):
        LabelStore(tmp_path / "left.sqlite")
    (tmp_path / "left.sqlite-shm").unlink()  # an index, which each reader makes
    assert files(tmp_path) == before
