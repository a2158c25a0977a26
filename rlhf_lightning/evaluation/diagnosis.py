"""Why a reward model is not accurate enough: noise in the labels, capacity, or overfitting."""

from __future__ import annotations

import math
from collections.abc import Mapping

GAP = 0.05  # training minus held-out accuracy from which a model has learnt its pairs by heart
NEAR = 0.03  # of the ceiling: nothing but the labels keeps it from being better
LOW = 0.88  # ceiling of labels that are themselves what keeps accuracy down
GAIN = 0.02  # what a larger model must add to show that size was missing


def explain_accuracy(metrics: Mapping[str, float]) -> str:
    """Return the likely cause of a low `val/accuracy`, with its evidence and what to try.

    The first that applies: overfitting, if accuracy on training pairs exceeds that on held-out
    ones by more than 0.05; noise, if the labels allow less than 0.88 and the interval of the
    held-out accuracy reaches what lies 0.03 below that; capacity, if a larger model is better by
    0.02; where it is not, too little training if the labels are known to allow more, and noise if
    that is not known; without a larger model, too little capacity or training if the labels are
    known to allow more; else what would tell.

    Args:
        metrics: `val/accuracy`; where measured `val/accuracy_high` (0.03 above it without),
            `val/train_accuracy`, `val/label_ceiling` and `val/larger_model_accuracy`.
    """
    accuracy = metrics["val/accuracy"]
    train = _get(metrics, "val/train_accuracy")
    ceiling = _get(metrics, "val/label_ceiling")
    larger = _get(metrics, "val/larger_model_accuracy")
    if train is not None and train - accuracy > GAP:
        return (
            f"Overfitting: {train:.3f} on training pairs, {train - accuracy:.3f} above held-out "
            "ones. Try fewer epochs, more pairs, label_smoothing or weight decay"
        )
    gap = "" if train is None else f", and training pairs do no better ({train:.3f})"
    high = _get(metrics, "val/accuracy_high")
    if ceiling is not None and ceiling < LOW:
        high = accuracy + NEAR if high is None else high
        if high >= ceiling - NEAR:
            return (
                f"Noise: the labels allow no more than {ceiling:.3f}, and up to {high:.3f} is not "
                f"ruled out{gap}. Try more raters a pair, or leave out pairs on which they disagree"
            )
    if larger is not None and larger - accuracy > GAIN:
        return (
            f"Capacity: a larger model reaches {larger:.3f} on the same pairs{gap}. Use it, or one "
            "of its size"
        )
    if larger is not None and ceiling is not None:
        return (
            f"Too little training: the labels allow {ceiling:.3f}, and a larger model reaches only "
            f"{larger:.3f} on the same pairs{gap}. Try more epochs or pairs, or another learning "
            "rate"
        )
    if larger is not None:
        return (
            f"Noise: a larger model reaches only {larger:.3f} on the same pairs{gap}. Try more "
            "raters a pair, and look at pairs that both models get wrong"
        )
    if ceiling is not None:
        return (
            f"Capacity or too little training: the labels allow {ceiling:.3f}{gap}. Try more "
            "epochs or pairs, another learning rate, then a larger model"
        )
    return (
        f"Noise or capacity{gap}: train a larger model on the same pairs and give its folder as "
        "evaluation.larger_reward_model, which tells them apart"
    )


def _get(metrics: Mapping[str, float], name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or math.isnan(value) else value
