"""The dashboard shows every panel, and says what it needs. What runs log of it: `test_tracking`."""

from __future__ import annotations

import json

import pytest

from rlhf_lightning.app.config.commands import DashboardSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.validate import load_settings
from rlhf_lightning.app.dashboard import run, sections


def test_the_workspace_that_is_printed_holds_every_panel_with_iterations_as_its_axis():
    (printed,) = run(load_settings(DashboardSettings, "dashboard", ["action=print"]))
    model = json.loads(printed)
    assert model["displayName"] == "RLHF"
    bank = model["spec"]["section"]["panelBankConfig"]
    shown = {s["name"]: s for s in bank["sections"] if s["panels"]}
    assert list(shown) == list(sections())
    for title, metrics in sections().items():
        made = shown[title]
        assert len(made["panels"]) == len(metrics)
        assert made["localPanelSettings"]["xAxis"] == "iteration"
        panels = [json.dumps(panel) for panel in made["panels"]]
        for metric in metrics:  # each in a panel of its own
            assert sum(f'"{metric}"' in panel for panel in panels) == 1, metric


def test_without_a_login_the_panels_are_named(monkeypatch, tmp_path, capsys):
    for name in ("WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="wandb login"):
        run(load_settings(DashboardSettings, "dashboard", []))
    assert "samples and distributions: held_out; best" in capsys.readouterr().out
