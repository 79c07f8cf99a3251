"""What the forward of a class computes, as expressions: for classes that no table knows.

The method runs on symbols. An attribute of the module, an operation on it and a call of a child
are nested tuples, written in one way however the code writes them (``torch_operations.py``):

* ``("input",)``: the first argument of ``forward``; ``("input", name)``: another one,
* ``("attribute", path)``: a parameter or number of the module, or of one of its attributes,
* ``("call", path, x)``: a child, called on ``x``,
* ``(operation, *arguments)``: a function or method of torch; keywords follow as ``(name, value)``.

No instance is needed. Where the code asks something about an attribute, it is run once for either
answer, and each result is a ``Path`` with the answers that lead to it. Code that asks for a size
other than the last or the state of the process, or that changes something, has no expression.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import math
import operator
from collections.abc import Iterator
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf.class_table import own_attribute, weakly_cached
from fusedops.integrations.hf.original_code import with_globals, with_inner
from fusedops.integrations.hf.torch_operations import (
    METHODS,
    NAMES,
    Expression,
    NoExpressionError,
    operation,
)

INPUT = ("input",)

_MOST_PATHS = 8
_NO_OPERATION = ("CACHE", "NOP", "RESUME", "EXTENDED_ARG", "PRECALL")


class Question(NamedTuple):
    """What code asks about an attribute of the module."""

    path: str  # of the attribute
    # A function of ``operator``; ``"truth"``; ``"tensor"``: whether it is one; or ``"one dtype"``:
    # whether all floating parameters of the module have one dtype; or ``"halves"``: whether the
    # layer at ``path`` has two times ``value`` outputs
    comparison: str = "truth"
    value: Expression = None  # what it is compared with

    def answer(self, module: nn.Module) -> bool:
        """Return the answer for a module in its current state."""
        if self.comparison == "one dtype":
            return len(set(_dtypes(module))) <= 1
        attribute = value_of(module, self.path)
        if self.comparison == "tensor":
            return isinstance(attribute, torch.Tensor)
        if self.comparison == "halves":
            return bool(getattr(attribute, "out_features", None) == 2 * at(module, self.value))
        if self.comparison == "truth":
            return bool(attribute)
        return bool(getattr(operator, self.comparison)(attribute, self.value))


def _dtypes(module: nn.Module) -> Iterator[torch.dtype]:
    """Yield the dtype of each floating parameter; torch's walk takes five times as long."""
    for parameter in module._parameters.values():
        if parameter is not None and parameter.is_floating_point():
            yield parameter.dtype
    for child in module._modules.values():
        if child is not None and (child._parameters or child._modules):
            yield from _dtypes(child)


class Path(NamedTuple):
    """What one way through a method computes."""

    result: Expression
    answers: tuple[tuple[Question, bool], ...] = ()  # those that lead to it

    def holds(self, module: nn.Module) -> bool:
        """Return whether a module takes this way now."""
        return all(question.answer(module) is answer for question, answer in self.answers)


def value_of(module: Any, path: str) -> Any:
    """Return the attribute at a path, which may go through children."""
    if "." not in path:
        return getattr(module, path)
    return functools.reduce(getattr, path.split("."), module)


def at(module: Any, place: Any) -> Any:
    """Return what is at ``("attribute", path)`` of a module; anything else is a value itself."""
    return value_of(module, place[1]) if isinstance(place, tuple) else place


def paths_of(cls: type[nn.Module], method: str = "forward") -> tuple[Path, ...]:
    """Return the ways through a method of a class that can be run on symbols.

    Arguments that may be left out have their defaults.
    """
    function: Any = getattr(cls, method)
    if not isinstance(function, FunctionType):
        return ()
    paths: list[Path] = []
    answers: list[tuple[Question, bool]] = []
    for _ in range(_MOST_PATHS):
        run = _Run(cls, answers)
        result = run.result(function)
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


# What changes something that outlives the call, or needs more than values.
_FORBIDDEN_OPERATIONS = {
    *("CONTAINS_OP", "STORE_ATTR", "STORE_SUBSCR", "STORE_GLOBAL", "DELETE_ATTR", "IMPORT_NAME"),
    *("DELETE_SUBSCR", "DELETE_GLOBAL", "YIELD_VALUE", "SETUP_FINALLY", "BEFORE_WITH"),
    *("PUSH_EXC_INFO", "LOAD_BUILD_CLASS", "RAISE_VARARGS", "SETUP_WITH", "LOAD_SPECIAL"),
}
# Attributes of torch that ask for the state of the process, change it, or draw numbers.
_FORBIDDEN_NAMES = {
    *("_C", "cuda", "backends", "distributed", "jit", "compiler", "autograd", "random", "special"),
    *("no_grad", "enable_grad", "inference_mode", "autocast", "finfo", "initial_seed", "data"),
    *(name for name in dir(torch) if name.startswith(("is_", "are_", "get_", "set_", "rand"))),
}
_KNOWN_GLOBALS = (torch, F, nn, math, float, int, bool, range, tuple, list)


