"""PPO: a rollout, then several epochs of clipped updates. Read `training_step` first.

Legend: B rows of a rank, P padded prompt, R response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, RunsCode, Seed, checked
from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.functional.losses import clipped_value_loss
from rlhf_lightning.hparams import LoraHparams, PPOHparams, SamplingHparams
from rlhf_lightning.models.forward import response_values
from rlhf_lightning.models.heads import ScalarHeadModel
from rlhf_lightning.models.ppo_models import PPOModels, ppo_models
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules import on_policy, pretrained
from rlhf_lightning.modules.data_checks import check_batch
from rlhf_lightning.modules.metrics import RunningMeans
from rlhf_lightning.modules.on_policy_module import OnPolicyModule
from rlhf_lightning.modules.optimization import (
    Measured,
    StepCounts,
    TermOfBatch,
    parameter_group,
    with_schedule,
)
from rlhf_lightning.modules.placement import sharing_models
from rlhf_lightning.modules.pretrained import Optimizer
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.rollout.estimators import GAE
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.scorers.base import RewardModelScorer, Scorer


class PPOModule(OnPolicyModule):
    """Proximal policy optimization with a KL penalty in the reward.

    Args:
        ppo: coefficients.
        sampling: how rollouts are sampled.
        models: builds policy, value model and reference.
        scorer: scores answers; its models are frozen.
        generator: continues prompts.
        tokenizer: turns responses into text.
        optimizer: parameter groups -> optimizer (AdamW with everything but the learning rates).
        schedule: factor on the learning rates over iterations.
        seed: of sampling noise and minibatch order.
        fingerprint: of the policy's source; a checkpoint resumes only from the same one.
        compute_dtype: of sharded forwards; None computes in the parameters' dtype.

    Source: Schulman et al. 2017 (PPO), Ziegler et al. 2019 (PPO on language models).
    """

    stage = "ppo"
    kinds: ClassVar = {"ppo": PPOHparams, "sampling": SamplingHparams}
    algorithm: PPOHparams

    @checked
    def __init__(
        self,
        *,
        ppo: PPOHparams,
        sampling: SamplingHparams,
        models: Callable[[], PPOModels],
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
        on_policy.begin(self, ppo, sampling, seed)
        self.ppo = ppo
        self.build_models = models
        self.scorer = scorer
        self.generator = generator
        self.tokenizer = tokenizer
        self.build_optimizer = optimizer
        self.schedule = schedule
        self.fingerprint = fingerprint
        self.compute_dtype = compute_dtype
        self.estimator = GAE(ppo.gamma, ppo.gae_lambda, ppo.gae_lambda_value, ppo.gae_length_alpha)
        self.value: ScalarHeadModel | None = None

    # -- made from names ----------------------------------------------------------------------

    @classmethod
    @checked(but=("reward",))
    def from_pretrained(
        cls,
        policy: PathOrName,
        reward: Any,
        *,
        reward_weights: Sequence[float] | None = None,
        ppo: PPOHparams | None = None,
        sampling: SamplingHparams | None = None,
        value: PathOrName | None = None,
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
            ppo: coefficients; the defaults of `PPOHparams`.
            sampling: how rollouts are sampled; the defaults of `SamplingHparams`.
            value: folder or hub name that the value model starts from; by default the reward model
                where it is one with the policy's tokenizer, else the policy with values of 0.
            lora: train adapters on one frozen base instead of whole models.
            schedule: of the learning rates; linear to 0 by default.
            optimizer: parameter groups, which hold the learning rates -> optimizer; AdamW by
                default.
            seed: of sampling noise, minibatches and new weights.
            activation_checkpointing: compute decoder layers again in the backward pass.
            chat_template: file of a template, or the name of one of ours, in place of the
                model's; exported with it.
            revision: branch, tag or commit of a hub name.
            trust_remote_code: run the code beside the weights.

        Raises:
            TypeError: if `reward` is none of these.
            ValueError: if tokenizer or settings cannot be used.
        """
        start = None if value is None else str(value)

        def models(policy: str, scorer: Scorer, **options: Any) -> PPOModels:
            found = start
            if found is None and isinstance(scorer, RewardModelScorer) and lora is None:
                found = str(reward) if isinstance(reward, str | Path) else None
            head: Literal["stored", "zero"] = "zero" if found is None else "stored"
            return ppo_models(policy, found, value_head=head, **options)

        return pretrained.on_policy_module(
            cls,
            policy,
            reward,
            reward_weights=reward_weights,
            models=models,
            hparams={"ppo": ppo or PPOHparams(), "sampling": sampling or SamplingHparams()},
            value=start,
            lora=lora,
            schedule=schedule,
            optimizer=optimizer,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            chat_template=chat_template,
            revision=revision,
            trust_remote_code=trust_remote_code,
        )

    # -- models -----------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build policy, value model, reference and scorer, and shard each if ranks share them."""
        if self.policy is None:
            with sharing_models(self):
                models = self.build_models()
                on_policy.place_models(self, models)
            self.value = models.value

    def configure_optimizers(self) -> dict[str, Any]:
        """One optimizer, two groups: policy and value model."""
        groups = [
            parameter_group(self.policy, "policy", self.ppo.learning_rate),
            parameter_group(self.value, "value", self.ppo.value_learning_rate),
        ]
        optimizer = self.build_optimizer(groups)
        return with_schedule(
            self, optimizer, self.schedule, lambda: self.controls.learning_rate_factor
        )

    # -- the algorithm ----------------------------------------------------------------------

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Run one PPO iteration: collect a rollout, update on it, adapt the KL coefficient."""
        check_batch(self, prompts, PromptBatch)
        rollout, seconds = self.collect_rollout(prompts, batch_idx)
        started, steps = time.perf_counter(), RunningMeans()
        for minibatch in on_policy.usable_minibatches(self, rollout, batch_idx):
            if not self.update(minibatch, steps, iteration=batch_idx):
                break  # the policy has moved far enough on this rollout
        release_freed_memory()  # the activations
        seconds["update"] = time.perf_counter() - started
        on_policy.finish_iteration(self, rollout, steps, seconds, batch_idx)
        return on_policy.outputs(rollout, steps)

    def collect_rollout(
        self, prompts: PromptBatch, iteration: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample, evaluate and score; return the rollout and the seconds of its phases."""
        return on_policy.sample_rollout(self, prompts, iteration, self.estimator, self.value)

    def update(self, minibatch: RolloutBatch, steps: RunningMeans, *, iteration: int) -> bool:
        """Take one optimizer step on `minibatch`; return False if approx_kl says to stop."""
        models = {"ppo/policy_grad_norm": self.policy, "ppo/value_grad_norm": self.value}
        terms = self.loss_terms(iteration)
        return on_policy.take_step(self, minibatch, terms, models, steps, iteration)

    def loss_terms(self, iteration: int) -> list[TermOfBatch]:
        """Return the terms of the loss: each a micro-batch's share of it, with its measures."""
        if iteration < self.ppo.critic_warmup_iterations:
            return [self.value_loss]
        return [self.policy_loss, self.value_loss]

    def value_loss(self, micro_batch: RolloutBatch, counts: StepCounts) -> tuple[Tensor, Measured]:
        """Return `vf_coef` times the clipped squared error of the values."""
        result = clipped_value_loss(
            response_values(self.value, micro_batch),
            micro_batch.values,
            micro_batch.returns,
            micro_batch.loss_mask,
            cliprange_value=self.ppo.cliprange_value,
            num_tokens=counts.num_tokens,
        )
        measures = {"ppo/value_loss": result.loss, "ppo/value_clipfrac": result.clipfrac}
        return self.ppo.vf_coef * result.loss, measures

    def on_train_start(self) -> None:
        """Refuse a warm-up of the value model that leaves no iteration to the policy."""
        warmup = self.ppo.critic_warmup_iterations
        iterations = int(self.trainer.estimated_stepping_batches)
        if 0 < iterations <= warmup:
            raise ValueError(
                f"PPOHparams.critic_warmup_iterations={warmup} leaves none of {iterations} "
                "iterations to train the policy: use fewer"
            )
