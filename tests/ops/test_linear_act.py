"""What is special about linear_act: what it saves, layouts that need no copy, sizes that block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from op_testing import assert_close

import fusedops
from fusedops._core.activation import ACTIVATIONS


@contextmanager
def saved_bytes(*parameters: torch.Tensor) -> Iterator[list[int]]:
    """Collect the bytes of each tensor saved for the backward, parameters left out."""
    known = {parameter.data_ptr() for parameter in parameters}
    found: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.numel() > 0 and tensor.data_ptr() not in known:
            found.append(tensor.numel() * tensor.element_size())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


@pytest.mark.parametrize("activation", ["identity", "gelu"])
def test_saves_the_preactivation_only(activation: str) -> None:
    x, weight = torch.randn(6, 8), torch.randn(10, 8, requires_grad=True)
    bias = torch.randn(10, requires_grad=True)
    with saved_bytes(x, weight, bias) as found:
        fusedops.linear_act(x, weight, bias, activation=activation)
    assert found == ([] if activation == "identity" else [6 * 10 * 4])


def test_without_a_gradient_in_view_nothing_is_kept() -> None:
    x, weight = torch.randn(6, 8), torch.randn(10, 8)
    with saved_bytes(x, weight) as found:
        fusedops.linear_act(x, weight, None, activation="gelu")
    assert found == []


def test_backward_makes_a_preactivation_that_was_not_kept() -> None:
    x, weight, bias, grad = (torch.randn(shape) for shape in ((6, 8), (10, 8), (10,), (6, 10)))
    op, backward = torch.ops.fusedops.linear_act, torch.ops.fusedops.linear_act_backward
    results = []
    for keep in (True, False):
        _, kept = op(x, weight, bias, "gelu", keep)
        results.append(backward(grad, x, weight, bias, kept, "gelu", keep, [True] * 3))
    for with_kept, without in zip(*results, strict=True):
        assert torch.equal(with_kept, without)


def test_gradient_of_a_transposed_weight_has_its_layout() -> None:
    """GPT-2's Conv1D keeps [in, out]: its gradient must not be copied when it is accumulated."""
    stored = torch.randn(8, 10, requires_grad=True)
    x = torch.randn(6, 8)
    output = fusedops.linear_act(x, stored.t(), activation="silu")
    (grad,) = torch.autograd.grad(output.sum(), stored)
    plain = stored.detach().t().contiguous().requires_grad_()
    output = fusedops.linear_act(x, plain, activation="silu")
    (want,) = torch.autograd.grad(output.sum(), plain)
    assert grad.is_contiguous()
    assert torch.equal(grad, want.t())


