"""What tests, benchmarks and documentation need to know of ``bias_dropout_add``."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from fusedops.ops.bias_dropout_add import bias_dropout_add
from fusedops.specs import _add_norm, depth
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    p: float = 0.0,
    training: bool = True,
) -> torch.Tensor:
    return residual + F.dropout(input if bias is None else input + bias, p, training)


def _samples(new: TensorFactory) -> list[Sample]:
    stream = new.wide

    def call(*shape: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return new(*shape), new(shape[-1], key="bias"), new(*shape, key="residual")

    def without_bias(*shape: int) -> tuple[torch.Tensor, None, torch.Tensor]:
        return new(*shape), None, new(*shape, key="residual")

    residual, wide_bias = stream(6, 40, key="residual"), stream(40, key="bias")
    return [
        Sample("rows", call(7, 33)),
        Sample("three_dims", call(2, 3, 64)),
        Sample("no_bias", without_bias(7, 33)),
        Sample("one_dim", call(129)),
        Sample("one_column", call(3, 1)),
        Sample("many_rows", call(70, 48)),
        Sample("no_rows", call(0, 33)),
        Sample("float32_residual", (new(6, 40), new(40, key="bias"), residual)),
        Sample("float32_bias", (new(6, 40), wide_bias, new(6, 40, key="residual"))),
        Sample("dropout", (*call(7, 33), 0.3), random=True),
        Sample("dropout_no_bias", (*without_bias(2, 3, 64), 0.1), random=True),
        Sample("dropout_float32_residual", (new(6, 40), wide_bias, residual, 0.5), random=True),
        Sample("dropout_of_all", (*call(4, 17), 1.0), random=True),
        Sample("dropout_no_rows", (*call(0, 33), 0.3), random=True),
        Sample("evaluation", (*call(7, 33), 0.3, False)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, bias = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    bad = bad_changes(input=x, bias=bias, residual=x)
    return [
        bad("residual_shape", "residual", "[3, 8]", residual=x[:2]),
        bad("bias_shape", "bias", "[8]", "[7]", bias=bias[:7]),
        bad("bias_rank", "bias", "[8]", "[3, 8]", bias=x),
        bad("bias_of_a_scalar", "input", input=x.sum(), residual=x.sum()),
        bad("p_above", "p ", "1.5", p=1.5),
        bad("p_below", "p ", "-0.1", p=-0.1),
    ]


def _case(rows: int, columns: int, p: float, *, bias: bool = False) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        added = new(columns, key="bias") if bias else None
        data = (new(rows, columns), added, new(rows, columns, key="residual"), p)
        return Sample("bench", data, random=p > 0)

    size = rows * columns
    label = f"{rows}x{columns}, dropout {p}" + (", bias" if bias else "")
    return BenchCase.moving(label, make, (3 * size, 2 * size))


SPEC = describe(bias_dropout_add, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(4096, 1024, 0.1).headlined(),
        _case(4096, 1024, 0.1, bias=True).headlined(),
        _case(8192, 4096, 0.1),
        _case(16, 768, 0.1, bias=True),
    ),
    summary="bias, dropout and residual sum",
    autocast="keep",
    depth=depth.elementwise,
    limits=_add_norm.LIMITS,
)
