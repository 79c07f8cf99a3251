"""What the forward of a class computes, as expressions: for classes that no table knows.

The method runs on symbols. An attribute of the module, an operation on it and a call of a child
are nested tuples, written in one way however the code writes them (``x * x``, ``x.pow(2)`` and
``torch.square(x)`` are ``("square", x)``):

* ``("input",)``: the first argument of ``forward``; ``("input", name)``: another one,
* ``("attribute", path)``: a parameter or number of the module, or of one of its attributes,
* ``("call", path, x)``: a child, called on ``x``,
* ``(operation, *arguments)``: a function or method of torch; keywords follow as ``(name, value)``.

No instance is needed. Where the code asks whether an attribute is true, it is run once for either
answer, and each result is a ``Path`` with the answers that lead to it. Code that asks for anything
else (a shape, a value, a type, the state of the process), or that changes something, has no
expression.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
import operator
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf.original_code import with_inner
from fusedops.integrations.hf.same_code import own_attribute

Expression = Any  # nested tuples, numbers, strings, dtypes and ``None``
INPUT = ("input",)

_MOST_PATHS = 8


class Question(NamedTuple):
    """What code asks about an attribute of the module.

    Attributes:
        path: of the attribute.
        comparison: a function of ``operator``, or ``"truth"``.
        value: what it is compared with.
    """

    path: str
    comparison: str = "truth"
    value: float | str | None = None

    def answer(self, module: nn.Module) -> bool:
        """Return the answer for a module in its current state."""
        attribute = value_of(module, self.path)
        if self.comparison == "truth":
            return bool(attribute)
        return bool(getattr(operator, self.comparison)(attribute, self.value))


class Path(NamedTuple):
    """What one way through a forward computes, and the answers that lead to it."""

    result: Expression
    answers: tuple[tuple[Question, bool], ...]

    def holds(self, module: nn.Module) -> bool:
        """Return whether a module takes this way now."""
        return all(question.answer(module) is answer for question, answer in self.answers)


def value_of(module: Any, path: str) -> Any:
    """Return the attribute at a path, which may go through children."""
    return functools.reduce(getattr, path.split("."), module)


def paths_of(cls: type[nn.Module]) -> tuple[Path, ...]:
    """Return the ways through the forward of a class that can be run on symbols."""
    forward: Any = cls.forward
    if not isinstance(forward, FunctionType):
        return ()
    paths: list[Path] = []
    answers: list[tuple[Question, bool]] = []
    for _ in range(_MOST_PATHS):
        run = _Run(cls, answers)
        result = run.result(forward)
        answers = list(run.answers.items())
        if result is not None:
            paths.append(Path(result, tuple(answers)))
        # The next way: the last question that was answered with yes is answered with no.
        while answers and not answers[-1][1]:
            answers.pop()
        if not answers:
            break
        answers[-1] = answers[-1][0], False
    return tuple(paths)


class _NoExpressionError(Exception):
    """The code does something that an expression cannot say."""


def _further_inputs(forward: FunctionType) -> list[str]:
    """Return the names of the arguments behind the first that a call must have."""
    _, first, *others = inspect.signature(forward).parameters.values()
    kinds = (first.POSITIONAL_ONLY, first.POSITIONAL_OR_KEYWORD)
    required = [other for other in others if other.default is other.empty]
    if first.kind not in kinds or any(other.kind not in kinds for other in required):
        raise _NoExpressionError
    return [other.name for other in required]


# What changes something that outlives the call, or needs more than values.
_FORBIDDEN_OPERATIONS = {
    *("CONTAINS_OP", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_ATTR", "IMPORT_NAME"),
    *("DELETE_SUBSCR", "DELETE_GLOBAL", "YIELD_VALUE", "SETUP_FINALLY", "BEFORE_WITH"),
    *("PUSH_EXC_INFO", "LOAD_BUILD_CLASS", "RAISE_VARARGS"),
}
# Attributes of torch that ask for the state of the process, change it, or draw numbers.
_FORBIDDEN_NAMES = {
    *("_C", "cuda", "backends", "distributed", "jit", "compiler", "autograd", "random", "special"),
    *("no_grad", "enable_grad", "inference_mode", "autocast", "finfo", "initial_seed", "data"),
    *(name for name in dir(torch) if name.startswith(("is_", "are_", "get_", "set_", "rand"))),
}


_KNOWN_GLOBALS = (torch, F, nn, math)
_KNOWN_BUILTINS = (float, int, bool, range, tuple, list)


def _is_runnable(function: Any) -> bool:
    """Return whether a function and those that it calls may run on symbols.

    They would not notice all that a function does, nor what a wrapper around it does.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    return (
        not function.__code__.co_freevars
        and _has_expression(function)
        and _compared_with_none(function) is not None
    )


@functools.cache
def _has_expression(function: FunctionType) -> bool:
    for part in with_inner(function.__code__):
        for step in dis.get_instructions(part):
            name = step.argval
            if step.opname in _FORBIDDEN_OPERATIONS:
                return False
            if not step.opname.startswith("LOAD_") or not isinstance(name, str):
                continue
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(name, getattr(builtins, name, None))
                if value is not function and not _is_known(value):
                    return False
            elif step.opname != "LOAD_CONST" and name in _FORBIDDEN_NAMES:
                return False
    return True


