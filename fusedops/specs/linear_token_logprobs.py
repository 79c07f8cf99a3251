"""What tests, benchmarks and documentation need to know of ``linear_token_logprobs``."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.linear_token_logprobs import linear_token_logprobs
from fusedops.ops.token_logprobs import TokenLogprobs
from fusedops.specs import token_logprobs
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    input: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    reads_input: bool = True,
    chunk_size: int | None = None,
    recompute: bool | None = None,
    **options: Any,
) -> TokenLogprobs:
    if not reads_input:
        ignored = target == options.get("ignore_index", -100)
        input = input.masked_fill(ignored.unsqueeze(-1), 0.0)
    return token_logprobs.eager(F.linear(input, weight, bias), target, **options)


def _samples(new: TensorFactory) -> list[Sample]:
    def call(
        name: str,
        rows: tuple[int, ...],
        hidden_size: int,
        classes: int,
        ignored: tuple[int, ...] = (),
        bias: bool = False,
        **options: Any,
    ) -> Sample:
        target = new.integers(*rows, high=classes)
        for row in ignored:
            target.view(-1)[row] = options.get("ignore_index", -100)
        weight = new(classes, hidden_size, scale=2.0 * max(hidden_size, 1) ** -0.5, key="w")
        shift = new(classes, key="b") if bias else None
        args = (new(*rows, hidden_size), weight, target, shift)
        return Sample(name, args, {"recompute": True} | token_logprobs.ENTROPY | options)

    every: dict[str, Any] = {"temperature": 0.7, "softcap": 3.0}
    return [
        call("rows", (7,), 12, 19),
        call("chunks", (7,), 12, 19, (0,), chunk_size=5),
        call("no_entropy", (7,), 12, 19, (2, 6), return_entropy=False),
        call("bias", (2, 3), 9, 17, (4,), bias=True, chunk_size=17),
        call("everything", (2, 4), 8, 13, (1, 6), bias=True, chunk_size=5, **every),
        call("kept", (2, 4), 8, 13, (1, 6), bias=True, chunk_size=5, recompute=False, **every),
        call("kept_rows", (9,), 8, 70, (8,), chunk_size=32, recompute=False),
        call("many_chunks", (5,), 8, 70, (3,), chunk_size=3, bias=True, temperature=2.0),
        call("odd_sizes", (37,), 101, 167, (11,), bias=True, chunk_size=64),
        call("one_row", (), 11, 23, chunk_size=8),
        call("two_classes", (3,), 4, 2),
        call("all_ignored", (3,), 4, 9, (0, 1, 2), bias=True),
        call("no_rows", (0,), 8, 13, bias=True),
        call("no_features", (3,), 0, 5),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, weight = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    target, bias = torch.tensor([1, 0, 4], device=device), torch.zeros(5, device=device)
    bad = bad_changes(input=x, weight=weight, target=target)
    return [
        bad("scalar", "input", "scalar", input=x[0, 0]),
        bad("weight_shape", "weight", "[8, 5]", weight=weight.t()),
        bad("bias_shape", "bias", "[4]", bias=bias[1:]),
        bad("target_shape", "target", "[2]", target=target[:2]),
        bad("too_large", "target", "5 at row 2", target=target + 1),
        bad("temperature", "temperature", "-1.0", temperature=-1.0),
        bad("chunk_size", "chunk_size", "0", chunk_size=0),
    ]


def _case(rows: int, hidden_size: int, classes: int, **options: Any) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        weight = new(classes, hidden_size, scale=hidden_size**-0.5, key="w")
        args = (new(rows, hidden_size), weight, new.integers(rows, high=classes))
        return Sample("bench", args, token_logprobs.ENTROPY | options)

    factors = rows * hidden_size + classes * hidden_size
    product = 2 * rows * hidden_size * classes
    extra = "".join(f" {name}={value}" for name, value in options.items())
    label = f"{rows}x{hidden_size}->{classes}{extra}"
    return BenchCase.moving(label, make, (factors, 2 * factors), (product, 2 * product))


SPEC = describe(linear_token_logprobs, _eager, _samples, _bad_inputs, _case)(
    # As in linear_cross_entropy.
    non_finite=tuple(functools.partial(_eager, reads_input=reads) for reads in (False, True)),
    bench_cases=(
        _case(2048, 768, 50257).headlined(),
        _case(2048, 768, 50257, recompute=True),
        _case(64, 256, 10000),
    ),
    summary="head, log-probabilities and entropies of tokens, large logits never whole in memory",
    autocast="lower",
    limits=(
        "Logits that the backward recomputes save memory, not time: four matrix products "
        "where whole logits take three.",
        "The second derivative makes whole logits.",
        "On CUDA ignored rows cost as much as others: counting them would wait for the device.",
    ),
)
