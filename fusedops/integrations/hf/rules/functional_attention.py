"""Attention of modules whose own code calls ``F.scaled_dot_product_attention``.

Replacing the function in torch would change every model of the process. Instead the methods of the
patched class that call it have the same code, for which ``F``, ``nn`` and ``torch`` are modules
that differ from torch's in this function and in ``multi_head_attention_forward``, which calls it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
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


def functional_attention_rule(
    original: type[nn.Module],
    module_name: str,
    note: str = "its call of F.scaled_dot_product_attention",
) -> PatchRule | None:
    """Return the rule for a class whose methods call torch's attention, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class.
        note: for the report.
    """
    calls = {ATTENTION, _MULTI_HEAD}
    return calls_rule(
        original, module_name, "O3", lambda module: attention_plan(note), calls, fused_in_torch
    )


def attention_plan(note: str) -> FusionPlan | Refusal:
    """Return what becomes now of code that calls torch's attention."""
    reason = replaced(_WATCHED)
    return FusionPlan(("attention",), note=note) if reason is None else Refusal(reason)


def calls_rule(
    original: type[nn.Module],
    module_name: str,
    level: str,
    plan: Callable[[Any], FusionPlan | Refusal],
    calls: set[str],
    replacement: Callable[[Any], Any],
) -> PatchRule | None:
    """Return the rule for a class whose methods call some functions of torch, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class.
        level: as in ``PatchRule``.
        plan: as in ``PatchRule``.
        calls: names of these functions.
        replacement: returns what stands for a global in the patched code, or ``None``.
    """
    methods = original_code.methods_with(original, calls, replacement)
    if not methods:
        return None
    patched = subclass(original, None, module_name, **methods)
    return PatchRule(original, patched, level, plan, methods=tuple(methods), copies_code=True)


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


def _multi_head_rule() -> PatchRule:
    original, module_name = nn.MultiheadAttention, patched.module_of(nn.MultiheadAttention)
    rule = functional_attention_rule(original, module_name, "calls without need_weights")
    assert rule is not None
    return rule


RULES = (_multi_head_rule(),)
