"""Matrix products of the sizes at which ``csrc/cpu/gemm/gemm.isa.cpp`` blocks them otherwise."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from comparing import assert_close, assert_within_budget

import fusedops
from fusedops.specs import Sample, _routing, all_specs
from fusedops.specs.comparison import run
from fusedops.specs.make import randn

CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
Make = Callable[..., torch.Tensor]


def linear_act(new: Make, rows: int, depth: int, columns: int) -> tuple[Any, ...]:
    weight = new(columns, depth, scale=depth**-0.5, key="w")
    return new(rows, depth), weight, new(columns)


def linear_glu(new: Make, rows: int, depth: int, columns: int) -> tuple[Any, ...]:
    weights = (new(columns, depth, scale=depth**-0.5, key=key) for key in "gu")
    return new(rows, depth), *weights


def grouped_mm(new: Make, sizes: tuple[int, ...], depth: int, columns: int) -> tuple[Any, ...]:
    weight = new(len(sizes), columns, depth, scale=depth**-0.5, grad=False, key="w")
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    return new(sum(sizes), depth), weight.mT.requires_grad_(), ends


def moe_mlp(
    new: Make, routing: tuple[int, int, int], hidden: int, inner: int, out: int
) -> tuple[Any, ...]:
    tokens, _, experts = routing
    dtype = new(1).dtype
    shapes = ((experts, 2 * inner, hidden), (experts, out, inner))
    w1, w2 = (
        new(*shape, scale=shape[2] ** -0.5, grad=False).mT.requires_grad_() for shape in shapes
    )
    biases = (new(experts, width, scale=0.5, key="b") for width in (2 * inner, out))
    plan = _routing.plan(*routing, device=CPU, dtype=dtype)
    return new(tokens, hidden), plan, w1, w2, *biases


def baddbmm(new: Make, *addend: int) -> tuple[Any, ...]:
    return new(*addend), new(3, 65, 9, key="a"), new(3, 9, 130, key="b")


OPTIONS: dict[Callable[..., tuple[Any, ...]], dict[str, Any]] = {
    linear_act: {"activation": "gelu_tanh"},
    linear_glu: {"activation": "gelu_tanh"},
    baddbmm: {"beta": 0.5},
}
# Rows on both sides of every decision, sums longer than one packed stretch (6144 elements in
# float32 and float16, 12288 in bfloat16); of few rows, products and gradients without packing.
SIZES: dict[Callable[..., tuple[Any, ...]], list[tuple[Any, ...]]] = {
    linear_act: [
        *((57, 385, 65), (113, 769, 70), (3, 12400, 33), (60, 12400, 40)),
        *((1, 500, 1100), (3, 301, 77), (4, 40, 513), (5, 40, 513)),
    ],
    # In the last two the sums of the gradient of the input, of two products, are as long.
    linear_glu: [
        *((57, 385, 65), (113, 769, 70), (3, 12400, 33), (60, 12400, 40), (60, 40, 6200)),
    ],
    # More packed rows than fit the cache at once; a gradient that is written around the cache.
    grouped_mm: [
        *(((57, 113, 1), 769, 165), ((3, 0, 40), 12400, 33), ((5000, 1, 2100), 800, 20)),
        *(((300,) * 6, 4000, 8), ((5, 0, 40), 1024, 2800)),
    ],
    moe_mlp: [
        *(((300, 2, 4), 800, 70, 65), ((60, 2, 3), 30, 12400, 20), ((40, 1, 3), 12400, 30, 20)),
    ],
    # Shapes of the addend, whose gradient is summed over the innermost dim or keeps it, longer than
    # a piece, in parts or not (csrc/cpu/product/baddbmm.isa.cpp).
    baddbmm: [
        *((), (1, 1, 130), (1, 65, 1), (3, 1, 1), (3, 65, 130), (1, 65, 130), (3, 1, 130)),
        (3, 65, 1),
    ],
}


@DTYPES
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        pytest.param(
            make,
            sizes,
            id=f"{make.__name__} {sizes}",
            marks=[pytest.mark.ci] * (make is grouped_mm),
        )
        for make, listed in SIZES.items()
        for sizes in listed
    ],
)
def test_blocked_sizes_match_float64(
    make: Callable[..., tuple[Any, ...]], sizes: tuple[Any, ...], dtype: torch.dtype
) -> None:
    def new(*shape: int, **options: Any) -> torch.Tensor:
        return randn(*shape, device=CPU, dtype=dtype, **options)

    spec = all_specs()[make.__name__]
    sample = Sample("sizes", make(new, *sizes), OPTIONS.get(make, {}))
    assert_within_budget(run(spec.op, sample), spec, sample)


@pytest.mark.parametrize("rows", [1, 3000])
def test_long_rows_of_an_addends_gradient_are_summed_in_pieces(rows: int) -> None:
    grad = torch.randn(2, rows, 5000, generator=torch.Generator().manual_seed(1))
    for shape in ((5000,), (rows, 1), ()):
        input = torch.zeros(shape, requires_grad=True)
        output = fusedops.baddbmm(input, torch.zeros(2, rows, 1), torch.zeros(2, 1, 5000))
        (got,) = torch.autograd.grad(output, input, grad)
        sums = [each.sum_to_size(shape) for each in (grad.double(), grad)]
        assert_close(got, *sums, f"{shape}", grad.numel())


@DTYPES
@pytest.mark.parametrize("features", [1, 17, 399, 1601, 12503])
def test_few_rows_without_packing_have_the_bits_of_many(dtype: torch.dtype, features: int) -> None:
    """Blocks, what is left of one, and sums that are carried; lines that are no whole vectors."""
    x = torch.randn(9, features).to(dtype)
    weight = torch.randn(71, features + 2).to(dtype)[:, 1 : features + 1]
    whole = fusedops.linear_act(x, weight, activation="identity")
    for count in range(1, 9):
        part = fusedops.linear_act(x[:count], weight, activation="identity")
        assert torch.equal(part, whole[:count]), f"{count} rows"


@DTYPES
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


@DTYPES
@pytest.mark.parametrize("sizes", [(8, 8, 8), (5, 31, 17), (14, 32, 32), (1, 3, 1)])
def test_small_matrices_have_the_bits_of_blocks(
    dtype: torch.dtype, sizes: tuple[int, int, int]
) -> None:
    """A product of one tile is not packed; as rows and columns of a larger one it is."""
    rows, depth, columns = sizes
    addend, a = torch.randn(2, 60, 90).to(dtype), torch.randn(2, 60, depth).to(dtype)
    for b in (torch.randn(2, depth, 90), torch.randn(2, 90, depth).mT):
        b = b.to(dtype)
        whole = fusedops.baddbmm(addend, a, b, beta=0.5)[:, :rows, :columns]
        part = fusedops.baddbmm(addend[:, :rows, :columns], a[:, :rows], b[..., :columns], beta=0.5)
        assert torch.equal(part, whole)


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
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


@DTYPES
def test_a_group_has_the_bits_of_linear_act_alone(dtype: torch.dtype) -> None:
    """A row depends on itself and its weight: not on its group, nor on the other groups."""
    sizes = (1, 130, 0, 57, 14, 3, 8, 9, 2)
    x, weight = torch.randn(sum(sizes), 800).to(dtype), torch.randn(9, 70, 800).to(dtype).mT
    bias = torch.linspace(-1, 1, 9 * 70, dtype=torch.float64).to(dtype).view(9, 70)
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    output = fusedops.grouped_mm(x, weight, ends, bias, activation="gelu")
    for group, (end, size) in enumerate(zip(ends.tolist(), sizes, strict=True)):
        rows = slice(end - size, end)
        alone = fusedops.linear_act(x[rows], weight[group].t(), bias[group], activation="gelu")
        assert torch.equal(output[rows], alone), f"group {group}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [3, 130])
def test_preactivations_of_a_gate_have_the_bits_of_linear_act(
    dtype: torch.dtype, rows: int
) -> None:
    """The second product beside the first changes neither."""
    x, *weights = (torch.randn(each, 800).to(dtype) for each in (rows, 70, 70))
    _, *products = torch.ops.fusedops.linear_glu(x, *weights, "silu", True)
    for product, weight in zip(products, weights, strict=True):
        assert torch.equal(product, fusedops.linear_act(x, weight, activation="identity"))


@DTYPES
def test_a_matrix_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    input, a, b = (torch.randn(s).to(dtype) for s in ((7, 1, 70), (7, 130, 60), (7, 60, 70)))
    whole = fusedops.baddbmm(input, a, b, alpha=0.5)
    for index in range(7):
        part = fusedops.baddbmm(input[index], a[index], b[index], alpha=0.5)
        assert torch.equal(part, whole[index])
        row = fusedops.baddbmm(input[index], a[index, 3:4], b[index], alpha=0.5)
        assert torch.equal(row, whole[index, 3:4])
