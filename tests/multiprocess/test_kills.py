"""Runs that are killed at 48 random instants in all and resumed: nothing is lost.

One more kill, of PPO in a single process, is in `tests/entry/test_train.py`.
"""

from __future__ import annotations

import pytest

from tests.builders.runs import make_start
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

FIVE: tuple[Moment, ...] = ("save", "any", "save", "save", "any")
CASES = [Case(s, "single", FIVE * 2 if s == "ppo" else (*FIVE, "any")) for s in STAGES]
CASES += [
    Case(stage, strategy, ("save", "any", "any") if stage == "ppo" else ("save", "any"))
    for stage in STAGES
    if stage not in ("dpo", "kto")
    for strategy in STRATEGIES
    if strategy != "single"
]


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_killed_at_random_instants_is_the_run_never_killed(case, tmp_path):
    runs = Runs(tmp_path, make_start(tmp_path / "models" / "start"), case)
    runs.start("whole").check()
    kills = []
    for number, moment in enumerate(case.kills):
        outputs = tmp_path / "killed" / "outputs"
        killer = Killer(outputs, moment, case.iterations, seed=f"{case}-{number}")
        outcome = runs.start("killed", killer)
        assert killer.struck, f"the run ended before it was killed: {outcome}"
        assert outcome.codes[0] != 0, outcome
        kills.append(f"{killer.struck}; it had begun at {killer.done}")
    if not finished(tmp_path / "killed"):
        runs.start("killed").check()
    (one,), (other,) = (finished(tmp_path / name) for name in ("whole", "killed"))
    assert differences(one, other, case.iterations) == [], kills
