"""The end of a command that is stopped; a machine without the accelerator is told early."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rlhf_lightning.app import train
from rlhf_lightning.app.build import check_devices
from rlhf_lightning.app.command_line import ended_in_one_line
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.evaluate import run as evaluate
from rlhf_lightning.app.failures import STOPPED, exit_with
from rlhf_lightning.app.start import MISTAKE
from rlhf_lightning.data.errors import BadRecordError, Location
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.stopping import stopping_on_signals
from rlhf_lightning.runs.summary import read_summary
from tests.builders.command_lines import settings_of


def test_torchrun_is_told_why_a_rank_ended(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    with pytest.raises(SystemExit) as ended:
        exit_with(KeyError("nobody knows this"))
    assert ended.value.code == 1
    message = json.loads((tmp_path / "error.json").read_text())["message"]["message"]
    assert message == "KeyError: 'nobody knows this'"
    assert capsys.readouterr().err.splitlines()[-1] == f"error: {message}"


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
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


def on(kind: str, devices: int) -> Any:
    words = (f"trainer.accelerator={kind}", f"trainer.devices={devices}", "data.batch_size=24")
    return settings_of("+experiment=base", *words)


def test_more_devices_than_there_are_is_refused(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    check_devices(on("gpu", 2))
    check_devices(on("cpu", 8))
    with pytest.raises(ConfigError, match=r"trainer\.devices=3"):
        check_devices(on("gpu", 3))
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"trainer\.accelerator=gpu"):
        check_devices(on("gpu", 1))


BAD = BadRecordError(Location("pairs.jsonl", 2), "it is not JSON", "write JSON")


def refused(*_: Any) -> None:
    raise BAD


def test_a_wrong_record_ends_a_command_as_other_mistakes_do(monkeypatch, capsys):
    monkeypatch.setattr(train, "this_job", lambda: (RunFolder("run"), []))
    monkeypatch.setattr(train, "command_settings", refused)
    with pytest.raises(SystemExit) as training:
        train._job({"stage": "dpo", "seed": 1})
    with pytest.raises(SystemExit) as other, ended_in_one_line():
        refused()
    assert (training.value.code, other.value.code) == (MISTAKE, MISTAKE)
    assert capsys.readouterr().err == f"error: {BAD}\n" * 2
