"""Readings of a history for detectors, and the iterations that each takes."""

from __future__ import annotations

import math

from rlhf_lightning.doctor.history import History, SharedThresholds
from rlhf_lightning.doctor.interventions import UNNAMED
from rlhf_lightning.doctor.spec import Measured

MAX_GAP = 20.0  # nats a token, as gaps are clamped
ROUNDING = 1e-3  # nats a token: more than a GPU makes of a KL of 0


def latest(history: History, name: str) -> float | None:
    """Read the value of the last iteration."""
    return history.of(name).latest


def gap_of_engine(history: History, name: str) -> float | None:
    """Read the last gap; the largest where a log-probability of the engine was not finite."""
    return MAX_GAP if history.of("sampler_non_finite").latest else history.of(name).latest


def kl_of_updates(history: History, name: str) -> float | None:
    """Read the value of the last iteration; nothing of a first minibatch alone, where it is 0."""
    found, updates = history.of(name).latest, history.of("num_updates").latest
    alone = updates == 1 and found is not None and abs(found) < ROUNDING
    return None if alone else found


def recent(history: History, name: str) -> float | None:
    """Read the recent mean."""
    return history.of(name).recent


def recent_size(history: History, name: str) -> float | None:
    """Read the size of the recent mean, whatever its sign."""
    found = history.of(name).recent
    return None if found is None else abs(found)


def ratio(history: History, name: str) -> float | None:
    """Read the recent mean as a share of the baseline."""
    return history.of(name).ratio


def relative_change(history: History, name: str) -> float | None:
    """Read the excess of the larger over the smaller of recent mean and baseline, as a share.

    Half is then as far as double; the share that is lost never passes 1.
    """
    found = history.of(name).ratio
    return max(found, 1 / found) - 1 if found else None


def iterations_with_equal_scores(history: History, name: str) -> float:
    """Read how many iterations in a row have had equal scores."""
    from rlhf_lightning.functional.statistics import all_equal

    note = "iterations in a row with one score"
    mean, std = history.of("score").latest or 0.0, history.of(name).latest or 0.0
    count = history.notes.get(note, 0.0) + 1 if all_equal(mean, std) else 0.0
    history.notes[note] = count
    return count


def kl_where_score_is_flat(history: History, name: str) -> Measured | None:
    """Read the recent KL; it counts where the score has gained less than `kl_low_gain`."""
    limits, kl = history.thresholds, history.of(name).recent
    score, baseline = history.of("score").recent, history.of("score").baseline
    std = history.of("score_std").baseline
    begins = from_share_of_run(limits, history.num_iterations)
    if history.iteration < begins or kl is None or score is None or baseline is None or not std:
        return None
    return Measured(kl, (score - baseline) / std < limits.kl_low_gain)


def fall_while_score_rose(history: History, name: str) -> float | None:
    """Read the fall from the best in standard deviations; 0 where the score did not rise since."""
    note, score = f"score at best {name}", history.of("score").recent
    if name in history.improved and score is not None:
        history.notes[note] = score
    second, best, at_best = history.of(name).recent, history.of(name).best, history.notes.get(note)
    std, spread = history.of("second_std").baseline, history.of("score_std").baseline
    if second is None or best is None or score is None or at_best is None or not std or not spread:
        return None
    rose = (score - at_best) / spread >= history.thresholds.hacking_gain
    return (best - second) / std if rose else 0.0


def fall_behind_others(history: History, prefix: str) -> Measured | None:
    """Read how far the domain that fell most has fallen behind the others, standard deviations."""
    std = history.of("second_std").baseline or history.of("score_std").baseline
    names = sorted(name for name in history.series if name.startswith(prefix))
    error = history.error(names)
    slack = error / math.sqrt(max(len(names) - 1, 1))  # of the mean of the others
    sigmas = history.thresholds.domain_sigmas + history.selection
    worst: Measured | None = None
    for name in names:
        others = history.mean_recent([other for other in names if other != name])
        note = f"others at best {name}"
        if name in history.improved and others is not None:
            history.notes[note] = others
        now, best, then = history.of(name).recent, history.of(name).best, history.notes.get(note)
        if now is None or best is None or others is None or then is None or not std:
            continue
        fell, behind = best - now, best - now + others - then
        real = fell > error and behind > sigmas * error
        fall = behind / std if real and others >= then - slack else 0.0
        if worst is None or fall > worst.value:
            worst = Measured(fall, subject=name.removeprefix(prefix) or UNNAMED)
    return worst


def recent_after_grace(history: History, name: str) -> float | None:
    """Read the recent mean, after the iterations in which the value model may still learn."""
    return history.of(name).recent if history.iteration > history.thresholds.critic_grace else None


def bias_of_sampler(history: History, name: str) -> Measured | None:
    """Read the size of the bias; it counts beyond so many of its standard errors."""
    bias, errors = history.of(name).recent, history.of("sampler_error").last
    if bias is None or not errors:
        return None
    error = math.sqrt(math.fsum(e * e for e in errors)) / len(errors)
    return Measured(abs(bias), abs(bias) >= history.thresholds.sampler_sigmas * error)


def fall_of_refusals(history: History, name: str) -> Measured | None:
    """Read the fall from the best; it counts beyond so many standard errors of two shares.

    A prompt counts once, however many responses it has: they resemble each other, and the mean of
    such a group varies at most as one response does.
    """
    now, best, prompts = (
        history.of(name).recent,
        history.of(name).best,
        history.of("harmful_prompts").recent,
    )
    if now is None or best is None or not prompts:
        return None
    fall, pooled = best - now, (best + now) / 2
    sigmas = history.thresholds.safety_sigmas + history.selection
    # Of the difference of two shares, each of the prompts of a window.
    error = math.sqrt(2 * pooled * (1 - pooled) / (prompts * history.thresholds.window))
    return Measured(fall, fall > sigmas * error)


def from_first(limits: SharedThresholds, num_iterations: int) -> int:
    """Return the first iteration."""
    return 1


def from_baseline(limits: SharedThresholds, num_iterations: int) -> int:
    """Return the first iteration with a baseline and a recent mean."""
    return max(limits.baseline_iterations, limits.window)


def from_share_of_run(limits: SharedThresholds, num_iterations: int) -> int:
    """Return the first iteration after a share of the run whose window holds none of the first."""
    apart = limits.baseline_iterations + limits.window
    return max(math.ceil(limits.kl_low_share * num_iterations), apart)


def from_grace(limits: SharedThresholds, num_iterations: int) -> int:
    """Return the first iteration with a recent mean after the grace of the value model."""
    return max(int(limits.critic_grace) + 1, limits.window)
