"""A reward model that is an adapter on the policy's own base."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from rlhf_lightning.arguments import Count, PathOrName, checked
from rlhf_lightning.models.adapter_files import load_scalar_adapter
from rlhf_lightning.models.ppo_models import ADAPTER
from rlhf_lightning.rollout.scorers.base import RewardModelScorer


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
            self.model = load_scalar_adapter(base, Path(self.source) / ADAPTER, "reward")
            self.model.eval().requires_grad_(False)
        return []


def _not_alone() -> Any:
    raise ValueError(
        "scorer=reward_adapter shares the policy's base: train PPO with lora=lora, or use "
        "scorer=reward_model, which loads the merged reward model by itself"
    )
