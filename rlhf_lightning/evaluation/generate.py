"""A policy's answers to held-out prompts, and how they compare with a baseline's.

Legend: B rows, R response.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from rlhf_lightning.batches import PromptBatch
from rlhf_lightning.data.records import asked_columns
from rlhf_lightning.distributed.collectives import agreed_max, gathered, rank, unsharded, world_size
from rlhf_lightning.functional.diversity import distinct_n
from rlhf_lightning.functional.kl import kl_k1
from rlhf_lightning.models.forward import by_micro_batch, response_statistics
from rlhf_lightning.models.heads import PolicyModel
from rlhf_lightning.models.modes import in_eval_mode
from rlhf_lightning.models.precision import release_freed_memory
from rlhf_lightning.rollout.generators.base import Generator, gathers_layers
from rlhf_lightning.rollout.noise import RowNoise
from rlhf_lightning.rollout.scorers.base import Answers, Scorer, make_answers

# (prompts, completions, finished) -> scores; also the prompt columns that its `columns` names.
GoldReward = Callable[..., list[float]]


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
    """Answers to prompts, and what was measured of them; all lists are by answer.

    Args:
        prompts: as text; each stands `answers_per_prompt` times in a row.
        domains: of the prompts.
        completions: the answers as text.
        finished: whether they ended by themselves.
        token_ids: of the answers.
        kl: of an answer, from the reference, nats.
        scores: of the answers.
        columns: columns of the prompts.
        answers_per_prompt: how many each prompt has.
    """

    prompts: list[str]
    domains: list[str]
    completions: list[str]
    finished: list[bool]
    token_ids: list[list[int]]
    kl: list[float]
    scores: list[float]
    columns: list[Mapping[str, Any]] = field(default_factory=list)
    answers_per_prompt: int = 1

    def extend(
        self, answers: Answers, scorer: Scorer | None, kl: Sequence[float] | None = None
    ) -> None:
        """Add the answers of a batch; without a scorer the scores are NaN, without a KL it is 0."""
        prompts, mask = answers.prompts, answers.response_mask.cpu()
        responses = answers.sequences[:, -mask.shape[1] :].cpu()
        rows = range(len(prompts))
        self.prompts += prompts.columns["prompt"]
        self.domains += prompts.domains
        self.columns += [{k: values[i] for k, values in prompts.columns.items()} for i in rows]
        self.completions += answers.completions
        self.finished += answers.finished.tolist()
        self.token_ids += [responses[i][mask[i]].tolist() for i in rows]
        self.kl += [0.0] * len(prompts) if kl is None else kl
        self.scores += (
            [math.nan] * len(prompts) if scorer is None else scorer(answers).total.tolist()
        )

    def rows(self, rows: Sequence[int]) -> PolicyAnswers:
        """Return some of the answers."""
        chosen: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        for name, value in chosen.items():
            if isinstance(value, list) and value:  # columns may be left out
                chosen[name] = [value[row] for row in rows]
        return PolicyAnswers(**chosen)

    def append(self, other: PolicyAnswers) -> None:
        """Add the answers of `other`."""
        for one in fields(self):
            if isinstance(value := getattr(self, one.name), list):
                value.extend(getattr(other, one.name))

    @property
    def lengths(self) -> list[int]:
        """Response tokens, EOS included."""
        return [len(ids) for ids in self.token_ids]


@torch.no_grad()
def sample_answers(
    policy: PolicyModel,
    batches: Iterable[PromptBatch],
    sampling: Sampling,
    *,
    noise: RowNoise,
    reference: PolicyModel | None = None,
    scorer: Scorer | None = None,
    answers_per_prompt: int = 1,
) -> PolicyAnswers:
    """Sample one response a row.

    Args:
        policy: answers.
        batches: held-out prompts.
        sampling: engine and settings.
        noise: by row; give each policy its own.
        reference: for the KL, k1 summed over a response, nats; without it 0.
        scorer: for the scores; without it NaN.
        answers_per_prompt: how often in a row each prompt stands in `batches`.
    """
    result = PolicyAnswers([], [], [], [], [], [], [], answers_per_prompt=answers_per_prompt)
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
        answers = make_answers(prompts, generation, tokenizer, skip_special_tokens=skip)
        kl = None if reference is None else _sequence_kl(policy, reference, answers, sampling)
        result.extend(answers, scorer, kl)
        release_freed_memory()
    return result


def shared_among_ranks(
    batches: Sequence[PromptBatch], ask: Callable[[Sequence[PromptBatch]], PolicyAnswers]
) -> PolicyAnswers:
    """Return the answers to all batches, in order, of which each rank has asked its part.

    A rank with fewer batches asks one again, as all must run a sharded model equally often.

    Args:
        batches: the same on every rank.
        ask: batches -> their answers.
    """
    ranks = world_size()
    if ranks == 1:
        return ask(batches)
    turns = -(-len(batches) // ranks)
    numbers = [min(turn * ranks + rank(), len(batches) - 1) for turn in range(turns)]
    answers = gathered(ask([batches[number] for number in numbers]))
    joined, starts = answers[0].rows(()), [0] * ranks
    for number, batch in enumerate(batches):  # asked by rank number % ranks
        start, of = starts[number % ranks], answers[number % ranks]
        starts[number % ranks] = start + len(batch)
        joined.append(of.rows(range(start, start + len(batch))))
    return joined


def _sequence_kl(
    policy: PolicyModel, reference: PolicyModel, answers: Answers, sampling: Sampling
) -> list[float]:
    def kl_of_rows(rows: torch.Tensor) -> tuple[torch.Tensor]:
        batch = answers.rows(rows)
        # Answers of the likeliest tokens are compared under the models as they are.
        temperature = sampling.temperature or 1.0
        new, ref = (
            response_statistics(model, batch, temperature=temperature, with_entropy=False)
            for model in (policy, reference)
        )
        kl = kl_k1(new.logprobs, ref.logprobs)  # [B, R]
        return (torch.where(batch.response_mask, kl, 0).sum(-1),)

    with in_eval_mode(policy), in_eval_mode(reference):
        (kl,) = by_micro_batch(
            kl_of_rows, answers.attention_mask, sampling.micro_batch_size, agree=agreed_max
        )
    return kl.tolist()


def gold_scores(gold: GoldReward, answers: PolicyAnswers) -> list[float]:
    """Return the gold reward of each answer."""
    # Copies, which the function may change.
    texts = list(answers.prompts), list(answers.completions), list(answers.finished)
    return gold(*texts, **asked_columns(gold, answers.columns))


def gold_details(gold: GoldReward, answers: PolicyAnswers) -> dict[str, float]:
    """Return the means of what else a gold reward measures: its `details`, if it has any."""
    measure = getattr(gold, "details", None)
    if measure is None:
        return {}
    columns = asked_columns(gold, answers.columns)
    details = measure(answers.prompts, answers.completions, answers.finished, **columns)
    return {name: sum(values) / len(values) for name, values in details.items()}


def describe_answers(answers: PolicyAnswers, prefix: str) -> dict[str, float]:
    """Return length, distinct-2 and share finished of the answers, as `<prefix>...`."""
    rows = len(answers.prompts)
    return {
        f"{prefix}response_length": sum(answers.lengths) / rows,
        f"{prefix}distinct_2": float(distinct_n(answers.token_ids, n=2)),
        f"{prefix}eos_fraction": sum(answers.finished) / rows,
    }


def _or_none(score: float) -> float | None:
    return None if math.isnan(score) else score


def values_of(policy: PolicyAnswers, baseline: PolicyAnswers) -> dict[str, Any]:
    """Return score and length of every answer of both sides, for distributions.jsonl."""
    return {
        "held_out": "answers",
        **{"score": policy.scores, "length": policy.lengths},
        **{"baseline_score": baseline.scores, "baseline_length": baseline.lengths},
    }


def side_by_side(
    policy: PolicyAnswers, baseline: PolicyAnswers, count: int
) -> list[dict[str, object]]:
    """Return the first `count` prompts with an answer of each, for samples.jsonl and the report."""
    mine, theirs = policy.answers_per_prompt, baseline.answers_per_prompt
    return [
        {
            "prompt": policy.prompts[row],
            "response": policy.completions[row],
            "baseline_response": baseline.completions[row // mine * theirs],
            "score": _or_none(policy.scores[row]),
            "baseline_score": _or_none(baseline.scores[row // mine * theirs]),
            "baseline_length": baseline.lengths[row // mine * theirs],
            "baseline_finished": baseline.finished[row // mine * theirs],
            "kl": policy.kl[row] / max(policy.lengths[row], 1),
            "length": policy.lengths[row],
            "domain": policy.domains[row],
            "finished": policy.finished[row],
        }
        for row in range(0, len(policy.prompts), mine)[:count]
    ]
