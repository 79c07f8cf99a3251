"""What tests, benchmarks and documentation need to know of ``linear_token_logprobs``."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.linear_token_logprobs import linear_token_logprobs
from fusedops.ops.token_logprobs import TokenLogprobs
from fusedops.specs import linear_cross_entropy, token_logprobs
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, describe


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
    # What is_argmax is of logits that are all the same in bfloat16 depends on where they are
    # rounded; of one class the incoming gradient alone is left.
    without = ("offset", "large_offset", "negative_offset", "one_class")
    return token_logprobs.samples_of(linear_cross_entropy.SPEC, new, without=without)


def _bad_inputs(device: torch.device) -> list[BadInput]:
    bad = token_logprobs.bad_inputs_of(linear_cross_entropy.SPEC, device)
    words = {"hidden": "input"}
    return [
        replace(each, mentions=tuple(words.get(word, word) for word in each.mentions))
        for each in bad
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
