from __future__ import annotations

import io
import math
import re

import pytest
from rich.console import Console

from rlhf_lightning.callbacks.console import COURSE_LENGTH, course, measures_table


def shown(history: dict[str, list[float]], width: int) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width, force_terminal=True, color_system="standard")
    console.print(measures_table(history, width=width))
    return out.getvalue()


def history(**values: list[float]) -> dict[str, list[float]]:
    return {name.replace("__", "/"): column for name, column in values.items()}


def test_a_row_has_the_value_now_and_at_first_its_course_and_the_healthy_range():
    text = shown(history(rollout__eos_fraction=[0.91, 0.95, 0.99]), 100)
    row = next(line for line in text.splitlines() if "responses that end" in line)
    for part in ("99.0 %", "91.0 %", "▁", "█", "90 to 100 %"):
        assert part in row


def test_a_value_outside_the_healthy_range_is_red_and_one_inside_is_not():
    red = "\x1b[31m"
    assert red in shown(history(ppo__clipfrac=[0.1, 0.5]), 100)
    assert red not in shown(history(ppo__clipfrac=[0.5, 0.1]), 100)
    assert red not in shown(history(rollout__kl_per_token=[0.0]), 100), "a run that has just begun"
    assert red in shown(history(rollout__kl_per_token=[0.0, 3.0]), 100)
    assert red in shown(history(rollout__score=[0.0, math.nan]), 100)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_no_line_is_wider_than_the_terminal(width):
    names = {
        "rollout__score": [0.0, 1.25],
        "ppo__explained_variance": [0.1, 0.5],
        "rollout__eos_fraction": [1.0, 1.0],
    }
    for line in shown(history(**names), width).splitlines():
        plain = line.replace("\x1b[0m", "").replace("\x1b[31m", "").replace("\x1b[36m", "")
        assert len(plain.replace("\x1b[2m", "").rstrip()) <= width


def test_a_course_goes_from_the_lowest_to_the_highest_block_and_keeps_its_length():
    assert course([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert course([1.0, math.nan, 2.0]) == "▁ █"
    assert len(course([float(i) for i in range(1000)])) == COURSE_LENGTH
    assert len(set(course([2.0, 2.0, 2.0]))) == 1
    assert course([1.0]) == ""


def test_nothing_is_cut_at_80_columns_but_the_course_which_is_shorter():
    long = history(
        ppo__explained_variance=[-0.34] * 40,
        rollout__eos_fraction=[1.0] * 40,
        ppo__approx_kl=[0.0144 - 0.0001 * i for i in range(40)],
    )
    text = shown(long, 80)
    assert "…" not in text
    for part in ("responses that end by themselves", "100.0 %", "start", "0.001 to 0.05"):
        assert part in text
    assert len(re.findall("[▁▂▃▄▅▆▇█]+", text)[0]) == 10
    assert len(re.findall("[▁▂▃▄▅▆▇█]+", shown(long, 120))[0]) == COURSE_LENGTH
