"""What tests, benchmarks and documentation need to know of ``token_logprobs``."""

from __future__ import annotations

import math
from typing import Any

import torch

from fusedops.ops.token_logprobs import TokenLogprobs, token_logprobs
from fusedops.specs.make import TensorFactory, common_offset, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


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


def _samples(new: TensorFactory) -> list[Sample]:
    def call(
        name: str,
        rows: tuple[int, ...],
        classes: int,
        ignored: tuple[int, ...] = (),
        scale: float = 2.0,
        shift: float = 0.0,
        **options: Any,
    ) -> Sample:
        target = new.integers(*rows, high=classes)
        for row in ignored:
            target.view(-1)[row] = options.get("ignore_index", -100)
        logits = new(*rows, classes, scale=scale, shift=shift)
        return Sample(name, (logits, target), ENTROPY | options)

    large = common_offset(new.dtype)
    extremes = (with_extremes(new(9, 33)), new.integers(9, high=33))
    return [
        call("rows", (7,), 33),
        call("ignored", (2, 4), 20, (1, 6)),
        call("no_entropy", (7,), 33, (2,), return_entropy=False),
        call("temperature", (7,), 33, (3,), temperature=0.7),
        call("softcap", (6,), 40, (3,), scale=4.0, softcap=5.0),
        call("everything", (2, 5), 45, (4,), scale=3.0, softcap=4.0, temperature=1.5),
        call("ignore_class", (7,), 5, (2,), ignore_index=3),
        call("large_logits", (5,), 70, scale=40.0),
        Sample("extremes", extremes, ENTROPY),
        call("offset", (5,), 70, shift=large),
        call("negative_offset", (5,), 2100, shift=-large),
        call("one_row", (), 129),
        call("one_class", (3,), 1),
        call("many_rows", (70,), 48),
        call("long_rows", (3,), 33001, (1,)),
        call("all_ignored", (3,), 9, (0, 1, 2)),
        call("no_rows", (0,), 33),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, target = torch.randn(3, 8, device=device), torch.tensor([1, 0, 7], device=device)
    bad = bad_changes(logits=x, target=target)
    return [
        bad("scalar", "logits", "scalar", logits=x[0, 0]),
        bad("no_classes", "logits", "one class", logits=x[:, :0]),
        bad("target_shape", "target", "[3]", "[2]", target=target[:2]),
        bad("target_dtype", "target", "int64", "int32", error=TypeError, target=target.int()),
        bad("too_large", "target", "[0, 8)", "8 at row 2", target=target + 1),
        bad("temperature", "temperature", "0.0", temperature=0.0),
        bad("softcap", "softcap", "0.0", softcap=0.0),
    ]


def _case(rows: int, classes: int, **options: Any) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        pair = (new(rows, classes), new.integers(rows, high=classes))
        return Sample("bench", pair, ENTROPY | options)

    extra = "".join(f" {name}={value}" for name, value in options.items())
    label, size = f"{rows}x{classes}{extra}", rows * classes
    return BenchCase.moving(label, make, (size, 2 * size))


SPEC = describe(token_logprobs, eager, _samples, _bad_inputs, _case)(
    bench_cases=(
        _case(2048, 50257).headlined(),
        _case(2048, 50257, temperature=0.7, softcap=30.0),
        _case(16, 1000),
    ),
    summary="log-probabilities and entropies of tokens, softmax never in memory",
    autocast="keep",
    limits=("On CUDA a target outside the classes is not reported; its results are NaN.",),
)
