"""The short causal convolution of each channel that state space models begin with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.nn import functional

from fusedops._core import checks, dtypes
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding
from fusedops.kernels._arguments import CausalConv1dArguments, of_backward
from fusedops.ops import _sequences

_WIDTHS = (2, 8)


def causal_conv1d(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str | None = None,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Convolve each channel with its own weights over the last tokens, and apply an activation.

    ``output[b, c, t] = act(bias[c] + sum(weight[c, k] * input[b, c, t - width + 1 + k]))`` over
    ``k < width``. What is before the first token is the initial state, or 0.

    Args:
        input: ``[batch, channels, tokens]``, any floating dtype, any strides. Fast is a transposed
            view of ``[batch, tokens, channels]``, or of columns of one, which is not copied.
        weight: ``[channels, width]`` with a width from 2 to 8, dtype of ``input`` (float32 is also
            accepted if that is a half-precision dtype).
        bias: ``[channels]``, a dtype as of ``weight``.
        activation: ``None`` or ``"silu"``.
        initial_state: ``[batch, channels, width - 1]``, or one for each packed sequence: the inputs
            before the first token, dtype of ``input``.
        cu_seqlens: ``[sequences + 1]`` int32 or int64, from 0, rising, to ``tokens``: the tokens of
            a batch of one are packed sequences. No value of one reaches another.
        return_state: also return the last ``width - 1`` inputs of each sequence, those of the
            initial state included where a sequence is shorter.

    Returns:
        The shape and dtype of ``input``. In memory the channels of a token are contiguous where
        those of ``input`` are; else the result is contiguous. With ``return_state`` also the state,
        of the shape and dtype of ``initial_state``, differentiable too.

    Raises:
        ValueError: a shape, device or option does not fit; ``cu_seqlens`` is not monotone or does
            not end at the number of tokens.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Sums and activation are float32 (float64 for float64), rounded once. Saves the arguments
        only; the backward computes the sums again. Gradients of weight and bias are sums over
        chunks of tokens in a fixed order. Packed sequences have the bits of separate calls.
        Autocast does not change the call.

    Reference:
        Gu, Dao: Mamba, arXiv:2312.00752.

    Example:
        >>> import torch, fusedops
        >>> weight = torch.tensor([[1.0, 10.0]])
        >>> fusedops.causal_conv1d(torch.tensor([[[1.0, 2.0, 3.0]]]), weight)
        tensor([[[10., 21., 32.]]])
    """
    op = "causal_conv1d"
    checks.flag(op, "return_state", return_state)
    if activation is not None:
        checks.choice(op, "activation", activation, ("silu",))
    check_arguments(input, weight, bias, initial_state, cu_seqlens)
    ends = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    output, state = _OP(input, weight, bias, initial_state, ends, activation or "identity")
    return (output, state) if return_state else output


def check_arguments(
    input: Any, weight: Any, bias: Any, initial_state: Any, cu_seqlens: Any
) -> None:
    """Raise unless the tensors of ``causal_conv1d`` fit."""
    op = "causal_conv1d"
    checks.tensor(op, "input", input)
    if input.dim() != 3:
        expected = "of 3 dims, [batch, channels, tokens]"
        checks.fail(op, "input", expected, list(input.shape))
    _, channels, tokens = input.shape
    checks.parameter(op, "weight", weight, "input", input)
    width = weight.shape[1] if weight.dim() == 2 else "width"
    checks.shape(op, "weight", weight, (channels, width), "channels of input")
    least, most = _WIDTHS
    if not least <= weight.shape[1] <= most:
        checks.fail(op, "weight", f"of a width from {least} to {most}", weight.shape[1])
    if bias is not None:
        checks.parameter(op, "bias", bias, "input", input)
        checks.shape(op, "bias", bias, (channels,), "channels of input")
    sequences = _sequences.check_packed(op, cu_seqlens, input, tokens)
    if initial_state is not None:
        checks.like(op, "initial_state", initial_state, "input", input, dtype=True)
        shape = (sequences, channels, weight.shape[1] - 1)
        checks.shape(op, "initial_state", initial_state, shape, "one for each sequence")


def _empty(input: torch.Tensor) -> torch.Tensor:
    """Return an empty tensor whose channels are contiguous where those of ``input`` are."""
    if input.stride(1) == 1 and input.stride(2) != 1:
        batch, channels, tokens = input.shape
        return input.new_empty(batch, tokens, channels).transpose(1, 2)
    return input.new_empty(input.shape)


def _windows(call: CausalConv1dArguments) -> Iterator[tuple[slice, slice, list[torch.Tensor]]]:
    """Yield per sequence its tokens, its row of states, and for each weight what it multiplies."""
    wide = dtypes.statistics_dtype(call.input.dtype)
    channels, width = call.weight.shape
    state = call.initial_state
    if state is None:
        sizes = (channels, width - 1)
        state = _sequences.zero_state(call.input, call.cu_seqlens, sizes, wide)
    for tokens, rows in _sequences.pieces(call.cu_seqlens):
        inputs = call.input[:, :, tokens].to(wide)
        padded = torch.cat([state[rows].to(wide), inputs], 2)
        length = inputs.shape[2]
        shifted = [padded[:, :, k : k + length] for k in range(width)]
        yield tokens, rows, [*shifted, padded[:, :, length:]]


