"""Megatron's core attention on the fused op: masks by type, windows, sinks, packed sequences.

Megatron's tensors are ``[tokens, batch, heads, head size]``. Without a mask of each sequence's own
the batch counts as further heads: the op then writes Megatron's layout, and nothing is copied.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer import dot_product_attention
from megatron.core.transformer.enums import AttnMaskType

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf.rules.rule import runs_here
from fusedops.ops.attention import attention
from fusedops.ops.attention_varlen import attention_varlen

_CAUSAL = (AttnMaskType.causal, AttnMaskType.padding_causal)
_EVERYTHING = (-1, -1)


class DotProductAttention(dot_product_attention.DotProductAttention):
    """Megatron's ``DotProductAttention`` with the fused op, and packed sequences.

    A query that may see nothing gets 0, where Megatron's finite mask gives it the mean of all
    values. As there, a layer with a window does not look at the mask.
    """

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend.

        Args:
            query: ``[Sq, batch, heads, D]``; ``[tokens, heads, D]`` for packed sequences.
            key: ``[Sk, batch, groups, D]``, or ``[tokens, groups, D]``.
            value: as ``key``.
            attention_mask: boolean, ``True`` is forbidden, broadcastable to
                ``[batch, heads, Sq, Sk]``.
            attn_mask_type: Megatron's; ``None`` is that of the constructor.
            attention_bias: must be ``None``.
            packed_seq_params: Megatron's ``PackedSeqParams``.

        Returns:
            ``[Sq, batch, heads * D]``, or ``[tokens, heads * D]``.

        Raises:
            UnsupportedError: a bias, or padding between packed sequences that are not causal.
        """
        if attention_bias is not None:
            raise UnsupportedError("megatron: attention_bias has no place in DotProductAttention")
        kind = attn_mask_type or self.attn_mask_type
        packed = packed_seq_params is not None and packed_seq_params.qkv_format == "thd"
        if not packed and not runs_here(query):
            return super().forward(query, key, value, attention_mask, attn_mask_type)
        dropout_p = self.attention_dropout.p if self.training else 0.0
        # Tensor-parallel ranks draw differently.
        same = dropout_p == 0.0 or self.config.sequence_parallel
        with nullcontext() if same else tensor_parallel.get_cuda_rng_tracker().fork():
            if packed:
                return self._packed(query, key, value, kind, packed_seq_params, dropout_p)
            return self._dense(query, key, value, kind, attention_mask, dropout_p)

    def _options(self, dropout_p: float) -> dict[str, Any]:
        # With apply_query_key_layer_scaling the layer's number divides here and multiplies there.
        factor = self.scale_mask_softmax.scale or 1.0
        return {"dropout_p": dropout_p, "scale": self.softmax_scale * factor}

    def _window(self, kind: Any) -> tuple[int, int]:
        """Return the keys to the left and to the right that a query may see."""
        if self.scale_mask_softmax.window_size is not None:
            return tuple(self.scale_mask_softmax.window_size)
        return (-1, 0) if kind in _CAUSAL else _EVERYTHING

    def _dense(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kind: Any,
        attention_mask: torch.Tensor | None,
        dropout_p: float,
    ) -> torch.Tensor:
        tokens, batch = query.shape[:2]
        window, keep = self._window(kind), None
        if attention_mask is not None and self.scale_mask_softmax.window_size is None:
            keep = ~attention_mask.to(torch.bool)
        if tokens != key.shape[0] and window != _EVERYTHING:  # a cache: the last query is the last
            keep = _lower_right(query, key, window) if keep is None else keep
            window = _EVERYTHING
        options = self._options(dropout_p) | {
            "window": window,
            "enable_gqa": query.shape[2] != key.shape[2],
        }
        sinks = self.softmax_offset
        if keep is not None and keep.shape[:-2].numel() > 1:
            query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
            output = attention(query, key, value, keep, sinks=sinks, **options)
            return output.permute(2, 0, 1, 3).reshape(tokens, batch, -1).contiguous()
        query, key, value = (x.flatten(1, 2).transpose(0, 1) for x in (query, key, value))
        sinks = None if sinks is None else sinks.repeat(batch)
        keep = None if keep is None else keep.reshape(keep.shape[-2:])
        output = attention(query, key, value, keep, sinks=sinks, **options)
        return output.transpose(0, 1).reshape(tokens, batch, -1)

    def _packed(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kind: Any,
        params: Any,
        dropout_p: float,
    ) -> torch.Tensor:
        ends, longest = [], []
        for side in ("q", "kv"):
            cu_seqlens = getattr(params, f"cu_seqlens_{side}")
            padded = getattr(params, f"cu_seqlens_{side}_padded")
            if padded is not None and padded is not cu_seqlens:
                # Padding after a sequence comes after all that its queries may see.
                if kind not in _CAUSAL:
                    raise UnsupportedError(
                        f"megatron: padding between packed sequences (cu_seqlens_{side}_padded) "
                        f"needs a causal mask type, got {kind}"
                    )
                cu_seqlens = padded
            most = getattr(params, f"max_seqlen_{side}")
            ends.append(cu_seqlens)
            longest.append(int(cu_seqlens.diff().max()) if most is None else int(most))
        output = attention_varlen(
            query,
            key,
            value,
            *ends,
            *longest,
            window=self._window(kind),
            sinks=self.softmax_offset,
            **self._options(dropout_p),
        )
        return output.flatten(1)


def _lower_right(query: torch.Tensor, key: torch.Tensor, window: tuple[int, int]) -> torch.Tensor:
    """Return the mask ``[Sq, Sk]`` of what a window allows if the last query is the last key's."""
    rows = torch.arange(key.shape[0] - query.shape[0], key.shape[0], device=query.device)
    distance = torch.arange(key.shape[0], device=query.device) - rows[:, None]
    left, right = (key.shape[0] if size < 0 else size for size in window)
    return (distance >= -left) & (distance <= right)
