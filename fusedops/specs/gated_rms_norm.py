"""What tests, benchmarks and documentation need to know of ``gated_rms_norm``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.gated_rms_norm import gated_rms_norm
from fusedops.specs import depth
from fusedops.specs.make import TensorFactory, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    gate: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float | None = None,
    *,
    norm_before_gate: bool = True,
    groups: int = 1,
    gate_activation: str = "silu",
) -> torch.Tensor:
    """Return what models write: the formula in float32, rounded before the weight."""
    x, opened = (
        tensor.double() if tensor.dtype == torch.float64 else tensor.float()
        for tensor in (input, gate)
    )
    opened = F.silu(opened) if gate_activation == "silu" else opened.sigmoid()
    x = x if norm_before_gate else x * opened
    eps = torch.finfo(x.dtype).eps if eps is None else eps
    parts = x.unflatten(-1, (groups, x.shape[-1] // groups))
    x = (parts * torch.rsqrt(parts.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2)
    x = x.to(input.dtype)
    x = x if weight is None else weight * x
    return (x * opened if norm_before_gate else x).to(input.dtype)


GATE_FIRST = {"norm_before_gate": False}
SIGMOID = {"gate_activation": "sigmoid"}


def _samples(new: TensorFactory) -> list[Sample]:
    def call(*shape: int, weight: Any = None) -> tuple[Any, ...]:
        given = new(shape[-1], key="weight", shift=1.0) if weight is None else weight
        return new(*shape), new(*shape, key="gate"), given

    wide = new.wide(33, key="weight", shift=1.0)
    projected = new(2, 3, 80).detach()
    parts = tuple(part.requires_grad_() for part in projected[..., :64].chunk(2, -1))
    extremes = (with_extremes(new(8, 6)), with_extremes(new(8, 6, key="gate")))
    pair = (new(4, 17), new(4, 17, key="gate"))
    return [
        Sample("rows", call(7, 33)),
        Sample("gate_first", call(7, 33), GATE_FIRST),
        Sample("sigmoid", (*call(7, 33), 1e-6), SIGMOID),
        Sample("sigmoid_first", call(2, 3, 21), GATE_FIRST | SIGMOID),
        Sample("groups", call(5, 48), {"groups": 3}),
        Sample("groups_gate_first", call(5, 2, 130), GATE_FIRST | {"groups": 2}),
        Sample("no_weight", pair),
        Sample("no_weight_gate_first", pair, GATE_FIRST | {"eps": 1e-3}),
        Sample("parts_of_a_row", (*parts, new(32, key="weight", shift=1.0)), GATE_FIRST),
        Sample("one_row", call(129)),
        Sample("one_column", call(3, 1)),
        Sample("many_rows", call(70, 48), {"groups": 2}),
        Sample("extremes", extremes),
        Sample("extremes_gate_first", extremes, GATE_FIRST),
        Sample("extremes_sigmoid", extremes, SIGMOID),
        Sample("wide_weight", call(7, 33, weight=wide)),
        Sample("no_rows", call(0, 33)),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    bad = bad_changes(input=x, gate=x, weight=weight)
    return [
        bad("gate_shape", "gate", "[3, 8]", "[3, 1]", gate=x[:, :1]),
        bad("gate_dtype", "gate", "float64", error=TypeError, gate=x.double()),
        bad("weight_shape", "weight", "[8]", "[7]", weight=weight[:7]),
        bad("groups", "groups", "divisor of 8", "3", groups=3),
        bad("no_groups", "groups", "at least 1", "0", groups=0),
        bad("activation", "gate_activation", "'silu'", "'relu'", gate_activation="relu"),
        bad("scalar", "input", "scalar", input=x[0, 0]),
    ]


def _case(rows: int, columns: int, groups: int = 1, *, gate_first: bool = False) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        tensors = (
            new(rows, columns),
            new(rows, columns, key="g"),
            new(columns, shift=1.0, key="w"),
        )
        options = {"eps": 1e-6, "norm_before_gate": not gate_first, "groups": groups}
        return Sample("bench", tensors, options)

    size = rows * columns
    words = [f"{rows}x{columns}", *([f"{groups} groups"] if groups > 1 else [])]
    label = ", ".join(words + ["gate first"] * gate_first)
    return BenchCase.moving(label, make, (3 * size, 5 * size))


SPEC = describe(gated_rms_norm, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(32768, 128).headlined(),
        _case(4096, 1536, gate_first=True).headlined(),
        _case(4096, 3584, 2, gate_first=True),
        _case(16, 1536, gate_first=True),
    ),
    summary="RMS norm of rows or groups, and a gate before or after it",
    autocast="keep",
    depth=depth.of_rows(depth.last_dim),
)
