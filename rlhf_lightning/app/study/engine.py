"""Runs that start from each other, each a process with the command that a person would type.

What was asked of a run, what it was given and what it published is recorded. A run is done as long
as all of that is still true.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from rlhf_lightning.app.command_line import check_command_line, fail, run_job, say
from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.app.config.errors import composition
from rlhf_lightning.app.config.inherit import command_settings
from rlhf_lightning.app.config.run_claim import check_folder
from rlhf_lightning.app.config.settings import RunSettings
from rlhf_lightning.app.study.words import key_of
from rlhf_lightning.distributed.launch import broadcast_from_rank0, launch_time, own_environment
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.lock import FolderTakenError, claim_run
from rlhf_lightning.runs.manifest import ManifestError, content_digest
from rlhf_lightning.runs.reading import parse
from rlhf_lightning.runs.stopping import RunStoppedError, stop_behind, stopping_on_signals
from rlhf_lightning.runs.summary import (
    Status,
    Summary,
    new_summary,
    read_summary,
    summary_or_none,
    write_summary,
)

ATTEMPTS = "attempts.jsonl"  # a line at the start of each attempt, and one at its end
LOG = "log.txt"  # of the newest attempt, of runs that do not print to the terminal
STOPPED = (3, 75, 130)  # exit statuses: people have to label, a signal or Ctrl-C stopped it
_POLL_SECONDS = 0.05
_SCRIPT = re.compile(r"(.+\.py):\w+")
_MODULE = re.compile(r"(?!rlhf_lightning\.)\w+(\.\w+)+")
_MODULE_ENDS = (".py", "/__init__.py")
# Of a model's folder what is no part of its fingerprint and changes what is learnt or sampled.
_BESIDE = (
    *("tokenizer_config.json", "special_tokens_map.json", "generation_config.json"),
    *("chat_template.*", "vocab.*", "merges.txt", "*.model"),
)
# What says where a run writes, and what is not read but where another key refers to it.
_NOT_READ = ("paths", "hydra", "logger", "callbacks", "run", "model.folder", "model.base")


class FailedRunError(Exception):
    """A run did not end as it should; `code` is the exit status of the command."""

    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True)
class Attempt:
    """A line of the record of a run: the start of an attempt, or its end.

    Args:
        config_hash: hash of its settings.
        run: name of the run.
        instead_of: its run folder that no longer counts, as other inputs were read there.
        read: digests of the files and models that its settings name, by their keys.
        made: digests of what it published, once it has completed.
        code: exit status of its process; None at the start.
        seconds, cpu_seconds: wall clock, and user and system time with its own processes.
        peak_mib: largest resident memory of one of its processes, MiB.
    """

    config_hash: str
    run: str = ""
    instead_of: str = ""
    read: Mapping[str, str] = field(default_factory=dict)
    made: Mapping[str, str] | None = None
    code: int | None = None
    seconds: float = 0.0
    cpu_seconds: float = 0.0
    peak_mib: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Run:
    """One run of a study or pipeline.

    Args:
        command: `train`, `collect` or `evaluate`.
        words: its command line, without its output folder.
        place: where its folders are, or its folder.
        needs: the runs that have to end well before it starts.
    """

    command: str
    words: tuple[str, ...]
    place: Path
    needs: tuple[Run, ...] = field(default=(), compare=False)

    @property
    def name(self) -> str:
        """The name in messages."""
        raise NotImplementedError

    @property
    def record(self) -> Path:
        """The file of its attempts."""
        return self.place / ATTEMPTS

    @cached_property
    def settings(self) -> Any:
        """The settings, as the command reads them."""
        words = list(self.words)
        cfg = composition(self.command, words)
        return command_settings(self.command, cfg, words, trains_first=True)

    @property
    def published(self) -> list[Path]:
        """The folders that it publishes."""
        target = self.settings.select("artifacts.publish")
        return [Path(target)] if target is not None and self.settings.paths.publish else []

    def command_line(self) -> list[str]:
        """Return the command that starts or continues it."""
        return [sys.executable, "-m", f"rlhf_lightning.{self.command}", *self.words]

    def make_room(self) -> None:
        """Prepare the place for a start."""
        self.place.mkdir(parents=True, exist_ok=True)

    def folder(self) -> RunFolder | None:
        """Return the newest run folder of these settings, a completed one before others."""
        found = []
        for file in (*self.place.glob("summary.json"), *self.place.glob("*/*/summary.json")):
            summary = summary_or_none(RunFolder(file.parent))
            if summary is not None and summary.config_hash == self.settings.config_hash:
                found.append((summary.status == "completed", file.parent))
        return RunFolder(max(found)[1]) if found else None

    def summary(self) -> Summary | None:
        """Return the summary in that folder."""
        folder = self.folder()
        return None if folder is None else summary_or_none(folder)

    def is_done(self) -> bool:
        """Return whether it has ended as it should and what it was given and made is unchanged."""
        known = self._known()
        made = self._made()
        if made is None or known.made not in (None, made) or not self.is_given_the_same():
            return False
        if known.made is None:  # its end was not seen
            self.note(replace(known, read=known.read or self.given(), made=made))
        return True

    def is_given_the_same(self) -> bool:
        """Return whether the files and models of its newest attempt are those of now."""
        return self._known().read.items() <= self.given().items()

    def attempts(self) -> list[Attempt]:
        """Return the lines of its record; one that was not written to its end is left out."""
        found = []
        for line in self.record.read_bytes().splitlines() if self.record.is_file() else ():
            with suppress(ValueError):
                row = parse(Attempt, line)
                same = row.config_hash == self.settings.config_hash
                found += [row] if same and row.run in (self.name, "") else []
        return found

    def note(self, attempt: Attempt) -> None:
        """Add a line to its record."""
        before = self.record.read_bytes() if self.record.is_file() else b""
        line = json.dumps(asdict(attempt)).encode() + b"\n"
        with self.record.open("ab") as file:  # behind a line that was not written to its end
            file.write(b"\n" * (before[-1:] not in (b"", b"\n")) + line)

    def note_start(self) -> None:
        """Note what it is given."""
        before, summary = self.folder(), self.summary()
        ended = summary is not None and summary.status == "completed"
        self.note(
            Attempt(
                self.settings.config_hash,
                self.name,
                instead_of=before.path.name if ended and before is not None else "",
                read=self.given(),
            )
        )

    def note_end(self, code: int, seconds: float, used: Any) -> None:
        """Note how its process ended, and what it has made if it has completed."""
        unit = 1 if sys.platform == "darwin" else 1024  # of ru_maxrss, in bytes
        known, made = self._known(), self._made() if code == 0 else None
        # Models of the built-in world may have been made by the run itself.
        read = known.read if made is None else {**self.given(), **known.read}
        self.note(
            replace(
                known,
                read=read,
                made=made,
                code=code,
                seconds=seconds,
                cpu_seconds=used.ru_utime + used.ru_stime,
                peak_mib=used.ru_maxrss * unit / 2**20,
            )
        )

    def _known(self) -> Attempt:
        """Return the newest line of its record, as the start of an attempt."""
        unknown = Attempt(self.settings.config_hash, self.name)
        newest = (self.attempts() or [unknown])[-1]
        kept = {key: getattr(newest, key) for key in ("instead_of", "read", "made")}
        return replace(unknown, **kept)

    def given(self) -> dict[str, str]:
        """Return the digests of the files and models that its settings name, by their keys."""
        named = {key_of(word) for word in self.words}
        found: dict[str, str] = {}
        if export := self.settings.resolved.get("export"):  # no part of the hash
            found["export"] = json.dumps(export)
        for key, text in _texts(self.settings.resolved):
            group = key.partition(".")[0]
            read = key in named if group == "artifacts" else not {group, key} & set(_NOT_READ)
            if read and key != "artifacts.publish":
                found |= _digests_of(key, text)
        return found

    def _made(self) -> dict[str, str] | None:
        """Return the digests of what it has published.

        None where it has not ended as it should, or where some of that is gone or damaged.
        """
        folder, summary = self.folder(), self.summary()
        if folder is None or summary is None or summary.status != "completed":
            return None
        if folder.path.name == self._known().instead_of:
            return None
        records = [folder.path / "data"] if self.command == "collect" else []
        try:
            return {path.name: content_digest(path) for path in (*records, *self.published)}
        except (ManifestError, OSError, ValueError, TypeError):
            return None


def _texts(node: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts in a configuration with their dotted keys."""
    if isinstance(node, Mapping | list):
        items = node.items() if isinstance(node, Mapping) else enumerate(node)
        for name, value in items:
            yield from _texts(value, f"{key}.{name}" if key else str(name))
    elif isinstance(node, str):
        yield key, node


