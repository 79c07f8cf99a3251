"""Parses the rules of a contract (grammar: ``contract.py``) into the steps of a ``Program``."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Collection, Sequence
from typing import Any

from fusedops._core.contract import (
    DTYPES,
    FLOATS,
    OPERATORS,
    Atom,
    Choice,
    Definition,
    Elements,
    Expression,
    Gradients,
    Program,
    Range,
    Requirement,
    Rules,
    SizeRule,
    Step,
    TensorRule,
)

_NODES = (
    *(ast.Add, ast.Sub, ast.Mult, ast.FloorDiv, ast.Mod),
    *(ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq),
)
_OPERATORS: dict[type, str] = {ast.And: "and", ast.Or: "or"} | dict(
    zip(_NODES, OPERATORS, strict=True)
)

_EACH = "each "  # a rule of the elements of lists
_OR_NONE = "or none "  # after "each": a list that may be empty
_COMPARISONS = ("<", "<=", ">", ">=", "==", "!=", "and", "or")


class _AbsentError(Exception):
    """An expression names an argument that this operator does not have."""


class Contract:
    """The rules of an op, from which the programs of the op and of its backward are made.

    Args:
        op: the op's name.
        forward: kind and name of each argument, in the order of the schema.
        rules: the contract, as ``contract.py`` describes it.
        returns: names of the results, which have rules as well.

    Raises:
        ValueError: an argument or a result has no rule; from ``program``, a rule cannot be read.
    """

    def __init__(
        self,
        op: str,
        forward: Sequence[tuple[str, str]],
        rules: Rules,
        returns: Collection[str] = (),
    ) -> None:
        self.op = op
        self.rules = [
            (name.strip(), rule) for names, rule in rules.items() for name in names.split(",")
        ]
        named = {name for name, _ in self.rules}
        tensors = {name for kind, name in forward if kind.startswith("Tensor")}
        if missing := sorted((tensors | set(returns)) - named):
            raise ValueError(f"contract of {op}: no rule for {', '.join(missing)}")
        self.forward = {name for _, name in forward} | set(returns)

    def program(
        self,
        arguments: Sequence[tuple[str, str]],
        results: Collection[str] = (),
        gradients: Gradients | None = None,
    ) -> Program:
        """Return the program of the op, or with ``gradients`` that of its backward.

        ``results`` are names of results of the op, or of the inputs whose gradients are returned.
        """
        if gradients is None:
            op, steps = self.op, self._steps(arguments, backward=False)
        else:
            op = f"{self.op}_backward"
            steps = (gradients, *self._steps(arguments, backward=True))
        rules = dict(self.rules)
        empty = tuple(self._tensor(name, False, str(rules[name])) for name in results)
        return Program(op, tuple(arguments), steps, empty)

    def _steps(self, arguments: Sequence[tuple[str, str]], *, backward: bool) -> tuple[Step, ...]:
        """Return the checks of these arguments, in the order of the rules."""
        self.places = {name: index for index, (_, name) in enumerate(arguments)}
        self.kinds = {name: kind for kind, name in arguments}
        steps: list[Step | None] = []
        of_elements: list[tuple[int, Step | None]] = []
        for name, rule in self.rules:
            of_lists = isinstance(rule, str) and rule.startswith(_EACH)
            if isinstance(rule, str):
                rule = rule.removeprefix(_EACH)
            here: list[Step | None] = []
            for argument in (f"grad_{name}", name) if backward else (name,):
                if argument in self.places:
                    here.append(self._step(argument, self.kinds[argument], rule))
            if name not in self.forward:
                here.append(self._name(name, str(rule)))
            if of_lists:
                of_elements += ((len(steps), step) for step in here)
            else:
                steps += here
        if of_elements:
            steps.insert(of_elements[0][0], self._elements([step for _, step in of_elements]))
        return tuple(step for step in steps if step is not None)

    def _elements(self, steps: Sequence[Step | None]) -> Elements:
        lists = tuple(
            (rule.argument, rule.name, rule.optional)
            for rule in steps
            if isinstance(rule, TensorRule) and self.kinds[rule.name] == "Tensor[]"
        )
        return Elements(lists, tuple(rule for rule in steps if rule is not None))

    def _name(self, name: str, rule: str) -> Step | None:
        expression = self._expression(rule)
        if expression is None:
            return None
        if expression[0] in _COMPARISONS:
            return Requirement(name, expression, rule)
        return Definition(name, expression, rule)

    def _step(self, name: str, kind: str, rule: str | Collection[str]) -> Any:
        if not isinstance(rule, str):
            return Choice(self.places[name], name, tuple(rule))
        if kind.startswith("Tensor"):
            optional = kind.endswith("?") or rule.startswith(_OR_NONE)
            rule = rule.removeprefix(_OR_NONE)
            return self._tensor(name, optional, rule)
        if kind == "float":
            return self._range(name, self.places[name], rule)
        expression = self._expression(rule)
        return None if expression is None else Requirement(name, expression, rule)

    def _tensor(self, name: str, optional: bool, rule: str) -> TensorRule:
        types, _, shapes = rule.partition("[")
        types, _, binds = (part.strip() for part in types.partition(" as "))
        words = [word.strip() for word in types.split("|")]
        atoms = tuple(_atom(word) for word in words)
        if len(atoms) == 1 and atoms[0].kind == "same" and words[0] not in self.kinds:
            binds, atoms = words[0], (Atom("set", FLOATS),)
        shapes, _, after = shapes.rpartition("]")
        alternatives = re.findall(r"\[((?:[^\[\]]|\[[^\]]*\])*)\]", f"[{shapes}]")
        if after.strip() not in ("", "dense"):
            raise ValueError(f"contract of {self.op}: cannot read {after.strip()!r} of {name}")
        place, dense = self.places.get(name, -1), bool(after.strip())
        sizes = tuple(self._shape(shape) for shape in alternatives)
        return TensorRule(place, name, optional, binds or None, atoms, sizes, dense)

    def _shape(self, text: str) -> tuple[SizeRule, ...]:
        sizes = []
        for part in (entry.strip() for entry in text.split(",") if entry.strip()):
            broadcast, rest = part.startswith("~"), part.removeprefix("~")
            if rest.startswith(("*", "...")):
                sizes.append(SizeRule(rest.lstrip("*."), True, broadcast, rest[0] == ".", part))
                continue
            expression = self._expression(rest)
            if expression is None:
                expression = ("unknown",)
            sizes.append(SizeRule(expression, False, broadcast, False, part))
        return tuple(sizes)

    def _range(self, name: str, place: int, rule: str) -> Range:
        number = r"(-?[\d.]+|-?inf)"
        match = re.fullmatch(rf"(?:{number}\s*(<=?)\s*)?{name}(?:\s*(<=?)\s*{number})?", rule)
        if match is None:
            raise ValueError(f"contract of {self.op}: {rule!r} is no range of {name}")
        low, low_sign, high_sign, high = match.groups()
        bounds = float(low or "-inf"), float(high or "inf")
        return Range(place, name, *bounds, low_sign == "<", high_sign == "<", rule)

    def _expression(self, text: str) -> Expression | None:
        """Return an expression, or ``None`` where it names an argument that is not among these."""
        try:
            return self._parse(ast.parse(text.strip(), mode="eval").body)
        except _AbsentError:
            return None
        except (SyntaxError, KeyError, AttributeError) as error:
            raise ValueError(f"contract of {self.op}: cannot read {text!r}") from error

    # Of a node that is not as expected the attributes are missing: that is the reader's error.
    def _parse(self, node: Any) -> Expression:
        parse = self._parse
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.UnaryOp):
            return -parse(node.operand)
        if isinstance(node, ast.Name):
            if node.id in self.places:
                return ("argument", self.places[node.id])
            if node.id in self.forward:
                raise _AbsentError
            return ("size", node.id)
        if isinstance(node, ast.Call):
            return self._call(node)
        if isinstance(node, ast.Subscript):
            place: Any = node.value
            return ("item", place.id, parse(node.slice))
        if isinstance(node, ast.IfExp):
            return ("if", parse(node.test), parse(node.body), parse(node.orelse))
        if isinstance(node, ast.BinOp):
            return (_OPERATORS[type(node.op)], parse(node.left), parse(node.right))
        if isinstance(node, ast.BoolOp):
            operator = _OPERATORS[type(node.op)]
            return _chain([parse(operand) for operand in node.values], operator)
        if isinstance(node.comparators[0], ast.Constant) and isinstance(
            node.comparators[0].value, str
        ):
            if node.left.id not in self.places:
                raise _AbsentError
            word = ("word", self.places[node.left.id], node.comparators[0].value)
            return ("==", word, 1 if isinstance(node.ops[0], ast.Eq) else 0)
        operands = [node.left, *node.comparators]
        pairs = [
            (_OPERATORS[type(op)], parse(operands[i]), parse(operands[i + 1]))
            for i, op in enumerate(node.ops)
        ]
        return _chain(pairs, "and")

    def _call(self, node: Any) -> Expression:
        function, names = node.func.id, [arg.id for arg in node.args]
        if function == "len" and self.kinds.get(names[0]) in ("Tensor[]", "float[]"):
            return ("count", self.places[names[0]])
        if function in ("given", "itemsize"):
            if names[0] not in self.places:
                raise _AbsentError
            return (function, self.places[names[0]])
        if function not in ("len", "broadcast"):
            raise KeyError(function)
        return (function, *names)


def _chain(parts: list[Expression], operator: str) -> Expression:
    return functools.reduce(lambda left, right: (operator, left, right), parts)


def _atom(word: str) -> Atom:
    if word in DTYPES:
        return Atom("set", DTYPES[word])
    match = re.fullmatch(r"(param|stat|mixed)\((\w+)\)", word)
    if match is not None:
        return Atom(match[1], letter=match[2])
    return Atom("same", letter=word)
