"""The causes of early ends, in one line each."""

from __future__ import annotations

import errno
import logging
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from typing import Any, NoReturn

from hydra.errors import InstantiationException

from rlhf_lightning.distributed.launch import global_rank
from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.atomic import DiskFullError, describe_full_disk, full_disk, write_text
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.secrets import redacted
from rlhf_lightning.runs.stopping import stop_behind
from rlhf_lightning.runs.summary import Status, Summary, read_summary, write_summary

logger = logging.getLogger(__name__)

PACKAGE = "rlhf_lightning"
STOPPED = 75  # exit status (EX_TEMPFAIL): not done, and resume=auto continues
INTERRUPTED = "interrupted from the keyboard or by a signal"
_OUT_OF_MEMORY = re.compile(
    r"out of memory|can't allocate memory|cannot allocate memory|CUBLAS_STATUS_ALLOC_FAILED"
    r"|bad_alloc",
    re.IGNORECASE,
)
# What is raised with a message for the user, and not by a mistake in the code.
_EXPECTED = (ValueError, RuntimeError, OSError)


class RunFailedError(RuntimeError):
    """A run ended early for a reason that its message explains."""


def explain_failure(
    error: BaseException, folder: RunFolder, save_memory: Callable[[bool], str]
) -> RunFailedError | None:
    """Return an error that says what to change, or None where `error` does already.

    Args:
        error: error that ended the run.
        folder: folder of the run.
        save_memory: returns which settings need less memory, in the evaluation at the end or not.
    """
    if is_out_of_memory(error):
        texts = [text for e in _chain(error) if _OUT_OF_MEMORY.search(text := _one_line(e))]
        name = next(iter(texts), _one_line(error) or "no more memory")
        evaluates = any(name == f"{PACKAGE}.app.finalize" for name in _modules_passed(error))
        return RunFailedError(f"out of memory ({name[:200]}). {save_memory(evaluates)}")
    number = full_disk(error)
    if number is not None:
        known = next((e for e in _chain(error) if isinstance(e, DiskFullError)), None)
        return RunFailedError(str(known or describe_full_disk(number, folder.path)))
    return None


