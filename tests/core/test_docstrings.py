"""Every public name is documented, and every example in a docstring runs."""

from __future__ import annotations

import doctest
import inspect

import pytest

import fusedops


def _public() -> list[str]:
    modules = ("memory", "nn", "parallel")
    inside = [
        f"{module}.{name}" for module in modules for name in getattr(fusedops, module).__all__
    ]
    return sorted(set(fusedops.__all__) - {"memory", "nn", "parallel"}) + inside


def _get(name: str) -> object:
    value: object = fusedops
    for part in name.split("."):
        value = getattr(value, part)
    return value


@pytest.mark.parametrize("name", _public())
def test_public_name_is_documented(name: str) -> None:
    documentation = inspect.getdoc(_get(name))
    assert documentation
    if "." in name or name in fusedops.ops.__all__:
        for section in ("Args:", "Raises:", "Example:"):
            assert section in documentation, f"{name} has no {section}"


@pytest.mark.parametrize("name", _public())
def test_examples_run(name: str) -> None:
    finder = doctest.DocTestFinder(recurse=True)
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for example in finder.find(_get(name), name, globs={"fusedops": fusedops}):
        runner.run(example)
    assert runner.summarize(verbose=False).failed == 0
