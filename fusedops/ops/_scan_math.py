"""The recurrence of state space models, forward and backward, in differentiable torch.

With ``step = clamp(softplus(dt + dt_bias))`` the state of a head goes from token to token:

    state = exp(step * A) * state + outer(step * input, B)
    output = (state @ C + D * input) * silu(z)

``selective_state_space`` has one ``A`` for a head; ``selective_scan`` has heads of one channel with
an ``A`` for each element of the state. Tensors here have the shapes of the former: ``input`` is
``[batch, tokens, heads, head_dim]``, ``A`` is ``[heads, 1 or state_dim]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch.nn import functional

from fusedops._core import checks, dtypes
from fusedops.kernels import _scan_steps
from fusedops.kernels._arguments import StateSpaceArguments
from fusedops.ops import _sequences

Tensor = torch.Tensor


def check(
    op: str,
    call: StateSpaceArguments,
    like_input: Sequence[tuple[str, Sequence[Any]]],
    parameters: Sequence[tuple[str, Sequence[Any]]],
    state_sizes: tuple[Any, ...],
) -> None:
    """Raise unless the arguments fit.

    Args:
        op: name of the op, for messages.
        call: the arguments; ``input`` has been looked at.
        like_input: names of tensors of the dtype of ``input``, and their shapes.
        parameters: the same of those that may also be float32.
        state_sizes: shape of the state of a sequence.
    """
    for names, same in ((like_input, True), (parameters, False)):
        for name, shape in names:
            value = getattr(call, name)
            if value is None and name in ("D", "z", "dt_bias"):
                continue
            if same:
                checks.like(op, name, value, "input", call.input, dtype=True)
            else:
                checks.parameter(op, name, value, "input", call.input)
            checks.shape(op, name, value, shape, "as input and B have sizes")
    if not state_sizes[-1]:
        checks.fail(op, "B", "of a state_dim of 1 or more", list(call.B.shape))
    sequences = _sequences.check_packed(op, call.cu_seqlens, call.input, call.input.shape[1])
    state = call.initial_state
    if state is not None:
        checks.like(op, "initial_state", state, "input", call.input)
        checks.shape(op, "initial_state", state, (sequences, *state_sizes), "one per sequence")
        wide = dtypes.statistics_dtype(call.input.dtype)
        if state.dtype != wide:
            raise TypeError(f"{op}: initial_state must have dtype {wide}, got {state.dtype}")


class _Inputs(NamedTuple):
    """Of some tokens, in the dtype of statistics."""

    input: Tensor
    dt: Tensor  # before softplus and bounds
    step: Tensor
    decay: Tensor  # [batch, tokens, heads, 1, 1 or state_dim]
    B: Tensor  # [batch, tokens, heads, 1, state_dim]
    C: Tensor

    def added(self, t: int) -> Tensor:
        """Return what token ``t`` adds to the state."""
        return (self.step[:, t, :, None] * self.input[:, t])[..., None] * self.B[:, t]


def _inputs(call: StateSpaceArguments, tokens: slice) -> _Inputs:
    wide = dtypes.statistics_dtype(call.input.dtype)
    input, B, C = (t[:, tokens].to(wide) for t in (call.input, call.B, call.C))
    dt, step = _scan_steps.steps(call, tokens)
    shares = call.input.shape[2] // max(1, call.B.shape[2])
    B, C = (t.repeat_interleave(shares, 2).unsqueeze(3) for t in (B, C))
    decay = (step[..., None] * call.A.to(wide)).exp().unsqueeze(3)
    return _Inputs(input, dt, step, decay, B, C)


def _states(call: StateSpaceArguments) -> Tensor:
    if call.initial_state is not None:
        return call.initial_state
    sizes = (*call.input.shape[2:], call.B.shape[3])
    wide = dtypes.statistics_dtype(call.input.dtype)
    return _sequences.zero_state(call.input, call.cu_seqlens, sizes, wide)


def _recur(inputs: _Inputs, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Return ``state @ C`` of each token, and the states from the initial one on."""
    outputs, states = [], [state]
    for t in range(inputs.input.shape[1]):
        states.append(states[-1] * inputs.decay[:, t] + inputs.added(t))
        outputs.append((states[-1] * inputs.C[:, t]).sum(-1))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(inputs.input), states


