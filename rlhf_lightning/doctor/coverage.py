"""Which detectors had something to watch, and why the others had not.

A detector that could not have raised an alert has found nothing in another sense than one that
watched: a run says of each which it was.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from rlhf_lightning.doctor.catalog import ILLNESSES
from rlhf_lightning.doctor.thresholds import DoctorThresholds

# What each detector reads: a value of one iteration, a recent mean, or that against the first ones.
OF_ONE_ITERATION = {"kl_high": "kl_per_token", "update_size": "approx_kl"}
RECENT = {
    "scorer_disagreement": "second_correlation",
    "duplicates": "most_common",
    "clipped_scores": "clipped",
    "missing_eos": "eos_fraction",
}
RATIOS = {"diversity": "distinct_2", "entropy": "entropy", "saturation": "score_std"}
READS = {
    "constant_score": "score_std",
    "kl_low": "kl_per_token",
    "reward_hacking": "second_score",
    "length_bias": "length_correlation",
    "length_drift": "response_length",
    "critic": "explained_variance",
    "sampler_mismatch": "sampler_bias",
    "safety": "refusal_rate",
    **OF_ONE_ITERATION,
    **RECENT,
    **RATIOS,
}
# Those whose reading counts iterations itself: one is enough.
AT_ONCE = ("constant_score",)
_NOT_MEASURED = {
    "reward_hacking": "no second scorer",
    "scorer_disagreement": "one of the two scores does not vary",
    "length_bias": "within a domain, score or length does not vary",
    "forgotten_domain": "fewer than two domains",
    "critic": "all returns are equal",
    "clipped_scores": "no score_clip",
    "safety": "no prompt of doctor.harmful_domains",
    "update_size": "no update was made",
}
_NO_READING = "the first iterations give nothing to compare with"


def raise_after(thresholds: DoctorThresholds, name: str) -> int:
    """Return how many readings in a row raise an alert of a detector."""
    return 1 if name in AT_ONCE else thresholds.raise_after


def first_alert(thresholds: DoctorThresholds, name: str, num_iterations: int) -> int:
    """Return the iteration at which a detector can raise an alert at the earliest.

    Args:
        thresholds: bounds and hysteresis.
        name: of the detector.
        num_iterations: that the run is going to have.
    """
    limits, window = thresholds, thresholds.window
    if name in OF_ONE_ITERATION or name in AT_ONCE:
        begins = 1
    elif name == "kl_low":
        apart = limits.baseline_iterations + window
        begins = max(math.ceil(limits.kl_low_share * num_iterations), apart)
    elif name == "critic":
        begins = max(limits.critic_grace + 1, window)
    elif name in RATIOS or name in ("length_drift", "reward_hacking", "forgotten_domain"):
        begins = max(limits.baseline_iterations, window)
    else:
        begins = window
    return begins + raise_after(thresholds, name) - 1


def idle_detectors(
    thresholds: DoctorThresholds,
    num_iterations: int,
    iterations: int,
    measured: Mapping[str, int],
    read: Mapping[str, int],
    names: Collection[str] = tuple(ILLNESSES),
) -> dict[str, str]:
    """Return why a detector could not have raised an alert so far, for each that could not.

    Args:
        thresholds: bounds and hysteresis.
        num_iterations: that the run is going to have.
        iterations: that were observed.
        measured: detector -> iterations that measured what it reads.
        read: detector -> iterations in which that gave a reading.
        names: of the detectors.
    """
    found = {}
    for name in names:
        needed, count = first_alert(thresholds, name, num_iterations), measured.get(name, 0)
        if read.get(name, 0) >= raise_after(thresholds, name):
            continue
        if iterations and not count:
            alone = name == "scorer_disagreement" and not measured.get("reward_hacking")
            key = "reward_hacking" if alone else name  # both read the second scorer
            found[name] = _NOT_MEASURED.get(key, f"{READS.get(name)} was not measured")
        elif count < needed:
            found[name] = f"not enough iterations: {count} of {needed}"
        else:
            found[name] = _NO_READING
    return found
