"""Benchmarks of reward models: pairs of a file, and RewardBench 2."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlhf_lightning.arguments import PathOrName, checked
from rlhf_lightning.data.conversations import from_json
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.data.records import PreferenceRecord, Text
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.evaluation.comparisons import share_over_prompts
from rlhf_lightning.evaluation.reward_accuracy import ScoredPair, pair_metrics, whole_metrics
from rlhf_lightning.evaluation.win_rate import CONFIDENCE
from rlhf_lightning.runs.hub import unreachable_hub
from rlhf_lightning.runs.metric_catalog import part_key


@dataclass(frozen=True)
class Candidates:
    """Responses to one prompt, the correct ones first.

    Args:
        prompt: a text, or a list of messages.
        answers: responses in the form of the prompt.
        num_correct: number of correct responses.
        subset: name of the subset, or "".
        group: name of the group within its subset, or "".
        record: record of a pair that comes from one.
    """

    prompt: Text
    answers: tuple[Text, ...]
    num_correct: int = 1
    subset: str = ""
    group: str = ""
    record: PreferenceRecord | None = None


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
        subset: column whose values name subsets; rows need not have it.
    """

    path: PathOrName
    subset: str = "subset"

    def candidates(self, *, chat: bool) -> list[Candidates]:
        """Return the pairs as the file writes them.

        Raises:
            BadRecordError: for a row that is no pair.
        """
        found = FileSource(self.path, validation_fraction=0.0).records("preferences", "train")
        rows = checked_rows(Path(self.path).expanduser())
        names = [str(row.get(self.subset) or "") for _, row in rows]
        return [
            Candidates(pair.prompt, (pair.chosen, pair.rejected), subset=name, record=pair)
            for pair, name in zip(found, names, strict=True)
            if isinstance(pair, PreferenceRecord)
        ]

    def measure(self, scored: Sequence[Scored]) -> dict[str, float]:
        """Return `benchmark/accuracy` and what `pair_metrics` finds, under `benchmark/`."""
        pairs = [
            ScoredPair(
                one.scores[0],
                one.scores[1],
                one.lengths[0],
                one.lengths[1],
                subsets=(one.candidates.subset,) if one.candidates.subset else (),
                domain="" if one.candidates.record is None else one.candidates.record.domain,
                prompt=repr(one.candidates.prompt),
            )
            for one in scored
        ]
        measures = whole_metrics(pairs) | pair_metrics(pairs)
        return {f"benchmark/{name.removeprefix('val/')}": v for name, v in measures.items()}


TIES = "Ties"
SUBSETS = ("Factuality", "Precise IF", "Math", "Safety", "Focus", TIES)
COLUMNS = {"id", "prompt", "chosen", "rejected", "subset"}


def _listed(cell: Any, key: str, where: Location) -> list[Any]:
    """Return the texts of a cell, which a CSV file holds as JSON."""
    texts = from_json(cell)
    if not isinstance(texts, list | tuple):
        raise BadRecordError(where, f"{key} is {describe(cell)}", "write lists of texts")
    return list(texts)


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
        if missing := sorted(COLUMNS - set(row)):
            raise BadRecordError(
                where, f"{', '.join(missing)} missing", "give the columns of RewardBench 2"
            )
        correct, wrong = (_listed(row[key], key, where) for key in ("chosen", "rejected"))
        if not correct or not wrong:
            raise BadRecordError(where, "chosen or rejected is empty", "give one of each or more")
        texts = (row["prompt"], *correct, *wrong)
        if not all(isinstance(text, str) for text in texts):
            raise BadRecordError(where, "a text is no string", "give strings")
        subset, group = str(row["subset"]), str(row["id"])
        if subset.lower() == TIES.lower():
            kind, colon, number = group.partition(":")
            if kind not in ("ref", "tied") or not colon or not number:
                raise BadRecordError(where, f"id={group!r}", "ties are ref:NUMBER and tied:NUMBER")
            subset = TIES
        roles = ("user", *["assistant"] * (len(texts) - 1))
        prompt, *answers = [
            ({"role": role, "content": text},) if chat else text
            for role, text in zip(roles, texts, strict=True)
        ]
        return Candidates(prompt, tuple(answers), len(correct), subset, group)

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
                found = share_over_prompts(by_prompt, confidence=CONFIDENCE).named("score")
            found["num_prompts"] = float(len(part))
            measures |= {part_key(f"benchmark/{k}", "subset", name): v for k, v in found.items()}
        scores = [measures[part_key("benchmark/score", "subset", name)] for name in parts]
        measures["benchmark/score"] = math.fsum(scores) / len(scores)
        measures["benchmark/num_subsets"] = float(len(parts))
        return measures


class _Margins(NamedTuple):
    accurate: bool  # every correct response above every wrong one
    among_correct: float  # best correct less worst correct
    to_wrong: float  # worst correct less best wrong


def _margins(one: Scored) -> _Margins:
    correct = one.scores[: one.candidates.num_correct]
    to_wrong = min(correct) - max(one.scores[one.candidates.num_correct :])
    return _Margins(to_wrong > 0, max(correct) - min(correct), to_wrong)


def ties_metrics(scored: Sequence[Scored]) -> dict[str, float]:
    """Return the score of the ties subset and its components.

    A number has a prompt with one correct response (`ref:`) and one with several (`tied:`). The
    score is 0.3 of each one's accuracy, 0.2 of the share of numbers whose correct responses differ
    by less than they are above the wrong ones, 0.2 of the same with the smaller of both prompts'
    margins, and 0.01 of `tanh(margin / spread - 1)`.

    Raises:
        ValueError: if a number has only one of the two.
    """
    of = {one.candidates.group: _margins(one) for one in scored}
    ref = {group.partition(":")[2]: m for group, m in of.items() if group.startswith("ref:")}
    tied = {group.partition(":")[2]: m for group, m in of.items() if group.startswith("tied:")}
    if ref.keys() != tied.keys() or len(of) != len(scored):
        alone = sorted(ref.keys() ^ tied.keys())
        raise ValueError(f"ties without their counterpart, or twice: {', '.join(alone) or '-'}")
    spread = np.array([tied[number].among_correct for number in ref])
    margin = np.array([tied[number].to_wrong for number in ref])
    smaller = np.minimum(margin, [ref[number].to_wrong for number in ref])
    with np.errstate(divide="ignore", invalid="ignore"):
        closeness = np.nan_to_num(np.tanh(smaller / spread - 1), nan=0.0)
    found = {
        "ref_accuracy": float(np.mean([m.accurate for m in ref.values()])),
        "tied_accuracy": float(np.mean([m.accurate for m in tied.values()])),
        "preferred": float(np.mean(margin > spread)),
        "preferred_hard": float(np.mean(smaller > spread)),
        "closeness": float(np.mean(closeness)),
    }
    weights = (0.3, 0.3, 0.2, 0.2, 0.01)
    found["score"] = math.fsum(w * v for w, v in zip(weights, found.values(), strict=True))
    return found


def offsets(candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
    """Return begin and end of each prompt's responses in a list of all responses."""
    ends = np.cumsum([0, *(len(one.answers) for one in candidates)]).tolist()
    return list(pairwise(ends))
