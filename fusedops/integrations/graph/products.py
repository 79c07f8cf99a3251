"""Linear layers, their activations and gates in a graph."""

from __future__ import annotations

from typing import Any

from torch import fx

from fusedops.integrations.graph.activations import activation_of
from fusedops.integrations.graph.match import Match
from fusedops.integrations.graph.reader import GraphReader, value_of
from fusedops.integrations.hf.rules.chain import GATES, GELUS, gated_product
from fusedops.integrations.hf.rules.recognition import factors
from fusedops.integrations.hf.rules.torch_modules import own_product, torchs_product_is_faster
from fusedops.ops.gelu import gelu
from fusedops.ops.linear_act import linear_act
from fusedops.ops.linear_glu import linear_glu
from fusedops.ops.mlp import mlp


def mlp_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return linear layer, activation and linear layer, or ``None``."""
    last = _linear(reader, root) if _fuses_products(root) else None
    if last is None:
        return None
    source, *parameters = last
    first = linear_act_match(reader, source)
    if first is None:
        return None
    return Match("mlp", mlp, (*first.arguments, *parameters), first.options, (root,))


def linear_act_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return linear layer and activation, or ``None``."""
    activation, source = activation_of(reader, root)
    linear = None if activation is None else _linear(reader, source)
    if linear is None or not _fuses_products(root):
        return None
    return Match("linear_act", linear_act, linear, {"activation": activation}, (root,))


def _fuses_products(node: fx.Node) -> bool:
    value = value_of(node)
    return value is not None and not torchs_product_is_faster(value)


def linear_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return a linear layer that the own product computes faster than torch's, or ``None``."""
    linear = _linear(reader, root)
    value = value_of(root)
    if linear is None or value is None or not own_product(value):
        return None
    return Match("linear", linear_act, linear, {"activation": "identity"}, (root,))


def linear_glu_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return two linear layers without bias and the product behind an activation, or ``None``."""
    for gate, up in factors(reader.expression(root)) if _fuses_products(root) else []:
        activation, source = activation_of(reader, gate)
        first, second = _linear(reader, source), _linear(reader, up)
        if activation is None or first is None or second is None:
            continue
        if first[0] is second[0] and first[2] is None and second[2] is None:
            arguments = (first[0], first[1], second[1])
            return Match("linear_glu", linear_glu, arguments, {"activation": activation}, (root,))
    return None


def glu_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return the product of a tensor and another one behind an activation, or ``None``."""
    for gate, up in factors(reader.expression(root)):
        activation, source = activation_of(reader, gate)
        if activation not in GATES or not isinstance(up, fx.Node):
            continue
        name = "swiglu" if activation == "silu" else "geglu"
        return Match(name, gated_product, (source, up, activation), {}, (root,))
    return None


def gelu_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return GELU, or ``None``."""
    activation, source = activation_of(reader, root)
    if activation not in GELUS:
        return None
    return Match("gelu", gelu, (source, GELUS[activation]), {}, (root,))


def _linear(reader: GraphReader, node: Any) -> tuple[Any, Any, Any] | None:
    """Return input, weight and bias of a linear layer, or ``None``."""
    match reader.expression(node):
        case ("linear", fx.Node() as source, *options):
            given = dict(options)
            weight, bias = value_of(given["weight"]), value_of(given.get("bias"))
            if weight is None or weight.dim() != 2 or (bias is not None and bias.dim() != 1):
                return None
            return source, given["weight"], given.get("bias")
    return None