def _is_runnable(function: Any, *, is_method: bool = False) -> bool:
    """Return whether a function and those that it calls may run on symbols.

    They would not notice all that a function does, nor what a wrapper around it does. A method of
    the class may call ``isinstance``, which is answered by the run. Where it calls another function
    that may not run on symbols, the way has no expression.
    """
    if not isinstance(function, FunctionType) or hasattr(function, "__wrapped__"):
        return False
    return (
        not function.__code__.co_freevars
        and _has_expression(function, is_method)
        and _compared_with_none(function) is not None
    )


@weakly_cached
def _has_expression(function: FunctionType, is_method: bool) -> bool:
    for part in with_inner(function.__code__):
        for step in dis.get_instructions(part):
            name = step.argval
            if step.opname in _FORBIDDEN_OPERATIONS:
                return False
            if not step.opname.startswith("LOAD_") or not isinstance(name, str):
                continue
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                value = function.__globals__.get(name, getattr(builtins, name, None))
                # The run of a method answers for these.
                answered = is_method and (value is isinstance or _is_refused(value))
                if value is not function and not answered and not _is_known(value):
                    return False
            elif step.opname != "LOAD_CONST" and name in _FORBIDDEN_NAMES:
                return False
    return True


@weakly_cached
def _compared_with_none(function: FunctionType) -> frozenset[str] | None:
    """Return the attributes that a function compares with ``None``.

    A symbol cannot answer that, so such an attribute is ``None`` on one way and none on the other.
    An argument with a default that is not assigned again has its default or is a symbol. If
    something else is compared, there is no answer: ``None``.
    """
    steps = [step for step in dis.get_instructions(function) if step.opname not in _NO_OPERATION]
    with_default = {
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is not parameter.empty
    } - {step.argval for step in steps if step.opname == "STORE_FAST"}
    names: set[str] = set()
    for place, step in enumerate(steps):
        if step.opname == "IS_OP":
            compared, constant = steps[place - 2], steps[place - 1]
            if constant.opname != "LOAD_CONST" or constant.argval is not None:
                return None
        elif step.opname.endswith(("IF_NONE", "IF_NOT_NONE")):
            compared = steps[place - 1]
        else:
            continue
        if compared.opname == "LOAD_ATTR":
            names.add(compared.argval)
        elif not compared.opname.startswith("LOAD_FAST") or compared.argval not in with_default:
            return None
    return frozenset(names)


def _is_known(value: Any) -> bool:
    """Return whether a global may be read by code that runs on symbols."""
    if isinstance(value, bool | int | float | str | torch.dtype):
        return True
    if any(value is other for other in _KNOWN_GLOBALS):
        return True
    return (callable(value) and value in NAMES) or _is_runnable(value)


def _is_refused(value: Any) -> bool:
    """Return whether a global is a function that may not run on symbols."""
    return isinstance(value, FunctionType) and not _is_runnable(value)


class _Run:
    """One run of a forward: answers the questions, and calls the methods of the class."""

    def __init__(self, cls: type[nn.Module], answers: list[tuple[Question, bool]]) -> None:
        self.cls = cls
        self.answers = dict(answers)
        self.module = _Module(self, ("attribute", ""))
        self.may_be_none: set[str] = set()

    def result(self, function: FunctionType) -> Expression | None:
        """Return what a method computes on this way, or ``None`` if that is no expression."""
        try:
            others = {
                parameter.name: _Symbol(self, ("input", parameter.name))
                for parameter in list(inspect.signature(function).parameters.values())[2:]
                if parameter.default is parameter.empty
                and parameter.kind is not parameter.VAR_KEYWORD
            }
            return _plain(self.call(function, (_Symbol(self, INPUT),), others))
        except Exception:  # whatever the code does on symbols that it would not do on tensors
            return None

    def call(self, function: Any, args: Any, kwargs: Any) -> Any:
        if not _is_runnable(function, is_method=True):
            raise NoExpressionError
        self.may_be_none |= _compared_with_none(function) or set()
        read = {name: function.__globals__.get(name) for name in function.__code__.co_names}
        others = {name: _no_answer for name, value in read.items() if _is_refused(value)}
        namespace = function.__globals__ | {"isinstance": self.is_instance} | others
        return with_globals(function, namespace)(self.module, *args, **kwargs)

    def is_instance(self, value: Any, kinds: Any) -> bool:
        """Answer whether an attribute is a tensor."""
        if type(value) is not _Module or not value._path or kinds is not torch.Tensor:
            raise NoExpressionError
        return self.answer(Question(value._path, "tensor"))

    def answer(self, question: Question) -> bool:
        return self.answers.setdefault(question, True)

    def attribute(self, path: str, name: str) -> Any:
        """Return an attribute of the module, or of something in it."""
        if name.startswith("__"):
            raise AttributeError(name)
        full_path = f"{path}.{name}" if path else name
        if name in self.may_be_none and not self.answer(Question(full_path, "is_not", None)):
            return None
        value = None if path else own_attribute(self.cls, name)
        if isinstance(value, property | staticmethod):
            raise NoExpressionError
        if callable(value):
            return lambda *args, **kwargs: self.call(value, args, kwargs)
        return _Module(self, ("attribute", full_path))


