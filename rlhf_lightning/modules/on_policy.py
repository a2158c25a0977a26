"""The part that PPO and its relatives share: rollout, optimizer steps, bookkeeping.

Read `OnPolicyModule.training_step` first. Legend: B rows of a rank, P padded prompt, R response.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import Any, ClassVar, Self, Unpack

import torch
from torch import Tensor, nn
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.data.datamodules import PromptDataModule
from rlhf_lightning.distributed.collectives import gathered, global_sum, unsharded, world_size
from rlhf_lightning.functional.losses import loss_divisor, policy_kl_loss
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.surrogates import SURROGATES, Surrogate
from rlhf_lightning.hparams import OnPolicyHparams, SamplingHparams
from rlhf_lightning.models.building import place_on_ranks
from rlhf_lightning.models.forward import group_micro_batches, response_statistics
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel, TokenStatistics
from rlhf_lightning.models.ppo_models import PolicyModels
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.base import RLHFModule
from rlhf_lightning.modules.checkpoint_state import Stateful
from rlhf_lightning.modules.checks import check_equal_shares, check_whole_groups
from rlhf_lightning.modules.controls import Controls
from rlhf_lightning.modules.metrics import (
    CLIPPED,
    RunningMeans,
    ratio_counts,
    rollout_metrics,
    sampler_metrics,
    trust_region_metrics,
    trust_region_sums,
    warn_of_clip,
)
from rlhf_lightning.modules.non_finite import finite, non_finite_in_rollout
from rlhf_lightning.modules.optimization import (
    Measured,
    StepCounts,
    Term,
    accumulate_gradients,
    clip_and_step,
)
from rlhf_lightning.modules.options import ModuleParts
from rlhf_lightning.modules.rewards import check_objects, check_reward, score_clip_of
from rlhf_lightning.modules.sampler_logprobs import (
    base_logprobs,
    check_sampler,
    corrected_advantages,
)
from rlhf_lightning.modules.step_0 import Step0
from rlhf_lightning.rollout.collect import RolloutParts, collect_rollout
from rlhf_lightning.rollout.estimators import AdvantageEstimator
from rlhf_lightning.rollout.generators.base import Generator, gathers_layers
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.pending import PendingGeneration
from rlhf_lightning.rollout.scorers.base import Scorer
from rlhf_lightning.rollout.scorers.hparams import is_address
from rlhf_lightning.rollout.teachers import ModelTeacher, Teacher, TeacherPrompt


class OnPolicyModule(RLHFModule):
    """Samples responses of a policy, scores them, and learns from them.

    Args:
        algorithm: coefficients of the algorithm.
        models: builder of policy and reference, and of a value model if there is one.
        default_estimator: estimator of advantages, if no other one is given.
        parts: further parts, see `OnPolicyParts` and `ModuleParts`.

    Attributes:
        whole_groups: whether a minibatch holds all responses to a prompt.
        whole_groups_in_micro_batches: whether a micro-batch does, for a loss that compares them.
        learns_distributions: whether the teacher's whole distributions are learnt.
        controls: values that change during a run; see `Controls`.
        value: the critic; None without one.
        teacher: says how likely it finds the responses; None without one.
        score_clip: that of the hyper-parameters, with "auto" resolved.
    """

    data = PromptDataModule
    batch = PromptBatch
    rolls_out = is_scored = True
    whole_groups: ClassVar[bool] = False
    whole_groups_in_micro_batches: ClassVar[bool | None] = None
    learns_distributions: bool = False
    algorithm: OnPolicyHparams
    policy: PolicyModel  # None before configure_model
    tokenizer: PreTrainedTokenizerBase
    reference: PolicyModel
    value: ScalarHeadModel | None
    teacher: Teacher | None = None
    score_clip: float | None = None
    trained_roots: tuple[nn.Module, ...] = ()
    frozen_models: tuple[nn.Module, ...] = ()

    def __init__(
        self,
        algorithm: OnPolicyHparams,
        models: Callable[[], PolicyModels],
        default_estimator: AdvantageEstimator,
        *,
        sampling: SamplingHparams,
        scorer: Scorer,
        generator: Generator,
        tokenizer: PreTrainedTokenizerBase,
        seed: int,
        surrogate: Surrogate | None = None,
        estimator: AdvantageEstimator | None = None,
        teacher: Teacher | None = None,
        teacher_prompt: TeacherPrompt | None = None,
        **parts: Unpack[ModuleParts],
    ) -> None:
        super().__init__(algorithm, models, **parts)
        self.teacher, self.teacher_prompt = teacher, teacher_prompt
        made = SURROGATES[algorithm.surrogate]
        named = {item.name: getattr(algorithm, item.name) for item in fields(made)}
        self.surrogate: Surrogate = surrogate or made(**named)
        self.estimator = estimator or default_estimator
        self.sampling = sampling
        self.scorer = scorer
        self.generator: Generator = generator
        self.tokenizer = tokenizer
        self.noise = RowNoise(seed, "rollout")
        self.order = RowNoise(seed, "minibatches")
        self.controls = Controls.from_hparams(algorithm, sampling, f"module.{self.stage}")
        self.said_clipped = False
        self.step_0 = Step0()
        self.pending = PendingGeneration()
        self.policy = None
        self.value = None

    # -- an iteration -----------------------------------------------------------------------

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Run one iteration; the callbacks get its rollout, and how many tokens have which ratio.

        1. sample responses, evaluate and score them, estimate advantages
        2. cut the rollout into minibatches, several times
        3. take an optimizer step on each: `loss_terms`, first of all `policy_loss`
        4. log, and adapt the KL coefficient
        """
        rollout, seconds = self.collect_rollout(prompts, batch_idx)
        started, steps = time.perf_counter(), RunningMeans()
        for epoch, minibatch in self.usable_minibatches(rollout, batch_idx):
            if not self.update(minibatch, steps, iteration=batch_idx, epoch=epoch):
                break  # the policy has moved far enough on this rollout
        release_freed_memory()  # the activations
        seconds["update"] = time.perf_counter() - started
        self.finish_iteration(rollout, steps, seconds, batch_idx)
        return {"rollout": rollout.detach(), "ratio_counts": steps.totals.get("ratio_counts")}

    def collect_rollout(
        self, prompts: PromptBatch, iteration: int
    ) -> tuple[RolloutBatch, dict[str, float]]:
        """Sample, evaluate and score; return the rollout and the seconds of its phases.

        With `rollout_lag=1` the responses were sampled in the iteration before, and those of the
        next one, whose prompts are in `prompts` as spares, are begun here: the weights that sample
        for iteration i are those after the update of iteration i - 2. An engine in processes of
        its own writes them while this one scores and trains.

        Raises:
            ValueError: if ranks have another number of prompts, or if there is to be a correction,
                and the generator gives no log-probabilities.
        """
        check_equal_shares(gathered(len(prompts)))
        parts = RolloutParts(
            generator=self.generator,
            policy=self.policy,
            reference=self.reference,
            value_model=self.value,
            scorer=self.scorer,
            tokenizer=self.tokenizer,
            unsharded=partial(unsharded, layers=gathers_layers(self.generator)),
            micro_batch_size=self.algorithm.micro_batch_size,
            skip_special_tokens=self.sampling.skip_special_tokens,
            teacher=self.teacher,
            teacher_states=self.learns_distributions,
        )
        how: dict[str, Any] = {
            "temperature": self.controls.temperature,
            "max_new_tokens": self.sampling.max_new_tokens,
        }
        started, generation = time.perf_counter(), None
        if self.algorithm.rollout_lag:
            is_last = iteration + 1 >= int(self.trainer.estimated_stepping_batches)
            prompts, generation = self.pending.exchange(
                parts, prompts, self.noise, iteration, is_last=is_last, **how
            )
        waited = time.perf_counter() - started
        rollout, seconds = collect_rollout(
            parts,
            prompts,
            noise=self.noise.at_iteration(iteration),
            shaping=self.controls.shaping(self.algorithm, self.estimator, self.score_clip),
            max_resampling_rounds=self.algorithm.num_resampling_rounds,
            generation=generation,
            **how,
        )
        seconds["generate"] += waited
        check_sampler(rollout, self.generator, self.algorithm, self.stage)
        return rollout, seconds

    def usable_minibatches(
        self, rollout: RolloutBatch, iteration: int
    ) -> Iterator[tuple[int, RolloutBatch]]:
        """Yield each pass and its minibatches, of `num_passes` over the rollout, in new orders.

        A rollout that is not finite yields nothing. A minibatch in which no row has a score is
        left out, unless a teacher teaches.
        """
        self.step_0.check_reference(rollout, self)
        problems, num_scored = non_finite_in_rollout(rollout)
        if not self.skipped.should_continue(problems, rollout, iteration):
            return
        # Known without another wait for the device, the same on every rank.
        all_learnt = rollout.taught or num_scored == len(rollout) * world_size()
        order = self.order.at_iteration(iteration)
        whole = self.whole_groups or bool(self.whole_groups_in_micro_batches)
        for epoch in range(self.algorithm.num_passes):
            keys = order.uniform(rollout.row_ids, epoch)
            for minibatch in rollout.minibatches(
                self.algorithm.num_minibatches, keys=keys, whole_groups=whole
            ):
                if all_learnt or global_sum(minibatch.scored.sum()):
                    yield epoch, minibatch

    def update(
        self, minibatch: RolloutBatch, steps: RunningMeans, *, iteration: int, epoch: int
    ) -> bool:
        """Take one optimizer step on `minibatch`; return False if approx_kl exceeds its target.

        A step whose loss or gradient is not finite is skipped. The gradient is that of one loss
        over the whole minibatch of all ranks, whatever the micro-batches: every sum over tokens is
        divided by global counts.

        Args:
            minibatch: this rank's rows.
            steps: collects the metrics of the step; of a minibatch that stops the updates only the
                distance, which would otherwise be seen only where it is small.
            iteration: of the run, from 0.
            epoch: pass over the rollout, from 0.

        Raises:
            ValueError: if there is a `target_approx_kl`, and the policy's loss does not measure it.
        """
        models, terms = self.models_by_norm(), self.loss_terms(iteration, epoch)
        sizes = torch.stack([minibatch.loss_mask.sum(), minibatch.loss_mask.any(-1).sum()])
        counts = StepCounts(*global_sum(sizes))
        parts = self.micro_batches(minibatch)
        measured = accumulate_gradients(
            self, minibatch, parts, terms, counts, list(models.values())
        )
        # A sampler may differ from the policy by more than its range before any update.
        is_old = self.algorithm.ratio_base == "old"
        cliprange = getattr(self.surrogate, "cliprange", math.inf) if is_old else 0.0
        self.step_0.check_ratio(measured, self, cliprange)
        if self.policy_loss in terms and self._is_too_far(measured):  # else the critic warms up
            self.optimizers().zero_grad()
            distance = (f"{self.stage}/{name}" for name in ("approx_kl", "clipfrac"))
            found = {name: measured[name] for name in distance if name in measured}
            steps.add(found, took_step=False)
            return False
        norms = clip_and_step(
            self,
            models,
            self.algorithm.max_grad_norm,
            lambda norms: self.skipped.should_step(measured | norms, minibatch, iteration),
        )
        if norms is not None:
            steps.add(measured | norms)
        return True

    def micro_batches(self, minibatch: RolloutBatch) -> list[Tensor]:
        """Return the rows of each micro-batch, of whole groups where the class asks for them.

        Raises:
            ValueError: if a class with a loss of its own does not say whether it does.
        """
        check_whole_groups(type(self), minibatch.group_size)
        size = minibatch.group_size if self.whole_groups_in_micro_batches else 1
        rows = self.algorithm.micro_batch_size
        return group_micro_batches(minibatch.attention_mask, size, rows)

    def _is_too_far(self, measured: Measured) -> bool:
        name, target = f"{self.stage}/approx_kl", self.algorithm.target_approx_kl
        if target is None:
            return False
        if name not in measured:
            raise ValueError(
                f"{type(self.algorithm).__name__}.target_approx_kl={target:g} bounds {name}, and "
                f"{self.policy_loss.__qualname__} returns only {sorted(measured)}: add {name} to "
                "its metrics, or set target_approx_kl=None"
            )
        return target < float(measured[name]) < math.inf

    def models_by_norm(self) -> dict[str, nn.Module]:
        """Return the models that are trained, by the names of their gradient norms."""
        return {f"{self.stage}/grad_norm": self.policy}

    def loss_terms(self, iteration: int, epoch: int) -> list[Term]:
        """Return the terms of the loss: each gives a micro-batch's share of it, and its metrics."""
        return [self.policy_loss]

    def statistics(self, micro_batch: RolloutBatch) -> TokenStatistics:
        """Return what the policy says of a micro-batch's responses, with a gradient."""
        return response_statistics(
            self.policy,
            micro_batch,
            temperature=self.controls.temperature,
            with_entropy=self.algorithm.entropy_coef > 0,
        )

    def policy_loss(self, micro_batch: RolloutBatch, counts: StepCounts) -> tuple[Tensor, Measured]:
        """Return a micro-batch's share of the surrogate loss, with its entropy and KL terms."""
        algorithm, mask = self.algorithm, micro_batch.loss_mask
        base = base_logprobs(micro_batch, algorithm)
        new = self.statistics(micro_batch)
        divisor = loss_divisor(
            mask,
            reduction=algorithm.loss_reduction,  # type: ignore[arg-type]
            num_tokens=counts.num_tokens,
            num_sequences=counts.num_sequences,
            max_length=self.sampling.max_new_tokens,
        )
        advantages = corrected_advantages(micro_batch, algorithm)
        result = self.surrogate(new.logprobs, base, advantages, mask, num_tokens=divisor)
        loss = result.loss
        if new.entropy is not None:
            entropy = (zero_off_mask(new.entropy, mask) / divisor).sum()
            loss = loss - algorithm.entropy_coef * entropy
        if algorithm.kl_in == "loss" and self.controls.kl_coef:
            kl = policy_kl_loss(
                new.logprobs,
                micro_batch.ref_logprobs,
                mask,
                estimator=algorithm.kl_estimator,  # type: ignore[arg-type]
                num_tokens=divisor,
            )
            loss = loss + self.controls.kl_coef * kl
        log_ratio, since_rollout = new.logprobs - base, new.logprobs - micro_batch.logprobs
        # Per token, where a constant length takes the place of the tokens.
        constant = algorithm.loss_reduction == "constant"
        scale = divisor / counts.num_tokens if constant else 1.0
        taught: Measured = {}
        if new.divergence is not None:
            divergence = (zero_off_mask(new.divergence, mask) / divisor).sum()
            loss = loss + algorithm.teacher_coef * divergence
            taught = {f"{self.stage}/divergence": divergence * scale}
        return loss, taught | self.step_0.measures(since_rollout, mask, counts.num_tokens) | {
            f"{self.stage}/policy_loss": result.loss,
            f"{self.stage}/clipfrac": result.clipfrac * scale,
            f"{self.stage}/approx_kl": result.approx_kl * scale,
            "ratio_counts": ratio_counts(log_ratio, mask),
            **trust_region_sums(self.surrogate, new.logprobs, base, mask),
        }

    def finish_iteration(
        self,
        rollout: RolloutBatch,
        steps: RunningMeans,
        seconds: Mapping[str, float],
        iteration: int,
    ) -> None:
        """Log the iteration, counted from 0; adapt the KL coefficient and the learning rate."""
        sampled = rollout_metrics(rollout, self.stage, score_clip=self.score_clip)
        tokens = float(global_sum(rollout.response_mask.sum()))
        sampled |= sampler_metrics(rollout, self.algorithm, tokens)
        if self.score_clip and sampled.get(CLIPPED) and not self.said_clipped:
            key, share = f"module.{self.stage}.score_clip", sampled[CLIPPED]
            self.said_clipped = warn_of_clip(rollout, self.score_clip, key, share, iteration)
        sampled |= trust_region_metrics(steps.totals, self.stage)
        measures: dict[str, Any] = finite(sampled | steps.means()) | {
            f"{self.stage}/skipped_steps": self.skipped.end_iteration(),
            f"{self.stage}/num_updates": steps.num_steps,
            f"{self.stage}/kl_coef": self.controls.kl_coef,
            f"{self.stage}/learning_rate": self.optimizers().param_groups[0]["lr"],
            **{f"time/{phase}": value for phase, value in seconds.items()},
            "throughput/tokens_per_second": tokens / sum(seconds.values()),
        }
        self.log_dict(self.logged_names.with_nans(measures), on_step=True)
        self.controls.adapt_kl_coef(
            measures.get("rollout/kl_per_response"),
            self.algorithm,
            num_episodes=len(rollout) * world_size(),
        )
        self.lr_schedulers().step()

    # -- models, Trainer, checkpoints -------------------------------------------------------

    def on_fit_start(self) -> None:
        """Check the Trainer and the data, and that a teacher can be asked about them.

        Raises:
            ValueError: also if a teacher's prompt is made of prompts that the policy sees cut.
        """
        super().on_fit_start()
        if self.teacher is None:
            return
        data: Any = getattr(self.trainer, "datamodule", None)
        rows: list[Any] = []
        if isinstance(data, PromptDataModule):
            rows = [row for split in ("train", "validation") for row in data.rows(split)]
            if self.teacher.prompt is not None and data.over_long == "truncate_left":
                raise ValueError(
                    "teacher_prompt is made of whole prompts, and over_long=truncate_left cuts "
                    "those of the policy: use over_long=drop"
                )
        columns = (row.columns for row in rows)
        self.teacher.check(columns, temperature=self.controls.temperature)

    def take(self, built: PolicyModels) -> None:
        """Take the models, and those of the scorer; shard each if ranks share them.

        Frozen models stay out of the module tree: not in checkpoints, not in `parameters()`, never
        in train mode.
        """
        frozen = (*built.frozen, *self.scorer.build(built.base))
        self.score_clip = score_clip_of(self.algorithm.score_clip, self.scorer)
        self.policy, self.trained_roots = built.policy, built.trained
        self.step_0.same_source = built.same_source
        object.__setattr__(self, "reference", built.reference)
        if built.teacher is not None:
            self.teacher = ModelTeacher(built.teacher, self.teacher_prompt)
        object.__setattr__(self, "frozen_models", frozen)
        for model in built.trained:
            place_on_ranks(model)
        for model in frozen:
            place_on_ranks(model, frozen=True)

    @property
    def roots(self) -> Sequence[nn.Module]:
        """Models that the module itself moves to the device."""
        return [*self.trained_roots, *self.frozen_models]

    @property
    def num_steps(self) -> int:
        """Optimizer steps of an iteration, at most."""
        return self.algorithm.num_passes * self.algorithm.num_minibatches

    @property
    def learning_rate_factor(self) -> float:
        """Factor on the learning rates of the schedule."""
        return self.controls.learning_rate_factor

    def stateful(self) -> dict[str, Stateful]:
        """Return what changes during a run and is no parameter, by its name in a checkpoint."""
        found: dict[str, Stateful] = {"controls": self.controls, **super().stateful()}
        return found | ({"pending": self.pending} if self.algorithm.rollout_lag else {})

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Take the state back; the ratio of the next step need not be 1."""
        super().on_load_checkpoint(checkpoint)
        self.step_0.resumed()

    # -- read from checkpoints --------------------------------------------------------------------

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
        changes |= {} if reward is None else {"reward": reward}
        return cls._restored(checkpoint_path, changes)

    @classmethod
    def check_kept(
        cls, path: PathOrName, given: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> None:
        """Check that a reward is known, and that no checkpoint names code or a server."""
        teacher = given.get("teacher")
        if is_address(teacher) and "teacher" not in changes:
            raise ValueError(
                f"{path} was trained with the teacher {teacher}, and no checkpoint sends anything "
                "to a server: give load_from_checkpoint(path, teacher=...)"
            )
        check_reward(path, given.get("reward"), is_given="reward" in changes)
        check_objects(path, {key: given.get(key) for key in ("surrogate", "estimator")})
