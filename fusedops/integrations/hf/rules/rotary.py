"""Rotary embedding in attention modules, whose families each have their ``apply_rotary_pos_emb``.

The patched class has the same code, for which this global name stands for the fused op. The file's
function runs where its code has been changed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch

from fusedops.integrations.hf import known_code
from fusedops.integrations.hf.original_code import names_in, replaced, watched_function
from fusedops.integrations.hf.rules.rule import runs_here
from fusedops.ops.rotary_embedding import rotary_embedding

_NAME = "apply_rotary_pos_emb"
_INTERLEAVED = "apply_rotary_pos_emb_interleave"


def fused_rotary(forward: Any) -> dict[str, Any]:
    """Return what stands for the rotary functions that a forward calls, by their global names."""
    others = {}
    for name in set(names_in(forward.__code__)) & {_NAME, _INTERLEAVED}:
        known = known_code.known_as(forward.__globals__.get(name), "rotary")
        if known is not None:
            others[name] = _fused(forward.__globals__, name, known)
    return others


def _fused(namespace: dict[str, Any], name: str, known: str) -> Callable[..., Any]:
    """Return a function with the fused op for arguments that it takes, else the file's own."""
    prepared = _PREPARED.get(known)
    watched = watched_function(namespace["__name__"], name)

    @wraps(namespace[name])
    def apply_rotary(*args: torch.Tensor, **options: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if not options and len(args) == 4 and _fits(*args) and replaced(watched) is None:
            q, k, cos, sin = args if prepared is None else prepared(*args)
            if known in _PARTIAL or cos.shape[-1] == q.shape[-1]:
                return rotary_embedding(q, k, cos, sin)
        output: tuple[torch.Tensor, torch.Tensor] = namespace[name](*args, **options)
        return output

    return apply_rotary


def _expanded_tables(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, ...]:
    return q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1)


def _deinterleaved(q: Any, k: Any, cos: Any, sin: Any) -> tuple[torch.Tensor, ...]:
    """Return the arguments for DeepSeek's function: neighbours form pairs before, halves after."""
    q, k = (torch.cat((x[..., 0::2], x[..., 1::2]), -1) for x in (q, k))
    return q, k, cos, sin


# Known function -> what makes the arguments of the op from its own.
_PREPARED = {
    "gpt_oss.apply_rotary_pos_emb": _expanded_tables,
    "deepseek_v3.apply_rotary_pos_emb_interleave": _deinterleaved,
}
# Functions that rotate the first elements of a head, as many as the tables have.
_PARTIAL = ("gpt_neox.apply_rotary_pos_emb", "phi3.apply_rotary_pos_emb")


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
