"""Public names of planner, models and checkpoint are documented, and their examples run."""

from __future__ import annotations

import doctest
import inspect
from types import ModuleType
from typing import Any

import pytest

from fusedops import checkpoint, models, planner
from fusedops.planner import search
from fusedops.terminal import sizes, svg

PUBLIC = [(module, name) for module in (planner, models, checkpoint) for name in module.__all__]


@pytest.mark.parametrize(
    ("module", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value)
)
def test_public_names_are_documented(module: ModuleType, name: str) -> None:
    value: Any = getattr(module, name)
    if name in ("PRESETS", "TINY"):
        return
    documentation = inspect.getdoc(value) or ""
    assert documentation
    takes = name not in ("CheckpointError", "GuardError")
    if takes and not name.startswith("show_") and inspect.signature(value).parameters:
        assert any(word in documentation for word in ("Args:", "Attributes:", "Raises:"))


@pytest.mark.parametrize("module", [search, sizes, svg, planner, models, checkpoint])
def test_examples_run(module: ModuleType) -> None:
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    found = [module, *(getattr(module, name) for name in getattr(module, "__all__", ()))]
    tests = [test for each in found for test in doctest.DocTestFinder().find(each, "example")]
    examples = [each for each in tests if each.examples]
    for example in examples:
        example.globs.update({name: getattr(module, name) for name in dir(module)})
        runner.run(example)
    assert examples and runner.summarize(verbose=False).failed == 0
