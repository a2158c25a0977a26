"""Benchmarks: of reward models pairs of a file and RewardBench 2, of policies lm-eval's tasks."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np

from rlhf_lightning.arguments import Count, CountOrZero, Names, PathOrName, Size, checked
from rlhf_lightning.data.errors import BadRecordError, Location, describe
from rlhf_lightning.data.files import checked_rows
from rlhf_lightning.data.records import PreferenceRecord, Text
from rlhf_lightning.data.sources.base import FileSource
from rlhf_lightning.data.texts import from_json
from rlhf_lightning.evaluation.reward_accuracy import ScoredPair, pair_metrics, whole_metrics
from rlhf_lightning.evaluation.win_rate import CONFIDENCE, Interval, share_over_prompts
from rlhf_lightning.preferences.candidates import LoadedPolicy
from rlhf_lightning.runs.hub import unreachable_hub
from rlhf_lightning.runs.metric_catalog import part_key

logger = logging.getLogger(__name__)


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
        pairs = []
        for one, scores, lengths in scored:
            subsets = (one.subset,) if one.subset else ()
            domain = "" if one.record is None else one.record.domain
            (good, bad), (long, other) = scores, lengths
            pairs.append(ScoredPair(good, bad, long, other, subsets, domain, repr(one.prompt)))
        measures = whole_metrics(pairs) | pair_metrics(pairs)
        return {f"benchmark/{name.removeprefix('val/')}": v for name, v in measures.items()}


TIES = "Ties"
SUBSETS = ("Factuality", "Precise IF", "Math", "Safety", "Focus", TIES)


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
            fix = (
                "give prompt, a text; chosen and rejected, lists of texts; subset; id, of ties "
                "ref:NUMBER and tied:NUMBER"
            )
            raise BadRecordError(where, f"it is {describe(row)}, not of RewardBench 2", fix)
        roles = ("user", *["assistant"] * (len(texts) - 1))
        prompt, *answers = [
            ({"role": role, "content": text},) if chat else text
            for role, text in zip(roles, texts, strict=True)
        ]
        return Candidates(prompt, tuple(answers), len(lists[0]), subset, group)

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


def offsets(candidates: Sequence[Candidates]) -> list[tuple[int, int]]:
    """Return begin and end of each prompt's responses in a list of all responses."""
    ends = np.cumsum([0, *(len(one.answers) for one in candidates)]).tolist()
    return list(pairwise(ends))


