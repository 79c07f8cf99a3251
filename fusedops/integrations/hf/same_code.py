"""Whether two functions or methods compute the same, up to the names of what they use.

Most modeling files of transformers are copies: ``GraniteRMSNorm`` is ``LlamaRMSNorm`` under
another name. Two functions are the same here if the interpreter executes the same instructions in
both, with the same constants and defaults, and if what they read from their modules, their closures
and their classes is the same in turn. Docstrings, annotations, line numbers and the names of local
variables, of helpers and of classes do not count; names of arguments, attributes and methods do.

The code is compared, not its text, so that it does not matter where the text is. A function without
Python code (a compiled one) is the same as itself only.
"""

from __future__ import annotations

import builtins
import dis
import functools
import inspect
import logging
from types import CodeType, FunctionType, MethodType
from typing import Any

from torch import nn

from fusedops.integrations.hf.class_table import is_entry, weakly_cached

# The opcodes whose argument is a variable of the function, and those whose argument is a place.
_VARIABLES = {*dis.haslocal, *dis.hasfree}
_JUMPS = {*dis.hasjrel, *dis.hasjabs}
_FLAGS = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE
_IGNORED = ("CACHE", "NOP", "RESUME", "EXTENDED_ARG")
_MISSING = object()


def same_methods(cls: type, other: type, *names: str) -> bool:
    """Return whether methods of two classes compute the same, with the methods that they call.

    Args:
        cls: a class.
        other: another.
        *names: of the methods.
    """
    comparison = _Comparison(cls, other)
    return all(comparison.attributes(name) for name in names)


def same_function(function: Any, other: Any) -> bool:
    """Return whether two functions compute the same."""
    return _Comparison(type(None), type(None)).values(function, other)


class _Comparison:
    """Compares what belongs to two classes.

    Pairs that are being compared count as the same when they are met again: a function that calls
    itself is the same as a copy that calls itself.
    """

    def __init__(self, cls: type, other: type) -> None:
        self.classes = cls, other
        self._same = {(id(cls), id(other))}

    def attributes(self, name: str) -> bool:
        """Return whether an attribute of the two classes is the same, or absent in both."""
        mine, theirs = (own_attribute(cls, name) for cls in self.classes)
        return mine is theirs or self.values(mine, theirs)

    def values(self, mine: Any, theirs: Any) -> bool:
        """Return whether two values that code reads are the same."""
        if mine is theirs:
            return True
        if type(mine) is not type(theirs):
            return False
        pair = id(mine), id(theirs)
        if pair in self._same:
            return True
        self._same.add(pair)
        same = self._different_objects(mine, theirs)
        if not same:
            self._same.discard(pair)
        return same

    def _different_objects(self, mine: Any, theirs: Any) -> bool:
        match mine:
            case FunctionType():
                return self._functions(mine, theirs)
            case staticmethod() | classmethod() | MethodType():
                return self.values(mine.__func__, theirs.__func__)
            case property():
                accessors = ("fget", "fset", "fdel")
                return all(
                    self.values(getattr(mine, name), getattr(theirs, name)) for name in accessors
                )
            case functools.partial():
                parts = ("func", "args", "keywords")
                return all(
                    self.values(getattr(mine, name), getattr(theirs, name)) for name in parts
                )
            case type():
                return self._other_classes(mine, theirs)
            case tuple() | list():
                pairs = zip(mine, theirs, strict=False)
                return len(mine) == len(theirs) and all(self.values(*pair) for pair in pairs)
            case dict():
                return mine.keys() == theirs.keys() and all(
                    self.values(value, theirs[key]) for key, value in mine.items()
                )
            case logging.Logger():
                return True
            case float() | complex():
                return repr(mine) == repr(theirs)  # 0.0 is not -0.0
            case bool() | int() | str() | bytes() | frozenset() | set():
                return bool(mine == theirs)
        return False

    def _other_classes(self, mine: type, theirs: type) -> bool:
        """Return whether two classes that code reads have the same bases and own attributes."""
        if not self.values(mine.__bases__, theirs.__bases__):
            return False
        inner = _Comparison(mine, theirs)
        inner._same |= self._same
        names = _own_names(mine)
        return names == _own_names(theirs) and all(inner.attributes(name) for name in names)

    def _functions(self, mine: FunctionType, theirs: FunctionType) -> bool:
        return (
            self.values(mine.__defaults__, theirs.__defaults__)
            and self.values(mine.__kwdefaults__, theirs.__kwdefaults__)
            and self._codes(mine, theirs, mine.__code__, theirs.__code__)
            and self._closures(mine, theirs)
        )

    def _closures(self, mine: FunctionType, theirs: FunctionType) -> bool:
        cells = zip(mine.__closure__ or (), theirs.__closure__ or (), strict=True)
        for name, pair in zip(mine.__code__.co_freevars, cells, strict=True):
            content, counterpart = (_content(cell) for cell in pair)
            if name == "__class__":  # super() reads it, and finds what comes next
                content, counterpart = (
                    getattr(c, "__mro__", (c, c))[1] for c in (content, counterpart)
                )
            if not self.values(content, counterpart):
                return False
        return True

    def _codes(self, mine: Any, theirs: Any, code: CodeType, other: CodeType) -> bool:
        """Return whether two codes of two functions are the same; inner functions are such too."""
        steps, counterparts = _steps(code), _steps(other)
        return (
            _frame(code) == _frame(other)
            and len(steps) == len(counterparts)
            and all(
                step[0] == counterpart[0] and self._arguments(mine, theirs, *step, counterpart[1])
                for step, counterpart in zip(steps, counterparts, strict=True)
            )
        )

    def _arguments(self, mine: Any, theirs: Any, operation: str, value: Any, other: Any) -> bool:
        """Return whether the arguments of an instruction of two functions are the same."""
        if isinstance(value, CodeType) and isinstance(other, CodeType):
            return self._codes(mine, theirs, value, other)
        if operation in ("LOAD_GLOBAL", "LOAD_NAME"):
            return self.values(_global(mine, value), _global(theirs, other))
        if operation == "LOAD_CONST":
            return self.values(value, other)
        if operation in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
            return value == other and self.attributes(value)
        return bool(value == other)


