"""The functions that transformers' recurrent mixers call, on the fused ops.

Each has the arguments of transformers' function in plain torch and computes the same: it ignores
the keywords that this ignores, and updates states in place where this does. It returns ``None`` for
arguments that the op does not take.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from fusedops.integrations.hf.original_code import is_plain
from fusedops.integrations.hf.rules.rule import runs_here
from fusedops.ops.causal_conv1d import causal_conv1d
from fusedops.ops.gated_delta_rule import gated_delta_rule

# Activation behind a convolution -> what the op calls it.
ACTIVATIONS = {None: None, "silu": "silu", "swish": "silu"}
WIDTHS = range(2, 9)  # of convolutions that the op takes


class MixerFunction(NamedTuple):
    """A function of transformers' files, on an op."""

    op: str
    compute: Callable[..., Any]  # returns None for arguments that the op does not take


def serves(first: torch.Tensor, *others: torch.Tensor | None) -> bool:
    """Return whether the ops have kernels for these tensors."""
    return runs_here(first) and all(other is None or is_plain(other) for other in others)


def as_state(tensor: torch.Tensor | None, input: torch.Tensor) -> torch.Tensor | None:
    """Return a state in the dtype of states for an input.

    Its cache writes to it in place, while an op keeps it for a backward: that gets a copy.
    """
    if tensor is None:
        return None
    copies = torch.is_grad_enabled()
    return tensor.to(torch.promote_types(input.dtype, torch.float32), copy=copies)


def as_parameter(tensor: torch.Tensor | None, input: torch.Tensor) -> Any:
    """Return a tensor that has float32 or the dtype of an input."""
    if tensor is None or tensor.dtype == input.dtype:
        return tensor
    return tensor.to(torch.promote_types(input.dtype, torch.float32))


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
    return known and serves(input, weight, bias) and (bias is None or bias.dtype == weight.dtype)


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
    if not serves(query, *given) or not query.dtype == key.dtype == value.dtype:
        return None
    output, state = gated_delta_rule(
        query,
        key,
        value,
        as_parameter(g, query),
        as_parameter(beta, query),
        qk_norm=use_qk_l2norm_in_kernel,
        initial_state=as_state(initial_state, query),
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


# Its name in the files -> the function.
FUNCTIONS = {
    "causal_conv1d_fn": MixerFunction("causal_conv1d", _convolution),
    "causal_conv1d_update": MixerFunction("causal_conv1d", _convolution_update),
    "torch_chunk_gated_delta_rule": MixerFunction("gated_delta_rule", _delta_rule),
    "torch_recurrent_gated_delta_rule": MixerFunction("gated_delta_rule", _recurrent_delta_rule),
    "chunk_kimi_delta_attention": MixerFunction("gated_delta_rule", _delta_rule),
    "recurrent_kimi_delta_attention": MixerFunction("gated_delta_rule", _recurrent_delta_rule),
}
