"""The gated delta rule in chunks of tokens, forward and backward, in differentiable torch.

``G`` is the sum of the gates from the chunk's begin to a token, itself included. With the strictly
lower part ``A`` of ``beta[i] * sum(k[i] * k[j] * exp(G[i] - G[j]))`` and the lower part ``P`` of
``sum(q[i] * k[j] * exp(G[i] - G[j]))`` a chunk computes

    (1 + A) @ new = beta * (value - (k * exp(G)) @ state)
    output = (q * exp(G)) @ state + P @ new
    state = exp(G[last]) * state + (k * exp(G[last] - G)).T @ new

No exponent is positive. Tensors are ``[batch, heads, tokens, size]`` in the dtype of statistics.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from fusedops._core import dtypes
from fusedops.kernels._arguments import DeltaRuleArguments

NORM_EPS = 1e-6
# The exponentials of smaller gates are 0 as well.
_LEAST_GATES = {torch.float32: -110.0, torch.float64: -750.0}
Tensor = torch.Tensor


class _Inputs(NamedTuple):
    query: Tensor  # normalised and scaled
    key: Tensor
    value: Tensor
    gate: Tensor  # of size 1, or of key's
    beta: Tensor


class _Chunk(NamedTuple):
    """What a chunk computes of its inputs and the state before it."""

    decay: Tensor  # exp(G[i] - G[j]) for j <= i, else 0: [batch, heads, tokens, tokens, size]
    rise: Tensor  # exp(G)
    left: Tensor  # exp(G[last] - G)
    keys: Tensor  # A without beta
    scores: Tensor  # P
    rest: Tensor  # value - (k * exp(G)) @ state
    new: Tensor


def forward(call: DeltaRuleArguments) -> tuple[Tensor, Tensor]:
    """Return the output and the state after the last token."""
    outputs, states = [call.value[:, :0]], [_state(call, slice(0, 0))]
    for tokens, rows in _sequences(call):
        state = _state(call, rows)
        for part in _chunks(call, tokens):
            inputs = _inputs(call, part)
            chunk = _chunk(inputs, state)
            output = (inputs.query * chunk.rise) @ state + chunk.scores @ chunk.new
            outputs.append(output.transpose(1, 2).to(call.value.dtype))
            state = _after(inputs, chunk, state)
        states.append(state)
    return torch.cat(outputs, 1), torch.cat(states)


def backward(
    call: DeltaRuleArguments, grad_output: Tensor | None, grad_final: Tensor | None
) -> tuple[Tensor, ...]:
    """Return the gradients of query, key, value, gate, beta and initial_state."""
    wide = dtypes.statistics_dtype(call.value.dtype)
    parts: list[tuple[Tensor, ...]] = [tuple(tensor[:, :0] for tensor in call[:5])]
    states = [_state(call, slice(0, 0))]
    for tokens, rows in _sequences(call):
        befores = [_state(call, rows)]
        for part in _chunks(call, tokens):
            inputs = _inputs(call, part)
            befores.append(_after(inputs, _chunk(inputs, befores[-1]), befores[-1]))
        last = befores.pop()
        grad_state = torch.zeros_like(last) if grad_final is None else grad_final[rows].to(wide)
        found = []
        for part in reversed(_chunks(call, tokens)):
            inputs, before = _inputs(call, part), befores.pop()
            if grad_output is None:
                grad = torch.zeros_like(inputs.value)
            else:
                grad = grad_output[:, part].transpose(1, 2).to(wide)
            grads, grad_state = _chunk_backward(inputs, before, grad, grad_state)
            found.append(_input_gradients(call, part, grads))
        parts += reversed(found)
        states.append(grad_state)
    return (*(torch.cat(grads, 1) for grads in zip(*parts, strict=True)), torch.cat(states))


def _sequences(call: DeltaRuleArguments) -> Iterator[tuple[range, slice]]:
    """Yield the tokens and the states of each packed sequence, or of the whole batch."""
    if call.cu_seqlens is None:
        yield range(call.value.shape[1]), slice(None)
        return
    ends = call.cu_seqlens.tolist()
    for number in range(len(ends) - 1):
        yield range(ends[number], ends[number + 1]), slice(number, number + 1)


def _chunks(call: DeltaRuleArguments, tokens: range) -> list[slice]:
    # Of a gate per channel the decays are a tensor of tokens x tokens x size.
    length = 64 if call.gate.dim() == 3 else 16
    starts = range(tokens.start, tokens.stop, length)
    return [slice(start, min(start + length, tokens.stop)) for start in starts]


def _state(call: DeltaRuleArguments, rows: slice) -> Tensor:
    if call.initial_state is not None:
        return call.initial_state[rows]
    count = call.value.shape[0] if call.cu_seqlens is None else call.cu_seqlens.shape[0] - 1
    shape = (call.value.shape[2], call.key.shape[3], call.value.shape[3])
    wide = dtypes.statistics_dtype(call.value.dtype)
    return call.value.new_zeros(len(range(count)[rows]), *shape, dtype=wide)


def _factor(tensor: Tensor) -> Tensor:
    return torch.rsqrt(tensor.square().sum(-1, keepdim=True) + NORM_EPS)


def _inputs(call: DeltaRuleArguments, part: slice) -> _Inputs:
    wide = dtypes.statistics_dtype(call.value.dtype)
    query, key, value, gate, beta = (t[:, part].transpose(1, 2).to(wide) for t in call[:5])
    if call.qk_norm:
        query, key = query * _factor(query), key * _factor(key)
    groups = value.shape[1] // max(1, key.shape[1])
    query, key = (t.repeat_interleave(groups, 1) for t in (query * call.scale, key))
    return _Inputs(query, key, value, gate if gate.dim() == 4 else gate[..., None], beta[..., None])


def _input_gradients(call: DeltaRuleArguments, part: slice, grads: _Inputs) -> tuple[Tensor, ...]:
    """Return gradients of the arguments from those of ``_inputs``."""
    query, key, value, gate, beta = grads
    groups = call.value.shape[2] // max(1, call.key.shape[2])
    of_arguments = []
    for given, grad in ((call.query, query * call.scale), (call.key, key)):
        grad = grad.unflatten(1, (given.shape[2], groups)).sum(2)
        if call.qk_norm:
            wide = given[:, part].transpose(1, 2).to(grad.dtype)
            factor = _factor(wide)
            unit = wide * factor
            grad = factor * (grad - unit * (unit * grad).sum(-1, keepdim=True))
        of_arguments.append(grad)
    of_arguments += [value, gate if call.gate.dim() == 4 else gate[..., 0], beta[..., 0]]
    pairs = zip(of_arguments, call[:5], strict=True)
    return tuple(grad.transpose(1, 2).to(given.dtype) for grad, given in pairs)


def _products(rows: Tensor, columns: Tensor, decay: Tensor) -> Tensor:
    """Return ``sum(rows[i] * columns[j] * decay[i, j])`` over the last dim."""
    if decay.shape[-1] == 1:
        return (rows @ columns.mT) * decay[..., 0]
    return torch.einsum("...ik,...jk,...ijk->...ij", rows, columns, decay)


def _products_backward(
    grad: Tensor, rows: Tensor, columns: Tensor, decay: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of ``rows`` and ``columns`` of ``_products``."""
    if decay.shape[-1] == 1:
        grad = grad * decay[..., 0]
        return grad @ columns, grad.mT @ rows
    return (
        torch.einsum("...ij,...jk,...ijk->...ik", grad, columns, decay),
        torch.einsum("...ij,...ik,...ijk->...jk", grad, rows, decay),
    )


