"""One iteration's experience, from prompts to a RolloutBatch.

Legend: B rows, P padded prompt, R response.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.batches import Generation, PromptBatch, RolloutBatch
from rlhf_lightning.distributed.collectives import agreed_max, gathered, rank, world_size
from rlhf_lightning.functional.distillation import distillation_advantages
from rlhf_lightning.functional.diversity import novel_ngram_shares
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.functional.masked import zero_off_mask
from rlhf_lightning.functional.rewards import adjust_scores, overlong_penalty, shape_rewards
from rlhf_lightning.models.cpu_kernels import side_by_side
from rlhf_lightning.models.forward import by_micro_batch, response_statistics, response_values
from rlhf_lightning.models.heads import PolicyModel, ScalarHeadModel
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.rollout.estimators import AdvantageEstimator
from rlhf_lightning.rollout.generators.base import Generator
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.resampling import resampled
from rlhf_lightning.rollout.scorers.base import Responses, Scorer, Scores, make_responses
from rlhf_lightning.rollout.teachers import Teacher, Unsharded


@dataclass(frozen=True)
class RolloutParts:
    """The models and functions of a rollout.

    Args:
        generator: generates the responses.
        policy: samples, and gives the old log-probabilities.
        reference: frozen copy of the policy before its first round.
        value_model: gives the old values; None where no value model is trained.
        scorer: scores the responses.
        tokenizer: turns responses into text for the scorer.
        unsharded: gathers a sharded model: to generate, and once for all its micro-batches.
        micro_batch_size: rows in one forward.
        skip_special_tokens: leave special tokens out of that text.
        teacher: says how likely it finds the responses; None without one.
        teacher_states: keep its states too, from which its whole distributions are learnt: they
            are then the loss, and its log-probabilities no part of the advantages.
    """

    generator: Generator
    policy: PolicyModel
    reference: PolicyModel
    value_model: ScalarHeadModel | None
    scorer: Scorer
    tokenizer: PreTrainedTokenizerBase
    unsharded: Unsharded
    micro_batch_size: int | None
    skip_special_tokens: bool = False
    teacher: Teacher | None = None
    teacher_states: bool = False


@dataclass(frozen=True)
class RewardShaping:
    """Coefficients from scores to advantages, named as in the hyper-parameters and `Controls`.

    `overlong_buffer` is None, or the tokens before `max_new_tokens` in which a response loses up
    to 1 for its length. `teacher_coef` weighs the teacher, if there is one.
    """

    kl_coef: float
    score_clip: float | None
    missing_eos_penalty: float
    estimator: AdvantageEstimator
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    diversity_bonus: float = 0.0
    overlong_buffer: int | None = None
    teacher_coef: float = 0.0


@torch.no_grad()
def collect_rollout(
    parts: RolloutParts,
    prompts: PromptBatch,
    *,
    noise: RowNoise,
    temperature: float,
    max_new_tokens: int,
    shaping: RewardShaping,
    max_resampling_rounds: int = 0,
    generation: Generation | None = None,
) -> tuple[RolloutBatch, dict[str, float]]:
    """Sample, score and evaluate one batch of prompts.

    Old log-probabilities are those of the training forward. Those of the sampler, where it gives
    them, are in `sampler_logprobs`.

    Args:
        parts: the models and functions.
        prompts: `[B, P]` prompts, with spare ones if there is resampling.
        noise: sampling noise of this iteration.
        temperature: temperature of sampling and of every log-probability.
        max_new_tokens: longest response, in tokens.
        shaping: coefficients from scores to advantages.
        max_resampling_rounds: how often spare prompts may take the place of others; see
            `resampling.resampled`.
        generation: responses to `prompts` that were sampled before; None samples them now.

    Returns:
        The rollout, and the seconds of its phases: `generate`, `score` (all forwards included).
    """
    seconds = {"generate": 0.0, "score": 0.0}

    def answered(prompts: PromptBatch) -> tuple[Responses, Scores]:
        started = time.perf_counter()
        sampled = generation
        if sampled is None:
            sampled = sample_responses(
                parts, prompts, noise=noise, temperature=temperature, max_new_tokens=max_new_tokens
            )
        generated = time.perf_counter()
        skip = parts.skip_special_tokens
        responses = make_responses(prompts, sampled, parts.tokenizer, skip_special_tokens=skip)
        scores = parts.scorer(responses)
        seconds["generate"] += generated - started
        seconds["score"] += time.perf_counter() - generated
        return responses, scores

    rounds = 0
    if max_resampling_rounds:
        responses, scores, rounds = resampled(
            answered, prompts, max_rounds=max_resampling_rounds, score_clip=shaping.score_clip
        )
    else:
        responses, scores = answered(prompts)
    started = time.perf_counter()
    rollout = assemble_rollout(
        parts,
        responses,
        scores,
        temperature=temperature,
        shaping=shaping,
        max_new_tokens=max_new_tokens,
    )
    if max_resampling_rounds:
        rollout = replace(rollout, resampled=responses.prompts.spare, resampling_rounds=rounds)
    release_freed_memory()
    seconds["score"] += time.perf_counter() - started
    return rollout, seconds


@torch.no_grad()
def sample_responses(
    parts: RolloutParts,
    prompts: PromptBatch,
    *,
    noise: RowNoise,
    temperature: float,
    max_new_tokens: int,
) -> Generation:
    """Sample one response a prompt from the policy as it is now; see `collect_rollout`."""
    with parts.unsharded(parts.policy.root), parts.policy.generating() as model:
        generation = parts.generator(
            model, prompts, noise=noise, temperature=temperature, max_new_tokens=max_new_tokens
        )
    release_freed_memory()  # the engine's copies of the weights, before other sizes are needed
    return generation


@torch.no_grad()
def begin_responses(
    parts: RolloutParts, prompts: PromptBatch, *, noise: RowNoise, **how: Any
) -> Callable[[], Generation]:
    """Start sampling from the policy as it is now; return a function that waits for the responses.

    A generator with separate processes (`begin`) samples in the background; the others have sampled
    when this returns. `how` is passed to `sample_responses`.
    """
    begin = getattr(parts.generator, "begin", None)
    if begin is None:
        generation = sample_responses(parts, prompts, noise=noise, **how)
        return lambda: generation
    with parts.unsharded(parts.policy.root), parts.policy.generating() as model:
        begun: Callable[[], Generation] = begin(model, prompts, noise=noise, **how)
    return begun


def assemble_rollout(
    parts: RolloutParts,
    responses: Responses,
    scores: Scores,
    *,
    temperature: float,
    shaping: RewardShaping,
    max_new_tokens: int,
) -> RolloutBatch:
    """Return the rollout of scored responses: evaluate, shape, estimate advantages."""
    prompts, mask = responses.prompts, responses.response_mask  # [B, R]
    found = evaluate_responses(parts, responses, temperature=temperature)
    by_domain = [shaping.domain_weights.get(name, 1.0) for name in prompts.domains]
    weights, estimator = scores.total.new_tensor(by_domain), shaping.estimator
    factors = torch.ones_like(weights) if estimator.scale_free else weights
    adjusted = _adjusted(scores.total, factors, responses, shaping, max_new_tokens)
    kl = kl_k1(found.logprobs, found.ref_logprobs)  # [B, R]
    rows = torch.arange(len(mask), device=mask.device)
    scored = torch.ones_like(mask[:, 0]) if scores.applies is None else scores.applies
    learnt = mask & scored.unsqueeze(-1)
    rewards = shape_rewards(adjusted, kl, learnt, kl_coef=shaping.kl_coef)
    groups = prompts.group_ids.where(scored, -1 - rows)  # a row without a score is in none
    advantages, returns = estimator(rewards, found.values, learnt, groups)
    if estimator.scale_free:
        advantages = advantages * weights.unsqueeze(-1)
    taught = found.teacher_logprobs is not None and shaping.teacher_coef != 0
    if taught:  # about rows without a score, too
        advantages = zero_off_mask(advantages, learnt)
        advantages = _with_teacher(advantages, found, mask, shaping.teacher_coef)
    return RolloutBatch(
        sequences=responses.sequences,
        attention_mask=responses.attention_mask,
        response_mask=mask,
        **found._asdict(),
        scores=scores.total,
        rewards=rewards,
        advantages=advantages,
        returns=returns,
        finish_reason=responses.generation.finish_reason,
        row_ids=prompts.row_ids,
        prompt_length=prompts.input_ids.shape[1],
        domains=prompts.domains,
        score_components=dict(scores.components),
        group_ids=prompts.group_ids,
        scored=scored,
        sampler_logprobs=responses.generation.logprobs,
        has_reward=getattr(parts.scorer, "is_reward", True),
        taught=taught,
    )


def _with_teacher(advantages: Tensor, found: Evaluated, mask: Tensor, coef: float) -> Tensor:
    """Return the advantages with the teacher's log-ratio, unless its states are what is learnt."""
    if found.teacher_logprobs is None or found.teacher_states is not None:
        return advantages
    return distillation_advantages(
        found.logprobs,
        found.teacher_logprobs,
        mask,
        teacher_coef=coef,
        advantages=advantages,
    )


