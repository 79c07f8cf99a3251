"""Matrix products: sizes at which ``csrc/cpu/gemm/gemm.isa.cpp`` blocks them otherwise, layouts."""

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
from fusedops.specs.make import TensorFactory


def test_gradient_of_a_transposed_weight_has_its_layout() -> None:
    """GPT-2's Conv1D keeps [in, out]: its gradient must not be copied when it is accumulated."""
    stored = torch.randn(8, 10, requires_grad=True)
    (grad,) = torch.autograd.grad(
        fusedops.linear_act(torch.randn(6, 8), stored.t(), activation="silu").sum(), stored
    )
    assert grad.is_contiguous()
    keys = torch.randn(2, 3, 7, 4, requires_grad=True)
    output = fusedops.baddbmm(torch.randn(7), torch.randn(2, 3, 5, 4), keys.mT)
    (grad,) = torch.autograd.grad(output.square().sum(), keys)
    assert grad.is_contiguous()


def test_blocks_of_rows_do_not_show() -> None:
    """The forward makes the hidden layer some thousand rows at a time (16 MiB)."""
    x = torch.randn(2500, 8, dtype=torch.float64)
    w1, w2 = torch.randn(1500, 8, dtype=torch.float64), torch.randn(6, 1500, dtype=torch.float64)
    whole = fusedops.mlp(x, w1, None, w2, None)
    assert torch.equal(whole[-3:], fusedops.mlp(x[-3:], w1, None, w2, None))


def test_beta_zero_ignores_nan_as_torch_does() -> None:
    input, a, b = torch.full((2, 3, 5), float("nan")), torch.randn(2, 3, 4), torch.randn(2, 4, 5)
    leaves = [each.requires_grad_() for each in (input, a, b)]
    output = fusedops.baddbmm(*leaves, beta=0)
    assert torch.allclose(output, torch.matmul(a, b))
    grads = torch.autograd.grad(output.sum(), leaves)
    assert torch.equal(grads[0], torch.zeros(2, 3, 5))
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.interpreter
def test_launches_of_a_part_of_the_batch_count_on(monkeypatch: pytest.MonkeyPatch) -> None:
    from fusedops.kernels import baddbmm

    monkeypatch.setattr(baddbmm, "_LAUNCH", 4)
    a, b, input = torch.randn(2, 5, 2, 3), torch.randn(5, 3, 4), torch.randn(2, 1, 2, 4)
    with fusedops.use_backend("triton"):
        output = fusedops.baddbmm(input, a, b)
    want = torch.matmul(a.double(), b.double()) + input
    assert_close(output, want, torch.matmul(a, b) + input, "output", depth=4)


CPU = torch.device("cpu")
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str
)
Make = Callable[..., torch.Tensor]
Args = tuple[Any, ...]


def linear_act(new: Make, rows: int, depth: int, columns: int) -> Args:
    return new(rows, depth), new(columns, depth, scale=depth**-0.5, key="w"), new(columns)


def linear_glu(new: Make, rows: int, depth: int, columns: int) -> Args:
    weights = (new(columns, depth, scale=depth**-0.5, key=key) for key in "gu")
    return new(rows, depth), *weights


def weights(new: Make, *shape: int) -> torch.Tensor:
    return new(*shape, scale=shape[2] ** -0.5, grad=False, key="w").mT.requires_grad_()


def grouped_mm(new: Make, sizes: tuple[int, ...], depth: int, columns: int) -> Args:
    ends = torch.tensor(list(accumulate(sizes)), dtype=torch.int32)
    return new(sum(sizes), depth), weights(new, len(sizes), columns, depth), ends


def moe_mlp(new: Make, routing: tuple[int, int, int], hidden: int, inner: int, out: int) -> Args:
    tokens, _, experts = routing
    plan = _routing.plan(*routing, device=CPU, dtype=new(1).dtype)
    w1, w2 = weights(new, experts, 2 * inner, hidden), weights(new, experts, out, inner)
    biases = (new(experts, width, scale=0.5, key="b") for width in (2 * inner, out))
    return new(tokens, hidden), plan, w1, w2, *biases


