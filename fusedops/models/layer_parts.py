"""The parts of a layer as a configuration wants them."""

from __future__ import annotations

from torch import nn

from fusedops.models.config import TransformerConfig
from fusedops.nn import (
    MLP,
    AddLayerNorm,
    AddRMSNorm,
    GatedMLP,
    LayerNorm,
    MoE,
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
            inner,
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
