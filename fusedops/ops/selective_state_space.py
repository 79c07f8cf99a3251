"""The state space model of Mamba-2 (SSD): one decay for each token and head."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops._core import checks
from fusedops._core.library import Gradient, define_op
from fusedops._core.sharding import REPLICATE, Placement, Sharding
from fusedops.kernels._arguments import StateSpaceArguments, of_backward
from fusedops.ops import _scan_math


def selective_state_space(
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
    dt_limit: tuple[float, float] = (0.0, math.inf),
    initial_state: torch.Tensor | None = None,
    cu_seqlens: torch.Tensor | None = None,
    return_state: bool = False,
) -> Any:
    """Apply the selective state space model of Mamba-2 to each head of each sequence.

    The state of a head, ``[head_dim, state_dim]``, goes from token to token:

        step = clamp(softplus(dt + dt_bias), *dt_limit)
        state = exp(step * A) * state + outer(step * input, B)
        output = (state @ C + D * input) * silu(z)

    Args:
        input: ``[batch, tokens, heads, head_dim]``, any floating dtype, any strides.
        dt: ``[batch, tokens, heads]``, dtype of ``input`` (float32 is also accepted if that is a
            half-precision dtype).
        A: ``[heads]``, usually negative, a dtype as of ``dt``.
        B: ``[batch, tokens, groups, state_dim]``, dtype of ``input``; ``heads`` is a multiple of
            ``groups``, and head ``h`` reads group ``h // (heads // groups)``.
        C: as ``B``.
        D: ``[heads]``, factor of the input that is added to the output, a dtype as of ``dt``.
        z: shape and dtype of ``input``: a gate, ``output * silu(z)``.
        dt_bias: ``[heads]``, a dtype as of ``dt``.
        dt_softplus: apply softplus to ``dt + dt_bias``.
        dt_limit: bounds of the step, ``0 <= low <= high``.
        initial_state: ``[batch, heads, head_dim, state_dim]``, or one for each packed sequence;
            float32 (float64 for float64). Zero by default.
        cu_seqlens: ``[sequences + 1]`` int32 or int64, from 0, rising, to ``tokens``: the tokens of
            a batch of one are packed sequences, which share no state.
        return_state: also return the state after the last token.

    Returns:
        The shape and dtype of ``input``, contiguous; with ``return_state`` also the state, of the
        shape and dtype of ``initial_state``, differentiable too.

    Raises:
        ValueError: a shape, device or number does not fit; ``cu_seqlens`` is not monotone or does
            not end at the number of tokens.
        TypeError: an argument is no tensor, or its dtype does not fit.

    Note:
        Sums, steps and states are float32 (float64 for float64). Several tokens are computed in
        chunks of 64: a sequence in pieces of whole chunks has the bits of one call, and packed
        sequences have those of separate calls. Results do not depend on the number of threads. The
        arguments are saved, and the backward computes the states again. Where a step or ``A`` is
        infinite, the values of its head after it in the chunk may be NaN. What is not finite may
        reach the gradient of ``dt``, and on GPUs the values, of all tokens of its chunk. Autocast
        does not change the call.

    Reference:
        Dao, Gu: Transformers are SSMs, arXiv:2405.21060.

    Example:
        >>> import torch, fusedops
        >>> x, dt, ones = torch.ones(1, 3, 1, 1), torch.ones(1, 3, 1), torch.ones(1, 3, 1, 1)
        >>> fusedops.selective_state_space(x, dt, torch.zeros(1), ones, ones).flatten()
        tensor([1., 2., 3.])
    """
    op = "selective_state_space"
    checks.flag(op, "dt_softplus", dt_softplus)
    checks.flag(op, "return_state", return_state)
    low, high = check_limits(dt_limit)
    tensors = (input, dt, A, B, C, D, z, dt_bias, initial_state)
    check_arguments(StateSpaceArguments(*tensors, cu_seqlens, dt_softplus, low, high))
    ends = None if cu_seqlens is None else cu_seqlens.to(torch.int64)
    output, state = _OP(*tensors, ends, dt_softplus, low, high)
    return (output, state) if return_state else output


def check_limits(dt_limit: Any) -> tuple[float, float]:
    """Return the limits as numbers; raise unless they are."""
    op, name = "selective_state_space", "dt_limit"
    if not isinstance(dt_limit, (tuple, list)) or len(dt_limit) != 2:
        raise TypeError(f"{op}: {name} must be a tuple of 2 floats, got {checks.shown(dt_limit)}")
    for number in dt_limit:
        checks.number(op, name, number)
    low, high = map(float, dt_limit)
    if not 0 <= low <= high or low == math.inf:
        checks.fail(op, name, "(low, high) with 0 <= low <= high and a finite low", (low, high))
    return low, high


def check_arguments(call: StateSpaceArguments) -> None:
    """Raise unless the tensors of ``selective_state_space`` fit."""
    op = "selective_state_space"
    input, B = call.input, call.B
    checks.tensor(op, "input", input)
    checks.tensor(op, "B", B)
    if input.dim() != 4:
        expected = "of 4 dims, [batch, tokens, heads, head_dim]"
        checks.fail(op, "input", expected, list(input.shape))
    if B.dim() != 4:
        expected = "of 4 dims, [batch, tokens, groups, state_dim]"
        checks.fail(op, "B", expected, list(B.shape))
    (batch, tokens, heads, head_dim), (groups, state_dim) = input.shape, B.shape[2:]
    if heads and (not groups or heads % groups):
        checks.fail(op, "input", f"of a number of heads that the {groups} groups divide", heads)
    shared = (batch, tokens, groups, state_dim)
    _scan_math.check(
        op,
        call,
        [("B", shared), ("C", shared), ("z", input.shape)],
        [("dt", (batch, tokens, heads)), *((name, (heads,)) for name in ("A", "D", "dt_bias"))],
        (heads, head_dim, state_dim),
    )


def _reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    call = StateSpaceArguments(*args)
    return _scan_math.forward(call._replace(A=call.A[:, None]))


def _backward(*args: Any) -> tuple[torch.Tensor | None, ...]:
    grads, call, _, output_mask = of_backward(StateSpaceArguments, args, incoming=2)
    results = list(_scan_math.backward(call._replace(A=call.A[:, None]), *grads))
    results[2] = results[2].squeeze(1)
    triples = zip(results, call, output_mask, strict=False)
    return tuple(
        grad.to(argument.dtype).contiguous() if on and isinstance(argument, torch.Tensor) else None
        for grad, argument, on in triples
    )


def _shard(input: Any, B: Any, cu_seqlens: Any) -> list[Sharding]:
    """Heads are independent, and so is the batch where it is not packed."""
    ranks = input.mesh.size()
    # Placements of tensors with tokens and heads, of B and C, of parameters, and of states.
    words: list[tuple[Placement, ...]] = [(REPLICATE,) * 4]
    if cu_seqlens is None:
        words.append((0, 0, REPLICATE, 0))
    if input.shape[2] % ranks == 0 and B.shape[2] % ranks == 0:
        words.append((2, 2, 0, 1))
    elif B.shape[2] == 1:
        words.append((2, REPLICATE, 0, 1))
    return [
        (
            [heads, state],
            [heads, heads, own, shared, shared, own, heads, own, state, REPLICATE],
        )
        for heads, shared, own, state in words
    ]


_OP = define_op(
    "selective_state_space",
    "(Tensor input, Tensor dt, Tensor A, Tensor B, Tensor C, Tensor? D, Tensor? z, Tensor? dt_bias,"
    " Tensor? initial_state, Tensor? cu_seqlens, bool dt_softplus, float dt_min, float dt_max)"
    " -> (Tensor output, Tensor state)",
    contract={
        "input, z, output": "T [batch, tokens, heads, head_dim]",
        "dt": "param(T) [batch, tokens, heads]",
        "A, D, dt_bias": "param(T) [heads]",
        "B, C": "T [batch, tokens, groups, state_dim]",
        "heads": "heads == 0 or groups > 0 and heads % groups == 0",
        "state_dim": "state_dim >= 1",
        "cu_seqlens": "int64 [ends]",
        "sequences": "ends - 1 if given(cu_seqlens) else batch",
        "initial_state, state": "stat(T) [sequences, heads, head_dim, state_dim]",
        "ends": "ends >= 2",
        "batch": "batch == (1 if given(cu_seqlens) else batch)",
        "dt_min": "0 <= dt_min < inf",
        "dt_max": "0 <= dt_max <= inf",
    },
    reference=_reference,
    gradient=Gradient(
        inputs=StateSpaceArguments._fields[:9],
        outputs=("output", "state"),
        saves=StateSpaceArguments._fields[:10],
        reference=_backward,
    ),
    triton="fusedops.kernels.selective_state_space",
    shard=_shard,
)
