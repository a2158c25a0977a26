from __future__ import annotations

import itertools
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Timer
from lightning.pytorch.loggers.logger import DummyLogger

from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO, PatientStopping
from rlhf_lightning.callbacks.iterations import current_iteration
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.lock import FolderTakenError
from rlhf_lightning.runs.resume import checkpoint_iteration, newest_complete_checkpoint
from rlhf_lightning.runs.stopping import RunStoppedError
from tests.builders.processes import killed_after
from tests.callbacks.tiny_run import KilledError, TinyModule, run


def assert_same_run(trainer, module: TinyModule, folder: Path, whole, whole_folder: Path) -> None:
    whole_trainer, whole_module = whole
    assert current_iteration(trainer) == current_iteration(whole_trainer)
    assert read_metrics(folder / "metrics.csv") == read_metrics(whole_folder / "metrics.csv")
    assert (folder / "metrics.csv").read_bytes() == (whole_folder / "metrics.csv").read_bytes()
    for name, value in whole_module.state_dict().items():
        assert torch.equal(module.state_dict()[name], value), name
    ours, theirs = (t.optimizers[0].state_dict()["state"] for t in (trainer, whole_trainer))
    for parameter, state in theirs.items():
        for name, value in state.items():
            assert torch.equal(ours[parameter][name], value), (parameter, name)
    stops = [t.early_stopping_callback for t in (trainer, whole_trainer)]
    if stops[0] is not None:
        assert stops[0].state_dict().items() >= {"wait_count": stops[1].wait_count}.items()
        assert torch.equal(stops[0].best_score, stops[1].best_score)
    kept, expected = (t.checkpoint_callback.state_dict() for t in (trainer, whole_trainer))
    assert kept == expected


def deaths(num_iterations: int, validate_every: int) -> list[tuple[str, int]]:
    every = [("train", i) for i in range(1, num_iterations + 1)] + [("after", 4)]
    validations = range(validate_every, num_iterations + 1, validate_every)
    return every + [("validation", i) for i in validations]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("num_iterations", "validate_every", "save_every"), [(6, 2, 2), (6, 3, 1), (5, 2, 3)]
)
def test_a_run_killed_anywhere_and_resumed_is_the_run_never_killed(
    tmp_path, num_iterations, validate_every, save_every
):
    settings = {
        "num_iterations": num_iterations,
        "validate_every": validate_every,
        "save_every": save_every,
    }
    whole = run(tmp_path / "whole", **settings)
    assert len(read_metrics(tmp_path / "whole" / "metrics.csv")) == num_iterations
    for where, iteration in deaths(num_iterations, validate_every):
        folder = tmp_path / f"{where}{iteration}"
        with pytest.raises(KilledError):
            run(folder, die_at=(where, iteration), **settings)
        start = newest_complete_checkpoint(RunFolder(folder))
        done = (checkpoint_iteration(start) or 0) if start else 0
        assert done < iteration
        # Before the first checkpoint there is nothing to continue: the run starts over.
        trainer, module = run(folder, resume=start is not None, **settings)
        expected = [i for i in whole[1].validations if i > done]
        assert module.validations == expected, (where, iteration)
        assert_same_run(trainer, module, folder, whole, tmp_path / "whole")


def test_early_stopping_decides_the_same_after_a_kill(tmp_path):
    settings = {"num_iterations": 12, "validate_every": 2, "save_every": 2, "patience": 2}
    whole = run(tmp_path / "whole", **settings)
    stopped_at = current_iteration(whole[0])
    assert 4 < stopped_at < 12, "the run must be stopped early for this test to say anything"
    for iteration in range(3, stopped_at + 1):
        folder = tmp_path / str(iteration)
        with pytest.raises(KilledError):
            run(folder, die_at=("train", iteration), **settings)
        trainer, module = run(folder, resume=True, **settings)
        assert_same_run(trainer, module, folder, whole, tmp_path / "whole")


def test_a_finished_or_early_stopped_run_trains_no_further_when_resumed(tmp_path):
    for name, settings in {"full": {}, "early": {"patience": 1, "num_iterations": 12}}.items():
        folder = tmp_path / name
        first, before = run(folder, **settings)
        last = current_iteration(first)
        again, after = run(folder, resume=True, **settings)
        assert current_iteration(again) == last
        assert after.validations == []
        assert torch.equal(before.policy.weight, after.policy.weight)
        assert len(read_metrics(folder / "metrics.csv")) == last


LOSSES = {2: 0.5, 4: 1.0, 6: 0.9, 8: 1.1, 10: 0.2, 12: 3.0}


def stopped_early(folder: Path, patience: int | None = 2, start: Path | None = None, **settings):
    """Train until the patience ends, or to the end without one; the folder holds the best."""
    stops = [] if patience is None else [PatientStopping("val/loss", patience=patience)]
    return run(folder, start=start, num_iterations=12, losses=LOSSES, callbacks=stops, **settings)


