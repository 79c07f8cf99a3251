"""Tokens of a batch, or of sequences packed one after another, for ops that keep a state."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops.ops._attention_math import check_sequences


def check_packed(op: str, cu_seqlens: Any, input: torch.Tensor, tokens: Any) -> Any:
    """Return the number of sequences; raise unless ``cu_seqlens`` fits a batch of one.

    Args:
        op: name of the op, for messages.
        cu_seqlens: ``None`` where each entry of the batch is a sequence.
        input: the op's argument ``input``, whose first dim is the batch.
        tokens: the number of tokens of an entry of the batch.
    """
    if cu_seqlens is None:
        return input.shape[0]
    checks.tensor(op, "cu_seqlens", cu_seqlens, floating=False)
    if cu_seqlens.device != input.device:
        expected = f"on {input.device}, the device of input"
        checks.fail(op, "cu_seqlens", expected, cu_seqlens.device)
    check_sequences(op, "cu_seqlens", cu_seqlens, tokens, 2**31 - 1)
    if cu_seqlens.shape[0] < 2:
        checks.fail(op, "cu_seqlens", "of one sequence or more", list(cu_seqlens.shape))
    if input.shape[0] != 1:
        checks.fail(op, "input", "of a batch of 1 where cu_seqlens is given", input.shape[0])
    return cu_seqlens.shape[0] - 1


def pieces(cu_seqlens: torch.Tensor | None) -> list[tuple[slice, slice]]:
    """Return the tokens and the rows of states of each packed sequence, or of the whole batch."""
    if cu_seqlens is None:
        return [(slice(None), slice(None))]
    ends = cu_seqlens.tolist()
    numbers = range(len(ends) - 1)
    return [(slice(ends[n], ends[n + 1]), slice(n, n + 1)) for n in numbers]


def zero_state(
    like: torch.Tensor, cu_seqlens: torch.Tensor | None, sizes: tuple[int, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Return a state of zeros of each sequence; ``like`` has the batch and the device."""
    rows = like.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return like.new_zeros(rows, *sizes, dtype=dtype)
