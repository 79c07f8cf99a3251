"""Calls that repeat a recorded plan give the bits of calls through Python, on a GPU."""

import pytest
import torch

import fusedops
from fusedops._core import backends, extension
from fusedops.specs import all_specs
from fusedops.specs.comparison import ComparisonResult, fresh, run

pytestmark = pytest.mark.gpu


def tensors(result: ComparisonResult) -> list[torch.Tensor]:
    return [output for output in (*result.outputs, *result.grads) if output is not None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", all_specs())
def test_plans_give_the_bits_of_python(name: str, dtype: torch.dtype) -> None:
    if extension.cuda_library() is not None:
        pytest.skip(f"no plans: {extension.cuda_library()}")
    spec = all_specs()[name]
    for sample in spec.samples(torch.device("cuda"), dtype)[:3]:
        results = [run(spec.op, fresh(sample)) for _ in range(4)]
        for other in results[1:]:
            for tensor, first in zip(tensors(other), tensors(results[0]), strict=True):
                torch.testing.assert_close(tensor, first, rtol=0, atol=0, equal_nan=True)


def test_a_plan_runs_on_the_current_stream_and_device() -> None:
    if extension.cuda_library() is not None:
        pytest.skip(f"no plans: {extension.cuda_library()}")
    x = torch.randn(64, 1024, device="cuda", dtype=torch.bfloat16)
    gate = torch.randn_like(x)
    wanted = fusedops.swiglu(x, gate)
    for _ in range(2):
        fusedops.swiglu(x, gate)
    fusedops.reset_counters()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(10_000_000)
        late = x.clone()
        found = fusedops.swiglu(late, gate)  # on another stream it would read before the copy
    stream.synchronize()
    assert torch.equal(found, wanted)
    assert sum(torch.ops.fusedops_native.planned_counts("swiglu")) == 1
    assert backends.counters()[("swiglu", "triton")] == 1
