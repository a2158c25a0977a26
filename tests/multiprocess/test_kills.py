"""Runs that are killed at twenty random instants in all and resumed: nothing is lost.

One more kill, of PPO in a single process, is in `tests/entry/test_train.py`.
"""

from __future__ import annotations

import pytest

from tests.multiprocess.try_kills import CASES, try_case


def test_there_are_twenty_kills():
    assert sum(len(case.kills) for case in CASES) == 20


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_run_killed_at_random_instants_is_the_run_never_killed(case, tmp_path):
    kills, differing = try_case(case, tmp_path)
    assert differing == [], kills
