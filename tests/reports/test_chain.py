"""The page of a pipeline: its stages in a row, and those that failed or were not run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rlhf_lightning.reports.page import write_report
from rlhf_lightning.reports.sections import rounds_section
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import GateResult, Summary, read_summary, write_summary
from tests.builders.run_folders import fake_reward_run, fake_sft_run
from tests.reports.test_page import Outline

STAGES = [f"round_1/{name}" for name in ("sft", "reward", "ppo", "evaluate")]


def pipeline(folder: Path) -> RunFolder:
    """Write a pipeline that stopped at the gates of its reward model, with the pages of both."""
    missed = GateResult("accuracy", 0.6, 0.8, False, "0.6, wanted at least 0.8")
    for make, name in ((fake_sft_run, "sft"), (fake_reward_run, "reward")):
        stage = make(folder / "round_1" / name, 20)
        gates = (missed,) if name == "reward" else ()
        about = {"data": f"of {name}"}
        write_summary(stage, replace(read_summary(stage), gates=gates, about=about))
        write_report(stage)
    run = RunFolder(folder)
    cause = "round_1/reward failed. Then say accept=[reward]"
    summary = Summary("pipeline", "stopped", 1, cause=cause)
    seconds = {"round_1/sft": 30.0, "round_1/reward": 60.0, "total": 90.0}
    about = {"stages": ", ".join(STAGES)}
    write_summary(run, replace(summary, about=about, seconds=seconds))
    return run


def cards(page: str) -> list[str]:
    found = re.findall(r'<article class="sample.*?</article>', page, re.S)
    return [Outline(card).text for card in found]


def test_each_stage_has_its_figure_its_curve_its_gates_its_time_and_a_link(tmp_path: Path) -> None:
    page = write_report(pipeline(tmp_path)).read_text()
    sft, reward, *_ = cards(page)
    assert "held-out 2.31 nats → 0.67 nats" in sft
    assert "Accuracyheld-out 86.1 %" in reward  # the first is not of before training
    assert "84.5 to 87.6 %" in reward
    assert "0.6, wanted at least 0.8" in reward
    assert "1 min 37 s" in reward
    chain = page[page.index("<ol") : page.index("</ol>")]
    assert chain.count("<svg") == 2
    links = re.findall(r'href="(.*?)"', page)
    assert links == [f"{name}/report.html" for name in STAGES[:2]]
    assert all((tmp_path / link).is_file() for link in links)


def test_the_cells_of_a_table_of_rounds_name_their_columns_and_have_units() -> None:
    figures = {"gold_win_rate": 0.6, "kl_per_token": 0.25}
    stages = ["round_1/ppo", "round_2/ppo"]
    page = rounds_section({f"{of}/{n}": v for of in stages for n, v in figures.items()}, stages)
    assert page.count('data-label="KL, per token">0.25 nats</td>') == 2
