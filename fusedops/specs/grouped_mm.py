"""What tests, benchmarks and documentation need to know of ``grouped_mm``."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F

from fusedops._core.activation import ACTIVATIONS
from fusedops.ops.grouped_mm import grouped_mm
from fusedops.specs.make import randn
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec


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


def _ends(sizes: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.tensor(list(accumulate(sizes)), dtype=torch.int32, device=device)


def _samples(device: torch.device, dtype: torch.dtype) -> list[Sample]:
    new = functools.partial(randn, device=device, dtype=dtype)

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
        shape = (len(sizes), columns, depth) if transposed else (len(sizes), depth, columns)
        weight = new(*shape, scale=max(depth, 1) ** -0.5, key="w")
        if transposed:
            weight = weight.detach().mT.requires_grad_()
        args = (
            new(sum(sizes) + tail, depth),
            weight,
            _ends(sizes, device),
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
    unknown = {"activation": "tanh"}
    narrow = {"grad_weight_into": torch.zeros(2, 8, 4, device=device)}
    half = {"grad_weight_into": torch.zeros(2, 8, 5, device=device, dtype=torch.bfloat16)}
    return [
        BadInput("weight_shape", (x, w.mT, ends), {}, ValueError, ("weight", "8", "[2, 5, 8]")),
        BadInput("weight_rank", (x, w[0], ends), {}, ValueError, ("weight", "[8, 5]")),
        BadInput("weight_dtype", (x, w.double(), ends), {}, TypeError, ("weight", "float64")),
        BadInput("weight_missing", (x, None, ends), {}, TypeError, ("weight", "NoneType")),
        BadInput("input_rank", (x[0], w, ends), {}, ValueError, ("input", "[8]")),
        BadInput("integers", (x.long(), w, ends), {}, TypeError, ("input", "int64")),
        BadInput("device", (x, w.to("meta"), ends), {}, ValueError, ("weight", "meta")),
        BadInput("offsets_shape", (x, w, ends[:1]), {}, ValueError, ("offsets", "[2]", "[1]")),
        BadInput("offsets_dtype", (x, w, ends.long()), {}, TypeError, ("offsets", "int64")),
        BadInput("offsets_list", (x, w, [2, 6]), {}, TypeError, ("offsets", "list")),
        BadInput("offsets_device", (x, w, ends.to("meta")), {}, ValueError, ("offsets", "meta")),
        BadInput("decreasing", (x, w, ends.flip(0)), {}, ValueError, ("offsets", "2 after 6")),
        BadInput("too_many_rows", (x[:5], w, ends), {}, ValueError, ("offsets", "5", "6")),
        BadInput("bias_shape", (x, w, ends, bias[0]), {}, ValueError, ("bias", "[2, 5]", "[5]")),
        BadInput("bias_dtype", (x, w, ends, bias.half()), {}, TypeError, ("bias", "float16")),
        BadInput("activation", (x, w, ends), unknown, ValueError, ("'tanh'",)),
        BadInput("into_shape", (x, w, ends), narrow, ValueError, ("grad_weight_into", "[2, 8, 4]")),
        BadInput("into_dtype", (x, w, ends), half, TypeError, ("grad_weight_into", "bfloat16")),
    ]


def _case(
    rows: int,
    groups: int,
    depth: int,
    columns: int,
    transposed: bool = True,
    headline: bool = False,
) -> BenchCase:
    # Uneven groups: sizes grow to three times the smallest.
    weights = [1 + 2 * group / max(1, groups - 1) for group in range(groups)]
    ends = [round(weight * rows / sum(weights)) for weight in accumulate(weights)]

    def make(device: torch.device, dtype: torch.dtype) -> Sample:
        new = functools.partial(randn, device=device, dtype=dtype)
        shape = (groups, columns, depth) if transposed else (groups, depth, columns)
        weight = new(*shape, scale=depth**-0.5, key="w")
        if transposed:
            weight = weight.detach().mT.requires_grad_()
        offsets = torch.tensor(ends, dtype=torch.int32, device=device)
        return Sample("bench", (new(rows, depth), weight, offsets))

    operands = rows * depth + groups * depth * columns
    result = rows * columns
    flops = 2 * rows * depth * columns
    return BenchCase(
        label=f"{rows}x{depth}->{columns}, {groups} groups" + (", [N, K]" if transposed else ""),
        make=make,
        bytes_forward=lambda dtype: (operands + result) * dtype.itemsize,
        bytes_backward=lambda dtype: (2 * operands + result) * dtype.itemsize,
        flops_forward=flops,
        flops_backward=2 * flops,
        headline=headline,
    )


def _peers() -> dict[str, Callable[..., Any]]:
    if not hasattr(F, "grouped_mm"):
        return {}

    def torch_grouped_mm(
        input: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        """Run torch's own, which wants strides of 16 bytes."""
        return F.grouped_mm(input, weight, offs=offsets)

    return {"torch_grouped_mm": torch_grouped_mm}


SPEC = Spec(
    name="grouped_mm",
    op=grouped_mm,
    eager=_eager,
    samples=_samples,
    bad_inputs=_bad_inputs,
    bench_case=_case,
    bench_cases=(
        _case(2048, 8, 1024, 2048, headline=True),
        _case(4096, 64, 1024, 768, headline=True),
        _case(2048, 8, 1024, 2048, transposed=False),
        _case(64, 64, 1024, 768),
        _case(256, 16, 128, 96),
    ),
    summary="matrix products of groups of rows, each with its own weight",
    autocast="lower",
    peers=_peers,
    rows_are_independent=False,
)
