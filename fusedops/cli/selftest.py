"""Runs every op once on its small samples and compares values and gradients with float64.

A user's check of an installation: the same samples and the same error budget as the project's
tests, but only the automatic choice of backend and the common dtypes.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from fusedops._core import backends
from fusedops.bench.contenders import ContenderCall, error_line
from fusedops.bench.results import dtype_name
from fusedops.specs import Sample, Spec
from fusedops.specs.comparison import difference_from_truth, fresh, run
from fusedops.specs.recorder import RecordOps

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class SelftestResult:
    """What the self-test of one op found."""

    op: str  # the op's name
    # per dtype name, the backend that runs here and why not the ones before it
    runs_on: dict[str, str]
    checks: int  # how many calls were compared
    skipped: int  # how many were not, because the time was over
    failures: tuple[str, ...]  # one sentence per difference or exception
    seconds: float  # how long it took


def check_op(spec: Spec, device: torch.device, seconds: float = math.inf) -> SelftestResult:
    """Run the self-test of one op on a device.

    After ``seconds`` the rest is skipped; the first sample of each dtype always runs.
    """
    start = time.perf_counter()
    runs_on: dict[str, str] = {}
    failures = []
    checks = skipped = 0
    for index, dtype in enumerate(DTYPES, start=1):
        deadline = start + seconds * index / len(DTYPES)
        name = dtype_name(dtype)
        try:
            samples = spec.samples(device, dtype)
            runs_on[name] = _resolution(spec, samples)
        except Exception as error:
            failures.append(f"{spec.name} {name}: {error_line(error)}")
            continue
        for number, sample in enumerate(samples):
            if number > 0 and time.perf_counter() > deadline:
                skipped += len(samples) - number
                break
            checks += 1
            try:
                wrong = difference_from_truth(run(spec.op, fresh(sample)), spec, sample)
            except Exception as error:
                wrong = error_line(error)
            if wrong is not None:
                failures.append(f"{spec.name} {name} {sample.name}: {wrong}")
    elapsed = time.perf_counter() - start
    return SelftestResult(spec.name, runs_on, checks, skipped, tuple(failures), elapsed)


def _resolution(spec: Spec, samples: list[Sample]) -> str:
    """Return which backend runs the op's first non-empty sample, and why not a better one."""
    given = next(sample for sample in samples if all(tensor.numel() for tensor in sample.leaves))
    with RecordOps() as recorded:
        outputs = spec.op(*given.args, **given.kwargs)
        if given.leaves:
            ContenderCall.of(spec, given).backward(outputs)
    parts = []
    for operator, args in recorded.calls:
        name = operator._opname.removesuffix("_backward")
        if name in backends.op_names():
            backward = operator._opname != name
            parts.append(str(backends.resolve(name, *args, backward=backward)))
    return "; ".join(dict.fromkeys(parts))
