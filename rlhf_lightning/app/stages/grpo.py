"""GRPO and its relatives: like PPO, with groups of responses in place of a value model."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from rlhf_lightning.app.stages import ppo
from rlhf_lightning.app.stages.spec import POLICY, Minibatches
from rlhf_lightning.hparams import GRPOHparams, SamplingHparams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from rlhf_lightning.app.config.settings import TrainSettings


def check(settings: TrainSettings) -> None:
    """Check what PPO's stage checks, and that a group has rows to compare.

    Raises:
        ConfigError: with the key, what it got and what it wants.
    """
    from rlhf_lightning.app.config.compose import ConfigError

    ppo.check(settings)
    size, baseline = settings.data.num_generations, settings.hparams.baseline
    if size < 2 and baseline != "none":
        raise ConfigError(
            f"data.num_generations={size}: module.grpo.baseline={baseline} compares the responses "
            "to one prompt, use 2 or more (8 is usual), or module.grpo.baseline=none with "
            "module.grpo.scale=global_std (REINFORCE++)"
        )


def arguments(
    settings: TrainSettings, tokenizer: PreTrainedTokenizerBase, generator: Any, fingerprint: str
) -> dict[str, Any]:
    """Return what the module samples and scores with.

    Raises:
        ConfigError: if an adapter was trained on another policy.
    """
    ppo.check_adapters(settings, fingerprint)
    return ppo.sampled_and_scored(settings, tokenizer, generator)


STAGE = replace(
    ppo.STAGE,
    name="grpo",
    title="GRPO",
    settings="grpo",
    hparams={"grpo": GRPOHparams, "sampling": SamplingHparams},
    rates={"learning_rate": "policy"},
    trains=(POLICY,),
    factory="rlhf_lightning.models.ppo_models.policy_models",
    minibatches=Minibatches(count="num_minibatches", epochs="num_epochs"),
    check=check,
    arguments=arguments,
)
