"""Rules for ``nn.TransformerEncoderLayer`` and its decoder layer.

The feed-forward layer is one op, and so is each residual sum with the norm that follows it in the
layer. In evaluation torch's own forward runs, with its fast path for inference.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf import known_code
from fusedops.integrations.hf.rules import chain
from fusedops.integrations.hf.rules.residual_norm import add_norm, layer_rule
from fusedops.integrations.hf.rules.rule import PatchRule, Refusal, runs_here, subclass


class _Layer(nn.Module):
    """What both layers share; also torch's own forward calls ``_ff_block``."""

    fused_rule: PatchRule
    steps: tuple[str, ...]

    def _ff_block(self: Any, x: torch.Tensor) -> torch.Tensor:
        rule: Any = self.fused_rule
        if not runs_here(x) or rule.bypass_reason(self) is not None:
            output: torch.Tensor = rule.original._ff_block(self, x)
            return output
        return chain.run(self, self.steps, x)


class _EncoderLayer(_Layer):
    steps = ("linear1", "activation", "dropout", "linear2", "dropout2")


class _DecoderLayer(_Layer):
    steps = ("linear1", "activation", "dropout", "linear2", "dropout3")


def _encode(
    self: Any,
    src: torch.Tensor,
    src_mask: torch.Tensor | None,
    src_key_padding_mask: torch.Tensor | None,
    is_causal: bool,
) -> torch.Tensor:
    if not self.training:
        masks = (src_mask, src_key_padding_mask, is_causal)
        return nn.TransformerEncoderLayer.forward(self, src, *masks)
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
        normed, total = add_norm(attended, src, self.norm2)
        return total + self._ff_block(normed)
    attended = self._sa_block(src, mask, padding, is_causal=is_causal)
    normed, _ = add_norm(attended, src, self.norm1)
    return add_norm(self._ff_block(normed), normed, self.norm2)[0]


def _decode(
    self: Any,
    tgt: torch.Tensor,
    memory: torch.Tensor,
    tgt_mask: torch.Tensor | None,
    memory_mask: torch.Tensor | None,
    tgt_key_padding_mask: torch.Tensor | None,
    memory_key_padding_mask: torch.Tensor | None,
    tgt_is_causal: bool,
    memory_is_causal: bool,
) -> torch.Tensor:
    masks = tgt_mask, tgt_key_padding_mask, tgt_is_causal
    memory_masks = memory_mask, memory_key_padding_mask, memory_is_causal
    if self.norm_first:
        attended = self._sa_block(self.norm1(tgt), *masks)
        normed, total = add_norm(attended, tgt, self.norm2)
        attended = self._mha_block(normed, memory, *memory_masks)
        normed, total = add_norm(attended, total, self.norm3)
        return total + self._ff_block(normed)
    normed, _ = add_norm(self._sa_block(tgt, *masks), tgt, self.norm1)
    attended = self._mha_block(normed, memory, *memory_masks)
    normed, _ = add_norm(attended, normed, self.norm2)
    return add_norm(self._ff_block(normed), normed, self.norm3)[0]


def _rule(
    original: type[nn.Module],
    base: type[_Layer],
    compute: Callable[..., torch.Tensor],
    norms: tuple[str, ...],
) -> PatchRule:
    if known_code.known_as(original, "torch_transformer") is None:
        refusal = Refusal(f"this torch has another {original.__name__}, whose code is not known")
        return PatchRule(original, subclass(original), "O2", lambda layer: refusal)
    return layer_rule(
        original,
        compute=compute,
        norms=lambda layer: norms[1:] if layer.norm_first else norms,
        feed_forward=base.steps,
        base=base,
    )


RULES = (
    _rule(nn.TransformerEncoderLayer, _EncoderLayer, _encode, ("norm1", "norm2")),
    _rule(nn.TransformerDecoderLayer, _DecoderLayer, _decode, ("norm1", "norm2", "norm3")),
)
