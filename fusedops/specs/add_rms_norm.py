"""What tests, benchmarks and documentation need to know of ``add_rms_norm``."""

from __future__ import annotations

import functools

from fusedops.ops.add_rms_norm import add_rms_norm
from fusedops.specs import _add_norm, depth
from fusedops.specs.make import TensorFactory
from fusedops.specs.rms_norm import eager_rms_norm
from fusedops.specs.spec import Sample, describe


def _samples(new: TensorFactory) -> list[Sample]:
    call = functools.partial(_add_norm.arguments, new, takes_bias=False)
    wide_weight = _add_norm.arguments(new.wide, 6, 40, takes_bias=False)[3]
    hf = {"rounding": "hf", "eps": 1e-6}
    return [
        *_add_norm.samples(new, takes_bias=False),
        Sample("long_rows", call(2, 17000)),
        Sample("weight_offset", (*call(7, 33)[:3], new(33)), {"weight_offset": 1.0}),
        Sample("hf", call(7, 33), hf),
        Sample("hf_wide_weight", (*call(6, 40)[:3], wide_weight), hf),
        Sample("hf_dropout", call(6, 40), hf | {"dropout_p": 0.5}, random=True),
    ]


_case = _add_norm.case_function(takes_bias=False)
_eager = _add_norm.eager(eager_rms_norm)

SPEC = describe(add_rms_norm, _eager, _samples, _add_norm.bad_inputs, _case)(
    bench_cases=_add_norm.cases(_case),
    summary="dropout, residual sum and root-mean-square normalisation",
    autocast="norm",
    depth=depth.of_rows(depth.normalized(2)),
    limits=_add_norm.LIMITS,
)
