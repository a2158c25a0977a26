"""A folder that is replaced as a whole: ours alone, and nothing of anybody else is lost."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
from pathlib import Path

import pytest

from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.replaced import WRITTEN, check_replaceable, replacing_folder


def write(folder: Path, **files: str) -> None:
    with replacing_folder(folder) as staging:
        staging.mkdir()
        for name, content in files.items():
            (staging / name).write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*"))


def test_what_was_written_before_goes_and_what_somebody_added_stays(tmp_path):
    target = tmp_path / "sft"
    write(target, config="1", shard="1")
    (target / "notes").mkdir()
    (target / "notes/mine.md").write_text("mine")
    (target / "link").symlink_to("notes")
    write(target, config="2")
    assert names(target) == sorted([WRITTEN, "config", "link", "notes", "notes/mine.md"])
    assert (target / "config").read_text() == "2"
    assert (target / "link/mine.md").read_text() == "mine"
    write(target, config="3")
    assert (target / "notes/mine.md").read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["sft"]


@pytest.mark.parametrize("mine", ["config.json", ".bashrc", ".git/HEAD", "notes/mine.md", ""])
def test_a_folder_or_file_of_somebody_else_is_refused_as_it_is(tmp_path, mine):
    target = tmp_path / "target"
    (target / mine).parent.mkdir(parents=True, exist_ok=True)
    (target / mine).write_text("mine")
    with pytest.raises(FolderTakenError, match="target"):
        write(target, config="1")
    assert (target / mine).read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_folder_below_a_file_is_refused_before_anything_is_written(tmp_path):
    (tmp_path / "target").write_text("mine")
    with pytest.raises(FolderTakenError, match="target, a file"):
        check_replaceable(tmp_path / "target/in/it")


def test_an_empty_folder_and_a_link_to_one_are_written_to(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to("empty")
    for content in ("1", "2"):
        write(tmp_path / "link", config=content)
        assert (tmp_path / "empty/config").read_text() == content
    assert sorted(p.name for p in tmp_path.iterdir()) == ["empty", "link"]


def test_what_a_killed_publication_left_is_removed_and_what_a_living_one_writes_is_not(tmp_path):
    ended = subprocess.Popen(["true"])
    ended.wait()
    host = socket.gethostname()
    dead = [f".sft.tmp-{host}-{ended.pid}"]
    kept = [
        f".sft.tmp-{ended.pid}",
        f".sft.tmp-{host}-{os.getppid()}",
        f".sft.tmp-elsewhere-{ended.pid}",
        ".sft2.tmp-1",
    ]
    for name in (*dead, *kept):
        (tmp_path / name).mkdir()
    write(tmp_path / "sft", config="1")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["sft", *kept])


def test_a_block_that_fails_leaves_the_former_folder(tmp_path):
    write(tmp_path / "sft", config="1")
    with pytest.raises(FileNotFoundError):
        write(tmp_path / "sft", **{"no/folder": "2"})
    assert names(tmp_path / "sft") == [WRITTEN, "config"]
    shutil.rmtree(tmp_path / "sft")
    assert not list(tmp_path.iterdir())
