"""`~` behind a key, where no shell has replaced it, and from Python."""

from __future__ import annotations

import sys
from pathlib import Path

from rlhf_lightning.app.command_line import check_command_line
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import replacing_folder


def test_the_home_folder_is_read_behind_a_key_and_from_python(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = ["+experiment=sft", "artifacts.base=~/m", "paths.outputs=~", "gates=none"]
    monkeypatch.setattr(sys, "argv", ["train", *words])
    settings = check_command_line("train")
    assert settings.artifacts.base == f"{tmp_path}/m"
    assert settings.paths.outputs == str(tmp_path)
    assert RunFolder(Path("~/run")).create().path == tmp_path / "run"
    with replacing_folder("~/made") as staging:
        staging.mkdir()
    assert (tmp_path / "made").is_dir()
