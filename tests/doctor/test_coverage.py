"""A score that does not vary, and what a detector says of how much it has had to watch."""

from __future__ import annotations

import json
import random

import pytest

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.detectors import Detectors
from rlhf_lightning.doctor.spec import LEVELS
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from tests.doctor.test_detectors import CASES, ITERATIONS, healthy


def scores(spreads: list[float], mean: float = 0.0) -> list[tuple[int, str]]:
    """Return what is said of the score where iterations have these standard deviations."""
    detectors = Detectors(DoctorThresholds(), len(spreads))
    return [
        (t, LEVELS[transition.after])
        for t, std in enumerate(spreads, start=1)
        for transition in detectors.observe(t, {"score": mean, "score_std": std})
        if transition.detector == "constant_score"
    ]


def test_a_score_that_does_not_vary_warns_at_once_and_alarms_at_the_third_iteration() -> None:
    assert scores([0.0] * 8) == [(1, "warn"), (3, "alarm")]
    assert scores([3e-4] * 8, mean=1000.0) == [(1, "warn"), (3, "alarm")], "rounding of 1000"
    assert scores([1e-3] * 8) == [], "a small score varies too"


def test_a_score_of_0_and_1_that_begins_with_all_0_is_no_alarm_unless_it_stays() -> None:
    assert scores([0.0, 0.2, 0.2, 0.3, 0.3]) == [(1, "warn"), (4, "healthy")]
    assert scores([0.0, 0.0, 0.2, 0.0, 0.0, 0.2]) == [(1, "warn")]
    assert scores([0.3, 0.3, 0.0, 0.0, 0.0]) == [(3, "warn"), (5, "alarm")]


def test_a_detector_says_what_it_has_had_to_watch() -> None:
    detectors, noise = Detectors(DoctorThresholds(), ITERATIONS), random.Random(0)
    assert set(detectors.idle) == set(DETECTORS)
    assert detectors.idle["missing_eos"] == "not enough iterations: 0 of 5"
    for t in (1, 2):
        values = healthy(t, noise) | {"eos_fraction": 0.0}
        assert not detectors.observe(t, values), "no alert of two iterations, and that is said"
    assert detectors.idle["missing_eos"] == "not enough iterations: 2 of 5"
    assert detectors.idle["kl_low"] == "not enough iterations: 2 of 11"
    assert detectors.idle["critic"] == "not enough iterations: 2 of 10"
    assert "kl_high" not in detectors.idle
    again = Detectors(DoctorThresholds(), ITERATIONS)
    again.load_state_dict(json.loads(json.dumps(detectors.state_dict())))
    assert again.idle == detectors.idle
    for t in range(3, 12):
        detectors.observe(t, healthy(t, noise))
    assert detectors.idle == {}


@pytest.mark.parametrize("name", CASES)
def test_no_detector_raises_an_alert_while_it_is_said_to_have_had_too_little(name: str) -> None:
    change = CASES[name][0]
    begin, noise = {"kl_low": 0}.get(name, 10), random.Random(0)
    detectors = Detectors(DoctorThresholds(), ITERATIONS)
    alone = 0
    for t in range(1, 15):
        idle = detectors.idle.get(name)
        raised = detectors.observe(t, healthy(t, noise) | change(t + begin))
        if any(transition.detector == name for transition in raised):
            assert name not in detectors.idle
        alone += idle is not None
    assert alone == DETECTORS[name].first_alert(DoctorThresholds(), ITERATIONS)
