"""All stages in a row, each judged by its gates: `python -m rlhf_lightning.pipeline`.

Each stage is a process of its own: what it leaves in memory or in a random state does not reach
the next one.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_lightning.app.command_line import check_command_line, fail, run_job, say, this_job
from rlhf_lightning.app.config.commands import PipelineSettings
from rlhf_lightning.app.config.compose import ConfigError, register
from rlhf_lightning.app.config.run_claim import check_folder, hydra_log
from rlhf_lightning.app.config.save import keep_secrets, write_settings
from rlhf_lightning.app.config.settings import TrainSettings
from rlhf_lightning.app.config.validate import load_settings, read_settings
from rlhf_lightning.app.pipeline.state import (
    DONE,
    FAILED_GATE,
    RUNNING,
    Outcome,
    find_begun_pipeline,
    read_state,
    set_aside,
    write_state,
)
from rlhf_lightning.app.pipeline.steps import (
    TRAINED,
    Step,
    accepted,
    as_overrides,
    check_pipeline,
    plan,
    settings_file,
)
from rlhf_lightning.distributed.launch import agree_on, launch_time, own_environment
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import claim_run
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.summary import (
    GateResult,
    Status,
    Summary,
    new_summary,
    read_summary,
    write_summary,
)
from rlhf_lightning.runs.taken import drop_unused, summary_or_none

register()
GATE_FAILED = 4  # exit status
PASSED_ON = (3, 75, 130)  # of a stage: people have to label, it was stopped


class StageEndedError(Exception):
    """A stage did not end as it should; `code` is the exit status of the pipeline."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


def run(settings: PipelineSettings, folder: RunFolder) -> Summary:
    """Run every stage that is not done yet, up to the end or to a gate that fails.

    Args:
        settings: of the command.
        folder: of a new run; with `resume=auto` an unfinished one takes its place, or a complete
            one of fewer rounds.

    Returns:
        The summary, as written to the run folder: `completed`, or `stopped` at a gate with what
        the gate says as its cause.

    Raises:
        ConfigError: if the configuration cannot work.
        StageEndedError: if a stage fails or has to wait.
    """
    check_pipeline(settings)
    check_folder(settings, folder)
    keep_secrets(settings, folder)
    folder = RunFolder(_where(settings, folder).resolve())  # command lines are compared
    summary = new_summary("pipeline", seed=settings.seed, config_hash=settings.config_hash)
    with claim_run(folder.path, lambda: check_folder(settings, folder)):
        write_summary(folder, summary)
        try:
            summary = _run_steps(settings, folder, summary)
        except (StageEndedError, KeyboardInterrupt) as error:
            cause = str(error) or "it was interrupted"
            waits = isinstance(error, KeyboardInterrupt) or error.code in PASSED_ON
            status: Status = "stopped" if waits else "failed"
            known = read_summary(folder)  # with what the stages before have come to
            _write_page(folder, replace(known, status=status, cause=cause))
            raise
    _tell(folder, summary)
    return summary


def _where(settings: PipelineSettings, folder: RunFolder) -> Path:
    """Return the folder of the run: the newest if there is something left to do, or a new one."""
    if settings.resume != "auto":
        return folder.path
    root = Path(settings.paths.outputs) / settings.name
    begun = find_begun_pipeline(root, settings.config_hash, settings.rounds)
    if begun is None:
        return folder.path
    say(f"going on with {begun.path}")
    drop_unused(folder, begun, hydra_log())
    return begun.path


def _run_steps(settings: PipelineSettings, folder: RunFolder, summary: Summary) -> Summary:
    done = read_state(folder.path)
    steps = plan(settings, folder.path)
    summary = replace(summary, about={"stages": ", ".join(step.name for step in steps)})
    write_summary(folder, summary)
    judged: dict[str, Summary] = {}
    for number, step in enumerate(steps, start=1):
        before = done.get(step.name)
        same = before is not None and before.overrides == step.overrides
        if before is None or not same or before.status == RUNNING:
            say(f"[{number}/{len(steps)}] {step.name}")
            # Everything behind a stage that runs anew is built on what it makes.
            done = {name: done[name] for name in judged}
            done[step.name] = Outcome(step.name, step.overrides, RUNNING)
            write_state(folder.path, done)
            if not (same and step.continues):
                set_aside(folder.path / step.name)
            _run_step(step, folder)
        else:
            say(f"[{number}/{len(steps)}] {step.name}: done before")
        result = read_summary(RunFolder(folder.path / step.name))
        judged[step.name] = result
        status = DONE if result.passed else FAILED_GATE
        done[step.name] = Outcome(step.name, step.overrides, status)
        write_state(folder.path, done)
        summary = _joined(summary, judged)
        if status == FAILED_GATE and not accepted(settings, step):
            return replace(summary, status="stopped", cause=_cause(step, judged))
        _write_page(folder, summary)
    return replace(summary, status="completed", cause=None)


def _run_step(step: Step, folder: RunFolder) -> None:
    begun = summary_or_none(RunFolder(folder.path / step.name))
    if step.lead is not None:
        file = settings_file(folder.path, step.lead)
        file.parent.mkdir(parents=True, exist_ok=True)
        write_settings(file, load_settings(TrainSettings, "train", list(step.lead.overrides)))
    if step.stage not in TRAINED and begun is not None and begun.status == "completed":
        return  # the pipeline was killed before it had noted that
    command = step.command(folder.path)
    code = subprocess.run(command, check=False, env=own_environment()).returncode
    if code:
        where = folder.path / step.name
        ends = "waits for people" if code == PASSED_ON[0] else f"ended with status {code}"
        raise StageEndedError(
            f"{step.name} {ends}, see {where}: calling the pipeline again goes on from there",
            code if code in PASSED_ON else 1,
        )
    begun = summary_or_none(RunFolder(folder.path / step.name))
    if begun is None or begun.status != "completed":
        raise StageEndedError(
            f"{step.name} ended with status 0 before its end, see {folder.path / step.name}: "
            "something that it calls ended its process (os._exit)",
            1,
        )


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
    # What goes to a stage of every round would begin the first one anew.
    within, accept = ("", step.stage) if step.round == 1 else (f"round_{step.round}/", step.name)
    return (
        f"{step.name} failed its gates ({reasons}). Then call the pipeline again, with "
        f"{within}STAGE:KEY=VALUE for the stage to change, or with accept=[{accept}]"
    )


def _write_page(folder: RunFolder, summary: Summary) -> None:
    from rlhf_lightning.reports.page import write_report

    write_summary(folder, summary)
    try:
        write_report(folder)
    except (OSError, ValueError) as error:
        say(f"the page of the pipeline was not written: {error}")


def _tell(folder: RunFolder, summary: Summary) -> None:
    from rlhf_lightning.callbacks.console import print_verdict

    _write_page(folder, summary)
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
    try:
        summary = run(read_settings(PipelineSettings, cfg), folder)
    except ConfigError as error:
        fail(str(error))
    except StageEndedError as error:
        fail(str(error), error.code)
    except KeyboardInterrupt:
        fail("stopped: calling the pipeline again goes on from there", 130)
    say(f"{duration(time.monotonic() - started)} in all")
    if summary.status == "stopped":
        raise SystemExit(GATE_FAILED)


def main() -> None:
    """Run the command line."""
    agree_on("launch time", launch_time)
    sys.argv[1:] = as_overrides(sys.argv[1:])
    settings = check_command_line("pipeline")
    try:
        if settings is not None:
            check_pipeline(settings)
    except ConfigError as error:
        fail(str(error))
    run_job("pipeline", _job)


if __name__ == "__main__":
    main()
