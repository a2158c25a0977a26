"""No room is left on the disk: the former checkpoint stands, and the message says where.

The disk is a real one of a few megabytes (tmpfs), where this process may mount it; what needs no
disk of its own meets a real limit on the size of files.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Callback

from rlhf_lightning.app.failures import RunFailedError
from rlhf_lightning.app.train import run
from rlhf_lightning.runs.atomic import DiskFullError, describe_full_disk, full_disk
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.resume import checkpoint_problem, newest_complete_checkpoint
from rlhf_lightning.runs.summary import read_summary
from tests.builders.processes import run_python
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
    message = str(caught.value)
    assert message.startswith("cannot write ")
    assert "resume=auto" in message
    assert read_summary(folder).status == "failed"
    assert read_summary(folder).cause == message
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


def test_metrics_that_do_not_fit_are_named(start, small_disk, monkeypatch):
    folder = RunFolder(small_disk / "run")
    with_filler(monkeypatch, FillDisk(small_disk, 1, spare=0))
    with pytest.raises(RunFailedError) as caught:
        completed(folder.path, "sft", start)
    assert str(caught.value).startswith("cannot write ")
    # The end itself could not be written down either, and what there was is whole.
    assert read_summary(folder).status == "running"


@pytest.mark.thorough
def test_an_export_that_does_not_fit_is_named_and_the_checkpoint_stays(
    start, small_disk, monkeypatch
):
    folder = RunFolder(small_disk / "run")

    class FillAtEnd(FillDisk):
        def on_fit_end(self, trainer, pl_module) -> None:
            self.on_train_batch_start(trainer, pl_module, None, self.iteration - 1)

    with_filler(monkeypatch, FillAtEnd(small_disk, 99, spare=60 * 2**10))
    with pytest.raises(RunFailedError) as caught:
        completed(folder.path, "sft", start)
    assert str(caught.value).startswith(f"cannot write {folder.path}")
    kept = newest_complete_checkpoint(folder)
    assert kept == folder.checkpoints / "iteration=000003.ckpt"


LIMITED = """
import resource, sys
from pathlib import Path
import torch
from safetensors.torch import save_file
from rlhf_lightning.callbacks.checkpointing import AtomicCheckpointIO
from rlhf_lightning.runs.atomic import DiskFullError, full_disk, write_text
from rlhf_lightning.runs.folder import MetricsAppender, SamplesAppender
folder = Path(sys.argv[1])
checkpoints, metrics = AtomicCheckpointIO(), MetricsAppender(folder / "metrics.csv")
checkpoints.save_checkpoint({"n": 1}, folder / "a.ckpt")
metrics.append(1, {"loss": 0.5})
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))
big = torch.zeros(100_000)
def attempt(name, action):
    try:
        action()
    except DiskFullError as error:
        print(name, "DiskFullError", error)
    except Exception as error:
        print(name, type(error).__name__, full_disk(error))
attempt("checkpoint", lambda: checkpoints.save_checkpoint({"big": big}, folder / "a.ckpt"))
attempt("text", lambda: write_text(folder / "report.html", "x" * 100_000))
attempt("samples", lambda: SamplesAppender(folder / "s.jsonl").append(1, [{"t": "x" * 100_000}]))
attempt("metrics", lambda: metrics.append(2, {f"m{i}": i / 7 for i in range(2000)}))
attempt("safetensors", lambda: save_file({"big": big}, folder / "m.safetensors"))
"""


def test_every_file_of_a_run_says_what_could_not_be_written(tmp_path):
    (tmp_path / "limited.py").write_text(LIMITED)
    done = run_python("limited.py", tmp_path, folder=tmp_path, timeout=120)
    assert done.returncode == 0, done.stderr
    lines = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    for name, file in (
        ("checkpoint", "a.ckpt"),
        ("text", "report.html"),
        ("samples", "s.jsonl"),
        ("metrics", "metrics.csv"),
    ):
        wanted = f"DiskFullError cannot write {tmp_path / file}: the file is larger than the system"
        assert lines[name].startswith(wanted), name
    assert lines["safetensors"] == "SafetensorError 27"
    assert torch.load(tmp_path / "a.ckpt", weights_only=True) == {"n": 1}
    assert read_metrics(tmp_path / "metrics.csv") == [{"iteration": 1.0, "loss": 0.5}]
    assert not (tmp_path / "report.html").exists()


def test_a_full_disk_is_told_from_other_errors(tmp_path):
    assert full_disk(OSError(28, "No space left on device")) == 28
    assert full_disk(OSError(2, "No such file")) is None
    assert full_disk(RuntimeError("No space left on device (os error 28)")) == 28
    assert full_disk(ValueError("28")) is None
    text = describe_full_disk(28, tmp_path / "not" / "there" / "x.ckpt")
    assert f"cannot write {tmp_path}/not/there/x.ckpt: no space is left" in text
    assert issubclass(DiskFullError, OSError)
