"""The examples in docstrings of planner, models and checkpoint run."""

from __future__ import annotations

import doctest
from types import ModuleType

import pytest

from fusedops import checkpoint, models, planner
from fusedops.planner import search
from fusedops.terminal import sizes, svg


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
