from __future__ import annotations

import itertools
import json
from dataclasses import replace
from typing import Any

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import (
    GateResult,
    Summary,
    new_summary,
    read_summary,
    resumed,
    write_summary,
)
from tests.builders.processes import killed_after

KEYS = {
    "stage", "status", "seed", "metrics", "gates", "seconds", "versions", "git_commit",
    "config_hash",
}  # fmt: skip


def test_a_summary_is_read_back_as_written_with_the_promised_keys(tmp_path):
    gate = GateResult("win rate", 0.8, 0.75, True, "0.80 is above 0.75")
    summary = replace(
        new_summary("ppo", seed=3, config_hash="abc"),
        status="completed",
        metrics={"val/score": 1.5},
        gates=(gate,),
        seconds={"total": 12.5},
    )
    folder = RunFolder(tmp_path / "run")
    write_summary(folder, summary)
    content = json.loads(folder.summary.read_text())
    assert set(content) >= KEYS
    assert list(content["gates"][0]) == ["name", "value", "threshold", "passed", "reason"]
    assert read_summary(folder) == summary
    assert summary.passed
    assert not replace(summary, gates=(gate, replace(gate, passed=False))).passed
    assert {"python", "torch"} <= set(content["versions"])


def _write_for_ever(folder: RunFolder, done: Any) -> None:
    for n in itertools.count(1):
        metrics = {f"value {i}": float(n) for i in range(5000)}
        write_summary(folder, Summary("ppo", "running", n, metrics=metrics))
        done.value = n


def test_a_run_that_other_code_began_says_so_when_it_is_resumed(tmp_path, caplog):
    folder, now = RunFolder(tmp_path), new_summary("ppo", seed=1, config_hash=None)
    for commit in (now.git_commit, "1" * 40):
        write_summary(folder, replace(now, git_commit=commit, seconds={"total": 5.0}))
        assert resumed(now, folder).seconds == {"total": 5.0}
        assert (f"begun with commit {commit}" in caplog.text) == (commit != now.git_commit)


def test_a_summary_killed_while_it_is_written_is_the_old_or_the_new(tmp_path):
    for wait in (0.0, 0.004):
        folder = RunFolder(tmp_path / str(wait))
        seen = killed_after(5, _write_for_ever, folder, wait=wait)
        found = read_summary(folder)
        assert found.seed is not None
        assert found.seed >= seen
        assert set(found.metrics.values()) == {float(found.seed)}
