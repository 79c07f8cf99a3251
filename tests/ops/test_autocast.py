"""Autocast is the operators' own work: calls past the public function get the same dtypes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import fusedops
from fusedops.specs import all_specs, tensors_in
from fusedops.specs.comparison import fresh
from fusedops.specs.recorder import RecordOps

# Their functions cast some arguments only, which no word of define_op says.
CAST_SOME = {
    *("attention", "attention_decode", "attention_varlen", "moe_mlp"),
    *("add_layer_norm", "add_rms_norm"),
}
SPECS = [
    spec for name, spec in all_specs().items() if spec.autocast != "keep" and name not in CAST_SOME
]


@contextlib.contextmanager
def _autocast(device: str) -> Iterator[None]:
    """Enable autocast for a device that need not be there."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    torch.set_autocast_dtype(device, torch.bfloat16)
    torch.set_autocast_enabled(device, True)
    try:
        yield
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


@pytest.mark.parametrize("spec", SPECS, ids=[spec.name for spec in SPECS])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=lambda dtype: str(dtype)[6:])
def test_operator_and_function_give_the_same_dtypes(spec: Any, dtype: torch.dtype) -> None:
    device = "cuda" if spec.autocast == "norm" else "cpu"
    for sample in map(fresh, spec.samples(torch.device("cpu"), dtype)):
        with RecordOps() as recorder:
            spec.op(*sample.args, **sample.kwargs)
        ((func, args),) = recorder.calls
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:

            def fake(tensor: torch.Tensor) -> torch.Tensor:
                with mode:
                    layout = tensor.shape, tensor.stride()
                    return torch.empty_strided(*layout, dtype=tensor.dtype, device=device)

            of_function = sample.map(fake)
            of_operator = pytree.tree_map_only(torch.Tensor, fake, args)
            with _autocast(device):
                outputs = tensors_in(spec.op(*of_function.args, **of_function.kwargs))
                direct = tensors_in(func(*of_operator))
        found = [output.dtype for output in outputs]
        if spec.autocast == "norm" and sample.kwargs.get("rounding") != "hf":
            assert found == [torch.float32], sample.name
        assert found == [output.dtype for output in direct[: len(outputs)]], sample.name


@pytest.mark.parametrize("name", all_specs())
def test_the_reference_has_the_dtypes_of_the_kernels(name: str) -> None:
    """Of all outputs, statistics that are saved for the backward included."""
    spec = all_specs()[name]
    samples = list(map(fresh, spec.samples(torch.device("cpu"), torch.float32)))[:3]
    for sample in samples:
        with RecordOps() as recorder:
            spec.op(*sample.args, **sample.kwargs)
        for func, args in recorder.calls:
            found = []
            for backend in ("cpp", "torch"):
                with fusedops.use_backend(backend), _autocast("cpu"), torch.no_grad():
                    found.append([output.dtype for output in tensors_in(func(*args))])
            assert found[0] == found[1], (func, sample.name)
