"""GRPO and its relatives: like PPO, with groups of responses in place of a value model."""

from __future__ import annotations

from typing import ClassVar

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.stages.ppo import PPOStage
from rlhf_lightning.app.stages.spec import POLICY
from rlhf_lightning.hparams import GRPOHparams
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.grpo import PolicyGradientModule
from rlhf_lightning.modules.on_policy import OnPolicyModule


class GRPOStage(PPOStage):
    """Policy gradients with a baseline of a group of responses to one prompt."""

    module = PolicyGradientModule
    family: ClassVar[type[RLHFModule] | None] = (
        OnPolicyModule  # every objective on own responses without a value model
    )
    rates: ClassVar = {"learning_rate": "policy"}
    trains = (POLICY,)

    def check(self, settings: TrainSettings) -> None:
        """Check what PPO's stage checks, and that a group has rows to compare.

        Raises:
            ConfigError: with the key, what it got and what it wants.
        """
        super().check(settings)
        size, hparams = settings.data.num_generations, settings.hparams
        if size < 2 and isinstance(hparams, GRPOHparams) and hparams.baseline != "none":
            raise ConfigError(
                f"data.num_generations={size}: module.grpo.baseline={hparams.baseline} compares "
                "responses to a prompt: use 2 or more (8 is usual), or baseline=none "
                "scale=global_std (REINFORCE++)"
            )


STAGE = GRPOStage()
