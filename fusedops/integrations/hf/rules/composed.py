"""Feed-forward layers with further operations between their parts, known by their code.

Falcon-H1 multiplies its gate by a number, DeepSeek-V4 bounds gate and factor, Zamba2 adds an
adapter to the packed projection, XLNet ends in the residual sum and a norm. The expression of the
forward (``symbolic.py``) is made a program of a few nodes, once for the class. A patched instance
runs it: chains (``chain.py``) and gated products (``gated_mlp.py``) by the fused ops, the rest by
torch's.
"""

from __future__ import annotations

import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn

from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.activations import Function, known_name_in, name_in, obstacle_in
from fusedops.integrations.hf.rules.chain import Step
from fusedops.integrations.hf.rules.gated_mlp import (
    GATES,
    GatedNames,
    gated_product,
    projections_obstacle,
)
from fusedops.integrations.hf.rules.recognition import activation_of, factors, step_of
from fusedops.integrations.hf.rules.rule import (
    PatchRule,
    configuration_obstacle,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.integrations.hf.symbolic import INPUT, Expression, Path, value_of
from fusedops.ops.linear_glu import linear_glu


class Argument(NamedTuple):
    """An argument of the forward; ``None``: the first one."""

    name: str | None


class Attribute(NamedTuple):
    """An attribute of the module, or of something in it."""

    path: str


class Literal(NamedTuple):
    """A number or dtype."""

    value: Any


class Operation(NamedTuple):
    """A function of ``_OPERATIONS`` of other nodes."""

    name: str
    operands: tuple[int, ...]
    options: tuple[tuple[str, int], ...] = ()


class Chain(NamedTuple):
    """Steps that run one after the other."""

    steps: tuple[Step, ...]
    source: int


class GateReading(NamedTuple):
    """One reading of a product: ``activation(gate) * up``.

    Attributes:
        activation: a child, or a function of torch.
        gate: the node that it is applied to.
        up: the other factor.
        names: of the children whose products of one input gate and up are; else ``None``.
    """

    activation: str | Function
    gate: int
    up: int
    names: GatedNames | None


class Product(NamedTuple):
    """A product of two nodes, and the readings of it as a gated one."""

    factors: tuple[int, int]
    gates: tuple[GateReading, ...]


Node = Argument | Attribute | Literal | Operation | Chain | Product

_OPERATIONS: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "sub": operator.sub,
    "div": operator.truediv,
    "neg": operator.neg,
    "item": operator.getitem,
    "part": operator.getitem,
    "square": torch.square,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "clamp": torch.clamp,
    "chunk": torch.chunk,
    "matmul": torch.matmul,
    "dtype": lambda tensor: tensor.dtype,
    "cast": lambda tensor, dtype: tensor.to(dtype),
    "contiguous": lambda tensor: tensor.contiguous(),
    "call": lambda child, input: child(input),
}
_NUM_OPERANDS = {"clamp": 1, "chunk": 2}  # the others' arguments are all operands


