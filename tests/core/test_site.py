"""The documentation site: what its build does to pages, and the check of links that it relies on.

``make site`` builds it; ``make site-check`` looks at every page in a browser.
"""

from __future__ import annotations

from pathlib import Path

from docs_site.links import broken_links
from docs_site.page_text import indent_lists, split_fences, without_comments


def test_what_belongs_to_an_item_is_indented_by_four_columns() -> None:
    page = """1. Step:

   * nested
     text of it

   ```python
   * code
     more
   ```

Text.

    code
"""
    indented = """1. Step:

    * nested
        text of it

    ```python
    * code
      more
    ```

Text.

    code
"""
    assert indent_lists(page) == indented


def test_parts_are_the_page_and_comments_with_fences_are_one_part() -> None:
    page = "a\n<!-- run first:\n```\n-->\n```python\n<!-- code -->\n```\nb\n"
    parts = split_fences(page)
    assert "".join(text for text, _ in parts) == page
    assert [text for text, fenced in parts if fenced] == ["```python\n<!-- code -->\n```\n"]
    assert [without_comments(text) for text, fenced in parts if not fenced] == ["a\n", "b\n"]


def _site(folder: Path, **pages: str) -> Path:
    for name, body in pages.items():
        (folder / name).mkdir(parents=True)
        (folder / name / "index.html").write_text(f"<html><body>{body}</body></html>")
    return folder


def test_broken_links_and_scripts_from_elsewhere_are_reported(tmp_path: Path) -> None:
    site = _site(
        tmp_path,
        a='<a href="../b/#there">x</a><a href="#here" id="here">y</a><a href="https://e.org">z</a>',
        b='<h1 id="there">t</h1><a href="../a/">back</a><a href="/docs/a/">absolute</a>',
    )
    assert broken_links(site, "/docs/") == []
    site = _site(
        tmp_path / "other",
        a='<a href="../c/">x</a><a href="../b/#gone">y</a><img src="none.png">'
        '<script src="https://e.org/x.js"></script>',
        b="",
    )
    assert broken_links(site) == [
        "a/index.html: ../b/#gone: the page has no such anchor",
        "a/index.html: ../c/",
        "a/index.html loads https://e.org/x.js from elsewhere",
        "a/index.html: none.png",
    ]
