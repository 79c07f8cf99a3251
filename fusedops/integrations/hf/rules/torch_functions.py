"""Modules whose own code calls torch's attention or cross-entropy.

The methods of the patched class that call them have the same code, for which ``F``, ``nn`` and
``torch`` are modules that differ from torch's in ``F.scaled_dot_product_attention`` and what calls
it, or in the cross-entropy with which BART, T5, BERT and most home-made models end.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from types import FunctionType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops._core import dtypes
from fusedops.integrations.hf import original_code
from fusedops.integrations.hf.class_table import own_attribute
from fusedops.integrations.hf.original_code import is_plain, replaced, with_other
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    runs_here,
    subclass,
)
from fusedops.ops.attention import attention
from fusedops.ops.cross_entropy import cross_entropy

ATTENTION = "scaled_dot_product_attention"
_MULTI_HEAD = "multi_head_attention_forward"
_WATCHED = original_code.functions(ATTENTION)
_ATTENTION, _LOSS = f"{__name__}.torch_attention", f"{__name__}.torch_loss"  # for ``with_others``


def attention_call_rule(
    original: type[nn.Module], note: str = "its call of F.scaled_dot_product_attention"
) -> PatchRule | None:
    """Return the rule for a class whose methods call torch's attention; ``note`` is reported."""
    plan, calls = lambda module: attention_plan(note), {ATTENTION, _MULTI_HEAD}
    return _calls_rule(original, "O3", plan, calls, fused_in_torch, _ATTENTION)


def attention_plan(note: str) -> FusionPlan | Refusal:
    """Return what becomes now of code that calls torch's attention."""
    reason = replaced(_WATCHED)
    return FusionPlan(("attention",), note=note) if reason is None else Refusal(reason)


def _calls_rule(
    original: type[nn.Module],
    level: str,
    plan: Callable[[Any], FusionPlan | Refusal],
    calls: set[str],
    replacement: Callable[[Any], Any],
    user: str,
) -> PatchRule | None:
    """Return the rule for a class whose methods call some functions of torch, or ``None``.

    ``calls``, ``replacement`` and ``user`` are those of ``with_other``.
    """
    methods = {}
    bases = original.__mro__[: original.__mro__.index(nn.Module)]
    for name in dict.fromkeys(name for base in bases for name in vars(base)):
        method = own_attribute(original, name)
        if not isinstance(method, FunctionType):
            continue
        takes_input = len(inspect.signature(inspect.unwrap(method)).parameters) > 1
        fused = with_other(method, calls, replacement, user) if takes_input else None
        if fused is not None:
            methods[name] = fused
    if not methods:
        return None
    patched = subclass(original, **methods)
    return PatchRule(original, patched, level, plan, methods=tuple(methods), copies_code=True)


@functools.wraps(F.scaled_dot_product_attention)
def _attend(query: Any, key: Any, value: Any, *args: Any, **options: Any) -> Any:
    mask = args[0] if args else options.get("attn_mask")
    known = runs_here(query) and is_plain(key) and is_plain(value)
    if isinstance(mask, torch.Tensor) and mask.dim() > 0:  # torch refuses another number of keys
        known = known and is_plain(mask) and mask.shape[-1] in (key.shape[-2], 1)
    known = known and query.dim() > 1 and _have_one_dtype(query, key, value)
    # Torch's function is called inside of others, whose callers do not watch it.
    if not known or replaced(_WATCHED) is not None:
        return F.scaled_dot_product_attention(query, key, value, *args, **options)
    if query.dim() > 2 and key.shape[-3] == value.shape[-3] == 1:  # torch broadcasts the head
        options["enable_gqa"] = True
    return attention(query, key, value, *args, **options)


def _have_one_dtype(*tensors: torch.Tensor) -> bool:
    """Return whether the tensors have one dtype, or get one by autocast."""
    found = {tensor.dtype for tensor in tensors}
    cast = dtypes.autocast_dtype(tensors[0].device) is not None and torch.float64 not in found
    return len(found) == 1 or cast


_multi_head_forward = (
    original_code.with_others(F.multi_head_attention_forward, {ATTENTION: _attend}, _ATTENTION)
    or F.multi_head_attention_forward
)
# Returns what stands for a global that leads to torch's attention, or ``None``.
fused_in_torch = original_code.in_torch(
    _ATTENTION, of_functional={ATTENTION: _attend, _MULTI_HEAD: _multi_head_forward}, of_nn={}
)


def multi_head_attention(*args: Any, **options: Any) -> torch.Tensor:
    """Return what ``F.multi_head_attention_forward`` returns first, with the fused attention."""
    output: torch.Tensor = _multi_head_forward(*args, **options)[0]
    return output


_torchs_loss = F.cross_entropy
_SERVED = {"ignore_index", "reduction", "label_smoothing"}
UNSERVED = {"weight", "size_average", "reduce"}  # unless they are None
LOSS_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")
_LOSS_NOTE = "the cross-entropy in its own code: no softmax of the logits in memory"


def loss_call_rule(original: type[nn.Module]) -> PatchRule | None:
    """Return the rule for a class whose methods compute torch's cross-entropy, or ``None``."""
    calls = {"CrossEntropyLoss", "cross_entropy"}
    return _calls_rule(original, "O2", _loss_plan, calls, _fused_loss_in_torch, _LOSS)


def _loss_plan(module: Any) -> FusionPlan | Refusal:
    # The logits must be those of a vocabulary; a few classes are torch's work.
    embeddings = getattr(module, "get_output_embeddings", None)
    known = embeddings is None or embeddings() is not None
    return FusionPlan(("cross_entropy",), note=_LOSS_NOTE) if known else NOT_APPLICABLE


def served(logits: Any, labels: Any) -> bool:
    """Return whether the op takes these; sharded logits keep torch's loss, which knows them."""
    if type(logits) is not torch.Tensor or type(labels) is not torch.Tensor:
        return False
    return runs_here(logits) and labels.dtype == torch.int64


@functools.wraps(_torchs_loss)
def _cross_entropy(input: Any, target: Any, *args: Any, **options: Any) -> Any:
    given = {
        name: value for name, value in options.items() if value is not None or name not in UNSERVED
    }
    known = not args and given.keys() <= _SERVED and served(input, target)
    if known and input.dim() == 2 and target.dim() == 1:
        return cross_entropy(input, target, **given)
    return _torchs_loss(input, target, *args, **options)


def _criterion(*args: Any, **options: Any) -> Callable[..., Any]:
    """Return what ``nn.CrossEntropyLoss`` of these arguments computes, or the module for hooks."""
    if global_hooks():
        return nn.CrossEntropyLoss(*args, **options)
    return functools.partial(
        _cross_entropy, **dict(zip(LOSS_OPTIONS, args, strict=False)), **options
    )


_fused_loss_in_torch = original_code.in_torch(
    _LOSS,
    of_functional={"cross_entropy": _cross_entropy},
    of_nn={"CrossEntropyLoss": _criterion},
)

_rule = attention_call_rule(nn.MultiheadAttention, "calls without need_weights")
assert _rule is not None
RULES = (_rule,)
