"""PPO: a rollout, then several epochs of clipped updates of a policy and of a value model.

Read `OnPolicyModule.training_step` first. Legend: B rows of a rank, R response.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Unpack

from torch import Tensor, nn

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.functional.losses import clipped_value_loss
from rlhf_lightning.hparams import PPOHparams, SamplingHparams
from rlhf_lightning.models.forward import response_values
from rlhf_lightning.models.ppo_models import PPOModels, freeze_but, ppo_models
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.optimization import Measured, StepCounts, Term, parameter_group
from rlhf_lightning.modules.options import OnPolicyOptions, OnPolicyParts
from rlhf_lightning.modules.pretrained import Start
from rlhf_lightning.rollout.estimators import GAE
from rlhf_lightning.rollout.scorers.base import RewardModelScorer, Scorer


class PPOModule(OnPolicyModule):
    """Proximal policy optimization with a KL penalty in the reward.

    Args:
        ppo: coefficients of PPO.
        models: builder of policy, value model and reference.
        parts: further parts, see `OnPolicyParts` and `ModuleParts`.

    Source: Schulman et al. 2017 (PPO), Ziegler et al. 2019 (PPO on language models).
    """

    stage = "ppo"
    title = "PPO"
    kinds: ClassVar = {"ppo": PPOHparams, "sampling": SamplingHparams}
    algorithm: PPOHparams

    @checked
    def __init__(
        self, *, ppo: PPOHparams, models: Callable[[], PPOModels], **parts: Unpack[OnPolicyParts]
    ) -> None:
        estimator = GAE(ppo.gamma, ppo.gae_lambda, ppo.gae_lambda_value, ppo.gae_length_alpha)
        super().__init__(ppo, models, estimator, **parts)

    @classmethod
    def title_of(cls, algorithm: PPOHparams) -> str:
        """Return SAO, if the ratio divides by the sampler and masks, else PPO."""
        masked = algorithm.surrogate == "masked_ratio" and algorithm.ratio_base == "sampler"
        return "SAO" if masked and cls.title == PPOModule.title else cls.title

    @classmethod
    @checked(but=("reward",))
    def from_pretrained(
        cls,
        policy: PathOrName,
        reward: Any,
        *,
        ppo: PPOHparams | None = None,
        value: PathOrName | None = None,
        value_head: Literal["stored", "zero"] | None = None,
        **options: Unpack[OnPolicyOptions],
    ) -> Self:
        """Return the module that trains `policy`; models are loaded when a Trainer asks for them.

        Args:
            policy: folder or hub name of the SFT policy, which is the reference too.
            reward: a function `(prompts, completions, **columns) -> list of numbers`, or its
                `path.py:name`; the folder or hub name of a reward model; a scorer; or a list of
                these, whose weighted sum is the score.
            ppo: coefficients; the defaults of `PPOHparams`.
            value: folder or hub name that the value model starts from; by default the reward model
                where it is one with the policy's tokenizer, else the policy. With `lora` the
                `adapter` folder of a reward model is taken up.
            value_head: "stored", that of the reward model which it starts from, or "zero" for
                values that start at 0; by default "stored" where there is a reward model.
            options: see `OnPolicyOptions` and `ModuleOptions`.

        Raises:
            TypeError: if `reward` is none of these.
            ValueError: if tokenizer, value model, adapters or settings cannot be used.
        """
        own = {"value": None if value is None else str(value), "value_head": value_head}
        hparams = {"ppo": ppo or PPOHparams()}
        return super().from_pretrained(policy, reward, hparams, options, **own)

    @classmethod
    def check_start(
        cls, start: Start, *, value: str | None = None, value_head: str | None = None
    ) -> None:
        """Check that the value model can start from `value`, unless that is the policy."""
        adapted = start.options["lora"] is not None
        if value is None or value == start.source.name or (adapted and value_head == "zero"):
            return
        if adapted:
            start.check_adapter("value", value)
        fix = "start the value model from the policy: artifacts.reward=null module.value_head=zero"
        start.check_tokenizer("value", value, fix=fix)

    @classmethod
    def load_models(
        cls,
        policy: str,
        reward: Any,
        scorer: Scorer,
        *,
        value: str | None = None,
        value_head: Literal["stored", "zero"] | None = None,
        **how: Any,
    ) -> PPOModels:
        """Return policy, value model and reference; see `from_pretrained` for `value`."""
        is_model = isinstance(reward, str | Path) and isinstance(scorer, RewardModelScorer)
        if value is None and value_head != "zero" and is_model and how["lora"] is None:
            value = str(reward)
        head: Any = value_head or ("zero" if value is None else "stored")
        return ppo_models(policy, value, value_head=head, **how)

    def take(self, built: PPOModels) -> None:
        """Take the models, the value model too, of which a part may be frozen."""
        freeze_but(built.value, self.algorithm.value_trainable)
        super().take(built)
        self.value = built.value

    def parameter_groups(self) -> list[dict[str, Any]]:
        """Return the groups of policy and value model."""
        value_rate = self.algorithm.value_learning_rate
        return [*super().parameter_groups(), parameter_group(self.value, "value", value_rate)]

    def models_by_norm(self) -> dict[str, nn.Module]:
        """Return policy and value model, by the names of their gradient norms."""
        return {"ppo/policy_grad_norm": self.policy, "ppo/value_grad_norm": self.value}

    def loss_terms(self, iteration: int, epoch: int) -> list[Term]:
        """Return the policy's loss and that of the value model.

        The value model trains alone while it warms up, and in the passes that it has more.
        """
        ppo = self.algorithm
        alone = ppo.num_passes - ppo.num_ppo_epochs
        if iteration < ppo.critic_warmup_iterations or epoch < alone:
            return [self.value_loss]
        return [self.policy_loss, self.value_loss]

    def value_loss(self, micro_batch: RolloutBatch, counts: StepCounts) -> tuple[Tensor, Measured]:
        """Return `vf_coef` times the clipped squared error of the values, 0 without a score."""
        result = clipped_value_loss(
            response_values(self.value, micro_batch),
            micro_batch.values,
            micro_batch.returns,
            micro_batch.reward_mask,
            cliprange_value=self.algorithm.cliprange_value,
            num_tokens=counts.num_reward_tokens.clamp(min=1),
        )
        measures = {"ppo/value_loss": result.loss, "ppo/value_clipfrac": result.clipfrac}
        return self.algorithm.vf_coef * result.loss, measures

    def on_train_start(self) -> None:
        """Refuse a warm-up of the value model that leaves no iteration to the policy."""
        warmup = self.algorithm.critic_warmup_iterations
        iterations = int(self.trainer.estimated_stepping_batches)
        if 0 < iterations <= warmup:
            told = f"PPOHparams.critic_warmup_iterations={warmup} leaves none"
            raise ValueError(f"{told} of {iterations} iterations to train the policy: use fewer")
