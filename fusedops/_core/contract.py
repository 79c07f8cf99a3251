"""Contracts: which dtypes and shapes an operator's arguments must have, stated once per op.

A registered operator is called by more than its public function: by compiled code, by exporters, by
other libraries. Its contract says which shapes and dtypes fit together, so that a kernel never
reads out of bounds. One description serves forward and backward. It is checked by the fake kernels
and before a kernel runs: the first time for each signature, since a contract does not read values
in tensors; the compiled router knows the signatures that were checked (``csrc/known_calls.h``, a
tenth of a microsecond). ``_contract_grammar.py`` parses the rules.

    contract={
        "input, output": "T [*rows, *normalized_shape]",
        "weight, bias": "param(T) [*normalized_shape]",
        "mean, rstd": "stat(T) [*rows]",
        "normalized_shape": "len(normalized_shape) >= 1",
    }

Keys are names of arguments and results; a result's rule holds for it, and for its gradient, where
the backward receives them. A result of one dtype and one shape needs no fake kernel of its own: its
rule makes the empty tensor. Rules are read in order. Of a tensor: dtype, then shape.

| dtype | means |
|---|---|
| ``int32 | int64`` | one of these; ``float`` is float16, bfloat16, float32 or float64 |
| ``T`` | a floating dtype, the same wherever the letter stands; also a ``ScalarType`` argument |
| ``param(T)`` | T, or float32 where T is a half-precision dtype |
| ``stat(T)`` | float64 where T is float64, else float32 |
| ``mixed(T)`` | float64 where T is float64, else float32, bfloat16 or float16 |
| ``param(T) as P`` | and the letter P names it |

| size | means |
|---|---|
| ``n`` | a size, the same wherever the name stands; or an integer argument |
| ``*rows`` | any number of sizes; or a list argument |
| ``2 * n + 1`` | an expression, see below |
| ``~n``, ``~*rows`` | a size, or as many sizes, that broadcast to these; ``~...rows``: or fewer |
| ``[a, b] | [0]`` | one of these shapes |

Of a list of tensors: ``each`` and the rule of its elements, for example
``each mixed(T) [*shape] dense``. All such lists have the length of the first one; those with
``each or none`` may be empty instead. Names and letters in these rules hold for the elements of one
index, ``number``, which any rule that begins with ``each`` may use. ``dense`` after the shapes: no
gaps between elements, and the strides of the first dense tensor of this index.

An expression has ``+ - * // %``, comparisons, ``and``, ``or``, ``a if c else b``, ``len(list)``,
``list[i]`` with an expression for ``i``, ``given(argument)``, ``itemsize(tensor)`` and
``name == "word"``. The first operand that is not known, or that has no value (a division by zero,
an index outside of a list), decides; ``and``, ``or`` and ``if`` look at no more than they need.

For other arguments: an expression that must be true, ``lo <= x < hi`` for a float, a collection of
words for a string. A key that is not an argument is a name: a comparison is a requirement, any
other expression defines the name; ``broadcast(first, second)`` makes one list of two. Rules that
depend on a tensor that is not given are skipped.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from fusedops._core import checks

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_HALF = (torch.float16, torch.bfloat16)
_MOST_SHOWN = 8  # numbers of a list in a message
DTYPES: dict[str, tuple[torch.dtype, ...]] = {
    "float": FLOATS,
    "float32": (torch.float32,),
    "float64": (torch.float64,),
    "int32": (torch.int32,),
    "int64": (torch.int64,),
    "uint8": (torch.uint8,),
    "bool": (torch.bool,),
}
Rules = Mapping[str, "str | Collection[str]"]
# The grammar has the names that ``ast`` gives them.
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "//": operator.floordiv,
    "%": operator.mod,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
    "==": operator.eq,
    "!=": operator.ne,
}
# An expression: a tuple of what it is and its operands, for example ("+", ("size", "n"), 1).
Expression = Any


@dataclass(frozen=True)
class Atom:
    """One way for a dtype to be right: "set", "same", "param", "stat" or "mixed"."""

    kind: str
    dtypes: tuple[torch.dtype, ...] = ()
    letter: str = ""

    def allowed(self, letters: Mapping[str, torch.dtype]) -> tuple[torch.dtype, ...]:
        """Return the dtypes that are right; all floating ones while the letter is not known."""
        if self.kind == "set":
            return self.dtypes
        known = letters.get(self.letter)
        if known is None:
            return FLOATS
        if self.kind == "stat":
            return (torch.float64 if known == torch.float64 else torch.float32,)
        if self.kind == "mixed" and known != torch.float64:
            return torch.float32, *_HALF
        if self.kind == "param" and known in _HALF:
            return known, torch.float32
        return (known,)


@dataclass(frozen=True)
class SizeRule:
    """One entry of a shape: an expression, or a named list of sizes; exact, or broadcast."""

    expression: Expression
    is_list: bool
    broadcast: bool
    shorter: bool  # a broadcast list may lack its first sizes
    text: str


@dataclass(frozen=True)
class TensorRule:
    """What one tensor must be."""

    argument: int  # -1 for a result that is no argument
    name: str
    optional: bool
    binds: str | None  # the letter that its dtype gets
    atoms: tuple[Atom, ...]
    shapes: tuple[tuple[SizeRule, ...], ...]
    # whether its elements must lie without gaps, in the order of the first such tensor
    dense: bool = False


@dataclass(frozen=True)
class Definition:
    """A name for a size (an expression), or for the sizes that two lists broadcast to."""

    name: str
    expression: Expression
    text: str


class Requirement(Definition):
    """An expression that must hold."""


@dataclass(frozen=True)
class Range:
    """Bounds of a float, possibly infinite. A NaN is never inside."""

    argument: int
    name: str
    low: float
    high: float
    low_open: bool
    high_open: bool
    text: str


@dataclass(frozen=True)
class Choice:
    """The words that a string may be."""

    argument: int
    name: str
    words: tuple[str, ...]


@dataclass(frozen=True)
class Gradients:
    """Of a backward: the incoming gradients, and what the requested ones need."""

    incoming: tuple[int, ...]
    mask: int
    count: int
    needs: tuple[tuple[int, int], ...]  # place in the mask -> argument


@dataclass(frozen=True)
class Elements:
    """What the elements of the lists of tensors must be to each other."""

    # argument, name, and whether it may be empty; the first one says how many there are
    lists: tuple[tuple[int, str, bool], ...]
    # for the elements of one index, which stand in the places of their lists
    steps: tuple[Any, ...]


Step = TensorRule | Definition | Requirement | Range | Choice | Gradients | Elements


@dataclass
class Bindings:
    """Sizes, lists and dtypes that the arguments checked so far have bound."""

    args: Sequence[Any]
    sizes: dict[str, Any] = field(default_factory=dict)
    lists: dict[str, tuple[Any, ...]] = field(default_factory=dict)
    letters: dict[str, torch.dtype] = field(default_factory=dict)
    place: str = ""  # of list elements: "[number]"
    layout: torch.Tensor | None = None  # the first tensor that must be dense


_UNKNOWN = KeyError  # what an expression raises that names what is not known: nothing is asked
_NO_VALUE = (ZeroDivisionError, IndexError)  # what an expression raises that cannot be computed


@dataclass(frozen=True)
class Program:
    """The steps of one operator, in order."""

    op: str  # for messages
    arguments: tuple[tuple[str, str], ...]  # kind and name of each argument, as the schema has them
    steps: tuple[Step, ...]  # what is looked at, in order
    results: tuple[TensorRule, ...] = ()

    def check(self, args: Sequence[Any]) -> Bindings:
        """Raise unless the arguments fit; return what they say of sizes and dtypes."""
        known = Bindings(args)
        self._check_devices(args)
        for (kind, name), value in zip(self.arguments, args, strict=True):
            if kind == "ScalarType":
                if value not in FLOATS:
                    raise TypeError(f"{self.op}: {name} must be a floating dtype, got {value}")
                known.letters[name] = value
            elif kind in ("SymInt[]", "int[]", "bool[]"):
                known.lists[name] = tuple(value)
        for step in self.steps:
            _CHECKS[type(step)](self, step, known)
        return known

    def unread_numbers(self) -> list[int]:
        """Return the places of the floats that no rule reads, such as a learning rate."""
        ranges = {step.argument for step in self.steps if isinstance(step, Range)}
        floats = [i for i, (kind, _) in enumerate(self.arguments) if kind.startswith("float")]
        return [place for place in floats if place not in ranges]

    def empty_results(
        self,
        known: Bindings,
        requested: Sequence[bool] | None,
        layouts: Mapping[str, Callable[[torch.Tensor], torch.Tensor]],
    ) -> list[torch.Tensor | None]:
        """Return empty results, as the rules describe them.

        A gradient whose input is an argument has its dtype and shape.

        Args:
            known: what ``check`` returned.
            requested: which results are made, by default all.
            layouts: result -> makes the empty tensor from the argument of its name.
        """
        args = known.args
        _, like = next(self._tensors(args))
        results: list[torch.Tensor | None] = []
        for i, rule in enumerate(self.results):
            given = args[rule.argument] if rule.argument >= 0 else None
            if requested is not None and not requested[i]:
                results.append(None)
            elif given is None:
                results.append(self._empty(rule, known, like))
            else:
                layout = layouts.get(rule.name)
                results.append(given.new_empty(given.shape) if layout is None else layout(given))
        return results

    def _empty(self, rule: TensorRule, known: Bindings, like: torch.Tensor) -> torch.Tensor:
        allowed = self._allowed(rule, known)
        if len(allowed) != 1 or len(rule.shapes) != 1:
            what = f"{rule.name} has several dtypes or shapes: give a fake"
            raise ValueError(f"contract of {self.op}: {what}")
        sizes: list[Any] = []
        for size in rule.shapes[0]:
            if size.is_list:
                sizes += known.lists[size.expression]
            else:
                sizes.append(_value(size.expression, known))
        return like.new_empty(sizes, dtype=allowed[0])

    def _check_devices(self, args: Sequence[Any]) -> None:
        owner = device = None
        for name, value in self._tensors(args):
            if device is None:
                owner, device = name, value.device
            elif value.device != device:
                expected = f"on {device}, the device of {owner}"
                checks.fail(self.op, name, expected, value.device)

    def _tensors(self, args: Sequence[Any]) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the tensors among the arguments with their names, those of lists too."""
        for (kind, name), value in zip(self.arguments, args, strict=True):
            if isinstance(value, torch.Tensor):
                yield name, value
            elif kind == "Tensor[]":
                for i, element in enumerate(value):
                    if not isinstance(element, torch.Tensor):
                        got = checks.type_name(element)
                        raise TypeError(f"{self.op}: {name}[{i}] must be a torch.Tensor, got {got}")
                    yield f"{name}[{i}]", element

    def _check_tensor(self, rule: TensorRule, known: Bindings) -> None:
        value, name = known.args[rule.argument], rule.name + known.place
        if value is None:
            if not rule.optional:
                raise TypeError(f"{self.op}: {name} must be a torch.Tensor, got None")
            return
        allowed = self._allowed(rule, known)
        if value.dtype not in allowed:
            expected = " or ".join(str(dtype)[6:] for dtype in dict.fromkeys(allowed))
            raise TypeError(
                f"{self.op}: {name} must have dtype {expected}, got {str(value.dtype)[6:]}"
            )
        if rule.binds is not None:
            known.letters[rule.binds] = value.dtype
        if not any(_match(sizes, value.shape, known) for sizes in rule.shapes):
            expected = " or ".join(_rendered(sizes, known) for sizes in rule.shapes)
            checks.fail(self.op, name, f"of shape {expected}", list(value.shape))
        if rule.dense:
            self._check_layout(name, value, known)

    def _check_layout(self, name: str, value: torch.Tensor, known: Bindings) -> None:
        first = known.layout = value if known.layout is None else known.layout
        if value.is_contiguous() and first.is_contiguous():
            return
        if value.stride() != first.stride() or not _has_no_gaps(value):
            expected = f"without gaps and of strides {list(first.stride())}"
            checks.fail(self.op, name, expected, f"strides {list(value.stride())}")

    def _check_elements(self, step: Elements, known: Bindings) -> None:
        counts = [len(known.args[argument]) for argument, _, _ in step.lists]
        first = step.lists[0][1]
        for (_, name, may_be_empty), count in zip(step.lists, counts, strict=True):
            if count != counts[0] and not (may_be_empty and count == 0):
                expected = f"a list of {counts[0]} tensors, as many as {first} has"
                expected += " or empty" * may_be_empty
                checks.fail(self.op, name, expected, f"{count} tensors")
        row = list(known.args)
        for number in range(counts[0]):
            for argument, *_ in step.lists:
                row[argument] = known.args[argument][number] if known.args[argument] else None
            sizes = {**known.sizes, "number": number}
            element = Bindings(row, sizes, dict(known.lists), dict(known.letters), f"[{number}]")
            for inner in step.steps:
                _CHECKS[type(inner)](self, inner, element)

    @staticmethod
    def _allowed(rule: TensorRule, known: Bindings) -> list[torch.dtype]:
        if rule.binds is not None and rule.binds in known.letters:
            return [known.letters[rule.binds]]
        return [dtype for atom in rule.atoms for dtype in atom.allowed(known.letters)]

    def _define(self, step: Definition, known: Bindings) -> None:
        try:
            if step.expression[0] == "broadcast":
                pair = [known.lists.get(name) for name in step.expression[1:]]
                if None not in pair:
                    known.lists[step.name] = self._broadcast(step.name, *pair)
            else:
                known.sizes[step.name] = _value(step.expression, known)
        except _UNKNOWN:
            pass
        except _NO_VALUE:
            self._refuse(step, known)

    def _broadcast(self, name: str, first: Any, second: Any) -> tuple[Any, ...]:
        wide = tuple(a if _holds(b == 1) else b for a, b in zip(first, second, strict=False))
        if len(first) != len(second) or not (_fits(first, wide) and _fits(second, wide)):
            checks.fail(self.op, name, f"sizes that broadcast with {list(first)}", list(second))
        return wide

    def _require(self, step: Requirement, known: Bindings) -> None:
        try:
            holds = _holds(_value(step.expression, known))
        except _UNKNOWN:
            return
        except _NO_VALUE:
            holds = False
        if not holds:
            self._refuse(step, known)

    def _refuse(self, step: Definition | Requirement, known: Bindings) -> None:
        given = {name: value for (_, name), value in zip(self.arguments, known.args, strict=True)}
        given |= known.sizes | known.lists
        values = (_shown(word, given[word]) for word in _names(step.text) if word in given)
        checks.fail(self.op, step.name, f"such that {step.text}", ", ".join(values))

    def _check_range(self, step: Range, known: Bindings) -> None:
        value = known.args[step.argument]
        above = step.low < value if step.low_open else step.low <= value
        below = value < step.high if step.high_open else value <= step.high
        if not (above and below):
            checks.fail(self.op, step.name, f"a number such that {step.text}", value)

    def _check_choice(self, step: Choice, known: Bindings) -> None:
        checks.choice(self.op, step.name, known.args[step.argument], step.words)

    def _check_gradients(self, step: Gradients, known: Bindings) -> None:
        names = [name for _, name in self.arguments]
        if all(known.args[index] is None for index in step.incoming):
            expected = " or ".join(names[index] for index in step.incoming)
            raise TypeError(f"{self.op}: {expected} must be a torch.Tensor, got None")
        mask = known.args[step.mask]
        if len(mask) != step.count:
            checks.fail(self.op, names[step.mask], f"{step.count} flags", len(mask))
        for place, argument in step.needs:
            if mask[place] and known.args[argument] is None:
                expected = f"given: output_mask[{place}] asks for a gradient that needs it"
                checks.fail(self.op, names[argument], expected, None)


