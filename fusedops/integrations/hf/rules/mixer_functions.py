"""The functions that transformers' recurrent mixers call, on the fused ops.

Each has the arguments of transformers' function in plain torch, of which it computes the same: it
ignores what that ignores, such as ``cu_seqlens`` and ``seq_idx``, and updates states in place where
that does. It returns ``None`` for arguments that the op does not take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusedops.integrations.hf.original_code import is_plain
from fusedops.integrations.hf.rules.rule import runs_here
from fusedops.ops.causal_conv1d import causal_conv1d
from fusedops.ops.gated_delta_rule import gated_delta_rule
from fusedops.ops.selective_scan import selective_scan
from fusedops.ops.selective_state_space import selective_state_space

# Activation behind a convolution -> what the op calls it.
ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
WIDTHS = range(2, 9)  # of convolutions that the op takes


def _serves(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Return whether the ops have kernels for these tensors."""
    return runs_here(first) and all(other is None or is_plain(other) for other in others)


def _convolution(
    hidden_states: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """Compute ``causal_conv1d_fn``."""
    if not _takes_convolution(hidden_states, weight, bias, activation):
        return None
    input = _convolved(hidden_states, weight)
    output = causal_conv1d(input, weight, bias, activation=ACTIVATIONS[activation])
    return output.to(hidden_states.dtype)


def _convolution_update(
    hidden_states: torch.Tensor,
    conv_state: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
) -> torch.Tensor | None:
    """Compute ``causal_conv1d_update``: the state is the last inputs, before and after."""
    first, width = conv_state.shape[-1], weight.shape[-1]
    known = _takes_convolution(hidden_states, weight, bias, activation) and is_plain(conv_state)
    if not known or first < width - 1:
        return None
    inputs = _convolved(torch.cat([conv_state, hidden_states], dim=-1), weight)
    conv_state.copy_(inputs[:, :, -first:])
    output = causal_conv1d(
        inputs[:, :, first:],
        weight,
        bias,
        activation=ACTIVATIONS[activation],
        initial_state=inputs[:, :, first + 1 - width : first],
    )
    return output.to(hidden_states.dtype)


def _convolved(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Return an input in the dtype of the weight, unless the op reads both as they are."""
    half = input.dtype in (torch.float16, torch.bfloat16)
    return input if half and weight.dtype == torch.float32 else input.to(weight.dtype)


def _takes_convolution(input: Any, weight: Any, bias: Any, activation: Any) -> bool:
    known = activation in ACTIVATIONS and weight.shape[-1] in WIDTHS
    return known and _serves(input, weight, bias) and (bias is None or bias.dtype == weight.dtype)


def _delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    chunk_size: int = 64,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Compute the gated delta rule, with a decay per head or (Kimi) per element of a key.

    Its formula does not depend on ``chunk_size``.
    """
    given = key, value, g, beta, initial_state
    if not _serves(query, *given) or not query.dtype == key.dtype == value.dtype:
        return None
    output, state = gated_delta_rule(
        query,
        key,
        value,
        _as(g, query),
        _as(beta, query),
        qk_norm=use_qk_l2norm_in_kernel,
        initial_state=None if initial_state is None else _wide(initial_state, query),
        return_state=True,
    )
    return output, state if output_final_state else None


def _recurrent_delta_rule(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    initial_state: torch.Tensor | None = None,
    output_final_state: bool = False,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[torch.Tensor, torch.Tensor | None] | None:
    """Compute the same as ``_delta_rule``, which for one token is one step."""
    state, options = initial_state, (output_final_state, use_qk_l2norm_in_kernel)
    return _delta_rule(query, key, value, g, beta, 64, state, *options)


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
    """Compute ``mamba2_chunk_scan``, in the dtype of ``hidden_states`` instead of float32."""
    if not _serves(hidden_states, dt, A, B, C, D, dt_bias, initial_states):
        return None
    return selective_state_space(
        hidden_states,
        _as(dt, hidden_states),
        _as(A, hidden_states),
        B,
        C,
        D=None if D is None else _as(D, hidden_states),
        dt_bias=None if dt_bias is None else _as(dt_bias, hidden_states),
        dt_softplus=dt_softplus,
        dt_limit=dt_limit,
        initial_state=None if initial_states is None else _wide(initial_states, hidden_states),
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
    if not dt_softplus or not _serves(hidden_states, dt, A, B, C, D, dt_bias, z, state):
        return None
    output, last = selective_state_space(
        hidden_states[:, None],
        _as(dt[:, None, :, 0], hidden_states),
        _as(A[:, 0, 0], hidden_states),
        B[:, None],
        C[:, None],
        D=None if D is None else _as(D[:, 0], hidden_states),
        z=None if z is None else z[:, None],
        dt_bias=None if dt_bias is None else _as(dt_bias[:, 0], hidden_states),
        dt_softplus=True,
        initial_state=_wide(state, hidden_states),
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
    """Compute ``mamba_selective_scan``, in the dtype of ``hidden_states`` instead of float32.

    Here the tokens are the last dimension.
    """
    if not _serves(hidden_states, dt, A, B, C, D, z, delta_bias):
        return None
    rows = hidden_states.transpose(1, 2)
    output, state = selective_scan(
        rows,
        _as(dt.transpose(1, 2), rows),
        _as(A, rows),
        B.transpose(1, 2),
        C.transpose(1, 2),
        D=None if D is None else _as(D, rows),
        z=None if z is None else z.transpose(1, 2),
        dt_bias=None if delta_bias is None else _as(delta_bias, rows),
        dt_softplus=delta_softplus,
        return_state=True,
    )
    output = output.transpose(1, 2)
    return (output, state) if return_last_state else output


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
    if not _serves(hidden_states, dt, A, B, C, D, dt_bias, z, state):
        return None
    output, last = selective_scan(
        hidden_states[:, None],
        _as(dt[:, None], hidden_states),
        _as(A, hidden_states),
        B[:, None],
        C[:, None],
        D=None if D is None else _as(D, hidden_states),
        z=None if z is None else z[:, None],
        dt_bias=None if dt_bias is None else _as(dt_bias, hidden_states),
        dt_softplus=dt_softplus,
        initial_state=_wide(state, hidden_states),
        return_state=True,
    )
    state.copy_(last)
    return output[:, 0]


def _wide(tensor: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return a tensor in the dtype of states for an input."""
    return tensor.to(torch.promote_types(input.dtype, torch.float32))


def _as(tensor: torch.Tensor, input: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has float32 or the dtype of an input."""
    return tensor if tensor.dtype == input.dtype else _wide(tensor, input)


class MixerFunction(NamedTuple):
    """A function of transformers' files, on an op."""

    op: str
    compute: Callable[..., Any]  # returns None for arguments that the op does not take


# Its name in the files -> the function.
FUNCTIONS = {
    "causal_conv1d_fn": MixerFunction("causal_conv1d", _convolution),
    "causal_conv1d_update": MixerFunction("causal_conv1d", _convolution_update),
    "torch_chunk_gated_delta_rule": MixerFunction("gated_delta_rule", _delta_rule),
    "torch_recurrent_gated_delta_rule": MixerFunction("gated_delta_rule", _recurrent_delta_rule),
    "chunk_kimi_delta_attention": MixerFunction("gated_delta_rule", _delta_rule),
    "recurrent_kimi_delta_attention": MixerFunction("gated_delta_rule", _recurrent_delta_rule),
    "mamba2_chunk_scan": MixerFunction("selective_state_space", _chunk_scan),
    "mamba2_selective_state_update": MixerFunction("selective_state_space", _state_space_update),
    "mamba_selective_scan": MixerFunction("selective_scan", _scan),
    "mamba_selective_state_update": MixerFunction("selective_scan", _scan_update),
}
