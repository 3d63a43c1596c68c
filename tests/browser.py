"""A headless Chromium for tests: Playwright drives the one of this system, and downloads none.

def test_search(open_page, site):
    page, log = open_page(f"{site}/index.html", width=390)
    page.keyboard.press("s")
    page.wait_for_selector("#mdbook-searchbar")
    assert log.errors == []
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import pytest
from waiting import HANGS_MS

from tools.chromium import executable, launch

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page


def reason_to_skip() -> str | None:
    """Why tests in a browser cannot run here, if they cannot. With KLEINLITE_BROWSER=required that is an error."""
    reason = None if executable() else "no Chromium found: apt install chromium, or set CHROMIUM to its path"
    if not importlib.util.find_spec("playwright"):
        reason = "playwright is not installed: pip install -e '.[test]' brings it"
    if reason and os.environ.get("KLEINLITE_BROWSER") == "required":
        raise RuntimeError(f"The tests in a browser must run here, but {reason}.")
    return reason


class Log(NamedTuple):
    """What happened on a page: errors in its scripts and on its console, addresses that it asked for."""

    errors: list[str]
    requests: list[str]


def watch(page: Page) -> Log:
    """A log that fills itself while the page lives."""
    log = Log([], [])
    page.on("request", lambda request: log.requests.append(request.url))
    page.on("pageerror", lambda error: log.errors.append(str(error)))
    page.on("console", lambda message: message.type in ("error", "assert") and log.errors.append(message.text))
    return log


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """The browser; one for all tests of a file."""
    if reason := reason_to_skip():
        pytest.skip(reason)
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=HANGS_MS)
    with sync_playwright() as playwright:
        browser = launch(playwright)
        yield browser
        browser.close()


@pytest.fixture
def open_page(chromium: Browser) -> Iterator[Callable[..., tuple[Page, Log]]]:
    """open_page(url, width=1200, dark=False): a loaded page with settings of its own, and its log."""
    with contextlib.ExitStack() as opened:

        def open_page(url: str, width: int = 1200, dark: bool = False) -> tuple[Page, Log]:
            page = opened.enter_context(chromium.new_context(
                viewport={"width": width, "height": 900}, is_mobile=width < 600,
                color_scheme="dark" if dark else "light",
            )).new_page()  # fmt: skip
            page.set_default_timeout(HANGS_MS)
            log = watch(page)
            page.goto(url)
            return page, log

        yield open_page
