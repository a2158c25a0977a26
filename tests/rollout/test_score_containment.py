"""Reward functions that hang, fork, or change the process."""

from __future__ import annotations

import asyncio
import builtins
import contextlib
import copy
import csv
import gc
import io
import json
import logging.config
import math
import os
import pathlib
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest
import torch
from torch.nn.modules.module import register_module_forward_hook

from rlhf_lightning.rollout.scorers import containment
from rlhf_lightning.rollout.scorers.base import FunctionScorer
from tests.builders.models import EOS, prompt_batch
from tests.rollout.answers import responses_of

ROWS = [[3, 4, 5], [6]]
RESPONSES = [[7, 8, EOS], [9, 10, EOS]]
PROMPTS, COMPLETIONS = ["w3 w4 w5", "w6"], ["w7 w8", "w9 w10"]


def scored(function, *, timeout_seconds=30.0, **columns):
    answers = responses_of(prompt_batch(ROWS, **columns), RESPONSES)
    return FunctionScorer(function, timeout_seconds=timeout_seconds)(answers).total.tolist()


def swapped(completions, prompts, **columns):
    return [1.0, 2.0]


def backtracks(prompts, completions):
    return [float(bool(re.search(r"^(\w+\s?)*$", "a" * 60 + "!")))] * 2


def sleeps(prompts, completions):
    time.sleep(60)
    return [0, 0]


def spins_in_silence(prompts, completions):
    end = time.monotonic() + 2
    while time.monotonic() < end:
        with contextlib.suppress(BaseException):
            time.sleep(60)
    return [0.0, 0.0]


def swallows(prompts, completions):
    try:
        time.sleep(60)
    except:  # noqa: E722
        return [0.0, 0.0]


def has_a_limit_of_its_own(prompts, completions):
    former = signal.signal(signal.SIGALRM, lambda *_: None)
    signal.alarm(5)
    signal.alarm(0)
    signal.signal(signal.SIGALRM, former)
    time.sleep(60)
    return [0.0, 0.0]


async def waits(prompts, completions):
    await asyncio.sleep(60)


def endless_generator(prompts, completions):
    yield 1.0
    while True:
        time.sleep(0.01)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "function",
    [
        backtracks,
        sleeps,
        spins_in_silence,
        swallows,
        has_a_limit_of_its_own,
        waits,
        endless_generator,
    ],
)
def test_a_function_that_takes_too_long_ends_with_its_name_and_a_prompt(function):
    began, before = time.monotonic(), signal.getsignal(signal.SIGALRM)
    with pytest.raises(TimeoutError, match=rf"{function.__name__} .*0.3 sec.*'w3 w4 w5'"):
        scored(function, timeout_seconds=0.3)
    assert time.monotonic() - began < 10
    assert signal.getsignal(signal.SIGALRM) is before


def finishes_late(prompts, completions):
    time.sleep(0.3)
    return [1.0, 2.0]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("function", "in_a_thread"),  # re lets no other thread run
    [(backtracks, False)]
    + [(each, place) for each in (sleeps, waits, finishes_late) for place in (False, True)],
)
def test_a_call_that_takes_long_is_named_once_with_its_prompt_while_it_runs(
    function, in_a_thread, monkeypatch, caplog
):
    monkeypatch.setattr(containment, "_STILL_SECONDS", 0.1)
    ends = pytest.raises(TimeoutError) if function is not finishes_late else nullcontext()
    with ends, ThreadPoolExecutor() as pool:
        if in_a_thread:
            pool.submit(scored, function, timeout_seconds=0.6).result()
        else:
            scored(function, timeout_seconds=0.6)
    (said,) = [record.getMessage() for record in caplog.records]
    assert re.search(
        rf"{function.__name__} is still running .*'w3 w4 w5'.*timeout_seconds=0.6", said
    )


def test_outside_of_the_main_thread_there_is_the_same_limit():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(scored, swapped).result() == [1.0, 2.0]
        with pytest.raises(TimeoutError, match=r"within 0\.3 seconds"):
            pool.submit(scored, lambda p, c: time.sleep(2), timeout_seconds=0.3).result()
        with pytest.raises(RuntimeError, match="raised TimeoutError: its own"):
            pool.submit(
                scored, lambda p, c: (_ for _ in ()).throw(TimeoutError("its own"))
            ).result()


def test_a_timer_of_the_caller_and_one_of_the_function_work_as_before():
    rung = []
    before = signal.signal(signal.SIGALRM, lambda *_: rung.append("caller"))
    signal.setitimer(signal.ITIMER_REAL, 0.4)

    def with_its_own(prompts, completions):
        signal.signal(signal.SIGALRM, lambda *_: rung.append("own"))
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        time.sleep(0.1)
        signal.alarm(3)
        return [1, 2]

    try:
        assert scored(with_its_own) == [1, 2]
        time.sleep(0.5)
        assert rung == ["own", "caller"]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("value", [0, -1.0, math.inf, "5", True])
