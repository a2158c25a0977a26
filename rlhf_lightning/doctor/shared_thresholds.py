"""Thresholds that all detectors share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from rlhf_lightning.arguments import Count
from rlhf_lightning.hparams import Checked


@dataclass(frozen=True)
class SharedThresholds(Checked):
    """Settings that all detectors share; `DoctorThresholds` adds the fields of each.

    "Baseline" is the mean over the first iterations, "recent" the mean over the last ones,
    "standard deviation" that of the scores in the first iterations.

    Args:
        raise_after: iterations in a row beyond a bound before an alert is raised; where a detector
            counts iterations itself, one is enough.
        clear_after: iterations in a row within it before it is cleared.
        baseline_iterations: number of first iterations, which others are compared with.
        window: iterations of a recent mean.
    """

    raise_after: Count = 2
    clear_after: Count = 3
    baseline_iterations: Count = 4
    window: Count = 4

    if TYPE_CHECKING:  # the fields that a detector adds

        def __getattr__(self, name: str) -> float: ...
