"""What the doctor does about an alert: pure decisions from levels and controls.

Nothing is changed here; the callback makes the changes through `module.controls`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rlhf_lightning.doctor.readings import ALARM
from rlhf_lightning.doctor.thresholds import ActionSettings

# Alarms that end a fit if they stay; the others are told, and training goes on.
SERIOUS = (
    "kl_high",
    "reward_hacking",
    "diversity",
    "duplicates",
    "forgotten_domain",
    "safety",
    "sampler_mismatch",
    "update_size",
)
_COLLAPSE = ("diversity", "duplicates", "entropy")
_RAISES_KL_COEF = ("kl_high", "reward_hacking", "safety")


@dataclass(frozen=True)
class Knobs:
    """The controls as they stand; the words are those of `module.controls`.

    Args:
        adapts_kl_coef: a KL target steers kl_coef, which is then not the doctor's.
    """

    kl_coef: float
    temperature: float
    learning_rate_factor: float
    diversity_bonus: float
    domain_weights: Mapping[str, float]
    adapts_kl_coef: bool = False


@dataclass(frozen=True)
class Treatment:
    """One change.

    Args:
        detector: the alert that asks for it.
        control: a field of `Controls`; of domain weights `domain_weights.<domain>`.
        before, after: its values.
    """

    detector: str
    control: str
    before: float
    after: float


@dataclass
class Practice:
    """Which treatment is due, how long alarms have stayed, and how the fit is to end.

    Args:
        settings: rungs, steps, limits and patience.
        treated_at: iteration of each detector's last action.
        alarmed_since: iteration at which each serious alarm was raised.
        ill: iterations at which there was a serious alarm.
        rollbacks: made so far.
        held: what the last rollback set, by control.
    """

    settings: ActionSettings
    treated_at: dict[str, int] = field(default_factory=dict)
    alarmed_since: dict[str, int] = field(default_factory=dict)
    ill: list[int] = field(default_factory=list)
    rollbacks: int = 0
    held: dict[str, float] = field(default_factory=dict)

    def treat(
        self, iteration: int, active: Mapping[str, int], subjects: Mapping[str, str], knobs: Knobs
    ) -> list[Treatment]:
        """Return the changes that are due, at most one a control.

        Args:
            iteration: from 1.
            active: level of each detector that is not healthy.
            subjects: what an alert is about, such as a domain.
            knobs: the controls as they stand.
        """
        found: dict[str, Treatment] = {}
        for detector in active:
            last = self.treated_at.get(detector)
            if last is not None and iteration - last < self.settings.cooldown:
                continue
            treatment = self._treatment(detector, subjects.get(detector, ""), knobs)
            if treatment is None or treatment.control in found:
                continue
            found[treatment.control] = treatment
            self.treated_at[detector] = iteration
        return list(found.values())

    def verdict(
        self, iteration: int, active: Mapping[str, int]
    ) -> tuple[Literal["go on", "stop", "rollback"], str]:
        """Return how the fit goes on, and the alarm that decides it, "" for none."""
        alarms = serious_alarms(active)
        self.alarmed_since = {n: self.alarmed_since.get(n, iteration) for n in alarms}
        if alarms:
            self.ill.append(iteration)
        patience = self.settings.alarm_patience
        for name, since in self.alarmed_since.items():
            if self.settings.on_alarm != "none" and iteration - since >= patience:
                again = self.settings.on_alarm == "rollback"
                if again and self.rollbacks < self.settings.max_rollbacks:
                    return "rollback", name
                return "stop", name
        return "go on", ""

    def after_rollback(self, knobs: Knobs) -> list[Treatment]:
        """Return what a fit that starts again from an earlier checkpoint does otherwise.

        Each rollback goes one step beyond the one before. The controls of the checkpoint, which may
        be the same again, do not know of that one, and the same changes would be the same fit, bit
        for bit.

        Args:
            knobs: the controls of the checkpoint.
        """
        coef, factor = knobs.kl_coef, knobs.learning_rate_factor
        if not knobs.adapts_kl_coef:
            coef = max(coef, self.held.get("kl_coef", coef))
        last = replace(
            knobs,
            kl_coef=coef,
            learning_rate_factor=min(factor, self.held.get("learning_rate_factor", factor)),
        )
        self.held = {name: getattr(last, name) for name in ("kl_coef", "learning_rate_factor")}
        for step in (self._raise_kl_coef("rollback", last), self._slow_down("rollback", last)):
            if step is not None:
                self.held[step.control] = step.after
        changes = (
            _if_changed("rollback", name, getattr(knobs, name), value)
            for name, value in self.held.items()
        )
        return [change for change in changes if change is not None]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        state = asdict(self)
        del state["settings"]
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint."""
        self.treated_at = dict(state["treated_at"])
        self.alarmed_since = dict(state["alarmed_since"])
        self.rollbacks = int(state["rollbacks"])
        # A checkpoint of an earlier version has none of these.
        self.ill = list(state.get("ill", ()))
        self.held = dict(state.get("held", {}))

    def _treatment(self, detector: str, subject: str, knobs: Knobs) -> Treatment | None:
        if detector in _RAISES_KL_COEF:
            return self._raise_kl_coef(detector, knobs)
        if detector == "kl_low":
            low = self.settings.kl_coef_low
            lowers = low < knobs.kl_coef and not knobs.adapts_kl_coef
            return Treatment(detector, "kl_coef", knobs.kl_coef, low) if lowers else None
        if detector in _COLLAPSE:
            return self._diversify(detector, knobs)
        if detector == "forgotten_domain" and subject:
            weight = knobs.domain_weights.get(subject, 1.0)
            heavier = min(weight * self.settings.domain_factor, self.settings.max_domain_weight)
            return _if_changed(detector, f"domain_weights.{subject}", weight, heavier)
        return self._slow_down(detector, knobs) if detector == "update_size" else None

    def _raise_kl_coef(self, detector: str, knobs: Knobs) -> Treatment | None:
        limits = self.settings
        rungs = (limits.kl_coef_first, limits.kl_coef_second, limits.kl_coef_third)
        higher = [rung for rung in rungs if rung > knobs.kl_coef]
        if not higher or knobs.adapts_kl_coef:
            return None
        return Treatment(detector, "kl_coef", knobs.kl_coef, higher[0])

    def _diversify(self, detector: str, knobs: Knobs) -> Treatment | None:
        limits, bonus = self.settings, knobs.diversity_bonus
        if bonus < limits.max_diversity and limits.diversity_step:
            more = min(round(bonus + limits.diversity_step, 6), limits.max_diversity)
            return Treatment(detector, "diversity_bonus", bonus, more)
        warmer = round(knobs.temperature + limits.temperature_step, 6)
        warmer = max(knobs.temperature, min(warmer, limits.max_temperature))
        return _if_changed(detector, "temperature", knobs.temperature, warmer)

    def _slow_down(self, detector: str, knobs: Knobs) -> Treatment | None:
        factor, limits = knobs.learning_rate_factor, self.settings
        slower = max(factor * limits.learning_rate_factor, limits.min_learning_rate_factor)
        return _if_changed(detector, "learning_rate_factor", factor, min(slower, factor))


def serious_alarms(active: Mapping[str, int]) -> list[str]:
    """Return the alarms that end a fit if they stay, of the levels of what is not healthy."""
    return [name for name in SERIOUS if active.get(name) == ALARM]


def _if_changed(detector: str, control: str, before: float, after: float) -> Treatment | None:
    return None if after == before else Treatment(detector, control, before, after)
