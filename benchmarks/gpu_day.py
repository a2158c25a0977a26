"""Run every part of a day on a GPU that has no result yet, each in a time limit.

    benchmarks/gpu_day.sh                 on a machine with CUDA
    benchmarks/gpu_day.sh --rehearse      the same parts, tiny, on a CPU and a device in Python

Parts whose seconds do not count run first, several at once on processors of their own. A part that
ends well leaves `gpu_PART.json`, and is not run again. One that fails leaves its log alone, and
does not stop the others.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.carried_wheels import install
from benchmarks.command import FOLDER, table
from benchmarks.gpu_parts import Part, command, device_count, parts
from benchmarks.machine import ROOT, available_cores, describe
from benchmarks.processes import environment

STATE = FOLDER / ".gpu_day"
SHORTEST = 30  # seconds that a part is worth starting for
LAST_LINES = 15
REHEARSED = 3  # times the limit: a machine without a GPU may be busy with other work


@dataclass(frozen=True)
class Outcome:
    """What became of a part."""

    part: Part
    status: str  # done, done before, skipped, failed, cut short, not started
    reason: str = ""
    seconds: float = 0.0

    def line(self) -> str:
        """Return one line of the list at the end."""
        reason = f": {self.reason}" if self.reason else ""
        return f"{self.part.name:20} {self.status:12} {self.seconds:6.0f} s{reason}"


def main(arguments: Sequence[str] | None = None) -> list[Outcome]:
    """Run the parts and name those that failed.

    Raises:
        SystemExit: if a part failed, or if there is no CUDA and this is no rehearsal.
    """
    options = _parser().parse_args(arguments)
    results = options.results or (STATE / "rehearsal" if options.rehearse else FOLDER / "results")
    results, logs = Path(results).resolve(), STATE.resolve()
    for folder in (results, logs):
        folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    site = None if options.rehearse else install()
    if not options.rehearse and device_count() == 0:
        raise SystemExit("no CUDA device: benchmarks/gpu_day.sh --rehearse runs without one")

    def run(part: Part, cores: Sequence[int]) -> Outcome:
        left = 60 * options.minutes - (time.monotonic() - started)
        variables = _variables(site, len(cores))
        words = _on(cores)
        outcome = _attempt(part, results, logs, variables, left, words, rehearse=options.rehearse)
        _say(outcome.line())
        return outcome

    chosen = [part for part in parts() if not options.only or part.name in options.only]
    outcomes = _at_once([part for part in chosen if not part.timed], options.together, run)
    outcomes += [run(part, _cores()) for part in chosen if part.timed]
    total = time.monotonic() - started
    _say(f"\n{total:.0f} s in all, results in {results}", *(o.line() for o in outcomes))
    if any(o.status in ("cut short", "not started") for o in outcomes):
        _say("the same command goes on with what was cut short or not started")
    failed = [o.part.name for o in outcomes if o.status == "failed"]
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}; logs in {logs}")
    return outcomes


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [part.name for part in parts()]
    made.add_argument("--rehearse", action="store_true", help="tiny, without CUDA")
    made.add_argument("--only", nargs="+", choices=names, help="parts to run")
    made.add_argument(
        "--together", type=int, help="tests and peaks of memory at once; default one for 4 cores"
    )
    made.add_argument("--minutes", type=float, default=24 * 60.0, help="to stop after")
    made.add_argument("--results", type=Path, help="folder; default benchmarks/results")
    return made


def _cores() -> list[int]:
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(available_cores()))


def _on(cores: Sequence[int]) -> list[str]:
    """Return the words before a command that keep it on these cores, where there is `taskset`."""
    if shutil.which("taskset") is None:
        return []
    return ["taskset", "-c", ",".join(map(str, cores))]


def _at_once(
    waiting: Sequence[Part], together: int | None, run: Callable[[Part, Sequence[int]], Outcome]
) -> list[Outcome]:
    """Run parts on shares of the cores, in order as shares become free."""
    cores = _cores()
    count = together or max(1, len(cores) // 4)
    shares: queue.SimpleQueue[Sequence[int]] = queue.SimpleQueue()
    for number in range(count):
        shares.put(cores[number::count] or cores)

    def one(part: Part) -> Outcome:
        share = shares.get()
        try:
            return run(part, share)
        finally:
            shares.put(share)

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, waiting))


def _variables(site: Path | None, threads: int) -> dict[str, str]:
    """Return the environment of a part: with the carried packages, and this checkout."""
    found = [str(ROOT), *([str(site)] if site else []), os.environ.get("PYTHONPATH")]
    if site and str(site) not in sys.path:
        sys.path.insert(0, str(site))
    path = os.pathsep.join(filter(None, found))
    return environment(threads) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _attempt(
    part: Part,
    results: Path,
    logs: Path,
    variables: dict[str, str],
    left: float,
    before: Sequence[str] = (),
    *,
    rehearse: bool,
) -> Outcome:
    """Run a part unless it has a result, cannot run here, or has no time."""
    if (results / part.result).exists():
        return Outcome(part, "done before")
    reason = None if rehearse else part.missing()
    if reason is not None:
        return Outcome(part, "skipped", reason)
    if left < min(SHORTEST, part.limit):
        return Outcome(part, "not started", "no time left")
    _say(f"== {part.name}: {part.shows}")
    longest = part.limit * (REHEARSED if rehearse else 1)
    limit, log = min(left, longest), logs / f"{part.name}.log"
    started = time.monotonic()
    words = command(part, logs if part.tests else results, rehearse=rehearse)
    code = limited([*before, *words], log, variables, limit)
    seconds = time.monotonic() - started
    if code is None and limit < longest:
        return Outcome(part, "cut short", "no time left", seconds)
    if code is None:
        reason = f"ran past its limit of {limit:.0f} s"
    elif part.tests:
        reason = _write_tests(part, logs / f"{part.name}.xml", results, words, rehearse=rehearse)
    elif code or not (results / part.result).exists():
        reason = f"ended with status {code}"
    if reason is None:
        return Outcome(part, "done", seconds=seconds)
    _say(*log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:])
    return Outcome(part, "failed", reason, seconds)


def limited(words: Sequence[str], log: Path, variables: dict[str, str], limit: float) -> int | None:
    """Run a command with everything it starts; return its status, None if it was too slow."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            words,
            cwd=ROOT,
            env=variables,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            return process.wait(limit)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):  # all of them have ended
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _write_tests(
    part: Part, report: Path, results: Path, words: Sequence[str], *, rehearse: bool
) -> str | None:
    """Write the result of tests that passed; return why it is none."""
    if not report.exists():
        return "pytest wrote no report"
    cases = [_case(element) for element in ElementTree.parse(report).iter("testcase")]
    failed = [case["name"] for case in cases if case["outcome"] == "failed"]
    if failed:
        return f"{len(failed)} of {len(cases)} tests failed: {', '.join(failed)}"
    if not any(case["outcome"] == "passed" for case in cases):
        return "no test ran"
    result = {
        "benchmark": "gpu_day",
        "command": f"benchmarks/gpu_day.sh --only {part.name}",
        "machine": describe(
            "cpu" if rehearse else "cuda", available_cores(), {"ours": sys.executable}
        ),
        "settings": {"pytest": [word for word in words[3:] if "junit" not in word]},
        "summary": {"shows": part.shows, "tests": cases},
    }
    text = json.dumps(result, indent=1) + "\n"
    (results / part.result).write_text(text, encoding="utf-8")
    return None