@functools.cache
def _compared_with_none(function: FunctionType) -> frozenset[str] | None:
    """Return the attributes that a function compares with ``None``.

    A symbol cannot answer that, so such an attribute is ``None`` on one way and none on the other.

    Returns:
        ``None`` where something else than an attribute is compared.
    """
    steps = [step for step in dis.get_instructions(function) if step.opname not in _NO_OPERATION]
    names: set[str] = set()
    for place, step in enumerate(steps):
        if step.opname == "IS_OP":
            attribute, constant = steps[place - 2], steps[place - 1]
            if constant.opname != "LOAD_CONST" or constant.argval is not None:
                return None
        elif step.opname.endswith(("IF_NONE", "IF_NOT_NONE")):
            attribute = steps[place - 1]
        else:
            continue
        if attribute.opname != "LOAD_ATTR":
            return None
        names.add(attribute.argval)
    return frozenset(names)


_NO_OPERATION = ("CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PRECALL")


def _is_known(value: Any) -> bool:
    """Return whether a global may be read by code that runs on symbols."""
    if isinstance(value, bool | int | float | str | torch.dtype):
        return True
    known = any(value is other for other in (*_KNOWN_GLOBALS, *_KNOWN_BUILTINS))
    return known or (callable(value) and value in _NAMES) or _is_runnable(value)


class _Run:
    """One run of a forward: answers the questions, and calls the methods of the class."""

    def __init__(self, cls: type[nn.Module], answers: list[tuple[Question, bool]]) -> None:
        self.cls = cls
        self.answers = dict(answers)
        self.module = _Module(self, "")
        self.may_be_none: set[str] = set()

    def result(self, forward: FunctionType) -> Expression | None:
        """Return what the forward computes on this way, or ``None`` if that is no expression."""
        try:
            others = [_Symbol(self, ("input", name)) for name in _further_inputs(forward)]
            return _plain(self.call(forward, (_Symbol(self, INPUT), *others), {}))
        except Exception:  # whatever the code does on symbols that it would not do on tensors
            return None

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        """Run a method of the class."""
        if not _is_runnable(function):
            raise _NoExpressionError
        self.may_be_none |= _compared_with_none(function) or set()
        return function(self.module, *args, **kwargs)

    def answer(self, question: Question) -> bool:
        """Return the answer on this way."""
        return self.answers.setdefault(question, True)

    def attribute(self, path: str, name: str) -> Any:
        """Return an attribute of the module, or of something in it."""
        if name.startswith("__"):
            raise AttributeError(name)
        full_path = f"{path}.{name}" if path else name
        if name in self.may_be_none and not self.answer(Question(full_path, "is_not", None)):
            return None
        value = None if path else own_attribute(self.cls, name)
        if value is None:
            return _Module(self, full_path)
        if isinstance(value, property):
            return self.call(value.fget, (), {})
        if isinstance(value, staticmethod):
            raise _NoExpressionError
        if callable(value):
            return lambda *args, **kwargs: self.call(value, args, kwargs)
        return _Module(self, name)


def _no_answer(*_: Any) -> Any:
    raise _NoExpressionError


class _Value:
    """A value of the run, on which operators and functions of torch make others."""

    _run: _Run

    def _expression(self) -> Expression:
        raise NotImplementedError

    def _apply(self, name: str, *args: Any, **kwargs: Any) -> _Symbol:
        return _Symbol(self._run, _operation(name, _plain(args), _plain(kwargs)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Make the expression of a call of torch's function."""
        name = _NAMES.get(func)
        if name is None:
            raise _NoExpressionError
        value = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, _Value))
        return value._apply(name, *args, **(kwargs or {}))

    __iter__ = __len__ = __contains__ = __float__ = __int__ = __index__ = _no_answer
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _no_answer
    __enter__ = __exit__ = __setitem__ = _no_answer
    __hash__ = None  # type: ignore[assignment]


class _Method:
    """What may be a method of a tensor: it is called, and nothing else."""

    def __init__(self, value: _Value, name: str) -> None:
        self._call = functools.partial(value._apply, name, value)

    def __call__(self, *args: Any, **kwargs: Any) -> _Symbol:
        return self._call(*args, **kwargs)

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __bool__ = __getattr__ = _no_answer
    __hash__ = None  # type: ignore[assignment]


def _arithmetic(name: str, *, reflected: bool = False) -> Callable[[_Value, Any], _Symbol]:
    def calculate(self: _Value, other: Any) -> _Symbol:
        return self._apply(name, other, self) if reflected else self._apply(name, self, other)

    return calculate


for _name, _method in (
    *(("add", "add"), ("mul", "mul"), ("sub", "sub"), ("div", "truediv"), ("pow", "pow")),
):
    setattr(_Value, f"__{_method}__", _arithmetic(_name))
    setattr(_Value, f"__r{_method}__", _arithmetic(_name, reflected=True))


