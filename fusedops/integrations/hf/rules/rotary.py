"""Rotary embedding in attention modules, whose families each have their ``apply_rotary_pos_emb``.

It is a function of the family's file that the attention's ``forward`` calls by its global name.
Putting another there would change every model of the process, and writing the forward anew would
tie it to one version of transformers. Instead the patched class gets the same code with other
globals: those of the module that holds the class, where the name stands for the fused op. The
rule sees to it that the original runs where one of the names means something else by now.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from types import FunctionType
from typing import Any

import torch
from torch import nn

from fusedops.integrations.hf.original_code import names_in
from fusedops.integrations.hf.rules.rule import runs_here
from fusedops.ops.rotary_embedding import rotary_embedding

_NAME = "apply_rotary_pos_emb"
_INTERLEAVED = "apply_rotary_pos_emb_interleave"


def forward_with_rotary(
    original: type[nn.Module], module_name: str, *, half_tables: bool = False
) -> FunctionType | None:
    """Return ``original.forward`` with the fused op for its ``apply_rotary_pos_emb``.

    Args:
        original: an attention class.
        module_name: name of the module that will hold the patched class; the globals that the
            code reads are put there. torch.compile looks for them under that name.
        half_tables: whether its cosines and sines hold each angle once (GPT-OSS), not twice.

    Returns:
        ``None`` where the forward does not call the function, or is a wrapper of it.
    """
    forward = original.forward
    if not isinstance(forward, FunctionType) or hasattr(forward, "__wrapped__"):
        return None
    names = set(names_in(forward.__code__))
    if _NAME not in names:
        return None
    ours, theirs = vars(sys.modules[module_name]), forward.__globals__
    ours.update({name: theirs[name] for name in names & theirs.keys()})
    ours[_NAME] = _fused(theirs[_NAME], half_tables)
    if _INTERLEAVED in names:
        ours[_INTERLEAVED] = _fused_interleaved(theirs[_INTERLEAVED])
    same = FunctionType(
        forward.__code__, ours, forward.__name__, forward.__defaults__, forward.__closure__
    )
    same.__kwdefaults__ = forward.__kwdefaults__
    same.__annotations__ = forward.__annotations__
    same.__doc__ = forward.__doc__
    return same


def _fused(original: Callable[..., Any], half_tables: bool) -> Callable[..., Any]:
    """Return a function with the fused op for arguments that it takes, else ``original``."""

    @wraps(original)
    def apply_rotary_pos_emb(
        *args: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if options or len(args) != 4 or not _fits(*args):
            return original(*args, **options)
        q, k, cos, sin = args
        if half_tables:
            cos, sin = torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)
        return rotary_embedding(q, k, cos, sin)

    return apply_rotary_pos_emb


def _fused_interleaved(original: Callable[..., Any]) -> Callable[..., Any]:
    """Return the same for DeepSeek's function: pairs are neighbours before, halves afterwards."""

    @wraps(original)
    def apply_rotary_pos_emb_interleave(
        *args: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if options or len(args) != 4 or not _fits(*args):
            return original(*args, **options)
        q, k, cos, sin = args
        return rotary_embedding(_halves(q), _halves(k), cos, sin)

    return apply_rotary_pos_emb_interleave


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
