"""The pages in a real Chromium: they fit a phone, follow the reader's scheme, and load nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from rlhf_lightning.app.report import run
from rlhf_lightning.runs.folder import SamplesAppender
from tests.browser import console, set_scheme, set_viewport
from tests.builders.run_folders import fake_ppo_run, fake_reward_run
from tests.reports.test_chain import pipeline
from tests.reports.test_compare import sweep
from tests.reports.test_distributions import HELD_OUT, PAIRS, ROLLOUTS

PHONE = 390


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> list[Path]:
    folder = tmp_path_factory.mktemp("pages")
    sweep(folder)
    reward = fake_reward_run(folder.parent / "reward_run", 60)
    SamplesAppender(reward.distributions).append(60, [PAIRS])
    grpo = fake_ppo_run(folder.parent / "grpo_run", 9)
    SamplesAppender(grpo.distributions).append(9, [*ROLLOUTS, HELD_OUT])
    others = [reward, grpo, pipeline(folder.parent / "pipeline_run")]
    return [*run([folder])[-2:], *(page for one in others for page in run([one.path]))]


@pytest.mark.thorough
@pytest.mark.timeout(120)
def test_pages_fit_a_phone_and_are_light_or_dark_as_the_reader_wants(browser, pages):
    papers = {}
    for page in pages:
        for scheme in ("light", "dark"):
            set_viewport(browser, PHONE, 844, phone=True)
            set_scheme(browser, scheme)
            browser.get(page.as_uri())
            width = browser.execute_script("return document.documentElement.scrollWidth")
            assert width == PHONE, f"{page.name} is {width} wide"
            paper, ink = browser.execute_script(
                "const s = getComputedStyle(document.body); return [s.backgroundColor, s.color]"
            )
            papers[scheme] = (brightness(paper), brightness(ink))
            assert console(browser) == []
            requests = "return performance.getEntriesByType('resource').length"
            assert browser.execute_script(requests) == 0
        assert papers["light"][0] > 200 > 100 > papers["light"][1]
        assert papers["dark"][0] < 60 < 200 < papers["dark"][1]


def brightness(colour: str) -> float:
    parts = [float(p) for p in colour[colour.index("(") + 1 : -1].split(",")[:3]]
    return sum(parts) / 3
