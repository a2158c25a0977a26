"""Kill runs at random instants, resume them, and say what became of each.

    python -m tests.multiprocess.try_kills FOLDER [sft-single ppo-fsdp ...]

What is done stays in FOLDER, so that the same command goes on where it was interrupted.
"""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

from tests.multiprocess.kills import (
    STAGES,
    STRATEGIES,
    Case,
    Killer,
    Moment,
    Runs,
    differences,
    finished,
)

TEN: tuple[Moment, ...] = ("save", "any", "save", "save", "any") * 2
CASES = [Case(stage, "single", TEN) for stage in STAGES]
CASES += [
    Case(stage, strategy, ("save", "any", "any") if stage == "ppo" else ("save", "any"))
    for stage in STAGES
    if stage not in ("dpo", "kto")
    for strategy in STRATEGIES
    if strategy != "single"
]


def try_case(case: Case, folder: Path) -> tuple[list[str], list[str]]:
    """Return when the run was killed, in words, and in what it differs from one never killed.

    Raises:
        AssertionError: if a process ends otherwise than it should.
    """
    folder.mkdir(parents=True, exist_ok=True)
    start = folder / "models" / "start"
    if not start.exists():
        from tests.builders.runs import make_start

        make_start(start)
    runs = Runs(folder, start, case)
    whole, killed = folder / "whole", folder / "killed"
    if not finished(whole):
        shutil.rmtree(whole, ignore_errors=True)  # it has been interrupted
        runs.start("whole").check()
    notes = folder / "kills.json"
    kills: list[str] = json.loads(notes.read_text()) if notes.exists() else []
    for number in range(len(kills), len(case.kills)):
        moment, seed = case.kills[number], f"{case}-{number}"
        killer = Killer(killed / "outputs", moment, case.iterations, seed)
        outcome = runs.start("killed", killer)
        assert killer.struck, f"the run ended before it was killed: {outcome}"
        assert outcome.codes[0] != 0, outcome
        kills.append(f"{killer.struck}; it had begun at {killer.done}")
        notes.write_text(json.dumps(kills, indent=1))
    if not finished(killed):
        runs.start("killed").check()
    (one,), (other,) = finished(whole), finished(killed)
    return kills, differences(one, other, case.iterations)


def main(folder: Path, *names: str) -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the ranks too
    tried = lost = 0
    for case in CASES:
        if names and str(case) not in names:
            continue
        kills, differing = try_case(case, folder / str(case))
        tried, lost = tried + len(kills), lost + (len(kills) if differing else 0)
        for kill in kills:
            sys.stdout.write(f"{case}: killed {kill}\n")
        sys.stdout.write(f"{case}: differs in {differing}\n" if differing else f"{case}: bitwise\n")
        sys.stdout.flush()
    sys.stdout.write(f"{tried} kills tried, {tried - lost} survived, {lost} lost\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute(), *sys.argv[2:])
