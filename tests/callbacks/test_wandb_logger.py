from __future__ import annotations

import json
import logging

import pytest
import wandb

from rlhf_lightning.callbacks.wandb_logger import choose_mode, is_logged_in, wandb_logger
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from tests import offline_wandb
from tests.callbacks.tiny_run import run


@pytest.fixture
def nobody_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


@pytest.mark.thorough
@pytest.mark.usefixtures("nobody_logged_in")
def test_a_run_without_a_key_is_offline_and_asks_nothing(tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("W&B asked for something"))
    folder = RunFolder(tmp_path / "run")
    logger = wandb_logger(folder, project="p", tags=["t"], config={"ppo": {"kl_coef": 0.05}})
    run(folder.path, num_iterations=4, logger=logger)
    logger.finish({"val/gold_win_rate": 0.8})
    assert logger.shown_in == f"offline: wandb sync {folder.wandb}/offline-run-*"
    shown = capfd.readouterr()
    assert "wandb" not in (shown.out + shown.err).lower()
    (found,) = offline_wandb.segments(folder.path)
    axes = [r["metric"] for r in found if "metric" in r]
    assert {a.get("step_metric") for a in axes if a.get("glob_name") == "*"} == {"iteration"}
    assert offline_wandb.summary_of(found)["val/gold_win_rate"] == 0.8
    assert "kl_coef" in json.dumps(found)


@pytest.mark.usefixtures("nobody_logged_in")
def test_a_run_goes_on_when_wandb_cannot_start(tmp_path, monkeypatch, caplog):
    def broken(**settings):
        raise OSError("no space left")

    monkeypatch.setattr(wandb, "init", broken)
    folder = RunFolder(tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        run(folder.path, num_iterations=2, logger=(logger := wandb_logger(folder)))
    assert logger.shown_in.startswith("off: it did not work")
    assert len(read_metrics(folder.metrics)) == 2
    assert caplog.text.count("goes on without it") == 1
    assert "no space left" in caplog.text


@pytest.fixture
def forgetful(nobody_logged_in, forgetful_wandb):
    return nobody_logged_in


def test_the_mode_follows_the_key_and_the_environment(forgetful, monkeypatch, caplog):
    monkeypatch.setenv("WANDB_BASE_URL", "https://api.example.org")
    assert not is_logged_in()
    assert choose_mode("auto") == "offline"
    assert choose_mode("online") == "offline"
    assert "wandb login" in caplog.text
    key = "0123456789" * 4
    netrc = forgetful / "netrc"
    netrc.write_text(f"machine elsewhere.org\n  login user\n  password {key}\n")
    assert not is_logged_in(), "a key for another host is no key"
    netrc.write_text(f"machine api.example.org\n  login user\n  password {key}\n")
    assert is_logged_in()
    assert choose_mode("auto") == "online"
    assert choose_mode("offline") == "offline"
    monkeypatch.setenv("WANDB_MODE", "disabled")
    assert choose_mode("auto") == "disabled"
    monkeypatch.setenv("WANDB_API_KEY", key)
    assert choose_mode("online") == "online"
