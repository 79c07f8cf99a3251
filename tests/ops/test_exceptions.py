"""An exception of an op keeps its inputs as long as it lives itself, and no longer.

One that is caught and dropped, out of memory above all, must leave its memory to the next attempt
without a garbage collection.
"""

from __future__ import annotations

import ast
import contextlib
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

import fusedops
from fusedops._core import backends
from fusedops.runtime.copy_engine import CopyError, finish_all
from fusedops.specs import all_specs, tensors_in
from fusedops.specs.comparison import floating, incoming

CPU = torch.device("cpu")
by_spec = pytest.mark.parametrize("spec", all_specs().values(), ids=list(all_specs()))


@pytest.fixture(autouse=True)
def _without_garbage_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def _raise_and_drop(function: Callable[..., Any], call: Any) -> list[weakref.ref[torch.Tensor]]:
    """Call a function that raises with tensors of its own, drop the error, and return those."""

    args, kwargs = pytree.tree_map_only(
        torch.Tensor,
        lambda tensor: tensor.detach().requires_grad_(tensor.requires_grad),
        (call.args, dict(call.kwargs)),
    )
    tensors = [weakref.ref(tensor) for tensor in tensors_in((args, kwargs))]
    try:
        function(*args, **kwargs)
    except Exception:
        return tensors
    pytest.fail("it raised nothing")


def _alive(tensors: list[weakref.ref[torch.Tensor]]) -> int:
    return sum(tensor() is not None for tensor in tensors)


@by_spec
@pytest.mark.parametrize("backend", [None, "torch"])
def test_refused_inputs_are_freed_with_the_error(spec: Any, backend: str | None) -> None:
    with fusedops.use_backend(backend):
        for bad in spec.bad_inputs(CPU):
            assert _alive(_raise_and_drop(spec.op, bad)) == 0, bad.name


@by_spec
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_inputs_of_a_kernel_that_raises_are_freed_with_the_error(
    spec: Any, backward: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, failing = backends._implementation, False

    def fail(*args: Any) -> Any:
        raise torch.OutOfMemoryError("no memory")

    def run(*args: Any, **kwargs: Any) -> None:
        nonlocal failing
        failing = not backward
        outputs = floating(spec.op(*args, **kwargs))
        failing = True
        torch.autograd.backward(outputs, incoming(outputs))

    samples = spec.samples(CPU, torch.float32)
    sample = next((call for call in samples if call.leaves), samples[0])
    if backward and not sample.leaves:
        return
    monkeypatch.setattr(
        backends, "_implementation", lambda *args: fail if failing else found(*args)
    )
    with fusedops.use_backend("torch"):
        tensors = _raise_and_drop(run, sample)
        failing = False
    assert _alive(tensors) == 0


def test_copies_that_fail_are_freed_with_the_error() -> None:
    class Failing:
        def finish(self, ticket: torch.Tensor, seconds: float | None = None) -> None:
            raise CopyError("lost")

    def copy(count: int) -> None:
        made = [torch.ones(3) for _ in range(count)]
        tensors.extend(weakref.ref(tensor) for tensor in made)
        finish_all(Failing(), [lambda tensor=tensor: tensor for tensor in made])  # type: ignore

    tensors: list[weakref.ref[torch.Tensor]] = []
    with contextlib.suppress(CopyError):
        copy(3)
    assert len(tensors) == 3 and _alive(tensors) == 0


def _kept_exceptions(tree: ast.AST, freed: frozenset[str] = frozenset()) -> Iterator[str]:
    """Yield what is raised from variables and attributes that nothing clears afterwards.

    An ``except`` clause clears its own variable, and ``del`` in a ``finally`` block any.
    """
    if isinstance(tree, ast.Raise) and isinstance(tree.exc, ast.Name | ast.Attribute):
        name = ast.unparse(tree.exc)
        is_class = name.rpartition(".")[2].lstrip("_")[:1].isupper()
        if not is_class and name not in freed:
            yield f"line {tree.lineno}: raise {name}"
    if isinstance(tree, ast.ExceptHandler) and tree.name:
        freed |= {tree.name}
    final = tree.finalbody if isinstance(tree, ast.Try) else []
    deletions = [step for step in final if isinstance(step, ast.Delete)]
    inside = freed | {ast.unparse(target) for step in deletions for target in step.targets}
    for child in ast.iter_child_nodes(tree):
        yield from _kept_exceptions(child, freed if child in final else inside)


def test_no_frame_refers_to_the_exception_that_it_raises() -> None:
    root = Path(fusedops.__file__).parent
    kept = {
        str(path.relative_to(root)): lines
        for path in root.rglob("*.py")
        if (lines := list(_kept_exceptions(ast.parse(path.read_text()))))
    }
    assert not kept
