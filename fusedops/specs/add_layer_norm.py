"""What tests, benchmarks and documentation need to know of ``add_layer_norm``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.specs import _add_norm, depth
from fusedops.specs.spec import Sample, Spec


def _eager(
    input: torch.Tensor,
    residual: torch.Tensor,
    *args: Any,
    dropout_p: float = 0.0,
    training: bool = True,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = residual + F.dropout(input, dropout_p, training)
    return F.layer_norm(summed, *args, **options), summed


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    call = functools.partial(_add_norm.arguments, takes_bias=True, device=device, dtype=dtype)
    *data, weight, bias = call(4, 33)
    return [
        *_add_norm.samples(device, dtype, takes_bias=True),
        Sample("weight_only", (*data, weight)),
        Sample("bias_only", (*data, None, bias)),
    ]


_case = _add_norm.case_function(takes_bias=True)

SPEC = Spec(
    name="add_layer_norm",
    op=add_layer_norm,
    eager=_eager,
    samples=_samples,
    bad_inputs=_add_norm.bad_inputs,
    bench_case=_case,
    bench_cases=_add_norm.cases(_case),
    summary="dropout, residual sum and layer normalisation",
    autocast="norm",
    depth=depth.of_rows(depth.normalized(2)),
    limits=_add_norm.LIMITS,
)