def _digests_of(key: str, text: str) -> dict[str, str]:
    """Return the digests of the file, script, module or folder that a text names, if any."""
    path = Path(os.path.expanduser(_SCRIPT.sub(r"\1", text)))
    if "function" in key.split(".") and _MODULE.fullmatch(text):
        path = _file_of(text.rpartition(".")[0])
    # os.path takes a text of any length for no path. Names of groups may be those of folders, too.
    is_model, is_path = os.path.isfile(path / "config.json"), "path" in key.split(".")
    is_folder = os.path.isdir(path) and ("/" in text or is_model or is_path)
    if not (os.path.isfile(path) or is_folder):
        return {}
    if (path / "summary.json").is_file():  # of a run its records: pages are written again
        path /= "data"
    try:
        found = {key: content_digest(path)}
    except (ManifestError, OSError, ValueError, TypeError):
        return {}
    beside = sorted(file for name in _BESIDE for file in path.glob(name)) if is_model else []
    if beside:
        found[f"{key} (texts)"] = " ".join(content_digest(file) for file in beside)
    return found


def _file_of(module: str) -> Path:
    """Return the file of a module, which is not imported; one that is not there without one."""
    place = module.replace(".", "/")
    names = [Path(folder, f"{place}{end}") for folder in ("", *sys.path) for end in _MODULE_ENDS]
    return next((name for name in names if os.path.isfile(name)), Path(f"{place}.py"))


