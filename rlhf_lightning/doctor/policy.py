"""The intervention policy: from levels and controls to actions and to the end of the fit."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.interventions import (
    ActionSettings,
    Intervention,
    Knobs,
    raise_kl_coef,
    slow_down,
)
from rlhf_lightning.doctor.spec import ALARM


@dataclass
class InterventionPolicy:
    """Decides which intervention is due and, by how long alarms last, whether the fit ends.

    Args:
        settings: rungs, steps, limits and patience.
        acted_at: each detector's reading of its last action, counted from 1.
        alarmed_since: each serious alarm's reading at which it was raised.
        alarmed_iterations: iterations with a serious alarm.
        rollbacks: number of rollbacks so far.
        held: values that the last rollback set, by control.
    """

    settings: ActionSettings
    acted_at: dict[str, int] = field(default_factory=dict)
    alarmed_since: dict[str, int] = field(default_factory=dict)
    alarmed_iterations: list[int] = field(default_factory=list)
    rollbacks: int = 0
    held: dict[str, float] = field(default_factory=dict)

    def due(
        self,
        beyond: Iterable[str],
        subjects: Mapping[str, str],
        knobs: Knobs,
        readings: Mapping[str, int],
    ) -> list[Intervention]:
        """Return the changes that are due, at most one a control.

        Args:
            beyond: detectors with an alert that this iteration read beyond its warning.
            subjects: what an alert is about, such as a domain.
            knobs: the controls as they stand.
            readings: how many readings each detector has had. Time is counted in them: one that
                reads every fifth iteration sees what a change did at its next reading.
        """
        found: dict[str, Intervention] = {}
        for detector in beyond:
            last = self.acted_at.get(detector)
            if last is not None and readings[detector] - last < self.settings.cooldown:
                continue
            action = DETECTORS[detector].action
            if action is None:
                continue
            asked = action.change(knobs, self.settings, subjects.get(detector, ""))
            step = Intervention(detector, *asked)
            if step.after == step.before or step.control in found:
                continue
            found[step.control] = step
            self.acted_at[detector] = readings[detector]
        return list(found.values())

    def verdict(
        self, iteration: int, active: Mapping[str, int], readings: Mapping[str, int]
    ) -> tuple[Literal["continue", "stop", "rollback"], str]:
        """Return whether the fit continues, and the alarm that decides it, "" for none.

        Args:
            iteration: number of the iteration, from 1.
            active: level of each detector that is not healthy.
            readings: how many readings each detector has had.
        """
        alarms = serious_alarms(active)
        self.alarmed_since = {n: self.alarmed_since.get(n, readings[n]) for n in alarms}
        if alarms:
            self.alarmed_iterations.append(iteration)
        patience = self.settings.alarm_patience
        for name, since in self.alarmed_since.items():
            if self.settings.on_alarm != "none" and readings[name] - since >= patience:
                again = self.settings.on_alarm == "rollback"
                if again and self.rollbacks < self.settings.max_rollbacks:
                    return "rollback", name
                return "stop", name
        return "continue", ""

    def after_rollback(self, knobs: Knobs) -> list[Intervention]:
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
        for act in (raise_kl_coef, slow_down):
            control, _, self.held[control] = act(last, self.settings, "")
        return [
            Intervention("rollback", name, before, after)
            for name, after in self.held.items()
            if (before := getattr(knobs, name)) != after
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "settings"}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint."""
        for name, value in copy.deepcopy(dict(state)).items():
            setattr(self, name, value)


def serious_alarms(active: Mapping[str, int]) -> list[str]:
    """Return the alarms that end a fit if they stay, of the levels of what is not healthy."""
    return [name for name, spec in DETECTORS.items() if spec.serious and active.get(name) == ALARM]
