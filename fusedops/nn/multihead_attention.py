"""``MultiheadAttention``: torch's module with fused attention and projections."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from fusedops._core import checks
from fusedops.nn._arguments import check_flags
from fusedops.ops.attention import attention
from fusedops.ops.linear_act import linear_act


class MultiheadAttention(nn.MultiheadAttention):
    """Attend with several heads; arguments and state_dict of ``torch.nn.MultiheadAttention``.

    ``need_weights=False`` runs on the fused ops. With ``need_weights=True`` (torch's default),
    which needs all scores in memory, torch's own forward runs, as it does with ``add_bias_kv``,
    ``add_zero_attn`` and nested tensors.

    Args:
        embed_dim: size of queries and of the output.
        num_heads: number of heads; divides ``embed_dim``.
        dropout: probability with which an attention weight is dropped in training.
        bias: whether the projections have biases.
        add_bias_kv: as torch's.
        add_zero_attn: as torch's.
        kdim: size of the keys, ``embed_dim`` by default.
        vdim: size of the values, ``embed_dim`` by default.
        batch_first: whether inputs are ``[N, L, E]`` rather than ``[L, N, E]``.
        device: device of the parameters.
        dtype: dtype of the parameters.

    Raises:
        ValueError: a shape does not fit.
        AssertionError: ``num_heads`` does not divide ``embed_dim``, as torch's.

    Note:
        The output of a query without any allowed key is the output projection's bias, where torch's
        eager forward with weights gives NaN. Numerics and backends are those of
        ``fusedops.attention``.

    Reference:
        Vaswani et al.: Attention Is All You Need, arXiv:1706.03762.

    Example:
        >>> import torch, fusedops
        >>> module = fusedops.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> x = torch.ones(1, 3, 8)
        >>> module(x, x, x, need_weights=False)[0].shape
        torch.Size([1, 3, 8])
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the output, and the weights if they are needed: as torch's module."""
        masks: dict[str, Any] = {"key_padding_mask": key_padding_mask, "attn_mask": attn_mask}
        flags: dict[str, Any] = {"need_weights": need_weights, "is_causal": is_causal}
        flags["average_attn_weights"] = average_attn_weights
        given = {"query": query, "key": key, "value": value}
        check_inputs("MultiheadAttention", given, masks, **flags)
        causal_without_mask = is_causal and attn_mask is None
        if need_weights or causal_without_mask or not self._is_plain(query, key, value):
            return super().forward(query, key, value, **masks, **flags)
        batched, first = query.dim() == 3, self.batch_first or query.dim() == 2
        same, shared = query is key and key is value, key is value
        tensors = [query, key, value]
        if not batched:
            tensors = [tensor.unsqueeze(0) for tensor in tensors]
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        if not first:
            tensors = [tensor.transpose(0, 1) for tensor in tensors]
        q, k, v = (self._heads(tensor) for tensor in self._project(tensors, same, shared))
        mask = merged_mask(None if is_causal else attn_mask, key_padding_mask, q)
        dropout_p = self.dropout if self.training else 0.0
        output = attention(q, k, v, mask, dropout_p, is_causal).transpose(1, 2).flatten(2)
        output = linear_act(output, self.out_proj.weight, self.out_proj.bias, activation="identity")
        if not first:
            output = output.transpose(0, 1)
        return (output if batched else output.squeeze(0)), None

    def _is_plain(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
        """Return whether the fused path serves; torch's own also words the errors of inputs."""
        shapes = query.dim() in (2, 3) and query.dim() == key.dim() == value.dim()
        nested = query.is_nested or key.is_nested or value.is_nested
        extra = self.bias_k is not None or self.bias_v is not None or self.add_zero_attn
        return shapes and not nested and not extra

    def _project(self, tensors: list[torch.Tensor], same: bool, shared: bool) -> list[torch.Tensor]:
        """Return queries, keys and values; what comes of one tensor comes of one product."""
        query, key, value = tensors
        size = self.embed_dim
        biases: list[torch.Tensor | None] = [None] * 3
        if self.in_proj_bias is not None:
            biases = list(self.in_proj_bias.split(size))
        if not self._qkv_same_embed_dim:
            weights = [self.q_proj_weight, self.k_proj_weight, self.v_proj_weight]
        elif same:
            return list(_linear(query, self.in_proj_weight, self.in_proj_bias).split(size, -1))
        elif shared:
            bias = self.in_proj_bias
            pair = _linear(key, self.in_proj_weight[size:], None if bias is None else bias[size:])
            return [_linear(query, self.in_proj_weight[:size], biases[0]), *pair.split(size, -1)]
        else:
            weights = list(self.in_proj_weight.split(size))
        given = zip((query, key, value), weights, biases, strict=True)
        return [_linear(tensor, weight, bias) for tensor, weight, bias in given]

    def _heads(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return linear_act(input, weight, bias, activation="identity")


def check_inputs(module: str, tensors: dict[str, Any], masks: dict[str, Any], **flags: Any) -> None:
    """Raise unless the arguments of a forward have the types that it takes, nested tensors too."""
    check_flags(module, **flags)
    for name, value in (tensors | masks).items():
        absent = value is None and name in masks
        nested = isinstance(value, torch.Tensor) and value.is_nested
        if not absent and not nested:
            known = checks.FLOATING if name in tensors else (torch.bool, *checks.FLOATING)
            checks.index_tensor(module, name, value, dtypes=known)


def merged_mask(
    attn_mask: torch.Tensor | None, key_padding_mask: torch.Tensor | None, query: torch.Tensor
) -> torch.Tensor | None:
    """Return torch's two masks as one of ``fusedops.attention``.

    Args:
        attn_mask: ``[L, S]`` or ``[N * heads, L, S]``; boolean ``True`` forbids, floats are added.
        key_padding_mask: ``[N, S]``, likewise.
        query: ``[N, heads, L, D]``.

    Returns:
        Boolean where both are (``True`` may be attended), else additive; ``None`` for none.
    """
    masks = []
    if attn_mask is not None:
        three = attn_mask.dim() == 3
        masks.append(attn_mask.unflatten(0, (query.shape[0], -1)) if three else attn_mask)
    if key_padding_mask is not None:
        masks.append(key_padding_mask[:, None, None, :])
    if not masks:
        return None
    if all(mask.dtype == torch.bool for mask in masks):
        forbidden = masks[0] if len(masks) == 1 else masks[0] | masks[1]
        return ~forbidden
    added = [
        torch.zeros_like(mask, dtype=query.dtype).masked_fill(mask, -torch.inf)
        if mask.dtype == torch.bool
        else mask
        for mask in masks
    ]
    return added[0] if len(added) == 1 else added[0] + added[1]
