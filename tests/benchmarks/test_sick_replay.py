"""Detectors replayed over a table of metrics."""

from __future__ import annotations

from benchmarks.studies.sick.replay import main, nearest, replay
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.runs.folder import MetricsAppender, RunFolder


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
