"""Base of the modules that train a policy on its own scored responses."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor, nn

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import RolloutBatch
from rlhf_lightning.hparams import OnPolicyHparams
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.modules import on_policy, pretrained
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.checkpoint_state import Stateful
from rlhf_lightning.modules.controls import Controls
from rlhf_lightning.modules.optimization import Measured, StepCounts
from rlhf_lightning.modules.placement import move_models
from rlhf_lightning.modules.step_0 import Step0
from rlhf_lightning.modules.trainer_flags import check_trainer
from rlhf_lightning.rollout.pending import PendingGeneration


class OnPolicyModule(RLHFModule):
    """What PPO and GRPO do alike, with the state that `on_policy.begin` gives."""

    policy: PolicyModel | None
    reference: PolicyModel
    trained_roots: tuple[nn.Module, ...]
    frozen_models: tuple[nn.Module, ...]
    algorithm: OnPolicyHparams
    controls: Controls
    pending: PendingGeneration
    step_0: Step0

    @classmethod
    @checked(but=("reward",))
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: PathOrName, reward: Any = None, **changes: Any
    ) -> Self:
        """Return a module with the weights of a checkpoint, on the CPU, in eval mode.

        Args:
            checkpoint_path: a checkpoint of a module that `from_pretrained` built.
            reward: as there; needed where it was a function or a scorer.
            changes: other arguments of `from_pretrained` that are to differ.

        Raises:
            ValueError: if the checkpoint holds no hyper-parameters, or no reward is known.
        """
        found: Self = pretrained.restored_on_policy(
            cls, checkpoint_path, reward, cls.kinds, changes
        )
        return found

    def on_fit_start(self) -> None:
        """Refuse flags of the Trainer that would train something else; place frozen models."""
        steps = self.algorithm.num_passes * self.algorithm.num_minibatches
        check_trainer(self.trainer, num_steps=steps)
        move_models(self, [*self.trained_roots, *self.frozen_models])

    def policy_loss(self, micro_batch: RolloutBatch, counts: StepCounts) -> tuple[Tensor, Measured]:
        """Return the surrogate loss, with its optional entropy and KL terms."""
        return on_policy.surrogate_loss(self, micro_batch, counts)

    def stateful(self) -> dict[str, Stateful]:
        """Return what changes during a run and is no parameter, by its name in a checkpoint."""
        found: dict[str, Stateful] = {"controls": self.controls, **super().stateful()}
        return found | ({"pending": self.pending} if self.algorithm.rollout_lag else {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the state back, as `RLHFModule`; the ratio of the next step need not be 1."""
        super().on_load_checkpoint(checkpoint)
        self.step_0.resumed()
