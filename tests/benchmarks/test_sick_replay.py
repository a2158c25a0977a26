"""Detectors replayed over a table of metrics."""

from __future__ import annotations

import pytest

from benchmarks.studies.sick.replay import main, nearest, replay
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.runs.folder import MetricsAppender, RunFolder
from tests.builders.run_folders import fake_ppo_run


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


def test_a_warning_at_the_value_that_was_kept_farthest_out_would_be_raised_and_beyond_it_not():
    values = [0.1, 0.9, 0.3, 0.6, 0.5, 0.2, 0.2, 0.2]
    rows = [{"iteration": t, "rollout/kl_per_token": v} for t, v in enumerate(values, start=1)]
    found = nearest(rows, DoctorThresholds())
    assert found["kl_high"] == 0.5
    assert "critic" not in found
    assert replay(rows, DoctorThresholds(kl_high_warn=0.49))
    assert not replay(rows, DoctorThresholds(kl_high_warn=0.5))


def test_for_a_floor_the_value_that_was_kept_lowest_counts():
    fractions = [1.0, 0.97, 0.94, 1.0, 0.93, 0.96, 0.97, 1.0]
    rows = [{"iteration": t, "rollout/eos_fraction": v} for t, v in enumerate(fractions, start=1)]
    found = nearest(rows, DoctorThresholds())["missing_eos"]
    assert 0.93 < found < 0.98
    assert replay(rows, DoctorThresholds(eos_warn_floor=found + 0.001))
    assert not replay(rows, DoctorThresholds(eos_warn_floor=found))


def test_a_folder_without_a_run_is_told(tmp_path):
    with pytest.raises(SystemExit, match=r"has no metrics.csv: give the folder of a PPO run"):
        main([str(tmp_path)])


def test_runs_of_grpo_are_read_as_those_of_ppo_are():
    def rows(stage):
        return [{"iteration": t, f"{stage}/approx_kl": 0.2 + 0.1 * t} for t in range(1, 9)]

    found, wanted = (replay(rows(stage), DoctorThresholds()) for stage in ("grpo", "ppo"))
    assert {change.detector for _, change in found} == {"update_size"}
    assert found == wanted
