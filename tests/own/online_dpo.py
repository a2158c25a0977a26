"""Online DPO: two responses of the policy to each prompt, the better and the worse by the scorer.

Source: Guo et al. 2024, "Direct language model alignment from online AI feedback".
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Self, Unpack

import torch
from pydantic import Field
from torch import Tensor

from rlhf_lightning.arguments import Above0, PathOrName, checked
from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.preference_losses import dpo_loss
from rlhf_lightning.hparams import OnPolicyHparams, SamplingHparams, Usual
from rlhf_lightning.models.forward import response_statistics
from rlhf_lightning.models.ppo_models import PolicyModels
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.optimization import Measured, StepCounts
from rlhf_lightning.modules.options import OnPolicyOptions, OnPolicyParts
from rlhf_lightning.rollout.estimators import Returns


@dataclass(frozen=True)
class OnlineDPOHparams(OnPolicyHparams):
    """Online DPO.

    Args:
        kl_coef: 0: the loss itself holds the policy to the reference.
        beta: weight of the log-ratio to the reference.
    """

    kl_coef: Annotated[float, Field(ge=0, le=0)] = 0.0
    beta: Annotated[Above0, Usual(0.01, 0.5)] = 0.1

    @property
    def num_passes(self) -> int:
        return 1


class OnlineDPOModule(OnPolicyModule):
    """DPO on pairs of the policy's own responses."""

    stage = "online_dpo"
    title = "online DPO"
    kinds: ClassVar = {"online_dpo": OnlineDPOHparams, "sampling": SamplingHparams}
    whole_groups_in_micro_batches = True
    algorithm: OnlineDPOHparams

    @checked
    def __init__(
        self,
        *,
        online_dpo: OnlineDPOHparams,
        models: Callable[[], PolicyModels],
        **parts: Unpack[OnPolicyParts],
    ) -> None:
        super().__init__(online_dpo, models, Returns(whiten=False), **parts)

    @classmethod
    @checked(but=("reward",))
    def from_pretrained(
        cls,
        policy: PathOrName,
        reward: Any,
        *,
        online_dpo: OnlineDPOHparams | None = None,
        **options: Unpack[OnPolicyOptions],
    ) -> Self:
        hparams = {"online_dpo": online_dpo or OnlineDPOHparams()}
        return super().from_pretrained(policy, reward, hparams, options)

    def policy_loss(self, micro_batch: RolloutBatch, counts: StepCounts) -> tuple[Tensor, Measured]:
        mask, scores = micro_batch.loss_mask, micro_batch.by_group(micro_batch.scores)
        new = response_statistics(self.policy, micro_batch, temperature=self.controls.temperature)
        policy = zero_off_mask(new.logprobs, mask).sum(-1)  # [b]
        reference = zero_off_mask(micro_batch.ref_logprobs, mask).sum(-1)
        better = scores.argmax(-1) + 2 * torch.arange(len(scores), device=scores.device)
        worse = better ^ 1
        result = dpo_loss(
            policy[better],
            policy[worse],
            reference[better],
            reference[worse],
            beta=self.algorithm.beta,
            label_smoothing=0.0,
            kind="sigmoid",
            num_pairs=counts.num_sequences / 2,
        )
        return result.loss, {
            "online_dpo/loss": result.loss,
            "online_dpo/accuracy": result.accuracy,
            "online_dpo/margin": result.chosen_reward - result.rejected_reward,
        }
