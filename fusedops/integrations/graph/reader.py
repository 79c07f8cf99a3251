"""What a node of a captured graph computes, and whether nodes may become one call.

The graph is what Dynamo captured: functions and methods of torch before autograd, with a fake
tensor for each value (``node.meta["example_value"]``).
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor

from fusedops.integrations.hf.torch_operations import (
    METHODS,
    NAMES,
    Expression,
    NoExpressionError,
    operation,
)

_FUNCTIONS: dict[Any, str] = NAMES | {
    operator.add: "add",
    operator.sub: "sub",
    operator.mul: "mul",
    operator.truediv: "div",
    operator.pow: "pow",
    operator.neg: "neg",
    operator.matmul: "matmul",
    torch.neg: "neg",
    torch.exp: "exp",
    torch.erf: "erf",
    torch._C._nn.gelu: "gelu",
    torch._C._nn.linear: "linear",
}
_METHODS = METHODS | {"neg", "exp", "erf"}
_IN_PLACE_OPERATORS = {
    value for name, value in vars(operator).items() if name.startswith("i") and callable(value)
} - {operator.index, operator.inv, operator.invert, operator.is_, operator.is_not}
_IN_PLACE_ARGUMENT = {
    **dict.fromkeys(("silu", "relu", "relu6", "selu", "mish", "hardswish", "hardsigmoid"), 1),
    **dict.fromkeys(("elu", "celu", "leaky_relu"), 2),
    **dict.fromkeys(("dropout", "alpha_dropout", "feature_alpha_dropout", "dropout1d"), 3),
    **dict.fromkeys(("dropout2d", "dropout3d", "hardtanh", "threshold"), 3),
    "rrelu": 4,
}


def value_of(node: Any) -> FakeTensor | None:
    """Return the fake tensor that a node computes, or ``None`` for all else.

    A tensor of another class (sharded, quantised) has operations of its own.
    """
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return value if isinstance(value, FakeTensor) else None


class GraphReader:
    """Reads one graph."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self._place: dict[fx.Node, int] = {}
        self._region: dict[fx.Node, int] = {}
        self._written: set[int] = set()
        self._has_unknown_writes = False
        self._autocasts: list[tuple[tuple[Any, ...], ...]] = [()]
        for place, node in enumerate(self.graph.nodes):
            self._place[node] = place
            if _changes_context(node):
                entered, name = self._autocasts[-1], getattr(node.target, "__name__", "")
                if name == "_enter_autocast":
                    entered = (*entered, node.args)
                self._autocasts.append(entered[:-1] if name == "_exit_autocast" else entered)
            self._region[node] = len(self._autocasts) - 1
            for value in map(value_of, _written_by(node)):
                self._has_unknown_writes |= value is None
                if value is not None:
                    self._written.add(_storage(value))

    def is_unchanged(self, nodes: Iterable[fx.Node]) -> bool:
        """Return whether nothing writes to the tensors of some nodes anywhere in the graph."""
        if self._has_unknown_writes:
            return False
        values = (value_of(node) for node in nodes)
        return all(value is None or _storage(value) not in self._written for value in values)

    def in_one_region(self, nodes: Iterable[fx.Node]) -> bool:
        """Return whether autocast and gradients are the same from the first node to the last."""
        return len({self._region[node] for node in nodes}) <= 1

    def precedes(self, node: fx.Node, other: fx.Node) -> bool:
        """Return whether a node is computed before another one."""
        return self._place[node] < self._place[other]

    def autocasts(self, node: fx.Node) -> tuple[tuple[Any, ...], ...]:
        """Return the arguments of the autocasts that are entered around a node, in order."""
        return self._autocasts[self._region[node]]

    def position(self, nodes: Sequence[fx.Node], sources: Iterable[Any]) -> fx.Node | None:
        """Return the node before which a call may stand in the place of ``nodes``, or ``None``.

        It comes after the call's sources and before all users.
        """
        places = [self._place[source] for source in sources if isinstance(source, fx.Node)]
        members = set(nodes)
        users = [user for node in nodes for user in node.users if user not in members]
        earliest = min([nodes[-1], *users], key=self._place.__getitem__)
        return earliest if self._place[earliest] > max(places, default=-1) else None

    def insert(self, node: fx.Node, position: fx.Node) -> None:
        """Let a new node be read as one that stands where another one does."""
        self._place[node] = self._place[position]
        self._region[node] = self._region[position]

    def expression(self, node: Any) -> Expression:
        """Return the operation of a node with the nodes of its arguments, else the argument.

        A cast to the dtype that a tensor has, and a dropout of nothing, is that tensor.
        """
        if not isinstance(node, fx.Node):
            return node
        node = self.source(node)
        name, value = _name(node), value_of(node)
        if name is None or value is None:
            return node
        try:
            content = operation(name, _plain(node.args), _plain(node.kwargs))
        except (NoExpressionError, KeyError, IndexError):
            return node
        if content[0] != "cast":
            return content
        known = value_of(content[1])
        if known is None or known.device != value.device:
            return node
        return "cast", content[1], value.dtype

    def before_cast(self, node: Any) -> Any:
        """Return what a node is a float32 copy of, else the node itself."""
        match self.expression(node):
            case ("cast", fx.Node() as source, torch.float32):
                return source
        return node

    def source(self, node: Any) -> Any:
        """Return a node without casts and dropouts that change nothing in front of it."""
        while isinstance(node, fx.Node) and _is_unchanged(node):
            node = node.args[0]
        return node

    def inner(self, roots: Sequence[fx.Node], sources: Iterable[Any]) -> list[fx.Node] | None:
        """Return the nodes from some sources to some roots, the roots among them, in order.

        It is ``None`` where others need the value of one that is not a root.
        """
        stop = {source for source in sources if isinstance(source, fx.Node)}
        members: set[fx.Node] = set()
        waiting = list(roots)
        while waiting:
            node = waiting.pop()
            if node in stop or node in members or node.op in ("placeholder", "get_attr"):
                continue
            members.add(node)
            waiting += node.all_input_nodes
        for node in members:
            if node not in roots and any(user not in members for user in node.users):
                return None
        return sorted(members, key=self._place.__getitem__)


def _name(node: fx.Node) -> str | None:
    if node.op == "call_method":
        return str(node.target) if node.target in _METHODS else None
    if node.op != "call_function":
        return None
    try:
        return _FUNCTIONS.get(node.target)
    except TypeError:  # it has no hash
        return None


def _is_unchanged(node: fx.Node) -> bool:
    """Return whether a node is a cast to the dtype of its argument, or drops nothing."""
    name = _name(node)
    if name in ("to", "float", "type", "type_as"):
        before, after = value_of(node.args[0]), value_of(node)
        if before is None or after is None:
            return False
        return before.dtype == after.dtype and before.device == after.device
    if name != "dropout" or not node.args:
        return False
    given = dict(zip(("p", "training"), node.args[1:], strict=False)) | node.kwargs
    return bool(given.get("p") == 0.0 or given.get("training") is False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _plain(element) for name, element in value.items()}
    if isinstance(value, tuple | list):
        return tuple(_plain(element) for element in value)
    return value


def _storage(value: torch.Tensor) -> int:
    return int(value.untyped_storage()._cdata)


def _changes_context(node: fx.Node) -> bool:
    """Return whether a node enters or leaves autocast, or turns gradients on or off."""
    name = getattr(node.target, "__name__", str(node.target))
    return node.op == "call_function" and (
        name.startswith(("_enter_", "_exit_", "_set_", "set_", "_autograd_"))
        or name in ("_sdpa_kernel_variadic", "_vmap_increment_nesting", "_vmap_decrement_nesting")
    )


def _written_by(node: fx.Node) -> Iterator[fx.Node]:
    """Yield the arguments that an operation may write to."""
    if node.op not in ("call_function", "call_method"):
        return
    target, kwargs = node.target, node.kwargs
    if isinstance(target, torch._ops.OpOverload):
        if target._schema.is_mutable:
            yield from node.all_input_nodes
        return
    if isinstance(target, torch._ops.HigherOrderOperator):
        inner = (part for body in bodies(node) for part in body.graph.nodes)
        if any(True for part in inner for _ in _written_by(part)):
            yield from node.all_input_nodes
        return
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    writes = name.endswith("_") and not name.endswith("__")
    if writes or name in ("__setitem__", "setitem") or target in _IN_PLACE_OPERATORS:
        yield from node.all_input_nodes[:1]
    position = _IN_PLACE_ARGUMENT.get(name)
    in_place = position is not None and node.args[position : position + 1] == (True,)
    if in_place or kwargs.get("inplace") is True:
        yield from node.all_input_nodes[:1]
    if "out" in kwargs:
        yield from _nodes(kwargs["out"])
    if not _is_torchs(target):
        yield from node.all_input_nodes


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Return the graphs that an operator which takes functions runs, as checkpointing does."""
    owner = node.graph.owning_module
    modules = (
        getattr(owner, str(argument.target), None)
        for argument in node.all_input_nodes
        if argument.op == "get_attr" and owner is not None
    )
    return [module for module in modules if isinstance(module, fx.GraphModule)]


def _nodes(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, tuple | list):
        for element in value:
            yield from _nodes(element)


def _is_torchs(target: Any) -> bool:
    """Return whether a target is a method, or a function whose name says whether it writes."""
    if isinstance(target, str):
        return True
    module = getattr(target, "__module__", None) or ""
    own = module.partition(".")[0]
    return own in ("torch", "_operator", "builtins", "math", "fusedops") or isinstance(
        target, type(torch.add) | type(operator.add)
    )
