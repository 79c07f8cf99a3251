"""Cross-entropy and attention of torch in a graph."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fusedops.integrations.graph.match import Match
from fusedops.integrations.graph.reader import GraphReader, value_of
from fusedops.ops.attention import attention
from fusedops.ops.cross_entropy import cross_entropy

_LOSS_ARGUMENTS = (
    *("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction"),
    "label_smoothing",
)
_HALF = (torch.float16, torch.bfloat16)


def cross_entropy_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return torch's cross-entropy of rows of logits, or ``None``."""
    if root.target is not F.cross_entropy or len(root.args) > len(_LOSS_ARGUMENTS):
        return None
    given: dict[str, Any] = dict(zip(_LOSS_ARGUMENTS, root.args, strict=False)) | root.kwargs
    if any(given.get(name) is not None for name in ("weight", "size_average", "reduce")):
        return None
    logits, target = given["input"], given["target"]
    rows, labels = value_of(logits), value_of(target)
    if rows is None or labels is None or rows.dim() != 2 or labels.dtype != torch.int64:
        return None
    options = {
        name: given[name]
        for name in ("ignore_index", "reduction", "label_smoothing")
        if name in given
    }
    match reader.expression(logits):
        case ("cast", fx.Node() as narrow, torch.float32):
            value = value_of(narrow)
            if value is not None and value.dtype in _HALF:
                logits, options["dtype"] = narrow, torch.float32
    return Match("cross_entropy", cross_entropy, (logits, target), options, (root,))


def attention_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return torch's attention, or ``None``."""
    if root.target is not F.scaled_dot_product_attention:
        return None
    query, key, value = (value_of(argument) for argument in root.args[:3])
    if query is None or key is None or value is None or query.dim() != 4:
        return None
    if not query.dtype == key.dtype == value.dtype:
        return None
    options = dict(root.kwargs)
    if key.shape[1] == value.shape[1] == 1 != query.shape[1]:  # torch broadcasts the head
        options["enable_gqa"] = True
    return Match("attention", attention, root.args, options, (root,))
