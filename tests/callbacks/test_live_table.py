from __future__ import annotations

import io

from rich.console import Console

from rlhf_lightning.callbacks.console import measures_table


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
