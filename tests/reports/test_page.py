from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest

from rlhf_lightning.evaluation.gates import check_gates
from rlhf_lightning.reports.page import render_report, write_report
from rlhf_lightning.runs.folder import MetricsAppender, RunFolder, SamplesAppender
from rlhf_lightning.runs.summary import GateResult, Summary, read_summary, write_summary
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
    outline = Outline(write_report(fake_ppo_run(tmp_path / "run")).read_text())
    order = ["81.2 %", "77.1 to 84.8 %", "The policy answers better than", "-0.02 → 1.41"]
    order += ["✓ passed", "Curves", "Samples", "Time", "Settings"]
    places = [outline.text.index(part) for part in order]
    assert places == sorted(places)
    assert outline.text.count("✓ passed") == 2
    assert outline.text.count("✗ failed") == 1
    assert "0.352 is below 0.36, so diversity fell" in outline.text


def test_a_gate_that_measured_nothing_is_not_counted_among_those_that_passed(tmp_path):
    folder = fake_ppo_run(tmp_path / "run")
    gates = check_gates({"refuses": {"metric": "val/none", "at_least": 0, "optional": True}}, {})
    write_summary(folder, replace(read_summary(folder), gates=gates))
    text = Outline(write_report(folder).read_text()).text
    assert "passed" not in text
    assert "not measured" in text


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
    texts = {"gates": (gate,), "versions": {HOSTILE: HOSTILE}, "git_commit": HOSTILE}
    metrics = {**summary.metrics, HOSTILE: 1.0}
    write_summary(folder, replace(summary, metrics=metrics, **texts))
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


def test_secrets_of_the_configuration_are_hidden_and_nothing_else(tmp_path):
    folder = fake_ppo_run(tmp_path, 3)
    folder.config.write_text(
        "judge:\n  api_key: sk-one\n  password: 'hunter2'\nrollout:\n  max_new_tokens: 24\n"
    )
    page = render_report(folder)
    assert "sk-one" not in page
    assert "hunter2" not in page
    assert "max_new_tokens: 24" in page


def test_a_run_that_has_only_begun_has_a_report_too(tmp_path):
    folder = RunFolder(tmp_path / "run")
    with pytest.raises(FileNotFoundError, match=r"summary\.json is missing"):
        write_report(folder)
    write_summary(folder, Summary("ppo", "running", 1))
    assert "resume=auto continues it" in Outline(render_report(folder)).text
    MetricsAppender(folder.metrics).append(1, {"rollout/score": float("nan")})
    assert "Curves" not in Outline(render_report(folder)).text


@pytest.mark.parametrize("iteration", [5, 0])  # of the policy; 0 says: against any baseline
def test_scores_against_another_baseline_than_the_start_are_not_drawn_over_its_kl(
    tmp_path, iteration
):
    folder = fake_ppo_run(tmp_path, 5)
    summary = read_summary(folder)
    metrics = {**summary.metrics, "val/kl_per_response": 9.0}
    write_summary(folder, replace(summary, metrics=metrics))
    values = {"held_out": "answers", "score": [1.0], "length": [3]}
    SamplesAppender(folder.distributions).append(iteration, [values])
    section = render_report(folder).partition("Over-optimisation")[2].partition("</section>")[0]
    assert "score, training" in section
    assert ("score, held-out" in section) == bool(iteration)
