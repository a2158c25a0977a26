"""GRPO and its relatives: groups of responses and no value model. Read `training_step` first.

Legend: B rows of a rank, P padded prompt, R response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

import torch
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, RunsCode, Seed, checked
from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import world_size
from rlhf_lightning.hparams import GRPOHparams, LoraHparams, SamplingHparams
from rlhf_lightning.models.ppo_models import PolicyModels, policy_models
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules import on_policy, pretrained
from rlhf_lightning.modules.data_checks import check_batch
from rlhf_lightning.modules.metrics import RunningMeans
from rlhf_lightning.modules.on_policy_module import OnPolicyModule
from rlhf_lightning.modules.optimization import (
    parameter_group,
    with_schedule,
)
from rlhf_lightning.modules.placement import sharing_models
from rlhf_lightning.modules.pretrained import Optimizer
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.rollout.estimators import GroupBaseline
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.scorers.base import Scorer


class PolicyGradientModule(OnPolicyModule):
    """Policy gradient on groups of responses: GRPO, Dr. GRPO, RLOO, REINFORCE++, GSPO, CISPO.

    A prompt gets several responses (`PromptDataModule(num_generations=k)`), and the others of its
    group take the place of a value model. Minibatches hold whole groups.

    Args:
        grpo: coefficients; they say which of the objectives it is.
        sampling: how rollouts are sampled.
        models: builds policy and reference.
        scorer: scores answers; its models are frozen.
        generator: continues prompts.
        tokenizer: turns responses into text.
        optimizer: parameter groups -> optimizer (AdamW with everything but the learning rate).
        schedule: factor on the learning rate over iterations.
        seed: of sampling noise and minibatch order.
        fingerprint: of the policy's source; a checkpoint resumes only from the same one.
        compute_dtype: of sharded forwards; None computes in the parameters' dtype.

    Source: Shao et al. 2024, "DeepSeekMath"; for the others see `GroupBaseline` and
    `functional.losses`.
    """

    stage = "grpo"
    kinds: ClassVar = {"grpo": GRPOHparams, "sampling": SamplingHparams}
    algorithm: GRPOHparams

    @checked
    def __init__(
        self,
        *,
        grpo: GRPOHparams,
        sampling: SamplingHparams,
        models: Callable[[], PolicyModels],
        scorer: Scorer,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        optimizer: Callable[[list[dict[str, Any]]], torch.optim.Optimizer],
        schedule: Schedule,
        seed: Seed,
        fingerprint: str = "",
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        on_policy.begin(self, grpo, sampling, seed)
        self.build_models = models
        self.scorer = scorer
        self.generator = generator
        self.tokenizer = tokenizer
        self.build_optimizer = optimizer
        self.schedule = schedule
        self.fingerprint = fingerprint
        self.compute_dtype = compute_dtype
        self.estimator = GroupBaseline(grpo.baseline, grpo.scale)

    @classmethod
    @checked(but=("reward",))
    def from_pretrained(
        cls,
        policy: PathOrName,
        reward: Any,
        *,
        reward_weights: Sequence[float] | None = None,
        grpo: GRPOHparams | None = None,
        sampling: SamplingHparams | None = None,
        lora: LoraHparams | None = None,
        schedule: Schedule | None = None,
        optimizer: Optimizer | None = None,
        seed: Seed = 1,
        activation_checkpointing: bool = False,
        chat_template: str | None = None,
        revision: str | None = None,
        trust_remote_code: RunsCode = False,
    ) -> Self:
        """Return the module that trains `policy`; models are loaded when a Trainer asks for them.

        Args:
            policy: folder or hub name of the SFT policy, which is the reference too.
            reward: a function `(prompts, completions, **columns) -> list of numbers`, or its
                `path.py:name`; the folder or hub name of a reward model; a scorer; or a list of
                these, whose weighted sum is the score.
            reward_weights: of a list of rewards, one each; 1 by default.
            grpo: coefficients; the defaults of `GRPOHparams`.
            sampling: how rollouts are sampled; the defaults of `SamplingHparams`.
            lora: train an adapter on one frozen base instead of the whole policy.
            schedule: of the learning rate; linear to 0 by default.
            optimizer: parameter groups, which hold the learning rates -> optimizer; AdamW by
                default.
            seed: of sampling noise, minibatches and a new adapter.
            activation_checkpointing: compute decoder layers again in the backward pass.
            chat_template: file of a template, or the name of one of ours, in place of the
                model's; exported with it.
            revision: branch, tag or commit of a hub name.
            trust_remote_code: run the code beside the weights.

        Raises:
            TypeError: if `reward` is none of these.
            ValueError: if tokenizer or settings cannot be used.
        """
        return pretrained.on_policy_module(
            cls,
            policy,
            reward,
            reward_weights=reward_weights,
            models=lambda policy, _scorer, **options: policy_models(policy, **options),
            hparams={"grpo": grpo or GRPOHparams(), "sampling": sampling or SamplingHparams()},
            lora=lora,
            schedule=schedule,
            optimizer=optimizer,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )

    def configure_model(self) -> None:
        """Build policy, reference and scorer, and shard each if ranks share them."""
        if self.policy is None:
            with sharing_models(self):
                on_policy.place_models(self, self.build_models())

    def configure_optimizers(self) -> dict[str, Any]:
        """One group; the schedule counts iterations."""
        group = parameter_group(self.policy, "policy", self.algorithm.learning_rate)
        optimizer = self.build_optimizer([group])
        return with_schedule(
            self, optimizer, self.schedule, lambda: self.controls.learning_rate_factor
        )

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Run one iteration: sample groups of responses, update on them, adapt the KL."""
        check_batch(self, prompts, PromptBatch)
        rollout, seconds = self.collect_rollout(prompts, batch_idx)
        started, steps = time.perf_counter(), RunningMeans()
        for minibatch in on_policy.usable_minibatches(self, rollout, batch_idx, whole_groups=True):
            if not self.update(minibatch, steps, iteration=batch_idx):
                break  # the policy has moved far enough on this rollout
        release_freed_memory()  # the activations
        seconds["update"] = time.perf_counter() - started
        on_policy.finish_iteration(self, rollout, steps, seconds, batch_idx)
        return on_policy.outputs(rollout, steps)

    def collect_rollout(
        self, prompts: PromptBatch, iteration: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample, evaluate and score; return the rollout and the seconds of its phases.

        Raises:
            ValueError: if a group has one row, whose advantage would always be 0, if groups differ
                in size or their rows do not follow each other, or if the batch has another number
                of spare prompts than resampling needs.
        """
        rounds, num_spares = self.algorithm.max_resampling_rounds, int(prompts.spare.sum())
        lagged = self.algorithm.rollout_lag
        wanted = rounds * world_size() * (len(prompts) - num_spares)
        if not lagged and num_spares != wanted:
            raise ValueError(
                f"GRPOHparams.max_resampling_rounds={rounds} needs the prompts of {rounds} more "
                f"iterations of all ranks as spare rows, {wanted}, and the batch has {num_spares} "
                f"spare of {len(prompts)} rows: give the "
                "Trainer a PromptDataModule, which adds them, by trainer.fit(module, "
                "datamodule=...), or use max_resampling_rounds=0"
            )
        sizes = prompts.group_ids.unique_consecutive(return_counts=True)[1]
        if len(sizes) != len(prompts.group_ids.unique()) or sizes.min() != sizes.max():
            raise ValueError(
                f"{type(self).__name__} was given groups of {int(sizes.min())} to "
                f"{int(sizes.max())} rows that follow each other: give each prompt as many rows as "
                "the others, next to each other, with one group_id"
            )
        if self.algorithm.baseline != "none" and len(sizes) == len(prompts):
            raise ValueError(
                f"GRPOHparams.baseline={self.algorithm.baseline} compares the responses to one "
                "prompt, and every prompt has one: use data.num_generations=8, that is "
                "PromptDataModule(num_generations=8), or baseline=none"
            )
        return on_policy.sample_rollout(
            self, prompts, iteration, self.estimator, max_resampling_rounds=rounds
        )

    def update(self, minibatch: RolloutBatch, steps: RunningMeans, *, iteration: int) -> bool:
        """Take one optimizer step on `minibatch`; return False if approx_kl says to stop."""
        models = {"grpo/grad_norm": self.policy}
        return on_policy.take_step(self, minibatch, [self.policy_loss], models, steps, iteration)