class LayerProgram:
    """The nodes of an expression; the last one is its result.

    Attributes:
        path: whose result the expression is.
    """

    def __init__(self, path: Path) -> None:
        """Make the nodes; raises ``KeyError`` for an operation that is not known here."""
        self.path = path
        self._nodes: list[Node] = []
        self._slots: dict[int, int] = {}
        self._uses: Counter[int] = Counter()
        self._count_uses(path.result)
        self._result = self._slot(path.result)

    def _count_uses(self, expression: Expression) -> None:
        self._uses[id(expression)] += 1
        if isinstance(expression, tuple) and self._uses[id(expression)] == 1:
            for part in expression:
                self._count_uses(part)

    def _slot(self, expression: Expression) -> int:
        """Return the number of the node for an expression; one object is computed once."""
        slot = self._slots.get(id(expression))
        if slot is None:
            node = self._node(expression)
            self._nodes.append(node)
            slot = self._slots[id(expression)] = len(self._nodes) - 1
        return slot

    def _node(self, expression: Expression) -> Node:
        match expression:
            case ("input",):
                return Argument(None)
            case ("input", str(name)):
                return Argument(name)
            case ("attribute", str(path)):
                return Attribute(path)
            case (str(), *_):
                pass
            case _:
                return Literal(expression)
        steps, source = self._steps(expression)
        if steps:
            return Chain(steps, self._slot(source))
        pairs = factors(expression)
        if pairs:
            gates = (
                self._reading(activation, self._slot(content), self._slot(up))
                for gate, up in pairs
                for activation, content in [activation_of(gate)]
                if activation is not None and self._uses[id(gate)] == 1
            )
            first, second = pairs[0]
            return Product((self._slot(first), self._slot(second)), tuple(gates))
        name, *arguments = expression
        _OPERATIONS[name]  # a KeyError is for the caller
        count = _NUM_OPERANDS.get(name, len(arguments))
        options = ((key, self._slot(value)) for key, value in arguments[count:])
        operands = (self._slot(argument) for argument in arguments[:count])
        return Operation(name, tuple(operands), tuple(options))

    def _steps(self, expression: Expression) -> tuple[tuple[Step, ...], Expression]:
        """Return the last steps of an expression, of whose results nothing else is made."""
        steps: list[Step] = []
        while not steps or self._uses[id(expression)] == 1:
            step, source = step_of(expression)
            if step is None:
                break
            steps.append(step)
            expression = source
        return tuple(reversed(steps)), expression

    def compute(self, module: Any, arguments: dict[str | None, Any]) -> torch.Tensor:
        """Return the result for a module that takes this path.

        Args:
            module: a module of the class.
            arguments: of its forward, by name; ``None``: the first one.
        """
        results: dict[int, Any] = {}

        def result(slot: int) -> Any:
            if slot not in results:
                results[slot] = compute(self._nodes[slot])
            return results[slot]

        def compute(node: Node) -> Any:
            if isinstance(node, Chain):
                return chain.run(module, node.steps, result(node.source))
            if isinstance(node, Product):
                return product(node)
            if isinstance(node, Operation):
                options = {name: result(slot) for name, slot in node.options}
                return _OPERATIONS[node.name](*map(result, node.operands), **options)
            if isinstance(node, Attribute):
                return value_of(module, node.path)
            return arguments[node.name] if isinstance(node, Argument) else node.value

        def product(node: Product) -> Any:
            gate = _known_gate(module, node)
            if gate is None or obstacle_in(module, gate.activation) is not None:
                first, second = node.factors
                return result(first) * result(second)
            activation = known_name_in(module, gate.activation)
            names = gate.names
            if names is not None and _are_read(module, gate):
                source: Any = self._nodes[gate.gate]
                weights = (value_of(module, name).weight for name in (names.gate, names.up))
                return linear_glu(result(source.source), *weights, activation=activation)
            return gated_product(result(gate.gate), result(gate.up), activation)

        output: torch.Tensor = result(self._result)
        return output

    def _reading(self, activation: str | Function, gate: int, up: int) -> GateReading:
        names = None
        match self._nodes[gate], self._nodes[up]:
            case (Chain((str(projection),), source), Chain((str(other),), other_source)):
                if source == other_source:
                    names = GatedNames(projection, other, activation)
        return GateReading(activation, gate, up, names)

    def _used(self, slot: int, gate_of: Callable[[Product], GateReading | None]) -> Iterator[Node]:
        """Yield the nodes that a node needs, given which gated products are read as such."""
        node = self._nodes[slot]
        yield node
        match node:
            case Chain(_, source):
                slots: tuple[int, ...] = (source,)
            case Product(both, _):
                gate = gate_of(node)
                slots = both if gate is None else (gate.gate, gate.up)
            case Operation(_, operands, options):
                slots = (*operands, *(operand for _, operand in options))
            case _:
                slots = ()
        for part in slots:
            yield from self._used(part, gate_of)

    def ops(self) -> tuple[str, ...]:
        """Return the op that may run, of several the first: none if there is no such part."""
        nodes = list(self._used(self._result, lambda node: next(iter(node.gates), None)))
        gates = [gate for node in nodes if isinstance(node, Product) for gate in node.gates]
        if gates:
            direct = any(gate.names is not None for gate in gates)
            return ("linear_glu",) if direct else ("swiglu", "geglu")
        longest = max((len(node.steps) for node in nodes if isinstance(node, Chain)), default=0)
        if longest < 2:
            return ()
        return ("mlp",) if longest > 2 else ("linear_act",)

    def parts(self, module: Any) -> list[Chain | GateReading]:
        """Return the chains with a linear layer and an activation, and the gated products."""
        parts: list[Chain | GateReading] = []
        for node in self._used(self._result, lambda node: _known_gate(module, node)):
            if isinstance(node, Chain) and chain.has_known_pair(module, node.steps):
                parts.append(node)
            elif isinstance(node, Product):
                gate = _known_gate(module, node)
                parts += [] if gate is None else [gate]
        return parts

    def obstacle(self, module: Any) -> str | None:
        """Return why no part is one op now, or ``None``."""
        reasons = [
            chain.chain_obstacle(module, part.steps)
            if isinstance(part, Chain)
            else obstacle_in(module, part.activation)
            for part in self.parts(module)
        ]
        known = [reason for reason in reasons if reason is not None]
        if len(known) < len(reasons):
            return global_hooks()
        return "; ".join(known) or "it has no activation"

    def fused_children(self, module: Any) -> tuple[str, ...]:
        """Return the children whose work a fused op does."""
        names: list[str] = []
        for part in self.parts(module):
            if isinstance(part, Chain):
                names += chain.fused_children(module, part.steps)
                continue
            if part.names is not None and _are_read(module, part):
                names += part.names[:2]
            if isinstance(part.activation, str):
                names.append(part.activation)
        return tuple(names)

    def ops_in(self, module: Any) -> tuple[str, ...]:
        """Return the ops that a module runs in its current state."""
        names: list[str] = []
        for part in self.parts(module):
            if isinstance(part, Chain):
                names += chain.fused_ops(module, part.steps)
                continue
            after = "swiglu" if name_in(module, part.activation) == "silu" else "geglu"
            names.append("linear_glu" if _are_read(module, part) else after)
        return tuple(dict.fromkeys(names))

    def note(self, module: Any) -> str | None:
        """Return which products are computed on their own, and why, or ``None``."""
        for part in self.parts(module):
            if isinstance(part, Chain):
                note = chain.chain_note(module, part.steps)
            else:
                names = part.names
                reason = None if names is None else projections_obstacle(module, names)
                note = None if reason is None else f"swiglu or geglu after the products: {reason}"
            if note is not None:
                return note
        return None


