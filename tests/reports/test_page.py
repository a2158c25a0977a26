from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from rlhf_lightning.evaluation.gates import check_gates
from rlhf_lightning.reports.charts import Series, line_chart
from rlhf_lightning.reports.page import render_report, write_report
from rlhf_lightning.runs.folder import MetricsAppender, RunFolder, SamplesAppender
from rlhf_lightning.runs.outcome import Fact
from rlhf_lightning.runs.summary import GateResult, Summary, read_summary, write_summary
from rlhf_lightning.runs.verdict import verdict
from tests.builders.run_folders import fake_ppo_run, fake_reward_run, fake_sft_run

HOSTILE = "</p><script>alert('x')</script><img src=x onerror=\"go()\">&amp; \x00\x1b[31m \u202e abc"
VOID = {"meta", "img", "br", "line", "rect", "circle", "polyline", "input", "link"}


class Outline(HTMLParser):
    """Collects tags and attributes, and checks that tags are nested."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.text = ""
        self.open: list[str] = []
        self.feed(page)
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_verdict_comes_first_with_its_interval_and_the_gates_with_their_reasons(tmp_path):
    path = write_report(fake_ppo_run(tmp_path / "run"))
    assert path.name == "report.html"
    outline = Outline(path.read_text())
    order = ["81.2 %", "77.1 to 84.8 %", "The policy answers better than", "-0.02 → 1.41", "Gates"]
    places = [
        outline.text.index(part) for part in [*order, "Curves", "Samples", "Time", "Settings"]
    ]
    assert places == sorted(places)
    assert outline.text.count("✓ passed") == 2
    assert outline.text.count("✗ failed") == 1
    assert "0.352 is below 0.36, so diversity fell" in outline.text
    assert "usual 0.05 to 1" in outline.text


def test_a_gate_that_measured_nothing_is_not_counted_among_those_that_passed(tmp_path):
    folder = fake_ppo_run(tmp_path / "run")
    gates = check_gates({"refuses": {"metric": "val/none", "at_least": 0, "optional": True}}, {})
    write_summary(folder, replace(read_summary(folder), gates=gates))
    outline = Outline(write_report(folder).read_text())
    assert "passed" not in outline.text
    assert "not measured" in outline.text
    read = read_summary(folder).gates
    write_summary(folder, replace(read_summary(folder), gates=(*read, passed_gate())))
    outline = Outline(write_report(folder).read_text())
    assert "1 gate passed" in outline.text


def passed_gate() -> GateResult:
    return GateResult("loss", 1.0, 2.0, True, "1 is at most 2")


def test_the_page_needs_no_network_and_no_script(tmp_path):
    for name, make in {"p": fake_ppo_run, "r": fake_reward_run, "s": fake_sft_run}.items():
        page = render_report(make(tmp_path / name))
        outline = Outline(page)
        assert not re.search(r"(https?:)?//[a-z]", page, re.I)
        assert not re.search(r"url\(|@import|javascript:", page, re.I)
        assert not outline.tags & {"script", "link", "img", "iframe", "object", "base", "form"}
        assert not outline.attributes & {"src", "href", "srcset", "action", "xlink:href"}
        assert "default-src 'none'" in page
        assert "prefers-color-scheme: dark" in page


def test_hostile_text_is_shown_and_does_nothing(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 5)
    summary = read_summary(folder)
    gate = GateResult(HOSTILE, 1.0, 2.0, False, HOSTILE)
    write_summary(
        folder,
        replace(
            summary,
            gates=(gate,),
            versions={HOSTILE: HOSTILE},
            git_commit=HOSTILE,
            metrics={**summary.metrics, HOSTILE: 1.0},
        ),
    )
    MetricsAppender(folder.metrics).append(6, {f"ppo/{HOSTILE}": 1.0})
    for extra in ({}, {"baseline_response": HOSTILE}):
        sample = {"prompt": HOSTILE, "response": HOSTILE, "domain": HOSTILE, "score": HOSTILE}
        SamplesAppender(folder.samples).append(7 + len(extra), [sample | extra])
        folder.config.write_text(json.dumps({"note": HOSTILE}))
        page = render_report(folder)
        outline = Outline(page)
        assert not outline.tags & {"script", "img"}
        assert not any(name.startswith("on") for name in outline.attributes)
        assert outline.text.count("<script>alert('x')</script>") >= 5
        assert "\x00" not in page
        assert "\x1b" not in page
        page.encode("utf-8")


def test_a_lone_surrogate_does_not_stop_the_report(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 3)
    sample = {"prompt": "a\ud800b", "response": "c\udfffd", "baseline_response": ""}
    SamplesAppender(folder.samples).append(9, [sample])
    assert "a?b" in write_report(folder).read_text()


def test_without_comparison_the_best_and_the_worst_of_the_last_iteration_are_shown(tmp_path):
    folder = RunFolder(tmp_path)
    write_summary(folder, Summary("ppo", "completed", 1))
    samples = [{"prompt": "p", "response": f"answer {i}", "score": float(i)} for i in range(20)]
    SamplesAppender(folder.samples).append(1, [{**samples[0], "response": "of long ago"}])
    SamplesAppender(folder.samples).append(2, samples)
    text = Outline(render_report(folder)).text
    shown = [int(n) for n in re.findall(r"answer (\d+)", text)]
    assert sorted(shown) == [0, 1, 2, 3, 16, 17, 18, 19]
    assert "of long ago" not in text
    assert text.index("answer 19") < text.index("answer 0")


def test_secrets_of_the_configuration_are_hidden_and_nothing_else(tmp_path):
    folder = fake_ppo_run(tmp_path, 3)
    folder.config.write_text(
        "judge:\n  api_key: sk-secret1\n  OPENAI_API_KEY: sk-secret2\n  password: 'secret3'\n"
        "rollout:\n  max_new_tokens: 24\n  monkey: banana\n"
    )
    page = render_report(folder)
    assert "secret1" not in page
    assert "secret2" not in page
    assert "secret3" not in page
    assert "max_new_tokens: 24" in page
    assert "monkey: banana" in page


def test_a_run_that_has_only_begun_has_a_report_too(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match="outputs/ppo"):
        write_report(folder)
    write_summary(folder, Summary("ppo", "running", 1))
    assert "resume=auto continues it" in Outline(render_report(folder)).text
    MetricsAppender(folder.metrics).append(1, {"rollout/score": float("nan")})
    assert "Curves" not in Outline(render_report(folder)).text
    folder.summary.unlink()
    MetricsAppender(folder.metrics).append(2, {"rollout/score": 0.5})
    assert "Curves" in Outline(render_report(folder)).text


def test_the_time_of_a_run_is_named_and_adds_up(tmp_path):
    folder = fake_reward_run(tmp_path / "run", 10)
    MetricsAppender(folder.metrics).append(11, {"time/update": 10.0, "time/validate": 30.0})
    seconds = {"setup": 5.0, "fit": 45.0, "finish": 50.0, "measure": 40.0, "export": 10.0}
    write_summary(folder, replace(read_summary(folder), seconds=seconds | {"total": 100.0}))
    page = render_report(folder)
    named = re.findall(r"</i>([\w ,]+) <span>[\d.]+ (?:s|min \d+ s) · ([\d.]+) %", page)
    assert dict(named) == {
        "final evaluation": "40.0",
        "validating": "30.0",
        "updating": "10.0",
        "exporting": "10.0",
        "loading": "5.0",
        "reading data, checkpoints, logs": "5.0",
    }
    assert "everything else" not in page


def test_a_figure_whose_interval_holds_one_half_is_undecided_and_not_red(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 5)
    rate = "val/score_win_rate"
    open_ = {rate: 0.7, f"{rate}_low": 0.4, f"{rate}_high": 0.9}
    write_summary(folder, replace(read_summary(folder), metrics=open_, gates=()))
    page = render_report(folder)
    assert '<p class="figure undecided">70.0 %</p>' in page
    assert "Undecided" in page


def test_a_score_of_0_is_a_score_and_one_that_is_missing_is_none(tmp_path):
    folder = RunFolder(tmp_path)
    write_summary(folder, Summary("ppo", "completed", 1))
    sample = {"prompt": "p", "response": "r", "baseline_response": "b"}
    SamplesAppender(folder.samples).append(9, [sample | {"score": 0.0, "baseline_score": 0.0}])
    assert Outline(render_report(folder)).text.count("score 0") == 2
    SamplesAppender(folder.samples).append(10, [sample | {"score": None, "baseline_score": None}])
    assert "score 0" not in Outline(render_report(folder)).text


def test_the_page_says_from_what_on_what_and_on_how_many_prompts(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 2)
    assert "What was run" not in render_report(folder), "a summary of an earlier version"
    about = {"trained from": "org/base", "data": HOSTILE, "reward": "f"}
    old = read_summary(folder)
    metrics = dict(old.metrics) | {"val/num_prompts": 512.0}
    write_summary(folder, replace(old, about=about, metrics=metrics))
    page = Outline(render_report(folder))
    told = page.text[page.text.index("What was run") : page.text.index("Curves")]
    assert told.index("org/base") < told.index("alert") < told.index("512 held-out prompts")
    assert not page.tags & {"script", "img"}


def test_a_run_that_was_not_judged_shows_no_wins_and_names_no_next_stage(tmp_path):
    folder = fake_ppo_run(tmp_path, 5)
    summary = read_summary(folder)
    metrics = {**summary.metrics, "val/gold_tie_rate": 0.1}
    write_summary(folder, replace(summary, metrics=metrics, gates=(), next="compare it"))
    judged = Outline(render_report(folder)).text
    assert "Comparisons, by the gold reward" in judged
    assert "Next:" in judged
    write_summary(folder, replace(summary, metrics=metrics, gates=(), judged=False))
    text = Outline(render_report(folder)).text
    assert "Comparisons, by" not in text
    assert "Next: The same command without debug=fast" in text


def test_each_run_that_ended_says_what_to_do_next(tmp_path):
    def top(folder: RunFolder, **changes) -> str:
        write_summary(folder, replace(read_summary(folder), **changes))
        return Outline(render_report(folder)).text.partition("What was run")[0]

    sft = fake_sft_run(tmp_path / "sft")
    assert "Next:" in top(sft, next="Train a reward model:\nrlhf-train 'a=<b>'")
    assert '<pre class="command">rlhf-train &#39;a=&lt;b&gt;&#39;</pre>' in render_report(sft)
    assert "It left no checkpoint" in top(sft, status="failed", cause="disk full")
    sft.last_checkpoint.mkdir(parents=True)
    assert "resume=auto" in top(sft, status="failed", cause="disk full")
    ppo = fake_ppo_run(tmp_path / "ppo", 5)
    assert "Next: 0.352 is below 0.36" in top(ppo)  # a gate failed
    assert "Next: compare it" in top(ppo, gates=(), next="compare it")
    assert "It left no checkpoint" in top(ppo, status="failed", cause="disk full", judged=False)
    assert "Next:" in top(ppo, status="completed", cause=None, judged=True)
    lost = {"val/gold_win_rate": 0.2, "val/gold_win_rate_low": 0.1, "val/gold_win_rate_high": 0.3}
    assert "Do not build on it" in top(ppo, gates=(), metrics=lost)


def test_an_alarm_of_the_doctor_that_was_not_cleared_is_what_to_do_next(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 5)
    alert = {"detector": "constant_score", "raised_at": 2, "cleared_at": None, "level": "alarm"}
    told = {"message": "5 iterations in a row", "cause": "c", "remedy": "score a few by hand"}
    found = read_summary(folder)
    for change, expected in (({}, "score a few by hand"), ({"cleared_at": 4}, "0.352 is below")):
        write_summary(folder, replace(found, alerts=(alert | told | change,)))
        assert expected in Outline(render_report(folder)).text.partition("Next:")[2][:90]


@pytest.mark.parametrize(("count", "shown"), [(1, "1 "), (2, "2 "), (10_000, "10,000 ")])
def test_one_of_a_thing_is_no_plural_and_thousands_are_read_easily(tmp_path, count, shown):
    folder = RunFolder(tmp_path / "run").create()
    gates = tuple(GateResult(f"g{i}", 1.0, 2.0, False, "no") for i in range(min(count, 2)))
    metrics = {"val/num_prompts": float(count), "val/human_win_rate": 0.7, "val/gold_win_rate": 0.6}
    metrics |= {"val/human_num_pairs": float(count), "val/human_skipped": float(count)}
    summary = Summary("ppo", "completed", 1, metrics=metrics, gates=gates, about={"data": "mine"})
    write_summary(folder, summary)
    MetricsAppender(folder.metrics).append(count, {"rollout/score": 1.0})
    pairs = {"held_out": "pairs", "margin": [1.0] * count, "reliability": [[0.6, 1, 0.5, 1, count]]}
    SamplesAppender(folder.distributions).append(count, [pairs])
    page = re.sub(r"<[^>]+>", " ", write_report(folder).read_text())
    many = "s" * (count > 1)
    for thing in ("iteration", "held-out prompt", "pair"):
        assert re.search(rf"{shown}{thing}{many}\b", page), thing
        assert not re.search(rf"\b{shown}{thing}{'' if many else 's'}\b", page), thing
    assert f"{len(gates)} gate{'s' * (len(gates) > 1)} failed" in page
    assert f"Failed gate{'s' * (len(gates) > 1)}: g0" in page
    assert f"{shown}of {2 * count:,} {'were' if many else 'was'} skipped" in page


def test_the_pairs_of_a_benchmark_are_counted_in_whole_numbers(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    metrics = {"benchmark/accuracy": 0.7, "benchmark/num_pairs": 50.0}
    write_summary(folder, Summary("evaluate", "completed", 1, metrics=metrics))
    facts = verdict(read_summary(folder)).facts
    assert Fact("pairs", "50") in facts


def test_the_page_of_an_evaluation_does_not_speak_of_training(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    folder.config.parent.mkdir(exist_ok=True)
    folder.config.write_text("seed: 1\n")
    rate = "val/judge_win_rate"
    metrics = {rate: 0.5, f"{rate}_low": 0.4, f"{rate}_high": 0.6, "val/judge_tie_rate": 0.0}
    write_summary(folder, Summary("evaluate", "completed", 1, metrics=metrics))
    lines = {"held_out": "answers", "length": [1, 2], "baseline_length": [3, 4]}
    SamplesAppender(folder.distributions).append(0, [lines])
    page = Outline(write_report(folder).read_text()).text
    assert "Both sides" in page
    assert "Before and after" not in page
    assert "A tie counts one half; 95 % interval 40.0 to 60.0 %." in page


def test_a_run_that_judges_nothing_does_not_say_that_there_is_no_gold_reward(tmp_path):
    folder = fake_ppo_run(tmp_path / "run", 9)
    assert "Over-optimisation" in render_report(folder)
    write_summary(folder, replace(read_summary(folder), judged=False))
    assert "Over-optimisation" not in render_report(folder)


def test_the_ends_of_a_curve_have_the_same_digits(tmp_path):
    folder = RunFolder(tmp_path / "run").create()
    for iteration, score in enumerate((-0.063, 0.56), start=1):
        MetricsAppender(folder.metrics).append(iteration, {"rollout/score": score})
    write_summary(folder, Summary("ppo", "completed", 1))
    assert "-0.06 → 0.56" in render_report(folder)


def test_refusals_say_of_how_many_prompts_they_are(tmp_path):
    metrics = {"val/refusal_rate": 1.0, "val/baseline_refusal_rate": 0.625, "val/num_harmful": 8.0}
    metrics |= {"val/refusal_rate_low": 0.676, "val/refusal_rate_high": 1.0}
    (fact,) = verdict(Summary("ppo", "completed", 1, metrics=metrics)).facts
    assert fact.note == "baseline → now, 95 % interval 67.6 to 100.0 %, of 8 prompts"


def test_the_name_of_a_point_stays_inside_of_the_axes():
    points, bounds = [(0.0, 1.0), (0.5, 1.0), (1.0, 1.0)], [(1.0, 1.0)] * 3
    chart = line_chart("x", [Series("a", points, "marks", bounds, ["n=1", "n=4", "n=16"])])
    names = re.findall(r'dot-name" style="text-anchor:(\w+)"', chart)
    assert names == ["start", "middle", "end"]
