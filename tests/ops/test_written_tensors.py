"""Operators that write to arguments count their versions, as torch's own in-place operators do."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from reachable import reachable
from torch._subclasses import FakeTensorMode
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core import backends, extension
from fusedops.ops._weight_gradients import summed
from fusedops.specs import all_specs, multi_tensor_specs, tensors_in
from fusedops.specs.comparison import fresh, run
from fusedops.specs.recorder import RecordOps

CPU = torch.device("cpu")
TRITON = pytest.param("triton", marks=pytest.mark.interpreter)
BACKENDS = pytest.mark.parametrize(
    "backend", [*(["cpp"] if extension.cpu_library() is None else []), "torch", TRITON]
)


def _operator(name: str) -> Any:
    return getattr(torch.ops.fusedops, name).default


def _writing() -> list[str]:
    """Return the names of all operators that write, but for those that the router alone calls."""
    names = (
        name.removeprefix("fusedops::")
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fusedops::") and not name.endswith("_choose")
    )
    return sorted(name for name in names if _operator(name)._schema.is_mutable)


WRITING = pytest.mark.parametrize("name", _writing())


def _calls(name: str) -> list[tuple[Any, ...]]:
    """Return the arguments of calls of an operator, with tensors that nobody else has."""
    if name in multi_tensor_specs():
        samples = multi_tensor_specs()[name].calls(CPU, torch.float32)
        calls = [sample.args for sample in samples if sample.name != "strides"]
    else:  # it is a backward of the op that it is a part of
        spec = all_specs()[str(backends._KERNELS[name].part_of)]
        calls = []
        for sample in spec.samples(CPU, torch.bfloat16):
            with summed(True), RecordOps() as recorder:
                run(spec.op, fresh(sample))
            calls += [args for func, args in recorder.calls if func is _operator(name)]
    assert calls
    return [pytree.tree_map_only(torch.Tensor, torch.clone, args) for args in calls]


def _written(name: str, args: tuple[Any, ...]) -> list[torch.Tensor]:
    described = zip(_operator(name)._schema.arguments, args, strict=True)
    return [
        tensor
        for argument, value in described
        if argument.alias_info is not None and argument.alias_info.is_write
        for tensor in tensors_in(value)
    ]


def _assert_counts(name: str, call: Callable[..., Any], args: tuple[Any, ...]) -> None:
    written = _written(name, args)
    others = {id(tensor) for tensor in tensors_in(args)} - set(map(id, written))
    before = {id(tensor): tensor._version for tensor in tensors_in(args)}
    call(*args)
    assert written
    assert all(tensor._version > before[id(tensor)] for tensor in written)
    read = [tensor for tensor in tensors_in(args) if id(tensor) in others]
    assert all(tensor._version == before[id(tensor)] for tensor in read)


@BACKENDS
@WRITING
def test_what_is_written_gets_a_new_version(name: str, backend: str) -> None:
    for args in _calls(name):
        with fusedops.use_backend(backend), reachable(tensors_in(args)), torch.no_grad():
            _assert_counts(name, _operator(name), args)


@WRITING
def test_without_values_and_in_compiled_code_too(name: str) -> None:
    args = _calls(name)[0]
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = pytree.tree_map_only(torch.Tensor, mode.from_tensor, args)
        _assert_counts(name, _operator(name), fakes)
    torch._dynamo.reset()
    compiled = torch.compile(_operator(name), backend="aot_eager")
    with torch.no_grad():
        _assert_counts(name, compiled, args)


@WRITING
def test_tensors_of_inference_mode_have_no_version_and_others_have(name: str) -> None:
    args = _calls(name)[0]
    with torch.inference_mode():
        _operator(name)(*pytree.tree_map_only(torch.Tensor, torch.clone, args))
        _assert_counts(name, _operator(name), args)
        written = _written(name, args)
        mixed = pytree.tree_map_only(
            torch.Tensor, lambda tensor: tensor.clone() if tensor is written[0] else tensor, args
        )
    before = [tensor._version for tensor in written[1:]]
    with torch.no_grad():
        _operator(name)(*mixed)
    assert all(a._version > b for a, b in zip(written[1:], before, strict=True))


@pytest.mark.skipif(extension.cpu_library() is not None, reason="it runs without the library")
def test_without_the_compiled_library_too() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", __file__]
    environment = os.environ | {"FUSEDOPS_DISABLE_NATIVE": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout
