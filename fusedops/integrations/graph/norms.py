"""Norms in a graph: torch's, and those that are written as a formula."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from fusedops.integrations.graph.match import Match
from fusedops.integrations.graph.reader import GraphReader, value_of
from fusedops.integrations.hf.rules.recognition import NormExpression, norm_of
from fusedops.integrations.hf.symbolic import INPUT
from fusedops.integrations.hf.torch_operations import Expression, operation
from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.ops.add_rms_norm import add_rms_norm
from fusedops.ops.layer_norm import layer_norm
from fusedops.ops.rms_norm import rms_norm

_MOST_OPERATIONS = 10  # between the input of a norm and its result, on any way
_ITS_DTYPE = ("dtype", INPUT)
_HALF = (torch.float16, torch.bfloat16)


def norm_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return the norm that ends at a node, or ``None``."""
    return _function_match(reader, root) or _formula_match(reader, root)


def add_norm_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return the sum of two tensors and its norm, which ends at a node, or ``None``."""
    match = norm_match(reader, root) or _fused_match(root)
    if match is None:
        return None
    source, *rest = match.arguments
    match reader.expression(source):
        case ("add", fx.Node() as first, fx.Node() as second):
            pass
        case _:
            return None
    total, *terms = map(value_of, (source, first, second))
    for value in terms:
        if value is None or total is None:
            return None
        if value.dtype != total.dtype or value.shape != total.shape:
            return None
    function = add_layer_norm if match.rewrite == "layer_norm" else add_rms_norm
    arguments, roots = (first, second, *rest), (root, source)
    return Match(f"add_{match.rewrite}", function, arguments, match.options, roots)


def _function_match(reader: GraphReader, root: fx.Node) -> Match | None:
    match reader.expression(root):
        case ("cast", fx.Node() as node, dtype):
            narrowed = dtype
        case _:
            node, narrowed = root, None
    match reader.expression(node):
        case ("layer_norm" | "rms_norm" as op, fx.Node() as source, *options):
            given: dict[str, Any] = dict(options)
        case _:
            return None
    if narrowed is not None:
        wide, source = source, reader.before_cast(source)
        if source is wide:
            return None
    input, shape = value_of(source), given["normalized_shape"]
    weight, bias, eps = given.get("weight"), given.get("bias"), given.get("eps")
    if narrowed is not None:
        weight, bias = (reader.before_cast(parameter) for parameter in (weight, bias))
        if input is None or narrowed != input.dtype or input.dtype not in _HALF:
            return None
    if not _are_parameters((weight, bias), input, shape):
        return None
    if op == "layer_norm":
        arguments = (source, shape, weight, bias, 1e-5 if eps is None else eps)
        return Match("layer_norm", layer_norm, arguments, {}, (root,))
    value = value_of(weight)
    if narrowed is None and value is not None and input is not None and value.dtype != input.dtype:
        return None  # torch has a third way of computing it, with the sums of neither dtype
    if eps is None and narrowed is not None:
        eps = torch.finfo(torch.float32).eps
    return Match("rms_norm", rms_norm, (source, shape, weight, eps), {}, (root,))


def _fused_match(root: fx.Node) -> Match | None:
    """Return the fused norm, as patched modules call it, whose result a node is, or ``None``."""
    match root.args:
        case (fx.Node(target=op, args=arguments), 0) if root.target is operator.getitem:
            pass
        case _:
            return None
    if op is torch.ops.fusedops.layer_norm.default:
        return Match("layer_norm", layer_norm, arguments, {}, (root,))
    if op is torch.ops.fusedops.rms_norm.default:
        *others, offset, rounding = arguments
        options = {"weight_offset": offset, "rounding": rounding}
        return Match("rms_norm", rms_norm, tuple(others), options, (root,))
    return None


def _formula_match(reader: GraphReader, root: fx.Node) -> Match | None:
    content = reader.expression(root)
    may_end = isinstance(content, tuple) and content[0] in ("mul", "div", "cast")
    for source in _possible_inputs(reader, root) if may_end else []:
        input = value_of(source)
        if input is None or input.dim() == 0 or not input.is_floating_point():
            continue
        for expands_weights in (True, False):
            writer = _Writer(reader, source, expands_weights)
            expression = writer.expression(root, _MOST_OPERATIONS)
            if input.dtype == torch.float32:
                expression = ("cast", expression, _ITS_DTYPE)
            norm = norm_of(expression)
            if norm is not None and not (input.dtype in _HALF and not norm.wide):
                match = _match_of(writer, norm, root)
                if match is not None:
                    return match
    return None


def _match_of(writer: _Writer, norm: NormExpression, root: fx.Node) -> Match | None:
    source = writer.source
    input = value_of(source)
    assert input is not None
    weight, bias, eps = map(writer.node_at, (norm.weight, norm.bias, norm.eps))
    shape = (input.shape[-1],)
    if (norm.wide and input.dtype == torch.float64) or not isinstance(eps, float | None):
        return None
    if not _are_parameters((weight, bias), input, shape):
        return None
    if norm.op == "layer_norm":
        return Match("layer_norm", layer_norm, (source, shape, weight, bias, eps), {}, (root,))
    options: dict[str, Any] = {"rounding": norm.rounding}
    if weight is not None:
        options["weight_offset"] = norm.weight_offset
    return Match("rms_norm", rms_norm, (source, shape, weight, eps), options, (root,))


def _are_parameters(
    parameters: tuple[Any, ...], input: torch.Tensor | None, shape: tuple[Any, ...]
) -> bool:
    """Return whether an op takes these as weight and bias for an input."""
    if input is None or not all(isinstance(size, int) for size in shape):
        return False
    dtypes = (input.dtype, torch.float32) if input.dtype in _HALF else (input.dtype,)
    values = [value_of(parameter) for parameter in parameters if parameter is not None]
    known = [value for value in values if value is not None]
    return (
        len(known) == len(values)
        and all(tuple(value.shape) == shape and value.dtype in dtypes for value in known)
        and len({value.dtype for value in known}) <= 1
    )


def _possible_inputs(reader: GraphReader, root: fx.Node) -> list[fx.Node]:
    """Return the nodes that may be the input of a formula that ends at a node."""
    waiting: list[tuple[fx.Node, int]] = [(root, 0)]
    while waiting:
        node, depth = waiting.pop()
        match reader.expression(node):
            case ("mean", fx.Node() as squares):
                match reader.expression(squares):
                    case ("square", fx.Node() as row):
                        return _rows(reader, row)
            case ("mul" | "cast" | "add" | "rsqrt" | "sqrt" | "div", *parts) if depth < 7:
                waiting += [(part, depth + 1) for part in parts if isinstance(part, fx.Node)]
    return []


def _rows(reader: GraphReader, row: fx.Node) -> list[fx.Node]:
    """Return what may be the input where ``row`` is squared: it, its minuend, either uncast."""
    rows = []
    match reader.expression(row):
        case ("sub", fx.Node() as minuend, _):
            rows = _rows(reader, minuend)
        case ("cast", fx.Node() as source, torch.float32):
            rows = [reader.source(source)]
    return [*rows, reader.source(row)]


class _Writer:
    """Writes nodes as expressions in terms of a source, as ``symbolic.py`` does for modules."""

    def __init__(self, reader: GraphReader, source: fx.Node, expands_weights: bool) -> None:
        """Write what does not depend on the source as an expression too if ``expands_weights``."""
        self.source = source
        self._reader = reader
        self._expands_weights = expands_weights
        self._nodes: dict[str, fx.Node] = {}

    def node_at(self, place: Any) -> Any:
        """Return the node at a place of an expression; a number or ``None`` is returned."""
        return self._nodes[place[1]] if isinstance(place, tuple) else place

    def expression(self, node: Any, depth: int) -> Expression:
        """Return the expression of a node, of at most ``depth`` operations on any way.

        A tensor in float32 is written as a cast to float32, whether it is one or not.
        """
        node = self._reader.source(node)
        if not isinstance(node, fx.Node):
            return node
        if node is self.source:
            return self._wide(node, INPUT)
        content = self._reader.expression(node)
        if (
            not isinstance(content, tuple)
            or depth == 0
            or not (self._expands_weights or self._depends(node, depth))
        ):
            self._nodes[node.name] = node
            return self._wide(node, ("attribute", node.name))
        name, *arguments = content
        if name == "cast":
            source, dtype = value_of(self.source), arguments[1]
            its_dtype = source is not None and dtype == source.dtype != torch.float32
            inner = self.expression(arguments[0], depth - 1)
            return "cast", inner, _ITS_DTYPE if its_dtype else dtype
        written = tuple(self.expression(argument, depth - 1) for argument in arguments)
        return operation(name, written, {}) if name == "div" else (name, *written)

    def _wide(self, node: fx.Node, expression: Expression) -> Expression:
        value = value_of(node)
        if value is not None and value.dtype == torch.float32:
            return "cast", expression, torch.float32
        return expression

    def _depends(self, node: fx.Node, depth: int) -> bool:
        if node is self.source:
            return True
        return depth > 0 and any(self._depends(part, depth - 1) for part in node.all_input_nodes)
