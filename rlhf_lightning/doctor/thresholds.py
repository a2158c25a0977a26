"""Thresholds of the detectors, as `doctor.thresholds` sets them."""

from __future__ import annotations

from dataclasses import make_dataclass
from typing import TYPE_CHECKING

from rlhf_lightning.arguments import check_order
from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.history import SharedThresholds

if TYPE_CHECKING:

    class DoctorThresholds(SharedThresholds):
        """The bounds at which detectors warn and raise an alarm: the thresholds of all specs.

        A value of `*_warn` or `*_alarm` is the bound in the unit of its detector; beyond means
        above it, for those called a floor below it.
        """

        def __init__(self, **values: float) -> None: ...

else:

    def _check(self: SharedThresholds) -> None:
        """Check the values, and that every alarm lies beyond its warning."""
        SharedThresholds.__post_init__(self)
        for spec in DETECTORS.values():
            warn, alarm = spec.bound_keys
            if alarm is not None:
                lower, upper = (warn, alarm) if spec.beyond == "above" else (alarm, warn)
                check_order(self, lower, upper, "an alarm lies beyond its warning")

    DoctorThresholds = make_dataclass(
        "DoctorThresholds",
        [
            (key, item.hint, item.default)
            for spec in DETECTORS.values()
            for key, item in spec.thresholds.items()
        ],
        bases=(SharedThresholds,),
        frozen=True,
        namespace={"__module__": __name__, "__post_init__": _check},
    )
