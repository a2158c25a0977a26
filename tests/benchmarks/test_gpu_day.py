"""The day on a GPU: its program with parts of a second, and its rehearsal."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu_day
from benchmarks.gpu_day import Part
from benchmarks.machine import ROOT

WRITES = "import sys; open(sys.argv[-1], 'w').write('{}')"


def script(folder: Path, name: str, text: str) -> tuple[str, ...]:
    """Return what `python -m` runs of a module in `folder`."""
    (folder / f"{name}.py").write_text(text)
    return (name,)


@pytest.fixture
def day(tmp_path, monkeypatch):
    """Run the program with some parts; return statuses by part, and what made it fail."""
    monkeypatch.setattr(gpu_day, "STATE", tmp_path / "state")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def run(parts: list[Part], *options: str) -> tuple[dict[str, str], str]:
        monkeypatch.setattr(gpu_day, "parts", lambda: tuple(parts))
        results = ["--results", str(tmp_path / "results")]
        outcomes: list[gpu_day.Outcome] = []
        attempt = gpu_day._attempt

        def noted(*arguments: Any, **named: Any) -> gpu_day.Outcome:
            outcomes.append(attempt(*arguments, **named))
            return outcomes[-1]

        with monkeypatch.context() as patched:
            patched.setattr(gpu_day, "_attempt", noted)
            try:
                gpu_day.main(["quick", *results, *options])
                failure = ""
            except SystemExit as error:
                failure = str(error)
        return {outcome.part.name: outcome.status for outcome in outcomes}, failure

    return run


@pytest.mark.thorough
def test_a_part_that_fails_or_hangs_is_named_and_the_rest_runs_and_is_not_run_again(day, tmp_path):
    bad = script(tmp_path, "bad_part", "raise SystemExit(3)")
    # Its child too is ended: it would write three seconds later.
    late = (
        "import subprocess, sys, time\n"
        "subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(6);"
        f' open({str(tmp_path / "late")!r}, "w")\'])\n'
        "time.sleep(60)"
    )
    parts = [
        Part("bad", "", (), bad, 60),
        Part("hangs", "", (), script(tmp_path, "hanging_part", late), 1),
        Part("no_result", "", (), script(tmp_path, "empty_part", ""), 60),
        Part("good", "", (), script(tmp_path, "good_part", WRITES), 60),
    ]
    started = time.monotonic()
    statuses, failure = day(parts)
    expected = {"bad": "failed", "hangs": "failed", "no_result": "failed"}
    assert statuses == {**expected, "good": "done"}
    assert failure.startswith("failed: bad, hangs, no_result; logs in")
    assert day(parts)[0] == {**expected, "good": "done before"}
    time.sleep(max(0.0, 8 - (time.monotonic() - started)))
    assert not (tmp_path / "late").exists()


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
