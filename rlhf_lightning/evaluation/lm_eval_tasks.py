"""Benchmarks of policies: tasks of lm-eval on exported models."""

from __future__ import annotations

import logging
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlhf_lightning.arguments import Count, CountOrZero, Names, PathOrName, Size, checked
from rlhf_lightning.evaluation.benchmarks import RewardBenchmark
from rlhf_lightning.evaluation.win_rate import Interval, share_over_prompts
from rlhf_lightning.runs.metric_catalog import part_key

logger = logging.getLogger(__name__)


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
        question, or a list of them, such as IFEval's of instructions, whose mean lm-eval reports.
        One question of each task is asked first, so that one without such a metric ends at once.

        Args:
            policy: folder of an exported model, or hub name.
            baseline: the same of the other side.
            tokenizers: folders of the tokenizers of both; those of the models where it is empty.
            model_args: further arguments of lm-eval's model `hf`.

        Raises:
            ValueError: if a task is unknown, or has no such metric.
        """
        from lm_eval.tasks import TaskManager

        # lm-eval reads thousands of its files: skip them if the folder has all requested tasks.
        own = self.include_path and str(self.include_path)
        for everything in (False, True) if own else (True,):
            manager = TaskManager(include_path=own, include_defaults=everything)
            unknown = [task for task in self.tasks if not manager.match_tasks([task])]
            if not unknown:
                break
        else:
            fix = "`lm-eval ls tasks` lists them, benchmark.include_path=FOLDER adds your own"
            raise ValueError(f"benchmark.tasks: lm-eval has no {', '.join(unknown)}; {fix}")
        device = "cuda" if torch.cuda.is_available() else "cpu"
        model_args = {"device": device, "dtype": "float32", **model_args}
        sides = [model_args | {"pretrained": source} for source in (policy, baseline)]
        for side, tokenizer in zip(sides, tokenizers, strict=False):
            side["tokenizer"] = tokenizer
        self._samples(sides[0], manager, limit=1)
        mine, theirs = (self._samples(side, manager, limit=self.limit) for side in sides)
        found: dict[str, float] = {}
        for task, metrics in mine.items():
            for metric in (name for name in metrics if name in theirs[task]):
                now, before = metrics[metric], theirs[task][metric]
                measures = _compared(metric, [(now[key], before[key]) for key in sorted(now)])
                found |= {part_key(f"benchmark/{k}", "task", task): v for k, v in measures.items()}
        return found

    def _samples(
        self, model_args: dict[str, Any], manager: Any, *, limit: int | None
    ) -> dict[str, dict[str, dict[int, np.ndarray]]]:
        """Return task -> metric -> number of a question -> its values."""
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
    of = share_over_prompts((change / reach + 1) / 2)
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
    found, other = {}, set()
    for (metric, rule), by_question in values.items():
        parts, told = list(by_question.values()), reported.get(f"{metric},{rule}")
        plain = all(x.size and x.ndim == 1 and x.dtype.kind in "bif" for x in parts)
        if plain and isinstance(told, int | float) and _is_mean(told, np.concatenate(parts)):
            behind = "" if rule == "none" else "_" + rule.replace("-", "_")
            found[metric + behind] = by_question
        else:
            other.add(metric)
    left_out = ", ".join(sorted(other)) or "there is none"
    if not found:
        none = f"benchmark.tasks: {task} has no metric that is a mean over questions ({left_out})"
        raise ValueError(f"{none}: leave the task out")
    if other:
        logger.warning("%s of %s is no mean over questions: left out", left_out, task)
    return found


def _is_mean(value: float, values: np.ndarray) -> bool:
    return math.isfinite(value) and math.isclose(float(values.mean()), value, abs_tol=1e-9)


Benchmark = RewardBenchmark | LmEvalBenchmark
