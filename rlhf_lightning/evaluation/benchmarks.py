"""Benchmarks of reward models: pairs of a file, and RewardBench 2."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedTokenizerBase

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.batches import FINISHED_BY_STOP, Generation
from rlhf_lightning.data.collate import PromptCollator
from rlhf_lightning.data.encode import EncodedPrompt, encode_prompt, give_same_columns
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.data.records import PromptRecord, Text
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.texts import from_json
from rlhf_lightning.evaluation.generate import PolicyAnswers
from rlhf_lightning.evaluation.reward_accuracy import ScoredPair, pair_metrics, whole_metrics
from rlhf_lightning.evaluation.win_rate import share_over_prompts
from rlhf_lightning.rollout.scorers.base import Responses, Scorer
from rlhf_lightning.runs.hub import unreachable_hub
from rlhf_lightning.runs.metric_catalog import part_key
from rlhf_lightning.text.tokens import TextEncoder, prompt_and_responses

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidates:
    """Responses to one prompt, the correct ones first.

    Args:
        prompt: the prompt, a text or a conversation.
        answers: responses in the form of the prompt.
        num_correct: number of correct responses.
        subset: name of the subset, or "".
        group: name of the group within its subset, or "".
    """

    prompt: PromptRecord
    answers: tuple[Text, ...]
    num_correct: int = 1
    subset: str = ""
    group: str = ""


class Scored(NamedTuple):
    """Scores and tokens of all responses to one prompt, in their order."""

    candidates: Candidates
    scores: Sequence[float]
    lengths: Sequence[int]


class RewardBenchmark(Protocol):
    """A set of responses that are known to be good or bad."""

    def candidates(self, *, chat: bool) -> list[Candidates]:
        """Return the responses; plain prompts as conversations if `chat`."""

    def measure(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Return `benchmark/...`."""