def _adjusted(
    scores: Tensor,
    weights: Tensor,
    responses: Responses,
    shaping: RewardShaping,
    max_new_tokens: int,
) -> Tensor:
    """Return `[B]` what each response is worth, before the KL penalty.

    A weight above 1 widens the clip: scores that the clip tells apart stay apart.
    """
    worth = scores * weights
    if shaping.diversity_bonus:
        worth = worth + shaping.diversity_bonus * worth.new_tensor(novelty(responses))
    clip = shaping.score_clip
    adjusted = adjust_scores(
        worth,
        responses.finished,
        clip=None if clip is None else clip * weights.abs().clamp(min=1),
        missing_eos_penalty=shaping.missing_eos_penalty,
    )
    if shaping.overlong_buffer is None:
        return adjusted
    lengths = responses.response_mask.sum(-1)
    return adjusted + overlong_penalty(
        lengths, max_length=max_new_tokens, buffer=shaping.overlong_buffer
    )


def novelty(responses: Responses) -> list[float]:
    """Return the share of each response's bigrams that no other response of any rank has, `[B]`."""
    mask = responses.response_mask.cpu()
    ids = responses.sequences[:, -mask.shape[1] :].cpu()
    own = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
    ranks = gathered(own)
    start = sum(len(rows) for rows in ranks[: rank()])
    shares = novel_ngram_shares([row for rows in ranks for row in rows], n=2)
    return shares[start : start + len(own)]


