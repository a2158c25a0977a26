"""The day on a GPU: its document and its rehearsal."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

from benchmarks import gpu_day
from benchmarks.machine import ROOT


def test_every_part_has_a_place_and_a_row_in_the_document_and_files_that_exist():
    text = (ROOT / "benchmarks/README.md").read_text(encoding="utf-8")
    parts = gpu_day.parts()
    for part in parts:
        assert f"<!-- table {Path(part.result).stem} -->" in text, part.name
        assert f"| `{part.name}` | {part.shows} | {part.limit} s |" in text, part.name
        assert part.limit < 600
        for word in (*part.command, *part.rehearsal):
            assert not word.startswith("tests/") or (ROOT / word).is_file(), word
    assert len({part.result for part in parts}) == len(parts)
    measured = [part.limit for part in parts if not part.tests]
    assert sum(measured) < 600, "one call of at most ten minutes holds all measurements"
    assert "tests/faults/test_memory.py" in gpu_day.gpu_tests()


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_whole_day_is_rehearsed(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_day, "STATE", tmp_path / "state")
    outcomes = gpu_day.main(["quick", "--results", str(tmp_path)])
    assert {o.status for o in outcomes if o.part.name != "trl_0.5b"} == {"done"}
    for outcome in (o for o in outcomes if o.status == "done"):  # TRL 1.12 may be missing
        result = json.loads((tmp_path / outcome.part.result).read_text())
        render = importlib.import_module(f"benchmarks.{result['benchmark']}").render
        assert render(result).count("|") > 5
