"""The reward models of the study and the runs of PPO against them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from rlhf_lightning.data.demo.gold import gold_scores
from rlhf_lightning.rollout.scorers.base import Answers, Scores

WORLD = "demo_seed1"
ITERATIONS = 50
ROWS = 96
MEMBERS = (1, 2, 3, 4)  # of an ensemble
SEEDS = tuple(range(1, 9))  # of runs; each has a single model of its own

# A decoder of this shape, trained on the world's texts first; the large one is the SFT model.
SMALL_BASE = (
    "+experiment=base",
    "seed=1",
    "logger=none",
    "+dataset.source.num_texts=10000",
    "model.from_scratch.hidden_size=32",
    "model.from_scratch.num_hidden_layers=1",
    "model.from_scratch.num_attention_heads=2",
    "model.from_scratch.intermediate_size=96",
)
SIZES = ("small", "large")
# Pairs, and passes over them: few pairs are read more often, as is usual.
PAIRS = {"few": (500, 4), "many": (8000, 1)}
ENSEMBLE_OF = ("large", "few")
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


def reward_name(size: str, pairs: str, member: int) -> str:
    """Return the folder name of a reward model."""
    return f"{size}_{pairs}_{member}"


def reward_overrides(size: str, pairs: str, member: int, root: Path) -> tuple[str, ...]:
    """Return the overrides that train a reward model; members differ in their seed alone.

    The seed draws the head and the order of the pairs. All are normalized over the same SFT policy.
    """
    count, epochs = PAIRS[pairs]
    world = root / WORLD
    start = "sft" if size == "large" else "base_small"
    return (
        "+experiment=reward",
        f"seed={member}",
        "logger=none",
        "gates=none",
        "trainer.validations=1",
        "dataset.source.seed=1",
        f"dataset.name={WORLD}",
        f"+dataset.source.num_preferences={count}",
        "+dataset.source.num_validation_preferences=600",
        f"data.num_epochs={epochs}",
        f"module.model.source={world / start}",
        f"artifacts.publish={world / reward_name(size, pairs, member)}",
    )


def reward_models() -> list[tuple[str, str, int]]:
    """Return size, pairs and member of every reward model."""
    cells = [(size, pairs, 1) for size in SIZES for pairs in PAIRS]
    return cells + [(*ENSEMBLE_OF, seed) for seed in SEEDS if seed != 1]


def conditions(seed: int) -> list[Condition]:
    """Return the runs of a seed: the grid with seed 1, single models and ensembles with all.

    Seed s of the single model is scored by model s, the ensembles by models 1 to 4.
    """
    found = []
    if seed == 1:
        found = [
            Condition(f"{size}_{pairs}", (reward_name(size, pairs, 1),))
            for size in SIZES
            for pairs in PAIRS
            if (size, pairs) != ENSEMBLE_OF
        ]
    members = tuple(reward_name(*ENSEMBLE_OF, member) for member in MEMBERS)
    single = Condition("_".join(ENSEMBLE_OF), (reward_name(*ENSEMBLE_OF, seed),))
    return [*found, single, *(Condition(how, members, how) for how in ENSEMBLES)]


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
        "module.models.value=${artifacts.sft}",
        "module.models.value_head=zero",
        "module.ppo.kl_coef=0",
        "module.ppo.learning_rate=8.0e-4",
        "module.ppo.critic_warmup_iterations=2",
        f"data.batch_size={ROWS}",
        f"data.num_iterations={ITERATIONS}",
        "callbacks.samples.num_samples=2",
        "doctor.second_scorer={_target_: benchmarks.studies.overoptimisation.plan.GoldScorer}",
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

    def __call__(self, answers: Answers) -> Scores:
        """Return gold scores `[B]`."""
        prompts = answers.prompts.columns["prompt"]
        found = gold_scores(prompts, answers.completions, answers.finished.tolist())
        total = torch.tensor(found, device=answers.sequences.device)
        return Scores(total, {"gold": total})