def outcome(run: Run) -> tuple[str, str | None]:
    """Return the status of a run and the reason why it has not ended as it should."""
    summary, tries = run.summary(), run.attempts()
    if summary is None and not tries:
        missing = " and ".join(one.name for one in run.needs if not one.is_done())
        return "not run", f"{missing} has not completed" if missing else None
    if run.is_done():
        return "completed", None
    if summary is not None and summary.cause is not None:
        return summary.status, summary.cause
    code = tries[-1].code if tries else None
    if code is None:
        return "stopped", "its process has not ended, or was not seen to end"
    if code < 0:
        return "failed", f"killed by signal {-code}"
    if code == 0 and summary is not None and summary.status == "completed":
        return "failed", "what it was given or has published has changed since"
    log = run.place / LOG
    told = log.read_text("utf-8", errors="replace").splitlines() if log.is_file() else []
    errors = [line.removeprefix("error: ") for line in told if line.startswith("error: ")]
    return "failed", errors[-1] if errors else f"exit status {code}, see {log}"


def startable(waiting: Sequence[Run], begun: Collection[Run]) -> list[Run]:
    """Return the runs that need none of those that have not ended."""
    open_runs = {one.name for one in (*waiting, *begun)}
    return [one for one in waiting if open_runs.isdisjoint(other.name for other in one.needs)]


