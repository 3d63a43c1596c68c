"""The book as one PDF, kleinlite.pdf, from the page to print that mdBook builds.

    make pdf

No script runs: what is alive on the site shows its stored pictures. It drives the Chromium of this system; CHROMIUM
names another.
"""

from pathlib import Path

from playwright.sync_api import sync_playwright

from tools.chromium import launch, serving

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "kleinlite.pdf"
FOOTER = '<div style="font-size: 8px; width: 100%; text-align: center"><span class="pageNumber"></span></div>'
MARGIN = "18mm"
SCALE = 0.75  # a line of code has 90 letters then
LONG = 600_000  # milliseconds


def write(book: Path = ROOT / "book", out: Path = OUT) -> None:
    """Print a built site into a file, with an outline of its headings."""
    with serving(book) as address, sync_playwright() as playwright:
        browser = launch(playwright)
        page = browser.new_context(java_script_enabled=False).new_page()
        page.set_default_timeout(LONG)
        page.goto(f"{address}/print.html")
        page.evaluate("document.querySelectorAll('details').forEach((folded) => (folded.open = true))")
        page.pdf(
            path=out, format="A4", scale=SCALE, margin=dict.fromkeys(("top", "right", "bottom", "left"), MARGIN),
            display_header_footer=True, header_template="<span></span>", footer_template=FOOTER, outline=True,
            tagged=True,
        )  # fmt: skip
        browser.close()


if __name__ == "__main__":
    write()
    print(f"{OUT.name}: {OUT.stat().st_size / 1e6:.1f} MB")
