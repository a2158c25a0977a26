"""The page in a real Chromium, against a real server process."""

from __future__ import annotations

import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait

from rlhf_lightning.preferences.records import Pair
from tests.browser import console
from tests.builders.labels import make_pairs
from tests.preferences.page_server import Server, serving

pytestmark = pytest.mark.timeout(90)
OTHER = {"first": "second", "second": "first"}


def sign_in(browser: Chrome, server: Server, name: str) -> None:
    browser.get(server.url)
    browser.find_element(By.ID, "name").send_keys(name + Keys.ENTER)
    wait(browser, lambda: browser.find_elements(By.CSS_SELECTOR, ".rater"))


def wait(browser: Chrome, condition) -> None:
    # Without the script each answer loads the page anew, perhaps while the condition reads it.
    waiting = WebDriverWait(browser, 20, 0.02, ignored_exceptions=[StaleElementReferenceException])
    waiting.until(lambda _: condition())


def pair_on(browser: Chrome) -> str | None:
    return browser.execute_script("return document.querySelector('[name=pair]')?.value")


def press(browser: Chrome, key: str) -> None:
    """Press a key and wait for the page that follows."""
    before = pair_on(browser)
    ActionChains(browser).send_keys(key).perform()
    wait(browser, lambda: pair_on(browser) != before)


def shown(browser: Chrome) -> list[str]:
    """Return the question and the two answers as they are read."""
    found = browser.find_elements(By.CSS_SELECTOR, ".prompt .free, article .free")
    return [element.text for element in found]


def noted(browser: Chrome) -> str:
    return browser.find_element(By.ID, "note").text


def test_a_rater_labels_with_the_keyboard_alone(browser: Chrome, tmp_path: Path):
    with serving(tmp_path, make_pairs(6)) as server:
        sign_in(browser, server, "Ann")
        seen = []
        for key in "12tbs":
            seen.append(shown(browser))
            press(browser, key)
        time.sleep(0.3)
        ActionChains(browser).send_keys("r").pause(0.1).send_keys("1 is clear b").perform()
        ActionChains(browser).send_keys(Keys.ENTER).send_keys("2").perform()
        wait(
            browser,
            lambda: "All done" in browser.page_source or "Nothing left" in browser.page_source,
        )
        labels = server.labels()
        meant = [label.choice for label in labels]
        orders = [label.order for label in labels]
        assert meant == [orders[0], OTHER[orders[1]], "tie", "both_bad", "skip", OTHER[orders[5]]]
        assert [label.reason for label in labels] == [None] * 5 + ["1 is clear b"]
        assert all(label.annotator == "Ann" and label.kind == "person" for label in labels)
        assert 0.3 < labels[-1].seconds < 60
        texts = {p.pair_id: (p.first, p.second) for p in make_pairs(6)}
        for screen, label in zip(seen, labels, strict=False):
            first, second = texts[label.pair_id]
            assert screen[1:] == ([first, second] if label.order == "first" else [second, first])
        assert console(browser) == []


@pytest.mark.thorough
def test_a_restart_in_the_middle_loses_nothing_and_the_rater_goes_on(
    browser: Chrome, tmp_path: Path
):
    with serving(tmp_path, make_pairs(4)) as server:
        sign_in(browser, server, "Ann")
        press(browser, "1")
        press(browser, "2")
        waiting = shown(browser)
        server.kill()
        ActionChains(browser).send_keys("t").perform()
        wait(browser, lambda: noted(browser).startswith("Not saved: the server does not answer"))
        assert shown(browser) == waiting
    with serving(tmp_path, port=urlsplit(server.url).port) as server:
        assert len(server.labels()) == 2
        press(browser, "t")
        assert [label.choice for label in server.labels()][2] == "tie"
        press(browser, "b")
        assert len(server.labels()) == 4


@pytest.mark.thorough
def test_hostile_text_is_shown_as_it_is_and_runs_nothing(browser: Chrome, tmp_path: Path):
    script = "<script>window.hit = 1</script>"
    image = "<img src=x onerror='window.hit = 2'>"
    markup = '"></div></form><a href="javascript:window.hit=3">{{ 7 * 7 }}</a>&lt;b&gt;'
    pair = Pair.make(f"Look: {script}", image, markup, domain='<i onclick="window.hit = 4">')
    with serving(tmp_path, [pair, *make_pairs(1)]) as server:
        sign_in(browser, server, '<svg onload="window.hit = 5">')
        question, *answers = shown(browser)
        assert question == f"Look: {script}"
        assert sorted(answers) == sorted([image, markup])
        assert browser.find_element(By.CSS_SELECTOR, ".domain").text == pair.domain
        assert browser.find_element(By.CSS_SELECTOR, ".rater").text.startswith("<svg onload")
        assert not browser.find_elements(By.CSS_SELECTOR, "main a, main img, main script, main i")
        ActionChains(browser).send_keys("r").pause(0.1).send_keys(script).perform()
        ActionChains(browser).send_keys(Keys.ESCAPE).perform()
        press(browser, "1")
        press(browser, "u")
        assert browser.find_element(By.CSS_SELECTOR, ".reason").get_attribute("value") == script
        assert browser.execute_script("return window.hit") is None
        assert console(browser) == []
        # And were something to get through, the policy stops it.
        browser.execute_script(
            "const s = document.createElement('script'); s.textContent = 'window.hit = 6';"
            "document.body.append(s); document.body.insertAdjacentHTML('beforeend', arguments[0])",
            image,
        )
        time.sleep(0.2)
        assert browser.execute_script("return window.hit") is None
        assert any("Content Security Policy" in message for message in console(browser))
