"""The package makes no tensor on a device from Python numbers in a way that waits for it."""

from __future__ import annotations

import ast
from pathlib import Path

import torch

import fusedops
from fusedops._core.device_tensors import device_tensor

PACKAGE = Path(fusedops.__file__).parent
SAMPLES = "specs"  # of tests and benchmarks, before anything is measured
MAKERS = ("tensor", "as_tensor", "scalar_tensor")


def waiting_calls(source: str) -> list[int]:
    """Return the lines that call ``torch.tensor`` and its like with a device."""
    if not any(f"torch.{maker}" in source for maker in MAKERS):
        return []  # parsing every file takes seconds
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in MAKERS
        and isinstance(call.func.value, ast.Name)
        and call.func.value.id == "torch"
        and any(keyword.arg == "device" for keyword in call.keywords)
    ]


def test_numbers_go_to_a_device_from_pinned_memory() -> None:
    assert waiting_calls("x = torch.tensor([1], device=device)") == [1]
    places = [
        f"{path.relative_to(PACKAGE)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.relative_to(PACKAGE).parts[0] != SAMPLES and path.name != "device_tensors.py"
        for line in waiting_calls(path.read_text())
    ]
    assert not places, f"use device_tensor: {places}"


def test_a_device_tensor_is_that_of_torch() -> None:
    expected = torch.tensor([1.5, 2.0], dtype=torch.float64)
    assert torch.equal(device_tensor([1.5, 2.0], torch.float64, "cpu"), expected)
    on_meta = device_tensor(3, torch.int64, torch.device("meta"))
    assert on_meta.is_meta and on_meta.shape == () and on_meta.dtype == torch.int64
