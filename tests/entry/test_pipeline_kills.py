"""A pipeline whose process is told to stop, or killed: what it leaves, and how it goes on."""

from __future__ import annotations

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from rlhf_lightning.runs.lock import is_claimed
from tests.builders.command_lines import SMALL, environment

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def call(folder: Path, start: Path, rate: str) -> subprocess.Popen[str]:
    words = [f"experiments.{stage}=null" for stage in ("base", "reward", "ppo")]
    words += ["evaluate=false", "accept=[sft]", *(f"sft:{word}" for word in SMALL)]
    words += [f"sft:artifacts.base={start}", "sft:trainer.limit_train_batches=60"]
    words += ["sft:data.batch_size=2", "sft:data.num_epochs=9", "sft:evaluation.num_samples=4"]
    words.append(f"sft:module.sft.learning_rate={rate}")
    return subprocess.Popen(
        [sys.executable, "-m", "rlhf_lightning.pipeline", *words],
        cwd=folder, env=environment(), text=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip


def until_checkpoint(folder: Path, process: subprocess.Popen[str], iteration: int) -> Path:
    """Wait until the stage has saved that iteration or a later one; return its folder."""
    begun = time.monotonic()
    pattern = "outputs/pipeline/*/round_1/sft/checkpoints/iteration=*.ckpt"
    while True:
        found = sorted(folder.glob(pattern))
        if found and int(found[-1].stem.partition("=")[2]) >= iteration:
            return found[-1].parent.parent
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < begun + 300
        time.sleep(0.01)


def status(folder: Path) -> str:
    return str(json.loads((folder / "summary.json").read_text())["status"])


def test_a_pipeline_that_is_stopped_and_killed_goes_on_with_what_its_settings_have_learnt(
    tmp_path: Path, start: Path
) -> None:
    first = call(tmp_path, start, "1.0e-3")
    stage = until_checkpoint(tmp_path, first, 2)
    made = stage.parent.parent
    first.terminate()
    told, _ = first.communicate(timeout=200)
    assert first.returncode == 130, told
    assert (status(stage), status(made)) == ("stopped", "stopped")
    assert not is_claimed(made)

    killed = call(tmp_path, start, "1.0e-3")
    done = len((stage / "metrics.csv").read_text().splitlines())
    until_checkpoint(tmp_path, killed, done + 4)
    of_stage = int(subprocess.check_output(["pgrep", "-P", str(killed.pid)], text=True))
    os.kill(of_stage, signal.SIGSTOP)  # or it may end before the next call
    killed.kill()
    killed.wait()
    refused = call(tmp_path, start, "1.0e-6")
    told, _ = refused.communicate(timeout=200)
    assert refused.returncode == 2, told
    assert "another process writes" in told
    assert status(stage) == "running"
    os.kill(of_stage, signal.SIGKILL)
    while is_claimed(stage):
        time.sleep(0.05)
    newest = sorted((stage / "checkpoints").glob("iteration=*.ckpt"))[-1]
    newest.write_bytes(newest.read_bytes()[:10_000])

    last = call(tmp_path, start, "1.0e-3")
    told, _ = last.communicate(timeout=400)
    assert last.returncode == 0, told
    assert (status(stage), status(made)) == ("completed", "completed")
    assert [path.name for path in made.parent.iterdir()] == [made.name]
    assert not list(made.glob("round_1/sft_before_*"))
    rows = list(csv.DictReader((stage / "metrics.csv").open()))
    assert [int(row["iteration"]) for row in rows] == list(range(1, len(rows) + 1))
    assert all(float(row["sft/learning_rate"]) > 1.0e-6 for row in rows[:10])
