"""Rules for classes that no table knows, from what the code of their forward computes."""

from __future__ import annotations

import inspect
from types import FunctionType

from torch import nn

from fusedops.integrations.hf import symbolic
from fusedops.integrations.hf.class_table import own_attribute
from fusedops.integrations.hf.original_code import remember
from fusedops.integrations.hf.rules import recognition
from fusedops.integrations.hf.rules.chain import chain_rule
from fusedops.integrations.hf.rules.norms import norm_rule
from fusedops.integrations.hf.rules.rule import PatchRule
from fusedops.integrations.hf.rules.torch_modules import LINEARS


def rule_by_code(original: type[nn.Module]) -> PatchRule | None:
    """Return the rule for what the forward of a class computes, or ``None``."""
    paths = symbolic.paths_of(original)
    norms = [(path, norm) for path in paths if (norm := recognition.norm_of(path.result))]
    # One with a gate as a further argument is always called with it.
    if norms and len(inspect.signature(original.forward).parameters) == 2:
        return norm_rule(original, norms)
    if issubclass(original, nn.Linear):
        layer = recognition.linear_layer_of(paths)
        if layer is not None:  # part of the ops of other rules
            remember(original)
            LINEARS[original] = layer
        return None
    known = [(path, steps) for path in paths if (steps := recognition.steps_of(path.result))]
    if len({steps for _, steps in known}) != 1:
        return _chunk_rule(original)
    # The other paths are the original's.
    return chain_rule(
        original,
        known[0][1],
        condition=lambda module: any(path.holds(module) for path, _ in known),
    )


def _chunk_rule(original: type[nn.Module]) -> PatchRule | None:
    """Return the rule for a class that hands on a method of its own which is a chain.

    ``apply_chunking_to_forward`` of transformers calls such a method for a part of the rows.
    """
    code = getattr(original.forward, "__code__", None)
    for name in () if code is None else code.co_names:
        method = own_attribute(original, name)
        if not isinstance(method, FunctionType) or method.__code__.co_argcount != 2:
            continue
        paths = symbolic.paths_of(original, name)
        steps = recognition.steps_of(paths[0].result) if len(paths) == 1 else ()
        if steps and not paths[0].answers:
            return chain_rule(original, steps, method=name)
    return None
