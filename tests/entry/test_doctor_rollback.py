"""Whole runs that the doctor rolls back and stops: killed, resumed, and gone on with."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_lightning.app import train as training
from rlhf_lightning.app.train import run
from rlhf_lightning.callbacks.doctor.callback import Doctor
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.runs.doctor_log import read_events
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.resume import checkpoint_iteration
from rlhf_lightning.runs.stopping import RunStoppedError
from tests import offline_wandb
from tests.builders.runs import completed, settings_for
from tests.multiprocess.kills import different

pytestmark = [pytest.mark.thorough, pytest.mark.timeout(600)]

# The estimate of KL is above 0 for the first time at iteration 3, and the alarm has stayed at 5.
ILL = (
    "doctor=act",
    "artifacts.reward=null",
    "trainer.limit_train_batches=9",
    "doctor.thresholds.kl_high_warn=1e-12",
    "doctor.thresholds.kl_high_alarm=1e-11",
    "doctor.thresholds.raise_after=1",
    "doctor.thresholds.clear_after=9",
    "doctor.actions.alarm_patience=2",
    "doctor.actions.max_rollbacks=2",
    "callbacks.checkpoint.keep_last=1",
)
BEST, STOPPED = 1, 4


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, start: Path) -> RunFolder:
    folder = tmp_path_factory.mktemp("rolled_back") / "whole"
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("WANDB_DATA_DIR", raising=False)
        with pytest.raises(RunStoppedError, match="the doctor, after iteration"):
            completed(folder, "ppo", start, *ILL, "logger=wandb", "logger.mode=offline")
    return RunFolder(folder)


def state_of(folder: RunFolder) -> Any:
    return torch.load(folder.last_checkpoint, weights_only=True)


def test_a_run_is_rolled_back_to_its_best_checkpoint_and_then_stopped(whole):
    summary = json.loads(whole.summary.read_text())
    assert summary["status"] == "stopped"
    assert "has stayed" in summary["cause"]
    ends = [a for a in summary["actions"] if a["kind"] in ("rollback", "stop")]
    assert [a["kind"] for a in ends] == ["rollback", "rollback", "stop"]
    assert [a["iteration"] for a in ends] == [STOPPED] * 3
    rows = read_metrics(whole.metrics)
    iterations = [int(row["iteration"]) for row in rows]
    assert iterations == list(range(1, STOPPED + 1)), "what was discarded is cut from the table"
    assert all(a["message"].endswith(f"iteration {BEST}") for a in ends[:2])
    coefs = [row["ppo/kl_coef"] for row in rows]
    assert coefs[BEST - 1] == pytest.approx(0.05)
    assert coefs[BEST] == pytest.approx(0.2), "the last fit trains with the second change"
    rates = [row["ppo/learning_rate"] for row in rows]
    assert rates[BEST] / rates[BEST - 1] < 0.3, "and at a quarter of the rates"
    assert "training goes back" in whole.report.read_text()


def test_the_second_rollback_to_a_checkpoint_goes_a_step_further_than_the_first(whole):
    changes = [
        event.changes
        for event in read_events(whole.doctor)
        if event.kind == "action" and event.name == "rollback"
    ]
    assert changes == [
        {"kl_coef": [0.05, 0.1]},
        {"learning_rate_factor": [1.0, 0.5]},
        {"kl_coef": [0.05, 0.2]},
        {"learning_rate_factor": [1.0, 0.25]},
    ]
    assert state_of(whole)["controls"]["learning_rate_factor"] == 0.25


def test_every_fit_of_a_run_that_was_rolled_back_is_in_w_and_b_under_one_id(whole):
    fits = offline_wandb.segments(whole.path)
    kept = (whole.wandb / "run_id").read_text().strip()
    assert len(fits) == 3
    assert {r["run"]["run_id"] for fit in fits for r in fit if "run" in r} == {kept}
    for fit, begun in zip(fits[:2], (0, BEST), strict=True):
        assert any("exit" in record for record in fit)
        logged = {int(row["iteration"]) for row in offline_wandb.history(fit)}
        assert logged == set(range(begun + 1, STOPPED + 1))


def killed_after(rollbacks: int) -> Any:
    def hook(doctor: Doctor, trainer: Any, *_: Any) -> None:
        if doctor.policy.rollbacks == rollbacks and current_iteration(trainer) == BEST + 1:
            raise KeyError("killed")

    return (Doctor, "on_train_batch_start", hook)


def killed_before() -> Any:
    def write(*_: Any) -> None:
        raise KeyError("killed")

    return (training, "write_handover", write)


@pytest.mark.parametrize(
    ("kill", "newest", "left"),
    [
        (killed_after(1), BEST, 1),
        pytest.param(killed_after(2), BEST, 0, marks=pytest.mark.slow),
        pytest.param(killed_before(), STOPPED, 2, marks=pytest.mark.slow),
    ],
    ids=["after the first", "after the second", "before the first"],
)
def test_a_run_killed_around_a_rollback_and_resumed_is_the_run_never_killed(
    whole, tmp_path, start, monkeypatch, caplog, kill, newest, left
):
    folder = RunFolder(tmp_path / "killed")
    monkeypatch.setattr(*kill)
    with pytest.raises(KeyError, match="killed"):
        completed(folder.path, "ppo", start, *ILL)
    monkeypatch.undo()
    assert checkpoint_iteration(folder.last_checkpoint) == newest
    caplog.clear()
    with pytest.raises(RunStoppedError, match="the doctor, after iteration"):
        run(settings_for("ppo", start, *ILL, f"ckpt_path={folder.last_checkpoint}"), folder, [])
    # A run that had forgotten its rollbacks would make all of them again, and end alike.
    assert sum("a new fit starts" in each.message for each in caplog.records) == left
    ours, theirs = state_of(folder), state_of(whole)
    assert ours["callbacks"]["Doctor"] == theirs["callbacks"]["Doctor"]
    assert ours["callbacks"]["Doctor"]["policy"]["rollbacks"] == 2
    assert ours["controls"] == theirs["controls"]
    assert different(ours["state_dict"], theirs["state_dict"]) == []
    assert folder.doctor.read_bytes() == whole.doctor.read_bytes()
    for a, b in zip(read_metrics(folder.metrics), read_metrics(whole.metrics), strict=True):
        for name in a.keys() | b.keys():
            if not name.startswith(("time/", "throughput/")):
                assert a[name] == b[name], (name, a["iteration"])