def test_an_impossible_limit_is_refused(value):
    with pytest.raises((TypeError, ValueError), match="timeout_seconds"):
        FunctionScorer(swapped, timeout_seconds=value)


def state():
    return [read() for read in READS]


OUR_LOGGERS = logging.root, logging.getLogger("rlhf_lightning"), logging.getLogger("lightning")
LIMITS = "AS", "NOFILE", "FSIZE"
READS = [
    torch.get_default_dtype, torch.get_default_device, torch.is_grad_enabled,
    torch.is_inference_mode_enabled, torch.get_num_threads,
    torch.are_deterministic_algorithms_enabled, torch.get_deterministic_debug_mode,
    torch.is_anomaly_enabled, torch.get_float32_matmul_precision,
    torch.backends.cuda.flash_sdp_enabled, lambda: torch.is_autocast_enabled("cpu"),
    lambda: torch.backends.mkldnn.enabled, lambda: float(torch.tensor([1e-40]) * 1),
    lambda: torch.nn.Identity()(torch.ones(1)).item(),
    *(partial(signal.getsignal, number) for number in (signal.SIGINT, signal.SIGTERM)),
    lambda: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
    lambda: signal.getitimer(signal.ITIMER_PROF),
    *(partial(resource.getrlimit, getattr(resource, f"RLIMIT_{n}")) for n in LIMITS),
    lambda: [os.getcwd(), dict(os.environ), (os.umask(mask := os.umask(0o22)), mask)[1]],
    lambda: [sys.stdout, sys.stderr, sys.getrecursionlimit(), sorted(set(sys.path))],
    lambda: [list(sys.meta_path), list(sys.path_hooks), sys.modules.get("omegaconf")],
    lambda: [gc.isenabled(), gc.get_debug(), gc.get_threshold()],
    np.geterr, csv.field_size_limit, logging.getLogRecordFactory,
    lambda: [list(warnings.filters), logging.root.manager.disable],
    lambda: [(each.level, each.disabled, list(each.handlers)) for each in OUR_LOGGERS],
    lambda: [os.unlink, os.getcwd, os.fchdir, shutil.rmtree, subprocess.Popen, builtins.open],
    lambda: [torch.ones, torch.nn.functional.silu, torch.nn.Module.__call__],
    lambda: [json.dumps, copy.deepcopy, pathlib.Path.write_text],
]  # fmt: skip
KEPT = []


def above(limit):
    """Whether it can be lowered; on some machines it is low."""
    return resource.getrlimit(limit) == (resource.RLIM_INFINITY, resource.RLIM_INFINITY)


def enter(manager):
    manager.__enter__()
    KEPT.append(manager)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "leave",
    [
        lambda: torch.set_default_dtype(torch.float64),
        lambda: torch.set_default_device("meta"),
        lambda: torch.set_grad_enabled(True),
        lambda: enter(torch.inference_mode()),
        lambda: enter(torch.autocast("cpu", dtype=torch.bfloat16)),
        lambda: torch.set_num_threads(torch.get_num_threads() + 1),
        lambda: torch.use_deterministic_algorithms(True),
        lambda: torch.set_float32_matmul_precision("medium"),
        lambda: signal.signal(signal.SIGINT, signal.SIG_IGN),
        lambda: signal.signal(signal.SIGTERM, lambda *_: None),
        lambda: os.chdir("/"),
        lambda: os.environ.update(RANK="3", HOME="/nowhere"),
        lambda: os.environ.clear(),
        lambda: setattr(sys, "stdout", None),
        lambda: sys.setrecursionlimit(50_000),
        lambda: torch.use_deterministic_algorithms(True, warn_only=True),
        lambda: torch.autograd.set_detect_anomaly(True),
        lambda: torch.backends.cuda.enable_flash_sdp(False),
        lambda: torch.backends.mkldnn.set_flags(False),
        lambda: torch.set_flush_denormal(True),
        gc.disable,
        lambda: np.seterr(all="raise"),
        lambda: os.umask(0o777),
        lambda: signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT}),
        lambda: [resource.setrlimit(n, (2**36, -1)) for n in (resource.RLIMIT_AS,) if above(n)],
        lambda: resource.setrlimit(
            resource.RLIMIT_NOFILE, (100, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        ),
        sys.path.clear,
        lambda: warnings.simplefilter("error"),
        lambda: logging.disable(logging.CRITICAL),
        lambda: logging.basicConfig(force=True, level=logging.CRITICAL),
        lambda: logging.config.dictConfig({"version": 1, "disable_existing_loggers": True}),
        lambda: [setattr(os, name, None) for name in ("unlink", "getcwd", "fchdir", "kill")],
        lambda: [setattr(shutil, "rmtree", None), setattr(subprocess, "Popen", None)],
        lambda: [setattr(builtins, "open", None), setattr(torch, "ones", None)],
        lambda: register_module_forward_hook(lambda module, given, out: out * 2),
        lambda: setattr(torch.nn.functional, "silu", lambda x, inplace=False: x),
        lambda: setattr(torch.nn.Module, "__call__", None),
        lambda: csv.field_size_limit(1),
        lambda: [setattr(json, "dumps", None), setattr(copy, "deepcopy", None)],
        lambda: setattr(pathlib.Path, "write_text", None),
        lambda: logging.setLogRecordFactory(None),
        lambda: [sys.meta_path.clear(), sys.path_hooks.clear()],
        lambda: sys.modules.pop("omegaconf"),
        lambda: [gc.set_debug(gc.DEBUG_STATS), gc.set_threshold(1), gc.set_debug(0)],
        lambda: gc.set_debug(gc.DEBUG_UNCOLLECTABLE),
        lambda: signal.setitimer(signal.ITIMER_PROF, 60),
    ],
)
def test_what_it_changes_of_the_process_is_put_back(leave):
    before = state()

    def function(prompts, completions):
        leave()
        return [1, 2]

    def failing(prompts, completions):
        leave()
        raise ValueError

    assert scored(function) == [1, 2]
    assert state() == before
    with pytest.raises(RuntimeError):
        scored(failing)
    assert state() == before
    assert torch.ones(1).dtype == torch.float32