def _solve(keys: Tensor, beta: Tensor, right: Tensor, *, transposed: bool = False) -> Tensor:
    matrix = keys * beta
    if transposed:
        matrix = matrix.mT
    return torch.linalg.solve_triangular(matrix, right, upper=transposed, unitriangular=True)


def _chunk(inputs: _Inputs, state: Tensor) -> _Chunk:
    query, key, value, gate, beta = inputs
    # In float64, because sums may be large where their differences are small.
    total = gate.clamp_min(_LEAST_GATES[gate.dtype]).double().cumsum(2)
    between = (total.unsqueeze(3) - total.unsqueeze(2)).to(gate.dtype)
    length = total.shape[2]
    later = torch.ones(length, length, dtype=torch.bool, device=gate.device).triu(1)
    decay = between.masked_fill(later[..., None], -torch.inf).exp()
    rise, left = (x.to(gate.dtype).exp() for x in (total, total[:, :, -1:] - total))
    keys = _products(key, key, decay).tril(-1)
    rest = value - (key * rise) @ state
    new = _solve(keys, beta, beta * rest)
    return _Chunk(decay, rise, left, keys, _products(query, key, decay), rest, new)


def _after(inputs: _Inputs, chunk: _Chunk, state: Tensor) -> Tensor:
    """Return the state after a chunk."""
    return state * chunk.rise[:, :, -1, :, None] + (inputs.key * chunk.left).mT @ chunk.new


