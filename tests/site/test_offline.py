"""The site without a network: the server is gone, and what was seen still opens."""

import re

import pytest
from playwright.sync_api import Error

from tools.chromium import serving


@pytest.mark.slow
def test_what_was_seen_opens_when_the_server_is_gone(site, chromium):
    """The page itself begins this on https alone; a test has no certificate, and begins it by hand."""
    for page_of, worker in (("index.html", "offline.js"), ("solutions/00_idea.html", "../offline.js")):
        head = (site / page_of).read_text("utf-8")
        assert re.search(rf'"https:"\) navigator\.serviceWorker\?\.register\("{re.escape(worker)}"\)', head)
    page = chromium.new_context().new_page()
    with serving(site) as address:
        page.goto(f"{address}/index.html")
        page.evaluate("navigator.serviceWorker.register('offline.js').then(() => navigator.serviceWorker.ready)")
        page.wait_for_function("navigator.serviceWorker.controller")
        page.goto(f"{address}/05_transformer.html", wait_until="load")
        page.wait_for_function("[...document.images].every((image) => image.complete)")
    page.goto(f"{address}/05_transformer.html?seen=again")
    assert "The transformer" in page.title() or page.locator("h1", has_text="The transformer").count()
    assert page.evaluate("[...document.images].filter((image) => image.src.includes('pictures'))[0].naturalWidth") > 0
    assert page.evaluate("getComputedStyle(document.querySelector('.doors')).color") != "rgb(0, 0, 0)"
    with pytest.raises(Error, match="ERR_"):
        page.goto(f"{address}/07_quantization.html")  # never seen
    page.context.close()
