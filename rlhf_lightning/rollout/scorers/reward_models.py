"""Several reward models as one, and one that is an adapter on the policy's own base."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
from pydantic import AfterValidator
from torch import Tensor, nn

from rlhf_lightning.arguments import Count, PathOrName, checked
from rlhf_lightning.models.adapter_files import load_scalar_adapter
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.rollout.scorers.base import Responses, RewardModelScorer, Scores
from rlhf_lightning.rollout.scorers.hparams import RewardEnsembleHparams

DISAGREEMENT = "disagreement"


def _check_members(sources: Sequence[PathOrName]) -> Sequence[PathOrName]:
    if len(sources) < 2 or len(set(map(str, sources))) < len(sources):
        told = f"={sources!r}: an ensemble needs two or more different reward models"
        raise ValueError(f"{told}: scorer.sources=[FOLDER,FOLDER]")
    return sources


Members = Annotated[Sequence[PathOrName], AfterValidator(_check_members)]


class RewardEnsembleScorer:
    """Reward models of other seeds, sizes or data that use the policy's tokenizer.

    Each of them was normalized to mean 0 and standard deviation 1 over the SFT policy's samples by
    its reward stage, which makes their scores comparable.

    Args:
        load: source -> reward model.
        sources: folders or hub names of the reward models.
        policy: folder or hub name of the policy; its tokenizer is compared with theirs.
        micro_batch_size: rows in one forward.
        hparams: the fields of `RewardEnsembleHparams`.

    Raises:
        ValueError: for fewer than two members, one twice, or another tokenizer than the policy's.

    Source: Coste et al. 2024, "Reward Model Ensembles Help Mitigate Overoptimization" (worst-case
    and uncertainty-weighted optimization; the latter subtracts the variance, this the standard
    deviation, which has the unit of the score).
    """

    Hparams = RewardEnsembleHparams
    holds = "model"
    words = "{number} reward models"

    @checked
    def __init__(
        self,
        load: Callable[..., ScalarHeadModel],
        sources: Members,
        *,
        policy: PathOrName | None = None,
        micro_batch_size: Count | None = None,
        **hparams: Any,
    ) -> None:
        self.hparams = RewardEnsembleHparams(**hparams)
        more: Any = {"policy": policy, "micro_batch_size": micro_batch_size}
        self.members = [
            RewardModelScorer(partial(load, source=at), name=f"reward_model_{n}", source=at, **more)
            for n, at in enumerate(map(str, sources), 1)
        ]

    @property
    def normalized(self) -> bool:
        """True if all members are; known once they are built."""
        return all(member.normalized for member in self.members)

    def build(self, base: Any = None) -> list[nn.Module]:
        """Load every member, frozen."""
        return [model for member in self.members for model in member.build(base)]

    def __call__(self, responses: Responses) -> Scores:
        """Return the combined score; components are the members' scores and their `disagreement`.

        The disagreement is their standard deviation, `[B]`.
        """
        scores = {member.name: member(responses).total for member in self.members}
        stacked = torch.stack(list(scores.values()))  # [members, B]
        total, std = combined(stacked, self.hparams)
        return Scores(total, {**scores, DISAGREEMENT: std})


def combined(scores: Tensor, hparams: RewardEnsembleHparams) -> tuple[Tensor, Tensor]:
    """Return the score and the standard deviation `[B]` of members' scores `[members, B]`."""
    std = scores.std(0, correction=0)
    if hparams.combine == "minimum":
        return scores.amin(0), std
    return scores.mean(0) - hparams.std_coef * std, std


class RewardAdapterScorer(RewardModelScorer):
    """A reward model trained with LoRA on the same base as the policy's adapter.

    It costs the memory of an adapter, not of a model.

    Args:
        source: artifact of the reward stage, which has a folder `adapter`.
        micro_batch_size: rows in one forward.
        name: name of the component.
    """

    holds = "adapter"

    @checked
    def __init__(
        self,
        source: PathOrName,
        *,
        micro_batch_size: Count | None = None,
        name: str = "reward_model",
    ) -> None:
        super().__init__(_not_alone, micro_batch_size=micro_batch_size, name=name)
        self.source: str = str(source)

    def build(self, base: Any = None) -> list[nn.Module]:
        """Put the reward model onto `base`, frozen; return no separate model.

        Raises:
            ValueError: without a base.
        """
        if self.model is None:
            if base is None:
                _not_alone()
            # A second adapter of one name would take the place of the first.
            number = sum(name.startswith("reward") for name in base.adapters)
            name = f"reward_{number + 1}" if number else "reward"
            self.model = load_scalar_adapter(base, Path(self.source) / ADAPTER, name)
            self.model.eval().requires_grad_(False)
        return []


def _not_alone() -> Any:
    fix = "train PPO with lora=lora, or use scorer=reward_model, which needs no base"
    raise ValueError(f"scorer=reward_adapter shares the policy's base: {fix}")
