"""What the report says of the doctor."""

from __future__ import annotations

from rlhf_lightning.reports.page import render_report
from rlhf_lightning.runs.doctor_log import DoctorEvent, write_events
from tests.builders.run_folders import fake_ppo_run

WATCH = DoctorEvent(0, "watch", "kl_high,safety", "", "2 detectors watch from iteration 1")
ALERT = DoctorEvent(
    12, "alert", "kl_high", "warn", "KL <b>1.3</b>", 1.3, 1.0, "nats a token", "too loose", "hold"
)
ACTION = DoctorEvent(12, "action", "kl_high", "", "kl_coef from 0.05 to 0.1")


def test_an_alert_stands_there_with_cause_and_remedy_and_nothing_of_it_is_markup(tmp_path):
    folder = fake_ppo_run(tmp_path / "run")
    assert "<h2>Doctor</h2>" not in render_report(folder)
    write_events(folder.doctor, [WATCH, ALERT, ACTION])
    page = render_report(folder)
    for part in ("12 to the end", "&lt;b&gt;1.3", "too loose", "hold", "kl_coef from 0.05 to 0.1"):
        assert part in page
    assert "<b>1.3</b>" not in page
