"""The parts that PPO and its relatives share: rollout, optimizer steps, bookkeeping.

Each function is given the LightningModule, which holds policy, reference, scorer, generator,
`algorithm` (an `OnPolicyHparams`), `controls` and the state of a run; `stage` is the first part of
the names of its metrics.

Legend: B rows of a rank, R response.
"""

from __future__ import annotations

import logging
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_lightning.batches import Generation, PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import gathered, global_sum, rank, unsharded, world_size
from rlhf_lightning.functional.losses import POLICY_LOSSES, loss_divisor, policy_kl_loss
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.off_policy import masked_weights, truncated_weights
from rlhf_lightning.hparams import OnPolicyHparams, SamplingHparams, UnusualHparamWarning
from rlhf_lightning.models.building import completed
from rlhf_lightning.models.forward import micro_batches, response_statistics
from rlhf_lightning.models.ppo_models import PolicyModels
from rlhf_lightning.modules.controls import Controls
from rlhf_lightning.modules.metrics import (
    CLIPPED,
    Gaps,
    RunningMeans,
    ratio_counts,
    rollout_measures,
    sampler_measures,
)
from rlhf_lightning.modules.non_finite import SkippedSteps, finite, non_finite_in_rollout
from rlhf_lightning.modules.optimization import (
    Measured,
    StepCounts,
    TermOfBatch,
    accumulate_gradients,
    clip_and_step,
    of_rows,
)
from rlhf_lightning.modules.step_0 import Step0
from rlhf_lightning.rollout.collect import (
    RolloutParts,
    begin_responses,
    collect_rollout,
    sample_responses,
)
from rlhf_lightning.rollout.estimators import AdvantageEstimator
from rlhf_lightning.rollout.generators.base import gathers_layers
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.pending import PendingGeneration

logger = logging.getLogger(__name__)
MANY_CLIPPED = 0.25  # share of the first scores; the doctor's `clipped_warn` too
CLIP_OF_NORMALIZED = 5.0  # standard deviations of the score


def begin(module: Any, algorithm: OnPolicyHparams, sampling: SamplingHparams, seed: int) -> None:
    """Give a module the state of a run that has not begun.

    Raises:
        ValueError: if the surrogate is unknown.
    """
    if algorithm.surrogate not in POLICY_LOSSES:
        raise ValueError(
            f"{type(algorithm).__name__}.surrogate={algorithm.surrogate!r}: use "
            f"{', '.join(POLICY_LOSSES)}"
        )
    key = f"module.{module.stage}"
    module.automatic_optimization = False
    module.algorithm = algorithm
    module.sampling = sampling
    module.noise = RowNoise(seed, "rollout")
    module.order = RowNoise(seed, "minibatches")
    module.controls = Controls.from_hparams(algorithm, sampling, key)
    module.gaps = Gaps()
    module.said_clipped = False
    module.step_0 = Step0()
    module.pending = PendingGeneration()
    module.skipped = SkippedSteps(algorithm.max_skipped_steps, f"{key}.max_skipped_steps")
    module.policy = None
    module.trained_roots = ()
    module.frozen_models = ()


def place_models(module: Any, models: PolicyModels) -> None:
    """Give a module its models and those of its scorer; shard each if ranks share them.

    Frozen models stay out of the module tree: not in checkpoints, not in `parameters()`, never in
    train mode.
    """
    frozen = (*models.frozen, *module.scorer.build(models.base))
    if module.algorithm.score_clip == "auto":
        # A model that is loaded may say that it is normalized.
        clip = CLIP_OF_NORMALIZED if getattr(module.scorer, "normalized", False) else None
        with warnings.catch_warnings():  # said when it was made
            warnings.simplefilter("ignore", UnusualHparamWarning)
            module.algorithm = replace(module.algorithm, score_clip=clip)
    module.policy, module.trained_roots = models.policy, models.trained
    module.step_0.same_source = models.same_source
    object.__setattr__(module, "reference", models.reference)
    object.__setattr__(module, "frozen_models", frozen)
    for model in models.trained:
        completed(model)
    for model in frozen:
        completed(model, frozen=True)


