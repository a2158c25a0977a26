"""PPO: a rollout, then several epochs of clipped updates. Read `training_step` first.

Legend: B rows of a rank, P padded prompt, R response.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

import lightning as L
import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import global_sum, shard, unsharded, world_size
from rlhf_lightning.functional.kl import kl_k2
from rlhf_lightning.functional.losses import clipped_value_loss, ppo_policy_loss
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.hparams import LoraHparams, PPOHparams, SamplingHparams
from rlhf_lightning.models.forward import micro_batches, response_statistics, response_values
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.ppo_models import PPOModels
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules import pretrained
from rlhf_lightning.modules.checkpoint_state import Stateful, load_states, save_states
from rlhf_lightning.modules.controls import Controls
from rlhf_lightning.modules.metrics import Gaps, RunningMeans, ratio_counts, rollout_measures
from rlhf_lightning.modules.non_finite import (
    SkippedSteps,
    finite,
    non_finite_in_rollout,
)
from rlhf_lightning.modules.optimization import (
    Measured,
    TermOfBatch,
    accumulate_gradients,
    clip_and_step,
    of_rows,
    parameter_group,
    with_schedule,
)
from rlhf_lightning.modules.pretrained import Optimizer
from rlhf_lightning.modules.schedules import Schedule
from rlhf_lightning.modules.step_0 import Step0
from rlhf_lightning.modules.trainer_flags import check_trainer
from rlhf_lightning.rollout.collect import RolloutParts, collect_rollout
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Scorer


class PPOModule(L.LightningModule):
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
    reference: PolicyModel

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
        seed: int,
        fingerprint: str = "",
        compute_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.ppo = ppo
        self.sampling = sampling
        self.build_models = models
        self.scorer = scorer
        self.generator = generator
        self.tokenizer = tokenizer
        self.build_optimizer = optimizer
        self.schedule = schedule
        self.noise = RowNoise(seed, "rollout")
        self.order = RowNoise(seed, "minibatches")
        self.fingerprint = fingerprint
        self.compute_dtype = compute_dtype
        self.controls = Controls.from_hparams(ppo, sampling)
        self.gaps = Gaps()
        self.step_0 = Step0()
        self.skipped = SkippedSteps(ppo.max_skipped_steps, "module.ppo.max_skipped_steps")
        self.policy: PolicyModel | None = None
        self.value: ScalarHeadModel | None = None
        self.trained_roots: tuple[nn.Module, ...] = ()
        self.frozen_models: tuple[nn.Module, ...] = ()

    # -- made from names ----------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls,
        policy: str | Path,
        reward: Any,
        *,
        ppo: PPOHparams | None = None,
        sampling: SamplingHparams | None = None,
        value: str | Path | None = None,
        lora: LoraHparams | None = None,
        schedule: Schedule | None = None,
        optimizer: Optimizer | None = None,
        seed: int = 1,
        activation_checkpointing: bool = False,
        revision: str | None = None,
        trust_remote_code: bool = False,
    ) -> Self:
        """Return the module that trains `policy`; models are loaded when a Trainer asks for them.

        Args:
            policy: folder or hub name of the SFT policy, which is the reference too.
            reward: a function `(prompts, completions, **columns) -> list of numbers`, the folder
                or hub name of a reward model, or a scorer.
            ppo: coefficients; the defaults of `PPOHparams`.
            sampling: how rollouts are sampled; the defaults of `SamplingHparams`.
            value: folder or hub name that the value model starts from; by default the reward model
                where it is one with the policy's tokenizer, else the policy with values of 0.
            lora: train adapters on one frozen base instead of whole models.
            schedule: of the learning rates; linear to 0 by default.
            optimizer: parameter groups -> optimizer; AdamW by default.
            seed: of sampling noise, minibatches and new weights.
            activation_checkpointing: compute decoder layers again in the backward pass.
            revision: branch, tag or commit of a hub name.
            trust_remote_code: run the code beside the weights.

        Raises:
            TypeError: if `reward` is none of these.
            ValueError: if tokenizer or settings cannot be used.
        """
        ppo, sampling = ppo or PPOHparams(), sampling or SamplingHparams()
        value = None if value is None else str(value)
        options = {"revision": revision, "trust_remote_code": trust_remote_code}
        built: list[Self] = []
        parts = pretrained.ppo_arguments(
            lambda: built[0],
            str(policy),
            reward,
            value=value,
            lora=lora,
            options=options,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
        ) | pretrained.common_arguments(
            str(policy), optimizer=optimizer, schedule=schedule, revision=revision
        )
        module = cls(ppo=ppo, sampling=sampling, **parts)
        built.append(module)
        pretrained.keep_hyper_parameters(
            module,
            policy=str(policy),
            reward=str(reward) if isinstance(reward, str | Path) else reward,
            ppo=ppo,
            sampling=sampling,
            value=value,
            lora=lora,
            schedule=module.schedule,
            seed=seed,
            activation_checkpointing=activation_checkpointing,
            **options,
        )
        return module

    @classmethod
    def load_from_checkpoint(  # type: ignore[override]
        cls, checkpoint_path: str | Path, reward: Any = None, **changes: Any
    ) -> Self:
        """Return a module with the weights of a checkpoint, on the CPU, in eval mode.

        Args:
            checkpoint_path: a checkpoint of a module that `from_pretrained` built.
            reward: as there; needed where it was a function or a scorer.
            changes: other arguments of `from_pretrained` that are to differ.

        Raises:
            ValueError: if the checkpoint holds no hyper-parameters, or no reward is known.
        """
        checkpoint, given = pretrained.read_checkpoint(checkpoint_path)
        kinds = {"ppo": PPOHparams, "sampling": SamplingHparams}
        given = pretrained.revived(given, kinds) | changes
        if reward is not None:
            given["reward"] = reward
        if given.get("reward") is None:
            raise ValueError(
                f"{checkpoint_path} was trained with a reward that no checkpoint can hold: give "
                "load_from_checkpoint(path, reward=function)"
            )
        return pretrained.restored(cls.from_pretrained(**given), checkpoint)

    # -- models -----------------------------------------------------------------------------

    def configure_model(self) -> None:
        """Build policy, value model, reference and scorer, and shard each if ranks share them."""
        if self.policy is not None:
            return
        models = self.build_models()
        frozen = (*models.frozen, *self.scorer.build(models.base))
        self.policy, self.value, self.trained_roots = models.policy, models.value, models.trained
        self.step_0.same_source = models.same_source
        # Out of the module tree: not in checkpoints, not in parameters(), never in train mode.
        object.__setattr__(self, "reference", models.reference)
        object.__setattr__(self, "frozen_models", frozen)
        release_freed_memory()
        if self.device_mesh is not None:
            place: Any = self.trainer.strategy
            self.compute_dtype = self.compute_dtype or place.compute_dtype
            for model in (*models.trained, *frozen):
                shard(model, place, frozen=model in frozen, compute_dtype=self.compute_dtype)

    def on_fit_start(self) -> None:
        """Refuse flags of the Trainer that would train something else; place frozen models."""
        check_trainer(self.trainer)
        if self.device_mesh is None:
            for model in (*self.trained_roots, *self.frozen_models):
                model.to(self.device)

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
        rollout, seconds = self.collect_rollout(prompts, batch_idx)
        started, steps = time.perf_counter(), RunningMeans()
        self.step_0.check_reference(rollout, self)
        usable = self.skipped.should_continue(non_finite_in_rollout(rollout), rollout, batch_idx)
        for minibatch in self.minibatches(rollout, iteration=batch_idx) if usable else ():
            if not self.update(minibatch, steps, iteration=batch_idx):
                break  # the policy has moved far enough on this rollout
        release_freed_memory()  # the activations
        seconds["update"] = time.perf_counter() - started
        self.finish_iteration(rollout, steps, seconds)
        return {"rollout": rollout.detach(), "ratio_counts": steps.totals.get("ratio_counts")}

    def collect_rollout(
        self, prompts: PromptBatch, iteration: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample, evaluate and score; return the rollout and the seconds of its phases."""
        parts = RolloutParts(
            generator=self.generator,
            policy=self.policy,
            reference=self.reference,
            value_model=self.value,
            scorer=self.scorer,
            tokenizer=self.tokenizer,
            unsharded=unsharded,
            micro_batch_size=self.ppo.micro_batch_size,
        )
        return collect_rollout(
            parts,
            prompts,
            noise=self.noise.at_iteration(iteration),
            temperature=self.controls.temperature,
            max_new_tokens=self.sampling.max_new_tokens,
            shaping=self.controls.shaping(self.ppo),
        )

    def minibatches(self, rollout: RolloutBatch, *, iteration: int) -> Iterator[RolloutBatch]:
        """Yield the rollout `num_ppo_epochs` times, each time cut anew into `num_minibatches`."""
        for epoch in range(self.ppo.num_ppo_epochs):
            keys = self.order.at_iteration(iteration).uniform(rollout.row_ids, epoch)
            yield from rollout.minibatches(self.ppo.num_minibatches, keys=keys)

    def update(self, minibatch: RolloutBatch, steps: RunningMeans, *, iteration: int) -> bool:
        """Take one optimizer step on `minibatch`; return False if approx_kl says to stop.

        A step whose loss or gradient is not finite is skipped. The gradient is that of one loss
        over the whole minibatch of all ranks, whatever the micro-batches: every sum over tokens is
        divided by the global token count.
        """
        num_tokens = global_sum(minibatch.response_mask.sum())
        parts = micro_batches(minibatch.attention_mask, self.ppo.micro_batch_size)
        measured = accumulate_gradients(
            self,
            parts,
            [of_rows(t, minibatch, num_tokens) for t in self.loss_terms(iteration)],
        )
        self.step_0.check_ratio(measured, self)
        target = self.ppo.target_approx_kl
        if target is not None and target < float(measured.get("ppo/approx_kl", 0.0)) < math.inf:
            self.optimizers().zero_grad()
            return False
        norms = clip_and_step(
            self,
            {"ppo/policy_grad_norm": self.policy, "ppo/value_grad_norm": self.value},
            self.ppo.max_grad_norm,
            lambda norms: self.skipped.should_step(measured | norms, minibatch, iteration),
        )
        if norms is not None:
            steps.add(measured | norms)
        return True

    def loss_terms(self, iteration: int) -> list[TermOfBatch]:
        """Return the terms of the loss: each a micro-batch's share of it, with its measures."""
        if iteration < self.ppo.critic_warmup_iterations:
            return [self.value_loss]
        return [self.policy_loss, self.value_loss]

    def policy_loss(self, micro_batch: RolloutBatch, num_tokens: Tensor) -> tuple[Tensor, Measured]:
        """Return the clipped surrogate loss, with its optional entropy and KL terms."""
        mask = micro_batch.response_mask
        new = response_statistics(
            self.policy,
            micro_batch,
            temperature=self.controls.temperature,
            with_entropy=self.ppo.entropy_coef > 0,
        )
        result = ppo_policy_loss(
            new.logprobs,
            micro_batch.logprobs,
            micro_batch.advantages,
            mask,
            cliprange=self.ppo.cliprange,
            cliprange_high=self.ppo.cliprange_high,
            dual_clip=self.ppo.dual_clip,
            num_tokens=num_tokens,
        )
        loss = result.loss
        if new.entropy is not None:
            entropy = zero_off_mask(new.entropy, mask).sum() / num_tokens
            loss = loss - self.ppo.entropy_coef * entropy
        if self.ppo.kl_loss_coef:
            kl = zero_off_mask(kl_k2(new.logprobs, micro_batch.ref_logprobs), mask).sum()
            loss = loss + self.ppo.kl_loss_coef * kl / num_tokens
        log_ratio = new.logprobs - micro_batch.logprobs
        return loss, self.step_0.measures(log_ratio, mask, num_tokens) | {
            "ppo/policy_loss": result.loss,
            "ppo/clipfrac": result.clipfrac,
            "ppo/approx_kl": result.approx_kl,
            "ratio_counts": ratio_counts(log_ratio, mask),
        }

    def value_loss(self, micro_batch: RolloutBatch, num_tokens: Tensor) -> tuple[Tensor, Measured]:
        """Return `vf_coef` times the clipped squared error of the values."""
        result = clipped_value_loss(
            response_values(self.value, micro_batch),
            micro_batch.values,
            micro_batch.returns,
            micro_batch.response_mask,
            cliprange_value=self.ppo.cliprange_value,
            num_tokens=num_tokens,
        )
        measures = {"ppo/value_loss": result.loss, "ppo/value_clipfrac": result.clipfrac}
        return self.ppo.vf_coef * result.loss, measures

    def finish_iteration(
        self, rollout: RolloutBatch, steps: RunningMeans, seconds: Mapping[str, float]
    ) -> None:
        """Log the iteration, then adapt the KL coefficient and the learning rate."""
        measures = finite(rollout_measures(rollout) | steps.means())
        measures["ppo/skipped_steps"] = self.skipped.end_iteration()
        measures |= {"ppo/num_updates": steps.num_steps, "ppo/kl_coef": self.controls.kl_coef}
        measures["ppo/learning_rate"] = self.optimizers().param_groups[0]["lr"]
        measures |= {f"time/{phase}": value for phase, value in seconds.items()}
        tokens = float(global_sum(rollout.response_mask.sum()))
        measures["throughput/tokens_per_second"] = tokens / sum(seconds.values())
        self.log_dict(self.gaps.filled(measures), on_step=True)
        observed_kl = measures.get("rollout/kl_per_response")
        self.controls.adapt_kl_coef(observed_kl, self.ppo, num_episodes=len(rollout) * world_size())
        self.lr_schedulers().step()

    def stateful(self) -> dict[str, Stateful]:
        """Return what changes during a run and is no parameter, by its name in a checkpoint."""
        return {"controls": self.controls, "skipped_steps": self.skipped}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Add the controls and the skipped steps, and the fingerprint of the reference."""
        save_states(checkpoint, self.fingerprint, **self.stateful())

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take them back; ValueError if the reference is another one than was trained with."""
        load_states(checkpoint, self.fingerprint, **self.stateful())
        self.step_0.resumed()
