"""The progress of long work: a bar on a terminal, lines elsewhere, and the time left."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from rlhf_lightning.preferences import progress as module
from rlhf_lightning.preferences.progress import WorkProgress


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    return now


def test_lines_say_how_much_is_done_and_how_long_the_rest_takes(clock: list[float]) -> None:
    out = io.StringIO()
    console = Console(file=out, width=200)
    with WorkProgress("candidates", 100, every_n_seconds=10, console=console) as work:
        for _ in range(4):  # 25 in 6 seconds each
            clock[0] += 6
            work.advance(25)
    assert out.getvalue().splitlines() == [
        "candidates 50/100 · 50 % · 0:12 left",
        "candidates 100/100 · 100 % · took 0:24",
    ]


def test_what_an_earlier_run_did_says_nothing_about_the_speed(clock: list[float]) -> None:
    out = io.StringIO()
    work = WorkProgress("labels", 100, done=80, every_n_seconds=1, console=Console(file=out))
    with work:
        clock[0] += 30
        work.advance(10)
    assert "labels 90/100 · 90 % · 0:30 left" in out.getvalue()


def test_a_terminal_gets_a_bar_with_the_time_left(clock: list[float]) -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    with WorkProgress("candidates [x]", 10, console=console) as work:
        clock[0] += 20
        work.advance(5, "of sft")
    assert "candidates [x]" in out.getvalue()
    assert "━" in out.getvalue()
    assert "5/10 0:20 left · of sft" in out.getvalue()


def test_work_that_breaks_off_says_where(clock: list[float]) -> None:
    out = io.StringIO()
    work = WorkProgress("candidates", 10, console=Console(file=out))

    def break_off() -> None:
        with work:
            clock[0] += 1
            work.advance(3)
            raise KeyError("broken")

    with pytest.raises(KeyError):
        break_off()
    assert out.getvalue().startswith("candidates 3/10 · 30 %")
