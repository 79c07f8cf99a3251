"""Every launch of a Triton kernel as a GPU sees it, without one: arguments, guards, compilation.

Each launch of every op's samples goes up to the compiler's front end, with the types and
specialisations of its arguments, and once more with all numbers 1 (``fake_gpu.py``).
"""

from __future__ import annotations

from collections.abc import Iterator

import fake_gpu
import pytest
import torch

from fusedops._core import backends, env
from fusedops.specs import Spec, all_specs
from fusedops.specs.comparison import fresh

triton = pytest.importorskip("triton")
if env.triton_interpreted():
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

SPECS = [spec for spec in all_specs().values() if backends._KERNELS[spec.name].triton is not None]


@pytest.fixture(autouse=True)
def gpu() -> Iterator[None]:
    with fake_gpu.present(ones=True):
        yield


@pytest.mark.parametrize(
    "count", [1, pytest.param(None, marks=pytest.mark.slow)], ids=["first", "all"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_every_launch_is_one_that_a_gpu_takes(
    spec: Spec, dtype: torch.dtype, count: int | None
) -> None:
    before = fake_gpu.launches()
    for sample in spec.samples(torch.device("cpu"), dtype)[:count]:
        fake_gpu.launch_everything(spec.op, fresh(sample))
    assert fake_gpu.launches() > before, f"fusedops/kernels has no Triton kernel of {spec.name}"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype)[6:])
@pytest.mark.parametrize("name", ["grouped_mm", "moe_mlp"])
def test_gradients_that_are_added_to_buffers_are_launched(name: str, dtype: torch.dtype) -> None:
    """No sample has buffers: generic tests compare gradients, and there the weights get none."""
    sample = fresh(all_specs()[name].samples(torch.device("cpu"), dtype)[0])
    weights = [arg for arg in sample.args if isinstance(arg, torch.Tensor) and arg.dim() == 3]
    into = [torch.zeros_like(weight, dtype=torch.float32) for weight in weights]
    given = {"grad_weights_into": into} if name == "moe_mlp" else {"grad_weight_into": into[0]}
    before = fake_gpu.launches()
    calls = fake_gpu.calls_of(
        lambda: all_specs()[name].op(*sample.args, **{**sample.kwargs, **given}).sum().backward()
    )
    fake_gpu.launch([call for call in calls if call[0] == f"{name}_add_gradients"])
    assert fake_gpu.launches() > before


@pytest.mark.parametrize("told", ["nothing", "fp32_precision", "allow_tf32", "high"])
def test_float32_products_are_exact_unless_torch_is_told_otherwise(told: str) -> None:
    from fusedops.kernels import _launch

    try:
        if told == "fp32_precision":
            torch.backends.cuda.matmul.fp32_precision = "tf32"
        elif told == "allow_tf32":
            torch.backends.cuda.matmul.allow_tf32 = True
        elif told == "high":
            torch.set_float32_matmul_precision("high")
        assert _launch.precision(torch.float32) == ("ieee" if told == "nothing" else "tf32")
    finally:
        torch.set_float32_matmul_precision("highest")
    assert _launch.precision(torch.float32) == "ieee"
