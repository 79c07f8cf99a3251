"""Attention of a layer: ``Attention``, and ``LatentAttention`` of DeepSeek-V2 and V3.

Attention over the heads themselves is in ``attention_core.py``, and while tokens are generated in
the cache of ``fusedops.generation``.

Letters of shapes: B sequences, S tokens of each, H hidden size, N heads, D size of a head of
queries and keys, V of values, P the part of D that is not rotated, R the rotated one, C the latent.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn

from fusedops import ops
from fusedops.models.attention_core import alibi_slopes
from fusedops.models.config import TransformerConfig
from fusedops.models.forward_context import ForwardContext
from fusedops.models.initialize import local_part
from fusedops.nn import LinearAct, QuantizedLinear, RMSNorm
from fusedops.nn.linear_act import joined

# Added to the mean square of latents, whatever ``norm_eps`` is, as DeepSeek's models do.
_LATENT_EPS = 1e-6


class Attention(nn.Module):
    """Attention between the tokens of a sequence.

    Attributes:
        num_heads: query heads on this process.
        num_kv_heads: key and value heads on this process.
        first_head: index of its first head.
    """

    def __init__(self, config: TransformerConfig, index: int) -> None:
        super().__init__()
        self.config, self.index = config, index
        self.num_heads = config.num_heads
        self.num_kv_heads = config.kv_heads
        self.first_head = 0
        self.head_dim = config.size_of_head
        self.query_key_value: nn.Module | None = None
        self._add_projections(config)

    def _add_projections(self, config: TransformerConfig) -> None:
        hidden, eps = config.hidden_size, config.norm_eps
        linear = partial(LinearAct, bias=config.bias, activation="identity")
        self.query = linear(hidden, config.query_width)
        self.key = linear(hidden, config.key_width)
        self.value = linear(hidden, config.key_width)
        self.output = linear(config.query_width, hidden)
        self.query_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None
        self.key_norm = RMSNorm(self.head_dim, eps) if config.qk_norm else None

    def forward(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        query_input_BSH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[B, S, H]``; a query layer (PanGu) gives queries an input of their own."""
        heads = self.project_qkv(x_BSH, context, query_input_BSH)
        return self.output(self.attend(*heads, context))

    def project_qkv(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        query_input_BSH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys and values by heads, ``[B, N, S, D]``, rotated by positions."""
        query_input_BSH = x_BSH if query_input_BSH is None else query_input_BSH
        if self.query_key_value is None:
            rows = self.query(query_input_BSH), self.key(x_BSH), self.value(x_BSH)
        else:
            width, key_width = self.config.query_width, self.config.key_width
            rows = self.query_key_value(x_BSH).split([width, key_width, key_width], -1)
        query_BSND, key_BSND, value_BSND = (
            row_BSF.unflatten(-1, (-1, self.head_dim)) for row_BSF in rows
        )
        if self.query_norm is not None and self.key_norm is not None:
            query_BSND, key_BSND = self.query_norm(query_BSND), self.key_norm(key_BSND)
        query_BNSD, key_BNSD = query_BSND.transpose(1, 2), key_BSND.transpose(1, 2)
        value_BNSD = value_BSND.transpose(1, 2)
        if context.rotary is not None:
            query_BNSD, key_BNSD = ops.rotary_embedding(query_BNSD, key_BNSD, *context.rotary)
        return query_BNSD, key_BNSD, value_BNSD

    def join_projections(self) -> None:
        """Make one layer of the projections of queries, keys and values."""
        self.query_key_value = joined([self.query, self.key, self.value])
        del self.query, self.key, self.value

    def attend(
        self,
        query_BNSD: torch.Tensor,
        key_BNSD: torch.Tensor,
        value_BNSD: torch.Tensor,
        context: ForwardContext,
    ) -> torch.Tensor:
        """Return the attention output of the heads on this process, ``[B, S, N * D]``."""
        config = self.config
        slopes = None
        if config.alibi:
            heads = slice(self.first_head, self.first_head + self.num_heads)
            slopes = alibi_slopes(config.num_heads, query_BNSD.device)[heads]
        options: dict[str, Any] = {"window": self.window()}
        if config.attention_scale is not None:
            options["scale"] = config.attention_scale
        dropout_p = config.attention_dropout if self.training else 0.0
        output_BNSD = context.attention_of(self.index)(
            query_BNSD,
            key_BNSD,
            value_BNSD,
            is_causal=config.causal,
            alibi_slopes=slopes,
            dropout_p=dropout_p,
            documents=context.documents,
            seed=context.score_seed(self.index) if dropout_p else None,
            **options,
        )
        return output_BNSD.transpose(1, 2).flatten(2)

    def window(self) -> tuple[int, int] | None:
        """Return how many keys on both sides of its own position a query attends."""
        size = self.config.sliding_window
        return None if size is None else (size - 1, 0)


class LatentAttention(Attention):
    """Multi-head latent attention (MLA): keys and values of all heads are made of one latent.

    ``c = norm(x @ kv_down[:C])`` is the latent, and ``r = rotated(x @ kv_down[C:])`` is a part of
    the key that all heads share. A head has the key ``(c @ K, r)`` and the value ``c @ V``, where
    ``kv_up`` contains ``K`` and ``V`` of every head; queries are ``(P, R)`` elements of ``query_up(
    norm(query_down(x)))``, or of ``query(x)`` without ``q_lora_rank``.

    While tokens are generated the cache has ``c`` and ``r`` alone. A new token is attended without
    keys and values of its heads: ``q . (c @ K) = (q @ K.T) . c``, so that the query is multiplied
    by ``K`` and the mean of the latents by ``V`` (absorption). Prompts are attended by heads.

    Reference:
        DeepSeek-V2, arXiv:2405.04434; DeepSeek-V3, arXiv:2412.19437.
    """

    def _add_projections(self, config: TransformerConfig) -> None:
        hidden, rank, query_rank = config.hidden_size, config.kv_lora_rank, config.q_lora_rank
        nope, rotated, value = config.qk_nope_head_dim, config.qk_rope_head_dim, config.v_head_dim
        assert rank is not None and nope is not None and rotated is not None and value is not None
        self.sizes = nope, rotated, value
        down = partial(LinearAct, bias=config.bias, activation="identity")
        up = partial(LinearAct, bias=False, activation="identity")
        if query_rank is None:
            self.query = up(hidden, config.query_width)
        else:
            self.query_down = down(hidden, query_rank)
            self.query_down_norm = RMSNorm(query_rank, _LATENT_EPS)
            self.query_up = up(query_rank, config.query_width)
        self.kv_down = down(hidden, rank + rotated)
        self.kv_norm = RMSNorm(rank, _LATENT_EPS)
        self.kv_up = up(rank, config.num_heads * (nope + value))
        self.output = down(config.num_heads * value, hidden)

    def join_projections(self) -> None:
        """Do nothing: most projections have inputs of their own."""

    def forward(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        query_input_BSH: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return ``[B, S, H]``."""
        if context.kv_cache is None:
            return super().forward(x_BSH, context, query_input_BSH)
        return self.output(self._attend_cache(*self._latents(x_BSH, context), context.kv_cache))

    def project_qkv(
        self,
        x_BSH: torch.Tensor,
        context: ForwardContext,
        query_input_BSH: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries, keys ``[B, N, S, D]`` and values ``[B, N, S, V]`` by heads."""
        query_BNSD, latent_BSC, key_B1SR = self._latents(x_BSH, context)
        return query_BNSD, *self._expanded(latent_BSC, key_B1SR)

    def _latents(
        self, x_BSH: torch.Tensor, context: ForwardContext
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return queries ``[B, N, S, D]``, latents ``[B, S, C]``, shared keys ``[B, 1, S, R]``."""
        nope, rotated, _ = self.sizes
        if self.config.q_lora_rank is None:
            rows = self.query(x_BSH)
        else:
            rows = self.query_up(self.query_down_norm(self.query_down(x_BSH)))
        query_BSNP, query_BSNR = rows.unflatten(-1, (-1, self.head_dim)).split([nope, rotated], -1)
        latent_BSC, key_BSR = self.kv_down(x_BSH).tensor_split([-rotated], -1)
        assert context.rotary is not None
        query_BNSR, key_B1SR = ops.rotary_embedding(
            query_BSNR.transpose(1, 2), key_BSR.unsqueeze(1), *context.rotary, interleaved=True
        )
        query_BSND = torch.cat((query_BSNP, query_BNSR.transpose(1, 2)), -1)
        return query_BSND.transpose(1, 2), self.kv_norm(latent_BSC), key_B1SR

    def _expanded(
        self, latent_BSC: torch.Tensor, key_B1SR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return keys ``[B, N, S, D]`` and values ``[B, N, S, V]``."""
        nope, _, value = self.sizes
        rows_BSNX = self.kv_up(latent_BSC).unflatten(-1, (-1, nope + value))
        key_BSNP, value_BSNV = rows_BSNX.split([nope, value], -1)
        shared_BSNR = key_B1SR.transpose(1, 2).expand(-1, -1, key_BSNP.shape[2], -1)
        key_BSND = torch.cat((key_BSNP, shared_BSNR), -1)
        return key_BSND.transpose(1, 2), value_BSNV.transpose(1, 2)

    def _attend_cache(
        self,
        query_1NTD: torch.Tensor,
        latent_1TC: torch.Tensor,
        key_11TR: torch.Tensor,
        cache: Any,
    ) -> torch.Tensor:
        """Return the output of all heads, ``[1, T, N * V]``, and append to the cache."""
        options = self.window(), None, self.config.attention_scale
        entries_11TE = torch.cat((latent_1TC.unsqueeze(1), key_11TR), -1)
        cached = cache.append((self.index, "latents"), entries_11TE)
        if cache.cu_seqlens is not None:
            expanded = self._expanded(latent_1TC, key_11TR)
            output_1NTV = cache.attend_prompts(query_1NTD, *expanded, *options)
            return output_1NTV.transpose(1, 2).flatten(2)
        nope, rotated, value = self.sizes
        up_NXC = self._up_weight(latent_1TC.dtype).unflatten(0, (-1, nope + value))
        key_up_NPC, value_up_NVC = up_NXC.split([nope, value], 1)
        query_NTP, query_NTR = query_1NTD[0].split([nope, rotated], -1)
        absorbed_NTE = torch.cat((_product(query_NTP, key_up_NPC), query_NTR), -1)
        values = cached[..., : latent_1TC.shape[-1]]
        options = *options[:2], options[2] or self.head_dim**-0.5
        latents_1NTC = cache.attend_step(absorbed_NTE.unsqueeze(0), cached, values, *options)
        output_NTV = _product(latents_1NTC[0], value_up_NVC.transpose(1, 2))
        return output_NTV.transpose(0, 1).flatten(1).unsqueeze(0)

    def _up_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return this process's part of the weight of ``kv_up``, ``[N * (P + V), C]``."""
        if isinstance(self.kv_up, QuantizedLinear):
            return self.kv_up.dequantize(dtype)
        return local_part(self.kv_up.weight)


def _product(x_NTK: torch.Tensor, weight_NKF: torch.Tensor) -> torch.Tensor:
    """Return products by heads, ``[N, T, F]``; a row does not depend on the other rows."""
    # The addend has the factor 0, and is not read.
    return ops.baddbmm(x_NTK[..., :1], x_NTK, weight_NKF, beta=0)
