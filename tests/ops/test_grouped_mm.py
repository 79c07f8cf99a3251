"""What is special about grouped_mm: rows of nobody, blocked sizes, gradients in a buffer."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import pytest
import torch
from op_testing import assert_close
from test_linear_act import saved_bytes

import fusedops

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]


def _ends(sizes: Sequence[int]) -> torch.Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32)


def _leaves(
    sizes: Sequence[int], depth: int, columns: int, dtype: torch.dtype, tail: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(sum(sizes) + tail, depth, generator=generator)
    weight = torch.randn(len(sizes), columns, depth, generator=generator) * depth**-0.5
    return x.to(dtype).requires_grad_(), weight.to(dtype).mT.requires_grad_()


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_nobody_are_never_read(backend: str, dtype: torch.dtype) -> None:
    sizes = (3, 0, 5)
    x, weight = _leaves(sizes, 8, 6, dtype, tail=4)
    bias = torch.ones(3, 6, dtype=dtype, requires_grad=True)
    with torch.no_grad():
        x[8:] = float("nan")
    with fusedops.use_backend(backend):
        output = fusedops.grouped_mm(x, weight, _ends(sizes), bias, activation="silu")
        grad = torch.ones_like(output)
        grad[8:] = float("nan")
        grads = torch.autograd.grad(output, (x, weight, bias), grad)
    assert torch.equal(output[8:], torch.zeros(4, 6, dtype=dtype))
    assert torch.equal(grads[0][8:], torch.zeros(4, 8, dtype=dtype))
    assert not any(each.isnan().any() for each in (output, *grads))
    assert torch.equal(grads[1][1], torch.zeros(8, 6, dtype=dtype))
    assert torch.equal(grads[2][1], torch.zeros(6, dtype=dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_group_has_the_bits_of_linear_act_alone(dtype: torch.dtype) -> None:
    """A row depends on itself and its weight: not on its group, nor on the other groups."""
    sizes = (1, 130, 0, 57, 14, 3, 8, 9, 2)
    x, weight = (leaf.detach() for leaf in _leaves(sizes, 800, 70, dtype))
    bias = torch.linspace(-1, 1, 9 * 70, dtype=torch.float64).to(dtype).view(9, 70)
    output = fusedops.grouped_mm(x, weight, _ends(sizes), bias, activation="gelu")
    begin = 0
    for group, end in enumerate(_ends(sizes).tolist()):
        alone = fusedops.linear_act(x[begin:end], weight[group].t(), bias[group], activation="gelu")
        assert torch.equal(output[begin:end], alone), f"group {group}"
        begin = end


# Both sides of the blocking decisions of the batch in csrc/cpu/gemm/gemm.isa.cpp: rows of one block
# and of several, more packed rows than fit the cache at once, sums that do not fit one stretch;
# last, a weight gradient that is written around the cache.
@pytest.mark.ci
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("sizes", "depth", "columns"),
    [
        ((57, 113, 1), 769, 165),
        ((3, 0, 40), 12400, 33),
        ((5000, 1, 2100), 800, 20),
        ((300,) * 6, 4000, 8),
        ((5, 0, 40), 1024, 2800),
    ],
)
def test_blocked_sizes_match_float64(
    dtype: torch.dtype, sizes: tuple[int, ...], depth: int, columns: int
) -> None:
    leaves = _leaves(sizes, depth, columns, dtype)
    grad = torch.randn(sum(sizes), columns, generator=torch.Generator().manual_seed(4)).to(dtype)

    def run(wide: torch.dtype, backend: str) -> list[torch.Tensor]:
        cast = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
        with fusedops.use_backend(backend):
            output = fusedops.grouped_mm(cast[0], cast[1], _ends(sizes))
            return [output, *torch.autograd.grad(output, cast, grad.to(wide))]

    exact, eager = run(torch.float64, "torch"), run(dtype, "torch")
    for index, got in enumerate(run(dtype, "cpp")):
        terms = max(depth, columns, *sizes)
        assert_close(got, exact[index], eager[index], f"result {index}", depth=terms)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    sizes = (100, 3, 0, 200)
    leaves = _leaves(sizes, 200, 130, dtype, tail=2)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            output = fusedops.grouped_mm(*leaves, _ends(sizes), activation="silu")
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_saves_the_preactivation_only_with_an_activation() -> None:
    leaves = _leaves((4, 2), 8, 10, torch.float32)
    with saved_bytes(*leaves) as found:
        fusedops.grouped_mm(*leaves, _ends((4, 2)), activation="silu")
    assert 6 * 10 * 4 in found
    with saved_bytes(*leaves) as found:
        fusedops.grouped_mm(*leaves, _ends((4, 2)))
    assert 6 * 10 * 4 not in found


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("activation", ["identity", "silu"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("transposed", [False, True])
def test_weight_gradients_add_to_a_buffer(
    backend: str, activation: str, dtype: torch.dtype, transposed: bool
) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("no Triton kernel takes float64")
    sizes, wide = (30, 0, 41), torch.float64 if dtype == torch.float64 else torch.float32
    x, weight = _leaves(sizes, 24, 17, dtype, tail=3)
    bias = torch.ones(3, 17, dtype=dtype, requires_grad=True)
    ends, before = _ends(sizes), torch.full((3, 24, 17), 0.5, dtype=wide)
    into = before.mT.contiguous().mT if transposed else before.clone()
    with fusedops.use_backend(backend):
        plain = fusedops.grouped_mm(x, weight, ends, bias, activation=activation)
        grad = torch.linspace(-1, 1, plain.numel(), dtype=torch.float64).to(dtype).view_as(plain)
        want = torch.autograd.grad(plain, (x, weight, bias), grad)
        output = fusedops.grouped_mm(
            x, weight, ends, bias, activation=activation, grad_weight_into=into
        )
        x_grad, w_grad, b_grad = torch.autograd.grad(
            output, (x, weight, bias), grad, allow_unused=True
        )
    assert torch.equal(output, plain) and w_grad is None
    assert torch.equal(into[1], before[1]), "an empty group adds nothing"
    # The sums as they are: nothing is rounded to the weight's dtype on the way.
    exact = before.double()
    with fusedops.use_backend("torch"):
        doubles = [each.detach().double() for each in (x, weight, bias)]
        leaf = doubles[1].requires_grad_()
        result = fusedops.grouped_mm(doubles[0], leaf, ends, doubles[2], activation=activation)
        exact = exact + torch.autograd.grad(result, leaf, grad.double())[0]
    if activation == "identity":
        assert_close(into, exact, into, "buffer", depth=41)
        assert torch.equal(x_grad, want[0]) and torch.equal(b_grad, want[2])
    else:  # the gradient of the sums is rounded to the dtype of the input before the product
        assert_close(into.to(dtype), exact, (want[1].to(wide) + before).to(dtype), "buffer", 41)


def test_buffer_works_in_compiled_code_and_under_autocast() -> None:
    sizes = (5, 4)
    x, weight = _leaves(sizes, 6, 7, torch.float32)
    ends, buffers = _ends(sizes), [torch.zeros(2, 6, 7) for _ in range(3)]

    def loss(into: torch.Tensor) -> torch.Tensor:
        return fusedops.grouped_mm(x, weight, ends, grad_weight_into=into).square().sum()

    loss(buffers[0]).backward()
    torch.compile(loss, fullgraph=True, backend="aot_eager")(buffers[1]).backward()
    assert torch.equal(buffers[0], buffers[1]) and buffers[0].abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):
        loss(buffers[2]).backward()
    lower = torch.zeros(2, 6, 7)
    halves = x.detach().bfloat16().requires_grad_(), weight.detach().bfloat16().requires_grad_()
    output = fusedops.grouped_mm(*halves, ends, grad_weight_into=lower)
    output.float().square().sum().backward()
    assert torch.equal(buffers[2], lower)
