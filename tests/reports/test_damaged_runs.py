"""`rlhf-report` on a run folder whose files are damaged: one line that names the file."""

from __future__ import annotations

import sys

import pytest

from rlhf_lightning.app.report import main
from tests.builders.run_folders import fake_ppo_run


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.csv", b"iteration,rollout/score\n1,good\n"),
        ("summary.json", b"{"),
        ("doctor.jsonl", b"{}\n"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, monkeypatch, capsys, name, content):
    folder = fake_ppo_run(tmp_path / "run")
    (folder.path / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["rlhf-report", str(folder.path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    assert f"{folder.path / name} cannot be read" in capsys.readouterr().err
