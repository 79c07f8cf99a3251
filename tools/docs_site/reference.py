"""mkdocs hook: a page of reference for every public module, from docstrings that griffe reads.

Griffe parses the source and imports nothing, so the site is built without torch. A public name is
described once, at its *home*: an op on its own page (``docs/ops``), any other name on the page of
the first module of ``MODULES`` that exports it. The pages of other modules that export it have a
row with an anchor and a link. The build fails if a name of ``tests/core/public_api.txt`` has no
anchor.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
RECORD = ROOT / "tests" / "core" / "public_api.txt"
OP_PAGES = ROOT / "docs" / "ops"
# The public modules in the order of the navigation, and the page that explains each.
MODULES = {
    "fusedops": "patching.md",
    "fusedops.ops": "operators.md",
    "fusedops.library": "tutorials/write_an_op.md",
    "fusedops.nn": "operators.md",
    "fusedops.optim": "optim.md",
    "fusedops.memory": "memory.md",
    "fusedops.models": "models.md",
    "fusedops.parallel": "parallel.md",
    "fusedops.planner": "planning.md",
    "fusedops.train": "training.md",
    "fusedops.cpu": "half_precision.md",
    "fusedops.checkpoint": "checkpoint.md",
    "fusedops.generation": "generation.md",
    "fusedops.testing": "verify.md",
    "fusedops.profiler": "observe.md",
    "fusedops.integrations": "integrations.md",
    "fusedops.integrations.trainer": "integrations.md",
    "fusedops.integrations.accelerate": "integrations.md",
    "fusedops.integrations.lightning": "integrations.md",
    "fusedops.integrations.deepspeed": "integrations.md",
    "fusedops.integrations.megatron": "integrations.md",
    "fusedops.integrations.kernels": "integrations.md",
    "fusedops.integrations.onnx": "export.md",
}
# The first to export a name is where it is described, and ops are described as fusedops.ops.
_HOMES = ("fusedops.ops", *(module for module in MODULES if module != "fusedops.ops"))


def module_pages() -> Iterator[str]:
    """Yield the names of the pages of the reference."""
    yield "reference/index.md"
    yield from (f"reference/{module}.md" for module in MODULES)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the reference."""
    for name, text in reference_pages().items():
        files.append(File.generated(config, name, content=text))
    return files


def on_post_build(config: MkDocsConfig) -> None:
    """Fail unless every public name has an anchor in the reference."""
    folder = Path(config.site_dir)
    pages = [*folder.glob("reference/**/*.html"), *folder.glob("ops/**/*.html")]
    anchors = {name for page in pages for name in re.findall(r'\bid="([^"]+)"', page.read_text())}
    missing = [name for name in public_names() if name not in anchors]
    if missing:
        raise PluginError(f"public names that are missing in the reference: {', '.join(missing)}")


def public_names() -> list[str]:
    """Return the full names of ``tests/core/public_api.txt``."""
    return [re.split(r"[(:]", line)[0] for line in RECORD.read_text().splitlines()]


@functools.cache
def package() -> griffe.Object | griffe.Alias:
    """Return the package as griffe reads it."""
    extensions = griffe.load_extensions(str(Path(__file__).with_name("docstrings.py")))
    package = griffe.load(
        "fusedops", search_paths=[ROOT], allow_inspection=False, extensions=extensions
    )
    modules = {f"fusedops.{name}" for name in package.exports or () if _is_module(package, name)}
    if missing := modules - {*MODULES}:
        raise PluginError(
            f"tools/docs_site/reference.py: add to MODULES: {', '.join(sorted(missing))}"
        )
    return package


def _is_module(package: griffe.Object | griffe.Alias, name: str) -> bool:
    member = package.members.get(str(name))
    return member is not None and _target(member).is_module


def _target(member: griffe.Object | griffe.Alias) -> griffe.Object | griffe.Alias:
    return member.final_target if member.is_alias else member


def exports(module: str) -> dict[str, griffe.Object | griffe.Alias]:
    """Return the public names of a module and what they are, in alphabetical order."""
    loaded = package()[module.removeprefix("fusedops.")] if module != "fusedops" else package()
    names = loaded.exports
    if names is None:  # a module without __all__: what it defines
        names = [
            name
            for name, member in loaded.members.items()
            if not name.startswith("_") and not member.is_alias and member.has_docstring
        ]
    return {name: loaded.members[name] for name in sorted(map(str, names), key=_by_name)}


def _by_name(name: str) -> tuple[str, str]:
    return name.lower(), name


@functools.cache
def homes() -> dict[str, str]:
    """Return the name under which an object is described, by the path of its definition."""
    described: dict[str, str] = {}
    for module in _HOMES:
        for name, member in exports(module).items():
            described.setdefault(_target(member).path, f"{module}.{name}")
    return described


def reference_pages() -> dict[str, str]:
    """Return the Markdown of each page."""
    rows = "\n".join(
        f"| [`{module}`]({module}.md) | {_summary(package_of(module))} |" for module in MODULES
    )
    pages = {"reference/index.md": INDEX.format(rows=rows)}
    return pages | {f"reference/{module}.md": module_page(module) for module in MODULES}


def package_of(module: str) -> griffe.Object | griffe.Alias:
    """Return a module by its name."""
    return package() if module == "fusedops" else package()[module.removeprefix("fusedops.")]


def module_page(module: str) -> str:
    """Return the page of a module: its docstring, a table of its names, the names at home here."""
    rows, described = [], []
    for name, member in exports(module).items():
        target = _target(member)
        full_name = f"{module}.{name}"
        if target.is_module:
            link, anchor = f"{target.path}.md", full_name
        else:
            home = homes()[target.path]
            link, anchor = _link(home, module), None if home == full_name else full_name
            if link.startswith("#"):
                described.append(f"::: {full_name}")
        mark = f'<a id="{anchor}"></a>' if anchor else ""
        rows.append(f"| {mark}[`{name}`]({link}) | {_summary(target)} |")
    table = "\n".join(["| name | what it is |", "|---|---|", *rows])
    return "\n\n".join([f"# {module}", _introduction(module), table, *described]) + "\n"


def _introduction(module: str) -> str:
    """Return what the docstring of a module says to its users, and a link to the guide.

    The paragraph "In reading order" is for those who read the source.
    """
    docstring = package_of(module).docstring
    text = _without_file(docstring.value if docstring else "")
    users = [part for part in text.split("\n\n") if not part.startswith("In reading order")]
    guide = f"This page lists the public names; [the guide](../{MODULES[module]}) explains them."
    return "\n\n".join([*users, guide])


def _without_file(text: str) -> str:
    """Leave out the name of the page at the end of a docstring: the site has a link."""
    return re.sub(r" \(``[\w/]+\.md``\)", "", text)


def _link(home: str, module: str) -> str:
    owner, _, name = home.rpartition(".")
    if owner == "fusedops.ops" and (OP_PAGES / f"{name}.md").exists():
        return f"../ops/{name}.md#{home}"
    return f"#{home}" if owner == module else f"{owner}.md#{home}"


def _summary(member: griffe.Object | griffe.Alias) -> str:
    """Return the first sentence of a docstring, for a cell of a table."""
    if not member.has_docstring:
        return ""
    paragraph = " ".join(member.docstring.value.split("\n\n")[0].split())
    return _without_file(paragraph).replace("|", "\\|")


INDEX = """# API reference

Every public name of fusedops, with signature, shapes, errors and source. What is not on these pages
is internal and may change without notice; [the changelog](../changelog.md) says how public names
are deprecated. The [ops](../operators.md) have pages of their own.

| module | what it contains |
|---|---|
{rows}
"""
