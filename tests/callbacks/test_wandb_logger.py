from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path

import pytest
import wandb

from rlhf_lightning.callbacks.wandb_logger import choose_mode, is_logged_in, wandb_logger
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from tests.callbacks.tiny_run import run


@pytest.fixture
def nobody_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_MODE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def records(folder: Path) -> list[dict]:
    (directory,) = (folder / "wandb").glob("offline-run-*")
    leet = [str(Path(sys.executable).with_name("wandb")), "leet", "inspect", "--json"]
    done = subprocess.run(
        [*leet, str(directory)],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=True,
    )
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.thorough
@pytest.mark.usefixtures("nobody_logged_in")
def test_a_run_without_a_key_is_offline_asks_nothing_and_can_be_read_back(
    tmp_path, monkeypatch, capfd
):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("W&B asked for something"))
    folder = RunFolder(tmp_path / "run")
    logger = wandb_logger(folder, project="p", tags=["t"], config={"ppo": {"kl_coef": 0.05}})
    run(folder.path, num_iterations=4, logger=logger)
    logger.finish({"val/gold_win_rate": 0.8})
    assert logger.shown_in == f"offline: wandb sync {folder.wandb}/offline-run-*"
    rows = read_metrics(folder.metrics)
    found = records(folder.path)
    history = [r["history"]["item"] for r in found if "history" in r]
    by_iteration: dict[int, dict] = {}
    for item in history:
        by_iteration.setdefault(item["iteration"], {}).update(item)
    assert sorted(by_iteration) == [1, 2, 3, 4]
    for row in rows:
        logged = by_iteration[int(row["iteration"])]
        for name, value in row.items():
            assert logged[name] == pytest.approx(value, rel=1e-6), name
    assert not any("trainer/global_step" in item or "epoch" in item for item in history)
    axes = [r["metric"] for r in found if "metric" in r]
    assert {axis.get("step_metric") for axis in axes if axis.get("glob_name") == "*"} == {
        "iteration"
    }
    summaries = [r["summary"]["update"] for r in found if "summary" in r]
    assert any(s.get("val/gold_win_rate") == 0.8 for s in summaries)
    assert "kl_coef" in json.dumps(found)
    shown = capfd.readouterr()
    assert "wandb" not in (shown.out + shown.err).lower()


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
