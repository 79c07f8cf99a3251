"""Attention of modules whose own code calls ``F.scaled_dot_product_attention``.

Replacing the function in torch would change every model of the process. Instead the methods of the
patched class that call it have the same code, for which ``F``, ``nn`` and ``torch`` are modules
that differ from torch's in this function and in ``multi_head_attention_forward``, which calls it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf import original_code, patched
from fusedops.integrations.hf.original_code import is_plain, replaced
from fusedops.integrations.hf.rules.rule import (
    FusionPlan,
    PatchRule,
    Refusal,
    runs_here,
    subclass,
)
from fusedops.ops.attention import attention

ATTENTION = "scaled_dot_product_attention"
_MULTI_HEAD = "multi_head_attention_forward"
_torchs = F.scaled_dot_product_attention
_WATCHED = original_code.functions(ATTENTION)


def functional_attention_rule(original: type[nn.Module], module_name: str) -> PatchRule | None:
    """Return the rule for a class whose methods call torch's attention, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class.
    """
    methods = original_code.methods_with(original, {ATTENTION, _MULTI_HEAD}, fused_in_torch)
    if not methods:
        return None
    return PatchRule(
        original,
        subclass(original, None, module_name, **methods),
        "O3",
        lambda module: _plan("its call of F.scaled_dot_product_attention"),
        methods=tuple(methods),
        copies_code=True,
    )


def _plan(note: str) -> FusionPlan | Refusal:
    reason = replaced(_WATCHED)
    return FusionPlan(("attention",), note=note) if reason is None else Refusal(reason)


def fused_in_torch(value: Any) -> Any:
    """Return what stands for a global that leads to torch's attention, or ``None``."""
    originals = (torch, nn, F, _torchs)
    return next((_copies()[i] for i, original in enumerate(originals) if value is original), None)


@functools.wraps(_torchs)
def _attend(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    mask = args[0] if args else options.get("attn_mask")
    known = runs_here(query) and is_plain(key) and is_plain(value)
    if isinstance(mask, torch.Tensor) and mask.dim() > 0:  # torch refuses another number of keys
        known = known and is_plain(mask) and mask.shape[-1] in (key.shape[-2], 1)
    known = known and query.dtype == key.dtype == value.dtype and query.dim() > 1
    # Torch's function is called inside of others, whose callers do not watch it.
    if not known or replaced(_WATCHED) is not None:
        return F.scaled_dot_product_attention(query, key, value, *args, **options)
    if query.dim() > 2 and key.shape[-3] == value.shape[-3] == 1:  # torch broadcasts the head
        options["enable_gqa"] = True
    return attention(query, key, value, *args, **options)


@functools.cache
def _copies() -> tuple[Any, ...]:
    """Return ``torch``, ``torch.nn``, its ``functional`` and that function, with the fused one."""
    of_functional: dict[str, Any] = {ATTENTION: _attend, _MULTI_HEAD: _multi_head_forward()}
    copies = original_code.copies_of_torch(__name__, of_nn={}, of_functional=of_functional)
    return *copies, _attend


def _multi_head_forward() -> Any:
    theirs, others = F.multi_head_attention_forward, {ATTENTION: _attend}
    return original_code.with_others(theirs, others, __name__) or theirs


def multi_head_attention(*args: Any, **options: Any) -> torch.Tensor:
    """Return what ``F.multi_head_attention_forward`` returns first, with the fused attention."""
    output: torch.Tensor = vars(_copies()[2])[_MULTI_HEAD](*args, **options)[0]
    return output


class _MultiHead(nn.Module):
    """``nn.MultiheadAttention``: in training, self-attention reads its packed projection directly.

    Torch copies queries, keys and values, and the result, into other orders of dimensions.
    """

    def forward(
        self: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        key_padding_mask: torch.Tensor | None = None,
        need_weights: bool = True,
        attn_mask: torch.Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the attended values, and the weights where they are needed."""
        length = query.size(-2)
        direct = (
            self.training
            and not need_weights
            and query is key is value
            and key_padding_mask is None
            and (attn_mask.shape == (length, length) if attn_mask is not None else not is_causal)
            and _is_plain(self, query)
            and replaced(_WATCHED) is None
        )
        if not direct:
            others = key_padding_mask, need_weights, attn_mask, average_attn_weights, is_causal
            result: tuple[torch.Tensor, torch.Tensor | None]
            result = self.general_forward(query, key, value, *others)
            return result
        packed = F.linear(query, self.in_proj_weight, self.in_proj_bias)
        heads = packed.view(*query.shape[:2], 3, self.num_heads, self.head_dim)
        queries, keys, values = heads.permute(2, 0, 3, 1, 4).unbind(0)
        mask = None if is_causal else attn_mask
        mask = F._canonical_mask(mask, "attn_mask", None, "", queries.dtype, check_other=False)
        attended = attention(queries, keys, values, mask, self.dropout, is_causal)
        attended = attended.transpose(1, 2).reshape(query.shape)
        return F.linear(attended, self.out_proj.weight, self.out_proj.bias), None


def _is_plain(module: Any, query: torch.Tensor) -> bool:
    """Return whether a module projects batches of rows to heads, and attends to nothing else."""
    return (
        type(query) is torch.Tensor
        and module.batch_first
        and query.dim() == 3
        and runs_here(query)
        and module._qkv_same_embed_dim
        and module.bias_k is None
        and not module.add_zero_attn
    )


def _multi_head_rule() -> PatchRule:
    original, module_name = nn.MultiheadAttention, patched.module_of(nn.MultiheadAttention)
    methods = original_code.methods_with(original, {ATTENTION, _MULTI_HEAD}, fused_in_torch)
    return PatchRule(
        original,
        subclass(original, _MultiHead, module_name, general_forward=methods["forward"]),
        "O3",
        lambda module: _plan("calls without need_weights"),
    )


RULES = (_multi_head_rule(),)