def _are_read(module: Any, gate: GateReading) -> bool:
    """Return whether the op that does a gate may do both projections as well."""
    return gate.names is not None and projections_obstacle(module, gate.names) is None


def _known_gate(module: Any, product: Product) -> GateReading | None:
    """Return the reading of a product whose activation is known, or ``None``."""
    for gate in product.gates:
        name = name_in(module, gate.activation)
        if name in GATES or (name is not None and _are_read(module, gate)):
            return gate
    return None


def programs_of(paths: tuple[Path, ...]) -> tuple[LayerProgram, ...]:
    """Return the programs of the paths that may compute a feed-forward layer."""
    programs: list[LayerProgram] = []
    for path in paths:
        try:
            program = LayerProgram(path)
        except KeyError:
            continue
        if path.result != INPUT and program.ops():
            programs.append(program)
    return tuple(programs)


class _Composed(nn.Module):
    """What all patched classes of this kind are derived from."""

    programs: tuple[LayerProgram, ...]


def composed_rule(
    original: type[nn.Module], module_name: str, programs: tuple[LayerProgram, ...]
) -> PatchRule:
    """Return the rule for a class whose forward is one of some programs.

    Args:
        original: the class.
        module_name: holds the patched class.
        programs: an instance runs the first one whose path it takes.
    """
    theirs: Any = original.forward
    signature = inspect.signature(theirs)
    own, first, *others = signature.parameters.values()
    optional = {name for program in programs for name in program.path.optional}
    known = [other for other in others if other.default is other.empty or other.name in optional]
    names = [other.name for other in known]

    def program_of(module: Any) -> LayerProgram | None:
        return next((program for program in programs if program.path.holds(module)), None)

    def forward(self: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        given: dict[str | None, Any] = {**dict(zip((first.name, *names), args, strict=False))}
        given.update(kwargs)
        input = given[None] = given.get(first.name)
        program = program_of(self) if isinstance(input, torch.Tensor) and runs_here(input) else None
        if (
            program is None
            or (names and any(given.get(name) is None for name in names))
            or global_hooks() is not None
        ):
            output: torch.Tensor = theirs(self, *args, **kwargs)
            return output
        return program.compute(self, given)

    vars(forward)["__signature__"] = signature.replace(parameters=[own, first, *known])

    def obstacle(module: Any) -> str | None:
        program = program_of(module)
        return configuration_obstacle(module, lambda _: program is not None) or (
            program.obstacle(module) if program is not None else None
        )

    def applies(module: Any) -> bool:
        program = program_of(module)
        return program is not None and bool(program.parts(module))

    def inside(module: Any) -> tuple[str, ...]:
        program = program_of(module)
        return () if program is None else program.fused_children(module)

    def note(module: Any) -> str | None:
        program = program_of(module)
        return None if program is None else program.note(module)

    def ops_in(module: Any) -> tuple[str, ...]:
        program = program_of(module)
        return () if program is None else program.ops_in(module)

    ops = tuple(dict.fromkeys(op for program in programs for op in program.ops()))
    return PatchRule(
        original,
        subclass(original, _Composed, module_name, programs=programs, forward=forward),
        ops,
        "O1" if ops[0] == "swiglu" else "O2",
        obstacle=obstacle,
        applies=applies,
        inside=inside,
        ops_in=ops_in,
        note=note,
    )
