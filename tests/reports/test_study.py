"""The page of a study, made of results that no model has made."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from rlhf_lightning.evaluation.win_rate import share
from rlhf_lightning.reports.study import (
    budget_table,
    compared_table,
    complete_curves,
    curves_table,
    published_table,
    settings_table,
    write_study,
)
from rlhf_lightning.reports.study_results import Result, Study
from rlhf_lightning.runs.folder import ITERATION
from rlhf_lightning.runs.metric_catalog import quantity


def metrics(gain: float, kl: float) -> dict[str, float | None]:
    return {
        "val/gold_win_rate": gain,
        "val/gold_win_rate_low": gain - 0.02,
        "val/gold_win_rate_high": gain + 0.02,
        "val/kl_per_token": kl,
        "val/response_length": 20.0,
    }


def result(row: str, setting: str, seed: int, gain: float, kl: float, **changes) -> Result:
    plain = Result(
        row, setting, seed, status="completed", cause=None, data_set=f"demo_seed{seed}", answers=8,
        metrics=metrics(gain, kl), rows=[{ITERATION: i, "time/update": 1.0} for i in (1, 2, 3, 4)],
        seconds=10.0, cpu_seconds=20.0, peak_mib=100.0, times_are_whole=True,
    )  # fmt: skip
    return replace(plain, **changes)


def study(ahead: float = 0.1, seeds: tuple[int, ...] = (1, 2, 3)) -> Study:
    """Two rows of two settings; `b` lies above `a` by `ahead`, give or take 0.01 by seed."""
    results = []
    for seed in seeds:
        for row, more in (("a", 0.0), ("b", ahead + 0.01 * (seed - 2))):
            results.append(result(row, "c=0.1", seed, 0.6 + more, 0.1))
            results.append(result(row, "c=0.2", seed, 0.7 + more, 0.2))
    columns = ("val/gold_win_rate", "val/response_length", "val/refusal_rate")
    return Study("mine", "About it.", results, columns, (0.15, 0.3))


def failed(one: Study) -> Study:
    """The same, the last run of it failed."""
    last = replace(one.results[-1], status="failed", cause="out <of> memory", metrics={}, rows=())
    return replace(one, results=[*one.results[:-1], last])


def test_a_row_is_better_at_equal_kl_where_the_interval_of_the_difference_excludes_0():
    table, verdicts = compared_table(study())
    # 4.3027 * 0.01 / sqrt(3) on both sides.
    assert list(table.rows[0]) == ["b - a", "at KL 0.15", "+10.0 (+7.5 to +12.5)", "better"]
    assert [row[1] for row in table.rows] == ["at KL 0.15", "on average from KL 0.10 to 0.20"]
    assert verdicts == ["b is better than a at KL 0.15, on average from KL 0.10 to 0.20."]
    table, verdicts = compared_table(study(ahead=-0.1))
    assert list(table.rows[0])[2:] == ["-10.0 (-12.5 to -7.5)", "worse"]
    assert verdicts[0].startswith("b is worse than a at KL 0.15, ")


def bounded(one: Study, row: str) -> Study:
    return replace(one, results=[replace(r, kl_is_bound=r.row == row) for r in one.results])


def test_a_row_whose_kl_is_an_upper_bound_is_called_better_and_never_worse(tmp_path):
    below = bounded(study(ahead=-0.1), "b")
    table, verdicts = compared_table(below)
    assert list(table.rows[0])[2:] == [
        "-10.0 (-12.5 to -7.5)",
        "not separated (KL of b is a bound)",
    ]
    assert verdicts == ["The evidence does not separate the objectives."]
    assert compared_table(bounded(study(), "b"))[0].rows[0][3] == "better"
    # The first row may itself lie further left: only "worse than it" is then safe.
    table, _ = compared_table(bounded(study(), "a"))
    assert table.rows[0][3] == "not separated (KL of a is a bound)"
    assert compared_table(bounded(study(ahead=-0.1), "a"))[0].rows[0][3] == "worse"
    with_kl = replace(below, measure=("val/gold_win_rate", "val/kl_per_token"))
    page, text = (path.read_text() for path in write_study(with_kl, tmp_path))
    assert text.count("KL of b is an upper bound") == 3, "settings, at equal KL, differences"
    assert page.count("KL of b is an upper bound") == 4, "and the chart"
    plain = write_study(study(ahead=-0.1), tmp_path)[0].read_text()
    assert "upper bound" not in plain


@pytest.mark.parametrize("ahead", [0.02, 0.03])
def test_rows_whose_difference_may_be_0_are_not_told_apart(ahead):
    # With 0.03 the interval of one comparison excludes 0, and that of two does not.
    table, verdicts = compared_table(study(ahead=ahead))
    assert table.rows[0][2].startswith("+3.0 (+0.5 to") == (ahead == 0.03)
    assert [row[3] for row in table.rows] == ["not separated", "not separated"]
    assert verdicts == ["The evidence does not separate the objectives."]


def test_rows_are_compared_only_where_all_seeds_reach():
    one = study()
    far = [replace(r, metrics=metrics(0.8, 0.16 if r.setting == "c=0.1" else 0.2))
           if (r.row, r.seed) == ("b", 3) else r for r in one.results]  # fmt: skip
    table, _ = compared_table(replace(one, results=far))
    assert [row[1] for row in table.rows] == ["on average from KL 0.16 to 0.20"]


def test_one_seed_has_intervals_over_prompts_and_the_page_says_that_seeds_are_not_covered():
    table, verdicts = compared_table(study(seeds=(2,)))
    # Half of each interval is 0.02, of their difference sqrt(2) times that.
    assert table.rows[0][2] == "+10.0 (+7.2 to +12.8)"
    assert "seeds are not covered" in table.lead
    assert len(verdicts) == 1


def test_the_interval_of_a_change_of_shares_is_signed_and_not_cut_at_zero():
    name = "benchmark/acc_change/task/blimp"
    low, high = "benchmark/acc_change_low/task/blimp", "benchmark/acc_change_high/task/blimp"
    measured = {name: 0.007, low: -0.004, high: 0.018}
    one = replace(study(seeds=(2,)), measure=(name,))
    one = replace(one, results=[replace(one.results[0], metrics=measured)])
    table = settings_table(one)
    assert table.header[3] == "acc change: blimp"
    assert table.rows[0][3] == "+0.7 (-0.4 to +1.8) points"
    assert quantity("val/refusal_rate_change").show(-0.25) == "-25.0"


def test_the_interval_of_one_run_is_its_own_and_not_put_around_its_value():
    name = "val/refusal_rate"
    none_of_24 = share(name, 0, 24)
    one = replace(study(seeds=(2,)), measure=(name,))
    one = replace(one, results=[replace(one.results[0], metrics=none_of_24)])
    assert settings_table(one).rows[0][3] == "0.0 % (0.0 to 13.8 %)"
    others = [replace(one.results[0], seed=seed, metrics={}) for seed in (1, 3)]
    several = replace(one, results=[*one.results, *others])
    assert settings_table(several).rows[0][3] == "0.0 % (0.0 to 13.8 %) (1 of 3 seeds)"


def test_a_row_with_a_failed_run_is_not_compared_and_its_mean_says_of_how_many_seeds_it_is():
    one = failed(study())
    assert list(complete_curves(one)) == ["a"]
    assert compared_table(one) == (replace(compared_table(one)[0], rows=[]), [])
    assert "Without: b" in curves_table(one).lead
    rows = {(row[0], row[1]): row[2] for row in settings_table(one).rows}
    assert rows == {
        ("a", "c=0.1"): "3 of 3", ("a", "c=0.2"): "3 of 3",
        ("b", "c=0.1"): "3 of 3", ("b", "c=0.2"): "2 of 3",
    }  # fmt: skip


def test_a_mean_over_fewer_seeds_than_ended_says_of_how_many_it_is():
    lacking = {**metrics(0.7, 0.1), "val/gold_win_rate": None}
    results = [result("a", "", seed, 0.7, 0.1) for seed in (1, 2, 3)]
    one = replace(
        study(), results=[results[0], *(replace(r, metrics=lacking) for r in results[1:])]
    )
    assert settings_table(study()).rows[0][3] == "60.0 % (58.8 to 61.2 %)"
    row = settings_table(one).rows[0]
    assert list(row[2:5]) == [
        "3 of 3", "70.0 % (68.0 to 72.0 %) (1 of 3 seeds)", "20.0 (20.0 to 20.0)",
    ]  # fmt: skip
    table = budget_table(one)
    assert table.rows[0][2:4] == ["3 of 3", "70.0 % (68.0 to 72.0 %) (1 of 3 seeds)"]
    theirs = replace(one, published={"a": {"val/gold_win_rate": 0.78}})
    assert published_table(theirs).rows[0][3:] == [
        "70.0 % (1 of 3 runs)", "68.0 to 72.0 %", "3 of 3",
    ]  # fmt: skip


def test_nothing_is_compared_with_a_first_row_that_is_incomplete_or_elsewhere():
    one = study()
    lost = replace(one.results[0], status="failed", metrics={}, rows=())
    table, verdicts = compared_table(replace(one, results=[lost, *one.results[1:]]))
    assert (table.rows, verdicts) == ([], ["Nothing is compared with a: a has no curve."])
    far = [replace(r, metrics=metrics(0.9, 1.0 + r.metrics["val/kl_per_token"]))
           if r.row == "b" else r for r in one.results]  # fmt: skip
    table, verdicts = compared_table(replace(one, results=far))
    assert table.rows == []
    told = "no KL is reached by a and another row in all seeds"
    assert verdicts == [f"Nothing is compared with a: {told}."]
    setting = next(r.setting for r in one.results if r.row == "b")
    lone = [r for r in one.results if r.row == "a" or r.setting == setting]
    table, verdicts = compared_table(replace(one, results=lone))
    told = "no other row has a curve of its settings"
    assert (table.rows, verdicts) == ([], [f"Nothing is compared with a: {told}."])


def test_at_an_equal_budget_a_longer_run_is_measured_where_it_had_sampled_as_much():
    short = result("a", "", 1, 0.6, 0.1)
    long = result("b", "", 1, 0.9, 0.3)
    rows = [{ITERATION: i, "time/update": 1.0} | metrics(0.5 + i / 100, 0.1) for i in range(1, 9)]
    one = Study("mine", "", [short, replace(long, rows=rows)], (), ())
    table = budget_table(one)
    assert table.rows[0][-1] == "end"
    assert table.rows[1][3:] == ["54.0 % (52.0 to 56.0 %)", "0.10", "iteration 4"]
    bare = [{key: row[key] for key in (ITERATION, "time/update")} for row in rows]
    table = budget_table(replace(one, results=[short, replace(long, rows=bare)]))
    assert table.rows[1][3:] == ["90.0 % (88.0 to 92.0 %)", "0.30", "end, 2.0 times as much"]


def test_a_model_that_others_start_from_is_compared_with_none_and_sets_no_budget():
    one = study()
    sft = [result("sft", "", seed, 0.5, 0.01) for seed in (1, 2, 3)]
    beside = replace(one, results=[*sft, *one.results], starts=frozenset({"sft"}))
    assert budget_table(beside).rows == budget_table(one).rows != []
    assert compared_table(beside) == compared_table(one)
    assert compared_table(one)[0].rows


def test_an_evaluation_of_the_best_of_n_is_one_run_with_a_result_for_each_n(tmp_path):
    best = [result("best", f"n={n}", seed, 0.7, 0.2) for seed in (1, 2) for n in (2, 4, 16)]
    lost = [
        replace(r, status="failed", cause="no room", metrics={}, rows=()) if r.seed == 2 else r
        for r in best
    ]
    _, text = write_study(Study("mine", "", lost, ("val/gold_win_rate",), ()), tmp_path)
    said = text.read_text()
    assert "1 of 2 runs have ended." in said
    assert said.count("failed, no room") == 1
    assert "- best seed 2: failed, no room" in said
    assert "| best | n=4 | 1 of 2 |" in said


def test_both_pages_name_the_failed_run_with_its_reason_and_escape_it(tmp_path):
    page, text = (path.read_text() for path in write_study(failed(study()), tmp_path))
    assert "b c=0.2 seed 3" in page
    assert "out &lt;of&gt; memory" in page
    assert "- b c=0.2 seed 3: failed, out <of> memory" in text
    assert "11 of 12 runs have ended." in page
    assert "| a | c=0.1 | 3 of 3 | 60.0 % (58.8 to 61.2 %) |" in text


def reproduction(**changes) -> Study:
    """Three held-out parts of a row whose accuracy others report."""
    results = [
        result("left_out", f"part={name}", seed, gain, 0.1)
        for name, gain in (("a", 0.7), ("b", 0.8), ("c", 0.9))
        for seed in (1, 2)
    ]
    plain = Study(
        "mine", "", results, ("val/gold_win_rate",), (),
        published={"left_out": {"val/gold_win_rate": 0.78}}, source="Their paper, table 2.",
        protocol={"one part is held out": "the same", "ten epochs": "one epoch"}, expected="2 GiB",
    )  # fmt: skip
    return replace(plain, **changes)


def test_published_figures_stand_beside_our_mean_over_what_was_held_out():
    table = published_table(reproduction())
    # 4.3027 * 0.1 / sqrt(3)
    assert table.rows == [
        ["left_out", quantity("val/gold_win_rate").label, "78.0 %", "80.0 %",
         "55.2 to 100.0 %", "6 of 6"],
    ]  # fmt: skip
    assert "Their paper, table 2. Expected of a run: 2 GiB. Found: at most 10 s, 20 s" in table.lead


def test_intervals_and_ticks_of_shares_are_drawn_within_0_and_100_percent(tmp_path):
    one = study()
    for gain in (0.99, 0.01):  # seeds far apart: Student's interval of the mean leaves 0 to 1
        apart = [result("a", "c=0.1", s, g, 0.1) for s, g in ((1, gain), (2, 1 - gain), (3, gain))]
        page, _ = write_study(replace(one, results=apart), tmp_path)
        drawn = page.read_text()
        ticks = [float(t) for t in re.findall(r">(-?[0-9.]+) %</text>", drawn)]
        assert min(ticks) >= 0
        assert max(ticks) <= 100
        heights = [float(y) for y in re.findall(r"[0-9.]+,(-?[0-9.]+)[ \"]", drawn)]
        assert min(heights) >= 10, "the top of the plane"


def test_what_was_run_stands_above_the_tables_and_what_to_do_next_at_the_top(tmp_path):
    one = study()
    told = {"trained from": "<sft>", "data": "hh, 64 rows an iteration"}
    results = [replace(r, about=told if r.row == "b" else {}) for r in one.results]
    page, text = (path.read_text() for path in write_study(replace(one, results=results), tmp_path))
    assert "| b | 2 with 3 seeds | <sft> | hh, 64 rows an iteration |" in text
    assert page.index("What was run") < page.index("&lt;sft&gt;") < page.index("<h2>Settings</h2>")
    undecided, _ = (path.read_text() for path in write_study(study(0.0, (1, 2)), tmp_path))
    for content, step in ((page, "Next:"), (undecided, "Next: more seeds")):
        assert (step in content) is (content is undecided)
    unfinished, _ = (path.read_text() for path in write_study(failed(one), tmp_path))
    assert unfinished.index("Next: call the study again") < unfinished.index("What was run")
