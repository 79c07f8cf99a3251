"""The smallest case that still fails."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch

from fusedops.testing.case import Case, Space


def shrink(case: Case, space: Space, fails: Callable[[Case], bool], most: int = 60) -> Case:
    """Make a failing case simpler, one change at a time, for as long as it fails in the same way.

    The first of each list of ``space`` is the simplest; at most ``most`` cases are tried.
    """
    tried = {case.code()}
    progress = True
    while progress:
        progress = False
        for simpler in _simpler(case, space):
            if simpler.code() in tried or len(tried) > most:
                continue
            tried.add(simpler.code())
            if fails(simpler):
                case, progress = simpler, True
                break
    return case


def _simpler(case: Case, space: Space) -> Iterator[Case]:
    """Yield cases that are simpler than this one, those that leave out most first."""

    def change(**changes: Any) -> Case:
        return dataclasses.replace(case, **changes)

    for axis, size in case.mesh.items():
        if size > 1 and len(case.mesh) > 1:
            yield change(mesh={name: size for name, size in case.mesh.items() if name != axis})
    for axis, size in case.mesh.items():
        if size > 2:
            yield change(mesh={**case.mesh, axis: size // 2})
    for axis, size in case.mesh.items():
        if size == 1 and len(case.mesh) > 1:
            yield change(mesh={name: size for name, size in case.mesh.items() if name != axis})
    for name, values in space.options.items():
        if name in case.options and case.options[name] != values[0]:
            yield change(options={**case.options, name: values[0]})
    for name, values in space.options.items():
        if name in case.options and case.options[name] == values[0]:
            yield change(
                options={key: option for key, option in case.options.items() if key != name}
            )
    if case.workload != "random":
        yield change(workload="random")
    if case.steps > 1:
        yield change(steps=1)
    if case.max_norm is not None:
        yield change(max_norm=None)
    if case.dtype != torch.float64:
        yield change(dtype=torch.float64)
    if case.model != space.models[0]:
        yield change(model=space.models[0])
    for sizes, name in ((space.batch_sizes, "batch_size"), (space.seq_lens, "seq_len")):
        for size in sorted(sizes):
            if size < getattr(case, name):
                yield change(**{name: size})
    if case.seed:
        yield change(seed=0)
