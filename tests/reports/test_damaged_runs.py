"""`rlhf-report` on a run folder whose files are damaged: one line that names the file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from rlhf_lightning.app.report import main
from rlhf_lightning.runs.folder import read_metrics
from tests.builders.run_folders import fake_ppo_run


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("metrics.csv", b"iteration,rollout/score\n1,good\n"),
        ("metrics.csv", b"iteration,rollout/score\n,0.5\n"),
        ("metrics.csv", b"step,rollout/score\n1,0.5\n"),
        ("metrics.csv", b"\xff\xfe\x00 nothing\n"),
        ("summary.json", b"{"),
        ("summary.json", b"[" * 100_000),
        ("summary.json", b"\xff"),
        ("summary.json", b"3"),
        ("doctor.jsonl", b"{}\n"),
        ("doctor.jsonl", b"[1]\n"),
        ("doctor.jsonl", b"\xff\n"),
    ],
)
def test_a_damaged_file_is_named_in_one_line(tmp_path, monkeypatch, capsys, name, content):
    folder = fake_ppo_run(tmp_path / "run")
    (folder.path / name).write_bytes(content)
    monkeypatch.setattr(sys, "argv", ["rlhf-report", str(folder.path)])
    with pytest.raises(SystemExit) as left:
        main()
    assert left.value.code == 2
    last = capsys.readouterr().err.strip().removeprefix("error: ")
    assert last.startswith(f"{folder.path / name} cannot be read as ")
    assert "\n" not in last
    assert len(last) < 600


@pytest.mark.parametrize(("key", "value"), [("metrics", "3"), ("seconds", '{"total": "long"}')])
def test_a_summary_with_figures_that_are_none_is_damaged(tmp_path, monkeypatch, capsys, key, value):
    folder = fake_ppo_run(tmp_path / "run")
    text = folder.summary.read_text()
    content = json.loads(text) | {key: json.loads(value)}
    folder.summary.write_text(json.dumps(content))
    monkeypatch.setattr(sys, "argv", ["rlhf-report", str(folder.path)])
    with pytest.raises(SystemExit):
        main()
    assert "summary.json cannot be read as a run summary" in capsys.readouterr().err


def test_samples_and_configuration_that_are_damaged_are_left_out(tmp_path, monkeypatch):
    folder = fake_ppo_run(tmp_path / "run")
    folder.config.parent.mkdir(exist_ok=True)
    for path in (folder.samples, folder.config):
        path.write_bytes(b"\xff\x00{[\n")
    monkeypatch.setattr(sys, "argv", ["rlhf-report", str(folder.path)])
    main()
    assert folder.report.stat().st_size > 1000


def test_a_page_that_cannot_be_written_is_told_in_one_line(tmp_path, monkeypatch, capsys):
    folder = fake_ppo_run(tmp_path / "run")
    folder.report.unlink(missing_ok=True)
    folder.report.mkdir()
    monkeypatch.setattr(sys, "argv", ["rlhf-report", str(folder.path)])
    with pytest.raises(SystemExit):
        main()
    assert "report.html" in capsys.readouterr().err


def test_a_line_that_a_kill_cut_short_is_no_damage(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("iteration,a\n1,2\n2")
    assert read_metrics(tmp_path / "metrics.csv") == [{"iteration": 1.0, "a": 2.0}]
