"""Frozen dataclasses whose types and ranges are checked when they are made.

A value that cannot work is an error that names the key, what it got and what it wants. A value
that can work but lies outside the usual range is a warning that names that range.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, fields
from typing import Any

from rlhf_lightning.arguments import annotations_of, fitting


class UnusualHparamWarning(UserWarning):
    """A hyper-parameter lies outside the range that published runs use."""


@dataclass(frozen=True)
class Usual:
    """Marks an annotation with the range of published runs; `Checked` warns outside of it."""

    low: float
    high: float


class Checked:
    """Mixin: hold every field against its annotation and its usual range."""

    def __post_init__(self) -> None:
        hints, names = annotations_of(type(self)), [one.name for one in fields(self)]  # type: ignore[arg-type]
        for name in names:
            object.__setattr__(self, name, fitting(name, getattr(self, name), hints[name]))
        for name in names:
            value, usual = getattr(self, name), self._usual(name, hints[name])
            if usual is None or isinstance(value, bool | str | None):
                continue
            if not usual.low <= value <= usual.high:
                warnings.warn(
                    f"{type(self).__name__}.{name}={value:g} is outside the usual range "
                    f"{usual.low:g} to {usual.high:g}",
                    UnusualHparamWarning,
                    stacklevel=3,
                )

    def _usual(self, name: str, hint: Any) -> Usual | None:
        """Return the usual range of a field; None: whatever is possible."""
        markers = getattr(hint, "__metadata__", ())
        return next((one for one in markers if isinstance(one, Usual)), None)


def check_order(settings: object, lower: str, upper: str, why: str) -> None:
    """Check that one field of some settings is not below another one.

    Raises:
        ValueError: naming both.
    """
    low, high = getattr(settings, lower), getattr(settings, upper)
    if high < low:
        raise ValueError(f"{lower}={low:g} is above {upper}={high:g}: {why}")
