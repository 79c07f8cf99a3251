"""The native libraries' schema lines: each kernel has one, and it says what the op says.

Read from the sources, so that no library and no GPU is needed. A line with other arguments than the
op's would be called with the op's all the same.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

import fusedops  # noqa: F401 registers the ops

CSRC = Path(__file__).resolve().parents[2] / "csrc"
FILES = {"cpu": CSRC / "schemas.cpp", "cuda": CSRC / "cuda" / "schemas.cpp"}
by_device = pytest.mark.parametrize("device", FILES)


def _lines(device: str) -> dict[str, str]:
    """Return op name -> schema, of one library."""
    found = re.findall(r"m\.def\(((?:\s*\"[^\"]*\")+)\)", FILES[device].read_text())
    schemas = ("".join(re.findall(r'"([^"]*)"', each)) for each in found)
    return {schema.split("(")[0]: schema for schema in schemas}


def _kernels(device: str) -> dict[str, str]:
    """Return op name -> the file that registers a kernel for it."""
    found = {}
    shared = (CSRC / "common").glob("*.h")  # bindings that both devices instantiate
    for path in sorted((*(CSRC / device).rglob("*.cpp"), *shared)):
        for name in re.findall(r'm\.impl\("(\w+)"', path.read_text()):
            found[name] = str(path.relative_to(CSRC.parent))
    return found


def _types(schema: torch._C.FunctionSchema) -> tuple[list[str], list[str]]:
    arguments = [f"{argument.type} {argument.name}" for argument in schema.arguments]
    return arguments, [str(each.type) for each in schema.returns]


@by_device
def test_every_kernel_has_a_schema_line(device: str) -> None:
    lines, kernels = _lines(device), _kernels(device)
    assert kernels
    for name, path in kernels.items():
        where = FILES[device].relative_to(CSRC.parent)
        assert name in lines, f"{path} registers {name!r}: add its schema line to {where}"
    for name in lines:
        assert name in kernels, f"no file of csrc/{device} registers a kernel for {name!r}"


@by_device
def test_schema_lines_are_those_of_the_ops(device: str) -> None:
    for name, line in _lines(device).items():
        forward = name.removesuffix("_backward")
        assert hasattr(torch.ops.fusedops, forward), f"no define_op for {forward!r}"
        op = getattr(torch.ops.fusedops, name, None)
        assert op is not None, f"define_op of {forward!r} was given no Gradient"
        schema = op.default._schema
        wanted = str(schema).removeprefix("fusedops::")
        assert _types(torch._C.parse_schema(line)) == _types(schema), (
            f"{FILES[device].relative_to(CSRC.parent)} has\n  {line}\nthe op is\n  {wanted}"
        )
