"""Run PPO on the built-in world to its end, with faults of the process and the reward service.

    python -m benchmarks.studies.endurance.run FOLDER --iterations 500 --minutes 8

makes two runs whose reward service fails at times and returns non-finite scores: `steady` runs in
one process, `killed` is killed, stopped, broken and started again. The last line is `done`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.studies.endurance.memory_log import read_memory
from benchmarks.studies.endurance.service import TIMEOUT, Unreliable
from rlhf_lightning.runs.folder import RunFolder
from tests.builders.command_lines import command, environment
from tests.builders.ranks import free_port
from tests.builders.reward_server import serving
from tests.builders.runs import make_start

KINDS = {  # fault of the process -> its exit status
    "killed": -signal.SIGKILL,
    "killed while it saves": -signal.SIGKILL,
    "killed while it starts": -signal.SIGKILL,
    "killed, and its newest checkpoint is damaged": -signal.SIGKILL,
    "told to stop": 75,
    "interrupted": 130,
    "without a reward service": 1,
}
POLL = 0.01  # seconds
POLLS = 24_000  # without an iteration, or without an end; time during which both are halted is free


@dataclass(frozen=True)
class Fault:
    """A fault of the process after an iteration."""

    kind: str
    iteration: int


def plan_faults(num_iterations: int, num_faults: int, seed: int = 0) -> list[Fault]:
    """Return the faults in the order in which they happen; every kind comes up."""
    draw = random.Random(seed)
    kinds = [list(KINDS)[i % len(KINDS)] for i in range(num_faults)]
    draw.shuffle(kinds)
    at = sorted(draw.sample(range(2, num_iterations - 1), num_faults))
    return [Fault(kind, iteration) for kind, iteration in zip(kinds, at, strict=True)]


class Endurance:
    """One of the two runs, in a folder of its own.

    Args:
        folder: of this run; what is there is continued.
        start: the policy to start from.
        num_iterations: of the run.
        faults: that happen to its process, in order.
        port: of the reward service, the same in every start: it is part of the configuration.
        seed: of the instants.
    """

    def __init__(
        self,
        folder: Path,
        start: Path,
        num_iterations: int,
        faults: list[Fault],
        port: int,
        seed: int = 0,
    ) -> None:
        self.folder = folder
        self.start = start
        self.num_iterations = num_iterations
        self.faults = faults
        self.port = port
        self.seed = seed
        self.memory = folder / "memory.txt"
        self.log = folder / "log.txt"
        self.state_file = folder / "state.json"
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def state(self) -> dict[str, object]:
        """Faults, starts and answers of the service up to now."""
        empty = {"faults": 0, "starts": 0, "given": {}, "seconds": 0.0, "done": False}
        return json.loads(self.state_file.read_text()) if self.state_file.exists() else empty

    @property
    def run_folder(self) -> RunFolder:
        """The folder of the training run."""
        return RunFolder(max(self.folder.glob("outputs/*/*/summary.json")).parent)

    def arguments(self) -> list[str]:
        """Return the overrides of the training run."""
        return [
            "+experiment=ppo",
            "logger=none",
            "resume=auto",
            "data.batch_size=4",
            f"data.num_iterations={self.num_iterations}",
            "module.ppo.num_minibatches=2",
            "module.ppo.num_ppo_epochs=1",
            "module.ppo.score_clip=null",
            "module.sampling.max_new_tokens=12",
            "module.value=null",
            "module.value_head=zero",
            "evaluation.num_prompts=16",
            "evaluation.gold=null",
            "gates=none",
            "callbacks.checkpoint.every_n_iterations=7",
            "callbacks.checkpoint.keep_last=3",
            "callbacks.samples.every_n_iterations=25",
            "+callbacks.extra.memory._target_=benchmarks.studies.endurance.memory_log.MemoryLog",
            f"+callbacks.extra.memory.file={self.memory}",
            "+dataset.source.num_texts=24",
            "+dataset.source.num_demonstrations=24",
            "+dataset.source.num_preferences=24",
            "+dataset.source.num_validation_preferences=16",
            f"artifacts.sft={self.start}",
            "artifacts.reward=null",
            "artifacts.publish=null",
            "scorer=http",
            f"scorer.url=http://127.0.0.1:{self.port}/score",
            f"scorer.timeout={TIMEOUT}",
            "scorer.max_retries=8",
        ]

    def continue_until(self, deadline: float) -> bool:
        """Run on; return whether the run is complete. Stops at `deadline` (of `time.monotonic`)."""
        state = self.state
        begun = time.monotonic()
        service = Unreliable(seed=int(str(state["starts"])) + self.seed)
        with serving(service, port=self.port):
            while not state["done"] and time.monotonic() < deadline:
                number = int(str(state["faults"]))
                fault = self.faults[number] if number < len(self.faults) else None
                state["starts"] = int(str(state["starts"])) + 1
                happened = self._one_start(service, fault, deadline, number)
                state["done"] = happened == "completed"
                state["faults"] = number + (happened == "fault")
                state["seconds"] = round(time.monotonic() - begun + float(str(state["seconds"])), 1)
                begun = time.monotonic()
                given = dict(state["given"])  # type: ignore[call-overload]
                for kind, count in service.given.items():
                    given[kind] = given.get(kind, 0) + count
                service.given.clear()
                state["given"] = given
                self.state_file.write_text(json.dumps(state))
        return bool(state["done"])

    def _one_start(
        self, service: Unreliable, fault: Fault | None, deadline: float, number: int
    ) -> str:
        """Start the process, let the fault happen, and hold its exit status against it."""
        draw = random.Random(f"{self.seed}/{number}")
        with self.log.open("ab") as log:
            log.write(f"--- start, then {fault}\n".encode())
            log.flush()
            process = subprocess.Popen(
                command(*self.arguments()),
                cwd=self.folder,
                env=environment(RLHF_ALLOWED_TARGETS="benchmarks.", HF_HUB_OFFLINE="1"),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
            try:
                happened, wanted = self._accompany(process, service, fault, deadline, draw)
                code = self._exit_status(process)
            finally:
                process.kill()
                process.wait()
                service.is_broken = False
        assert code == wanted, f"{fault}: exit status {code}, wanted {wanted}; see {self.log}"
        if fault is not None and happened == "fault" and "damaged" in fault.kind:
            self._damage()
        return happened

    def _accompany(
        self,
        process: subprocess.Popen[bytes],
        service: Unreliable,
        fault: Fault | None,
        deadline: float,
        draw: random.Random,
    ) -> tuple[str, int]:
        """Return what was done to the process, and the exit status that must follow."""
        seen, waited = len(read_memory(self.memory)), 0
        if fault is not None and fault.kind == "killed while it starts":
            time.sleep(draw.uniform(0.0, 6.0))
            process.kill()
            return "fault", -signal.SIGKILL
        while process.poll() is None:
            rows = read_memory(self.memory)
            waited = waited + 1 if len(rows) == seen else 0
            seen = len(rows)
            assert waited < POLLS, f"no iteration for {POLLS * POLL} s; see {self.log}"
            if time.monotonic() > deadline:
                process.kill()
                return "out of time", -signal.SIGKILL
            mine = [iteration for pid, iteration, _ in rows if pid == process.pid]
            if fault is not None and mine and mine[-1] >= fault.iteration:
                self._happen(process, service, fault.kind, draw)
                return "fault", KINDS[fault.kind]
            time.sleep(POLL)
        return "completed", 0

    def _exit_status(self, process: subprocess.Popen[bytes]) -> int:
        for _ in range(POLLS):
            if process.poll() is not None:
                return int(process.returncode)
            time.sleep(POLL)
        raise AssertionError(f"the process does not end; see {self.log}")

    def _happen(
        self,
        process: subprocess.Popen[bytes],
        service: Unreliable,
        kind: str,
        draw: random.Random,
    ) -> None:
        if kind == "without a reward service":
            service.is_broken = True
        elif kind == "told to stop":
            process.send_signal(signal.SIGTERM)
        elif kind == "interrupted":
            process.send_signal(signal.SIGINT)
        elif kind == "killed while it saves":
            checkpoints = self.run_folder.checkpoints
            while process.poll() is None and not list(checkpoints.glob(".*tmp*")):
                time.sleep(0.0002)
            process.kill()
        else:
            time.sleep(draw.uniform(0.0, 0.5))
            process.kill()

    def _damage(self) -> None:
        found = sorted(self.run_folder.checkpoints.glob("iteration=*.ckpt"))
        if len(found) > 1:  # without one before it the run would begin anew
            os.truncate(found[-1], found[-1].stat().st_size * 2 // 3)


def endure(
    folder: Path, *, num_iterations: int, num_faults: int, minutes: float = 1e9
) -> tuple[Endurance, Endurance] | None:
    """Run both to their ends, or go on for so long; None if they are not at their ends then."""
    deadline = time.monotonic() + 60 * minutes
    plan = folder / "plan.json"
    if not plan.exists():
        folder.mkdir(parents=True, exist_ok=True)
        # Answers that differ in length from the first iteration on: EOS depends on what precedes.
        make_start(folder / "start", eos_scale=12.0, num_hidden_layers=2, intermediate_size=64)
        plan.write_text(json.dumps({"port": free_port()}))
    port = int(json.loads(plan.read_text())["port"])
    faults = plan_faults(num_iterations, num_faults)
    steady = Endurance(folder / "steady", folder / "start", num_iterations, [], port)
    killed = Endurance(folder / "killed", folder / "start", num_iterations, faults, port)
    done = all(run.continue_until(deadline) for run in (steady, killed))
    return (steady, killed) if done else None


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--faults", type=int, default=28)
    parser.add_argument("--minutes", type=float, default=1e9, help="stop after so many")
    given = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the process that trains ends, too
    # A shell ignores it in what it starts with `&`, and so would every run that is started here.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    runs = endure(
        given.folder.absolute(),
        num_iterations=given.iterations,
        num_faults=given.faults,
        minutes=given.minutes,
    )
    if runs is None:
        sys.stdout.write("not done: run it again\n")
        raise SystemExit(75)
    from benchmarks.studies.endurance.outcome import report

    sys.stdout.write(report(*runs))


if __name__ == "__main__":
    main()
