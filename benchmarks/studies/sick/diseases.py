"""The planted diseases, as overrides of one small PPO run, and the detectors of each."""

from __future__ import annotations

from dataclasses import dataclass

ITERATIONS = 24
PLANTED = "benchmarks.studies.sick.planted"
FEW_ITERATIONS = 12  # for what shows at once
ROWS = 64

# Every run: one built-in world and its cached models, rollouts of 64 answers, gold watching.
BASE = (
    "+experiment=ppo",
    "logger=none",
    "scheduler=constant",
    "dataset.source.seed=1",
    "dataset.name=demo_seed1",
    "artifacts.publish=null",
    f"data.batch_size={ROWS}",
    "callbacks.samples.num_samples=2",
    f"doctor.second_scorer={{_target_: rlhf_lightning.FunctionScorer, function: {PLANTED}.gold}}",
)


@dataclass(frozen=True)
class Disease:
    """One planted disease.

    Args:
        overrides: of the configuration.
        detectors: that must fire.
        within: iterations by which each of them has fired.
        iterations: of the run.
        noisy_labels: whether the reward model is the one that was trained on coin flips.
    """

    overrides: tuple[str, ...]
    detectors: tuple[str, ...]
    within: int
    iterations: int = ITERATIONS
    noisy_labels: bool = False


def spoilt(*arguments: str) -> tuple[str, ...]:
    """Return the overrides that put `SpoiltRewardModel` in place of the scorer."""
    return (
        f"scorer._target_={PLANTED}.SpoiltRewardModel",
        *(f"+scorer.{argument}" for argument in arguments),
    )


DISEASES: dict[str, Disease] = {
    "healthy": Disease((), (), ITERATIONS),
    "length_loving": Disease(
        spoilt(f"extra={PLANTED}.words", "weight=0.3"),
        ("length_bias", "length_drift"),
        22,
    ),
    "unknown_rewarded": Disease(
        spoilt(f"extra={PLANTED}.ignorance", "weight=4.0"),
        ("duplicates", "reward_hacking", "diversity"),
        22,
    ),
    "one_answer": Disease(
        (
            *spoilt("factor=0.0", f"extra={PLANTED}.words", "weight=-0.3"),
            "module.ppo.kl_coef=0.0",
            "module.ppo.learning_rate=1.0e-3",
        ),
        ("entropy", "saturation"),
        32,
        36,
    ),
    "kl_off": Disease(
        ("module.ppo.kl_coef=0.0", "module.ppo.learning_rate=1.0e-3"), ("kl_high",), 22
    ),
    "wrong_pad": Disease(
        ("rollout=cached", f"rollout._target_={PLANTED}.PadStopGenerator"),
        ("missing_eos",),
        8,
        FEW_ITERATIONS,
    ),
    "dead_critic": Disease(
        ("module.value_head=zero", "module.ppo.value_learning_rate=1.0e-7"),
        ("critic",),
        12,
        FEW_ITERATIONS,
    ),
    "noisy_labels": Disease((), ("scorer_disagreement",), 10, FEW_ITERATIONS, noisy_labels=True),
    "forgotten_domain": Disease(
        spoilt("domain_factors={talk: -2.0}"), ("forgotten_domain",), 30, 32
    ),
    "high_learning_rate": Disease(
        ("module.ppo.learning_rate=1.0e-2",), ("update_size", "kl_high"), 8, FEW_ITERATIONS
    ),
    "harm_rewarded": Disease(spoilt(f"extra={PLANTED}.compliance", "weight=4.0"), ("safety",), 22),
    "top_k_sampler": Disease(
        ("rollout=cached", f"rollout._target_={PLANTED}.TopKGenerator", "+rollout.k=3"),
        ("sampler_mismatch",),
        8,
        FEW_ITERATIONS,
    ),
    "stale_engine": Disease(
        ("rollout=cached", f"rollout._target_={PLANTED}.StaleGenerator"),
        ("engine_weights",),
        8,
        FEW_ITERATIONS,
    ),
    "no_learning": Disease(("module.ppo.learning_rate=1.0e-7",), ("kl_low",), 12, FEW_ITERATIONS),
    "constant_reward": Disease(
        ("scorer=function", f"scorer.function={PLANTED}.constant"),
        ("constant_score",),
        1,
        FEW_ITERATIONS,
    ),
    "unnormalised": Disease(spoilt("factor=10.0"), ("clipped_scores",), 8, FEW_ITERATIONS),
}
