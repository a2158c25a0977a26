"""The end of a command that failed or was stopped: its cause, summary and exit status."""

from __future__ import annotations

import errno
import logging
import re
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import NoReturn

from rlhf_lightning.app.config.compose import ConfigError
from rlhf_lightning.data.errors import BadRecordError
from rlhf_lightning.distributed.launch import global_rank, tell_torchrun
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.atomic import write_text
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.manifest import ManifestError, ModelError
from rlhf_lightning.runs.stopping import causes, stop_behind
from rlhf_lightning.runs.summary import Status, Summary, read_summary, write_summary

logger = logging.getLogger(__name__)

PACKAGE = "rlhf_lightning"
STOPPED = 75  # exit status (EX_TEMPFAIL): not done, and resume=auto continues
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MEMORY = re.compile(r"out of memory|allocate memory|ALLOC_FAILED|bad_alloc", re.IGNORECASE)


# What a command cannot do as it is given: it ends with the status of a mistake, and leaves nothing.
REFUSALS = (ConfigError, BadRecordError, ModelError, ManifestError)


class RunFailedError(RuntimeError):
    """A run ended early for a reason that its message explains."""


def explain_failure(error: BaseException, folder: RunFolder, advice: str) -> RunFailedError | None:
    """Return what to change where memory or disk ran out, or None where `error` says it.

    Args:
        error: error that ended the run.
        folder: folder of the run.
        advice: which settings need less memory.
    """
    for one in causes(error):
        text = _one_line(one)[:200]
        of_memory = isinstance(one, RuntimeError | OSError) and _MEMORY.search(text)
        if isinstance(one, MemoryError) or of_memory:
            return RunFailedError(f"out of memory ({text}). {advice}")
        full = any(f"os error {number}" in text for number in _FULL)  # as safetensors says it
        if full or (isinstance(one, OSError) and one.errno in _FULL):
            place = getattr(one, "filename", None) or folder.path
            return RunFailedError(f"cannot write {place} ({text}): make room, then resume=auto")
    return None


@contextmanager
def refusing(*kinds: type[Exception]) -> Iterator[None]:
    """Make a refusal of an error of these kinds, by default of one that explains itself.

    Raises:
        ConfigError: with its message.
    """
    try:
        yield
    except Exception as error:
        if not (isinstance(error, kinds) if kinds else _is_expected(error)):
            raise
        raise ConfigError(_one_line(error)) from error


def cause_of(error: BaseException) -> str:
    """Return one line: the message of an error that explains itself, else its type as well."""
    error = stop_behind(error) or error  # torch makes another error of a Control-C
    if isinstance(error, KeyboardInterrupt):
        return "interrupted from the keyboard or by a signal"
    text = _one_line(error)
    return text if text and _is_expected(error) else f"{type(error).__name__}: {text}".rstrip(": ")


def record_failure(
    folder: RunFolder, summary: Summary, error: BaseException, *, resumes: bool = True
) -> None:
    """Write status and cause into the summary, the report and `traceback.txt`.

    A note at the error says where. A disk that is full, which may be the cause itself, hides
    nothing: it is only logged.
    """
    status: Status = "failed" if stop_behind(error) is None else "stopped"
    try:
        about = summary.about  # some is known only once a command has begun
        if not about and folder.summary.is_file():
            about = read_summary(folder).about
        write_summary(folder, replace(summary, status=status, cause=cause_of(error), about=about))
        if status == "failed":
            write_text(folder.traceback, "".join(traceback.format_exception(error)))
            error.add_note(f"the traceback is in {folder.traceback}")
        elif resumes:
            error.add_note(f"resume=auto continues {folder.path}")
        write_report(folder)
    except (OSError, ValueError) as problem:
        logger.warning("how the run ended could not be recorded: %s", problem)


def exit_with(error: BaseException) -> NoReturn:
    """Print in one line why the run ended and exit with 1, with 75 or 130 if it was stopped.

    75 is for a signal or `max_time`. Other ranks than the first then exit with 0: Lightning kills
    the first one, which is still writing, if another one fails. An unexpected error is shown with
    its traceback. torchrun gets the error as well, and names the rank that failed first.
    """
    stop, word, code = stop_behind(error), "error", 1
    if stop is not None:
        word, code = "stopped", STOPPED if global_rank() == 0 else 0
        code = 130 if isinstance(stop, KeyboardInterrupt) else code
    else:
        if not _is_expected(error):
            sys.stderr.write("".join(traceback.format_exception(error)))
        tell_torchrun(error)
    lines = [f"{word}: {cause_of(error)}", *getattr(error, "__notes__", ())]
    sys.stderr.write("\n".join(lines) + "\n")
    raise SystemExit(code) from None


def _is_expected(error: BaseException) -> bool:
    """Return whether our own code, or Lightning's checks, raised it for the user to read."""
    kind, frames = type(error), [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if kind.__module__.startswith(PACKAGE) or kind.__name__ == "MisconfigurationException":
        return True
    raised_in = str(frames[-1].f_globals.get("__name__")) if frames else ""
    return isinstance(error, ValueError | RuntimeError | OSError) and raised_in.startswith(PACKAGE)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