def weights_of(checkpoint: Path) -> torch.Tensor:
    return torch.load(checkpoint)["state_dict"]["policy.weight"]


def test_an_early_stopping_run_continued_in_another_folder_ends_with_the_same_best(
    tmp_path, caplog
):
    _, whole = stopped_early(tmp_path / "whole")
    assert torch.equal(whole.policy.weight, weights_of(tmp_path / "whole/checkpoints/best.ckpt"))
    killed, moved = tmp_path / "killed" / "checkpoints", RunFolder(tmp_path / "moved")
    with pytest.raises(KilledError):
        stopped_early(killed.parent, die_at=("train", 5))
    trainer, module = stopped_early(moved.path, start=killed / "last.ckpt")
    assert current_iteration(trainer) == 6
    assert checkpoint_iteration(moved.best_checkpoint) == 2
    assert torch.equal(module.policy.weight, whole.policy.weight)
    assert torch.equal(weights_of(moved.best_checkpoint), whole.policy.weight)
    alone = tmp_path / "alone.ckpt"
    alone.write_bytes((killed / "last.ckpt").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"iteration 2, .*callbacks\.early_stopping"):
        stopped_early(tmp_path / "other", start=alone)
    trainer, _ = run(tmp_path / "other", num_iterations=12, losses=LOSSES, start=alone)
    assert "the next one counts as the best" in caplog.text
    assert trainer.checkpoint_callback.best_iteration == 10


def test_a_resume_that_is_refused_deletes_nothing(tmp_path):
    checkpoints = tmp_path / "checkpoints"
    with pytest.raises(KilledError):
        stopped_early(tmp_path, patience=9, die_at=("train", 11))
    assert not (checkpoints / "iteration=000002.ckpt").exists(), "what was the best at 8"
    there = sorted(path.name for path in checkpoints.iterdir())
    with pytest.raises(FileNotFoundError, match="iteration 2, is not"):
        stopped_early(tmp_path, patience=9, start=checkpoints / "iteration=000008.ckpt")
    assert sorted(path.name for path in checkpoints.iterdir()) == there
    assert checkpoint_iteration(RunFolder(tmp_path).best_checkpoint) == 10
    assert checkpoint_iteration(RunFolder(tmp_path).last_checkpoint) == 10
    start = checkpoints / "iteration=000008.ckpt"
    trainer, _ = run(tmp_path, num_iterations=8, losses=LOSSES, start=start)
    assert current_iteration(trainer) == 8
    assert not (checkpoints / "best.ckpt").is_symlink(), "what it led to is gone"


@pytest.mark.parametrize("patience", [9, None])
def test_a_run_stopped_early_goes_on_with_more_patience_and_not_with_the_same(tmp_path, patience):
    stopped_early(tmp_path / "whole")
    last = tmp_path / "whole" / "checkpoints" / "last.ckpt"
    trainer, module = stopped_early(tmp_path / "same", start=last)
    assert module.validations == []
    assert torch.equal(module.policy.weight, weights_of(last.with_name("best.ckpt")))
    trainer, module = stopped_early(tmp_path / "more", patience, start=last)
    assert module.validations == [8, 10, 12]
    assert trainer.checkpoint_callback.best_iteration == 10
    best = weights_of(tmp_path / "more/checkpoints/best.ckpt")
    assert torch.equal(module.policy.weight, best) is (patience is not None)


def test_last_and_best_lead_to_complete_checkpoints_and_old_ones_go(tmp_path):
    trainer, _ = run(tmp_path, num_iterations=9, validate_every=2, save_every=3, keep_last=1)
    folder = RunFolder(tmp_path)
    callback = trainer.checkpoint_callback
    rows = [row for row in read_metrics(folder.metrics) if "val/loss" in row]
    values = {int(row["iteration"]): row["val/loss"] for row in rows}
    best = min(values, key=values.__getitem__)
    assert sorted(values) == [2, 4, 6, 8]
    assert checkpoint_iteration(folder.last_checkpoint) == 9
    assert checkpoint_iteration(folder.best_checkpoint) == callback.best_iteration == best
    loops = torch.load(folder.best_checkpoint)["loops"]["fit_loop"]
    assert loops["epoch_loop.batch_progress"]["total"]["ready"] == best
    kept = {checkpoint_iteration(p) for p in folder.checkpoints.iterdir() if not p.is_symlink()}
    assert kept == {9, best}


def test_a_damaged_checkpoint_is_reported_and_the_one_before_taken(tmp_path, caplog):
    run(tmp_path, num_iterations=6)
    folder = RunFolder(tmp_path)
    newest = folder.last_checkpoint.resolve()
    whole = newest.read_bytes()
    for damaged in (whole[:-100], b""):
        newest.write_bytes(damaged)
        caplog.clear()
        with caplog.at_level(logging.WARNING):
            found = newest_complete_checkpoint(folder)
        assert found is not None
        assert checkpoint_iteration(found) == 4
        assert newest.name in caplog.text
    newest.write_bytes(whole)
    assert newest_complete_checkpoint(folder) == newest


