from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import (
    GateResult,
    new_summary,
    read_summary,
    write_summary,
)

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


WRITER = """
import sys
from pathlib import Path
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Summary, write_summary
n = 0
while True:
    n += 1
    metrics = {f"value {i}": float(n) for i in range(5000)}
    write_summary(RunFolder(Path(sys.argv[1])), Summary("ppo", "running", n, metrics=metrics))
    print(n, flush=True)
"""


def test_a_summary_killed_while_it_is_written_is_the_old_or_the_new(tmp_path):
    for wait in (0.0, 0.004):
        folder = RunFolder(tmp_path / str(wait))
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(folder.path)],
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])},
        )
        assert writer.stdout is not None
        for _ in range(5):
            seen = int(writer.stdout.readline())
        time.sleep(wait)
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        found = read_summary(folder)
        assert found.seed is not None
        assert found.seed >= seen
        assert set(found.metrics.values()) == {float(found.seed)}
