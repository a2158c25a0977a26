from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from rlhf_lightning.app.report import run
from rlhf_lightning.reports.choice import AHEAD, TAKE, choose
from rlhf_lightning.reports.compare import render_comparison, write_comparison
from rlhf_lightning.reports.frontier import frontier
from rlhf_lightning.reports.several import read_runs
from rlhf_lightning.runs.folder import RunFolder
from rlhf_lightning.runs.summary import Status, read_summary, write_summary
from tests.builders.run_folders import fake_ppo_run, fake_reward_run


def job(
    path: Path,
    kl_coef: float,
    rate: float,
    kl: float,
    status: Status = "completed",
    *,
    seed: int = 1,
    more: str = "",
) -> RunFolder:
    """A sweep's job with this setting and this outcome; its interval is 0.04 wide."""
    folder = fake_ppo_run(path, 8)
    metrics = dict(read_summary(folder).metrics) | {
        "val/score_win_rate": rate,
        "val/score_win_rate_low": rate - 0.02,
        "val/score_win_rate_high": rate + 0.02,
        "val/kl_per_token": kl,
    }
    write_summary(folder, replace(read_summary(folder), metrics=metrics, status=status))
    text = f"seed: {seed}\npaths: {{outputs: /home/me}}\nmodule: {{ppo: {{kl_coef: {kl_coef}}}}}\n"
    folder.config.write_text(text + more)
    return folder


def sweep(folder: Path) -> list[RunFolder]:
    outcomes = ((0.01, 0.90, 0.80), (0.05, 0.84, 0.40), (0.1, 0.83, 0.20), (0.2, 0.70, 0.10))
    return [
        job(folder / str(i), kl_coef, rate, kl) for i, (kl_coef, rate, kl) in enumerate(outcomes)
    ]


def test_of_settings_that_cannot_be_told_apart_none_is_recommended_and_the_nearest_to_sft_is_named(
    tmp_path,
):
    runs = read_runs(sweep(tmp_path))
    assert [r.label for r in runs] == ["kl_coef=0.01", "kl_coef=0.05", "kl_coef=0.1", "kl_coef=0.2"]
    choice = choose(runs)
    # 0.90 has left the band of KL; 0.83 reaches 0.84 by its interval and has half the KL.
    assert (choice.run, choice.caption) == (runs[2], "")
    assert "84.0 %, is that of kl_coef=0.05" in choice.reason
    assert "cannot be told from that of kl_coef=0.1 (83.0 %)" in choice.reason
    assert "One seed a setting and 8 iterations" in choice.reason
    page = render_comparison([run.folder for run in runs])
    assert "No setting is shown to be better than all others." in page
    assert "class=chosen" not in page
    assert TAKE not in page


def test_a_setting_is_ahead_where_intervals_are_apart_and_to_take_only_with_several_seeds(tmp_path):
    apart = [job(tmp_path / "a", 0.05, 0.84, 0.4), job(tmp_path / "b", 0.2, 0.7, 0.1)]
    choice = choose(read_runs(apart))
    assert (choice.run.label, choice.caption) == ("kl_coef=0.05", AHEAD)
    assert AHEAD in render_comparison(apart)

    def again(name: str, kl_coef: float, rate: float) -> RunFolder:
        folder = job(tmp_path / name, kl_coef, rate, 0.3)
        folder.config.write_text(folder.config.read_text().replace("seed: 1", "seed: 2"))
        return folder

    better, worse = again("c", 0.05, 0.86), again("d", 0.2, 0.72)
    choice = choose(read_runs([*apart, better, worse]))
    assert (choice.run.folder, choice.caption) == (better, TAKE)
    assert "class=chosen" in render_comparison([*apart, better, worse])
    noise = [job(tmp_path / f"n{kl}", kl, rate, 0.3) for kl, rate in ((0.05, 0.801), (0.2, 0.8))]
    noise += [again("n1", 0.05, 0.802), again("n2", 0.2, 0.799)]
    assert choose(read_runs(noise)).caption == "", "each is better, all within their intervals"
    crossing = again("e", 0.2, 0.85)  # beats the first seed of the better setting
    assert choose(read_runs([*apart, better, crossing])).caption == ""


