"""Hundreds of iterations with faults: nothing is lost, and memory does not grow."""

from __future__ import annotations

import pytest

from benchmarks.studies.endurance.memory_log import growth, read_memory
from benchmarks.studies.endurance.outcome import differences, memory_growth, passed_over
from benchmarks.studies.endurance.run import endure

SURVIVED = ("unavailable", "busy", "slow", "cut off")


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("num_iterations", "num_faults"), [(200, 8)])
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


def test_growth_is_seen_and_a_warm_up_is_none(tmp_path):
    file = tmp_path / "memory.txt"
    sizes = [1000 + 5 * min(i, 20) + max(i - 20, 0) for i in range(1, 61)]
    file.write_text("".join(f"7 {i} {size}\n" for i, size in enumerate(sizes, 1)) + "7 61 12")
    rows = read_memory(file)
    assert len(rows) == 60, "a line that a kill has cut is no row"
    assert growth(rows, warm_up=20, window=10) == pytest.approx(1135 / 1105 - 1, rel=0.01)
    flat = [(pid, i, 1100) for pid, i, _ in rows]
    assert growth(flat, warm_up=20, window=10) == 0
