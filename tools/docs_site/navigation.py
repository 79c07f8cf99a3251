"""mkdocs hook: the entries of ``nav`` that stand for folders.

``folder/`` becomes the pages of the folder, ``index.md`` first and the others by name; a folder
without pages is left out. A generated index is an entry of its own. The files of ``examples`` are
published unchanged. Pages of the repository that are not in ``docs`` are made here, too
(``REPOSITORY_PAGES``).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"

# Files outside docs that are pages of the site, and their names there.
REPOSITORY_PAGES = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "bench/README.md": "benchmark_protocol.md",
}


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Resolve the entries of ``nav``; offer the versions when mike builds the site."""
    from reference import module_pages

    config.nav = _entries(config.nav, {"reference/": [*module_pages()]})
    if "MIKE_DOCS_VERSION" in os.environ:  # only its branch has the list of versions
        config.extra["version"] = {"provider": "mike"}
    if config.repo_url:
        config.edit_uri = "edit/main/docs/"
        config.theme["features"].append("content.action.edit")
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the repository and the examples."""
    for source, page in REPOSITORY_PAGES.items():
        text = (ROOT / source).read_text()
        files.append(File.generated(config, page, content=text))
    for path in examples():
        files.append(File.generated(config, path, abs_src_path=str(ROOT / path)))
    return files


def examples() -> list[str]:
    """Return the paths of the examples, which the site offers as files next to the pages."""
    files = (path for path in (ROOT / "examples").rglob("*") if path.is_file())
    return sorted(
        path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts
    )


def _entries(entries: list[Any], generated: dict[str, list[str]]) -> list[Any]:
    resolved: list[Any] = []
    for entry in entries:
        title, value = next(iter(entry.items())) if isinstance(entry, dict) else (None, entry)
        if isinstance(value, list):
            resolved.append({title: _entries(value, generated)})
        elif value.endswith("/"):
            pages = _folder(value, generated.get(value, []))
            if title is None:
                resolved.extend(pages)
            elif pages:
                resolved.append({title: pages})
        else:
            resolved.append(entry)
    return resolved


def _folder(folder: str, generated: list[str]) -> list[str]:
    written = sorted(str(page.relative_to(DOCS)) for page in (DOCS / folder).glob("*.md"))
    pages = generated + [page for page in written if page not in generated]
    return sorted(pages, key=lambda page: not page.endswith("/index.md"))
