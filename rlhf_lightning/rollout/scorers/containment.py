"""Call code of the user's own so that it cannot hang, double or change the process."""

from __future__ import annotations

import inspect
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, TypeVar

import torch

from rlhf_lightning.rollout.concurrent_requests import run_async
from rlhf_lightning.runs.stopping import RunStoppedError

Result = TypeVar("Result")
_CPU = torch.device("cpu")
# What a function may set for itself and must not leave changed: how it is read, and how it is set.
_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device == _CPU else device),
    ),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (lambda: torch.is_autocast_enabled("cpu"), lambda on: torch.set_autocast_enabled("cpu", on)),
    (lambda: torch.is_autocast_enabled("cuda"), lambda on: torch.set_autocast_enabled("cuda", on)),
    (sys.getrecursionlimit, sys.setrecursionlimit),
)
_AGAIN_SECONDS = 1.0
_STILL_SECONDS = 20.0  # after which a call that runs is named

logger = logging.getLogger(__name__)


class ClosedStreamError(RuntimeError):
    """Code of the user's own closed standard output or error."""


class _TimeUp(BaseException):
    """Raised inside a function whose time is up; no `except Exception` catches it."""


def contained(
    call: Callable[[], Any],
    read: Callable[[Any], Result],
    what: str,
    *,
    seconds: float,
    about: str,
) -> Result:
    """Return `read` of what `call` returns, awaited if it is a coroutine.

    The process is as it was before: torch's defaults, working folder, environment, signal handlers
    and open streams. A child process that it forks and that comes back here ends. A call that runs
    for 20 seconds is named in a warning, once.

    Args:
        call: the function, with its arguments.
        read: takes what it returned, which may run its code too.
        what: names it in errors.
        seconds: after which it is interrupted.
        about: what it was given, for the warning and the error.

    Raises:
        TimeoutError: if it took longer, also where it caught the interruption.
        RuntimeError: if it raised.
        ClosedStreamError: if it closed standard output or error.
    """
    process = os.getpid()

    async def awaited(returned: Any) -> Any:
        try:
            return await returned
        finally:
            _end_child(process, what)

    def guarded() -> Result:
        try:
            returned = call()
            if inspect.isawaitable(returned):
                coroutine = awaited(returned)
                returned = run_async(lambda: coroutine)
            return read(returned)
        finally:
            _end_child(process, what)

    def say() -> None:
        logger.warning(
            "%s is still running after %g seconds, for %s; scorer.timeout_seconds=%g ends it",
            what,
            _STILL_SECONDS,
            about,
            seconds,
        )

    in_main = threading.current_thread() is threading.main_thread()
    timed = _interrupted_by_alarm if in_main else _left_behind
    try:
        with restoring_state(what):
            return timed(guarded, seconds, say)
    except (KeyboardInterrupt, RunStoppedError, ClosedStreamError):
        raise
    except _TimeUp as error:
        raise TimeoutError(
            f"{what} did not return within {seconds:g} seconds for {about}: mend it, or raise "
            "scorer.timeout_seconds"
        ) from error
    except BaseException as error:
        raise RuntimeError(f"{what} raised {said(error)}; it was called with {about}") from error


def said(error: BaseException) -> str:
    """Return class and text of an error in one line, also of one whose text cannot be made."""
    return " ".join(traceback.format_exception_only(error)[-1].split())[:500]


def _end_child(process: int, what: str) -> None:
    if os.getpid() != process:
        with suppress(OSError):
            os.write(2, f"{what} forked, and its child process returned: it is ended\n".encode())
        os._exit(1)


def _interrupted_by_alarm(
    call: Callable[[], Result], seconds: float, say: Callable[[], None]
) -> Result:
    """Call in the main thread; SIGALRM interrupts even a regular expression that never ends."""
    rung, quiet, ended = False, seconds > _STILL_SECONDS, False

    def ring(number: int, frame: FrameType | None) -> None:
        nonlocal rung, quiet
        passed = time.monotonic() - began
        if ended:
            return
        if passed < seconds:  # a timer that the function has set may ring here, too
            due = quiet and passed >= _STILL_SECONDS
            quiet = quiet and not due
            left = (_STILL_SECONDS if quiet else seconds) - passed
            signal.setitimer(signal.ITIMER_REAL, max(left, 1e-3), _AGAIN_SECONDS)
            if due:
                say()
            return
        rung = True
        # It rings again, as a function may catch everything.
        signal.setitimer(signal.ITIMER_REAL, _AGAIN_SECONDS, _AGAIN_SECONDS)
        raise _TimeUp

    handler, began = signal.signal(signal.SIGALRM, ring), time.monotonic()
    delay, interval = signal.setitimer(signal.ITIMER_REAL, min(seconds, _STILL_SECONDS))
    # For functions that set and cancel the same timer for a limit of their own.
    second = threading.Timer(
        seconds + _AGAIN_SECONDS, signal.pthread_kill, (threading.get_ident(), signal.SIGALRM)
    )
    second.daemon = True
    second.start()
    try:
        found = call()
    finally:
        ended = True
        second.cancel()
        second.join()
        left = max(delay - (time.monotonic() - began), 1e-3) if delay else 0.0
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL if handler is None else handler)
        signal.setitimer(signal.ITIMER_REAL, left, interval)
    if rung:
        raise _TimeUp
    return found


def _left_behind(call: Callable[[], Result], seconds: float, say: Callable[[], None]) -> Result:
    """Call in a daemon thread, which is left where it is when the time is up."""
    future: Future[Result] = Future()

    def run() -> None:
        try:
            with torch.no_grad():
                future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    first = min(seconds, _STILL_SECONDS)
    if not wait([future], first).done and first < seconds:
        say()
        wait([future], seconds - first)
    if not future.done():
        raise _TimeUp
    return future.result()


@contextmanager
def restoring_state(what: str, *, environment: bool = True) -> Iterator[None]:
    """Put back what the code inside changes of the process.

    Args:
        what: names the code in errors.
        environment: put the environment's variables back, too.

    Raises:
        ClosedStreamError: if it closed standard output or error, which cannot be opened again.
    """
    state = [read() for read, _ in _STATE]
    variables = dict(os.environ)
    streams = sys.stdin, sys.stdout, sys.stderr
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    descriptors = {number: _duplicate(number) for number in (1, 2)}
    folder = os.open(".", os.O_RDONLY)
    try:
        # Leaving it also leaves the modes that were entered within.
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        os.fchdir(folder)
        os.close(folder)
        for number, kept in descriptors.items():
            if kept is not None:
                os.dup2(kept, number)
                os.close(kept)
        sys.stdin, sys.stdout, sys.stderr = streams
        if environment and os.environ != variables:
            for name in os.environ.keys() - variables.keys():
                del os.environ[name]
            os.environ.update(variables)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler and handler is not None:
                    signal.signal(number, handler)
        for (read, write), value in zip(_STATE, state, strict=True):
            if read() != value:
                write(value)
    if any(getattr(stream, "closed", False) for stream in streams[1:]):
        raise ClosedStreamError(f"{what} closed standard output or error: leave them open")


def _duplicate(descriptor: int) -> int | None:
    try:
        return os.dup(descriptor)
    except OSError:  # it is closed already
        return None
