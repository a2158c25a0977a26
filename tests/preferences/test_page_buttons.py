"""Where the page's buttons stand and what fits into them, in a real Chromium."""

from __future__ import annotations

from pathlib import Path

import pytest
from selenium.webdriver import Chrome

from tests.browser import set_viewport
from tests.builders.labels import make_pairs
from tests.preferences.page_server import serving
from tests.preferences.test_page_browser import sign_in

pytestmark = pytest.mark.timeout(90)


@pytest.mark.thorough
def test_keys_and_words_stay_inside_their_buttons_where_there_is_a_mouse(
    browser: Chrome, tmp_path: Path
):
    script = (
        "const box = e => e.getBoundingClientRect();"
        "return [...document.querySelectorAll('.choices button > *')].map(e => [e.textContent,"
        "  [box(e), box(e.parentElement)]]).map(([text, [own, button]]) => [text, own.width > 0,"
        "  own.left >= button.left, own.right <= button.right, own.bottom <= button.bottom])"
    )
    with serving(tmp_path, make_pairs(1)) as server:
        sign_in(browser, server, "Ann")
        for width in (320, 360, 390, 520, 600, 800, 981, 1280):
            set_viewport(browser, width, 740)
            found = browser.execute_script(script)
            assert len(found) == 12
            assert [part for part in found if not all(part[1:])] == [], width
