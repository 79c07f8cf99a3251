"""The functions of Mamba's mixers, as ``mixer_functions.py`` has others.

Those of several tokens return float32 in transformers. Here they return the dtype of the input, to
which the mixers convert, or which their gated norm reads.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops.integrations.hf.rules.mixer_functions import (
    MixerFunction,
    as_parameter,
    as_state,
    serves,
)
from fusedops.ops.selective_scan import selective_scan
from fusedops.ops.selective_state_space import selective_state_space


def _chunk_scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    chunk_size: int,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    initial_states: torch.Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, math.inf),
    return_final_states: bool = False,
    **_: Any,
) -> Any:
    """Compute ``mamba2_chunk_scan``."""
    low, high = dt_limit
    if not 0 <= low <= high:
        return None
    if not serves(hidden_states, dt, A, B, C, D, dt_bias, initial_states):
        return None
    return selective_state_space(
        hidden_states,
        as_parameter(dt, hidden_states),
        as_parameter(A, hidden_states),
        B.to(hidden_states.dtype),
        C.to(hidden_states.dtype),
        D=as_parameter(D, hidden_states),
        dt_bias=as_parameter(dt_bias, hidden_states),
        dt_softplus=dt_softplus,
        dt_limit=(low, high),
        initial_state=as_state(initial_states, hidden_states),
        return_state=return_final_states,
    )


def _state_space_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """Compute ``mamba2_selective_state_update``: a step of one token, in place in ``state``.

    The numbers of a head come expanded over its elements.
    """
    expanded = [(dt, 2), (A, 1), (D, 1), (dt_bias, 1)]
    if not all(tensor is None or _is_expanded(tensor, dim) for tensor, dim in expanded):
        return None
    if not dt_softplus or not serves(hidden_states, dt, A, B, C, D, dt_bias, z, state):
        return None
    output, last = selective_state_space(
        hidden_states[:, None],
        as_parameter(dt[:, None, :, 0], hidden_states),
        as_parameter(A[:, 0, 0], hidden_states),
        B[:, None].to(hidden_states.dtype),
        C[:, None].to(hidden_states.dtype),
        D=None if D is None else as_parameter(D[:, 0], hidden_states),
        z=None if z is None else z[:, None].to(hidden_states.dtype),
        dt_bias=None if dt_bias is None else as_parameter(dt_bias[:, 0], hidden_states),
        dt_softplus=True,
        initial_state=as_state(state, hidden_states),
        return_state=True,
    )
    state.copy_(last)
    return output[:, 0]


def _is_expanded(tensor: torch.Tensor, first: int) -> bool:
    """Return whether a tensor has equal elements along the dimensions from ``first`` on."""
    sizes = zip(tensor.shape[first:], tensor.stride()[first:], strict=True)
    return all(size == 1 or stride == 0 for size, stride in sizes)


def _scan(
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    delta_bias: torch.Tensor | None = None,
    delta_softplus: bool = False,
    return_last_state: bool = False,
    **_: Any,
) -> Any:
    """Compute ``mamba_selective_scan``, for which the tokens are the last dimension."""
    if not delta_softplus:
        return None
    rows = [None if x is None else x.transpose(1, 2) for x in (hidden_states, dt, B, C, z)]
    result = _scanned(rows, A, D, delta_bias)
    if result is None:
        return None
    output, state = result
    return (output.transpose(1, 2), state) if return_last_state else output.transpose(1, 2)


def _scan_update(
    state: torch.Tensor,
    hidden_states: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    D: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    z: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """Compute ``mamba_selective_state_update``: a step of one token, in place in ``state``."""
    if not dt_softplus:
        return None
    rows = [None if x is None else x[:, None] for x in (hidden_states, dt, B, C, z)]
    result = _scanned(rows, A, D, dt_bias, state)
    if result is None:
        return None
    state.copy_(result[1])
    return result[0][:, 0]


def _scanned(
    rows: list[Any], A: torch.Tensor, D: Any, bias: Any, state: Any = None
) -> tuple[torch.Tensor, torch.Tensor] | None:
    """Return output and last state of a scan with softplus, for which the op's steps are these.

    ``rows`` are input, ``dt``, ``B``, ``C`` and ``z``, each ``[batch, tokens, ...]`` or ``None``.
    """
    input, dt, B, C, z = rows
    if not serves(*rows, A, D, bias, state):
        return None
    result: tuple[torch.Tensor, torch.Tensor] = selective_scan(
        input,
        as_parameter(dt, input),
        as_parameter(A, input),
        B.to(input.dtype),
        C.to(input.dtype),
        D=as_parameter(D, input),
        z=None if z is None else z.to(input.dtype),
        dt_bias=as_parameter(bias, input),
        dt_softplus=True,
        initial_state=as_state(state, input),
        return_state=True,
    )
    return result


FUNCTIONS = {
    "mamba2_chunk_scan": MixerFunction("selective_state_space", _chunk_scan),
    "mamba2_selective_state_update": MixerFunction("selective_state_space", _state_space_update),
    "mamba_selective_scan": MixerFunction("selective_scan", _scan),
    "mamba_selective_state_update": MixerFunction("selective_scan", _scan_update),
}
