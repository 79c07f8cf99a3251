"""Look at every page of the built site in a browser, and search for every op.

    python tools/docs_site/check_browser.py build/site/html    # needs playwright and chromium

Every page is opened at two widths. It fails if it logs an error, requests anything from another
host, has no text, or is wider than the window; a search fails if the first result is not the page
of the op. Exit code 1 and one line for each failure.
"""

from __future__ import annotations

import argparse
import functools
import http.server
import shutil
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from playwright.sync_api import Browser, Error, Page, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
WIDTHS = {"narrow": (390, 844), "wide": (1280, 900)}
# How far the page is wider than the window; boxes that scroll by themselves do not count.
_OVERFLOW = """() => {
    const width = document.documentElement.clientWidth;
    return document.documentElement.scrollWidth > width
        ? `${document.documentElement.scrollWidth} of ${width} pixels` : "";
}"""
_TEXT = "() => document.querySelector('article')?.innerText.trim().length ?? 0"
_BROKEN_PICTURES = """() => [...document.images]
    .filter(image => image.complete && !image.naturalWidth).map(image => image.src)"""


class Site:
    """A built site on a port of this machine, as a web server would serve it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        handler = functools.partial(_Silent, directory=str(folder))
        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.address = f"http://127.0.0.1:{self._server.server_port}/"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def pages(self) -> Iterator[str]:
        """Yield the addresses of the pages, relative to the site's."""
        for path in sorted(self.folder.rglob("*.html")):
            yield path.relative_to(self.folder).as_posix().removesuffix("index.html")

    def close(self) -> None:
        """End the server."""
        self._server.shutdown()
        self._server.server_close()


class _Silent(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *arguments: object) -> None:
        pass


def look(page: Page, site: Site, name: str, messages: list[str]) -> list[str]:
    """Open a page and return what is wrong with it. ``messages`` receives what the page logs."""
    messages.clear()
    page.goto(site.address + name, wait_until="load")
    page.evaluate("() => document.fonts.ready")
    wrong = list(messages)
    if not page.evaluate(_TEXT):
        wrong.append("the page has no text")
    if overflow := page.evaluate(_OVERFLOW):
        wrong.append(f"wider than the window: {overflow}")
    wrong += [f"picture not drawn: {source}" for source in page.evaluate(_BROKEN_PICTURES)]
    return wrong


def search(page: Page, site: Site, text: str) -> list[str]:
    """Return the addresses of the results of a search, best first."""
    page.goto(f"{site.address}?q={text}", wait_until="load")
    results = page.locator(".md-search-result__link")
    results.first.wait_for(state="attached", timeout=10_000)
    return [
        (link.get_attribute("href") or "").split("?")[0].removeprefix(site.address)
        for link in results.all()
    ]


def watched(browser: Browser, size: tuple[int, int], site: Site) -> tuple[Page, list[str]]:
    """Return a window of a size, and the list of errors and requests to other hosts in it."""
    page = browser.new_page(viewport={"width": size[0], "height": size[1]})
    messages: list[str] = []
    page.on(
        "console",
        lambda entry: messages.append(entry.text) if entry.type in ("error", "warning") else None,
    )
    page.on("pageerror", lambda error: messages.append(str(error)))
    page.on(
        "request",
        lambda request: (
            None
            if request.url.startswith((site.address, "data:", "blob:"))
            else messages.append(f"requests {request.url}")
        ),
    )
    return page, messages


def check(browser: Browser, site: Site, ops: list[str]) -> list[str]:
    """Return a line for each failure."""
    failures, count = [], 0
    for width, size in WIDTHS.items():
        page, messages = watched(browser, size, site)
        for name in site.pages():
            failures += [f"/{name} ({width}): {text}" for text in look(page, site, name, messages)]
            count += 1
        page.close()
    page, _ = watched(browser, WIDTHS["wide"], site)
    for op in ops:
        try:
            results = search(page, site, op)
        except Error:
            results = []
        if not results or results[0].split("#")[0] != f"ops/{op}/":
            failures.append(f"search for {op}: the first results are {results[:3]}")
    print(f"looked at {count} pages, searched for {len(ops)} ops: {len(failures)} failures")
    return failures


def main() -> None:
    """Check the site that the command line names."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path, help="the built site")
    arguments = parser.parse_args()
    if not (arguments.folder / "index.html").exists():
        sys.exit(f"{arguments.folder} has no site: run make site")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    if chromium is None:
        sys.exit("there is no browser: apt-get install chromium")
    ops = sorted(path.stem for path in (ROOT / "docs" / "ops").glob("*.md"))
    site = Site(arguments.folder)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        failures = check(browser, site, ops)
        browser.close()
    site.close()
    sys.exit("\n".join(failures) or 0)


if __name__ == "__main__":
    main()