def test_a_win_rate_of_0_is_compared_with_others(tmp_path):
    folders = [job(tmp_path / "a", 0.05, 0.9, 0.2), job(tmp_path / "b", 0.2, 0.0, 0.1)]
    choice = choose(read_runs(folders))
    assert (choice.run.label, choice.caption) == ("kl_coef=0.05", AHEAD)


def test_runs_whose_score_never_varied_are_not_compared(tmp_path):
    folders = [job(tmp_path / "a", 0.05, 0.9, 0.2), job(tmp_path / "b", 0.2, 0.7, 0.1)]
    for folder in folders:
        summary = read_summary(folder)
        flat = dict(summary.metrics) | {"rollout/score_std_max": 0.0}
        write_summary(folder, replace(summary, metrics=flat))
    choice = choose(read_runs(folders))
    assert choice.run is None
    assert "2 of 2 runs had a score that never varied" in choice.reason


def test_runs_that_failed_are_shown_and_never_chosen(tmp_path):
    folders = sweep(tmp_path)
    failed = job(tmp_path / "4", 0.15, 0.99, 0.01, status="failed")
    page = render_comparison([*folders, failed])
    assert choose(read_runs([*folders, failed])).run.label == "kl_coef=0.1"
    assert "1 did not end" in page
    assert "<td>failed</td>" in page
    assert choose(read_runs([failed, failed])).run is None
    outside = [job(tmp_path / name, 0.3, 0.9, 2.0) for name in ("a", "b")]
    assert "2 of 2 runs left the band" in choose(read_runs(outside)).reason


def test_a_setting_some_of_whose_seeds_are_not_compared_is_not_named_as_ahead(tmp_path):
    worse = [job(tmp_path / f"w{s}", 0.05, 0.85, 0.2, seed=s) for s in (1, 2)]
    better = [job(tmp_path / f"b{s}", 0.001, 0.93, 0.45, seed=s) for s in (1, 2)]
    assert choose(read_runs([*worse, *better])).caption == TAKE
    left = job(tmp_path / "b3", 0.001, 0.99, 2.3, seed=3)
    failed = [job(tmp_path / f"b{s}", 0.001, 0.9, 0.4, "failed", seed=s) for s in (4, 5)]
    choice = choose(read_runs([*worse, *better, left, *failed]))
    assert choice.caption == ""
    assert "1 of 5 runs left the band of " in choice.reason
    assert "2 of 5 runs did not end" in choice.reason
    assert choose(read_runs([worse[0], better[0], failed[0]])).caption == "", "nor as ahead"
    # What failed of another setting takes nothing from the better one.
    lost = job(tmp_path / "w3", 0.05, 0.85, 0.2, "failed", seed=3)
    assert choose(read_runs([*worse, lost, *better])).caption == TAKE


@pytest.mark.parametrize(
    "varied",
    [
        "scorer: {{std_coef: {}}}",
        "artifacts: {{reward: models/{}}}",
        "artifacts: {{sft: models/{}}}",
        "dataset: {{name: world_{}}}",
        "data: {{path: pairs_{}.jsonl}}",
        "evaluation: {{temperature: {}}}",
    ],
)
def test_runs_that_are_measured_by_different_scores_or_data_have_no_best_one(tmp_path, varied):
    folders = [
        job(tmp_path / f"{i}{s}", 0.05, rate, 0.2, seed=s, more=varied.format(i) + "\n")
        for i, rate in ((0.5, 0.93), (1.0, 0.85))
        for s in (1, 2)
    ]
    choice = choose(read_runs(folders))
    assert (choice.run, choice.caption) == (None, "")
    assert "measured by different scores or data" in choice.reason
    assert "class=chosen" not in render_comparison(folders)
    same = [job(tmp_path / "a", 0.05, 0.9, 0.2), job(tmp_path / "b", 0.2, 0.7, 0.1)]
    length = "data: {num_iterations: 8}\nevaluation: {every_n_iterations: 2}\n"
    longer = job(tmp_path / "c", 0.05, 0.95, 0.2, more=length)
    assert choose(read_runs([*same, longer])).run.folder == longer, "of how long it trains"