def _no_answer(*_: Any, **__: Any) -> Any:
    raise NoExpressionError


class _Value:
    """A value of the run, on which operators and functions of torch make others."""

    def __init__(self, run: _Run, content: Expression) -> None:
        self._run, self._content = run, content

    def _apply(self, name: str, *args: Any, **kwargs: Any) -> _Symbol:
        return _Symbol(self._run, operation(name, _plain(args), _plain(kwargs)))

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = NAMES.get(func)
        if name is None:
            raise NoExpressionError
        value = next(arg for arg in (*args, *(kwargs or {}).values()) if isinstance(arg, _Value))
        return value._apply(name, *args, **(kwargs or {}))

    def __neg__(self) -> _Symbol:
        return self._apply("neg", self)

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


for _name, _method in (
    *(("add", "add"), ("mul", "mul"), ("sub", "sub"), ("div", "truediv"), ("pow", "pow")),
    ("matmul", "matmul"),
):
    setattr(
        _Value, f"__{_method}__", lambda self, other, name=_name: self._apply(name, self, other)
    )
    setattr(
        _Value, f"__r{_method}__", lambda self, other, name=_name: self._apply(name, other, self)
    )


class _Module(_Value):
    """The module, or an attribute of it whose kind is not known: a child, a tensor, a number."""

    @property
    def _path(self) -> str:
        return str(self._content[1])

    def __getattr__(self, name: str) -> Any:
        if name in METHODS and self._path:
            return _Method(self, name)
        return self._run.attribute(self._path, name)

    __getitem__ = _no_answer

    def __call__(self, *args: Any, **kwargs: Any) -> _Symbol:
        if kwargs or len(args) != 1 or not self._path:
            raise NoExpressionError
        return _Symbol(self._run, ("call", self._path, _plain(args[0])))

    def __bool__(self) -> bool:
        return self._run.answer(Question(self._path))

    def _compare(self, name: str, other: Any) -> bool:
        if type(other) not in (bool, int, float, str, torch.dtype):
            raise NoExpressionError
        return self._run.answer(Question(self._path, name, other))


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(_Module, f"__{_name}__", functools.partialmethod(_Module._compare, _name))


class _Symbol(_Value):
    """The input, or a result."""

    def __getattr__(self, name: str) -> Any:
        if name == "dtype":
            return _Symbol(self._run, ("dtype", self._content))
        if name == "shape":
            return _Shape(_Symbol(self._run, ("size", self._content, -1)))
        if name == "split":
            return self._halves
        if name not in METHODS:
            raise NoExpressionError
        return _Method(self, name)

    def __eq__(self, other: Any) -> Any:
        """Return whether the dtype of a result is that of a parameter.

        A cast changes no value where it is, so that each answer is right for any module; of one
        dtype alone, the products around it may be one op.
        """
        is_parameters = type(other) is _Module and other._path.endswith(".dtype")
        if self._content[0] != "dtype" or not is_parameters:
            raise NoExpressionError
        return self._run.answer(Question("", "one dtype"))

    def __ne__(self, other: Any) -> Any:
        return not self == other

    __hash__ = None

    def _halves(self, split_size: Any, dim: int = 0) -> list[_Symbol]:
        """Return what ``split`` makes of the result of a child, if that is two halves."""
        match self._content, _plain(split_size):
            case ("call", child, _), int() | ("attribute", _) as size if dim == -1:
                if self._run.answer(Question(child, "halves", size)):
                    return _Symbol(self._run, ("chunk", self._content, 2, ("dim", -1)))._parts()
        raise NoExpressionError

    def _parts(self) -> list[_Symbol]:
        match self._content:
            case ("chunk", _, int(count), ("dim", -1)):
                return [_Symbol(self._run, ("part", self._content, i)) for i in range(count)]
        raise NoExpressionError

    def __iter__(self) -> Iterator[_Symbol]:
        return iter(self._parts())

    def __getitem__(self, index: Any) -> Any:
        if type(index) is tuple and len(index) == 2 and index[0] is ...:
            columns = index[1]
            if type(columns) is slice and columns.stop is None:
                start, step = columns.start or 0, columns.step or 1
                return _Symbol(self._run, ("strided", self._content, start, step))
        return self._parts()[index]

    __bool__ = _no_answer


class _Shape:
    """The shape of a result, which may be asked for its last size alone."""

    def __init__(self, last: _Symbol) -> None:
        self._last = last

    def __getitem__(self, index: Any) -> Any:
        if type(index) is slice and index == slice(-1, None):
            return (self._last,)
        if type(index) is int and index == -1:
            return self._last
        raise NoExpressionError

    __iter__ = __len__ = __contains__ = __bool__ = __eq__ = __ne__ = __add__ = _no_answer
    __hash__ = None  # type: ignore[assignment]


def _plain(value: Any) -> Any:
    if isinstance(value, _Value):
        return value._content
    if isinstance(value, tuple | list):
        return tuple(_plain(element) for element in value)
    if isinstance(value, dict):
        return {name: _plain(element) for name, element in value.items()}
    if value is None or isinstance(value, bool | int | float | str | torch.dtype):
        return value
    raise NoExpressionError
