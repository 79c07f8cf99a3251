"""What is special about linear_glu: its two products are linear's, what it saves, blocked sizes."""

from __future__ import annotations

import pytest
import torch
from op_testing import assert_close
from test_linear_act import saved_bytes

import fusedops
from fusedops._core.activation import ACTIVATIONS

ACTIVATION = "gelu_tanh"


def _leaves(
    sizes: tuple[int, int, int], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    rows, features, out = sizes
    generator = torch.Generator().manual_seed(3)
    x, gate, up = (
        torch.randn(shape, generator=generator)
        for shape in ((rows, features), (out, features), (out, features))
    )
    scale = features**-0.5
    return tuple(each.to(dtype).requires_grad_() for each in (x, gate * scale, up * scale))


def _eager(x: torch.Tensor, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    linear = torch.nn.functional.linear
    return ACTIVATIONS[ACTIVATION](linear(x, gate)) * linear(x, up)


def test_saves_the_two_preactivations_only() -> None:
    leaves = _leaves((6, 8, 10))
    with saved_bytes(*leaves) as found:
        fusedops.linear_glu(*leaves)
    assert found == [6 * 10 * 4] * 2
    with saved_bytes(*leaves) as found, torch.no_grad():
        fusedops.linear_glu(*leaves)
    assert found == []


def test_backward_makes_preactivations_that_were_not_kept() -> None:
    x, gate_weight, up_weight = (leaf.detach() for leaf in _leaves((6, 8, 10)))
    grad = torch.ones(6, 10)
    op, backward = torch.ops.fusedops.linear_glu, torch.ops.fusedops.linear_glu_backward
    results = []
    for keep in (True, False):
        _, gate, up = op(x, gate_weight, up_weight, "silu", keep)
        results.append(
            backward(grad, x, gate_weight, up_weight, gate, up, "silu", keep, [True] * 3)
        )
    for with_kept, without in zip(*results, strict=True):
        assert torch.equal(with_kept, without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("rows", [3, 130])
def test_preactivations_have_the_bits_of_linear_act(dtype: torch.dtype, rows: int) -> None:
    """The second product beside the first changes neither."""
    x, gate_weight, up_weight = (leaf.detach() for leaf in _leaves((rows, 800, 70), dtype))
    _, gate, up = torch.ops.fusedops.linear_glu(x, gate_weight, up_weight, "silu", True)
    assert torch.equal(gate, fusedops.linear_act(x, gate_weight, activation="identity"))
    assert torch.equal(up, fusedops.linear_act(x, up_weight, activation="identity"))


# Both sides of every blocking decision of csrc/cpu/gemm/gemm.isa.cpp; in the last two sizes the
# sums of the forward (features) and those of grad_input (outputs, of two products) do not fit one
# stretch.
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(
    "sizes", [(57, 385, 65), (113, 769, 70), (3, 12400, 33), (60, 12400, 40), (60, 40, 6200)]
)
def test_blocked_sizes_match_float64(dtype: torch.dtype, sizes: tuple[int, int, int]) -> None:
    leaves = _leaves(sizes, dtype)
    grad = torch.randn(sizes[0], sizes[2], generator=torch.Generator().manual_seed(4)).to(dtype)

    def run(wide: torch.dtype, fused: bool) -> list[torch.Tensor]:
        cast = [leaf.detach().to(wide).requires_grad_() for leaf in leaves]
        output = fusedops.linear_glu(*cast, activation=ACTIVATION) if fused else _eager(*cast)
        return [output, *torch.autograd.grad(output, cast, grad.to(wide))]

    exact, eager = run(torch.float64, fused=False), run(dtype, fused=False)
    for index, got in enumerate(run(dtype, fused=True)):
        assert_close(got, exact[index], eager[index], f"result {index}", depth=max(sizes))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_has_the_same_bits_in_every_batch(dtype: torch.dtype) -> None:
    x, gate, up = (leaf.detach() for leaf in _leaves((300, 800, 70), dtype))
    whole = fusedops.linear_glu(x, gate, up)
    for count in (1, 2, 14, 15, 56, 57, 128, 299):
        assert torch.equal(fusedops.linear_glu(x[:count], gate, up), whole[:count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_same_bits_for_any_number_of_threads(dtype: torch.dtype) -> None:
    leaves = _leaves((301, 200, 130), dtype)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3, 5):
            torch.set_num_threads(count)
            output = fusedops.linear_glu(*leaves, activation="gelu")
            results.append([output, *torch.autograd.grad(output.square().sum(), leaves)])
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
