from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from rlhf_lightning.app.report import run
from rlhf_lightning.reports.compare import curves_of, read_runs, render_comparison, write_comparison
from rlhf_lightning.runs.folder import MetricsAppender, RunFolder, SamplesAppender
from rlhf_lightning.runs.summary import read_summary, write_summary
from tests.builders.run_folders import fake_ppo_run, fake_reward_run, fake_sft_run
from tests.evaluation.test_comparisons import values_of_run


def sweep(folder: Path) -> list[RunFolder]:
    """Write four jobs of a sweep, each with its setting and its outcome."""
    outcomes = ((0.01, 0.90, 0.80), (0.05, 0.84, 0.40), (0.1, 0.83, 0.20), (0.2, 0.70, 0.10))
    jobs = [fake_ppo_run(folder / str(i), 8) for i in range(len(outcomes))]
    for job, (kl_coef, rate, kl) in zip(jobs, outcomes, strict=True):
        name = "val/score_win_rate"
        metrics = {name: rate, f"{name}_low": rate - 0.02, f"{name}_high": rate + 0.02}
        summary = read_summary(job)
        metrics = dict(summary.metrics) | metrics | {"val/kl_per_token": kl}
        write_summary(job, replace(summary, metrics=metrics, warning="Too few steps."))
        text = f"seed: 1\npaths: {{outputs: /home/me}}\nmodule: {{ppo: {{kl_coef: {kl_coef}}}}}\n"
        job.config.write_text(text)
    return jobs


def test_the_page_has_what_differs_and_a_mark_a_run_and_needs_no_network(tmp_path):
    folders = sweep(tmp_path)
    page = render_comparison(folders)
    parts = ("4 runs of", "Result<", "Figures<", "What differs<", "Curves<", "Win rate against KL")
    places = [page.index(part) for part in parts]
    assert places == sorted(places)
    assert "<details open><summary>1 difference of the whole configurations" in page
    assert "kl_coef=0.05" in page  # a label
    assert page.count("· completed · 1 min 37 s") == page.count("Too few steps.") == 4
    assert "/home/me" not in page
    assert not re.search(r"(https?:)?//[a-z]|url\(|<script|<img|<link", page, re.I)


def test_the_command_writes_each_report_and_one_comparison_beside_the_runs(tmp_path):
    sweep(tmp_path)
    written = run([tmp_path])
    assert [p.relative_to(tmp_path).as_posix() for p in written] == [
        *(f"{i}/report.html" for i in range(4)),
        "comparison.html",
    ]
    assert run([tmp_path / "0"]) == [tmp_path / "0" / "report.html"]
    elsewhere = run([tmp_path / "0", tmp_path / "1"], tmp_path / "both.html")
    assert elsewhere[-1] == tmp_path / "both.html"
    with pytest.raises(FileNotFoundError, match="is no run folder"):
        run([tmp_path / "0" / ".hydra"])


def test_a_page_of_somebody_else_is_no_place_for_a_comparison(tmp_path):
    runs = [fake_reward_run(tmp_path / name) for name in ("a", "b")]
    mine = tmp_path / "thesis.html"
    mine.write_text("<!doctype html>\n<html><body>my thesis")
    with pytest.raises(FileExistsError, match=r"thesis\.html is there already"):
        write_comparison(runs, mine)
    assert "my thesis" in mine.read_text()
    for _ in range(2):
        write_comparison(runs, tmp_path / "both.html")


def test_policies_of_the_same_prompts_are_compared_prompt_by_prompt(tmp_path):
    folders = sweep(tmp_path)
    assert "Prompt by prompt" not in render_comparison(folders)
    for number, folder in enumerate(folders[:3]):
        prompts = range(200) if number < 2 else range(180, 260)
        values = values_of_run(number, 0.2 * number, prompts)
        SamplesAppender(folder.distributions).append(8, [{"held_out": "answers", **values}])
    page = render_comparison(folders)
    paired = page[page.index("Prompt by prompt") : page.index("Win rate against KL")]
    assert "200 prompts" in paired
    assert "20 prompts in common" in paired
    assert paired.count(">differs</td>") >= 3
    # In a narrow window a row is a card, in which a cell without a name says nothing.
    cells = re.findall(r"<td[^>]*>", page)
    assert len(cells) > 30
    assert all(re.search("class=.name|data-label=|colspan=", cell) for cell in cells)
    assert "kl_coef=0.2" not in paired, "it has no values by prompt"


def test_losses_of_different_stages_share_no_column_and_no_chart(tmp_path):
    folders = [fake_sft_run(tmp_path / "sft", 8), fake_reward_run(tmp_path / "reward", 8)]
    summary = read_summary(folders[1])
    write_summary(folders[1], replace(summary, metrics={**summary.metrics, "val/loss": 0.3}))
    MetricsAppender(folders[1].metrics).append(9, {"val/loss": 0.3})
    page = render_comparison(folders)
    assert re.findall(r">loss, (.*?)</th>", page) == ["Supervised fine-tuning", "Reward model"]
    figures = curves_of(read_runs(folders))
    assert {figure.code for figure in figures} >= {"sft/loss", "reward/accuracy", "val/loss"}
    assert all(sum(map(bool, figure.legends)) == 1 for figure in figures)


