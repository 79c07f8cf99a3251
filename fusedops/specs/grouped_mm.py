"""What tests, benchmarks and documentation need to know of ``grouped_mm``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.grouped_mm import grouped_mm
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    activation: str = "identity",
) -> torch.Tensor:
    """Loop over the groups, as model code does."""
    parts, begin = [], 0
    for group, end in enumerate(offsets.tolist()):
        rows = F.linear(input[begin:end], weight[group].t(), None if bias is None else bias[group])
        parts.append(ACTIVATIONS[activation](rows))
        begin = end
    parts.append(parts[0].new_zeros(input.shape[0] - begin, weight.shape[2]))
    return torch.cat(parts)


def _weight(
    new: TensorFactory, groups: int, matrix: tuple[int, int], transposed: bool
) -> torch.Tensor:
    depth, columns = matrix
    scale = max(depth, 1) ** -0.5
    if transposed:
        return new(groups, columns, depth, scale=scale, key="w").detach().mT.requires_grad_()
    return new(groups, depth, columns, scale=scale, key="w")


def _ends(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def _samples(new: TensorFactory) -> list[Sample]:

    def call(
        name: str,
        sizes: Sequence[int],
        matrix: tuple[int, int],
        activation: str = "identity",
        tail: int = 0,
        bias: bool = False,
        transposed: bool = False,
    ) -> Sample:
        depth, columns = matrix
        args = (
            new(sum(sizes) + tail, depth),
            _weight(new, len(sizes), matrix, transposed),
            _ends(sizes, new.device),
            new(len(sizes), columns, key="b") if bias else None,
        )
        return Sample(name, args, {"activation": activation})

    return [
        call("default", (5, 3, 4), (8, 6)),
        call("bias", (4, 2, 5), (7, 9), bias=True),
        call("tail", (2, 4), (7, 9), tail=3, bias=True),
        *(call(name, (3, 2), (6, 5), name, 2) for name in ("relu", "silu", "gelu")),
        *(call(name, (3, 2), (6, 5), name, bias=True) for name in ("gelu_tanh", "fast_gelu")),
        call("relu2", (4, 1), (6, 5), "relu2", bias=True, transposed=True),
        call("empty_groups", (0, 3, 0, 0, 4, 0), (5, 6), bias=True),
        call("transposed_weights", (4, 3), (9, 7), transposed=True),
        call("size_37", (37, 1, 20), (37, 37), "silu", bias=True),
        call("one_group", (6,), (5, 4)),
        call("one_element", (1,), (1, 1)),
        call("no_rows", (0, 0), (5, 4), bias=True),
        call("only_tail", (0, 0), (5, 4), tail=3, bias=True),
        call("no_depth", (2, 3), (0, 4), bias=True),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, w = torch.randn(6, 8, device=device), torch.randn(2, 8, 5, device=device)
    ends, bias = _ends((2, 4), device), torch.zeros(2, 5, device=device)
    name, into = "grad_weight_into", torch.zeros(2, 8, 5, device=device)
    bad = bad_changes(input=x, weight=w, offsets=ends)
    return [
        bad("weight_shape", "weight", "8", "[2, 5, 8]", weight=w.mT),
        bad("weight_rank", "weight", "[8, 5]", weight=w[0]),
        bad("input_rank", "input", "[8]", input=x[0]),
        bad("offsets_shape", "offsets", "[2]", "[1]", offsets=ends[:1]),
        bad("offsets_dtype", "offsets", "int64", error=TypeError, offsets=ends.long()),
        bad("decreasing", "offsets", "2 after 6", offsets=ends.flip(0)),
        bad("too_many_rows", "offsets", "5", "6", input=x[:5]),
        bad("bias_shape", "bias", "[2, 5]", "[5]", bias=bias[0]),
        bad("into_shape", name, "[2, 8, 4]", grad_weight_into=into[..., :4]),
        bad("into_dtype", name, "bfloat16", error=TypeError, grad_weight_into=into.bfloat16()),
    ]


def _case(rows: int, groups: int, depth: int, columns: int, transposed: bool = True) -> BenchCase:
    # Uneven groups: sizes grow to three times the smallest.
    weights = [1 + 2 * group / max(1, groups - 1) for group in range(groups)]
    ends = [round(weight * rows / sum(weights)) for weight in accumulate(weights)]

    def make(new: TensorFactory) -> tuple[torch.Tensor, ...]:
        offsets = torch.tensor(ends, dtype=torch.int32, device=new.device)
        return new(rows, depth), _weight(new, groups, (depth, columns), transposed), offsets

    operands = rows * depth + groups * depth * columns
    result = rows * columns
    flops = 2 * rows * depth * columns
    label = f"{rows}x{depth}->{columns}, {groups} groups" + (", [N, K]" if transposed else "")
    elements = (operands + result, 2 * operands + result)
    return BenchCase.moving(label, make, elements, (flops, 2 * flops))


SPEC = describe(grouped_mm, _eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(2048, 8, 1024, 2048).headlined(),
        _case(4096, 64, 1024, 768).headlined(),
        _case(2048, 8, 1024, 2048, transposed=False),
        _case(64, 64, 1024, 768),
        _case(256, 16, 128, 96),
    ),
    summary="matrix products of groups of rows, each with its own weight",
    autocast="lower",
    rows_are_independent=False,
)
