"""The planted diseases, as overrides of one small PPO run, and what must notice each of them."""

from __future__ import annotations

from dataclasses import dataclass

ITERATIONS = 24
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
    "doctor.second_scorer={_target_: rlhf_lightning.rollout.scorers.base.FunctionScorer, "
    "function: tests.sick.scorers.gold}",
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
    return (
        "scorer._target_=tests.sick.scorers.SpoiltRewardModel",
        *(f"+scorer.{argument}" for argument in arguments),
    )


DISEASES: dict[str, Disease] = {
    "healthy": Disease((), (), ITERATIONS),
    "length_loving": Disease(
        spoilt("extra=tests.sick.scorers.words", "weight=0.3"), ("length_bias", "length_drift"), 22
    ),
    "unknown_rewarded": Disease(
        spoilt("extra=tests.sick.scorers.ignorance", "weight=4.0"),
        ("duplicates", "reward_hacking", "diversity"),
        22,
    ),
    "one_answer": Disease(
        (
            *spoilt("factor=0.0", "extra=tests.sick.scorers.words", "weight=-0.3"),
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
        ("rollout._target_=tests.sick.engines.PadStopGenerator",),
        ("missing_eos",),
        8,
        FEW_ITERATIONS,
    ),
    "dead_critic": Disease(
        ("module.models.value_head=zero", "module.ppo.value_learning_rate=1.0e-7"),
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
    "harm_rewarded": Disease(
        spoilt("extra=tests.sick.scorers.compliance", "weight=4.0"), ("safety",), 22
    ),
    "top_k_sampler": Disease(
        ("rollout._target_=tests.sick.engines.TopKGenerator", "+rollout.k=3"),
        ("sampler_mismatch",),
        8,
        FEW_ITERATIONS,
    ),
    "no_learning": Disease(("module.ppo.learning_rate=1.0e-7",), ("kl_low",), 12, FEW_ITERATIONS),
    "constant_reward": Disease(
        ("scorer=function", "scorer.function=tests.sick.scorers.constant"),
        ("constant_score",),
        1,
        FEW_ITERATIONS,
    ),
    "unnormalised": Disease(spoilt("factor=10.0"), ("clipped_scores",), 8, FEW_ITERATIONS),
}
