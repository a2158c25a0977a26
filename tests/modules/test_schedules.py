from __future__ import annotations

import pytest

from rlhf_lightning.modules.optimization import Schedule


def factors(schedule: Schedule, total: int) -> list[float]:
    return [schedule.factor(i, total) for i in range(total)]


def test_linear_falls_evenly_from_1_and_would_reach_0_after_the_last_iteration():
    assert factors(Schedule("linear"), 4) == [1.0, 0.75, 0.5, 0.25]
    assert Schedule("linear").factor(4, 4) == 0.0
    assert Schedule("linear").factor(9, 4) == 0.0


def test_cosine_passes_one_half_in_the_middle():
    got = factors(Schedule("cosine"), 4)
    assert got == pytest.approx([1.0, 0.853553, 0.5, 0.146447], abs=1e-6)


def test_constant_stays():
    assert factors(Schedule("constant"), 3) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("name", ["constant", "linear", "cosine"])
def test_warm_up_rises_evenly_and_never_starts_at_0(name):
    got = factors(Schedule(name, warmup_fraction=0.4), 10)
    assert got[:5] == pytest.approx([0.25, 0.5, 0.75, 1.0, 1.0])
    assert all(0 < value <= 1 for value in got)
    assert got[4:] == sorted(got[4:], reverse=True)