@checked
@dataclass(frozen=True)
class LmEvalBenchmark:
    """Tasks of lm-eval, with paired intervals of the change from the baseline.

    Args:
        tasks: names of the tasks.
        include_path: folder of further task files.
        num_fewshot: examples before each question; None as the task says.
        limit: questions of each task; None for all.
        batch_size: rows of a forward.
        apply_chat_template: questions as messages of a user.
    """

    tasks: Names
    include_path: PathOrName | None = None
    num_fewshot: CountOrZero | None = None
    limit: Count | None = None
    batch_size: Size = 8
    apply_chat_template: bool = False

    def measure(self, policy: LoadedPolicy, baseline: LoadedPolicy) -> dict[str, float]:
        """Return of each task and metric the policy's mean, the baseline's, and the change.

        Names are `benchmark/<metric>/task/<task>`, `benchmark/baseline_<metric>/task/<task>` and
        `benchmark/<metric>_change/task/<task>` with the ends of its 95 % interval over the
        questions, each with both responses: see `share_over_prompts`. A metric is a number for each
        question, or a list of them, such as IFEval's of instructions, whose mean lm-eval reports.
        One question of each task is asked first, so that one without such a metric ends at once.

        Raises:
            ValueError: if a task is unknown, or has no such metric.
        """
        self._samples(policy, limit=1)
        mine, theirs = (self._samples(side, limit=self.limit) for side in (policy, baseline))
        found: dict[str, float] = {}
        for task, metrics in mine.items():
            for metric in (name for name in metrics if name in theirs[task]):
                now, before = metrics[metric], theirs[task][metric]
                if now.keys() != before.keys():
                    raise ValueError(f"task {task}: both sides were not asked the same questions")
                measures = _compared(metric, [(now[key], before[key]) for key in sorted(now)])
                found |= {part_key(f"benchmark/{k}", "task", task): v for k, v in measures.items()}
        return found

    def _samples(
        self, side: LoadedPolicy, *, limit: int | None
    ) -> dict[str, dict[str, dict[int, np.ndarray]]]:
        """Return task -> metric -> number of a question -> its values."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        # lm-eval reads thousands of its files: skip them if the folder has all requested tasks.
        own = self.include_path and str(self.include_path)
        for everything in (False, True) if own else (True,):
            manager = TaskManager(include_path=own, include_defaults=everything)
            unknown = [task for task in self.tasks if not manager.match_tasks([task])]
            if not unknown:
                break
        else:
            raise ValueError(
                f"benchmark.tasks: lm-eval has no {', '.join(unknown)}; `lm-eval ls tasks` lists "
                "them, and benchmark.include_path=FOLDER adds your own"
            )
        with side.model.generating() as model:
            own_model: Any = {"pretrained": model, "tokenizer": side.tokenizer}
            result = simple_evaluate(
                model=HFLM(**own_model, batch_size=self.batch_size),
                tasks=list(self.tasks),
                num_fewshot=self.num_fewshot,
                limit=limit,
                bootstrap_iters=0,
                apply_chat_template=self.apply_chat_template,
                task_manager=manager,
            )
        return {
            task: _by_metric(task, samples, result["results"][task])
            for task, samples in result["samples"].items()
        }


def _compared(metric: str, pairs: Sequence[tuple[np.ndarray, np.ndarray]]) -> dict[str, float]:
    """Return the policy's mean of a metric, the baseline's, and the change with its interval."""
    both = np.array([(mine.mean(), theirs.mean()) for mine, theirs in pairs])
    parts = np.array([len(mine) for mine, _ in pairs], dtype=float)
    both *= (parts / parts.mean())[:, None]  # each part counts the same
    change = both[:, 0] - both[:, 1]
    # As shares, so that the interval never has width 0.
    reach = max(1.0, float(np.abs(change).max()))
    of = share_over_prompts((change / reach + 1) / 2, confidence=CONFIDENCE)
    return {
        metric: float(both[:, 0].mean()),
        f"baseline_{metric}": float(both[:, 1].mean()),
        **Interval(*(reach * (2 * value - 1) for value in of)).named(f"{metric}_change"),
        "num_questions": float(len(both)),
    }


def _by_metric(
    task: str, samples: Sequence[Mapping[str, Any]], reported: Mapping[str, Any]
) -> dict[str, dict[int, np.ndarray]]:
    """Return metric -> number of a question -> its values; the name of a filter is appended.

    A metric is left out where its values are no numbers, or lm-eval reports not their mean.
    """
    values: dict[tuple[str, str], dict[int, np.ndarray]] = defaultdict(dict)
    for one in samples:
        for metric in one["metrics"]:
            value = one[metric] if isinstance(one[metric], list) else [one[metric]]
            values[metric, one.get("filter", "none")][one["doc_id"]] = np.asarray(value)
    found: dict[str, dict[int, np.ndarray]] = {}
    other = set()
    for (metric, rule), by_question in values.items():
        told, parts = reported.get(f"{metric},{rule}"), list(by_question.values())
        plain = all(x.size and x.ndim == 1 and x.dtype.kind in "bif" for x in parts)
        mean = np.concatenate(parts).mean() if plain else math.nan
        if not isinstance(told, int | float) or math.isinf(told):
            told = math.nan
        if math.isclose(mean, told, abs_tol=1e-9):
            behind = "" if rule == "none" else "_" + rule.replace("-", "_")
            found[metric + behind] = by_question
        else:
            other.add(metric)
    left_out = ", ".join(sorted(other)) or "there is none"
    if not found:
        raise ValueError(
            f"benchmark.tasks: {task} has no metric that is a mean over its questions ({left_out}):"
            " leave the task out"
        )
    if other:
        logger.warning("%s of %s is no mean over questions: left out", left_out, task)
    return found


Benchmark = RewardBenchmark | LmEvalBenchmark
