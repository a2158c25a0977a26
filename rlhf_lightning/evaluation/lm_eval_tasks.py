"""Tasks of EleutherAI's lm-eval on a policy and on what it started from."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from rlhf_lightning.arguments import Count, CountOrZero, Names, PathOrName, Size, checked
from rlhf_lightning.evaluation.benchmarks import RewardBenchmark
from rlhf_lightning.evaluation.comparisons import Interval, share_over_prompts
from rlhf_lightning.evaluation.win_rate import CONFIDENCE
from rlhf_lightning.preferences.candidates import LoadedPolicy
from rlhf_lightning.runs.metric_catalog import part_key

logger = logging.getLogger(__name__)


class QuestionResult(NamedTuple):
    """Result of a metric on one question: the mean of its parts, and their number."""

    mean: float
    parts: int


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
            for metric, by_question in metrics.items():
                before = theirs[task].get(metric)
                if before is None:
                    continue
                if by_question.keys() != before.keys():
                    raise ValueError(f"task {task}: both sides were not asked the same questions")
                pairs = [(by_question[key], before[key]) for key in sorted(by_question)]
                measures = _compared(metric, pairs)
                found |= {part_key(f"benchmark/{k}", "task", task): v for k, v in measures.items()}
        return found

    def _samples(
        self, side: LoadedPolicy, *, limit: int | None
    ) -> dict[str, dict[str, dict[int, QuestionResult]]]:
        """Return task -> metric -> number of a question -> value."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        # lm-eval reads thousands of its files: skip them if the folder has all requested tasks.
        own = self.include_path and str(self.include_path)
        manager = TaskManager(include_path=own, include_defaults=not own)
        unknown = [task for task in self.tasks if not manager.match_tasks([task])]
        if unknown and own:
            manager = TaskManager(include_path=own)
            unknown = [task for task in self.tasks if not manager.match_tasks([task])]
        if unknown:
            raise ValueError(
                f"benchmark.tasks: lm-eval has no {', '.join(unknown)}; `lm-eval ls tasks` lists "
                "them, and benchmark.include_path=FOLDER adds your own"
            )
        with side.model.generating() as model:
            adapted: Any = HFLM(
                pretrained=model, tokenizer=side.tokenizer, batch_size=self.batch_size
            )
            result = simple_evaluate(
                model=adapted,
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


def _compared(
    metric: str, pairs: Sequence[tuple[QuestionResult, QuestionResult]]
) -> dict[str, float]:
    """Return the policy's mean of a metric, the baseline's, and the change with its interval."""
    both = np.array([(mine.mean, theirs.mean) for mine, theirs in pairs])
    parts = np.array([mine.parts for mine, _ in pairs], dtype=float)
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
) -> dict[str, dict[int, QuestionResult]]:
    """Return metric -> number of a question -> value; the name of a filter is appended.

    Args:
        task: name of the task.
        samples: samples of lm-eval.
        reported: results of lm-eval; a metric is left out if the mean over its questions differs.
    """
    values: dict[tuple[str, str], dict[int, QuestionResult | None]] = {}
    for one in samples:
        for metric in one["metrics"]:
            of = values.setdefault((metric, one.get("filter", "none")), {})
            of[one["doc_id"]] = _question_result(one[metric])
    found: dict[str, dict[int, QuestionResult]] = {}
    other = []
    for (metric, rule), by_question in values.items():
        known = {key: value for key, value in by_question.items() if value is not None}
        if len(known) == len(by_question) and _is_mean(known, reported.get(f"{metric},{rule}")):
            behind = "" if rule == "none" else "_" + rule.replace("-", "_")
            found[metric + behind] = known
        else:
            other.append(metric)
    if not found:
        raise ValueError(
            f"benchmark.tasks: {task} has no metric that is a mean over its questions "
            f"({', '.join(sorted(set(other))) or 'it has none'} is not): leave the task out"
        )
    if other:
        logger.warning("%s of %s is no mean over questions: left out", ", ".join(other), task)
    return found


def _question_result(value: Any) -> QuestionResult | None:
    """Return what a metric made of one question, None where that is no number."""
    parts = np.asarray(value if isinstance(value, list) else [value])
    if parts.size == 0 or parts.ndim != 1 or parts.dtype.kind not in "bif":
        return None
    return QuestionResult(float(parts.mean()), len(parts)) if np.isfinite(parts).all() else None


def _is_mean(by_question: Mapping[int, QuestionResult], reported: Any) -> bool:
    total = sum(value.mean * value.parts for value in by_question.values())
    mean = total / sum(value.parts for value in by_question.values())
    return isinstance(reported, int | float) and math.isclose(mean, reported, abs_tol=1e-9)


Benchmark = RewardBenchmark | LmEvalBenchmark
