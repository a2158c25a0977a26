"""A run that is told to stop by a signal, as Slurm tells it, from the command line."""

from __future__ import annotations

import csv
import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.builders.command_lines import environment, run_folder, small_sft, train
from tests.builders.ranks import run_ranks
from tests.multiprocess.kills import different, read_checkpoint

# The process sends itself the signal at the start of the second iteration.
SENDER = """
import os, signal
from pathlib import Path
from lightning.pytorch.callbacks import Callback

class Send(Callback):
    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        marker = Path("sent")
        mine = os.environ.get("RANK", "0") == os.environ.get("TOLD", "0")
        if mine and batch_idx == 1 and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), getattr(signal, os.environ["SENT"]))
"""


def prepared(folder: Path, start: Path, *overrides: str) -> tuple[list[str], dict[str, str]]:
    (folder / "sender.py").write_text(SENDER)
    arguments = small_sft(start, "+callbacks.extra.send._target_=sender.Send", *overrides)
    arguments += ["resume=auto", "callbacks.checkpoint.every_n_iterations=1000"]
    path = os.pathsep.join([str(folder), environment()["PYTHONPATH"]])
    return arguments, {"RLHF_ALLOWED_TARGETS": "sender.", "PYTHONPATH": path}


def iterations(folder: Path) -> list[int]:
    with (folder / "metrics.csv").open() as file:
        return [int(row["iteration"]) for row in csv.DictReader(file)]


@pytest.mark.thorough
@pytest.mark.timeout(240)
def test_sigterm_ends_a_run_with_status_75_behind_a_checkpoint(start, tmp_path):
    arguments, variables = prepared(tmp_path, start)
    done = train(tmp_path, *arguments, SENT="SIGTERM", **variables)
    folder = run_folder(tmp_path)
    assert done.returncode == 75, done.stderr
    assert done.stderr.strip().splitlines()[-2:] == [
        "stopped: SIGTERM: saved after iteration 2 of 3",
        f"resume=auto continues {folder}",
    ]
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["status"] == "stopped"
    assert summary["cause"] == "SIGTERM: saved after iteration 2 of 3"
    assert os.readlink(folder / "checkpoints/last.ckpt") == "iteration=000002.ckpt"
    assert iterations(folder) == [1, 2]
    assert "The run stopped: SIGTERM" in (folder / "report.html").read_text()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_a_signal_to_one_rank_stops_both_behind_one_checkpoint_and_the_run_goes_on(
    start, tmp_path, strategy
):
    states: list[Any] = []
    for name in ("stopped", "whole"):
        where = tmp_path / name
        where.mkdir()
        if name == "whole":
            (where / "sent").touch()
        settings = [f"strategy={strategy}", "trainer.devices=2", "trainer.accelerator=cpu"]
        paths = [f"paths.outputs={where}/outputs", f"paths.artifacts={where}/artifacts"]
        arguments, variables = prepared(where, start, *settings, *paths)
        variables |= {"TOLD": "1", "SENT": "SIGUSR1"}
        for number, codes in enumerate([[75, 0], [0, 0]] if name == "stopped" else [[0, 0]]):
            outcome = run_ranks(
                ["-m", "rlhf_lightning.train", *arguments],
                world_size=2,
                folder=tmp_path / f"logs_{name}_{number}",
                timeout=200,
                environment=variables,
                working_folder=where,
                fresh=True,
            )
            assert outcome.codes == codes, outcome.logs
            (folder,) = (path.parent for path in where.glob("outputs/*/*/summary.json"))
            assert iterations(folder) == ([1, 2] if codes[0] else [1, 2, 3])
        states.append(read_checkpoint(folder / "checkpoints/last.ckpt"))
    assert different(*(state["state_dict"] for state in states)) == []
