"""What tests, benchmarks and documentation need to know of ``add_layer_norm``."""

from __future__ import annotations

import torch.nn.functional as F

from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.specs import _add_norm, depth
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import Sample, describe


def _samples(new: TensorFactory) -> list[Sample]:
    *data, weight, bias = _add_norm.arguments(new, 4, 33, takes_bias=True)
    return [
        *_add_norm.samples(new, takes_bias=True),
        Sample("weight_only", (*data, weight)),
        Sample("bias_only", (*data, None, bias)),
    ]


_case = _add_norm.case_function(takes_bias=True)
_eager = _add_norm.eager(F.layer_norm)

SPEC = describe(add_layer_norm, _eager, _samples, _add_norm.bad_inputs, _case)(
    bench_cases=_add_norm.cases(_case),
    summary="dropout, residual sum and layer normalisation",
    autocast="norm",
    depth=depth.of_rows(depth.normalized(2)),
    limits=_add_norm.LIMITS,
)
