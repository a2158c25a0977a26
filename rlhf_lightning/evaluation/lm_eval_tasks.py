"""Benchmarks of policies: tasks of lm-eval on exported models."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from statistics import fmean
from typing import Any

import numpy as np
import torch

from rlhf_lightning.arguments import Count, CountOrZero, Names, PathOrName, Size, checked
from rlhf_lightning.evaluation.benchmarks import RewardBenchmark
from rlhf_lightning.evaluation.win_rate import Interval, share_over_prompts
from rlhf_lightning.runs.metric_catalog import part_key

# task -> metric -> number of a question -> its value.
Values = dict[str, dict[str, dict[int, float]]]


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

    def measure(
        self,
        policy: str,
        baseline: str,
        *,
        tokenizers: Sequence[str] = (),
        **model_args: Any,
    ) -> dict[str, float]:
        """Return of each task and metric the policy's mean, the baseline's, and the change.

        Names are `benchmark/<metric>/task/<task>`, `benchmark/baseline_<metric>/task/<task>` and
        `benchmark/<metric>_change/task/<task>` with the ends of its 95 % interval over the
        questions, each with both responses: see `share_over_prompts`. A metric is a number for each
        question, whose mean lm-eval reports; others are left out. One question of each task is
        asked first, so that a task without such a metric ends at once.

        Args:
            policy: folder of an exported model, or hub name.
            baseline: the same of the other side.
            tokenizers: folders of the tokenizers of both; those of the models where it is empty.
            model_args: further arguments of lm-eval's model `hf`.

        Raises:
            ValueError: if a task is unknown, has no such metric, or may show a question its answer.
        """
        from lm_eval.tasks import TaskManager

        manager = TaskManager(include_path=self.include_path and str(self.include_path))
        if unknown := [task for task in self.tasks if not manager.match_tasks([task])]:
            fix = "`lm-eval ls tasks` lists them, benchmark.include_path=FOLDER adds your own"
            raise ValueError(f"benchmark.tasks: lm-eval has no {', '.join(unknown)}; {fix}")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model_args = {"device": device, "dtype": "float32", **model_args}
        sides = [model_args | {"pretrained": source} for source in (policy, baseline)]
        for side, tokenizer in zip(sides, tokenizers, strict=False):
            side["tokenizer"] = tokenizer
        self._values(sides[0], manager, limit=1)
        mine, theirs = (self._values(side, manager, limit=self.limit) for side in sides)
        found: dict[str, float] = {}
        for task, metrics in mine.items():
            for metric in (name for name in metrics if name in theirs[task]):
                measures = _compared(metric, metrics[metric], theirs[task][metric])
                found |= {part_key(f"benchmark/{k}", "task", task): v for k, v in measures.items()}
        return found

    def _values(self, model_args: dict[str, Any], manager: Any, *, limit: int | None) -> Values:
        from lm_eval import simple_evaluate

        result = simple_evaluate(
            model="hf",
            model_args=model_args,
            tasks=list(self.tasks),
            num_fewshot=self.num_fewshot,
            batch_size=self.batch_size,
            limit=limit,
            bootstrap_iters=0,
            apply_chat_template=self.apply_chat_template,
            task_manager=manager,
        )
        for task, config in result["configs"].items():
            if result["n-shot"].get(task):
                _check_examples(task, config)
        reported = result["results"]
        return {t: _by_metric(t, each, reported[t]) for t, each in result["samples"].items()}


def _check_examples(task: str, config: Mapping[str, Any]) -> None:
    """Refuse examples that lm-eval draws from the questions, but without leaving one out."""
    examples, asked = config["fewshot_config"], config.get("test_split")
    rest = [config.get(f"{name}_split") for name in ("training", "validation", "test")]
    pool = examples["split"] or (not examples["samples"] and next(filter(None, rest), None))
    if pool == (asked or config.get("validation_split")) and examples["split"] != asked:
        why = "lm-eval may show a question its own answer as an example"
        fix = f"write `test_split: {pool}` and `fewshot_split: {pool}` in the task's file"
        raise ValueError(f"benchmark.tasks: {task}: {why}; {fix}, or benchmark.num_fewshot=0")


def _compared(
    metric: str, mine: Mapping[int, float], theirs: Mapping[int, float]
) -> dict[str, float]:
    """Return the policy's mean of a metric, the baseline's, and the change with its interval."""
    both = np.array([(mine[question], theirs[question]) for question in sorted(mine)], dtype=float)
    change = both[:, 0] - both[:, 1]
    # As shares, so that the interval never has width 0.
    reach = max(1.0, float(np.abs(change).max()))
    of = share_over_prompts((change / reach + 1) / 2)
    return {
        metric: float(both[:, 0].mean()),
        f"baseline_{metric}": float(both[:, 1].mean()),
        **Interval(*(reach * (2 * value - 1) for value in of)).named(f"{metric}_change"),
        "num_questions": float(len(both)),
    }


def _by_metric(
    task: str, samples: Sequence[Mapping[str, Any]], reported: Mapping[str, Any]
) -> dict[str, dict[int, float]]:
    """Return metric -> number of a question -> its value; the name of a filter is appended."""
    values: dict[tuple[str, str], dict[int, Any]] = defaultdict(dict)
    for one in samples:
        for metric in one["metrics"]:
            values[metric, one.get("filter", "none")][one["doc_id"]] = one[metric]
    found = {}
    for (metric, rule), by_question in values.items():
        told: Any = reported.get(f"{metric},{rule}")
        each = by_question.values()
        numbers = all(isinstance(value, Number | np.bool_) for value in (told, *each))
        if numbers and math.isfinite(told) and math.isclose(fmean(each), told, abs_tol=1e-9):
            found[metric + ("" if rule == "none" else "_" + rule.replace("-", "_"))] = by_question
    if not found:
        none = f"benchmark.tasks: {task} has no metric that is a mean over questions"
        left_out = ", ".join(sorted({metric for metric, _ in values})) or "there is none"
        raise ValueError(f"{none} ({left_out}): leave the task out")
    return found


Benchmark = RewardBenchmark | LmEvalBenchmark