def _sums(call: CausalConv1dArguments, shifted: list[torch.Tensor]) -> torch.Tensor:
    weight = call.weight.to(shifted[0].dtype)
    total = sum(part * weight[:, k, None] for k, part in enumerate(shifted))
    assert isinstance(total, torch.Tensor)
    return total if call.bias is None else total + call.bias[:, None]


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = CausalConv1dArguments(*args)
    outputs, states = [], []
    for _, _, (*shifted, state) in _windows(call):
        sums = _sums(call, shifted)
        outputs.append(functional.silu(sums) if call.activation == "silu" else sums)
        states.append(state)
    dtype = call.input.dtype
    output = _empty(call.input).copy_(torch.cat(outputs, 2))
    return output, torch.cat(states).to(dtype)


def _fake(
    input: torch.Tensor, weight: torch.Tensor, cu_seqlens: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    rows = input.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    return _empty(input), input.new_empty(rows, input.shape[1], weight.shape[1] - 1)


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grads, call, _, output_mask = of_backward(CausalConv1dArguments, args, incoming=2)
    grad_output, grad_state = grads
    weight, width = call.weight, call.weight.shape[1]
    wide = dtypes.statistics_dtype(call.input.dtype)
    grad_inputs, grad_initial, grad_parameters = [], [], []
    for tokens, rows, (*shifted, state) in _windows(call):
        grad = torch.zeros_like(shifted[0])
        if grad_output is not None:
            grad = grad_output[:, :, tokens].to(wide)
        if call.activation == "silu":
            sums = _sums(call, shifted)
            share = torch.sigmoid(sums)
            grad = grad * share * (1 + sums * (1 - share))
        terms = [grad * part for part in shifted]
        grad_parameters.append(torch.stack([term.sum((0, 2)) for term in (*terms, grad)], 1))
        # Of the inputs from the initial state on.
        padded = functional.pad(grad * weight[:, :1].to(wide), (0, width - 1))
        for k in range(1, width):
            shares = grad * weight[:, k, None].to(wide)
            padded = padded + functional.pad(shares, (k, width - 1 - k))
        if grad_state is not None:
            length = grad.shape[2]
            padded = padded + functional.pad(grad_state[rows].to(wide), (length, 0))
        grad_initial.append(padded[:, :, : state.shape[2]])
        grad_inputs.append(padded[:, :, state.shape[2] :])
    sums = torch.stack(grad_parameters).sum(0)
    grad_input = _empty(call.input).copy_(torch.cat(grad_inputs, 2))
    found = (grad_input, sums[:, :width], sums[:, width], torch.cat(grad_initial))
    grads = [
        grad.to(given.dtype).contiguous() if given is not None and on else None
        for grad, given, on in zip(found[1:], call[1:4], output_mask[1:], strict=True)
    ]
    return grad_input if output_mask[0] else None, *grads


def _shard(cu_seqlens: Any) -> list[Sharding]:
    """Channels are independent, and so is the batch where it is not packed."""
    # Placements of input, of the parameters, and of states.
    words: list[tuple[Placement, Placement, Placement]] = [
        (REPLICATE, REPLICATE, REPLICATE),
        (1, 0, 1),
    ]
    if cu_seqlens is None:
        words.append((0, REPLICATE, 0))
    return [
        ([rows, state], [rows, parameter, parameter, state, REPLICATE])
        for rows, parameter, state in words
    ]


_OP = define_op(
    "causal_conv1d",
    "(Tensor input, Tensor weight, Tensor? bias, Tensor? initial_state, Tensor? cu_seqlens,"
    " str activation) -> (Tensor output, Tensor state)",
    contract={
        "input, output": "T [batch, channels, tokens]",
        "weight": "param(T) [channels, width]",
        "bias": "param(T) [channels]",
        "width": f"{_WIDTHS[0]} <= width <= {_WIDTHS[1]}",
        "cu_seqlens": "int64 [ends]",
        "sequences": "ends - 1 if given(cu_seqlens) else batch",
        "initial_state, state": "T [sequences, channels, width - 1]",
        "ends": "ends >= 2",
        "batch": "batch == (1 if given(cu_seqlens) else batch)",
        "activation": ("identity", "silu"),
    },
    reference=_reference,
    fake=_fake,
    gradient=Gradient(
        inputs=("input", "weight", "bias", "initial_state"),
        outputs=("output", "state"),
        saves=CausalConv1dArguments._fields[:5],
        reference=_backward,
        layouts={"input": _empty},
    ),
    triton="fusedops.kernels.causal_conv1d",
    shard=_shard,
)
