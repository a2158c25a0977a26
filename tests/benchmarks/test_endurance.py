"""Hundreds of iterations with faults: nothing is lost, and memory does not grow."""

from __future__ import annotations

import pytest

from benchmarks.studies.endurance.outcome import differences, memory_growth, passed_over
from benchmarks.studies.endurance.run import endure

SURVIVED = ("unavailable", "busy", "slow", "cut off")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_iterations", "num_faults"), [(500, 28)])
def test_a_run_that_is_killed_again_and_again_is_the_one_that_never_was(
    tmp_path, num_iterations, num_faults
):
    runs = endure(tmp_path, num_iterations=num_iterations, num_faults=num_faults)
    assert runs is not None
    steady, killed = runs
    assert differences(steady, killed) == []
    assert memory_growth(steady) < 0.02
    assert killed.state["faults"] == num_faults
    assert passed_over(killed.folder) > 0
    for run in runs:
        given = run.state["given"]
        assert isinstance(given, dict)
        assert set(SURVIVED) <= set(given)
