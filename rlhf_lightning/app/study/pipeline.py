"""All stages in a row, each judged by its gates: `python -m rlhf_lightning.pipeline`.

Each stage is a separate process: its memory and random state do not reach the next one.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from rlhf_lightning.app.command_line import say, this_job
from rlhf_lightning.app.config.commands import PipelineSettings
from rlhf_lightning.app.config.compose import register
from rlhf_lightning.app.config.run_claim import check_folder, continues, hydra_log
from rlhf_lightning.app.config.save import keep_configuration
from rlhf_lightning.app.config.validate import read_settings
from rlhf_lightning.app.study.engine import (
    STOPPED,
    Engine,
    FailedRunError,
    Run,
    failing_in_one_line,
    recorded,
    run_job_of_runs,
)
from rlhf_lightning.app.study.steps import Step, accepted, check_pipeline, plan
from rlhf_lightning.app.study.words import as_overrides
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import drop_unused
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.summary import (
    GateResult,
    Summary,
    read_summary,
    summary_or_none,
    write_summary,
)

register()
GATE_FAILED = 4  # exit status


def run(settings: PipelineSettings, folder: RunFolder) -> Summary:
    """Run every stage that is not done yet, up to the end or to a gate that fails.

    Args:
        settings: settings of the command.
        folder: folder of a new run; with `resume=auto` an unfinished one replaces it, or a complete
            one of fewer rounds.

    Returns:
        The summary, as written to the run folder: `completed`, or `stopped` at a gate with the
            gate's reason as its cause.

    Raises:
        ConfigError: if the configuration cannot work.
        FolderTakenError: if a stage of an earlier call still runs.
        FailedRunError: if a stage fails or has to wait.
    """
    check_pipeline(settings)
    check_folder(settings, folder)
    keep_configuration(settings, folder)
    folder = RunFolder(where_to_run(settings, folder).path.resolve())
    steps = plan(settings, folder.path)
    judged: dict[str, Summary] = {}

    def begins(step: Run, done: bool) -> None:
        say(f"[{len(judged) + 1}/{len(steps)}] {step.name}{': done before' * done}")

    def ends(step: Run, seconds: float | None) -> bool:
        assert isinstance(step, Step)
        if seconds is not None and not step.is_done():
            raise _failure(step)
        judged[step.name] = result = read_summary(RunFolder(step.place))
        joined = _joined(read_summary(folder), judged)
        passed = result.passed or accepted(settings, step)
        if not passed:
            joined = replace(joined, status="stopped", cause=_cause(step, judged))
        write_summary(folder, joined)
        _write_page(folder)
        return passed

    with recorded("pipeline", settings, folder, partial(write_report, folder)) as (summary, claim):
        about = {"stages": ", ".join(step.name for step in steps)}
        write_summary(folder, replace(summary, about=about))
        Engine(folder, claim, logged=False).run(steps, ends, begins)
        summary = read_summary(folder)
        if summary.status == "running":
            summary = replace(summary, status="completed")
            write_summary(folder, summary)
    _tell(folder, summary)
    return summary


def where_to_run(settings: PipelineSettings, folder: RunFolder) -> RunFolder:
    """Return the folder of the run: the newest if there is something left to do, or a new one.

    What is older than the newest is left alone: it was given up for the newer one.
    """
    root = Path(settings.paths.outputs) / settings.name
    for path in sorted((p for p in root.glob("*") if p.is_dir()), reverse=True):
        begun, summary = RunFolder(path), summary_or_none(RunFolder(path))
        if summary is not None and summary.config_hash == settings.config_hash:
            if not continues(settings, begun):
                break
            say(f"going on with {path}")
            drop_unused(folder, begun, hydra_log())
            return begun
    return folder


def _failure(step: Step) -> FailedRunError:
    """Return the error of a stage that did not end as it should."""
    code, then = step.attempts()[-1].code, "calling the pipeline again continues from there"
    if code == STOPPED[0]:
        what = "waits for people"
    elif code:
        what = f"ended with status {code}"
    else:
        what = "ended with status 0 before its end, or what it read or published was changed"
        then = "something that it calls may have ended its process (os._exit)"
    code = code if code in STOPPED else 1
    return FailedRunError(f"{step.name} {what}, see {step.place}: {then}", code)


def _joined(summary: Summary, judged: Mapping[str, Summary]) -> Summary:
    """Return the pipeline's summary: every stage's figures, and plainly those of the last one."""
    metrics: dict[str, float | None] = {}
    seconds: dict[str, float] = {}
    for name, result in judged.items():
        metrics |= {f"{name}/{key.removeprefix('val/')}": v for key, v in result.metrics.items()}
        seconds[name] = float(result.seconds.get("total", 0.0))
    last = list(judged.values())[-1]
    gates = tuple(
        replace(gate, name=f"{name} {gate.name}")
        for name, result in judged.items()
        for gate in result.gates
    )
    return replace(
        summary,
        about={"stages": summary.about["stages"], **last.about},
        judged=all(one.judged for one in judged.values()),
        metrics=dict(last.metrics) | dict(sorted(metrics.items())),
        gates=gates,
        seconds=seconds | {"total": sum(seconds.values())},
    )


def _cause(step: Step, judged: Mapping[str, Summary]) -> str:
    failed = [gate for gate in judged[step.name].gates if not gate.passed]
    reasons = "; ".join(f"{gate.name}: {gate.reason}" for gate in failed)
    # Overrides for a stage of every round would restart the first one.
    within, accept = ("", step.stage) if step.round == 1 else (f"round_{step.round}/", step.name)
    return (
        f"{step.name} failed its gates ({reasons}). Then call the pipeline again, with "
        f"{within}STAGE:KEY=VALUE for the stage to change, or with accept=[{accept}]"
    )


def _write_page(folder: RunFolder) -> None:
    try:
        write_report(folder)
    except (OSError, ValueError) as error:
        say(f"the page of the pipeline was not written: {error}")


def _tell(folder: RunFolder, summary: Summary) -> None:
    # brings torch: a mistake on the command line is reported before
    from rlhf_lightning.callbacks.console import print_verdict

    print_verdict(summary, folder)
    total = duration(summary.seconds.get("total", 0.0))
    say(f"{summary.cause or _gates_in_words(summary.gates)} ({total} in the stages)")


def _gates_in_words(gates: Sequence[GateResult]) -> str:
    """Return how many gates passed, failed and were accepted, and were not measured."""
    if not gates:
        return "done; there were no gates"
    count = Counter(gate.word for gate in gates)
    if count["passed"] == len(gates):
        return "all gates passed"
    if count["not measured"] == len(gates):
        return "no gate could be measured"
    passed = f"{count['passed']} gate{'s' * (count['passed'] != 1)} passed"
    others = [(count["NOT PASSED"], "failed and accepted"), (count["not measured"], "not measured")]
    return ", ".join([passed, *(f"{number} {word}" for number, word in others if number)])


def _job(cfg: Any) -> None:
    folder, *_ = this_job()
    started = time.monotonic()
    with failing_in_one_line("pipeline"):
        summary = run(read_settings(PipelineSettings, cfg), folder)
    say(f"{duration(time.monotonic() - started)} in all")
    if summary.status == "stopped":
        raise SystemExit(GATE_FAILED)


def main() -> None:
    """Run the command line."""
    run_job_of_runs("pipeline", as_overrides(sys.argv[1:]), check_pipeline, _job)


if __name__ == "__main__":
    main()
