"""A folder that is replaced as a whole: ours alone, and nothing of anybody else is lost."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.runs.lock import WRITTEN, FolderTakenError, replacing_folder


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


@pytest.mark.parametrize("mine", ["config.json", "notes/mine.md"])
def test_a_folder_or_file_of_somebody_else_is_refused_as_it_is(tmp_path, mine):
    target = tmp_path / "target"
    (target / mine).parent.mkdir(parents=True, exist_ok=True)
    (target / mine).write_text("mine")
    with pytest.raises(FolderTakenError, match="target"):
        write(target, config="1")
    assert (target / mine).read_text() == "mine"
    assert [p.name for p in tmp_path.iterdir()] == ["target"]


def test_a_file_that_was_added_is_not_taken_for_a_new_one_of_its_name(tmp_path):
    target = tmp_path / "sft"
    write(target, config="1")
    (target / "shard").write_text("mine")
    with pytest.raises(FolderTakenError, match="shard"):
        write(target, config="2", shard="2")
    assert (target / "shard").read_text() == "mine"
    assert (target / "config").read_text() == "1"


def test_what_a_killed_publication_left_is_removed(tmp_path):
    (tmp_path / ".sft.tmp-new").mkdir()
    (tmp_path / ".sft.tmp-new/half").write_text("")
    (tmp_path / ".sft.tmp-99").mkdir()
    write(tmp_path / "sft", config="1")
    assert sorted(p.name for p in tmp_path.iterdir()) == [".sft.tmp-99", "sft"]
    assert names(tmp_path / "sft") == [WRITTEN, "config"]
