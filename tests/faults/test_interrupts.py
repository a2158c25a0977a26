"""Control-C, and a W&B that cannot be reached."""

from __future__ import annotations

import json
import os
import signal
import socket
import time

import pytest

from rlhf_lightning.runs.folder import RunFolder, read_metrics
from tests.builders.command_lines import command, environment, run_folder, small_sft, summary
from tests.builders.processes import ForkedPython
from tests.builders.runs import completed

pytestmark = pytest.mark.timeout(240)


def test_control_c_stops_the_run_and_says_how_to_continue(start, tmp_path):
    long = ("trainer.limit_train_batches=null", "data.num_epochs=2000")
    out, err = tmp_path / "out", tmp_path / "err"
    arguments = command(*small_sft(start, *long))[1:]
    process = ForkedPython(arguments, tmp_path, environment(), out, err)
    try:
        deadline = time.monotonic() + 180
        while not list(tmp_path.glob("outputs/sft/*/checkpoints/last.ckpt")):
            assert process.poll() is None, err.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(process.pid, signal.SIGINT)
        assert process.wait(60) == 130
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    errors = err.read_text()
    folder = run_folder(tmp_path)
    assert f"resume=auto continues {folder}" in errors
    assert "Traceback" not in errors
    assert summary(tmp_path)["status"] == "stopped"
    assert (folder / "report.html").is_file()
    assert not (folder / "traceback.txt").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("forgetful_wandb")
@pytest.mark.parametrize("kind", ["refused", "silent"])
def test_a_run_goes_on_without_a_wandb_that_cannot_be_reached(
    start, tmp_path, monkeypatch, caplog, kind
):
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        if kind == "silent":
            server.listen(64)  # it accepts, and never answers
        monkeypatch.setenv("WANDB_BASE_URL", f"http://127.0.0.1:{server.getsockname()[1]}")
        monkeypatch.setenv("WANDB_API_KEY", "0123456789" * 4)
        monkeypatch.setenv("WANDB_MODE", "online")
        monkeypatch.setenv("WANDB_INIT_TIMEOUT", "2")
        folder = RunFolder(tmp_path / "run")
        completed(folder.path, "sft", start, "logger=wandb")
    assert json.loads(folder.summary.read_text())["status"] == "completed"
    assert len(read_metrics(folder.metrics)) == 3
    assert "logger.mode=offline" in caplog.text
