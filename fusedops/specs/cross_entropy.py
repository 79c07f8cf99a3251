"""What tests, benchmarks and documentation need to know of ``cross_entropy``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from fusedops.ops.cross_entropy import cross_entropy
from fusedops.specs.make import TensorFactory, common_offset, with_extremes
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes, describe


def eager(
    logits: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """Compute the loss as a user does today; also what linear_cross_entropy is compared with."""
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows, flat = logits.reshape(-1, logits.shape[-1]), target.reshape(-1)
    loss = F.cross_entropy(
        rows, flat, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
    )
    if z_loss > 0.0:
        valid = flat != ignore_index
        extra = torch.where(valid, z_loss * torch.logsumexp(rows, -1).square(), 0.0)
        if reduction != "none":
            extra = extra.sum() / (valid.sum() if reduction == "mean" else 1)
        loss = loss + extra
    return loss.reshape(target.shape) if reduction == "none" else loss


def ignoring(
    logits: torch.Tensor, target: torch.Tensor, *, ignore_index: int = -100, **options: Any
) -> torch.Tensor:
    """Compute the same, with a gradient of 0 also for ignored rows that hold NaN."""
    logits = logits.masked_fill((target == ignore_index).unsqueeze(-1), 0.0)
    return eager(logits, target, ignore_index=ignore_index, **options)


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
        return Sample(name, (new(*rows, classes, scale=scale, shift=shift), target), options)

    none: dict[str, Any] = {"reduction": "none"}
    every: dict[str, Any] = {"softcap": 4.0, "label_smoothing": 0.2, "z_loss": 1e-2}
    large = common_offset(new.dtype)
    return [
        call("rows", (7,), 33, **none),
        call("mean", (7,), 33, (2, 6)),
        call("sum", (2, 3), 20, (1,), reduction="sum"),
        call("smoothing", (7,), 33, (0,), label_smoothing=0.1),
        call("smoothing_rows", (6,), 17, (5,), label_smoothing=0.3, **none),
        call("z_loss", (7,), 33, (3,), z_loss=1e-2),
        call("softcap", (6,), 40, (3,), scale=4.0, softcap=5.0, **none),
        call("everything", (2, 5), 45, (4, 7), scale=3.0, **every),
        call("ignore_class", (7,), 5, (2,), ignore_index=3),
        call("large_logits", (5,), 70, scale=40.0, **none),
        call("shifted", (5,), 70, shift=-60.0, **none),
        Sample("extremes", (with_extremes(new(9, 33)), new.integers(9, high=33)), none),
        call("offset", (5,), 70, shift=1e3),
        call("large_offset", (5,), 70, shift=large, label_smoothing=0.1),
        call("negative_offset", (5,), 2100, shift=-large, label_smoothing=0.1, **none),
        call("offset_z_loss", (5,), 70, shift=1e3, z_loss=1e-4),
        call("one_row", (), 129),
        call("one_class", (3,), 1, **none),
        call("many_rows", (70,), 48),
        call("long_rows", (3,), 33001, (1,), **none),
        call("all_ignored", (3,), 9, (0, 1, 2), reduction="sum"),
        call("no_rows", (0,), 33, reduction="sum"),
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
        bad("negative", "target", "-1 at row 1", target=target - 1),
        bad("reduction", "reduction", "'mean'", reduction="average"),
        bad("smoothing", "label_smoothing", "1.5", label_smoothing=1.5),
        bad("z_loss", "z_loss", "-1", z_loss=-1.0),
        bad("softcap", "softcap", "0.0", softcap=0.0),
        bad("dtype", "dtype", "float32", "float16", dtype=torch.float16),
    ]


def _case(rows: int, classes: int, **options: Any) -> BenchCase:
    def make(new: TensorFactory) -> Sample:
        return Sample("bench", (new(rows, classes), new.integers(rows, high=classes)), options)

    extra = "".join(f" {name}={value}" for name, value in options.items())
    label, size = f"{rows}x{classes}{extra}", rows * classes
    return BenchCase.moving(label, make, (size, 2 * size))


def _from_opinfo(
    input: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    (target,) = args
    if target.dtype.is_floating_point or kwargs.get("weight") is not None:
        return None  # class probabilities and class weights are not offered
    return (input.movedim(1, -1), target), kwargs


SPEC = describe(cross_entropy, eager, _samples, _bad_inputs, _case)(
    non_finite=(ignoring,),
    bench_cases=(
        _case(2048, 50257).headlined(),
        _case(2048, 50257, z_loss=1e-4, label_smoothing=0.1),
        _case(2048, 50257, softcap=30.0),
        _case(8192, 32000),
        _case(4096, 1000),
        _case(16, 1000),
    ),
    summary="cross-entropy of logits, softmax never in memory",
    autocast="keep",
    opinfo=("nn.functional.cross_entropy",),
    from_opinfo=_from_opinfo,
    limits=(
        "Class probabilities as targets and class weights are not offered; "
        "`fusedops.nn.CrossEntropyLoss` runs torch's loss for them.",
        "Classes stay last and whole: a vocabulary that is sharded over ranks is gathered.",
        "On CUDA a target outside the classes is not reported; its loss and gradient are NaN.",
    ),
)