@checked
@dataclass(frozen=True)
class PairsBenchmark:
    """Pairs of a file: accuracy with its interval, by subset and domain, and beside it by length.

    Args:
        path: .jsonl, .json, .csv or .parquet with `prompt`, `chosen`, `rejected`, and perhaps
            `domain`.
        subset: column whose values name subsets; the default need not be there.
    """

    path: PathOrName
    subset: str = "subset"

    def candidates(self, *, chat: bool) -> list[Candidates]:
        """Return the pairs as the file writes them.

        Raises:
            BadRecordError: for a row that is no pair.
            ValueError: if no pair has the column that `subset` names.
        """
        found: Any = FileSource(self.path, validation_fraction=0.0).records("preferences", "train")
        names = {name for pair in found for name in pair.origin.columns} | {"domain"}
        if self.subset not in {*names, "subset"}:
            told = f"no pair has the column benchmark.subset={self.subset!r}"
            raise ValueError(f"{told}: name one of {', '.join(sorted(names))}")
        candidates = []
        for pair in found:
            given: dict[str, Any] = {"variables": pair.variables, "origin": pair.origin}
            columns = pair.origin.columns
            prompt = PromptRecord(pair.prompt, pair.domain, columns, pair.rendered, **given)
            value = {**columns, "domain": pair.domain}.get(self.subset)
            subset = "" if value is None else str(value)
            candidates.append(Candidates(prompt, (pair.chosen, pair.rejected), subset=subset))
        return candidates

    def measure(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Return `benchmark/accuracy` and what `pair_metrics` finds, under `benchmark/`."""
        pairs = [
            ScoredPair(
                scores[0],
                scores[1],
                lengths[0],
                lengths[1],
                subsets=(one.subset,) if one.subset else (),
                domain=one.prompt.domain,
                prompt=repr(one.prompt.prompt),
            )
            for one, scores, lengths in scored
        ]
        measures = whole_metrics(pairs) | pair_metrics(pairs)
        return {f"benchmark/{name.removeprefix('val/')}": v for name, v in measures.items()}


TIES = "Ties"


@checked
@dataclass(frozen=True)
class RewardBench2:
    """RewardBench 2: best of four in five subsets, and ties, by the set's own rules.

    Args:
        path: .jsonl, .json or .parquet with the columns of the set; None loads it from the hub.

    Source: Malik et al. 2025, "RewardBench 2: Advancing Reward Model Evaluation"; the weights of
    `ties_score` as in its repository, allenai/reward-bench.
    """

    path: PathOrName | None = None

    def candidates(self, *, chat: bool) -> list[Candidates]:
        """Return the responses to each prompt.

        Raises:
            BadRecordError: for a row without the columns of the set.
        """
        return [self._parsed(row, where, chat) for where, row in self._rows()]

    def _rows(self) -> list[tuple[Location, Mapping[str, Any]]]:
        if self.path is not None:
            return list(checked_rows(Path(self.path).expanduser()))
        unreachable_hub()  # known at once, and not after minutes
        from datasets import load_dataset

        name = "allenai/reward-bench-2"
        found = load_dataset(name, split="test")
        return [(Location(name, number), row) for number, row in enumerate(found, start=1)]

    def _parsed(self, row: Mapping[str, Any], where: Location, chat: bool) -> Candidates:
        # A CSV file holds lists as JSON.
        correct, wrong = (from_json(row.get(key)) for key in ("chosen", "rejected"))
        subset, group, prompt = str(row.get("subset")), str(row.get("id")), row.get("prompt")
        lists = [x if isinstance(x, list | tuple) else () for x in (correct, wrong)]
        texts: list[Any] = [prompt, *lists[0], *lists[1]]
        if subset.lower() == TIES.lower():
            subset = TIES
        is_tie = group.partition(":")[0] in ("ref", "tied") and group.partition(":")[2]
        is_row = all(lists) and all(isinstance(text, str) for text in texts)
        if not is_row or "subset" not in row or (subset == TIES and not is_tie):
            fix = "give prompt; chosen and rejected, lists; subset; id (of ties ref:N and tied:N)"
            raise BadRecordError(where, f"it is {describe(row)}, not of RewardBench 2", fix)
        roles = ("user", *["assistant"] * (len(texts) - 1))
        prompt, *answers = [
            ({"role": role, "content": text},) if chat else text
            for role, text in zip(roles, texts, strict=True)
        ]
        return Candidates(PromptRecord(prompt), tuple(answers), len(lists[0]), subset, group)

    def measure(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Return `benchmark/score` and each subset's.

        A best of four counts 1, or one over the number of equal highest scores. The score of the
        whole is the mean of the subsets that are present, each with one weight.
        """
        parts: dict[str, list[Scored]] = defaultdict(list)
        for one in scored:
            parts[one.candidates.subset].append(one)
        measures: dict[str, float] = {}
        for name, part in sorted(parts.items()):
            if name == TIES:
                found = ties_metrics(part)
            else:
                by_prompt = np.array([(s[0] == max(s)) / s.count(max(s)) for _, s, _ in part])
                found = share_over_prompts(by_prompt).named("score")
            found["num_prompts"] = float(len(part))
            measures |= {part_key(f"benchmark/{k}", "subset", name): v for k, v in found.items()}
        scores = [measures[part_key("benchmark/score", "subset", name)] for name in parts]
        measures["benchmark/score"] = math.fsum(scores) / len(scores)
        measures["benchmark/num_subsets"] = float(len(parts))
        return measures


def _margins(one: Scored) -> tuple[bool, float, float]:
    """Return if all correct responses are above the others, their spread, and how far above."""
    correct = one.scores[: one.candidates.num_correct]
    to_wrong = min(correct) - max(one.scores[one.candidates.num_correct :])
    return to_wrong > 0, max(correct) - min(correct), to_wrong


def ties_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the score of the ties subset and its components.

    A number has a prompt with one correct response (`ref:`) and one with several (`tied:`). The
    score is 0.3 of each one's accuracy, 0.2 of the share of numbers whose correct responses differ
    by less than they are above the wrong ones, 0.2 of the same with the smaller of both prompts'
    margins, and 0.01 of `tanh(margin / spread - 1)`.

    Raises:
        ValueError: if a number has only one of the two.
    """
    sides: dict[str, dict[str, tuple[bool, float, float]]] = {"ref": {}, "tied": {}}
    for one in scored:
        kind, _, number = one.candidates.group.partition(":")
        sides[kind][number] = _margins(one)
    ref, tied = sides.values()
    if ref.keys() != tied.keys() or len(ref) + len(tied) != len(scored):
        alone = sorted(ref.keys() ^ tied.keys())
        raise ValueError(f"ties without their counterpart, or twice: {', '.join(alone) or '-'}")
    (ref_right, _, above), (right, spread, margin) = (
        np.array([side[number] for number in ref], dtype=float).T for side in (ref, tied)
    )
    smaller = np.minimum(margin, above)
    with np.errstate(divide="ignore", invalid="ignore"):
        closeness = np.nan_to_num(np.tanh(smaller / spread - 1), nan=0.0)
    found = {
        "ref_accuracy": float(np.mean(ref_right)),
        "tied_accuracy": float(np.mean(right)),
        "preferred": float(np.mean(margin > spread)),
        "preferred_hard": float(np.mean(smaller > spread)),
        "closeness": float(np.mean(closeness)),
    }
    weights = (0.3, 0.3, 0.2, 0.2, 0.01)
    found["score"] = math.fsum(w * v for w, v in zip(weights, found.values(), strict=True))
    return found


def score_candidates(
    candidates: Sequence[Candidates],
    scorer: Scorer,
    tokenizer: PreTrainedTokenizerBase,
    **how: Any,
) -> list[Scored]:
    """Return the scores and tokens of all responses.

    Args:
        candidates: prompts with their responses.
        scorer: scores them; its models are on `device`.
        tokenizer: tokenizer of the policy, whose tokens the scorer reads.
        **how: further arguments of `written_responses`.

    Raises:
        ValueError: if one has a prompt of more tokens, or a response has no score.
    """
    answers = written_responses(
        [one.prompt for one in candidates for _ in one.answers],
        [answer for one in candidates for answer in one.answers],
        tokenizer,
        scorer=scorer,
        **how,
    )
    if unscored := sum(map(math.isnan, answers.scores)):  # which would count as ranked wrong
        told = f"benchmark: {unscored} of {len(answers.scores)} responses have no score"
        raise ValueError(f"{told}: use a scorer that scores every response")
    unknown, ids = tokenizer.unk_token_id, answers.token_ids
    if unknown is not None and (rows := sum(unknown in one[:-1] for one in ids)):
        told = "%d of %d responses have words that the tokenizer does not know"
        logger.warning(told, rows, len(ids))
    values = iter(zip(answers.scores, answers.lengths, strict=True))
    return [
        Scored(one, *map(list, zip(*(next(values) for _ in one.answers), strict=True)))
        for one in candidates
    ]


def written_responses(
    records: Sequence[PromptRecord],
    completions: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_prompt_length: int,
    batch_size: int,
    device: torch.device,
    scorer: Scorer | None,
) -> PolicyAnswers:
    """Return given texts as responses of a policy, with their scores.

    Args:
        records: the prompts.
        completions: one a prompt, as the records write them.
        tokenizer: tokenizer of the policy, whose tokens the scorer reads.
        max_prompt_length: longest prompt, in tokens.
        batch_size: rows that are scored together.
        device: device of the scorer's models.
        scorer: scores them; without it NaN.

    Raises:
        ValueError: if a prompt has more tokens, or none: the figure would be of another set.
    """
    encoder = TextEncoder(tokenizer)
    asked: list[EncodedPrompt] = []
    answered: list[list[int]] = []
    for given in zip(records, completions, strict=True):
        record, completion = _disarmed(*given, encoder)
        row = encode_prompt(record, encoder, max_length=max_prompt_length)
        if row is None:
            told = f"benchmark: a prompt has more than prompts.max_length={max_prompt_length}"
            raise ValueError(f"{told} tokens, or none: raise it for {str(record.prompt)[:100]!r}")
        how: dict[str, Any] = {"rendered": record.rendered, "variables": record.variables}
        (found,) = prompt_and_responses(record.prompt, [completion], encoder, **how)
        prompt = np.asarray(found.prompt or row.input_ids, dtype=np.int32)
        asked.append(replace(row, input_ids=prompt))
        answered.append(found.response)
    give_same_columns(asked)
    result, pad = PolicyAnswers(), int(tokenizer.pad_token_id)  # type: ignore[arg-type]
    for start in range(0, len(asked), batch_size):
        part = slice(start, start + batch_size)
        prompts = PromptCollator(pad)([(row, start + i) for i, row in enumerate(asked[part])])
        ids = [torch.tensor(tokens, dtype=torch.int64) for tokens in answered[part]]
        mask = pad_sequence([torch.ones_like(row) for row in ids], batch_first=True)
        generation = Generation(
            sequences=torch.cat([prompts.input_ids, pad_sequence(ids, True, pad)], 1),
            response_mask=mask.bool(),  # [B, R]
            finish_reason=torch.full((len(ids),), FINISHED_BY_STOP),
        )
        answers = Responses.of(prompts.to(device), generation.to(device), tokenizer)
        # As written: a word that the tokenizer does not know is missing in what it decodes.
        texts = completions[part]
        written = tuple(one if isinstance(one, str) else one[-1]["content"] for one in texts)
        result.extend(replace(answers, completions=written), scorer)
    return result


def _disarmed(
    record: PromptRecord, completion: Text, encoder: TextEncoder
) -> tuple[PromptRecord, Text]:
    """Return both with the control tokens that they spell as plain text."""
    if record.rendered:
        return record, completion
    plain = encoder.control.disarmed
    prompt, variables = plain(record.prompt), plain(dict(record.variables))
    return replace(record, prompt=prompt, variables=variables), plain(completion)
