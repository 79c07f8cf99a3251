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
        _, expected, parse = _KINDS[_kind(parameters[name])]
        try:
            values[name] = parse(value)
        except (KeyError, ValueError):
            raise files.UserError(f"--shape: {name} must be {expected}, got {value!r}") from None
    missing = [name for name in parameters if name not in values and _required(parameters[name])]
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
        word = f"{name}={_KINDS[_kind(parameter)][0]}"
        words.append(word if _required(parameter) else f"[{word}]")
    return ",".join(words)


def _parameters(spec: Spec) -> dict[str, inspect.Parameter]:
    if spec.bench_case is None:
        return {}
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    parameters = inspect.signature(spec.bench_case, eval_str=True).parameters.values()
    return {one.name: one for one in parameters if one.kind in named}


def _required(parameter: inspect.Parameter) -> bool:
    return parameter.default is parameter.empty


def _kind(parameter: inspect.Parameter) -> Any:
    """Return the type without ``None``, and ``tuple`` for a tuple of sizes."""
    annotation = parameter.annotation
    if isinstance(annotation, types.UnionType):
        annotation = next(kind for kind in typing.get_args(annotation) if kind is not type(None))
    return typing.get_origin(annotation) or annotation


def _size(text: str) -> int:
    if not (text.isdecimal() and 0 < int(text) < 2**31):
        raise ValueError
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(_size, text.split("x")))


# By the type of a dimension: how a user writes it, what it must be, and how it is read.
_KINDS: dict[Any, tuple[str, str, Any]] = {
    int: ("N", "an integer from 1 on", _size),
    tuple: ("NxN", "sizes from 1 on, such as 16x64", _sizes),
    float: ("0.1", "a number", float),
    bool: ("true", "true or false", {"true": True, "false": False}.__getitem__),
    str: ("WORD", "a word", str),
}