_CHECKS: dict[type, Any] = {
    TensorRule: Program._check_tensor,
    Definition: Program._define,
    Requirement: Program._require,
    Range: Program._check_range,
    Choice: Program._check_choice,
    Gradients: Program._check_gradients,
    Elements: Program._check_elements,
}


def _has_no_gaps(tensor: torch.Tensor) -> bool:
    """Return whether the elements are those of one piece of memory, each once, in any order."""
    following = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != following:
            return False
        following *= size
    return True


def _shown(name: str, value: Any) -> str:
    """Return a value for a message: a tensor's dtype, the length of a long list or of tensors."""
    if isinstance(value, torch.Tensor):
        return f"{name}.dtype = {value.dtype}"
    is_list = isinstance(value, (list, tuple))
    if is_list and (len(value) > _MOST_SHOWN or any(isinstance(x, torch.Tensor) for x in value)):
        return f"len({name}) = {len(value)}"
    return f"{name} = {value}"


def _holds(condition: Any) -> bool:
    """Return whether a condition holds; one of sizes that only a run tells is taken to."""
    if isinstance(condition, torch.SymBool):
        from torch.fx.experimental.symbolic_shapes import guard_or_true

        return guard_or_true(condition)
    return bool(condition)


def _fits(sizes: Sequence[Any], others: Sequence[Any], broadcast: bool = True) -> bool:
    """Return whether ``sizes`` equal ``others`` or broadcast to them; the counts must be equal."""
    return len(sizes) == len(others) and all(
        size is other or _holds(size == other) or (broadcast and _holds(size == 1))
        for size, other in zip(sizes, others, strict=True)
    )


