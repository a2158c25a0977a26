"""Processes of Python that are forked from one with the heavy imports done.

`run_python` is `subprocess.run([sys.executable, ...])` without the seconds that importing torch,
lightning and transformers takes. A test whose subject is the start of a process starts a real one.
The server that forks is a process of its own: one that has run a backward cannot fork.
"""

from __future__ import annotations

import atexit
import faulthandler
import multiprocessing
import os
import resource
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

SERVER = multiprocessing.get_context("forkserver")
SERVER.set_forkserver_preload(["tests.builders.preloaded"])


class ForkedPython:
    """A running `python ARGUMENTS` in a session of its own, with what tests use of `Popen`."""

    def __init__(
        self, arguments: Sequence[object], folder: Path, environment: Mapping[str, str],
        out: Path, err: Path | None = None,
    ) -> None:  # fmt: skip
        self._process = SERVER.Process(
            target=_run,
            args=([str(a) for a in arguments], folder, dict(environment), out, err or out),
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self.poll()


def _run(
    arguments: list[str], folder: Path, environment: dict[str, str], out: Path, err: Path
) -> None:
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    for number, path in ((1, out), (2, err)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    if environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    sys.path[:0] = filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))
    try:
        if arguments[0] == "-m":
            sys.argv = arguments[1:]
            runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
        else:
            sys.argv = arguments
            runpy.run_path(arguments[0], run_name="__main__")
    finally:
        atexit._run_exitfuncs()


def fresh_python(
    arguments: Sequence[object], folder: Path, environment: Mapping[str, str], out: Path
) -> subprocess.Popen[bytes]:
    """Start a new interpreter instead, with the same arguments."""
    with out.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            cwd=folder,
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )


def run_python(
    *arguments: object,
    folder: Path,
    timeout: float = 240,
    environment: Mapping[str, str] | None = None,
    **changes: str,
) -> subprocess.CompletedProcess[str]:
    """Run `python ARGUMENTS` in `folder` to its end; `changes` are of the environment."""
    given = dict(os.environ if environment is None else environment)
    with TemporaryDirectory() as logs:
        out, err = Path(logs) / "out", Path(logs) / "err"
        process = ForkedPython(arguments, folder, given | changes, out, err)
        code = process.wait(timeout)
        if code is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise subprocess.TimeoutExpired([*map(str, arguments)], timeout, out.read_text())
        return subprocess.CompletedProcess([], code, out.read_text(), err.read_text())


def timed_python(
    *arguments: str, folder: Path, environment: Mapping[str, str], limit: float
) -> subprocess.CompletedProcess[str]:
    """Run a new interpreter, which may take `limit` seconds of user and system time."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder, env=dict(environment), capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime <= limit
    return done


def killed_after(
    count: int, write: Callable[[Any, Any], None], place: object, *, wait: float = 0.0
) -> int:
    """Run `write(place, done)` in a fork of this process, and kill it `wait` seconds after `count`.

    `write` counts in `done.value` what it has finished. Returns what it had counted when it died.
    """
    fork = multiprocessing.get_context("fork")  # to import nothing again
    done = fork.Value("q", 0, lock=False)  # a lock would be held by the dead
    writer = fork.Process(target=write, args=(place, done), daemon=True)
    writer.start()
    while done.value < count:
        assert writer.is_alive()
        time.sleep(0.001)
    time.sleep(wait)
    writer.kill()
    writer.join()
    return int(done.value)
