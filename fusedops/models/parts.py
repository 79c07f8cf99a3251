"""The parts of a transformer around its attention: embedding, norms, feed-forward parts and head.

Letters of shapes as in ``transformer.py``.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from fusedops import ops
from fusedops.models.config import TransformerConfig
from fusedops.models.forward_context import ForwardContext
from fusedops.nn import (
    MLP,
    AddLayerNorm,
    AddRMSNorm,
    Dropout,
    GatedMLP,
    LayerNorm,
    LinearAct,
    MoE,
    QuantizedLinear,
    RMSNorm,
)


def kernel_name(config: TransformerConfig) -> str:
    """Return the activation as the operators call it."""
    return "gelu_tanh" if config.activation == "gelu_new" else config.activation


def norm_of(config: TransformerConfig, *, adds: bool = False) -> nn.Module:
    """Return a norm; one that ``adds`` takes a branch and the residual stream."""
    size, eps, dropout = config.hidden_size, config.norm_eps, config.dropout
    if config.norm == "layer":
        return AddLayerNorm(size, eps, dropout_p=dropout) if adds else LayerNorm(size, eps)
    return AddRMSNorm(size, eps, dropout_p=dropout) if adds else RMSNorm(size, eps)


def feed_forward_of(config: TransformerConfig, index: int) -> nn.Module:
    """Return the feed-forward part of a layer: dense, gated or of experts."""
    hidden, inner, bias = config.hidden_size, config.intermediate_size, config.bias
    activation = kernel_name(config)
    if config.is_sparse(index):
        return MoE(
            hidden,
            config.expert_width,
            config.num_experts,
            config.top_k,
            activation=activation,
            gated=config.gated,
            bias=bias,
            score=config.router_score,
            normalize=config.router_normalize,
            scaling=config.router_scaling,
            num_groups=config.num_groups,
            topk_groups=config.topk_groups,
            group_score=config.group_score,
            correction_bias=config.balance_rate > 0,
            capacity_factor=config.capacity_factor,
            drop_policy=config.drop_policy,
            router=config.router == "learned",
            shared_intermediate_size=config.shared_size or None,
            shared_gate=config.shared_gate,
        )
    if config.gated:
        return GatedMLP(hidden, inner, activation=activation, bias=bias)
    return MLP(hidden, inner, bias=bias, activation=activation, keep_hidden=True)


class Embedding(nn.Module):
    """Embeddings of tokens, and of positions and token types where a model has them."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden = config.hidden_size

        def table(rows: int) -> nn.Embedding | None:
            return nn.Embedding(rows, hidden) if rows else None

        self.tokens = nn.Embedding(config.vocab_size, hidden, config.pad_token_id)
        self.positions = table(config.seq_len if config.position_tables else 0)
        self.token_types = table(config.token_types)
        self.norm = norm_of(config) if config.post_norm else None
        self.dropout = Dropout(config.dropout)

    def forward(self, tokens_BS: torch.Tensor, context: ForwardContext) -> torch.Tensor:
        """Return ``[B, S, H]``."""
        x_BSH = self.tokens(tokens_BS)
        if self.positions is not None:
            x_BSH = x_BSH + self.positions(context.positions)
        if self.token_types is not None:
            types = context.token_types
            types = torch.zeros_like(tokens_BS) if types is None else types
            x_BSH = x_BSH + self.token_types(types)
        if self.norm is not None:
            x_BSH = self.norm(x_BSH)
        return self.dropout(x_BSH, seed=context.embedding_seed())


class Head(nn.Module):
    """From the last hidden states to logits, or to the loss.

    The backward of the loss recomputes the logits, chunk by chunk, unless they are small compared
    with what the layers save: then they are saved.

    Attributes:
        weight: of the projection on the vocabulary, ``[V, H]``; ``None`` where it is the
            embedding's.
        bias: of the projection, ``[V]``, or ``None``.
        recompute: whether the backward recomputes the logits: set it if layers save nothing.
        quantized: the projection that ``fusedops.quantize`` made, or ``None``.
    """

    weight: nn.Parameter | None
    bias: nn.Parameter | None

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        hidden, vocab = config.hidden_size, config.vocab_size
        masked = config.head == "masked"
        activation = kernel_name(config)
        self.transform = LinearAct(hidden, hidden, activation=activation) if masked else None
        self.norm = norm_of(config) if masked else None
        self.weight = None if config.tied else nn.Parameter(torch.empty(vocab, hidden))
        self.bias = nn.Parameter(torch.empty(vocab)) if masked else None
        self.quantized: QuantizedLinear | None = None
        # The least that a layer saves for a token, in half precision, in numbers of float32.
        layer = (8 * hidden + 2 * config.intermediate_size) // 2
        self.recompute = vocab > config.num_layers * layer

    def forward(
        self,
        x_BSH: torch.Tensor,
        labels_BS: torch.Tensor | None,
        context: ForwardContext,
        weight: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Return logits ``[B, S, V]``, or with labels the sum of the targets' losses.

        Args:
            x_BSH: of the last layer.
            labels_BS: the target of each token; -100 where there is none.
            context: of ``R`` tokens whose indices are its ``logits_to_keep`` logits are
                ``[B, R, V]``; ``gather_logits`` is for ranks that shard the vocabulary.
            weight: the embedding's, where it is tied.
        """
        if self.transform is not None and self.norm is not None:
            x_BSH = self.norm(self.transform(x_BSH))
        weight = self.weight if weight is None else weight
        if labels_BS is None:
            return self.logits(x_BSH, weight, context)
        return self.loss(x_BSH, weight, labels_BS)

    def logits(self, x_BSH: torch.Tensor, weight: Any, context: ForwardContext) -> torch.Tensor:
        """Return logits ``[B, S, V]``, or ``[B, R, V]``; arguments as of ``forward``."""
        if context.logits_to_keep is not None:
            x_BSH = x_BSH[:, context.logits_to_keep]
        if self.quantized is not None:
            logits_BSV: torch.Tensor = self.quantized(x_BSH)
            return logits_BSV
        return ops.linear_act(x_BSH, weight, self.bias, activation="identity")

    def loss(self, x_BSH: torch.Tensor, weight: Any, labels_BS: torch.Tensor) -> torch.Tensor:
        """Return the sum of the targets' cross-entropies, float32 for half precision."""
        if self.quantized is not None:
            weight = self.quantized.dequantize(x_BSH.dtype)
        # A sum in bfloat16 has three digits; under autocast the operator's own float32 comes out.
        half = x_BSH.dtype in (torch.bfloat16, torch.float16)
        with torch.autocast(x_BSH.device.type, dtype=x_BSH.dtype) if half else nullcontext():
            return ops.linear_cross_entropy(
                x_BSH, weight, labels_BS, self.bias, reduction="sum", recompute=self.recompute
            )
