"""A matrix of runs and one page of what they show: `python -m rlhf_lightning.study NAME`.

NAME is a file of `conf/study`, or of the folder `study` in that of `--config-dir`.

Each run is a process of its own. Must not import torch: the runs do.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rlhf_lightning.app.command_line import check_command_line, fail, run_job, say, this_job
from rlhf_lightning.app.config.commands import EvaluateSettings, StudySettings
from rlhf_lightning.app.config.compose import ConfigError, register
from rlhf_lightning.app.config.groups import MODELS
from rlhf_lightning.app.config.run_claim import check_folder
from rlhf_lightning.app.config.save import keep_secrets
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import read_settings
from rlhf_lightning.app.pipeline.steps import as_overrides, given
from rlhf_lightning.app.prerequisites import prepare_inputs
from rlhf_lightning.app.study.plan import PlannedRun, plan
from rlhf_lightning.distributed.launch import agree_on, launch_time, own_environment
from rlhf_lightning.runs.folder import RunFolder, read_metrics
from rlhf_lightning.runs.lock import claim_run, is_claimed
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.reading import loads
from rlhf_lightning.runs.summary import Summary, new_summary, read_summary, write_summary

register()
LOG = "log.txt"  # of the newest attempt
_BEST_OF = re.compile(r"best_of/(\d+)/")
ATTEMPTS = "attempts.jsonl"  # a line at the start of each attempt, and one at its end


def run(settings: StudySettings, folder: RunFolder) -> Summary:
    """Run what is not done yet, and write the page of what is there.

    Args:
        settings: of the command.
        folder: of the study; the runs of earlier calls stand in it.

    Returns:
        The summary: `completed`, or `failed` with the runs that failed as its cause.

    Raises:
        ConfigError: if a command line does not compose.
        RuntimeError: if a model that runs start from cannot be trained.
    """
    check_folder(settings, folder)
    keep_secrets(settings, folder)
    folder = RunFolder(folder.path.resolve())
    runs = plan(settings, folder.path)
    summary = new_summary("study", seed=settings.seed, config_hash=settings.config_hash)
    with claim_run(folder.path, lambda: check_folder(settings, folder)):
        write_summary(folder, summary)
        try:
            left = [planned for planned in runs if not planned.is_done()]
            _check_not_under_way(left)
            say(f"{len(runs)} runs, {len(runs) - len(left)} done before: {folder.path}")
            _prepare(left, folder.path)
            _run_all(left, settings.jobs)
        except BaseException as error:
            stopped = isinstance(error, KeyboardInterrupt)
            cause = str(error) or "it was interrupted"
            status = "stopped" if stopped else "failed"
            summary = replace(summary, status=status, cause=cause)  # type: ignore[arg-type]
            raise
        else:
            failed = [planned.name for planned in runs if not planned.is_done()]
            cause = f"{len(failed)} of {len(runs)} runs failed: {', '.join(failed)}"
            ended = replace(summary, status="failed", cause=cause)
            summary = ended if failed else replace(summary, status="completed")
        finally:
            write_summary(folder, summary)
            _write_pages(settings, runs, folder.path)
    return summary


def _check_not_under_way(runs: Sequence[PlannedRun]) -> None:
    """Refuse to begin a run anew that a process of a killed study still writes."""
    for planned in runs:
        if (begun := planned.folder()) is not None and is_claimed(begun.path):
            raise ConfigError(
                f"{planned.name} is under way in another process, which writes {begun.path}: wait "
                "for its end, or end it"
            )


def _prepare(runs: Sequence[PlannedRun], folder: Path) -> None:
    """Train the models that runs start from and that are missing, each once.

    Collections and evaluations make their own: their policies tell what they need.
    """
    for planned in runs:
        if isinstance(planned.settings, TrainSettings):
            words = [*planned.words, given("paths.outputs", folder / "prerequisites")]
            kinds = [kind for kind in MODELS if kind not in planned.starts_from]
            prepare_inputs(planned.settings, words, say, kinds=kinds)


def _has_its_models(planned: PlannedRun) -> bool:
    """Return whether the runs that it starts from have ended as they should; say so if not."""
    missing = [one.name for one in planned.starts_from.values() if not one.is_done()]
    if missing:
        say(f"{planned.name}: not run, because {' and '.join(missing)} has not completed")
    return not missing


def _run_all(runs: Sequence[PlannedRun], jobs: int) -> None:
    """Run them, `jobs` at a time, each as soon as the models that it starts from are there.

    Of those the first in the order of the plan, so that a study that is stopped has whole seeds. A
    signal stops them, and they can be continued.
    """
    threads = max(1, (os.cpu_count() or 1) // jobs)
    environment = own_environment() | {"OMP_NUM_THREADS": str(threads)}
    processes: dict[int, PlannedRun] = {}
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    ended = count(1)
    waiting = list(runs)
    begun: dict[Future[float], PlannedRun] = {}
    with ThreadPoolExecutor(jobs) as pool:
        try:
            while waiting or begun:
                for one in startable(waiting, begun.values())[: jobs - len(begun)]:
                    waiting.remove(one)
                    if _has_its_models(one):
                        begun[pool.submit(_attempt, one, environment, processes)] = one
                for future in wait(begun, return_when=FIRST_COMPLETED).done:
                    one, seconds = begun.pop(future), duration(future.result())
                    status, cause = outcome(one)
                    told = f"{status}: {cause}" if cause else status
                    say(f"[{next(ended)}/{len(runs)}] {one.name}: {told} ({seconds})")
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(processes):
                with suppress(ProcessLookupError):
                    os.kill(process, signal.SIGTERM)
            raise


def startable(waiting: Sequence[PlannedRun], begun: Collection[PlannedRun]) -> list[PlannedRun]:
    """Return the runs none of whose models another run is still to make."""
    open_runs = {one.name for one in (*waiting, *begun)}
    return [
        one
        for one in waiting
        if open_runs.isdisjoint(maker.name for maker in one.starts_from.values())
    ]


def _attempt(
    planned: PlannedRun, environment: dict[str, str], processes: dict[int, PlannedRun]
) -> float:
    """Run it to its end, note what that took, and return the seconds."""
    planned.place.mkdir(parents=True, exist_ok=True)
    digest = planned.settings.config_hash
    _note(planned, {"config_hash": digest})
    started = time.monotonic()
    with (planned.place / LOG).open("wb") as log:
        # In a session of its own: Ctrl-C reaches it once, by `_run_all`.
        process = subprocess.Popen(
            planned.command_line(),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
        processes[process.pid] = planned
        _, status, used = os.wait4(process.pid, 0)  # with the processes that it started
        process.returncode = os.waitstatus_to_exitcode(status)
        del processes[process.pid]
    seconds = time.monotonic() - started
    unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
    ended = {
        "code": process.returncode,
        "seconds": seconds,
        "cpu_seconds": used.ru_utime + used.ru_stime,
        "peak_mib": used.ru_maxrss * unit / 2**20,
    }
    _note(planned, {"config_hash": digest, **ended})
    return seconds


def _note(planned: PlannedRun, row: dict[str, Any]) -> None:
    with (planned.place / ATTEMPTS).open("a", encoding="utf-8") as file:
        file.write(json.dumps(row) + "\n")


def attempts(planned: PlannedRun) -> list[dict[str, Any]]:
    """Return the lines of its attempts: each has a start, and an end unless that was not seen."""
    file = planned.place / ATTEMPTS
    lines = file.read_text("utf-8").splitlines() if file.is_file() else []
    found = [loads(line.encode()) for line in lines if line.endswith("}")]
    return [row for row in found if row["config_hash"] == planned.settings.config_hash]


def outcome(planned: PlannedRun) -> tuple[str, str | None]:
    """Return its status and the reason why it has not ended as it should."""
    folder, tries = planned.folder(), attempts(planned)
    if folder is None and not tries:
        return "not run", None
    summary = None if folder is None else read_summary(folder)
    if summary is not None and summary.status == "completed":
        return "completed", None
    code = tries[-1].get("code") if tries else None
    if summary is not None and summary.cause is not None:
        return summary.status, summary.cause
    if code is None:
        return "stopped", "its process has not ended, or was not seen to end"
    if code < 0:
        return "failed", f"killed by signal {-code}"
    told = (planned.place / LOG).read_text("utf-8", errors="replace").splitlines()
    errors = [line.removeprefix("error: ") for line in told if line.startswith("error: ")]
    return "failed", errors[-1] if errors else f"exit status {code}, see {planned.place / LOG}"


def _write_pages(settings: StudySettings, runs: Sequence[PlannedRun], folder: Path) -> None:
    from rlhf_lightning.reports.study import write_study
    from rlhf_lightning.reports.study_results import RewardModel, Study

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
            setting=_joined(result.setting, f"n={size}"),
            metrics=_of_best(result.metrics, f"best_of/{size}/"),
            kl_is_bound=True,
        )
        for size in sizes
        if size > 1  # the policy itself
    ] or [result]


def _joined(*parts: str) -> str:
    return " ".join(filter(None, parts))


def _of_best(metrics: Mapping[str, Any], head: str) -> dict[str, Any]:
    """Return the metrics of the best of n by the names that those of a trained policy have."""
    found = {f"val/{k.removeprefix(head)}": v for k, v in metrics.items() if k.startswith(head)}
    for name in ("gold", "score"):  # of the policy itself, over the same pool
        found[f"val/baseline_{name}"] = metrics.get(f"best_of/1/{name}")
    return {name: value for name, value in found.items() if value is not None}


def _result(planned: PlannedRun) -> Any:
    from rlhf_lightning.reports.study_results import Result

    folder, tries = planned.folder(), attempts(planned)
    status, cause = outcome(planned)
    ended = [row for row in tries if "code" in row]
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
        seconds=sum(row["seconds"] for row in ended),
        cpu_seconds=sum(row["cpu_seconds"] for row in ended),
        peak_mib=max((row["peak_mib"] for row in ended), default=0.0),
        times_are_whole=2 * len(ended) == len(tries),
        about={} if summary is None else summary.about,
    )


def _job(cfg: Any) -> None:
    folder, *_ = this_job()
    try:
        summary = run(read_settings(StudySettings, cfg), folder)
    except ConfigError as error:
        fail(str(error))
    except RuntimeError as error:  # of a model that runs start from
        fail(str(error), 1)
    except KeyboardInterrupt:
        fail("stopped: calling the study again goes on from there", 130)
    if summary.status != "completed":
        fail(str(summary.cause), 1)


def arguments(words: Sequence[str]) -> list[str]:
    """Return the words of a command line as Hydra reads them: flags first, NAME as `study=NAME`."""
    first_flag = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    given_words, flags = list(words[:first_flag]), words[first_flag:]
    if given_words and "=" not in given_words[0]:
        given_words[0] = f"study={given_words[0]}"
    return [*flags, *as_overrides(given_words)]


def main() -> None:
    """Run the command line."""
    agree_on("launch time", launch_time)
    sys.argv[1:] = arguments(sys.argv[1:])
    settings = check_command_line("study")
    try:
        if settings is not None:
            first = settings.model_copy(update={"seeds": settings.seeds[:1]})
            plan(first, Path(settings.paths.outputs))
    except ConfigError as error:
        fail(str(error))
    run_job("study", _job)


if __name__ == "__main__":
    main()
