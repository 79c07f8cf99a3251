"""What the specs of ``add_layer_norm`` and ``add_rms_norm`` share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from fusedops.specs.make import TensorFactory, common_offset
from fusedops.specs.spec import BadInput, BenchCase, Sample, bad_changes

LIMITS = (
    "The dropout mask is not that of torch's dropout: it is drawn by another generator.",
    "With DTensor, dropout needs the whole tensor on every rank: elements are counted from its "
    "beginning.",
)


def eager(norm: Callable[..., torch.Tensor]) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """Return the eager function of the op that normalizes the sum with ``norm``."""

    def add_and_normalize(
        input: torch.Tensor,
        residual: torch.Tensor,
        *args: Any,
        dropout_p: float = 0.0,
        training: bool = True,
        **options: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        summed = residual + F.dropout(input, dropout_p, training)
        return norm(summed, *args, **options), summed

    return add_and_normalize


def arguments(new: TensorFactory, *shape: int, dims: int = 1, takes_bias: bool) -> tuple[Any, ...]:
    """Return input, residual, normalized shape (the last ``dims``), weight, and bias if any."""
    normalized = shape[-dims:]
    data = (new(*shape), new(*shape, key="residual"), normalized)
    parameters = (new(*normalized, shift=1.0, key="w"), new(*normalized, key="b"))
    return (*data, *parameters[: 1 + takes_bias])


def samples(new: TensorFactory, *, takes_bias: bool) -> list[Sample]:
    call = functools.partial(arguments, new, takes_bias=takes_bias)
    mixed = (call(6, 40)[0], *arguments(new.wide, 6, 40, takes_bias=takes_bias)[1:])
    shifted, *others = call(7, 33)
    shifted = (shifted.detach() + common_offset(new.dtype)).requires_grad_()
    return [
        Sample("rows", call(7, 33)),
        Sample("three_dims", call(2, 3, 64), {"eps": 1e-3}),
        Sample("two_normalized_dims", call(5, 4, 6, dims=2)),
        Sample("no_parameters", call(4, 17)[:3]),
        Sample("one_row", call(129)),
        Sample("one_column", call(3, 1)),
        Sample("many_rows", call(70, 48)),
        Sample("offset", (shifted, *others)),
        Sample("no_rows", call(0, 33)),
        Sample("float32_residual", mixed),
        Sample("dropout", call(7, 33), {"dropout_p": 0.3}, random=True),
        Sample("dropout_float32_residual", mixed, {"dropout_p": 0.5}, random=True),
        Sample("dropout_of_all", call(4, 17)[:3], {"dropout_p": 1.0}, random=True),
        Sample("dropout_no_rows", call(0, 33)[:3], {"dropout_p": 0.3}, random=True),
        Sample("evaluation", call(7, 33), {"dropout_p": 0.3, "training": False}),
    ]


def bad_inputs(device: torch.device) -> list[BadInput]:
    """Return the calls that must raise in every op that adds a residual and normalizes."""
    x, weight = torch.randn(3, 8, device=device), torch.ones(8, device=device)
    bad = bad_changes(input=x, residual=x, normalized_shape=(8,))
    return [
        bad("normalized_shape", "normalized_shape", "7", normalized_shape=(7,)),
        bad("residual_shape", "residual", "[3, 8]", residual=x[:2]),
        bad("weight_shape", "weight", "[7]", weight=weight[:7]),
        bad("p_above", "dropout_p", "1.5", dropout_p=1.5),
        bad("p_below", "dropout_p", "-0.1", dropout_p=-0.1),
    ]


def case_function(*, takes_bias: bool) -> Callable[..., BenchCase]:
    """Return what makes a benchmark row; an op without a bias gets an ``eps`` in its place."""

    def case(rows: int, columns: int, p: float = 0.0) -> BenchCase:
        def make(new: TensorFactory) -> Sample:
            args = arguments(new, rows, columns, takes_bias=takes_bias)
            eps = () if takes_bias else (1e-6,)
            return Sample("bench", (*args, *eps), {"dropout_p": p}, random=p > 0)

        label = f"{rows}x{columns}" + (f", dropout {p}" if p else "")
        size = rows * columns
        # Both gradients and the sum; without dropout both inputs have the same gradient.
        backward = (5 if p else 4) * size
        return BenchCase.moving(label, make, (4 * size, backward))

    return case


def cases(case: Callable[..., BenchCase]) -> tuple[BenchCase, ...]:
    return (
        case(4096, 768),
        case(4096, 1024).headlined(),
        case(4096, 1024, p=0.1).headlined(),
        case(8192, 4096),
        case(16, 768),
    )
