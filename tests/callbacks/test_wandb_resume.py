"""A run that is resumed is one run in W&B and TensorBoard: one id, no gap, equal points."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Callback
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from rlhf_lightning.callbacks.tensorboard_logger import tensorboard_logger
from rlhf_lightning.callbacks.wandb_logger import IterationWandbLogger, WandbContent, wandb_logger
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from tests import offline_wandb
from tests.builders.processes import run_python
from tests.callbacks.tiny_run import KilledError, run

ROOT = Path(__file__).resolve().parents[2]
NUM_ITERATIONS, KILLED_AT, CHECKPOINT = 9, 7, 6


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_a_run_that_fails_and_is_resumed_joins_without_a_gap(tmp_path, monkeypatch):
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    with pytest.raises(KilledError):
        train(tmp_path, die_at=("after", KILLED_AT))
    train(tmp_path, resume=True)
    first, resumed = offline_wandb.segments(tmp_path)
    ids = {r["run"]["run_id"] for part in (first, resumed) for r in part if "run" in r}
    assert ids == {(tmp_path / "wandb/run_id").read_text().strip()}
    assert any("exit" in r for r in first)
    # `by_iteration` fails where a point that was logged twice differs.
    rows = offline_wandb.history(first) + offline_wandb.history(resumed)
    joined = offline_wandb.by_iteration(rows)
    assert sorted(joined) == list(range(1, NUM_ITERATIONS + 1))
    for row in read_metrics(RunFolder(tmp_path).metrics):
        for name, value in row.items():
            assert joined[int(row["iteration"])][name] == pytest.approx(value, rel=1e-12), name


def test_the_id_stays_with_what_can_be_resumed_and_a_sweep_agent_names_its_own(
    tmp_path, monkeypatch
):
    def run_id(name: str) -> str:
        logger = wandb_logger(RunFolder(tmp_path / name), mode="offline")
        found = logger.experiment.id
        logger.finish()
        return found

    assert run_id("here") != run_id("here"), "without a checkpoint it is another run"
    first = run_id("here")
    checkpoints = RunFolder(tmp_path / "here").checkpoints
    checkpoints.mkdir()
    (checkpoints / "iteration=000001.ckpt").touch()
    (tmp_path / "here").rename(tmp_path / "there")
    assert run_id("there") == first
    assert run_id("other") != first
    monkeypatch.setenv("WANDB_RUN_ID", "of-the-agent")
    assert run_id("there") == first
    monkeypatch.setenv("WANDB_SWEEP_ID", "abc")
    assert run_id("there") == "of-the-agent"


@pytest.mark.thorough
@pytest.mark.timeout(300)
def test_tensorboard_has_every_point_of_a_run_that_was_killed_with_sigkill_and_resumed(tmp_path):
    done = run_python(__file__, tmp_path, folder=ROOT, PYTHONPATH=str(ROOT))
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    in_tensorboard(tmp_path, resume=True)
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    points = [event.step for event in events.Scalars("ppo/loss")]
    assert points == list(range(1, NUM_ITERATIONS + 1))
    assert "epoch" not in events.Tags()["scalars"]
    for row in read_metrics(RunFolder(tmp_path).metrics):
        for name in row.keys() - {"iteration"}:
            found = [e.value for e in events.Scalars(name) if e.step == row["iteration"]]
            assert found == pytest.approx([row[name]] * max(len(found), 1), rel=1e-6), name


def test_tensorboard_hides_what_a_run_logged_that_ended_before_its_first_checkpoint(tmp_path):
    for rows in ((1.0, 2.0, 3.0), (4.0, 5.0)):
        logger = tensorboard_logger(RunFolder(tmp_path))
        for step, value in enumerate(rows):
            logger.log_metrics({"ppo/loss": value}, step)
        logger.finalize("success")
        time.sleep(1.1)  # as below
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("ppo/loss")
    assert [(event.step, event.value) for event in events] == [(1, 4.0), (2, 5.0)]


def in_tensorboard(folder: Path, **settings: Any) -> None:
    if (folder / "tensorboard").exists():
        time.sleep(1.1)  # TensorBoard orders its files by the second in which they were begun
    train(folder, logger=tensorboard_logger(RunFolder(folder)), keep_last=9, **settings)


def train(folder: Path, logger: Any = None, **settings: Any) -> None:
    made = RunFolder(folder)
    extra = settings.pop("callbacks", [])
    logger = logger or wandb_logger(made, mode="offline")
    run(
        folder,
        validate_every=3,
        save_every=2,
        logger=logger,
        callbacks=[WandbContent(), *extra],
        **({"num_iterations": NUM_ITERATIONS} | settings),
    )
    if isinstance(logger, IterationWandbLogger):
        logger.finish()


class Kill(Callback):
    """Take the process away as a power cut does."""

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx + 1 == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    in_tensorboard(Path(sys.argv[1]), callbacks=[Kill()])
