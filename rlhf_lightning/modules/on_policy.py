"""The loop of PPO and its relatives, in one file and in the order in which it happens.

A rollout: 1 sample responses, 2 score them, 3 log-probabilities and values by the training forward,
4 KL and rewards, 5 advantages. Its optimizer steps: 6 minibatches, 7 the loss of micro-batches,
8 clip and step. At the end 9 metrics, KL controller, learning rate.

Four parts are objects of their own: the generator (1), the scorer (2), the estimator of advantages
(5) and the surrogate, the loss (7). What PPO, the group methods and distillation differ in stands
in `modules.ppo`, `modules.grpo` and `modules.distillation`.

Legend: B rows of a rank, P padded prompt, R response, H hidden size.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from rlhf_lightning.batches import PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import (
    agreed_max,
    clip_grad_norm,
    gathered,
    global_sum,
    unsharded,
    world_size,
)
from rlhf_lightning.functional.distillation import distillation_advantages
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.losses import PolicyLoss, loss_divisor, policy_kl_loss
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.rewards import adjust_scores, overlong_penalty, shape_rewards
from rlhf_lightning.models.forward import (
    by_micro_batch,
    group_micro_batches,
    response_statistics,
    response_values,
)
from rlhf_lightning.models.heads import Teaching, TokenStatistics
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.modules.checks import (
    check_ready,
    check_result,
    check_sampler,
    check_whole_groups,
    estimate,
    exceeds_target_kl,
    score,
)
from rlhf_lightning.modules.metrics import (
    PhaseSeconds,
    RunningMeans,
    novelty,
    ratio_counts,
    rollout_metrics,
    sampler_metrics,
    trust_region_metrics,
    trust_region_sums,
)
from rlhf_lightning.modules.non_finite import finite, non_finite_in_rollout
from rlhf_lightning.modules.optimization import (
    Measured,
    StepCounts,
    Term,
    accumulate_gradients,
)
from rlhf_lightning.modules.policy import PolicyModule
from rlhf_lightning.rollout.estimators import corrected_advantages
from rlhf_lightning.rollout.generators.base import gathers_layers
from rlhf_lightning.rollout.resampling import resampled
from rlhf_lightning.rollout.scorers.base import Responses, Scores


class ResponseFigures(NamedTuple):
    """Figures of the models about responses, `[B, R]`, 0 off the mask; see `RolloutBatch`."""

    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    teacher_logprobs: Tensor | None = None
    teacher_states: Tensor | None = None  # [B, R, H]


class OnPolicyModule(PolicyModule):
    """Samples responses of a policy, scores them, and learns from them.

    See `PolicyModule` for its parts.
    """

    def training_step(self, prompts: PromptBatch, batch_idx: int) -> dict[str, Any]:
        """Run one iteration; the callbacks get its rollout, and how many tokens have which ratio.

        1 to 5. sample responses, score and evaluate them, estimate advantages
        6. cut the rollout into minibatches, `num_passes` times
        7, 8. take an optimizer step on each: `loss_terms`, first of all `policy_loss`
        9. log, and adapt the KL coefficient
        """
        rollout, seconds = self.collect_rollout(prompts, batch_idx)
        steps = RunningMeans()
        with seconds.of("update"):
            self.step_0.check_reference(rollout, self)
            problems, num_scored = non_finite_in_rollout(rollout)
            is_usable = self.skipped.should_continue(problems, rollout, batch_idx)
            # Known without another wait for the device, the same on every rank.
            all_learnt = rollout.taught or num_scored == len(rollout) * world_size()
            order = self.order.at_iteration(batch_idx)
            # 6. Each pass over the rollout deals its rows in a new order.
            minibatches = (
                (epoch, minibatch)
                for epoch in range(self.algorithm.num_passes if is_usable else 0)
                for minibatch in rollout.minibatches(
                    self.algorithm.num_minibatches,
                    keys=order.uniform(rollout.row_ids, epoch),
                    whole_groups=self.whole_groups or bool(self.whole_groups_in_micro_batches),
                )
            )
            for epoch, minibatch in minibatches:
                if not (all_learnt or global_sum(minibatch.scored.sum())):
                    continue  # nothing to learn from: no row has a score, and no teacher teaches
                if not self.update(minibatch, steps, iteration=batch_idx, epoch=epoch):
                    break  # the policy has moved far enough on this rollout
            release_freed_memory()  # the activations
        self.finish_iteration(rollout, steps, seconds, batch_idx)
        return {"rollout": rollout.detach(), "ratio_counts": steps.totals.get("ratio_counts")}

    # -- the rollout ------------------------------------------------------------------------

    @torch.no_grad()
    def collect_rollout(
        self, prompts: PromptBatch, iteration: int
    ) -> tuple[RolloutBatch, PhaseSeconds]:
        """Sample, score and evaluate responses; return the rollout and the seconds of its phases.

        With `rollout_lag=1` the responses were sampled in the iteration before, and those of the
        next one, whose prompts are in `prompts` as spares, are begun here: the weights that sample
        for iteration i are those after the update of iteration i - 2.

        Args:
            prompts: `[B, P]`, with spare ones where there is resampling or a lag.
            iteration: of the run, from 0; the sampling noise is a function of it.

        Raises:
            RuntimeError: if `configure_model` was not called.
            ValueError: if ranks have another number of prompts, a weighted domain has none, scores
                are of another shape, or there is to be a correction, and the generator gives no
                log-probabilities.
        """
        check_ready(self, gathered(len(prompts)))
        seconds = PhaseSeconds(generate=0.0, score=0.0)

        def sample(prompts: PromptBatch, iteration: int, generator: Any) -> Any:
            with self._unsharded(self.policy.root), self.policy.generating() as model:
                sampled = generator(
                    model,
                    prompts,
                    noise=self.noise.at_iteration(iteration),
                    temperature=self.controls.temperature,
                    max_new_tokens=self.sampling.max_new_tokens,
                )
            release_freed_memory()  # the engine's copies of the weights: other sizes follow
            return sampled

        def sample_and_score(prompts: PromptBatch) -> tuple[Responses, Scores]:
            # 1. Sample a response to each prompt, from the policy as it is now.
            with seconds.of("generate"):
                if self.algorithm.rollout_lag:
                    is_last = iteration + 1 >= int(self.trainer.estimated_stepping_batches)
                    prompts, drawn = self.pending.exchange(
                        prompts, iteration, sample, self.generator, is_last=is_last
                    )
                else:
                    drawn = sample(prompts, iteration, self.generator)
            # 2. Score it.
            with seconds.of("score"):
                skip = self.sampling.skip_special_tokens
                responses = Responses.of(prompts, drawn, self.tokenizer, skip_special_tokens=skip)
                return responses, score(self.scorer, responses)

        spares: dict[str, Any] = {}
        if rounds := self.algorithm.num_resampling_rounds:
            responses, scores, used = resampled(
                sample_and_score, prompts, max_rounds=rounds, score_clip=self.score_clip
            )
            spares = {"resampled": responses.prompts.spare, "resampling_rounds": used}
        else:
            responses, scores = sample_and_score(prompts)
        with seconds.of("score"):
            # 3. Log-probabilities and values, by the training forward. 4. Rewards. 5. Advantages.
            found = self.evaluate_responses(responses)
            rollout = self.assemble_rollout(responses, scores, found, **spares)
            check_sampler(self, rollout)
        return rollout, seconds

    def _unsharded(self, model: nn.Module) -> AbstractContextManager[Any]:
        """Gather a sharded model: to generate, and once for all its micro-batches."""
        return unsharded(model, layers=gathers_layers(self.generator))

    def evaluate_responses(self, responses: Responses) -> ResponseFigures:
        """3. Return what policy, reference, value model and teacher find in the responses."""
        temperature, value = self.controls.temperature, self.value
        micro_batch_size = self.algorithm.micro_batch_size
        # On a CPU as the updates compute, whose bits these are to have.
        beside = (self.policy, value) if value is not None and world_size() == 1 else ()

        def forward(function: Callable[[Any], tuple[Tensor | None, ...]]) -> Any:
            return by_micro_batch(
                lambda rows: function(responses.rows(rows)),
                responses.attention_mask,
                micro_batch_size,
                agree=agreed_max,
                models=beside,
            )

        statistics = partial(response_statistics, temperature=temperature)
        with self._unsharded(self.policy.root):  # there is room: it was gathered to generate
            policy = TokenStatistics(*forward(partial(statistics, self.policy)))
        with self._unsharded(self.reference.root):
            of_reference = partial(statistics, self.reference, with_entropy=False)
            reference = TokenStatistics(*forward(of_reference))
        taught: tuple[Tensor | None, ...] = ()
        if self.teacher is not None:
            taught = self.teacher(
                responses,
                temperature=temperature,
                micro_batch_size=micro_batch_size,
                with_states=self.learns_distributions,
                unsharded=self._unsharded,
            )
        values = None
        if value is not None:
            (values,) = forward(lambda rows: (response_values(value, rows),))
        release_freed_memory()  # the activations
        return ResponseFigures(policy.logprobs, policy.entropy, reference.logprobs, values, *taught)

    def assemble_rollout(
        self, responses: Responses, scores: Scores, found: ResponseFigures, **spares: Any
    ) -> RolloutBatch:
        """Return the rollout: 4. rewards of tokens from scores and KL, and 5. their advantages.

        Args:
            responses: prompts with responses.
            scores: their scores, `[B]`; `applies` is False on rows without one.
            found: see `evaluate_responses`.
            spares: fields of the rollout where spare prompts were asked.
        """
        prompts, mask, algorithm = responses.prompts, responses.response_mask, self.algorithm
        scored = torch.ones_like(mask[:, 0]) if scores.applies is None else scores.applies
        learnt = mask & scored.unsqueeze(-1)  # [B, R]
        by_domain = [self.controls.domain_weights.get(name, 1.0) for name in prompts.domains]
        weights = torch.tensor(by_domain, device=mask.device)  # [B], float for whole scores too
        # 4. KL (k1) on every token, the score on the last one; a weight above 1 widens its clip.
        factors = torch.ones_like(weights) if self.estimator.scale_free else weights
        worth = scores.total * factors
        if bonus := self.controls.diversity_bonus:
            worth = worth + bonus * worth.new_tensor(novelty(responses))
        clip = None if self.score_clip is None else self.score_clip * factors.abs().clamp(min=1)
        penalty = algorithm.missing_eos_penalty
        worth = adjust_scores(worth, responses.finished, clip=clip, missing_eos_penalty=penalty)
        if (buffer := algorithm.overlong_buffer) is not None:
            longest = self.sampling.max_new_tokens
            worth = worth + overlong_penalty(mask.sum(-1), max_length=longest, buffer=buffer)
        kl = kl_k1(found.logprobs, found.ref_logprobs)  # [B, R]
        kl_coef = self.controls.kl_coef if algorithm.kl_in == "reward" else 0.0
        rewards = shape_rewards(worth, kl, learnt, kl_coef=kl_coef)
        # 5. Advantages, and targets of a value model; a row without a score is in no group.
        groups = prompts.group_ids.where(scored, -1 - torch.arange(len(mask), device=mask.device))
        advantages, returns = estimate(self.estimator, rewards, found.values, learnt, groups)
        if self.estimator.scale_free:
            advantages = advantages * weights.unsqueeze(-1)
        theirs, coef = found.teacher_logprobs, algorithm.teacher_coef
        if taught := (theirs is not None and coef != 0):  # about rows without a score, too
            advantages = zero_off_mask(advantages, learnt)
        if taught and found.teacher_states is None:  # else its distributions are the loss
            advantages = distillation_advantages(
                found.logprobs, theirs, mask, teacher_coef=coef, advantages=advantages
            )
        return RolloutBatch.of(
            prompts,
            responses.generation,
            attention_mask=responses.attention_mask,
            **found._asdict(),
            **spares,
            scores=scores.total,
            score_components=dict(scores.components),
            scored=scored,
            rewards=rewards,
            advantages=advantages,
            returns=returns,
            has_reward=getattr(self.scorer, "is_reward", True),
            taught=taught,
        )

    # -- the optimizer steps ----------------------------------------------------------------

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
            ValueError: if there is a `target_approx_kl`, and the policy's loss does not measure it;
                if a class with a loss of its own does not say whether it compares responses.
        """
        # 7. The loss of the minibatch, over micro-batches and ranks; its gradients.
        algorithm, models = self.algorithm, self.models_by_norm()
        terms = self.loss_terms(iteration, epoch)
        learnt, rewarded = minibatch.loss_mask, minibatch.reward_mask
        sizes = torch.stack([learnt.sum(), learnt.any(-1).sum(), rewarded.sum()])
        counts = StepCounts(*global_sum(sizes))
        check_whole_groups(type(self), minibatch.group_size)
        together = minibatch.group_size if self.whole_groups_in_micro_batches else 1
        parts = group_micro_batches(minibatch.attention_mask, together, algorithm.micro_batch_size)
        measured = accumulate_gradients(
            self, minibatch, parts, terms, counts, list(models.values())
        )
        # A sampler may differ from the policy by more than its range before any update.
        is_old = algorithm.ratio_base == "old"
        cliprange = getattr(self.surrogate, "cliprange", math.inf) if is_old else 0.0
        self.step_0.check_ratio(measured, self, cliprange)
        # Without the policy's loss the critic warms up.
        if self.policy_loss in terms and exceeds_target_kl(self, measured):
            self.optimizers().zero_grad()
            distance = (f"{self.stage}/{name}" for name in ("approx_kl", "clipfrac"))
            found = {name: measured[name] for name in distance if name in measured}
            steps.add(found, took_step=False)
            return False
        # 8. Clip the gradient of each model by itself, and step if everything is finite.
        norms = {
            name: clip_grad_norm(model.parameters(), algorithm.max_grad_norm)
            for name, model in models.items()
            if any(parameter.grad is not None for parameter in model.parameters())
        }
        if self.skipped.should_step(measured | norms, minibatch, iteration):
            self.optimizers().step()
            steps.add(measured | norms)
        self.optimizers().zero_grad()
        return True

    def models_by_norm(self) -> dict[str, nn.Module]:
        """Return the models that are trained, by the names of their gradient norms."""
        return {f"{self.stage}/grad_norm": self.policy}

    def loss_terms(self, iteration: int, epoch: int) -> list[Term]:
        """Return the terms of the loss: each gives a micro-batch's share of it, and its metrics."""
        return [self.policy_loss]

    def teaching(self, micro_batch: RolloutBatch) -> Teaching | None:
        """Return the teacher whose whole distributions are learnt; by default there is none."""
        return None

    def policy_loss(self, micro_batch: RolloutBatch, counts: StepCounts) -> tuple[Tensor, Measured]:
        """Return a micro-batch's share of the surrogate loss, with its entropy and KL terms."""
        algorithm, mask = self.algorithm, micro_batch.loss_mask
        sampler = algorithm.ratio_base == "sampler"
        base: Any = micro_batch.sampler_logprobs if sampler else micro_batch.logprobs
        new = response_statistics(
            self.policy,
            micro_batch,
            temperature=self.controls.temperature,
            with_entropy=algorithm.entropy_coef > 0,
            teaching=self.teaching(micro_batch),
        )
        divisor = loss_divisor(
            mask,
            reduction=algorithm.loss_reduction,  # type: ignore[arg-type]
            num_tokens=counts.num_tokens,
            num_sequences=counts.num_sequences,
            max_length=self.sampling.max_new_tokens,
        )
        advantages = corrected_advantages(micro_batch, algorithm)
        result = self.surrogate(new.logprobs, base, advantages, mask, num_tokens=divisor)
        check_result(self.surrogate, result, PolicyLoss)
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

    # -- the end of the iteration -----------------------------------------------------------

    def finish_iteration(
        self,
        rollout: RolloutBatch,
        steps: RunningMeans,
        seconds: PhaseSeconds,
        iteration: int,
    ) -> None:
        """9. Log the iteration, counted from 0; adapt the KL coefficient and the learning rate."""
        sampled = rollout_metrics(rollout, self.stage, score_clip=self.score_clip)
        tokens = float(global_sum(rollout.response_mask.sum()))
        sampled |= sampler_metrics(rollout, self.algorithm, tokens)
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
