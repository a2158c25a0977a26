"""Which detectors had something to watch, and why the others had not.

A detector that could not have raised an alert has found nothing in another sense than one that
watched: a run says of each which it was.
"""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_lightning.doctor.catalog import DETECTORS
from rlhf_lightning.doctor.spec import DetectorSpec
from rlhf_lightning.doctor.thresholds import DoctorThresholds


def idle_detectors(
    thresholds: DoctorThresholds,
    num_iterations: int,
    iterations: int,
    measured: Mapping[str, int],
    read: Mapping[str, int],
) -> dict[str, str]:
    """Return why a detector could not have raised an alert so far, for each that could not.

    Args:
        thresholds: bounds and hysteresis.
        num_iterations: that the run is going to have.
        iterations: that were observed.
        measured: detector -> iterations that measured what it reads.
        read: detector -> iterations in which that gave a reading.
    """
    found = {}
    for name, spec in DETECTORS.items():
        needed, count = spec.first_alert(thresholds, num_iterations), measured.get(name, 0)
        if read.get(name, 0) >= spec.raise_after(thresholds):
            continue
        if iterations and not count:
            found[name] = _not_measured(spec, measured)
        elif count < needed:
            found[name] = f"not enough iterations: {count} of {needed}"
        else:
            found[name] = "the first iterations give nothing to compare with"
    return found


def _not_measured(spec: DetectorSpec, measured: Mapping[str, int]) -> str:
    source = spec.source
    if source.missing_with and not measured.get(source.missing_with):
        source = DETECTORS[source.missing_with].source
    return source.missing or f"{source.measure} was not measured"
