"""A real headless Chromium for tests of pages, driven by selenium.

Debian and Ubuntu: `apt-get install chromium chromium-driver`. RLHF_CHROMIUM and RLHF_CHROMEDRIVER
name other places. The fixture `browser` is in `tests/conftest.py`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from selenium.webdriver import Chrome, ChromeOptions
from selenium.webdriver.chrome.service import Service

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
# Nothing of it may reach for a network, and nothing may be left of an earlier visit.
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--no-default-browser-check",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-extensions",
    "--hide-scrollbars",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1, EXCLUDE localhost",
)


def find_chromium() -> tuple[str, str] | None:
    """Return the paths of Chromium and of its driver, or None if one is missing."""
    browser = os.environ.get("RLHF_CHROMIUM") or next(filter(None, map(shutil.which, BROWSERS)), "")
    driver = os.environ.get("RLHF_CHROMEDRIVER") or shutil.which("chromedriver")
    return (browser, driver) if browser and driver else None


@contextmanager
def chromium(profile: Path) -> Iterator[Chrome]:
    """Run a Chromium of 1280 x 900 with an empty profile.

    Args:
        profile: a new folder.

    Raises:
        FileNotFoundError: if there is none.
    """
    found = find_chromium()
    if found is None:
        raise FileNotFoundError("no chromium and chromedriver: apt-get install chromium-driver")
    options = ChromeOptions()
    options.binary_location = found[0]
    for flag in (*FLAGS, f"--user-data-dir={profile}", "--window-size=1280,900"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = Chrome(options=options, service=Service(found[1]))
    driver.set_page_load_timeout(30)
    driver.set_script_timeout(30)
    try:
        yield driver
    finally:
        driver.quit()


def forget(driver: Chrome) -> None:
    """Leave the page; drop cookies and the messages of the console."""
    driver.get("about:blank")
    driver.execute_cdp_cmd("Network.clearBrowserCookies", {})
    driver.get_log("browser")


def console(driver: Chrome) -> list[str]:
    """Return what the page wrote to the console since the last time, violations of CSP too."""
    return [entry["message"] for entry in driver.get_log("browser")]