class Engine:
    """Executes runs, several at a time, each as soon as those that it needs have ended well.

    Args:
        folder: folder around all runs.
        claim: descriptor of its lock. The processes of the runs hold it, too: no other process may
            write there before the last of them has ended.
        jobs: runs at a time; each has its share of the processors as threads, if there are several.
        logged: whether the output of each run goes into a separate file.
    """

    def __init__(self, folder: RunFolder, claim: int, *, jobs: int = 1, logged: bool) -> None:
        self.claim = claim
        self.jobs, self.logged = jobs, logged
        self.environment = own_environment()
        if logged:
            threads = max(1, (os.cpu_count() or 1) // jobs)
            self.environment["OMP_NUM_THREADS"] = str(threads)
        self.begun: dict[int, tuple[Run, subprocess.Popen[bytes], float]] = {}

    def run(
        self,
        runs: Sequence[Run],
        ends: Callable[[Run, float | None], bool],
        begins: Callable[[Run, bool], None] = lambda run, done: None,
    ) -> None:
        """Carry out runs in their order; whatever ends this ends their processes first.

        Args:
            runs: those that others need come before them.
            ends: called with a run and its seconds, None of one that was done before; returns
                whether those that need it may start.
            begins: called with a run, and whether it is done.
        """
        waiting, held_up = list(runs), set[str]()
        try:
            while waiting or self.begun:
                begun = [run for run, *_ in self.begun.values()]
                for one in startable(waiting, begun)[: self.jobs - len(begun)]:
                    waiting.remove(one)
                    if not held_up.isdisjoint(other.name for other in one.needs):
                        held_up.add(one.name)
                        continue
                    done = one.is_done()
                    begins(one, done)
                    if not done:
                        self._start(one)
                    elif not ends(one, None):
                        held_up.add(one.name)
                for one, seconds in self._ended():
                    if not ends(one, seconds):
                        held_up.add(one.name)
        except BaseException:
            self._end_all()
            raise

    def _start(self, run: Run) -> None:
        run.make_room()
        command = run.command_line()
        run.note_start()
        with open(run.place / LOG if self.logged else os.devnull, "wb") as log:
            # Ctrl-C, which all processes of a terminal get, reaches it from here, once.
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log if self.logged else None,
                stderr=subprocess.STDOUT if self.logged else None,
                env=self.environment,
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
                pass_fds=[self.claim],
            )
        self.begun[process.pid] = (run, process, time.monotonic())

    def _ended(self) -> Iterator[tuple[Run, float]]:
        """Wait a moment, and yield the runs whose processes have ended, with their seconds."""
        time.sleep(_POLL_SECONDS if self.begun else 0)
        for pid, (run, process, started) in list(self.begun.items()):
            found, status, used = os.wait4(pid, os.WNOHANG)  # with the processes that it started
            if found:
                del self.begun[pid]
                process.returncode = os.waitstatus_to_exitcode(status)
                seconds = time.monotonic() - started
                run.note_end(process.returncode, seconds, used)
                yield run, seconds

    def _end_all(self) -> None:
        """Have all processes save and end, and wait for them; after another Ctrl-C, end them."""
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                for pid in self.begun:
                    os.kill(pid, number)
                while self.begun:
                    list(self._ended())
                return
            except KeyboardInterrupt:
                continue


@contextmanager
def recorded(
    kind: str, settings: RunSettings, folder: RunFolder, write_page: Callable[[], object]
) -> Iterator[tuple[Summary, int]]:
    """Claim the folder around all runs for the block, and record how it ends.

    Args:
        kind: name of the command, in the summary.
        settings: settings of the command.
        folder: folder of the command.
        write_page: called at the end, whatever the outcome.

    Returns:
        The summary as it begins, and the descriptor of the claim.
    """
    summary = new_summary(kind, seed=settings.seed, config_hash=settings.config_hash, title=kind)
    with (
        claim_run(folder.path, lambda: check_folder(settings, folder)) as claim,
        stopping_on_signals(),
    ):
        write_summary(folder, summary)
        try:
            yield summary, claim
        except BaseException as error:
            asked = stop_behind(error) is not None
            status: Status = "failed"
            if asked or (isinstance(error, FailedRunError) and error.code in STOPPED):
                status = "stopped"
            cause = "it was interrupted" if asked else str(error)
            known = read_summary(folder)  # with what the runs before have come to
            write_summary(folder, replace(known, status=status, cause=cause))
            raise
        finally:
            try:
                write_page()
            except (OSError, ValueError) as error:
                say(f"the page of the {kind} was not written: {error}")


@contextmanager
def failing_in_one_line(kind: str) -> Iterator[None]:
    """End the process in one line where the block fails or is stopped."""
    try:
        yield
    except FolderTakenError as error:
        never = "resume=never or " if kind == "pipeline" else ""  # a study has no such key
        fail(f"{error}, or begin another with {never}name=")
    except ConfigError as error:
        fail(str(error))
    except FailedRunError as error:
        fail(str(error), error.code)
    except RuntimeError as error:  # of a model that runs start from
        fail(str(error), 1)
    except (KeyboardInterrupt, RunStoppedError):
        fail(f"stopped: calling the {kind} again continues from there", 130)


def run_job_of_runs(
    kind: str, words: list[str], check: Callable[[Any], object], job: Callable[[Any], object]
) -> None:
    """Run a command line whose words are in the form of Hydra.

    Args:
        kind: name of the command.
        words: arguments of the command.
        check: called with the settings; raises where they cannot work.
        job: called with the composed configuration.
    """
    broadcast_from_rank0("launch time", launch_time)
    sys.argv[1:] = words
    settings = check_command_line(kind)
    if settings is not None:
        with failing_in_one_line(kind):
            check(settings)
    run_job(kind, job)
