"""A matrix of runs and the page of their results: `python -m rlhf_lightning.study NAME`.

NAME is a file of `conf/study`, or of the folder `study` in that of `--config-dir`.

Each run is a separate process.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rlhf_lightning.app.command_line import fail, say, this_job
from rlhf_lightning.app.config.commands import EvaluateSettings, StudySettings
from rlhf_lightning.app.config.compose import register
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.run_claim import check_folder
from rlhf_lightning.app.config.save import keep_configuration
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import read_settings
from rlhf_lightning.app.prerequisites import prepare_inputs
from rlhf_lightning.app.study.engine import (
    Engine,
    Run,
    failing_in_one_line,
    outcome,
    recorded,
    run_job_of_runs,
)
from rlhf_lightning.app.study.rows import PlannedRun, plan
from rlhf_lightning.app.study.words import as_overrides, given
from rlhf_lightning.reports.study import write_study
from rlhf_lightning.reports.study_results import Result, RewardModel, Study
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.summary import Summary, read_summary, write_summary

register()
_BEST_OF = re.compile(r"best_of/(\d+)/")


def run(settings: StudySettings, folder: RunFolder) -> Summary:
    """Run what is not done yet, and write the page of all results.

    Args:
        settings: settings of the command.
        folder: folder of the study, with the runs of earlier calls.

    Returns:
        The summary: `completed`, or `failed` with the runs that failed as its cause.

    Raises:
        ConfigError: if a command line does not compose.
        RuntimeError: if a model that runs start from cannot be trained.
    """
    check_folder(settings, folder)
    keep_configuration(settings, folder)
    folder = RunFolder(folder.path.resolve())
    runs = plan(settings, folder.path)

    def write_page() -> None:
        _write_pages(settings, runs, folder.path)

    with recorded("study", settings, folder, write_page) as (summary, claim):
        left = [planned for planned in runs if not planned.is_done()]
        say(f"{len(runs)} runs, {len(runs) - len(left)} done before: {folder.path}")
        _prepare(left, folder.path)
        ended = count(len(runs) - len(left) + 1)

        def ends(one: Run, seconds: float | None) -> bool:
            status, cause = outcome(one)
            if seconds is not None:
                told = f"{status}: {cause}" if cause else status
                say(f"[{next(ended)}/{len(runs)}] {one.name}: {told} ({duration(seconds)})")
            return status == "completed"

        Engine(folder, claim, jobs=settings.jobs, logged=True).run(runs, ends)
        failed = [planned for planned in runs if not planned.is_done()]
        names = ", ".join(planned.name for planned in failed)
        summary = replace(
            summary,
            status="failed" if failed else "completed",
            cause=f"{len(failed)} of {len(runs)} runs failed: {names}" if failed else None,
        )
        write_summary(folder, summary)
    return summary


def _prepare(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Train the models that runs start from and that are missing, each once.

    Collections and evaluations make their own: their policies tell what they need.
    """
    for planned in runs:
        if isinstance(planned.settings, TrainSettings):
            words = [*planned.words, given("paths.outputs", folder / "prerequisites")]
            kinds = [kind for kind in MODELS if kind not in planned.starts_from]
            prepare_inputs(planned.settings, words, say, kinds=kinds)


def _write_pages(settings: StudySettings, runs: Sequence[PlannedRun], folder: Path) -> None:
    results = tuple(result for planned in runs for result in _results(planned))
    study = Study(
        settings.name,
        settings.about,
        results,
        tuple(settings.measure),
        tuple(settings.at_kl),
        published={name: row.published for name, row in settings.runs.items()},
        source=settings.source,
        protocol=settings.protocol,
        expected=settings.expected,
        reward_models={
            name: RewardModel(**row.reward_model.model_dump())
            for name, row in settings.runs.items()
            if row.reward_model is not None
        },
        starts=settings.begun_from,
    )
    for page in write_study(study, folder):
        say(str(page))


def _results(planned: PlannedRun) -> list[Any]:
    """Return the result of a run; of an evaluation of the best of n one for each n."""
    result = _result(planned)
    sizes = sorted({int(found[1]) for name in result.metrics if (found := _BEST_OF.match(name))})
    if not result.completed and isinstance(planned.settings, EvaluateSettings):
        sizes = sorted(planned.settings.best_of.n)  # each n lacks a seed
    return [
        replace(
            result,
            setting=f"{result.setting} n={size}".strip(),
            metrics=_of_best(result.metrics, f"best_of/{size}/"),
            kl_is_bound=True,
        )
        for size in sizes
        if size > 1  # the policy itself
    ] or [result]


def _of_best(metrics: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Return the metrics of the best of n by the names that those of a trained policy have."""
    found = {f"val/{k.removeprefix(head)}": v for k, v in metrics.items() if k.startswith(head)}
    for name in ("gold", "score"):  # of the policy itself, over the same pool
        found[f"val/baseline_{name}"] = metrics.get(f"best_of/1/{name}")
    return {name: value for name, value in found.items() if value is not None}


def _result(planned: PlannedRun) -> Any:
    folder, tries = planned.folder(), planned.attempts()
    status, cause = outcome(planned)
    ended = [row for row in tries if row.code is not None]
    begun = [row for row in tries if row.code is None and row.made is None]
    done = folder is not None and status == "completed"
    summary = None if folder is None else read_summary(folder)
    return Result(
        planned.row,
        planned.setting,
        planned.seed,
        status=status,
        cause=cause,
        data_set=planned.settings.dataset.name,
        answers=planned.answers,
        metrics=summary.metrics if done and summary is not None else {},
        rows=read_metrics(folder.metrics) if done and folder is not None else (),
        seconds=sum(row.seconds for row in ended),
        cpu_seconds=sum(row.cpu_seconds for row in ended),
        peak_mib=max((row.peak_mib for row in ended), default=0.0),
        times_are_whole=len(ended) == len(begun),
        about={} if summary is None else summary.about,
    )


def _job(cfg: Any) -> None:
    folder, *_ = this_job()
    with failing_in_one_line("study"):
        summary = run(read_settings(StudySettings, cfg), folder)
    if summary.status != "completed":
        fail(str(summary.cause), 1)


def arguments(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as Hydra reads them: flags first, NAME as `study=NAME`."""
    flags: list[str] = []
    given_words: list[str] = []
    for before, word in zip(["", *words], words, strict=False):
        is_value = before.startswith("-") and "=" not in before + word and word[0] != "~"
        (flags if word.startswith("-") or is_value else given_words).append(word)
    if given_words and "=" not in given_words[0]:
        given_words[0] = f"study={given_words[0]}"
    return [*flags, *as_overrides(given_words)]


def _check(settings: StudySettings) -> None:
    first = settings.model_copy(update={"seeds": settings.seeds[:1]})
    plan(first, Path(settings.paths.outputs))


def main() -> None:
    """Run the command line."""
    run_job_of_runs("study", arguments(sys.argv[1:]), _check, _job)


if __name__ == "__main__":
    main()
