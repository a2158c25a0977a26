"""The interventions on an alert: pure decisions from the controls as they stand.

Nothing is changed here; the callback makes the changes through `module.controls`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal, NamedTuple

from rlhf_lightning.arguments import (
    Above0,
    AtLeast0,
    AtLeast1,
    Checked,
    Count,
    CountOrZero,
    ShareAbove0,
    check_order,
)

UNNAMED = "without a name"  # the subject where rows have no domain


@dataclass(frozen=True)
class ActionSettings(Checked):
    """Settings of the interventions, all through `module.controls`, effective at the next rollout.

    Args:
        cooldown: readings of a detector between two of its actions.
        kl_coef_low: set when KL is low and the reward flat.
        kl_coef_first, kl_coef_second, kl_coef_third: rungs taken one by one while KL is high.
        temperature_step, max_temperature: added while the responses have collapsed, up to this.
        diversity_step, max_diversity: added to the bonus for novel bigrams, up to this; reward
            units.
        domain_factor, max_domain_weight: multiplies the weight of a forgotten domain, up to this.
        learning_rate_factor, min_learning_rate_factor: multiplies the learning rates while
            updates are too large, down to this.
        on_alarm: how the fit ends if an alarm stays: none, stop, or rollback, which continues from
            the best checkpoint with the next larger kl_coef and smaller learning rates.
        alarm_patience: readings of its detector for which it may stay.
        max_rollbacks: after so many rollbacks the fit stops.
    """

    cooldown: Count = 4
    kl_coef_low: AtLeast0 = 0.01
    kl_coef_first: Above0 = 0.05
    kl_coef_second: Above0 = 0.1
    kl_coef_third: Above0 = 0.2
    temperature_step: AtLeast0 = 0.1
    max_temperature: Above0 = 1.3
    diversity_step: AtLeast0 = 0.1
    max_diversity: AtLeast0 = 0.3
    domain_factor: AtLeast1 = 1.5
    max_domain_weight: AtLeast1 = 3.0
    learning_rate_factor: ShareAbove0 = 0.5
    min_learning_rate_factor: ShareAbove0 = 0.125
    on_alarm: Literal["none", "stop", "rollback"] = "none"
    alarm_patience: Count = 6
    max_rollbacks: CountOrZero = 2

    def __post_init__(self) -> None:
        """Check the values, and that each rung is as high as the one before."""
        super().__post_init__()
        for lower, upper in pairwise(("kl_coef_first", "kl_coef_second", "kl_coef_third")):
            check_order(self, lower, upper, "a later rung holds the policy at least as much")


@dataclass(frozen=True)
class Knobs:
    """The controls as they stand; the words are those of `module.controls`.

    Args:
        adapts_kl_coef: a KL target steers kl_coef, which is then not the doctor's.
        keeps_temperature: a teacher knows no other temperature.
    """

    kl_coef: float
    temperature: float
    learning_rate_factor: float
    diversity_bonus: float
    domain_weights: Mapping[str, float]
    adapts_kl_coef: bool = False
    keeps_temperature: bool = False


@dataclass(frozen=True)
class Intervention:
    """One change of a control.

    Args:
        detector: the alert that calls for it.
        control: a field of `Controls`; of domain weights `domain_weights.<domain>`.
        before, after: values of the control.
    """

    detector: str
    control: str
    before: float
    after: float


class Action(NamedTuple):
    """The intervention that a detector calls for.

    Args:
        words: predicate of the sentence "the doctor ...".
        change: takes the controls, the settings and the subject of the alert, such as a domain, and
            returns a control with its value before and after, which may be the same.
    """

    words: str
    change: Callable[[Knobs, ActionSettings, str], tuple[str, float, float]]


def raise_kl_coef(knobs: Knobs, limits: ActionSettings, subject: str) -> tuple[str, float, float]:
    """Take the next rung of kl_coef."""
    coef = knobs.kl_coef
    rungs = (limits.kl_coef_first, limits.kl_coef_second, limits.kl_coef_third)
    higher = [rung for rung in rungs if rung > coef and not knobs.adapts_kl_coef]
    return "kl_coef", coef, higher[0] if higher else coef


def lower_kl_coef(knobs: Knobs, limits: ActionSettings, subject: str) -> tuple[str, float, float]:
    """Set kl_coef to the low value."""
    coef = knobs.kl_coef
    return "kl_coef", coef, coef if knobs.adapts_kl_coef else min(limits.kl_coef_low, coef)


def diversify(knobs: Knobs, limits: ActionSettings, subject: str) -> tuple[str, float, float]:
    """Raise the bonus for novel bigrams, and when that is at its limit the temperature."""
    bonus = knobs.diversity_bonus
    if bonus < limits.max_diversity and limits.diversity_step:
        more = min(round(bonus + limits.diversity_step, 6), limits.max_diversity)
        return "diversity_bonus", bonus, more
    step = 0.0 if knobs.keeps_temperature else limits.temperature_step
    warmer = round(knobs.temperature + step, 6)
    warmer = max(knobs.temperature, min(warmer, limits.max_temperature))
    return "temperature", knobs.temperature, warmer


def weigh_domain(knobs: Knobs, limits: ActionSettings, subject: str) -> tuple[str, float, float]:
    """Raise the weight of the domain's scores; there is none without a name."""
    weight = knobs.domain_weights.get(subject, 1.0)
    named = subject not in ("", UNNAMED)
    heavier = min(weight * limits.domain_factor, limits.max_domain_weight) if named else weight
    return f"domain_weights.{subject}", weight, heavier


def slow_down(knobs: Knobs, limits: ActionSettings, subject: str) -> tuple[str, float, float]:
    """Lower the learning rates."""
    factor = knobs.learning_rate_factor
    slower = max(factor * limits.learning_rate_factor, limits.min_learning_rate_factor)
    return "learning_rate_factor", factor, min(slower, factor)


RAISE_KL_COEF = Action("raises kl_coef to the next of 0.05, 0.1, 0.2", raise_kl_coef)
LOWER_KL_COEF = Action("lowers kl_coef to 0.01", lower_kl_coef)
DIVERSIFY = Action("adds a bonus for novel bigrams, then raises the temperature", diversify)
WEIGH_DOMAIN = Action("multiplies the weight of the domain's scores by 1.5", weigh_domain)
SLOW_DOWN = Action("halves the learning rates", slow_down)
