"""What the doctor does, as decisions on levels and controls."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from rlhf_lightning.doctor.detectors import Detectors
from rlhf_lightning.doctor.interventions import UNNAMED, ActionSettings, Intervention, Knobs
from rlhf_lightning.doctor.policy import InterventionPolicy
from rlhf_lightning.doctor.spec import ALARM
from rlhf_lightning.doctor.thresholds import DoctorThresholds

PLAIN = Knobs(0.05, 1.0, 1.0, 0.0, {})


def knobs(**changes: object) -> Knobs:
    return Knobs(**(PLAIN.__dict__ | changes))


def first(detector: str, state: Knobs = PLAIN, subject: str = "") -> Intervention | None:
    found = InterventionPolicy(ActionSettings()).due(
        [detector], {detector: subject}, state, {detector: 1}
    )
    return found[0] if found else None


@pytest.mark.parametrize(
    ("now", "then"), [(0.0, 0.05), (0.01, 0.05), (0.05, 0.1), (0.1, 0.2), (0.2, None), (0.4, None)]
)
def test_high_kl_raises_the_coefficient_by_one_rung(now: float, then: float | None) -> None:
    found = first("kl_high", knobs(kl_coef=now))
    assert (None if found is None else found.after) == then


def test_low_kl_lowers_the_coefficient_once() -> None:
    assert first("kl_low") == Intervention("kl_low", "kl_coef", 0.05, 0.01)
    assert first("kl_low", knobs(kl_coef=0.01)) is None


@pytest.mark.parametrize("detector", ["kl_high", "kl_low", "reward_hacking", "safety"])
def test_a_coefficient_that_follows_a_target_is_left_alone(detector: str) -> None:
    assert first(detector, knobs(adapts_kl_coef=True)) is None


def test_a_collapse_is_met_by_the_bonus_first_and_then_by_temperature() -> None:
    assert first("diversity") == Intervention("diversity", "diversity_bonus", 0.0, 0.1)
    most = knobs(diversity_bonus=0.3)
    assert first("duplicates", most) == Intervention("duplicates", "temperature", 1.0, 1.1)
    assert first("entropy", knobs(diversity_bonus=0.3, temperature=1.3)) is None
    assert first("duplicates", replace(most, keeps_temperature=True)) is None  # as of a server


def test_a_forgotten_domain_gets_more_weight_up_to_the_most() -> None:
    found = first("forgotten_domain", subject="lists")
    assert found == Intervention("forgotten_domain", "domain_weights.lists", 1.0, 1.5)
    heavy = knobs(domain_weights={"lists": 2.5})
    assert first("forgotten_domain", heavy, "lists").after == 3.0
    assert first("forgotten_domain", knobs(domain_weights={"lists": 3.0}), "lists") is None
    assert first("forgotten_domain", subject=UNNAMED) is None, "rows without a domain weigh 1"


def test_updates_that_are_too_large_halve_the_learning_rates_down_to_the_least() -> None:
    assert first("update_size").after == 0.5
    assert first("update_size", knobs(learning_rate_factor=0.125)) is None


@pytest.mark.parametrize("detector", ["critic", "missing_eos", "saturation", "sampler_mismatch"])
def test_what_no_control_can_help_is_only_told(detector: str) -> None:
    assert first(detector) is None


def test_one_detector_acts_again_only_after_the_cooldown() -> None:
    policy = InterventionPolicy(ActionSettings(cooldown=4))
    acted = [bool(policy.due(["kl_high"], {}, PLAIN, {"kl_high": t})) for t in range(1, 7)]
    assert acted == [True, False, False, False, True, False]
    healthy = [policy.due([], {}, PLAIN, {"kl_high": t}) for t in range(7, 12)]
    assert not any(healthy), "an alert whose readings are healthy again asks for nothing"


def verdicts(settings: ActionSettings, alarms: list[dict[str, int]]) -> list[str]:
    policy = InterventionPolicy(settings)
    found = []
    for t, active in enumerate(alarms, 1):
        word, _ = policy.verdict(t, active, dict.fromkeys(active, t))
        policy.rollbacks += word == "rollback"
        found.append(word)
    return found


def test_an_alarm_that_stays_ends_the_fit_as_it_is_set() -> None:
    alarms = [{"safety": ALARM}] * 4
    for mode in ("stop", "rollback"):
        found = verdicts(ActionSettings(on_alarm=mode, alarm_patience=2), alarms)
        assert found == ["continue", "continue", mode, mode]
    assert set(verdicts(ActionSettings(alarm_patience=2), alarms)) == {"continue"}


@pytest.mark.parametrize("every", [1, 2, 5])
def test_what_is_read_every_nth_iteration_has_as_many_readings_to_recover(every: int) -> None:
    detectors = Detectors(DoctorThresholds(), 200 * every)
    policy = InterventionPolicy(ActionSettings(on_alarm="rollback"))
    state, acted_at, alarmed = knobs(kl_coef=0.01), [], False
    for t in range(1, 50 * every + 1):
        values = {"score": 0.01 * t, "score_std": 1.0}
        if t % every == 0:
            hacked = t >= 20 * every and not alarmed
            values |= {"second_score": 0.0 if hacked else 1.5, "second_std": 1.0}
        detectors.observe(t, values)
        alarmed |= ALARM in detectors.active.values()
        for step in policy.due(detectors.beyond, detectors.subjects, state, detectors.read):
            state = knobs(kl_coef=step.after)
            acted_at.append(t)
        assert policy.verdict(t, detectors.active, detectors.read)[0] == "continue", t
    assert alarmed
    assert acted_at == [21 * every, 25 * every], "the recent mean is low until reading 25"
    assert not detectors.active


def test_alarms_of_what_cannot_be_undone_by_going_back_do_not_end_the_fit() -> None:
    settings = ActionSettings(on_alarm="rollback", alarm_patience=1)
    assert set(verdicts(settings, [{"critic": ALARM, "missing_eos": ALARM}] * 5)) == {"continue"}


def test_after_the_last_rollback_the_run_stops() -> None:
    settings = ActionSettings(on_alarm="rollback", alarm_patience=1, max_rollbacks=2)
    found = verdicts(settings, [{"kl_high": ALARM}] * 5)
    assert found == ["continue", "rollback", "rollback", "stop", "stop"]


def ladder(knobs_before: list[Knobs]) -> list[dict[str, tuple[float, float]]]:
    policy = InterventionPolicy(ActionSettings())
    return [
        {c.control: (c.before, c.after) for c in policy.after_rollback(each)}
        for each in knobs_before
    ]


def test_a_second_rollback_to_the_same_checkpoint_goes_a_step_further() -> None:
    assert ladder([PLAIN] * 4) == [
        {"kl_coef": (0.05, 0.1), "learning_rate_factor": (1.0, 0.5)},
        {"kl_coef": (0.05, 0.2), "learning_rate_factor": (1.0, 0.25)},
        {"kl_coef": (0.05, 0.2), "learning_rate_factor": (1.0, 0.125)},
        {"kl_coef": (0.05, 0.2), "learning_rate_factor": (1.0, 0.125)},
    ]


def test_the_policy_goes_on_from_its_state() -> None:
    one = InterventionPolicy(ActionSettings(on_alarm="rollback", alarm_patience=3))
    one.due(["kl_high"], {}, PLAIN, {"kl_high": 1})
    one.verdict(1, {"kl_high": ALARM}, {"kl_high": 1})
    one.rollbacks = 1
    one.after_rollback(PLAIN)
    other = InterventionPolicy(one.settings)
    other.load_state_dict(json.loads(json.dumps(one.state_dict())))
    assert other == one