def _match(sizes: tuple[SizeRule, ...], shape: Sequence[Any], known: Bindings) -> bool:
    """Return whether a shape matches ``sizes``; if so, bind the names that it defines."""
    bound, lists = dict(known.sizes), dict(known.lists)
    open_ended = [rule.is_list and (rule.shorter or rule.expression not in lists) for rule in sizes]
    counts = [
        0 if free else len(lists[rule.expression]) if rule.is_list else 1
        for rule, free in zip(sizes, open_ended, strict=True)
    ]
    rest = len(shape) - sum(counts)
    if rest < 0 or (rest > 0 and not any(open_ended)):
        return False
    at = 0
    for rule, free, fixed in zip(sizes, open_ended, counts, strict=True):
        if rule.is_list:
            expected = lists.get(rule.expression)
            count = rest if free else fixed
            part = tuple(shape[at : at + count])
            at += count
            if rule.shorter and expected is not None:
                expected = expected[max(0, len(expected) - count) :]
            if expected is None:
                lists[rule.expression] = part
            elif not _fits(part, expected, rule.broadcast):
                return False
            continue
        size = shape[at]
        at += 1
        kind = rule.expression[0] if isinstance(rule.expression, tuple) else ""
        if kind == "size" and rule.expression[1] not in bound and not rule.broadcast:
            bound[rule.expression[1]] = size
            continue
        try:
            value = _value(rule.expression, Bindings(known.args, bound, lists))
        except _UNKNOWN:
            continue
        except _NO_VALUE:
            return False
        if not (size is value or _holds(size == value) or (rule.broadcast and _holds(size == 1))):
            return False
    known.sizes, known.lists = bound, lists
    return True