def test_a_run_is_said_to_stay_nearest_to_sft_only_where_the_kl_of_all_is_known(tmp_path):
    folders = [fake_reward_run(tmp_path / str(size), 20) for size in (64, 128, 192)]
    for folder, size, rate in zip(folders, (64, 128, 192), (0.85, 0.84, 0.87), strict=True):
        found = {"val/accuracy": rate, "val/accuracy_low": 0.8, "val/accuracy_high": 0.9}
        write_summary(folder, replace(read_summary(folder), metrics=found))
        folder.config.write_text(f"seed: 1\nmodule: {{model: {{size: {size}}}}}\n")
    choice = choose(read_runs(folders))
    assert choice.run.folder == folders[2]
    assert "nearest" not in choice.reason
    close = [job(tmp_path / "a", 0.05, 0.85, 0.2), job(tmp_path / "b", 0.1, 0.84, 0.1)]
    assert "Of these kl_coef=0.1 stays nearest" in choose(read_runs(close)).reason
    unknown = {**read_summary(close[1]).metrics, "val/kl_per_token": None}
    write_summary(close[1], replace(read_summary(close[1]), metrics=unknown))
    choice = choose(read_runs(close))
    assert choice.run.label == "kl_coef=0.05"
    assert "nearest" not in choice.reason


def test_an_interval_is_not_rounded_across_one_half(tmp_path):
    page = render_comparison(
        [job(tmp_path / "a", 0.05, 0.5161, 0.2), job(tmp_path / "b", 0.2, 0.7, 0.1)]
    )
    assert "<small>49.6 to 53.6 %</small>" in page


def test_of_more_runs_than_colours_the_later_have_dashed_lines_and_hollow_dots(tmp_path):
    folders = [job(tmp_path / str(i), 0.01 * i, 0.5 + 0.01 * i, 0.2) for i in range(1, 9)]
    page = render_comparison(folders)
    charts = re.findall(r"<svg.*?</svg>", page, re.S)
    chart = next(c for c in charts if "<title>score</title>" in c)
    lines = re.findall(r"<polyline class=\"line (s\d)\"( style=[^ ]+ 3\")?", chart)
    assert [bool(style) for _, style in lines] == [False] * 6 + [True] * 2
    assert len(set(lines)) == 8, "each has a look of its own"
    plane = next(c for c in charts if "learnt score over KL" in c)
    assert re.findall(r"<circle class=.s(\d).( style=.fill:var)?", plane) == [
        *((str(i), "") for i in range(6)), ("0", ' style="fill:var'), ("1", ' style="fill:var'),
    ]  # fmt: skip
    dots = re.findall(r'<span class="(s\dt)">(.)</span> kl_coef=0.0[178]<', page)
    assert set(dots) == {("s0t", "●"), ("s0t", "○"), ("s1t", "○")}


def test_runs_of_different_stages_are_compared_and_none_is_recommended(tmp_path):
    folders = [fake_ppo_run(tmp_path / "p", 5), fake_reward_run(tmp_path / "r", 20)]
    page = render_comparison(folders)
    assert "No setting is recommended" in page
    assert "different stages" in page


def test_a_setting_that_changes_no_figure_names_no_run(tmp_path):
    folders = sweep(tmp_path)
    often = folders[0].config.read_text() + "callbacks: {checkpoint: {every_n_iterations: 2}}\n"
    folders[0].config.write_text(often)
    runs = read_runs(folders)
    assert [run.label for run in runs][:2] == ["kl_coef=0.01", "kl_coef=0.05"]
    page = render_comparison(folders)
    assert "callbacks.checkpoint.every_n_iterations" in page, "it is told among what differs"


def test_the_frontier_keeps_what_nothing_beats_in_both():
    points = [(0.1, 0.7), (0.2, 0.83), (0.3, 0.8), (0.4, 0.84), (0.1, 0.6)]
    assert frontier(points) == [(0.1, 0.7), (0.2, 0.83), (0.4, 0.84)]


def test_the_page_has_what_differs_and_a_line_a_run_and_needs_no_network(tmp_path):
    folders = sweep(tmp_path)
    page = render_comparison(folders)
    places = [page.index(part) for part in ("kl_coef=0.1", "Runs", "Win rate against KL", "Curves")]
    assert places == sorted(places)
    assert "module.ppo.kl_coef" in page
    assert "/home/me" not in page
    charts = re.findall(r"<svg.*?</svg>", page, re.S)
    scores = next(c for c in charts if "<title>score</title>" in c)
    assert {f"line s{i}" for i in range(4)} == set(re.findall(r"line s\d", scores))
    assert "How do I cook rice?" in page
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
    with pytest.raises(FileNotFoundError, match="runs are in outputs/"):
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
