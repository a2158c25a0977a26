"""Threads and processes that user code leaves do not hold a command that is done."""

from __future__ import annotations

import subprocess
import sys

import pytest

HEAD = """
import multiprocessing, sys, threading, time
from concurrent.futures import ThreadPoolExecutor
from rlhf_lightning.app import leftovers
leftovers.PATIENCE_SECONDS = 0.3
pool = ThreadPoolExecutor(1)
with leftovers.ending_without_them():
"""


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("code", "exit_code", "name"),
    [
        ("threading.Thread(target=time.sleep, args=(99,), name='own').start()", 0, "own"),
        ("threading.Thread(target=time.sleep, args=(99,), name='own').start(); exit(3)", 3, "own"),
        ("pool.submit(time.sleep, 99)", 0, "ThreadPool"),
        ("multiprocessing.Process(target=time.sleep, args=(2,), name='child').start()", 0, "child"),
        ("threading.Thread(target=time.sleep, args=(99,), daemon=True).start()", 0, None),
        ("pool.submit(time.sleep, 0).result()", 0, None),
        ("threading.Thread(target=time.sleep, args=(99,)).start(); 1 / 0", 1, "Thread-"),
        ("sys.exit('text')", 1, None),
    ],
)  # fmt: skip
def test_a_command_ends_without_what_goes_on_and_names_it(code, exit_code, name):
    done = subprocess.run(
        [sys.executable, "-c", f"{HEAD}    {code}\n"], capture_output=True, text=True, timeout=20
    )
    assert done.returncode == exit_code
    assert ("still at work" in done.stderr) == (name is not None)
    assert name is None or name in done.stderr


def test_a_process_that_goes_on_after_a_command_is_not_ended():
    code = (
        f"{HEAD}    pass\nthreading.Thread(target=time.sleep, args=(2,)).start(); time.sleep(1)\n"
    )
    code += "print('went on', flush=True)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=20)
    assert (done.returncode, done.stdout.strip()) == (0, "went on")
