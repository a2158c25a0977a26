"""On-policy distillation: the policy responds, and a teacher says how likely it found each token.

Read `OnPolicyModule.training_step` first. Legend: b rows of a micro-batch, R response,
H hidden size of the teacher.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, Self, Unpack

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.distributed.collectives import is_sharded, unsharded
from rlhf_lightning.hparams import DistillationHparams, SamplingHparams
from rlhf_lightning.models.heads import Teaching, logits_of
from rlhf_lightning.models.ppo_models import PolicyModels
from rlhf_lightning.modules.on_policy import OnPolicyModule
from rlhf_lightning.modules.options import OnPolicyOptions, OnPolicyParts
from rlhf_lightning.rollout.estimators import Returns
from rlhf_lightning.rollout.teachers import ModelTeacher


class DistillationModule(OnPolicyModule):
    """Distillation from a teacher on the responses of the policy, the student.

    By `divergence="sampled"` the teacher is a token's advantage, else a loss over the whole
    vocabulary. The advantages of a reward, if there is one, are rewards to go without a baseline;
    give another `estimator` for those of a group.

    Args:
        distillation: coefficients.
        models: builds policy, reference and teacher.
        parts: see `OnPolicyParts` and `ModuleParts`.

    Source: Agarwal et al. 2024, "On-policy distillation of language models" (GKD), with samples of
    the student alone; Lu et al. 2025, "On-policy distillation" (sampled tokens).
    """

    stage = "distillation"
    title = "on-policy distillation"
    kinds: ClassVar = {"distillation": DistillationHparams, "sampling": SamplingHparams}
    whole_groups = True
    objective = "val/teacher_kl_per_token"
    maximised = False
    algorithm: DistillationHparams

    @checked
    def __init__(
        self,
        *,
        distillation: DistillationHparams,
        models: Callable[[], PolicyModels],
        **parts: Unpack[OnPolicyParts],
    ) -> None:
        super().__init__(distillation, models, Returns(whiten=False), **parts)
        self.learns_distributions = distillation.learns_distributions

    @classmethod
    @checked(but=("reward",))
    def from_pretrained(
        cls,
        policy: PathOrName,
        reward: Any = None,
        *,
        distillation: DistillationHparams | None = None,
        **options: Unpack[OnPolicyOptions],
    ) -> Self:
        """Return the module that trains `policy`; models are loaded when a Trainer asks for them.

        Args:
            policy: folder or hub name of the student, which is the reference too.
            reward: None for the teacher alone, else as in `PPOModule`, to be added to it.
            distillation: coefficients; the defaults of `DistillationHparams`.
            options: see `OnPolicyOptions` and `ModuleOptions`; `teacher` is needed.

        Raises:
            TypeError: if `reward` is none of these.
            ValueError: if there is no teacher, or tokenizer or settings cannot be used.
        """
        if options["teacher"] is None:
            fix = "give teacher=FOLDER (artifacts.teacher)"
            raise ValueError(f"{cls.__name__} learns from a teacher: {fix}")
        hparams = {"distillation": distillation or DistillationHparams()}
        given = False if reward is None else reward
        return super().from_pretrained(policy, given, hparams, options)

    def teaching(self, micro_batch: RolloutBatch) -> Teaching | None:
        """Return the teacher's head with its states before these tokens, if they are learnt."""
        if not self.learns_distributions:
            return None
        assert isinstance(self.teacher, ModelTeacher)  # or it has no states
        teacher = self.teacher.model
        with unsharded(teacher.root, layers=False):  # for its head
            logits = logits_of(teacher.model, copied=is_sharded(teacher.root))
        algorithm = self.algorithm
        return Teaching(
            micro_batch.teacher_states, logits, algorithm.divergence, algorithm.mixture_weight
        )
