"""All stages in a row, each judged by its gates: `python -m rlhf_lightning.pipeline`.

A stage is a process with the command line that a person would type. It is done while its summary
says `completed` with the hash of its settings, and the digests of what it read are those of
`stages.json`.
"""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

from rlhf_lightning.app.command_line import (
    check_command_line,
    ended_in_one_line,
    fail,
    run_job,
    say,
    this_job,
)
from rlhf_lightning.app.config.commands import PipelineSettings
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.saved import keep_configuration
from rlhf_lightning.app.config.validate import read_settings
from rlhf_lightning.app.pipeline_steps import Step, check_pipeline, plan
from rlhf_lightning.app.run_claim import check_folder, continues, hydra_log
from rlhf_lightning.distributed.launch import own_environment
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder, to_json, write_text
from rlhf_lightning.runs.lock import FolderTakenError, claim_run, drop_unused, is_claimed
from rlhf_lightning.runs.metric_catalog import duration
from rlhf_lightning.runs.stopping import RunStoppedError, stop_behind, stopping_on_signals
from rlhf_lightning.runs.summary import (
    Status,
    Summary,
    new_summary,
    read_summary,
    summary_or_none,
    write_summary,
)

RECORD = "stages.json"
GATE_FAILED, STOPPED = 4, (3, 75, 130)  # exit statuses; 3: people have to label


class FailedRunError(RuntimeError):
    """A stage did not end as it should; `code` is the exit status of the command."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code if code in STOPPED else 1


def advance(step: Step, folder: RunFolder) -> bool:
    """Run a step that is not done; return whether it was done before.

    It is done if it has completed with these settings, and what it read is unchanged. A run that
    cannot be continued gets another name: `reward` becomes `reward_before_1`.
    """
    known, summary, read = read_record(folder).get(step.name), step.summary(), step.read()
    same = known is not None and known.items() <= read.items()
    completed = summary is not None and summary.status == "completed"
    if same and completed:
        note(folder, step, read)
        return True
    if is_claimed(step.place):
        raise FolderTakenError(f"another process writes {step.place}: wait for it, or end it")
    unfinished = summary is not None and not completed and step.command != "evaluate"
    if step.place.exists() and not (same and unfinished):
        others = (step.place.with_name(f"{step.stage}_before_{n}") for n in count(1))
        step.place.rename(next(other for other in others if not other.exists()))
    note(folder, step, read)
    code, summary = _wait_for(step.command_line()), step.summary()
    if code or summary is None or summary.status != "completed":
        what = "waits for people" if code == STOPPED[0] else f"ended with status {code}"
        raise FailedRunError(
            f"{step.name} {what}, see {step.place}: calling the pipeline again goes on from there",
            code,
        )
    # Models of the built-in world may have been made by the run itself.
    note(folder, step, {**step.read(), **read})
    return False


def _wait_for(command: Sequence[str]) -> int:
    """Return the exit status of a process; what ends this one ends it first, in order."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        env=own_environment(),
        # Ctrl-C, which all processes of a terminal get, reaches it from here, once.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
    )
    try:
        return process.wait()
    except BaseException:
        process.terminate()
        process.wait()
        raise


def read_record(folder: RunFolder) -> dict[str, dict[str, str]]:
    """Return the digests of what each stage of a pipeline has read, by its name."""
    file = folder.path / RECORD
    return json.loads(file.read_text("utf-8")) if file.is_file() else {}


def note(folder: RunFolder, step: Step, read: Mapping[str, str]) -> None:
    """Record what a stage reads."""
    record = read_record(folder) | {step.name: dict(read)}
    write_text(folder.path / RECORD, to_json(record, indent=2) + "\n")


