"""Encodes contracts as lists of integers, which ``csrc/contract.cpp`` decodes.

A code is a list of integers, with indices into two more lists: strings and bounds. Names of sizes,
lists and letters become numbers. Only this file and ``csrc/contract.cpp`` know the format.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fusedops._core import contract
from fusedops._core.contract import Program
from fusedops._core.dtypes import SCALAR_TYPES

_STEPS = {
    contract.TensorRule: 1,
    contract.Definition: 2,
    contract.Requirement: 3,
    contract.Range: 4,
    contract.Choice: 5,
    contract.Gradients: 6,
    contract.Elements: 7,
}
_ATOMS = {"set": 0, "same": 1, "param": 2, "stat": 3, "mixed": 4}
_OPERATIONS = {
    name: code
    for code, name in enumerate(
        (
            *("constant", "size", "argument", "word", "given", "itemsize", "len", "item", "if"),
            *(*contract.OPERATORS, "and", "or", "unknown", "count"),
        )
    )
}
Code = tuple[list[int], list[str], list[float]]


def encode(program: Program) -> Code:
    return _Encoder(program).code()


class _Encoder:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.names: dict[str, dict[str, int]] = {"size": {}, "list": {}, "letter": {}}
        self.words: list[str] = []
        self.bounds: list[float] = []

    def code(self) -> Code:
        arguments = list(enumerate(self.program.arguments))
        tensors = [i for i, (kind, _) in arguments if kind.startswith("Tensor")]
        lists = [
            (self._number("list", name), i)
            for i, (kind, name) in arguments
            if kind in ("SymInt[]", "int[]", "bool[]")
        ]
        letters = [
            (self._number("letter", name), i)
            for i, (kind, name) in arguments
            if kind == "ScalarType"
        ]
        body = self._steps(self.program.steps)
        counts = [len(self.names[kind]) for kind in ("size", "list", "letter")]
        pairs = [len(lists), *sum(lists, ()), len(letters), *sum(letters, ())]
        return [*counts, len(tensors), *tensors, *pairs, *body], self.words, self.bounds

    def _number(self, kind: str, name: str) -> int:
        return self.names[kind].setdefault(name, len(self.names[kind]))

    def _word(self, word: str) -> int:
        self.words.append(word)
        return len(self.words) - 1

    def _steps(self, steps: Sequence[contract.Step]) -> list[int]:
        code = [len(steps)]
        for step in steps:
            code += [_STEPS[type(step)], *self._step(step)]
        return code

    def _step(self, step: contract.Step) -> list[int]:
        if isinstance(step, contract.Elements):
            lists = [int(value) for place, _, empty in step.lists for value in (place, empty)]
            number = self._number("size", "number")
            return [len(step.lists), *lists, number, *self._steps(step.steps)]
        if isinstance(step, contract.TensorRule):
            return self._tensor(step)
        if isinstance(step, contract.Definition):
            if step.expression[0] == "broadcast":
                first, second = (self._number("list", name) for name in step.expression[1:])
                return [1, self._number("list", step.name), first, second]
            return [0, self._number("size", step.name), *self._expression(step.expression)]
        if isinstance(step, contract.Requirement):
            return self._expression(step.expression)
        if isinstance(step, contract.Range):
            self.bounds += [step.low, step.high]
            return [step.argument, len(self.bounds) - 2, step.low_open, step.high_open]
        if isinstance(step, contract.Choice):
            words = [self._word(word) for word in step.words]
            return [step.argument, len(words), *words]
        needs = [number for pair in step.needs for number in pair]
        return [
            *(len(step.incoming), *step.incoming, step.mask, step.count),
            *(len(step.needs), *needs),
        ]

    def _tensor(self, rule: contract.TensorRule) -> list[int]:
        binds = -1 if rule.binds is None else self._number("letter", rule.binds)
        code = [rule.argument, int(rule.optional), int(rule.dense), binds, len(rule.atoms)]
        for atom in rule.atoms:
            if atom.kind == "set":
                operand = sum(1 << SCALAR_TYPES[dtype] for dtype in atom.dtypes)
            else:
                operand = self._number("letter", atom.letter)
            code += [_ATOMS[atom.kind], operand]
        code.append(len(rule.shapes))
        for shape in rule.shapes:
            code.append(len(shape))
            for size in shape:
                code.append(int(size.broadcast) + int(size.shorter))
                if size.is_list:
                    code += [1, self._number("list", size.expression)]
                elif isinstance(size.expression, tuple) and size.expression[0] == "size":
                    code += [2, self._number("size", size.expression[1])]
                else:
                    code += [0, *self._expression(size.expression)]
        return code

    def _expression(self, expression: contract.Expression) -> list[int]:
        """Return the length of the postfix code, and the code."""
        code = self._postfix(expression)
        return [len(code), *code]

    def _postfix(self, expression: Any) -> list[int]:
        if not isinstance(expression, tuple):
            return [_OPERATIONS["constant"], int(expression)]
        kind, *operands = expression
        operation = _OPERATIONS[kind]
        if kind in ("size", "len"):
            return [operation, self._number("size" if kind == "size" else "list", operands[0])]
        if kind == "item":
            return [*self._postfix(operands[1]), operation, self._number("list", operands[0])]
        if kind in ("argument", "given", "itemsize", "count"):
            return [operation, operands[0]]
        if kind == "word":
            return [operation, operands[0], self._word(operands[1])]
        if kind == "unknown":
            return [operation]
        return [*(number for operand in operands for number in self._postfix(operand)), operation]
