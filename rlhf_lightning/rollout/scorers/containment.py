"""Call code of the user's own so that it cannot hang, double or change the process."""

from __future__ import annotations

import csv
import gc
import inspect
import logging
import os
import pathlib
import resource
import signal
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, TypeVar

import numpy as np
import torch
from torch.backends import cuda, cudnn, mkldnn

from rlhf_lightning.rollout.concurrent_requests import run_async
from rlhf_lightning.runs.stopping import RunStoppedError

Result = TypeVar("Result")
_CPU = torch.device("cpu")


def _raise_again(limit: int, before: tuple[int, int]) -> None:
    """Undo that a function lowered a limit of the process; one that it raised stays."""
    (soft, hard), endless = resource.getrlimit(limit), resource.RLIM_INFINITY
    if soft != endless and (before[0] == endless or soft < before[0]):
        most = before[0] if hard == endless else hard
        resource.setrlimit(limit, (most if before[0] == endless else min(before[0], most), hard))


# Hooks of torch on every module: it has no call that lists them.
_GLOBAL_HOOKS: list[dict[Any, Any]] = [
    value
    for name, value in vars(torch.nn.modules.module).items()
    if name.startswith("_global_") and isinstance(value, dict)
]


def _set_hooks(kept: list[dict[Any, Any]]) -> None:
    for hooks, before in zip(_GLOBAL_HOOKS, kept, strict=True):
        hooks.clear()
        hooks.update(before)


def _stop_timer(timer: int, was_running: bool) -> None:
    if not was_running:
        signal.setitimer(timer, 0)


def _add_missing(place: list[Any], kept: list[Any]) -> None:
    place.extend(each for each in kept if each not in place)


def _set_modules(kept: dict[str, Any]) -> None:
    sys.modules.update({n: each for n, each in kept.items() if sys.modules.get(n) is None})


# What a function may set for itself and must not leave changed: how it is read, and how it is set.
_STATE: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (torch.get_default_dtype, torch.set_default_dtype),
    (
        torch.get_default_device,
        lambda device: torch.set_default_device(None if device == _CPU else device),
    ),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    (torch.is_anomaly_enabled, torch.set_anomaly_enabled),
    (lambda: not (torch.tensor([1e-40]) * 1).any(), torch.set_flush_denormal),
    *(
        (partial(torch.is_autocast_enabled, device), partial(torch.set_autocast_enabled, device))
        for device in ("cpu", "cuda")
    ),
    *(  # the kernel of attention changes the bits
        (getattr(cuda, f"{name}_sdp_enabled"), getattr(cuda, f"enable_{name}_sdp"))
        for name in ("flash", "math", "mem_efficient", "cudnn")
    ),
    *(
        (partial(getattr, owner, name), partial(setattr, owner, name))
        for owner, name in ((cudnn, "benchmark"), (cudnn, "deterministic"), (mkldnn, "enabled"))
    ),
    *(
        (partial(resource.getrlimit, limit), partial(_raise_again, limit))
        for name in ("AS", "CPU", "DATA", "FSIZE", "NOFILE")
        for limit in (getattr(resource, f"RLIMIT_{name}"),)
    ),
    (lambda: [dict(each) for each in _GLOBAL_HOOKS], _set_hooks),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (csv.field_size_limit, csv.field_size_limit),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (gc.get_debug, gc.set_debug),
    (gc.get_threshold, lambda counts: gc.set_threshold(*counts)),
    *(  # timers whose signals nothing of ours handles
        (lambda timer=timer: any(signal.getitimer(timer)), partial(_stop_timer, timer))
        for timer in (signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
    ),
    (np.geterr, lambda kinds: np.seterr(**kinds)),
    (lambda: (os.umask(mask := os.umask(0o077)), mask)[1], os.umask),
    (
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
        lambda mask: signal.pthread_sigmask(signal.SIG_SETMASK, mask),
    ),
    *(
        (partial(list, place), partial(_add_missing, place))
        for place in (sys.path, sys.meta_path, sys.path_hooks)
    ),
    (lambda: dict(sys.modules), _set_modules),
)


def _set_environment(variables: dict[str, str]) -> None:
    for name in set(os.environ) - set(variables):
        del os.environ[name]
    for name, value in variables.items():  # other threads read them meanwhile
        if os.environ.get(name) != value:
            os.environ[name] = value


