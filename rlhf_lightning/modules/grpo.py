"""GRPO and its relatives: groups of responses to a prompt, and no value model.

Read `OnPolicyModule.training_step` first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, Unpack

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import world_size
from rlhf_lightning.hparams import GRPOHparams, SamplingHparams
from rlhf_lightning.models.ppo_models import PolicyModels
from rlhf_lightning.modules.metrics import PhaseSeconds
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.options import OnPolicyOptions, OnPolicyParts
from rlhf_lightning.rollout.estimators import AdvantageEstimator, GroupBaseline, Returns


class PolicyGradientModule(OnPolicyModule):
    """Policy gradient on groups of responses: GRPO, Dr. GRPO, RLOO, REINFORCE++, GSPO, CISPO.

    A prompt gets several responses (`PromptDataModule(num_generations=k)`), and the others of its
    group take the place of a value model. Minibatches hold whole groups.

    Args:
        grpo: coefficients; they say which of the objectives it is.
        models: builds policy and reference.
        parts: see `OnPolicyParts` and `ModuleParts`.

    Source: Shao et al. 2024, "DeepSeekMath"; for the others see `rollout.estimators`
    and `functional.surrogates`.
    """

    stage = "grpo"
    title = "GRPO"
    kinds: ClassVar = {"grpo": GRPOHparams, "sampling": SamplingHparams}
    whole_groups = True
    algorithm: GRPOHparams

    @checked
    def __init__(
        self,
        *,
        grpo: GRPOHparams,
        models: Callable[[], PolicyModels],
        **parts: Unpack[OnPolicyParts],
    ) -> None:
        estimator: AdvantageEstimator = Returns(whiten=grpo.scale == "global_std")
        if grpo.baseline != "none":
            estimator = GroupBaseline(grpo.baseline, grpo.scale)  # type: ignore[arg-type]
        super().__init__(grpo, models, estimator, **parts)

    @classmethod
    def title_of(cls, algorithm: GRPOHparams) -> str:
        """Return the objective that the coefficients make, as its paper calls it."""
        if cls.title != PolicyGradientModule.title:
            return cls.title
        by_surrogate = {"gspo": "GSPO", "cispo": "CISPO"}.get(algorithm.surrogate)
        by_baseline = {"none": "REINFORCE++", "leave_one_out": "RLOO"}.get(algorithm.baseline)
        undivided = algorithm.scale == "none" and algorithm.loss_reduction == "constant"
        return by_surrogate or by_baseline or ("Dr. GRPO" if undivided else cls.title)

    @classmethod
    @checked(but=("reward",))
    def from_pretrained(
        cls,
        policy: PathOrName,
        reward: Any,
        *,
        grpo: GRPOHparams | None = None,
        **options: Unpack[OnPolicyOptions],
    ) -> Self:
        """Return the module that trains `policy`; models are loaded when a Trainer asks for them.

        Args:
            policy: folder or hub name of the SFT policy, which is the reference too.
            reward: a function `(prompts, completions, **columns) -> list of numbers`, or its
                `path.py:name`; the folder or hub name of a reward model; a scorer; or a list of
                these, whose weighted sum is the score.
            grpo: coefficients; the defaults of `GRPOHparams`.
            options: see `OnPolicyOptions` and `ModuleOptions`.

        Raises:
            TypeError: if `reward` is none of these.
            ValueError: if tokenizer or settings cannot be used.
        """
        hparams = {"grpo": grpo or GRPOHparams()}
        return super().from_pretrained(policy, reward, hparams, options)

    def collect_rollout(
        self, prompts: PromptBatch, iteration: int
    ) -> tuple[RolloutBatch, PhaseSeconds]:
        """Sample, evaluate and score; return the rollout and the seconds of its phases.

        Raises:
            ValueError: if a group has one row, whose advantage would always be 0, if groups differ
                in size or their rows do not follow each other, or if the batch has another number
                of spare prompts than resampling needs.
        """
        rounds, num_spares = self.algorithm.max_resampling_rounds, int(prompts.spare.sum())
        wanted = rounds * world_size() * (len(prompts) - num_spares)
        if not self.algorithm.rollout_lag and num_spares != wanted:
            told = f"GRPOHparams.max_resampling_rounds={rounds} needs {wanted} spare rows"
            fix = "train with a PromptDataModule, which adds them"
            raise ValueError(f"{told}, and the batch has {num_spares}: {fix}")
        sizes = prompts.group_ids.unique_consecutive(return_counts=True)[1]
        if len(sizes) != len(prompts.group_ids.unique()) or sizes.min() != sizes.max():
            told = f"prompts have {int(sizes.min())} to {int(sizes.max())} rows next to each other"
            raise ValueError(f"{told}: give each prompt as many rows, with one group_id")
        if isinstance(self.estimator, GroupBaseline) and len(sizes) == len(prompts):
            told = f"GRPOHparams.baseline={self.estimator.baseline} compares responses to a prompt"
            fix = "use data.num_generations=8, PromptDataModule(num_generations=8) or baseline=none"
            raise ValueError(f"{told}, and each has one: {fix}")
        return super().collect_rollout(prompts, iteration)
