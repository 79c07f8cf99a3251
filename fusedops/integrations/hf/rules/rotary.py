"""Rotary embedding in attention modules, whose families each have their ``apply_rotary_pos_emb``.

It is a function of the family's file that the attention's ``forward`` calls by its global name.
Replacing it there would change every model of the process, and rewriting the forward would
tie it to one version of transformers. Instead the patched class gets the same code, for which the
name stands for the fused op. The rule sees to it that the original runs where one of the names
means something else by now.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.original_code import names_in, with_others
from fusedops.integrations.hf.renamed_arguments import only_renames
from fusedops.integrations.hf.rules.rule import runs_here
from fusedops.ops.rotary_embedding import rotary_embedding

_NAME = "apply_rotary_pos_emb"
_INTERLEAVED = "apply_rotary_pos_emb_interleave"


def forward_with_rotary(
    original: type[nn.Module], *, half_tables: bool = False
) -> FunctionType | None:
    """Return ``original.forward`` with the fused op for its ``apply_rotary_pos_emb``.

    Args:
        original: an attention class.
        half_tables: whether its cosines and sines hold each angle once (GPT-OSS), not twice.

    Returns:
        ``None`` where the forward does not call the function, or somebody else's wrapper does.
    """
    forward: Any = inspect.unwrap(original.forward)
    if not isinstance(forward, FunctionType) or not only_renames(original.forward):
        return None
    names = set(names_in(forward.__code__))
    if _NAME not in names:
        return None
    theirs = forward.__globals__
    others = {_NAME: _fused(theirs[_NAME], _whole_tables if half_tables else _as_given)}
    if _INTERLEAVED in names:
        others[_INTERLEAVED] = _fused(theirs[_INTERLEAVED], _deinterleaved)
    return with_others(original.forward, others, __name__)


def _fused(original: Callable[..., Any], prepared: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function with the fused op for arguments that it takes, else ``original``."""

    @wraps(original)
    def apply_rotary(*args: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if options or len(args) != 4 or not _fits(*args):
            return original(*args, **options)
        return rotary_embedding(*prepared(*args))

    return apply_rotary


def _as_given(*args: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return args


def _whole_tables(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, ...]:
    return q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _deinterleaved(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, ...]:
    """Return the arguments for DeepSeek's function: neighbours form pairs before, halves after."""
    return _halves(q), _halves(k), cos, sin


def _halves(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with the first elements of all pairs before the second ones."""
    return torch.cat((x[..., 0::2], x[..., 1::2]), -1)


def _fits(q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> bool:
    half = q.dtype in (torch.float16, torch.bfloat16)
    return (
        runs_here(q)
        and q.dim() == k.dim() == 4
        and cos.dim() == 3
        and q.dtype == k.dtype
        and cos.dtype == sin.dtype
        and (cos.dtype == q.dtype or (half and cos.dtype == torch.float32))
        and not (cos.requires_grad or sin.requires_grad)
    )
