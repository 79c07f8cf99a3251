"""mkdocs hook: every link of the built site leads to a file and an anchor that exist.

mkdocs checks what Markdown links to; this reads the HTML, with what themes and generators added.
Links to other sites are not followed, but no page may load a script, a style or a font from one.
"""

from __future__ import annotations

import posixpath
from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit

if TYPE_CHECKING:  # broken_links needs no mkdocs
    from mkdocs.config.defaults import MkDocsConfig


class _Page(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.anchors: set[str] = set()
        self.links: set[str] = set()
        self.loads: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        target = values.get("src") or values.get("href")
        if target and not (tag == "link" and values.get("rel") in ("canonical", "edit")):
            self.links.add(target)
            if tag != "a":
                self.loads.add(target)


def on_post_build(config: MkDocsConfig) -> None:
    """Fail, with a list, if a link is broken."""
    from mkdocs.exceptions import PluginError

    broken = broken_links(Path(config.site_dir), urlsplit(config.site_url or "").path or "/")
    if broken:
        raise PluginError("broken links:\n  " + "\n  ".join(broken))


def broken_links(folder: Path, base: str = "/") -> list[str]:
    """Return a line for each link of the built pages that leads nowhere."""
    pages = {
        path.relative_to(folder).as_posix(): _Page(path.read_text())
        for path in sorted(folder.rglob("*.html"))
    }
    broken = []
    for name, page in pages.items():
        for link in sorted(page.links):
            parts = urlsplit(link)
            if parts.scheme in ("data", "mailto", "javascript"):
                continue
            if parts.scheme or parts.netloc:
                if link in page.loads:
                    broken.append(f"{name} loads {link} from elsewhere")
                continue
            path = unquote(parts.path)
            if path.startswith("/"):
                target = path.removeprefix(base).lstrip("/")
            else:
                target = posixpath.normpath(posixpath.join(posixpath.dirname(name), path))
            target = name if not path else "" if target == "." else target
            if (folder / target).is_dir():
                target = posixpath.join(target, "index.html")
            anchor = unquote(parts.fragment)
            if not (folder / target).exists():
                broken.append(f"{name}: {link}")
            elif anchor and target in pages and anchor not in pages[target].anchors:
                broken.append(f"{name}: {link}: the page has no such anchor")
    return broken
