"""What is special about bias_gelu: mixed dtypes, one rounding, fixed sums, sharding."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from op_testing import assert_close

import fusedops
from fusedops._core.activation import ACTIVATIONS, GELU_VARIANTS
from fusedops.specs import Sample
from fusedops.specs.comparison import ComparisonResult, run

BACKENDS = ["cpp", "torch", pytest.param("triton", marks=pytest.mark.interpreter)]


def call(rows: int, columns: int, dtype: torch.dtype, bias: torch.dtype, variant: str) -> Sample:
    x = torch.randn(rows, columns).to(dtype).requires_grad_()
    return Sample("call", (x, torch.randn(columns).to(bias).requires_grad_(), variant))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("approximate", GELU_VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_float32_bias_beside_half_precision(
    backend: str, dtype: torch.dtype, approximate: str
) -> None:
    sample = call(45, 70, dtype, torch.float32, approximate)

    def eager(x: torch.Tensor, bias: torch.Tensor, approximate: str) -> torch.Tensor:
        return ACTIVATIONS[GELU_VARIANTS[approximate]](x + bias).to(x.dtype)

    with fusedops.use_backend(backend):
        got = run(fusedops.bias_gelu, sample)
    assert got.outputs[0].dtype == got.grads[0].dtype == dtype
    assert got.grads[1].dtype == torch.float32
    base = run(eager, sample)
    exact = run(eager, sample.map(lambda t: t.detach().double().requires_grad_()))
    for index, tensors in enumerate(zip(_all(got), _all(exact), _all(base), strict=True)):
        assert_close(*tensors, f"result {index}", depth=45)


def _all(result: ComparisonResult) -> list[torch.Tensor]:
    return result.outputs + result.grads


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_sum_is_not_rounded(backend: str) -> None:
    """-3 + 2^-7 is no bfloat16: eager rounds it back to -3 and is then wrong by five units."""
    x = torch.full((1, 40), -3.0, dtype=torch.bfloat16)
    bias = torch.full((40,), 2.0**-7, dtype=torch.bfloat16)
    exact = F.gelu(x.double() + bias.double()).bfloat16()
    with fusedops.use_backend(backend):
        assert torch.equal(fusedops.bias_gelu(x, bias), exact)
    assert not torch.equal(F.gelu(x + bias), exact)


@pytest.mark.parametrize("approximate", GELU_VARIANTS)
@pytest.mark.parametrize(("rows", "columns"), [(3, 5000), (40, 600), (300, 130), (3000, 24)])
def test_thread_count_does_not_change_the_bias_gradient(
    rows: int, columns: int, approximate: str
) -> None:
    sample = call(rows, columns, torch.float32, torch.float32, approximate)
    threads = torch.get_num_threads()
    results = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            results.append(run(fusedops.bias_gelu, sample))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(map(torch.equal, _all(other), _all(results[0])))


@pytest.mark.parametrize("approximate", GELU_VARIANTS)
def test_large_outputs_are_the_same_bits_as_small_ones(approximate: str) -> None:
    """Above 16 MiB the kernels write around the cache."""
    sample = call(2080, 4096, torch.bfloat16, torch.bfloat16, approximate)
    x, bias, _ = sample.args
    large = run(fusedops.bias_gelu, sample)
    for first in (0, 1040):
        rows = slice(first, first + 1040)
        assert torch.equal(large.outputs[0][rows], fusedops.bias_gelu(x[rows], bias, approximate))
    ones = torch.ones_like(large.outputs[0])
    dx, _ = torch.autograd.grad(fusedops.bias_gelu(x, bias, approximate), (x, bias), ones)
    part = x[1040:].detach().requires_grad_()
    small = fusedops.bias_gelu(part, bias, approximate)
    assert torch.equal(dx[1040:], torch.autograd.grad(small, part, ones[1040:])[0])


def test_only_input_and_bias_are_saved() -> None:
    x, bias = torch.randn(8, 64, requires_grad=True), torch.randn(64, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        fusedops.bias_gelu(x, bias, "tanh")
    assert [tensor.data_ptr() for tensor in saved] == [x.data_ptr(), bias.data_ptr()]


@pytest.fixture
def mesh() -> Iterator[object]:
    """A mesh of two ranks of which this process is one; nobody answers a collective."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        yield init_device_mesh("cpu", (2,))
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_sharded_calls_need_no_communication(mesh: object, dim: int) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
    from torch.distributed.tensor.debug import CommDebugMode

    last = dim == 2
    x, bias = torch.randn(4, 6, 8), torch.randn(8)
    sharded_x = DTensor.from_local(x, mesh, [Shard(dim)]).requires_grad_()
    placement = Shard(0) if last else Replicate()
    sharded_bias = DTensor.from_local(bias, mesh, [placement]).requires_grad_()
    with CommDebugMode() as communication:
        y = fusedops.gelu(fusedops.bias_gelu(sharded_x, sharded_bias, "tanh"), "fast")
        grads = torch.autograd.grad(y, (sharded_x, sharded_bias), torch.ones_like(y))
    assert communication.get_total_counts() == 0
    assert y.placements == (Shard(dim),)
    assert grads[0].placements == (Shard(dim),)
    assert grads[1].placements == ((Shard(0),) if last else (Partial(),))
    x, bias = x.requires_grad_(), bias.requires_grad_()
    alone = fusedops.gelu(fusedops.bias_gelu(x, bias, "tanh"), "fast")
    assert torch.equal(y.to_local(), alone)
    for got, want in zip(grads, torch.autograd.grad(alone.sum(), (x, bias)), strict=True):
        assert torch.equal(got.to_local(), want)