def sample_rollout(
    module: Any,
    prompts: PromptBatch,
    iteration: int,
    estimator: AdvantageEstimator,
    value_model: Any = None,
    *,
    max_resampling_rounds: int = 0,
) -> tuple[RolloutBatch, dict[str, float]]:
    """Sample, evaluate and score; return the rollout and the seconds of its phases.

    With `rollout_lag=1` the responses were sampled in the iteration before, and those of the next
    one, whose prompts stand in `prompts` as spares, are begun here: the weights that sample for
    iteration i are those after the update of iteration i - 2. An engine in processes of its own
    writes them while this one scores and trains.

    Raises:
        ValueError: if ranks have another number of prompts, or if there is to be a correction, and
            the generator gives no log-probabilities.
    """
    if len(set(rows := gathered(len(prompts)))) > 1:
        raise ValueError(
            f"the ranks were given {', '.join(map(str, rows))} prompts: give each as many as the "
            "others, as a PromptDataModule does"
        )
    parts = RolloutParts(
        generator=module.generator,
        policy=module.policy,
        reference=module.reference,
        value_model=value_model,
        scorer=module.scorer,
        tokenizer=module.tokenizer,
        unsharded=partial(unsharded, layers=gathers_layers(module.generator)),
        micro_batch_size=module.algorithm.micro_batch_size,
        skip_special_tokens=module.sampling.skip_special_tokens,
    )
    common: dict[str, Any] = {
        "temperature": module.controls.temperature,
        "max_new_tokens": module.sampling.max_new_tokens,
    }
    started, generation = time.perf_counter(), None
    if module.algorithm.rollout_lag:
        prompts, generation = _lagged_responses(module, parts, prompts, iteration, common)
    waited = time.perf_counter() - started
    rollout, seconds = collect_rollout(
        parts,
        prompts,
        noise=module.noise.at_iteration(iteration),
        shaping=module.controls.shaping(module.algorithm, estimator),
        max_resampling_rounds=max_resampling_rounds,
        generation=generation,
        **common,
    )
    seconds["generate"] += waited
    _check_sampler(module, rollout)
    return rollout, seconds


def _check_sampler(module: Any, rollout: RolloutBatch) -> None:
    """Check that a correction has the log-probabilities that it weighs tokens by.

    Raises:
        RuntimeError: if some are not finite where the policy's are.
        ValueError: if there are none.
    """
    correction, sampler = module.algorithm.off_policy, rollout.sampler_logprobs
    if correction == "none":
        return
    setting = f"module.{module.stage}.off_policy={correction}"
    if sampler is None:
        raise ValueError(
            f"{setting} needs the log-probabilities of the sampler, and "
            f"{type(module.generator).__name__} gives none: use rollout=cached, or off_policy=none"
        )
    wrong = rollout.response_mask & ~sampler.isfinite() & rollout.logprobs.isfinite()
    if count := int(global_sum(wrong.sum())):
        name = getattr(module.generator, "name", type(module.generator).__name__)
        raise RuntimeError(
            f"{count} log-probabilities of {name} are not finite, and {setting} weighs tokens by "
            "them: mend the sampler, or use off_policy=none"
        )


def _lagged_responses(
    module: Any, parts: RolloutParts, prompts: PromptBatch, iteration: int, common: dict[str, Any]
) -> tuple[PromptBatch, Generation]:
    """Return prompts and responses of the iteration; begin with the responses of the next one."""
    own, following = _lagged(prompts)
    generation = _sampled_before(module, own, iteration)
    if generation is None:
        noise = module.noise.at_iteration(iteration)
        generation = sample_responses(parts, own, noise=noise, **common)
    if iteration + 1 < int(module.trainer.estimated_stepping_batches):
        noise = module.noise.at_iteration(iteration + 1)
        begun = begin_responses(parts, following, noise=noise, **common)
        module.pending.put(iteration + 1, following, begun)
    return own, generation


def _lagged(prompts: PromptBatch) -> tuple[PromptBatch, PromptBatch]:
    """Return the prompts of the iteration, and those of the next one.

    Raises:
        ValueError: if there are not as many of the one as of the other.
    """
    own, following = prompts[~prompts.spare], prompts[prompts.spare]
    if len(own) != len(following):
        raise ValueError(
            f"rollout_lag=1 needs the prompts of the next iteration as spare rows, and the batch "
            f"has {len(following)} spare of {len(prompts)} rows: give the Trainer a "
            "PromptDataModule, which adds them, by trainer.fit(module, datamodule=...), or use "
            "rollout_lag=0"
        )
    return own, following


def _sampled_before(module: Any, prompts: PromptBatch, iteration: int) -> Generation | None:
    """Return the responses of the iteration; None for the first, which has none before it.

    Raises:
        RuntimeError: if those of a later iteration are missing.
    """
    found: Generation | None = module.pending.take(iteration, prompts)
    if found is None and iteration > 0:
        raise RuntimeError(
            f"the responses of iteration {iteration + 1} were not sampled in the one before, and "
            "rollout_lag=1 trains on no others: start anew with resume=never"
        )
    return found