def run(settings: PipelineSettings, folder: RunFolder) -> Summary:
    """Run every stage that is not done yet, up to the end or to a gate that fails.

    With `resume=auto` an unfinished folder takes the place of a new one, or a complete one of fewer
    rounds. The summary is `completed`, or `stopped` at a gate with its reason as the cause.

    Raises:
        FolderTakenError: if a stage of an earlier call still runs.
        FailedRunError: if a stage fails or has to wait.
    """
    check_folder(settings, folder)
    keep_configuration(settings, folder)
    folder = RunFolder(where_to_run(settings, folder).path.resolve())
    steps = plan(settings, folder.path)
    begun = new_summary("pipeline", seed=settings.seed, config_hash=settings.config_hash)
    begun = replace(begun, about={"stages": ", ".join(step.name for step in steps)})
    with claim_run(folder.path, lambda: check_folder(settings, folder)), stopping_on_signals():
        write_summary(folder, begun)
        try:
            _run_stages(settings, folder, steps)
        except BaseException as error:
            asked = stop_behind(error) is not None
            stopped = asked or getattr(error, "code", None) in STOPPED
            status: Status = "stopped" if stopped else "failed"
            cause = "it was interrupted" if asked else str(error)
            write_summary(folder, replace(read_summary(folder), status=status, cause=cause))
            raise
        finally:
            write_report(folder)
    # brings torch: a mistake on the command line is reported before
    from rlhf_lightning.callbacks.console import print_verdict

    summary = read_summary(folder)
    print_verdict(summary, folder)
    total = duration(summary.seconds.get("total", 0.0))
    words = Counter(gate.word for gate in summary.gates)
    gates = ", ".join(f"{number} {word}" for word, number in words.items()) or "none"
    say(f"{summary.cause or f'gates: {gates}'} ({total} in the stages)")
    return summary


def _run_stages(settings: PipelineSettings, folder: RunFolder, steps: Sequence[Step]) -> None:
    """Run stage after stage; the summary of the pipeline grows with each."""
    judged: dict[str, Summary] = {}
    for step in steps:
        say(f"[{len(judged) + 1}/{len(steps)}] {step.name}")
        if advance(step, folder):
            say(f"{step.name}: done before")
        judged[step.name] = result = read_summary(RunFolder(step.place))
        summary = _joined(read_summary(folder), judged)
        if not (result.passed or {step.stage, step.name} & set(settings.accept)):
            failed = [f"{gate.name}: {gate.reason}" for gate in result.gates if not gate.passed]
            # Overrides for a stage of every round would restart the first one.
            at, name = ("", step.stage) if step.round == 1 else (f"round_{step.round}/", step.name)
            cause = (
                f"{step.name} failed its gates ({'; '.join(failed)}). Then call the pipeline again "
                f"with {at}STAGE:KEY=VALUE for the stage to change, or with accept=[{name}]"
            )
            write_summary(folder, replace(summary, status="stopped", cause=cause))
            return
        write_summary(folder, summary)
        write_report(folder)
    write_summary(folder, replace(read_summary(folder), status="completed"))


def where_to_run(settings: PipelineSettings, folder: RunFolder) -> RunFolder:
    """Return the folder of the run: the newest if there is something left to do, or a new one."""
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


def _joined(summary: Summary, judged: Mapping[str, Summary]) -> Summary:
    """Return the pipeline's summary: every stage's figures, and plainly those of the last one."""
    metrics = {
        f"{name}/{key.removeprefix('val/')}": value
        for name, one in judged.items()
        for key, value in one.metrics.items()
    }
    named = [replace(g, name=f"{name} {g.name}") for name, one in judged.items() for g in one.gates]
    seconds = {name: float(one.seconds.get("total", 0.0)) for name, one in judged.items()}
    last = list(judged.values())[-1]
    return replace(
        summary,
        about={k: v for k, v in last.about.items() if k != "command"} | {**summary.about},
        judged=all(one.judged for one in judged.values()),
        metrics=dict(last.metrics) | dict(sorted(metrics.items())),
        gates=tuple(named),
        seconds=seconds | {"total": sum(seconds.values())},
    )


def _job(cfg: Any) -> None:
    folder, _ = this_job()
    try:
        summary = run(read_settings(PipelineSettings, cfg), folder)
    except (FolderTakenError, ConfigError) as error:
        fail(f"{error}; resume=never or name= begin another")
    except FailedRunError as error:
        fail(str(error), error.code)
    except (KeyboardInterrupt, RunStoppedError):
        fail("stopped: calling the pipeline again continues from there", 130)
    if summary.status == "stopped":
        raise SystemExit(GATE_FAILED)


def main() -> None:
    """Run the command line."""
    if (settings := check_command_line("pipeline")) is not None:
        with ended_in_one_line():
            check_pipeline(settings)
    run_job("pipeline", _job)
