"""The selective scan of Mamba: one decay for each token, channel and element of its state."""

from __future__ import annotations

from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding
from fusedops.kernels._arguments import StateSpaceArguments, of_backward
from fusedops.ops import _scan_math


def selective_scan(
    input: torch.Tensor,
    dt: torch.Tensor,
    A: torch.Tensor,
    B: torch.Tensor,
    C: torch.Tensor,
    *,
    D: torch.Tensor | None = None,
    z: torch.Tensor | None = None,
    dt_bias: torch.Tensor | None = None,
    dt_softplus: bool = False,
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Apply the selective state space model of Mamba to each channel of each sequence.

    The state of a channel, ``[state_dim]``, goes from token to token:

        step = max(softplus(dt + dt_bias), 0)
        state = exp(step * A) * state + step * input * B
        output = (sum(state * C) + D * input) * silu(z)

    Args:
        input: ``[batch, tokens, channels]``, any floating dtype, any strides.
        dt: ``[batch, tokens, channels]``, dtype of ``input`` (float32 is also accepted if that is a
            half-precision dtype).
        A: ``[channels, state_dim]``, usually negative, a dtype as of ``dt``.
        B: ``[batch, tokens, state_dim]``, dtype of ``input``.
        C: as ``B``.
        D: ``[channels]``, factor of the input that is added to the output, a dtype as of ``dt``.
        z: shape and dtype of ``input``: a gate, ``output * silu(z)``.
        dt_bias: ``[channels]``, a dtype as of ``dt``.
        dt_softplus: apply softplus to ``dt + dt_bias``.
        initial_state: ``[batch, channels, state_dim]``, or one for each packed sequence; float32
            (float64 for float64). Zero by default.
        cu_seqlens: ``[sequences + 1]`` int32 or int64, from 0, rising, to ``tokens``: the tokens of
            a batch of one are packed sequences, which share no state.
        return_state: also return the state after the last token.

    Returns:
        The shape and dtype of ``input``, contiguous; with ``return_state`` also the state, of the
        shape and dtype of ``initial_state``, differentiable too.

    Raises:
        ValueError: a shape or device does not fit; ``cu_seqlens`` is not monotone or does not end
            at the number of tokens.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Sums, steps and states are float32 (float64 for float64). A sequence in pieces has the bits
        of one call, and packed sequences have those of separate calls. Results do not depend on the
        number of threads. The arguments are saved, and the backward computes the states again.
        There is no kernel for GPUs: the reference goes from token to token there. Autocast does not
        change the call.

    Reference:
        Gu, Dao: Mamba, arXiv:2312.00752.

    Example:
        >>> import torch, fusedops
        >>> x, ones = torch.ones(1, 3, 1), torch.ones(1, 3, 1)
        >>> fusedops.selective_scan(x, ones, torch.zeros(1, 1), ones, ones).flatten()
        tensor([1., 2., 3.])
    """
    op = "selective_scan"
    checks.flag(op, "dt_softplus", dt_softplus)
    checks.flag(op, "return_state", return_state)
    tensors = (input, dt, A, B, C, D, z, dt_bias, initial_state)
    _check(StateSpaceArguments(*tensors, cu_seqlens, dt_softplus))
    ends = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    output, state = _OP(*tensors, ends, dt_softplus)
    return (output, state) if return_state else output


def _check(call: StateSpaceArguments) -> None:
    op = "selective_scan"
    input, A = call.input, call.A
    checks.tensor(op, "input", input)
    checks.tensor(op, "A", A)
    if input.dim() != 3:
        expected = "of 3 dims, [batch, tokens, channels]"
        checks.fail(op, "input", expected, list(input.shape))
    if A.dim() != 2:
        checks.fail(op, "A", "of 2 dims, [channels, state_dim]", list(A.shape))
    (batch, tokens, channels), state_dim = input.shape, A.shape[1]
    shared = (batch, tokens, state_dim)
    _scan_math.check(
        op,
        call,
        [("B", shared), ("C", shared), ("z", input.shape)],
        [
            ("dt", input.shape),
            ("A", (channels, state_dim)),
            ("D", (channels,)),
            ("dt_bias", (channels,)),
        ],
        (channels, state_dim),
    )


def _as_heads(call: StateSpaceArguments) -> StateSpaceArguments:
    """Return the call with a head of size 1 for each channel."""

    def last(tensor: torch.Tensor | None) -> torch.Tensor | None:
        return None if tensor is None else tensor.unsqueeze(-1)

    state = call.initial_state
    return call._replace(
        input=call.input.unsqueeze(-1),
        B=call.B.unsqueeze(2),
        C=call.C.unsqueeze(2),
        z=last(call.z),
        initial_state=None if state is None else state.unsqueeze(2),
    )


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    output, state = _scan_math.forward(_as_heads(StateSpaceArguments(*args)))
    return output.squeeze(-1), state.squeeze(2)


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    *given, output_mask = args
    (grad_output, grad_state), call, _, _ = of_backward(
        StateSpaceArguments, (*given, 0.0, torch.inf, output_mask), incoming=2
    )
    found = _scan_math.backward(
        _as_heads(call),
        None if grad_output is None else grad_output.unsqueeze(-1),
        None if grad_state is None else grad_state.unsqueeze(2),
    )
    tensors: tuple[Any, ...] = call[:9]
    triples = zip(found, tensors, output_mask, strict=True)
    return tuple(
        grad.reshape(given.shape).to(given.dtype) if on and given is not None else None
        for grad, given, on in triples
    )


def _shard(cu_seqlens: Any) -> list[Sharding]:
    """Channels are independent, and so is the batch where it is not packed."""
    # Placements of tensors with tokens and channels, of B and C, of parameters, and of states.
    words: list[tuple[Placement, ...]] = [(REPLICATE,) * 4, (2, REPLICATE, 0, 1)]
    if cu_seqlens is None:
        words.append((0, 0, REPLICATE, 0))
    return [
        ([rows, state], [rows, rows, own, shared, shared, own, rows, own, state, REPLICATE])
        for rows, shared, own, state in words
    ]


_OP = define_op(
    "selective_scan",
    "(Tensor input, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias,"
    " Tensor? initial_state, Tensor? cu_seqlens, bool dt_softplus)"
    " -> (Tensor output, Tensor state)",
    contract={
        "input, z, output": "T [batch, tokens, channels]",
        "dt": "param(T) [batch, tokens, channels]",
        "A": "param(T) [channels, state_dim]",
        "D, dt_bias": "param(T) [channels]",
        "B, C": "T [batch, tokens, state_dim]",
        "state_dim": "state_dim >= 1",
        "cu_seqlens": "int64 [ends]",
        "sequences": "ends - 1 if given(cu_seqlens) else batch",
        "initial_state, state": "stat(T) [sequences, channels, state_dim]",
        "ends": "ends >= 2",
        "batch": "batch == (1 if given(cu_seqlens) else batch)",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=StateSpaceArguments._fields[:9],
        outputs=("output", "state"),
        saves=StateSpaceArguments._fields[:10],
        reference=_backward,
    ),
    shard=_shard,
)
