"""The page of a pipeline: its stages in a row, and those that failed or were not run."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from rlhf_lightning.reports.page import write_report
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import GateResult, Summary, read_summary, write_summary
from tests.builders.run_folders import fake_ppo_run, fake_reward_run, fake_sft_run
from tests.reports.test_page import HOSTILE, Outline

STAGES = [f"round_1/{name}" for name in ("sft", "reward", "ppo", "evaluate")]


def pipeline(folder: Path) -> RunFolder:
    """Write a pipeline that stopped at the gates of its reward model, with the pages of both."""
    missed = GateResult("accuracy", 0.6, 0.8, False, "0.6, wanted at least 0.8")
    for make, name in ((fake_sft_run, "sft"), (fake_reward_run, "reward")):
        stage = make(folder / "round_1" / name, 20)
        gates = (missed,) if name == "reward" else ()
        write_summary(
            stage, replace(read_summary(stage), gates=gates, about={"data": f"of {name}"})
        )
        write_report(stage)
    run = RunFolder(folder)
    summary = Summary(
        "pipeline", "stopped", 1, cause="round_1/reward failed. Then say accept=[reward]"
    )
    seconds = {"round_1/sft": 30.0, "round_1/reward": 60.0, "total": 90.0}
    about = {"stages": ", ".join(STAGES)}
    write_summary(run, replace(summary, about=about, seconds=seconds))
    return run


def cards(page: str) -> list[str]:
    return [
        Outline(card).text
        for card in re.findall(r'<article class="sample.*?</article>', page, re.S)
    ]


def test_each_stage_has_its_figure_its_curve_its_gates_its_time_and_a_link(tmp_path: Path) -> None:
    page = write_report(pipeline(tmp_path)).read_text()
    sft, reward, *_ = cards(page)
    assert "Supervised fine-tuning" in sft
    assert "0.67" in sft
    assert "of sft" in sft
    assert "86.1 %" in reward
    assert "84.5 to 87.6 %" in reward
    assert "0.6, wanted at least 0.8" in reward
    assert "gates failed" in reward
    assert "1 min 37 s" in reward
    chain = page[page.index("<ol") : page.index("</ol>")]
    assert chain.count("<svg") == 2
    links = re.findall(r'href="(.*?)"', page)
    assert links == [f"{name}/report.html" for name in STAGES[:2]]
    assert all((tmp_path / link).is_file() for link in links)


def test_what_trained_the_policy_is_titled_by_its_own_objective(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    trained = fake_ppo_run(tmp_path / STAGES[2], 20)
    write_summary(trained, replace(read_summary(trained), stage="dpo", title="KTO"))
    titles = re.findall(r"<h3><b>(.*?)</b>", write_report(run).read_text())
    assert titles == ["sft: Supervised fine-tuning", "reward: Reward model", "ppo: KTO", "evaluate"]


def test_what_was_not_run_says_for_what_it_waits_and_the_top_says_what_to_do(
    tmp_path: Path,
) -> None:
    page = write_report(pipeline(tmp_path)).read_text()
    *_, ppo, evaluation = cards(page)
    for card in (ppo, evaluation):
        assert "not run" in card
        assert "waits for round_1/reward" in card
    text = Outline(page).text
    assert text.index("accept=[reward]") < text.index("What was run") < text.index("Stages")


def test_a_stage_that_failed_says_why(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    stage = fake_ppo_run(tmp_path / "round_1/ppo", 5)
    write_summary(
        stage, replace(read_summary(stage), status="failed", cause="OutOfMemoryError: 3 GiB")
    )
    ppo = cards(write_report(run).read_text())[2]
    assert "failed" in ppo
    assert "OutOfMemoryError: 3 GiB" in ppo


def test_stages_that_a_foreign_summary_names_lead_nowhere_else(tmp_path: Path) -> None:
    run = pipeline(tmp_path / "run")
    fake_sft_run(tmp_path / "outside", 20)
    names = ["../outside", "round_1/../../outside", "/etc", HOSTILE, "round_1/sft"]
    write_summary(run, replace(read_summary(run), about={"stages": ", ".join(names)}))
    page = write_report(run).read_text()
    assert re.findall(r'href="(.*?)"', page) == ["round_1/sft/report.html"]
    assert not Outline(page).tags & {"script", "img"}


def test_the_time_of_a_pipeline_is_that_of_its_stages(tmp_path: Path) -> None:
    text = Outline(write_report(pipeline(tmp_path)).read_text()).text
    assert "round_1/reward 1 min 0 s · 66.7 %" in text


def test_the_stages_of_several_rounds_have_their_round_and_wait_for_none_that_ended_well(
    tmp_path: Path,
) -> None:
    names = ["round_1/sft", "round_1/ppo", "round_2/ppo"]
    run = RunFolder(tmp_path)
    fake_sft_run(tmp_path / names[0], 20)
    about = {"stages": ", ".join(names)}
    write_summary(run, Summary("pipeline", "running", 1, about=about))
    sft, first, second = cards(write_report(run).read_text())
    assert "round 1, sft" in sft
    assert "round 1, ppo" in first
    assert "round 2, ppo" in second
    assert "waits" not in first + second


def test_the_next_step_of_a_pipeline_names_the_stage_whose_gate_failed(tmp_path: Path) -> None:
    run = pipeline(tmp_path)
    gates = (GateResult("round_1/reward accuracy", 0.6, 0.8, False, "0.6, wanted at least 0.8"),)
    write_summary(run, replace(read_summary(run), status="completed", cause=None, gates=gates))
    text = Outline(write_report(run).read_text()).text
    assert "Next: round_1/reward accuracy: 0.6, wanted at least 0.8" in text
