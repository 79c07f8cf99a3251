"""Attention of modules whose own code calls ``F.scaled_dot_product_attention``.

Replacing the function in torch would change every model of the process. Instead the methods of the
patched class that call it have the same code with other globals: those of the module that holds the
class, where ``F``, ``nn`` and ``torch`` are copies of torch's modules that differ in this function,
and in ``multi_head_attention_forward``, which calls it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf import original_code, patched
from fusedops.integrations.hf.rules.rule import PatchRule, runs_here, subclass
from fusedops.ops.attention import attention

ATTENTION = "scaled_dot_product_attention"
_MULTI_HEAD = "multi_head_attention_forward"
_torchs = F.scaled_dot_product_attention


def functional_attention_rule(original: type[nn.Module], module_name: str) -> PatchRule | None:
    """Return the rule for a class whose methods call torch's attention, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class, and the globals that its code reads.
    """
    methods = original_code.methods_with(
        original, module_name, {ATTENTION, _MULTI_HEAD}, fused_in_torch
    )
    if not methods:
        return None
    return PatchRule(
        original,
        subclass(original, _Caller, module_name, **methods),
        ("attention",),
        "O3",
        methods=tuple(methods),
        note=_note,
    )


def _note(module: Any) -> str:
    if isinstance(module, nn.MultiheadAttention):
        return "calls without need_weights"
    return "its call of F.scaled_dot_product_attention"


class _Caller(nn.Module):
    """What all patched classes of this kind are derived from."""


def fused_in_torch(value: Any) -> Any:
    """Return what stands for a global that leads to torch's attention, or ``None``."""
    originals = (torch, nn, F, _torchs)
    return next((_copies()[i] for i, original in enumerate(originals) if value is original), None)


@functools.wraps(_torchs)
def _attend(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    if not (runs_here(query) and query.dtype == key.dtype == value.dtype and query.dim() > 1):
        return _torchs(query, key, value, *args, **options)
    if query.dim() > 2 and key.shape[-3] == value.shape[-3] == 1:  # torch broadcasts the head
        options["enable_gqa"] = True
    return attention(query, key, value, *args, **options)


@functools.cache
def _copies() -> tuple[Any, ...]:
    """Return ``torch``, ``torch.nn``, its ``functional`` and that function, with the fused one."""
    copies = original_code.copies_of_torch(__name__, of_nn={}, of_functional={ATTENTION: _attend})
    functional = vars(copies[2])
    functional[_MULTI_HEAD] = original_code.with_globals(F.multi_head_attention_forward, functional)
    return *copies, _attend


def multi_head_attention(*args: Any, **options: Any) -> torch.Tensor:
    """Return what ``F.multi_head_attention_forward`` returns first, with the fused attention."""
    output: torch.Tensor = vars(_copies()[2])[_MULTI_HEAD](*args, **options)[0]
    return output


def _multi_head_rule() -> PatchRule:
    rule = functional_attention_rule(
        nn.MultiheadAttention, patched.module_of(nn.MultiheadAttention)
    )
    assert rule is not None
    return rule


RULES = (_multi_head_rule(),)
