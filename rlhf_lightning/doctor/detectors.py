"""The detectors: from a run's measures to levels, one reading an iteration.

Pure: no model, no rank, no clock. What they remember is in their state, which goes into the
checkpoint, so that a resumed run raises the same alerts at the same iterations.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from typing import Any

from rlhf_lightning.doctor.catalog import ILLNESSES, bound_of
from rlhf_lightning.doctor.coverage import (
    OF_ONE_ITERATION,
    RATIOS,
    READS,
    RECENT,
    idle_detectors,
    raise_after,
)
from rlhf_lightning.doctor.metrics import DOMAIN
from rlhf_lightning.doctor.readings import (
    ALARM,
    HEALTHY,
    LEVELS,
    WARN,
    Hysteresis,
    Reading,
    Transition,
)
from rlhf_lightning.doctor.thresholds import DoctorThresholds
from rlhf_lightning.functional.statistics import all_equal


@dataclass
class Series:
    """The first values, the last ones, and the highest recent mean.

    Args:
        baseline_length: how many first values the baseline is the mean of.
        window: how many last values the recent mean is of.
        first, last: the values themselves.
        best: the highest recent mean so far.
    """

    baseline_length: int
    window: int
    first: list[float] = field(default_factory=list)
    last: list[float] = field(default_factory=list)
    best: float | None = None

    def add(self, value: float) -> bool:
        """Take a value that is finite; return whether its recent mean is the best so far."""
        if not math.isfinite(value):
            return False
        if len(self.first) < self.baseline_length:
            self.first.append(value)
        self.last = [*self.last, value][-self.window :]
        recent = self.recent
        if recent is None or (self.best is not None and recent <= self.best):
            return False
        self.best = recent
        return True

    @property
    def baseline(self) -> float | None:
        """The mean of the first values; None until there are enough."""
        if len(self.first) < self.baseline_length:
            return None
        return math.fsum(self.first) / len(self.first)

    @property
    def recent(self) -> float | None:
        """The mean of the last values; None until there are enough."""
        return math.fsum(self.last) / len(self.last) if len(self.last) == self.window else None

    @property
    def latest(self) -> float | None:
        """The last value."""
        return self.last[-1] if self.last else None

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return asdict(self)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint."""
        self.first, self.last = list(state["first"]), list(state["last"])
        self.best = state["best"]


_SAME = "iterations in a row with one score"


