"""``fusedops bench --shape rows=4096,columns=1024``: a size of the user's own, by dimension names.

The names are the parameters of the function that makes the op's benchmark rows
(``Spec.bench_case``), their types those of its annotations.
"""

from __future__ import annotations

import inspect
import types
import typing
from typing import Any

from fusedops.cli.bench import options
from fusedops.specs import BenchCase, Spec
from fusedops.terminal import files

_FLAGS = {"true": True, "false": False}


def case_of(spec: Spec, text: str) -> BenchCase:
    """Return the benchmark row of an op at a size such as ``rows=4096,columns=1024``.

    Raises:
        UserError: a dimension is missing, not known or no size, or the op takes no shape.
    """
    if spec.bench_case is None:
        raise files.UserError(f"{spec.name} has no --shape: --sizes chooses one of its sizes")
    parameters = _parameters(spec)
    values: dict[str, Any] = {}
    for word in text.split(","):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise files.UserError(f"--shape must be {example(spec)}, got {word.strip()!r}")
        options.check_known(name, parameters, f"dimension of {spec.name}")
        if name in values:
            raise files.UserError(f"--shape has {name} twice: give it once")
        values[name] = _value(name, value, parameters[name].annotation)
    required = [
        name for name, parameter in parameters.items() if parameter.default is parameter.empty
    ]
    missing = [name for name in required if name not in values]
    if missing:
        raise files.UserError(
            f"--shape of {spec.name} lacks {', '.join(missing)}: it takes {example(spec)}"
        )
    try:
        return spec.bench_case(**values)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        raise files.UserError(f"--shape {text} of {spec.name}: {error}") from None


def example(spec: Spec) -> str:
    """Return what an op takes, as a user writes it; what may be left out is in brackets."""
    words = []
    for name, parameter in _parameters(spec).items():
        word = f"{name}={_placeholder(parameter.annotation)}"
        words.append(word if parameter.default is parameter.empty else f"[{word}]")
    return ",".join(words)


def _parameters(spec: Spec) -> dict[str, inspect.Parameter]:
    if spec.bench_case is None:
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(spec.bench_case, eval_str=True).parameters
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind in named and name != "headline"
    }


def _kind(annotation: Any) -> Any:
    """Return the type without ``None``, and ``tuple`` for a tuple of sizes."""
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return typing.get_origin(annotation) or annotation


def _placeholder(annotation: Any) -> str:
    return {int: "N", tuple: "NxN", float: "0.1", bool: "true"}.get(_kind(annotation), "WORD")


def _value(name: str, text: str, annotation: Any) -> Any:
    kind = _kind(annotation)
    if kind is bool:
        options.check_known(text, _FLAGS, f"value of {name}")
        return _FLAGS[text]
    if kind is float:
        try:
            return float(text)
        except ValueError:
            raise files.UserError(f"--shape: {name} must be a number, got {text!r}") from None
    if kind is str:
        return text
    sizes = text.split("x") if kind is tuple else [text]
    if not all(size.isdecimal() and 0 < int(size) < 2**31 for size in sizes):
        expected = "sizes from 1 on, such as 16x64" if kind is tuple else "an integer from 1 on"
        raise files.UserError(f"--shape: {name} must be {expected}, got {text!r}")
    numbers = tuple(int(size) for size in sizes)
    return numbers if kind is tuple else numbers[0]
