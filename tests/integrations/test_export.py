"""Patched models as programs: torch.export with sizes left open, torch.jit.trace, plain torch."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from exported_models import MODELS, SIZES, Model
from patch_testing import assert_close, counted
from torch import nn

import fusedops

# The others ask the same of the exporter with other modules, which have tests of their own.
FIRST = ("GPT2", "Qwen3Moe")
each_model = pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name not in FIRST)) for name in MODELS],
)
# torch's own, of which pytest would show hundreds.
pytestmark = pytest.mark.filterwarnings("ignore")


def program(model: nn.Module, kind: Model) -> torch.export.ExportedProgram:
    with torch.no_grad():
        return torch.export.export(model, kind.of(*SIZES[0]), dynamic_shapes=kind.dynamic)


def targets(exported: torch.export.ExportedProgram) -> set[str]:
    names = {str(node.target) for node in exported.graph.nodes}
    return {name.split(".")[1] for name in names if name.startswith("fusedops")}


def assert_same(found: Any, kind: Model, patched: nn.Module, stock: nn.Module) -> None:
    """Compare a program with the model that it was made of and with stock, at all sizes."""
    for size in SIZES:
        inputs = kind.of(*size)
        with torch.no_grad():
            logits, eager, expected = found(*inputs), patched(*inputs), stock(*inputs)
        assert_close(logits, eager)
        assert_close(logits, expected)


@pytest.mark.ci
@each_model
def test_a_program_serves_other_sizes_than_it_was_made_with(name: str) -> None:
    """Also fewer rows than those from which on the own product is taken, and one sequence."""
    kind = MODELS[name]
    patched, stock = kind.pair()
    with counted() as eager, torch.no_grad():
        patched(*kind.of(*SIZES[0]))
    exported = program(patched, kind)
    assert targets(exported) == set(eager), "the program does not call what the model calls"
    written = io.BytesIO()
    torch.export.save(exported, written)
    written.seek(0)
    loaded = torch.export.load(written)
    assert_same(loaded.module(), kind, patched, stock)


@pytest.mark.parametrize(
    "name", ["Qwen3Moe", *(pytest.param(name, marks=pytest.mark.slow) for name in ("Llama", "T5"))]
)
def test_a_program_of_plain_operators_computes_the_same(name: str) -> None:
    kind = MODELS[name]
    patched, stock = kind.pair()
    plain = program(patched, kind).run_decompositions(fusedops.decompositions())
    assert not targets(plain)
    with counted() as calls:
        assert_same(plain.module(), kind, stock, stock)
    assert not calls


@each_model
def test_a_trace_serves_other_sizes_and_gradients(name: str) -> None:
    """The trace's own check runs the model again without gradients: the graphs must be the same."""
    kind = MODELS[name]
    patched, stock = kind.pair()
    inputs = kind.of(*SIZES[0])
    traced = torch.jit.trace(patched, inputs)
    assert_same(traced, kind, patched, stock)
    gradients = []
    for function in (traced, patched):
        patched.zero_grad()
        function(*inputs).square().mean().backward()
        gradients.append({key: parameter.grad for key, parameter in patched.named_parameters()})
    for key, expected in gradients[1].items():
        assert (expected is None) == (gradients[0][key] is None), key
        if expected is not None:
            assert_close(gradients[0][key], expected)


def test_compiled_code_for_all_sizes_is_compiled_once() -> None:
    """GPT-2's products have a least number of rows: eagerly, and for sizes that are numbers."""
    kind = MODELS["GPT2"]
    patched, stock = kind.pair()
    graphs: list[Any] = []

    def backend(module: Any, example: Any) -> Any:
        graphs.append(module)
        return module.forward

    compiled = torch.compile(patched, backend=backend, dynamic=True)
    for size in ((3, 12), (2, 5), (5, 20)):
        with torch.no_grad():
            assert_close(compiled(*kind.of(*size)), stock(*kind.of(*size)))
    assert len(graphs) == 1
    torch.compiler.reset()
