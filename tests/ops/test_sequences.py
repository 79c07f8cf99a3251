"""Ops that keep a state: packed sequences and sequences in pieces have the bits of one call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_same_bits, assert_same_bits_on_threads

import fusedops
from fusedops.specs import Sample, all_specs

LENGTHS = (70, 0, 1, 129, 64)
Call = tuple[Callable[..., Any], tuple[torch.Tensor, ...], dict[str, Any], tuple[int, ...]]


def new(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape).to(dtype).requires_grad_()


def _causal_conv1d(dtype: torch.dtype, tokens: int, states: int) -> Call:
    rows = new(1, tokens, 37, dtype=dtype).transpose(1, 2)
    parameters = {"weight": new(37, 4, dtype=dtype), "bias": new(37, dtype=dtype)}
    options = {**parameters, "activation": "silu"}
    return fusedops.causal_conv1d, (rows,), options, (states, 37, 3)


def _selective_state_space(dtype: torch.dtype, tokens: int, states: int) -> Call:
    x, z = (new(1, tokens, 6, 20, dtype=dtype) for _ in range(2))
    B, C = (new(1, tokens, 2, 12, dtype=dtype) for _ in range(2))
    options = {"D": new(6), "dt_bias": new(6), "dt_softplus": True}

    def call(x: Any, dt: Any, B: Any, C: Any, z: Any, **more: Any) -> Any:
        return fusedops.selective_state_space(x, dt, A, B, C, z=z, **more)

    A = -torch.rand(6)
    return call, (x, new(1, tokens, 6, dtype=dtype), B, C, z), options, (states, 6, 20, 12)


def _selective_scan(dtype: torch.dtype, tokens: int, states: int) -> Call:
    x, dt, z = (new(1, tokens, 37, dtype=dtype) for _ in range(3))
    B, C = (new(1, tokens, 16, dtype=dtype) for _ in range(2))
    options = {"D": new(37), "dt_bias": new(37), "dt_softplus": True}

    def call(x: Any, dt: Any, B: Any, C: Any, z: Any, **more: Any) -> Any:
        return fusedops.selective_scan(x, dt, A, B, C, z=z, **more)

    A = -torch.rand(37, 16)
    return call, (x, dt, B, C, z), options, (states, 37, 16)


CALLS = {
    "causal_conv1d": _causal_conv1d,
    "selective_state_space": _selective_state_space,
    "selective_scan": _selective_scan,
}
CASES = [(name, dtype) for name in CALLS for dtype in (torch.float32, torch.bfloat16)]


def state_of(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    return new(*shape, dtype=dtype if name == "causal_conv1d" else torch.float32)


def token_dim(name: str) -> int:
    return 2 if name == "causal_conv1d" else 1


def results(
    function: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    state: torch.Tensor,
    given: tuple[torch.Tensor, torch.Tensor],
    **options: Any,
) -> list[torch.Tensor]:
    """Return output, state, and the gradients of the tensors with tokens and of the state."""
    outputs = function(*tensors, initial_state=state, return_state=True, **options)
    return [*outputs, *torch.autograd.grad(outputs, [*tensors, state], given)]


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_packed_sequences_have_the_bits_of_separate_calls(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, tensors, options, shape = CALLS[name](dtype, sum(LENGTHS), len(LENGTHS))
    state, dim = state_of(name, dtype, shape), token_dim(name)
    ends = torch.tensor([0, *LENGTHS]).cumsum(0)
    given = torch.randn(tensors[0].shape).to(dtype), torch.randn(shape).to(state.dtype)
    packed = results(function, tensors, state, given, cu_seqlens=ends, **options)
    dims = [dim, 0, *[dim] * len(tensors), 0]
    separate = []
    for n in range(len(LENGTHS)):
        cut = [tensor.narrow(dim, int(ends[n]), LENGTHS[n]) for tensor in (*tensors, given[0])]
        *part, grad = (tensor.detach().requires_grad_() for tensor in cut)
        one = state[n : n + 1].detach().requires_grad_()
        separate.append(
            results(function, tuple(part), one, (grad.detach(), given[1][n : n + 1]), **options)
        )
    joined = [
        torch.cat(parts, d) for d, parts in zip(dims, zip(*separate, strict=True), strict=True)
    ]
    assert_same_bits(packed, joined)


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_the_number_of_threads_changes_no_bits(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, tensors, options, shape = CALLS[name](dtype, 700, 3)
    options |= {"initial_state": state_of(name, dtype, shape), "return_state": True}
    options["cu_seqlens"] = torch.tensor([0, 300, 301, 700])
    spec = replace(all_specs()[name], op=function)
    assert_same_bits_on_threads(spec, Sample("packed", tensors, options), (2, 1, 3))


@pytest.mark.parametrize(("name", "dtype"), CASES)
def test_a_sequence_in_pieces_has_the_bits_of_one_call(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    function, tensors, options, shape = CALLS[name](dtype, 192, 1)
    options |= {"return_state": True}
    dim, state = token_dim(name), state_of(name, dtype, shape)
    output, last = function(*tensors, initial_state=state, **options)
    parts = []
    for begin, length in ((0, 64), (64, 128)):
        cut = [tensor.narrow(dim, begin, length) for tensor in tensors]
        part, state = function(*cut, initial_state=state, **options)
        parts.append(part)
    assert_same_bits([torch.cat(parts, dim), state], [output, last])


def test_decays_of_many_tokens_have_no_bias() -> None:
    """An exponential that is too small by 7e-8 makes a state too small by 3e-4 after 4096."""
    tokens, A = 4096, -torch.rand(8)
    rows, steps = torch.zeros(1, tokens, 8), 1e-3 * torch.rand(1, tokens, 8)
    heads, shared = rows[..., None], torch.zeros(1, tokens, 1)
    calls: list[tuple[Callable[..., Any], tuple[torch.Tensor, ...], tuple[int, ...]]] = [
        (fusedops.selective_scan, (rows, steps, A[:, None], shared, shared), (1, 8, 1)),
        (
            fusedops.selective_state_space,
            (heads, steps, A, shared[..., None], shared[..., None]),
            (1, 8, 1, 1),
        ),
        (fusedops.gated_delta_rule, (heads, heads, heads, steps * A, rows), (1, 8, 1, 1)),
        (
            fusedops.gated_delta_rule,
            (heads, heads, heads, (steps * A)[..., None], rows),
            (1, 8, 1, 1),
        ),
    ]
    want = (steps.double() * A.double()).sum(1).exp().flatten()
    base = (steps * A).exp().prod(1).flatten()
    for op, arguments, shape in calls:
        _, state = op(*arguments, initial_state=torch.ones(shape), return_state=True)
        assert_close(state.flatten(), want, base, op.__name__)


@pytest.mark.parametrize("backend", ["cpp", pytest.param("triton", marks=pytest.mark.interpreter)])
@pytest.mark.parametrize("step", [40.0, 1e5])
def test_strong_decays_of_selective_state_space_are_exact(step: float, backend: str) -> None:
    """The gradients of ``A`` and ``dt`` are small there; large terms of them must not cancel."""
    torch.manual_seed(0)
    x, B, C = new(1, 90, 2, 16), new(1, 90, 1, 8), new(1, 90, 1, 8)
    dt = torch.rand(1, 90, 2)
    dt[:, ::9] = step
    given = (x, dt.requires_grad_(), (-1 - torch.rand(2)).requires_grad_(), B, C, new(1, 2, 16, 8))
    exact = [tensor.detach().double().requires_grad_() for tensor in given]
    results = []
    for tensors, name in ((given, backend), (exact, "torch")):
        *inputs, state = tensors
        with fusedops.use_backend(name):
            output = fusedops.selective_state_space(*inputs, initial_state=state)
        results.append([output, *torch.autograd.grad(output.sum(), tensors)])
    for found, expected in zip(*results, strict=True):
        assert_close(found, expected, expected.float(), depth=90)