def usable_minibatches(
    module: Any, rollout: RolloutBatch, iteration: int, *, whole_groups: bool = False
) -> Iterator[RolloutBatch]:
    """Yield the rollout `num_passes` times, each time cut anew into `num_minibatches`.

    A rollout that is not finite yields nothing. A minibatch in which no row has a score is left
    out.
    """
    module.step_0.check_reference(rollout, module)
    problems, num_scored = non_finite_in_rollout(rollout)
    if not module.skipped.should_continue(problems, rollout, iteration):
        return
    # Known without another wait for the device, the same on every rank.
    all_scored = num_scored == len(rollout) * world_size()
    order = module.order.at_iteration(iteration)
    for epoch in range(module.algorithm.num_passes):
        keys = order.uniform(rollout.row_ids, epoch)
        for minibatch in rollout.minibatches(
            module.algorithm.num_minibatches, keys=keys, whole_groups=whole_groups
        ):
            if all_scored or global_sum(minibatch.scored.sum()):
                yield minibatch


def take_step(
    module: Any,
    minibatch: RolloutBatch,
    terms: Sequence[TermOfBatch],
    models: Mapping[str, nn.Module],
    steps: RunningMeans,
    iteration: int,
) -> bool:
    """Take one optimizer step on `minibatch`; return False if approx_kl says to stop.

    A step whose loss or gradient is not finite is skipped. The gradient is that of one loss over
    the whole minibatch of all ranks, whatever the micro-batches: every sum over tokens is divided
    by global counts.

    Args:
        module: that is trained.
        minibatch: this rank's rows.
        terms: of the loss.
        models: that are trained, by the name of their gradient norm.
        steps: takes the measures of the step; of a minibatch that stops the updates the distance
            alone, which would otherwise be seen only where it is small.
        iteration: from 0.

    Raises:
        TypeError: if a term returns something else than a loss with its measures.
        ValueError: if there is a `target_approx_kl`, and the policy's loss does not measure it.
    """
    sizes = torch.stack([minibatch.loss_mask.sum(), minibatch.scored.sum()])
    counts = StepCounts(*global_sum(sizes))
    parts = micro_batches(minibatch.attention_mask, module.algorithm.micro_batch_size)
    measured = accumulate_gradients(
        module, parts, [of_rows(t, minibatch, counts) for t in terms], list(models.values())
    )
    module.step_0.check_ratio(measured, module)
    target = module.algorithm.target_approx_kl
    if target is not None and module.policy_loss in terms:  # else the critic warms up
        approx_kl = _measured_kl(module, measured, target)
        if target < approx_kl < math.inf:
            module.optimizers().zero_grad()
            distance = (f"{module.stage}/{name}" for name in ("approx_kl", "clipfrac"))
            found = {name: measured[name] for name in distance if name in measured}
            steps.add(found, took_step=False)
            return False
    norms = clip_and_step(
        module,
        dict(models),
        module.algorithm.max_grad_norm,
        lambda norms: module.skipped.should_step(measured | norms, minibatch, iteration),
    )
    if norms is not None:
        steps.add(measured | norms)
    return True


def _measured_kl(module: Any, measured: Measured, target: float) -> float:
    name = f"{module.stage}/approx_kl"
    if name not in measured:
        raise ValueError(
            f"{type(module.algorithm).__name__}.target_approx_kl={target:g} bounds {name}, and "
            f"{module.policy_loss.__qualname__} measures only {sorted(measured)}: add {name} to "
            "the measures that it returns, or set target_approx_kl=None"
        )
    return float(measured[name])


def surrogate_loss(
    module: Any, micro_batch: RolloutBatch, counts: StepCounts
) -> tuple[Tensor, Measured]:
    """Return a micro-batch's share of the policy's loss, with its entropy and KL terms."""
    algorithm, mask = module.algorithm, micro_batch.loss_mask
    new = response_statistics(
        module.policy,
        micro_batch,
        temperature=module.controls.temperature,
        with_entropy=algorithm.entropy_coef > 0,
    )
    divisor = loss_divisor(
        mask,
        reduction=algorithm.loss_reduction,
        num_tokens=counts.num_tokens,
        num_sequences=counts.num_sequences,
        max_length=module.sampling.max_new_tokens,
    )
    result = POLICY_LOSSES[algorithm.surrogate](
        new.logprobs,
        micro_batch.logprobs,
        corrected_advantages(micro_batch, algorithm),
        mask,
        cliprange=algorithm.cliprange,
        cliprange_high=algorithm.cliprange_high,
        dual_clip=algorithm.dual_clip,
        num_tokens=divisor,
    )
    loss = result.loss
    if new.entropy is not None:
        entropy = (zero_off_mask(new.entropy, mask) / divisor).sum()
        loss = loss - algorithm.entropy_coef * entropy
    if algorithm.kl_in == "loss" and module.controls.kl_coef:
        kl = policy_kl_loss(
            new.logprobs,
            micro_batch.ref_logprobs,
            mask,
            estimator=algorithm.kl_estimator,
            num_tokens=divisor,
        )
        loss = loss + module.controls.kl_coef * kl
    log_ratio = new.logprobs - micro_batch.logprobs
    # Per token, where a constant length takes the place of the tokens.
    constant = algorithm.loss_reduction == "constant"
    scale = divisor / counts.num_tokens if constant else 1.0
    return loss, module.step_0.measures(log_ratio, mask, counts.num_tokens) | {
        f"{module.stage}/policy_loss": result.loss,
        f"{module.stage}/clipfrac": result.clipfrac * scale,
        f"{module.stage}/approx_kl": result.approx_kl * scale,
        "ratio_counts": ratio_counts(log_ratio, mask),
    }


