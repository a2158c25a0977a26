"""The reward models of the study and the runs of PPO against them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_lightning.data.demo.gold import gold_scores
from rlhf_lightning.rollout.scorers.base import Responses, Scores

WORLD = "demo_seed1"
ITERATIONS = 50
ROWS = 96
MEMBERS = (1, 2, 3, 4)  # of an ensemble
SEEDS = tuple(range(1, 9))  # of runs; each has a model of its own
SINGLE = "single"

PAIRS, EPOCHS = 500, 4
ENSEMBLES = ("mean_minus_std", "minimum")


@dataclass(frozen=True)
class Condition:
    """The reward of one run of PPO.

    Args:
        name: of the condition.
        rewards: names of the reward models.
        combine: how several become one.
    """

    name: str
    rewards: tuple[str, ...]
    combine: str | None = None


def reward_name(member: int) -> str:
    """Return the folder name of a reward model."""
    return f"member_{member}"


def reward_overrides(member: int, root: Path) -> tuple[str, ...]:
    """Return the overrides that train a reward model; members differ in their seed alone.

    The seed draws the head and the order of the pairs. All are normalized over the same SFT policy.
    """
    world = root / WORLD
    return (
        "+experiment=reward",
        f"seed={member}",
        "logger=none",
        "gates=none",
        "trainer.validations=1",
        "dataset.source.seed=1",
        f"dataset.name={WORLD}",
        f"+dataset.source.num_preferences={PAIRS}",
        "+dataset.source.num_validation_preferences=600",
        f"data.num_epochs={EPOCHS}",
        f"module.source={world / 'sft'}",
        f"artifacts.publish={world / reward_name(member)}",
    )


def conditions(seed: int) -> list[Condition]:
    """Return the runs of a seed: its own model alone, and the ensembles of models 1 to 4."""
    members = tuple(map(reward_name, MEMBERS))
    single = Condition(SINGLE, (reward_name(seed),))
    return [single, *(Condition(how, members, how) for how in ENSEMBLES)]


def ppo_overrides(condition: Condition, seed: int, root: Path) -> tuple[str, ...]:
    """Return the overrides of one run: no KL penalty, and a value model that starts from SFT."""
    world = root / WORLD
    folders = [str(world / name) for name in condition.rewards]
    overrides = (
        "+experiment=ppo",
        "logger=none",
        "scheduler=constant",
        f"seed={seed}",
        "dataset.source.seed=1",
        f"dataset.name={WORLD}",
        f"artifacts.sft={world / 'sft'}",
        f"artifacts.reward={folders[0]}",
        "artifacts.publish=null",
        "module.value=${artifacts.sft}",
        "module.value_head=zero",
        "module.ppo.kl_coef=0",
        "module.ppo.learning_rate=8.0e-4",
        "module.ppo.critic_warmup_iterations=2",
        f"data.batch_size={ROWS}",
        f"data.num_iterations={ITERATIONS}",
        "callbacks.samples.num_samples=2",
        "doctor.second_scorer={_target_: benchmarks.studies.ensembles.plan.GoldScorer}",
    )
    if condition.combine is None:
        return overrides
    return (
        *overrides,
        "scorer=reward_ensemble",
        f"scorer.sources=[{','.join(folders)}]",
        f"scorer.combine={condition.combine}",
    )


class GoldScorer:
    """The gold reward of each answer, whether it ended by itself included."""

    def build(self, base: Any = None) -> list[torch.nn.Module]:
        """Return no models: gold needs none."""
        return []

    def __call__(self, answers: Responses) -> Scores:
        """Return gold scores `[B]`."""
        prompts = answers.prompts.columns["prompt"]
        found = gold_scores(prompts, answers.completions, answers.finished.tolist())
        total = torch.tensor(found, device=answers.sequences.device)
        return Scores(total, {"gold": total})
