"""Inputs for one module on its own, of the sizes that its weights declare.

Made from the names of its forward's arguments: modules of transformers call the residual stream by
a few names, and the rest of what they take may be left out or comes from the model's rotary
embedding. What is not known is said; nothing of the whole model runs.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.rules.probes import empty_like_parameters
from fusedops.integrations.hf.rules.rule import PatchRule

# Arguments that are rows of the width that the module's first weight reads.
_ROWS = frozenset({"hidden_states", "hidden_state", "input", "x", "features"})
# Rows of the width that it returns to the residual stream, and rows for keys and values.
_RESIDUAL = frozenset({"input_tensor", "residual"})
_OTHER_ROWS = frozenset({"key_value_states", "encoder_hidden_states"})
_CACHES = frozenset({"past_key_values", "past_key_value", "cache"})
_ABSENT = _CACHES | {"attention_mask", "mask", "position_bias", "head_mask"}
# Sequences of a batch are no longer than this, as in attention of short texts.
_LONGEST = 128


class UnknownError(Exception):
    """Inputs cannot be made; the message says why."""


def width(module: Any, model: nn.Module) -> int:
    """Return how many numbers a row has that ``module`` reads.

    A module without weights reads the output of the widest linear layer next to it.

    Raises:
        UnknownError: no weight tells it.
    """
    columns = _width(module)
    if columns is None:
        for parent in model.modules():
            if any(child is module for child in parent.children()):
                columns = max(filter(None, map(_columns, parent.children())), default=None)
                break
    if columns is None:
        raise UnknownError("no weight tells the size of its input")
    return columns


def inputs(
    module: Any, rule: PatchRule, model: nn.Module, rows: int
) -> tuple[list[torch.Tensor], list[Any], dict[str, Any]]:
    """Return what a module's forward is called with.

    Args:
        module: patched or not.
        rule: of its class.
        model: around it; its rotary embedding is asked for the tables.
        rows: of all sequences together.

    Returns:
        The tensors among them that are differentiated, arguments by position, and by name.

    Raises:
        UnknownError: an argument is not known.
    """
    size = width(module, model)
    example = empty_like_parameters(
        module if next(module.parameters(), None) is not None else model
    )
    seq_len = min(rows, _LONGEST)
    shape = (rows // seq_len, seq_len)
    leaves: list[torch.Tensor] = []

    def leaf(columns: int) -> torch.Tensor:
        leaves.append(torch.randn(*shape, columns, dtype=example.dtype, device=example.device))
        return leaves[-1]

    def value(parameter: inspect.Parameter) -> Any:
        name = parameter.name
        if name in _ROWS:
            return leaf(size)
        if name in _RESIDUAL:
            return leaf(_last_width(module))
        if name == "position_embeddings":
            return _tables(model, leaf(size) if not leaves else leaves[0], seq_len)
        if name in _ABSENT:
            return None
        if parameter.default is not inspect.Parameter.empty:
            return parameter.default
        if name in _OTHER_ROWS:
            return leaf(size)
        raise UnknownError(f"what its argument {name!r} is, is not known")

    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    signature = inspect.signature(inspect.unwrap(rule.original.forward))
    for name, parameter in list(signature.parameters.items())[1:]:
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            kwargs[name] = value(parameter)
        elif parameter.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            # By position: the fused forward of a norm may call its input otherwise.
            args.append(value(parameter))
    if not leaves:
        raise UnknownError("it does not read rows of hidden states")
    return leaves, args, kwargs


def _columns(module: Any) -> int | None:
    """Return how many numbers a row has that a linear layer gives."""
    if isinstance(module, nn.Linear):
        return module.out_features
    return int(module.nf) if type(module).__name__ == "Conv1D" else None


def _width(module: Any) -> int | None:
    if isinstance(module, nn.Linear):
        return module.in_features
    if type(module).__name__ == "Conv1D":
        return int(module.weight.shape[0])
    for parameter in module.parameters(recurse=False):
        if parameter.dim() in (1, 2):
            return int(parameter.shape[-1])
    return next(filter(None, map(_width, module.children())), None)


def _last_width(module: Any) -> int:
    """Return the width of the last norm inside: of what is added to a residual stream."""
    norms = [part for part in module.modules() if type(part).__name__.endswith("Norm")]
    weights = [norm.weight for norm in norms if getattr(norm, "weight", None) is not None]
    if not weights:
        raise UnknownError("it has no norm that tells the width of the residual stream")
    return int(weights[-1].shape[-1])


def _tables(model: nn.Module, rows: torch.Tensor, seq_len: int) -> Any:
    """Return the cosines and sines of the model's rotary embedding; with several, of the first."""
    for module in model.modules():
        if type(module).__name__.endswith("RotaryEmbedding"):
            positions = torch.arange(seq_len, device=rows.device).unsqueeze(0)
            return module(rows, positions)
    raise UnknownError("the model has no rotary embedding")
