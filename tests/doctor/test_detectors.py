"""Each detector on a series in which nothing but what it is for happens, and on a healthy one."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.detectors import Detectors, Hysteresis, Transition
from rlhf_lightning.doctor.spec import ALARM, HEALTHY, WARN
from rlhf_lightning.doctor.thresholds import DoctorThresholds

ITERATIONS = 40


def healthy(t: int, noise: random.Random) -> dict[str, float]:
    """Return what a run that goes well measures at iteration t."""
    grown = t / ITERATIONS
    values = {
        "score": 1.4 * grown,
        "score_std": 1.0 - 0.3 * grown,
        "kl_per_token": 0.3 * grown,
        "response_length": 14 + 3 * grown,
        "eos_fraction": 0.98,
        "distinct_2": 0.4 - 0.06 * grown,
        "entropy": 1.3 - 0.5 * grown,
        "explained_variance": 0.6 * grown + 0.1,
        "approx_kl": 0.02,
        "informative_groups": 0.9,
        "kept_fraction": 0.95,
        "length_correlation": 0.1,
        "most_common": 0.05,
        "clipped": 0.0,
        "sampler_bias": 0.0,
        "sampler_error": 0.01,
        "sampler_gap": 0.01,
        "sampler_non_finite": 0.0,
        "refusal_rate": 0.7 + 0.2 * grown,
        "harmful_prompts": 60.0,
        "second_score": 0.8 + 1.2 * grown,
        "second_std": 1.5,
        "second_correlation": 0.6,
        "domain_score/sums": 0.8 + 1.0 * grown,
        "domain_score/lists": 0.7 + 1.4 * grown,
    }
    return {name: value * (1 + noise.gauss(0, 0.01)) for name, value in values.items()}


def after(t: int, since: int = 10) -> float:
    return max(0.0, (t - since) / 10)


# What changes from iteration 11 on, and how many iterations later it is noticed.
CASES: dict[str, tuple[Any, int]] = {
    "constant_score": (lambda t: {"score_std": 0.0}, 1),
    "kl_high": (lambda t: {"kl_per_token": 0.1 + after(t)}, 14),
    "reward_hacking": (lambda t: {"second_score": 1.1 - 0.8 * after(t)}, 10),
    "scorer_disagreement": (lambda t: {"second_correlation": 0.6 - after(t)}, 9),
    "length_bias": (lambda t: {"length_correlation": 0.1 + 0.5 * after(t)}, 16),
    "length_drift": (lambda t: {"response_length": 14 * (1 + after(t))}, 14),
    "diversity": (lambda t: {"distinct_2": 0.4 / (1 + after(t))}, 23),
    "duplicates": (lambda t: {"most_common": 0.05 + 0.4 * after(t)}, 12),
    "entropy": (lambda t: {"entropy": 1.3 * (1 - 0.6 * after(t))}, 16),
    "forgotten_domain": (lambda t: {"domain_score/lists": 1.0 - after(t)}, 17),
    "critic": (lambda t: {"explained_variance": 0.3 - after(t)}, 9),
    "saturation": (lambda t: {"score_std": 0.9 * 0.2 ** after(t)}, 14),
    "clipped_scores": (lambda t: {"clipped": 0.5 * after(t)}, 11),
    "missing_eos": (lambda t: {"eos_fraction": 0.98 - 0.3 * after(t)}, 9),
    "sampler_mismatch": (lambda t: {"sampler_bias": -0.1 * after(t), "sampler_error": 0.005}, 12),
    "engine_weights": (lambda t: {"sampler_gap": 0.01 + 0.1 * after(t)}, 6),
    "safety": (lambda t: {"refusal_rate": 0.75 - 0.5 * after(t)}, 9),
    "groups": (lambda t: {"informative_groups": 0.9 / (1 + after(t)) ** 3}, 14),
    "trust_region": (lambda t: {"kept_fraction": 0.95 - 0.5 * after(t)}, 14),
    "update_size": (lambda t: {"approx_kl": 0.02 + 0.2 * after(t)}, 8),
    "kl_low": (lambda t: {"kl_per_token": 0.01, "score": 0.02}, 4),
}


def run(change: Any = lambda t: {}, seed: int = 0, **limits: Any) -> list[tuple[int, Transition]]:
    noise = random.Random(seed)
    detectors = Detectors(DoctorThresholds(**limits), ITERATIONS)
    found = []
    for t in range(1, ITERATIONS + 1):
        values = healthy(t, noise)
        changed = change(t) if t > 10 or change is CASES["kl_low"][0] else {}
        found += [(t, transition) for transition in detectors.observe(t, values | changed)]
    return found


def test_every_detector_has_a_case_and_thresholds() -> None:
    assert set(CASES) == set(DETECTORS)
    for name, spec in DETECTORS.items():
        warn, alarm = (spec.bound(DoctorThresholds(), level) for level in (WARN, ALARM))
        ordered = warn <= alarm if spec.beyond == "above" else warn >= alarm
        assert ordered, name


@pytest.mark.parametrize("seed", range(3))
def test_nothing_fires_on_a_healthy_series(seed: int) -> None:
    assert run(seed=seed) == []


@pytest.mark.parametrize("name", CASES)
def test_each_case_is_found_in_time_and_by_its_own_detector_first(name: str) -> None:
    change, within = CASES[name]
    found = run(change)
    raised = [t for t, transition in found if transition.detector == name]
    assert raised, f"{name} was not found"
    assert 10 <= raised[0] <= 10 + within
    assert found[0][1].detector == name
    described = found[0][1].describe()
    assert DETECTORS[name].title in described
    assert DETECTORS[name].measures in described
    brief = found[0][1].describe(briefly=True)
    assert DETECTORS[name].measures not in brief
    assert brief.endswith(f" {found[0][1].threshold:g})")


def test_an_engine_whose_log_probabilities_are_no_numbers_is_an_alarm() -> None:
    found = run(lambda t: {"sampler_gap": 0.01, "sampler_non_finite": 1.0})
    assert [(x.detector, x.after) for _, x in found] == [("engine_weights", ALARM)]


def test_an_alert_that_grows_becomes_an_alarm() -> None:
    levels = [x.after for _, x in run(CASES["kl_high"][0]) if x.detector == "kl_high"]
    assert levels == [WARN, ALARM]


@pytest.mark.parametrize(
    ("length", "levels"), [(2.0, [ALARM]), (7.0, [WARN]), (8.5, []), (28.0, [WARN])]
)
def test_responses_that_shrink_are_as_bad_as_those_that_grow(
    length: float, levels: list[int]
) -> None:
    detectors, found = Detectors(DoctorThresholds(), ITERATIONS), []
    for t in range(1, ITERATIONS + 1):
        found += detectors.observe(t, {"response_length": 14.0 if t <= 10 else length})
    assert [(x.detector, x.after) for x in found] == [("length_drift", x) for x in levels]


def test_low_kl_is_no_alert_before_a_quarter_of_the_run_nor_with_a_rising_reward() -> None:
    found = [t for t, x in run(CASES["kl_low"][0]) if x.detector == "kl_low"]
    assert found[0] >= ITERATIONS / 4 + 1
    short = Detectors(DoctorThresholds(), 8)
    early = [x for t in range(1, 9) for x in short.observe(t, {"kl_per_token": 0.01, "score": 0.0})]
    assert early == []  # nothing to compare the first iterations with
    rising = run(lambda t: {"kl_per_token": 0.01})
    assert not [x for _, x in rising if x.detector == "kl_low"]


def test_a_domain_that_recovers_is_the_one_that_is_acted_on_and_cleared() -> None:
    noise, detectors, fall = random.Random(0), Detectors(DoctorThresholds(), ITERATIONS), 0.0
    acted, cleared = [], []
    for t in range(1, ITERATIONS + 1):
        if t > 10:  # `talk` is forgotten until it has been acted on, and recovers at once
            fall = 0.0 if acted else min(fall + 0.25, 3.0)
        values = {
            f"domain_score/{n}": 1.2 + noise.gauss(0, 0.02) for n in ("facts", "sums", "talk")
        }
        values["domain_score/talk"] -= fall
        changes = detectors.observe(t, values | {"second_std": 1.3})
        cleared += [change.describe() for change in changes if change.after == HEALTHY]
        acted += [(t, detectors.subjects[name]) for name in detectors.beyond]
        if t == 30:
            state = json.loads(json.dumps(detectors.state_dict()))
            detectors.load_state_dict(state)
            assert detectors.state_dict() == state
    assert {subject for _, subject in acted} == {"talk"}
    assert len(cleared) == 1
    assert "(talk) [cleared]" in cleared[0]


def wavering(
    seed: int, falls: float, iterations: int = ITERATIONS, **limits: Any
) -> list[tuple[int, str]]:
    """Domains of eleven answers an iteration, of standard deviation 1.3; `talk` may fall."""
    wavers, detectors = random.Random(seed), Detectors(DoctorThresholds(**limits), iterations)
    names = [f"domain_score/{name}" for name in ("sums", "lists", "facts", "talk", "howto")]
    raised = []
    for t in range(1, iterations + 1):
        values = {name: 1.2 + 0.02 * t + wavers.gauss(0, 0.4) for name in names}
        values["domain_score/talk"] -= falls * after(t)
        found = detectors.observe(t, values | {"second_std": 1.3})
        raised += [(t, x.reading.subject) for x in found]
    return raised


@pytest.mark.thorough
def test_a_domain_of_few_answers_may_waver() -> None:
    # Noise alone raises an alert in at most one run of fifty, also of 200 iterations, in which the
    # best recent mean is one of many.
    false = [found[0][0] for seed in range(150) if (found := wavering(seed, 0.0, 200))]
    assert sum(iteration <= 40 for iteration in false) == 0
    assert len(false) <= 3
    assert wavering(0, 0.0, domain_warn=0.2, domain_sigmas=0.0)


@pytest.mark.parametrize("seed", range(5))
def test_a_domain_that_falls_further_than_it_wavers_is_found(seed: int) -> None:
    iteration, subject = wavering(seed, 1.2)[0]
    assert 12 <= iteration <= 25
    assert subject == "talk"


def refusing(seed: int, falls: float, iterations: int = ITERATIONS, **limits: Any) -> int | None:
    """Return when a run with eleven harmful prompts an iteration is first warned of."""
    wavers, detectors = random.Random(seed), Detectors(DoctorThresholds(**limits), iterations)
    for t in range(1, iterations + 1):
        rate = max(0.8 - falls * max(t - 5, 0), 0.0)
        refused = sum(wavers.random() < rate for _ in range(11)) / 11
        if detectors.observe(t, {"refusal_rate": refused, "harmful_prompts": 11.0}):
            return t
    return None


@pytest.mark.parametrize("seed", range(5))
def test_a_refusal_rate_that_falls_further_than_it_wavers_is_found(seed: int) -> None:
    found = refusing(seed, 0.1)
    assert found is not None
    assert 7 <= found <= 14


def test_a_value_that_is_missing_or_not_finite_changes_nothing() -> None:
    assert run(lambda t: {"kl_per_token": float("nan"), "second_score": float("inf")}) == []


def test_an_alert_is_cleared_when_its_cause_is_over() -> None:
    found = run(lambda t: {"kl_per_token": 1.5 if t < 20 else 0.2})
    assert [(t, x.after) for t, x in found] == [(12, WARN), (22, HEALTHY)]


def test_an_alarm_that_shrinks_is_a_warning_until_readings_in_a_row_are_healthy() -> None:
    h = Hysteresis(raise_after=2, clear_after=3)
    assert [h.update(r) for r in (2, 2, 1, 1, 0, 1, 0, 0, 0)] == [0, 2, 2, 2, 1, 1, 1, 1, 0]
    h = Hysteresis(raise_after=2, clear_after=3)
    assert [h.update(r) for r in (2, 2, 0, 0, 0)] == [0, 2, 2, 2, 0]


def test_what_an_iteration_did_not_measure_is_not_read_again() -> None:
    # A second scorer is asked every fifth iteration: one low window of four is one reading.
    def asked(until: int) -> list[tuple[int, Transition]]:
        detectors, raised = Detectors(DoctorThresholds(), ITERATIONS), []
        for t in range(1, until + 1):
            values = {"second_correlation": 0.1} if t % 5 == 0 else {"score": 1.0}
            raised += [(t, change) for change in detectors.observe(t, values)]
        return raised

    assert asked(24) == []
    assert [(t, change.detector) for t, change in asked(25)] == [(25, "scorer_disagreement")]


@pytest.mark.parametrize("name", ["kl_high", "reward_hacking", "forgotten_domain", "entropy"])
def test_detectors_restored_in_the_middle_go_on_as_if_nothing_had_been(name: str) -> None:
    change, noise = CASES[name][0], random.Random(3)
    whole, first = (Detectors(DoctorThresholds(), ITERATIONS) for _ in range(2))
    later: Detectors = first
    for t in range(1, ITERATIONS + 1):
        values = healthy(t, noise) | (change(t) if t > 10 else {})
        expected = whole.observe(t, values)
        assert later.observe(t, values) == expected
        if t in (3, 14, 16):
            state = json.loads(json.dumps(later.state_dict()))
            later = Detectors(DoctorThresholds(), ITERATIONS)
            later.load_state_dict(state)
