"""What the report says of the doctor."""

from __future__ import annotations

from rlhf_lightning.reports.page import doctor_section, render_report
from rlhf_lightning.runs.doctor_log import DoctorEvent, write_events
from tests.builders.run_folders import fake_ppo_run

WATCH = DoctorEvent(0, "watch", "kl_high,safety", "", "2 detectors watch from iteration 1")
ALERT = DoctorEvent(
    12, "alert", "kl_high", "warn", "KL <b>1.3</b>", 1.3, 1.0, "nats a token", "too loose", "hold"
)
ACTION = DoctorEvent(12, "action", "kl_high", "", "kl_coef from 0.05 to 0.1")


def test_a_healthy_run_says_that_somebody_watched():
    page = doctor_section([WATCH])
    assert "2 detectors watched, none found anything" in page
    assert "<li>" not in page


def test_a_detector_that_had_too_little_to_watch_is_named_with_why():
    short = DoctorEvent(2, "idle", "safety", "", "not enough iterations: 2 of 5")
    page = doctor_section([WATCH, short])
    assert "1 of 2 detectors had enough to watch, none of them found anything." in page
    assert "<b>1 of 2</b><p>safety: not enough iterations: 2 of 5</p>" in page
    groups = DoctorEvent(2, "idle", "groups", "", "the stage has no groups")
    both = doctor_section([WATCH, short, groups])
    assert both.count("<li>") == 1
    assert "safety: not enough iterations: 2 of 5; groups: the stage has no groups" in both
    never = [DoctorEvent(0, "idle", name, "", "0 of 5") for name in ("safety", "kl_high")]
    page = doctor_section([WATCH, *never])
    assert "None of 2 detectors had enough to watch." in page
    assert "found" not in page


def test_an_alert_stands_there_with_cause_and_remedy_and_nothing_of_it_is_markup():
    page = doctor_section([WATCH, ALERT, ACTION])
    for part in ("iterations 12 to the end", "too loose", "hold", "kl_coef from 0.05 to 0.1"):
        assert part in page
    assert "<b>1.3</b>" not in page
    assert "&lt;b&gt;1.3" in page


def test_a_preflight_that_failed_is_shown_with_its_fix():
    check = DoctorEvent(0, "check", "scores differ", "alarm", "std 0", remedy="another scorer")
    page = doctor_section([WATCH, check])
    assert "✗ failed" in page
    assert "another scorer" in page


def test_the_page_of_a_run_holds_the_section(tmp_path):
    folder = fake_ppo_run(tmp_path / "run")
    assert "<h2>Doctor</h2>" not in render_report(folder)
    write_events(folder.doctor, [WATCH, ALERT])
    assert "<h2>Doctor</h2>" in render_report(folder)
