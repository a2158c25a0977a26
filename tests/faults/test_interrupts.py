"""Control-C."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.builders.command_lines import command, environment, run_folder, small_sft, summary
from tests.builders.processes import ForkedPython

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