def baddbmm(new: Make, *addend: int) -> Args:
    return new(*addend), new(3, 65, 9, key="a"), new(3, 9, 130, key="b")


OPTIONS: dict[Callable[..., Args], dict[str, Any]] = {
    linear_act: {"activation": "gelu_tanh"},
    linear_glu: {"activation": "gelu_tanh"},
    baddbmm: {"beta": 0.5},
}
# Rows on both sides of every decision, sums longer than one packed stretch (6144 elements in
# float32 and float16, 12288 in bfloat16); of few rows, products and gradients without packing.
SIZES: list[tuple[Callable[..., Args], Args]] = [
    *((linear_act, each) for each in ((57, 385, 65), (113, 769, 70), (3, 12400, 33))),
    *((linear_act, each) for each in ((60, 12400, 40), (1, 500, 1100), (3, 301, 77))),
    *((linear_act, each) for each in ((4, 40, 513), (5, 40, 513))),
    # In the last two the sums of the gradient of the input, of two products, are as long.
    *((linear_glu, each) for each in ((57, 385, 65), (113, 769, 70), (3, 12400, 33))),
    *((linear_glu, each) for each in ((60, 12400, 40), (60, 40, 6200))),
    # More packed rows than fit the cache at once; a gradient that is written around the cache.
    (grouped_mm, ((57, 113, 1), 769, 165)),
    (grouped_mm, ((3, 0, 40), 12400, 33)),
    (grouped_mm, ((5000, 1, 2100), 800, 20)),
    (grouped_mm, ((300,) * 6, 4000, 8)),
    (grouped_mm, ((5, 0, 40), 1024, 2800)),
    (moe_mlp, ((300, 2, 4), 800, 70, 65)),
    (moe_mlp, ((60, 2, 3), 30, 12400, 20)),
    (moe_mlp, ((40, 1, 3), 12400, 30, 20)),
    # Shapes of the addend, whose gradient is summed over the innermost dim or keeps it, longer than
    # a piece, in parts or not (csrc/cpu/product/baddbmm.isa.cpp).
    *((baddbmm, each) for each in ((), (1, 1, 130), (1, 65, 1), (3, 1, 1), (3, 65, 130))),
    *((baddbmm, each) for each in ((1, 65, 130), (3, 1, 130), (3, 65, 1))),
]


@DTYPES
@pytest.mark.parametrize(
    ("make", "sizes"),
    [
        pytest.param(
            make,
            sizes,
            id=f"{make.__name__} {sizes}",
            marks=[pytest.mark.ci(every=4)] * (make is grouped_mm),
        )
        for make, sizes in SIZES
    ],
)
def test_blocked_sizes_match_float64(
    make: Callable[..., Args], sizes: Args, dtype: torch.dtype
) -> None:
    spec, new = all_specs()[make.__name__], TensorFactory(CPU, dtype)
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
@pytest.mark.parametrize("features", [300, 1024, 1301])
@pytest.mark.parametrize("columns", [31, 32, 71])
def test_rows_of_one_or_two_vectors_have_the_bits_of_many(
    dtype: torch.dtype, features: int, columns: int
) -> None:
    """Rows are the lanes, and elements of the weight are broadcast from where they lie."""
    x = torch.randn(300, features).to(dtype)
    weight, bias = torch.randn(columns, features).to(dtype), torch.randn(columns).to(dtype)
    whole = fusedops.linear_act(x, weight, bias, activation="gelu")
    for count in (*range(9, 34), 40, 55, 56, 63, 64, 65):
        part = fusedops.linear_act(x[:count], weight, bias, activation="gelu")
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


@DTYPES
def test_a_matrix_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    input, a, b = (torch.randn(s).to(dtype) for s in ((7, 1, 70), (7, 130, 60), (7, 60, 70)))
    whole = fusedops.baddbmm(input, a, b, alpha=0.5)
    for index in range(7):
        part = fusedops.baddbmm(input[index], a[index], b[index], alpha=0.5)
        assert torch.equal(part, whole[index])
        row = fusedops.baddbmm(input[index], a[index, 3:4], b[index], alpha=0.5)
        assert torch.equal(row, whole[index, 3:4])
