"""Run every part of a day on a GPU that has no result yet, one after the other, in order of worth.

    benchmarks/gpu_day.sh                 on a machine with CUDA
    benchmarks/gpu_day.sh quick           the same parts, tiny, on a CPU and a device in Python

A part that ends well leaves `gpu_PART.json`, and is not run again without `--again`. One that fails
leaves its log alone, and does not stop the others. This program imports no torch: it holds no
memory of a GPU.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks.carried_wheels import PINNED, install
from benchmarks.command import FOLDER, table
from benchmarks.machine import ROOT, available_cores, describe
from benchmarks.processes import environment

STATE = FOLDER / ".gpu_day"
SHORTEST = 30  # seconds that a part is worth starting for
LAST_LINES = 15
PARITY = ("tests/rehearsal/test_training.py", "tests/rehearsal/test_command_lines.py")
SHARDED = "tests/multiprocess/test_on_gpus.py"
MEMORY = "tests/memory/test_peaks.py"  # takes minutes
TRL = PINNED["trl"]
VLLM = Path(os.environ.get("VLLM_PYTHON", ROOT / ".vllm/bin/python"))


@dataclass(frozen=True)
class Part:
    """One command, and its small stand-in for a machine without a GPU.

    Args:
        name: of the part, and `gpu_NAME.json` of its result.
        shows: what, in the table.
        command: module and arguments; of tests those of pytest.
        rehearsal: likewise, on a CPU and on the second device in Python.
        limit: seconds.
        tests: the command is pytest's, and the result is made from its report.
        missing: whether it is a rehearsal -> why the part cannot run on this machine, or None.
    """

    name: str
    shows: str
    command: tuple[str, ...]
    rehearsal: tuple[str, ...]
    limit: int
    tests: bool = False
    missing: Callable[[bool], str | None] = lambda quick: None

    @property
    def result(self) -> str:
        """File of the result."""
        return f"gpu_{self.name}.json"


def _measured(
    name: str, shows: str, limit: int, words: tuple[str, ...], on_gpu: tuple[str, ...]
) -> Part:
    quick = ("--device", "cpu", "--quick", "--threads", "1", "--repeats", "1")
    return Part(name, shows, (*words, "--device", "cuda", *on_gpu), (*words, *quick), limit)


def _ppo(name: str, side: str, shows: str, limit: int) -> Part:
    """Return PPO iterations in bf16, the first of which is not counted."""
    own = ("benchmarks.ppo_iteration", "--only", side, "--precisions", "bf16")
    # Both sides read the same models, from memory where there is such a folder.
    memory = Path("/dev/shm")
    folder = memory / "rlhf_gpu_day" if memory.is_dir() else STATE / "models"
    counted = ("--repeats", "1", "--warmup", "1", "--iterations", "3", "--models", str(folder))
    peer = ("--peer-python", sys.executable)
    part = _measured(name, shows, limit, (*own, *peer), ("--shape", "0.5b", *counted))
    return replace(part, missing=_no_trl) if side == "trl" else part


def _no_vllm(quick: bool) -> str | None:
    if quick or VLLM.exists():
        return None
    return f"no {VLLM.name} of an environment with vLLM (make vllm)"


def _no_trl(quick: bool) -> str | None:
    try:
        found = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError:
        found = "none"
    return None if found == TRL else f"needs trl=={TRL}, found {found}"


def gpu_tests() -> tuple[str, ...]:
    """Return the test files that have tests for a GPU and are in no part of their own."""
    own = {*PARITY, SHARDED, MEMORY}
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    named = {str(f.relative_to(ROOT)): f.read_text(encoding="utf-8") for f in files}
    return tuple(name for name, text in named.items() if "mark.gpu" in text and name not in own)


def parts() -> tuple[Part, ...]:
    """Return all parts; the measurements take seven minutes together."""
    engine = ("benchmarks.gpu_engine",)
    one_gpu = ("-m", "gpu", "-n", "4")
    here = "tests/rehearsal/test_mirror.py"
    return (
        _measured("engine_0.5b", "decode and update, 0.5B", 150, engine, ("--shape", "0.5b")),
        _ppo("ppo_0.5b", "ours", "PPO iteration, 0.5B, default settings", 150),
        _ppo("trl_0.5b", "trl", "PPO iteration, 0.5B, TRL 1.12", 160),
        _measured(
            "engine_1b",
            "update, 1B",
            100,
            (*engine, "--parts", "update"),
            ("--shape", "1b"),
        ),
        Part("tests", "tests that need CUDA", (*one_gpu, *gpu_tests()), (here,), 240, tests=True),
        Part(
            "parity",
            "weights and metrics of every stage against the CPU",
            (*one_gpu, *PARITY),
            ("-k", "of_the_cpu and sft and not lora and not cuda", PARITY[0]),
            480,
            tests=True,
        ),
        Part(
            "nccl",
            "FSDP2 over NCCL on 1, 2 and 4 GPUs: exports of one CPU process",
            ("-m", "gpu", SHARDED),
            ("-k", "cpu-sft-none-2", SHARDED),
            540,
            tests=True,
        ),
        Part(
            "vllm",
            "vLLM: weights, log-probabilities, failures",
            ("-m", "gpu", "-k", "vllm]", "tests/rollout/test_generate_vllm.py"),
            ("-k", "did_not_arrive and stand-in", "tests/rollout/test_generate_vllm.py"),
            540,
            tests=True,
            missing=_no_vllm,
        ),
    )


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
    quick = options.quick == "quick"
    results = options.results or (STATE / "rehearsal" if quick else FOLDER / "results")
    results, logs = Path(results).resolve(), STATE.resolve()
    for folder in (results, logs):
        folder.mkdir(parents=True, exist_ok=True)
    started = time.monotonic()
    site = None if quick else install()
    if not quick and device_count() == 0:
        raise SystemExit("no CUDA device: benchmarks/gpu_day.sh quick runs without one")
    variables = _variables(site)
    outcomes = []
    for part in parts():
        if options.only and part.name not in options.only:
            continue
        if options.again:
            (results / part.result).unlink(missing_ok=True)
        left = 60 * options.minutes - (time.monotonic() - started)
        outcomes.append(_attempt(part, results, logs, variables, left, quick=quick))
        _say(outcomes[-1].line())
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
    made.add_argument("quick", nargs="?", choices=["quick"], help="tiny, without CUDA")
    made.add_argument("--only", nargs="+", choices=names, help="parts to run")
    made.add_argument("--again", action="store_true", help="also what has a result")
    made.add_argument("--minutes", type=float, default=24 * 60.0, help="to stop after")
    made.add_argument("--results", type=Path, help="folder; default benchmarks/results")
    return made


def device_count() -> int:
    """Return the number of CUDA devices, as torch sees them in a process of its own."""
    code = "import torch; print(torch.cuda.device_count())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return int(done.stdout)


def _variables(site: Path | None) -> dict[str, str]:
    """Return the environment of a part: with the carried packages, and this checkout."""
    found = [str(ROOT), *([str(site)] if site else []), os.environ.get("PYTHONPATH")]
    if site and str(site) not in sys.path:
        sys.path.insert(0, str(site))
    path = os.pathsep.join(filter(None, found))
    return environment(available_cores()) | {"PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}


def _attempt(
    part: Part, results: Path, logs: Path, variables: dict[str, str], left: float, *, quick: bool
) -> Outcome:
    """Run a part unless it has a result, cannot run here, or has no time."""
    if (results / part.result).exists():
        return Outcome(part, "done before")
    reason = part.missing(quick)
    if reason is not None:
        return Outcome(part, "skipped", reason)
    longest = part.limit * (3 if quick else 1)  # a machine without a GPU may be busy
    if left < min(SHORTEST, longest):
        return Outcome(part, "not started", "no time left")
    _say(f"== {part.name}: {part.shows}")
    limit, log = min(left, longest), logs / f"{part.name}.log"
    words = part.rehearsal if quick else part.command
    if part.tests:
        report = f"--junit-xml={logs / part.name}.xml"
        words = ("pytest", "-q", "--timeout", str(part.limit), report, *words)
    else:
        words = (*words, "--out", str(results / part.result))
    started = time.monotonic()
    code = limited([sys.executable, "-m", *words], log, variables, limit)
    seconds = time.monotonic() - started
    if code is None and limit < longest:
        return Outcome(part, "cut short", "no time left", seconds)
    if code is None:
        reason = f"ran past its limit of {limit:.0f} s"
    elif part.tests:
        reason = _write_tests(part, logs / f"{part.name}.xml", results, words, quick=quick)
    elif code or not (results / part.result).exists():
        reason = f"ended with status {code}"
    last = log.read_text(encoding="utf-8", errors="replace").splitlines()[-LAST_LINES:]
    if reason is not None or not part.tests:
        _say(*last)
    return Outcome(part, "done" if reason is None else "failed", reason or "", seconds)


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
            with contextlib.suppress(ProcessLookupError):  # all of them have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _write_tests(
    part: Part, report: Path, results: Path, words: Sequence[str], *, quick: bool
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
            "cpu" if quick else "cuda", available_cores(), {"ours": sys.executable}
        ),
        "settings": {"pytest": [word for word in words[2:] if "junit" not in word]},
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
