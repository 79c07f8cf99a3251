"""What is special about swiglu and geglu: chunks of one tensor, one rounding, infinities."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from op_testing import assert_close

import fusedops
from fusedops._core.activation import ACTIVATIONS, GELU_VARIANTS

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]
by_backend = pytest.mark.parametrize("backend", BACKENDS)

Op = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def _geglu(approximate: str) -> Op:
    return lambda gate, up: fusedops.geglu(gate, up, approximate)


# The op -> its activation in eager torch.
OPS: dict[str, tuple[Op, Callable[[torch.Tensor], torch.Tensor]]] = {
    "swiglu": (fusedops.swiglu, F.silu),
    **{
        f"geglu_{gelu_variant}": (_geglu(gelu_variant), ACTIVATIONS[GELU_VARIANTS[gelu_variant]])
        for gelu_variant in GELU_VARIANTS
    },
}
by_op = pytest.mark.parametrize("name", OPS)


def results(name: str, gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    """Return the output and both gradients for an incoming gradient of ones."""
    leaves = [tensor.detach().requires_grad_() for tensor in (gate, up)]
    output = OPS[name][0](*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, torch.ones_like(output))]


@by_op
@by_backend
def test_halves_of_one_tensor_give_the_bits_of_dense_ones(name: str, backend: str) -> None:
    both = torch.randn(3, 4, 2 * 70).bfloat16()
    gate, up = both.chunk(2, -1)
    with fusedops.use_backend(backend):
        got = results(name, gate, up)
        want = results(name, gate.contiguous(), up.contiguous())
    assert all(map(torch.equal, got, want))


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_halves_of_one_tensor_are_not_copied(name: str) -> None:
    gate, up = torch.randn(64, 4, 2 * 512).chunk(2, -1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        getattr(fusedops, name)(gate, up)
    ran = {event.name for event in profile.events()}
    assert f"fusedops_cpp::{name}" in ran or f"fusedops::{name}" in ran
    assert not {each for each in ran if "copy" in each or "contiguous" in each or "clone" in each}


@by_op
@by_backend
def test_the_activation_is_not_rounded(name: str, backend: str) -> None:
    gate = torch.linspace(-4, 4, 1000).bfloat16()
    up = torch.linspace(1, 3, 1000).bfloat16()
    activation = OPS[name][1]
    exact = activation(gate.double()) * up.double()
    eager = activation(gate) * up
    with fusedops.use_backend(backend):
        got = OPS[name][0](gate, up)
    assert_close(got, exact, exact.bfloat16(), name)
    assert (got.double() - exact).square().mean() < (eager.double() - exact).square().mean()


@by_op
@by_backend
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_nothing_finite_overflows(name: str, backend: str, dtype: torch.dtype) -> None:
    if backend == "triton" and dtype == torch.float64:
        pytest.skip("the Triton kernels compute in float32")
    gate = torch.tensor([-1e38, -1e30, -2e4, 2e4, 1e30, 1e38] * 3, dtype=dtype)
    up = torch.full_like(gate, 2.0)
    with fusedops.use_backend(backend):
        y, grad_gate, grad_up = results(name, gate, up)
    assert torch.equal(y, 2 * gate.clamp_min(0.0))
    assert torch.equal(grad_gate, 2 * (gate > 0).to(dtype))
    assert torch.equal(grad_up, gate.clamp_min(0.0))


@by_op
@by_backend
def test_nan_stays_nan(name: str, backend: str) -> None:
    nan = float("nan")
    gate, up = torch.tensor([1.0, nan, -1.0, 0.5]), torch.tensor([1.0, 1.0, nan, 2.0])
    with fusedops.use_backend(backend):
        y, grad_gate, grad_up = results(name, gate, up)
    assert y.isnan().tolist() == grad_gate.isnan().tolist() == [False, True, True, False]
    assert grad_up.isnan().tolist() == [False, True, False, False]


@by_op
def test_large_outputs_are_the_same_bits_as_small_ones(name: str) -> None:
    """Above 16 MiB the kernels write around the cache, by rows or as one long row."""
    both = torch.randn(2080, 2 * 4160).bfloat16()
    gate, up = both.chunk(2, -1)
    small = [results(name, *parts) for parts in zip(gate.split(260), up.split(260), strict=True)]
    for large in (results(name, gate, up), results(name, gate.contiguous(), up.contiguous())):
        for got, parts in zip(large, zip(*small, strict=True), strict=True):
            assert torch.equal(got, torch.cat(parts))


@pytest.mark.parametrize("name", ["swiglu", "geglu"])
def test_only_gate_and_up_are_saved(name: str) -> None:
    gate, up = torch.randn(8, 64, requires_grad=True), torch.randn(8, 64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        getattr(fusedops, name)(gate, up)
    assert [tensor.data_ptr() for tensor in saved] == [gate.data_ptr(), up.data_ptr()]