class Evaluated(NamedTuple):
    """Figures that the models give, each `[B, R]` and 0 off the mask; see `RolloutBatch`."""

    logprobs: Tensor
    entropy: Tensor
    ref_logprobs: Tensor
    values: Tensor | None
    teacher_logprobs: Tensor | None = None
    teacher_states: Tensor | None = None  # [B, R, H]


def evaluate_responses(
    parts: RolloutParts, responses: Responses, *, temperature: float
) -> Evaluated:
    """Return what policy, reference, value model and teacher say of the responses."""

    def policy(rows: Tensor) -> tuple[Tensor, ...]:
        statistics = response_statistics(
            parts.policy, responses.rows(rows), temperature=temperature
        )
        assert statistics.entropy is not None  # asked for
        return statistics.logprobs, statistics.entropy

    def reference(rows: Tensor) -> tuple[Tensor, ...]:
        statistics = response_statistics(
            parts.reference, responses.rows(rows), temperature=temperature, with_entropy=False
        )
        return (statistics.logprobs,)

    value_model = parts.value_model
    # As the updates compute, whose bits these are to have.
    alone = value_model is not None and world_size() == 1
    beside = side_by_side(parts.policy, value_model) if alone else None

    def values(rows: Tensor) -> tuple[Tensor, ...]:
        assert value_model is not None  # or it is not called
        return (response_values(value_model, responses.rows(rows)),)

    def of_rows(function: Callable[[Tensor], tuple[Tensor, ...]]) -> tuple[Tensor, ...]:
        return by_micro_batch(
            function,
            responses.attention_mask,
            parts.micro_batch_size,
            agree=agreed_max,
            run=None if beside is None else beside.run,
        )

    with parts.unsharded(parts.policy.root):  # there is room: it was gathered to generate
        logprobs, entropy = of_rows(policy)
    with parts.unsharded(parts.reference.root):
        (ref_logprobs,) = of_rows(reference)
    taught: tuple[Tensor | None, ...] = ()
    if parts.teacher is not None:
        taught = parts.teacher(
            responses,
            temperature=temperature,
            micro_batch_size=parts.micro_batch_size,
            with_states=parts.teacher_states,
            unsharded=parts.unsharded,
        )
    state_values = None if value_model is None else of_rows(values)[0]
    return Evaluated(logprobs, entropy, ref_logprobs, state_values, *taught)
