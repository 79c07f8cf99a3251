"""Torch's cross-entropy and attention in a graph."""

from __future__ import annotations

import operator
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from fusedops.integrations.graph.match import Match
from fusedops.integrations.graph.reader import GraphReader, value_of
from fusedops.integrations.hf.rules.torch_functions import (
    LOSS_OPTIONS,
    UNSERVED,
    multi_head_attention,
)
from fusedops.ops.attention import attention
from fusedops.ops.cross_entropy import cross_entropy

_LOSS_ARGUMENTS = ("input", "target", *LOSS_OPTIONS)
_HALF = (torch.float16, torch.bfloat16)


def cross_entropy_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return torch's cross-entropy of rows of logits, or ``None``."""
    if root.target is not F.cross_entropy or len(root.args) > len(_LOSS_ARGUMENTS):
        return None
    given: dict[str, Any] = dict(zip(_LOSS_ARGUMENTS, root.args, strict=False)) | root.kwargs
    if any(given.get(name) is not None for name in UNSERVED):
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
    narrow = _before_cast(reader, logits)
    if narrow is not None:
        logits, options["dtype"] = narrow, torch.float32
    return Match("cross_entropy", cross_entropy_of_rows, (logits, target), options, (root,))


def _before_cast(reader: GraphReader, rows: fx.Node) -> fx.Node | None:
    """Return half-precision logits of which ``rows`` are a float32 copy, or ``None``.

    They may have leading dimensions that are one in ``rows``.
    """
    value = value_of(rows)
    while rows.target in ("view", "reshape", "flatten", "contiguous"):
        rows = rows.all_input_nodes[0]
    narrow: fx.Node = reader.before_cast(rows)
    before = value_of(narrow)
    if narrow is rows or before is None or value is None or before.dtype not in _HALF:
        return None
    return narrow if before.shape[-1] == value.shape[-1] else None


def cross_entropy_of_rows(
    logits: torch.Tensor, target: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return the cross-entropy of logits with any leading dimensions."""
    return cross_entropy(logits.reshape(-1, logits.shape[-1]), target, **options)


def attention_match(reader: GraphReader, root: fx.Node) -> Match | None:
    """Return torch's attention, ``None`` if a node is none; repeated heads are read once."""
    if root.target is operator.getitem:
        return _multi_head_match(root)
    if root.target is not F.scaled_dot_product_attention or len(root.args) < 3:
        return None
    query, key, value = root.args[:3]
    given = [value_of(argument) for argument in (query, key, value)]
    if any(tensor is None or tensor.dim() != 4 for tensor in given):
        return None
    if len({tensor.dtype for tensor in given if tensor is not None}) > 1:
        return None
    options = dict(root.kwargs)
    num_heads, key_heads, value_heads = (tensor.shape[1] for tensor in given if tensor is not None)
    if key_heads == value_heads == num_heads:
        single = [_before_repeat(key), _before_repeat(value)]
        heads = {value.shape[1] for value in map(value_of, single) if value is not None}
        if None not in single and len(heads) == 1:
            key, value = single
            options["enable_gqa"] = True
    elif key_heads == value_heads == 1:  # torch broadcasts the head
        options["enable_gqa"] = True
    arguments = (query, key, value, *root.args[3:])
    return Match("attention", attention, arguments, options, (root,))


def _multi_head_match(root: fx.Node) -> Match | None:
    """Return the function behind ``nn.MultiheadAttention``, whose first result a node is."""
    match root.args:
        case (fx.Node(target=F.multi_head_attention_forward) as call, 0):
            if call.kwargs.get("need_weights") is False:
                options = dict(call.kwargs)
                return Match("attention", multi_head_attention, call.args, options, (root,))
    return None


def _before_repeat(node: Any) -> fx.Node | None:
    """Return ``x`` where a node is ``x[:, :, None].expand(...).reshape(...)``, or ``None``.

    ``x`` is ``[batch, num_heads, seq_len, head_dim]``; each head stands there several times.
    """
    match node:
        case fx.Node(target="reshape", args=(fx.Node(target="expand", args=(inner, *_)), *_)):
            pass
        case _:
            return None
    match inner:
        case fx.Node(args=(fx.Node() as source, (_, _, None, *rest) as index)):
            pass
        case _:
            return None
    every = (slice(None), slice(None), None, slice(None), slice(None))
    before, after = value_of(source), value_of(node)
    if inner.target is not operator.getitem or tuple(index) != every[: 3 + len(rest)]:
        return None
    if before is None or after is None or before.dim() != 4 or after.dim() != 4:
        return None
    same = before.shape[0] == after.shape[0] and before.shape[2:] == after.shape[2:]
    return source if same else None