class _Module(_Value):
    """The module, or an attribute of it whose kind is not known: a child, a tensor, a number."""

    def __init__(self, run: _Run, path: str) -> None:
        self._run, self._path = run, path

    def _expression(self) -> Expression:
        return "attribute", self._path

    def __getattr__(self, name: str) -> Any:
        if name in _METHODS and self._path:
            return _Method(self, name)
        return self._run.attribute(self._path, name)

    def __call__(self, *args: Any, **kwargs: Any) -> _Symbol:
        if kwargs or len(args) != 1 or not self._path:
            raise _NoExpressionError
        return _Symbol(self._run, ("call", self._path, _plain(args[0])))

    def __bool__(self) -> bool:
        return self._run.answer(Question(self._path))


def _comparison(name: str) -> Callable[[_Module, Any], bool]:
    def compare(self: _Module, other: Any) -> bool:
        if not isinstance(other, int | float | str):
            raise _NoExpressionError
        return self._run.answer(Question(self._path, name, other))

    return compare


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Module, f"__{_name}__", _comparison(_name))


class _Symbol(_Value):
    """The input, or a result."""

    def __init__(self, run: _Run, expression: Expression) -> None:
        self._run, self._content = run, expression

    def _expression(self) -> Expression:
        return self._content

    def __getattr__(self, name: str) -> Any:
        if name == "dtype":
            return _Symbol(self._run, ("dtype", self._content))
        if name not in _METHODS:
            raise _NoExpressionError
        return _Method(self, name)

    def _parts(self) -> list[_Symbol]:
        match self._content:
            case ("chunk", _, int(count), ("dim", -1)):
                return [_Symbol(self._run, ("part", self._content, i)) for i in range(count)]
        raise _NoExpressionError

    def __iter__(self) -> Iterator[_Symbol]:
        return iter(self._parts())

    def __getitem__(self, index: Any) -> Any:
        return self._parts()[index]

    __bool__ = _no_answer


def _plain(value: Any) -> Any:
    """Return a value of the run as an expression."""
    if isinstance(value, _Value):
        return value._expression()
    if isinstance(value, tuple | list):
        return tuple(_plain(element) for element in value)
    if isinstance(value, dict):
        return {name: _plain(element) for name, element in value.items()}
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise _NoExpressionError


# Methods of tensors that have an expression, and functions of torch: each under one name.
_METHODS = {
    *("add", "mul", "sub", "div", "pow", "square", "sqrt", "rsqrt", "mean", "var", "chunk", "size"),
    *("to", "float", "type", "type_as", "sigmoid", "tanh", "relu", "contiguous"),
}
_NAMES: dict[Any, str] = {
    function: name
    for home, names in (
        (torch, _METHODS | {"multiply", "divide", "rms_norm", "layer_norm", "true_divide"}),
        (F, {"silu", "gelu", "relu", "sigmoid", "tanh", "dropout", "layer_norm", "rms_norm"}),
    )
    for name in names
    if (function := getattr(home, name, None)) is not None
}
_SIGNATURES = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
    "dropout": ("input", "p", "training", "inplace"),
    "gelu": ("input", "approximate"),
    "silu": ("input", "inplace"),
    "relu": ("input", "inplace"),
    "mean": ("input", "dim", "keepdim"),
    "chunk": ("input", "chunks", "dim"),
    "pow": ("input", "exponent"),
    "to": ("input", "dtype"),
    "type": ("input", "dtype"),
}
_SYNONYMS = {"multiply": "mul", "divide": "div", "true_divide": "div", "type": "to"}


def _operation(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Expression:
    """Return an operation in the one way in which it is written here."""
    if name in _SIGNATURES:
        names = _SIGNATURES[name]
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or not given.keys() <= set(names):
            raise _NoExpressionError
    elif kwargs:
        raise _NoExpressionError
    name = _SYNONYMS.get(name, name)
    match name:
        case "float":
            return "cast", args[0], torch.float32
        case "type_as":
            return "cast", args[0], ("dtype", args[1])
        case "to":
            return "cast", given["input"], given["dtype"]
        case "pow":
            return _power(given["input"], given["exponent"])
        case "mul" if args[0] == args[1]:
            return "square", args[0]
        case "div":
            return _quotient(*args)
        case "mean":
            if given.get("keepdim") is not True or given.get("dim") not in (-1, (-1,)):
                raise _NoExpressionError
            return "mean", given["input"]
        case "chunk":
            return "chunk", given["input"], given["chunks"], ("dim", given.get("dim", 0))
        case "layer_norm" | "rms_norm" | "dropout" | "gelu" | "silu" | "relu":
            rest = [(key, given[key]) for key in _SIGNATURES[name][1:] if key in given]
            return name, given["input"], *rest
    return name, *args


def _power(base: Expression, exponent: Expression) -> Expression:
    if exponent == 2:
        return "square", base
    if exponent == -0.5:
        return "rsqrt", base
    return "pow", base, exponent


def _quotient(above: Expression, below: Expression) -> Expression:
    match below:
        case ("sqrt", root):
            inverse = ("rsqrt", root)
            return inverse if above == 1 else ("mul", above, inverse)
    return "div", above, below
