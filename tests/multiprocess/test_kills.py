"""Runs that are killed at 64 random instants in all and resumed: nothing is lost.

One more kill, of PPO in a single process, is in `tests/entry/test_train.py`.
"""

from __future__ import annotations

import pytest

from tests.multiprocess.try_kills import CASES, try_case


def test_each_stage_is_killed_ten_times_in_one_process_and_mostly_in_a_save():
    single = [case for case in CASES if case.strategy == "single"]
    assert {case.stage for case in single} == {"sft", "reward", "dpo", "kto", "ppo"}
    assert all((len(c.kills), c.kills.count("save")) == (10, 6) for c in single)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_killed_at_random_instants_is_the_run_never_killed(case, tmp_path):
    kills, differing = try_case(case, tmp_path)
    assert differing == [], kills
