"""A policy inside ``torch.compile``: as policies of AOTAutograd's partitioner.

Compiled code has no hooks and no second forward. A recomputed module becomes the region of a
selective checkpoint whose policy answers for each operator as the eager policy would. Offload is
``MUST_CPU_OFFLOAD``, which only graph passes of torch implement (off by default; without them the
tensor is saved). A warning names such rules.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from fusedops.memory.policy import (
    OFFLOAD,
    RECOMPUTE,
    SAVE,
    MemoryRule,
    SavedTensorInfo,
    winning_rule,
)
from fusedops.memory.recomputation.selective import communicates


def contexts_for(
    name: str, rules: tuple[MemoryRule, ...], region: MemoryRule | None
) -> Callable[[], Any] | None:
    """Return the ``context_fn`` of a module's checkpoint in compiled code, or ``None`` without one.

    ``rules`` are those of the policy that may fit what the module saves, in their order.
    """
    single = any(rule.of_tensors and rule.treatment == RECOMPUTE for rule in rules)
    if region is None and not single:
        return None

    def contexts() -> Any:
        policy = functools.partial(_decide, name, rules, region)
        return create_selective_checkpoint_contexts(policy)

    return contexts


def left_out(rules: tuple[MemoryRule, ...]) -> str:
    """Return a sentence about the rules that compiled code does not follow, ``""`` without any."""
    named = [str(rule) for rule in rules if rule.treatment == OFFLOAD]
    if not named:
        return ""
    verb = "does" if len(named) == 1 else "do"
    return f"memory: {', '.join(named)} {verb} nothing in compiled code: tensors are kept there"


@torch.compiler.assume_constant_result
def _warn(message: str) -> None:
    warnings.warn(message, stacklevel=2)


def run(
    call: Callable[..., Any],
    contexts: Callable[[], Any] | None,
    warning: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Run a module in compiled code, where Dynamo wants ``contexts`` made outside of it."""
    if warning:
        _warn(warning)
    if contexts is None:
        return call(*args, **kwargs)
    return checkpoint(call, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _decide(
    name: str,
    rules: tuple[MemoryRule, ...],
    region: MemoryRule | None,
    context: Any,
    op: Any,
    *args: Any,
    **kwargs: Any,
) -> CheckpointPolicy:
    word = op._schema.name if isinstance(op, torch._ops.OpOverload) else ""
    if region is not None and communicates(word) and not region.communication.mp_comm_recompute:
        return CheckpointPolicy.MUST_SAVE
    fitting = _fitting(name, rules, word, context.op_output)
    if winning_rule(fitting, RECOMPUTE) is not None:
        return CheckpointPolicy.PREFER_RECOMPUTE if region else CheckpointPolicy.MUST_RECOMPUTE
    if region is None and not any(rule.treatment == SAVE for rule in fitting):
        return CheckpointPolicy.PREFER_SAVE
    if winning_rule(fitting, OFFLOAD) is not None:
        return CheckpointPolicy.MUST_CPU_OFFLOAD
    return CheckpointPolicy.MUST_SAVE


def _fitting(name: str, rules: tuple[MemoryRule, ...], op: str, output: Any) -> list[MemoryRule]:
    first = output[0] if isinstance(output, (tuple, list)) and output else output
    if not isinstance(first, torch.Tensor):
        return [rule for rule in rules if not rule.of_tensors]
    nbytes = first.numel() * first.element_size()
    saved = SavedTensorInfo(name, op, None, tuple(first.shape), first.dtype, first.device, nbytes)
    return [
        rule
        for rule in rules
        # An operator is one node there: a rule by a result's name applies to the operator.
        if rule.fits(saved) or (rule.outputs and rule.when is None and op in (rule.ops or (op,)))
    ]