def forward(call: StateSpaceArguments) -> tuple[Tensor, Tensor]:
    """Return the output and the states after the last tokens."""
    outputs, last = [], []
    initial = _states(call)
    for tokens, rows in _sequences.pieces(call.cu_seqlens):
        inputs = _inputs(call, tokens)
        output, states = _recur(inputs, initial[rows])
        if call.D is not None:
            output = output + call.D[:, None] * inputs.input
        if call.z is not None:
            output = output * functional.silu(call.z[:, tokens].to(output.dtype))
        outputs.append(output)
        last.append(states[-1])
    # Not an argument, which a result must not be.
    return torch.cat(outputs, 1).to(call.input.dtype), torch.cat(last).clone()


def backward(
    call: StateSpaceArguments, grad_output: Tensor | None, grad_state: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of all arguments that are given or not, from input to initial_state."""
    wide = dtypes.statistics_dtype(call.input.dtype)
    initial, parts, parameters, states = _states(call), [], [], []
    for tokens, rows in _sequences.pieces(call.cu_seqlens):
        inputs = _inputs(call, tokens)
        grad = torch.zeros_like(inputs.input)
        if grad_output is not None:
            grad = grad_output[:, tokens].to(wide)
        last = torch.zeros_like(initial[rows]) if grad_state is None else grad_state[rows].to(wide)
        z = None if call.z is None else call.z[:, tokens].to(wide)
        of_tokens, of_parameters, before = _piece_backward(
            call, inputs, initial[rows], z, grad, last
        )
        parts.append(of_tokens)
        parameters.append(of_parameters)
        states.append(before)
    input, dt, B, C, z = (torch.cat(grads, 1) for grads in zip(*parts, strict=True))
    A, D, dt_bias = (torch.stack(grads).sum(0) for grads in zip(*parameters, strict=True))
    return input, dt, A, B, C, D, z, dt_bias, torch.cat(states)


def _piece_backward(
    call: StateSpaceArguments,
    inputs: _Inputs,
    state: Tensor,
    z: Tensor | None,
    grad: Tensor,
    grad_state: Tensor,
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], Tensor]:
    """Return gradients of tensors with tokens, of parameters, and of the state before."""
    wide, A = grad.dtype, call.A.to(grad.dtype)
    output, states = _recur(inputs, state)
    grad_z = torch.zeros_like(grad)
    if z is not None:
        if call.D is not None:
            output = output + call.D[:, None] * inputs.input
        share = torch.sigmoid(z)
        grad_z = grad * output * share * (1 + z * (1 - share))
        grad = grad * z * share
    of_input, of_step, of_A, of_B, of_C = [], [], [torch.zeros_like(A)], [], []
    for t in reversed(range(grad.shape[1])):
        step, input, B = inputs.step[:, t, :, None], inputs.input[:, t], inputs.B[:, t]
        row = grad[:, t, :, :, None]
        grad_state = grad_state + row * inputs.C[:, t]
        of_C.append((row * states[t + 1]).sum(2))
        of_B.append((grad_state * (step * input)[..., None]).sum(2))
        # Of step * input, and of the exponent of the decay.
        of_product = (grad_state * B).sum(-1)
        exponent = (grad_state * states[t] * inputs.decay[:, t]).sum(2)
        exponent = exponent.sum(-1, keepdim=True) if A.shape[1] == 1 else exponent
        of_step.append((exponent * A).sum(-1) + (of_product * input).sum(-1))
        of_A.append((exponent * step).sum(0))
        of_input.append(of_product * step)
        grad_state = grad_state * inputs.decay[:, t]

    def joined(grads: list[Tensor], like: Tensor) -> Tensor:
        return torch.stack(grads[::-1], 1) if grads else torch.zeros_like(like)

    def grouped(grads: list[Tensor], like: Tensor) -> Tensor:
        groups = call.B.shape[2]
        shares = like.shape[2] // max(1, groups)
        return joined(grads, like.squeeze(3)).unflatten(2, (groups, shares)).sum(3)

    grad_dt = _scan_steps.steps_backward(call, inputs.dt, joined(of_step, inputs.step))
    grad_input = joined(of_input, inputs.input)
    if call.D is not None:
        grad_input = grad_input + call.D[:, None].to(wide) * grad
    of_tokens = (
        grad_input,
        grad_dt,
        grouped(of_B, inputs.B),
        grouped(of_C, inputs.C),
        grad_z,
    )
    of_D = (grad * inputs.input).sum((0, 1, 3))
    return of_tokens, (torch.stack(of_A).sum(0), of_D, grad_dt.sum((0, 1))), grad_state
