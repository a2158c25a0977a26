"""The end of a command that is stopped; a machine without the accelerator is told early."""

from __future__ import annotations

import io
import json
import os
import signal
import sys
from typing import Any

import pytest
import torch

from rlhf_lightning.app.command_line import ended_in_one_line, run_command
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import check_devices
from rlhf_lightning.app.evaluate import run as evaluate
from rlhf_lightning.app.failures import (
    INTERRUPTED,
    STOPPED,
    exit_with,
    record_failure,
)
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.resume import unfinished_runs
from rlhf_lightning.runs.stopping import stopping_on_signals
from rlhf_lightning.runs.summary import new_summary, read_summary
from tests.builders.command_lines import overrides_of, settings_of, summary, train


@pytest.mark.thorough
def test_a_process_that_ends_without_a_word_leaves_a_run_that_the_next_command_names(
    start, tmp_path, caplog
):
    leaving = "import os\ndef score(completions, **_):\n    os._exit(0)\n"
    (tmp_path / "reward.py").write_text(leaving)
    words = ["scorer=function", f"scorer.function={tmp_path}/reward.py:score"]
    done = train(tmp_path, *overrides_of("ppo", start), *words, "artifacts.reward=null")
    found = summary(tmp_path)
    assert (done.returncode, found["status"]) == (0, "running")
    (left,) = unfinished_runs(tmp_path / "outputs/ppo", found["config_hash"])
    assert f"{left.path} never ended" in caplog.text


def test_torchrun_is_told_why_a_rank_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        exit_with(KeyError("nobody knows this"))
    assert ended.value.code == 1
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "KeyError: 'nobody knows this'"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


class InterruptedFile(io.BytesIO):
    """Control-C comes while it is written to."""

    def write(self, content: Any) -> int:
        if self.tell() > 100:
            raise KeyboardInterrupt
        return super().write(content)


def test_a_control_c_in_the_middle_of_a_checkpoint_is_no_failure_of_torch(tmp_path, capsys):
    folder = RunFolder(tmp_path).create()
    begun = new_summary("sft", seed=1, config_hash=None)
    with pytest.raises(RuntimeError) as caught:
        torch.save({"x": torch.zeros(10_000)}, InterruptedFile())
    record_failure(folder, begun, caught.value)
    assert (read_summary(folder).status, read_summary(folder).cause) == ("stopped", INTERRUPTED)
    assert not folder.traceback.exists()
    with pytest.raises(SystemExit) as ended:
        exit_with(caught.value)
    assert ended.value.code == 130
    assert capsys.readouterr().err.splitlines()[0] == f"stopped: {INTERRUPTED}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2", "SIGINT"])
def test_a_signal_ends_an_evaluation_with_a_word(start, tmp_path, name, capsys):
    reward = "import os, signal\ndef score(*_, **__):\n    os.kill(os.getpid(), signal.{})\n"
    (tmp_path / "reward.py").write_text(reward.format(name))
    words = [f"policy={start}", f"baseline={start}", "scorer=function", "evaluation.num_prompts=4"]
    words.append(f"scorer.function={tmp_path}/reward.py:score")
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(SystemExit) as ended, ended_in_one_line(), stopping_on_signals():
        evaluate(settings_of(*words, entry="evaluate"), folder, words)
    assert ended.value.code == (130 if name == "SIGINT" else STOPPED)
    (line,) = (text for text in capsys.readouterr().err.splitlines() if "stopped" in text)
    assert name == "SIGINT" or name in line
    assert read_summary(folder).status == "stopped"


@pytest.mark.parametrize("entry", ["report", "export", "plan", "dashboard", "annotate"])
def test_a_signal_ends_a_command_without_a_folder_with_a_word(entry, monkeypatch, capsys, tmp_path):
    words = {
        "report": [f"run={tmp_path}"], "export": [f"run={tmp_path}"], "plan": ["+experiment=sft"],
        "dashboard": ["project=x"], "annotate": [f"store={tmp_path}/store"],
    }  # fmt: skip
    monkeypatch.setattr(sys, "argv", [entry, *words[entry]])

    def work(settings: object) -> None:
        os.kill(os.getpid(), signal.SIGHUP)

    config = "train" if entry == "plan" else None
    with pytest.raises(SystemExit) as ended:
        run_command(entry, work, config=config)
    assert ended.value.code == STOPPED
    assert capsys.readouterr().err.startswith("stopped: SIGHUP")


def test_a_signal_that_nohup_has_switched_off_stays_so(monkeypatch):
    former = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with stopping_on_signals():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, former)


def on(kind: str, devices: int) -> TrainSettings:
    found: TrainSettings = settings_of(
        "+experiment=base",
        f"trainer.accelerator={kind}",
        f"trainer.devices={devices}",
        "data.batch_size=24",
    )
    return found


@pytest.mark.parametrize("kind", ["gpu", "cuda", "mps"])
def test_an_accelerator_that_is_not_there_is_refused(kind, monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    settings = on(kind, 1)
    with pytest.raises(ConfigError, match=rf"^trainer\.accelerator={kind}, but torch finds none"):
        check_devices(settings)


def test_more_devices_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    for devices in (1, 2):
        check_devices(on("gpu", devices))
    settings = on("gpu", 3)
    with pytest.raises(ConfigError, match=r"^trainer\.devices=3, but torch finds 2 of kind gpu"):
        check_devices(settings)
    check_devices(on("cpu", 8))
