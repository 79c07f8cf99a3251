"""Checks of the arguments of ``verify``, before a model is made or a rank starts.

Names and values that no case could have are errors here. What only some cases cannot have, such as
sizes that do not divide, is no error: such a case is refused by all ranks, and counted.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any

from fusedops._core import checks
from fusedops._core.checks import UnsupportedError
from fusedops.models import ParallelConfig
from fusedops.testing import batches
from fusedops.testing.case import Space

# The axes of a mesh that ``fusedops.models.parallelize`` takes; the other sizes are options.
AXES = ("dp", "cp", "tp", "pp")
_OP = "verify"
# Combinations of other options that are tried with a value before it is left to the ranks.
_MOST_COMBINATIONS = 1024


def check(space: Space, cases: int, seed: int, *, own_parallelize: bool, own_batch: bool) -> None:
    """Raise unless what may be drawn has a meaning.

    ``own_parallelize`` and ``own_batch``: the caller's functions give options and workloads theirs.

    Raises:
        ValueError: a name or value is not known, or is refused in every combination.
        TypeError: one has the wrong type.
    """
    checks.integer(_OP, "cases", cases, least=1)
    checks.integer(_OP, "seed", seed)
    for name in ("meshes", "models", "batch_sizes", "seq_lens", "workloads", "dtypes"):
        _check_list(name, getattr(space, name))
    for mesh in space.meshes:
        _check_mesh(mesh)
    for name in ("batch_sizes", "seq_lens"):
        for size in getattr(space, name):
            checks.integer(_OP, f"each of {name}", size, least=1)
    for dtype in space.dtypes:
        if dtype not in checks.FLOATING:
            checks.fail(_OP, "each of dtypes", "a floating torch.dtype", checks.shown(dtype))
    if not isinstance(space.options, Mapping):
        got = checks.type_name(space.options)
        raise TypeError(f"{_OP}: options must be a dict of lists by name, got {got}")
    for name, values in space.options.items():
        _check_list(f"options[{name!r}]", values)
    if not own_batch:
        for workload in space.workloads:
            checks.choice(_OP, "each of workloads", workload, batches.WORKLOADS)
    if not own_parallelize:
        _check_names(space)
        _check_values(space)


def _check_list(name: str, values: Any) -> None:
    if isinstance(values, (str, Mapping)) or not isinstance(values, Sequence):
        expected = f"{name} must be a list of values to choose from"
        raise TypeError(f"{_OP}: {expected}, got {checks.shown(values)}")
    if not values:
        checks.fail(_OP, name, "a list of at least one value", values)


def _check_mesh(mesh: Any) -> None:
    if not isinstance(mesh, Mapping):
        expected = "each mesh must be a dict of sizes by axis, such as {'dp': 2}"
        raise TypeError(f"{_OP}: {expected}, got {checks.shown(mesh)}")
    if not mesh:
        checks.fail(_OP, "each mesh", "a dict of at least one axis, such as {'dp': 2}", mesh)
    for axis, size in mesh.items():
        checks.integer(_OP, f"axis {axis!r} of a mesh", size, least=1)


def _check_names(space: Space) -> None:
    fields = [field.name for field in dataclasses.fields(ParallelConfig)]
    for mesh in space.meshes:
        for axis in mesh:
            if axis in fields and axis not in AXES:
                expected = (
                    f"one of {', '.join(AXES)}; {axis!r} is an option: options={{{axis!r}: ...}}"
                )
                checks.fail(_OP, "an axis of a mesh", expected, repr(axis))
            checks.choice(_OP, "an axis of a mesh", axis, AXES)
    for name in space.options:
        if name in AXES:
            expected = f"a field of ParallelConfig that is no axis; {name!r} belongs to meshes"
            checks.fail(_OP, "the name of an option", expected, repr(name))
        known = [field for field in fields if field not in AXES]
        checks.choice(_OP, "the name of an option", name, known)


def _check_values(space: Space) -> None:
    """Raise where ``ParallelConfig`` refuses a mesh or a value in every combination."""
    for name, values in space.options.items():
        for value in values:
            options = {**space.options, name: [value]}
            _check_value(f"option {name}={value!r}", space.meshes, options)
    for mesh in space.meshes:
        _check_value(f"mesh {dict(mesh)}", [mesh], space.options)


def _check_value(
    what: str, meshes: Sequence[Mapping[str, int]], options: Mapping[str, Sequence[Any]]
) -> None:
    combinations = itertools.product(meshes, *options.values())
    refusal: Exception | None = None
    for mesh, *chosen in itertools.islice(combinations, _MOST_COMBINATIONS):
        given: dict[str, Any] = {**mesh, **dict(zip(options, chosen, strict=True))}
        try:
            ParallelConfig(**given)
            return
        except (TypeError, ValueError, UnsupportedError) as error:
            refusal = refusal or error
    if next(combinations, None) is None and refusal is not None:
        text = f"{_OP}: {what} is possible in no combination: {refusal}"
        raise type(refusal)(text)
