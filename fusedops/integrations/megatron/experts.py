"""Megatron's ``GroupedMLP`` on ``grouped_mm``: all experts of a rank in two products.

Its weights, which lie as the op takes them, and its checkpoints, which ``SequentialMLP`` reads too,
are Megatron's. Neither the package grouped_gemm nor bfloat16 is needed.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from megatron.core.transformer.moe import experts

from fusedops._core.checks import UnsupportedError
from fusedops.integrations.hf.rules.chain import gated_product
from fusedops.integrations.megatron.feed_forward import activation_name
from fusedops.ops.grouped_mm import grouped_mm


class GroupedMLP(experts.GroupedMLP):
    """Megatron's ``GroupedMLP`` with the fused ops.

    Args:
        num_local_experts: the experts of this rank.
        config: a ``TransformerConfig``.
        pg_collection: Megatron's process groups.

    Raises:
        UnsupportedError: no op has the activation, or ``moe_act`` is to be recomputed.
    """

    def __init__(self, num_local_experts: int, config: Any, pg_collection: Any = None) -> None:
        # Its forward needs the package, ours does not.
        with mock.patch.object(experts.gg, "assert_grouped_gemm_is_available"):
            super().__init__(num_local_experts, config, pg_collection)
        if self.activation_recompute:
            raise UnsupportedError("megatron: recompute_modules 'moe_act' is not served; 'moe' is")
        name = activation_name(config)
        if name is None:
            raise UnsupportedError(
                f"megatron: no fused op has the activation of the experts, "
                f"{getattr(config.activation_func, '__name__', config.activation_func)}"
            )
        self.activation_name = name

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        permuted_probs: torch.Tensor,
    ) -> tuple[torch.Tensor, None]:
        """Return the experts' outputs of rows that are sorted by expert, and no bias.

        Args:
            permuted_local_hidden_states: ``[rows, hidden_size]``.
            tokens_per_expert: ``[num_local_experts]``.
            permuted_probs: ``[rows]``.
        """
        rows, scale = permuted_local_hidden_states, permuted_probs.unsqueeze(-1)
        if self.config.moe_apply_probs_on_input:
            rows = (rows * scale).to(rows.dtype)
        offsets = tokens_per_expert.to(rows.device).cumsum(0).to(torch.int32)
        first = self.weight1.view(self.num_local_experts, self.config.hidden_size, -1)
        second = self.weight2.view(self.num_local_experts, -1, self.config.hidden_size)
        if self.config.gated_linear_unit:
            gate, up = grouped_mm(rows, first, offsets).chunk(2, dim=-1)
            hidden = gated_product(gate, up, self.activation_name)  # Megatron has silu and gelu
        else:
            hidden = grouped_mm(rows, first, offsets, activation=self.activation_name)
        if not self.config.moe_apply_probs_on_input:
            hidden = (hidden * scale).to(hidden.dtype)
        return grouped_mm(hidden, second, offsets), None
