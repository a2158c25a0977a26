"""A policy's responses to held-out prompts, compared with a baseline's.

Legend: B rows, R response.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from hashlib import blake2b
from typing import Any, Concatenate

import torch
from torch import Tensor

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.records import asked_columns
from rlhf_lightning.distributed.collectives import agreed_max, gathered, rank, unsharded, world_size
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.models.building import in_eval_mode
from rlhf_lightning.models.forward import by_micro_batch, response_statistics
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.rollout.generators.base import Generator, gathers_layers
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Responses, Scorer
from rlhf_lightning.rollout.teachers import Teacher
from rlhf_lightning.text.messages import CONVERSATION, RENDERED, read_by_people

# (prompts, completions, finished) -> scores; also the prompt columns that its `columns` names.
GoldReward = Callable[Concatenate[Any, Any, Any, ...], list[float]]


@dataclass(frozen=True)
class Sampling:
    """Settings of sampling for an evaluation; at temperature 0 the likeliest token is taken."""

    generator: Generator
    tokenizer: object
    temperature: float
    max_new_tokens: int
    micro_batch_size: int | None = None
    skip_special_tokens: bool = False


@dataclass
class PolicyAnswers:
    """Responses to prompts, with their scores; all lists are by response.

    Args:
        prompts: prompts as text; each is repeated `answers_per_prompt` times in a row.
        domains: domains of the prompts.
        completions: responses as text.
        finished: whether they ended by themselves.
        token_ids: token ids of the responses.
        kl: KL of a response from the reference, nats.
        scores: scores of the responses.
        columns: columns of the prompts.
        teacher_kl: KL of a response to the teacher, nats; empty without one.
        gold: gold rewards of the responses, once measured; else empty.
        answers_per_prompt: number of responses to each prompt.
        safety: responses to the prompts of a safety file, if there is one.
    """

    prompts: list[str] = field(default_factory=list)
    domains: list[str] = field(default_factory=list)
    completions: list[str] = field(default_factory=list)
    finished: list[bool] = field(default_factory=list)
    token_ids: list[list[int]] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    columns: list[Mapping[str, Any]] = field(default_factory=list)
    teacher_kl: list[float] = field(default_factory=list)
    gold: list[float] = field(default_factory=list)
    answers_per_prompt: int = 1
    safety: PolicyAnswers | None = None

    def extend(
        self, answers: Responses, scorer: Scorer | None, kl: Sequence[float] | None = None
    ) -> None:
        """Add the responses of a batch; scores are NaN without a scorer, KL is 0 without one."""
        prompts, mask = answers.prompts, answers.response_mask.cpu()
        responses, rows = answers.sequences[:, -mask.shape[1] :].cpu(), range(len(prompts))
        self.prompts += prompts.columns["prompt"]
        self.domains += prompts.domains
        self.columns += [{k: values[i] for k, values in prompts.columns.items()} for i in rows]
        self.completions += answers.completions
        self.finished += answers.finished.tolist()
        self.token_ids += [responses[i][mask[i]].tolist() for i in rows]
        self.kl += [0.0 for _ in rows] if kl is None else kl
        self.scores += (
            [math.nan for _ in rows] if scorer is None else scorer(answers).total.tolist()
        )

    def append(self, other: PolicyAnswers) -> None:
        """Add the responses of `other`."""
        for one in fields(self):
            if isinstance(value := getattr(self, one.name), list):
                value.extend(getattr(other, one.name))

    @property
    def num_prompts(self) -> int:
        """The number of prompts, each answered `answers_per_prompt` times."""
        return len(self.prompts) // self.answers_per_prompt

    @property
    def lengths(self) -> list[int]:
        """Response tokens, EOS included."""
        return [len(ids) for ids in self.token_ids]


@torch.no_grad()
def sample_batches(
    policy: PolicyModel,
    batches: Iterable[PromptBatch],
    sampling: Sampling,
    *,
    noise: RowNoise,
    reference: PolicyModel | None = None,
    scorer: Scorer | None = None,
    teacher: Teacher | None = None,
    answers_per_prompt: int = 1,
) -> PolicyAnswers:
    """Sample one response a row.

    Args:
        policy: policy to sample from.
        batches: batches of held-out prompts.
        sampling: engine and decoding.
        noise: noise by row; give each policy different noise.
        reference: for the KL, k1 summed over a response, nats; without it 0.
        scorer: for the scores; without it NaN.
        teacher: for the KL to it; without it none.
        answers_per_prompt: how often each prompt is repeated in `batches`.
    """
    result = PolicyAnswers(answers_per_prompt=answers_per_prompt)
    device = policy.device
    for cpu_prompts in batches:
        prompts = cpu_prompts.to(device)
        layers = gathers_layers(sampling.generator)
        with unsharded(policy.root, layers=layers), policy.generating() as model:
            generation = sampling.generator(
                model,
                prompts,
                noise=noise,
                temperature=sampling.temperature,
                max_new_tokens=sampling.max_new_tokens,
            )
        release_freed_memory()  # the engine's copies of the weights
        tokenizer: Any = sampling.tokenizer
        skip = sampling.skip_special_tokens
        answers = Responses.of(prompts, generation, tokenizer, skip_special_tokens=skip)
        kl = own = None
        if reference is not None or teacher is not None:
            own = _logprobs(policy, answers, sampling)
        if own is not None and reference is not None:
            kl = _sequence_kl(own, _logprobs(reference, answers, sampling), answers)
        result.extend(answers, scorer, kl)
        if own is not None and teacher is not None:
            size, temperature = sampling.micro_batch_size, sampling.temperature or 1.0
            said = teacher(answers, temperature=temperature, micro_batch_size=size)
            result.teacher_kl += _sequence_kl(own, said.logprobs, answers)
        release_freed_memory()
    return result


def shared_among_ranks(
    batches: Sequence[PromptBatch], ask: Callable[[Sequence[PromptBatch]], PolicyAnswers]
) -> PolicyAnswers:
    """Return the responses to all batches, in order; each rank samples its part.

    A rank with fewer batches repeats one, as all must run a sharded model equally often.

    Args:
        batches: the same on every rank.
        ask: batches -> responses to them.
    """
    ranks = world_size()
    if ranks == 1:
        return ask(batches)
    turns = range(-(-len(batches) // ranks))
    own = [min(turn * ranks + rank(), len(batches) - 1) for turn in turns]
    by_rank = gathered([ask([batches[number]]) for number in own])
    joined = PolicyAnswers(answers_per_prompt=by_rank[0][0].answers_per_prompt)
    for number in range(len(batches)):
        joined.append(by_rank[number % ranks][number // ranks])
    return joined


def _logprobs(model: PolicyModel, answers: Responses, sampling: Sampling) -> Tensor:
    """Return `[B, R]` log-probabilities; greedy responses are read by the model as it is."""

    def of_rows(rows: Tensor) -> tuple[Tensor]:
        part, temperature = answers.rows(rows), sampling.temperature or 1.0
        found = response_statistics(model, part, temperature=temperature, with_entropy=False)
        return (found.logprobs,)

    with in_eval_mode(model):
        (logprobs,) = by_micro_batch(
            of_rows, answers.attention_mask, sampling.micro_batch_size, agree=agreed_max
        )
    return logprobs


def _sequence_kl(own: Tensor, other: Tensor, answers: Responses) -> list[float]:
    kl = kl_k1(own, other)  # [B, R]
    return torch.where(answers.response_mask, kl, 0).sum(-1).tolist()  # type: ignore[no-any-return]


def gold_scores(gold: GoldReward, answers: PolicyAnswers) -> list[float]:
    """Return the gold reward of each response."""
    texts: Sequence[Any] = (answers.prompts, answers.completions, answers.finished)
    return gold(*map(list, texts), **asked_columns(gold, answers.columns))  # copies it may change


def gold_details(gold: GoldReward, answers: PolicyAnswers) -> Mapping[str, Sequence[float]]:
    """Return further values of a gold reward for each response: its `details`, if it has any."""
    if (measure := getattr(gold, "details", None)) is None:
        return {}
    texts = (answers.prompts, answers.completions, answers.finished)
    found: Mapping[str, Sequence[float]] = measure(*texts, **asked_columns(gold, answers.columns))
    return found


def _shown(answers: PolicyAnswers, row: int) -> dict[str, str]:
    """Return `prompt` and, where there is one, `system` of a response, as people read them."""
    written = answers.columns[row].get(CONVERSATION) if answers.columns else None
    if written in (None, "", RENDERED):
        return {"prompt": answers.prompts[row]}
    found = json.loads(str(written))
    if found and isinstance(found[-1], list):  # behind the template's further variables
        found = found[-1]
    system, prompt = read_by_people(found)
    return {"system": system, "prompt": prompt} if system else {"prompt": prompt}


def values_of(policy: PolicyAnswers, baseline: PolicyAnswers) -> dict[str, Any]:
    """Return the values of every response of both sides, for distributions.jsonl.

    Score, length, KL and, where it was measured, gold; `prompts` has a digest of each prompt, by
    which `paired_differences` finds those of two runs.
    """
    asked = policy.prompts[:: policy.answers_per_prompt]
    found = {
        "held_out": "answers",
        "score": policy.scores,
        "length": policy.lengths,
        "kl": policy.kl,
        "baseline_score": baseline.scores,
        "baseline_length": baseline.lengths,
    }
    found |= {"gold": policy.gold, "baseline_gold": baseline.gold} if policy.gold else {}
    digests = [blake2b(prompt.encode(), digest_size=8).hexdigest() for prompt in asked]
    return found | {"prompts": digests}


def side_by_side(
    policy: PolicyAnswers, baseline: PolicyAnswers, count: int | None = None
) -> list[dict[str, object]]:
    """Return prompts with a response of each side, for samples.jsonl; None for all prompts."""
    rows: list[dict[str, object]] = []
    for number in range(policy.num_prompts)[:count]:
        mine, theirs = number * policy.answers_per_prompt, number * baseline.answers_per_prompt
        scores = policy.scores[mine], baseline.scores[theirs]
        score, baseline_score = (None if math.isnan(one) else one for one in scores)
        length = len(policy.token_ids[mine])
        rows.append(
            {
                **_shown(policy, mine),
                "response": policy.completions[mine],
                "baseline_response": baseline.completions[theirs],
                "score": score,
                "baseline_score": baseline_score,
                "baseline_length": len(baseline.token_ids[theirs]),
                "baseline_finished": baseline.finished[theirs],
                "kl": policy.kl[mine] / max(length, 1),
                "length": length,
                "domain": policy.domains[mine],
                "finished": policy.finished[mine],
            }
        )
    return rows