def _case(element: ElementTree.Element) -> dict[str, Any]:
    children = {child.tag: child for child in element}
    bad, skipped = {"failure", "error"} & children.keys(), children.get("skipped")
    case: dict[str, Any] = {"name": element.get("name"), "seconds": float(element.get("time", 0))}
    if skipped is not None:
        return case | {"outcome": "skipped", "reason": skipped.get("message", "")}
    return case | {"outcome": "failed" if bad else "passed"}


def render(result: dict[str, Any]) -> str:
    """Return the tests as Markdown: a line for each function, and why some did not run."""
    counts: dict[str, list[int]] = {}
    reasons: dict[str, int] = {}
    for case in result["summary"]["tests"]:
        found = counts.setdefault(str(case["name"]).partition("[")[0], [0, 0])
        found[case["outcome"] == "skipped"] += 1
        if case["outcome"] == "skipped":
            reasons[case["reason"]] = reasons.get(case["reason"], 0) + 1
    rows = [[f"`{name}`", str(passed), str(skipped)] for name, (passed, skipped) in counts.items()]
    lines = [table(["test", "passed", "skipped"], rows), ""]
    lines += [f"* skipped {count}: {reason}" for reason, count in reasons.items()]
    return "\n".join(lines).rstrip()


def _say(*lines: str) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    sys.stdout.flush()


if __name__ == "__main__":
    main()
