"""The fused operators as torch operators, for programs that run without fusedops.

    program = torch.export.export(model, args, dynamic_shapes=shapes)
    program = program.run_decompositions(fusedops.decompositions())

Each op becomes its reference in torch operations, or the one operator that torch has for it
(LayerNorm, RMSNorm, attention). Experts become one product per expert.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core import backends
from fusedops.kernels._arguments import GroupedArguments, MoeArguments
from fusedops.ops import _attention_math, _moe_math, _norm_math
from fusedops.ops._moe_gate import hidden_of
from fusedops.ops.linear_act import activate
from fusedops.ops.rotary_embedding import rotated

Decompositions = dict[torch._ops.OpOverload, Callable[..., Any]]
_LEFT = (
    *("attention_decode", "attention_varlen", "causal_conv1d", "gated_delta_rule"),
    *("selective_scan", "selective_state_space", "moe_pack", "moe_unpack"),
)


def decompositions() -> Decompositions:
    """Return a table for ``torch.export.ExportedProgram.run_decompositions``.

    Returns:
        Operator -> a function of torch operators that computes the same, for the forward of every
        op. Results are within each op's error budget; the order of sums differs.

    Note:
        The table has no backward operators: export under ``torch.no_grad()``. Not decomposed are
        ``attention_decode``, ``attention_varlen``, ``causal_conv1d``, ``gated_delta_rule``,
        ``selective_scan`` and ``selective_state_space``, because they read lengths while they run,
        and ``moe_pack`` and ``moe_unpack``, which belong to exchanges between processes.

    Example:
        >>> import torch, fusedops
        >>> norm = fusedops.nn.RMSNorm(4)
        >>> with torch.no_grad():
        ...     program = torch.export.export(norm, (torch.ones(2, 4),))
        >>> program = program.run_decompositions(fusedops.decompositions())
        >>> any("fusedops" in str(node.target) for node in program.graph.nodes)
        False
    """
    table = {name: backends.reference(name) for name in backends.op_names()} | _OWN
    return {
        getattr(torch.ops.fusedops, name).default: function
        for name, function in table.items()
        if name not in _LEFT
    }


def _layer_norm(*args: Any) -> tuple[Any, ...]:
    input, _, weight, bias, _ = args
    output, mean, rstd = backends.reference("layer_norm")(*args)
    if _of_dtype(input.dtype, weight, bias):
        output = F.layer_norm(*args).contiguous()
    return output, mean, rstd


def _add_layer_norm(*args: Any) -> tuple[Any, ...]:
    _, _, shape, weight, bias, _, eps, *_ = args
    _, summed, mean, rstd = backends.reference("add_layer_norm")(*args)
    return _layer_norm(summed, shape, weight, bias, eps)[0], summed, mean, rstd


def _rms_norm(*args: Any) -> tuple[Any, ...]:
    input, shape, weight, eps, weight_offset, _ = args
    output, rstd = backends.reference("rms_norm")(*args)
    # In half precision models round in other places than torch.
    if input.dtype == torch.float32 and weight is not None and _of_dtype(input.dtype, weight):
        factor = _norm_math.offset(weight, weight_offset, input.dtype)
        output = F.rms_norm(input, shape, factor, eps).contiguous()
    return output, rstd


def _add_rms_norm(*args: Any) -> tuple[Any, ...]:
    _, _, shape, weight, _, eps, weight_offset, rounding, *_ = args
    _, summed, rstd = backends.reference("add_rms_norm")(*args)
    normed, _ = _rms_norm(summed, shape, weight, eps, weight_offset, rounding)
    return normed, summed, rstd


def _of_dtype(dtype: torch.dtype, *parameters: torch.Tensor | None) -> bool:
    return all(weight is None or weight.dtype == dtype for weight in parameters)


def _attention(*args: Any) -> tuple[torch.Tensor, ...]:
    query, key, value, attn_mask, alibi_slopes, sinks, seed, *options = args
    _, scale, window_left, window_right, softcap, _ = options
    output, *rest = backends.reference("attention")(*args)
    # torch's own has a mask of query's dtype, and would round another.
    fits = attn_mask is None or attn_mask.dtype in (torch.bool, query.dtype)
    if fits and alibi_slopes is None and sinks is None and seed is None and softcap == 0.0:
        causal = attn_mask is None and (window_left, window_right) == (-1, 0)
        mask = None if causal else _whole_mask(query, key, attn_mask, window_left, window_right)
        grouped = query.shape[1] != key.shape[1]
        output = F.scaled_dot_product_attention(
            query, key, value, mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
        if mask is not None:
            # A query that may attend nothing gets 0, which not every runtime knows.
            seen = mask if mask.dtype == torch.bool else mask > -torch.inf
            output = output.masked_fill(~seen.any(-1, keepdim=True), 0.0)
        output = _attention_math.heads_inside(output)
    return output, *rest


def _whole_mask(
    query: torch.Tensor, key: torch.Tensor, mask: Any, window_left: int, window_right: int
) -> torch.Tensor | None:
    """Return mask and window as one, ``[..., Sq, Sk]``; ``None`` where all may be attended."""
    rows, columns = query.shape[2], key.shape[2]
    pattern = _attention_math.AttentionOptions(1.0, window_left, window_right, 0.0)
    allowed = _attention_math.allowed(rows, columns, pattern, query.device)
    if mask is None:
        return None if allowed is None else allowed.expand(1, 1, rows, columns)
    mask = mask.expand(*mask.shape[:2], rows, columns)
    if mask.dtype == torch.bool:
        return mask if allowed is None else mask & allowed
    return mask if allowed is None else mask.masked_fill(~allowed, -torch.inf)


def _rotary_embedding(
    query: torch.Tensor, key: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> tuple[torch.Tensor, ...]:
    # As the op's results lie in memory, but without the reference's copy into them: an exported
    # graph writes into no tensor.
    results = []
    for x in (query, key):
        turned = rotated(x, cos, sin, interleaved)
        inside = x.transpose(1, 2).is_contiguous()
        results.append(_attention_math.heads_inside(turned) if inside else turned.contiguous())
    return tuple(results)


def _grouped_mm(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = GroupedArguments(*args)
    group = _groups(call.offsets, call.input.shape[0])
    z = _grouped_product(call.input, call.weight, group, call.bias)
    kept = z if call.keeps else call.input.new_empty(0)
    return activate(z, call.activation), kept


def _moe_mlp(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = MoeArguments(*args)
    dtype, slots = call.input.dtype, call.permutation.long()
    group = _groups(call.offsets, slots.shape[0])
    probs = call.probs.flatten().index_select(0, slots).unsqueeze(1)
    wide = probs.dtype
    rows = call.input.index_select(0, slots // max(1, call.positions.shape[1]))
    b1 = None if call.b1 is None else call.b1.to(wide)
    z = _grouped_product(rows.to(wide), call.w1.to(wide), group, b1)
    hidden = (hidden_of(z, *call.form) * probs).to(dtype)
    output = _grouped_product(hidden, call.w2, group)
    if call.b2 is not None:
        experts = call.offsets.shape[0]
        of_rows = call.b2.index_select(0, group.clamp(max=experts - 1))
        output = (output + of_rows * probs).to(dtype)
    kept = z.to(dtype) if call.keep_preactivation else call.input.new_zeros(0, z.shape[1])
    return _moe_math.combine(output, None, call.positions, call.offsets), kept


def _groups(offsets: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the group of each row; rows behind the last offset get the number of groups."""
    row = torch.arange(rows, device=offsets.device).unsqueeze(1)
    return (row >= offsets).sum(1)


def _grouped_product(
    rows: torch.Tensor, weight: torch.Tensor, group: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """Return each row's product with the weight of its group; 0 where a row has none.

    How many rows a group has is known when the program runs: they are looked up then.
    """
    result = rows.new_zeros(rows.shape[0], weight.shape[2])
    for index in range(weight.shape[0]):
        places = torch.nonzero(group == index).squeeze(1)
        product = rows.index_select(0, places) @ weight[index]
        product = product if bias is None else product + bias[index]
        result = result.index_copy(0, places, product)
    return result


_OWN: dict[str, Callable[..., Any]] = {
    "layer_norm": _layer_norm,
    "add_layer_norm": _add_layer_norm,
    "rms_norm": _rms_norm,
    "add_rms_norm": _add_rms_norm,
    "attention": _attention,
    "rotary_embedding": _rotary_embedding,
    "grouped_mm": _grouped_mm,
    "moe_mlp": _moe_mlp,
}