@contextmanager
def exits_are_failures() -> Iterator[None]:
    """Raise an error where what a run calls ends the process, as `sys.exit(0)` would in silence.

    Raises:
        RunFailedError: that names the place.
        KeyboardInterrupt: where it is what Lightning makes of an interrupt.
    """
    try:
        yield
    except SystemExit as error:
        if isinstance(error.__context__, KeyboardInterrupt):
            raise KeyboardInterrupt from error
        frames = traceback.extract_tb(error.__traceback__)
        # W&B replaces sys.exit.
        place = [f for f in frames if not f.filename.endswith("wandb/sdk/lib/exit_hooks.py")][-1]
        raise RunFailedError(
            f"sys.exit({error.code!r}) was called in {place.name} ({place.filename}, line "
            f"{place.lineno}), which would end the run in silence: raise an error there instead"
        ) from error


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether memory, of a GPU or of the machine, ran out."""
    return any(
        isinstance(e, MemoryError)
        or type(e).__name__ == "OutOfMemoryError"
        or (isinstance(e, OSError) and e.errno == errno.ENOMEM)
        or (isinstance(e, RuntimeError) and _OUT_OF_MEMORY.search(str(e)))
        for e in _chain(error)
    )


def cause_of(error: BaseException) -> str:
    """Return one line: the message of an error that explains itself, else its type as well."""
    error = unwrapped(error)
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    text = redacted(_one_line(error))
    return text if text and is_expected(error) else f"{type(error).__name__}: {text}".rstrip(": ")


def is_expected(error: BaseException) -> bool:
    """Return whether our own code raised it for the user to read."""
    error = unwrapped(error)
    if type(error).__module__.partition(".")[0] == PACKAGE:
        return True
    modules = list(_modules_passed(error))
    if type(error).__name__ == "MisconfigurationException":  # Lightning's word for it
        return True
    ours = bool(modules) and modules[-1].partition(".")[0] == PACKAGE
    return ours and isinstance(error, _EXPECTED)


def unwrapped(error: BaseException) -> BaseException:
    """Return the error inside Hydra's wrappers, or the stop behind an error.

    torch turns a Control-C during a write into another error.
    """
    if (stop := stop_behind(error)) is not None:
        return stop
    while isinstance(error, InstantiationException) and error.__cause__ is not None:
        error = error.__cause__
    return error


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
        if status == "stopped":
            if resumes:
                error.add_note(f"resume=auto continues {folder.path}")
        else:
            write_text(folder.traceback, redacted("".join(traceback.format_exception(error))))
            error.add_note(f"the traceback is in {folder.traceback}")
        write_report(folder)
    except (OSError, ValueError) as problem:
        logger.warning("how the run ended could not be recorded: %s", problem)


def exit_with(error: BaseException) -> NoReturn:
    """Print in one line why the run ended and exit with 1, with 75 or 130 if it was stopped.

    75 is for a signal or a deadline. Other ranks than the first then exit with 0: Lightning kills
    the first one, which is still writing, if another one fails. An unexpected error is shown with
    its traceback, which is in the run folder in any case.
    """
    stop = stop_behind(error)
    if isinstance(stop, KeyboardInterrupt):
        word, code = "stopped", 130
    elif stop is not None:
        word, code = "stopped", STOPPED if global_rank() == 0 else 0
    else:
        word, code = "error", 1
        if not is_expected(error):
            sys.stderr.write(redacted("".join(traceback.format_exception(error))))
    lines = [f"{word}: {cause_of(error)}", *getattr(error, "__notes__", ())]
    sys.stderr.write("\n".join(lines) + "\n")
    raise SystemExit(code) from None


def _chain(error: BaseException) -> Iterator[BaseException]:
    seen: BaseException | None = error
    while seen is not None:
        yield seen
        seen = seen.__cause__ or seen.__context__


def _modules_passed(error: BaseException) -> Iterator[str]:
    for frame, _ in traceback.walk_tb(error.__traceback__):
        yield str(frame.f_globals.get("__name__", ""))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())


PATIENCE = timedelta(seconds=6)  # for the others to say why they end
LOST = "lost contact"  # reason of a rank without a cause
_CONTACT = re.compile(
    r"gloo.*(connection|timed out|timeout|broken pipe|read error|write error)"
    r"|nccl.*(abort|timeout|timed out|remote|unhandled system error)"
    r"|watchdog caught collective",
    re.IGNORECASE | re.DOTALL,
)
_PLACE = re.compile(r"^\[/\S+\] ")  # in the sources of gloo
_LATE = re.compile(r"timed out|timeout", re.IGNORECASE)
RESUME = "Start all ranks again with resume=auto"


def explain_lost_rank(error: BaseException, timeout_minutes: float) -> RunFailedError | None:
    """Tell the other ranks why this one ends; return their reason if that is the cause.

    Args:
        error: error that ended this rank.
        timeout_minutes: minutes that ranks wait for each other.

    Returns:
        An error that names the rank that failed, was killed or does not answer; None in a single
        process, or where `error` itself is the cause.
    """
    if "torch" not in sys.modules:
        return None
    # brings torch: commands that compute nothing fail without it
    from rlhf_lightning.distributed.collectives import exchange_failure_reasons, rank, world_size

    ours, size = rank(), world_size()
    if size == 1:
        return None
    lost = is_lost_contact(error)
    heard = exchange_failure_reasons(LOST if lost else cause_of(error), PATIENCE)
    if not lost:
        return None
    causes = {r: said for r, said in heard.items() if said != LOST}
    silent = [r for r in range(size) if r != ours and r not in heard]
    return RunFailedError(describe_loss(causes, silent, size, error, timeout_minutes))


def is_lost_contact(error: BaseException) -> bool:
    """Return whether `error` means that another process no longer answers."""
    seen: BaseException | None = error
    while seen is not None:
        distributed = any(base.__name__ == "DistError" for base in type(seen).__mro__)
        if distributed or (isinstance(seen, RuntimeError) and _CONTACT.search(str(seen))):
            return True
        seen = seen.__cause__ or seen.__context__
    return False


def describe_loss(
    causes: Mapping[int, str],
    silent: Iterable[int],
    size: int,
    error: BaseException,
    minutes: float,
) -> str:
    """Return which rank ended the run, and the fix.

    Args:
        causes: cause by rank, for those with one.
        silent: ranks that did not answer.
        size: number of ranks.
        error: error by which this rank lost contact.
        minutes: minutes that a rank waits for the others.
    """
    if causes:
        first = min(causes)
        return f"rank {first} of {size} stopped: {causes[first]}"
    gone = ", ".join(map(str, silent))
    text = _PLACE.sub("", " ".join(str(error).split()))
    how = f"({text.partition('. ')[0][:160]})"
    if not gone:
        return (
            f"the ranks lost contact with each other, though all {size} are there {how}: the "
            f"network between them failed. {RESUME}"
        )
    if _LATE.search(text):
        return (
            f"rank {gone} of {size} did not answer within strategy.timeout_minutes={minutes:g} "
            f"{how}: it hangs, or needs longer for its share; see its output. {RESUME}"
        )
    return (
        f"rank {gone} of {size} is gone {how}: it was killed, or its machine is down; its own "
        f"output and the system's log (out of memory?) say why. {RESUME}"
    )


def watch_children(trainer: Any, folder: RunFolder, summary: Summary) -> None:
    """Record it when a process that Lightning started ends early.

    Args:
        trainer: Trainer of the run.
        folder: folder of the run.
        summary: summary of the run while it is under way.
    """
    # brings torch: commands that compute nothing fail without it
    from rlhf_lightning.callbacks.children import WatchChildren

    trainer.callbacks.insert(0, WatchChildren(_teller(folder, summary)))


def _teller(folder: RunFolder, summary: Summary) -> Callable[[dict[int, int]], None]:

    def tell(failed: dict[int, int]) -> None:
        # brings torch: commands that compute nothing fail without it
        from rlhf_lightning.distributed.collectives import failure_reasons_so_far, world_size

        causes = {r: said for r, said in failure_reasons_so_far().items() if said != LOST}
        if causes:
            text = describe_loss(causes, (), world_size(), RuntimeError(), 0)
        else:
            ends = ", ".join(f"rank {r} {_ended(code)}" for r, code in failed.items())
            text = f"{ends}, and the others hang while they wait for it. {RESUME}"
        error = RunFailedError(text)
        record_failure(folder, summary, error)
        sys.stderr.write(f"error: {cause_of(error)}\n")
        sys.stderr.flush()

    return tell


def _ended(code: int) -> str:
    if code < 0:
        return f"was killed by {signal.Signals(-code).name}"
    return f"ended with exit code {code}"
