"""What tests, benchmarks and documentation need to know of ``swiglu``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops.ops.swiglu import swiglu
from fusedops.specs import _glu, depth
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, Sample, bad_changes, describe, wrong_tensors


def _eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _samples(new: TensorFactory) -> list[Sample]:
    return _glu.samples(new)


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(3, 8, device=device)
    bad = bad_changes(gate=x, up=x)
    return [bad("shape", "up", "[3, 8]", "[3, 1]", up=x[:, :1]), *wrong_tensors(bad, gate=x, up=x)]


SPEC = describe(swiglu, _eager, _samples, _bad_inputs, _glu.case)(
    bench_cases=(
        _glu.case(4096, 4096).headlined(),
        _glu.case(2048, 11008),
        _glu.case(2048, 11008, chunks=True),
        _glu.case(16, 4096),
    ),
    summary="silu(gate) * up",
    autocast="keep",
    depth=depth.elementwise,
)
