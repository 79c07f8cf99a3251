"""What tests, benchmarks and documentation need to know of ``add_rms_norm``."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
import torch.nn.functional as F

from fusedops.ops.add_rms_norm import add_rms_norm
from fusedops.specs import _add_norm, _peers, depth
from fusedops.specs.make import randn
from fusedops.specs.rms_norm import eager_rms_norm
from fusedops.specs.spec import BadInput, Sample, Spec


def _eager(
    input: torch.Tensor,
    residual: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    weight_offset: float = 0.0,
    rounding: str = "torch",
    dropout_p: float = 0.0,
    training: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    summed = residual + F.dropout(input, dropout_p, training)
    normed = eager_rms_norm(
        summed, normalized_shape, weight, eps, weight_offset=weight_offset, rounding=rounding
    )
    return normed, summed


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    stream = functools.partial(randn, device=device, dtype=wide)

    def pair(*shape: int) -> tuple[torch.Tensor, torch.Tensor]:
        return new(*shape), new(*shape, key="residual")

    def weight(*shape: int) -> torch.Tensor:
        return new(*shape, shift=1.0, key="w")

    wide_weight = stream(40, shift=1.0, key="w")
    mixed = (new(6, 40), stream(6, 40, key="residual"), (40,), wide_weight)
    hf = {"rounding": "hf", "eps": 1e-6}
    return [
        Sample("rows", (*pair(7, 33), (33,), weight(33))),
        Sample("three_dims", (*pair(2, 3, 64), (64,), weight(64)), {"eps": 1e-3}),
        Sample("two_normalized_dims", (*pair(5, 4, 6), (4, 6), weight(4, 6))),
        Sample("no_weight", (*pair(4, 17), (17,))),
        Sample("one_row", (*pair(129), (129,), weight(129))),
        Sample("one_column", (*pair(3, 1), (1,), weight(1))),
        Sample("many_rows", (*pair(70, 48), (48,), weight(48))),
        Sample("long_rows", (*pair(2, 17000), (17000,), weight(17000))),
        Sample("no_rows", (*pair(0, 33), (33,), weight(33))),
        Sample("weight_offset", (*pair(7, 33), (33,), new(33)), {"weight_offset": 1.0}),
        Sample("hf", (*pair(7, 33), (33,), weight(33)), hf),
        Sample("hf_wide_weight", (*pair(6, 40), (40,), wide_weight), hf),
        Sample("float32_residual", mixed),
        Sample("dropout", (*pair(7, 33), (33,), weight(33)), {"dropout_p": 0.3}, random=True),
        Sample("dropout_float32_residual", mixed, hf | {"dropout_p": 0.5}, random=True),
        Sample("dropout_of_all", (*pair(4, 17), (17,)), {"dropout_p": 1.0}, random=True),
        Sample("dropout_no_rows", (*pair(0, 33), (33,)), {"dropout_p": 0.3}, random=True),
        Sample(
            "evaluation", (*pair(7, 33), (33,), weight(33)), {"dropout_p": 0.3, "training": False}
        ),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x = torch.randn(3, 8, device=device)
    offset = {"weight_offset": "1"}
    return [
        *_add_norm.bad_inputs(device),
        BadInput("rounding", (x, x, (8,)), {"rounding": "llama"}, ValueError, ("rounding", "'hf'")),
        BadInput("offset_type", (x, x, (8,)), offset, TypeError, ("weight_offset",)),
    ]


_case = _add_norm.case_function(takes_bias=False)

SPEC = Spec(
    name="add_rms_norm",
    op=add_rms_norm,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=_add_norm.cases(_case),
    summary="dropout, residual sum and root-mean-square normalisation",
    autocast="norm",
    peers=_peers.add_rms_norm,
    depth=depth.of_rows(depth.normalized(2)),
    limits=_add_norm.LIMITS,
)
