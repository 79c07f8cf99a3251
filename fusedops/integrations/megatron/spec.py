"""Megatron's specs with our modules in the places of its local ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.fusions import fused_bias_dropout, fused_layer_norm
from megatron.core.models.gpt import gpt_layer_specs
from megatron.core.transformer import dot_product_attention, torch_norm, transformer_layer
from megatron.core.transformer.moe import experts, shared_experts

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.megatron.attention import DotProductAttention
from fusedops.integrations.megatron.experts import GroupedMLP
from fusedops.integrations.megatron.feed_forward import (
    SequentialMLP,
    SharedExpertMLP,
    TransformerLayer,
)
from fusedops.integrations.megatron.norms import Norm
from fusedops.ops.bias_dropout_add import bias_dropout_add


def get_bias_dropout_add(training: bool, fused: bool) -> Callable[..., torch.Tensor]:
    """Return the function of ``(output, bias), residual, probability`` that ends a sublayer."""

    def function(
        output_with_bias: tuple[torch.Tensor, torch.Tensor | None],
        residual: torch.Tensor,
        prob: float,
    ) -> torch.Tensor:
        output, bias = output_with_bias
        return bias_dropout_add(output, bias, residual.to(output.dtype), prob, training)

    return function


# Theirs -> ours.
_OURS: dict[Any, Any] = {
    dot_product_attention.DotProductAttention: DotProductAttention,
    experts.GroupedMLP: GroupedMLP,
    experts.SequentialMLP: SequentialMLP,
    fused_bias_dropout.get_bias_dropout_add: get_bias_dropout_add,
    fused_layer_norm.FusedLayerNorm: Norm,
    shared_experts.SharedExpertMLP: SharedExpertMLP,
    torch_norm.WrappedTorchNorm: Norm,
    transformer_layer.TransformerLayer: TransformerLayer,
}


def fused_spec(spec: Any) -> Any:
    """Return a spec of Megatron's in which our modules stand in the places of its local ones.

    The modules have the parameters, names and ``sharded_state_dict`` of those that they replace:
    checkpoints load both ways. What is not local (Transformer Engine's) stays.

    Args:
        spec: a ``ModuleSpec``, or the submodules of a block (``get_gpt_decoder_block_spec``), whose
            final norm is replaced as well. It is not changed.

    Returns:
        A spec of the same type.

    Raises:
        UnsupportedError: there is nothing in it that could be replaced.
    """
    replaced: list[Any] = []
    fused = _fused(spec, replaced)
    if not replaced:
        raise UnsupportedError(
            "megatron: nothing in this spec is a local module; Transformer Engine's stay as they "
            "are: start from get_gpt_layer_local_spec or use_transformer_engine=False"
        )
    return fused


def layer_spec(**options: Any) -> Any:
    """Return the spec of a GPT layer whose norms, attention, MLP or experts run on the fused ops.

    For ``GPTModel(config, transformer_layer_spec=layer_spec(), ...)``. The model's final norm is
    not part of a layer: ``fused_spec(get_gpt_decoder_block_spec(config, False))`` has it too.

    Args:
        **options: those of Megatron's ``get_gpt_layer_local_spec``: ``num_experts``,
            ``moe_grouped_gemm``, ``qk_layernorm``, ``normalization`` ...
    """
    return fused_spec(gpt_layer_specs.get_gpt_layer_local_spec(**options))


def _fused(value: Any, replaced: list[Any]) -> Any:
    """Return ``value`` with our modules, and list those that it had."""
    if isinstance(value, list):
        return [_fused(spec, replaced) for spec in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        changes = {name: _fused(getattr(value, name), replaced) for name in names}
        return dataclasses.replace(value, **changes)
    if callable(value) and value in _OURS:
        replaced.append(value)
        return _OURS[value]
    return value
