"""mkdocs hook: the pages as they stand in the repository, in the form that the site's parser reads.

The same files are read in a plain checkout and by Python-Markdown, which differs from GitHub's:

* Links to files outside ``docs`` lead to the page that the site makes of the file, or to the file
  if it is in ``examples``, else to the file in the repository (``repo_url``). Without a
  ``repo_url`` the text stays, without a link.
* HTML comments (``<!-- not run: ... -->``, ``<!-- run first: ... -->``) are removed.
* What belongs to an item of a list is indented by four columns.
* The docstring on the page of an op is rendered by mkdocstrings, so its arguments have anchors.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import Files
from mkdocs.structure.pages import Page
from navigation import REPOSITORY_PAGES
from page_text import indent_lists, split_fences, without_comments
from reference import OP_PAGES, homes

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_SIGNATURE = re.compile(r"```python\nfusedops\.[^\n]*\n```\n\n```text\n.*?\n```\n", re.DOTALL)


def on_page_markdown(text: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Return the Markdown for the site's parser."""
    uri = page.file.src_uri
    name = Path(uri).stem
    if uri.startswith("ops/") and f"fusedops.ops.{name}" in homes().values():
        page.meta["search"] = {"boost": _search_boost(name)}
        options = "    options:\n      heading_level: 2\n      show_root_toc_entry: false\n"
        text = _SIGNATURE.sub(lambda _: f"::: fusedops.ops.{name}\n{options}", text, count=1)
    if uri.startswith(("dev/", "reference/index")) or uri in ("coverage.md", "changelog.md"):
        page.meta["search"] = {"boost": 0.5}
    source = _source(uri)
    parts = [
        part if fenced else _rewrite(without_comments(part), source, config)
        for part, fenced in split_fences(text)
    ]
    return indent_lists("".join(parts))


def _search_boost(op: str) -> int:
    """Return the weight of an op's page, so that a search for its name lists it first.

    The search completes words: ``attention`` is also a search for ``attention_varlen``, a rare word
    and therefore a better match.
    """
    longer = [page for page in OP_PAGES.glob(f"{op}*.md") if page.stem != op]
    return 20 if longer else 4


def _source(uri: str) -> str:
    """Return the path in the repository of a page's text."""
    made = {page: source for source, page in REPOSITORY_PAGES.items()}
    return made.get(uri, f"docs/{uri}")


def _rewrite(text: str, source: str, config: MkDocsConfig) -> str:
    return _LINK.sub(lambda link: _resolved(link, source, config), text)


def _resolved(link: re.Match[str], source: str, config: MkDocsConfig) -> str:
    picture, label, target = link.groups()
    path, _, anchor = target.partition("#")
    if not path or re.match(r"\w+:", path):
        inner = _rewrite(label, source, config)
        return f"{picture}[{inner}]({target})"
    place = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
    page = REPOSITORY_PAGES.get(place)
    if place.startswith("examples/") and (ROOT / place).is_file():
        page = place
    if page is None and place.startswith("docs/"):
        page = place.removeprefix("docs/")
        if (ROOT / place).is_dir():
            page += "/index.md"
    if page is not None:
        own = source.removeprefix("docs/") if source.startswith("docs/") else ""
        relative = posixpath.relpath(page, posixpath.dirname(own) or ".")
        return f"{picture}[{label}]({relative}{'#' + anchor if anchor else ''})"
    if not config.repo_url or not (ROOT / place).exists():
        return label if (ROOT / place).exists() else link[0]  # mkdocs reports what is missing
    kind = "tree" if (ROOT / place).is_dir() else "blob"
    return f"[{label}]({config.repo_url.rstrip('/')}/{kind}/main/{place})"
