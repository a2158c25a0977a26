"""Tasks of EleutherAI's lm-eval on a policy and on what it started from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from rlhf_lightning.evaluation.comparisons import Interval, share_over_prompts
from rlhf_lightning.evaluation.win_rate import CONFIDENCE
from rlhf_lightning.preferences.candidates import LoadedPolicy
from rlhf_lightning.runs.metric_catalog import part_key

METRICS = ("acc", "acc_norm", "exact_match")  # each a mean over questions


@dataclass(frozen=True)
class LmEvalBenchmark:
    """Tasks of lm-eval, with paired intervals of the change from the baseline.

    Args:
        tasks: their names.
        include_path: folder of task files of one's own.
        num_fewshot: examples before each question; None as the task says.
        limit: questions of each task; None for all.
        batch_size: rows of a forward.
        apply_chat_template: questions as messages of a user.
    """

    tasks: Sequence[str]
    include_path: str | Path | None = None
    num_fewshot: int | None = None
    limit: int | None = None
    batch_size: int = 8
    apply_chat_template: bool = False

    def measure(self, policy: LoadedPolicy, baseline: LoadedPolicy) -> dict[str, float]:
        """Return of each task and metric the policy's mean, the baseline's, and the change.

        Names are `benchmark/<metric>/task/<task>`, `benchmark/baseline_<metric>/task/<task>` and
        `benchmark/<metric>_change/task/<task>` with the ends of its 95 % interval over the
        questions, each with both responses: see `share_over_prompts`.

        Raises:
            ValueError: if a task is unknown, or has no metric that is known here.
        """
        mine, theirs = self._samples(policy), self._samples(baseline)
        found: dict[str, float] = {}
        for task, metrics in mine.items():
            for metric, by_question in metrics.items():
                before = theirs[task][metric]
                if by_question.keys() != before.keys():
                    raise ValueError(f"task {task}: both sides were not asked the same questions")
                both = np.array([(by_question[key], before[key]) for key in sorted(by_question)])
                # Differences of values in [0, 1] as shares, so that the interval never has width 0.
                shares = (both[:, 0] - both[:, 1] + 1) / 2
                of = share_over_prompts(shares, confidence=CONFIDENCE)
                of = Interval(*(2 * value - 1 for value in of))
                measures = {
                    metric: float(both[:, 0].mean()),
                    f"baseline_{metric}": float(both[:, 1].mean()),
                    **of.named(f"{metric}_change"),
                    "num_questions": float(len(both)),
                }
                found |= {part_key(f"benchmark/{k}", "task", task): v for k, v in measures.items()}
        return found

    def _samples(self, side: LoadedPolicy) -> dict[str, dict[str, dict[int, float]]]:
        """Return task -> metric -> number of a question -> value."""
        from lm_eval import simple_evaluate
        from lm_eval.models.huggingface import HFLM
        from lm_eval.tasks import TaskManager

        # lm-eval reads thousands of files of its own: not where the folder has all that is asked.
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
                limit=self.limit,
                bootstrap_iters=0,
                apply_chat_template=self.apply_chat_template,
                task_manager=manager,
            )
        return {task: _by_metric(task, samples) for task, samples in result["samples"].items()}


def _by_metric(task: str, samples: Sequence[dict[str, Any]]) -> dict[str, dict[int, float]]:
    """Return metric -> number of a question -> value; a metric of a filter has its name behind."""
    found: dict[str, dict[int, float]] = {}
    for one in samples:
        rule = one.get("filter", "none")
        behind = "" if rule == "none" else "_" + rule.replace("-", "_")
        for metric in METRICS:
            if metric in one:
                found.setdefault(metric + behind, {})[one["doc_id"]] = float(one[metric])
    if not found:
        raise ValueError(f"benchmark.tasks: {task} has none of the metrics {', '.join(METRICS)}")
    return found
