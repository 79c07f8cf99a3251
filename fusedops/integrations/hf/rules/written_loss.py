"""The rule for models that compute a cross-entropy in their own forward.

BART, T5, BERT and most home-made models end with torch's cross-entropy of all logits, where nothing
could be replaced on its own. The patched class's methods that name it have the same code, for which
``CrossEntropyLoss`` and ``cross_entropy`` are the fused op's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from fusedops.integrations.hf import original_code
from fusedops.integrations.hf.rules.functional_attention import calls_rule
from fusedops.integrations.hf.rules.rule import (
    NOT_APPLICABLE,
    FusionPlan,
    PatchRule,
    Refusal,
    global_hooks,
    runs_here,
)
from fusedops.ops.cross_entropy import cross_entropy

_torchs = F.cross_entropy
_NAMES = {"CrossEntropyLoss", "cross_entropy"}
_SERVED = {"ignore_index", "reduction", "label_smoothing"}
_UNSERVED = {"weight", "size_average", "reduce"}  # unless they are None
_OPTIONS = ("weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing")


def written_loss_rule(original: type[nn.Module], module_name: str) -> PatchRule | None:
    """Return the rule for a class whose methods compute torch's cross-entropy, or ``None``.

    Args:
        original: the class.
        module_name: holds the patched class.
    """
    return calls_rule(original, module_name, "O2", _plan, _NAMES, _replacement)


_NOTE = "the cross-entropy in its own code: no softmax of the logits in memory"


def _plan(module: Any) -> FusionPlan | Refusal:
    # The logits must be those of a vocabulary; a few classes are torch's work.
    embeddings = getattr(module, "get_output_embeddings", None)
    known = embeddings is None or embeddings() is not None
    return FusionPlan(("cross_entropy",), note=_NOTE) if known else NOT_APPLICABLE


def served(logits: Any, labels: Any) -> bool:
    """Return whether the op takes these; sharded logits keep torch's loss, which knows them."""
    if type(logits) is not torch.Tensor or type(labels) is not torch.Tensor:
        return False
    return runs_here(logits) and labels.dtype == torch.int64


@functools.wraps(_torchs)
def _cross_entropy(input: Any, target: Any, *args: Any, **options: Any) -> Any:
    given = {
        name: value for name, value in options.items() if value is not None or name not in _UNSERVED
    }
    known = not args and given.keys() <= _SERVED and served(input, target)
    if known and input.dim() == 2 and target.dim() == 1:
        return cross_entropy(input, target, **given)
    return _torchs(input, target, *args, **options)


def _criterion(*args: Any, **options: Any) -> Callable[..., Any]:
    """Return what ``nn.CrossEntropyLoss`` of these arguments computes, or the module for hooks."""
    if global_hooks():
        return nn.CrossEntropyLoss(*args, **options)
    return functools.partial(_cross_entropy, **dict(zip(_OPTIONS, args, strict=False)), **options)


@functools.cache
def _modules() -> tuple[ModuleType, ...]:
    """Return ``torch``, ``torch.nn`` and its ``functional`` with the fused cross-entropy."""
    return original_code.copies_of_torch(
        __name__,
        of_nn={"CrossEntropyLoss": _criterion},
        of_functional={"cross_entropy": _cross_entropy},
    )


def _replacement(value: Any) -> Any:
    """Return what stands for a global in the patched code, or ``None``."""
    if value is _torchs:
        return _cross_entropy
    if value is nn.CrossEntropyLoss:
        return _criterion
    originals = (torch, nn, F)
    return next((_modules()[i] for i, original in enumerate(originals) if value is original), None)
