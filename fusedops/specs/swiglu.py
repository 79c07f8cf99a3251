"""What tests, benchmarks and documentation need to know of ``swiglu``."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from fusedops.ops.swiglu import swiglu
from fusedops.specs import _glu, depth
from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, Sample, Spec, bad_changes


def _eager(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return F.silu(gate) * up


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    return _glu.samples(functools.partial(randn, device=device, dtype=dtype))


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(3, 8, device=device)
    bad = bad_changes(gate=x, up=x[:, :1])
    return [
        bad("shape", "up", "[3, 8]", "[3, 1]"),
        bad("dtype", "up", "float64", error=TypeError, up=x.double()),
        bad("integers", "gate", "int64", error=TypeError, gate=x.long(), up=x.long()),
        bad("no_tensor", "up", "float", error=TypeError, up=1.0),
        bad("device", "up", "meta", up=x.to("meta")),
    ]


SPEC = Spec(
    name="swiglu",
    op=swiglu,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_glu.case,
    bench_cases=(
        _glu.case(4096, 4096, headline=True),
        _glu.case(2048, 11008),
        _glu.case(2048, 11008, chunks=True),
        _glu.case(16, 4096),
    ),
    summary="silu(gate) * up",
    autocast="keep",
    depth=depth.elementwise,
)
