"""What tests, benchmarks and documentation need to know of ``linear_cross_entropy``."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.linear_cross_entropy import linear_cross_entropy
from fusedops.specs import cross_entropy
from fusedops.specs.make import TensorFactory, common_offset
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def _eager(
    hidden: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    loss: Callable[..., torch.Tensor] = cross_entropy.eager,
    chunk_size: int | None = None,
    recompute: bool | None = None,
    **options: Any,
) -> torch.Tensor:
    return loss(F.linear(hidden, weight, bias), target, **options)


def _ignoring(
    hidden: torch.Tensor, *args: torch.Tensor, reads_hidden: bool, **options: Any
) -> torch.Tensor:
    """Compute the same with no gradient for ignored rows, whatever they or the weight hold."""
    if not reads_hidden:
        ignored = args[1] == options.get("ignore_index", -100)
        hidden = hidden.masked_fill(ignored.unsqueeze(-1), 0.0)
    return _eager(hidden, *args, loss=cross_entropy.ignoring, **options)


def _samples(new: TensorFactory) -> list[Sample]:
    def call(
        name: str,
        rows: tuple[int, ...],
        hidden_size: int,
        classes: int,
        ignored: tuple[int, ...] = (),
        bias: bool = False,
        offset: float = 0.0,
        **options: Any,
    ) -> Sample:
        target = new.integers(*rows, high=classes)
        for row in ignored:
            target.view(-1)[row] = options.get("ignore_index", -100)
        weight = new(classes, hidden_size, scale=2.0 * max(hidden_size, 1) ** -0.5, key="w")
        options.setdefault("recompute", True)
        shift = new(classes, shift=offset, key="b") if bias else None
        args = (new(*rows, hidden_size), weight, target, shift)
        return Sample(name, args, options)

    none: dict[str, Any] = {"reduction": "none"}
    every: dict[str, Any] = {"label_smoothing": 0.2, "z_loss": 1e-2, "softcap": 3.0}
    smooth: dict[str, Any] = {"label_smoothing": 0.1}
    large = common_offset(new.dtype)
    embedding = new(10, 19, key="e").detach().t().requires_grad_()
    return [
        call("rows", (7,), 12, 19, **none),
        call("mean", (7,), 12, 19, (2, 6)),
        call("chunks", (7,), 12, 19, (0,), chunk_size=5, **none),
        call("bias", (2, 3), 9, 17, (4,), bias=True, reduction="sum", chunk_size=17),
        call("smoothing", (6,), 8, 13, (5,), label_smoothing=0.1, chunk_size=6),
        call("z_loss", (6,), 8, 13, z_loss=1e-2, chunk_size=4, **none),
        call("softcap", (6,), 8, 13, (1,), bias=True, softcap=2.0, chunk_size=12, **none),
        call("everything", (2, 4), 8, 13, (1, 6), bias=True, chunk_size=5, **every),
        call("everything_rows", (9,), 8, 13, (1, 6), bias=True, chunk_size=5, **every, **none),
        call("offset", (7,), 12, 19, (2,), bias=True, offset=1e3, chunk_size=5),
        call("large_offset", (7,), 12, 19, bias=True, offset=large, recompute=False, **smooth),
        call("negative_offset", (7,), 12, 19, bias=True, offset=-large, chunk_size=5, **smooth),
        call("kept", (2, 4), 8, 13, (1, 6), bias=True, chunk_size=5, recompute=False, **every),
        call("kept_rows", (9,), 8, 70, (8,), chunk_size=32, recompute=False, **none),
        call("few_rows", (3,), 32, 41, (1,), chunk_size=16, recompute=None),
        call("ignore_class", (7,), 6, 5, (2,), ignore_index=3),
        call("many_chunks", (5,), 8, 70, (3,), chunk_size=3, bias=True),
        call("odd_sizes", (37,), 101, 167, (11,), bias=True, chunk_size=64),
        Sample("transposed_weight", (new(5, 10), embedding, new.integers(5, high=19))),
        call("one_row", (), 11, 23, chunk_size=8),
        call("one_class", (3,), 4, 1, **none),
        call("all_ignored", (3,), 4, 9, (0, 1, 2), bias=True, reduction="sum"),
        call("no_rows", (0,), 8, 13, bias=True, reduction="sum"),
        call("no_features", (3,), 0, 5, **none),
    ]


def _bad_inputs(device: torch.device) -> list[BadInput]:
    x, weight = torch.randn(3, 8, device=device), torch.randn(5, 8, device=device)
    target, bias = torch.tensor([1, 0, 4], device=device), torch.zeros(5, device=device)
    bad = bad_changes(hidden=x, weight=weight, target=target)
    return [
        bad("scalar", "hidden", "scalar", hidden=x[0, 0]),
        bad("weight_shape", "weight", "[8, 5]", weight=weight.t()),
        bad("no_classes", "weight", "one class", weight=weight[:0]),
        bad("bias_shape", "bias", "[4]", bias=bias[1:]),
        bad("target_shape", "target", "[2]", target=target[:2]),
        bad("target_dtype", "target", "int32", error=TypeError, target=target.int()),
        bad("swapped", "weight", "int64", error=TypeError, weight=target, target=weight),
        bad("too_large", "target", "5 at row 2", target=target + 1),
        bad("negative", "target", "-1 at row 1", target=target - 1),
        bad("reduction", "reduction", "'avg'", reduction="avg"),
        bad("softcap", "softcap", "-1.0", softcap=-1.0),
        bad("chunk_size", "chunk_size", "0", chunk_size=0),
    ]


def _case(rows: int, hidden_size: int, classes: int, **options: Any) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        weight = new(classes, hidden_size, scale=hidden_size**-0.5, key="w")
        target = new.integers(rows, high=classes)
        return Sample("bench", (new(rows, hidden_size), weight, target), options)

    factors = rows * hidden_size + classes * hidden_size
    product = 2 * rows * hidden_size * classes
    extra = "".join(f" {name}={value}" for name, value in options.items())
    label = f"{rows}x{hidden_size}->{classes}{extra}"
    elements, flops = (factors, 2 * factors), (product, 2 * product)
    return BenchCase.moving(label, make, elements, flops)


SPEC = describe(linear_cross_entropy, _eager, _samples, _bad_inputs, _case)(
    # For the gradient of the weight an ignored row is skipped, or multiplied by a gradient of 0.
    non_finite=tuple(functools.partial(_ignoring, reads_hidden=reads) for reads in (False, True)),
    bench_cases=(
        _case(2048, 768, 50257).headlined(),
        _case(2048, 768, 50257, recompute=True),
        _case(512, 1024, 32000, softcap=30.0, z_loss=1e-4),
        _case(64, 256, 10000),
    ),
    summary="head and cross-entropy, large logits never whole in memory",
    autocast="lower",
    limits=(
        "Logits that the backward recomputes save memory, not time: four matrix products "
        "where whole logits take three. On two Zen 4 cores forward and backward at 2048 x 768 x "
        "50257 was 1.41 (float32) and 1.17 (bfloat16) times as fast as `F.linear` and "
        "`F.cross_entropy` with the logits kept (578 and 491 MiB beyond the arguments, theirs 1178 "
        "and 589), with `recompute=True` 0.95 and 0.87.",
        "Weight and bias stay whole: a vocabulary that is sharded over ranks is gathered.",
        "The second derivative makes whole logits.",
        "On CUDA ignored rows cost as much as others: counting them would wait for the device.",
    ),
)