def test_a_descriptor_that_it_closes_is_open_again_and_a_closed_stream_is_named(capfd):
    assert scored(lambda p, c: [os.close(1), 1, 2][1:]) == [1, 2]
    os.write(1, b"still here")
    assert capfd.readouterr().out == "still here"

    class Stream:
        closed = False

        def close(self):
            self.closed = True

    before, sys.stderr = sys.stderr, Stream()
    try:
        with pytest.raises(RuntimeError, match=r"^reward function closes closed standard"):
            scored(closes)
    finally:
        sys.stderr = before


def test_a_function_that_closes_the_files_of_others_is_named():
    before = set(os.listdir("/proc/self/fd"))

    def closes_all(prompts, completions):
        for number in set(os.listdir("/proc/self/fd")) - before:
            with contextlib.suppress(OSError):
                os.close(int(number))
        return [1, 2]

    with pytest.raises(RuntimeError, match=r"^reward function closes_all closed files"):
        scored(closes_all)


class Strange:
    """A value whose code runs when it is read as a number, or shown."""

    def __init__(self, act, shown=False):
        self.act, self.shown = act, shown

    def __float__(self):
        if self.shown:
            raise TypeError
        self.act()
        return 1.0

    def __repr__(self):
        self.act()
        return "strange"


@pytest.mark.parametrize("shown", [False, True])
@pytest.mark.parametrize("leave", [lambda: sys.exit(0), lambda: next(iter(())), lambda: 1 / 0])
def test_code_of_a_value_ends_in_an_error_of_the_function(leave, shown):
    with pytest.raises((RuntimeError, ValueError), match=r"^reward function <lambda>"):
        scored(lambda p, c: [Strange(leave, shown), 1.0])


def test_code_of_a_value_can_neither_hang_nor_fork_nor_change_the_process(capfd):
    began, mine = time.monotonic(), os.getpid()
    with pytest.raises(TimeoutError, match=r"within 0\.3 sec"):
        scored(lambda p, c: [Strange(lambda: time.sleep(60)), 1.0], timeout_seconds=0.3)
    assert time.monotonic() - began < 10
    assert scored(lambda p, c: [Strange(os.fork), 1.0]) == [1, 1]
    assert os.getpid() == mine, "a child came back"
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    before = state()
    assert scored(lambda p, c: [Strange(lambda: os.chdir("/")), 1.0]) == [1, 1]
    assert state() == before


@pytest.mark.parametrize(
    "value", [np.complex64(1 + 2j), np.str_("1.5"), np.bytes_(b"1.5"), np.datetime64(5, "s")]
)
def test_a_value_of_numpy_that_is_no_real_number_is_refused(value):
    with pytest.raises(ValueError, match=r"for completion 0 .*finite number"):
        scored(lambda p, c: [value, 1.0])


def closes(prompts, completions):
    sys.stderr.close()
    return [1, 2]