def _set_filters(filters: list[Any]) -> None:
    warnings.resetwarnings()
    warnings.filters.extend(filters)  # type: ignore[attr-defined]


def _our_loggers() -> list[tuple[logging.Logger, int, bool, list[logging.Handler]]]:
    return [
        (each, each.level, each.disabled, list(each.handlers))
        for each in (logging.root, *logging.root.manager.loggerDict.values())
        if isinstance(each, logging.Logger)
        and each.name.partition(".")[0] in ("root", "lightning", "rlhf_lightning")
    ]


def _set_loggers(kept: list[tuple[logging.Logger, int, bool, list[logging.Handler]]]) -> None:
    for each, level, disabled, handlers in kept:
        each.setLevel(level)
        each.disabled = disabled
        each.handlers[:] = handlers


# What a file may set once for all, and a call may not.
_FOR_A_CALL: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (lambda: dict(os.environ), _set_environment),
    (lambda: list(warnings.filters), _set_filters),
    (lambda: logging.root.manager.disable, logging.disable),
    (logging.getLogRecordFactory, logging.setLogRecordFactory),
    (_our_loggers, _set_loggers),
)
_OF_TORCH = ("torch", "torch.nn.functional")
_CLASSES = (pathlib.Path, torch.nn.Module)
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
    settings: bool = True,
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
        settings: see `restoring_state`.

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
                returned = run_async(partial(awaited, returned))
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
        with restoring_state(what, settings=settings):
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


def _callables() -> list[tuple[Any, dict[str, Any]]]:
    """Return the functions and classes of the standard library, of torch, and of some classes.

    A guard around code that a function runs may take them away, and never give them back.
    """
    owners = [
        module
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] in sys.stdlib_module_names or name in _OF_TORCH
    ]
    return [
        (owner, {name: value for name, value in vars(owner).items() if callable(value)})
        for owner in (*owners, *_CLASSES)
        if owner is not None
    ]


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
    # For functions that set and cancel the same timer for another limit.
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
def restoring_state(what: str, *, settings: bool = True) -> Iterator[None]:
    """Put back what the code inside changes of the process.

    Args:
        what: names the code in errors.
        settings: put back the environment, warnings, loggers and replaced functions, too.

    Raises:
        ClosedStreamError: if it closed standard output or error, or files that are not its own,
            which cannot be opened again.
    """
    table = (*_STATE, *_FOR_A_CALL) if settings else _STATE
    state = [read() for read, _ in table]
    callables = _callables() if settings else []
    streams = sys.stdin, sys.stdout, sys.stderr
    encodings: list[tuple[Any, str, str | None]] = [
        (each, each.encoding, each.errors) for each in streams if hasattr(each, "errors")
    ]
    handlers = {number: signal.getsignal(number) for number in signal.valid_signals()}
    descriptors = {number: _duplicate(number) for number in (1, 2)}
    folder = os.open(".", os.O_RDONLY)
    try:
        # Leaving it also leaves the modes that were entered within.
        with torch.inference_mode(False), torch.no_grad():
            yield
    finally:
        for owner, before in callables:
            now = vars(owner)
            for name in [name for name, old in before.items() if now.get(name) is not old]:
                setattr(owner, name, before[name])
        try:
            os.fchdir(folder)
            os.close(folder)
            for number, kept in descriptors.items():
                if kept is not None:
                    os.dup2(kept, number)
                    os.close(kept)
        except OSError as error:
            raise ClosedStreamError(f"{what} closed files that it did not open: {error}") from error
        sys.stdin, sys.stdout, sys.stderr = streams
        for stream, encoding, errors in encodings:
            if (stream.encoding, stream.errors) != (encoding, errors):
                stream.reconfigure(encoding=encoding, errors=errors)
        if threading.current_thread() is threading.main_thread():
            for number, handler in handlers.items():
                if signal.getsignal(number) is not handler and handler is not None:
                    signal.signal(number, handler)
        for (read, write), value in zip(table, state, strict=True):
            if read() != value:
                write(value)
    if any(getattr(stream, "closed", False) for stream in streams[1:]):
        raise ClosedStreamError(f"{what} closed standard output or error: leave them open")


def _duplicate(descriptor: int) -> int | None:
    try:
        return os.dup(descriptor)
    except OSError:  # it is closed already
        return None