def test_going_back_to_an_older_checkpoint_removes_what_came_after(tmp_path):
    whole = run(tmp_path / "whole", num_iterations=6)
    folder = tmp_path / "again"
    with pytest.raises(KilledError):
        run(folder, num_iterations=6, die_at=("train", 6))
    checkpoints = folder / "checkpoints"
    (checkpoints / "iteration=000004.ckpt").write_bytes(b"cut short")
    (checkpoints / ".iteration=000006.ckpt.tmp-1").write_bytes(b"left by a kill")
    trainer, module = run(folder, num_iterations=6, resume=True)
    assert module.validations == [4, 6]
    assert_same_run(trainer, module, folder, whole, tmp_path / "whole")
    assert sorted(p.name for p in checkpoints.iterdir()) == sorted(
        p.name for p in (tmp_path / "whole" / "checkpoints").iterdir()
    )


@pytest.mark.parametrize("save_every", [2, None])
def test_a_monitor_nobody_logs_does_not_lose_the_run(tmp_path, save_every):
    monitor = "val/losss"
    with pytest.raises(ValueError, match=f"monitor='{monitor}'"):
        run(tmp_path, num_iterations=4, monitor=monitor, mode="min", save_every=save_every)
    trainer, _ = run(tmp_path, num_iterations=4, monitor=None, resume=True)
    assert newest_complete_checkpoint(RunFolder(tmp_path)) is not None
    assert trainer.fit_loop.epoch_loop.total_batch_idx == 3


def test_the_time_of_the_trainer_stops_a_run_and_its_checkpoint_goes_on(tmp_path):
    with pytest.raises(RunStoppedError, match=r"max_time.* saved after iteration 1 of 8"):
        run(tmp_path, callbacks=[Timer({"microseconds": 1})])
    trainer, _ = run(tmp_path, resume=True)
    assert trainer.fit_loop.epoch_loop.total_batch_idx == 7


def test_the_best_by_a_metric_of_training_is_one_of_the_regular_checkpoints(tmp_path):
    settings = {"num_iterations": 9, "save_every": 4, "keep_last": 1, "monitor": "ppo/loss"}
    whole = run(tmp_path / "whole", **settings)
    folder = RunFolder(tmp_path / "whole")
    losses = {int(row["iteration"]): row["ppo/loss"] for row in read_metrics(folder.metrics)}
    best = min((4, 8, 9), key=losses.__getitem__)
    assert min(losses.values()) < losses[best], "it must not be the best of all by chance"
    assert checkpoint_iteration(folder.best_checkpoint) == best
    assert best != 9
    with pytest.raises(KilledError):
        run(tmp_path / "killed", die_at=("train", 8), **settings)
    trainer, module = run(tmp_path / "killed", resume=True, **settings)
    assert_same_run(trainer, module, tmp_path / "killed", whole, tmp_path / "whole")


def test_a_new_run_leaves_the_checkpoints_of_another_alone(tmp_path):
    run(tmp_path, num_iterations=2)
    folder = RunFolder(tmp_path).checkpoints
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(FolderTakenError, match=r"ckpt_path=.*iteration=000002\.ckpt"):
        run(tmp_path, num_iterations=3)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    trainer, _ = run(tmp_path, num_iterations=2, resume=True)
    assert current_iteration(trainer) == 2


class Steps(DummyLogger):
    """Keeps the step of each row of training."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        self.steps += [step] * ("ppo/loss" in metrics)


def test_loggers_count_on_where_a_resumed_run_validates_at_other_iterations(tmp_path):
    with pytest.raises(KilledError):
        run(tmp_path, die_at=("train", 4), validate_every=2)
    logger = Steps()
    run(tmp_path, validate_every=3, resume=True, logger=logger)
    assert logger.steps == [2, 3, 4, 5, 6, 7]  # of iterations 3 to 8


def _save_for_ever(path: Path, done: Any) -> None:
    for n in itertools.count(1):
        weights = torch.full((1_000_000,), float(n))
        AtomicCheckpointIO().save_checkpoint({"n": n, "weights": weights}, path)
        done.value = n


def test_a_checkpoint_killed_while_it_is_written_leaves_the_old_or_the_new(tmp_path):
    for wait in (0.0, 0.002, 0.004):
        path = tmp_path / f"{wait}.ckpt"
        saved = killed_after(4, _save_for_ever, path, wait=wait)
        found = torch.load(path)
        assert found["n"] >= saved
        assert torch.equal(found["weights"], torch.full((1_000_000,), float(found["n"])))