# Rows on both sides of every blocking decision of csrc/cpu/gemm/gemm.isa.cpp; sums longer than one
# packed stretch (6144 elements in float32 and float16, 12288 in bfloat16).
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [(57, 385, 65), (113, 769, 70), (3, 12400, 33), (60, 12400, 40)])
def test_blocked_sizes_match_float64(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    rows, features, out = sizes
    generator = torch.Generator().manual_seed(3)
    x, weight, bias, grad = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, features), (out, features), (out,), (rows, out))
    )
    weight *= features**-0.5

    def run(wide: torch.dtype, fused: bool) -> list[torch.Tensor]:
        leaves = [each.detach().to(wide).requires_grad_() for each in (x, weight, bias)]
        if fused:
            output = fusedops.linear_act(*leaves, activation="gelu_tanh")
        else:
            z = torch.nn.functional.linear(*leaves)
            output = ACTIVATIONS["gelu_tanh"](z)
        return [output, *torch.autograd.grad(output, leaves, grad.to(wide))]

    exact = run(torch.float64, fused=False)
    eager = run(dtype, fused=False)
    for index, got in enumerate(run(dtype, fused=True)):
        assert_close(got, exact[index], eager[index], f"result {index}", depth=features)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x = torch.randn(300, 800).to(dtype)
    weight = torch.randn(70, 800).to(dtype)
    whole = fusedops.linear_act(x, weight)
    for count in (1, 2, 14, 15, 56, 57, 128, 299):
        assert torch.equal(fusedops.linear_act(x[:count], weight), whole[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("features", [1, 17, 399, 1601, 12503])
def test_few_rows_without_packing_have_the_bits_of_many(dtype: torch.dtype, features: int) -> None:
    """Blocks, what is left of one, and sums that are carried; lines that are no whole vectors."""
    x = torch.randn(9, features).to(dtype)
    weight = torch.randn(71, features + 2).to(dtype)[:, 1 : features + 1]
    whole = fusedops.linear_act(x, weight, activation="identity")
    for count in range(1, 9):
        part = fusedops.linear_act(x[:count], weight, activation="identity")
        assert torch.equal(part, whole[:count]), f"{count} rows"


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_every_weight_counts_the_same_in_few_rows(dtype: torch.dtype, flushed: bool) -> None:
    """Subnormal numbers, infinities and NaN, also where subnormal floats are zero."""
    weight = torch.arange(1 << 16).to(torch.int16).view(dtype).view(128, 512)
    x = torch.randn(32, 512).to(dtype)
    x[1:3, ::7] = torch.finfo(dtype).max
    x[2:4, ::5] = torch.finfo(dtype).smallest_normal / 4
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # whose results are flushed; others' are not
    torch.set_flush_denormal(flushed)
    try:
        whole = fusedops.linear_act(x, weight, activation="identity")
        for rows in (1, 2, 4, 8):
            few = fusedops.linear_act(x[:rows], weight, activation="identity")
            lost = whole[:rows].isnan()
            assert torch.equal(few.isnan(), lost), f"{rows} rows"
            assert torch.equal(few[~lost], whole[:rows][~lost]), f"{rows} rows"
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    assert whole[0].isfinite().sum() in range(60, 128) and whole[0].isnan().any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    leaves = [
        torch.randn(shape).to(dtype).requires_grad_() for shape in ((301, 200), (130, 200), (130,))
    ]
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            output = fusedops.linear_act(*leaves, activation="gelu")
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("activation", list(ACTIVATIONS))
def test_large_values_stay_finite(activation: str) -> None:
    x = torch.tensor([[-3e38], [-1e30], [-200.0], [200.0], [1e15]], requires_grad=True)
    output = fusedops.linear_act(x, torch.ones(1, 1), activation=activation)
    (grad,) = torch.autograd.grad(output.sum(), x)
    assert output.isfinite().all()
    assert grad.isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("sizes", [(1, 500, 1100), (3, 301, 77), (4, 40, 513), (5, 40, 513)])
def test_gradients_of_few_rows_match_float64(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """Up to four rows the weight gradient, and of one row the input's, are made without packing."""
    rows, features, out = sizes
    generator = torch.Generator().manual_seed(5)
    x, weight, grad = (
        torch.randn(shape, generator=generator).to(dtype)
        for shape in ((rows, features), (out, features), (rows, out))
    )

    def run(wide: torch.dtype, fused: bool) -> list[torch.Tensor]:
        leaves = [each.to(wide).requires_grad_() for each in (x, weight)]
        linear = torch.nn.functional.linear
        output = fusedops.linear_act(*leaves, activation="relu") if fused else None
        output = linear(*leaves).relu() if output is None else output
        return list(torch.autograd.grad(output, leaves, grad.to(wide)))

    exact, eager = run(torch.float64, fused=False), run(dtype, fused=False)
    for index, got in enumerate(run(dtype, fused=True)):
        assert_close(got, exact[index], eager[index], f"gradient {index}", depth=out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("features", [300, 1301])
def test_gradient_of_one_row_has_the_bits_of_many(dtype: torch.dtype, features: int) -> None:
    """A product that is not packed adds in the order of one that is."""
    leaf = torch.randn(60, features, dtype=dtype)
    weight, grad = torch.randn(901, features, dtype=dtype), torch.randn(60, 901, dtype=dtype)

    def gradient(rows: int) -> torch.Tensor:
        x = leaf[:rows].clone().requires_grad_()
        output = fusedops.linear_act(x, weight, activation="identity")
        return torch.autograd.grad(output, x, grad[:rows])[0]

    assert torch.equal(gradient(1), gradient(60)[:1])