def _argument_names(code: CodeType) -> tuple[str, ...]:
    count = code.co_argcount + code.co_kwonlyargcount
    count += bool(code.co_flags & inspect.CO_VARARGS) + bool(code.co_flags & inspect.CO_VARKEYWORDS)
    return code.co_varnames[:count]


def _frame(code: CodeType) -> tuple[Any, ...]:
    """Return the names and kinds of a code's arguments, and how many variables it closes over.

    Handlers of exceptions are no instructions, but a table of the code.
    """
    kinds = code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount
    flags, handlers = code.co_flags & _FLAGS, code.co_exceptiontable
    return *kinds, flags, handlers, _argument_names(code), len(code.co_freevars)


@weakly_cached
def _steps(code: CodeType) -> tuple[tuple[str, Any], ...]:
    """Return operation and argument of each instruction; variables and places have numbers.

    Arguments and variables of outer functions are numbered by their place, others by when they
    are met first.
    """
    numbers: dict[str, int] = {}
    for name in (*_argument_names(code), *code.co_freevars):
        numbers.setdefault(name, len(numbers))
    instructions = [step for step in dis.get_instructions(code) if step.opname not in _IGNORED]
    places = {instruction.offset: place for place, instruction in enumerate(instructions)}
    steps: list[tuple[str, Any]] = []
    for instruction in instructions:
        value = instruction.argval
        if instruction.opcode in _VARIABLES:
            names = value if isinstance(value, tuple) else (value,)
            value = tuple(numbers.setdefault(name, len(numbers)) for name in names)
        elif instruction.opcode in _JUMPS:
            value = places.get(value, value)
        steps.append((instruction.opname, value))
    return tuple(steps)


def _global(function: FunctionType, name: str) -> Any:
    return function.__globals__.get(name, getattr(builtins, name, _MISSING))


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # an empty cell
        return _MISSING


def own_attribute(cls: type, name: str) -> Any:
    """Return the stored attribute of a class; ``None`` where it has none, or torch's."""
    for base in cls.__mro__:
        if base is nn.Module or base is object:
            return None
        if name in vars(base):
            return vars(base)[name]
    return None


def _own_names(cls: type) -> set[str]:
    hidden = {"__module__", "__doc__", "__dict__", "__weakref__", "__annotations__", "__qualname__"}
    hidden |= {"__firstlineno__", "__static_attributes__", "__parameters__", "__orig_bases__"}
    return {name for name in vars(cls) if name not in hidden and not is_entry(name)}


def operations(cls: type[nn.Module]) -> tuple[str, ...]:
    """Return the operations of the forward of a class: equal ones are worth a comparison."""
    code = getattr(cls.forward, "__code__", None)
    return () if code is None else tuple(operation for operation, _ in _steps(code))
