"""The name of each metric in words, its unit, and its range in a healthy run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from rlhf_lightning.runs.reading import read_yaml
from rlhf_lightning.runs.summary import Metrics, figure


@dataclass(frozen=True)
class Quantity:
    """The name and the range of one metric.

    Args:
        label: the name in plain words, a few.
        unit: "" for a plain number; "share" is shown in percent, and a difference of two shares,
            "points", in percentage points with its sign; a "count" is a whole number.
        healthy: the usual range of a run that goes well; None where there is none.
    """

    label: str
    unit: str = ""
    healthy: Sequence[float] | None = None

    def show(self, value: float, *, like: float | None = None) -> str:
        """Return a value as text, without its unit unless that is percent; `like` as `number`."""
        if self.unit == "points":
            return f"{100 * value:+.1f}"
        if self.unit == "count":
            return f"{value:,.0f}"
        return percent(value) if self.unit == "share" else number(value, like=like)

    @property
    def usual(self) -> str:
        """The healthy range as text, e.g. `90 to 100 %`; "" where there is none."""
        if self.healthy is None:
            return ""
        times, unit = (100, " %") if self.unit == "share" else (1, "")
        low, high = (times * end for end in self.healthy)
        return f"{low:g}{f' to {high:g}' * (high > low)}{unit}"


_ROWS = read_yaml(Path(__file__).with_name("metrics.yaml"))
QUANTITIES = {name: Quantity(**row) for name, row in _ROWS.items()}
Part = Literal["domain", "subset", "task"]
PARTS = get_args(Part)
# Names that a run makes up: parts of a score, of gold. `*` stands for the rest of a name. The
# metric of a domain or a subset starts with the name of the whole; see `part_key`.
FAMILIES = (
    *("rollout/score/*", "val/num_pairs_*", "val/num_pair_prompts_*", "val/gold/*"),
    *("val/baseline_*", "val/*_win_rate_length_controlled", "val/*_tie_rate"),
    *("doctor/domain_score/*", "best_of/*", "benchmark/*"),
)
_BEST_OF = re.compile(r"best_of/(\d+)/(.+)")


def part_key(key: str, kind: Part, name: str) -> str:
    """Return the metric's name for one part, such as a domain, of what `key` is measured on.

    The part's name comes last, behind a slash that no key has, so it cannot collide with another
    metric.

    Args:
        key: `phase/quantity`, with `_low` or `_high` for a bound of an interval.
        kind: the kind of part.
        name: the part's name in the data.
    """
    return f"{key}/{kind}/{name}"


def whole_key(name: str) -> str:
    """Return the metric of the whole that `name` is a part of; `name` itself for others."""
    pieces = name.split("/", 3)
    return "/".join(pieces[:2]) if len(pieces) == 4 and pieces[2] in PARTS else name


def bound_keys(name: str) -> tuple[str, str]:
    """Return the names of the lower and the upper end of the interval of `name`."""
    whole = whole_key(name)
    low, high = (whole + end + name.removeprefix(whole) for end in ("_low", "_high"))
    return low, high


def best_of_counts(names: Iterable[str]) -> list[int]:
    """Return the n, by size, of which there are metrics `best_of/<n>/...`."""
    return sorted({int(match[1]) for name in names if (match := _BEST_OF.fullmatch(name))})


def quantity(name: str) -> Quantity:
    """Return how to show `name`; an unknown metric is called by the last part of its name.

    That of a domain or a subset is shown as that of the whole, with its name behind.
    """
    whole = whole_key(name)
    if whole != name:
        about = quantity(whole)
        return Quantity(f"{about.label}: {name.split('/', 3)[3]}", about.unit, about.healthy)
    if name.startswith("benchmark/"):
        plain = name.removeprefix("benchmark/")
        unit = "points" if plain.endswith("_change") else "share"
        unit = "count" if plain.startswith("num_") else unit
        return Quantity(plain.removeprefix("num_").replace("_", " "), unit)
    if (plain := name.replace("val/baseline_", "val/")) != name and plain in QUANTITIES:
        about = QUANTITIES[plain]
        return Quantity(f"{about.label}, baseline", about.unit)
    if best_of := _BEST_OF.fullmatch(name):
        n, what = best_of.groups()
        if what in ("pass_at_k", "maj_at_k"):
            return Quantity(what.replace("_at_k", f"@{n}"), "share")
        about = quantity(f"val/{what}")
        return Quantity(f"{about.label}, best of {n}", about.unit)
    known = QUANTITIES.get(name) or _OF_STEPS.get(step_quantity(name))
    return known or Quantity(name.rpartition("/")[2].replace("_", " "))


def step_quantity(name: str) -> str:
    """Return `clipfrac` of `ppo/clipfrac`, measured in optimizer steps; "" of other metrics."""
    phase, _, what = name.partition("/")
    return "" if phase in _OTHER_PHASES or "/" in what else what


_OTHER_PHASES = {"rollout", "val", "data", "doctor", "time", "throughput"}
_OTHER_PHASES |= {"benchmark", "best_of", "collect"}
# An objective of a user's measures under its own name what ours measure: it is shown alike.
_OF_STEPS = {step_quantity(name): about for name, about in reversed(QUANTITIES.items())}
_OF_STEPS.pop("", None)  # what is not measured in optimizer steps


def show(name: str, value: float, *, like: float | None = None) -> str:
    """Return the value as text with its unit, and as many digits as `like` would have."""
    about = quantity(name)
    unit = "" if about.unit in ("share", "count") else about.unit
    return f"{about.show(value, like=like)} {unit}".strip()


def number(value: float, *, like: float | None = None) -> str:
    """Return a number with about three digits that count, or as many as `like` would have."""
    size = abs(value if like is None else like)
    if value != value:
        return "not a number"
    if value == 0:
        return "0"
    if like is not None and size >= 100_000 > abs(value):
        return number(value)
    if size >= 100_000 or size < 0.001:
        return f"{value:.1e}".replace("e-0", "e-").replace("e+0", "e+")
    digits = 0 if size >= 100 else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:.{digits}f}"


def capitalized(label: str) -> str:
    """Return a label as the beginning of a sentence; the rest of it as it is."""
    return label[:1].upper() + label[1:]


def counted(count: float, noun: str) -> str:
    """Return a number of things, e.g. `1 pair` or `2,000 pairs`."""
    return f"{count:,.0f} {noun}{'s' * (count != 1)}"


def percent(value: float) -> str:
    """Return a share as percent, e.g. `82.4 %`."""
    return f"{100 * value:.1f} %"


def ends(metrics: Metrics, name: str) -> str:
    """Return the interval, e.g. `79.7 to 86.2 %` or `0.19 to 0.22`; "" where none was measured."""
    low, high = (figure(metrics, key) for key in bound_keys(name))
    if low is None or high is None:
        return ""
    unit = quantity(name).unit
    if unit == "points":
        return f"{100 * low:+.1f} to {100 * high:+.1f} points"
    if unit != "share" and "_win_rate" not in name:
        like = max(abs(low), abs(high))
        return f"{number(low, like=like)} to {number(high, like=like)}"
    return f"{100 * low:.1f} to {percent(high)}"


def duration(seconds: float) -> str:
    """Return a duration with its units, e.g. `0.4 s`, `42 s`, `6 min 43 s` or `1 h 2 min`."""
    if seconds < 9.95:
        return f"{max(seconds, 0.0):.1f} s"
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