def corrected_advantages(rollout: RolloutBatch, algorithm: OnPolicyHparams) -> Tensor:
    """Return `[B, R]` advantages times the importance weights, old policy over sampler.

    Weights are not negative, so this weighs the loss of each token, whatever the surrogate. The
    divisor of the loss stays the count of all tokens or responses, also of those that weigh 0.
    """
    old, sampler, mask = rollout.logprobs, rollout.sampler_logprobs, rollout.response_mask
    if algorithm.off_policy == "none" or sampler is None:
        return rollout.advantages
    if algorithm.off_policy == "truncated":
        weights = truncated_weights(old, sampler, mask, cap=algorithm.off_policy_cap)
    else:
        low, high = algorithm.off_policy_low, algorithm.off_policy_high
        weights = masked_weights(old, sampler, mask, low=low, high=high)
    return rollout.advantages * weights


def finish_iteration(
    module: Any,
    rollout: RolloutBatch,
    steps: RunningMeans,
    seconds: Mapping[str, float],
    iteration: int,
) -> None:
    """Log the iteration, counted from 0, then adapt the KL coefficient and the learning rate."""
    stage, score_clip = module.stage, module.algorithm.score_clip
    sampled = rollout_measures(rollout, stage, score_clip=score_clip)
    tokens = float(global_sum(rollout.response_mask.sum()))
    sampled |= sampler_measures(rollout, module.algorithm, tokens)
    if sampled.get(CLIPPED) and not module.said_clipped:
        _warn_of_clip(module, rollout, sampled[CLIPPED], iteration)
    measures = finite(sampled | steps.means())
    measures[f"{stage}/skipped_steps"] = module.skipped.end_iteration()
    measures |= {
        f"{stage}/num_updates": steps.num_steps,
        f"{stage}/kl_coef": module.controls.kl_coef,
    }
    measures[f"{stage}/learning_rate"] = module.optimizers().param_groups[0]["lr"]
    measures |= {f"time/{phase}": value for phase, value in seconds.items()}
    measures["throughput/tokens_per_second"] = tokens / sum(seconds.values())
    module.log_dict(module.gaps.filled(measures), on_step=True)
    module.controls.adapt_kl_coef(
        measures.get("rollout/kl_per_response"),
        module.algorithm,
        num_episodes=len(rollout) * world_size(),
    )
    module.lr_schedulers().step()


def _warn_of_clip(module: Any, rollout: RolloutBatch, share: float, iteration: int) -> None:
    """Warn once a run if two different scores are made one, or if many of the first are clipped."""
    clip = module.algorithm.score_clip
    beyond = rollout.scores[rollout.scores.abs() >= clip]
    sides = [
        (float(side.min()), float(side.max()))
        for side in (beyond[beyond < 0], beyond[beyond > 0])
        if len(side)
    ]
    found = sorted({score for own in gathered(sides) for side in own for score in side})
    pairs = [(a, b) for a, b in pairwise(found) if a * b > 0]
    if not pairs and (iteration or share <= MANY_CLIPPED):
        return
    module.said_clipped = True
    if rank() == 0:
        same = f"the scores {pairs[0][0]:g} and {pairs[0][1]:g} are" if pairs else "such scores are"
        logger.warning(
            "iteration %d: %.0f %% of the scores are at module.%s.score_clip=%g or beyond, and %s "
            "worth the same: normalise the scorer (mean 0, std 1), or raise score_clip (null does "
            "not clip)",
            iteration + 1,
            100 * share,
            module.stage,
            clip,
            same,
        )


@torch.no_grad()
def outputs(rollout: RolloutBatch, steps: RunningMeans) -> dict[str, Any]:
    """Return what `training_step` gives to the callbacks."""
    return {"rollout": rollout.detach(), "ratio_counts": steps.totals.get("ratio_counts")}