def test_its_random_numbers_go_on_from_call_to_call():
    scorer = FunctionScorer(lambda p, c: [random.random(), random.random()])
    answers = responses_of(prompt_batch(ROWS), RESPONSES)
    assert scorer(answers).total.tolist() != scorer(answers).total.tolist()


@pytest.mark.parametrize("how", ["returns", "raises", "exits", "awaits"])
def test_a_child_that_it_forks_does_not_come_back(how, capfd):
    def forks(prompts, completions):
        if os.fork() == 0 and how == "raises":
            raise ValueError
        if how == "exits" and os.getpid() != mine:
            sys.exit(0)
        return [1, 2]

    async def later(prompts, completions):
        return forks(prompts, completions)

    later.__name__ = "forks"
    mine = os.getpid()
    assert scored(later if how == "awaits" else forks) == [1, 2]
    assert os.getpid() == mine, "a child came back"
    _, status = os.wait()
    assert os.waitstatus_to_exitcode(status) == 1
    assert "forks forked" in capfd.readouterr().err


def test_a_file_that_changes_the_process_while_it_is_read_leaves_it_as_it_was(tmp_path):
    (tmp_path / "mine.py").write_text(
        "import os, torch\ntorch.set_default_dtype(torch.float64)\nos.chdir('/')\n"
        "os.environ['MINE_OF_TEST'] = 'kept'\n"
        "def f(prompts, completions):\n    return [len(os.environ['MINE_OF_TEST'])] * 2\n"
    )
    before = torch.get_default_dtype(), os.getcwd()
    try:
        assert scored(f"{tmp_path}/mine.py:f") == [4, 4]
    finally:
        os.environ.pop("MINE_OF_TEST", None)
    assert (torch.get_default_dtype(), os.getcwd()) == before


def test_a_file_that_forks_or_does_not_end_while_it_is_read_is_named(tmp_path, capfd):
    forks, hangs = tmp_path / "forks.py", tmp_path / "hangs.py"
    forks.write_text("import os\nos.fork()\ndef f(prompts, completions):\n    return [1, 2]\n")
    hangs.write_text("import time\nwhile True:\n    time.sleep(1)\n")
    mine = os.getpid()
    assert scored(f"{forks}:f") == [1, 2]
    assert os.getpid() == mine, "a child came back"
    assert os.waitstatus_to_exitcode(os.wait()[1]) == 1
    assert "forks.py forked" in capfd.readouterr().err
    with pytest.raises(TimeoutError, match=r"hangs\.py did not return within 0\.5 seconds"):
        FunctionScorer(f"{hangs}:f", timeout_seconds=0.5)
    assert "reward_function_hangs" not in sys.modules


def test_a_stream_is_written_in_the_encoding_that_it_had(monkeypatch):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), "utf-8", "strict"))

    def function(prompts, completions):
        sys.stdout.reconfigure(encoding="ascii", errors="replace")
        return [1, 2]

    assert scored(function) == [1, 2]
    assert (sys.stdout.encoding, sys.stdout.errors) == ("utf-8", "strict")


def test_threads_run_on():
    done = threading.Event()
    assert scored(lambda p, c: [threading.Thread(target=done.set).start(), 1, 2][1:]) == [1, 2]
    assert done.wait(5)


@pytest.mark.thorough
@pytest.mark.parametrize("waits_for_it", [True, False])
def test_a_timer_that_a_function_leaves_running_is_no_limit(waits_for_it):
    """It may ring within the function, or while what it returned is taken."""

    def leaves(prompts, completions):
        signal.setitimer(signal.ITIMER_REAL, next(delays))
        time.sleep(0.01 * waits_for_it)
        return [1.0, 2.0]

    delays = iter([number * 1e-6 for number in range(1, 400)])
    for _ in range(5 if waits_for_it else 200):
        assert scored(leaves, timeout_seconds=5) == [1.0, 2.0]
        assert signal.getitimer(signal.ITIMER_REAL)[1] == 0.0  # none that rings again


def test_a_limit_that_a_function_raised_stays_and_one_that_it_lowered_comes_back():
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    half = soft // 2
    resource.setrlimit(resource.RLIMIT_NOFILE, (half, hard))
    try:
        for wanted in (soft, half):  # raised, and then lowered
            change = partial(resource.setrlimit, resource.RLIMIT_NOFILE, (wanted, hard))
            with containment.restoring_state("a function"):
                change()
            assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_other_threads_see_the_environment_while_a_variable_is_put_back(monkeypatch):
    monkeypatch.setattr(os.environ, "clear", lambda: pytest.fail("it was empty for a moment"))
    with containment.restoring_state("a function"):
        os.environ["SET_BY_A_FUNCTION"] = "1"
    assert "SET_BY_A_FUNCTION" not in os.environ