def _chunk_backward(
    inputs: _Inputs, state: Tensor, grad_output: Tensor, grad_after: Tensor
) -> tuple[_Inputs, Tensor]:
    """Return the gradients of a chunk's inputs and of the state before it."""
    query, key, _, gate, beta = inputs
    chunk = _chunk(inputs, state)
    decay, rise, left, keys, scores, rest, new = chunk
    grad_new = scores.mT @ grad_output + (key * left) @ grad_after
    grad_right = _solve(keys, beta, grad_new, transposed=True)
    grad_value = beta * grad_right
    grad_keys = (-grad_right @ new.mT).tril(-1)
    grad_scores = (grad_output @ new.mT).tril()
    grad_beta = (grad_right * rest).sum(-1) + (grad_keys * keys).sum(-1)
    # The key as a row has the factor exp(G), as a column exp(-G).
    query_rows, key_rows = (grad_output @ state.mT) * rise, -(grad_value @ state.mT) * rise
    columns = (new @ grad_after.mT) * left
    grad_gate = _gate_gradient(inputs, chunk, grad_scores, grad_keys * beta)
    of_rows = query * query_rows + key * key_rows
    of_states = (state * grad_after).sum(-1)[:, :, None] * rise[:, :, -1:]
    of_tokens = of_rows.flip(2).cumsum(2).flip(2) + of_states
    of_tokens = of_tokens + functional.pad(key * columns, (0, 0, 1, -1)).cumsum(2)
    grad_gate = grad_gate + (of_tokens if gate.shape[-1] > 1 else of_tokens.sum(-1, keepdim=True))
    query_more, query_columns = _products_backward(grad_scores, query, key, decay)
    key_more, key_columns = _products_backward(grad_keys * beta, key, key, decay)
    grad_state = (
        grad_after * rise[:, :, -1, :, None]
        + (query * rise).mT @ grad_output
        - (key * rise).mT @ grad_value
    )
    grad_key = key_rows + key_more + columns + query_columns + key_columns
    grads = _Inputs(query_rows + query_more, grad_key, grad_value, grad_gate, grad_beta[..., None])
    return grads, grad_state


def _gate_gradient(
    inputs: _Inputs, chunk: _Chunk, grad_scores: Tensor, grad_keys: Tensor
) -> Tensor:
    """Return what the gates get of the products of tokens of the chunk.

    A gate decays the products of its token and later rows with earlier columns. Sums of these
    alone do not cancel, as the difference of what rows and columns get would.
    """
    query, key = inputs.query.unsqueeze(3), inputs.key.unsqueeze(3)
    if inputs.gate.shape[-1] == 1:
        pairs = (grad_scores * chunk.scores + grad_keys * chunk.keys)[..., None]
    else:
        rows = grad_scores[..., None] * query + grad_keys[..., None] * key
        pairs = rows * inputs.key.unsqueeze(2) * chunk.decay
    from_row = pairs.flip(2).cumsum(2).flip(2)
    return from_row.movedim(-1, 2).tril(-1).sum(-1).mT
