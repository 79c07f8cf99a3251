"""Rules for ``nn.TransformerEncoderLayer`` and its decoder layer.

The feed-forward layer is one op, and so is each residual sum with the norm that follows it in the
layer. In evaluation torch's own forward runs, with its fast path for inference.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf import known_code, patched
from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.chain import run
from fusedops.integrations.hf.rules.residual_norm import add_norm, norm_obstacle
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    subclass,
)


class _Layer(nn.Module):
    """What both layers share."""

    steps: tuple[str, ...]

    def _ff_block(self: Any, x: torch.Tensor) -> torch.Tensor:
        return run(self, self.steps, x)

    def _add_norm(
        self: Any, branch: torch.Tensor, residual: torch.Tensor, name: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a norm of ``residual + branch``, and the sum."""
        norm = getattr(self, name)
        if norm_obstacle(name, norm) is None:
            return add_norm(branch, residual, norm)
        total = residual + branch
        return norm(total), total


class _EncoderLayer(_Layer):
    def forward(
        self: Any,
        src: torch.Tensor,
        src_mask: torch.Tensor | None = None,
        src_key_padding_mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        if not self.training:
            output: torch.Tensor = super().forward(src, src_mask, src_key_padding_mask, is_causal)
            return output
        padding = F._canonical_mask(
            src_key_padding_mask,
            "src_key_padding_mask",
            F._none_or_dtype(src_mask),
            "src_mask",
            src.dtype,
        )
        mask = F._canonical_mask(src_mask, "src_mask", None, "", src.dtype, check_other=False)
        if self.norm_first:
            attended = self._sa_block(self.norm1(src), mask, padding, is_causal=is_causal)
            normed, total = self._add_norm(attended, src, "norm2")
            return total + self._ff_block(normed)
        attended = self._sa_block(src, mask, padding, is_causal=is_causal)
        normed, _ = self._add_norm(attended, src, "norm1")
        return self._add_norm(self._ff_block(normed), normed, "norm2")[0]


class _DecoderLayer(_Layer):
    def forward(
        self: Any,
        tgt: torch.Tensor,
        memory: torch.Tensor,
        tgt_mask: torch.Tensor | None = None,
        memory_mask: torch.Tensor | None = None,
        tgt_key_padding_mask: torch.Tensor | None = None,
        memory_key_padding_mask: torch.Tensor | None = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> torch.Tensor:
        """Return the residual stream after the layer."""
        masks = tgt_mask, tgt_key_padding_mask, tgt_is_causal
        memory_masks = memory_mask, memory_key_padding_mask, memory_is_causal
        if self.norm_first:
            attended = self._sa_block(self.norm1(tgt), *masks)
            normed, total = self._add_norm(attended, tgt, "norm2")
            attended = self._mha_block(normed, memory, *memory_masks)
            normed, total = self._add_norm(attended, total, "norm3")
            return total + self._ff_block(normed)
        normed, _ = self._add_norm(self._sa_block(tgt, *masks), tgt, "norm1")
        attended = self._mha_block(normed, memory, *memory_masks)
        normed, _ = self._add_norm(attended, normed, "norm2")
        return self._add_norm(self._ff_block(normed), normed, "norm3")[0]


def _rule(
    original: type[nn.Module],
    forward: type[nn.Module],
    dropout: str,
    norms: tuple[str, ...],
) -> PatchRule:
    steps = ("linear1", "activation", "dropout", "linear2", dropout)
    unknown_code = None
    if known_code.known_as(original, "torch_transformer") is None:
        unknown_code = f"this torch has another {original.__name__}, whose code no table knows"

    def fused_norms(layer: Any) -> tuple[str, ...]:
        """Return the norms of a sum that one op computes now."""
        names = norms[1:] if layer.norm_first else norms
        return tuple(name for name in names if norm_obstacle(name, getattr(layer, name)) is None)

    def plan(layer: Any) -> FusionPlan | Refusal:
        products = chain.chain_plan(layer, steps)
        fused = fused_norms(layer)
        reason = unknown_code or global_hooks()
        if reason is None and not fused and isinstance(products, Refusal):
            reason = products.reason
        if reason is not None:
            return Refusal(reason)
        ops = ("add_layer_norm",) if fused else ()
        if isinstance(products, Refusal):
            return FusionPlan(ops, fused, products.reason)
        return FusionPlan((*products.ops, *ops), (*products.absorbs, *fused), products.note)

    return PatchRule(
        original,
        subclass(original, forward, patched.module_of(original), steps=steps),
        "O2",
        plan,
        guarded=True,
        methods=("forward", "_ff_block"),
    )


RULES = (
    _rule(nn.TransformerEncoderLayer, _EncoderLayer, "dropout2", ("norm1", "norm2")),
    _rule(nn.TransformerDecoderLayer, _DecoderLayer, "dropout3", ("norm1", "norm2", "norm3")),
)
