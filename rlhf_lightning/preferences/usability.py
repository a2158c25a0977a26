"""How many candidates can be compared, why the others cannot, and what to change."""

from __future__ import annotations

from collections.abc import Mapping

from rlhf_lightning.preferences.candidates import (
    DUPLICATE,
    EMPTY,
    OVER_LONG,
    UNFINISHED,
    Sampling,
)

# Reason -> the name of its metric.
METRICS = {
    UNFINISHED: "collect/dropped_cut_off",
    EMPTY: "collect/dropped_empty",
    DUPLICATE: "collect/dropped_said_before",
    OVER_LONG: "collect/dropped_prompt_over_long",
}


def describe_dropped(num_asked: int, dropped: Mapping[str, int]) -> str:
    """Return how many candidates can be compared, and how many cannot for which reason.

    Args:
        num_asked: candidates that prompts, policies and ways to decode ask for.
        dropped: by reason.
    """
    reasons = sorted(dropped.items(), key=lambda item: -item[1])
    why = ", ".join(f"{number} {reason}" for reason, number in reasons)
    left = num_asked - sum(dropped.values())
    return f"{left} of {num_asked} candidates can be compared" + (f" (dropped: {why})" * bool(why))


def what_to_change(dropped: Mapping[str, int], sampling: Sampling) -> str:
    """Return the settings that give more pairs: those of the reason that dropped most come first.

    Args:
        dropped: by reason.
        sampling: how candidates were made.
    """
    advice = {
        UNFINISHED: f"raise candidates.max_new_tokens={sampling.max_new_tokens}, so that answers "
        "end by themselves, or keep those that were cut off with lab.keep_unfinished=true",
        EMPTY: "look at the policy: its answers are empty",
        DUPLICATE: "raise candidates.decoding.temperature: its answers are alike",
        OVER_LONG: f"raise candidates.max_prompt_length={sampling.max_prompt_length}",
    }
    reasons = sorted(dropped, key=lambda reason: -dropped[reason])
    more = f"sample more (candidates.num_samples={sampling.num_samples}, or more prompts)"
    return "; ".join([*(advice[reason] for reason in reasons[:2]), more])