def test_command_lines_tell_runs_apart_in_the_words_of_the_user(tmp_path):
    folders = [fake_ppo_run(tmp_path / name, 8) for name in ("a", "b")]
    for folder, rest in zip(folders, ("data.batch_size=8", "--reward r.py:f"), strict=True):
        command = f"rlhf-train grpo {folder.name} my.jsonl {rest}"
        write_summary(folder, replace(read_summary(folder), about={"command": command}))
    one, other = read_runs(folders)
    assert one.words == {"model": "a", "data.batch_size": "8", "reward": "not set"}
    assert other.words == {"model": "b", "data.batch_size": "not set", "reward": "r.py:f"}
    folders[1].config.write_text("data: {batch_size: 8}")
    assert "data.batch_size" not in read_runs(folders)[0].words, "it has that value, too"


def test_runs_on_models_in_folders_of_one_name_are_no_seeds_of_one(tmp_path):
    folders = [fake_ppo_run(tmp_path / str(i), 8) for i in range(4)]
    for number, folder in enumerate(folders):
        model = f"/home/me/{'first' if number < 2 else 'second'}/export"
        folder.config.write_text(f"seed: {number % 2}\nartifacts: {{reward: {model}}}\n")
    runs = read_runs(folders)
    shown = [run.settings["artifacts.reward"] for run in runs]
    assert shown == [".../export (1)"] * 2 + [".../export (2)"] * 2
    assert {run.settings["seed"] for run in runs} == {"0", "1"}
    for figure in curves_of(runs):
        assert [name.partition(", ")[2] for name in figure.legends] == ["2 seeds", ""] * 2
        bands = re.findall(r'class="range (s\d)" points="([^"]*)"', figure.chart)
        assert [colour for colour, _ in bands] == ["s0", "s2"], "those of their first runs"
        assert all(len(points.split()) == 2 * 8 for _, points in bands)
    assert "/home/me" not in render_comparison(folders)


def test_runs_that_differ_in_the_folder_of_their_models_are_no_seeds_of_one(tmp_path):
    folders = [fake_ppo_run(tmp_path / name / "ppo", 8) for name in ("a", "b")]

    def labels(*places: Path | str) -> list[str]:
        for seed, (folder, place) in enumerate(zip(folders, places, strict=True)):
            folder.config.write_text(f"seed: {seed}\npaths: {{artifacts: {place}}}\n")
        return list(curves_of(read_runs(folders))[0].legends)

    assert labels("old", "new") == ["seed=0 artifacts=old", "seed=1 artifacts=new"]
    beside = [folder.path.parent / "artifacts" for folder in folders]
    assert labels(*beside)[0] == "all runs, 2 seeds", "a pipeline has its own"


def test_settings_are_shown_resolved_and_those_of_one_value_not_at_all(tmp_path):
    folders = [fake_ppo_run(tmp_path / name, 8) for name in ("a", "b")]
    written = (
        "seed: 1\nmodule: {rate: 0.1, policy: '${sft}'}\ndata: {seed: '${seed}', rows: 8}",
        "seed: 2\nmodule: {rate: '${at}', policy: x/sft}\ndata: {seed: '${seed}', rows: '${n}'}",
    )
    resolved = (
        "seed: 1\nmodule: {rate: 0.1, policy: x/sft}\ndata: {seed: 1, rows: 8}",
        "seed: 2\nmodule: {rate: 0.2, policy: x/sft}\ndata: {seed: 2, rows: 8}",
    )
    for folder, *texts in zip(folders, written, resolved, strict=True):
        for name, text in zip(("config.yaml", "resolved.yaml"), texts, strict=True):
            folder.config.with_name(name).write_text(text)
    first, second = (run.settings for run in read_runs(folders))
    assert first == {"seed": "1", "module.rate": "0.1"}
    assert second == {"seed": "2", "module.rate": "0.2"}
    assert "${" not in render_comparison(folders)


@pytest.mark.thorough
def test_no_page_is_wider_than_its_window(browser: Chrome, tmp_path: Path) -> None:
    folders = sweep(tmp_path)
    for number, folder in enumerate(folders):
        long = "a_model_with_a_long_name" * 3
        failed = {"status": "failed", "cause": f"no file {long}"} if number == 0 else {}
        write_summary(folder, replace(read_summary(folder), **failed))
        for name, word in (
            ("config.yaml", f"sft: {long}{number}"),
            ("overrides.yaml", f"- {long}"),
        ):
            file = folder.config.with_name(name)
            file.write_text(f"{file.read_text()}{word}\n")
        values = values_of_run(number, 0.2 * number, range(60))
        SamplesAppender(folder.distributions).append(8, [{"held_out": "answers", **values}])
    first, *_, comparison = run([tmp_path])
    for width in (390, 768, 1280):
        window = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", window)
        for page in (first, comparison):
            browser.get(page.as_uri())
            wide = """return [document.documentElement, ...document.querySelectorAll(".wide")]
                .filter(one => one.scrollWidth > one.clientWidth).length"""
            assert browser.execute_script(wide) == 0, f"{page.name} at {width}"