def _value(expression: Expression, known: Bindings) -> Any:
    if not isinstance(expression, tuple):
        return expression
    kind, *operands = expression
    if kind in _READ:
        return _READ[kind](known, *operands)
    if kind == "if":
        condition, then, otherwise = operands
        return _value(then if _holds(_value(condition, known)) else otherwise, known)
    first, second = operands
    if kind == "and":
        return _holds(_value(first, known)) and _holds(_value(second, known))
    if kind == "or":
        return _holds(_value(first, known)) or _holds(_value(second, known))
    return OPERATORS[kind](_value(first, known), _value(second, known))


def _unknown(*_: Any) -> Any:
    raise _UNKNOWN


def _itemsize(known: Bindings, place: int) -> int:
    return _unknown() if known.args[place] is None else known.args[place].dtype.itemsize


# What reads the arguments and what they have bound; a name that has no value yet is unknown.
_READ: dict[str, Callable[..., Any]] = {
    "unknown": _unknown,
    "size": lambda known, name: known.sizes[name],
    "argument": lambda known, place: known.args[place],
    "count": lambda known, place: len(known.args[place]),
    "word": lambda known, place, word: known.args[place] == word,
    "given": lambda known, place: known.args[place] is not None,
    "itemsize": _itemsize,
    "len": lambda known, name: len(known.lists[name]),
    "item": lambda known, name, index: known.lists[name][_value(index, known)],
}


def _rendered(sizes: tuple[SizeRule, ...], known: Bindings) -> str:
    """Return a shape for a message: numbers where they are known."""
    parts = []
    for rule in sizes:
        if rule.is_list:
            bound = known.lists.get(rule.expression)
            parts += [rule.text] if bound is None else [str(size) for size in bound]
            continue
        try:
            value = _value(rule.expression, known)
        except (_UNKNOWN, *_NO_VALUE):
            value = rule.text
        parts.append(f"1 or {value}" if rule.broadcast else str(value))
    return f"[{', '.join(parts)}]"


def _names(text: str) -> list[str]:
    words = re.findall(r"[A-Za-z_]\w*", re.sub(r"'\w*'|\"\w*\"", "", text))
    return list(dict.fromkeys(words))
