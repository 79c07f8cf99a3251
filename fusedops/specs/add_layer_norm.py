"""What tests, benchmarks and documentation need to know of ``add_layer_norm``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fusedops.ops.add_layer_norm import add_layer_norm
from fusedops.specs import _add_norm, depth
from fusedops.specs.make import randn
from fusedops.specs.spec import Sample, Spec


def _eager(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    eps: float = 1e-5,
    *,
    dropout_p: float = 0.0,
    training: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = residual + F.dropout(input, dropout_p, training)
    return F.layer_norm(summed, normalized_shape, weight, bias, eps), summed


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    stream = functools.partial(randn, device=device, dtype=wide)

    def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return new(*shape), new(*shape, key="residual")

    def parameters(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return new(*shape, shift=1.0, key="w"), new(*shape, key="b")

    wide_parameters = (stream(40, shift=1.0, key="w"), stream(40, key="b"))
    mixed = (new(6, 40), stream(6, 40, key="residual"), (40,), *wide_parameters)
    return [
        Sample("rows", (*pair(7, 33), (33,), *parameters(33))),
        Sample("three_dims", (*pair(2, 3, 64), (64,), *parameters(64)), {"eps": 1e-3}),
        Sample("two_normalized_dims", (*pair(5, 4, 6), (4, 6), *parameters(4, 6))),
        Sample("no_parameters", (*pair(4, 17), (17,))),
        Sample("weight_only", (*pair(4, 33), (33,), parameters(33)[0])),
        Sample("bias_only", (*pair(4, 33), (33,), None, parameters(33)[1])),
        Sample("one_row", (*pair(129), (129,), *parameters(129))),
        Sample("one_column", (*pair(3, 1), (1,), *parameters(1))),
        Sample("many_rows", (*pair(70, 48), (48,), *parameters(48))),
        Sample("no_rows", (*pair(0, 33), (33,), *parameters(33))),
        Sample("float32_residual", mixed),
        Sample("dropout", (*pair(7, 33), (33,), *parameters(33)), {"dropout_p": 0.3}, random=True),
        Sample("dropout_float32_residual", mixed, {"dropout_p": 0.5}, random=True),
        Sample("dropout_of_all", (*pair(4, 17), (17,)), {"dropout_p": 1.0}, random=True),
        Sample("dropout_no_rows", (*pair(0, 33), (33,)), {"dropout_p": 0.3}, random=True),
        Sample(
            "evaluation",
            (*pair(7, 33), (33,), *parameters(33)),
            {"dropout_p": 0.3, "training": False},
        ),
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
