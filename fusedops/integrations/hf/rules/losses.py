"""The losses of transformers' language models on ``cross_entropy``, as an attribute of the model.

A model asks ``self.loss_function`` for its loss. ``patch`` sets that attribute, as a user would, in
the place of the library's losses for causal and for masked language models; any other loss stays.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers.loss import loss_utils
from transformers.modeling_utils import PreTrainedModel

from fusedops.integrations.hf.known_code import unknown_code
from fusedops.integrations.hf.original_code import (
    context_obstacle,
    name_of,
    replaced,
    watched_function,
)
from fusedops.integrations.hf.report import ModuleReport
from fusedops.integrations.hf.rules.rule import resolution
from fusedops.integrations.hf.rules.torch_functions import served
from fusedops.ops.cross_entropy import cross_entropy

LEVEL = "O2"
_NOTE = "no float32 copy of the logits, no softmax in memory"


def causal_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor | None,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: torch.Tensor | None = None,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the loss of the next tokens, as transformers' ``ForCausalLMLoss``.

    ``labels`` are not shifted, and ignored if ``shift_labels`` are given. ``num_items_in_batch`` is
    the divisor of the sum, for the mean over several batches.
    """
    targets: Any = labels if shift_labels is None else shift_labels
    if not served(logits, targets) or _replaced(_LOSSES[0]) or context_obstacle():
        return loss_utils.LOSS_MAPPING["ForCausalLM"](
            logits, labels, vocab_size, num_items_in_batch, ignore_index, shift_labels, **kwargs
        )
    if shift_labels is None:
        targets = nn.functional.pad(targets, (0, 1), value=ignore_index)[..., 1:]
    return _loss(logits, targets, vocab_size, num_items_in_batch, ignore_index)


def masked_lm_loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None = None,
    ignore_index: int = -100,
    **kwargs: Any,
) -> torch.Tensor:
    """Return the loss of the tokens in place, as transformers' ``ForMaskedLMLoss``."""
    if not served(logits, labels) or _replaced(_LOSSES[1]) or context_obstacle():
        return loss_utils.LOSS_MAPPING["ForMaskedLM"](
            logits, labels, vocab_size, num_items_in_batch, ignore_index, **kwargs
        )
    return _loss(logits, labels, vocab_size, num_items_in_batch, ignore_index)


def _loss(
    logits: torch.Tensor,
    labels: torch.Tensor,
    vocab_size: int,
    num_items_in_batch: torch.Tensor | int | None,
    ignore_index: int,
) -> torch.Tensor:
    if logits.dtype == torch.float64:  # theirs is float32 for any logits
        logits = logits.float()
    loss = cross_entropy(
        logits.reshape(-1, vocab_size),
        labels.reshape(-1).to(logits.device),
        ignore_index=ignore_index,
        reduction="mean" if num_items_in_batch is None else "sum",
        dtype=torch.float32,
    )
    if num_items_in_batch is None:
        return loss
    if isinstance(num_items_in_batch, torch.Tensor):
        num_items_in_batch = num_items_in_batch.to(loss.device)
    return loss / num_items_in_batch


class _KnownLoss(NamedTuple):
    task: str  # the name under which transformers has it
    stock: Callable[..., Any]
    fused: Callable[..., Any]


_LOSSES = (
    _KnownLoss("ForCausalLM", loss_utils.ForCausalLMLoss, causal_lm_loss),
    _KnownLoss("ForMaskedLM", loss_utils.ForMaskedLMLoss, masked_lm_loss),
)
_WATCHED = watched_function(loss_utils.__name__, "fixed_cross_entropy")


def owners(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield name and model of all in ``model`` whose loss is, or was, one that is known."""
    for name, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            code = getattr(inspect.unwrap(type(module).forward), "__code__", None)
            asks = code is not None and "loss_function" in code.co_names
            if asks and (_set_loss(module) is not None or _known(_loss_of(module)) is not None):
                yield name, module


def is_replaced(owner: Any) -> bool:
    """Return whether the loss of ``owner`` is one of ours."""
    return any(_set_loss(owner) is known.fused for known in _LOSSES)


def take(owner: Any) -> None:
    """Let ``owner`` compute its loss by ``cross_entropy``, if there is no obstacle."""
    known = _known(_loss_of(owner))
    if known is not None and _refusal(known) is None:
        owner.loss_function = known.fused


def restore(owner: Any) -> None:
    """Give ``owner`` the loss back that it had before ``take``; one set since then stays."""
    if is_replaced(owner):
        known: Any = _known(_set_loss(owner))
        del owner._loss_function
        if _loss_of(owner) is not known.stock:  # somebody had chosen it
            owner.loss_function = known.stock


def entry(name: str, owner: Any, level: str) -> ModuleReport:
    """Return the entry of a report of some level for the loss of a model of some name."""
    name, loss = f"{name}.loss_function".removeprefix("."), _loss_of(owner)
    known = _known(loss)
    if known is None:
        cls = str(getattr(loss, "__name__", type(loss).__name__))
        return ModuleReport(name, cls, False, reason="a loss of its own")
    cls = known.stock.__name__
    if loss is known.fused:
        reason = _replaced(known) or context_obstacle()
        note = _NOTE if reason is None else f"falls back now: {reason}"
        return ModuleReport(
            name, cls, True, "cross_entropy", resolution("cross_entropy", owner), note
        )
    reason = _refusal(known)
    later = "not patched" if level == "-" else f"from level {LEVEL} on"
    return ModuleReport(name, cls, False, reason=reason or later, failed=reason is not None)


def _known(loss: Any) -> _KnownLoss | None:
    """Return what is known of a loss, transformers' or ours; ``None`` for any other."""
    return next((known for known in _LOSSES if loss in (known.stock, known.fused)), None)


def _set_loss(owner: Any) -> Any:
    """Return the loss that somebody has given to ``owner``, or ``None``."""
    return getattr(owner, "_loss_function", None)


def _loss_of(owner: Any) -> Any:
    """Return ``owner.loss_function`` without the warning for models whose name says no task."""
    loss = _set_loss(owner)
    if loss is not None:
        return loss
    if type(owner).loss_function is not PreTrainedModel.loss_function:
        return None
    mapping = loss_utils.LOSS_MAPPING
    return mapping.get(getattr(owner, "loss_type", None), mapping["ForCausalLM"])


def _replaced(known: _KnownLoss) -> str | None:
    """Return what others have put in the place of transformers' loss, or ``None``."""
    function = loss_utils.LOSS_MAPPING[known.task]
    if function is not known.stock:
        return f"the loss {known.task!r} was replaced by {name_of(function)}"
    return replaced(_WATCHED)


def _refusal(known: _KnownLoss) -> str | None:
    """Return why transformers' loss is not the one that ours was written for, or ``None``."""
    return _replaced(known) or unknown_code(known.stock, "losses")
