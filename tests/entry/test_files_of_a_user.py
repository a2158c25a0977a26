"""No command loses or changes a file that a user has put somewhere, whatever it is given."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import suppress
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


@pytest.mark.parametrize("writer", WRITERS)
def test_whatever_stands_in_a_folder_stays(writer, tmp_path):
    for name in NAMES:
        (tmp_path / name).write_text("<!doctype html>\n")
    with suppress(FolderTakenError, StoreError, ConfigError, OSError):
        WRITERS[writer](tmp_path)
    assert {(tmp_path / name).read_text() for name in NAMES} == {"<!doctype html>\n"}


def test_a_run_that_is_continued_goes_on_in_its_own_folder_alone(tmp_path, start):
    begun = RunFolder(tmp_path / "thesis/outputs/sft/1").create()
    checkpoint = begun.checkpoints / "iteration=000001.ckpt"
    write_summary(begun, Summary("sft", "stopped", 1))
    (tmp_path / "thesis/report.html").write_text("mine")
    own = settings_for("sft", start, f"ckpt_path='{checkpoint}'")
    check_folder(own, begun)
    with pytest.raises(FolderTakenError, match="thesis"):
        check_folder(own, RunFolder(tmp_path / "thesis"))