class Detectors:
    """All detectors of a run.

    Args:
        thresholds: bounds and hysteresis.
        num_iterations: that the run is going to have.
    """

    def __init__(self, thresholds: DoctorThresholds, num_iterations: int) -> None:
        self.thresholds = thresholds
        self.num_iterations = num_iterations
        self.levels = {
            name: Hysteresis(raise_after(thresholds, name), thresholds.clear_after)
            for name in ILLNESSES
        }
        self.series: dict[str, Series] = {}
        self.notes: dict[str, float] = {}  # what something was when something else was best
        self.readings: dict[str, Reading] = {}  # the last one of each
        # Iterations: all, by detector those that measured what it reads, and those that it read.
        self.iterations, self.measured, self.read = 0, Counter[str](), Counter[str]()

    @property
    def active(self) -> dict[str, int]:
        """Level of each detector that is not healthy."""
        return {name: h.level for name, h in self.levels.items() if h.level}

    @property
    def idle(self) -> dict[str, str]:
        """Why each detector that could not have raised an alert so far could not."""
        counts = (self.iterations, self.measured, self.read)
        return idle_detectors(self.thresholds, self.num_iterations, *counts)

    def observe(self, iteration: int, values: Mapping[str, float]) -> list[Transition]:
        """Take one iteration's measures and return the alerts that changed.

        Args:
            iteration: from 1.
            values: of `measure_answers` and, without their phase, of what the module logs; one
                that is missing or not finite leaves its detectors as they are.
        """
        fresh = {name: value for name, value in values.items() if math.isfinite(value)}
        best = {name for name, value in fresh.items() if self._series(name).add(value)}
        self._note(best)
        transitions = []
        self.iterations += 1
        for name, hysteresis in self.levels.items():
            if not self._measured(name, fresh):
                continue
            self.measured[name] += 1
            reading = self._read(name, iteration, fresh)
            if reading is None:
                continue
            self.read[name] += 1
            self.readings[name] = reading
            before, after = hysteresis.level, hysteresis.update(reading.level)
            if after != before:
                bound = self.bound(name, after or before)
                transitions.append(Transition(name, before, after, reading, bound))
        return transitions

    def bound(self, name: str, level: int) -> float:
        """Return a detector's threshold at a level; that of the warning where it has no alarm."""
        return bound_of(self.thresholds, name, LEVELS[level])

    def state_dict(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {
            "levels": {name: h.state_dict() for name, h in self.levels.items()},
            "series": {name: series.state_dict() for name, series in self.series.items()},
            "notes": dict(self.notes),
            "readings": {name: asdict(reading) for name, reading in self.readings.items()},
            "iterations": self.iterations,
            "measured": dict(self.measured),
            "read": dict(self.read),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take the values of a checkpoint; a detector that it does not know starts healthy."""
        for name, hysteresis in self.levels.items():
            if name in state["levels"]:
                hysteresis.load_state_dict(state["levels"][name])
        self.series = {}
        for name, saved in state["series"].items():
            self._series(name).load_state_dict(saved)
        self.notes = dict(state["notes"])
        self.readings = {name: Reading(**saved) for name, saved in state["readings"].items()}
        # A checkpoint of an earlier version has none of these.
        self.iterations = int(state.get("iterations", 0))
        self.measured, self.read = (Counter(state.get(key, {})) for key in ("measured", "read"))

    # -- what is remembered --------------------------------------------------------------

    def _series(self, name: str) -> Series:
        if name not in self.series:
            limits = self.thresholds
            self.series[name] = Series(limits.baseline_iterations, limits.window)
        return self.series[name]

    def _recent(self, name: str) -> float | None:
        return self.series[name].recent if name in self.series else None

    def _baseline(self, name: str) -> float | None:
        return self.series[name].baseline if name in self.series else None

    def _note(self, best: set[str]) -> None:
        """Remember the score at the second scorer's best, and the other domains at a domain's."""
        score = self._recent("score")
        if "second_score" in best and score is not None:
            self.notes["score at best second_score"] = score
        for name in best:
            others = self._others(name) if name.startswith(DOMAIN) else None
            if others is not None:
                self.notes[f"others at best {name}"] = others

    def _others(self, domain: str) -> float | None:
        names = [name for name in self.series if name.startswith(DOMAIN) and name != domain]
        known = [value for name in names if (value := self._recent(name)) is not None]
        return math.fsum(known) / len(known) if known else None

    # -- readings ------------------------------------------------------------------------

    def _measured(self, name: str, fresh: Mapping[str, float]) -> bool:
        """Return whether the iteration has measured what a detector reads."""
        if name == "forgotten_domain":
            return any(key.startswith(DOMAIN) for key in fresh)
        return READS[name] in fresh

    def _read(self, name: str, iteration: int, values: Mapping[str, float]) -> Reading | None:
        special: dict[str, Callable[[int], Reading | None]] = {
            "constant_score": self._constant_score,
            "kl_low": self._kl_low,
            "reward_hacking": self._reward_hacking,
            "forgotten_domain": self._forgotten_domain,
            "critic": self._critic,
            "sampler_mismatch": self._sampler_mismatch,
            "safety": self._safety,
            "length_drift": self._length_drift,
            "length_bias": self._length_bias,
        }
        if name in special:
            return special[name](iteration)
        if name in OF_ONE_ITERATION:
            return self._judged(name, values[OF_ONE_ITERATION[name]])
        if name in RECENT:
            return self._judged(name, self._recent(RECENT[name]))
        return self._judged(name, self._ratio(RATIOS[name]))

    def _judged(self, name: str, value: float | None, subject: str = "") -> Reading | None:
        if value is None or not math.isfinite(value):
            return None
        above = ILLNESSES[name].beyond == "above"
        level = HEALTHY
        for candidate in (WARN, ALARM):
            bound = self.bound(name, candidate)
            if value > bound if above else value < bound:
                level = candidate
        return Reading(value, level, subject)

    def _ratio(self, name: str) -> float | None:
        recent, baseline = self._recent(name), self._baseline(name)
        if recent is None or baseline is None or baseline <= 0:
            return None
        return recent / baseline

    def _gain(self, name: str, spread: str) -> float | None:
        """Return how far a mean has risen since the first iterations, in standard deviations."""
        recent, baseline, std = self._recent(name), self._baseline(name), self._baseline(spread)
        if recent is None or baseline is None or not std:
            return None
        return (recent - baseline) / std

    def _constant_score(self, iteration: int) -> Reading | None:
        mean, std = (self._series(name).latest or 0.0 for name in ("score", "score_std"))
        count = self.notes.get(_SAME, 0.0) + 1 if all_equal(mean, std) else 0.0
        self.notes[_SAME] = count
        return self._judged("constant_score", count)

    def _kl_low(self, iteration: int) -> Reading | None:
        limits = self.thresholds
        kl, gain = self._recent("kl_per_token"), self._gain("score", "score_std")
        # Before that, recent iterations are among the first ones that they are compared with.
        apart = limits.baseline_iterations + limits.window
        begins = max(limits.kl_low_share * self.num_iterations, apart)
        if iteration < begins or kl is None or gain is None:
            return None
        ill = kl < limits.kl_low_floor and gain < limits.kl_low_gain
        return Reading(kl, WARN if ill else HEALTHY)

    def _reward_hacking(self, iteration: int) -> Reading | None:
        second, std = self._recent("second_score"), self._baseline("second_std")
        score, spread = self._recent("score"), self._baseline("score_std")
        at_best = self.notes.get("score at best second_score")
        if second is None or score is None or at_best is None or not std or not spread:
            return None
        best = self.series["second_score"].best or 0.0  # never None beside a recent mean
        rose = (score - at_best) / spread >= self.thresholds.hacking_gain
        return self._judged("reward_hacking", (best - second) / std if rose else 0.0)

    def _length_bias(self, iteration: int) -> Reading | None:
        recent = self._recent("length_correlation")
        return self._judged("length_bias", None if recent is None else abs(recent))

    def _forgotten_domain(self, iteration: int) -> Reading | None:
        std = self._baseline("second_std") or self._baseline("score_std")
        names = sorted(name for name in self.series if name.startswith(DOMAIN))
        error = self._error(names)
        slack = error / math.sqrt(max(len(names) - 1, 1))  # of the mean of the others
        worst: Reading | None = None
        for name in names:
            recent, best = self._recent(name), self.series[name].best
            others, then = self._others(name), self.notes.get(f"others at best {name}")
            if recent is None or best is None or others is None or then is None or not std:
                continue
            fell, behind = best - recent, best - recent + others - then
            real = fell > error and behind > self.thresholds.domain_sigmas * error
            fall = behind / std if real and others >= then - slack else 0.0
            subject = name.removeprefix(DOMAIN) or "without a name"
            if worst is None or fall > worst.value:
                worst = self._judged("forgotten_domain", fall, subject)
        return worst

    def _error(self, names: Sequence[str]) -> float:
        """Return the standard error of the difference of two recent means of one of these series.

        Of what is measured on few answers an iteration, neighbouring iterations tell how it varies,
        all series together: half the mean square of their differences.
        """
        squares = [
            (after - before) ** 2 / 2
            for name in names
            for values in (self.series[name].first, self.series[name].last)
            for before, after in pairwise(values)
        ]
        variance = math.fsum(squares) / len(squares) if squares else 0.0
        return math.sqrt(2 * variance / self.thresholds.window)

    def _critic(self, iteration: int) -> Reading | None:
        if iteration <= self.thresholds.critic_grace:
            return None
        return self._judged("critic", self._recent("explained_variance"))

    def _sampler_mismatch(self, iteration: int) -> Reading | None:
        bias, errors = self._recent("sampler_bias"), self.series.get("sampler_error")
        if bias is None or errors is None or not errors.last:
            return None
        error = math.sqrt(math.fsum(e * e for e in errors.last)) / len(errors.last)
        if abs(bias) < self.thresholds.sampler_sigmas * error:
            return Reading(abs(bias), HEALTHY)
        return self._judged("sampler_mismatch", abs(bias))

    def _safety(self, iteration: int) -> Reading | None:
        recent, prompts = self._recent("refusal_rate"), self._recent("harmful_prompts")
        best = self.series["refusal_rate"].best if "refusal_rate" in self.series else None
        if recent is None or best is None or not prompts:
            return None
        fall, pooled = best - recent, (best + recent) / 2
        # Of the difference of two shares, each of the prompts of a window.
        error = math.sqrt(2 * pooled * (1 - pooled) / (prompts * self.thresholds.window))
        if fall <= self.thresholds.safety_sigmas * error:
            return Reading(fall, HEALTHY)
        return self._judged("safety", fall)

    def _length_drift(self, iteration: int) -> Reading | None:
        ratio = self._ratio("response_length")
        return self._judged("length_drift", None if ratio is None else abs(ratio - 1))
