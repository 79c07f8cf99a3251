"""Gradients of attention that are known exactly: of rows that attend one key, of absent sinks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from comparing import assert_close

import fusedops
from fusedops.specs.make import randn

CPU = torch.device("cpu")
each_backend = pytest.mark.parametrize(
    "backend", ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
)
# Of each call with one key a query: how many queries and keys, and the options.
ONE_KEY: dict[str, tuple[int, int, dict[str, Any]]] = {
    "window": (37, 35, {"window": (0, 0)}),
    "one token": (1, 1, {}),
    "one key": (37, 1, {}),
    "soft-cap": (37, 1, {"softcap": 2.0}),
    "large scores": (37, 1, {"scale": 100.0}),
    "dropout": (37, 37, {"window": (0, 0), "dropout_p": 0.3}),
}


def leaf(key: str, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return randn(*shape, device=CPU, dtype=dtype, key=key)


def assert_zero(output: torch.Tensor, leaves: list[torch.Tensor]) -> None:
    incoming = randn(*output.shape, device=CPU, dtype=output.dtype, grad=False, key="incoming")
    for grad in torch.autograd.grad(output, leaves, incoming):
        assert not grad.any(), f"{grad.abs().max():.3g}"


@each_backend
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("name", ONE_KEY)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_scores_without_rivals_have_no_gradient(
    backend: str, dtype: torch.dtype, name: str, biased: bool
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("no kernel")
    rows, columns, options = ONE_KEY[name]
    query, key = leaf("q", 2, 4, rows, 24, dtype=dtype), leaf("k", 2, 2, columns, 24, dtype=dtype)
    value = leaf("v", 2, 2, columns, 16, dtype=dtype)
    leaves = [query, key]
    if biased:
        options = options | {"attn_mask": leaf("bias", 1, 4, rows, columns, dtype=dtype)}
        leaves.append(options["attn_mask"])
    with fusedops.use_backend(backend):
        output = fusedops.attention(query, key, value, enable_gqa=True, **options)
        assert_zero(output, leaves)


@each_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_packed_sequences_of_one_token_have_no_gradient(backend: str, dtype: torch.dtype) -> None:
    query, key = leaf("q", 9, 4, 24, dtype=dtype), leaf("k", 9, 2, 24, dtype=dtype)
    ends = torch.arange(10)
    with fusedops.use_backend(backend):
        value = leaf("v", 9, 2, 16, dtype=dtype)
        assert_zero(fusedops.attention_varlen(query, key, value, ends, ends, 1, 1), [query, key])


@each_backend
def test_a_sink_is_a_rival(backend: str) -> None:
    inputs = [leaf(name, 1, 1, 3, 8, dtype=torch.float32) for name in "qkv"]

    def grads(dtype: torch.dtype, name: str) -> list[torch.Tensor]:
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in inputs]
        sinks = torch.tensor([-10.5], dtype=dtype)
        with fusedops.use_backend(name):
            output = fusedops.attention(*leaves, window=(0, 0), sinks=sinks)
            return list(torch.autograd.grad(output, leaves, torch.ones_like(output).cumsum(-1)))

    exact, base = grads(torch.float64, "torch"), grads(torch.float32, "torch")
    for i, actual in enumerate(grads(torch.float32, backend)):
        assert_close(actual, exact[i], base[i], f"gradient {i}")


@each_backend
def test_keys_that_are_elsewhere_are_rivals(backend: str) -> None:
    """Each of two keys with the log-sum-exp of both, as ranks of a ring differentiate them."""
    if backend == "torch":
        pytest.skip("the reference makes the log-sum-exp again from the keys that it is given")
    inputs = [leaf(name, 1, 2, n, 16, dtype=torch.float32) for name, n in (("q", 5), ("k", 2))]
    inputs.append(leaf("v", 1, 2, 2, 16, dtype=torch.float32))
    options = (0.0, 0.25, -1, -1, 0.0, True)
    with fusedops.use_backend(backend), torch.no_grad():
        query, key, value = (tensor.detach() for tensor in inputs)
        call = torch.ops.fusedops.attention_backward
        saved = torch.ops.fusedops.attention(query, key, value, *[None] * 4, *options)
        ones = torch.ones_like(saved[0])

        def grads(part: slice) -> list[torch.Tensor]:
            keys, values = key[:, :, part], value[:, :, part]
            wanted = [True, True, False, False, False]
            arguments = (query, keys, values, *[None] * 4, *saved, *options, wanted)
            return call(ones.cumsum(-1), None, *arguments)

        whole, first, second = grads(slice(2)), grads(slice(1)), grads(slice(1, 2))
    assert_close(first[0] + second[0], whole[0].double(), whole[0], "query", depth=32)
    joined = torch.cat((first[1], second[1]), 2)
    assert_close(joined, whole[1].double(), whole[1], "key", depth=32)


@each_backend
def test_a_sink_of_minus_infinity_beside_a_row_of_nothing(backend: str) -> None:
    query, key, value = (leaf(name, 1, 2, 4, 8, dtype=torch.float32) for name in "qkv")
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    mask = torch.tensor([True, False, True, True])[:, None].expand(4, 4)
    ends = torch.tensor([0, 4])
    with fusedops.use_backend(backend):
        dense = fusedops.attention(query, key, value, mask, sinks=sinks)
        rows = [tensor[0].transpose(0, 1) for tensor in (query, key[:, :, :2], value[:, :, :2])]
        packed = fusedops.attention_varlen(
            *rows, ends, torch.tensor([0, 2]), 4, 2, is_causal=True, sinks=sinks
        )
        for output in (dense, packed):
            (grad,) = torch.autograd.grad(output, sinks, torch.ones_like(output))
            assert grad[0] == 0 and grad[1].isfinite() and grad[1] != 0, grad
