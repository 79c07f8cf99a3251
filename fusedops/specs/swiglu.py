"""What tests, benchmarks and documentation need to know of ``swiglu``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops.ops.swiglu import swiglu
from fusedops.specs import _glu, depth
from fusedops.specs.spec import describe


def _eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


SPEC = describe(swiglu, _eager, _glu.samples, _glu.bad_inputs, _glu.case)(
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
