"""Which functions and methods count as the same code, and which do not."""

from __future__ import annotations

import functools
import textwrap
from typing import Any

import pytest
from torch import nn

from fusedops.integrations.hf.same_code import same_function, same_methods

ORIGINAL = """
    import math
    import torch
    from torch import nn

    LIMIT = 4.0

    def scaled(x, factor=2.0):
        "Scale."
        return [value * factor for value in x]

    def decorated(function):
        def wrapper(*args, **kwargs):
            return function(*args, **kwargs)
        return wrapper

    class Base(nn.Module):
        def helper(self, x):
            return scaled(x) + [LIMIT]

    class Layer(Base):
        def __init__(self, size):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(size))

        @property
        def width(self):
            return self.weight.shape[0]

        @decorated
        def forward(self, x, mask=None):
            out = self.helper(x)
            try:
                first = out[0]
            except IndexError:
                first = 0.0
            for value in out:
                if value > 1:
                    first = first + value
            return first - self.width * math.sqrt(2.0)
"""


def _module(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {"__name__": "made"}
    exec(textwrap.dedent(source), namespace)
    return namespace


def _is_same(source: str) -> bool:
    return same_methods(_module(source)["Layer"], _module(ORIGINAL)["Layer"], "forward")


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("", ""),
        ('"Scale."', '"Another docstring."'),
        ('"Scale."', "pass"),
        ("x, factor=2.0", "x: list, factor: float = 2.0"),
        ("scaled", "multiplied"),
        ("Base", "Parent"),
        ("LIMIT", "MOST"),
        ("first", "result"),
        ("            return first -", "\n            # A comment.\n            return first -"),
        ("self.weight = nn.Parameter(torch.ones(size))", "self.weight = None"),  # is not forward's
    ],
)
def test_names_docstrings_and_annotations_do_not_count(old: str, new: str) -> None:
    assert _is_same(ORIGINAL.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("- self.width", "+ self.width"),
        ("value > 1", "value >= 1"),
        ("value > 1", "value > 1.0"),
        ("value > 1", "value > True"),
        ("factor=2.0", "factor=3.0"),
        ("factor=2.0", "scale=2.0"),  # callers may pass it by name
        ("mask=None", "mask=0"),
        ("LIMIT = 4.0", "LIMIT = 5.0"),
        ("value * factor", "factor * value"),
        ("math.sqrt(2.0)", "math.cbrt(2.0)"),
        ("math.sqrt(2.0)", "math.sqrt(-0.0)"),
        ("IndexError", "KeyError"),
        ("self.weight.shape[0]", "self.weight.shape[1]"),
        ("function(*args, **kwargs)", "function(*args)"),
        ("        @decorated\n", ""),
        ("[LIMIT]", "[-LIMIT]"),
        ("first = out[0]", "first = out[0]; self.count = 1"),
    ],
)
def test_one_token_of_what_runs_is_another_code(old: str, new: str) -> None:
    assert ORIGINAL.count(old) == 1, "the test changes one place"
    assert not _is_same(ORIGINAL.replace(old, new))


def test_exchanged_arguments_and_outer_variables_are_another_code() -> None:
    def difference(a: Any, b: Any) -> Any:
        return a - b

    def exchanged(a: Any, b: Any) -> Any:
        return b - a

    def closed(first: Any, second: Any, *, swapped: bool) -> Any:
        def inner() -> Any:
            return first - second

        def other() -> Any:
            return second - first

        return other if swapped else inner

    assert not same_function(difference, exchanged)
    assert same_function(closed(1, 2, swapped=False), closed(1, 2, swapped=False))
    assert not same_function(closed(1, 2, swapped=False), closed(1, 3, swapped=False))
    assert not same_function(closed(1, 2, swapped=False), closed(1, 2, swapped=True))
    assert not same_function(functools.partial(difference, 1), functools.partial(difference, 2))


def test_a_function_that_calls_itself_is_the_same_as_a_copy() -> None:
    source = "def walk(n):\n    return 0 if n == 0 else 1 + {}(n - 1)\n"
    mine = _module(source.format("walk"))["walk"]
    theirs = _module(source.format("walk").replace("walk", "step"))["step"]
    assert same_function(mine, theirs)


def test_what_super_finds_counts() -> None:
    source = """
        from torch import nn
        class Base(nn.Module):
            def forward(self, x):
                return x + 1
        class Layer(Base):
            def forward(self, x):
                return super().forward(x) * 2
    """
    layers = [_module(text)["Layer"] for text in (source, source, source.replace("x + 1", "x + 2"))]
    assert same_methods(layers[0], layers[1], "forward")
    assert not same_methods(layers[0], layers[2], "forward")


def test_compiled_functions_are_the_same_as_themselves_alone() -> None:
    assert same_function(len, len) and not same_function(len, repr)
    assert not same_function(nn.functional.gelu, len)
