"""mkdocs hook: ``llms.txt`` and ``llms-full.txt`` for language models (llmstxt.org).

The first lists the pages by section of the navigation; the second has their text. The Markdown of
each page is published as ``index.md`` in its folder. On pages of the reference, signatures and
docstrings replace the directives of mkdocstrings.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.nav import Navigation, Section
from mkdocs.structure.pages import Page
from reference import package_of

_DIRECTIVE = re.compile(r"^::: (\S+)\n(?:    .*\n)*", re.MULTILINE)
_pages: dict[str, str] = {}
_lists: list[str] = []


def on_nav(nav: Navigation, config: MkDocsConfig, **more: object) -> None:
    """Remember the navigation."""
    _pages.clear()
    _lists[:] = []
    config.extra["_nav"] = nav


def on_page_content(html: str, page: Page, **more: object) -> str:
    """Remember the Markdown of a page."""
    _pages[page.file.src_uri] = _DIRECTIVE.sub(_docstring, page.markdown or "")
    return html


def on_post_build(config: MkDocsConfig) -> None:
    """Write the files."""
    nav: Navigation = config.extra.pop("_nav")
    folder = Path(config.site_dir)
    base = (config.site_url or "").rstrip("/")
    base = base + "/" if base else ""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}"]
    texts = []
    for item in nav.items:
        lines += ["", f"## {item.title}", ""]
        for page in _pages_of(item):
            name = page.file.dest_uri.removesuffix("index.html") + "index.md"
            text = _pages[page.file.src_uri]
            (folder / name).write_text(text)
            lines.append(f"- [{page.title}]({base}{name}){_first_sentence(text)}")
            texts.append(f"<!-- {base}{page.url} -->\n\n{text.strip()}\n")
    (folder / "llms.txt").write_text("\n".join(lines) + "\n")
    (folder / "llms-full.txt").write_text("\n\n".join(texts))


def _pages_of(item: object) -> list[Page]:
    if isinstance(item, Section):
        return [page for child in item.children for page in _pages_of(child)]
    return [item] if isinstance(item, Page) else []


def _docstring(directive: re.Match[str]) -> str:
    member = package_of(directive[1])
    text = member.docstring.value if member.docstring else ""
    signature = f"{directive[1]}({', '.join(map(str, _parameters(member)))})"
    summary, _, more = text.partition("\n\n")
    parts = [f"## {directive[1]}", summary, f"```python\n{signature}\n```"]
    if more:
        parts.append(f"```text\n{more}\n```")
    return "\n\n".join(parts) + "\n"


def _parameters(member: object) -> list[str]:
    parameters = getattr(member, "parameters", ())
    return [
        parameter.name + (f"={parameter.default}" if parameter.default is not None else "")
        for parameter in parameters
        if parameter.name != "self"
    ]


def _first_sentence(text: str) -> str:
    for paragraph in text.split("\n\n"):
        paragraph = " ".join(paragraph.split())
        if paragraph and not paragraph.startswith(("#", "```", "|", "<", "!", "*")):
            paragraph = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", paragraph)
            return ": " + re.split(r"(?<=[^.]\.) (?=[A-Z`])", paragraph)[0]
    return ""
