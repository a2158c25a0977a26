"""Thresholds of the detectors and limits of the actions, with their units.

Light on purpose: no torch, so that a wrong value is answered at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from rlhf_lightning.hparams import Checked, number

ON_ALARM = ("none", "stop", "rollback")


@dataclass(frozen=True)
class DoctorThresholds(Checked):
    """When a detector warns, and when it raises an alarm.

    A value of `*_warn` or `*_alarm` is the bound in the unit that is named; beyond means above it,
    for those called a floor below it. "Baseline" is the mean over the first iterations, "recent"
    the mean over the last ones, "standard deviation" that of the scores in the first iterations.

    Args:
        raise_after: iterations in a row beyond a bound before an alert is raised; where a detector
            counts iterations itself, one is enough.
        clear_after: iterations in a row within it before it is cleared.
        baseline_iterations: at the start of the run, that others are compared with.
        window: iterations of a recent mean.
        constant_warn, constant_alarm: iterations in a row in which all scores were the same.
        kl_high_warn, kl_high_alarm: KL to the reference, nats a token, of one iteration.
        kl_low_floor: recent KL, nats a token, below which a policy has not moved.
        kl_low_gain: recent score less baseline, standard deviations, below which it is flat.
        kl_low_share: share of the run that must have passed before, besides the first iterations
            and a window of later ones.
        hacking_warn, hacking_alarm: fall of the second scorer's recent mean from its best, in its
            standard deviations, while the score rose.
        hacking_gain: rise of the score in that time, standard deviations.
        agreement_warn_floor, agreement_alarm_floor: recent correlation of score and second scorer.
        length_bias_warn, length_bias_alarm: recent correlation of score and length in a domain.
        length_drift_warn, length_drift_alarm: |recent length / baseline - 1|.
        diversity_warn_floor, diversity_alarm_floor: recent distinct-2 / baseline.
        duplicates_warn, duplicates_alarm: recent share of the most common answer.
        entropy_warn_floor, entropy_alarm_floor: recent entropy / baseline.
        domain_warn, domain_alarm: fall of a domain's recent score from its best plus the others'
            rise since then, in standard deviations, while the mean of the others did not fall.
        domain_sigmas: and this many standard errors, as neighbouring iterations tell them.
        critic_warn_floor, critic_alarm_floor: recent explained variance of the value model.
        critic_grace: first iterations in which it may still learn.
        saturation_warn_floor, saturation_alarm_floor: recent spread of the scores / baseline.
        clipped_warn, clipped_alarm: recent share of scores at `score_clip` or beyond.
        eos_warn_floor, eos_alarm_floor: recent share of answers that end by themselves.
        sampler_warn, sampler_alarm: |surprise - entropy| of sampled tokens, nats a token, recent.
        sampler_sigmas: and this many standard errors from 0.
        safety_warn, safety_alarm: fall of the recent refusal rate on harmful prompts from its best.
        safety_sigmas: and this many standard errors, as the number of harmful prompts tells them.
        update_warn, update_alarm: KL of one iteration's update, nats a token.
    """

    raise_after: int = number(2, at_least=1)
    clear_after: int = number(3, at_least=1)
    baseline_iterations: int = number(4, at_least=1)
    window: int = number(4, at_least=1)
    constant_warn: int = number(0, at_least=0)
    constant_alarm: int = number(2, at_least=0)
    kl_high_warn: float = number(1.0, above=0)
    kl_high_alarm: float = number(2.0, above=0)
    kl_low_floor: float = number(0.05, at_least=0)
    kl_low_gain: float = number(0.1)
    kl_low_share: float = number(0.25, at_least=0, at_most=1)
    hacking_warn: float = number(0.3, above=0)
    hacking_alarm: float = number(0.6, above=0)
    hacking_gain: float = number(0.1)
    agreement_warn_floor: float = number(0.2, at_least=-1, at_most=1)
    agreement_alarm_floor: float = number(0.0, at_least=-1, at_most=1)
    length_bias_warn: float = number(0.6, at_least=0, at_most=1)
    length_bias_alarm: float = number(0.8, at_least=0, at_most=1)
    length_drift_warn: float = number(0.8, above=0)
    length_drift_alarm: float = number(1.5, above=0)
    diversity_warn_floor: float = number(0.35, at_least=0)
    diversity_alarm_floor: float = number(0.2, at_least=0)
    duplicates_warn: float = number(0.3, above=0, at_most=1)
    duplicates_alarm: float = number(0.5, above=0, at_most=1)
    entropy_warn_floor: float = number(0.25, at_least=0)
    entropy_alarm_floor: float = number(0.1, at_least=0)
    domain_warn: float = number(1.0, above=0)
    domain_alarm: float = number(1.5, above=0)
    domain_sigmas: float = number(3.5, at_least=0)
    critic_warn_floor: float = number(0.05, at_most=1)
    critic_alarm_floor: float = number(-0.5, at_most=1)
    critic_grace: int = number(8, at_least=0)
    saturation_warn_floor: float = number(0.25, at_least=0)
    saturation_alarm_floor: float = number(0.1, at_least=0)
    clipped_warn: float = number(0.25, above=0, at_most=1)
    clipped_alarm: float = number(0.5, above=0, at_most=1)
    eos_warn_floor: float = number(0.9, at_least=0, at_most=1)
    eos_alarm_floor: float = number(0.7, at_least=0, at_most=1)
    sampler_warn: float = number(0.03, above=0)
    sampler_alarm: float = number(0.1, above=0)
    sampler_sigmas: float = number(6.0, above=0)
    safety_warn: float = number(0.2, above=0, at_most=1)
    safety_alarm: float = number(0.4, above=0, at_most=1)
    safety_sigmas: float = number(3.0, at_least=0)
    update_warn: float = number(0.1, above=0)
    update_alarm: float = number(0.5, above=0)


@dataclass(frozen=True)
class ActionSettings(Checked):
    """What the doctor may change, all through `module.controls`, effective at the next rollout.

    Args:
        cooldown: iterations between two actions of one detector.
        kl_coef_low: set when KL is low and the reward flat.
        kl_coef_first, kl_coef_second, kl_coef_third: rungs taken one by one while KL is high.
        temperature_step, max_temperature: added while the answers have collapsed, up to this.
        diversity_step, max_diversity: added to the bonus for novel bigrams, up to this; reward
            units.
        domain_factor, max_domain_weight: multiplies the weight of a forgotten domain, up to this.
        learning_rate_factor, min_learning_rate_factor: multiplies the learning rates while
            updates are too large, down to this.
        on_alarm: what ends the fit when an alarm stays: none, stop, or rollback, which continues
            from the best checkpoint with the next larger kl_coef and smaller learning rates.
        alarm_patience: iterations that it may stay.
        max_rollbacks: after these many it stops.
    """

    cooldown: int = number(4, at_least=1)
    kl_coef_low: float = number(0.01, at_least=0)
    kl_coef_first: float = number(0.05, above=0)
    kl_coef_second: float = number(0.1, above=0)
    kl_coef_third: float = number(0.2, above=0)
    temperature_step: float = number(0.1, at_least=0)
    max_temperature: float = number(1.3, above=0)
    diversity_step: float = number(0.1, at_least=0)
    max_diversity: float = number(0.3, at_least=0)
    domain_factor: float = number(1.5, at_least=1)
    max_domain_weight: float = number(3.0, at_least=1)
    learning_rate_factor: float = number(0.5, above=0, at_most=1)
    min_learning_rate_factor: float = number(0.125, above=0, at_most=1)
    on_alarm: str = "none"
    alarm_patience: int = number(6, at_least=1)
    max_rollbacks: int = number(2, at_least=0)

    def __post_init__(self) -> None:
        """Check the values."""
        super().__post_init__()
        if self.on_alarm not in ON_ALARM:
            raise ValueError(
                f"ActionSettings.on_alarm={self.on_alarm!r} must be one of {', '.join(ON_ALARM)}"
            )
