"""No room is left on the disk: the former checkpoint stands, and the message says where.

The disk is a real one of a few megabytes (tmpfs), where this process may mount it.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightning.pytorch import Callback

from rlhf_lightning.app.failures import RunFailedError
from rlhf_lightning.app.train import run
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.resume import checkpoint_problem, newest_complete_checkpoint
from rlhf_lightning.runs.summary import read_summary
from tests.builders.runs import completed, settings_for

pytestmark = pytest.mark.timeout(180)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A disk of 4 MiB: room for a few checkpoints of the tiny model."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = shutil.which("mount")
    done = mount and subprocess.run(
        [mount, "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)],
        capture_output=True,
        check=False,
    )
    if not done or done.returncode:
        pytest.skip("a small disk needs the right to mount one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


class FillDisk(Callback):
    """Leave almost nothing free, from the given iteration on."""

    def __init__(self, folder: Path, iteration: int, *, spare: int) -> None:
        self.folder = folder
        self.iteration = iteration
        self.spare = spare

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
        if batch_idx + 1 == self.iteration:
            free = shutil.disk_usage(self.folder).free - self.spare
            (self.folder / "filler").write_bytes(bytes(max(free, 0)))


def with_filler(monkeypatch: pytest.MonkeyPatch, callback: Callback) -> None:
    from rlhf_lightning.app import build as assembly

    make = assembly.make_trainer
    added = lambda settings, folder, own: make(settings, folder, [callback, *own])  # noqa: E731
    monkeypatch.setattr(assembly, "make_trainer", added)


@pytest.mark.thorough
def test_a_checkpoint_that_does_not_fit_leaves_the_one_before(
    start, small_disk, monkeypatch, tmp_path
):
    folder = RunFolder(small_disk / "run")
    with_filler(monkeypatch, FillDisk(small_disk, 2, spare=100 * 2**10))
    with pytest.raises(RunFailedError) as caught:
        completed(folder.path, "sft", start)
    assert "resume=auto" in str(caught.value)
    assert read_summary(folder).status == "failed"
    kept = newest_complete_checkpoint(folder)
    assert kept == folder.checkpoints / "iteration=000001.ckpt"
    assert checkpoint_problem(kept) is None
    assert [p.name for p in folder.checkpoints.iterdir() if p.name.startswith(".")] == []
    assert (folder.checkpoints / "last.ckpt").resolve() == kept

    # Room is made, and the run goes on from there.
    (small_disk / "filler").unlink()
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    summary = run(settings_for("sft", start).updated({"ckpt_path": str(kept)}), folder, [])
    assert summary.status == "completed"
    assert newest_complete_checkpoint(folder) == folder.checkpoints / "iteration=000003.ckpt"
