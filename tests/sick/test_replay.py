"""Detectors replayed over a table of metrics."""

from __future__ import annotations

import pytest

from rlhf_lightning.runs.folder import MetricsAppender, RunFolder
from tests.reports.fake_run import fake_ppo_run
from tests.sick.replay import main


def test_a_run_that_goes_well_has_no_alert(tmp_path, capsys):
    fake_ppo_run(tmp_path / "run", 24)
    main([str(tmp_path / "run"), "--picture", str(tmp_path / "run.png")])
    assert capsys.readouterr().out == "no alert in 24 iterations\n"
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")


def test_an_alert_is_told_with_its_iteration_and_thresholds_can_be_tried(tmp_path, capsys):
    table = MetricsAppender(RunFolder(tmp_path).metrics)
    for iteration in range(1, 11):
        row = {"rollout/kl_per_token": 0.2 * iteration, "time/score": 9.0}
        table.append(iteration, row)
    main([str(tmp_path)])
    assert capsys.readouterr().out.startswith(
        "iteration 7: The policy has left the reference [warn"
    )
    main([str(tmp_path), "--set", "kl_high_warn=0.5", "raise_after=1"])
    assert capsys.readouterr().out.startswith("iteration 3: ")


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"has no metrics.csv: give the folder of a PPO run"):
        main([str(tmp_path)])
