"""What tests, benchmarks and documentation need to know of ``token_logprobs``."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection
from typing import Any

import torch

from fusedops.ops.token_logprobs import TokenLogprobs, token_logprobs
from fusedops.specs import cross_entropy
from fusedops.specs.make import TensorFactory
from fusedops.specs.spec import BadInput, BenchCase, Sample, Spec, describe


def eager(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    temperature: float = 1.0,
    softcap: float | None = None,
    ignore_index: int = -100,
    return_entropy: bool = False,
) -> TokenLogprobs:
    """Compute it as a user does today; also what linear_token_logprobs is compared with."""
    ignored = target == ignore_index
    logits = logits.masked_fill(ignored.unsqueeze(-1), 0.0)
    logits = logits.float() if logits.dtype in (torch.bfloat16, torch.float16) else logits
    y = logits if softcap is None else softcap * torch.tanh(logits / softcap)
    y = y / temperature
    index = target.masked_fill(ignored, 0).unsqueeze(-1)
    shares = torch.log_softmax(y, -1)
    logprobs, largest = shares.gather(-1, index).squeeze(-1), y.amax(-1)
    lse = largest + (y - largest.unsqueeze(-1)).exp().sum(-1).log()
    hit = (logprobs >= shares.amax(-1)) & ~ignored
    entropy = -(shares.exp() * torch.where(shares == -math.inf, 0.0, shares)).sum(-1)
    rows = [values.masked_fill(ignored, 0.0) for values in (logprobs, lse, entropy)]
    return TokenLogprobs(rows[0], rows[1], hit, rows[2] if return_entropy else None)


ENTROPY = {"return_entropy": True}
# Options that the losses have too.
_SHARED = {"ignore_index", "softcap", "chunk_size", "recompute"}


def samples_of(loss: Spec, new: TensorFactory, *, without: Collection[str] = ()) -> list[Sample]:
    """Return the calls of a loss as calls of its log-probabilities, but those ``without``."""
    samples = []
    for sample in loss.samples(new.device, new.dtype):
        options: dict[str, Any] = {k: v for k, v in sample.kwargs.items() if k in _SHARED}
        options["return_entropy"] = sample.kwargs.get("reduction") != "sum"
        options |= {"temperature": 0.7} if "z_loss" in sample.kwargs else {}
        if sample.name not in without:
            samples.append(Sample(sample.name, sample.args, options))
    return samples


def bad_inputs_of(loss: Spec, device: torch.device) -> list[BadInput]:
    """Return the same of its bad inputs, and a wrong temperature."""
    bad = [each for each in loss.bad_inputs(device) if _SHARED.issuperset(each.kwargs)]
    args = loss.samples(device, torch.float32)[0].args
    return [*bad, BadInput("temperature", args, {"temperature": 0.0}, ValueError, ("0.0",))]


def _case(rows: int, classes: int, **options: Any) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        pair = (new(rows, classes), new.integers(rows, high=classes))
        return Sample("bench", pair, ENTROPY | options)

    extra = "".join(f" {name}={value}" for name, value in options.items())
    label, size = f"{rows}x{classes}{extra}", rows * classes
    return BenchCase.moving(label, make, (size, 2 * size))


SPEC = describe(
    token_logprobs,
    eager,
    functools.partial(samples_of, cross_entropy.SPEC),
    functools.partial(bad_inputs_of, cross_entropy.SPEC),
    _case,
)(
    bench_cases=(
        _case(2048, 50257).headlined(),
        _case(2048, 50257, temperature=0.7, softcap=30.0),
        _case(16, 1000),
    ),
    summary="log-probabilities and entropies of tokens, softmax never in memory",
    autocast="keep",
    limits=("On CUDA a target outside the classes is not reported; its results are NaN.",),
)
