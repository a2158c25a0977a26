"""The studies: a command line of every row composes, a study runs to its table and continues."""

from __future__ import annotations

import importlib
import json

import pytest

from benchmarks.studies.run import Row, Study, allow_targets, main, runs_of
from rlhf_lightning.app.config.commands import COMMANDS
from rlhf_lightning.app.config.compose import register
from rlhf_lightning.app.config.validate import load_settings
from tests.builders.command_lines import environment, overrides_of

NAMES = (
    "arguments", "commands", "doctor.run", "gsm8k_gemma2", "gsm8k_qwen", "objectives",
    "objectives_tuning", "overoptimization", "safety", "sao", "sentiment", "staleness",
    "tldr_pythia",
)  # fmt: skip


def study(name: str) -> Study:
    return importlib.import_module(f"benchmarks.studies.{name}").STUDY


@pytest.mark.parametrize("name", NAMES)
def test_rows_start_from_rows_above_them(name):
    above: set[str] = set()
    for row, content in study(name).rows.items():
        assert set(content.starts_from.values()) <= above
        above.add(row)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_command_line_of_every_row_of_a_study_composes(name, tmp_path, monkeypatch):
    monkeypatch.setenv("RLHF_ALLOWED_TARGETS", "")
    allow_targets()
    register()
    own = study(name)
    lasts = {run.row: run for run in runs_of(own, tmp_path, own.seeds[:1], {})}
    for run in lasts.values():  # a row's runs differ in a value or two
        command = own.rows[run.row].command
        load_settings(COMMANDS[command], command, list(run.command[3:]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_study_names_what_failed_keeps_what_is_done_and_writes_its_table(
    tmp_path, start, monkeypatch, capsys
):
    for name, value in environment().items():
        monkeypatch.setenv(name, value)
    words = [*overrides_of("ppo", start), "artifacts.reward=null", "gates=none"]
    rows = {
        "good": Row(words),
        "later": Row(words, starts_from={"sft": "good"}),
        "bad": Row([*words, "scorer.function=nowhere.py:score"]),
    }
    tiny = Study("tiny", rows, measure=("val/gold_win_rate",))
    out = tmp_path / "out"
    with pytest.raises(SystemExit, match="1 of 3 runs have not completed: bad"):
        main(tiny, [f"--out={out}"])
    assert (out / "made/good/seed_1/config.json").is_file()
    first = out / "good/seed_1/summary.json"
    before = first.stat().st_mtime_ns
    with pytest.raises(SystemExit):
        main(tiny, [f"--out={out}"])
    assert first.stat().st_mtime_ns == before
    rate = json.loads(first.read_text())["metrics"]["val/gold_win_rate"]
    assert f"| good |  | 1 of 1 | {rate:.3f} (" in (out / "table.md").read_text()
    with pytest.raises(SystemExit, match="another --out"):
        main(tiny, [f"--out={out}", "train:trainer.validations=0"])
