"""Checks of the arguments of ``verify``, before a model is made or a rank starts.

Names and values that no case could have are errors here. What only some cases cannot have, such as
sizes that do not divide, is no error: such a case is refused by all ranks, and counted.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
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
# If there are more combinations of meshes and options, the ranks refuse what is possible in none.
_MOST_COMBINATIONS = 4096


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
    for mesh in space.meshes:
        for axis in mesh:
            checks.choice(_OP, "an axis of a mesh (a key of options is any other size)", axis, AXES)
    known = [field.name for field in dataclasses.fields(ParallelConfig) if field.name not in AXES]
    for name in space.options:
        checks.choice(_OP, "the name of an option (meshes has the axes)", name, known)


def _check_values(space: Space) -> None:
    """Raise where ``ParallelConfig`` refuses a mesh or a value in every combination."""
    if math.prod(map(len, (space.meshes, *space.options.values()))) > _MOST_COMBINATIONS:
        return
    refusals: dict[str, Exception] = {}
    possible: set[str] = set()
    for mesh, *chosen in itertools.product(space.meshes, *space.options.values()):
        given: dict[str, Any] = dict(zip(space.options, chosen, strict=True))
        parts = [f"option {name}={value!r}" for name, value in given.items()]
        parts.append(f"mesh {dict(mesh)}")
        try:
            ParallelConfig(**mesh, **given)
            possible.update(parts)
        except (TypeError, ValueError, UnsupportedError) as error:
            for part in parts:
                refusals.setdefault(part, error)
    for part, refusal in refusals.items():
        if part not in possible:
            text = f"{_OP}: {part} is possible in no combination: {refusal}"
            raise type(refusal)(text)
