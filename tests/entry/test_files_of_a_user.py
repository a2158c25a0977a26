"""No command loses or changes a file that a user has put somewhere, whatever it is given."""

from __future__ import annotations

import pytest

from rlhf_lightning.app.annotate import run as annotate
from rlhf_lightning.app.config.commands import AnnotateSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.run_claim import check_folder
from rlhf_lightning.preferences.annotation.store import LabelStore
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.summary import Summary, write_summary
from tests.builders.labels import make_pairs
from tests.builders.runs import settings_for


def test_labels_are_not_exported_over_a_file(tmp_path):
    with LabelStore(tmp_path / "labels.sqlite") as store:
        store.add_pairs(make_pairs(2), labels_per_pair=1)
    file = tmp_path / "out.jsonl"
    file.write_text("mine")
    words = [f"store={tmp_path}/labels.sqlite", "format=pairs", f"file={file}"]
    with pytest.raises(ConfigError, match=r"out\.jsonl"):
        annotate(load_settings(AnnotateSettings, "annotate", ["action=export", *words]))
    assert file.read_text() == "mine"


def test_a_run_that_is_continued_goes_on_in_its_own_folder_alone(tmp_path, start):
    begun = RunFolder(tmp_path / "thesis/outputs/sft/1").create()
    checkpoint = begun.checkpoints / "iteration=000001.ckpt"
    write_summary(begun, Summary("sft", "stopped", 1))
    (tmp_path / "thesis/report.html").write_text("mine")
    own = settings_for("sft", start, f"ckpt_path='{checkpoint}'")
    check_folder(own, begun)
    with pytest.raises(FolderTakenError, match="thesis"):
        check_folder(own, RunFolder(tmp_path / "thesis"))
