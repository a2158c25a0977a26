"""How a reward model stands up to choices that it was not trained on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rlhf_lightning.evaluation.policy import CONFIDENCE
from rlhf_lightning.functional.statistics import wilson_interval

BINS = 10


def reward_check(
    gaps: Sequence[float], lengths: Sequence[int], prefix: str, *, log_odds: bool = True
) -> dict[str, float]:
    """Return how a reward model ranks pairs whose better answer is known.

    Args:
        gaps: score of the better answer minus that of the other.
        lengths: tokens of the better answer minus those of the other.
        prefix: of the names.
        log_odds: whether `gaps` are log-odds; without, nothing is said of calibration.

    Returns:
        `<prefix>_accuracy` with `_low` and `_high` (Wilson 95 %; equal scores are wrong),
        `_calibration_error` (mean gap of stated and observed preference over 10 bins, both orders
        of a pair), and where lengths differ `_longer_wins_accuracy` (how often the better answer is
        the longer one), `_prefers_longer` (how often the model scores the longer one higher) and
        `_length_bias`, the second minus the first.
    """
    gap, longer = np.asarray(gaps, float), np.asarray(lengths, float)
    right = int((gap > 0).sum())
    low, high = wilson_interval(right, len(gap), confidence=CONFIDENCE)
    found = {
        f"{prefix}_accuracy": right / len(gap),
        f"{prefix}_accuracy_low": low,
        f"{prefix}_accuracy_high": high,
        f"{prefix}_num_pairs": float(len(gap)),
    }
    if log_odds:
        found[f"{prefix}_calibration_error"] = _calibration_error(gap)
    unequal = longer != 0
    if unequal.any():
        wins = float((longer[unequal] > 0).mean())
        same = np.sign(gap[unequal]) == np.sign(longer[unequal])
        found[f"{prefix}_longer_wins_accuracy"] = wins
        found[f"{prefix}_prefers_longer"] = float(same.mean())
        found[f"{prefix}_length_bias"] = float(same.mean()) - wins
    return found


def _calibration_error(gap: np.ndarray) -> float:
    both = np.concatenate([gap, -gap])
    stated = 1 / (1 + np.exp(-np.clip(both, -700, 700)))
    observed = np.concatenate([np.ones_like(gap), np.zeros_like(gap)])
    bins = np.minimum((stated * BINS).astype(int), BINS - 1)
    total = 0.0
    for number in range(BINS):
        inside = bins == number
        if inside.any():
            total += inside.mean() * abs(stated[inside].mean() - observed[inside].mean())
    return float(total)
