"""State space models in eager torch: token by token, and in chunks as models compute them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from fusedops._core import dtypes

Tensor = torch.Tensor
# (x * step, step * A, B, C, state) -> (outputs, state), all of them per head.
Scan = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]
CHUNK = 64


def recurrence(
    x: Tensor, exponent: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Go from token to token."""
    outputs = [x[:, :0]]
    for t in range(x.shape[1]):
        state = exponent[:, t, :, None].exp() * state + x[:, t, ..., None] * B[:, t, :, None]
        outputs.append((state * C[:, t, :, None]).sum(-1)[:, None])
    return torch.cat(outputs, 1), state


def chunks(
    x: Tensor,
    exponent: Tensor,
    B: Tensor,
    C: Tensor,
    state: Tensor,
    *,
    multiply: Callable[[Tensor, Tensor], Tensor] = torch.matmul,
) -> tuple[Tensor, Tensor]:
    """Go from chunk to chunk by matrix products; ``exponent`` is one number per head."""
    outputs = [x[:, :0]]
    for start in range(0, x.shape[1], CHUNK):
        rows = slice(start, start + CHUNK)
        part, b, c = (tensor[:, rows].transpose(1, 2) for tensor in (x, B, C))
        total = exponent[:, rows, :, 0].transpose(1, 2).cumsum(-1)
        between = (total[..., :, None] - total[..., None, :]).exp().tril()
        output = multiply(c @ b.mT * between, part) + (c @ state.mT) * total[..., None].exp()
        left = (total[..., -1:] - total).exp()
        state = total[..., -1:, None].exp() * state + (part * left[..., None]).mT @ b
        outputs.append(output.transpose(1, 2))
    return torch.cat(outputs, 1), state


def bounded_chunks(
    x: Tensor, exponent: Tensor, B: Tensor, C: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Go from chunk to chunk with exponents of which minus infinity is a decay of 0."""
    least = -110.0 if exponent.dtype == torch.float32 else -750.0
    return chunks(x, exponent.clamp(min=least), B, C, state, multiply=multiply_lower)


def multiply_lower(scores: Tensor, part: Tensor) -> Tensor:
    """Return ``scores @ part`` without the terms above the diagonal, which may be 0 times NaN."""
    terms = scores.unsqueeze(-1) * part.unsqueeze(-3)
    lower = torch.ones_like(scores, dtype=torch.bool).tril()
    return torch.where(lower.unsqueeze(-1), terms, torch.zeros_like(terms)).sum(-2)


def state_space(
    input: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    *,
    D: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    return_state: bool = False,
    scan: Scan | None = None,
) -> Any:
    """Apply a state space model; ``scan`` is by default that of the length."""
    batch, tokens, heads, head_dim = input.shape
    dtype, wide = input.dtype, dtypes.statistics_dtype(input.dtype)
    if scan is None:
        scan = chunks if tokens > 2 * CHUNK else recurrence
    x, step, B, C = (tensor.to(wide) for tensor in (input, dt, B, C))
    if dt_bias is not None:
        step = step + dt_bias
    step = (functional.softplus(step) if dt_softplus else step).clamp(*dt_limit)
    B, C = (tensor.repeat_interleave(heads // max(1, B.shape[2]), 2) for tensor in (B, C))
    exponent = step[..., None] * (A if A.dim() == 2 else A[:, None]).to(wide)
    ends = None if cu_seqlens is None else cu_seqlens.tolist()
    sequences = batch if ends is None else len(ends) - 1
    if initial_state is None:
        initial_state = x.new_zeros(sequences, heads, head_dim, B.shape[3])
    outputs, states = [], []
    for n in range(1 if ends is None else sequences):
        rows = slice(None) if ends is None else slice(ends[n], ends[n + 1])
        state = initial_state if ends is None else initial_state[n : n + 1]
        added = (x * step[..., None])[:, rows]
        output, after = scan(added, exponent[:, rows], B[:, rows], C[:, rows], state)
        outputs.append(output)
        states.append(after)
    output = torch.cat(outputs, 1)
    if not input.numel():  # all tensors have gradients of zeros
        output = output + 0 * (step.sum() + exponent.sum() + B.sum() + C.sum())
    if D is not None:
        output = output + D[:, None] * x
    if z is not None:
        output = output * functional.silu(z.to(wide))
    output = output.to(dtype)
    return (output, torch.cat(states).clone()) if return_state else output
